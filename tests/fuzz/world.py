"""The ranks, the communicators under test, and the comparison of outcomes."""

import faulthandler
import hashlib
import os
import random
import time
from dataclasses import dataclass, replace

import numpy as np
from mpi4py import MPI

import collectives
from collectives import Communicator
from tests.fuzz.performing import SAME_ON_ALL, Lists, bits, difference, prepare
from tests.fuzz.plans import draw

PATIENT, SHORT = 20.0, 0.2
STEP_SECONDS = 90
REGISTERED = 6


class DeviationError(Exception):
    """A result that isn't the required one. Every rank raises it."""


@dataclass
class Outcome:
    """The outcome of one attempt on one rank. It is pickled."""

    problem: str | None = None
    """What is wrong with the result; None where it is right, or there is none."""
    text: str = ""
    """The error, if there was one."""
    kinds: frozenset[str] = frozenset()
    """The names of its classes."""
    absent: tuple[int, ...] = ()
    """The ranks that a deadline's error names."""
    digest: bytes = b""
    start: float = 0.0
    end: float = 0.0
    deadline: float = 0.0
    """The communicator's, in seconds."""

    @property
    def right(self):
        """Whether there was a result, and the right one."""
        return self.problem is None and not self.text

    def is_a(self, *kinds):
        """Whether it is an error of one of these kinds."""
        return any(kind.__name__ in self.kinds for kind in kinds)

    def __str__(self):
        return self.problem or self.text or "right"


class Group:
    """A communicator under test, with arrays of the same lifetime."""

    def __init__(self, comm, numbers):
        """`numbers` are the ranks' numbers in the communicator, in the world's order."""
        self.comm, self.numbers, self.lists = comm, numbers, Lists()
        self.registered = []

    @property
    def broken(self):
        """Whether this rank's communicator refuses calls."""
        return self.comm._engine.broken is not None

    def forget_native(self):
        """Offer no collectives of MPI's own."""
        engine = self.comm._engine
        levels = None if engine.node is None else engine.node._levels
        across = None if levels is None else levels.across
        between = [across.transport] if across is not None else []
        for transport in (engine.transport, self.comm._duplicate.transport, *between):
            transport.native = lambda collective, op, dtype: None
        engine._paths.clear()
        engine._chosen.clear()

    def abandon(self):
        """Drop it without the other ranks, which may be unable to close it."""
        engine = self.comm._engine
        if engine.broken is None:
            engine.broken = RuntimeError("the fuzzer has abandoned it")
        self.comm.close()


class World:
    """One rank's view of the world that is fuzzed."""

    def __init__(self, seed):
        # The fuzzer's own messages don't use the package.
        self.control = MPI.COMM_WORLD.Dup()
        self.control.allgather(None)
        self.rank, self.size = self.control.rank, self.control.size
        self.seed, self.step = seed, 0
        self.pids = self.gather(os.getpid())
        self.excused = 0
        """Deadlines that ended because the machine held a rank up, with no fault injected."""
        self._groups = {}
        self.rng = self.own = random.Random(0)

    def begin(self, step):
        """Draw from the step's own generators from now on: a common one, and one of this rank."""
        faulthandler.dump_traceback_later(STEP_SECONDS, exit=True)
        self.step = step
        self.rng = random.Random(f"{self.seed}/{step}")
        self.own = random.Random(f"{self.seed}/{step}/{self.rank}")

    def gather(self, thing):
        """Every rank's, in rank order."""
        return self.control.allgather(thing)

    def group(self, name=None, *, native=True):
        """One of the communicators; a new one where any rank's is broken.

        Without `native` no call uses MPI's own collectives, which can't raise an error:
        a rank that waits there for one that broke the communicator ends the job.
        """
        name = name or self.rng.choice(("world", "nodes", "split"))
        group = self._groups.get((name, native))
        if any(self.gather(group is None or group.broken)):
            if group is not None:
                group.abandon()
            comm = self._make(name)
            group = self._groups[name, native] = Group(comm, self.gather(comm.rank))
            if not native:
                group.forget_native()
        group.comm.deadline = PATIENT
        return group

    def _make(self, name):
        # From a separate generator: whether it is created must not change the next draws.
        rng = random.Random(f"{self.seed}/{self.step}/{name}")
        if name == "world":
            return Communicator(MPI.COMM_WORLD, deadline=PATIENT)
        if name == "nodes":
            nodes = [rng.randrange(3) for _ in range(self.size)]
            return Communicator(MPI.COMM_WORLD, deadline=PATIENT, node_of=nodes)
        order = list(range(self.size))
        rng.shuffle(order)
        part = MPI.COMM_WORLD.Split(0, order[self.rank])
        comm = Communicator(part, deadline=PATIENT)
        part.Free()
        return comm

    def ready(self, group, plan, *, on_this_rank=None):
        """A function that makes the call. Collective allocation of its arrays happens here."""
        registered = self._registered(group, plan) if plan.layout == "registered" else None
        return prepare(on_this_rank or plan, group.comm, group.lists, registered)

    def _registered(self, group, plan):
        if plan.collective not in ("all_reduce", "broadcast", "reduce"):
            return None
        kept = group.registered
        found = [each for each in kept if (each.shape, each.dtype) == (plan.shape, plan.dtype)]
        if not found:
            if len(kept) >= REGISTERED:
                kept.pop(0)
            found = [group.comm.empty(plan.shape, plan.dtype)]
            kept += found
        return found[0]

    def attempt(self, group, plan, call, expected_of=None):
        """Make the call, and judge this rank's result locally."""
        outcome = Outcome(start=time.monotonic(), deadline=group.comm.deadline)
        try:
            result = call()
        except BaseException as error:
            outcome.text = f"{type(error).__name__}: {error}"
            outcome.kinds = frozenset(kind.__name__ for kind in type(error).__mro__)
            outcome.absent = getattr(error, "absent", ())
        else:
            comm = group.comm
            outcome.problem = difference(expected_of or plan, result, comm.rank, comm.size)
            if plan.collective in SAME_ON_ALL:
                # MPI's own reductions, which may run where the ranks share no memory, promise no
                # bits of a NaN.
                native = comm.nodes > 1 or plan.asynchronous or comm._engine.path == "native"
                content = bits(result, any_nan=plan.nans and native)
                outcome.digest = hashlib.blake2b(content, digest_size=8).digest()
        outcome.end = time.monotonic()
        return outcome

    def expect(self, condition, text, outcomes=()):
        """Raise a deviation on every rank: the condition must be the same on all."""
        if condition:
            return
        lines = [
            f"  rank {rank}: {' '.join(str(each).split())[:300]}"
            for rank, each in enumerate(outcomes)
        ]
        raise DeviationError("\n".join([text, *lines]))

    def expect_right(self, plan, outcomes, what="a valid call"):
        """Every rank has the right result, and the same bits where they are guaranteed."""
        right = not any(each.problem for each in outcomes)
        if any(each.is_a(collectives.DeadlineExceededError) for each in outcomes):
            starts = [each.start for each in outcomes]
            least = min(each.deadline for each in outcomes) / 2
            if right and max(starts) - min(starts) > least:
                self.excused += 1
                return
        # A rank that gets no core for so long in the middle of a call breaks the communicator.
        held_up = [f"deadline of {SHORT:g} s" in each.text for each in outcomes]
        middle = ["in the middle of the call" in each.text for each in outcomes]
        if right and any(map(all, zip(held_up, middle, strict=True))):
            self.excused += 1
            return
        # MPI has no collective of its own for every dtype and op: all ranks raise the error.
        refused = [each.is_a(ValueError) and "there is no such" in each.text for each in outcomes]
        if plan.algorithm == "native" and all(refused):
            return
        self.expect(all(each.right for each in outcomes), f"{what}: {plan.shows}", outcomes)
        digests = {each.digest for each in outcomes}
        self.expect(len(digests) == 1, f"{what}, different bits: {plan.shows}", outcomes)

    def valid_call(self, group, plan=None, what="a valid call"):
        """All ranks make the same call, which must succeed."""
        plan = plan or draw(self.rng, self.size)
        group.comm.deadline = PATIENT
        if self.rng.random() < 0.1:
            # The ranks arrive at different times.
            time.sleep(self.own.random() * 2e-3)
        outcomes = self.gather(self.attempt(group, plan, self.ready(group, plan)))
        self.expect_right(plan, outcomes, what)

    def small(self, plan):
        """The plan with a small array."""
        return plan if np.prod(plan.shape) < 50_000 else replace(plan, shape=(1000,), axis=0)

    def any_but_native(self, plan):
        """The plan without MPI's own collective forced."""
        return replace(plan, algorithm=None) if plan.algorithm == "native" else plan

    def drop_all(self):
        """Reset after a deviation: the state of a communicator is unknown now."""
        for group in self._groups.values():
            group.abandon()
        self._groups.clear()

    def abort(self):
        """End the job."""
        self.control.Abort(3)

    def end(self):
        """Free everything collectively."""
        for group in self._groups.values():
            if any(self.gather(group.broken)):
                group.abandon()
            else:
                group.comm.close()
        faulthandler.cancel_dump_traceback_later()
        self.control.Free()
