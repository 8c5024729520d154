"""`mpirun -n 3 python -m tests.fuzz --seed 1 --steps 1000`: prints and counts deviations."""

import argparse
import logging
import sys
import time
import traceback
from collections import Counter

from tests.fuzz.faults import FAULTS
from tests.fuzz.world import DeviationError, World


def parse():
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seconds", type=float, help="begin no step after so many seconds")
    parser.add_argument("--first", type=int, default=0, help="the first step, to repeat one")
    parser.add_argument("--only", nargs="*", choices=FAULTS, help="these kinds of faults alone")
    parser.add_argument("--most", type=int, default=10, help="stop after so many deviations")
    return parser.parse_args()


def main():
    """Run the steps; the number of deviations."""
    options = parse()
    # Half of the faults make ranks late, which is warned of.
    logging.getLogger("collectives").setLevel(logging.ERROR)
    world = World(options.seed)
    offered = [
        (name, *each)
        for name, each in FAULTS.items()
        if each[2] <= world.size and (not options.only or name in options.only)
    ]
    injected, spent, deviations = Counter(), Counter(), 0
    begun = time.monotonic()
    for step in range(options.first, options.first + options.steps):
        over = options.seconds is not None and time.monotonic() - begun > options.seconds
        if any(world.gather(over)):
            break
        world.begin(step)
        name, function, *_ = world.rng.choices(offered, [each[2] for each in offered])[0]
        start = time.monotonic()
        try:
            injected[name] += function(world)
        except DeviationError as error:
            deviations += 1
            say(world, f"step {step}, {name}: {error}")
            world.drop_all()
        except Exception:
            # No check expects this: the state of the other ranks is unknown now.
            traceback.print_exc()
            print(f"seed {options.seed}, step {step}, {name}, rank {world.rank}", flush=True)
            world.abort()
        spent[name] += time.monotonic() - start
        if deviations >= options.most:
            break
    seconds = time.monotonic() - begun
    kinds = ", ".join(f"{name} {injected[name]} in {spent[name]:.1f} s" for name in sorted(spent))
    say(
        world,
        f"seed {options.seed}, {world.size} ranks: {sum(injected.values())} faults injected in"
        f" {seconds:.0f} s ({kinds}); {world.excused} deadlines excused, since a rank was held up;"
        f" {deviations} deviations",
    )
    world.end()
    return deviations


def say(world, text):
    """Print it on one rank."""
    if world.rank == 0:
        print(text, flush=True)


sys.exit(1 if main() else 0)
