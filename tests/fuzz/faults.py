"""The faults that are injected, and what must come of each.

Each is a function of the world. It returns how many faults it injected, and raises DeviationError
where something else came than must come.
"""

import gc
import os
import threading
import time
from dataclasses import dataclass, replace

import numpy as np

from collectives import (
    CollectiveMismatchError,
    DeadlineExceededError,
    MismatchError,
    RankFailedError,
)
from tests.fuzz.interrupting import ALARMS, alarm_after, raising_at_line, stop_for
from tests.fuzz.performing import content
from tests.fuzz.plans import REDUCING, Plan, deviate, draw
from tests.fuzz.world import PATIENT, SHORT, Outcome

STOP_SECONDS = 0.05
FAULTS = {}


def fault(weight, *, least=1):
    """Register a kind of fault: how often it is drawn, and on how many ranks it makes sense."""

    def register(function):
        FAULTS[function.__name__] = (function, weight, least)
        return function

    return register


@fault(20)
def none(world):
    """Valid calls."""
    group = world.group()
    for _ in range(world.rng.randrange(1, 5)):
        world.valid_call(group)
    return 0


BAD_ARGUMENTS = (
    lambda comm: comm.all_reduce(np.ones(3), "nonsense"),
    lambda comm: comm.all_reduce(np.ones(3), out=np.ones(4)),
    lambda comm: comm.all_reduce(np.ones(3), out=_read_only(3)),
    lambda comm: comm.all_reduce(np.ones(3), algorithm="nonsense"),
    lambda comm: comm.all_reduce(np.array([None])),
    lambda comm: comm.all_reduce(np.ones(3, "c8"), "max"),
    lambda comm: comm.all_reduce_async(np.ones(3), out=np.ones(3, "i4")),
    lambda comm: comm.broadcast(np.ones(3), root=comm.size),
    lambda comm: comm.broadcast(_read_only(3), root=(comm.rank + 1) % comm.size),
    lambda comm: comm.reduce(np.ones(3), root=-1),
    lambda comm: comm.all_gather(np.ones((2, 3)), axis=2),
    lambda comm: comm.all_gather(np.ones((2, 3)), out=_read_only(3)),
    lambda comm: comm.reduce_scatter(np.ones((2, 3)), axis="0"),
    lambda comm: comm.all_to_all([np.ones(3)] * (comm.size + 1)),
    lambda comm: comm.all_reduce_many([np.ones(3), None]),
    lambda comm: comm.all_reduce_many([np.ones(3)], out=[]),
    lambda comm: comm.all_reduce_many([np.ones(3)], out=[_read_only(3)]),
    lambda comm: comm.all_reduce_many([np.ones(3)], bucket_bytes=-1),
    lambda comm: comm.send(np.ones(3), comm.rank),
    lambda comm: comm.recv(_read_only(3), (comm.rank + 1) % comm.size, tag=-1),
    lambda comm: comm.empty(-1),
    lambda comm: comm.split("red"),
)


def _read_only(length):
    array = np.ones(length)
    array.flags.writeable = False
    return array


@dataclass
class _Turn:
    """One call of a burst."""

    plan: Plan
    others: dict[int, Plan]
    """The ranks that make another call: all get a MismatchError."""
    refused: dict[int, int]
    """The ranks that first make a call that is refused at once, by its number."""

    @property
    def shows(self):
        deviating = [f"rank {rank} {plan.shows}" for rank, plan in self.others.items()]
        refused = [f"rank {rank} refused {index}" for rank, index in self.refused.items()]
        return "; ".join([self.plan.shows, *deviating, *refused])


def _draw_turn(rng, size):
    ranks = range(size)
    turn = _Turn(draw(rng, size), {}, {})
    if size > 1 and rng.random() < 0.6:
        odd = rng.sample(ranks, rng.randrange(1, size))
        turn.others = {rank: deviate(rng, turn.plan, size) for rank in odd}
    if rng.random() < 0.3:
        odd = rng.sample(ranks, rng.randrange(1, size + 1))
        turn.refused = {rank: rng.randrange(len(BAD_ARGUMENTS)) for rank in odd}
    return turn


@fault(60)
def other_arguments(world):
    """A burst of calls: some ranks make other ones, or such as are refused at once.

    Other calls give the same MismatchError on all ranks. A refusal is a ValueError or TypeError on
    its rank, which then makes the call. The next call is right.
    """
    group = world.group()
    turns = [_draw_turn(world.rng, world.size) for _ in range(world.rng.randrange(1, 9))]
    own = [_take_turn(world, group, turn) for turn in turns]
    for turn, each in zip(turns, zip(*world.gather(own), strict=True), strict=True):
        refusals, outcomes = zip(*each, strict=True)
        for rank in turn.refused if world.size > 1 else ():
            kinds = refusals[rank].is_a(ValueError, TypeError)
            world.expect(kinds, f"a bad argument is accepted: {turn.shows}", refusals)
        if not turn.others:
            world.expect_right(turn.plan, outcomes, turn.shows)
            continue
        mismatched = all(each.is_a(MismatchError) for each in outcomes)
        world.expect(mismatched, f"no MismatchError on all: {turn.shows}", outcomes)
        texts = {each.text for each in outcomes}
        world.expect(len(texts) == 1, f"different texts: {turn.shows}", outcomes)
    world.valid_call(group, what="after a burst")
    return sum(len(turn.others) + len(turn.refused) for turn in turns)


def _take_turn(world, group, turn):
    call = world.ready(group, turn.plan, on_this_rank=turn.others.get(world.rank))
    refusal, index = Outcome(), turn.refused.get(world.rank)
    # On one rank the neighbour that some of them name is the rank itself.
    if index is not None and world.size > 1:
        refusal = world.attempt(group, turn.plan, lambda: BAD_ARGUMENTS[index](group.comm))
    return refusal, world.attempt(group, turn.plan, call)


@fault(6, least=2)
def skipped(world):
    """Some ranks skip a call: the others' error names them; the next call is right."""
    group, rng = world.group(), world.rng
    plan = draw(rng, world.size)
    odd = rng.sample(range(world.size), rng.randrange(1, world.size))
    group.comm.deadline = SHORT
    call = world.ready(group, plan)
    outcome = Outcome() if world.rank in odd else world.attempt(group, plan, call)
    outcomes = world.gather(outcome)
    waited = [each for rank, each in enumerate(outcomes) if rank not in odd]
    text = f"{plan.shows}, which ranks {sorted(group.numbers[rank] for rank in odd)} skip"
    world.expect(all(each.is_a(DeadlineExceededError) for each in waited), text, outcomes)
    late = max(each.start for each in waited) - min(each.start for each in waited) > SHORT / 2
    absent = {group.numbers[rank] for rank in odd}
    named = all(set(each.absent) == absent or not each.absent for each in waited)
    some = any(each.absent for each in waited)
    # Between nodes a rank may know no more than that its leader waits for another node.
    covered = all(set(each.absent) & absent or not each.absent for each in waited)
    exact = group.comm.nodes == 1
    world.excused += late
    world.expect(late or ((named if exact else covered) and some), f"wrong names: {text}", outcomes)
    world.valid_call(group, what=f"after {text}")
    return len(odd)


@fault(5, least=2)
def late(world):
    """One rank comes late, but before the deadline: nothing but a delay."""
    group, rng = world.group(), world.rng
    plan, odd = draw(rng, world.size), rng.randrange(world.size)
    call = world.ready(group, plan)
    if world.rank == odd:
        time.sleep(world.own.random() * SHORT / 2)
    outcomes = world.gather(world.attempt(group, plan, call))
    world.expect_right(plan, outcomes, "a call that one rank makes late")
    return 1


@fault(4, least=2)
def too_late(world):
    """One rank comes after the others' deadline, and they make the call again: it is right."""
    group, rng = world.group(), world.rng
    plan, odd = draw(rng, world.size), rng.randrange(world.size)
    group.comm.deadline = SHORT
    call = world.ready(group, plan)
    first = Outcome()
    if world.rank == odd:
        time.sleep(SHORT * (1 + world.own.random()))
    else:
        first = world.attempt(group, plan, call)
    group.comm.deadline = PATIENT
    # A rank that was held up may have made the call with the late one at the first attempt.
    again = first.text != "" or world.rank == odd
    second = world.attempt(group, plan, world.ready(group, plan)) if again else first
    outcomes = world.gather((first, second))
    errors = [each for rank, (each, _) in enumerate(outcomes) if rank != odd]
    kinds = all(each.right or each.is_a(DeadlineExceededError) for each in errors)
    world.expect(kinds, f"too late: {plan.shows}", [each for each, _ in outcomes])
    world.expect_right(plan, [each for _, each in outcomes], "the call, made again")
    world.valid_call(group, what="after a rank that came too late")
    return 1


@fault(6, least=2)
def doubled(world):
    """One rank makes a call twice: its second one is compared with the others' next."""
    group, rng = world.group(), world.rng
    plan, odd = draw(rng, world.size), rng.randrange(world.size)
    plan = replace(plan, asynchronous=False)
    following = deviate(rng, plan, world.size)
    first = world.attempt(group, plan, world.ready(group, plan))
    second_plan = plan if world.rank == odd else following
    call = world.ready(group, replace(plan, layout="plain"), on_this_rank=second_plan)
    second = world.attempt(group, plan, call)
    outcomes = world.gather((first, second))
    world.expect_right(plan, [each for each, _ in outcomes], "the call that is doubled")
    seconds = [each for _, each in outcomes]
    text = f"{plan.shows} twice on rank {odd}, against {following.shows}"
    world.expect(all(each.is_a(MismatchError) for each in seconds), text, seconds)
    world.valid_call(group, what=f"after {text}")
    return 1


def _interrupted(world, interrupt, what):
    """One rank's call is interrupted by an exception, and made again: never a wrong result.

    Either it had not begun, so that the second attempt is the call itself; or the communicator is
    broken, and every rank gets an error by its deadline.
    """
    group, rng = world.group(), world.rng
    plan, odd = world.small(draw(rng, world.size)), rng.randrange(world.size)
    for _ in range(rng.randrange(3)):
        world.valid_call(group, plan, what="before an interruption")
    group.comm.deadline = 2 * SHORT
    call = world.ready(group, plan)
    if world.rank == odd:
        first = world.attempt(group, plan, lambda: interrupt(call))
        again = first.is_a(*ALARMS)
        second = world.attempt(group, plan, world.ready(group, plan)) if again else first
    else:
        first = second = world.attempt(group, plan, call)
    outcomes = world.gather((first, second, group.broken))
    first, second = [each for each, *_ in outcomes], [each for _, each, _ in outcomes]
    broken = [each for *_, each in outcomes]
    text = f"{what} on rank {odd}: {plan.shows}: {' '.join(first[odd].text.split())[:200]}"
    world.expect(not any(each.problem for each in second), f"wrong after {text}", second)
    if not any(broken):
        world.expect_right(plan, second, f"not broken, but not right after {text}")
        world.valid_call(group, what=f"after {text}")
        return int(first[odd].text != "")
    _refuses(world, group, text)
    return 1


def _refuses(world, group, text):
    """A broken communicator gives no rank a result any more."""
    plan = Plan("all_reduce", (5,), np.dtype("f8"), salt=world.step % 1000)
    outcomes = world.gather(world.attempt(group, plan, world.ready(group, plan)))
    world.expect(not any(each.right for each in outcomes), f"a result after {text}", outcomes)
    world.expect(not any(each.problem for each in outcomes), f"wrong after {text}", outcomes)
    if group.comm._engine.broken is None:
        group.comm._engine.broken = RankFailedError("another rank's communicator is broken")


@fault(4, least=2)
def exception_at_a_line(world):
    """An exception at any line of the product."""
    line, kind = int(2 ** world.rng.uniform(0, 9)), world.rng.choice(ALARMS)

    def interrupt(call):
        with raising_at_line(line, kind):
            return call()

    return _interrupted(world, interrupt, f"{kind.__name__} at line {line}")


@fault(4, least=2)
def exception_from_a_signal(world):
    """An exception from a signal's handler at any moment of a call."""
    seconds, kind = 10 ** world.rng.uniform(-6, -2.5), world.rng.choice(ALARMS)

    def interrupt(call):
        with alarm_after(seconds, kind):
            return call()

    return _interrupted(world, interrupt, f"{kind.__name__} after {seconds * 1e6:.0f} µs")


@fault(8)
def harmless_signal(world):
    """A signal whose handler returns: nothing."""
    group = world.group()
    plan = draw(world.rng, world.size)
    call = world.ready(group, plan)
    with alarm_after(10 ** world.own.uniform(-6, -3)):
        outcome = world.attempt(group, plan, call)
    world.expect_right(plan, world.gather(outcome), "a call with a signal in it")
    return world.size


@fault(8)
def dropped_handles(world):
    """Asynchronous calls that nobody waits for: they are made, and the next ones are right."""
    group, rng = world.group(), world.rng
    count = rng.randrange(1, 6)
    for index in range(count):
        group.comm.all_reduce_async(np.full(rng.choice((1, 100, 20_000)), float(index)))
    world.valid_call(group, what="after dropped handles")
    plan = replace(draw(rng, world.size), collective="all_reduce", asynchronous=True, op="sum")
    plan = replace(plan, algorithm=None, place="new", axis=0)
    world.valid_call(group, plan, what="an asynchronous call after dropped handles")
    return count


@fault(2, least=2)
def stop(world):
    """A rank is stopped for a while: nothing but a delay."""
    group, rng = world.group(), world.rng
    stopped, after = rng.randrange(world.size), rng.random() * 2e-3
    plan = draw(rng, world.size)
    call = world.ready(group, plan)
    stopper = (stopped + 1) % world.size
    thread = stop_for(world.pids[stopped], after, STOP_SECONDS) if world.rank == stopper else None
    outcomes = [world.attempt(group, plan, call)]
    for _ in range(3):
        outcomes.append(world.attempt(group, plan, world.ready(group, plan)))
    if thread is not None:
        thread.join()
    for each in zip(*world.gather(outcomes), strict=True):
        world.expect_right(plan, each, "calls while a rank is stopped")
    return 1


@fault(5)
def threads(world):
    """Two threads, each with a communicator of its own, at the same time."""
    groups = [world.group("world"), world.group("nodes")]
    plans = [[draw(world.rng, world.size) for _ in range(3)] for _ in groups]
    results = [[], []]

    def run(index):
        for plan in plans[index]:
            plan = replace(plan, layout="plain")
            group = groups[index]
            results[index].append(world.attempt(group, plan, world.ready(group, plan)))

    workers = [threading.Thread(target=run, args=(index,)) for index in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    every = world.gather(results)
    for index in (0, 1):
        for place, plan in enumerate(plans[index]):
            outcomes = [each[index][place] for each in every]
            world.expect_right(plan, outcomes, f"call {place} of thread {index}")
    return 2


@fault(3)
def shared_by_threads(world):
    """Two threads that make the same call on one communicator: one after the other."""
    group = world.group()
    plan = replace(world.small(draw(world.rng, world.size)), layout="plain", place="new")
    if plan.collective == "all_reduce_many":
        plan = replace(plan, collective="all_reduce")
    calls = [world.ready(group, plan) for _ in range(2)]
    results = [Outcome(text="never ran")] * 2

    def run(index):
        results[index] = world.attempt(group, plan, calls[index])

    workers = [threading.Thread(target=run, args=(index,)) for index in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for each in zip(*world.gather(results), strict=True):
        world.expect_right(plan, each, "a call of two threads")
    return 1


@fault(1)
def fork(world):
    """A forked child is refused; the parent goes on."""
    group = world.group()
    plan = draw(world.rng, world.size)
    call = world.ready(group, plan)
    child = os.fork()
    if child == 0:
        refused = False
        try:
            group.comm.all_reduce(np.ones(2))
        except RuntimeError:
            refused = True
        finally:
            os._exit(0 if refused else 3)
    _, status = os.waitpid(child, 0)
    outcome = world.attempt(group, plan, call)
    outcomes = world.gather((status, outcome))
    statuses = [each for each, _ in outcomes]
    world.expect(not any(statuses), f"a forked child was not refused: {statuses}")
    world.expect_right(plan, [each for _, each in outcomes], "a call after a fork")
    return world.size


@fault(6)
def freed(world):
    """Registered arrays that the ranks let go of at different times, and that outlive calls."""
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


@fault(4, least=2)
def late_message(world):
    """A recv that exceeds its deadline takes nothing from the next one."""
    group, rng = world.group(), world.rng
    source, target = rng.sample(range(world.size), 2)
    comm, tag = group.comm, rng.randrange(3)
    wanted = [np.full(rng.choice((1, 3, 9000)), float(rng.randrange(1000))) for _ in range(2)]
    outcome, problem = Outcome(), ""
    if world.rank == target:
        comm.deadline = 0.02
        room = np.zeros(rng.choice((1, 3, 9000)))
        outcome = world.attempt(
            group, Plan("barrier"), lambda: comm.recv(room, group.numbers[source], tag)
        )
        comm.deadline = PATIENT
    first = world.gather(outcome)
    timed_out = first[target].is_a(DeadlineExceededError)
    world.expect(timed_out, "a recv without a sender", first)
    if world.rank == source:
        for each in wanted:
            comm.send(each, group.numbers[target], tag)
    if world.rank == target:
        for each in wanted:
            got = comm.recv(np.zeros(len(each)), group.numbers[source], tag)
            if not (got == each).all():
                problem = f"received {got[0]}, sent was {each[0]}"
    problems = world.gather(problem)
    world.expect(not any(problems), f"after a recv that was too late: {problems}")
    world.valid_call(group, what="after a recv that was too late")
    return 1


@fault(5)
def read_only_later(world):
    """Known arrays whose `out` becomes read-only on one rank, which makes the call after all."""
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
    """Some ranks give registered arrays, the others ordinary ones, of the same values."""
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


@fault(2, least=2)
def skipped_asynchronous(world):
    """An asynchronous call that one rank does not begin until after the others' deadline."""
    group, rng = world.group(), world.rng
    odd = rng.randrange(world.size)
    plan = Plan("all_reduce", (7,), np.dtype("f4"), asynchronous=True, salt=rng.randrange(999))
    group.comm.deadline = SHORT
    call = world.ready(group, plan)
    outcome = Outcome() if world.rank == odd else world.attempt(group, plan, call)
    outcomes = world.gather(outcome)
    waited = [each for rank, each in enumerate(outcomes) if rank != odd]
    text = f"asynchronous, skipped by rank {odd}"
    world.expect(all(each.is_a(DeadlineExceededError) for each in waited), text, outcomes)
    world.valid_call(group, plan, what=f"after {text}")
    world.valid_call(group, what=f"after {text}")
    return 1


@fault(2, least=2)
def close_against_a_call(world):
    """One rank closes while the others call: a mismatch on all, and nothing is closed."""
    group, odd = world.group(), world.rng.randrange(world.size)
    plan = Plan("all_reduce", (3,), np.dtype("f8"), salt=world.rng.randrange(999))
    call = world.ready(group, plan)
    call = group.comm.close if world.rank == odd else call
    outcomes = world.gather(world.attempt(group, plan, call))
    mismatched = all(each.is_a(CollectiveMismatchError) for each in outcomes)
    world.expect(mismatched, "close against a call", outcomes)
    world.valid_call(group, what="after close against a call")
    return 1
