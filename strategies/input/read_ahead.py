"""Read-ahead: a thread that reads batches before they are requested."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import closing
from queue import SimpleQueue
from typing import Any, NamedTuple

THREAD_NAME = "strategies-read-ahead"
Batches = Generator[Any, None, None]


class _End(NamedTuple):
    error: BaseException | None


def read_ahead(batches: Batches, depth: int) -> Batches:
    """The same batches, up to `depth` of them read in advance by a thread; 0: no thread.

    The thread starts with the first request. It ends with the batches; where this generator is
    closed or deleted earlier, it ends after the batch that it is reading. An exception of the
    batches is raised here in its place, with the original traceback.
    """
    if depth == 0:
        yield from batches
        return
    reader = _Reader(batches, depth)
    try:
        while not isinstance(batch := reader.next_batch(), _End):
            yield batch
        if batch.error is not None:
            raise batch.error
    finally:
        reader.stop()


class _Reader:
    def __init__(self, batches: Batches, depth: int) -> None:
        self._ready: SimpleQueue[Any] = SimpleQueue()
        self._free_slots, self._stopped = threading.Semaphore(depth), threading.Event()
        threading.Thread(target=self._read, args=(batches,), name=THREAD_NAME, daemon=True).start()

    def next_batch(self) -> Any:
        """The next batch or `_End`; waits for it."""
        batch = self._ready.get()
        self._free_slots.release()
        return batch

    def stop(self) -> None:
        """End the thread after the batch that it is reading."""
        self._stopped.set()
        self._free_slots.release()

    def _read(self, batches: Batches) -> None:
        error = None
        try:
            with closing(batches):
                self._free_slots.acquire()
                for batch in batches:
                    self._ready.put(batch)
                    self._free_slots.acquire()
                    if self._stopped.is_set():
                        return
        except BaseException as raised:  # SystemExit too: the consumer waits for an answer
            error = raised
        finally:
            self._ready.put(_End(error))
