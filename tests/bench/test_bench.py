"""The benchmark itself: its ways agree, its figures mean what they say, and its timeline measures overlap."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fusedtp.bench import cli
from fusedtp.bench.cases import OPERATIONS, Case, ways
from fusedtp.bench.cpu import WAYS, Result, Row, measure_step
from fusedtp.bench.idle_driver import c_compiler
from fusedtp.bench.machine import slug
from fusedtp.bench.options import Plan
from fusedtp.bench.rank import run, run_ranks
from fusedtp.bench.sample import LEAST, Spread, interleave
from fusedtp.bench.timeline import Call, arrivals, draw, overlapped


@dataclass(frozen=True)
class Whole(Case):
    """A case of small integers: sums of up to 40 products of at most 4 are exact in bfloat16's 8 bits (256)."""

    def operands(self, rank: int, world_size: int) -> tuple[Tensor, Tensor, Tensor]:
        x, w, dy = (t.round().clamp(-2, 2) for t in super().operands(rank, world_size))
        return x, w, dy


SMALL = [
    Whole(op, dtype, 32, 24, 40, both)
    for op in OPERATIONS
    for dtype in ("float32", "bfloat16")
    for both in (False, True)
]


def _gloo_and_ours(rank: int) -> list[tuple[str, Tensor, Tensor]]:
    out = []
    for case in SMALL:
        found = ways(case, "chunked")
        gloo, ours = found["gloo"](), found["ours"]()
        pairs = [(gloo, ours)] if isinstance(gloo, Tensor) else zip(gloo, ours, strict=True)
        out += [(case.label, a.detach().clone(), b.detach().clone()) for a, b in pairs]
    return out


@pytest.mark.slow
def test_gloo_and_ours_compute_the_same() -> None:
    compared = run_ranks(_gloo_and_ours, 2)
    assert len(compared) == 4 * (1 + 2)
    for label, theirs, mine in compared:
        assert theirs.any() and torch.equal(mine, theirs), label


def _slow_on_rank_one(rank: int) -> tuple[dict[str, list[float]], list[str]]:
    import time

    order: list[str] = []

    def way(name: str, seconds: float) -> None:
        order.append(name)
        time.sleep(seconds if rank == 1 else 0.0)

    times = interleave({"a": lambda: way("a", 0.02), "b": lambda: way("b", 0.0)}, 0.0)
    dist.barrier()
    return times, order


@pytest.mark.slow
def test_a_sample_takes_as_long_as_the_slowest_rank_and_ways_alternate() -> None:
    times, order = run_ranks(_slow_on_rank_one, 2)
    assert len(times["a"]) == len(times["b"]) == LEAST
    assert min(times["a"]) >= 0.02
    assert min(times["b"]) < 0.02
    assert order[-2 * LEAST :] == ["a", "b", "b", "a", "a", "b"]


def _row(bare: float, gloo: float, ours: float) -> Row:
    return Row(SMALL[0], *(Spread.of([t, t, t]) for t in (bare, gloo, ours)))


def test_figures() -> None:
    result = Result([_row(1, 3, 1.5), _row(1, 2, 2), _row(2, 4, 1)], 10, 4, 3)
    assert [row.share for row in result.rows] == [0.75, 0.0, 1.5]
    assert (result.median_share, result.least_share) == (0.75, 0.0)
    assert result.mean_ratio == pytest.approx((2.0 * 1.0 * 4.0) ** (1 / 3))
    assert result.bound_bytes == 10


def test_overlap_counts_matmuls_before_the_last_shard_arrived(tmp_path: Path) -> None:
    early = Call(0.0, 5.0, [("matmul 0", 1.0, 3.0), ("wait 1", 3.0, 3.0), ("matmul 1", 3.0, 5.0)])
    late = Call(0.0, 7.0, [("matmul 1", 2.0, 4.0), ("wait 0", 4.0, 4.0), ("matmul 0", 4.0, 7.0)])
    calls = [early, late]
    assert arrivals("all_gather_matmul", calls, 0) == {1: 2.0}
    assert overlapped("all_gather_matmul", calls, 0) == 1.0
    assert overlapped("all_gather_matmul", calls, 1) == 0.0
    assert arrivals("matmul_reduce_scatter", calls, 0) == {1: 7.0}
    assert overlapped("matmul_reduce_scatter", calls, 0) == 4.0
    assert overlapped("matmul_reduce_scatter", calls, 1) == 3.0
    draw(tmp_path / "t.png", {"all_gather_matmul": calls})
    assert (tmp_path / "t.png").stat().st_size > 1000


@pytest.mark.slow
def test_the_training_steps_compute_the_same_and_are_timed() -> None:
    shape = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 160, "num_hidden_layers": 2}
    found = run(Plan(), 2, measure_step, "float32", "chunked", 0.0, 256, shape)
    difference = found["first_loss_difference"]
    assert difference.keys() == {"single", "torch", "collective", "ours"}
    # For 16 operations, each with a sum of up to 160 terms and one rounding of its own.
    assert max(difference.values()) < 16**0.5 * (160**0.5 + 1) * 2.0**-24
    assert {name: time["samples"] for name, time in found["seconds"].items()} == dict.fromkeys(WAYS, LEAST)
    assert all(time["low"] >= 0 for time in found["seconds"].values())
    largest = 256 * 64 * 4
    assert 2 * largest < found["symmetric_bytes"] <= found["symmetric_bound_bytes"]
    assert found["symmetric_bound_bytes"] < 3 * largest


def test_a_machine_names_its_folder() -> None:
    assert slug({"cpu": "AMD EPYC (x)", "capability": "AVX512", "cores": 2}) == "amd-epyc-x-avx512-2-cores"


@pytest.mark.slow
def test_host_time_of_every_call_and_pass_is_measured(capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("triton")
    if c_compiler() is None:  # without a C compiler Triton cannot build its launcher
        assert cli.main(["host", "--rounds", "3"]) == 2 and "no C compiler" in capsys.readouterr().err
        return
    assert cli.main(["host", "--rounds", "3"]) == 0
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if line.strip().startswith("│")]
    passes = []
    for row in rows:
        _, _call, which, ours, bound, _ = (part.strip() for part in row.split("│"))
        passes.append(which)
        assert float(ours) > 0, row
        if which in ("repeated", "forward and backward"):
            assert float(bound) > 0, row
        else:
            assert not bound, row
    last = ["forward and backward", "the same on one device", "index by a kernel", "index in torch"]
    assert passes == [*["no gradients", "repeated", "forward", "backward"] * 4, *last], printed


def test_host_time_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert cli.main(["host", "--rounds", "3"]) == 2
    assert "no C compiler" in capsys.readouterr().err
