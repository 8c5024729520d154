"""Killed and started again: the same parameters, bit for bit, as without an interruption."""

import re

import pytest

from tests.examples.support import example, lines_of, on_ranks, run
from tests.slow import slow

pytestmark = pytest.mark.slow

ACCURACY = re.compile(r"step (\d+)  loss ([\d.]+)  test accuracy +([\d.]+)%")
STEPS, DIES_AT, SAVED_AT = 120, 71, 60


def command(directory, size, *options):
    chosen = ["--directory", str(directory), "--steps", str(STEPS), *options]
    return on_ranks(size, example("preemption", *chosen))


def ended(directory, size, *options):
    """The step it began at, then step, loss and accuracy at the end, and the parameters' digest."""
    lines = lines_of(command(directory, size, *options))
    assert {rank for rank, _ in lines} == {0}
    (_, begins), (_, line), (_, parameters) = lines
    began = int(begins.removeprefix(f"{size or 1} replicas start at step "))
    step, loss, accuracy = ACCURACY.fullmatch(line).groups()
    return began, int(step), float(loss), float(accuracy), parameters.split()[1]


def kill(directory, size, step=DIES_AT):
    ending, lines = run(command(directory, size, "--die-at", str(step)))
    assert not ending.succeeded
    assert not any("parameters" in text for _, text in lines)


@pytest.mark.parametrize("size", [2, *slow(None, 1)])
def test_it_ends_with_the_same_parameters_as_uninterrupted_training(size, tmp_path):
    began, *uninterrupted = ended(tmp_path / "whole", size)
    assert began == 0
    kill(tmp_path / "killed", size)
    began, *restarted = ended(tmp_path / "killed", size)
    assert began == SAVED_AT
    assert restarted == uninterrupted
    step, _, accuracy, digest = uninterrupted
    assert (step, len(digest)) == (STEPS, 64)
    assert accuracy >= 92


@pytest.mark.slow
def test_twice_killed_and_the_second_time_before_anything_was_saved_anew(tmp_path):
    _, *uninterrupted = ended(tmp_path / "whole", None)
    kill(tmp_path / "killed", None)
    kill(tmp_path / "killed", None, SAVED_AT + 1)
    began, *restarted = ended(tmp_path / "killed", None)
    assert (began, restarted) == (SAVED_AT, uninterrupted)
    assert ended(tmp_path / "killed", None)[0] == STEPS


@pytest.mark.slow
def test_it_goes_on_with_another_number_of_ranks(tmp_path):
    _, *uninterrupted = ended(tmp_path / "whole", None)
    kill(tmp_path / "killed", 2)
    began, step, loss, accuracy, _ = ended(tmp_path / "killed", 3)
    assert (began, step) == (SAVED_AT, STEPS)
    assert loss == pytest.approx(uninterrupted[1], abs=2e-5)
    assert accuracy == pytest.approx(uninterrupted[2], abs=0.3)


@pytest.mark.slow
def test_the_data_must_be_a_function_of_the_step(tmp_path):
    """Another order of the data ends with other parameters, which the digest would tell."""
    digests = [ended(tmp_path / seed, None, "--seed", seed)[-1] for seed in ("0", "1")]
    assert digests[0] != digests[1]
