"""Run two computations concurrently.

On a GPU the kernels of the second one go to their own stream: they run while kernels of the first one wait for peers,
forward and backward (autograd runs a node's backward on the stream of its forward). The second must not communicate:
a rank's fused calls keep their order, and would run one after another.

    stream of the caller   x | first: plan .. dispatch .. matmuls .. combine    | joined | sum
    stream beside          . . second: matmuls . . . . . . . . . . . . . . . . .^
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor


def run_on_side_stream(first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """first(x) + second(x)."""
    if not x.is_cuda or torch.compiler.is_compiling():
        return first(x) + second(x)
    here = torch.cuda.current_stream(x.device)
    there = _stream_beside(here)
    there.wait_stream(here)
    with torch.cuda.stream(there):  # launch it before the first, which may block the host
        other = second(x)
    x.record_stream(there)
    y = first(x)
    here.wait_stream(there)
    other.record_stream(here)
    return y + other


@cache
def _stream_beside(stream: torch.cuda.Stream) -> torch.cuda.Stream:
    """One side stream per stream: ranks of one process must not share side streams."""
    return torch.cuda.Stream(stream.device)
