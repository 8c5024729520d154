"""The required result of each collective, against loops over Python numbers; busbw factors."""

import math

import numpy as np
import pytest

from bench.cases import CASES
from bench.problem import OPS, Problem, count_wrong

FACTORS = {
    # The table of nccl-tests' doc/PERFORMANCE.md, at 2, 4 and 8 ranks.
    "all_reduce": (1, 1.5, 1.75),
    "all_reduce_many": (1, 1.5, 1.75),
    "persistent_all_reduce_many": (1, 1.5, 1.75),
    "reduce_scatter": (0.5, 0.75, 0.875),
    "all_gather": (0.5, 0.75, 0.875),
    "gather": (0.5, 0.75, 0.875),
    "scatter": (0.5, 0.75, 0.875),
    "all_to_all": (0.5, 0.75, 0.875),
    "broadcast": (1, 1, 1),
    "reduce": (1, 1, 1),
    "scan": (1, 1, 1),
    "exscan": (1, 1, 1),
    "barrier": (1, 1, 1),
}
PYTHON_FOLDS = {
    "sum": sum,
    "mean": lambda values: sum(values) / len(values),
    "min": min,
    "max": max,
    "product": math.prod,
}


@pytest.mark.parametrize("name", CASES)
def test_busbw_factors(name):
    assert tuple(CASES[name].factor(ranks) for ranks in (2, 4, 8)) == FACTORS[name]


def cut(values, ranks):
    block = len(values) // ranks
    return [values[start : start + block] for start in range(0, len(values), block)]


def joined(lists):
    return [value for values in lists for value in values]


def what_must_come(name, sent, fold, rank, root):
    """The semantics of MPI 4.1, chapter 6, on lists; None where the rank has no result."""
    ranks = len(sent)
    if name == "broadcast":
        return sent[root]
    if name == "scatter":
        return cut(sent[root], ranks)[rank]
    if name == "all_to_all":
        return joined(cut(values, ranks)[rank] for values in sent)
    if name in ("gather", "all_gather"):
        return joined(sent) if name == "all_gather" or rank == root else None
    if name in ("scan", "exscan"):
        sent = sent[: rank + (name == "scan")]
        return [fold(values) for values in zip(*sent, strict=True)] or None
    folded = [fold(values) for values in zip(*sent, strict=True)]
    if name == "reduce_scatter":
        return cut(folded, ranks)[rank]
    return folded if name != "reduce" or rank == root else None


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.has_bytes])
def test_expected_is_what_the_collective_means(name, op, ranks):
    case = CASES[name]
    problem = Problem(ranks, 300 * ranks, np.dtype(np.float64), op, root=1, tensors=2)
    given = [case.given(problem, rank) for rank in range(ranks)]
    sent = [None if array is None else array.tolist() for array in given]
    for rank in range(ranks):
        expected = case.expected(problem, rank)
        came = what_must_come(name, sent, PYTHON_FOLDS[op], rank, root=1)
        assert came == (None if expected is None else expected.tolist())


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "float16", "bfloat16", "complex64"])
def test_sums_of_the_smallest_dtypes_are_exact(dtype):
    problem = Problem(ranks=8, count=300, dtype=np.dtype(dtype))
    exact = sum(problem.values(rank, 300).astype(np.complex128).real for rank in range(8))
    folded = problem.folded(300)
    assert folded.dtype == problem.dtype
    expected = exact > 0 if dtype == "bool" else exact
    assert folded.astype(np.complex128).real.tolist() == expected.tolist()


def test_the_mean_of_integers_is_float64():
    problem = Problem(ranks=2, count=4, dtype=np.dtype(np.int32), op="mean")
    assert problem.folded(4).dtype == np.float64
    assert True not in CASES["all_reduce"].forms(problem)


def test_ranks_and_positions_give_different_values():
    problem = Problem(ranks=2, count=1024, dtype=np.dtype(np.float32))
    first, second = (problem.values(rank, 1024) for rank in range(2))
    assert (first != second).any()
    for distance in (1, 2, 4, 64, 512):
        assert (first[distance:] != first[:-distance]).any()


def test_wrong_elements_are_counted():
    expected = np.arange(6.0)
    assert count_wrong(expected.copy(), expected) == 0
    assert count_wrong([expected[:2], expected[2:]], expected) == 0
    assert count_wrong(expected + np.array([0, 1, 0, np.nan, 0, 0]), expected) == 2
    assert count_wrong(expected[:4], expected) == 6
    assert count_wrong(None, expected) == 6
    assert count_wrong(expected, None) == 0
