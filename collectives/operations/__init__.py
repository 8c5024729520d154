"""The collectives on arrays: each function checks its arguments and returns an `Operation`.

Checking first and running later is what lets the same code serve the blocking calls, which run the
operation at once, and the asynchronous ones, which run it on a thread of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from collectives.engine import Engine

Operation: TypeAlias = Callable[[Engine], Any]
