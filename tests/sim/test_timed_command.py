"""Nodes as data files, comparisons of choices, and the command that prints them."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusedtp.bench import timed_exchange
from fusedtp.bench.timed import (
    COMPARISONS,
    GATHER,
    REDUCE,
    SCATTER,
    SWITCH,
    Problem,
    alternatives,
    collective_time,
    compared,
    main,
    matmul_run,
    measure,
    model_problem,
)
from fusedtp.sim.timed import Engine, load_node, machines
from fusedtp.sim.timed.node import read_node

from .timed_support import SMALL


def entries_of(name: str) -> dict[str, Any]:
    return json.loads((resources.files("fusedtp.sim.timed") / "machines" / f"{name}.json").read_text())


@pytest.mark.parametrize("name", machines())
def test_machines_are_complete(name: str) -> None:
    node = load_node(name)
    assert node.sms > 100 and node.flops["bf16"] > 1e14
    got = Engine(matmul_run(Problem(GATHER, 256, (256,), 256), node), node).run()
    assert got.total > 0


@pytest.mark.parametrize("name", machines())
def test_every_number_says_where_it_is_from(name: str) -> None:
    """By an address, or by the word for an unsourced number."""
    for key, entry in entries_of(name).items():
        assert "https://" in entry["source"] or entry["source"].startswith("assumed: "), key


@given(st.integers(2, 16), st.integers(1, 10**10))
def test_a_collective_takes_its_best_ring(world_size: int, width: int) -> None:
    """W - 1 hops plus the bytes that a rank must receive. Small messages use the ring with the shortest hop."""
    problem = Problem(GATHER, world_size, (1,), width, world_size)
    rings = SMALL.collectives
    want = [r["start"] + (world_size - 1) * (r["hop"] + 2 * width / r["bandwidth"]) for r in rings.values()]
    assert collective_time(problem, SMALL) == pytest.approx(min(want))
    if width < 1000:
        assert min(want) == want[list(rings).index("ll")]
    if width > 10**9:
        assert min(want) == want[list(rings).index("simple")]


def test_a_damaged_machine_lists_all_its_faults() -> None:
    entries = entries_of("h100")
    del entries["sms"]["source"], entries["l2_bytes"], entries["collectives"]["value"]["ll"]["hop"]
    entries["link_bandwidth"]["value"] = 0
    entries["flops"]["value"] = {}
    entries["memory_latency"]["value"] = "short"
    entries["colour"] = {"value": 1, "source": "none"}
    with pytest.raises(ValueError) as caught:
        read_node("mine", json.dumps(entries))
    for words in (
        "sms has no source", "l2_bytes is missing", "link_bandwidth is not positive", "colour is unknown",
        "collectives gives start, bandwidth of a ring", "flops gives no numbers", "memory_latency is not positive",
    ):  # fmt: skip
        assert words in str(caught.value)


def test_all_comparisons_are_each_of_them_once() -> None:
    for operation in (GATHER, SCATTER, REDUCE):
        problem = Problem(operation, 512, (256,), 256, 4)
        every = [p for _, p in alternatives(problem, SMALL, "all")]
        single = [c for c in COMPARISONS[1:-1] if operation != SCATTER or c != "transport"]
        assert len(every) == len(set(every))
        assert set(every) == {p for c in single for _, p in alternatives(problem, SMALL, c)}


@pytest.mark.parametrize("compare", ["none", "transport", "chunk", "programs", "order"])
def test_comparisons_vary_what_they_name(compare: str) -> None:
    few, problem = (Problem(GATHER, rows, (256,), 256, 4) for rows in (512, 1024))
    assert dict(alternatives(few, SMALL, compare)) == {"as launched": few}  # which has one way
    found = dict(alternatives(problem, SMALL, compare))
    assert found.pop("as launched") == problem
    assert len(found) == {"none": 0, "transport": 1}.get(compare, len(found)) and (found or compare == "none")
    assert len({(p.chosen(SMALL), p.transport, p.order) for p in [problem, *found.values()]}) == 1 + len(found)


@pytest.mark.slow
def test_choices_are_compared_with_one_product() -> None:
    """Choices vary the fused kernel; the product is the same, even where a launch would give it other tiles."""
    problem = Problem(SCATTER, 512, (1024,), 256, 8)  # a tile has no rows of two owners: theirs are 64
    got = [m for _, m in compared(problem, SMALL, "order")]
    assert len({m.matmul for m in got}) == 1 and len({m.unfused for m in got}) == 1
    assert got[0].matmul == measure(problem, SMALL).matmul != measure(got[1].problem, SMALL).matmul


def test_hidden_is_what_fusing_saves_of_the_shorter_part() -> None:
    got = measure(Problem(GATHER, 512, (256,), 256, 4), SMALL)
    saved = got.communication + got.matmul - got.fused.total
    assert got.hidden == pytest.approx(saved / min(got.communication, got.matmul))


def test_the_command_prints_a_row_for_each_choice(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "timeline.html"
    arguments = ["--shape", "512x256", "--tokens", "320", "--tp", "2", "--compare", "transport"]
    assert main([*arguments, "--timeline", str(page), "--path"]) == 0
    out = capsys.readouterr().out
    assert "hidden" in out and "engine" in out
    assert "takes" in out and "latency" in out
    assert "all_gather_matmul_kernel" in page.read_text()


def test_the_command_refuses_with_every_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--machine", "abacus", "--tokens", "0", "--tp", "1"]) == 2
    out = capsys.readouterr().out
    assert all(word in out for word in ("abacus", "--tokens", "--tp"))
    assert main(["--shape", "wide"]) == 2


@pytest.mark.slow
def test_all_sizes_stand_in_one_table_beside_those_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fusedtp.bench.timed.SIZES", (("256x128",), (16, 48)))
    first, second = tmp_path / "made" / "first.json", tmp_path / "second.json"
    given = ["--sizes", "--tp", "2"]
    assert main([*given, "--save", str(first)]) == 0
    made = json.loads(first.read_text())
    problem = model_problem("matmul_all_reduce", "256x128", 48, 2, dtype=torch.bfloat16)
    want = measure(problem, load_node("h100"))
    row = made["rows"]["matmul_all_reduce 256x128 48"]
    assert row == {
        "product": round(want.matmul * 1e6, 1),
        "unfused": round(want.unfused * 1e6, 1),
        "fused": round(want.fused.total * 1e6, 1),
    }
    assert len(made["rows"]) == 6 and made["node"] == "h100" and made["command"].endswith(str(first))
    made["rows"]["all_gather_matmul 256x128 16"]["fused"] = 12345.0
    first.write_text(json.dumps(made))
    assert main([*given, "--against", str(first), "--save", str(second)]) == 0
    assert json.loads(second.read_text())["rows"]["all_gather_matmul 256x128 16"]["before"] == 12345.0
    assert "before" in capsys.readouterr().out
    assert main([*given, "--against", str(tmp_path / "none.json")]) == 2
    assert main([*given, "--switch", "--against", str(first), "--save", str(second)]) == 0
    rows = json.loads(second.read_text())["rows"]
    assert set(rows) == {f"matmul_all_reduce 256x128 {tokens}" for tokens in (16, 48)}
    switched = measure(replace(problem, transport=SWITCH), load_node("h100")).fused.total
    assert rows["matmul_all_reduce 256x128 48"]["fused"] == round(switched * 1e6, 1)
    assert rows["matmul_all_reduce 256x128 48"]["before"] == row["fused"]
    assert main(["--tp", "2", "--switch"]) == 2


@pytest.mark.slow
def test_an_exchange_sends_what_its_routing_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two ranks, Mixtral's rows: of a token's two choices, those that the other rank owns travel there and back."""
    before, now = tmp_path / "before.json", tmp_path / "now.json"
    words = ["--machine", "h200", "--model", "mixtral-8x7b", "--tokens", "16", "--ranks", "2", "--save"]
    assert timed_exchange.main([*words, str(before)]) == 0
    assert timed_exchange.main([*words, str(now), "--against", str(before)]) == 0
    found = json.loads(now.read_text())
    assert found["rows"] == json.loads(before.read_text())["rows"] and found["node"] == "h200"
    for row in found["rows"].values():
        assert 0 < row["MB"] <= 16 * 2 * 4096 * 2 * 1.1 / 1e6 and 0 < row["us"] < 100
        assert row["GB/s"] == pytest.approx(row["MB"] * 1e3 / row["us"], rel=0.4)  # of rounded numbers
    assert "us before" in capsys.readouterr().out
    gated = ["--machine", "h200", "--model", "qwen3-30b-a3b", "--operations", "gated", "--tokens", "16", "--ranks", "2"]
    assert timed_exchange.main([*gated, "--save", str(now)]) == 0
    (row,) = json.loads(now.read_text())["rows"].values()
    assert row["MB"] == pytest.approx(16 * 8 / 2 * 2048 * 2 / 1e6, rel=0.2), "half of the choices are of the other rank"
    assert row["us"] > 2 * 64 * 768 * 2048 * 2 / 4.8e6, "both weights of 64 experts come from memory"
    assert timed_exchange.main(["--tokens", "9", "--ranks", "3"]) == 2
    said = capsys.readouterr().out
    assert "--tokens 9" in said and "--ranks 3" in said
