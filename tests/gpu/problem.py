"""Why no test can run on a GPU here."""

from functools import cache
from importlib.util import find_spec


@cache
def gpu_problem():
    """The reason as a sentence; None where there is a GPU. Creates no context on it."""
    if find_spec("cupy") is None:
        return "no GPU: CuPy isn't installed"
    from collectives.cuda.runtime import cuda
    from collectives.errors import BackendUnavailableError

    try:
        problem = cuda().problem()
    except BackendUnavailableError as error:
        problem = str(error)
    return None if problem is None else f"no GPU: {problem}"
