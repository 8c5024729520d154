"""A run of the GPU benchmark. Every rank measures; only rank 0 prints and writes."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import collectives
from bench.cases import CASES
from bench.gpu import bars
from bench.gpu.bare import NAME
from bench.gpu.device import Device
from bench.gpu.environment import describe_gpu, gpu_problem
from bench.gpu.measure import ALGORITHM, GpuBench
from bench.gpu.options import BARS, parse
from bench.options import problems
from bench.reports import open_table
from bench.reports.columns import columns, header_lines
from bench.reports.sections import Section, write_json_sections, write_markdown_sections
from bench.run import CAN_NOT_MEASURE, CanNotMeasureError, check_outputs, status_of
from collectives.cuda.runtime import cuda


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status, the same on every rank."""
    options = parse(arguments)
    problem = gpu_problem()
    if problem is not None:
        print(f"bench.gpu: {problem}", file=sys.stderr)
        return CAN_NOT_MEASURE
    return status_of(lambda comm: _measure_all(comm, options), options.backend)


def _measure_all(comm: collectives.Communicator, options: argparse.Namespace) -> int:
    """Measure and report; the number of wrong elements."""
    from mpi4py import MPI

    from bench.gpu.cupy_device import CupyDevice

    if options.root >= comm.size:
        raise CanNotMeasureError(f"--root is {options.root}: there are {comm.size} ranks")
    check_outputs(MPI.COMM_WORLD, options, "json", "markdown")
    gpus, world = cuda(), MPI.COMM_WORLD.Dup()
    # The null stream can't be captured.
    with gpus.on(gpus.new_stream()):
        device = CupyDevice()
        bench = GpuBench(comm, world, gpus, device, options.settings)
        sections = _sections(comm, options, bench, device)
        found = _bars(comm, world, bench, device) if options.bars else []
        device.synchronize()
    world.Free()
    if comm.rank == 0:
        _report(options, sections, found, describe_gpu(comm, _named(options, BARS), device))
    rows = [row for section in sections for row in section.rows]
    return sum(row.wrong for row in rows) + sum(bar.wrong for bar in found)


def _bars(
    comm: collectives.Communicator, world: Any, bench: GpuBench, device: Device
) -> list[bars.Bar]:
    gpus = cuda()
    alone = [bars.call_overhead(comm, world, gpus, device), bars.packing(world, gpus, device)]
    return [*alone, *bars.copy_bound(comm, bench)]


def _sections(
    comm: collectives.Communicator, options: argparse.Namespace, bench: GpuBench, device: Device
) -> list[Section]:
    """One for each collective that takes the dtype and op. CanNotMeasureError if none does."""
    sections, problem = [], None
    for name in options.collectives:
        try:
            sections.append(_section(comm, options, name, bench, device))
        except CanNotMeasureError as error:
            problem = error
    if problem is not None and not sections:
        raise problem
    return sections


def _named(options: argparse.Namespace, collective: str) -> argparse.Namespace:
    """The options for one of the collectives."""
    return argparse.Namespace(**{**vars(options), "collective": collective})


def _section(
    comm: collectives.Communicator,
    options: argparse.Namespace,
    name: str,
    bench: GpuBench,
    device: Device,
) -> Section:
    """Measure one collective; its table is printed row by row."""
    chosen = _named(options, name)
    case = CASES[name]
    shown = columns(case, NAME, [ALGORITHM], graph=True)
    section = Section(name, _command(comm, chosen), describe_gpu(comm, chosen, device), shown, [])
    table = open_table(section.header, shown) if comm.rank == 0 else None
    try:
        for problem in problems(chosen, comm.size):
            row = bench.row(case, problem)
            section.rows.append(row)
            if table:
                table.add(row)
    except (TypeError, ValueError) as error:
        if section.rows:
            raise
        text = f"can't measure {name}: {error}"
        if table:
            table.close([text])
        raise CanNotMeasureError(text) from error
    if table:
        wrong = sum(row.wrong for row in section.rows)
        table.close([f"{wrong} WRONG elements" if wrong else "all results exact", ""])
    return section


def _command(comm: collectives.Communicator, options: argparse.Namespace) -> str:
    given = [options.collective, *options.given]
    return f"mpirun -n {comm.size} python -m bench.gpu {shlex.join(given)}"


def _report(
    options: argparse.Namespace,
    sections: list[Section],
    found: Sequence[bars.Bar],
    header: dict[str, Any],
) -> None:
    summary = [*header_lines(header), *map(str, found)] if found else []
    if summary:
        print(*summary, sep="\n", flush=True)
    if options.json and sections:
        write_json_sections(options.json, sections)
    if options.markdown and sections:
        write_markdown_sections(options.markdown, "On a GPU", sections)
    if options.markdown and summary:
        lines = ["", "## Required values", "", *(f"- {line}" for line in summary), ""]
        with options.markdown.open("a" if sections else "w", encoding="utf-8") as file:
            file.write("\n".join(lines))
