"""Automatic sharding: all ranks agree on how a dataset is split, before any of it is read."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from collectives import Communicator
from collectives.consistency.uncaught import raising_on_all
from strategies.input.failures import check_together
from strategies.input.options import AutoShardPolicy, InputOptions, as_policy
from strategies.input.sources import (
    check_iterable,
    draw_seed,
    files_of,
    policy_of,
    shared_order,
    takes_seed,
)

log = logging.getLogger("strategies")


class Sharding(NamedTuple):
    """The agreed policy and seed. `own_seeds`: every rank adds its number to the seed."""

    policy: AutoShardPolicy
    seed: int
    own_seeds: bool = False


class Report(NamedTuple):
    """The options that one rank requests, and the properties of its dataset."""

    kind: str
    policy: AutoShardPolicy
    own_seeds: bool
    takes_seed: bool
    files: tuple[int, str] | None  # number of files, digest of their names in order
    seed: int


def agree_on_sharding(communicator: Communicator, dataset: Any, options: Any) -> Sharding:
    """How to split the dataset. Collective; rank 0 logs what AUTO chose and why.

    Raises the same TypeError or ValueError on every rank.
    """
    report = check_together(communicator, lambda: make_report(dataset, options))
    with raising_on_all(communicator.rank):
        sharding, level, text = decide(communicator.all_gather_object(report))
    if communicator.rank == 0 and text:
        log.log(level, "%s", text)
    return sharding


def make_report(dataset: Any, options: InputOptions | None) -> Report:
    """This rank's report. Raises TypeError or ValueError for what can't be distributed."""
    check_iterable(dataset)
    checked = checked_options(options)
    own_policy, files = checked.auto_shard_policy, files_of(dataset)
    digest = None
    if files is not None:
        # Without directories, which may differ by node.
        names = "\0".join(PurePath(file).name for file in files)
        digest = len(files), hashlib.sha256(names.encode(errors="surrogateescape")).hexdigest()
    return Report(
        kind=type(dataset).__name__,
        policy=policy_of(dataset) if own_policy is None else as_policy(own_policy),
        own_seeds=checked.sharding == "seed_offset",
        takes_seed=takes_seed(dataset),
        files=digest,
        seed=draw_seed(by_torch=shared_order(dataset) is not None),
    )


def checked_options(options: Any) -> InputOptions:
    """The options; the defaults for None. TypeError for anything else."""
    if options is None:
        return InputOptions()
    if not isinstance(options, InputOptions):
        raise TypeError(f"options is a {type(options).__name__}: must be None or InputOptions")
    return options


def decide(reports: Sequence[Report]) -> tuple[Sharding, int, str]:
    """The sharding, a log level and a text to log; a pure function of the reports of all ranks.

    Raises ValueError where the ranks request different sharding, or it isn't possible.
    """
    first = reports[0]
    requested = [(each.policy, each.own_seeds) for each in reports]
    if len(set(requested)) > 1:
        lines = [
            f"rank {rank}: {'seed_offset' if own_seeds else policy.name}"
            for rank, (policy, own_seeds) in enumerate(requested)
        ]
        raise ValueError(f"the ranks request different sharding: {', '.join(lines)}")
    if first.own_seeds:
        _check_seeds(reports)
        return Sharding(AutoShardPolicy.OFF, first.seed, own_seeds=True), 0, ""
    obstacle = _obstacle_to_files(reports)
    if first.policy is AutoShardPolicy.AUTO:
        return _automatic(first, obstacle)
    if first.policy is AutoShardPolicy.FILE and obstacle:
        raise ValueError(f"auto_shard_policy=FILE: {obstacle}")
    return Sharding(first.policy, first.seed), 0, ""


def _automatic(first: Report, obstacle: str) -> tuple[Sharding, int, str]:
    if not obstacle:
        text = "AutoShardPolicy.AUTO chose FILE: there is at least one file for each rank"
        return Sharding(AutoShardPolicy.FILE, first.seed), logging.INFO, text
    text = f"AutoShardPolicy.AUTO chose DATA, every rank reads everything: {obstacle}"
    level = logging.WARNING if first.files else logging.INFO
    return Sharding(AutoShardPolicy.DATA, first.seed), level, text


def _obstacle_to_files(reports: Sequence[Report]) -> str:
    """Why the dataset can't be split by files; empty where it can."""
    for rank, report in enumerate(reports):
        if report.files is None:
            return f"the dataset of rank {rank}, a {report.kind}, isn't made of files"
    if len({report.files for report in reports}) > 1:
        counts = [report.files[0] for report in reports if report.files]
        return f"the ranks' files, {counts} of them, differ in number, name or order"
    count = reports[0].files[0] if reports[0].files else 0
    if count < len(reports):
        return f"{count} files for {len(reports)} ranks: each rank needs at least one file"
    return ""


def _check_seeds(reports: Sequence[Report]) -> None:
    for rank, report in enumerate(reports):
        if not report.takes_seed:
            raise ValueError(
                f"sharding='seed_offset': the dataset of rank {rank}, a {report.kind}, has no"
                " shuffle that takes a seed: must have a method with_seed(seed, offset), as those"
                " of strategies.input with a shuffle have"
            )
