"""The recorded measurements in one world: `mpirun -n 2 python -m bench.suite --output DIR`.

Every run is a line of arguments for `python -m bench`, which repeats it alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import collectives
from bench.options import Parser, parse
from bench.reports.sections import Section, write_json_sections, write_markdown_sections
from bench.run import check_outputs, measure, status_of

_LARGE = "64K,256K,1M,4M,16M,64M"
RUNS = {
    "all_reduce": f"all_reduce --stream --sizes 8,1K,4K,16K,{_LARGE}",
    "all_reduce, registered": f"all_reduce --registered --stream --sizes {_LARGE}",
    "all_reduce of float16": "all_reduce --dtype float16 --sizes 1M,4M,16M",
    "all_reduce of bfloat16": "all_reduce --dtype bfloat16 --sizes 1M,4M,16M",
    "all_reduce_many": "all_reduce_many --tensors 1000 --tensor-bytes 4000",
    "persistent all_reduce_many": "persistent_all_reduce_many --tensors 1000 --tensor-bytes 4000",
    "broadcast": "broadcast --sizes 1M,16M",
    "broadcast, registered": "broadcast --registered --sizes 1M,16M",
    "all_gather": "all_gather --sizes 1M,16M",
    "all_gather, registered": "all_gather --registered --sizes 1M,16M",
    "reduce_scatter": "reduce_scatter --sizes 1M,16M",
    "reduce_scatter, registered": "reduce_scatter --registered --sizes 1M,16M",
}
# With oversubscribed cores, only the mutual disturbance of the ranks can be observed.
RUNS_OF_MANY = {"all_reduce": "all_reduce --sizes 1M"}
_MOST_RANKS = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status, the same on every rank."""
    options = _parse(arguments)
    return status_of(lambda comm: _measure_all(comm, options))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m bench.suite", description=__doc__)
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="DIR", help="for the two files")
    add("--repeats", type=int, default=50, help="default: %(default)s")
    return parser.parse_args(arguments)


def _measure_all(comm: collectives.Communicator, options: argparse.Namespace) -> int:
    """Number of wrong elements. The files are rewritten after each run, which keeps the results."""
    from mpi4py import MPI

    check_outputs(MPI.COMM_WORLD, options, "output", folder=True)
    sections: list[Section] = []
    for title, line in (RUNS if comm.size <= _MOST_RANKS else RUNS_OF_MANY).items():
        given = f"{line} --peer mpi4py --repeats {options.repeats}"
        run = measure(comm, parse(given.split()))
        command = f"mpirun -n {comm.size} python -m bench {given}"
        sections.append(Section(title, command, run.header, run.columns, run.rows))
        if comm.rank == 0:
            _write(options.output, sections)
    return sum(row.wrong for section in sections for row in section.rows)


def _write(folder: Path, sections: Sequence[Section]) -> None:
    header = sections[0].header
    ranks, mpi = header["ranks"], header["mpi"].rpartition(" ")[0]
    stem = folder / f"suite-{ranks}-ranks-{mpi.replace(' ', '').lower()}"
    folder.mkdir(parents=True, exist_ok=True)
    write_json_sections(stem.with_suffix(".json"), sections)
    write_markdown_sections(stem.with_suffix(".md"), f"{ranks} ranks, {mpi}", sections)


if __name__ == "__main__":
    sys.exit(main())
