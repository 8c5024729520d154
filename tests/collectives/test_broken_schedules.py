"""The verifier rejects wrong schedules, made by mutation of right ones or by hand."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from collectives import ScheduleError, algorithms
from collectives.analysis.verify import verify_schedule
from collectives.schedules.schedule import Recv, Reduce, Send
from collectives.schedules.spec import spec_of
from tests.collectives.oracle import case
from tests.slow import slow

PAIRS = algorithms.pairs()
# Exact sets of contributors below 256 ranks, fingerprints above.
SIZES = [4, 7, *slow(300)]
# Where 300 ranks take few rounds; the fingerprints do not depend on the algorithm.
QUICK_PAIRS = [("all_reduce", "doubling"), ("reduce_scatter", "circulant"), ("gather", "binomial")]


def check(collective, rounds, size, chunks):
    verify_schedule(spec_of(collective), rounds, size, chunks)


def rounds_of(collective, algorithm, size):
    found = algorithms.find(collective, algorithm)
    return [list(steps) for steps in found.schedule(np.arange(size), size)], found.chunks(size)


def drop_a_round(rounds, at, size, chunks):
    del rounds[at]


def double_a_round(rounds, at, size, chunks):
    if all(not isinstance(step, Reduce) for step in rounds[at]):
        return "doubling a round of copies changes nothing that matters"
    rounds.insert(at, rounds[at])
    return None


def shift_the_sent_chunk(rounds, at, size, chunks):
    if chunks == 1:
        return "there is but one chunk"
    rounds[at] = [_shifted(step, chunks) if isinstance(step, Send) else step for step in rounds[at]]
    return None


def shift_the_received_chunk(rounds, at, size, chunks):
    if chunks == 1:
        return "there is but one chunk"
    rounds[at] = [step if isinstance(step, Send) else _shifted(step, chunks) for step in rounds[at]]
    return None


def _shifted(step, chunks):
    return replace(step, chunk=(step.chunk + 1) % chunks)


def copy_for_reduce(rounds, at, size, chunks):
    if not any(isinstance(step, Reduce) for step in rounds[at]):
        return "the round folds nothing"
    rounds[at] = [
        Recv(step.chunk, step.peer, step.count, step.when) if isinstance(step, Reduce) else step
        for step in rounds[at]
    ]
    return None


def reduce_for_copy(rounds, at, size, chunks):
    if not any(isinstance(step, Recv) for step in rounds[at]):
        return "the round copies nothing"
    rounds[at] = [
        Reduce(step.chunk, step.peer, step.count, step.when) if isinstance(step, Recv) else step
        for step in rounds[at]
    ]
    return None


def a_send_that_nobody_receives(rounds, at, size, chunks):
    rounds[at] = [step for step in rounds[at] if isinstance(step, Send)]


def a_receive_that_nobody_sends(rounds, at, size, chunks):
    rounds[at] = [step for step in rounds[at] if not isinstance(step, Send)]


def a_wrong_peer(rounds, at, size, chunks):
    rounds[at] = [
        replace(step, peer=(step.peer + 1) % size) if isinstance(step, Send) else step
        for step in rounds[at]
    ]


def a_chunk_too_few(rounds, at, size, chunks):
    rounds[at] = [
        replace(step, count=step.count - 1) if isinstance(step, Send) else step
        for step in rounds[at]
    ]


MUTATIONS = [
    drop_a_round,
    double_a_round,
    shift_the_sent_chunk,
    shift_the_received_chunk,
    copy_for_reduce,
    reduce_for_copy,
    a_send_that_nobody_receives,
    a_receive_that_nobody_sends,
    a_wrong_peer,
    a_chunk_too_few,
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
def test_a_mutated_schedule_is_rejected(collective, algorithm, mutation, size):
    check_mutated(collective, algorithm, mutation, size)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_mutated_schedule_of_many_ranks_is_rejected(mutation):
    for collective, algorithm in QUICK_PAIRS:
        with case(collective, algorithm):
            check_mutated(collective, algorithm, mutation, 300)


def check_mutated(collective, algorithm, mutation, size):
    rounds, chunks = rounds_of(collective, algorithm, size)
    places = {0, len(rounds) // 2, len(rounds) - 1}
    for at in places:
        mutated = list(rounds)
        if mutation(mutated, at, size, chunks) is not None:
            continue  # the mutation isn't defined for this round; the message says why
        with pytest.raises(ScheduleError):
            check(collective, mutated, size, chunks)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_every_mutation_has_a_meaning_somewhere(mutation):
    meanings = []
    for collective, algorithm in PAIRS:
        rounds, chunks = rounds_of(collective, algorithm, 7)
        meanings += [mutation(list(rounds), at, 7, chunks) is None for at in range(len(rounds))]
    assert sum(meanings) >= 3


RANK = np.arange(2)
BY_HAND = {
    "a fold into a chunk that is empty": (
        "broadcast",
        [[Send(0, 1, when=RANK == 0), Reduce(0, 0, when=RANK == 1)]],
        1,
        "round 0, rank 1, chunk 0: a fold into an empty chunk",
    ),
    "an empty chunk is sent": (
        "broadcast",
        [[Send(0, 0, when=RANK == 1), Recv(0, 1, when=RANK == 0)]],
        1,
        "round 0, rank 1, chunk 0: an empty chunk is sent",
    ),
    "a chunk is overwritten while it is sent": (
        "all_reduce",
        [[Send(0, 1 - RANK), Recv(0, 1 - RANK)]],
        1,
        "round 0, rank 1, chunk 0: overwritten while in use",
    ),
    "a chunk is overwritten twice in a round": (
        "broadcast",
        [
            [
                Send(0, 1, when=RANK == 0),
                Send(0, 1, when=RANK == 0),
                Recv(0, 0, when=RANK == 1),
                Recv(0, 0, when=RANK == 1),
            ]
        ],
        1,
        "round 0, rank 1, chunk 0: overwritten while in use",
    ),
    "a contribution comes twice": (
        "all_reduce",
        [[Send(0, 1 - RANK), Reduce(0, 1 - RANK)], [Send(0, 1 - RANK), Reduce(0, 1 - RANK)]],
        1,
        "round 1, rank 1, chunk 0: a contribution that is there already",
    ),
    "a rank sends to itself": (
        "all_reduce",
        [[Send(0, RANK), Reduce(0, RANK)]],
        1,
        "round 0, rank 0, chunk 0: peer 0 does not exist, or is the rank itself",
    ),
    "a rank sends to one that does not exist": (
        "broadcast",
        [[Send(0, 2, when=RANK == 0)]],
        1,
        "round 0, rank 0, chunk 0: peer 2 does not exist, or is the rank itself",
    ),
    "a chunk that does not exist": (
        "broadcast",
        [[Send(1, 1, when=RANK == 0), Recv(1, 0, when=RANK == 1)]],
        1,
        "round 0, rank 0, chunk 1: no such chunk",
    ),
    "a chunk is received and folded in one round": (
        "reduce",
        [
            [Send(0, 0, when=RANK == 1), Recv(0, 1, when=RANK == 0)],
            [
                Send(0, 0, when=RANK == 1),
                Send(0, 0, when=RANK == 1),
                Reduce(0, 1, when=RANK == 0),
                Recv(0, 1, when=RANK == 0),
            ],
        ],
        1,
        "round 1, rank 0, chunk 0: received and folded in one round",
    ),
    "nothing is done": (
        "all_gather",
        [],
        2,
        "round 0, rank 0, chunk 1: the condition of all_gather does not hold",
    ),
    "chunks of another block": (
        "all_to_all",
        [[Send(1 - RANK, 1 - RANK), Recv(2 + RANK, 1 - RANK)]],
        4,
        "round 0, rank 1, chunk 3: another chunk's data is sent here",
    ),
    "another number of chunks": (
        "all_gather",
        [[Send(RANK, 1 - RANK), Recv(1 - RANK, 1 - RANK, 2)]],
        2,
        "round 0, rank 1, chunk 0: 2 chunks expected, 1 sent by rank 0",
    ),
    "one send for two receives": (
        "all_gather",
        [[Send(RANK, 1 - RANK), Recv(1 - RANK, 1 - RANK), Recv(1 - RANK, 1 - RANK)]],
        2,
        "round 0, rank 1, chunk 0: as many sends as receives are needed",
    ),
}


@pytest.mark.parametrize("fault", BY_HAND)
def test_the_error_names_round_rank_and_chunk(fault):
    collective, rounds, chunks, message = BY_HAND[fault]
    with pytest.raises(ScheduleError) as caught:
        check(collective, rounds, 2, chunks)
    assert message in str(caught.value)
    error = pickle.loads(pickle.dumps(caught.value))
    assert (type(error), str(error)) == (ScheduleError, str(caught.value))
    assert (error.round, error.rank, error.chunk) == (
        caught.value.round,
        caught.value.rank,
        caught.value.chunk,
    )


def test_ranks_that_fold_in_different_orders():
    """Each sends its part to all and reduces theirs into its own: (0 + 1) + 2, but 1 + (0 + 2)."""
    steps = []
    for peer in range(3):
        others = np.arange(3) != peer
        steps += [Send(0, peer, when=others), Reduce(0, peer, when=others)]
    with pytest.raises(ScheduleError, match="round 1, rank 2, chunk 0: folded in another order"):
        check("all_reduce", [steps], 3, 1)
