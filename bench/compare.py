"""Two versions' recorded suites, row by row: `python -m bench.compare --before A… --after B…`.

Record the suites of both versions in turn, several times each, on an idle machine; the machine's
state changes from minute to minute. The medians over the recordings are compared.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.sizes import shown


class Key(NamedTuple):
    """One row of a suite, out of place or in place."""

    ranks: int
    mpi: str
    title: str
    nbytes: int
    place: str


class Figures(NamedTuple):
    """Seconds of a call, and the peer's over them, one of each for every recording."""

    seconds: list[float]
    ratios: list[float]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the comparison in Markdown."""
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    for name in ("--before", "--after"):
        parser.add_argument(name, type=Path, nargs="+", required=True, metavar="FILE.json")
    options = parser.parse_args(arguments)
    try:
        lines = table(read(options.before), read(options.after))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print("\n".join(lines))


def read(paths: Iterable[Path]) -> dict[Key, Figures]:
    """The figures of recorded suites. ValueError for a file of something else."""
    found: dict[Key, Figures] = {}
    for path in paths:
        text = path.read_text(encoding="utf-8")
        try:
            results = list(_results(json.loads(text)["sections"]))
        except (ValueError, LookupError, TypeError):
            raise ValueError(f"{path} is not a file that bench.suite has written") from None
        for key, seconds, ratio in results:
            figures = found.setdefault(key, Figures([], []))
            figures.seconds.append(seconds)
            if ratio is not None:
                figures.ratios.append(ratio)
    return found


def _results(sections: Iterable[dict[str, Any]]) -> Iterator[tuple[Key, float, float | None]]:
    """Each row's median and its peer's ratio."""
    for section in sections:
        header = section["header"]
        run = header["ranks"], header["mpi"].rpartition(" ")[0]
        for row in section["rows"]:
            for place in ("out_of_place", "in_place"):
                result = row[place]
                if result is not None:
                    key = Key(*run, section["title"], row["nbytes"], place.replace("_", " "))
                    peer = result["peer"]
                    yield key, result["seconds"]["median"], None if peer is None else peer["ratio"]


def table(before: dict[Key, Figures], after: dict[Key, Figures]) -> list[str]:
    """A Markdown table of the rows that both have. ValueError if there are none."""
    keys = [key for key in before if key in after]
    if not keys:
        raise ValueError("the two versions' files have no row in common")
    titles = ("ranks", "MPI", "call", "bytes", "buffers", "before (µs)", "after (µs)")
    lines = [
        f"| {' | '.join((*titles, 'before / after', 'peer / before', 'peer / after'))} |",
        "|---:|---|---|---:|---|" + "---:|" * 5,
    ]
    for key in keys:
        then, now = median(before[key].seconds), median(after[key].seconds)
        cells = [str(key.ranks), key.mpi, key.title, shown(key.nbytes), key.place]
        cells += [f"{1e6 * seconds:.1f}" for seconds in (then, now)]
        cells.append(f"{then / now:.2f}")
        for figures in (before[key], after[key]):
            cells.append(f"{median(figures.ratios):.2f}" if figures.ratios else "")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
