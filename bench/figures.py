"""The pictures of the documentation, from the results on record: `python -m bench.figures`.

Every picture holds the digest of the files that it was drawn from, so that a test finds those that
are older than the figures.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator, PercentFormatter

from bench.scale.networks import NETWORKS
from bench.sizes import shown

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
IMAGES = ROOT / "docs" / "images"

LIBRARIES = {"mpich": "MPICH", "openmpi": "Open MPI"}
_RATIO = "mpi4py's time / ours"


def main() -> None:
    """Draw all pictures into docs/images."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name in PICTURES:
        draw(name, IMAGES / f"{name}.svg")


def sources(name: str) -> list[Path]:
    """The files that a picture is drawn from."""
    panels, _ = PICTURES[name]
    return [RESULTS / file for file in dict.fromkeys(panels.values())]


def digest(paths: Iterable[Path]) -> str:
    """A text that is another one once any of the files has changed."""
    content = b"".join(path.read_bytes() for path in paths)
    return hashlib.sha256(content).hexdigest()[:16]


def draw(name: str, target: Path) -> None:
    """Draw one picture as SVG, with a panel for each MPI library or network."""
    files, draw_panel = PICTURES[name]
    # Text stays text, and the same figures give the same bytes.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9}):
        figure = Figure(figsize=(8.4, 3.2), layout="constrained")
        panels = figure.subplots(1, len(files), sharey=True)
        for panel, (title, file) in zip(panels, files.items(), strict=True):
            results = json.loads((RESULTS / file).read_text(encoding="utf-8"))
            draw_panel(panel, results, title)
            panel.set_title(title, fontsize="medium")
            panel.grid(alpha=0.3)
            panel.spines[["top", "right"]].set_visible(False)
        for panel in panels[1:]:
            panel.set_ylabel("")
        if len(files) > len(LIBRARIES):
            # Three panels leave no room inside.
            named = panels[-1].get_legend_handles_labels()
            figure.legend(*named, loc="outside right upper", frameon=False, fontsize="small")
        else:
            panels[-1].legend(frameon=False, fontsize="small")
        metadata = {"Date": None, "Creator": None, "Description": digest(sources(name))}
        figure.savefig(target, format="svg", metadata=metadata)


def _ratios(results: Any, title: str, form: str) -> dict[int, float]:
    """mpi4py's time over ours by bytes, of one section and form."""
    (section,) = (each for each in results["sections"] if each["title"] == title)
    return {
        row["nbytes"]: row[form]["peer"]["ratio"]
        for row in section["rows"]
        if row[form] and row[form]["peer"]
    }


def _all_reduce(panel: Axes, results: Any, _: str) -> None:
    lines = {
        "registered, in place": ("all_reduce, registered", "in_place"),
        "registered": ("all_reduce, registered", "out_of_place"),
        "ordinary": ("all_reduce", "out_of_place"),
        "ordinary, in place": ("all_reduce", "in_place"),
    }
    for label, (title, form) in lines.items():
        ratios = _ratios(results, title, form)
        panel.plot(list(ratios), list(ratios.values()), label=label, marker="o", markersize=3)
    panel.axhline(1, color="black", linestyle="--", linewidth=1, label="mpi4py")
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_locator(FixedLocator([8 << shift for shift in range(0, 24, 4)]))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda size, _: shown(int(size))))
    panel.set_ylim(bottom=0)
    panel.set_xlabel("size (bytes)")
    panel.set_ylabel(_RATIO)


def _movements(panel: Axes, results: Any, _: str) -> None:
    collectives = {
        "broadcast": "in_place",
        "all_gather": "out_of_place",
        "reduce_scatter": "out_of_place",
    }
    kinds = [
        (f"{kind}, {shown(nbytes)}", suffix, nbytes)
        for kind, suffix in (("ordinary", ""), ("registered", ", registered"))
        for nbytes in (1 << 20, 16 << 20)
    ]
    width = 0.8 / len(kinds)
    for number, (label, suffix, nbytes) in enumerate(kinds):
        heights = [_ratios(results, f"{n}{suffix}", f)[nbytes] for n, f in collectives.items()]
        places = [place + (number - 1.5) * width for place in range(len(collectives))]
        panel.bar(places, heights, width, label=label)
    panel.axhline(1, color="black", linestyle="--", linewidth=1)
    panel.set_xticks(range(len(collectives)), list(collectives))
    panel.set_ylabel(_RATIO)


def _steps(panel: Axes, results: Any, _: str) -> None:
    (rows,) = (each["rows"] for each in results if each["title"] == "The synchronous step")
    labels = {
        "in step": "a copy on each rank",
        "in step, central storage": "one copy per node",
        "each for itself": "no communication",
    }
    for step, label in labels.items():
        chosen = [row for row in rows if row["step"] == step]
        batches = [row["batch per rank"] for row in chosen]
        excess = [row["over alone (median of ratios)"] - 1 for row in chosen]
        panel.plot(batches, excess, label=label, marker="o", markersize=3)
    panel.set_xscale("log", base=2)
    panel.set_xticks(batches, [str(batch) for batch in batches])
    panel.set_ylim(bottom=0)
    panel.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    panel.set_xlabel("batch per rank")
    panel.set_ylabel("more time than alone")


def _scale(panel: Axes, results: Any, title: str) -> None:
    """Simulated times of 1 MiB."""
    rows = [
        row
        for row in results["predictions"]
        if row["network"] == title and row["nbytes"] == 1 << 20
    ]
    lines: dict[str, dict[int, float]] = {}
    for row in rows:
        for path, seconds in row["simulated"].items():
            line = lines.setdefault(path.partition("/")[0], {})
            line[row["ranks"]] = min(seconds, line.get(row["ranks"], seconds))
    for path, points in lines.items():
        panel.plot(list(points), list(points.values()), label=path, color=_COLOURS[path])
    chosen = {row["ranks"]: row["simulated"][row["automatic"]] for row in rows}
    panel.plot(list(chosen), list(chosen.values()), "k:", linewidth=2, label="automatic choice")
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xlabel("ranks")
    panel.set_ylabel("seconds, 1 MiB")


def _crossings(panel: Axes, results: Any, title: str) -> None:
    """The best path over ranks and bytes: one bar for each number of ranks."""
    rows = [row for row in results["predictions"] if row["network"] == title]
    sizes = [row["nbytes"] for row in rows]
    numbers = list(dict.fromkeys(row["ranks"] for row in rows))
    for ranks in numbers:
        changes = [
            each
            for each in results["crossings"]
            if each["network"] == title and each["ranks"] == ranks
        ]
        paths = [each["before"] for each in changes[:1]] + [each["after"] for each in changes]
        ends = [min(sizes), *(each["nbytes"] for each in changes), max(sizes)]
        if not changes:
            first = next(row["simulated"] for row in rows if row["ranks"] == ranks)
            paths = [min(first, key=lambda path: first[path])]
        for path, (low, high) in zip(paths, pairwise(ends), strict=True):
            kind, _, inner = path.partition("/")
            hatch = "////" if kind == "hierarchical" else None
            colour = _COLOURS[inner or kind]
            panel.bar(
                ranks, high - low, ranks * 0.66, low, color=colour, hatch=hatch, edgecolor="white"
            )
    panel.set_xscale("log", base=2)
    panel.set_yscale("log", base=2)
    panel.set_ylim(min(sizes), max(sizes))
    panel.yaxis.set_major_locator(FixedLocator([8 << shift for shift in range(0, 28, 4)]))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda size, _: shown(int(size))))
    panel.set_xlabel("ranks")
    panel.set_ylabel("size (bytes)")
    for path in ("shared", "doubling", "rabenseifner", "ring"):
        panel.bar(numbers[0], 0, color=_COLOURS[path], label=path)
    panel.bar(numbers[0], 0, color="white", hatch="////", edgecolor="gray", label="hierarchical")


_COLOURS = {
    "ring": "tab:blue",
    "doubling": "tab:orange",
    "rabenseifner": "tab:green",
    "circulant": "tab:purple",
    "shared": "tab:gray",
    "hierarchical": "tab:red",
}


def _of_libraries(pattern: str) -> dict[str, str]:
    """A panel for each MPI library, and its file."""
    return {title: pattern.format(library) for library, title in LIBRARIES.items()}


_OF_NETWORKS = dict.fromkeys(NETWORKS, "scale-all_reduce.json")

PICTURES: dict[str, tuple[dict[str, str], Callable[[Axes, Any, str], None]]] = {
    "all_reduce": (_of_libraries("suite-2-ranks-{}.json"), _all_reduce),
    "movements": (_of_libraries("suite-2-ranks-{}.json"), _movements),
    "steps": (_of_libraries("strategies-{}.json"), _steps),
    "scale": (_OF_NETWORKS, _scale),
    "crossings": (_OF_NETWORKS, _crossings),
}

if __name__ == "__main__":
    main()
