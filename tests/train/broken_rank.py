"""A training rank with a deliberate fault: torchrun broken_rank.py BREAKAGE OPTIONS

The breakage replaces one function in this process by a wrong one. The rank then trains as `fusedtp train` does.
"""

from __future__ import annotations

import faulthandler
import sys
from contextlib import AbstractContextManager
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F

from fusedtp import cli, ops
from fusedtp.parallel import layers, placement
from fusedtp.train import loop


def own_partial(x, weight, group, *, bias=None, sizes=None, dim=0, engine="auto", layer=""):
    """matmul_reduce_scatter that omits the other ranks' partial sums."""
    rank = dist.get_rank()
    return F.linear(x, placement.local(weight))[sum(sizes[:rank]) : sum(sizes[: rank + 1])]


def off_by_one_percent(*args, **kwargs):
    """matmul_reduce_scatter whose result is 1% too large."""
    return 1.01 * matmul_reduce_scatter(*args, **kwargs)


def scattering(how) -> AbstractContextManager:
    """While active, row-parallel layers use this instead of matmul_reduce_scatter."""
    return patch.object(layers, "PLAIN", layers.PLAIN._replace(scatter=how))


def broken_from_step_12(model, batches, step, load, *more):
    """backward of a step; from step 12 on the forward is slightly wrong."""
    with scattering(off_by_one_percent if step >= 12 else matmul_reduce_scatter):
        return backward(model, batches, step, load, *more)


def failing_on_rank_1(options, step):
    """A learning_rate that raises on one rank in the middle of a run."""
    if step == 2 and dist.get_rank() == 1:
        raise RuntimeError("the disk of rank 1 is full")
    return 1e-3


matmul_reduce_scatter, backward = ops.matmul_reduce_scatter, loop.backward
BREAKAGES: dict[str, AbstractContextManager] = {
    "row_sum": scattering(own_partial),
    "replicated_gradient": patch.object(layers, "read", lambda parameter, group: placement.local(parameter)),
    "late": patch.object(loop, "backward", broken_from_step_12),
    "raise": patch("fusedtp.commands.run.learning_rate", failing_on_rank_1),
}

if __name__ == "__main__":
    faulthandler.dump_traceback_later(200, exit=True)  # on a hang, print where
    torch.set_num_threads(1)
    with BREAKAGES[sys.argv[1]]:
        sys.exit(cli.main(["train", *sys.argv[2:]]))
