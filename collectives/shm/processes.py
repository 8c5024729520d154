"""The processes of a node's ranks, as the system shows them."""

from __future__ import annotations

import os
from pathlib import Path


def process_namespace() -> int:
    """The number of the namespace in which this process's number is valid; 0 if it isn't known."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def boot_id() -> str:
    """What the processes of one running kernel have in common; "" if it isn't known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""


def is_alive(process: int) -> bool:
    """Whether the process runs. A killed process remains as a zombie until its parent waits."""
    try:
        with open(f"/proc/{process}/stat", encoding="ascii", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except ProcessLookupError:  # reaped between opening and reading
        return False
    except FileNotFoundError:
        return not os.path.isdir("/proc/self")
    except OSError:  # such as without a free descriptor
        return True
