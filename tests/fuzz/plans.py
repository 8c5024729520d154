"""Plans of calls, drawn from a generator that has the same state on all ranks."""

from dataclasses import dataclass, replace

import numpy as np

from collectives import algorithms
from tests.collectives.oracle import BITWISE, DTYPES, OPS, defined

SCANS = ("scan", "exscan")
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "all_reduce_many", *SCANS)
ROOTED = ("reduce", "broadcast", "gather", "scatter", "broadcast_object")
COLLECTIVES = (
    *("all_reduce", "all_reduce", "all_reduce", "reduce", "reduce_scatter", "all_reduce_many"),
    *("broadcast", "all_gather", "gather", "scatter", "all_to_all", "barrier"),
    *SCANS,
    *("broadcast_object", "all_gather_object"),
)
ASYNCHRONOUS = tuple(each for each in COLLECTIVES if not each.endswith("_object"))
ALONG_AXES = ("all_gather", "gather", "scatter", "reduce_scatter")
WITH_OUT = ("all_reduce", "reduce_scatter", "all_gather", "all_reduce_many", *SCANS)
LENGTHS = (0, 1, 2, 3, 7, 64, 1000, 5000, 40_000)
LARGE = 300_000
FLOAT = np.dtype("f4")
PLACES = ("new", "in place", "out", "slice")
LAYOUTS = ("plain", "plain", "strided", "fortran", "registered")


@dataclass(frozen=True)
class Plan:
    """One call. `salt` makes the values of each call different from those of the previous ones."""

    collective: str
    shape: tuple = (3,)
    dtype: np.dtype = FLOAT
    op: str = "sum"
    root: int = 0
    axis: int = 0
    algorithm: str | None = None
    place: str = "new"
    layout: str = "plain"
    asynchronous: bool = False
    nans: bool = False
    salt: int = 0

    @property
    def reduces(self):
        """Whether elements are reduced."""
        return self.collective in REDUCING

    @property
    def shows(self):
        """The plan as one line, for reports."""
        kind = f"{self.dtype.name}{list(self.shape)}, {self.op}, root={self.root}"
        flags = f"{self.place}, {self.layout}{', async' * self.asynchronous}{', nan' * self.nans}"
        return f"{self.collective}({kind}, axis={self.axis}, {self.algorithm}; {flags})"


def draw(rng, size):
    """Any valid call."""
    asynchronous = rng.random() < 0.15
    collective = rng.choice(ASYNCHRONOUS if asynchronous else COLLECTIVES)
    dtype = rng.choice(DTYPES)
    op = rng.choice(_ops_of(dtype, collective))
    shape = draw_shape(rng)
    named = (*algorithms.names(collective), *(["native"] if collective not in SCANS else []))
    return Plan(
        collective,
        shape,
        dtype,
        op,
        root=rng.randrange(size),
        axis=rng.randrange(len(shape)) if collective in ALONG_AXES else 0,
        algorithm=rng.choice(named) if takes_algorithm(collective, rng) else None,
        place=rng.choice(PLACES) if collective in WITH_OUT else "new",
        layout=rng.choice(LAYOUTS),
        asynchronous=asynchronous,
        nans=dtype.kind in "fc" and rng.random() < 0.1,
        salt=rng.randrange(1000),
    )


def draw_shape(rng):
    """One to three axes; large arrays are rare."""
    length = LARGE if rng.random() < 0.02 else rng.choice(LENGTHS)
    if rng.random() < 0.6:
        return (length,)
    rows = rng.choice((1, 2, 5))
    return (rows, max(1, length // rows)) if rng.random() < 0.7 else (rows, 1, max(1, length // 7))


def takes_algorithm(collective, rng):
    """Whether an algorithm is forced: sometimes, where there is a choice."""
    return collective in algorithms_of() and rng.random() < 0.25


def algorithms_of():
    """The collectives that have schedules."""
    return {collective for collective, _ in algorithms.pairs()}


def deviate(rng, plan, size):
    """A valid call that differs from the plan in one property that the ranks must agree on."""
    fields = ["collective"]
    if plan.reduces:
        fields += ["op", "dtype", "shape"]
    if plan.collective in ("broadcast", "all_gather", "gather"):
        fields += ["dtype", "shape"]
    if plan.collective in ROOTED and size > 1:
        fields += ["root"]
    if plan.collective in algorithms_of():
        fields += ["algorithm"]
    plain = replace(plan, layout="plain", place="new", nans=False)
    return DEVIATIONS[rng.choice(fields)](rng, plain, size)


def _collective(rng, plan, size):
    offered = ASYNCHRONOUS if plan.asynchronous else sorted(set(COLLECTIVES))
    other = rng.choice([each for each in offered if each != plan.collective])
    op = "sum" if plan.dtype.kind == "c" or (other in SCANS and plan.op == "mean") else plan.op
    return replace(plan, collective=other, algorithm=None, axis=0, op=op)


def _ops_of(dtype, collective):
    offered = [op for op in (*OPS, *BITWISE) if defined(op, dtype)]
    return [op for op in offered if op != "mean" or collective not in SCANS]


def _op(rng, plan, size):
    return replace(
        plan,
        op=rng.choice([op for op in _ops_of(plan.dtype, plan.collective) if op != plan.op]),
    )


def _dtype(rng, plan, size):
    offered = [each for each in DTYPES if each != plan.dtype and defined(plan.op, each)]
    return replace(plan, dtype=rng.choice(offered))


def _shape(rng, plan, size):
    return replace(plan, shape=(*plan.shape, 3))


def _root(rng, plan, size):
    return replace(plan, root=(plan.root + rng.randrange(1, size)) % size)


def _algorithm(rng, plan, size):
    native = [] if plan.collective in SCANS else ["native"]
    names = (*algorithms.names(plan.collective), *native, None)
    return replace(plan, algorithm=rng.choice([name for name in names if name != plan.algorithm]))


DEVIATIONS = {
    "collective": _collective,
    "op": _op,
    "dtype": _dtype,
    "shape": _shape,
    "root": _root,
    "algorithm": _algorithm,
}
