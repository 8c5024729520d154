"""What the README shows works as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block_with(text, language="python"):
    blocks = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    (found,) = [block for block in blocks if text in block]
    return found


def test_the_training_loop_runs_alone_and_in_a_world(launch):
    loop = block_with("apply_gradients")
    assert len(loop.splitlines()) <= 24
    alone = subprocess.run(
        [sys.executable, "-c", loop],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=ROOT,
    )
    in_a_world = launch(2, [sys.executable, "-c", loop], timeout=60)
    assert in_a_world.returncode == 0, in_a_world.stderr
    numbers = [
        [float(number) for number in re.findall(r"-?\d+\.\d*(?:e[-+]?\d+)?", ended.stdout)]
        for ended in (alone, in_a_world)
    ]
    assert len(numbers[0]) == len(numbers[1]) == 9
    assert all(abs(one - other) < 1e-9 for one, other in zip(*numbers, strict=True))
    assert all(abs(weight - place) < 0.1 for place, weight in enumerate(numbers[0][1:]))


def test_the_calls_of_the_layer_below(launch):
    calls = block_with("collectives.world()")
    program = (
        "import numpy\n"
        "array, gradients = numpy.ones(3), [numpy.ones(2), numpy.ones(4)]\n"
        f"{calls}"
        "assert total[0] == 2 and array[0] == 2 and gradients[1][3] == 2 and result[0] == 4\n"
    )
    ended = launch(2, [sys.executable, "-c", program], timeout=60)
    assert ended.returncode == 0, ended.stderr


def test_the_algorithm_that_it_adds_is_right():
    source, registration = block_with("flat.py").split("# collectives/algorithms/__init__.py")
    program = (
        "import types, collectives.algorithms\n"
        "from collectives import register_algorithm\n"
        "from collectives.schedule import one_chunk\n"
        f"{source}\n"
        "collectives.algorithms.flat = types.SimpleNamespace(broadcast=broadcast)\n"
        f"{registration}\n"
        "for size in (1, 2, 64, 1000): collectives.verify('broadcast', 'flat', size)\n"
    )
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True, cwd=ROOT)


def test_it_names_every_module():
    for package in ("collectives", "strategies"):
        for path in (ROOT / package).glob("[!_]*.py"):
            if path.stem not in ("arrays", "errors", "backends", "topology", "reduce_op"):
                assert f"`{path.stem}`" in README, path
        for path in (ROOT / package).glob("*/__init__.py"):
            assert f"`{path.parent.name}/`" in README, path


NAMED_TEST = re.compile(r"`((?:examples/|collectives/)?test_\w+)(?:::(\w+))?`")


def test_every_test_that_it_names_is_there():
    named = NAMED_TEST.findall(README)
    assert len(named) > 60
    for file, test in named:
        path = ROOT / "tests" / f"{file if '/' in file else f'strategies/{file}'}.py"
        assert path.exists(), file
        if test:
            assert f"\ndef {test}(" in path.read_text(encoding="utf-8"), f"{file}::{test}"
