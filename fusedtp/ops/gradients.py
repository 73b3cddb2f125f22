"""The backward formulas, each written once in terms of the forward operations.

column-parallel   dx = matmul_reduce_scatter(dy_i, w_i.T), summed over i before the exchange
                  dw_i = all_gather_wgrad(x, dy_i)
row-parallel      dx_j, dy_full = all_gather_matmul(dy, w_j.T)
                  dw_j = dy_full.T @ x_j, local
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _len_torch_dispatch_stack  # type: ignore[attr-defined]

BODIES: dict[str, Any] = {}  # name -> what the custom op runs; filled by library.py


def op(name: str) -> Any:
    """The custom op fusedtp::name; its body where nothing would see the op, in eager code without a dispatch mode.

    The dispatch of a Python custom op runs some 100 kB of cold code between two matmuls, 0.2 ms.
    """
    if torch.compiler.is_compiling() or _len_torch_dispatch_stack():
        return getattr(torch.ops.fusedtp, name)
    return BODIES[name]


class Where(NamedTuple):
    """Which ranks hold which rows, the engine asked for, and the kind of layer that calls are counted for."""

    group: str
    rank: int
    sizes: tuple[int, ...]
    batch: int
    engine: str
    layer: str = ""


def column_dgrad(at: Where, dys: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """dy_i [T, N_i], w_i [N_i, K] -> dx [T_r, K]."""
    transposed = [w.t() for w in weights]
    return op("matmul_reduce_scatter")(
        list(dys), transposed, None, at.group, at.rank, at.sizes, at.batch, at.engine, 0, at.layer
    )


def column_wgrad(at: Where, x: Tensor, dys: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """x [T_r, K], dy_i [T, N_i] -> dw_i [N_i, K] of `dtype`: x's, or fp32."""
    return op("all_gather_wgrad")(x, list(dys), at.group, at.sizes, at.batch, at.engine, at.layer, dtype)


def row_dgrad(
    at: Where, dy: Tensor, weights: Sequence[Tensor], keep: bool
) -> tuple[list[Tensor], Tensor | None]:
    """dy [T_r, N], w_j [N, K_j] -> dx_j [T, K_j], and the gathered dy if `keep`."""
    transposed = [w.t() for w in weights]
    outs = op("all_gather_matmul")(
        dy, transposed, [], 0, at.group, at.rank, at.sizes, at.batch, at.engine, 0, keep, at.layer
    )
    return (outs[:-1], outs[-1]) if keep else (outs, None)


def gather(at: Where, dy: Tensor) -> Tensor:
    """dy [T_r, N] -> [T, N]."""
    return op("all_gather_rows")(dy, at.group, at.rank, at.sizes, at.batch, at.layer)
