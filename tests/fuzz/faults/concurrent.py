"""Handles that are dropped, threads and forks."""

import os
import threading
from dataclasses import replace

import numpy as np

from tests.fuzz.faults.registry import fault
from tests.fuzz.plans import draw
from tests.fuzz.world import Outcome


@fault(8)
def dropped_handles(world):
    """Asynchronous calls without a wait: they are run, and the next ones are right."""
    group, rng = world.group(), world.rng
    count = rng.randrange(1, 6)
    for index in range(count):
        group.comm.all_reduce_async(np.full(rng.choice((1, 100, 20_000)), float(index)))
    world.valid_call(group, what="after dropped handles")
    plan = replace(draw(rng, world.size), collective="all_reduce", asynchronous=True, op="sum")
    plan = replace(plan, algorithm=None, place="new", axis=0)
    world.valid_call(group, plan, what="an asynchronous call after dropped handles")
    return count


@fault(5)
def threads(world):
    """Two threads, each with its own communicator, at the same time."""
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
    """Two threads that make the same call on one communicator: calls are serialized."""
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
    """A forked child is refused; the parent continues."""
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
