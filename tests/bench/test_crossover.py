"""fusedtp bench crossover without mocks: it measures two ranks, and `auto` reads what it wrote."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fusedtp.bench import crossover as command
from fusedtp.bench.cases import linear
from fusedtp.bench.shapes import MODELS, Layer
from fusedtp.ops import measured
from fusedtp.ops.operation import OPERATIONS
from tests.ops.tables import tables_in

CPU = measured.kind_of(torch.device("cpu"))


@pytest.mark.slow
def test_a_table_is_measured_kept_and_read(tmp_path: Path, capsys):
    argv = [
        "--device",
        "cpu",
        "--shapes",
        "tiny",
        "--tokens",
        "8,16",
        "--minutes",
        "0",
        "--out",
        str(tmp_path),
    ]
    argv += ["--world", "virtual"]
    assert command.main([*argv, "--operations", "all_gather_matmul"]) == 0
    assert command.main([*argv, "--operations", "matmul_all_reduce,matmul_reduce_scatter"]) == 0
    path = tmp_path / measured.file_of(CPU)
    body = json.loads(path.read_text())
    table = body["tables"]["engines"]
    assert [entry["operation"] for entry in table["entries"]] == [
        "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce",
    ]  # fmt: skip
    assert {"device", "torch", "commit", "date", "command"} <= set(table["measured"])
    assert path.with_suffix(".crossover.png").stat().st_size > 1000 and str(path) in capsys.readouterr().out
    with tables_in(tmp_path):
        for entry in table["entries"]:
            assert [rows for rows, _ in entry["seconds"]] == [8, 16]
            times = dict(entry["seconds"])
            assert all(
                known.keys() == {"collective", "chunked"} and min(known.values()) > 0 for known in times.values()
            )
            assert [tuple(step) for step in entry["engines"]] == measured.fit(times, measured.ENGINES[:2])
            key = measured.Key(*(entry[name] for name in measured.Key._fields))
            assert key[1:] == ("float32", 2, "virtual") and entry["width"] == MODELS["tiny"].hidden
            for rows in (1, 8, 16, 99):
                assert measured.find(CPU, key, rows, 32).engine == measured.at(entry["engines"], rows)[1]


def test_thresholds_of_engines_are_those_of_the_better_transport():
    """By programs triton loses. By copies it wins from 64 rows on, and copies beat programs from 32 rows on."""
    times = {
        rows: {"collective": 2.0, "chunked": 3.0, "triton": 2.5, command.COPY: copy}
        for rows, copy in ((16, 2.6), (32, 2.2), (64, 1.5), (128, 1.0))
    }
    found = command.thresholds(times)
    assert found["transports"] == [[0, "programs"], [32, "copy"]]
    assert found["engines"] == [[0, "collective"], [64, "triton"]]
    entry = measured.Key("all_gather_matmul", "bfloat16", 8, "processes")._asdict() | {
        "width": 8192,
        **found,
    }
    assert measured.faults(entry, "nvidia-h200") == []


def test_each_way_of_a_gather_goes_by_its_transport(monkeypatch):
    case = linear("all_gather_matmul", "bfloat16", 8, Layer("", "", "column", 8, 8), 2)
    assert command.engines_of(case, "cuda") == (*measured.ENGINES, command.COPY)
    assert command.engines_of(case, "cpu") == ("collective", "chunked")
    assert command.engines_of(replace(case, operation="matmul_all_reduce"), "cuda") == measured.ENGINES
    seen = []

    def call(x, w, group, sizes, engine) -> None:
        key = measured.Key(case.operation, "bfloat16", 2, "processes")
        seen.append((engine, measured.find("nowhere", key, 8, 8).transport))

    monkeypatch.setattr(OPERATIONS[case.operation], "example", case.example._replace(call=call))
    rank = SimpleNamespace(rank=0, group=None, copies=lambda make: [(None, None)])
    for way in command.ways(rank, case, command.engines_of(case, "cuda")).values():
        way()
    measured.hold(None)
    assert seen == [
        ("collective", "programs"), ("chunked", "programs"), ("triton", "programs"), ("triton", "copy"),
    ]  # fmt: skip
    assert measured.find("nowhere", measured.Key("x", "y", 2, "z"), 8, 8) is measured.NOTHING


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--tp", "1"], "--tp 1: a single rank needs no engine"),
        (["--operations", "matmul"], "--operations 'matmul' is not one of all_gather_matmul"),
        (["--save"], "--save is for tables of GPUs only"),
        (["--minutes", "-1"], "--minutes -1.0 must be finite and not negative"),
        (["--device", "cuda"], "torch sees no GPU here"),
    ],
)
def test_bad_input_is_refused(argv, told, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert command.main(["--device", "cpu", *argv]) == 2
    assert told in capsys.readouterr().err


def test_a_table_that_is_none_is_not_written_over(tmp_path: Path, capsys):
    path = tmp_path / measured.file_of(CPU)
    path.write_text("{}")
    assert command.main(["--device", "cpu", "--out", str(tmp_path)]) == 2
    assert "field 'format' is missing" in capsys.readouterr().err and path.read_text() == "{}"
