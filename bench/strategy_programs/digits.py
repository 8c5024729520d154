"""Steps per second of one strategy, training a small classifier of handwritten digits.

Network and batch are those of the example `train_digits`: 64 → 128 → 10, SGD, scikit-learn's
digits. Every training rank takes batches of 32. Synchronous steps are counted once.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

import collectives
import strategies
from bench.options import Parser
from bench.strategy_programs.perceptron import Array, Perceptron
from bench.strategy_programs.roles import resolver_of
from bench.strategy_programs.rows import print_rows

BATCH, WARM_UP, STEPS = 32, 50, 1000
WIDTHS = (64, 128, 10)

Batch = tuple[Array, Array]
Maker = Callable[[collectives.Communicator], strategies.Strategy]
Trial = Callable[[collectives.Communicator, int], float | None]
"""One rank's work for a number of steps: its steps per second, or None if it does not train."""


def batches(seed: int, steps: int) -> Iterator[Batch]:
    """That many batches, drawn from all images."""
    # Imported only where a program trains: it takes seconds.
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    generator = np.random.default_rng(seed)
    for _ in range(steps):
        chosen = generator.integers(0, len(images), BATCH)
        yield images[chosen], labels[chosen]


def make_step(strategy: strategies.Strategy) -> Callable[[Batch], None]:
    """A step function for `run`."""
    with strategy.scope():
        model = Perceptron(WIDTHS)
        optimizer = strategies.optimizers.SGD(0.1)

    def step(batch: Batch) -> None:
        gradients = [np.empty(variable.shape, variable.dtype) for variable in model.variables]
        model.gradients(*batch, gradients)
        optimizer.apply_gradients(zip(gradients, model.variables, strict=True))

    return step


def rate_of(strategy: strategies.Strategy, given: Iterable[Batch]) -> float:
    """Steps per second of this rank after the warm-up."""
    step = make_step(strategy)
    start, counted = time.perf_counter(), -WARM_UP
    for batch in given:
        strategy.run(step, args=(batch,))
        counted += 1
        if counted == 0:
            start = time.perf_counter()
    return counted / (time.perf_counter() - start)


def replicas(make: Maker) -> Trial:
    """All ranks train."""
    return lambda comm, steps: rate_of(make(comm), batches(comm.rank, WARM_UP + steps))


def fed(comm: collectives.Communicator, steps: int) -> float | None:
    """One rank distributes batches to the others, which train synchronously."""
    resolver = resolver_of(comm, {"worker": comm.size - 1, "data": 1})
    strategy = strategies.MultiWorkerMirroredStrategy(resolver, communicator=comm)
    given = list(batches(0, (WARM_UP + steps) * (comm.size - 1)))
    data = strategies.DatasetWorker(strategy, lambda context: given)
    if data.serves:
        data.serve(epochs=1)
        return None
    return rate_of(strategy, data)


def served(comm: collectives.Communicator, steps: int) -> float | None:
    """One rank stores the parameters, the others train independently."""
    resolver = resolver_of(comm, {"worker": comm.size - 1, "ps": 1})
    strategy = strategies.ParameterServerStrategy(resolver, communicator=comm)
    if resolver.task_type == "ps":
        strategy.serve()
        return None
    rate = rate_of(strategy, batches(comm.rank, WARM_UP + steps))
    strategy.shutdown()
    return rate


def coordinated(comm: collectives.Communicator, steps: int) -> float | None:
    """One rank schedules the steps, one stores the parameters, the others train."""
    resolver = resolver_of(comm, {"chief": 1, "worker": comm.size - 2, "ps": 1})
    strategy = strategies.ParameterServerStrategy(resolver, communicator=comm)
    if resolver.task_type != "chief":
        strategy.serve()
        return None
    coordinator = strategies.ClusterCoordinator(strategy)
    step = make_step(strategy)
    iterator = iter(coordinator.create_per_worker_dataset(lambda: batches(0, 1 << 30)))

    def train(given: Any) -> None:
        step(next(given))

    for _ in range(WARM_UP):
        coordinator.schedule(train, args=(iterator,))
    coordinator.join()
    start = time.perf_counter()
    for _ in range(steps):
        coordinator.schedule(train, args=(iterator,))
    coordinator.join()
    rate = steps / (time.perf_counter() - start)
    strategy.shutdown()
    return rate


PROGRAMS: dict[str, tuple[int, Trial]] = {
    "default": (0, replicas(lambda comm: strategies.get_strategy())),
    "one device": (0, replicas(lambda comm: strategies.OneDeviceStrategy("CPU:0"))),
    "mirrored": (0, replicas(lambda comm: strategies.MirroredStrategy(communicator=comm))),
    "multi-worker mirrored": (
        0,
        replicas(lambda comm: strategies.MultiWorkerMirroredStrategy(communicator=comm)),
    ),
    "central storage": (
        0,
        replicas(lambda comm: strategies.CentralStorageStrategy(communicator=comm)),
    ),
    "local SGD, every 8 steps": (
        0,
        replicas(lambda comm: strategies.LocalSGDStrategy(sync_every=8, communicator=comm)),
    ),
    "multi-worker mirrored, dataset rank": (1, fed),
    "parameter server": (1, served),
    "parameter server, coordinator": (2, coordinated),
}
"""By name: the number of ranks that do not train, and each rank's work."""


def main() -> int:
    """Run one strategy, and print its row."""
    options = _parse()
    comm = collectives.world()
    idle, program = PROGRAMS[options.strategy.replace("_", " ")]
    rate = program(comm, options.steps)
    rates = [each for each in comm.all_gather_object(rate) if each is not None]
    if comm.rank == 0:
        row = {"strategy": options.strategy.replace("_", " "), "ranks": comm.size}
        row |= {"ranks that train": comm.size - idle, "steps/s": round(float(np.mean(rates)))}
        about = f"{WIDTHS}, batch {BATCH} per training rank; mean over these ranks"
        print_rows(f"{about}, with the coordinator their sum", [row])
    return 0


def _parse() -> argparse.Namespace:
    parser = Parser(prog="python -m bench.strategy_programs.digits", description=__doc__)
    names = [name.replace(" ", "_") for name in PROGRAMS]
    parser.add_argument("--strategy", choices=names, required=True)
    parser.add_argument("--steps", type=int, default=STEPS, help="default: %(default)s")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
