"""`doctor --links`: which pairs are measured, what is warned of, and links that really are bad."""

import dataclasses
import itertools
import re
import subprocess
import sys

import pytest

from collectives.doctor.links import Link, problems_of, report_links, rounds
from collectives.doctor.machine import RankFacts
from collectives.doctor.report import Report
from tests.worlds import hosts


@pytest.mark.parametrize("count", [2, 3, 4, 7, 16])
def test_every_pair_is_measured_once_in_rounds_of_disjoint_pairs(count):
    found = rounds(count)
    assert len(found) == count - 1 + count % 2
    assert sorted(itertools.chain(*found)) == list(itertools.combinations(range(count), 2))
    for pairs in found:
        nodes = list(itertools.chain(*pairs))
        assert len(nodes) == len(set(nodes))


GOOD = Link(0, 1, 1e-5, (1e9, 1.1e9, 0.9e9), sent=1000, repeated=4)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"bandwidths": (3e8,) * 3}, ["slow: the median of all links is 1 GB/s"]),
        ({"latency": 4e-5}, ["slow: the median latency of all links is 10 µs"]),
        ({"bandwidths": (1e9, 1e9, 2e8)}, ["unsteady: a message had 0.2 GB/s"]),
        ({"repeated": 6}, ["lossy: TCP has repeated 6 of 1000 segments"]),
    ],
)
def test_what_is_odd_about_a_link(changes, expected):
    link = dataclasses.replace(GOOD, source=2, **changes)
    assert problems_of(link, [GOOD, GOOD, link, GOOD]) == expected
    assert problems_of(GOOD, [GOOD, GOOD, link, GOOD]) == []


class Rows(Report):
    def __init__(self):
        super().__init__(prints=False)
        self.rows = []

    def row(self, label, text):
        self.rows.append((label, str(text)))


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_each_rank_of_its_own_node_is_measured(comm):
    from mpi4py import MPI

    facts = [RankFacts(rank, f"host{rank}", frozenset(), None, {}) for rank in range(comm.size)]
    if MPI.COMM_WORLD.size != comm.size:
        pytest.skip("the doctor measures the whole world")
    report = Rows()
    report_links(report, MPI, facts)
    found = [(label, text) for label, text in report.rows if label]
    pairs = list(itertools.permutations(range(comm.size), 2))
    assert [label for label, _ in found] == [f"node {a} to node {b}" for a, b in pairs]
    for (a, b), (_, text) in zip(pairs, found, strict=True):
        form = rf"\d+ µs, [\d.e+]+ GB/s \(host{a} \(node {a}\) to host{b} \(node {b}\)\)"
        assert re.fullmatch(form, text), text


@pytest.mark.slow
def test_a_slow_and_a_lossy_link_are_found():
    if (reason := hosts.why_not()) is not None:
        pytest.skip(f"no hosts can be imitated: {reason}")
    with hosts.hosts(3) as (addresses, agent):
        program = "import sys; from collectives import doctor; sys.exit(doctor.main(links=True))"

        name = hosts.namespace_of(agent, addresses[1])

        def run(device, *limits):
            line = ["tc", *device, "root", "tbf", "rate", *limits]
            subprocess.run(line, check=True)
            ended = hosts.run_on_hosts(addresses, agent, (1, 1, 1), program, timeout=60)
            assert ended.returncode == 0, ended.stdout + ended.stderr
            report = ended.stdout.split("\nLinks\n")[1]
            parts = re.split(r"^  node (\d) to node (\d)", report, flags=re.MULTILINE)[1:]
            return {(a, b): text for a, b, text in zip(*[iter(parts)] * 3, strict=True)}

        sent = ("-n", name, "qdisc", "replace", "dev", "eth0")
        # Far below what other programs on the cores leave of the other links.
        slow = run(sent, "20mbit", "burst", "32kb", "latency", "100ms")
        subprocess.run(["tc", *sent, "root", "pfifo"], check=True)
        # A queue of few packets drops the others, and TCP repeats them. It is outside of the hosts:
        # the kernel reports a drop in a host's own queue to TCP, which then sends less.
        received = ("qdisc", "replace", "dev", f"{name}o")
        lossy = run(received, "1gbit", "burst", "16kb", "limit", "12000")
    for a, b in (("1", "0"), ("1", "2")):
        assert "warning: slow: the median of all links" in slow[a, b], slow
        assert re.search(r" 0.002\d* GB/s", slow[a, b]), slow
        assert "warning: lossy" in lossy[b, a], lossy
    assert "median of all links" not in slow["0", "1"]


@pytest.mark.slow
def test_on_one_node_there_are_no_links(launch):
    ended = launch(2, [sys.executable, "-m", "collectives", "doctor", "--links"], timeout=60)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "none: all ranks are on one node" in ended.stdout
    assert "all_reduce" not in ended.stdout
