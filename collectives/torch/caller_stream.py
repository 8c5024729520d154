"""The GPU's stream on which a program has made a call that another thread carries out.

The current stream belongs to a thread. A call's work is enqueued on that of the program, whatever
the thread, and the stream that waits for the call's end follows it, as with torch's own groups
(pytorch.org/docs/stable/distributed.html, "Synchronous and asynchronous collective operations").
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class CallerStream:
    """The stream that is current when this is made, on the GPU of the given tensors.

    Tensors on the CPU have none; each method then does nothing.
    """

    def __init__(self, tensors: Any) -> None:
        """`tensors` may be in lists; all on one GPU, or all on the CPU."""
        self.gpus = gpus_of(tensors)
        self._stream = torch.cuda.current_stream(self.gpus[0]) if self.gpus else None
        self._end: Any = None

    def current(self) -> AbstractContextManager[Any]:
        """Context in which the stream, and its GPU, are the calling thread's current ones."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def mark_end(self) -> None:
        """Note that the call's work has been enqueued."""
        if self._stream is not None:
            self._end = self._stream.record_event()

    def order_current(self) -> None:
        """Order what the calling thread's current stream does from now on after that work."""
        if self._end is not None:
            torch.cuda.current_stream(self.gpus[0]).wait_event(self._end)


def gpus_of(tensors: Any) -> list[Any]:
    """The GPU of tensors in lists, as a list for torch's futures; empty where it is the CPU."""
    if isinstance(tensors, Sequence):
        return next(filter(None, map(gpus_of, tensors)), [])
    return [tensors.device] if tensors.is_cuda else []
