"""Removing what a killed MPI job leaves behind: processes and shared memory."""

import contextlib
import os
import select
import signal
import subprocess
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
SEGMENT_PATTERNS = ("mpich_shm_*", "sm_segment.*")
GRACE_SECONDS = 5


def end_group(process):
    """End a process and its group: first so that mpirun can clean up, then by force."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)


def kill_tagged(variable, value):
    """Kill every process that has an environment variable: ranks may leave mpirun's group."""
    tag = f"{variable}={value}".encode()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        # Processes end while this looks at them, and others' may not be looked at.
        with contextlib.suppress(OSError):
            if tag in environment.read_bytes().split(b"\0"):
                kill_and_wait(int(environment.parent.name))


def kill_and_wait(process_id):
    """Kill a process that need not be a child, and wait until it has let go of its memory."""
    descriptor = os.pidfd_open(process_id)
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        select.select([descriptor], [], [], GRACE_SECONDS)
    finally:
        os.close(descriptor)


def find_segments(directory=SHARED_MEMORY):
    """Return the files of shared memory that MPI jobs made."""
    return {path for pattern in SEGMENT_PATTERNS for path in directory.glob(pattern)}


def remove_segments(known, directory=SHARED_MEMORY):
    """Remove the shared memory made since `known` was found, unless a live process maps it."""
    for path in find_segments(directory) - known - mapped_files():
        path.unlink(missing_ok=True)


def mapped_files():
    """Return the files that live processes map into their memory."""
    paths = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            for line in maps.read_text(errors="replace").splitlines():
                paths.add(Path(line.split(maxsplit=5)[-1]))
    return paths
