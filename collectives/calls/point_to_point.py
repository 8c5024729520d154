"""send and recv between two ranks.

Device arrays are staged through the host, because NCCL has no tags and waits for the receiver.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from collectives.arrays.kinds import flat, given_output, is_device, to_array
from collectives.consistency.signature import check_index, dtype_name, fingerprint
from collectives.cuda.runtime import fetched, filled
from collectives.errors import DeadlineExceededError, DtypeMismatchError, ShapeMismatchError
from collectives.execution.engine import Engine
from collectives.transports.base import LARGEST_TAG

Result = TypeVar("Result")


def send(array: Any, peer: int, tag: int) -> Callable[[Engine], None]:
    """Send the array's elements to one rank."""
    tag = check_index("tag", tag, LARGEST_TAG + 1)
    given = to_array(array)

    def perform(engine: Engine) -> None:
        elements = flat(given)
        content = (fetched(elements) if is_device(elements) else elements).view(np.uint8).data
        _begin(engine, f"send(to rank {peer}, tag={tag})")
        _once(engine, engine.transport.send, content, peer, tag, _kind(given.dtype))

    return perform


def recv(out: Any, peer: int, tag: int) -> Callable[[Engine], Any]:
    """Receive one rank's elements into `out`."""
    tag = check_index("tag", tag, LARGEST_TAG + 1)
    view = to_array(out, "out")
    output = given_output(out, view.shape, view.dtype)
    on_gpu = is_device(output.buffer)

    def perform(engine: Engine) -> Any:
        call = f"recv(from rank {peer}, tag={tag})"
        _begin(engine, call)
        buffer = np.empty(output.buffer.size, view.dtype) if on_gpu else output.buffer
        content = buffer.view(np.uint8).data
        nbytes, kind = _once(engine, engine.transport.receive, content, peer, tag)
        if kind != _kind(view.dtype):
            held = dtype_name(view.dtype)
            raise DtypeMismatchError(f"{call}: it sent another dtype than out holds, {held}")
        if nbytes != len(content):
            raise ShapeMismatchError(
                f"rank {peer} sent {nbytes} bytes with tag {tag}: out holds {len(content)}"
            )
        if on_gpu:
            filled(output.buffer, buffer)
        return output.deliver()

    return perform


def _once(engine: Engine, step: Callable[..., Result], *arguments: Any) -> Result:
    """Send or receive once: the call may be repeated after a deadline, but not after an error."""
    try:
        return step(*arguments)
    except DeadlineExceededError:
        raise
    except BaseException as error:
        # Part of the message may have been moved: the next one would be taken for the rest.
        engine.break_off(error)
        raise


def _kind(dtype: np.dtype[Any]) -> int:
    return fingerprint((dtype_name(dtype),))


def _begin(engine: Engine, call: str) -> None:
    """Make errors of a wait name this call."""
    waited = engine.wait_policy.call
    waited.what, waited.sequence, waited.line = call, None, None
