"""Tables of engines from predicted times: a fused kernel is taken where it is far ahead, if nobody measured."""

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
    about = {"node": "h100", "unit": "us, predicted", "commit": "c", "command": "x", "rows": ROWS}
    path.write_text(json.dumps(about | changes))
    return path


@given(st.dictionaries(st.sampled_from([16, 512, 4096, 8192]), st.floats(0.3, 1.5), min_size=1))
def test_a_fused_kernel_is_taken_where_it_is_predicted_to_be_a_quarter_faster_on_both_sides(shares):
    rows = {f"matmul_reduce_scatter llama3-8b {t}": {"unfused": 100.0, "fused": 100 * s} for t, s in shares.items()}
    found = predicted.entries_of(rows)
    assert {entry["dtype"] for entry in found} == {"bfloat16", "float16"}
    for entry in found:
        assert not measured.faults(entry, GPU) and entry["width"] == 4096
        known = sorted(shares)
        wins = {t: shares[t] * predicted.MARGIN < 1 for t in known}
        for rows in (0, *known, *(t + 1 for t in known), *(t - 1 for t in known)):
            nearest = [t for t in known if t <= rows][-1:] + [t for t in known if t >= rows][:1]
            fused = all(map(wins.get, nearest))
            assert (measured.at(entry["engines"], rows)[1] == "triton") == fused, (rows, entry["engines"])


def test_what_is_measured_goes_before_what_is_predicted(tmp_path):
    (path,) = predicted.write(file(tmp_path), tmp_path)
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


@pytest.mark.parametrize("node", ["h100", "h200", "a100"])
def test_the_table_that_ships_follows_from_the_times_that_are_kept(node, tmp_path):
    (path,) = predicted.write(SAVED / f"{node}.json", tmp_path)
    assert path.read_bytes() == (measured.SHIPPED / path.name).read_bytes()


@pytest.mark.parametrize("wrong", [{"rows": {"a": {}}}, {"rows": {"a b 1": {}}}, {"node": "mine"}, {"commit": None}])
def test_a_file_that_is_none_is_refused(wrong, tmp_path, capsys):
    path = file(tmp_path, **wrong)
    if wrong.get("commit", "") is None:
        path.write_text("[")
    assert predicted.main([str(path)], tmp_path) == 2
    assert "is no file of predicted times" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_the_command_says_what_it_takes_and_where_it_wrote(tmp_path, capsys):
    assert predicted.main([], tmp_path) == 2 and predicted.main(["--help"], tmp_path) == 0
    assert predicted.main([str(SAVED / "h100.json")], tmp_path) == 0
    assert str(tmp_path / measured.file_of(GPU)) in capsys.readouterr().out
