"""Ranks that skip a call, are late, are stopped, or make another number of calls."""

import time
from dataclasses import replace

import numpy as np

from collectives import CollectiveMismatchError, DeadlineExceededError, MismatchError
from tests.fuzz.faults.registry import fault
from tests.fuzz.interrupting import stop_for
from tests.fuzz.plans import Plan, deviate, draw
from tests.fuzz.world import PATIENT, SHORT, Outcome

STOP_SECONDS = 0.05


@fault(5, least=2)
def skipped(world):
    """Some ranks skip a call: the others' error names them; the next call succeeds."""
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
    # Between nodes a rank may know only that its leader waits for another node.
    waits = "which waits for other nodes"
    covered = all(set(each.absent) & absent or waits in each.text for each in waited)
    exact = group.comm.nodes == 1
    world.excused += late
    world.expect(late or ((named if exact else covered) and some), f"wrong names: {text}", outcomes)
    world.valid_call(group, what=f"after {text}")
    return len(odd)


@fault(5, least=2)
def late(world):
    """One rank is late, but before the deadline: only a delay."""
    group, rng = world.group(), world.rng
    plan, odd = draw(rng, world.size), rng.randrange(world.size)
    call = world.ready(group, plan)
    if world.rank == odd:
        time.sleep(world.own.random() * SHORT / 2)
    outcomes = world.gather(world.attempt(group, plan, call))
    world.expect_right(plan, outcomes, "a call that one rank makes late")
    return 1


@fault(2, least=2)
def too_late(world):
    """One rank is later than the others' deadline, and they repeat the call: it succeeds."""
    group, rng = world.group(), world.rng
    # Without MPI's own collectives, which don't exist for every dtype and op.
    plan, odd = world.any_but_native(draw(rng, world.size)), rng.randrange(world.size)
    group.comm.deadline = SHORT
    call = world.ready(group, plan)
    first = Outcome()
    if world.rank == odd:
        time.sleep(SHORT * (1 + world.own.random()))
    else:
        first = world.attempt(group, plan, call)
    group.comm.deadline = PATIENT
    # A delayed rank may have made the call with the late one at the first attempt.
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


@fault(2, least=2)
def stop(world):
    """A rank is stopped for a while: only a delay."""
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


@fault(4, least=2)
def late_message(world):
    """A recv that exceeds its deadline doesn't consume the message of the next one."""
    group, rng = world.group(), world.rng
    source, target = rng.sample(range(world.size), 2)
    comm, tag = group.comm, rng.randrange(3)
    wanted = [np.full(rng.choice((1, 3, 9000)), float(rng.randrange(1000))) for _ in range(2)]
    outcome, problem = Outcome(), ""
    if world.rank == target:
        comm.deadline = 0.02
        room = np.zeros(world.own.choice((1, 3, 9000)))
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
    """One rank closes while the others call: a mismatch on all, and no rank closes."""
    group, odd = world.group(), world.rng.randrange(world.size)
    plan = Plan("all_reduce", (3,), np.dtype("f8"), salt=world.rng.randrange(999))
    call = world.ready(group, plan)
    call = group.comm.close if world.rank == odd else call
    outcomes = world.gather(world.attempt(group, plan, call))
    mismatched = all(each.is_a(CollectiveMismatchError) for each in outcomes)
    world.expect(mismatched, "close against a call", outcomes)
    world.valid_call(group, what="after close against a call")
    return 1
