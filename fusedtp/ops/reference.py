"""The operations' formulas on full tensors of one device: the oracle of every test.

`xs` are all ranks' shards in rank order; nothing here communicates, and nothing here calls a fused kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def all_gather_matmul(xs: Sequence[Tensor], w: Tensor, bias: Tensor | None = None, dim: int = 0) -> Tensor:
    """[T_r, K] of every rank, w [N, K] -> y [T, N] of the rank that holds w."""
    y = torch.cat(list(xs), dim) @ w.T
    return y if bias is None else y + bias


def matmul_reduce_scatter(
    xs: Sequence[Tensor], ws: Sequence[Tensor], sizes: Sequence[int], bias: Tensor | None = None, dim: int = 0
) -> list[Tensor]:
    """x [T, K_r] and w [N, K_r] of every rank -> y [T_r, N] of every rank."""
    return list(matmul_all_reduce(xs, ws, bias).split(list(sizes), dim))


def matmul_all_reduce(xs: Sequence[Tensor], ws: Sequence[Tensor], bias: Tensor | None = None) -> Tensor:
    """x [T, K_r] and w [N, K_r] of every rank -> y [T, N]: one matmul over the concatenated K."""
    y = torch.cat(list(xs), -1) @ torch.cat(list(ws), -1).T
    return y if bias is None else y + bias


def all_gather_wgrad(xs: Sequence[Tensor], dy: Tensor, dim: int = 0) -> Tensor:
    """[T_r, K] of every rank, dy [T, N] -> dw [N, K]."""
    return dy.flatten(0, -2).T @ torch.cat(list(xs), dim).flatten(0, -2)
