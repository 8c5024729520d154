"""Cost parameters: on disk, fitted, and used by every choice; no time is asserted."""

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

import collectives
from collectives.bound import folds
from collectives.diagnostics import tuning
from collectives.execution import cost_model, parameters_file
from collectives.execution.calibration import fit
from collectives.execution.cost_model import HIERARCHICAL, NATIVE, SHARED, CostParameters, Layout
from collectives.transports.local import run
from tests.slow import slow

SLOW, FAST = {"start": 1.0, "bandwidth": 1e3}, {"start": 1e-9, "bandwidth": 1e15}


def preferring(kind):
    """Cost parameters with which one kind of path is the fastest by far."""
    values = {}
    for each in ("schedule", "native", "shared"):
        values |= {f"{each}_{name}": v for name, v in (FAST if each == kind else SLOW).items()}
    return CostParameters(**values)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(parameters_file.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "all_gather", "all_to_all"])
@pytest.mark.parametrize("nbytes", [8, 1 << 16, 1 << 26])
@pytest.mark.parametrize("kind", ["schedule", NATIVE, SHARED])
def test_the_choice_follows_the_figures(collective, nbytes, kind):
    paths = (NATIVE, SHARED)
    choice = cost_model.choose(collective, nbytes, Layout((3,)), paths, preferring(kind))
    assert (choice.algorithm if choice.algorithm in paths else "schedule") == kind


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize("nodes", [2, 3, 4])
def test_large_messages_between_nodes_go_round_a_ring(collective, nodes):
    """Though other paths have fewer rounds, or are expected to be a little faster."""
    moved_of_two = nodes == 2 and collective != "all_reduce"
    usual, large = CostParameters(), nodes << (21 if moved_of_two else 19)
    apart, together = Layout((1,) * nodes), Layout((nodes,))
    for nbytes, layout, costs, ring in (
        (large, apart, usual, True),
        (large - 8, apart, usual, False),
        (large, replace(apart, oversubscription=2), usual, nodes > 2 or moved_of_two),
        (large, together, usual, False),
        (large, apart, preferring(NATIVE), False),
    ):
        chosen = cost_model.choose(collective, nbytes, layout, (NATIVE,), costs)
        assert chosen.algorithm == "ring" if ring else "large" not in chosen.reason


@pytest.mark.parametrize("nodes", [3, 4, 8])
def test_where_one_path_is_as_good_as_another_a_rank_keeps_its_neighbors(nodes):
    layout, medium = Layout((1,) * nodes), nodes << 18
    costs = cost_model.built_in(layout)
    for collective in ("all_reduce", "all_gather", "reduce_scatter"):
        chosen = cost_model.choose(collective, medium, layout, (NATIVE,), costs)
        assert chosen.algorithm == "ring", chosen
        quicker = replace(costs, native_bandwidth=1.2 * costs.native_bandwidth)
        quicker = replace(quicker, native_move_bandwidth=quicker.native_bandwidth)
        chosen = cost_model.choose(collective, medium, layout, (NATIVE,), quicker)
        assert "large messages" not in chosen.reason, chosen


@pytest.mark.parametrize(
    ("collective", "cut"),
    [("broadcast", "scatter_all_gather"), ("reduce", "reduce_scatter_gather")],
)
def test_large_arrays_between_nodes_do_not_go_along_trees(collective, cut):
    """As those of MPI's own do, which send the whole array in each of their rounds."""
    for layout, nbytes, expected in (
        (Layout((1,) * 4), 4 << 10, NATIVE),
        (Layout((1,) * 4), 1 << 20, cut),
        (Layout((1,) * 64), 1 << 20, cut),
    ):
        costs = cost_model.built_in(layout)
        assert cost_model.choose(collective, nbytes, layout, (NATIVE,), costs).algorithm == expected


@pytest.mark.parametrize(
    ("mebibytes", "expected"), [(1, SHARED), (4, SHARED), (8, SHARED), (64, SHARED)]
)
def test_the_built_in_choice_of_two_ranks(mebibytes, expected):
    """Parameters whose measurements under both MPIs differed by more than a fifth."""
    layout, paths = Layout((2,)), (NATIVE, SHARED)
    choice = cost_model.choose("all_reduce", mebibytes << 20, layout, paths, CostParameters())
    assert choice.algorithm == expected


@pytest.mark.parametrize("sizes", [(2, 2), (8, 8), (2, 2, 2, 2)])
@pytest.mark.parametrize(
    "collective", ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"]
)
def test_the_built_in_choice_between_nodes(collective, sizes):
    """Two levels send fewer bytes over the links, which are slower than the nodes' memory."""
    layout, paths = Layout(sizes), (NATIVE, HIERARCHICAL)
    for nbytes, expected in (
        (4 << 10, NATIVE),
        (256 << 10, HIERARCHICAL),
        (64 << 20, HIERARCHICAL),
    ):
        costs = cost_model.built_in(layout)
        choice = cost_model.choose(collective, nbytes, layout, paths, costs)
        assert choice.algorithm == expected, nbytes
    assert cost_model.built_in(Layout((4,))) == CostParameters()


TRUE = CostParameters(
    schedule_start=7e-6,
    schedule_latency=2e-6,
    schedule_bandwidth=3e9,
    native_start=9e-6,
    native_latency=4e-6,
    native_bandwidth=5e9,
    reduction=6e9,
    shared_start=8e-6,
    shared_latency=1e-6,
    shared_bandwidth=11e9,
)


@pytest.mark.parametrize("layout", [Layout((2,)), Layout((3,), 1.5), Layout((2, 1))])
def test_the_fit_finds_the_figures_that_the_times_came_from(layout):
    """Except what a small size can't separate: start and latency, whose sum it measures."""
    paths = {"ring": "schedule", "doubling": "schedule", NATIVE: NATIVE, SHARED: SHARED}

    def model(path, nbytes, figures):
        return cost_model.expected("all_reduce", path, nbytes, layout, figures)

    seconds = {
        (path, nbytes): model(path, nbytes, TRUE) for path in paths for nbytes in (8, 1 << 22)
    }
    fitted = fit(seconds, model, replace(CostParameters(), reduction=TRUE.reduction), paths)
    for key, taken in seconds.items():
        assert model(*key, fitted) == pytest.approx(taken, rel=0.25 if key[1] == 8 else 0.02)
    for name in ("schedule_bandwidth", "native_bandwidth", "shared_bandwidth"):
        assert getattr(fitted, name) == pytest.approx(getattr(TRUE, name), rel=0.05)


def test_times_that_no_figures_explain_give_positive_ones():
    paths = {"ring": "schedule", SHARED: SHARED}
    layout = Layout((2,))
    # Larger sizes in no time at all.
    seconds = {(path, nbytes): 1e-9 for path in paths for nbytes in (8, 1 << 22)}
    fitted = fit(
        seconds,
        lambda path, nbytes, figures: cost_model.expected(
            "all_reduce", path, nbytes, layout, figures
        ),
        CostParameters(),
        paths,
    )
    assert all(0 < value < float("inf") for value in asdict(fitted).values())
    assert fitted.native_start == CostParameters().native_start


def test_one_rank_has_nothing_to_measure(cache):
    comm = collectives.Communicator(run(1, lambda transport: transport)[0])
    assert "nothing is measured" in comm.tune()
    assert not cache.exists()


def test_tuning_between_threads(cache):
    """A transport without collectives of its own: only schedules."""

    def one_rank(transport):
        comm = collectives.Communicator(transport)
        text = comm.tune(save=False)
        return text, comm._engine.costs, comm.explain("all_reduce", 1 << 20)

    results = run(2, one_rank)
    assert results[0] == results[1]
    text, figures, explained = results[0]
    assert "schedule" in text
    assert "native" not in text
    assert figures.native_start == CostParameters().native_start
    assert explained.endswith("by parameters measured now")
    assert not cache.exists()


# On ranks under MPI


@pytest.fixture
def made(comm, monkeypatch, tmp_path):
    """Communicators of all ranks, with a cache of the test's own; closed at the end."""
    from mpi4py import MPI

    folder = comm.broadcast_object(str(tmp_path / "cache"))
    monkeypatch.setenv(parameters_file.CACHE_VARIABLE, folder)
    open_ones = []

    def make(**arguments):
        open_ones.append(collectives.Communicator(MPI.COMM_WORLD, **arguments))
        return open_ones[-1]

    yield make
    for each in open_ones:
        each.close()


def alike(comm, value):
    """The value, which is the same on all ranks."""
    values = comm.all_gather_object(value)
    assert values == [values[0]] * comm.size
    return value


def known(comm):
    """What the communicator reports to choose by."""
    return [alike(comm, comm.explain(name, 1 << 20)) for name in ("scan", "exscan")]


@pytest.mark.mpi
@pytest.mark.ranks(4)
def test_calls_between_nodes_go_by_them(made):
    part = made(node_of=[0, 0, 1, 1])
    assert part.explain("all_gather", 16 << 20).startswith("hierarchical runs")


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_all_ranks_choose_alike_after_tune(comm, made):
    tuned = made()
    assert "built-in parameters" in known(tuned)[0]
    text = alike(comm, tuned.tune())
    for word in ("schedule", "native", "shared", "reduction", "saved in"):
        assert word in text
    alike(comm, tuned._engine.costs)
    assert all("parameters measured now" in each for each in known(tuned))
    later = made()
    assert later._engine.costs == tuned._engine.costs
    assert all(
        f"by parameters from {tuning._key(tuned._engine).path}" in each for each in known(later)
    )
    array = np.arange(100_000.0)
    total = array * (comm.size * (comm.size + 1) / 2)
    np.testing.assert_array_equal(later.all_reduce(array * (comm.rank + 1)), total)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_tune_without_saving_leaves_no_file(comm, made):
    tuned = made()
    assert "not saved" in tuned.tune(save=False)
    assert "built-in parameters" in known(made())[0]


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_ranks_that_ask_for_different_tunings_are_told(comm, made):
    with pytest.raises(collectives.MismatchError, match="save"):
        made().tune(save=comm.rank == 0)


@pytest.mark.mpi
@pytest.mark.ranks(3)
@pytest.mark.parametrize("node_of", [[0, 1, 1], *slow([0, 0, 1], [0, 1, 2])])
def test_tune_between_nodes(comm, made, node_of):
    spread = made(node_of=node_of)
    text = alike(comm, spread.tune())
    assert f"{len(set(node_of))} nodes" in text
    # Shared memory within the nodes is part of what runs between them.
    assert ("shared" in text) == (len(set(node_of)) < 3)
    known(spread)
    array = np.arange(100_000.0)
    total = array * (comm.size * (comm.size + 1) / 2)
    np.testing.assert_array_equal(spread.all_reduce(array * (comm.rank + 1)), total)
    # Another layout has its own parameters.
    assert "built-in parameters" in known(made())[0]


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_what_was_looked_up_before_is_forgotten(comm, made, monkeypatch):
    """Of a dtype and size that are chosen by the model: it is cached by shape, and by bytes."""
    tuned = made()
    array = np.ones(1 << 10, np.float16)
    for kind in ("shared", "schedule"):
        monkeypatch.setattr(tuning, "parameters_for", lambda *_, kind=kind: preferring(kind))
        tuned.tune(save=False)
        for _ in range(2):
            tuned.all_reduce(array)
            assert (tuned._engine.recorder.entries()[-1][2] == "staged") == (kind == "shared")
            tuned.reduce(array)
            assert (tuned._engine.recorder.entries()[-1][2] == "staged") == (kind == "shared")


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_asynchronous_calls_go_by_the_same_figures(comm, made, monkeypatch):
    """From the first one after tune on: earlier ones may still be in progress.

    Small arrays would travel with the check, whatever the figures are.
    """
    for small in ("small_reduction", "exchanged_reduction"):
        monkeypatch.setattr(folds, small, lambda *_: None)
    tuned = made()
    kinds = ("native", "shared", "native")
    # Where Open MPI was loaded before us, asynchronous calls have no shared memory.
    unshared = "Open MPI" in comm._engine.transport.library
    messages = {"native", "ring"}  # MPI's own folds whole buffers on three ranks
    ways = {"native": {"native"}, "shared": messages if unshared else {"staged"}}
    handles = []
    for kind in kinds:
        monkeypatch.setattr(tuning, "parameters_for", lambda *_, kind=kind: preferring(kind))
        tuned.tune(save=False)
        handles += [tuned.all_reduce_async(np.ones(1 << 10)) for _ in range(2)]
    for handle in handles:
        np.testing.assert_array_equal(handle.wait(), np.full(1 << 10, comm.size))
    tuned.barrier()
    last = tuned.all_reduce_async(np.ones(4))
    last.wait()
    entries = tuned._duplicate.entries() or tuned._engine.recorder.entries()
    ran = [entry[2] for entry in entries if entry[1].nbytes == 1 << 13]
    assert len(ran) == 2 * len(kinds)
    for way, kind in zip(ran, [kind for kind in kinds for _ in range(2)], strict=True):
        assert way in ways[kind]


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_a_broken_file_is_ignored_by_all_ranks(comm, made, caplog):
    first = made()
    path = tuning._key(first._engine).path
    if comm.rank == 0:
        path.parent.mkdir(parents=True)
        path.write_text("{", encoding="utf-8")
    comm.barrier()
    assert "built-in parameters" in known(made())[0]
    assert (str(path) in caplog.text) == (comm.rank == 0)


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_the_tests_keep_to_a_cache_of_their_own(comm):
    assert not parameters_file.cache_folder().is_relative_to(Path.home() / ".cache")


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_small_arrays_are_told_to_go_their_own_way(comm):
    text = comm.explain("all_reduce", 64)
    assert text.startswith("slots runs, in one step")
    assert not comm.explain("all_reduce", 1 << 20).startswith("slots runs, in one step")
