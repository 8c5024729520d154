"""Predictions: simulated times against arithmetic, against each other and the cost model."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.hosts import table
from bench.hosts.namespaces import why_not
from bench.scale import measured, predictions, programs, run
from bench.scale.networks import NETWORKS, LogGP, Network, uniform
from bench.scale.predictions import crossings, predict
from bench.scale.programs import Program, Turn, expand, fold, lifted, program_of
from bench.scale.simulation import _Simulation, simulate
from collectives import Link, algorithms, estimate
from collectives.execution import cost_model
from collectives.execution.cost_model import CostParameters, Layout
from collectives.schedules.schedule import Recv, Reduce, Send

REASON = why_not()

# Those that are the same from the point of view of every node, at powers of two or always.
ALIKE = [
    *(("all_reduce", name) for name in ("ring", "doubling", "rabenseifner", "circulant")),
    *(("reduce_scatter", name) for name in ("ring", "rabenseifner", "circulant")),
    ("all_gather", "ring"),
    ("all_gather", "doubling"),
    ("all_to_all", "pairwise"),
]

DURATIONS = st.integers(0, 50).map(lambda units: units * 1e-7)
LINKS = st.builds(LogGP, DURATIONS.map(lambda each: each + 1e-9), *[DURATIONS] * 2, DURATIONS)


@st.composite
def networks(draw):
    local = draw(st.integers(1, 4))
    ports = draw(st.integers(1, local))
    reduction = draw(st.sampled_from([1e6, 1e8, 1e12]))
    return Network("drawn", local, ports, draw(LINKS), draw(LINKS), reduction)


NETWORK = Network(
    "test", 2, 1, LogGP(1e-6, 2e-6, 0, 1e-9), LogGP(10e-6, 3e-6, 5e-6, 8e-9), reduction=1e9
)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(ALIKE), networks(), st.integers(2, 6), st.integers(0, 1 << 12), st.booleans()
)
def test_one_node_stands_for_all_exactly(pair, network, nodes, nbytes, across):
    found, local = algorithms.find(*pair), network.ranks_per_node
    size, chunks = nodes * local, found.chunks(nodes if across else nodes * local)
    schedule = lifted(found.schedule, local) if across else found.schedule
    folded = fold(schedule, size, local, chunks)
    if folded is None:
        # Halving and doubling need powers of two.
        assert size & (size - 1) or nodes & (nodes - 1), (pair, size)
        return
    assert folded.simulated == local
    everything = expand(schedule, size, local, chunks)
    assert everything.simulated == size
    assert simulate(folded, network, nbytes) == simulate(everything, network, nbytes, skip=False)


@settings(max_examples=20, deadline=None)
@given(networks(), st.integers(0, 1 << 12), st.sampled_from([False, True]))
def test_skipped_rounds_change_nothing(network, nbytes, folded):
    size = 48 * network.ranks_per_node if folded else 48
    ring = algorithms.find("all_reduce", "ring").schedule
    found = fold(ring, size, network.ranks_per_node, size) if folded else None
    program = found or expand(ring, size, network.ranks_per_node, size)
    assert simulate(program, network, nbytes) == simulate(program, network, nbytes, skip=False)


def test_rounds_are_skipped_within_a_run_alone():
    """After each exchange the ranks are in the same state, and drift apart ever after."""

    def drifting(rank, size):
        for count in (40, 40, 400):
            for _ in range(count):
                yield [Send(0, 1, when=rank == 0), Reduce(0, 0, when=rank == 1)]
            yield [Send(0, 1 - rank), Recv(0, 1 - rank)]

    program = expand(drifting, 2, 2, 1)
    slow = replace(NETWORK, reduction=1e7)
    assert simulate(program, slow, 1000) == simulate(program, slow, 1000, skip=False)


def test_most_rounds_of_a_ring_are_skipped(monkeypatch):
    started, start = [], _Simulation._start
    counted = lambda self, *event: (started.append(event), start(self, *event))  # noqa: E731
    monkeypatch.setattr(_Simulation, "_start", counted)
    network = NETWORKS["100 Gbit RoCE"]
    simulate(program_of("all_reduce", "ring", 4096, network.ranks_per_node), network, 1 << 20)
    assert 0 < len(started) < 2 * 4095 * network.ranks_per_node / 10


def test_a_message_of_an_exscan_is_a_whole_buffer():
    """Its chunks are those of two buffers; between two ranks it is the message of a broadcast."""
    programs = program_of("exscan", "doubling", 2, 1), program_of("broadcast", "binomial", 2, 1)
    network = replace(NETWORK, ranks_per_node=1)
    first, other = (simulate(each, network, 1000) for each in programs)
    assert first == other


def times_of(schedule, size, nbytes, network=NETWORK):
    return simulate(expand(schedule, size, network.ranks_per_node, 1), network, nbytes)


def test_a_message_takes_what_loggp_says():
    binomial = algorithms.find("broadcast", "binomial").schedule
    inside, between = NETWORK.inside, NETWORK.between
    # Within a node; the receiver's overhead comes last.
    one = inside.overhead * 2 + inside.latency + 1000 * inside.gap_per_byte
    assert times_of(binomial, 2, 1000) == pytest.approx(one)
    # To the other node, and there to its second rank.
    other = between.overhead * 2 + between.latency + 1000 * between.gap_per_byte
    assert times_of(binomial, 4, 1000) == pytest.approx(other + one)


def test_ranks_share_the_ports_of_their_node():
    def to_the_other_node(rank, size):
        yield [Send(0, (rank + 2) % 4, when=rank < 2), Recv(0, (rank - 2) % 4, when=rank >= 2)]

    link = NETWORK.between
    first = link.overhead * 2 + link.latency
    passing = 1000 * link.gap_per_byte
    assert times_of(to_the_other_node, 4, 1000) == pytest.approx(first + 2 * passing)
    two_ports = replace(NETWORK, ports=2)
    assert times_of(to_the_other_node, 4, 1000, two_ports) == pytest.approx(first + passing)
    # Short messages are as far apart as the gap.
    assert times_of(to_the_other_node, 4, 0) == pytest.approx(first + link.gap)


def test_what_has_arrived_is_folded():
    doubling = algorithms.find("all_reduce", "doubling").schedule
    link, nbytes = NETWORK.inside, 1000
    arrived = link.overhead * 2 + link.latency + nbytes * link.gap_per_byte
    expected = arrived + nbytes / NETWORK.reduction
    assert times_of(doubling, 2, nbytes) == pytest.approx(expected)


def test_a_round_ends_once_its_sends_have_left():
    def two_rounds(rank, size):
        yield [Send(0, 2, when=rank == 0), Recv(0, 0, when=rank == 2)]
        yield [Send(0, 1, when=rank == 0), Recv(0, 0, when=rank == 1)]

    late = replace(NETWORK, inside=LogGP(1e-3, 2e-6, 0, 1e-9))
    left = late.between.overhead + 1000 * late.between.gap_per_byte
    expected = left + late.inside.overhead * 2 + late.inside.latency + 1000 * 1e-9
    assert times_of(two_rounds, 4, 1000, late) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["ring", "doubling", "rabenseifner", "circulant"])
def test_on_one_level_the_simulation_is_the_cost_model(name):
    link = Link(latency=3e-6, bandwidth=2e9, reduction=5e9)
    for size in (2, 8, 64, 1024):
        program = program_of("all_reduce", name, size, 1)
        assert program.simulated == 1
        simulated = simulate(program, uniform(link), 1 << 20)
        assert simulated == pytest.approx(
            estimate("all_reduce", name, size, 1 << 20, link), rel=1e-9
        )


def test_nodes_that_differ_are_not_folded():
    binomial = algorithms.find("broadcast", "binomial").schedule
    assert fold(binomial, 8, 2, 1) is None
    ring = algorithms.find("all_gather", "ring").schedule

    def fields(**changed):
        def one_differs(rank, size):
            for steps in ring(rank, size):
                last = rank == size - 1
                yield [
                    replace(step, **{name: change(step, last) for name, change in changed.items()})
                    for step in steps
                ]

        return one_differs

    different = [
        fields(count=lambda step, last: np.where(last, 2, 1)),
        fields(when=lambda step, last: ~last),
        fields(peer=lambda step, last: np.where(last, 0, step.peer)),
    ]
    assert fold(fields(), 8, 2, 8) is not None
    assert [fold(each, 8, 2, 8) for each in different] == [None] * len(different)
    # Of more ranks a sample is compared, with the last among it.
    assert fold(different[0], 4 * programs._ALL_TESTED, 2, 8) is None


def test_what_is_too_large_is_left_out():
    network = NETWORKS["100 Gbit RoCE"]
    with pytest.raises(programs.TooLargeError):
        program_of("broadcast", "scatter_all_gather", 2048, network.ranks_per_node)
    found = predict(network, "broadcast", 2048, 1 << 10)
    assert list(found.simulated) == list(found.modelled) == ["binomial"]


def test_the_choice_is_the_librarys():
    network = NETWORKS["1 Gbit Ethernet"]
    for ranks, offered in ((4, ("shared",)), (16, ("hierarchical",))):
        layout, costs = network.layout(ranks), network.costs(ranks)
        for nbytes in (8, 1 << 20):
            chosen = cost_model.choose("all_reduce", nbytes, layout, offered, costs)
            found = predict(network, "all_reduce", ranks, nbytes)
            assert found.automatic.partition("/")[0] == chosen.algorithm
            least = min(found.modelled.values())
            assert least == pytest.approx(min(chosen.seconds.values()))
            assert found.modelled[found.automatic] == pytest.approx(least)


# At 24 ranks those of doubling and of Rabenseifner's algorithm do different things.
@pytest.mark.parametrize("ranks", [24, 64])
def test_beyond_the_librarys_limit_its_rule_is_continued(ranks, monkeypatch):
    network = NETWORKS["NVLink + NDR"]
    below = predict(network, "all_reduce", ranks, 3 << 20)
    predictions._schedule_seconds.cache_clear()
    monkeypatch.setattr(predictions, "LARGEST_PRICED", 4)
    beyond = predict(network, "all_reduce", ranks, 3 << 20)
    predictions._schedule_seconds.cache_clear()
    assert beyond.automatic == below.automatic
    assert beyond.modelled == pytest.approx(below.modelled)


def test_a_path_is_best_up_to_its_crossing_point():
    network = NETWORKS["NVLink + NDR"]
    found = [predict(network, "all_reduce", 64, nbytes) for nbytes in (8, 1 << 20, 1 << 28)]
    changes = list(crossings(network, found))
    assert len(changes) >= 2
    for each in changes:
        around = [round(each.nbytes * factor) for factor in (0.97, 1.03)]
        best = [predict(network, "all_reduce", 64, nbytes).best for nbytes in around]
        assert best == [each.before, each.after]


def test_tables_and_files(tmp_path, capsys):
    arguments = ["--ranks", "4,16", "--sizes", "8,1M", "--output", str(tmp_path)]
    assert run.main(arguments) == 0
    text = (tmp_path / "scale-all_reduce.md").read_text(encoding="utf-8")
    for line in capsys.readouterr().out.splitlines():
        assert line in text or line in NETWORKS
    content = json.loads((tmp_path / "scale-all_reduce.json").read_text(encoding="utf-8"))
    cases = {(row["network"], row["ranks"], row["nbytes"]) for row in content["predictions"]}
    assert cases == {(name, r, n) for name in NETWORKS for r in (4, 16) for n in (8, 1 << 20)}
    assert f"`python -m bench.scale {' '.join(arguments)}`" in text


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--ranks", "1"], "must be at least 2"),
        (["--ranks", "12"], "12 ranks don't fill nodes of 8"),
        (["--networks", "token ring"], "'token ring' is not one of"),
        (["--sizes", "0,1M"], "--sizes: must be at least 1"),
        (["--measured", "--output", "."], "--output is of predictions"),
    ],
)
def test_what_cannot_be_predicted_is_refused(arguments, problem, capsys):
    with pytest.raises(SystemExit):
        run.main(arguments)
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("values", [(0, 0, 0, 0), (1, -1, 0, 0)])
def test_impossible_links_are_refused(values):
    with pytest.raises(ValueError, match="must not be negative"):
        LogGP(*values)


def test_an_empty_program_takes_no_time():
    assert simulate(Program(1, 1, ((Turn((), ()),),), ()), NETWORK, 8) == 0


# Between namespaces


def test_it_prints_why_hosts_cannot_be_simulated(monkeypatch, capsys):
    monkeypatch.setattr(table, "why_not", lambda: "tc is not installed")
    assert run.main(["--measured"]) == 2
    assert capsys.readouterr().err == "hosts can't be simulated here: tc is not installed\n"


def test_predictions_beside_measurements():
    costs, layout = CostParameters(), Layout((1, 1), 2.0)
    taken = {"ring": 0.5, "native": 2.0, "auto": 4.0}
    rows = [
        {
            "nbytes": 1 << 20,
            "algorithm": name,
            "out_of_place": {"seconds": {"median": seconds}},
            "in_place": None,
        }
        for name, seconds in taken.items()
    ]
    lines = list(measured._lines(layout, "all_reduce", costs, rows))
    chosen = cost_model.choose("all_reduce", 1 << 20, layout, ("native",), costs).algorithm
    predicted = cost_model.expected("all_reduce", "ring", 1 << 20, layout, costs)
    assert f"| ring | 500000.0 | {predicted * 1e6:.1f} | {predicted / 0.5:.2f} |" in lines[0]
    assert f"| auto: {chosen} |" in lines[2]
    assert "up to 8.00 of the fastest's time" in lines[3]


@pytest.mark.slow
@pytest.mark.skipif(REASON is not None, reason=f"no hosts can be simulated: {REASON}")
def test_hosts_are_tuned_and_measured(capfd):
    arguments = ["--measured", "--hosts", "2", "--sizes", "64K", "--repeats", "2"]
    assert run.main(arguments) == 0
    out, err = capfd.readouterr()
    rows = [line.split("|")[3].strip() for line in out.splitlines() if line.startswith("| 2 |")]
    assert rows[:-1] == [*algorithms.names("all_reduce"), "native"]
    assert rows[-1].startswith("auto: ")
    assert "measured with 2 ranks on 2 nodes" in err
