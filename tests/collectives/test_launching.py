"""The start of MPI without a launcher of MPI: hosts, sessions, absent ranks, other libraries."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from collectives import DeadlineExceededError, LaunchError
from collectives.launching import ending, hosts, start
from collectives.launching.exchange import Exchange
from collectives.launching.hosts import Host, listening_address, process_mapping
from collectives.launching.launcher import check_launch, find_torch_launch, started_by_mpi
from collectives.waiting.wait_policy import DEFAULT_DEADLINE
from collectives.world import _FOREVER, _start_seconds
from tests.worlds.programs import errors_of

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("nodes", "mapping"),
    [
        ("a", "(vector,(0,1,1))"),
        ("aaa", "(vector,(0,1,3))"),
        ("aabb", "(vector,(0,2,2))"),
        ("aabbb", "(vector,(0,1,2),(1,1,3))"),
        ("abab", "(vector,(0,2,1),(0,2,1))"),
        ("aba", "(vector,(0,2,1),(0,1,1))"),
        ("abcb", "(vector,(0,3,1),(1,1,1))"),
        ("aabbccd", "(vector,(0,3,2),(3,1,1))"),
    ],
)
def test_the_mapping_of_ranks_to_nodes(nodes, mapping):
    assert process_mapping([Host(node, node, "") for node in nodes]) == mapping


def test_a_mapping_too_long_for_pmi_is_left_out():
    ragged = [name for node in range(400) for name in [str(node)] * (1 + node % 2)]
    assert process_mapping([Host(node, node, "") for node in ragged]) == ""


def test_where_the_server_listens(monkeypatch):
    here = Host("a", "n1", "198.51.100.7")
    assert listening_address([here, Host("b", "n1", "198.51.100.7")]) == "127.0.0.1"
    towards = {"198.51.100.9": "198.51.100.8"}
    monkeypatch.setattr(hosts, "address_towards", lambda target="": towards.get(target))
    far = Host("c", "n2", "198.51.100.9")
    assert listening_address([here, here, far]) == "198.51.100.8"
    # Another host that has given no address, or one of its own alone.
    assert listening_address([here, Host("c", "n2", "")]) == "198.51.100.7"
    assert listening_address([here._replace(address="127.0.1.1"), Host("c", "n2", "::1")]) is None


def test_this_host():
    own = hosts.this_host("127.0.0.1")
    assert own == hosts.this_host("127.0.0.1")
    assert own.address == "127.0.0.1"
    assert socket.gethostname() in own.node
    assert hosts.address_towards("", "name.invalid", "127.0.0.1") == "127.0.0.1"


def test_a_torchrun_within_a_launcher_of_mpi_is_the_launcher():
    near, far = socket.socketpair()
    with near, far, socket.socket() as other:
        inherited = {"PMI_RANK": "0", "PMI_SIZE": "2"}
        assert started_by_mpi(inherited | {"PMI_FD": str(near.fileno())} | TORCHRUN)
        assert not started_by_mpi(inherited | {"PMI_FD": str(other.fileno())} | TORCHRUN)
        closed = os.dup(near.fileno())
        os.close(closed)
        for number in (closed, 1 << 40):
            assert not started_by_mpi(inherited | {"PMI_FD": str(number)} | TORCHRUN)
    assert started_by_mpi({"PMIX_RANK": "0"} | TORCHRUN)
    assert not started_by_mpi({"PMIX_RANK": "0", "TORCHELASTIC_RUN_ID": "x"} | TORCHRUN)
    assert started_by_mpi({"OMPI_COMM_WORLD_RANK": "0", "TORCHELASTIC_RUN_ID": "x"})
    assert not started_by_mpi(TORCHRUN)


@pytest.mark.parametrize("missing", [*TORCHRUN, None])
def test_the_variables_of_torchrun(missing):
    launch = find_torch_launch({name: TORCHRUN[name] for name in TORCHRUN if name != missing})
    assert (launch is None) == (missing is not None)
    if launch is not None:
        assert (launch.rank, launch.size, launch.host, launch.port) == (1, 2, "here", 29500)
        assert not launch.agent_store
        assert find_torch_launch(TORCHRUN | {"MASTER_PORT": "65536"}) is None
        agent = find_torch_launch(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
        assert agent.agent_store


class Store:
    """The part of torch's store that is used, for threads."""

    def __init__(self):
        self.values = {}
        self.joined = threading.Semaphore(0)

    def set(self, name, value):
        self.values[name] = value.encode()
        self.joined.release()

    def get(self, name):
        return self.values[name]

    def check(self, names):
        return all(name in self.values for name in names)


def connect(store, size, seconds=20.0, absent=(), *, rank_0_is_last=False, sizes=None):
    """Every present rank's connection or error."""

    def one(rank):
        if rank_0_is_last and rank == 0:
            for _ in range(size - 1):
                assert store.joined.acquire(timeout=10)
        try:
            of = sizes[rank] if sizes else size
            limit = seconds[rank] if isinstance(seconds, tuple) else seconds
            return Exchange(store, rank, of, limit).connect("127.0.0.1")
        except Exception as error:
            return error

    present = [rank for rank in range(size) if rank not in absent]
    with ThreadPoolExecutor(size) as pool:
        return dict(zip(present, pool.map(one, present), strict=True))


def test_each_attempt_has_a_session_although_the_store_keeps_the_earlier_one():
    store, sessions = Store(), []
    for attempt in range(2):
        # The others join the earlier session then.
        connections = connect(store, 3, rank_0_is_last=attempt > 0)
        store.joined = threading.Semaphore(0)
        assert [each.pmi.getpeername()[0] for each in connections.values()] == ["127.0.0.1"] * 3
        (session,) = {each.session for each in connections.values()}
        sessions.append(session)
        for each in connections.values():
            each.pmi.sendall(b"cmd=finalize\n")
            each.pmi.close()
            each.end.close()
    assert sessions[0] != sessions[1]


@pytest.mark.parametrize("absent", [(2,), (0,), (1, 2)])
def test_absent_ranks_are_named_on_all_others(absent):
    store = Store()
    if absent == (0,):
        # As an earlier attempt has left it, with a server that has ended.
        store.set("session", "old")
        store.set("old/server", json.dumps(["127.0.0.1", 9, "token"]))
        for rank in range(3):
            store.set(f"old/{rank}", json.dumps([3, 0]))
    for rank, error in connect(store, 3, 1.5, absent).items():
        assert isinstance(error, DeadlineExceededError), error
        assert error.absent == absent
        assert f"rank {rank} of 3: the start of MPI timed out after 1.5 s" in str(error)
        named = ", ".join(map(str, absent))
        assert f"Absent: rank{'s' * (len(absent) > 1)} {named}" in str(error)
        # The entry in the earlier attempt's session may be another process's.
        assert ("was started twice" in str(error)) == (absent == (0,))


def test_ranks_of_worlds_of_different_sizes_are_an_error_on_all(monkeypatch):
    from collectives.launching import exchange

    monkeypatch.setattr(exchange, "_STALE_SECONDS", 0.1)
    # In the second world rank 0 waits for a rank that no process has.
    for sizes, seconds in (((2, 3), 20.0), ((3, 2), 20.0), ((2, 2, 3), (20.0, 20.0, 1.5))):
        errors = connect(Store(), len(sizes), seconds, sizes=sizes)
        surplus = len(sizes) == 3
        for rank in (2,) if surplus else (0, 1):
            # The entries may be of an earlier attempt, of which rank 0 alone knows.
            kind = DeadlineExceededError if surplus else LaunchError
            assert isinstance(errors[rank], kind), errors[rank]
            text = f"rank 0 of {sizes[0]}, but rank 1 of {sizes[1]}"
            if surplus:
                text = "rank 2 of 3, but rank 0 of 2"
            assert f"as worlds of different sizes: {text}" in str(errors.pop(rank))
        for connected in errors.values():
            connected.pmi.close()
            connected.end.close()


@pytest.mark.parametrize("first_gives_up", [False, True])
def test_a_rank_that_was_started_twice_is_named(first_gives_up, monkeypatch):
    from collectives.launching import exchange

    monkeypatch.setattr(exchange, "_STALE_SECONDS", 0.1)
    store = Store()
    store.set("session", "now")
    store.set("now/0", json.dumps([3, "a"]))
    if first_gives_up:
        store.set("now/1", json.dumps([3, "another process"]))
        store.set("now/server", json.dumps(["", 0, "", "", [2]]))
    exchanges = [Exchange(store, 1, 3, seconds) for seconds in (1.5, 3.0)]
    with ThreadPoolExecutor(2) as pool:
        for end in [pool.submit(each.connect, "127.0.0.1") for each in exchanges]:
            text = re.escape("Absent: rank 2; or rank 1 of 3 was started twice")
            with pytest.raises(DeadlineExceededError, match=text):
                end.result()


@pytest.mark.parametrize(
    "failure", [["", 0, "", "rank 0 of 3: timed out", [1]], ["", 0, "", "rank 0 can't listen"]]
)
def test_a_failure_of_an_earlier_attempt_does_not_end_the_next_one(failure):
    store = Store()
    store.set("session", "old")
    store.set("old/0", json.dumps([3, "old"]))
    store.set("old/server", json.dumps(failure))
    for _ in range(2):
        assert store.joined.acquire(timeout=10)
    connections = connect(store, 3, rank_0_is_last=True)
    (session,) = {each.session for each in connections.values()}
    assert session != "old"
    for each in connections.values():
        each.pmi.sendall(b"cmd=finalize\n")
        each.pmi.close()
        each.end.close()


def test_a_published_failure_is_raised_although_its_store_ends():
    class Ending(Store):
        def check(self, names):
            if "old/1" in self.values and names == ["session"] and self.ends:
                raise RuntimeError("the connection is closed")
            self.ends = names == ["old/server"]
            return super().check(names)

    store = Ending()
    store.ends = False
    store.set("session", "old")
    store.set("old/0", json.dumps([3, "old"]))
    store.set("old/server", json.dumps(["", 0, "", "rank 0 can't listen"]))
    with pytest.raises(LaunchError, match="rank 0 can't listen"):
        Exchange(store, 1, 2, 20.0).connect("127.0.0.1")


def test_a_server_that_can_not_listen_is_an_error_on_all_ranks(monkeypatch):
    from collectives.launching import exchange

    monkeypatch.setattr(exchange, "_STALE_SECONDS", 0.1)
    monkeypatch.setattr(exchange, "listening_address", lambda hosts: "192.0.2.1")
    for error in connect(Store(), 2).values():
        assert isinstance(error, LaunchError)
        assert "rank 0 can't listen on 192.0.2.1" in str(error)


def test_a_server_that_has_ended_is_an_error_on_all_ranks(monkeypatch):
    from collectives.launching import exchange

    configure = Exchange._configure

    def ended(self, process, hosts):
        return process.wait() and configure(self, process, hosts)

    monkeypatch.setattr(Exchange, "_configure", ended)
    monkeypatch.setattr(exchange, "_STALE_SECONDS", 0.1)
    monkeypatch.setattr(exchange, "_SERVER", "/without/a/server")
    for error in connect(Store(), 2).values():
        assert isinstance(error, LaunchError)
        assert "rank 0 can't listen on 127.0.0.1: the server has ended" in str(error)


FORKED = """
import os, socket
from collectives.launching import ending

pmi, far_pmi = socket.socketpair()
end, far_end = socket.socketpair()
ending.end_with_world(end, pmi.fileno(), 1)
if {finalized}:
    number = pmi.detach()
    os.close(number)
    pmi, _ = socket.socketpair()
    assert pmi.fileno() == number
child = os.fork()
if child == 0:
    assert end.fileno() == -1
    is_null = os.path.sameopenfile(pmi.fileno(), os.open(os.devnull, os.O_RDWR))
    os._exit(10 if {finalized} != is_null else 11)
assert os.waitpid(child, 0)[1] >> 8 == 10
end.send(b"open")
pmi.send(b"open")
os._exit(0)
"""


@pytest.mark.parametrize("finalized", [False, True])
def test_a_forked_child_closes_its_copies_of_the_connections(finalized):
    program = FORKED.format(finalized=finalized)
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, errors_of(ended)) == (0, "")


OPEN_MPI = "Open MPI v5.0.11, package: x\n"


def library(name):
    world = SimpleNamespace(size=1)
    return SimpleNamespace(Get_library_version=lambda: name, COMM_WORLD=world)


def test_another_library_than_mpich_is_refused_before_it_starts(monkeypatch):
    monkeypatch.setattr(start, "is_initialized", lambda: False)
    monkeypatch.setattr(start, "started_by_mpi", lambda environment: False)
    monkeypatch.setattr(start, "load_uninitialized", lambda: library(OPEN_MPI))
    with pytest.raises(LaunchError) as caught:
        start.start_through(Store(), 1, 2, 1.0)
    assert "2 processes were started without mpirun" in str(caught.value)
    assert "Open MPI v5.0.11" in str(caught.value)
    assert "pip install 'mpi-collectives[mpich]'" in str(caught.value)
    assert "-n 2 python" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "environment", "advice"),
    [
        (OPEN_MPI, TORCHRUN, "mpi-collectives[mpich]"),
        ("MPICH Version: 5.0.2\n", TORCHRUN, "import mpi4py.MPI after the first call of"),
        (
            "MPICH Version: 5.0.2\n",
            {"RANK": "1", "WORLD_SIZE": "2"},
            "Set MASTER_ADDR, and MASTER_",
        ),
    ],
)
def test_advice_for_worlds_of_one_rank_under_torchrun(name, environment, advice):
    with pytest.raises(LaunchError) as caught:
        check_launch(library(name), environment)
    assert "2 processes were started (WORLD_SIZE=2), but MPI sees a world" in str(caught.value)
    assert advice in str(caught.value)


@pytest.mark.parametrize(
    ("deadline", "seconds"),
    [
        (float("inf"), _FOREVER),
        (1e14, _FOREVER),
        (None, _FOREVER),
        (np.float32(4), 4.0),
        (-1, DEFAULT_DEADLINE),
        ("4", DEFAULT_DEADLINE),
    ],
)
def test_the_start_takes_at_most_the_deadline(deadline, seconds):
    """A wrong one is refused after the start, on all ranks."""
    assert _start_seconds(deadline) == seconds


def test_a_rank_ends_though_nothing_reads_its_errors(monkeypatch):
    codes, (mine, others) = [], socket.socketpair()
    others.close()

    def fail(*_):
        raise BrokenPipeError

    with monkeypatch.context() as patched:
        patched.setattr(os, "_exit", codes.append)
        patched.setattr(os, "write", fail)
        ending._await_end(mine, 0)
    mine.close()
    assert codes == [1]


ENDED = """
import os, socket, sys, time
from collectives.launching import ending

(end, far_end), (pmi, _) = socket.socketpair(), socket.socketpair()
ending._kill_with_world(end)
os._exit = lambda code: None  # as if the thread had no turn
ending.end_with_world(end, pmi.fileno(), 1)
time.sleep(0.3)  # the thread may wait by then
far_end.send(b"rank=0 exitcode=3")
time.sleep(20)
sys.exit(5)
"""


def test_the_kernel_ends_a_rank_in_finalize_whatever_the_thread_does():
    ended = subprocess.run([sys.executable, "-c", ENDED], capture_output=True, timeout=60)
    assert ended.returncode == -9, ended.stderr


@pytest.mark.parametrize("launch", ["rank 1 of 2 at here:29500", "rank 0 of 2"])
def test_a_process_that_a_rank_has_started_is_no_rank(monkeypatch, launch):
    """Of torch's variables, and of the tasks of TF_CONFIG, which leave nothing else.

    Nor is the rank's own process after `exec`.
    """
    if "here" in launch:
        for name, value in TORCHRUN.items():
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("COLLECTIVES_STARTED", launch)
    monkeypatch.setattr(start, "is_initialized", lambda: False)
    monkeypatch.setattr(start, "started_by_mpi", lambda environment: False)
    with pytest.raises(LaunchError, match=f"is no rank: {launch} has started it, or has replaced"):
        start.start_mpi()


@pytest.mark.parametrize(
    ("before", "set_by_user", "found"),
    [("", {}, "131072"), ("", {"OMPI_MCA_btl_tcp_eager_limit": "4096"}, "4096"),
     ("import mpi4py.MPI;", {}, "None")],
)  # fmt: skip
def test_settings_of_open_mpi_where_mpi_is_initialized_here(before, set_by_user, found):
    pytest.importorskip("mpi4py", reason="mpi4py isn't installed: MPI can't be initialized")
    program = f"import os; {before} import collectives; collectives.world();"
    program += "print(os.environ.get('OMPI_MCA_btl_tcp_eager_limit'))"
    environment = {key: value for key, value in os.environ.items() if "OMPI_MCA" not in key}
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | set_by_user,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ended.stdout.split() == [found]
