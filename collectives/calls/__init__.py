"""What calls on arrays need: their arguments are checked, and an `Operation` is made of them.

Checking first and running later lets the same code serve blocking calls, which run the operation at
once, and asynchronous calls, which run it on another thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from collectives.consistency.signature import Signature
from collectives.execution.engine import Engine

PASS = object()
"""What a bound call returns, before it did anything, for arguments that it can't take."""


class Operation(NamedTuple):
    """A call with checked arguments: the signature that the ranks compare, and its action."""

    signature: Signature
    run: Callable[[Engine], Any]
    on_gpu: bool = False
    """Whether its arrays lie on a GPU."""
    checks: bool = False
    """Whether `run` itself compares the ranks' calls, as bound calls do."""

    def perform(self, engine: Engine) -> Any:
        """Make the call, and return its result."""
        if self.checks:
            return engine.whole(self.run, engine)
        return engine.perform(self.signature, self.run)

    def then(self, action: Callable[[Any], None]) -> Operation:
        """The same call, followed by an action on its result."""

        def run(engine: Engine) -> Any:
            result = self.run(engine)
            action(result)
            return result

        return self._replace(run=run)
