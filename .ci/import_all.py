"""Import every module of some packages: `python .ci/import_all.py [--has MPI] PACKAGE …`.

A module that can't be imported is an error, but for those listed here where what they need is
absent; and these must fail then, so that the list stays true. A folder of scripts counts as a
package.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Patterns of modules that nothing imports before what they are about is asked for.
NEEDS = {
    # mpi4py loads the MPI library when its MPI module is imported.
    "MPI": {
        "bench.peers.mpi",
        "collectives.transports.mpi",
        "collectives.transports.mpi_control",
        "collectives.transports.mpi_end",
        "collectives.transports.mpi_mailbox",
        "collectives.transports.mpi_messages",
        "collectives.transports.mpi_native",
        "collectives.transports.mpi_neighbors",
        "collectives.transports.mpi_windows",
    },
    # What is for torch alone.
    "torch": {
        "bench.gpu.torch_calls",
        "bench.torch.operations",
        "bench.torch.training",
        "collectives.torch*",
        "strategies.keras.torch_gradients",
        "strategies.parameter_server.torch_models",
        "strategies.torch.distribution",
        "strategies.torch.mirroring",
        "strategies.torch.other_optimizers",
        "strategies.torch.sampler",
        "strategies.torch.states",
        "torch_*",
    },
    "Keras": {
        "bench.keras.loops",
        "bench.keras.training",
        "keras_*",
        *(
            f"strategies.keras.{each}"
            for each in ("callbacks", "data", "loops", "losses", "models", "optimizers", "orders")
        ),
        *(f"strategies.keras.{each}" for each in ("saving", "scope", "seeds", "shares", "state")),
        "strategies.keras.arguments",
        "strategies.keras.steps",
        *(
            f"strategies.keras.tensorflow_{each}"
            for each in ("compile", "data", "predictions", "steps")
        ),
    },
    "JAX": {
        "bench.jax.operations",
        "bench.jax.training",
        "collectives.jax*",
        "jax_*",
        "strategies.jax*",
        "strategies.keras.jax_gradients",
    },
    "TensorFlow": {
        "strategies.estimator*",
        "strategies.keras.tensorflow_gradients",
        "strategies.tensorflow*",
        "tensorflow_*",
    },
    # They are what talks to CuPy.
    "CuPy": {
        "bench.gpu.cupy_device",
        "collectives.cuda.cupy_cuda",
        "collectives.cuda.cupy_streams",
        "collectives.cuda.cupy_tensors",
    },
}


def main() -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--has", action="append", default=[], choices=list(NEEDS))
    parser.add_argument("packages", nargs="+", metavar="PACKAGE")
    options = parser.parse_args()
    # Last, so that what is installed goes before the sources.
    sys.path += [str(ROOT), str(ROOT / "examples")]
    names = [name for package in options.packages for name in modules_of(package)]
    absent = [each for what in NEEDS if what not in options.has for each in NEEDS[what]]
    expected = {name for name in names if any(fnmatch(name, each) for each in absent)}
    problems = [each for name in names if (each := problem(name, expected=name in expected))]
    print("\n".join([*problems, f"{len(names)} modules, {len(problems)} problems"]))
    return int(bool(problems))


def modules_of(package: str) -> list[str]:
    """The package's modules, or the names of a folder's scripts."""
    folder = ROOT / package
    if not (folder / "__init__.py").exists():
        return sorted(path.stem for path in folder.glob("*.py"))
    paths = importlib.import_module(package).__path__
    walked = pkgutil.walk_packages(paths, f"{package}.", onerror=lambda name: None)
    return [package, *(module.name for module in walked)]


def problem(name: str, *, expected: bool) -> str:
    """What is wrong with the import of a module; empty where it goes as expected."""
    try:
        importlib.import_module(name)
    except (ImportError, RuntimeError) as error:
        return "" if expected else f"{name}: {type(error).__name__}: {error}"
    return f"{name}: listed as needing what is absent, but was imported" if expected else ""


if __name__ == "__main__":
    sys.exit(main())
