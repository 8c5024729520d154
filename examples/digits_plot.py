"""The plot of the examples that train on handwritten digits."""

from __future__ import annotations

from collections.abc import Sequence


def plot_training(path: str, losses: Sequence[float], speeds: Sequence[float]) -> None:
    """Write a plot of each epoch's loss and throughput. It needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    for axes, values, label in zip(
        figure.subplots(1, 2), (losses, speeds), ("training loss", "images per second"), strict=True
    ):
        axes.plot(range(1, len(values) + 1), values, marker="o")
        axes.set(xlabel="epoch", ylabel=label, ylim=(0, 1.1 * max(values)))
    figure.savefig(path)
