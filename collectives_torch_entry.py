"""The entry point that `import torch` calls.

It lies outside of the package `collectives`, whose import fails where a package that it needs is
absent or broken: `import torch` must not fail with it.
"""

import sys
import warnings


def register() -> None:
    """Register the backend with torch, or warn that it can't be."""
    used = "collectives" in sys.modules
    try:
        from collectives.lifecycle.unstarted import leave_exceptions_to_mpi
        from collectives.torch.registration import register
    except Exception as error:
        warnings.warn(
            'the backend "collectives" of torch.distributed is not available, because its package'
            f" mpi-collectives can't be imported: {type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
    else:
        register()
        if not used:
            # Processes that mpirun starts and that use torch alone may not belong together.
            leave_exceptions_to_mpi()
