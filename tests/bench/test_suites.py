"""`fusedtp bench`: one small run of every suite on CPU, with checks that its figures agree, and comparisons."""

from __future__ import annotations

import copy
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedtp.bench import cli, compare
from fusedtp.bench.options import Options, Plan, plan_of
from fusedtp.bench.rank import Rank
from fusedtp.bench.rows import FORMAT, Row
from fusedtp.bench.sample import Spread
from fusedtp.bench.shapes import MODELS, SKEWS, layers, shared_out
from fusedtp.bench.suites import SUITES, experts
from fusedtp.comm import VirtualGroup, VirtualWorld

RUN = ["--smoke", "--device", "cpu", "--minutes", "0", "--no-plots"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of two runs: all suites on processes, with gloo; three suites in a virtual world and on one rank."""
    folder = tmp_path_factory.mktemp("bench")
    assert cli.main(["all", *RUN, "--tp", "2", "--dtype", "bfloat16", "--out", str(folder / "all.json")]) == 0
    fused = ["--suites", "all-gather-matmul,matmul-reduce-scatter,block", "--world", "virtual", "--tp", "1,2"]
    assert cli.main(["all", *RUN, *fused, "--dtype", "float32", "--out", str(folder / "virtual.json")]) == 0
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, dict[str, Any]]:
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in ("all", "virtual")}


def rows_of(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for result in results.values() for row in result["rows"]]


@pytest.mark.slow
def test_a_result_says_where_and_with_what(results: dict[str, dict[str, Any]]) -> None:
    for result in results.values():
        assert (result["format"], result["complete"], result["failures"]) == (FORMAT, True, 0)
        about = result["machine"]
        assert about["device"] == "cpu" and about["gpu"] is None and about["gpu_state"] is None
        assert all(about[name] for name in ("cpu", "cores", "torch", "python", "fusedtp"))
        assert about["command"].startswith("fusedtp bench all --smoke")
    assert set(results["all"]["roofs"]) == {"onex1", "processesx2"}
    assert set(results["virtual"]["roofs"]) == {"onex1", "virtualx2"}


def test_every_suite_has_rows_with_every_field(results: dict[str, dict[str, Any]]) -> None:
    rows = rows_of(results)
    assert {row["suite"] for row in rows} == set(SUITES)
    for row in rows:
        assert set(row) == set(Row("", {}, "", "", "", 1).as_dict())
        assert Row.from_dict(row).as_dict() == row  # computed fields are the same after reading
        if row["seconds"] is None:
            assert row["note"], row
        else:
            spread = row["seconds"]
            assert 0 < spread["low"] <= spread["median"] <= spread["high"] and spread["samples"] >= 3
            assert row["suite"] == "train" or (row["host_seconds"] > 0 and row["roof"] > 0)


def test_what_is_not_here_says_why(results: dict[str, dict[str, Any]]) -> None:
    notes = {(row["suite"], row["world"], row["engine"]): row["note"] for row in rows_of(results) if row["note"]}
    assert "needs GPUs" in notes["all-gather-matmul", "processes", "torch symm_mem"]
    assert "one process" in notes["all-gather-matmul", "virtual", "gloo + matmul"]
    assert "--no-compile" in notes["matmul", "one", "torch.compile"]
    assert "Liger" in notes["pointwise", "one", "Liger-Kernel"]


def test_figures_follow_from_the_times_and_the_shape(results: dict[str, dict[str, Any]]) -> None:
    """Compute the figures here again, from the shape alone."""
    measured = [row for row in rows_of(results) if row["seconds"] is not None]
    for row in measured:
        t, shape = row["seconds"]["median"], row["shape"]
        if row["suite"] in (
            "matmul",
            "all-gather-matmul",
            "all-gather-wgrad",
            "matmul-reduce-scatter",
            "matmul-all-reduce",
        ):
            flops = 2 * shape["T"] * shape["K"] * shape["N"] * row["ranks"]
            if row["tflops"] is not None:
                assert row["tflops"] == pytest.approx(flops / t / 1e12)
                assert row["roof_share"] == pytest.approx(flops / t / row["roof"])
            else:
                assert row["engine"].startswith("communication alone")
        if row["suite"] == "grouped-matmul":
            assert row["tflops"] == pytest.approx(2 * shape["R"] * shape["K"] * shape["N"] / t / 1e12)
        if row["suite"] == "moe":
            flops = 3 * 3 * 2 * shape["T"] * shape["k"] * shape["H"] * shape["F"]
            assert row["tflops"] == pytest.approx(flops / t / 1e12)
        if row["suite"] == "moe-exchange":
            payload = shape["T"] * shape["k"] * shape["H"] * (4 if row["dtype"] == "float32" else 2)
            assert row["gbps"] == pytest.approx(2 * payload / t / 1e9) and row["tflops"] is None
        if row["suite"] == "pointwise":
            assert row["gbps"] == pytest.approx(row["moved_bytes"] / t / 1e9) and row["tflops"] is None
    swiglu = [r for r in measured if r["shape"].get("op") == "swiglu" and r["shape"]["direction"] == "fwd"]
    assert swiglu and all(row["moved_bytes"] == 3 * 64 * 80 * 2 for row in swiglu)


def test_a_layer_of_experts_stands_beside_its_matmuls_alone(results: dict[str, dict[str, Any]]) -> None:
    timed = [row for row in rows_of(results) if row["suite"] == "moe" and row["seconds"]]
    engines = {(str(row["shape"]), row["dtype"], row["world"]): set[str]() for row in timed}
    for row in timed:
        engines[str(row["shape"]), row["dtype"], row["world"]].add(row["engine"])
    assert engines and all({"experts alone", "fusedtp chunked"} <= found for found in engines.values())


def test_the_gain_of_a_layer_of_experts_is_against_the_same_layer_without_overlap() -> None:
    def made(engine: str, seconds: float | None) -> Row:
        spread = None if seconds is None else Spread.of([seconds] * 2)
        return Row("moe", {}, "bfloat16", engine, "virtual", 8, seconds=spread)

    rows = [
        made("fusedtp triton", 2.0),
        made("fusedtp triton, one by one", 3.0),
        made("fusedtp collective", None),
    ]
    first, *others = experts.with_gain(rows)
    assert first.gain == 1.5 and Row.from_dict(first.as_dict()) == first
    assert others == rows[1:] and all(row.gain is None for row in others)


def test_rows_are_shared_out_among_experts_evenly_and_unevenly() -> None:
    assert shared_out(10, 4, "balanced") == (2, 3, 3, 2)
    assert shared_out(10, 4, "skewed") == (5, 2, 2, 1)
    for skew in SKEWS:
        assert sum(shared_out(8191, 256, skew)) == 8191 and shared_out(0, 3, skew) == (0, 0, 0)


def test_the_share_hidden_follows_from_the_times_of_the_same_case(results: dict[str, dict[str, Any]]) -> None:
    cases: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows_of(results):
        if row["suite"].endswith(("gather-matmul", "reduce-scatter", "all-reduce")) and row["seconds"]:
            key = f"{row['suite']} {row['shape']} {row['dtype']} {row['world']}"
            cases.setdefault(key, {})[row["engine"]] = row
    assert len(cases) == 3 * 2 + 2 * 2
    for engines in cases.values():
        alone = [row["seconds"]["median"] for name, row in engines.items() if name.startswith("communication")]
        t_comm, t_matmul = min(alone), engines["matmul alone"]["seconds"]["median"]
        fused = engines["fusedtp chunked"]
        assert (fused["t_comm"], fused["t_matmul"]) == (t_comm, t_matmul)
        want = (t_comm + t_matmul - fused["seconds"]["median"]) / min(t_comm, t_matmul)
        assert fused["hidden_share"] == pytest.approx(want)
        assert fused["over_slower"] == pytest.approx(fused["seconds"]["median"] / max(t_comm, t_matmul))
        assert engines["matmul alone"]["hidden_share"] is None


def test_figures_of_the_trainer_follow_from_their_times(results: dict[str, dict[str, Any]]) -> None:
    """By its order, a step of two stages with 8 microbatches takes 9 x (2 + 2 + 2) ms. Sleeps never end early."""
    parts: dict[str, list[dict[str, Any]]] = {}
    for row in results["all"]["rows"]:
        if row["suite"] == "train":
            parts.setdefault(row["shape"]["part"], []).append(row)
    for row in parts["bubble"]:
        of_rank, figures = 2 if row["shape"]["schedule"] == "dualpipev" else 1, row["figures"]
        assert (
            figures["ideal_bubble"]
            == pytest.approx(figures["formula_bubble"])
            == pytest.approx(1 / (9, 25)[of_rank - 1])
        )
        by_order = 8 * 0.006 * of_rank / (1 - figures["ideal_bubble"])
        assert (
            figures["step_ratio"] == pytest.approx(row["seconds"]["median"] / by_order) and figures["step_ratio"] >= 1
        )
        assert 0 < figures["bubble"] < 1 and figures["bubble_ratio"] == figures["bubble"] / figures["ideal_bubble"]
    assert len(parts["bubble"]) == 2
    by_hand, trainer = parts["overhead"]
    assert trainer["figures"]["ratio"] == trainer["seconds"]["median"] / by_hand["seconds"]["median"]
    figures = parts["checkpoint"][1]["figures"]
    assert figures["blocked_seconds"] <= figures["save_seconds"] and figures["gigabytes"] > 0


def test_errors_are_within_what_the_dtype_allows(results: dict[str, dict[str, Any]]) -> None:
    ours = [row for row in rows_of(results) if row["engine"].startswith("fusedtp") and row["seconds"]]
    ours = [row for row in ours if row["suite"] != "train"]
    assert {row["suite"] for row in ours} == set(SUITES) - {"train"}
    for row in ours:
        assert 0 <= row["error_share"] <= 1, row
    assert all(row["error"] > 0 for row in ours if row["dtype"] == "bfloat16" and row["suite"] == "matmul")


def test_compare_passes_the_same_file_and_finds_what_became_worse(
    folder: Path, results: dict[str, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = folder / "all.json"
    assert cli.main(["compare", str(old), str(old)]) == 0
    slower = copy.deepcopy(results["all"])
    row = next(r for r in slower["rows"] if r["engine"] == "fusedtp chunked")
    for name in ("median", "low", "high"):
        row["seconds"][name] = 1.1 * row["seconds"][name] + results["all"]["rows"][0]["seconds"]["high"]
    row["seconds"]["low"] = 1.1 * row["seconds"]["high"]
    new = tmp_path / "new.json"
    new.write_text(json.dumps(slower))
    capsys.readouterr()
    assert cli.main(["compare", str(old), str(new)]) == 1
    told = capsys.readouterr().out
    assert "slower" in told and "fusedtp chunked" in told and "1 worse" in told
    assert cli.main(["compare", str(new), str(old)]) == 0  # faster does not count as a regression
    lost = copy.deepcopy(results["all"])
    del lost["rows"][next(i for i, r in enumerate(lost["rows"]) if r["seconds"])]
    new.write_text(json.dumps(lost))
    assert cli.main(["compare", str(old), str(new)]) == 1
    wrong = copy.deepcopy(results["all"])
    next(r for r in wrong["rows"] if r["error_share"] is not None)["error_share"] = 1.5
    new.write_text(json.dumps(wrong))
    assert cli.main(["compare", str(old), str(new)]) == 1


def test_compare_refuses_other_machines_and_other_files(
    folder: Path, results: dict[str, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = copy.deepcopy(results["all"])
    other["machine"]["cpu"] = "another"
    new = tmp_path / "new.json"
    new.write_text(json.dumps(other))
    assert cli.main(["compare", str(folder / "all.json"), str(new)]) == 2
    assert "different machines" in capsys.readouterr().err
    assert cli.main(["compare", str(folder / "all.json"), str(new), "--force"]) == 0
    new.write_text("{}")
    assert cli.main(["compare", str(folder / "all.json"), str(new)]) == 2


def test_a_quartile_beyond_a_quartile_is_a_change() -> None:
    def row(median: float, half: float) -> Row:
        spread = {"median": median, "low": median - half, "high": median + half, "samples": 9}
        return Row.from_dict(Row("s", {}, "float32", "e", "one", 1).as_dict() | {"seconds": spread})

    assert compare.verdict(row(1.0, 0.1), row(1.19, 0.1), 0.0) == "same"
    assert compare.verdict(row(1.0, 0.1), row(1.21, 0.1), 0.0) == "slower"
    assert compare.verdict(row(1.0, 0.1), row(1.21, 0.1), 0.1) == "same"
    assert compare.verdict(row(1.21, 0.1), row(1.0, 0.1), 0.0) == "faster"


def test_faults_of_options_are_told_together(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = Options(shapes="llama3-8b,nonsense", tp="3", dtype="int8", engine="warp", tokens="0", device="cpu")
    with pytest.raises(ValueError) as caught:
        plan_of(wrong)
    said = str(caught.value)
    for part in ("'nonsense'", "does not split over 3", "'int8'", "'warp'", "tokens '0'"):
        assert part in said
    uneven = ["all-gather-matmul", "--device", "cpu", "--shapes", "tiny", "--tokens", "7", "--tp", "2"]
    assert cli.main(uneven) == 2 and "7 tokens do not divide among 2" in capsys.readouterr().err
    assert cli.main(["all-gather-matmul", "--device", "cpu", "--tp", "1"]) == 2
    assert "no case" in capsys.readouterr().err
    assert cli.main(["nonsense"]) == 2


def test_every_suite_and_command_has_its_module() -> None:
    """Find the modules without importing them, because some import a lot."""
    assert all(f"  {name} " in cli.usage() for name in (*SUITES, *cli.COMMANDS, "all"))
    assert not set(SUITES) & set(cli.COMMANDS)
    for command, _ in cli.COMMANDS.values():
        module, *_ = command.split()
        spec = find_spec(f"fusedtp.bench.{module}")
        assert spec is not None and spec.origin is not None
        assert "\ndef main(argv" in Path(spec.origin).read_text(), module


def test_shapes_of_llama_3_70b_on_eight_ranks() -> None:
    assert {layer.name: (layer.k, layer.n) for layer in layers("llama3-70b", 8)} == {
        "qkv": (8192, 1280), "gate_up": (8192, 7168), "o": (1024, 8192), "down": (3584, 8192),
    }  # fmt: skip
    assert len([model for model in MODELS.values() if model.source]) >= 8
    (square,) = layers("square-4096", 8)
    assert (square.k, square.n) == (4096, 4096)


def test_ranks_make_operands_equally_often() -> None:
    """Also if operand sizes differ by rank, as with unevenly routed rows: making operands may be a collective."""

    def made(group: VirtualGroup) -> int:
        rank = Rank(Plan(world="virtual", smoke=True), group)
        return len(rank.copies(lambda seed: (torch.ones(1 << (10 + 4 * rank.rank)),)))

    first, second = VirtualWorld(2).run(made)
    assert first == second > 1
