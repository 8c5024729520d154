"""A worker's side: it runs what the chief sends, one closure after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from collectives.errors import RankFailedError
from strategies.coordinator.failures import describe
from strategies.coordinator.messages import (
    Box,
    End,
    Failed,
    Finished,
    Message,
    NewDataset,
    Packed,
    Restored,
    Run,
)
from strategies.coordinator.packing import References, pack, unpack
from strategies.coordinator.per_worker import WorkerDatasets

LOOK_SECONDS = 0.1
"""How often it is looked whether the chief lives."""

Call = Callable[[Callable[..., Any], Sequence[Any], dict[str, Any]], Any]


class WorkerPlace(References, Protocol):
    """What a worker has of its own."""

    def uses(self) -> list[Any]:
        """What is to be told to the chief with a result."""

    def restore(self, number: int, restored: Any) -> None:
        """What an optimizer begins with."""


class Worker:
    """Serves the chief until that says End.

    `call` calls a function with its arguments in the contexts that it is to see.
    """

    def __init__(
        self, box: Box, chief: int, call: Call, references: WorkerPlace, datasets: WorkerDatasets
    ) -> None:
        self._box, self._chief, self._call = box, chief, call
        self._references, self._datasets = references, datasets

    def serve(self) -> None:
        """Return when the chief lets it. Raises RankFailedError where the chief has died."""
        for message in self._messages():
            if isinstance(message.header, NewDataset):
                self._datasets.add(message.header.number, message.arrays)
            elif isinstance(message.header, Restored):
                restored = unpack(message.arrays, self._references)
                self._references.restore(message.header.number, restored)
            elif isinstance(message.header, Run):
                self._run(message.header.number, message.arrays)

    def _messages(self) -> Iterator[Message]:
        while True:
            message = self._box.receive(LOOK_SECONDS)
            if message is None:
                if not self._box.alive(self._chief):
                    raise RankFailedError(f"the chief, rank {self._chief}, has died")
            elif isinstance(message.header, End):
                return
            else:
                yield message

    def _run(self, number: int, arrays: Packed) -> None:
        header: Finished | Failed
        try:
            fn, args, kwargs = unpack(arrays, self._references)
            result = pack(self._call(fn, args, kwargs), self._references)
            header = Finished(number, self._references.uses())
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # sys.exit too: on the next worker it would do the same
            header, result = Failed(number, describe(error)), []
        self._answer(header, result)

    def _answer(self, header: Finished | Failed, result: Packed) -> None:
        try:
            # The next closure may change arrays that this one has returned.
            self._box.send(self._chief, header, result).wait()
        except RankFailedError:
            # The chief may have ended in good order: then its End is here.
            return
