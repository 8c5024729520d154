"""A sampler whose DataLoader has worker processes: they read ahead of what the program has got.

In a program of its own: the processes are forks, which JAX warns of where a test has loaded it.
"""

import sys
import textwrap

import pytest

pytest.importorskip("torch", reason="torch isn't installed: DataLoader can't be tested")

PROGRAM = """
import logging
import torch
import strategies

strategy = strategies.MultiWorkerMirroredStrategy()
size, logged = strategy.communicator.size, []
handler = logging.Handler()
handler.emit = lambda record: logged.append(record.getMessage())
logging.getLogger("strategies").addHandler(handler)

sampler = strategy.sampler(range(10), seed=3)
whole = list(sampler)
loader = torch.utils.data.DataLoader(range(10), 1, sampler=sampler, num_workers=1)
sampler.set_epoch(0)
got = []
for number, index in enumerate(loader, 1):
    got.append(index.item())
    saved, ended = sampler.saved_tensors(), number == len(whole)
    assert saved["epoch"] == ended, saved
    assert saved["position"] == (0 if ended else number * size), saved
assert got == whole
assert not logged, logged

# Resumed within the epoch.
resumed = strategy.sampler(range(10), seed=3)
resumed.set_epoch(0, 2)
again = torch.utils.data.DataLoader(range(10), 2, sampler=resumed, num_workers=2)
iterator = iter(again)
assert next(iterator).tolist() == whole[2:4]
assert resumed.saved_tensors()["position"] == min(4, len(whole)) % len(whole) * size

# The samples that the loader leaves out are no part of the epoch: it has ended.
uneven = strategy.sampler(range(7 * size), seed=3)
uneven.set_epoch(0)
dropping = torch.utils.data.DataLoader(
    range(7 * size), 3, sampler=uneven, num_workers=1, drop_last=True, persistent_workers=True
)
positions = [int(uneven.saved_tensors()["position"]) for _ in dropping]
assert positions == [3 * size, 0], positions
assert uneven.saved_tensors()["epoch"] == 1

class Pairs:
    batch_size = 5  # the most that it gives

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        yield from zip(*[iter(self.sampler)] * 2)

    def __len__(self):
        return len(self.sampler) // 2

paired = strategy.sampler(range(20 * size), seed=3)
pairs = torch.utils.data.DataLoader(range(20 * size), batch_sampler=Pairs(paired), num_workers=1)
iterator = iter(pairs)
next(iterator)
assert paired.saved_tensors()["position"] >= 2 * size
assert "has a batch sampler of class Pairs" in logged.pop()

class Twice(torch.utils.data.Sampler):
    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        return (index for index in self.sampler for _ in range(2))

repeated = strategy.sampler(range(20 * size), seed=3)
twice = torch.utils.data.DataLoader(range(20 * size), 2, sampler=Twice(repeated), num_workers=1)
iterator = iter(twice)
next(iterator)
assert repeated.saved_tensors()["position"] >= size
assert "has a sampler of class Twice around it" in logged.pop()

class OtherIterator(torch.utils.data.dataloader._MultiProcessingDataLoaderIter):
    pass

class OtherLoader(torch.utils.data.DataLoader):
    def _get_iterator(self):
        return OtherIterator(self)

other = strategy.sampler(range(20 * size), seed=3)
iterator = iter(OtherLoader(range(20 * size), 2, sampler=other, num_workers=1))
next(iterator)
assert other.saved_tensors()["position"] >= 2 * size
assert "has a loader of class OtherIterator" in logged.pop()

options = strategies.InputOptions(experimental_per_replica_buffer_size=2)
ahead = strategy.sampler(range(20 * size), seed=3)
plain = torch.utils.data.DataLoader(range(20 * size), 2, sampler=ahead)
for _ in strategy.distribute_datasets_from_function(lambda context: plain, options):
    ahead.saved_tensors()
    assert "is read ahead" in logged.pop()
assert ahead.saved_tensors()["position"] == 0
assert not logged, logged

# Batches may come in another order than they were asked for.
unordered = torch.utils.data.DataLoader(
    range(10), 1, sampler=resumed, num_workers=1, in_order=False
)
resumed.set_epoch(0)
for _ in unordered:
    resumed.saved_tensors()
assert all("in_order=False" in each for each in logged), logged
assert len(logged) == len(whole) - 1, logged
logged.clear()

# An iteration that is left early, also where its processes have all that is left of the epoch.
left = strategy.sampler(range(10 * size), seed=3)
for dropped in (False, True):
    loader = torch.utils.data.DataLoader(
        range(10 * size), 3, sampler=left, num_workers=2, drop_last=dropped
    )
    for count in (1, 2, 3):
        left.set_epoch(0, 0)
        for number, _ in enumerate(loader, 1):
            if number == count:
                break
        saved = left.saved_tensors()
        ended = dropped and count == 3
        assert (saved["epoch"], saved["position"]) == (ended, 0 if ended else 3 * count * size)
assert not logged, logged
"""


def test_the_position_is_what_was_delivered(launch):
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    ended = launch(2, command, timeout=120)
    assert ended.returncode == 0, ended.stderr
