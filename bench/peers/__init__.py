"""Table of peers. A new peer needs a file and a line here; each is imported on use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from bench.peers.base import Peer

PEERS = {
    "mpi4py": ("bench.peers.mpi", "MpiPeer"),
    "gloo": ("bench.peers.gloo", "GlooPeer"),
}


def open_peer(name: str, world: Any) -> Peer:
    """The peer on the ranks of an mpi4py communicator; PeerUnavailableError if it is missing."""
    module, kind = PEERS[name]
    peer: Peer = getattr(import_module(module), kind)(world)
    return peer
