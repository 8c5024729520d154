"""Handwritten digits, a network and a report for the examples with torch."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from digits_plot import plot_file, plot_training
from rich.console import Console
from rich.progress import track
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split

Batch = tuple[torch.Tensor, torch.Tensor]


def datasets() -> tuple[Any, Any]:
    """Training and test images of 8 × 8 pixels, scaled to 0 … 1, with their labels."""
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None]
    whole = TensorDataset(images, torch.tensor(digits.target))
    train, test = random_split(whole, [0.8, 0.2], torch.Generator().manual_seed(0))
    return train, test


def network() -> nn.Sequential:
    """Two convolutions and two dense layers, with the same random weights in every process."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
        nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Flatten(), nn.Linear(512, 64), nn.ReLU()),
        nn.Linear(64, 10),
    )


def options(description: str | None, **flags: str) -> argparse.Namespace:
    """The command line, with further flags and their help."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64, help="examples over all ranks")
    parser.add_argument(
        "--plot", metavar="FILE", type=plot_file, help="write a plot of loss and throughput"
    )
    for flag, text in flags.items():
        parser.add_argument(f"--{flag}", action="store_true", help=text)
    return parser.parse_args()


class Report:
    """One line for each epoch, a progress bar in a terminal, and a plot; printed by rank 0."""

    def __init__(self, rank: int, model: nn.Module, test: Any) -> None:
        self._prints, self._model = rank == 0, model
        self._images, self._labels = next(iter(torch.utils.data.DataLoader(test, len(test))))
        self._losses: list[float] = []
        self._speeds: list[float] = []

    def batches(self, loader: Iterable[Batch], epoch: int) -> Iterator[Batch]:
        """The batches of an epoch, with a progress bar."""
        shown = self._prints and sys.stderr.isatty()
        console = Console(stderr=True)
        self._began = time.perf_counter()
        name = f"epoch {epoch}"
        yield from track(loader, name, transient=True, console=console, disable=not shown)

    @torch.no_grad()
    def epoch(self, epoch: int, loss: float, images: int) -> None:
        """The mean loss of an epoch with so many images, the accuracy and the throughput."""
        seconds = time.perf_counter() - self._began
        accuracy = (self._model(self._images).argmax(1) == self._labels).float().mean().item()
        self._losses.append(loss)
        self._speeds.append(images / seconds)
        if self._prints:
            print(
                f"epoch {epoch:2d}  loss {loss:.4f}  test accuracy {accuracy:7.2%}"
                f"  {self._speeds[-1]:8.0f} images/s",
                flush=True,
            )

    def plot(self, path: str | None) -> None:
        """Write the plot, if a path is given."""
        if path is not None and self._prints:
            plot_training(path, self._losses, self._speeds)
