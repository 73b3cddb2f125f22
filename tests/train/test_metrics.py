"""Records: waiting is a share of the step where it is measured, and nowhere 0 % because nobody looked."""

import io
import json
from unittest.mock import MagicMock

import pytest
import torch
from rich.console import Console

from fusedtp.commands import results
from fusedtp.commands.results import sinks_for
from fusedtp.train.config import TrainConfig
from fusedtp.train.loop import Metrics
from fusedtp.train.mesh import World


def record_run(device: str, folder, monkeypatch) -> tuple[dict, dict, str]:
    """The last record, the summary and the screen of two steps on two ranks of such a device."""
    where = World(tp=2, device=torch.device(device), mesh=MagicMock())
    config, screen = TrainConfig(), Console(file=io.StringIO(), width=110)
    monkeypatch.setattr(type(config.run), "folder", folder)
    with Metrics(where, sinks_for(config, where, screen)) as metrics:
        for step in range(2):
            waited = None if device == "cuda" else 1e-5
            waits = {"tp_wait_seconds": waited, "pp_wait_seconds": waited, "dp_wait_seconds": waited}
            metrics.step(step, 10, loss=2.0, grad_norm=1.0, lr=0.1, **waits)
        metrics.validation(1, 2.0)
    summary = results.summarize(config, where, metrics, {}, 10, None)
    results.show(screen, summary, None)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return json.loads(lines[1]), summary, screen.file.getvalue()


def test_waiting_is_measured_on_cpu(tmp_path, monkeypatch):
    record, summary, shown = record_run("cpu", tmp_path, monkeypatch)
    assert record["wait_share"] == summary["wait_share"] == pytest.approx(3e-5 / record["seconds"])
    assert "% of a step" in shown and "not measured" not in shown


def test_waiting_is_not_measured_on_a_gpu(tmp_path, monkeypatch):
    record, summary, shown = record_run("cuda", tmp_path, monkeypatch)
    assert record["wait_share"] is None and summary["wait_share"] is None
    assert "not measured" in shown and "%" not in shown
