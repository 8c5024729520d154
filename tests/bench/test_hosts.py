"""Collectives between hosts, which are network namespaces."""

import signal
import subprocess
import sys

import pytest

from bench import strategies
from bench.hosts import compression, namespaces, run, table
from bench.hosts.namespaces import hosts, why_not
from bench.scale import run as scale

REASON = why_not()
# Bytes per second of 1 Gbit, and what the token bucket lets pass at once.
LINK, BURST = 0.125, 256e3


@pytest.mark.parametrize("program", [run, compression])
def test_it_prints_why_hosts_cannot_be_simulated(monkeypatch, capsys, program):
    monkeypatch.setattr(table, "why_not", lambda: "tc is not installed")
    assert program.main([]) == 2
    assert capsys.readouterr().err == "hosts can't be simulated here: tc is not installed\n"


@pytest.mark.parametrize(
    ("program", "option", "value", "problem"),
    [
        (run, "--layouts", "3", "'3' is not hosts x ranks, such as 2x1"),
        (run, "--layouts", "2x1,0x2", "'0x2' is not hosts x ranks"),
        (run, "--rates", "unshaped,foo", "'foo' is not a rate such as 200mbit or 1gbit"),
        (run, "--rates", "-1mbit", "'-1mbit' is not a rate"),
        (run, "--rates", "0.0mbit", "'0.0mbit' is not a rate"),
        (run, "--collectives", "barrier,foo", "'foo' is not one of all_reduce, "),
        (run, "--sizes", "8,64Q", "'64Q' is not a size"),
        (run, "--repeats", "0", "'0' is not a number from 1 up"),
        (run, "--markdown", "/absent/x.md", "can't write /absent/x.md: /absent is no folder"),
        (run, "--markdown", "/dev", "/dev is a folder; it must be a file"),
        (compression, "--rates", "unshaped", "'unshaped' is not a rate"),
        (compression, "--compressions", "float16,zip", "compression='zip': must be"),
        (scale, "--rate", "10k", "'10k' is not a rate"),
        (scale, "--output", "/dev/null/x", "can't write /dev/null/x: /dev/null is no folder"),
        (strategies, "--output", "/dev/null", "can't write /dev/null: /dev/null is no folder"),
    ],
)
def test_an_option_error_is_named_before_hosts_are_made(program, option, value, problem, capsys):
    with pytest.raises(SystemExit) as ended:
        program.main([f"{option}={value}"])
    assert ended.value.code == 2
    assert f"error: argument {option}: {problem}" in capsys.readouterr().err


def test_options_are_read():
    line = "--layouts 2x1,3x2 --rates unshaped,1.5Gbit --collectives barrier --sizes 8,4K"
    options = run._options(line.split())
    assert options.layouts == [(2, 1), (3, 2)]
    assert options.rates == ["unshaped", "1.5Gbit"]
    assert options.collectives == ["barrier"]
    assert options.sizes == (8, 4096)
    assert run._options([]).layouts == [(2, 1), (2, 2)]


def test_the_error_of_a_command_has_what_it_printed():
    with pytest.raises(RuntimeError, match=r"sh -c echo no rate >&2; exit 3: no rate$"):
        namespaces._run("sh", "-c", "echo no rate >&2; exit 3")


def test_a_row_tells_whether_it_is_in_place():
    form = {"seconds": {"median": 2e-6}, "peer": {"seconds": {"median": 3e-6}, "ratio": 1.4}}
    rows = [
        {"collective": "all_reduce", "nbytes": 8, "out_of_place": form, "in_place": form},
        {"collective": "broadcast", "nbytes": 8, "out_of_place": None, "in_place": form},
    ]
    figures = "| 2 × 1 | 1gbit | 8 | 2.0 | 3.0 | 1.40 | 0.004 |"
    assert list(run._rows({"rows": rows}, "2 × 1", "1gbit")) == [
        f"| all_reduce {figures}",
        f"| broadcast, in place {figures}",
    ]


PROGRAM = """
import time
from bench.hosts.namespaces import hosts
with hosts(1) as (addresses, agent):
    print(addresses[0], flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(REASON is not None, reason=f"no hosts can be simulated: {REASON}")
def test_two_simulations_at_once_have_networks_of_their_own_and_end_by_sigterm():
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE) as other:
        address = other.stdout.readline().decode().strip()
        with hosts(1) as (addresses, _):
            own = addresses[0]
        other.terminate()
        assert other.wait(30) == 128 + signal.SIGTERM
    own, address = (each.rpartition(".")[0] + "." for each in (own, address))
    assert own != address
    left = subprocess.run(["ip", "-4", "address"], capture_output=True, text=True, check=True)
    assert own not in left.stdout
    assert address not in left.stdout


@pytest.mark.slow
@pytest.mark.skipif(REASON is not None, reason=f"no hosts can be simulated: {REASON}")
def test_a_table_over_a_shaped_link(tmp_path, capsys):
    path = tmp_path / "table.md"
    arguments = ["--layouts", "2x1", "--rates", "1gbit", "--sizes", "8,16M", "--repeats", "2"]
    arguments += ["--collectives", "all_reduce,broadcast", "--markdown", str(path)]
    assert run.main(arguments) == 0
    text = path.read_text()
    assert capsys.readouterr().out == text
    rows = [line.split("|")[1:-1] for line in text.splitlines() if "| 2 × 1 |" in line]
    assert [row[0].strip() for row in rows] == ["all_reduce"] * 2 + ["broadcast, in place"] * 2
    assert [row[3].strip() for row in rows] == ["8", str(1 << 24)] * 2
    assert all(float(row[6]) > 0 for row in rows)
    assert float(rows[1][7]) < LINK * (1 + BURST / (1 << 24)) * 1.02


@pytest.mark.slow
@pytest.mark.skipif(REASON is not None, reason=f"no hosts can be simulated: {REASON}")
def test_bytes_of_compressed_gradients_on_the_link(tmp_path):
    path = tmp_path / "table.md"
    arguments = ["--layouts", "2x2", "--rates", "1gbit", "--repeats", "2", "--markdown", str(path)]
    assert compression.main([*arguments, "--compressions", "float16,powersgd(4)"]) == 0
    rows = [line.split("|")[1:-1] for line in path.read_text().splitlines() if "2 × 2" in line]
    assert [row[2].strip() for row in rows] == ["exact", "float16", "powersgd(4)"]
    exact, narrow, factors = (float(row[5]) for row in rows)
    # Between two hosts each sends the 16.8 MB once; headers take a few percent.
    assert 16.8 < exact < 18
    assert 0.49 < narrow / exact < 0.53
    assert factors < exact / 20
