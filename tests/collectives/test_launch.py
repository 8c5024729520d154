"""The start of tasks without a launcher: who may take part, and which task is to blame."""

import dataclasses
import json
import os
import shutil
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

import collectives.__main__
from collectives import DeadlineExceededError, LaunchError
from collectives.launch import command, task_client, task_server
from collectives.launch.__main__ import find_tasks
from collectives.launch.command import main
from collectives.launch.task_client import TaskClient
from collectives.launch.task_server import TaskServer
from collectives.launch.tasks import Tasks, prove, read, write
from collectives.launching.exchange import Exchange
from tests.collectives.test_pmi_server import wait_until_refused
from tests.worlds.launcher import find_mpirun, is_open_mpi
from tests.worlds.programs import run_launcher

SECRET = "a secret of the tests"


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def tasks(size, cluster="the cluster"):
    names = tuple(f"worker {rank}" for rank in range(size))
    return Tasks(0, names, "127.0.0.1", free_port(), cluster)


def start(own, seconds, secret=SECRET, **options):
    """Start one task up to MPI; its connection, or its error."""
    options = {"insecure": False} | options
    try:
        if own.rank == 0:
            store = TaskServer(own, secret, **options)
        else:
            store = TaskClient(own, secret, seconds, **options)
    except Exception as error:
        return error
    listening = {"listening": store} if own.rank == 0 else {}
    try:
        exchange = Exchange(store, own.rank, own.size, seconds, names=own.names, **listening)
        return exchange.connect(store.host)
    except Exception as error:
        return error
    finally:
        store.close()


def start_all(parts, seconds=20.0):
    """Start all tasks, each with its secret, together."""
    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(lambda part: start(part[0], seconds, part[1]), parts))


def ranks_of(whole, *ranks, secret=SECRET):
    return [(dataclasses.replace(whole, rank=rank), secret) for rank in ranks]


def test_a_program_that_is_absent_is_named_before_the_start(capsys):
    with pytest.raises(SystemExit) as ended:
        main("collectives.launch", find_tasks, {}, ["--", "absent.py"])
    assert ended.value.code == 2
    assert "there is no file absent.py" in capsys.readouterr().err


def test_all_connections_go_to_the_address_that_the_cluster_names(monkeypatch):
    monkeypatch.setattr(task_client, "_STALE_SECONDS", 0.1)
    whole = tasks(3)
    connections = start_all(ranks_of(whole, 2, 0, 1))
    for each in connections:
        assert each.pmi.getpeername() == each.end.getpeername() == ("127.0.0.1", whole.port)
    # All have arrived: those that come now are refused by their names.
    for rank in (1, 2):
        error = start(dataclasses.replace(whole, rank=rank), 20)
        assert isinstance(error, LaunchError), error
        assert f"worker {rank} was started twice, or once more after all tasks" in str(error)
    assert "worker 0 can't listen on its address" in str(error := start(whole, 20))
    assert "It was started twice, or another program has the port" in str(error)
    for each in connections:
        each.pmi.sendall(b"cmd=finalize\n")
        assert each.pmi.recv(100) == b"cmd=finalize_ack rc=0\n"
        each.pmi.close()
        # The first end closes the port, so that all tasks may be started again.
        if each is connections[0]:
            wait_until_refused(whole.port)
    for each in connections:
        each.end.close()


@pytest.mark.parametrize("absent", [(2,), (0,), (1, 3)])
def test_absent_tasks_are_named_by_all_others(absent):
    whole = tasks(4)
    present = [rank for rank in range(4) if rank not in absent]
    for rank, error in zip(present, start_all(ranks_of(whole, *present), 1.5), strict=True):
        assert isinstance(error, DeadlineExceededError), error
        assert error.absent == absent
        named = ", ".join(f"worker {each}" for each in absent)
        expected = f"{named} did not answer" if absent == (0,) else f"Absent: {named}"
        assert expected in str(error)
        assert str(error).startswith(f"worker {rank}: ")


def test_a_task_that_was_started_twice_ends_the_start_of_all():
    # One task never comes.
    errors = start_all(ranks_of(tasks(3), 0, 1, 1))
    assert all(isinstance(error, LaunchError) for error in errors), errors
    assert all("worker 1 was started twice: at 127.0.0.1:" in str(error) for error in errors)


def test_a_task_of_another_cluster_ends_the_start_of_all():
    whole = tasks(3)
    other = dataclasses.replace(whole, rank=2, cluster="another one")
    with ThreadPoolExecutor(1) as pool:
        # The start has failed when the last task connects.
        earlier = pool.submit(start_all, [*ranks_of(whole, 0), (other, SECRET)])
        time.sleep(0.3)
        last = start_all(ranks_of(whole, 1))
        first = earlier.result()
    errors = [first[0], *last, first[1]]
    for error in errors:
        assert isinstance(error, LaunchError), error
        assert "worker 2 at 127.0.0.1:" in str(error)
        assert "has another cluster than worker 0, which has the cluster" in str(error)
    assert "This task has another one" in str(errors[2])


def test_a_task_that_is_started_again_takes_the_place_of_the_first():
    whole = tasks(2)
    first, second = (dataclasses.replace(whole, rank=rank) for rank in (0, 1))
    server = TaskServer(first, SECRET, insecure=False)
    TaskClient(second, SECRET, 5, insecure=False).close()
    for thread in list(server._connections.values()):
        thread.join(5)
    again = TaskClient(second, SECRET, 5, insecure=False)
    again.set("name", "value")
    assert server.get("name") == again.get("name") == b"value"
    assert again.check(["name"])
    assert not again.check(["name", "other"])
    again.close()
    server.close()


@pytest.mark.parametrize("secret", ["", "another"])
def test_a_task_without_the_secret_is_refused_and_the_others_wait(secret):
    whole = tasks(2)
    server = TaskServer(whole, SECRET, insecure=False)
    with ThreadPoolExecutor(1) as pool:
        task = pool.submit(start, dataclasses.replace(whole, rank=1), 1.5, secret)
        exchange = Exchange(server, 0, 2, 1.5, names=whole.names, listening=server)
        with pytest.raises(DeadlineExceededError) as absent:
            exchange.connect(server.host)
    errors = {0: absent.value, 1: task.result()}
    assert "a process at 127.0.0.1:" in server.hints
    assert server.hints.endswith("did not prove that it has this COLLECTIVES_SECRET")
    server.close()
    assert isinstance(errors[1], LaunchError)
    assert "has another COLLECTIVES_SECRET than this task" in str(errors[1])
    assert isinstance(errors[0], DeadlineExceededError)
    assert "Absent: worker 1" in str(errors[0])


def test_strangers_get_nothing_from_the_server():
    whole = tasks(2)
    server = TaskServer(whole, SECRET, insecure=False)
    server.set("token", "value")
    hello = json.dumps(HELLO | {"cluster": whole.digest}).encode() + b"\n"
    for lines in ([b"nothing\n"], [b"x" * 5000], [b"[" * 1023 + b"\n"], [hello, b'"no"\n']):
        with socket.create_connection(("127.0.0.1", whole.port), 5) as stranger:
            for line in (*lines, b'["get", "token"]\n'):
                stranger.sendall(line)
            received = b""
            try:
                while part := stranger.recv(1000):
                    received += part
            except ConnectionResetError:
                pass
            # Nothing that the secret has to do with.
            found = [json.loads(line) for line in received.splitlines()]
            assert [list(each) for each in found] == ([["random"], []] if lines[0] == hello else [])
    assert server.check(["token"]), "the start goes on"
    end = time.monotonic() + 20
    while server._connections:
        assert time.monotonic() < end
        time.sleep(0.01)
    server.close()


HELLO = {"random": "0" * 32, "rank": 1, "name": "worker 1", "cluster": ""}


def test_a_proof_holds_for_one_connection():
    whole = tasks(2)
    server = TaskServer(whole, SECRET, insecure=False)
    keys = {"cluster": whole.digest}
    proof = None
    for expected in ({"proof", "problem"}, set()):
        with (
            socket.create_connection(("127.0.0.1", whole.port), 5) as connection,
            connection.makefile("rwb") as stream,
        ):
            write(stream, HELLO | keys)
            words = [*map(str, (HELLO | keys).values()), read(stream, dict)["random"]]
            proof = proof or prove(SECRET, "client", *words)
            write(stream, proof)
            assert set(read(stream, dict)) == expected
    assert prove(SECRET, "client", *words) != prove(SECRET, "server", *words)
    server.close()


def test_strangers_hold_a_bounded_number_of_connections_for_a_bounded_time(monkeypatch):
    whole = tasks(2)
    server = TaskServer(whole, SECRET, insecure=False)
    own, threads = dataclasses.replace(whole, rank=1), threading.active_count()
    strangers = [
        socket.create_connection(("127.0.0.1", whole.port), 5)
        for _ in range(server._most_unproved + 3)
    ]
    for stranger in strangers[:3]:
        assert stranger.recv(1) == b""
    # A task makes the fourth oldest give way.
    TaskClient(own, SECRET, 5, insecure=False).close()
    assert strangers[3].recv(1) == b""
    # The thread of a connection ends after the connection.
    end = time.monotonic() + 10
    while threading.active_count() - threads > server._most_unproved:
        assert time.monotonic() < end
        time.sleep(0.01)
    server.close()
    for stranger in strangers:
        assert stranger.recv(1) == b""
        stranger.close()
    monkeypatch.setattr(task_server, "_HELLO_SECONDS", 0.3)
    whole = tasks(2)
    server = TaskServer(whole, SECRET, insecure=False)
    with socket.create_connection(("127.0.0.1", whole.port), 0.1) as slow:
        for _ in range(50):
            # Each part comes in time, the whole doesn't.
            slow.sendall(b" ")
            try:
                assert slow.recv(1) == b""
                break
            except TimeoutError:
                continue
        else:
            pytest.fail("the connection is still open")
    server.close()


def test_a_server_of_someone_else_gets_nothing_from_a_task():
    whole = tasks(2)
    received = []

    def pretend(listener):
        connection, _ = listener.accept()
        with connection, connection.makefile("rwb") as stream:
            received.append(stream.readline())
            write(stream, {"random": "1"})
            received.append(stream.readline())
            # The task's own proof sent back is no proof of the server's.
            write(stream, {"proof": json.loads(received[1]), "problem": ""})
            received.append(stream.readline())

    with socket.create_server(("127.0.0.1", whole.port)) as listener:
        thread = threading.Thread(target=pretend, args=(listener,))
        thread.start()
        with pytest.raises(LaunchError, match="has another COLLECTIVES_SECRET"):
            TaskClient(dataclasses.replace(whole, rank=1), SECRET, 5, insecure=False)
        thread.join()
    assert received[2] == b""
    assert SECRET.encode() not in received[0]


HOSTS = {"here": ["127.0.1.1"], "too": ["127.0.0.1"], "both": ["127.0.0.1", "192.0.2.1"]}


@pytest.fixture
def names(monkeypatch):
    """Names of hosts that resolve to these addresses, in this order."""
    plain = socket.getaddrinfo

    def resolve(host, port, *options, **named):
        addresses = HOSTS.get(host, [host])
        return [found for each in addresses for found in plain(each, port, *options, **named)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


def test_without_a_secret_all_addresses_of_the_first_host_must_be_loopback(names):
    for host in ("here", "both", "0.0.0.0"):
        whole = dataclasses.replace(tasks(2), host=host)
        if host == "here":
            server = TaskServer(whole, "", insecure=False)
            assert server.socket.getsockname()[0] == "127.0.1.1"
            TaskClient(dataclasses.replace(whole, rank=1), "", 5, insecure=False).close()
            server.close()
            continue
        # A server that would answer the task.
        server = TaskServer(dataclasses.replace(whole, host="127.0.0.1"), "", insecure=False)
        for rank in (0, 1):
            error = start(dataclasses.replace(whole, rank=rank), 1.0, "")
            assert isinstance(error, LaunchError), error
            assert "is no loopback address, and COLLECTIVES_SECRET is not set" in str(error)
            assert "secrets.token_hex(32)" in str(error)
        TaskClient(dataclasses.replace(whole, rank=1), "", 5, insecure=True).close()
        server.close()
    # The address that other hosts reach is the one to listen on.
    with pytest.raises(LaunchError, match=r"can't listen .* assign requested address"):
        TaskServer(dataclasses.replace(tasks(2), host="both"), SECRET, insecure=False)


def test_an_address_that_only_the_first_host_reaches_is_refused(names, monkeypatch):
    whole = dataclasses.replace(tasks(2), host="here", hosts=frozenset({"here", "192.0.2.1"}))
    with pytest.raises(LaunchError, match="which other hosts can't reach: write its IP address"):
        TaskServer(whole, SECRET, insecure=False)
    # Two names of one host.
    whole = dataclasses.replace(whole, hosts=frozenset({"here", "too"}))
    TaskServer(whole, SECRET, insecure=False).close()
    # Where the other hosts aren't known, the error about those that are absent says it.
    variables = VARIABLES | {"RANK": "0", "MASTER_ADDR": "here", "MASTER_PORT": str(whole.port)}

    def late(*_, **named):
        raise DeadlineExceededError("Absent: rank 1", (1,))

    monkeypatch.setattr(command, "load_mpich", lambda size: None)
    monkeypatch.setattr(command, "start_through", late)
    error = main("collectives.launch", find_tasks, variables, [__file__])
    assert "listens on 127.0.1.1, which other hosts can't reach" in error


def test_what_is_no_name_of_a_host_is_named():
    tasks = Tasks(0, ("chief 0 (x:1)", "worker 0 (y:1)"), "x" * 70, 1, "cluster")
    with pytest.raises(LaunchError, match=r"chief 0 \(x:1\) can't listen on .*label"):
        TaskServer(tasks, SECRET, insecure=False)


def test_a_port_in_use_is_named():
    whole = tasks(2)
    named = r"worker 0 can't listen on its address: .*in use"
    with (
        socket.create_server(("127.0.0.1", whole.port)),
        pytest.raises(LaunchError, match=named),
    ):
        TaskServer(whole, SECRET, insecure=False)


VARIABLES = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "29500"}


def test_the_tasks_of_torchs_variables():
    found = find_tasks(VARIABLES)
    assert (found.rank, found.names) == (1, ("rank 0 (here:29500)", "rank 1"))
    assert (found.host, found.port) == ("here", 29500)
    assert found.digest != find_tasks(VARIABLES | {"WORLD_SIZE": "3"}).digest
    for wrong in ({"RANK": "2"}, {"MASTER_PORT": ""}, {"MASTER_PORT": "0"}, {"MASTER_ADDR": ""}):
        with pytest.raises(LaunchError, match="needed are all four, with 0 <= RANK < WORLD_SIZE"):
            find_tasks(VARIABLES | wrong)
    with pytest.raises(LaunchError, match=r"srun has started 4 processes .* --mpi=pmi2 for MPICH"):
        find_tasks({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"})
    with pytest.raises(LaunchError, match="torchrun serves here:29500 itself"):
        find_tasks(VARIABLES | {"TORCHELASTIC_USE_AGENT_STORE": "True"})


def test_an_error_is_the_text_of_the_exit():
    # Where the exit status is that of a text, 1.
    error = main("collectives.launch", find_tasks, {"RANK": "0"}, [__file__])
    assert error.startswith("python -m collectives.launch: the environment has RANK='0', WORLD_")
    with pytest.raises(SystemExit):
        main("collectives.launch", find_tasks, VARIABLES, [])


@pytest.mark.parametrize("text", ["-1", "0", "nan", "inf", "1e7", "soon"])
@pytest.mark.parametrize(
    ("command", "option"),
    [
        (partial(main, "collectives.launch", find_tasks, {}), ["--timeout"]),
        (collectives.__main__.main, ["doctor", "--limit"]),
    ],
    ids=["launch", "doctor"],
)
def test_a_time_limit_that_none_can_keep_is_refused(command, option, text, capsys):
    with pytest.raises(SystemExit) as ended:
        command([*option, text, "program.py"])
    assert ended.value.code == 2
    problem = f"{text!r}: must be a number of seconds above 0 and at most 1000000"
    assert f"argument {option[-1]}: {problem}" in capsys.readouterr().err


PROGRAM = """
import atexit, os, pickle, sys
import numpy as np
from mpi4py import MPI
import collectives
comm = collectives.world(deadline=30)
total = comm.all_reduce(np.array(comm.rank + 1.0))
sys.stdout.write(f"{sys.argv[1:]} {comm.rank} {MPI.COMM_WORLD.size} {total:g} {__name__}\\n")
# The launcher's own future imports must not change it.
def annotated(x: int): assert annotated.__annotations__ == {"x": int}
annotated(1)
os.chdir("/")
assert open(__file__).readline() == "\\n"  # of a path that was relative
class Kept: pass
@atexit.register
def dump(): sys.stdout.write("pickled\\n" if pickle.dumps(Kept()) else "")
"""


UNREAD = """
import os, time
import collectives
comm = collectives.world()
unread, errors = os.pipe()
os.dup2(errors, 2)
os.close(errors)
os.close(unread)
comm.barrier()
if comm.rank:
    os.kill(os.getpid(), 9)
time.sleep(40)
print("it lives")
"""


@pytest.mark.slow
def test_a_rank_whose_errors_nothing_reads_ends_with_the_others(tmp_path):
    if is_open_mpi(find_mpirun()):
        pytest.skip("only MPICH can start without mpirun")
    (tmp_path / "program.py").write_text(UNREAD)
    command = f"{sys.executable} -m collectives.launch --timeout 30 {tmp_path}/program.py"
    line = f"RANK=1 {command} & RANK=0 {command}; wait"
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    ended = run_launcher(["sh", "-c", line], variables, timeout=30)
    assert ended.stdout == "", ended.stderr


FAILING = """
import os, time
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
if MPI.COMM_WORLD.rank == 0:
    time.sleep(2)
    os._exit(3)
print("process", os.getppid())
"""


@pytest.mark.slow
def test_a_rank_that_is_process_1_of_its_container_ends_with_the_others(tmp_path):
    """It waits in MPI_Finalize."""
    container = "unshare --pid --fork --kill-child"
    if shutil.which("unshare") is None or os.system(f"{container} true 2> /dev/null"):
        pytest.skip("unshare can't make a namespace of processes here")
    if is_open_mpi(find_mpirun()):
        pytest.skip("only MPICH can start without mpirun")
    (tmp_path / "program.py").write_text(FAILING)
    command = f"{sys.executable} -m collectives.launch --timeout 30 {tmp_path}/program.py"
    status = f"{container} {command}; echo $?"
    line = f"RANK=0 {command} & RANK=1 timeout -s KILL 30 sh -c '{status}'; wait"
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    variables["UCX_TLS"] = "tcp,self"  # UCX's shared memory needs one namespace
    ended = run_launcher(["sh", "-c", line], variables, timeout=60)
    assert ended.stdout.splitlines() == ["process 1", str(128 + 9)], ended.stderr


def test_a_secret_may_be_any_bytes():
    assert prove("\udcff", "task") != prove("\udcfe", "task")


@pytest.mark.slow
def test_a_program_started_by_torchs_variables(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = f"{sys.executable} -m collectives.launch --timeout 30 program.py --x"
    # No connection may get the numbers of the standard streams.
    line = f"cd {tmp_path}; RANK=1 {command} & RANK=0 {command} <&-; wait"
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    ended = run_launcher(["sh", "-c", line], variables, timeout=60)
    if is_open_mpi(find_mpirun()):
        assert ended.stderr.count("Without mpirun only MPICH can start") == 2, ended.stderr
        return
    expected = [f"['--x'] {rank} 2 3 __main__" for rank in (0, 1)] + ["pickled"] * 2
    assert sorted(ended.stdout.splitlines()) == expected, ended.stderr
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text(PROGRAM)
    for program in ("-m program", tmp_path / "folder"):
        line = (
            f"cd {tmp_path}; RANK=0 WORLD_SIZE=1 {sys.executable} -m collectives.launch {program}"
        )
        ended = run_launcher(["sh", "-c", line], variables, timeout=60)
        assert ended.stdout == "[] 0 1 1 __main__\npickled\n", ended.stderr
