"""A rank that fails during a save or a restore: the others raise errors, and none hangs."""

from functools import partial

import numpy as np
import pytest

from collectives import CollectiveMismatchError
from strategies import Variable
from strategies.checkpoint import Checkpoint, CheckpointManager, tensor_file
from tests.strategies.support import on_ranks


class OddError(Exception):
    """An error that can't be unpickled."""

    def __init__(self, one, other):
        super().__init__(f"{one} and {other}")


class Failing:
    """State that one rank fails to save, check or restore."""

    def __init__(self, call, error):
        self.call, self.error = call, error

    def _maybe(self, call):
        if call == self.call:
            raise self.error

    def saved_tensors(self):
        self._maybe("save")
        return {"": np.zeros(2)}

    def check_tensors(self, tensors):
        self._maybe("check")

    def restore_tensors(self, tensors):
        self._maybe("restore")


def ended(function, *arguments):
    """The error that a call raises, of any class."""
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        function(*arguments)
    return caught.value


@pytest.mark.parametrize("call", ["save", "check", "restore"])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_ranks_state_is_every_ranks(call, rank, tmp_path):
    def body(strategy):
        with strategy.scope():
            variable = Variable(1.0)
        own = strategy.communicator.rank
        path = Checkpoint(v=variable, z=Failing(None, None)).save(tmp_path / "state")
        state = Failing(call if own == rank else None, KeyError(f"rank {own}"))
        checkpoint = Checkpoint(v=variable, z=state)
        error = ended(checkpoint.save if call == "save" else checkpoint.restore, path)
        # The next call works.
        return repr(error), strategy.gather(np.array([own]), axis=0).tolist()

    assert on_ranks(2, body) == [(f"KeyError('rank {rank}')", [0, 1])] * 2


def test_an_error_before_anothers_collective_call_ends_that_call(tmp_path):
    """Rank 1's error arrives while rank 0 waits for it in the next state."""

    def body(strategy):
        with strategy.scope():
            z = Variable(1.0)

        class Collective(Failing):
            def saved_tensors(self):
                return {"": strategy.communicator.all_reduce(np.ones(1))}

        failing = strategy.communicator.rank == 1
        first = Failing("save" if failing else None, ValueError("mine"))
        error = ended(Checkpoint(a=first, b=Collective(None, None), z=z).save, tmp_path / "state")
        return type(error), repr(error.__context__)

    seen = on_ranks(2, body)
    assert [kind for kind, _ in seen] == [CollectiveMismatchError] * 2
    assert seen[1][1] == "ValueError('mine')"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (KeyboardInterrupt(), "rank 0 was interrupted by KeyboardInterrupt"),
        (SystemExit(1), "rank 0 was interrupted by SystemExit"),
        (OddError(1, 2), "OddError: 1 and 2"),
        (OddError, None),
    ],
)
def test_any_error_of_rank_0s_write_is_raised_on_the_others(error, told, tmp_path, monkeypatch):
    if told is None:
        error, told = OddError(lambda: 0, 2), "OddError: <function"

    def write(path, content):
        raise error

    monkeypatch.setattr(tensor_file, "write", write)

    def body(strategy):
        with strategy.scope():
            checkpoint = Checkpoint(v=Variable(1.0))
        return ended(checkpoint.save, tmp_path / "state")

    own, *others = on_ranks(3, body)
    assert own is error
    assert [type(each) for each in others] == [RuntimeError] * 2
    assert all(str(each).startswith(told) for each in others)


@pytest.mark.parametrize("call", ["save", "restore", "manage", "number"])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_while_one_rank_finds_states_is_raised_on_all(call, rank, tmp_path):
    def body(strategy):
        with strategy.scope():
            things = {"v": Variable(1.0)}
        own = strategy.communicator.rank
        checkpoint = Checkpoint(things=things)
        path = checkpoint.save(tmp_path / "state")
        manager = CheckpointManager(checkpoint, tmp_path)
        if own == rank:
            things[own, "key"] = things["v"]
        calls = {
            "save": checkpoint.save,
            "restore": checkpoint.restore,
            "manage": partial(CheckpointManager, checkpoint),
            "number": lambda _: manager.save(),
        }
        error = ended(calls[call], path)
        # The next call works.
        return repr(error), strategy.gather(np.array([own]), axis=0).tolist()

    (first, gathered), second = on_ranks(2, body)
    assert (first, gathered) == second
    assert f"TypeError(\"things/ has the key ({rank}, 'key')" in first
    assert gathered == [0, 1]
