"""Two computations that may run at the same time.

On a GPU the second one's kernels go to a stream of their own: they run while the first one's wait for peers, forward
and backward (autograd runs a node's backward on the stream of its forward). The second is not to use a workspace that
the first one uses too: kernels that do keep their order, and would run one after another.

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
    with torch.cuda.stream(there):  # before the first, which may make the host wait
        other = second(x)
    x.record_stream(there)
    y = first(x)
    here.wait_stream(there)
    other.record_stream(here)
    return y + other


@cache
def _stream_beside(stream: torch.cuda.Stream) -> torch.cuda.Stream:
    """One for each stream that ever asks: ranks of one process must not share theirs."""
    return torch.cuda.Stream(stream.device)
