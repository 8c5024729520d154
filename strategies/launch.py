"""`python -m strategies.launch`: the ranks that TF_CONFIG describes, without mpirun."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping

from collectives.launch.command import main
from collectives.launch.tasks import Tasks
from strategies.cluster.spec import ordered_tasks
from strategies.cluster.tf_config import parse_tf_config, validate_task


def find_tasks(environment: Mapping[str, str]) -> Tasks:
    """The tasks of the cluster in TF_CONFIG, in the order of `ordered_tasks`.

    Raises ValueError or TypeError for what can't be read, a task that isn't in the cluster, and a
    first task without a port.
    """
    config = parse_tf_config(environment.get("TF_CONFIG"))
    if config.cluster is None or config.task is None:
        raise ValueError(
            f"TF_CONFIG is {environment.get('TF_CONFIG')!r}; needed are a cluster, and the type and"
            " index of the task"
        )
    validate_task(config.task, config.cluster)
    tasks = ordered_tasks(config.cluster)
    if config.task not in tasks:
        raise ValueError(
            f"{config.task} has no address in the cluster, so the other tasks can't wait for it:"
            " add it to the cluster in every TF_CONFIG"
        )
    addresses = [config.cluster.task_address(task.type, task.index) for task in tasks]
    host, port = split_address(addresses[0], str(tasks[0]))
    return Tasks(
        rank=tasks.index(config.task),
        names=tuple(f"{task} ({address})" for task, address in zip(tasks, addresses, strict=True)),
        host=host,
        port=port,
        cluster=json.dumps(config.cluster.as_dict(), sort_keys=True),
        hosts=frozenset(_host(address.rpartition(":")[0] or address) for address in addresses),
    )


def split_address(address: str, task: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[IPv6]:port"; ValueError, naming the task, otherwise."""
    host, _, port = address.rpartition(":")
    # The others would wait for a name that can't come to exist.
    named = host and not re.search(r"[\s/]", host)
    if not (named and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise ValueError(
            f"{task} has the address {address!r}; it serves the start, and needs host:port"
        )
    return _host(host), int(port)


def _host(text: str) -> str:
    """Without the brackets of an IPv6 address."""
    return text.removeprefix("[").removesuffix("]")


if __name__ == "__main__":
    sys.exit(main("strategies.launch", find_tasks, os.environ))
