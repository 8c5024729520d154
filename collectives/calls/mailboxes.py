"""Creation of mailboxes."""

from __future__ import annotations

import pickle

from collectives.calls import Operation
from collectives.calls.objects import gather_pickles
from collectives.consistency.signature import Signature
from collectives.errors import BackendUnavailableError, in_step
from collectives.execution.engine import Engine
from collectives.messaging.liveness import Processes, this_process
from collectives.messaging.mailbox import Mailbox


def open_mailbox() -> Operation:
    """This rank's mailbox. Raises BackendUnavailableError if the transport supports none."""
    own = pickle.dumps(this_process())

    def perform(engine: Engine) -> Mailbox:
        processes = Processes(gather_pickles(engine, own), engine.rank)
        channel = engine.transport.open_message_channel()
        if channel is None:
            kind = type(engine.transport).__name__
            problem = f"mailbox(): {kind} carries no such messages (open_message_channel)"
            raise in_step(BackendUnavailableError(problem))
        return Mailbox(channel, processes, engine.rank, engine.wait_policy)

    return Operation(Signature("mailbox"), perform)
