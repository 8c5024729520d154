"""How a program that a user might type tells the test beside it what it was refused."""

import contextlib
import json

import collectives


@contextlib.contextmanager
def refused(what):
    """Say, once for all ranks, which TypeError ends the block: null where none does."""
    text = None
    try:
        yield
    except TypeError as error:
        text = str(error)
    texts = set(collectives.world().all_gather_object(text))
    assert len(texts) == 1, texts
    if collectives.world().rank == 0:
        print(json.dumps({what: text}), flush=True)


def refusals_of(output):
    """What a program's `refused` blocks have said."""
    said = {}
    for line in output.splitlines():
        if line.startswith("{"):
            said |= json.loads(line)
    return said
