"""`python -m bench.markdown` on every committed result, and on what is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fusedtp.bench import cli, markdown

RESULTS = Path(__file__).parents[2] / "bench" / "results"
NAMES = sorted(str(path.relative_to(RESULTS)) for path in RESULTS.glob("*/*.json"))
OTHERS = [name for name in NAMES if name.startswith("predicted/") or name.endswith(("/host.json", "/sim.json"))]


def test_there_are_results_of_every_kind() -> None:
    assert len(NAMES) - len(OTHERS) > 10 and len(OTHERS) > 10


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OTHERS])
def test_a_committed_result_is_shown(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The machine, and the time of every row that was measured, next to the name of its engine."""
    path = RESULTS / name
    assert markdown.main([str(path)]) == 0
    printed, result = capsys.readouterr().out, json.loads(path.read_text())
    assert printed.startswith(result["machine"].get("gpu") or result["machine"]["cpu"])
    for row in result.get("rows", []):
        if row["suite"] == "train":
            figures = row["figures"]
            assert (f"{figures['bubble_low']:.1%}" if "bubble" in figures else row["note"]) in printed
        elif row["seconds"]:
            assert f" {1e6 * row['seconds']['median']:.0f} |" in printed and f"| {row['engine']} |" in printed
            assert f"`{row['suite']}`" in printed and f", {row['dtype']}, us:" in printed


@pytest.mark.parametrize("name", OTHERS)
def test_a_file_of_another_kind_is_refused_by_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = RESULTS / name
    assert markdown.main([str(path)]) == 2
    printed = capsys.readouterr()
    assert str(path) in printed.err and "neither a result of a suite" in printed.err and not printed.out


def test_what_is_no_json_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "notes.json"
    assert markdown.main([str(path)]) == 2 and str(path) in capsys.readouterr().err
    path.write_text("[1, 2]")
    assert markdown.main([str(path)]) == 2 and str(path) in capsys.readouterr().err
    path.write_text("ms: 3")
    assert markdown.main([str(path)]) == 2 and str(path) in capsys.readouterr().err


def test_a_new_result_of_a_cpu_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mm.json"
    run = ["matmul", "--smoke", "--device", "cpu", "--dtype", "float32", "--minutes", "0", "--no-plots"]
    assert cli.main([*run, "--out", str(path)]) == 0
    capsys.readouterr()
    assert markdown.main([str(path)]) == 0
    assert "`matmul`, " in capsys.readouterr().out


def test_a_gpu_without_nvidia_smi_is_named_without_its_driver() -> None:
    about = json.loads((RESULTS / "nvidia-h200" / "matmul.json").read_text())["machine"]
    assert f"(driver {about['gpu_state']['driver_version']})" in markdown.machine({"machine": about})
    assert markdown.machine({"machine": about | {"gpu_state": None}}).startswith("NVIDIA H200, Python ")
