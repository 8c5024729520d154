"""Sabotaged transports that never communicate: the suite must fail on them."""

from collectives.shm.peer_memory import PeerMemory

BROKEN_VARIABLE = "TEST_BROKEN_TRANSPORT"
"""In the environment, "messages" or "memory": what the fixture `comm` hands out broken."""


def break_communicator(comm, what):
    """Drop what a sound communicator sends, and offer no other path."""
    if what == "memory":
        break_memory(comm._engine.node.steps.memory)
        # Some paths have looked up the addresses of the bounce buffers.
        comm._engine.join(comm._engine.node)
    else:
        break_messages()
        comm._engine.node = None


def break_messages():
    """Every message over MPI is lost."""
    from collectives.transports.base import Copied
    from collectives.transports.mpi import MpiTransport

    MpiTransport.exchange_beside = lambda transport, sends, receives, overlapped: None
    MpiTransport.send = lambda transport, buffer, peer, tag, kind: Copied(buffer, kind)
    MpiTransport.receive = lambda transport, buffer, peer, tag: Copied(buffer, 0)
    MpiTransport.native = lambda transport, collective, op, dtype: None


def break_memory(memory):
    """Every rank reads its own buffers and slots instead of the others', and copies nothing."""
    PeerMemory.read = PeerMemory.write = lambda self, peer, address, nbytes, here: None
    for peer in range(memory.size):
        memory.stages[peer] = memory.stages[memory.rank]
        memory.slots[peer] = memory.slots[memory.rank]
