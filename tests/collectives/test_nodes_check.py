"""The comparison of calls between nodes, in a simulated world: time passes only when ranks poll."""

import os
import random
import threading
from collections import defaultdict

import pytest
from mpi4py import MPI

from collectives import Communicator
from collectives.consistency import lateness
from collectives.consistency.dissemination import DIFFERENT, Dissemination, Rounds
from collectives.consistency.nodes_check import NodesCheck
from collectives.errors import DeadlineExceededError, UnusableError
from collectives.shm.node_barrier import SEQUENCE_BITS
from collectives.transports.base import ControlChannel
from collectives.transports.neighbors import NeighborChannel
from collectives.waiting.wait_policy import WaitPolicy
from tests.slow import slow_but

LATENCY, DEADLINE, LONG = 1.0, 100.0, 1e7
CALL, OTHER = 0x123456789ABC, 0x5555


class World:
    """Ranks as threads, of which one runs at a time, chosen at random; a clock of its own."""

    def __init__(self, size, seed):
        self.size, self.random, self.clock = size, random.Random(seed), 0.0
        self.lines = defaultdict(list)
        self.sent = [0] * size
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._done = threading.Semaphore(0)
        self._running = set(range(size))
        self.wakes = [0.0] * size
        self.stops, self.voting = 0.0, set()

    def stop(self, rank, often=1):
        """As SIGSTOP does, now and then, while the rank hasn't begun to vote."""
        if rank not in self.voting and self.random.random() < often * self.stops:
            self.sleep(rank, self.random.uniform(0, 2 * DEADLINE))

    def monotonic(self):
        return self.clock

    def put(self, line, content):
        """Deliver after a random time; messages of a line keep their order."""
        earliest = self.lines[line][-1][0] if self.lines[line] else 0.0
        due = max(earliest, self.clock + self.random.uniform(0, LATENCY))
        self.lines[line].append((due, content))
        self.sent[line[0]] += 1

    def arrived(self, line):
        """Whether the next message of a line has arrived."""
        queue = self.lines[line]
        return bool(queue) and queue[0][0] <= self.clock

    def take(self, line):
        """The next message of a line, if it has arrived."""
        return self.lines[line].pop(0)[1] if self.arrived(line) else None

    def sleep(self, rank, seconds=0.0):
        """Let the others run, for so long at least."""
        self.wakes[rank] = self.clock + seconds
        self._done.release()
        self._turns[rank].acquire()

    def run(self, program):
        errors, results = [], [None] * self.size

        def body(rank):
            self._turns[rank].acquire()
            try:
                results[rank] = program(rank)
            except BaseException as error:
                errors.append(error)
            self._running.discard(rank)
            self._done.release()

        threads = [threading.Thread(target=body, args=(r,), daemon=True) for r in range(self.size)]
        for thread in threads:
            thread.start()
        while self._running and not errors and self.clock < 1e6:
            self.clock += self.random.uniform(0, LATENCY / 4)
            awake = [rank for rank in sorted(self._running) if self.wakes[rank] <= self.clock]
            if not awake:
                self.clock = min(self.wakes[rank] for rank in self._running)
                continue
            self._turns[self.random.choice(awake)].release()
            assert self._done.acquire(timeout=60)
        if errors:
            raise errors[0]
        assert not self._running, f"ranks {sorted(self._running)} wait for ever"
        return results


class Policy(WaitPolicy):
    def __init__(self, world, rank, deadline):
        super().__init__(deadline)
        self.spins, self.world, self.rank = 0, world, rank

    def until(self, ready, absent, grace=0.0, start=None, *, in_transit=False):
        start = self.world.clock if start is None else start
        while not ready():
            if self.world.clock - start >= self.deadline + grace:
                raise DeadlineExceededError("late", tuple(absent()))
            self.world.sleep(self.rank)


class Words(ControlChannel):
    def __init__(self, world, rank):
        self.world, self.rank = world, rank
        self.words = [[0] * world.size, [0] * world.size]

    def post(self, word):
        self.words[word & 1][self.rank] = word
        for peer in range(self.world.size):
            if peer != self.rank:
                self.world.put((self.rank, peer, "word"), word)

    def take(self):
        # As with MPI, not all that has arrived is visible at once. It is soon, since the check
        # relies on a message taking less than its time of grace.
        lines = [(source, self.rank, "word") for source in range(self.world.size)]
        arrived = [line for line in lines if self.world.arrived(line)]
        if not arrived or self.world.random.random() < 0.5:
            return False
        line = self.world.random.choice(arrived)
        word = self.world.take(line)
        self.words[word & 1][line[0]] = word
        return True

    def of(self, number):
        return self.words[number & 1]

    def close(self):
        pass


class Neighbors(NeighborChannel):
    def __init__(self, world, rank, target, source, nbytes):
        super().__init__(nbytes)
        self.world, self.out, self.into = world, (rank, target, "round"), (source, rank, "round")
        self.here = False

    def send(self, nbytes):
        self.world.stop(self.out[0], often=20)
        self.world.put(self.out, self._outgoing.content[:nbytes].copy())

    def sent(self):
        return True

    def arrived(self):
        self.world.stop(self.out[0])
        content = None if self.here else self.world.take(self.into)
        if content is not None:
            self.incoming.content[: len(content)] = content
            self.here = True
        return self.here

    def discard(self):
        self.here = False

    def close(self):
        pass


class Leaders:
    """What the check uses of a transport."""

    def __init__(self, world, rank):
        self.world, self.rank, self.size = world, rank, world.size

    def open_control_channel(self):
        return Words(self.world, self.rank)

    def open_neighbor_channel(self, target, source, nbytes):
        return Neighbors(self.world, self.rank, target, source, min(nbytes, 16 + 24 * self.size))


class Values:
    """An exchange of a number of each node, once of every other one and twice of the rest."""

    def __init__(self, value):
        self.value, self.all = value, None

    def pack(self, block):
        (buffer, start), count = block, 1 + self.value // 1000 % 2
        for word in range(start >> 3, (start >> 3) + count):
            buffer.words[word] = self.value
        return 8 * count

    def unpack(self, blocks):
        words = [(buffer.words, start >> 3) for buffer, start in blocks]
        self.all = [words[start] for words, start in words]
        assert self.all == [
            words[start + each // 1000 % 2]
            for (words, start), each in zip(words, self.all, strict=True)
        ]


class Check(NodesCheck):
    def __init__(self, world, rank, deadline):
        super().__init__(Leaders(world, rank), Policy(world, rank, deadline), dict.fromkeys)
        self.world, self.rank = world, rank

    def deadline(self, seconds):
        """Set this rank's."""
        self._wait_policy.deadline = seconds

    def _vote(self, rounds, late):
        self.world.voting.add(self.rank)
        try:
            return super()._vote(rounds, late)
        finally:
            self.world.voting.discard(self.rank)


def word_of(call, number):
    return call << SEQUENCE_BITS | number


CASES = [(2, 20), (3, 20), (2, 300), (3, 300), (4, 200), (5, 200), (8, 100)]


@pytest.mark.parametrize("case", slow_but(CASES, (2, 20), (3, 20)))
def test_late_ranks_at_random(case, monkeypatch):
    size, seeds = case
    calls, withdrawn, differing, changed, stopped, unusable = 10, 0, 0, 0, 0, 0
    for seed in range(seeds):
        world = World(size, seed)
        monkeypatch.setattr(lateness, "time", world)
        world.stops = stops = world.random.choice([0, 0, 0.002])
        delay = world.random.choice([0, LATENCY, DEADLINE / 8, DEADLINE, 2 * DEADLINE])
        changing = world.random.random() < 0.3
        # The rank, and in how many attempts: it may go on with another call than it has withdrawn.
        wrong = {
            number: (world.random.randrange(size), world.random.choice([1, calls]))
            for number in range(calls)
            if world.random.random() < 0.2
        }

        def program(rank, world=world, delay=delay, wrong=wrong, stops=stops, changing=changing):
            check, results, ended = Check(world, rank, DEADLINE), [], []
            for number in range(calls):
                if number == calls - 1:
                    # No later call could tell that it was completed.
                    world.stops = 0.0
                own = random.Random(hash((rank, number, delay)))
                if changing:
                    check.deadline(own.choice([1, 1, 1.5, 3]) * DEADLINE)
                world.sleep(rank, own.uniform(0, delay))
                attempt = 0
                while True:
                    # The data of a call that was withdrawn must not be used.
                    exchange = Values(rank * 1000 + attempt)
                    who, attempts = wrong.get(number, (None, 0))
                    call = OTHER if who == rank and attempt < attempts else CALL
                    try:
                        alike = check.agree(word_of(call, number), exchange)
                    except DeadlineExceededError as error:
                        if stops and not error.withdrawn:
                            raise UnusableError from error
                        ended.append((error.withdrawn, rank in error.absent))
                        attempt += 1
                        world.sleep(rank, own.uniform(0, delay / 10))
                    else:
                        break
                results.append((attempt, exchange.all if alike else None))
            assert set(ended) <= {(True, False)}
            return results

        try:
            everywhere = world.run(program)
        except UnusableError:
            # One rank was stopped before it could use the data, and another one for a deadline.
            assert stops
            unusable += 1
            continue
        stopped += stops > 0
        for number, each in enumerate(zip(*everywhere, strict=True)):
            expected = [rank * 1000 + attempt for rank, (attempt, _) in enumerate(each)]
            withdrawn += any(attempt for attempt, _ in each)
            who, attempts = wrong.get(number, (0, 0))
            differs = each[who][0] < attempts
            differing += differs
            changed += bool(attempts) and not differs
            for _, received in each:
                assert received == (None if differs else expected), (seed, number, each)
    assert unusable <= stopped
    assert withdrawn > 5
    assert differing > 5
    assert changed > 1


def test_a_leader_that_is_stopped_before_it_sends(monkeypatch):
    """Once it goes on, the data of the other one are there, which have been withdrawn."""
    stopped, send = set(), Neighbors.send

    def send_late(neighbors, nbytes):
        number = int(neighbors._outgoing.words[0]) & 0xFFFF
        if number == 3 and neighbors.out[0] == 0 and neighbors.world not in stopped:
            stopped.add(neighbors.world)
            neighbors.world.sleep(0, 1.7 * DEADLINE)
        send(neighbors, nbytes)

    monkeypatch.setattr(Neighbors, "send", send_late)
    for seed in range(5):
        world = World(2, seed)
        monkeypatch.setattr(lateness, "time", world)

        def program(rank, world=world):
            check, made = Check(world, rank, DEADLINE), []
            for number in range(5):
                attempt = 0
                while len(made) == number:
                    exchange = Values(rank * 1000 + attempt)
                    try:
                        check.agree(word_of(CALL, number), exchange)
                        made.append((attempt, exchange.all))
                    except DeadlineExceededError:
                        attempt += 1
            return made

        for (first, seen), (second, seen_too) in zip(*world.run(program), strict=True):
            assert seen == seen_too == [first, 1000 + second]
        assert world in stopped


@pytest.mark.parametrize("size", slow_but([2, 3, 5, 8, 16, 64], 2, 3, 5))
def test_every_leader_learns_of_any_that_deviates(size, monkeypatch):
    for deviating in range(size):
        world = World(size, deviating)
        monkeypatch.setattr(lateness, "time", world)

        def program(rank, world=world, deviating=deviating):
            check = Check(world, rank, LONG)
            call = OTHER if rank == deviating else CALL
            # No call has told yet that the others are on time.
            assert check.agree(word_of(CALL, 1), None)
            sent = world.sent[rank]
            outcome = check.agree(word_of(call, 2), None), check.agree(word_of(CALL, 3), None)
            assert world.sent[rank] - sent == 2 * (size - 1).bit_length()
            return outcome

        assert world.run(program) == [(False, True)] * size


@pytest.mark.parametrize("size", slow_but([2, 3, 7, 100, 1023, 1024, 4096], 2, 3, 7, 100, 1023))
def test_rounds_of_many_nodes(size):
    """All in step: the word of one node reaches every other one in ⌈log₂ N⌉ rounds."""
    deviating = random.Random(size).randrange(size)
    status = [OTHER if rank == deviating else CALL for rank in range(size)]
    channels = [_channels_of(rank, size) for rank in (0, deviating, size - 1)]
    assert all(len(each) == (size - 1).bit_length() for each in channels)
    for distance, source in channels[0]:
        assert source == -distance % size
        status = [
            status[rank] if status[rank] == status[(rank - distance) % size] else DIFFERENT
            for rank in range(size)
        ]
    assert status == [DIFFERENT] * size


def _channels_of(rank, size):
    """Distance to the target, and the source, of each of the channels that a leader opens."""

    class Counting:
        def __init__(self):
            self.rank, self.size, self.opened = rank, size, []

        def open_neighbor_channel(self, target, source, nbytes):
            self.opened.append(((target - rank) % size, source))

    leaders = Counting()
    Dissemination(leaders, WaitPolicy(), dict)
    return leaders.opened


def test_a_message_may_be_of_the_call_before_or_of_the_next():
    rounds = Rounds(word_of(CALL, 0), None, LONG)
    assert rounds.accepts(word_of(OTHER, 0))
    for number in (0xFFFF, 1):
        assert not rounds.accepts(word_of(CALL, number))
        assert rounds.is_outdated(word_of(CALL, number)) == (number != 1)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_ranks_of_all_nodes_of_a_machine_share_its_cores(comm):
    """As in containers: the nodes are those of the caller, the cores the machine's."""
    with Communicator(MPI.COMM_WORLD, node_of=range(comm.size)) as apart:
        cores = len(os.sched_getaffinity(0))
        assert apart._engine.layout.local_sizes == (1,) * comm.size
        assert apart._engine.layout.oversubscription == max(1.0, comm.size / cores)


def test_two_nodes_whose_ranks_disagree(monkeypatch):
    """Their words are equal: those of no call."""
    monkeypatch.setattr(f"{__name__}.LATENCY", 0.0)
    world = World(2, 1)
    monkeypatch.setattr(lateness, "time", world)

    def program(rank):
        check = Check(world, rank, LONG)
        for number in range(3):
            assert check.agree(word_of(CALL, number), None)
        return check.disagree(3), check.agree(word_of(CALL, 4), None)

    assert world.run(program) == [(False, True)] * 2


def test_times_of_a_leader(monkeypatch):
    world = World(1, 0)
    monkeypatch.setattr(lateness, "time", world)
    times = lateness.Lateness(WaitPolicy(80.0), rounds=1)
    # Nothing is known of the others.
    assert not times.on_time()
    assert times.begin()
    times.settle(80.0)
    for seconds, on_time in [(10.0, True), (10.0, True), (10.1, False)]:
        world.clock += seconds
        assert times.on_time() == on_time
    assert times.begin()
    world.clock += 9.5
    assert not times.lease_is_over(80.0)
    world.clock += 30.0
    assert times.lease_is_over(80.0)
    assert not times.stopped()
    assert not times.stopped(80.0)
    world.clock += 1.0
    assert times.stopped()
    assert times.stopped(80.0)
    assert not times.stopped(90.0)


@pytest.mark.parametrize(
    "change", ["longer", "limit", "unsettled", "shorter elsewhere", "shorter meanwhile"]
)
def test_a_call_that_is_not_like_the_last(change, monkeypatch):
    world, policy = World(1, 0), WaitPolicy(80.0)
    monkeypatch.setattr(lateness, "time", world)
    times = lateness.Lateness(policy, rounds=1)
    times.begin()
    if change == "shorter meanwhile":
        # Another thread sets that of the next call.
        policy.deadline = 40.0
    times.settle(60.0 if change == "shorter elsewhere" else 80.0)
    if change == "longer":
        policy.deadline = 90.0
    elif change == "limit":
        policy.limit = 1.0
    elif change == "unsettled":
        times.unsettle()
    assert not times.on_time()
    assert times.begin() == (change in ("limit", "shorter meanwhile"))
