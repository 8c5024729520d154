"""An exception at moments of a call between nodes: all ranks end, or all go on."""

import functools
import itertools
import random
from dataclasses import replace

import pytest

from collectives import Communicator
from collectives.consistency.flight_recorder import DIRECTORY_VARIABLE
from collectives.schedules.paths import DISSEMINATION
from collectives.transports import local
from collectives.waiting import wait_policy
from tests.collectives import test_interruptions
from tests.collectives.interrupting import Interruption, share_memory
from tests.collectives.test_interruptions import (
    CALLS,
    TIMES,
    Barrier,
    Broadcast,
    Gathered,
    Mean,
    Small,
    ToRoot,
    program,
)

MOST = 15
# Seconds that ranks which have made the call wait in the next one for a rank that has ended.
DEADLINE = 0.5


class Staged(Mean):
    """Through the stages of a node with two ranks."""

    length = 20_000

    def __init__(self, at):
        super().__init__(at)
        engine = at.comm._engine
        engine.layout = replace(engine.layout, oversubscription=2.0)

    def looked_at(self, result, call):
        assert self.at.comm._engine.path == DISSEMINATION
        return result


LAYOUTS = {"a rank each": [0, 1, 2], "two and one": [0, 0, 1], "two alone": [0, 1]}
ROUTES = [Small, Mean, ToRoot, Broadcast, Barrier, Gathered]
CASES = [*itertools.product(ROUTES, LAYOUTS, [1]), *((Staged, "two and one", n) for n in range(3))]


@pytest.mark.slow
@pytest.mark.parametrize(("route", "layout", "interrupted"), CASES)
def test_an_exception_in_a_call_between_nodes(route, layout, interrupted, monkeypatch, tmp_path):
    monkeypatch.setattr(test_interruptions, "INTERRUPTED_RANK", interrupted)
    nodes = LAYOUTS[layout]
    memory = share_memory(monkeypatch)
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    for module in (wait_policy, local):
        monkeypatch.setattr(module, "CHECK_SECONDS", 0.001)
    on_nodes = functools.partial(Communicator, node_of=nodes)
    monkeypatch.setattr(test_interruptions, "Communicator", on_nodes)

    def run(place):
        memory.clear()
        interruption = Interruption(place)
        return interruption, local.run(len(nodes), program(route, interruption, DEADLINE))

    passed = run(None)[0].places.items()
    places = [(*place, time) for place, times in passed for time in range(1, min(times, TIMES) + 1)]
    random.Random(1).shuffle(places)
    ends = []
    for place in places[:MOST]:
        interruption, ranks = run(place)
        errors = [error for _, error in ranks]
        assert all(errors) or not any(errors), f"{interruption}: {errors}"
        ends.append(any(errors))
        if not ends[-1]:
            assert [right for right, _ in ranks] == [route.before + CALLS] * len(nodes)
    assert any(ends)
    assert not all(ends)
