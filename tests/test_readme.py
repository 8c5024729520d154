"""What the README shows works as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.both_mpis

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


def test_the_pytorch_loop(launch):
    """Two ranks with half of a batch each train as one with all of it."""
    pytest.importorskip("torch", reason="torch isn't installed: the PyTorch loop can't be tested")
    program = (
        "import torch, collectives\n"
        "comm = collectives.world()\n"
        "torch.manual_seed(comm.rank)\n"
        "model, loss_of = torch.nn.Linear(3, 1, dtype=torch.float64), torch.nn.MSELoss()\n"
        "with torch.no_grad():\n"
        "    for parameter in model.parameters(): parameter.fill_(1 - comm.rank)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "torch.manual_seed(7)\n"
        "inputs = torch.randn(80, 4, 3, dtype=torch.float64)\n"
        "targets = inputs.sum(2, keepdim=True)\n"
        "own = slice(comm.rank, None, comm.size)\n"
        "batches = [(each[own], wanted[own]) for each, wanted in zip(inputs, targets)]\n"
        f"{block_with('state_dict')}"
        "sums = comm.all_gather(model.weight.detach())\n"
        "assert all(torch.equal(each, sums[0]) for each in sums)\n"
        "if comm.rank == 0: print(*model.weight[0].tolist())\n"
    )
    weights = []
    for ranks in (1, 2):
        ended = launch(ranks, [sys.executable, "-c", program], timeout=60)
        assert ended.returncode == 0, ended.stderr
        weights.append([float(number) for number in ended.stdout.split()])
    assert weights[0] == pytest.approx(weights[1], abs=1e-12)
    assert weights[0] == pytest.approx([1, 1, 1], abs=0.01)


def test_it_takes_two_minutes():
    assert len(README.splitlines()) <= 150


@pytest.mark.parametrize("package", ["collectives", "strategies"])
def test_it_names_every_folder(package):
    for path in (ROOT / package).glob("*/__init__.py"):
        assert f"`{path.parent.name}/`" in README, path
