"""What the launchers refuse, and the advice in the error."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CALL = "import torch; from fusedtp.ops import launch; x = torch.ones(2, 2, dtype={}); launch.matmul(x, x)"


def said(dtype: str, **variables: str) -> str:
    """The last line printed by a process that multiplies two CPU tensors."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    call = variables.pop("CALL", CALL)
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", call.format(dtype)]
    done = subprocess.run(command, env={**env, **variables}, capture_output=True, text=True)
    return (done.stderr.strip().splitlines() or [""])[-1]


@pytest.mark.slow
def test_cpu_tensors_without_the_interpreter():
    pytest.importorskip("triton")
    line = said("torch.float32")
    assert line.startswith("RuntimeError") and "TRITON_INTERPRET=1 before triton is imported" in line


@pytest.mark.slow
def test_fp64():
    pytest.importorskip("triton")
    line = said("torch.float64", TRITON_INTERPRET="1")
    assert line.startswith("ValueError") and "torch.float64" in line
    assert said("torch.float32", TRITON_INTERPRET="1") == ""


@pytest.mark.slow
def test_more_rows_than_32_bits_number():
    pytest.importorskip("triton")
    call = CALL.replace("x = torch.ones(2, 2, dtype={})", "x = torch.ones(1, 1).expand(2**31, 1)")
    line = said("", TRITON_INTERPRET="1", CALL=call)
    assert line.startswith("ValueError") and "at most 2147418112 rows or columns, not 2147483648" in line, line
