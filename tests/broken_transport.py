"""A transport that never communicates: the suite must fail on it."""

BROKEN_VARIABLE = "TEST_BROKEN_TRANSPORT"
"""In the environment, makes the fixture `comm` hand out such a transport."""


def break_transport():
    """Let every message over MPI be lost without a word, and offer no other way."""
    from collectives.transports.mpi import MpiTransport

    MpiTransport.exchange = lambda transport, sends, receives: None
    MpiTransport.send = lambda transport, buffer, peer, tag: None
    MpiTransport.receive = lambda transport, buffer, peer, tag: len(buffer)
    MpiTransport.native = lambda transport, collective, op, dtype: None
