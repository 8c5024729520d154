"""The pictures of the documentation, from the results on record: `python -m bench.figures`.

Every picture holds the digest of the files that it was drawn from, so that a test finds those that
are older than the figures.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator, PercentFormatter

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
    """The files that a picture is drawn from, one for each MPI library."""
    pattern, _ = PICTURES[name]
    return [RESULTS / pattern.format(library) for library in LIBRARIES]


def digest(paths: Iterable[Path]) -> str:
    """A text that is another one once any of the files has changed."""
    content = b"".join(path.read_bytes() for path in paths)
    return hashlib.sha256(content).hexdigest()[:16]


def draw(name: str, target: Path) -> None:
    """Draw one picture as SVG, with a panel for each MPI library."""
    paths = sources(name)
    _, draw_panel = PICTURES[name]
    # Text stays text, and the same figures give the same bytes.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9}):
        figure = Figure(figsize=(8.4, 3.2), layout="constrained")
        panels = figure.subplots(1, len(paths), sharey=True)
        for panel, path, title in zip(panels, paths, LIBRARIES.values(), strict=True):
            draw_panel(panel, json.loads(path.read_text(encoding="utf-8")))
            panel.set_title(title, fontsize="medium")
            panel.grid(alpha=0.3)
            panel.spines[["top", "right"]].set_visible(False)
        for panel in panels[1:]:
            panel.set_ylabel("")
        panels[-1].legend(frameon=False, fontsize="small")
        metadata = {"Date": None, "Creator": None, "Description": digest(paths)}
        figure.savefig(target, format="svg", metadata=metadata)


def _ratios(results: Any, title: str, form: str) -> dict[int, float]:
    """mpi4py's time over ours by bytes, of one section and form."""
    (section,) = (each for each in results["sections"] if each["title"] == title)
    return {
        row["nbytes"]: row[form]["peer"]["ratio"]
        for row in section["rows"]
        if row[form] and row[form]["peer"]
    }


def _all_reduce(panel: Axes, results: Any) -> None:
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


def _movements(panel: Axes, results: Any) -> None:
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


def _steps(panel: Axes, results: Any) -> None:
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


PICTURES: dict[str, tuple[str, Callable[[Axes, Any], None]]] = {
    "all_reduce": ("suite-2-ranks-{}.json", _all_reduce),
    "movements": ("suite-2-ranks-{}.json", _movements),
    "steps": ("strategies-{}.json", _steps),
}

if __name__ == "__main__":
    main()
