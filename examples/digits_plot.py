"""The plot of the examples that train on handwritten digits."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.util import find_spec


def plot_file(path: str) -> str:
    """The argument `--plot`, refused before the training where matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("a plot needs matplotlib: pip install matplotlib")
    return path


def plot_training(path: str, losses: Sequence[float], speeds: Sequence[float]) -> None:
    """Write a plot of each epoch's loss and throughput."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    for axes, values, label in zip(
        figure.subplots(1, 2), (losses, speeds), ("training loss", "images per second"), strict=True
    ):
        axes.plot(range(1, len(values) + 1), values, marker="o")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set(xlabel="epoch", ylabel=label, ylim=(0, 1.1 * max(values)))
    figure.savefig(path)
