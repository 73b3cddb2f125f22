"""`fusedtp bench gpu`: its parts, the time for each part, and what a second call repeats."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fusedtp.bench import gpu, runner
from fusedtp.bench.options import Options, parse, plan_of


class Clockwork:
    """Runs parts instantly, with the given exit codes."""

    def __init__(self, codes: dict[str, int]) -> None:
        self.codes, self.ran = codes, []  # type: dict[str, int], list[str]

    def __call__(self, command: Sequence[str], seconds: float) -> int:
        assert seconds > 0
        name = "tests" if "pytest" in command else Path(command[command.index("--out") + 1]).stem
        self.ran.append(name)
        return self.codes.get(name, 0)


def test_parts_go_on_after_one_fails_and_only_that_is_done_again(tmp_path: Path) -> None:
    options = gpu.Options()
    every = gpu.parts(options)
    names = [
        "tests",
        "matmul",
        "virtual-8",
        "fp8",
        "pointwise",
        "loss",
        "block",
        "step",
        "fewer",
        "short",
        "decode",
        "experts",
        "moe",
        "host",
    ]
    assert [part.name for part in every] == names

    def call(codes: dict[str, int], commit: str = "abc", **changes: object) -> tuple[int, list[str]]:
        run = Clockwork(codes)
        code = gpu.run_parts(every, tmp_path, commit, replace(options, **changes), run)  # type: ignore[arg-type]
        return code, run.ran

    assert call({"tests": 1, "short": 124}) == (1, names)
    assert call({}) == (0, ["tests", "short"])
    assert call({}) == (0, [])
    assert call({}, fresh=True) == (0, names)
    assert call({}, commit="abd") == (0, names)
    assert call({}, commit="") == (0, names) and call({}, commit="") == (0, names)  # unknown code is never reused
    assert call({}, commit="new", minutes=0.0) == (1, [])  # no time is left


def test_every_part_is_a_command_that_has_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    ranks = {}
    *every, host = gpu.parts(gpu.Options(tests=False))
    assert host.command[-2:] == ("host", "--gpu")
    for part in every:
        options = parse(Options, part.command[part.command.index("all") + 1 :], "x")
        plan = plan_of(options)
        jobs = runner.jobs_of(plan, options.suites.split(","))
        assert plan.world == "virtual" and plan.device == "cuda" and all(jobs.values())
        ranks[part.name] = set(jobs)
    one, eight = (
        {name: {1} for name in ("matmul", "fp8", "pointwise", "step", "experts")},
        {name: {8} for name in ("virtual-8", "short", "decode", "moe")},
    )
    assert ranks == one | eight | {"fewer": {2, 4}, "loss": {1, 8}, "block": {1, 8}}


def test_parts_share_the_time_that_is_left() -> None:
    every = gpu.parts(gpu.Options())
    left = total = 540.0
    for i, part in enumerate(every):
        seconds = gpu.seconds_for(part, every[i + 1 :], left)
        assert seconds >= min(gpu.USUAL_SECONDS, left)
        left -= seconds
    assert left == pytest.approx(0) and gpu.seconds_for(every[-1], [], total) == total


@pytest.mark.slow
def test_a_part_that_takes_too_long_ends_with_all_that_it_started(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    child = f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert gpu.run_within([sys.executable, "-c", parent], 2.0) == 124
    assert gpu.run_within([sys.executable, "-c", "raise SystemExit(3)"], 30.0) == 3
    if mark.exists():  # a loaded machine may not have started it yet
        assert not Path(f"/proc/{mark.read_text()}").exists() or "Z" in _state(mark.read_text())


def _state(pid: str) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
