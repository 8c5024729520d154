"""The table of peers. Adding one takes a file and a line here; each is imported when asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from bench.peers.base import Peer

PEERS = {
    "mpi4py": ("bench.peers.mpi", "MpiPeer"),
    "gloo": ("bench.peers.gloo", "GlooPeer"),
}


def open_peer(name: str, world: Any) -> Peer:
    """The peer between the ranks of an mpi4py communicator; PeerUnavailableError without it."""
    module, kind = PEERS[name]
    peer: Peer = getattr(import_module(module), kind)(world)
    return peer
