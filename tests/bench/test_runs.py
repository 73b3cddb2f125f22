"""How runs continue: journals, warm-up, rotation, options, pictures, and what is missing without optional packages."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from fusedtp.bench import cli, machine, output
from fusedtp.bench.cases import Case
from fusedtp.bench.crossover import CrossoverOptions
from fusedtp.bench.options import Options, _parse_plainly, parse
from fusedtp.bench.rows import Journal, Row
from fusedtp.bench.sample import Rotating, Spread, cache_bytes, copies, steady, warm_up
from fusedtp.bench.tune import TuneOptions
from fusedtp.bench.ways import Ways

ROW = Row("s", {"T": 8}, "float32", "e", "one", 1, seconds=Spread(2.0, 1.0, 3.0, 5), flops=8.0)


def test_a_journal_of_the_same_run_goes_on_and_of_another_begins_anew(tmp_path: Path) -> None:
    path, key = tmp_path / "a.jsonl", {"commit": "abc"}
    journal = Journal(path, key, resume=False)
    journal.add(world="onex1", roofs={"copy": 1.0})
    journal.add_case("s", "case 1", [ROW])
    journal.add_case("s", "case 2", [replace(ROW, note="failed", seconds=None)], failed=True)
    with path.open("a") as f:
        f.write('{"suite": "s", "case": "cut o')  # as if killed while writing
    again = Journal(path, key, resume=True)
    assert again.done() == {("s", "case 1"), ("s", "case 2")} and again.failures() == 1
    assert again.rows()[0] == ROW and again.roofs() == {"onex1": {"copy": 1.0}}
    again.add_case("s", "case 3", [ROW])
    assert ("s", "case 3") in Journal(path, key, resume=True).done()
    assert Journal(path, {"commit": "abd"}, resume=True).done() == set()
    assert Journal(path, {"commit": "abd"}, resume=False).rows() == []


def test_a_run_measures_only_what_its_journal_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A case that raises is reported and later cases still run. With --resume nothing is measured twice."""
    from fusedtp.bench.suites import SUITES

    about = machine.describe_run("cpu", []) | {"commit": "abc"}
    monkeypatch.setattr(machine, "describe_run", lambda device, argv: dict(about))
    measured: list[str] = []
    usual = SUITES["matmul"]

    def measure(rank: object, case: Case) -> list[Row]:
        measured.append(str(case.shape["layer"]))
        if measured[-1] == "o" and "--" not in measured:
            raise RuntimeError("no luck")
        rows: list[Row] = usual.measure(rank, case)
        return rows

    monkeypatch.setitem(SUITES, "matmul", usual._replace(measure=measure))
    path = tmp_path / "m.json"
    run = [
        "matmul",
        "--smoke",
        "--device",
        "cpu",
        "--tp",
        "2",
        "--dtype",
        "float32",
        "--minutes",
        "0",
        "--no-plots",
    ]
    run += ["--out", str(path), "--resume"]
    assert cli.main(run) == 1
    assert measured == ["qkv", "gate_up", "o", "down"]
    result = json.loads(path.read_text())
    assert result["failures"] == 1
    assert [r["note"] for r in result["rows"] if r["engine"] == "all"] == ["failed: RuntimeError: no luck"]
    assert {r["shape"]["layer"] for r in result["rows"] if r["seconds"]} == {"qkv", "gate_up", "down"}
    assert cli.main(run) == 1 and len(measured) == 4  # all are measured already
    assert "no luck" in capsys.readouterr().err
    measured[:] = ["--"]
    assert cli.main([*run, "--no-resume"]) == 0 and len(measured) == 5


def test_a_baseline_that_raises_says_so_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fusedtp.bench.suites import model as suite

    def broken(*_: object) -> None:
        raise TypeError("another version\nof theirs")

    monkeypatch.setattr(suite, "liger", lambda device: (broken, ""))
    path = tmp_path / "l.json"
    run = [
        "linear-cross-entropy",
        "--smoke",
        "--device",
        "cpu",
        "--tp",
        "1",
        "--dtype",
        "float32",
        "--minutes",
        "0",
    ]
    assert cli.main([*run, "--no-plots", "--out", str(path)]) == 0
    rows = {row["engine"]: row for row in json.loads(path.read_text())["rows"]}
    assert rows["Liger-Kernel"]["note"] == "TypeError: another version"
    assert rows["torch"]["seconds"] and rows["fusedtp"]["seconds"] and not rows["Liger-Kernel"]["seconds"]


def test_samples_are_steady_when_the_last_ones_agree() -> None:
    assert not steady([1.0, 1.0, 1.0]) and steady([5.0, 1.0, 1.01, 1.0, 1.02])
    assert not steady([1.0, 1.0, 1.0, 1.03])
    times = iter([3.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    assert warm_up(lambda: next(times), 100.0) == [3.0, 2.0, 1.0, 1.0, 1.0, 1.0]
    growing = iter(range(1, 100))
    assert warm_up(lambda: float(next(growing)), 10.0) == [1.0, 2.0, 3.0, 4.0]


def test_calls_rotate_through_operands_larger_than_the_cache() -> None:
    import torch

    seen: list[int] = []
    way = Rotating(seen.append, [(1,), (2,), (3,)])
    for _ in range(5):
        way()
    assert seen == [1, 2, 3, 1, 2]
    assert [copies(n, 100) for n in (1, 30, 50, 100, 1000)] == [64, 4, 2, 1, 1]
    assert cache_bytes(torch.device("cpu")) >= 1 << 18


def test_options_without_tyro_are_those_with_it() -> None:
    argv = [
        "--shapes",
        "tiny",
        "--tokens",
        "8",
        "--minutes",
        "2.5",
        "--no-compile",
        "--smoke",
        "--world",
        "virtual",
    ]
    assert _parse_plainly(Options, argv, "x") == parse(Options, argv, "x")
    assert _parse_plainly(Options, [], "x") == Options() == parse(Options, [], "x")
    argv = ["--tp", "4", "--out", "there", "--world", "processes"]
    for kind in (TuneOptions, CrossoverOptions):
        assert (
            _parse_plainly(kind, argv, "x")
            == parse(kind, argv, "x")
            == kind(tp="4", out=Path("there"), world="processes")
        )
    with pytest.raises(SystemExit):
        _parse_plainly(Options, ["--world", "flat"], "x")


# Run benchmarks as if these packages were not installed.
BARE = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("tyro", "rich", "matplotlib", "tensorboard", "transformers"):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Blocker())
from fusedtp.cli import main
cpu = ["--device", "cpu", "--tp", "2", "--dtype", "float32", "--minutes", "0"]
tiny = ["--shapes", "tiny", "--tokens", "8", "--world", "virtual", "--operations", "matmul_all_reduce"]
sys.exit(main(["bench", "matmul", "--smoke", *cpu, "--out", sys.argv[1]])
         or main(["bench", "crossover", *cpu, *tiny, "--out", sys.argv[2]]))
"""


@pytest.mark.slow
def test_a_bare_box_gets_json_and_plain_text(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    done = subprocess.run(
        [sys.executable, "-c", BARE, str(path), str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "torch.matmul" in done.stdout and "matplotlib is not installed" in done.stdout
    assert "from rows on" in done.stdout and len(list(tmp_path.glob("*.json"))) == 2
    assert json.loads(path.read_text())["rows"]


@pytest.mark.slow
def test_pictures_are_drawn_of_what_there_is(tmp_path: Path) -> None:
    def row(engine: str, tokens: int, seconds: float) -> Row:
        shape: dict[str, int | str] = {"model": "m", "layer": "qkv", "T": tokens, "K": 64, "N": 32, "tp": 2}
        spread = Spread(seconds, seconds, seconds, 3)
        return Row("all-gather-matmul", shape, "float32", engine, "virtual", 2, spread, 1e9, t_comm=1.0, t_matmul=1.0)

    rows = [row(e, t, t * k) for e, k in (("gloo + matmul", 3.0), ("fusedtp chunked", 2.0)) for t in (8, 16)]
    about, roofs = {"cpu": "c", "torch": "t", "commit": ""}, {"virtualx2": {"float32": 1e9, "copy": 1e8}}
    drawn = output.draw(tmp_path / "r.json", about, roofs, rows)
    assert [path.name for path in drawn] == ["r-roofline.png", "r-tokens.png", "r-crossover.png"]
    assert all(path.stat().st_size > 1000 for path in drawn)
    assert output.draw(tmp_path / "e.json", about, roofs, []) == []
    (lines,) = output.fused_lines(rows).values()
    assert lines["fusedtp chunked"] == [(8.0, 16000.0), (16.0, 32000.0)]
    faster = replace(rows[0], engine="fusedtp collective", seconds=Spread(20.0, 20.0, 20.0, 3))
    (lines,) = output.ratios([*rows, faster]).values()
    assert lines == {"fusedtp chunked": [(8.0, 1.25), (16.0, 1.5)]}


def test_a_row_carries_the_note_of_its_last_sample() -> None:
    rank, case = mock.MagicMock(notes={"late": "waited"}), mock.MagicMock(shape={}, dtype="float32")
    ways = Ways(rank, "s", case)
    ways.timed = {"late": print, "other": print}
    assert [ways.row(name, Spread(1.0, 1.0, 1.0, 3)).note for name in ways.timed] == ["waited", ""]


def test_a_row_has_a_cell_for_each_column() -> None:
    full = replace(
        ROW, t_comm=0.5, t_matmul=1.0, t_plain=1.6, t_apart=3.0, roof=8.0, host_seconds=1e-4, peak_bytes=3_000_000,
        error=0.1, error_share=0.25, note="n",
    )  # fmt: skip
    found = dict(zip(output.COLUMNS, output.cells(full), strict=True))
    assert found | {"ms": "", "TFLOP/s": "", "GB/s": ""} == {
        "engine": "e", "ms": "", "TFLOP/s": "", "GB/s": "", "roof": "50%", "hidden": "-100%", "/ slower": "2.000",
        "/ plain": "1.250", "gain": "1.500", "host us": "100", "peak MB": "3", "error": "0.25", "note": "n",
    }  # fmt: skip


def test_a_share_above_the_roof_is_marked_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    """With a rate of 4, the first two roofs show 100 % and the next two show more. Then come no roof and no time."""
    rows = [replace(ROW, engine=f"e{i}", roof=roof) for i, roof in enumerate((4.0, 3.99, 3.9, 2.0, None))]
    rows[3] = replace(rows[3], flops=None, moved_bytes=8.0)
    untimed = replace(ROW, engine="e5", roof=1.0, seconds=None)
    output.show({}, {}, [*rows, rows[2], untimed])
    told = capsys.readouterr().out
    shares = [dict(zip(output.COLUMNS, output.cells(row), strict=True))["roof"] for row in [*rows, untimed]]
    assert shares == ["100%", "100%", "103% !", "200% !", "", ""]
    assert "103% !" in told
    assert [line for line in told.splitlines() if line.startswith("note: ")] == [
        "note: 1 row in float32 above the roof, marked !: the roof's sample was disturbed by other load; measure again",
        "note: 2 rows in float32 above the roof, marked !: the roof's sample was disturbed by other load, "
        "or torch.matmul is slow here in float32; measure again",
    ]
    marked = [row.as_dict()["above_roof"] for row in [*rows, untimed]]
    assert marked == [False, False, True, True, False, False]


def test_nvidia_smi_is_asked_for_the_gpu_and_may_be_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert machine.gpu_state() is None or "name" in machine.gpu_state()  # type: ignore[operator]
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\necho "NVIDIA H200, 580.1, 1980 MHz, 1980 MHz, 3201 MHz, 120 W, 700 W, 40"\n')
    tool.chmod(0o755)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    state = machine.gpu_state()
    assert state is not None and state["clocks.sm"] == "1980 MHz" and state["power.limit"] == "700 W"
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert machine.gpu_state() is None
    assert machine.slug({"gpu": "NVIDIA H200", "cpu": "c", "capability": "a", "cores": 2}) == "nvidia-h200"


@pytest.mark.parametrize(
    "more, said",
    [
        (["--minutes", "nan"], "--minutes is nan"),
        (["--minutes", "inf"], "--minutes is inf"),
        (["--out", "{folder}"], "is a folder"),
        (["--out", "{folder}/file/x.json"], "file/x.json: "),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_measured(more, said, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    options = [each.format(folder=tmp_path) for each in more]
    assert cli.main(["matmul", "--smoke", "--device", "cpu", *options]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("slack", ["nan", "-1", "inf"])
def test_a_slack_that_is_no_share_is_refused(slack, tmp_path):
    with pytest.raises(SystemExit) as ended:
        cli.main(["compare", "a.json", "b.json", "--slack", slack])
    assert ended.value.code == 2
