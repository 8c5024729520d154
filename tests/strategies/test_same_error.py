"""One module raises the same error on every rank; where all is well it costs a barrier."""

from functools import partial

import numpy as np
import pytest

from collectives import Communicator, MismatchError
from collectives.transports import local
from strategies.core.same_error import (
    PropagatedErrors,
    call_on_all,
    call_on_first,
    compare,
    refuse_differences,
)
from tests.strategies.support import limited, refusal


def on_ranks(size, function):
    def one_rank(transport):
        with limited(transport):
            return function(Recording(transport))

    return local.run(size, one_rank)


class Recording(Communicator):
    """Notes the calls by which ranks compare texts and gather reports."""

    def barrier(self, what=None):
        self.made = [*getattr(self, "made", []), "barrier"]
        super().barrier(what)

    def all_gather_object(self, obj):
        self.made = [*getattr(self, "made", []), "gather"]
        return super().all_gather_object(obj)


def fail_on(rank, communicator, error):
    if communicator.rank == rank:
        raise error
    return communicator.rank


def test_reports_are_gathered_only_where_ranks_differ():
    def body(comm):
        call_on_all(comm, "act", lambda: comm.rank)
        refuse_differences(comm, "they differ", "x")
        assert compare(comm, "kind: ", "x", comm.rank) is None
        reports = compare(comm, "kind: ", f"x{comm.rank}", comm.rank)
        return comm.made, reports

    assert on_ranks(3, body) == [([*["barrier"] * 4, "gather"], [0, 1, 2])] * 3


def test_the_error_of_one_rank_is_raised_on_every_rank_as_what_it_is():
    def body(comm):
        error = FileNotFoundError(2, "no such file", f"of rank {comm.rank}")
        with pytest.raises(FileNotFoundError) as caught:
            call_on_all(comm, "act", lambda: fail_on(1, comm, error))
        return caught.value is error, str(caught.value), call_on_all(comm, "act", lambda: comm.rank)

    text = "[Errno 2] no such file: 'of rank 1'"
    assert on_ranks(3, body) == [(False, text, 0), (True, text, 1), (False, text, 2)]


def test_an_error_that_one_rank_alone_has_though_it_was_common_before():
    """It was raised on all ranks of another communicator, or by an earlier action."""

    def body(comm):
        marked = ValueError("of an earlier action")
        for _ in range(2):
            with pytest.raises(ValueError, match="of an earlier"):
                call_on_all(comm, "act", lambda: fail_on(1, comm, marked))
        part = comm.split(min(comm.rank, 1))
        for act in (partial(call_on_all, comm, "act"), partial(guarded, comm)):
            with pytest.raises(MismatchError):
                act(lambda: part.barrier(f"of rank {comm.rank}"))
        return int(comm.all_reduce(np.array(comm.rank)))

    assert on_ranks(3, body) == [3] * 3


def guarded(comm, check):
    with PropagatedErrors(comm, "act"):
        check()
    comm.barrier("act")


def test_equal_errors_of_all_ranks_are_raised_by_each():
    def body(comm):
        error = ValueError("no")
        with pytest.raises(ValueError, match="no") as caught:
            call_on_all(comm, "act", lambda: fail_on(comm.rank, comm, error))
        return caught.value is error

    assert on_ranks(2, body) == [True, True]


def test_an_error_that_cant_be_pickled_is_its_text_elsewhere():
    def body(comm):
        error = ValueError(lambda: 0)
        with pytest.raises((ValueError, RuntimeError)) as caught:
            call_on_first(comm, lambda: fail_on(0, comm, error))
        return type(caught.value), str(caught.value).startswith(("<function", "ValueError: <func"))

    assert on_ranks(2, body) == [(ValueError, True), (RuntimeError, True)]


def test_an_error_whose_text_fails_is_raised_on_every_rank():
    """A class of the program's own: `"code " + self.code`, for example, of a number."""

    class CodedError(Exception):
        def __str__(self):
            return "code " + self.args[0]

    def body(comm):
        def check():
            if comm.rank == 1:
                raise CodedError(7)

        with pytest.raises((RuntimeError, CodedError)) as caught:
            call_on_all(comm, "checking", check)
        if comm.rank != 1:
            assert "CodedError, whose text can't be made: TypeError" in str(caught.value)
        return int(comm.all_reduce(np.array(comm.rank)))

    assert on_ranks(2, body) == [1, 1]


def test_an_error_of_the_first_rank_leaves_the_ranks_in_step_in_another_call():
    def body(comm):
        with pytest.raises(ValueError, match="no"):
            call_on_all(
                comm,
                "outer",
                lambda: call_on_first(comm, lambda: fail_on(0, comm, ValueError("no"))),
            )
        return comm.all_reduce(np.array([comm.rank + 1])).tolist()

    assert on_ranks(2, body) == [[3], [3]]


def test_ranks_in_other_calls_raise_the_mismatch_and_go_on():
    """A rank that compares something else gathers no reports of the first kind."""

    def body(comm):
        kind = ["first: ", "second: "][comm.rank % 2]
        text = refusal(MismatchError, None, compare, comm, kind, "x", None)
        return text, compare(comm, "third: ", "x", None)

    first, *others = on_ranks(3, body)
    assert others == [first] * 2
    assert first[1] is None
    assert "rank 1: barrier(second: x)" in first[0]


def test_another_call_sees_the_name_of_the_call():
    def body(comm):
        def compared():
            refuse_differences(comm, "they differ", "x", call="act, a call for every rank")

        made = comm.barrier if comm.rank else compared
        return refusal(MismatchError, None, made)

    for text in on_ranks(2, body):
        assert "rank 0: barrier(act, a call for every rank: x)" in text


def test_differing_texts_are_listed_by_rank():
    def body(comm):
        return refusal(ValueError, None, refuse_differences, comm, "they differ", f"n={comm.rank}")

    assert on_ranks(2, body) == ["they differ\n  rank 0: n=0\n  rank 1: n=1"] * 2
