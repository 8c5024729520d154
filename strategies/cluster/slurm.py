"""Slurm's description of a step: its nodes, and the number of tasks on each.

Hosts keep Slurm's order, in which tasks are numbered. (TensorFlow's resolver sorts hosts and jobs,
which may assign a task to a node that it doesn't run on.)
"""

from __future__ import annotations

import re
from itertools import product

_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_hosts(text: str) -> list[str]:
    """The hosts that a host list such as "gpu[01-03,7],login" names, in its order.

    As `scontrol show hostnames`. Raises ValueError for what is no host list.
    """
    if not text or text.count("[") != text.count("]"):
        raise ValueError(f"{text!r} is no host list")
    # At the commas outside of brackets.
    parts = re.split(r",(?![^\[]*\])", text)
    return [host for part in parts for host in _expand(part, text)]


def expand_counts(text: str) -> list[int]:
    """The numbers that "2(x3),1" stands for: 2, 2, 2, 1. ValueError for anything else."""
    counts: list[int] = []
    for part in text.split(","):
        found = _COUNT.fullmatch(part.strip())
        if found is None:
            raise ValueError(f"{text!r} is no list of task counts such as '2(x3),1'")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def place_tasks(
    hosts: list[str], per_host: list[int], tasks: int, distribution: str = "block"
) -> list[str]:
    """Each task's host, by its number.

    `distribution` is srun's, of which the part before a colon or comma counts: "block" (the
    default) fills one host after the other, "cyclic" goes round. Raises ValueError for others, and
    where so many tasks don't fit.
    """
    if len(hosts) != len(per_host) or sum(per_host) < tasks:
        raise ValueError(f"{tasks} tasks on hosts {hosts}, which run {per_host}: they don't fit")
    places = [(turn, host) for host, count in enumerate(per_host) for turn in range(count)]
    kind = re.split("[:,]", distribution)[0].lower()
    if kind == "cyclic":
        places.sort()
    elif kind not in ("", "*", "block"):
        raise ValueError(f"tasks are distributed by {distribution!r}: known are block and cyclic")
    return [hosts[host] for _, host in places[:tasks]]


def _expand(part: str, text: str) -> list[str]:
    pieces = list(_PIECE.finditer(part))
    if "".join(piece[0] for piece in pieces) != part or not part:
        raise ValueError(f"{text!r} is no host list")
    choices = [[piece[2]] if piece[1] is None else _numbers(piece[1], text) for piece in pieces]
    return ["".join(chosen) for chosen in product(*choices)]


def _numbers(ranges: str, text: str) -> list[str]:
    """The numbers in a pair of brackets, with their leading zeros."""
    numbers: list[str] = []
    for each in ranges.split(","):
        found = _RANGE.fullmatch(each)
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise ValueError(f"{text!r} is no host list: [{ranges}]")
        first, last = found[1], found[2] or found[1]
        numbers += [f"{n:0{len(first)}d}" for n in range(int(first), int(last) + 1)]
    return numbers
