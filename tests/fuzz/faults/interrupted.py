"""Exceptions and signals inside calls."""

import numpy as np

from collectives import RankFailedError
from tests.fuzz.faults.registry import fault
from tests.fuzz.interrupting import ALARMS, alarm_after, raising_at_line
from tests.fuzz.plans import Plan, draw
from tests.fuzz.world import SHORT


def _interrupted(world, interrupt, what):
    """One rank's call is interrupted by an exception, and repeated: never a wrong result.

    Either it had not begun, so that the second attempt is the call itself; or the communicator is
    broken, and every rank gets an error by its deadline.
    """
    group, rng = world.group(native=False), world.rng
    plan = world.any_but_native(world.small(draw(rng, world.size)))
    odd = rng.randrange(world.size)
    for _ in range(rng.randrange(3)):
        world.valid_call(group, plan, what="before an interruption")
    group.comm.deadline = 2 * SHORT
    call = world.ready(group, plan)
    attempt = call if world.rank != odd else lambda: interrupt(call)
    first = second = world.attempt(group, plan, attempt)
    # An error while the root's array is read is raised on every rank: all try again.
    if first.is_a(*ALARMS):
        # An asynchronous call that has begun is waited for again.
        repeated = call if plan.asynchronous else world.ready(group, plan)
        second = world.attempt(group, plan, repeated)
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
    """A broken communicator gives no rank a result."""
    plan = Plan("all_reduce", (5,), np.dtype("f8"), salt=world.step % 1000)
    outcomes = world.gather(world.attempt(group, plan, world.ready(group, plan)))
    world.expect(not any(each.right for each in outcomes), f"a result after {text}", outcomes)
    world.expect(not any(each.problem for each in outcomes), f"wrong after {text}", outcomes)
    if group.comm._engine.broken is None:
        group.comm._engine.broken = RankFailedError("another rank's communicator is broken")


@fault(8, least=2)
def exception_at_a_line(world):
    """An exception at any line of the package."""
    line, kind = int(2 ** world.rng.uniform(0, 9)), world.rng.choice(ALARMS)

    def interrupt(call):
        with raising_at_line(line, kind):
            return call()

    return _interrupted(world, interrupt, f"{kind.__name__} at line {line}")


@fault(8, least=2)
def exception_from_a_signal(world):
    """An exception from a signal's handler at any moment of a call."""
    seconds, kind = 10 ** world.rng.uniform(-6, -2.5), world.rng.choice(ALARMS)

    def interrupt(call):
        with alarm_after(seconds, kind):
            return call()

    return _interrupted(world, interrupt, f"{kind.__name__} after {seconds * 1e6:.0f} µs")


@fault(8)
def harmless_signal(world):
    """A signal whose handler returns has no effect."""
    group = world.group()
    plan = draw(world.rng, world.size)
    call = world.ready(group, plan)
    with alarm_after(10 ** world.own.uniform(-6, -3)):
        outcome = world.attempt(group, plan, call)
    world.expect_right(plan, world.gather(outcome), "a call with a signal in it")
    return world.size
