"""Mailboxes between threads of one process, which can simulate the death of a rank."""

import collections
import contextlib
import threading
import time
from typing import Any, NamedTuple

from collectives.errors import RankFailedError
from strategies.coordinator.link import Link, Run
from strategies.coordinator.values import WorkerDatasets
from strategies.coordinator.worker import Worker

CHIEF = 0


class Letter(NamedTuple):
    source: int
    header: Any
    arrays: list


class Dead(BaseException):
    """End the thread of a rank as if its process died."""


class MessageChannel:
    """Mailboxes of ranks that are threads; to the others, `kill` ends a rank's process."""

    def __init__(self, size):
        self.inboxes = [collections.deque() for _ in range(size)]
        self.dead = set()
        self.changed = threading.Condition()

    def box(self, rank):
        return PostBox(self, rank)

    def kill(self, rank):
        with self.changed:
            self.dead.add(rank)
            self.changed.notify_all()


class PostBox:
    def __init__(self, post, rank):
        self.post, self.rank = post, rank

    def send(self, peer, header, arrays=()):
        with self.post.changed:
            if self.rank in self.post.dead:
                raise Dead
            if peer in self.post.dead:
                raise RankFailedError(f"rank {peer} has died")
            self.post.inboxes[peer].append(
                Letter(self.rank, header, [each.copy() for each in arrays])
            )
            self.post.changed.notify_all()
        return self

    def wait(self):
        pass

    def receive(self, timeout=None):
        inbox = self.post.inboxes[self.rank]
        with self.post.changed:
            self.post.changed.wait_for(lambda: inbox or self.rank in self.post.dead, timeout)
            if self.rank in self.post.dead:
                raise Dead
            return inbox.popleft() if inbox else None

    def alive(self, peer):
        return peer not in self.post.dead

    def present(self, peer):
        return self.alive(peer)


class FragileBox(PostBox):
    """A worker's mailbox, which dies before it runs its n-th closure, or before it answers."""

    def __init__(self, post, rank, before_running=None, before_answering=None):
        super().__init__(post, rank)
        self.before_running, self.before_answering = before_running, before_answering
        self.received = self.answered = 0

    def receive(self, timeout=None):
        letter = super().receive(timeout)
        if letter is not None and isinstance(letter.header.body, Run):
            self._count_down("received", self.before_running)
        return letter

    def send(self, peer, header, arrays=()):
        self._count_down("answered", self.before_answering)
        return super().send(peer, header, arrays)

    def _count_down(self, what, last):
        setattr(self, what, getattr(self, what) + 1)
        if getattr(self, what) == last:
            self.post.kill(self.rank)
            raise Dead


class PlainReferences:
    """A mailbox that sends no function by its name."""

    def name(self, thing):
        return None

    def resolve(self, name):
        raise AssertionError(name)

    def reduce(self, thing):
        return NotImplemented

    def uses(self):
        return []


def call_plainly(fn, args, kwargs):
    return fn(*args, **kwargs)


def start_worker(box):
    """A thread that serves the chief."""

    def serve():
        with contextlib.suppress(Dead, RankFailedError):
            link = Link(box, CHIEF, {box.rank: f"worker {box.rank - 1} (rank {box.rank})"}, {})
            Worker(link, call_plainly, PlainReferences(), WorkerDatasets(None)).serve()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


def wait_until(condition, seconds=10):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited too long"
        time.sleep(0.001)
