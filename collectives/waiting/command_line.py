"""Time limits on command lines."""

from __future__ import annotations

import argparse

from collectives.waiting.wait_policy import check_deadline

_LONGEST = 1e6
"""Seconds; sockets count milliseconds in 32 bits."""


def parse_seconds(text: str) -> float:
    """The time limit of that text, for argparse: a deadline that sockets and locks can keep."""
    try:
        seconds = check_deadline(float(text))
    except ValueError:
        seconds = None
    if seconds is None or seconds > _LONGEST:
        allowed = f"must be a number of seconds above 0 and at most {_LONGEST:.0f}"
        raise argparse.ArgumentTypeError(f"{text!r}: {allowed}")
    return seconds
