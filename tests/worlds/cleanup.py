"""Remove the processes and shared memory of a killed MPI job."""

import contextlib
import os
import re
import select
import signal
import subprocess
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
SEGMENT_PATTERNS = ("mpich_shm_*", "sm_segment.*")
GRACE_SECONDS = 5


def end_group(process):
    """End a process and its group: by SIGTERM, so that mpirun can clean up, then by SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)


def find_tagged(variable, value):
    """Return the folder in /proc of every process with an environment variable."""
    tag, found = f"{variable}={value}".encode(), []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        # Processes end during the search, and others' can't be read.
        with contextlib.suppress(OSError):
            if tag in environment.read_bytes().split(b"\0"):
                found.append(environment.parent)
    return found


def kill_tagged(variable, value):
    """Kill every process with an environment variable: ranks may not be in mpirun's group."""
    for folder in find_tagged(variable, value):
        with contextlib.suppress(OSError):
            kill_and_wait(int(folder.name))


def describe_tagged(variable, value):
    """Return a line for each process with an environment variable: its threads' states."""
    lines = []
    for folder in find_tagged(variable, value):
        with contextlib.suppress(OSError):
            command = folder.joinpath("cmdline").read_bytes().split(b"\0")[0].decode()
            threads = [
                "{} in {}".format(
                    re.search(r"State:\s+(\S)", thread.joinpath("status").read_text())[1],
                    thread.joinpath("wchan").read_text(),
                )
                for thread in sorted(folder.glob("task/*"))
            ]
            lines.append(f"{folder.name} {command}: {', '.join(threads)}")
    return "\n".join(lines)


def kill_and_wait(process_id):
    """Kill a process that need not be a child, and wait until its memory is unmapped."""
    descriptor = os.pidfd_open(process_id)
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        select.select([descriptor], [], [], GRACE_SECONDS)
    finally:
        os.close(descriptor)


def find_segments(directory=SHARED_MEMORY):
    """Return the shared memory files of MPI jobs."""
    return {path for pattern in SEGMENT_PATTERNS for path in directory.glob(pattern)}


def remove_segments(known, directory=SHARED_MEMORY):
    """Remove the shared memory created since `known` was found, unless a live process uses it."""
    for path in find_segments(directory) - known - used_files():
        path.unlink(missing_ok=True)


def used_files():
    """Return the files that live processes have open or map."""
    paths = set()
    # In this order, since a process maps a file while it is open, and closes it then.
    for folder in Path("/proc").glob("[0-9]*/fd"):
        # The process may have ended, or close a file.
        with contextlib.suppress(OSError):
            for link in folder.iterdir():
                with contextlib.suppress(OSError):
                    paths.add(link.readlink())
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            for line in maps.read_text(errors="replace").splitlines():
                paths.add(Path(line.split(maxsplit=5)[-1]))
    return paths
