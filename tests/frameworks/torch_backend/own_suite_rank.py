"""Run torch's DistributedTest on the ranks of one mpirun, each test in a process group of its own.

`python own_suite_rank.py BACKEND FIRST RESULTS [NAME …]`: rank 0 appends a line of JSON for each
test from the number FIRST on. A test that hangs ends the program; the parent starts the next one.

torch's tests compare the backend's name with "gloo" or "mpi" where they mean an ability. They are
run as well: the tests see a name that equals those, and torch sees the real one.
"""

import faulthandler
import importlib.util
import json
import os
import sys
import tempfile
import time
import traceback
import types
import unittest
import warnings
from datetime import timedelta

warnings.filterwarnings("ignore")
BACKEND, FIRST, RESULTS, *ONLY = sys.argv[1:]
LIMIT = 90
DEADLINE = 30

import collectives  # noqa: E402

world = collectives.world(deadline=LIMIT)


def shared_folder():
    folder = world.broadcast_object(tempfile.mkdtemp() if world.rank == 0 else None)
    for name in ("barrier", "test_dir", "init_dir"):
        os.makedirs(os.path.join(folder, name), exist_ok=True)
    return folder


FOLDER = shared_folder()
os.environ.update(
    BACKEND=BACKEND, WORLD_SIZE=str(world.size), TEMP_DIR=FOLDER, MASTER_ADDR="127.0.0.1"
)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.testing._internal import common_distributed as common  # noqa: E402

import collectives.torch  # noqa: E402

torch.set_num_threads(1)


class Permitted(str):
    """The backend's name, which equals those of the backends whose tests it can run."""

    __slots__ = ()
    NAMES = ("collectives", "gloo", "mpi")

    def __eq__(self, other):
        return other in self.NAMES

    def __ne__(self, other):
        return other not in self.NAMES

    def __hash__(self):
        return hash("gloo")


def load():
    """torch's module of tests, in which BACKEND is what is permitted."""
    for feature in ("ddp", "plugin", "subgroup"):
        common.DistTestCases.backend_feature[feature].add(BACKEND)
    spec = importlib.util.find_spec("torch.testing._internal.distributed.distributed_test")
    with open(spec.origin, encoding="utf-8") as file:
        source = file.read()
    module = types.ModuleType("distributed_test")
    module.__file__ = spec.origin
    if BACKEND != "gloo":
        line = 'BACKEND = os.environ["BACKEND"]'
        assert source.count(line) == 1
        source = source.replace(line, "BACKEND = Permitted(os.environ['BACKEND'])")
        module.Permitted = Permitted
    sys.modules[module.__name__] = module
    exec(compile(source, spec.origin, "exec"), module.__dict__)
    return module


module = load()


class Suite(module.TestDistBackend, module.DistributedTest._DistTestBase):
    world_size = property(lambda self: os.environ["WORLD_SIZE"])

    def setUp(self):
        """In torch's own harness it starts the processes."""

    def tearDown(self):
        """In torch's own harness it ends them."""


def empty(folder):
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            os.unlink(path)


def attempt(name):
    """(pass, skip, refused or fail; why)"""
    case = Suite(name)
    case.rank = world.rank
    case.file_name = os.path.join(FOLDER, "init_dir", name)
    method = getattr(Suite, name)
    seconds = module.CUSTOM_PG_TIMEOUT.get(name, DEADLINE)
    torch.manual_seed(0)
    try:
        if getattr(method, "__unittest_skip__", False):
            raise unittest.SkipTest(method.__unittest_skip_why__)
        timeout = timedelta(seconds=min(seconds, DEADLINE))
        dist.init_process_group(BACKEND, init_method="mpi://", timeout=timeout)
        getattr(case, name)()
    except unittest.SkipTest as error:
        return "skip", str(error)
    except SystemExit as error:
        for why in common.TEST_SKIPS.values():
            if why.exit_code == error.code:
                return "skip", why.message
        return "fail", f"exit code {error.code}"
    except BaseException as error:
        if "only implemented for GLOO" in str(error):
            return "refused", str(error)
        return "fail", "".join(traceback.format_exception(error))[-2000:]
    return "pass", ""


def run(index, name):
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    module.Barrier.barrier_id = 0
    if world.rank == 0:
        empty(os.path.join(FOLDER, "barrier"))
        empty(os.path.join(FOLDER, "test_dir"))
        with open(RESULTS, "a", encoding="utf-8") as file:
            file.write(json.dumps({"index": index, "test": name, "began": True}) + "\n")
    world.barrier(name)
    start = time.monotonic()
    outcome, why = attempt(name)
    if dist.is_initialized():
        dist.destroy_process_group()
    outcomes = world.all_gather_object((outcome, why))
    if world.rank == 0:
        # The worst of the ranks; a skip only where all skip.
        kinds = [kind for kind, _ in outcomes]
        worst = next(kind for kind in ("fail", "refused", "pass", "skip") if kind in kinds)
        whys = [f"rank {rank}: {why}" for rank, (kind, why) in enumerate(outcomes) if kind == worst]
        line = {"index": index, "test": name, "outcome": worst, "why": whys[0]}
        line["seconds"] = round(time.monotonic() - start, 2)
        with open(RESULTS, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    faulthandler.cancel_dump_traceback_later()


names = sorted(each for each in dir(Suite) if each.startswith("test_"))
for index, name in enumerate(names):
    if index >= int(FIRST) and (not ONLY or name in ONLY):
        run(index, name)
if world.rank == 0:
    with open(RESULTS, "a", encoding="utf-8") as file:
        file.write(json.dumps({"index": len(names), "end": True}) + "\n")
