"""What a strategy does otherwise where its replicas don't keep step with each other."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from typing import Any


class InStep:
    """The methods of a strategy whose replicas take each step together.

    Strategies of independent replicas override them.
    """

    def chief_first(self, action: Callable[[], Any]) -> Any:
        """What the action gives, which all ranks take together.

        Where replicas aren't in step, the chief acts alone, and the others wait for its outcome.
        """
        return action()

    def evaluating(self) -> AbstractContextManager[None]:
        """A context in which checkpoints are restored into variables made in it, and evaluated.

        Where replicas aren't in step, these variables are each process's own.
        """
        return nullcontext()

    def settle(self) -> None:
        """Make the replicas' values equal, before a checkpoint takes the chief's. Collective."""

    def loop_over(self, batches: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """The batches of one rank, of which it may have more or fewer than the others.

        Where replicas aren't in step, a rank without batches takes part in what the others do.
        """
        return batches

    def leave_loops(self) -> None:
        """Return when no rank needs this one for a loop that it has left. Collective."""
