"""The comparison of two versions' recorded suites."""

import json

import pytest

from bench import compare


def recorded(folder, name, seconds, ratio, ranks=2):
    def result(factor):
        peer = None if ratio is None else {"ratio": ratio * factor}
        return {"seconds": {"median": seconds / factor}, "peer": peer}

    row = {"nbytes": 1 << 20, "out_of_place": result(1), "in_place": result(2)}
    only = {"nbytes": 8, "out_of_place": None, "in_place": result(1)}
    path = folder / f"{name}.json"
    header = {"ranks": ranks, "mpi": "Open MPI 5.0.11"}
    sections = [
        {"header": header, "title": title, "rows": [row]}
        for title, row in (("all_reduce", row), (name[0], only))
    ]
    path.write_text(json.dumps({"sections": sections}), encoding="utf-8")
    return path


def test_medians_of_the_rows_that_both_have(tmp_path, capsys):
    before = [recorded(tmp_path, f"a{i}", each * 1e-6, 1.0) for i, each in enumerate((3, 90, 4))]
    # Not the same rows as those of two ranks.
    before.append(recorded(tmp_path, "a of four", 5e-6, 3.0, ranks=4))
    after = [recorded(tmp_path, "b", 2e-6, 2.0)]
    compare.main(["--before", *map(str, before), "--after", *map(str, after)])
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| 2 | Open MPI | all_reduce | 1M | out of place | 4.0 | 2.0 | 2.00 | 1.00 | 2.00 |",
        "| 2 | Open MPI | all_reduce | 1M | in place | 2.0 | 1.0 | 2.00 | 2.00 | 4.00 |",
    ]


def test_a_row_without_a_peer(tmp_path):
    one = compare.read([recorded(tmp_path, "a", 1e-6, None)])
    assert (
        compare.table(one, one)[-1]
        == "| 2 | Open MPI | a | 8 | in place | 1.0 | 1.0 | 1.00 |  |  |"
    )
    with pytest.raises(ValueError, match="no row in common"):
        compare.table(one, {})


def test_files_without_a_common_row(tmp_path, capsys):
    paths = [str(recorded(tmp_path, "a", 1e-6, None)), str(tmp_path / "empty.json")]
    (tmp_path / "empty.json").write_text('{"sections": []}', encoding="utf-8")
    with pytest.raises(SystemExit, match="2"):
        compare.main(["--before", paths[0], "--after", paths[1]])
    assert "no row in common" in capsys.readouterr().err


HEADER = {"ranks": 2, "mpi": "MPICH"}
ROW = {
    "header": HEADER,
    "title": "a",
    "rows": [{"nbytes": 8, "out_of_place": {}, "in_place": None}],
}


@pytest.mark.parametrize(
    "content",
    [None, "not JSON", "{}", '{"sections": [{"title": "a"}]}', json.dumps({"sections": [ROW]})],
)
def test_other_files_are_named(tmp_path, capsys, content):
    path = tmp_path / "other.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(SystemExit, match="2"):
        compare.main(["--before", str(path), "--after", str(path)])
    assert "other.json" in capsys.readouterr().err
