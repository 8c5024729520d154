"""The server of PMI: its protocol, who may connect, and when it ends."""

import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from collectives.launching import pmi_server
from collectives.launching.pmi_server import LONGEST_HELLO, Server

TOKEN = "7f" * 16
MAPPING = "(vector,(0,1,2))"


class Rank:
    """A client with both connections of a rank, or one that sends something else."""

    def __init__(self, port, hello=None, rank=None):
        if rank is not None:
            hello = f"{TOKEN} {rank} pmi"
            self.end = Rank(port, f"{TOKEN} {rank} end")
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self.file = self.socket.makefile("r")
        if hello is not None:
            self.send(hello)

    def send(self, line):
        self.socket.sendall(line.encode() + b"\n")

    def request(self, line):
        self.send(line)
        return self.read()

    def read(self):
        """The next line; "" at the end."""
        try:
            return self.file.readline().rstrip("\n")
        except ConnectionResetError:
            return ""

    def close(self):
        self.file.close()
        self.socket.close()
        if hasattr(self, "end"):
            self.end.close()


@contextmanager
def served(size, seconds=20.0, listener=None, *, refuses_late=False):
    """The port of a server; it must have ended soon after the block."""
    lifeline, alive = os.pipe()
    named = {"refuses_late": refuses_late}
    server = Server(TOKEN, "127.0.0.1", size, seconds, MAPPING, listener, **named)
    thread = threading.Thread(target=server.run, args=(lifeline,))
    thread.start()
    try:
        yield server.port
    finally:
        os.close(alive)
        thread.join(10)
        os.close(lifeline)
    assert not thread.is_alive()


def connected(port, size):
    ranks = [Rank(port, rank=rank) for rank in range(size)]
    assert [rank.read() for rank in ranks] == ["ok"] * size
    return ranks


def wait_until_refused(port):
    limit = time.monotonic() + 10
    while time.monotonic() < limit:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            return
        except ConnectionResetError:  # It was closed while this connection was being made.
            continue
    pytest.fail(f"port {port} is still open")


def close(ranks):
    for rank in ranks:
        rank.close()


def test_ranks_find_each_other():
    with served(2) as port:
        first, second = ranks = connected(port, 2)
        for rank in ranks:
            answer = rank.request("cmd=init pmi_version=1 pmi_subversion=1")
            assert answer == "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1"
        assert first.request("cmd=get_universe_size") == "cmd=universe_size rc=0 size=2"
        name = first.request("cmd=get_my_kvsname")
        assert name.startswith("cmd=my_kvsname rc=0 kvsname=kvs_")
        mapping = second.request("cmd=get kvsname=kvs key=PMI_process_mapping")
        assert mapping == f"cmd=get_result rc=0 value={MAPPING}"
        for number, rank in enumerate(ranks):
            rank.request(f"cmd=put kvsname=kvs key=address{number} value=a=b{number}")
            rank.send("cmd=barrier_in")
        assert [rank.read() for rank in ranks] == ["cmd=barrier_out rc=0"] * 2
        assert first.request("cmd=get kvsname=kvs key=address1") == "cmd=get_result rc=0 value=a=b1"
        assert "rc=-1" in first.request("cmd=get kvsname=kvs key=other")
        first.send("mcmd=spawn\nnprocs=1\narg1=x cmd=abort\nendcmd")
        assert first.read() == "cmd=spawn_result rc=-1 msg=unsupported"
        assert "rc=-1" in first.request("cmd=publish_name service=a port=b")
        for rank in ranks:
            assert rank.request("cmd=finalize") == "cmd=finalize_ack rc=0"
        close(ranks)


def test_two_worlds_share_no_name():
    """MPICH names its shared memory by it, and a killed world leaves that behind."""
    names = set()
    for _ in range(2):
        with served(1) as port:
            (rank,) = connected(port, 1)
            names.add(rank.request("cmd=get_my_kvsname"))
            rank.request("cmd=finalize")
            rank.close()
    assert len(names) == 2


@pytest.mark.parametrize(
    "hello",
    [
        "",
        "cmd=init pmi_version=1 pmi_subversion=1",
        f"{TOKEN[:-1]} 1 pmi",
        f"{TOKEN}0 1 pmi",
        TOKEN,
        f"{TOKEN} 1",
        f"{TOKEN} 1 other",
        f"{TOKEN} -1 pmi",
        f"{TOKEN} 2 pmi",
        f"{TOKEN} 0 pmi",
        "x" * (LONGEST_HELLO + 1),
        "\xff\x00",
    ],
    ids=lambda hello: hello.replace(TOKEN, "TOKEN")[:20],
)
def test_a_connection_without_the_token_or_a_free_rank_is_refused(hello):
    with served(2) as port:
        first = Rank(port, rank=0)
        assert first.socket.getpeername() == ("127.0.0.1", port)
        # The server has read the first rank's line when it accepts a later connection's.
        refused = Rank(port, hello)
        assert refused.read() == ""
        refused.close()
        second = Rank(port, rank=1)
        assert [first.read(), second.read()] == ["ok", "ok"]
        for rank in (first, second):
            rank.request("cmd=finalize")
        close([first, second])


def test_a_silent_connection_is_closed_and_the_port_too(monkeypatch):
    monkeypatch.setattr(pmi_server, "_HELLO_SECONDS", 0.2)
    with served(1) as port:
        silent = Rank(port)
        assert silent.read() == ""
        silent.close()
        monkeypatch.undo()
        ranks = connected(port, 1)
        with pytest.raises(ConnectionRefusedError):
            Rank(port)
        ranks[0].request("cmd=finalize")
        close(ranks)


@pytest.mark.parametrize("started", [False, True])
def test_strangers_are_bounded_and_late_tasks_answered_until_the_first_rank_ends(
    started, monkeypatch
):
    monkeypatch.setattr(pmi_server, "_HELLO_SECONDS", 60.0)
    listener = socket.create_server(("127.0.0.1", 0))
    with served(2, listener=listener, refuses_late=True) as port:
        ranks = connected(port, 2) if started else []
        strangers = [Rank(port) for _ in range(4 + pmi_server._STRANGERS + 2)]
        assert [each.read() for each in strangers[:2]] == ["", ""]
        task = Rank(port)
        assert strangers[2].read() == ""
        assert task.request('{"rank": 1}') == '{"late": true}'
        assert task.read() == ""
        if not started:
            close(strangers)
            ranks = connected(port, 2)
            strangers = []
        ranks[0].request("cmd=finalize")
        ranks.pop(0).close()
        wait_until_refused(port)
        # Strangers don't keep the server alive.
        ranks[0].request("cmd=finalize")
        close(ranks)
        assert [each.read() for each in strangers[3:]] == [""] * len(strangers[3:])
        close([task, *strangers])


def test_the_port_is_free_once_all_ranks_are_connected():
    """For the program: torch's store listens there."""
    with served(2, listener=socket.create_server(("127.0.0.1", 0))) as port:
        ranks = connected(port, 2)
        wait_until_refused(port)
        socket.create_server(("127.0.0.1", port)).close()
        close(ranks)


def test_absent_ranks_are_named_at_the_deadline():
    with served(4, seconds=2) as port:
        ranks = [Rank(port, rank=rank) for rank in (0, 2)]
        assert [rank.read() for rank in ranks] == ["absent 1 3"] * 2
        assert [rank.read() for rank in ranks] == ["", ""]
        close(ranks)


def test_a_rank_that_ends_before_all_are_connected_is_named():
    with served(3) as port:
        ranks = [Rank(port, rank=rank) for rank in (0, 1)]
        refused = Rank(port, "")
        assert refused.read() == ""  # by then both ranks' lines have been read
        refused.close()
        ranks.pop().close()
        assert ranks[0].read() == "failed 1"
        close(ranks)


def test_the_end_of_rank_0_ends_the_start():
    with served(2) as port:
        rank = Rank(port, rank=1)
    assert rank.read() == ""
    rank.close()


@pytest.mark.parametrize("how", ["abort", "end"])
def test_a_failed_rank_ends_the_others(how, monkeypatch):
    """The rank that aborts at once, the others a little later."""
    ending = 3.0 if how == "abort" else pmi_server._ENDING_SECONDS
    monkeypatch.setattr(pmi_server, "_ENDING_SECONDS", ending)
    with served(3) as port:
        ranks = connected(port, 3)
        ranks[0].send("cmd=barrier_in")
        start = time.monotonic()
        if how == "abort":
            ranks[1].send("cmd=abort exitcode=7")
            assert ranks[1].end.read() == "exitcode=7 rank=1"
            assert time.monotonic() - start < 2
        failed = ranks.pop(1)
        failed.close()
        code = 7 if how == "abort" else 1
        assert [rank.end.read() for rank in ranks] == [f"exitcode={code} rank=1"] * 2
        assert time.monotonic() - start >= 0.9 * ending
        assert [rank.end.read() for rank in ranks] == ["", ""]
        close(ranks)


def test_the_program_ends_with_its_input_and_with_its_clients():
    command = [sys.executable, "-I", "-S", pmi_server.__file__]
    configuration = f"{TOKEN}\n127.0.0.1\n1\n20\n\n".encode()
    for given_up in (True, False):
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            if given_up:
                process.stdin.close()
                assert process.stdout.read() == b""
            else:
                process.stdin.write(configuration)
                process.stdin.flush()
                port = int(process.stdout.readline())
                # The server is a process of its own, and rank 0 has no child to wait for.
                assert process.wait(10) == 0
                (rank,) = connected(port, 1)
                # It has no more use for its input, and the name of its output is free.
                assert process.stdout.read() == b""
                rank.request("cmd=finalize")
                rank.close()
        assert process.returncode == 0


def test_the_program_reports_why_it_can_not_listen():
    command = [sys.executable, "-I", "-S", pmi_server.__file__]
    given = f"{TOKEN}\n192.0.2.1\n1\n20\n\n"
    ended = subprocess.run(command, input=given, capture_output=True, text=True, timeout=20)
    assert "annot assign requested address" in ended.stdout
    assert ended.stderr == ""
