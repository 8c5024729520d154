"""Messages, bytes and seconds equal the textbook's formulas."""

import math

import pytest

import collectives
from collectives import Link
from tests.collectives.oracle import traffic

# Every size divides this, so that the formulas hold to the byte.
NBYTES = math.lcm(*range(1, 17))
SIZES = [2, 3, 4, 5, 6, 7, 8, 12, 16]


def log(size):
    """⌈log₂ size⌉."""
    return (size - 1).bit_length()


def power(size):
    """The largest power of two that is at most `size`."""
    return 1 << (size.bit_length() - 1)


def rabenseifner(size, doubled):
    """Of the busiest rank: one that communicates for a pair, where there are pairs."""
    logarithm, pairs = int(math.log2(power(size))), size - power(size)
    exchanged = NBYTES * (size - 1) // size
    if not pairs:
        return (logarithm * (1 + doubled), exchanged * (1 + doubled))
    return None


# (collective, algorithm): messages and bytes of the rank that sends most of either.
FORMULAS = {
    ("all_reduce", "ring"): lambda p: (2 * (p - 1), 2 * (p - 1) * NBYTES // p),
    ("all_reduce", "doubling"): lambda p: (
        int(math.log2(power(p))) + (power(p) < p),
        NBYTES * (int(math.log2(power(p))) + (power(p) < p)),
    ),
    ("all_reduce", "rabenseifner"): lambda p: rabenseifner(p, True),
    ("all_reduce", "circulant"): lambda p: (2 * log(p), 2 * (p - 1) * NBYTES // p),
    ("reduce_scatter", "ring"): lambda p: (p - 1, (p - 1) * NBYTES // p),
    ("reduce_scatter", "rabenseifner"): lambda p: rabenseifner(p, False),
    ("reduce_scatter", "circulant"): lambda p: (log(p), (p - 1) * NBYTES // p),
    ("all_gather", "ring"): lambda p: (p - 1, (p - 1) * NBYTES // p),
    ("all_gather", "doubling"): lambda p: (log(p), (p - 1) * NBYTES // p),
    ("broadcast", "binomial"): lambda p: (log(p), log(p) * NBYTES),
    # The root sends most bytes: the scatter's (p−1)/p and the ring's.
    ("broadcast", "scatter_all_gather"): lambda p: (
        log(p) + p - 1,
        2 * (p - 1) * NBYTES // p,
    ),
    ("reduce", "binomial"): lambda p: (1, NBYTES),
    # The ring's share, and the half of the result that the root's last child sends.
    ("reduce", "reduce_scatter_gather"): lambda p: (
        p,
        (p - 1 + max(min(d, p - d) for d in _powers(p))) * NBYTES // p,
    ),
    ("gather", "binomial"): lambda p: (1, max(min(d, p - d) for d in _powers(p)) * NBYTES // p),
    ("scatter", "binomial"): lambda p: (log(p), (p - 1) * NBYTES // p),
    ("all_to_all", "pairwise"): lambda p: (p - 1, (p - 1) * NBYTES // p),
    ("scan", "doubling"): lambda p: (log(p), log(p) * NBYTES),
    # The inputs move on by one rank first.
    ("exscan", "doubling"): lambda p: (1 + log(p - 1), (1 + log(p - 1)) * NBYTES),
}


def _powers(size):
    return [1 << bit for bit in range(log(size))]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("pair", FORMULAS)
def test_traffic_equals_the_textbook(pair, size):
    formula = FORMULAS[pair](size)
    count, total = traffic(*pair, size, NBYTES)
    if formula is not None:
        assert (count.max(), total.max()) == formula
    else:
        check_rabenseifner_in_pairs(pair, size, list(zip(count, total, strict=True)))


def check_rabenseifner_in_pairs(pair, size, sent):
    """Rank 0 communicates for two: it ends with two chunks, and sends one, or all, to rank 1."""
    speakers = power(size)
    logarithm, pairs, chunk = int(math.log2(speakers)), size - speakers, NBYTES // size
    halved = size - 2
    doubled = sum(distance + min(distance, pairs) for distance in _powers(speakers))
    expected = {
        "reduce_scatter": (logarithm + 1, (halved + 1) * chunk),
        "all_reduce": (2 * logarithm + 1, (halved + doubled + size) * chunk),
    }
    assert sent[:2] == [expected[pair[0]], (1, NBYTES)]


@pytest.mark.parametrize("size", SIZES)
def test_ring_estimate_equals_its_closed_form(size):
    link = Link(latency=3e-6, bandwidth=2e9, reduction=5e9)
    share = NBYTES / size
    rounds = size - 1
    expected = (
        2 * rounds * (link.latency + share / link.bandwidth) + rounds * share / link.reduction
    )
    measured = collectives.estimate("all_reduce", "ring", size, NBYTES, link)
    assert measured == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_doubling_estimate_equals_its_closed_form(size):
    link = Link(latency=3e-6, bandwidth=2e9, reduction=5e9)
    each = link.latency + NBYTES / link.bandwidth + NBYTES / link.reduction
    measured = collectives.estimate("all_reduce", "doubling", size, NBYTES, link)
    assert measured == pytest.approx(log(size) * each, rel=1e-12)


def test_latency_decides_for_small_and_bandwidth_for_large_buffers():
    link = Link(latency=1e-5, bandwidth=1e10, reduction=1e11)

    def seconds(algorithm, nbytes):
        return collectives.estimate("all_reduce", algorithm, 16, nbytes, link)

    assert seconds("doubling", 8) < seconds("ring", 8)
    assert seconds("ring", 1 << 28) < seconds("doubling", 1 << 28)


@pytest.mark.parametrize(("size", "nbytes"), [(0, 8), (-1, 8), (4, -8)])
def test_impossible_sizes_are_refused(size, nbytes):
    with pytest.raises(ValueError, match=r"size=|nbytes="):
        collectives.estimate("all_reduce", "ring", size, nbytes, Link(1, 1, 1))


@pytest.mark.parametrize("size", ["4", 4.0, None])
def test_numbers_that_are_no_integers_are_refused(size):
    for call in (
        lambda: collectives.estimate("all_reduce", "ring", size, 8, Link(1, 1, 1)),
        lambda: collectives.estimate("all_reduce", "ring", 4, size, Link(1, 1, 1)),
        lambda: collectives.verify("all_reduce", "ring", size),
    ):
        with pytest.raises(TypeError, match=r"(size|nbytes)=.*: must be an integer"):
            call()


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="algorithm='tree'"):
        collectives.estimate("all_reduce", "tree", 4, 8, Link(1, 1, 1))
