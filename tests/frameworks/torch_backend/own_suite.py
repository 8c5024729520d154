"""torch's own tests of a backend, and the table of their outcomes.

`python -m tests.frameworks.torch_backend.own_suite` runs torch's DistributedTest with
"collectives" and with gloo on worlds of 2, 3 and 4 ranks, and writes bench/results/torch-suite.md.
"""

import argparse
import collections
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.worlds.programs import run_program

PROGRAM = str(Path(__file__).with_name("own_suite_rank.py"))
TABLE = Path(__file__).parents[3] / "bench" / "results" / "torch-suite.md"
COMMAND = "python -m tests.frameworks.torch_backend.own_suite"
LIMIT = 580
OUTCOMES = ("pass", "fail", "refused", "skip")

FEW = (
    "test_all_gather",
    "test_all_reduce_coalesced_sum",
    "test_all_reduce_complex_unsupported_ops",
    "test_all_reduce_sum_async",
    "test_all_to_all_single_unequal_split",
    "test_barrier_timeout_full_group",
    "test_batch_isend_irecv_gloo",
    "test_broadcast",
    "test_DistributedDataParallelCPU",
    "test_all_reduce_max",
    "test_scatter",
    "test_send_recv_any_source",
    "test_scatter_object_list",
    "test_reduce_sum",
)
"""A dozen and two for every run of the tests, which need no GPU and two ranks."""


def run(backend, ranks, names=(), *, limit=LIMIT):
    """The outcome of each test: {name: {"outcome": …, "why": …}}."""
    found, first, last_error = {}, 0, ""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        while True:
            results.write_text("")
            command = [sys.executable, PROGRAM, backend, str(first), str(results), *names]
            try:
                ended = run_program(ranks, command, timeout=limit)
                last_error = ended.stderr
            except subprocess.TimeoutExpired:
                last_error = f"more than {limit} s"
            lines = [json.loads(line) for line in results.read_text().splitlines()]
            found |= {each["test"]: each for each in lines if "outcome" in each}
            if not lines:
                raise RuntimeError(f"no test began: {last_error[-2000:]}")
            last = lines[-1]
            if "end" in last:
                return found
            if "outcome" not in last:
                # It hung, or ended the program.
                found[last["test"]] = last | {"outcome": "fail", "why": last_error[-2000:]}
            first = last["index"] + 1


def counts(found):
    return collections.Counter(each["outcome"] for each in found.values())


def table(runs):
    """The page: `runs` maps (backend, ranks) to outcomes."""
    import torch

    import collectives

    comm = collectives.world()
    library = comm._engine.transport.library
    lines = [
        "# torch's own tests of a backend",
        "",
        f"`{COMMAND}` runs `DistributedTest` of `torch.testing._internal.distributed` in worlds of"
        " mpirun, with the backend `collectives` and, by the same harness, with gloo.",
        "",
        f"torch {torch.__version__}, {library}, Python {platform.python_version()}. No GPU: the"
        " tests that need one skip. Of the tests that torch keeps to gloo or mpi by their names,"
        " `collectives` runs both kinds. `refused`: `monitored_barrier`, which torch permits for"
        " gloo alone before it calls the backend.",
        "",
        "| backend | ranks | pass | fail | refused | skip |",
        "|---|---|---|---|---|---|",
    ]
    for (backend, ranks), found in runs.items():
        count = counts(found)
        lines.append(f"| {backend} | {ranks} | {' | '.join(str(count[k]) for k in OUTCOMES)} |")
    problems = [
        f"- {backend}, {ranks} ranks, `{name}`: {each['outcome']}"
        for (backend, ranks), found in runs.items()
        for name, each in sorted(found.items())
        if each["outcome"] in ("fail", "refused")
    ]
    return "\n".join([*lines, "", *problems]).rstrip() + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backends", default="collectives,gloo")
    parser.add_argument("--ranks", default="2,3,4")
    parser.add_argument("--only", nargs="*", default=(), metavar="TEST")
    options = parser.parse_args()
    runs = {}
    for backend in options.backends.split(","):
        for ranks in map(int, options.ranks.split(",")):
            runs[backend, ranks] = found = run(backend, ranks, options.only, limit=3600)
            print(backend, ranks, dict(counts(found)), flush=True)
            for name, each in sorted(found.items()):
                if each["outcome"] == "fail":
                    print(f"  {name}: {each['why']}", flush=True)
    if not options.only:
        TABLE.write_text(table(runs), encoding="utf-8")


if __name__ == "__main__":
    main()
