"""Former name of `collectives.schedules.schedule`, kept for existing imports."""

from collectives.schedules.schedule import Recv, Reduce, Send, one_chunk

__all__ = ["Recv", "Reduce", "Send", "one_chunk"]
