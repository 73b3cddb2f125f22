"""Engine tables from predicted times: without measurements, a fused kernel is used if it is far ahead."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusedtp.bench import predicted, tables
from fusedtp.ops import measured
from tests.ops.tables import tables_in

SAVED = Path(predicted.__file__).parent / "results" / "predicted"
GPU = measured.slug(predicted.GPUS["h100"][0])
KEY = measured.Key("matmul_reduce_scatter", "bfloat16", 8, "processes")


ROWS = {"matmul_reduce_scatter llama3-8b 512": {"unfused": 9.0, "fused": 3.0}}


def file(folder: Path, **changes: object) -> Path:
    path = folder / "times.json"
    about = {"node": "h100", "ranks": 8, "unit": "us, predicted", "commit": "c", "command": "x", "rows": ROWS}
    path.write_text(json.dumps(about | changes))
    return path


@given(st.dictionaries(st.sampled_from([16, 512, 4096, 8192]), st.floats(0.3, 1.5), min_size=1))
def test_a_fused_kernel_is_taken_where_it_is_predicted_to_be_a_quarter_faster_on_both_sides(shares):
    rows = {f"matmul_reduce_scatter llama3-8b {t}": {"unfused": 100.0, "fused": 100 * s} for t, s in shares.items()}
    found = predicted.entries_of(rows, 8)
    assert {entry["dtype"] for entry in found} == {"bfloat16", "float16"}
    for entry in found:
        assert not measured.faults(entry, GPU) and entry["width"] == 4096
        known = sorted(shares)
        wins = {t: shares[t] * predicted.MARGIN < 1 for t in known}
        for rows in (0, *known, *(t + 1 for t in known), *(t - 1 for t in known)):
            nearest = [t for t in known if t <= rows][-1:] + [t for t in known if t >= rows][:1]
            fused = all(map(wins.get, nearest))
            assert (measured.at(entry["engines"], rows)[1] == "triton") == fused, (rows, entry["engines"])


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from([16, 512, 4096, 8192]), st.tuples(*[st.integers(99, 103)] * 2), min_size=1))
def test_rows_go_by_the_copy_engine_from_where_on_that_gains_and_never_loses(times):
    """With 16 and 512 rows there are no times for copies, so few rows go by programs."""
    rows = {}
    for t, (fused, copied) in times.items():
        us = {"unfused": 101.0, "fused": float(fused)} | ({"copied": float(copied)} if t > 512 else {})
        rows[f"all_gather_matmul llama3-8b {t}"] = us
    found = predicted.entries_of(rows, 8)
    assert {entry["operation"] for entry in found} == {"all_gather_matmul", "all_gather_gated_matmul"}

    def never_loses(t: int) -> bool:
        return t > 512 and all(copied <= fused for other, (fused, copied) in times.items() if other >= t)

    begin = min((t for t, (f, c) in times.items() if never_loses(t) and f >= predicted.GAIN * c), default=10**9)
    for entry in found:
        assert not measured.faults(entry, GPU)
        for t, (fused, copied) in times.items():
            by_copies = measured.at(entry.get("transports", [[0, "programs"]]), t)[1] == "copy"
            assert by_copies == (t >= begin)
            seconds = dict(map(tuple, entry["seconds"]))[t]["triton"]
            assert seconds == pytest.approx((copied if by_copies else fused) * 1e-6)


def test_what_is_measured_goes_before_what_is_predicted(tmp_path):
    (path,) = predicted.write([file(tmp_path)], tmp_path)
    assert path.name == measured.file_of(GPU)
    with tables_in(tmp_path):
        found = measured.find(GPU, KEY, 512, 4096)
        assert found.engine == "triton" and f"predicted crossover of {GPU}" in found.reason
        entry = KEY._asdict() | {"width": 4096, "engines": [[0, "collective"]]}
        others, _ = tables.kept(path, GPU, "engines", lambda entry: [])
        tables.write(path, GPU, "engines", {}, [entry], others)
    with tables_in(tmp_path):
        found = measured.find(GPU, KEY, 512, 4096)
        assert found.engine == "collective" and f"measured crossover of {GPU}" in found.reason


def files_of(node: str) -> list[Path]:
    return [SAVED / f"{node}.json", *(SAVED / f"{node}-tp{ranks}.json" for ranks in (4, 2))]


@pytest.mark.parametrize("node", ["h100", "h200", "a100"])
def test_the_table_that_ships_follows_from_the_times_that_are_kept(node, tmp_path):
    (path,) = predicted.write(files_of(node), tmp_path)
    assert path.read_bytes() == (measured.SHIPPED / path.name).read_bytes()


def test_a_node_has_one_table_of_all_its_files(tmp_path, capsys):
    """The files have different numbers of ranks. Two files with the same number are refused, and nothing is written."""
    made = [file(tmp_path, ranks=ranks).rename(tmp_path / f"{ranks}.json") for ranks in (8, 2)]
    (path,) = predicted.write(made, tmp_path / "tables")
    entries = json.loads(path.read_text())["tables"]["predicted"]["entries"]
    assert [(entry["world"], entry["dtype"]) for entry in entries] == [
        (ranks, dtype) for ranks in (8, 2) for dtype in predicted.DTYPES
    ]
    assert predicted.main([str(made[0]), str(made[0])], tmp_path / "others") == 2
    assert "with 8 ranks" in capsys.readouterr().err and not (tmp_path / "others").exists()


@pytest.mark.parametrize(
    "wrong", [{"rows": {"a": {}}}, {"rows": {"a b 1": {}}}, {"node": "mine"}, {"commit": None}, {"ranks": []}]
)
def test_a_file_that_is_none_is_refused(wrong, tmp_path, capsys):
    path = file(tmp_path, **wrong)
    if wrong.get("commit", "") is None:
        path.write_text("[")
    assert predicted.main([str(path)], tmp_path) == 2
    assert "is not a file of predicted times" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_the_command_says_what_it_takes_and_where_it_wrote(tmp_path, capsys):
    assert predicted.main([], tmp_path) == 2 and predicted.main(["--help"], tmp_path) == 0
    assert predicted.main([str(SAVED / "h100.json")], tmp_path) == 0
    assert str(tmp_path / measured.file_of(GPU)) in capsys.readouterr().out
