"""Valid calls, and calls that differ between ranks or are refused on one."""

from dataclasses import dataclass

import numpy as np

from collectives import MismatchError
from tests.fuzz.faults.registry import fault
from tests.fuzz.plans import Plan, deviate, draw
from tests.fuzz.world import Outcome


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


@fault(30)
def other_arguments(world):
    """A burst of calls: some ranks make different ones, or invalid ones.

    Different calls give the same MismatchError on all ranks. An invalid one is a ValueError or
    TypeError on its rank, which then makes the valid call. The next call succeeds.
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
