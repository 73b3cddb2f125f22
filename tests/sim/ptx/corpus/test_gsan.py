"""The comparison with GSan, as far as it needs no GPU: moving a run's tensors, and verdicts from a process's output."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from fusedtp.sim import Schedule, run_schedule
from fusedtp.sim.case import memory_map
from tests.sim.ptx.corpus.gsan import MODULE, UNABLE, Moved, kernels, verdict


@pytest.mark.parametrize("name", ["message", "two_shot", "double_buffer", "sender"])
def test_a_moved_run_computes_the_same_on_its_own_tensors(name: str) -> None:
    run = kernels()[name][1]()
    before = [each.tensor.clone() for each in memory_map(run).allocations]
    moved = Moved(run, "cpu")
    ours = {each.base for each in memory_map(run).allocations}
    theirs = {each.base for each in memory_map(moved.run).allocations}
    assert len(ours) == len(theirs) and not ours & theirs
    run_schedule(replace(moved.run, check=lambda: ()), Schedule("random", 1, target="sm_80"))
    unchanged = zip(before, memory_map(run).allocations, strict=True)
    assert all(torch.equal(a.view(torch.uint8), b.tensor.view(torch.uint8)) for a, b in unchanged)
    assert run.check is not None and run.check(), "the run's own outputs are not written yet"
    moved.back()
    assert not run.check()


def test_verdicts() -> None:
    assert verdict(1, "k.py:3: Read after write race detected\nTraceback") == "race"
    assert verdict(None, "") == "deadlock" and verdict(0, "") == "ok" and verdict(1, "") == "wrong value"
    assert verdict(1, "Traceback (most recent call last)") == "crashed" and verdict(-6, "") == "crashed"
    assert verdict(UNABLE, "") == "not run" and verdict(UNABLE, "Traceback") == "crashed"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it needs where there is no GPU")
def test_without_a_gpu_it_says_what_it_needs() -> None:
    done = subprocess.run([sys.executable, "-m", MODULE], capture_output=True, text=True)
    assert done.returncode == 2 and "needs a CUDA GPU" in done.stderr and len(done.stderr.splitlines()) == 1
