"""The older place of `collectives.schedules`."""

from collectives.schedules.schedule import Recv, Reduce, Send, one_chunk

__all__ = ["Recv", "Reduce", "Send", "one_chunk"]
