"""What comes of the pushes that follow one which failed on its server."""

import numpy as np
import pytest

from strategies import Variable, optimizers
from strategies.parameter_server import FixedShardsPartitioner
from tests.strategies.parameter_servers import run_workers, together
from tests.strategies.support import refusal

pytestmark = pytest.mark.mpi


def divide(array, divisor):
    if not divisor.all():
        raise ZeroDivisionError(f"by {divisor.tolist()}")
    array /= divisor


class ErrorsLater:
    """Lets no error arrive before so many pushes have gone, and two then."""

    def __init__(self, mail, monkeypatch, pushes):
        self.left, self.take_in, self.send = pushes, mail._take_in, mail._send
        self.mail = mail
        monkeypatch.setattr(mail, "_take_in", self.take_in_later)
        monkeypatch.setattr(mail, "_send", self.count)

    def take_in_later(self):
        if not self.left:
            self.take_in()

    def count(self, *arguments):
        sent = self.send(*arguments)
        self.left = max(0, self.left - 1)
        if not self.left:
            while len(self.mail._errors) < 2:
                self.take_in()
        return sent


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", ["step", "assign", "creation"])
def test_an_old_error_does_not_divide_what_comes_after_it(comm, monkeypatch, kind):
    """All parts of it go, and then the error is raised; or the error before any of them."""

    def work(strategy):
        variable, other = Variable(np.full(8, 64.0)), Variable(np.full(2, 1.0))
        optimizer = optimizers.SGD(1.0)
        strategy.worker.client.fence()
        other.storage.change(divide, np.zeros(2))
        with monkeypatch.context() as patch:
            ErrorsLater(strategy.worker._mail, patch, 1)
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
    mail = strategy.worker._mail
    while not mail._errors:
        mail._take_in()


@pytest.mark.ranks(2, 3)
def test_answers_that_an_error_comes_before_are_not_kept(comm):
    """They may be as large as a variable."""

    def work(strategy):
        strategy.worker.client._same_node = lambda number: False
        variable = Variable(np.full(8, 1.0))
        together(strategy)
        mail = strategy.worker._mail
        for read in (variable.numpy, strategy.worker.client.fence):
            variable.storage.change(divide, np.zeros(8))
            refusal(ZeroDivisionError, "by", read)
        variable.numpy()
        strategy.worker.client.fence()
        assert not mail._answers
        assert not mail._expected
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

        refusal(FileNotFoundError, "nothing there", strategy.chief_first, fail)
        if strategy.is_chief:
            refusal(ZeroDivisionError, "by", variable.numpy)
        return True

    comm.deadline = 5
    assert all(run_workers(comm, 1, work))
