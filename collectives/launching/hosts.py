"""Which processes share memory, and the addresses at which hosts reach each other."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

LOOPBACK = "127.0.0.1"

# Documentation networks (RFC 5737, RFC 3849): they select the interface of the default route.
_ANYWHERE = ("192.0.2.1", "2001:db8::1")
_LONGEST_MAPPING = 1000


class Host(NamedTuple):
    """Where a process runs.

    Processes of one `node` share memory, those of one `network` reach each other by the loopback
    interface: containers of one machine may share both, either or none.
    """

    node: str
    network: str
    address: str


def this_host(server: str | None) -> Host:
    """Where this process runs; its address is the one that reaches `server`, if given."""
    boot = _read("/proc/sys/kernel/random/boot_id")
    network = f"{boot} {_identity('/proc/self/ns/net')}"
    memory = f"{_identity('/dev/shm')} {_identity('/proc/self/ns/pid')}"
    node = f"{socket.gethostname()} {boot} {memory}"
    return Host(node, network, address_towards(server or "") or address_towards(*_ANYWHERE) or "")


def address_towards(*targets: str) -> str | None:
    """The local address from which the first reachable target is reached; nothing is sent."""
    for target in filter(None, targets):
        try:
            family, kind, *_, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
            with closing(socket.socket(family, kind)) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return None


def listening_address(hosts: Sequence[Host]) -> str | None:
    """The address of rank 0's host that all ranks reach; None if there is no such address."""
    own = hosts[0]
    others = [each.address for each in hosts if each.network != own.network]
    if not others:
        return LOOPBACK
    reached = address_towards(*(each for each in others if not _is_loopback(each)))
    return reached or (own.address if not _is_loopback(own.address) else None)


def process_mapping(hosts: Sequence[Host]) -> str:
    """The node of each rank as PMI_process_mapping: blocks (first node, nodes, ranks per node).

    Empty if it is too long for PMI; MPICH then compares the hosts' names itself.
    """
    numbers: dict[str, int] = {}
    blocks: list[list[int]] = []
    for node, group in groupby(numbers.setdefault(host.node, len(numbers)) for host in hosts):
        ranks = len(list(group))
        if blocks and blocks[-1][2] == ranks and sum(blocks[-1][:2]) == node:
            blocks[-1][1] += 1
        else:
            blocks.append([node, 1, ranks])
    text = "".join(f",({first},{nodes},{ranks})" for first, nodes, ranks in blocks)
    mapping = f"(vector{text})"
    return mapping if len(mapping) <= _LONGEST_MAPPING else ""


def _is_loopback(address: str) -> bool:
    return not address or address == "::1" or address.startswith("127.")


def _read(path: str) -> str:
    """The content of a file of the kernel; empty where there is none."""
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _identity(path: str) -> str:
    try:
        status = os.stat(path)
    except OSError:
        return ""
    return f"{status.st_dev}:{status.st_ino}"
