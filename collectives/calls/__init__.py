"""The collectives on arrays: each function checks its arguments and returns an `Operation`.

Checking first and running later is what lets the same code serve the blocking calls, which run the
operation at once, and the asynchronous ones, which run it on a thread of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from collectives.consistency.signature import Signature
from collectives.execution.engine import Engine


class Operation(NamedTuple):
    """A call whose arguments were checked: what the ranks must agree on, and what it does."""

    signature: Signature
    run: Callable[[Engine], Any]
    on_gpu: bool = False
    """Whether its arrays lie on a GPU."""

    def then(self, action: Callable[[Any], None]) -> Operation:
        """The same call, at whose end `action` is given the result."""

        def run(engine: Engine) -> Any:
            result = self.run(engine)
            action(result)
            return result

        return self._replace(run=run)
