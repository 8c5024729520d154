"""Sizes in bytes: parsing, formatting, and the steps of a sweep."""

from __future__ import annotations

import argparse
import re

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"(\d+)([KMG]?)", re.IGNORECASE)


def parse_size(text: str) -> int:
    """The bytes of a text like `8`, `64K`, `1M` or `1G`; units are powers of 1024."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 8, 64K, 1M or 1G")
    number, unit = match.groups()
    return int(number) * _UNITS[unit.upper()]


def parse_sizes(text: str) -> tuple[int, ...]:
    """The sizes in a comma list."""
    return tuple(parse_size(part) for part in text.split(","))


def sweep(smallest: int, largest: int, factor: int) -> tuple[int, ...]:
    """Sizes from the smallest up to the largest, each `factor` times the one before."""
    sizes = [smallest]
    while sizes[-1] * factor <= largest:
        sizes.append(sizes[-1] * factor)
    return tuple(sizes)


def shown(nbytes: float) -> str:
    """The size in the largest unit that divides it, such as 64K."""
    for unit in "GMK":
        if nbytes >= _UNITS[unit] and nbytes % _UNITS[unit] == 0:
            return f"{nbytes / _UNITS[unit]:.0f}{unit}"
    return f"{nbytes:.0f}"


def parse_count(text: str) -> int:
    """A number from 1 up."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 up")
    return int(text)
