"""The plot: busbw over size, one line for each algorithm and one for the peer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from bench.rows import Measurement, Row
from bench.sizes import shown

_FORMS = {"out_of_place": "out of place", "in_place": "in place"}


def write_plot(path: Path, header: dict[str, Any], rows: list[Row]) -> None:
    """Write one panel for each measured form."""
    forms = [form for form in _FORMS if any(getattr(row, form) for row in rows)]
    figure = Figure(figsize=(5.5 * len(forms) + 1, 4.6), layout="constrained")
    panels = figure.subplots(1, len(forms), sharey=True, squeeze=False)[0]
    for panel, form in zip(panels, forms, strict=True):
        _draw(panel, form, header, rows)
    panels[0].set_ylabel("bus bandwidth (GB/s)")
    panels[0].legend(frameon=False)
    figure.suptitle(
        f"{header['collective']} of {rows[0].dtype}, {header['ranks']} ranks,"
        f" {header['mpi']}, {header['cpu']}"
    )
    figure.savefig(path, dpi=150)


def _draw(panel: Axes, form: str, header: dict[str, Any], rows: list[Row]) -> None:
    lines = _lines(form, header["peer"], rows)
    # The peer is last in the legend, and on top.
    for name, points in sorted(lines.items(), key=lambda item: item[0] == header["peer"]):
        is_peer = name == header["peer"]
        sizes = list(points)
        bandwidths = [np.median(points[size]) / 1e9 for size in sizes]
        (line,) = panel.plot(sizes, bandwidths, label=name, marker="o", markersize=3.5)
        if is_peer:
            line.set(color="black", linestyle="--", marker="")
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter(FuncFormatter(lambda bandwidth, _: f"{bandwidth:g}"))
    panel.xaxis.set_major_locator(LogLocator(base=8, numticks=20))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda size, _: shown(size)))
    panel.set_title(_FORMS[form], fontsize="medium")
    panel.set_xlabel("size (bytes)")
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)


def _lines(form: str, peer: str | None, rows: list[Row]) -> dict[str, dict[int, list[float]]]:
    """The bandwidths at each size, by line; the peer was measured with every algorithm."""
    lines: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        measured: Measurement | None = getattr(row, form)
        if measured is None:
            continue
        lines.setdefault(row.algorithm, {}).setdefault(row.nbytes, []).append(measured.busbw)
        if measured.peer and peer:
            busbw = measured.busbw * measured.seconds.median / measured.peer.seconds.median
            lines.setdefault(peer, {}).setdefault(row.nbytes, []).append(busbw)
    return lines
