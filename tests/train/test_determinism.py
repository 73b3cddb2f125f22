"""--determinism: which settings it changes, and that two runs are bitwise equal."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedtp import cli
from fusedtp.commands import run
from fusedtp.commands.run import deterministic
from fusedtp.train.loop import learning_rate
from tests.train.test_resume import arguments, trained


def run_twice(group: Any, mesh: str, options: str, tokens: Path, folder: Path) -> list[Any]:
    """(records, state) of two runs on this rank."""
    with deterministic(True):
        return [trained(group, mesh, options, tokens, folder / str(turn))[:2] for turn in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "options"), [("tp2", "--tie-embeddings"), ("dp2", "--accumulate 2")])
def test_two_runs_are_the_same_to_the_last_bit(worlds, tokens, tmp_path, mesh, options):
    for (records, state), (again, state_again) in worlds(2).run(run_twice, mesh, options, tokens, tmp_path):
        assert len(records) == 4 and records == again
        assert [name for name in state if not torch.equal(state[name], state_again[name])] == []


@pytest.mark.slow
def test_a_run_switches_it_on_for_itself_alone(book, tmp_path, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # restored after the test
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    seen = []

    def look(*given):
        cudnn, variables = (
            torch.backends.cudnn.benchmark,
            [os.environ.get(each) for each in run.DETERMINISTIC],
        )
        seen.append((torch.are_deterministic_algorithms_enabled(), cudnn, variables))
        return learning_rate(*given)

    monkeypatch.setattr("fusedtp.commands.run.learning_rate", look)
    assert cli.main(arguments(book, tmp_path, "--determinism", "--steps", "1")) == 0
    assert seen == [(True, False, [":4096:8", "Ring"])], "what the environment has already stays"
    assert not torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.benchmark
    assert json.loads((tmp_path / "main" / "config.json").read_text())["run"]["determinism"] is True
    assert cli.main(arguments(book, tmp_path, "--replace", "--steps", "1")) == 0
    assert seen[1][:2] == (False, True)
