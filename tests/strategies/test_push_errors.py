"""The effects of pushes after one that failed on its server."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

from strategies import Variable, optimizers
from strategies.errors import RemoteTracebackError
from strategies.optimizers.update_rules import UpdateRule
from strategies.parameter_server import FixedShardsPartitioner
from tests.strategies.parameter_servers import number_of, run_workers, together
from tests.strategies.support import refusal

pytestmark = pytest.mark.mpi


def divide(array, divisor):
    if not divisor.all():
        raise ZeroDivisionError(f"by {divisor.tolist()}")
    array /= divisor


class ErrorsLater:
    """Delays errors until so many pushes were sent, then delivers two."""

    def __init__(self, rpc, monkeypatch, pushes):
        self.left, self.drain, self.send = pushes, rpc.endpoint.drain, rpc.endpoint._send
        self.rpc = rpc
        monkeypatch.setattr(rpc.endpoint, "drain", self.drain_later)
        monkeypatch.setattr(rpc.endpoint, "_send", self.count)

    def drain_later(self):
        if not self.left:
            self.drain()

    def count(self, *arguments):
        sent = self.send(*arguments)
        self.left = max(0, self.left - 1)
        if not self.left:
            while len(self.rpc._errors) < 2:
                self.drain()
        return sent


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", ["step", "assign", "creation"])
def test_an_old_error_does_not_divide_later_pushes(comm, monkeypatch, kind):
    """Either all parts are sent before the error is raised, or none."""

    def work(strategy):
        variable, other = Variable(np.full(8, 64.0)), Variable(np.full(2, 1.0))
        optimizer = optimizers.SGD(1.0)
        strategy.worker.client.number_of(optimizer)  # no request within the step
        strategy.worker.client.fence()
        other.storage.change(divide, np.zeros(2))
        with monkeypatch.context() as patch:
            ErrorsLater(strategy.worker._rpc, patch, 1)
            if kind == "step":
                strategy.run(optimizer.apply_gradients, args=([(np.ones(8), variable)],))
            elif kind == "assign":
                variable.assign(np.full(8, 63.0))
            else:
                variable = Variable(np.full(8, 63.0))
        refusal(ZeroDivisionError, "by", variable.numpy)
        return variable.numpy()

    partitioner = FixedShardsPartitioner(4)
    (value,) = run_workers(comm, 2, work, variable_partitioner=partitioner)
    np.testing.assert_array_equal(value, np.full(8, 63.0))


@pytest.mark.ranks(2)
def test_restored_slots_outlive_an_old_error(comm):
    def work(strategy):
        variable, optimizer = Variable(np.zeros(4)), optimizers.SGD(1.0, momentum=0.5)
        slot = {"slots/0/velocity": np.full(4, 8.0)}
        optimizer.restore_tensors({"iterations": 3, "learning_rate": 1.0, **slot})
        variable.storage.change(divide, np.zeros(4))
        wait_for_the_error(strategy)
        step = ([(np.zeros(4), variable)],)
        refusal(ZeroDivisionError, "by", strategy.run, optimizer.apply_gradients, args=step)
        strategy.run(optimizer.apply_gradients, args=step)
        return variable.numpy()

    (value,) = run_workers(comm, 1, work)
    np.testing.assert_array_equal(abs(value), np.full(4, 4.0))


def wait_for_the_error(strategy):
    rpc = strategy.worker._rpc
    while not rpc._errors:
        rpc.endpoint.drain()


@pytest.mark.ranks(2, 3)
def test_answers_after_an_error_are_not_stored(comm):
    """Errors may be as large as a variable."""

    def work(strategy):
        strategy.worker.client._same_node = lambda number: False
        variable = Variable(np.full(8, 1.0))
        together(strategy)
        for read in (variable.numpy, strategy.worker.client.fence):
            variable.storage.change(divide, np.zeros(8))
            refusal(ZeroDivisionError, "by", read)
        variable.numpy()
        strategy.worker.client.fence()
        assert not strategy.worker._rpc.endpoint.outstanding
        return True

    assert all(run_workers(comm, 1, work, variable_partitioner=FixedShardsPartitioner(4)))


@pytest.mark.ranks(3)
def test_an_old_error_does_not_keep_the_chief_from_telling_of_a_new_one(comm):
    def work(strategy):
        variable = Variable(np.full(8, 1.0))

        def fail():
            variable.storage.change(divide, np.zeros(8))
            wait_for_the_error(strategy)
            raise FileNotFoundError("nothing there")

        with pytest.raises(FileNotFoundError, match="nothing there") as raised:
            strategy.chief_first(fail)
        if strategy.is_chief:
            assert raised.value.__cause__ is None
            refusal(ZeroDivisionError, "by", variable.numpy)
        else:
            assert isinstance(raised.value.__cause__, RemoteTracebackError)
            assert "in fail" in raised.value.__cause__.text
        return True

    before, comm.deadline = comm.deadline, 5
    try:
        assert all(run_workers(comm, 1, work))
    finally:
        comm.deadline = before


@dataclass(frozen=True)
class PickyRule(UpdateRule):
    """Refuses negative gradients after some updates."""

    slots = ()

    def _apply(self, value, gradient, slots, iteration):
        value += gradient
        if (gradient < 0).any():
            raise ValueError(f"negative in step {iteration}")


class Picky(optimizers.SGD):
    """An optimizer with that rule."""

    @property
    def rule(self):
        return PickyRule()


@pytest.mark.ranks(3)
def test_a_step_that_fails_blocks_no_worker_later(comm):
    """A worker that continues after the error isn't a step late from then on."""

    def work(strategy):
        number, optimizer = number_of(strategy), Picky()
        variable = Variable(np.zeros(2))
        together(strategy)
        for step in range(4):
            bad = number == 1 and step == 1
            gradients = [(np.full(2, -1.0 if bad else 1.0), variable)]
            call = partial(strategy.run, optimizer.apply_gradients, args=(gradients,))
            if bad:
                refusal(ValueError, "negative", call)
            else:
                call()
        together(strategy)
        return optimizer.iterations

    before, comm.deadline = comm.deadline, 5
    assert run_workers(comm, 1, work, staleness=0) == [4, 4]
    comm.deadline = before


@pytest.mark.ranks(3)
def test_an_error_names_the_failed_parts(comm):
    def work(strategy):
        optimizer = Picky()
        first, second = Variable(np.zeros(4), name="first"), Variable(np.zeros(4), name="second")
        strategy.worker.client.fence()
        gradients = [(np.ones(4), first), (np.array([1.0, 1.0, 1.0, -1.0]), second)]
        strategy.run(optimizer.apply_gradients, args=(gradients,))
        with pytest.raises(ValueError, match="negative in step 1") as raised:
            strategy.worker.client.fence()
        cause = str(raised.value.__cause__)
        assert "'second'" in cause
        assert "rows 2 to 3 on ps 1 (rank 1)" in cause
        assert "first" not in cause
        assert "all other parts were changed" in cause
        return first.numpy(), second.numpy()

    [(first, second)] = run_workers(comm, 2, work, variable_partitioner=FixedShardsPartitioner(2))
    np.testing.assert_array_equal(first, np.ones(4))
    np.testing.assert_array_equal(second[:2], np.ones(2))
