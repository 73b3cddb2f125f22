"""Parallel linear layers as one writes them with a process group, without fusedtp.

Both save the shard of x, as fusedtp does:

    column   y = gather(x) @ w.T     dx = reduce_scatter(dy @ w)    dw = dy.T @ gather(x)
    row      y = reduce_scatter(x @ w.T)    dx = gather(dy) @ w     dw = gather(dy).T @ x, of one gather

`Gloo` communicates; `Nothing` leaves that out, so that only the matmuls remain. On a CPU without 16-bit instructions
16-bit matmuls go through fp32, as fusedtp's do: what is compared is the communication.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

# torch 2.13 renamed both and warns of the old names.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@cache
def widens(dtype: torch.dtype) -> bool:
    """Whether matmuls of this dtype run faster in fp32 on this CPU."""
    ops = torch.ops.mkldnn
    if dtype == torch.bfloat16:
        return not ops._is_mkldnn_bf16_supported()
    return dtype == torch.float16 and not ops._is_mkldnn_fp16_supported()


def mm(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] @ b [K, N] in the way that is fastest here."""
    return torch.mm(a.float(), b.float()).to(a.dtype) if widens(a.dtype) else torch.mm(a, b)


class Moves(Protocol):
    """How rows travel: [T_r, K] -> [T, K] and, summed over ranks, [T, N] -> [T_r, N]."""

    def gather(self, x: Tensor) -> Tensor: ...

    def reduce_scatter(self, partial: Tensor) -> Tensor: ...


class Gloo:
    """The collectives called directly, into outputs made once."""

    def __init__(self) -> None:
        self.world_size = dist.get_world_size()
        self.outputs: dict[tuple[str, tuple[int, ...], torch.dtype], Tensor] = {}

    def output(self, use: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor that every call with this use and shape writes to."""
        key = use, shape, dtype
        if key not in self.outputs:
            self.outputs[key] = torch.zeros(shape, dtype=dtype)
        return self.outputs[key]

    def gather(self, x: Tensor) -> Tensor:
        out = self.output("gather", (x.shape[0] * self.world_size, x.shape[1]), x.dtype)
        _gather_into(out, x)
        return out

    def reduce_scatter(self, partial: Tensor) -> Tensor:
        out = self.output("scatter", (partial.shape[0] // self.world_size, partial.shape[1]), partial.dtype)
        _reduce_scatter_into(out, partial)
        return out


class Nothing(Gloo):
    """The same outputs, never written."""

    def gather(self, x: Tensor) -> Tensor:
        return self.output("gather", (x.shape[0] * self.world_size, x.shape[1]), x.dtype)

    def reduce_scatter(self, partial: Tensor) -> Tensor:
        return self.output("scatter", (partial.shape[0] // self.world_size, partial.shape[1]), partial.dtype)


class Column(Function):
    """x [T_r, K], w [N_r, K] -> y [T, N_r]."""

    @staticmethod
    def forward(ctx: Any, moves: Moves, x: Tensor, w: Tensor) -> Tensor:
        ctx.moves = moves
        ctx.save_for_backward(x, w)
        return mm(moves.gather(x), w.t())

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, w = ctx.saved_tensors
        dx = ctx.moves.reduce_scatter(mm(dy, w))
        return None, dx, mm(dy.t(), ctx.moves.gather(x))


class Row(Function):
    """x [T, K_r], w [N, K_r] -> y [T_r, N]."""

    @staticmethod
    def forward(ctx: Any, moves: Moves, x: Tensor, w: Tensor) -> Tensor:
        ctx.moves = moves
        ctx.save_for_backward(x, w)
        return moves.reduce_scatter(mm(x, w.t())).detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, w = ctx.saved_tensors
        full = ctx.moves.gather(dy)
        return None, mm(full, w), mm(full.t(), x)
