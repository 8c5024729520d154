"""Exceptions of the package.

CollectiveError(RuntimeError)
├── MismatchError                 the ranks did not call the same thing
│   ├── CollectiveMismatchError
│   ├── ShapeMismatchError
│   ├── DtypeMismatchError
│   ├── OpMismatchError
│   └── RootMismatchError
├── DeadlineExceededError         (also a TimeoutError) some ranks did not arrive in time
├── RankFailedError               a peer died, or an exception ended one of its calls
├── LaunchError                   the ranks can't be started, or this process is no rank
├── GradientError                 of collectives.torch: gradients could not be reduced
├── BackendUnavailableError       no MPI, no GPU, no NCCL: the message says what to install
└── ScheduleError                 an algorithm does not do what its collective promises

An error that a rank detects from its own arguments (a root out of range, a dtype that cannot be
reduced) is a ValueError or TypeError, raised before any message is sent; for `out` of `scatter`,
after the call.
"""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Error = TypeVar("Error", bound=BaseException)

_IN_STEP = "_collectives_in_step"


def check_integer(name: str, value: Any, least: int | None = None) -> int:
    """The argument `name` as an int, of `least` or more; TypeError or ValueError otherwise."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r}: must be an integer") from None
    if least is not None and number < least:
        raise ValueError(f"{name}={value!r}: must be at least {least}")
    return number


def in_step(error: Error) -> Error:
    """Mark an error that keeps the ranks in step, and return it.

    The ranks are in step if every rank raises the error at the same point of the same call, or if
    all data of the call have moved. Any other exception that ends a call after other ranks may have
    seen it breaks the communicator: it refuses all further calls.
    """
    setattr(error, _IN_STEP, True)
    return error


def summary_of(error: BaseException) -> str:
    """The class and the text, also of an exception whose text can't be made."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as problem:  # of the program's own __str__
        return f"{type(error).__name__}, whose text can't be made: {type(problem).__name__}"


def pickled(
    error: BaseException, dumps: Callable[[BaseException], bytes] = pickle.dumps
) -> bytes | None:
    """The pickle; None where pickle can't restore an error of its class, or its text fails."""
    try:
        str(error)
        content = dumps(error)
        same = type(pickle.loads(content)) is type(error)
    except Exception:  # of what it holds, or of its class, whose own code runs
        return None
    return content if same else None


def portable(error: Error) -> Error | RuntimeError:
    """The error, or one of its text where it has no pickle."""
    return RuntimeError(summary_of(error)) if pickled(error) is None else error


def is_in_step(error: BaseException) -> bool:
    """Whether `in_step` marked the error."""
    return hasattr(error, _IN_STEP)


class CollectiveError(RuntimeError):
    """Base class of the errors of calls.

    Wrong arguments raise ValueError or TypeError, calls of a closed or broken communicator a
    RuntimeError.
    """


ENDED = "exit()"
"""The last call of a program that ends, as text; the texts of what closes its parts begin so."""


class MismatchError(CollectiveError):
    """The ranks did not call the same thing.

    The same error is raised on every rank, except for blocks of `all_to_all` and for messages
    (`recv`, `irecv`), where the receiver alone knows. `calls` holds every rank's call as text, in
    rank order.
    """

    def __init__(
        self, message: str, calls: tuple[str, ...] = (), lines: Sequence[str] = ()
    ) -> None:
        """Append every rank's call to `message`, and the source lines that made them."""
        places = [f" ({line})" if line else "" for line in lines or [""] * len(calls)]
        listed = zip(calls, places, strict=True)
        shown = [f"  rank {rank}: {call}{place}" for rank, (call, place) in enumerate(listed)]
        if any(call.startswith(ENDED) for call in calls):
            shown.append(f"  {ENDED}: the program has ended, after fewer calls than on other ranks")
        super().__init__("\n".join([message, *shown]))
        self.calls = calls


class CollectiveMismatchError(MismatchError):
    """A rank called another collective than its peers."""


class ShapeMismatchError(MismatchError):
    """The ranks' arrays differ in shape where the collective requires equal shapes."""


class DtypeMismatchError(MismatchError):
    """The ranks' arrays differ in dtype."""


class OpMismatchError(MismatchError):
    """The ranks requested different reductions."""


class RootMismatchError(MismatchError):
    """The ranks gave different roots."""


class DeadlineExceededError(CollectiveError, TimeoutError):
    """Some ranks did not arrive before the deadline; `absent` holds those that are known."""

    def __init__(self, message: str, absent: tuple[int, ...] = ()) -> None:
        """`message` names the call, the absent ranks and the source line that waited."""
        super().__init__(message)
        self.absent = absent
        self.withdrawn = False
        """Whether the call was withdrawn: this rank may repeat it, or make another call."""


class RankFailedError(CollectiveError):
    """A peer died, or an exception ended one of its threads or calls."""


class UnusableError(RuntimeError):
    """A communicator or mailbox is closed, or an earlier call has broken it; no call was started.

    No CollectiveError: what broke the communicator was one, or an exception of the program.
    """


class LaunchError(CollectiveError):
    """The ranks can't be started, or this process is no rank; the message names the fix."""


class BackendUnavailableError(CollectiveError):
    """A required backend is not installed or not present; the message says what to install."""


class ScheduleError(CollectiveError):
    """A schedule breaks a rule or does not reach its collective's postcondition."""

    def __init__(self, problem: str, *, round: int, rank: int, chunk: int) -> None:
        """Name the location. Rounds count from 0; the number of rounds stands for the end."""
        super().__init__(f"round {round}, rank {rank}, chunk {chunk}: {problem}")
        self.round, self.rank, self.chunk = round, rank, chunk

    def __reduce__(self) -> Any:
        # Exceptions are pickled as calls of their class with `args`, which `__init__` refuses.
        return type(self).__new__, (type(self), *self.args), self.__dict__
