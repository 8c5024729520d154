"""Collectives between hosts, which are network namespaces."""

import pytest

from bench.hosts import run
from bench.hosts.namespaces import why_not

REASON = why_not()
# Bytes per second of 1 Gbit, and what the token bucket lets pass at once.
LINK, BURST = 0.125, 256e3


def test_it_prints_why_hosts_cannot_be_simulated(monkeypatch, capsys):
    monkeypatch.setattr(run, "why_not", lambda: "tc is not installed")
    assert run.main([]) == 2
    assert capsys.readouterr().err == "hosts can't be simulated here: tc is not installed\n"


@pytest.mark.slow
@pytest.mark.skipif(REASON is not None, reason=f"no hosts can be simulated: {REASON}")
def test_a_table_over_a_shaped_link(tmp_path, capsys):
    path = tmp_path / "table.md"
    arguments = ["--layouts", "2x1", "--rates", "1gbit", "--sizes", "8,16M", "--repeats", "2"]
    assert run.main([*arguments, "--markdown", str(path)]) == 0
    text = path.read_text()
    assert capsys.readouterr().out == text
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| 2 × 1")]
    assert [row[2].strip() for row in rows] == ["8", str(1 << 24)]
    assert all(float(row[5]) > 0 for row in rows)
    assert float(rows[1][6]) < LINK * (1 + BURST / (1 << 24)) * 1.02
