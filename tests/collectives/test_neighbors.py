"""Buffers of messages between neighbours that are sent late."""

from collectives.transports.neighbors import MessageNeighborChannel


class Sending:
    def __init__(self):
        self.over = False

    def done(self):
        return self.over


class Slow:
    """A transport whose messages are sent when the test says so."""

    def __init__(self):
        self.sent = []

    def send(self, buffer, peer, tag, kind):
        self.sent.append((buffer, Sending()))
        return self.sent[-1][1]

    def receive(self, buffer, peer, tag):
        return None


def test_no_buffer_is_changed_while_it_is_being_sent():
    transport = Slow()
    channel = MessageNeighborChannel(transport, 1, 1, 16)
    for number in range(1, 6):
        channel.outgoing().words[0] = number
        channel.send(8)
        assert not channel.sent()
    assert [int.from_bytes(buffer, "little") for buffer, _ in transport.sent] == [1, 2, 3, 4, 5]


def test_a_buffer_that_is_free_is_used_again():
    transport = Slow()
    channel = MessageNeighborChannel(transport, 1, 1, 16)
    first = channel.outgoing()
    assert channel.outgoing() is first
    channel.send(8)
    second = channel.outgoing()
    assert second is not first
    channel.send(8)
    for _, sending in transport.sent:
        sending.over = True
    assert channel.sent()
    assert channel.outgoing() is second
    channel.send(8)
    # The other one has become free meanwhile.
    assert channel.outgoing() is first
