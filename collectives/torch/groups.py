"""Creation of process groups."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from collectives.communicator import Communicator
from collectives.errors import BackendUnavailableError, LaunchError
from collectives.launching.start import session, start_mpi, start_through
from collectives.torch.call_queue import CallQueue
from collectives.torch.members import Members
from collectives.torch.messages import Messages
from collectives.torch.process_group import CollectivesProcessGroup
from collectives.world import world

# MPI guarantees tags up to 32767.
_TAGS = 1 << 15

_created: Counter[str] = Counter()
"""How often this process has created a group, by torch's name and its ranks; "" is all ranks'.

Torch uses names again, and numbers groups anew with each group of all ranks. Each group has other
keys of the store, which may outlive it.
"""


def create(backend: str, options: Any) -> CollectivesProcessGroup:
    """The group of torch's options, for a backend of that name. Collective between its members.

    Starts MPI through torch's store where no launcher of MPI started the process.

    Raises BackendUnavailableError if MPI was initialized for calls of one thread, ValueError where
    torch's ranks are not MPI's or the members' lists differ, LaunchError where MPI can't start,
    DeadlineExceededError if a rank does not start, or a member does not create the group, within
    the timeout.
    """
    if not options.global_ranks_in_group:
        seconds = options.timeout.total_seconds()
        mpi = start_through(options.store, options.group_rank, options.group_size, seconds)
        # Before `world`, which judges the environment by itself.
        _refuse_world_of_one(options, mpi.COMM_WORLD.size)
        worlds = _created[""] + 1
        _created.clear()
        _created[""] = worlds
    whole, mpi = world(), start_mpi()
    if mpi.Query_thread() != mpi.THREAD_MULTIPLE:
        raise BackendUnavailableError(
            "MPI was initialized without MPI_THREAD_MULTIPLE, which the threads of a group need:"
            " leave `mpi4py.rc.thread_level` as it is"
        )
    name = f"{options.group_id} {list(options.global_ranks_in_group)}"
    attempt = f"{session()}{_created['']}.{_created[name]}/"
    _created[name] += 1
    members = Members(options.store, options.group_rank, options.group_size, attempt)
    ranks = list(options.global_ranks_in_group)
    if not ranks:
        ranks = list(range(whole.size))
        _check_world(options, whole)
    elif max(ranks) >= whole.size:
        raise LaunchError(
            f"a group of ranks {ranks}: MPI has a world of {whole.size}. Without mpirun the first"
            ' group must be of all ranks, as init_process_group("collectives") makes it'
        )
    members.await_creation(ranks, options.timeout)
    # Ranks that are not members make no call: a number of groups would differ between ranks.
    tag = zlib.crc32(options.group_id.encode()) % _TAGS
    mpi_comm = mpi.COMM_WORLD.Create_group(mpi.COMM_WORLD.group.Incl(ranks), tag)
    comm = Communicator(mpi_comm, deadline=options.timeout.total_seconds())
    engine = comm._engine
    queue = CallQueue(engine, engine.wait_policy, partial(_on_gpus, comm))
    messages = Messages(mpi_comm, engine.wait_policy, members)
    return CollectivesProcessGroup(backend, comm, messages, queue, members)


@contextmanager
def _on_gpus(comm: Communicator, asynchronous: bool) -> Iterator[None]:
    engine = comm._engine
    assert engine.devices is not None
    if engine.before_call is not None:
        engine.before_call()
    # Calls of other threads must not come between the streams.
    with (
        engine.lock,
        engine.devices.beside(None) if asynchronous else nullcontext(),
        engine.devices.as_torch(),
    ):
        yield


def _refuse_world_of_one(options: Any, actual: int) -> None:
    if actual == 1 < options.group_size:
        raise LaunchError(
            f"rank={options.group_rank}, world_size={options.group_size}: MPI was initialized"
            " before as a world of one, by collectives.world() or mpi4py.MPI. Call"
            " init_process_group first. Lightning initializes MPI where it starts its ranks"
            " itself: give its Trainer plugins=[LightningEnvironment()]"
        )


def _check_world(options: Any, whole: Communicator) -> None:
    given, actual = (options.group_rank, options.group_size), (whole.rank, whole.size)
    if given != actual:
        raise ValueError(
            f"rank={given[0]}, world_size={given[1]}: mpirun started this process as rank"
            f" {actual[0]} of {actual[1]}. Leave both out, or give MPI's"
        )
