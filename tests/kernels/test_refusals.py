"""What the launchers refuse, and what they say to do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CALL = "import torch; from fusedtp.ops import launch; x = torch.ones(2, 2, dtype={}); launch.matmul(x, x)"


def said(dtype: str, **variables: str) -> str:
    """The last line of a process that multiplies two CPU tensors."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", CALL.format(dtype)]
    done = subprocess.run(command, env={**env, **variables}, capture_output=True, text=True)
    return (done.stderr.strip().splitlines() or [""])[-1]


def test_cpu_tensors_without_the_interpreter():
    pytest.importorskip("triton")
    line = said("torch.float32")
    assert line.startswith("RuntimeError") and "TRITON_INTERPRET=1 before triton is imported" in line


def test_fp64():
    pytest.importorskip("triton")
    line = said("torch.float64", TRITON_INTERPRET="1")
    assert line.startswith("ValueError") and "torch.float64" in line
    assert said("torch.float32", TRITON_INTERPRET="1") == ""
