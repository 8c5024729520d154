import argparse

import pytest

from bench.sizes import parse_size, parse_sizes, shown, sweep


@pytest.mark.parametrize(
    ("text", "nbytes"), [("8", 8), ("64K", 65536), ("1M", 1 << 20), ("3g", 3 << 30), (" 2k ", 2048)]
)
def test_a_size_is_a_number_and_a_power_of_1024(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "K", "1.5M", "-8", "8T", "1 M", "eight"])
def test_what_is_no_size_is_named(text):
    with pytest.raises(argparse.ArgumentTypeError, match="not a size such as"):
        parse_size(text)


def test_sizes_are_a_comma_list():
    assert parse_sizes("8,64K,1M") == (8, 65536, 1 << 20)


def test_a_sweep_stops_at_the_last_step_that_fits():
    assert sweep(8, 64, 2) == (8, 16, 32, 64)
    assert sweep(8, 100, 4) == (8, 32)
    assert sweep(8, 8, 2) == (8,)


@pytest.mark.parametrize(
    ("nbytes", "text"), [(8, "8"), (65536, "64K"), (1 << 30, "1G"), (1500, "1500"), (1536, "1536")]
)
def test_sizes_are_shown_as_they_are_typed(nbytes, text):
    assert shown(nbytes) == text
