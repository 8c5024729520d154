"""The formulas against traffic that is counted event by event."""

import pytest

from bench import traffic_model as model

MANY = 10**9


def load_and_store(ranks, *, inputs_read, results_stored, copied=0):
    """Bytes per byte of the vector, from counts of slices of one rank-th of it."""
    return (inputs_read + results_stored + 2 * copied) / ranks


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8, 64])
def test_each_formula_counts_what_the_scheme_does(ranks):
    others = ranks - 1
    fold = {"inputs_read": ranks, "results_stored": 1}
    near = pytest.approx
    to_all = {"inputs_read": ranks, "results_stored": ranks}
    assert model.registered() == near(load_and_store(ranks, **to_all))
    # All slices but the own one are copied in; the whole result is copied out.
    assert model.staged(ranks) == near(load_and_store(ranks, **fold, copied=others + ranks))
    # A ring reduces two slices into one in each of p - 1 steps and moves one in each of 2 (p - 1).
    steps = {"inputs_read": 2 * others, "results_stored": others}
    for copies, ring in ((1, model.ring_single_copy), (2, model.ring_two_copies)):
        moved = load_and_store(ranks, **steps, copied=copies * 2 * others)
        assert ring(ranks, in_place=True) == near(moved)
        assert ring(ranks, in_place=False) == near(moved + 2)


# At 2, 8 and very many ranks, as derived by hand.
TABLE = {
    model.staged: (4.5, 4.875, 5),
    lambda ranks: model.ring_single_copy(ranks, in_place=True): (3.5, 6.125, 7),
    lambda ranks: model.ring_two_copies(ranks, in_place=True): (5.5, 9.625, 11),
}


@pytest.mark.parametrize(("formula", "figures"), TABLE.items())
def test_the_figures_at_some_ranks(formula, figures):
    assert [formula(ranks) for ranks in (2, 8, MANY)] == pytest.approx(figures)


def test_what_our_own_paths_touch():
    assert model.touched(2, is_registered=True) == model.touched(8, is_registered=True) == 2
    # A copy into shared memory, and a reduction of the own array with the other's copy.
    assert model.touched(2, is_registered=False) == 5
    assert model.touched(4, is_registered=False) == 4.75


@pytest.mark.parametrize(
    ("ranks", "is_registered", "in_place", "low", "high"),
    [
        (2, True, True, 1.75, 2.75),
        (2, True, False, 2.75, 3.75),
        (2, False, True, 0.7, 1.1),
        (2, False, False, 1.1, 1.5),
        (8, True, True, 3.0625, 4.8125),
        (8, False, False, 8.125 / 4.875, 11.625 / 4.875),
    ],
)
def test_ratios(ranks, is_registered, in_place, low, high):
    found = model.ratio(ranks, is_registered=is_registered, in_place=in_place)
    assert found == pytest.approx((low, high))
