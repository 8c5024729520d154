"""Options of programs that make hosts, checked before any is made."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Collection

from bench.output_paths import output_file
from bench.sizes import parse_count

UNSHAPED = "unshaped"
# A part of what tc(8) takes, with the unit that it may leave out.
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)(?:[kmgt]i?)?(?:bit|bps)", re.IGNORECASE)
_LAYOUT = re.compile("([1-9][0-9]{0,3})x([1-9][0-9]{0,3})")


def add_options(
    parser: argparse.ArgumentParser, *, rates: str, repeats: int, unshaped: bool = False
) -> None:
    """Those of every table, with these defaults; whether a link may be unshaped."""
    add = parser.add_argument
    add("--layouts", type=_layouts, default="2x1,2x2", help="hosts x ranks (default: 2x1,2x2)")
    add("--rates", type=_rates(unshaped=unshaped), default=rates, help=f"default: {rates}")
    add("--repeats", type=parse_count, default=repeats, help=f"default: {repeats}")
    add("--markdown", type=output_file, metavar="FILE")


def parse_rate(text: str) -> str:
    """A rate of tc(8), as it is given."""
    match = _RATE.fullmatch(text)
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate such as 200mbit or 1gbit")
    return text


def parse_names(known: Collection[str]) -> Callable[[str], list[str]]:
    """A parser of some of these names in a comma list."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
        return names

    return parse


def _layouts(text: str) -> list[tuple[int, int]]:
    """The numbers of hosts, and of ranks on each, in a comma list."""
    matches = {part: _LAYOUT.fullmatch(part) for part in text.split(",")}
    for part, match in matches.items():
        if match is None:
            raise argparse.ArgumentTypeError(f"{part!r} is not hosts x ranks, such as 2x1")
    return [(int(match[1]), int(match[2])) for match in matches.values() if match]


def _rates(*, unshaped: bool) -> Callable[[str], list[str]]:
    """From a comma list."""

    def parse(text: str) -> list[str]:
        parts = text.split(",")
        return [part if unshaped and part == UNSHAPED else parse_rate(part) for part in parts]

    return parse
