"""The tutorial's loop: it learns equally on any number of ranks, and restores its checkpoint."""

import re

import pytest

from tests.examples.support import example, known_lines_of, on_ranks
from tests.slow import slow

EPOCHS = 5
LINE = re.compile(
    r"(?P<part>epoch|iterator|function) (?P<number>\d)  loss (?P<loss>\d\.\d{4})"
    r"  accuracy +(?P<accuracy>[\d.]+)%"
    r"(  test loss (?P<test_loss>\d\.\d{4})  test accuracy +(?P<test_accuracy>[\d.]+)%)?"
)
RESTORED = re.compile(r"restored ckpt-(\d)\.safetensors without a strategy: test accuracy +(.*)%")


def said(size):
    """The example's lines on so many ranks."""
    return known_lines_of(on_ranks(size, example("custom_training_loop")))


def parts(lines):
    return [LINE.fullmatch(text).groupdict() for _, text in lines if LINE.fullmatch(text)]


sizes = pytest.mark.parametrize("size", [2, *slow(None, 1, 3)])


@sizes
def test_only_the_chief_prints_and_every_part_is_there(size):
    lines = said(size)
    assert {rank for rank, _ in lines} == {0}
    assert lines[0][1] == f"Number of replicas: {size or 1}"
    assert len(lines) == 2 + 3 * EPOCHS
    assert [(each["part"], int(each["number"])) for each in parts(lines)] == [
        (part, number)
        for part in ("epoch", "iterator", "function")
        for number in range(1, EPOCHS + 1)
    ]


@sizes
def test_it_learns(size):
    lines = parts(said(size))
    first, tested, last = lines[0], lines[EPOCHS - 1], lines[-1]
    assert float(tested["test_accuracy"]) >= 93
    assert float(last["accuracy"]) >= 98
    assert float(last["loss"]) < 0.1 * float(first["loss"])


@sizes
def test_the_checkpoint_of_the_last_even_epoch_is_restored_without_a_strategy(size):
    lines = said(size)
    ((number, accuracy),) = [
        found.groups() for _, text in lines if (found := RESTORED.fullmatch(text))
    ]
    assert int(number) == 5
    assert parts(lines)[4]["test_accuracy"] == accuracy


@pytest.mark.slow
@sizes
def test_every_number_of_ranks_has_the_same_numbers(size):
    for seen, wanted in zip(parts(said(size)), parts(said(None)), strict=True):
        for name in ("loss", "test_loss"):
            if wanted[name] is not None:
                assert float(seen[name]) == pytest.approx(float(wanted[name]), abs=1.5e-4)
        assert seen["accuracy"] == wanted["accuracy"]
        assert seen["test_accuracy"] == wanted["test_accuracy"]
