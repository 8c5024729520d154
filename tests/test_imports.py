"""Which way imports run, read from the syntax trees: anywhere in a file, for type checkers too."""

import ast
import re
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST_FILES, MOST_LINES = 10, 300
PACKAGES = ("collectives", "strategies", "bench")

# For each folder, and each module that lies in none, what it may import of `collectives`.
# Top to bottom: what users call, what serves their calls, what is served.
COLLECTIVES = {
    "__init__": {"analysis", "communicator", "errors", "fusion", "lifecycle"}
    | {"messaging", "reductions", "world"},
    "__main__": {"doctor"},
    "doctor": {"communicator", "cuda", "errors", "gpu", "launching", "transports"}
    | {"waiting", "world"},
    "torch": {"arrays", "communicator", "compression", "consistency", "errors", "horovod"}
    | {"launching", "lifecycle", "reductions", "shm", "transports", "waiting", "world"},
    "horovod": {"communicator", "consistency", "errors", "reductions", "transports", "world"},
    "jax": {"caching", "calls", "communicator", "consistency", "reductions", "world"},
    "compression": {"arrays", "communicator", "reductions"},
    "world": {"communicator", "consistency", "launching", "lifecycle", "waiting"},
    "fusion": {"arrays", "calls", "communicator", "cuda", "reductions"},
    "communicator": {"asynchronous", "bound", "calls", "diagnostics", "gpu", "group"}
    | {"messaging", "reductions"},
    "scope": {"group"},
    "group": {"asynchronous", "bound", "calls", "consistency", "diagnostics", "errors"}
    | {"execution", "gpu", "lifecycle", "messaging", "waiting"},
    "asynchronous": {"bound", "calls", "consistency", "errors", "execution", "gpu", "lifecycle"}
    | {"reductions", "transports", "waiting"},
    "gpu": {"caching", "algorithms", "arrays", "bound", "calls", "consistency", "cuda", "errors"}
    | {"execution", "lifecycle", "reductions", "schedules", "transports"}
    | {"waiting"},
    "lifecycle": {"calls", "consistency", "errors", "execution", "launching", "shm"}
    | {"transports", "waiting"},
    "launch": {"consistency", "errors", "launching", "waiting"},
    "launching": {"errors", "waiting"},
    "diagnostics": {"bound", "calls", "consistency", "execution", "reductions", "schedules"}
    | {"shm", "transports"},
    "bound": {"algorithms", "arrays", "caching", "calls", "consistency", "cuda", "execution"}
    | {"reductions", "schedules", "shm", "transports"},
    "calls": {"arrays", "caching", "consistency", "cuda", "errors"}
    | {"execution", "messaging", "reductions", "schedules", "shm", "transports"}
    | {"waiting"},
    "execution": {"algorithms", "analysis", "arrays", "caching", "consistency", "cuda"}
    | {"errors", "reductions", "schedules", "shm", "transports", "waiting"},
    "messaging": {"arrays", "consistency", "errors", "reductions", "shm", "transports"}
    | {"waiting"},
    "consistency": {"errors", "shm", "transports", "waiting"},
    "shm": {"caching", "errors", "reductions", "schedules", "transports", "waiting"},
    "transports": {"errors", "waiting"},
    "arrays": {"caching", "cuda", "reductions"},
    "cuda": {"errors", "reductions"},
    "analysis": {"algorithms", "errors", "schedules"},
    "algorithms": {"schedules"},
    "waiting": {"errors"},
    "reductions": {"errors"},
    "schedules": set(),
    "schedule": {"schedules"},
    "caching": set(),
    "errors": set(),
}

# The same of `strategies`; "collectives" is its public face.
STRATEGIES = {
    "__init__": {"base", "checkpoint", "cluster", "cluster_resolver", "coordinator"}
    | {"core", "cross_device_ops", "data_service", "errors", "evaluation", "experimental"}
    | {"input", "metrics", "optimizers", "parameter_server", "replication", "synchronous"}
    | {"variables"},
    "launch": {"cluster", "collectives.launch"},
    "experimental": {
        "checkpoint",
        "cluster_resolver",
        "coordinator",
        "core",
        "input",
        "parameter_server",
    }
    | {"synchronous", "collectives"},
    "evaluation": {"base", "checkpoint", "cluster", "core", "input", "parameter_server"}
    | {"synchronous", "collectives", "collectives.errors"},
    "checkpoint": {"base", "core", "foreign", "optimizers", "replication", "synchronous"}
    | {"torch", "variables", "collectives", "collectives.consistency", "collectives.scope"},
    "data_service": {"base", "cluster", "cluster_resolver", "core", "input", "collectives"}
    | {"collectives.messaging"},
    "coordinator": {"base", "core", "errors", "replication", "variables"}
    | {"collectives.errors", "collectives.messaging"},
    "parameter_server": {"base", "cluster", "cluster_resolver", "coordinator", "core"}
    | {"foreign", "input", "optimizers", "replication", "torch", "variables", "collectives"}
    | {"collectives.arrays", "collectives.lifecycle", "collectives.messaging"}
    | {"collectives.shm", "collectives.transports"},
    "synchronous": {"base", "cluster", "cluster_resolver", "communication", "core"}
    | {"cross_device_ops", "input", "jax", "optimizers", "replication", "torch", "variables"}
    | {"collectives", "collectives.arrays", "collectives.consistency"}
    | {"collectives.scope", "collectives.transports"},
    "base": {"cluster", "cluster_resolver", "core", "cross_device_ops", "foreign", "input"}
    | {"jax", "keras", "replication", "torch", "collectives", "collectives.arrays"}
    | {"collectives.consistency", "collectives.cuda", "collectives.torch"},
    "jax": {"cluster_resolver", "core", "replication", "collectives", "collectives.compression"}
    | {"collectives.caching", "collectives.jax"},
    "estimator": {"core", "tensorflow"},
    "tensorflow": {"base", "checkpoint", "cluster", "cluster_resolver", "coordinator", "core"}
    | {"cross_device_ops", "foreign", "keras", "optimizers", "parameter_server", "replication"}
    | {"synchronous", "collectives", "collectives.caching", "collectives.compression"}
    | {
        "collectives.consistency",
        "collectives.errors",
        "collectives.horovod",
        "collectives.messaging",
        "collectives.reductions",
    },
    "torch": {"core", "foreign", "input", "replication", "collectives", "collectives.arrays"}
    | {"collectives.torch", "collectives.transports"},
    "keras": {"core", "foreign", "input", "replication", "collectives", "collectives.arrays"}
    | {"collectives.compression", "collectives.consistency"}
    | {"collectives.jax", "collectives.torch"},
    "metrics": {"core", "replication", "variables", "collectives.scope"},
    "optimizers": {"core", "foreign", "replication", "variables", "collectives"}
    | {"collectives.cuda"},
    "variables": {"core", "replication", "collectives.cuda"},
    "cross_device_ops": {"communication", "core", "replication", "collectives"}
    | {"collectives.calls", "collectives.reductions"},
    "replication": {"communication", "core", "foreign", "collectives"}
    | {"collectives.compression", "collectives.consistency"},
    "communication": {"core", "collectives", "collectives.calls", "collectives.compression"}
    | {"collectives.consistency", "collectives.cuda", "collectives.gpu"},
    "input": {"core", "collectives", "collectives.arrays", "collectives.consistency"}
    | {"collectives.errors"}
    | {"collectives.cuda", "collectives.scope"},
    "cluster_resolver": {"cluster", "core", "collectives"},
    "cluster": set(),
    "core": {"collectives", "collectives.arrays", "collectives.compression"}
    | {"collectives.consistency"}
    | {"collectives.cuda", "collectives.errors", "collectives.gpu", "collectives.scope"},
    "foreign": {"collectives.consistency"},
    "errors": {"collectives.messaging"},
}
LAZY = {
    "mpi4py": {
        "collectives/launching/library.py",
        "collectives/transports/mpi.py",
        "collectives/transports/mpi_end.py",
        "collectives/transports/mpi_mailbox.py",
        "collectives/transports/mpi_messages.py",
        "collectives/transports/mpi_control.py",
        "collectives/transports/mpi_native.py",
        "collectives/transports/mpi_neighbors.py",
        "collectives/transports/mpi_windows.py",
    },
    "cupy": {
        "collectives/cuda/cupy_cuda.py",
        "collectives/cuda/cupy_streams.py",
        "collectives/cuda/cupy_tensors.py",
        "collectives/doctor/gpu.py",
        "collectives/transports/nccl_driver.py",
    },
    "torch": {
        "collectives/launching/torch_store.py",
        "collectives/torch/arguments.py",
        "collectives/torch/backward_hooks.py",
        "collectives/torch/buckets.py",
        "collectives/torch/call_queue.py",
        "collectives/torch/closures.py",
        "collectives/torch/collective_calls.py",
        "collectives/torch/fsdp.py",
        "collectives/torch/functions.py",
        "collectives/torch/horovod/asynchronous.py",
        "collectives/torch/horovod/broadcasts.py",
        "collectives/torch/horovod/compression.py",
        "collectives/torch/horovod/joined_reducer.py",
        "collectives/torch/horovod/operations.py",
        "collectives/torch/horovod/optimizer.py",
        "collectives/torch/horovod/tensors.py",
        "collectives/torch/messages.py",
        "collectives/torch/names.py",
        "collectives/torch/parameters.py",
        "collectives/torch/process_group.py",
        "collectives/torch/reduce_ops.py",
        "collectives/torch/reduction_round.py",
        "collectives/torch/rendezvous.py",
        "collectives/torch/sparse_bucket.py",
        "collectives/torch/sync_batch_norm.py",
        "collectives/torch/untraced.py",
        "collectives/torch/works.py",
        "strategies/input/batches.py",
        "strategies/input/element_spec.py",
        "strategies/keras/torch_gradients.py",
        "strategies/parameter_server/torch_models.py",
        "strategies/torch/distribution.py",
        "strategies/torch/mirroring.py",
        "strategies/torch/other_optimizers.py",
        "strategies/torch/sampler.py",
        "strategies/torch/states.py",
    },
    "keras": {
        "strategies/estimator/estimator.py",
        "strategies/estimator/linear.py",
        "strategies/estimator/models.py",
        "strategies/estimator/restored.py",
        "strategies/keras/arguments.py",
        "strategies/keras/callbacks.py",
        "strategies/keras/data.py",
        "strategies/keras/loops.py",
        "strategies/keras/losses.py",
        "strategies/keras/models.py",
        "strategies/keras/optimizers.py",
        "strategies/keras/orders.py",
        "strategies/keras/saving.py",
        "strategies/keras/scope.py",
        "strategies/keras/seeds.py",
        "strategies/keras/shares.py",
        "strategies/keras/state.py",
        "strategies/keras/steps.py",
        "strategies/keras/tensorflow_data.py",
        "strategies/keras/tensorflow_compile.py",
        "strategies/keras/tensorflow_predictions.py",
        "strategies/keras/tensorflow_steps.py",
        "strategies/tensorflow/custom_loops.py",
        "strategies/tensorflow/keras_pickles.py",
        "strategies/tensorflow/loss_scaling.py",
        "strategies/tensorflow/saving.py",
        "strategies/tensorflow/horovod/batch_normalization.py",
        "strategies/tensorflow/horovod/callbacks.py",
        "strategies/tensorflow/horovod/gradients.py",
        "strategies/tensorflow/horovod/optimizer.py",
    },
    "jax": {
        "collectives/jax/functions.py",
        "collectives/jax/hoisting.py",
        "collectives/jax/host_calls.py",
        "collectives/jax/kinds.py",
        "collectives/jax/lowering_in_place.py",
        "collectives/jax/mpi4jax.py",
        "collectives/jax/ordering.py",
        "collectives/jax/paths.py",
        "collectives/jax/primitive.py",
        "collectives/jax/program_order.py",
        "collectives/jax/tokens.py",
        "strategies/jax/gradients.py",
        "strategies/jax/mesh.py",
        "strategies/jax/replicas.py",
        "strategies/jax/states.py",
        "strategies/keras/jax_gradients.py",
    },
    "tensorflow": {
        "strategies/estimator/estimator.py",
        "strategies/estimator/restored.py",
        "strategies/keras/tensorflow_compile.py",
        "strategies/keras/tensorflow_data.py",
        "strategies/keras/tensorflow_gradients.py",
        "strategies/keras/tensorflow_predictions.py",
        "strategies/keras/tensorflow_steps.py",
        "strategies/tensorflow/cluster.py",
        "strategies/tensorflow/coordinator.py",
        "strategies/tensorflow/custom_loops.py",
        "strategies/tensorflow/empty_batches.py",
        "strategies/tensorflow/experimental.py",
        "strategies/tensorflow/extended.py",
        "strategies/tensorflow/failures.py",
        "strategies/tensorflow/graphs.py",
        "strategies/tensorflow/files.py",
        "strategies/tensorflow/input.py",
        "strategies/tensorflow/local_sgd.py",
        "strategies/tensorflow/loss_scaling.py",
        "strategies/tensorflow/mirrored.py",
        "strategies/tensorflow/operations.py",
        "strategies/tensorflow/outer_steps.py",
        "strategies/tensorflow/parameter_server.py",
        "strategies/tensorflow/program_order.py",
        "strategies/tensorflow/references.py",
        "strategies/tensorflow/replica_context.py",
        "strategies/tensorflow/saving.py",
        "strategies/tensorflow/seeds.py",
        "strategies/tensorflow/exchange.py",
        "strategies/tensorflow/served.py",
        "strategies/tensorflow/statistics.py",
        "strategies/tensorflow/strategy.py",
        "strategies/tensorflow/traces.py",
        "strategies/tensorflow/variables.py",
        "strategies/tensorflow/horovod/batch_normalization.py",
        "strategies/tensorflow/horovod/callbacks.py",
        "strategies/tensorflow/horovod/calls.py",
        "strategies/tensorflow/horovod/compression.py",
        "strategies/tensorflow/horovod/differentiation.py",
        "strategies/tensorflow/horovod/gradients.py",
        "strategies/tensorflow/horovod/movements.py",
        "strategies/tensorflow/horovod/optimizer.py",
        "strategies/tensorflow/horovod/reductions.py",
    },
}


def sources(*packages):
    return sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))


@cache
def imports(path):
    """The import statements of a file, anywhere in it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def imported(path):
    """The full names of what a file imports."""
    for node in imports(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            assert not node.level, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def room_of(name, package):
    """The folder, or the module in none, that a module of the package lies in."""
    return name.split(".")[1] if "." in name else "__init__"


@pytest.mark.parametrize(
    ("package", "rules"), [("collectives", COLLECTIVES), ("strategies", STRATEGIES)]
)
def test_a_folder_imports_only_what_it_may(package, rules):
    edges = graph()
    rooms = {room_of(name, package) for name in edges if name.split(".")[0] == package}
    assert rooms == set(rules), "each folder and each module beside them has a rule"
    used = {room: set() for room in rooms}
    for name, imports in edges.items():
        if name.split(".")[0] != package:
            continue
        room = room_of(name, package)
        for each in imports:
            other = room_of(each, package)
            if each.split(".")[0] != package:
                other = each if each == "collectives" else ".".join(each.split(".")[:2])
            if other != room or each.split(".")[0] != package:
                assert other in rules[room], f"{name} imports {each}"
                used[room].add(other)
    assert used == rules, "a rule allows no more than what is used"


@pytest.mark.parametrize("rules", [COLLECTIVES, STRATEGIES], ids=["collectives", "strategies"])
def test_folders_form_a_hierarchy(rules):
    done = set()
    while ready := {
        room for room in rules if room not in done and rules[room] & set(rules) <= done
    }:
        done |= ready
    assert done == set(rules), f"in a circle: {sorted(set(rules) - done)}"


@pytest.mark.parametrize("package", ["collectives", "strategies"])
def test_few_files_lie_outside_of_folders(package):
    assert len(list((ROOT / package).glob("*.py"))) <= MOST_FILES


def test_no_file_is_long():
    paths = [path for name in PACKAGES for path in (ROOT / name).rglob("*.py")]
    assert {str(path) for path in paths if len(path.read_text().splitlines()) > MOST_LINES} == set()


def test_each_check_of_types_that_is_left_out_has_its_reason():
    lines = {
        f"{path}: {line.strip()}"
        for name in PACKAGES
        for path in (ROOT / name).rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r"# type: ignore(?!\[[a-z-, ]+\]  # \w)", line)
    }
    assert lines == set()


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


LIBRARIES = {"MPI": "mpi4py", "torch": "torch", "Keras": "keras", "JAX": "jax"}
LIBRARIES |= {"TensorFlow": "tensorflow", "CuPy": "cupy"}


def test_modules_that_need_what_is_absent_are_listed():
    """In the script that the CI runs in environments of several kinds."""
    has = [f"--has={name}" for name, module in LIBRARIES.items() if find_spec(module)]
    command = [sys.executable, ROOT / ".ci" / "import_all.py", *has, "collectives", "strategies"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout


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


def graph():
    """What each module imports of this project, function-level imports included."""
    modules = {module_of(path) for path in sources("collectives", "strategies")}
    return {
        module_of(path): {
            name
            for node in imports(path)
            for name in _names(node, modules)
            if name in modules and name != module_of(path)
        }
        for path in sources("collectives", "strategies")
    }


def test_no_import_runs_in_a_circle():
    edges, done = graph(), set()
    while ready := {name for name in edges if name not in done and edges[name] <= done}:
        done |= ready
    assert done == set(edges), f"in a circle: {sorted(set(edges) - done)}"


def _names(node, modules):
    """The modules that a statement needs; a package only where a name of its own is taken."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    full = [f"{node.module}.{alias.name}" for alias in node.names]
    return [name if name in modules else node.module for name in full]
