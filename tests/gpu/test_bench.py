"""`fusedtp bench` on one GPU: every suite runs with compiled kernels, and its errors are within their bounds."""

from __future__ import annotations

import json
from pathlib import Path
from time import sleep

import pytest
import torch

from fusedtp.bench import cli, sample

RUN = ["--smoke", "--device", "cuda", "--minutes", "0", "--no-plots", "--dtype", "bfloat16"]


def _rows(path: Path, *argv: str) -> list[dict]:
    assert cli.main([*argv, *RUN, "--out", str(path)]) == 0
    rows: list[dict] = json.loads(path.read_text())["rows"]
    for row in rows:
        if row["engine"].startswith("fusedtp") and row["seconds"] is not None:
            assert row["error_share"] <= 1, row
    return rows


def test_every_suite_runs(tmp_path: Path) -> None:
    virtual = ["--world", "virtual", "--tp", "1,2", "--engine", "triton,chunked"]
    rows = _rows(tmp_path / "all.json", "all", *virtual)
    assert {row["engine"] for row in rows if row["seconds"]} >= {
        "fusedtp triton",
        "fusedtp chunked",
        "fusedtp",
    }


def test_the_gain_of_a_layer_of_experts_is_against_the_same_layer_without_overlap(tmp_path: Path) -> None:
    virtual = ["--world", "virtual", "--tp", "2", "--engine", "triton"]
    rows = {row["engine"]: row for row in _rows(tmp_path / "moe.json", "moe", *virtual)}
    fused, apart = rows["fusedtp triton"], rows["fusedtp triton, one by one"]
    assert fused["gain"] == pytest.approx(apart["seconds"]["median"] / fused["seconds"]["median"])


def test_the_device_clock_counts_the_device_and_not_the_host() -> None:
    """A call that spins on the device takes longer than a call during which only the host sleeps."""
    device = torch.device("cuda", torch.cuda.current_device())
    cycles, clock = int(0.01 * sample.cycles_per_second(device)), sample.DeviceClock(device, ranks=20)
    busy = clock(sample.Alone(), lambda: torch.cuda._sleep(cycles))
    idle = clock(sample.Alone(), lambda: sleep(0.02))  # the gate is closed for longer
    assert idle < busy
