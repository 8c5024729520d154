"""`python -m collectives doctor`: report on the installation, and try every collective."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from collectives import doctor


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand; return the exit status."""
    options = _parser().parse_args(arguments)
    return doctor.main(options.limit, links=options.links)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m collectives")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    command = commands.add_parser(
        "doctor",
        help="report on this installation and try every collective",
        description="Report on Python, MPI, the ranks and the machine, and try every collective,"
        " alone or on the ranks that mpirun starts. Exits with status 1 if anything fails.",
    )
    doctor.add_options(command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
