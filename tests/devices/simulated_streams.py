"""The streams, events and graphs of a simulated GPU: each stream is a thread."""

import itertools
import queue
import threading
import traceback
from functools import partial

import numpy as np

_HANGS_SECONDS = 60
_handles = itertools.count(0x1000, 16)


class SimulatedGraph:
    """Captured work, in the order in which it was put on any of the streams."""

    def __init__(self, origin):
        self.origin, self.streams, self.nodes, self.open = origin, {origin}, [], True
        self.invalid, self.discarded = False, []

    def launch(self, stream):
        for node in self.nodes:
            stream.put(node)


class SimulatedEvent:
    def __init__(self, stream):
        self.cuda, self.graph, self.seen = stream.cuda, stream.graph, frozenset(stream.seen)
        self.reached = threading.Event()

    def again(self, stream):
        self.__init__(stream)
        return self

    def done(self):
        if self.graph is not None or self.cuda.captures():
            raise RuntimeError("an event was queried during capture")
        return self.reached.is_set()


class SimulatedStream:
    """A thread that runs its work in order. While it captures, `seen` are the nodes before it."""

    def __init__(self, cuda, device):
        assert not cuda.closed.is_set()
        self.cuda, self.device, self.handle = cuda, device, next(_handles)
        self.graph, self.seen = None, set()
        self._work, self._idle = queue.SimpleQueue(), threading.Condition()
        self._pending, self.error = 0, None
        self.thread = threading.Thread(target=self._run, daemon=True, name=f"stream-{self.handle}")
        self.thread.start()
        cuda.streams[self.handle] = self

    def _run(self):
        with np.errstate(all="ignore"):  # a GPU gives no warnings
            while (function := self._work.get()) is not None:
                try:
                    if not self.cuda.closed.is_set():
                        function()
                except BaseException as error:
                    # Other ranks may hang because of it, so that the test never reaches `close`.
                    traceback.print_exc()
                    self.error = self.error or error
                with self._idle:
                    self._pending -= 1
                    self._idle.notify_all()

    def put(self, function):
        assert not self.cuda.closed.is_set()
        if self.graph is not None:
            self.seen.add(len(self.graph.nodes))
            self.graph.nodes.append(function)
            return
        self._enqueue(function)

    def _enqueue(self, function):
        with self._idle:
            self._pending += 1
            self._work.put(function)

    def discard(self, function):
        """Work on memory that was freed: as `put`, but never part of a graph."""
        if self.graph is not None:
            self.graph.discarded.append((self, function))
        elif not self.cuda.closed.is_set():
            self._enqueue(function)

    def end(self):
        """End the thread. Work that has not begun is skipped where the GPU is closed."""
        self._work.put(None)
        self.thread.join(5)
        assert not self.thread.is_alive(), "work that doesn't end"

    def record(self, event=None):
        event = SimulatedEvent(self) if event is None else event.again(self)
        if self.graph is None:
            self.put(event.reached.set)
        return event

    def wait(self, event):
        if event.graph is None and self.graph is None:
            self.put(partial(self._await, event.reached))
        elif event.graph is not None and event.graph.open and self.graph in (None, event.graph):
            self.graph = event.graph
            self.graph.streams.add(self)
            self.seen |= event.seen
        else:
            raise RuntimeError("a stream waits for an event that is not of the same capture")

    def _await(self, reached):
        while not reached.wait(0.1) and not self.cuda.closed.is_set():
            pass

    def capturing(self):
        return self.graph is not None

    def same_as(self, other):
        return self is other

    def synchronize(self):
        if self.graph is not None:
            self.graph.invalid = True
            raise RuntimeError("a stream was waited for during capture")
        with self._idle:
            if not self._idle.wait_for(lambda: self._pending == 0, _HANGS_SECONDS):
                raise RuntimeError(f"a stream hangs: waited for {_HANGS_SECONDS} s")
            error, self.error = self.error, None
        if error is not None:
            raise error

    def begin_capture(self):
        if self.graph is not None:
            raise RuntimeError("the stream captures already")
        self.graph = SimulatedGraph(self)
        self.cuda.open_graph(self.graph)

    def end_capture(self):
        graph, joined = self.graph, self.seen
        if graph is None or graph.origin is not self:
            raise RuntimeError("the capture was not begun on this stream")
        graph.open = False
        for stream in graph.streams:
            stream.graph, stream.seen = None, set()
        for stream, function in graph.discarded:
            stream.discard(function)
        if graph.invalid:
            raise RuntimeError("the capture was ended by what can't be captured")
        if len(joined) < len(graph.nodes):
            raise RuntimeError("the capture holds work that its stream doesn't wait for")
        return graph
