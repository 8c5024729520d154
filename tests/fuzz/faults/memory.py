"""Arrays that change, overlap, or are freed."""

import gc

import numpy as np

from tests.fuzz.faults.registry import fault
from tests.fuzz.performing import content
from tests.fuzz.plans import REDUCING, Plan
from tests.fuzz.world import Outcome


@fault(6)
def freed(world):
    """Registered arrays that the ranks free at different times, and that outlive calls."""
    group, rng = world.group(), world.rng
    length = rng.choice((10, 5000, 70_000, 600_000))
    arrays = [group.comm.empty(length, "f8") for _ in range(rng.randrange(1, 4))]
    totals = []
    for index, array in enumerate(arrays):
        array[:] = world.rank + index
        totals.append(group.comm.all_reduce(array, out=array if index % 2 else None))
    want = sum(range(world.size))
    right = all((x == want + world.size * i).all() for i, x in enumerate(totals))
    del array
    if world.own.random() < 0.5:
        arrays.clear()
    else:
        arrays.pop()
    if world.own.random() < 0.1:
        gc.collect()
    world.expect(all(world.gather(right)), "a sum of registered arrays is wrong")
    world.valid_call(group, what="after registered arrays were freed")
    again = group.comm.empty(length, "f8")
    again[:] = world.rank
    total = group.comm.all_reduce(again)
    right = bool((total == want).all())
    kept = arrays and bool(
        (arrays[0] == (world.rank if totals[0] is not arrays[0] else want)).all()
    )
    world.expect(all(world.gather(right)), "a sum of a reused registered array is wrong")
    world.expect(all(world.gather(kept is not False)), "a registered array was overwritten")
    return 1


@fault(5)
def read_only_later(world):
    """Known arrays whose `out` becomes read-only on one rank, which then makes a valid call."""
    group, rng = world.group(), world.rng
    odd, before = rng.randrange(world.size), rng.randrange(12)
    many = rng.random() < 0.6
    shapes = [(50,), (3,), (4000,)] if many else [(rng.choice((3, 5000)),)]
    arrays = [np.full(shape, world.rank + 1.0) for shape in shapes]
    outs = [np.zeros(shape) for shape in shapes]
    want = sum(range(1, world.size + 1))

    def call():
        if many:
            group.comm.all_reduce_many(arrays, out=outs)
        else:
            group.comm.all_reduce(arrays[0], out=outs[0])

    def checked():
        for out in outs:
            out[:] = 0
        call()
        if not all((out == want).all() for out in outs):
            raise AssertionError(f"{[out[0] for out in outs]}, must be {want}")

    for _ in range(before):
        call()
    refused = Outcome()
    plan = Plan("barrier")
    if world.rank == odd:
        outs[-1].flags.writeable = False
        refused = world.attempt(group, plan, call)
        outs[-1].flags.writeable = True
    outcomes = world.gather((refused, world.attempt(group, plan, checked)))
    text = f"a read-only out after {before} calls, many={many}"
    world.expect(outcomes[odd][0].is_a(ValueError), text, [each for each, _ in outcomes])
    world.expect(all(each.right for _, each in outcomes), text, [each for _, each in outcomes])
    world.valid_call(group, what=f"after {text}")
    return 1


@fault(4)
def empty_slices(world):
    """Empty inputs and results that are slices of the other array."""
    group, rng = world.group(), world.rng
    width = rng.choice((1, 64, 4096))
    algorithm = rng.choice((None, None, "native"))
    rows = rng.randrange(world.size)
    comm = group.comm
    problem = ""
    for _ in range(6 if algorithm is None else 1):
        if rng.random() < 0.5:
            whole = np.full((rows, width), comm.rank + 1.0)
            mine = np.array_split(np.arange(rows), world.size)[comm.rank]
            start = mine[0] if len(mine) else rows
            out = whole[start : start + len(mine)]
            got = comm.reduce_scatter(whole, out=out, algorithm=algorithm)
            want = sum(range(1, world.size + 1))
        else:
            whole = np.zeros((1, width))
            holder = rng.randrange(world.size)
            give = np.full((1, width), 7.0) if comm.rank == holder else whole[1:1]
            got, want = comm.all_gather(give, out=whole, algorithm=algorithm), 7.0
        if not (got == want).all():
            problem = f"{got}, must be {want}"
    problems = world.gather(problem)
    world.expect(not any(problems), f"empty slices: {problems}")
    return 1


@fault(3)
def registered_and_ordinary(world):
    """Some ranks use registered arrays, the others ordinary ones, of the same values."""
    group, rng = world.group(), world.rng
    collective = rng.choice([each for each in REDUCING if each == "all_reduce"] + ["broadcast"])
    plan = Plan(
        collective, (rng.choice((3, 5000, 70_000)),), np.dtype("f8"), salt=rng.randrange(999)
    )
    registered = group.comm.empty(plan.shape, plan.dtype)
    outcomes = []
    for _ in range(3):
        array = registered if world.own.random() < 0.5 else np.empty(plan.shape)
        array[...] = content(plan, group.comm.rank, plan.shape)
        call = getattr(group.comm, collective)
        outcomes.append(world.attempt(group, plan, lambda call=call, array=array: call(array)))
    for each in zip(*world.gather(outcomes), strict=True):
        world.expect_right(plan, each, "registered arrays beside ordinary ones")
    return 1
