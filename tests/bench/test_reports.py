from dataclasses import replace

import pytest

from bench.cases import CASES
from bench.reports.columns import columns
from bench.reports.files import write_markdown
from bench.rows import Measurement, PeerMeasurement, Row
from bench.timing import Timing

HEADER = {
    "collective": "all_gather",
    "date": "2026-01-01",
    "mpi": "MPICH 5.0.2",
    "mpi4py": "4.1.2",
    "numpy": "2.4.6",
    "python": "3.11.7",
    "thread level": "multiple",
    "ranks": 2,
    "nodes": 1,
    "cpu": "a processor",
    "cores": 2,
    "peer": "mpi4py",
    "repeats": 20,
}


def row(nbytes, seconds):
    timing = Timing(seconds, seconds / 2, seconds * 2)
    peer = PeerMeasurement(Timing(2 * seconds, seconds, seconds), 2.0, 0)
    measured = Measurement(timing, nbytes / seconds, nbytes / seconds / 2, 0, peer)
    return Row(nbytes, nbytes // 4, "float32", None, None, "ring", out_of_place=measured)


def cells(measured, peer):
    return [column.cell(measured) for column in columns(CASES["all_gather"], peer, ["ring"])]


def test_a_row_reads_as_in_nccl_tests():
    assert cells(row(1000, 2e-6), None) == [
        *("1000", "250", "float32", "ring"),
        *("2.00", "0.500", "0.250", "0"),
        *("-", "-", "-", "-"),
    ]


def test_the_peer_has_a_column_for_each_form():
    assert cells(row(1000, 2e-6), "mpi4py")[4:10] == ["2.00", "0.500", "0.250", "0", "4.00", "2.00"]
    assert cells(row(1000, 2e-6), "mpi4py")[10:] == ["-"] * 6


def test_the_model_has_a_column_after_the_ratio_and_the_stream_after_our_own():
    measured = row(1000, 2e-6).out_of_place
    predicted = replace(measured.peer, model=(1.75, 2.75))
    measured = replace(measured, peer=predicted, of_stream=0.876)
    reduced = replace(row(1000, 2e-6), op="sum", out_of_place=measured)
    shown = columns(CASES["all_reduce"], "mpi4py", ["auto"], stream=True)
    found = [(column.title, column.cell(reduced)) for column in shown if column.group]
    assert found[:8] == [
        *(("time", "2.00"), ("algbw", "0.500"), ("busbw", "0.250"), ("#wrong", "0")),
        *(("% of stream", "88"), ("mpi4py", "4.00"), ("ratio", "2.00"), ("model", "1.75–2.75")),
    ]
    assert [cell for _, cell in found[8:]] == ["-"] * 8


@pytest.mark.parametrize(
    ("collective", "peer", "stream", "shown"),
    [
        ("all_reduce", "mpi4py", False, {"model"}),
        ("all_reduce", "gloo", True, {"% of stream"}),
        ("all_reduce", None, False, set()),
        ("broadcast", "mpi4py", True, set()),
    ],
)
def test_the_columns_of_the_model_exist_where_it_applies(collective, peer, stream, shown):
    found = columns(CASES[collective], peer, ["auto"], stream=stream)
    assert {column.title for column in found} & {"model", "% of stream"} == shown


def test_wide_cells_fit_their_columns():
    for column in columns(CASES["all_gather"], "mpi4py", ["ring"]):
        assert len(column.cell(row(16 << 30, 12.5))) <= column.width


def test_markdown_omits_missing_forms(tmp_path):
    path = tmp_path / "rows.md"
    shown = columns(CASES["all_gather"], "mpi4py", ["ring"])
    write_markdown(path, HEADER, shown, [row(8, 1e-6), row(16, 1e-6)])
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# all_gather\n\n- all_gather: 2 ranks on 1 node, 2026-01-01\n")
    assert text.count("| ring |") == 2
    assert "out time (µs)" in text
    assert "in time" not in text


def test_a_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    from bench.reports.plot import write_plot

    path = tmp_path / "busbw.png"
    write_plot(path, HEADER, [row(8, 1e-6), row(16, 1e-6)])
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_terminal_gets_the_same_cells(capsys):
    pytest.importorskip("rich")
    from bench.reports.terminal import RichTable

    table = RichTable(HEADER, columns(CASES["all_gather"], None, ["ring"]))
    table.add(row(1000, 2e-6))
    table.close(["all results exact"])
    assert "all results exact" in capsys.readouterr().out
