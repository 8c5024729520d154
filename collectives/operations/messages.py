"""send and recv between two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from collectives.arrays import flat, given_output, to_numpy
from collectives.engine import Engine
from collectives.errors import ShapeMismatchError
from collectives.operations.arguments import check_index
from collectives.transports.base import LARGEST_TAG


def send(array: Any, peer: int, tag: int) -> Callable[[Engine], None]:
    """The array's elements, to one rank."""
    tag = check_index("tag", tag, LARGEST_TAG + 1)
    content = flat(to_numpy(array)).view(np.uint8).data
    return lambda engine: engine.transport.send(content, peer, tag)


def recv(out: Any, peer: int, tag: int) -> Callable[[Engine], Any]:
    """One rank's elements, into `out`."""
    tag = check_index("tag", tag, LARGEST_TAG + 1)
    view = to_numpy(out, "out")
    output = given_output(out, view.shape, view.dtype)
    content = output.buffer.view(np.uint8).data

    def perform(engine: Engine) -> Any:
        nbytes = engine.transport.receive(content, peer, tag)
        if nbytes != len(content):
            raise ShapeMismatchError(
                f"rank {peer} sent {nbytes} bytes with tag {tag}: out holds {len(content)}"
            )
        return output.deliver()

    return perform
