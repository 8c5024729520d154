"""The tasks of one world, and the proof that a process belongs to them.

Both sides of a connection prove that they have the same secret, without sending it: each sends the
HMAC of its side's name and of random numbers of both. The client's proof comes first, so that a
stranger who connects to the server receives nothing to test guesses of the secret with.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from collectives.errors import LaunchError

SECRET = "COLLECTIVES_SECRET"
"""The environment variable with the secret that all tasks share."""

LONGEST_HELLO = 1 << 10
_LONGEST_LINE = 1 << 20


@dataclass(frozen=True)
class Tasks:
    """This process's rank, every rank's name, and the address that rank 0 serves.

    The name of rank 0 has its address.
    """

    rank: int
    names: tuple[str, ...]
    host: str
    port: int
    cluster: str
    """The same text on all ranks, unless they have been started for different clusters."""
    hosts: frozenset[str] = frozenset()
    """The hosts of all ranks, if known."""
    refuses_late: bool = True
    """Whether rank 0's port stays open once all tasks have arrived, to refuse those that come late.

    torch's store needs the port otherwise.
    """

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.names)

    @property
    def digest(self) -> str:
        """A short text that differs for different clusters."""
        return hashlib.sha256(self.cluster.encode()).hexdigest()

    @property
    def own_name(self) -> str:
        """This process's name."""
        return self.names[self.rank]


def prove(secret: str, side: str, *words: str) -> str:
    """What only a process with the secret can compute, for random words of both sides."""
    return hmac.new(os.fsencode(secret), json.dumps((side, *words)).encode(), "sha256").hexdigest()


def is_proof(given: object, secret: str, side: str, *words: str) -> bool:
    """Whether it is what `prove` returns."""
    return isinstance(given, str) and hmac.compare_digest(
        given.encode(), prove(secret, side, *words).encode()
    )


def addresses_of(host: str) -> list[str]:
    """The IP addresses of a host, in the system's order of preference; OSError if it has none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"{host!r} is no name of a host: {error}") from None
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def check_secret(addresses: Sequence[str], secret: str, *, insecure: bool) -> None:
    """LaunchError without a secret, unless all of rank 0's addresses are loopback addresses."""
    if secret or insecure or not (others := beyond_loopback(addresses)):
        return
    raise LaunchError(
        f"{others[0]} is no loopback address, and {SECRET} is not set: any host on the network"
        f" could take part. Set {SECRET} for all tasks to one long random text, as"
        ' `python -c "import secrets; print(secrets.token_hex(32))"` prints, or give --insecure'
    )


def beyond_loopback(addresses: Sequence[str]) -> list[str]:
    """Those that other hosts may reach."""
    return [
        each for each in addresses if not ipaddress.ip_address(each.partition("%")[0]).is_loopback
    ]


def write(stream: BinaryIO, value: object) -> None:
    """Send one value as a line of JSON; OSError if the connection is closed."""
    stream.write(json.dumps(value).encode() + b"\n")
    stream.flush()


def read(stream: BinaryIO, kind: type, longest: int = _LONGEST_LINE) -> Any:
    """Receive one value of the kind; EOFError at the end, ValueError for anything else."""
    line = stream.readline(longest)
    if not line.endswith(b"\n"):
        raise EOFError("the connection was closed")
    try:
        value = json.loads(line)
    except RecursionError:
        raise ValueError("a value in too many lists") from None
    if not isinstance(value, kind):
        raise ValueError(f"{value!r} where a {kind.__name__} was expected")
    return value
