"""The predictions as files: one table for each network, and everything as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.reports.columns import counted
from bench.scale.networks import NETWORKS, Network
from bench.scale.predictions import Crossing, Prediction
from bench.sizes import shown


def write(
    folder: Path,
    command: str,
    predictions: Sequence[Prediction],
    crossings: Sequence[Crossing],
) -> None:
    """Write scale-COLLECTIVE.md and .json."""
    stem = folder / f"scale-{predictions[0].collective}"
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"# {predictions[0].collective}, predicted", "", f"`{command}`"]
    for network in dict.fromkeys(each.network for each in predictions):
        lines += ["", f"## {network}", "", _about(NETWORKS[network]), ""]
        lines += section(network, predictions, crossings)
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    parts = {"predictions": _as_json(predictions), "crossings": _as_json(crossings)}
    content = ",\n".join(f' "{name}": [\n{rows}\n ]' for name, rows in parts.items())
    stem.with_suffix(".json").write_text(f"{{\n{content}\n}}\n", encoding="utf-8")


def _as_json(rows: Sequence[Prediction] | Sequence[Crossing]) -> str:
    """One line for each."""
    return ",\n".join("  " + json.dumps(_rounded(asdict(row))) for row in rows)


def _rounded(value: Any) -> Any:
    """Seconds to four digits."""
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _about(network: Network) -> str:
    """The parameters."""
    per_node, ports = network.ranks_per_node, network.ports
    levels = (
        f"{where}: L {link.latency * 1e6:g} µs, o {link.overhead * 1e6:g} µs,"
        f" g {link.gap * 1e6:.3g} µs, 1/G {1e-9 / link.gap_per_byte:.4g} GB/s"
        for where, link in (("inside", network.inside), ("between", network.between))
    )
    folds = f"folds {network.reduction / 1e9:.4g} GB/s"
    return f"{per_node} ranks and {counted(ports, 'port')} per node. " + "; ".join([*levels, folds])


def section(
    network: str, predictions: Sequence[Prediction], crossings: Sequence[Crossing]
) -> list[str]:
    """The two tables of a network."""
    rows = [each for each in predictions if each.network == network]
    changes = [each for each in crossings if each.network == network]
    return [*table_lines(rows), "", *crossing_lines(rows, changes)]


def table_lines(predictions: Sequence[Prediction]) -> list[str]:
    """Of one network: what would be chosen, and the simulated time of every path."""
    paths = list(dict.fromkeys(path for each in predictions for path in each.simulated))
    fixed = ["ranks", "size", "automatic", "expected (µs)", "simulated (µs)", "over the best"]
    rows = [[*fixed, *paths], ["---:", "---:", "---", *["---:"] * (len(paths) + 3)]]
    for each in predictions:
        chosen = each.automatic
        times = (each.modelled[chosen], each.simulated[chosen])
        first = [str(each.ranks), shown(each.nbytes), chosen, *map(_microseconds, times)]
        found = [each.simulated.get(path) for path in paths]
        cells = ["-" if seconds is None else _microseconds(seconds) for seconds in found]
        rows.append([*first, f"{each.excess:.2f}", *cells])
    return [f"| {' | '.join(cells)} |" for cells in rows]


def crossing_lines(predictions: Sequence[Prediction], crossings: Sequence[Crossing]) -> list[str]:
    """For each number of ranks of a network the best paths by rising size, and where they change.

    Neighbouring numbers of ranks with the same best path at all sizes share a line.
    """
    chains: list[tuple[int, str]] = []
    for ranks, rows in groupby(predictions, lambda each: each.ranks):
        changes = [each for each in crossings if each.ranks == ranks]
        parts = [f" to {_size(each.nbytes)}, then {each.after}" for each in changes]
        chains.append((ranks, "".join([next(rows).best, *parts])))
    lines = ["| ranks | best path, by rising size |", "|---:|---|"]
    for chain, alike in groupby(chains, lambda each: each[1]):
        numbers = [ranks for ranks, _ in alike]
        span = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
        lines.append(f"| {span} | {chain} |")
    return lines


def _size(nbytes: int) -> str:
    """To three digits, in a unit of 1024."""
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes} B"


def _microseconds(seconds: float) -> str:
    value = seconds * 1e6
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"
