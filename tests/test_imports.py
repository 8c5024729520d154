"""Which way imports run, read from the syntax trees."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# What the modules of a layer may import of this project; a layer is a module or a package.
ALLOWED = {
    "collectives.errors": set(),
    "collectives.consistency.uncaught": {"errors"},
    "collectives.lifecycle.launcher": {"errors"},
    "collectives.schedules.paths": set(),
    "collectives.lifecycle.topology": set(),
    "collectives.schedule": set(),
    "collectives.reductions.reduction": set(),
    "collectives.schedules.spec": {"schedule"},
    "collectives.analysis.traffic": {"schedule", "errors"},
    "collectives.algorithms": {"algorithms", "paths", "schedule", "spec"},
    "collectives.verify": {"algorithms", "schedule", "spec", "traffic", "errors"},
    "collectives.analysis.cost": {"algorithms", "schedule", "traffic"},
    "collectives.execution.plan": {"schedule"},
    "collectives.execution.executor": {
        "algorithms",
        "reduction",
        "resolve",
        "schedule",
        "spec",
        "transports.base",
    },
    "collectives.waiting.wait_policy": {"errors"},
    "collectives.consistency.signature": {"errors"},
    "collectives.consistency.flight_recorder": {"signature"},
    "collectives.transports": {"transports", "errors", "waiting"},
    "collectives.shm": {"shared", "paths", "reduction", "waiting", "errors"},
    "collectives.consistency.call_check": {
        "errors",
        "shared.arrival",
        "signature",
        "transports.base",
        "waiting",
    },
    "collectives.calls": {"agreement", "errors", "watchdog"},
    "collectives.execution.cost_model": {"algorithms", "cost", "paths", "spec"},
    "collectives.fusion": set(),
    "collectives.arrays.kinds.tensors": {"reduction"},
    "collectives.arrays": {"devices.cuda", "reduction", "tensors"},
    "collectives.cuda.kernels": set(),
    "collectives.cuda.interface": {"devices.cupy_cuda", "errors", "reduction"},
    "collectives.cuda.cupy_cuda": {"devices.cuda", "devices.kernels", "reduction"},
    "collectives.cuda.host_copies": {"devices.cuda"},
    "collectives.gpu.side_stream": {"devices.cuda"},
    "collectives.cuda.memory": {"devices.cuda", "reduction"},
    "collectives.gpu.conversions": {"devices.cuda", "reduction"},
    "collectives.execution.device_path": {"devices.cuda", "reduction"},
    "collectives.gpu.bootstrap": {
        "devices.cuda",
        "transports.nccl",
        "transports.nccl_driver",
    },
    "collectives.gpu.buckets": {
        "devices.cuda",
        "devices.kernels",
        "fusion",
        "reduction",
    },
    "collectives.gpu.stream_work": {"devices.cuda", "errors", "waiting", "watchdog"},
    "collectives.gpu.nccl_path": {
        "algorithms",
        "devices.conversions",
        "devices.cuda",
        "devices.launches",
        "devices.memory",
        "devices.path",
        "errors",
        "executor",
        "paths",
        "reduction",
        "transports.base",
        "transports.nccl",
    },
    "collectives.gpu.ipc_path": {
        "devices.cuda",
        "devices.side_stream",
        "devices.path",
        "errors",
        "reduction",
        "shared.staged",
    },
    "collectives.gpu.host_path": {
        "devices.cuda",
        "devices.side_stream",
        "devices.path",
        "engine",
        "reduction",
    },
    "collectives.gpu.future": {"devices.cuda", "handles"},
    "collectives.gpu.probe": {
        "devices.bootstrap",
        "devices.cuda",
        "errors",
        "transports.cupy_nccl",
        "transports.nccl_driver",
    },
    "collectives.gpu.bound": {
        "devices.cuda",
        "devices.path",
        "engine",
        "operations",
        "quick",
        "shared.arrival",
        "signature",
        "transports.nccl_driver",
    },
    "collectives.gpu.backend": {
        "devices",
        "engine",
        "errors",
        "handles",
        "operations",
        "reduction",
        "signature",
        "transports.nccl",
        "transports.nccl_driver",
        "waiting",
    },
    "collectives.transports.mpi_cuda": set(),
    "collectives.transports.nccl": {"transports.base", "transports.nccl_driver"},
    "collectives.transports.nccl_driver": set(),
    "collectives.transports.cupy_nccl": {"transports.nccl_driver"},
}
LAZY = {
    "mpi4py": {
        "collectives/lifecycle/setup.py",
        "collectives/transports/mpi.py",
        "collectives/transports/mpi_mailbox.py",
        "collectives/transports/mpi_messages.py",
        "collectives/transports/mpi_native.py",
    },
    "cupy": {
        "collectives/cuda/cupy_cuda.py",
        "collectives/doctor/gpu_look.py",
        "collectives/transports/cupy_nccl.py",
    },
}


def sources(*packages):
    return sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))


def imported(path):
    """The full names of what a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("layer", ALLOWED)
def test_a_layer_imports_only_what_lies_below_it(layer):
    allowed = tuple(f"collectives.{name}." for name in ALLOWED[layer])
    files = [
        path for path in sources("collectives") if (module_of(path) + ".").startswith(layer + ".")
    ]
    assert files
    for path in files:
        for name in imported(path):
            if name == "collectives" or name.startswith("collectives."):
                assert f"{name}.".startswith(allowed), f"{path.name} imports {name}"


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("collectives", ("strategies", "bench", "examples", "tests")),
        ("strategies", ("bench", "examples", "tests")),
        ("bench", ("tests", "examples")),
        ("examples", ("tests", "bench")),
    ],
)
def test_lower_packages_know_nothing_of_higher_ones(package, forbidden):
    for path in sources(package):
        for name in imported(path):
            assert name.split(".")[0] not in forbidden, f"{path} imports {name}"


@pytest.mark.parametrize("library", LAZY)
def test_libraries_that_may_be_absent_are_imported_in_few_places(library):
    importing = {
        str(path.relative_to(ROOT))
        for path in sources("collectives", "strategies")
        if any(name.split(".")[0] == library for name in imported(path))
    }
    assert importing == LAZY[library]


# mpi4py's calls for objects.
HOLD_THE_LOCK = {
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "bcast",
    "exscan",
    "gather",
    "reduce",
    "scan",
    "scatter",
}


def test_the_transport_gives_pythons_lock_back_while_it_waits():
    """A call for objects duplicates its communicator the first time, and keeps the lock meanwhile.

    The threads of other communicators would wait for the lock, and other ranks for them.
    """
    for path in sources("collectives/transports"):
        if str(path.relative_to(ROOT)) not in LAZY["mpi4py"]:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                assert node.func.attr not in HOLD_THE_LOCK, f"{path}:{node.lineno}"


def test_no_import_runs_in_a_circle():
    edges = {}
    modules = {module_of(path) for path in sources("collectives", "strategies")}
    for path in sources("collectives", "strategies"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = [
            name
            for node in tree.body
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in _names(node, modules)
        ]
        edges[module_of(path)] = {name for name in names if name in modules}
    done = set()
    while ready := {name for name in edges if name not in done and edges[name] <= done}:
        done |= ready
    assert done == set(edges), f"in a circle: {sorted(set(edges) - done)}"


def _names(node, modules):
    """The modules that a statement needs; a package only where a name of its own is taken."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    full = [f"{node.module}.{alias.name}" for alias in node.names]
    return [name if name in modules else node.module for name in full]
