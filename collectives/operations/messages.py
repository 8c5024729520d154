"""send and recv between two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from collectives.arrays import flat, given_output, to_numpy
from collectives.engine import Engine
from collectives.errors import DtypeMismatchError, ShapeMismatchError
from collectives.operations.arguments import check_index
from collectives.signature import dtype_name, fingerprint
from collectives.transports.base import LARGEST_TAG


def send(array: Any, peer: int, tag: int) -> Callable[[Engine], None]:
    """The array's elements, to one rank."""
    tag = check_index("tag", tag, LARGEST_TAG + 1)
    given = to_numpy(array)
    content = flat(given).view(np.uint8).data

    def perform(engine: Engine) -> None:
        _begin(engine, f"send(to rank {peer}, tag={tag})")
        engine.transport.send(content, peer, tag, _kind(given.dtype))

    return perform


def recv(out: Any, peer: int, tag: int) -> Callable[[Engine], Any]:
    """One rank's elements, into `out`."""
    tag = check_index("tag", tag, LARGEST_TAG + 1)
    view = to_numpy(out, "out")
    output = given_output(out, view.shape, view.dtype)
    content = output.buffer.view(np.uint8).data

    def perform(engine: Engine) -> Any:
        call = f"recv(from rank {peer}, tag={tag})"
        _begin(engine, call)
        nbytes, kind = engine.transport.receive(content, peer, tag)
        if kind != _kind(view.dtype):
            held = dtype_name(view.dtype)
            raise DtypeMismatchError(f"{call}: it sent another dtype than out holds, {held}")
        if nbytes != len(content):
            raise ShapeMismatchError(
                f"rank {peer} sent {nbytes} bytes with tag {tag}: out holds {len(content)}"
            )
        return output.deliver()

    return perform


def _kind(dtype: np.dtype[Any]) -> int:
    return fingerprint((dtype_name(dtype),))


def _begin(engine: Engine, call: str) -> None:
    """Let a wait that ends in an error name this call."""
    waited = engine.patience.call
    waited.what, waited.sequence, waited.line = call, None, None
