"""End a rank whose test takes too long, after it has dumped its stacks."""

import contextlib
import faulthandler
import os
import signal

DEFAULT_SECONDS = 60
EXIT_DELAY = 1
"""Between showing the stacks and exiting, since the first rank to exit takes the others along."""

RUNNERS = (
    "/_pytest/",
    "/pluggy/",
    "/pytest/",
    "/mpi4py/run.py",
    "/mpi4py/__main__",
    "<frozen runpy",
)


def time_limit(item):
    """Return how many seconds a test may take on a rank."""
    mark = item.get_closest_marker("timeout_seconds")
    return mark.args[0] if mark else DEFAULT_SECONDS


class Watchdog:
    """A timer that works even while a C function holds Python's lock, as MPI_Finalize does."""

    def __init__(self, path=None):
        """Dump the stacks to a file, else to the standard error that pytest has not captured."""
        self.path = path
        self.file = open(path or os.dup(2), "w", encoding="utf-8")  # noqa: SIM115 (kept open)
        # The alarm dumps the stacks of every rank; then faulthandler's own timer exits.
        faulthandler.register(signal.SIGALRM, file=self.file, all_threads=True)

    def start(self, seconds):
        """Limit the process to so many seconds from now."""
        if self.path:
            # The last test may have ended between its alarm and its exit.
            self.file.truncate(0)
            self.file.seek(0)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        faulthandler.dump_traceback_later(seconds + EXIT_DELAY, exit=True, file=self.file)

    def stop(self):
        """Remove the limit."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()

    @contextlib.contextmanager
    def limit(self, seconds):
        """Limit the body of a `with` statement."""
        self.start(seconds)
        try:
            yield
        finally:
            self.stop()


def read_stacks(path):
    """Return the stacks that a watchdog has dumped, without the frames of the test runners."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    # The timer that exits dumps the stacks again, unless the alarm could not.
    text = text.partition("Timeout (")[0] or text
    own = [line for line in text.splitlines() if not any(runner in line for runner in RUNNERS)]
    return "\n".join(own) if any(line.startswith("  File") for line in own) else text
