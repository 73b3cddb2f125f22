"""What a launcher chooses for GPUs that are not here."""

from __future__ import annotations

import pytest
import torch

from fusedtp.ops.launch.config import HOST, tiles
from fusedtp.ops.launch.gather import even_columns
from fusedtp.ops.launch.run import Launch
from fusedtp.sim.lint import TARGETS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_cuda_is_told_of_registers(dtype):
    """Other backends and the interpreter refuse the option."""
    for machine in (HOST, *(target.machine for target in TARGETS.values())):
        options = [
            Launch(None, 1, {}, tiles(machine, dtype, rows, 512, even)).options
            for rows in (1, 64, 512)
            for even in (True, False)
        ]
        assert all(("maxnreg" in each) == (machine.clock == "cuda") for each in options), machine


def test_columns_are_evened_with_zeros_and_only_where_they_must_be():
    for width in (1, 15, 16, 17, 32):
        dy = torch.randn(3, width)
        made = even_columns(dy)
        assert made.shape == (3, -(-width // 16) * 16) and made.stride(0) % 16 == 0
        assert torch.equal(made[:, :width], dy) and not made[:, width:].any()
        assert (made is dy) == (width % 16 == 0)
