"""The sum of a token's choices: always in the order of its slots, in fp32 (fp64 of fp64), rounded once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK_BYTES = 1 << 18  # of sums held at a time on CPU, so that they stay in a core's cache


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """What sums of that dtype are made in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def places_of(order: Tensor) -> Tensor:
    """order [T * k], a permutation -> where each slot stands in it, int64."""
    places = torch.empty(order.shape[0], dtype=torch.int64, device=order.device)
    return places.scatter_(0, order.long(), torch.arange(order.shape[0], device=order.device))


def stretches(rows: int, width: int, wide: torch.dtype, device: torch.device) -> Iterator[slice]:
    """rows of `width` in stretches: on CPU of what a core's cache holds in that dtype, else all at once."""
    each = max(1, _BLOCK_BYTES // max(1, width * wide.itemsize)) if device.type == "cpu" else max(rows, 1)
    for begin in range(0, rows, each):
        yield slice(begin, min(begin + each, rows))


def weighted_sum(parts: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    """parts [T * k, N], places [T, k] of each slot in it, weights [T, k] or None for ones -> [T, N] of parts' dtype."""
    wide = accumulator(parts.dtype)
    if weights is None and places.shape[1] == 1:
        return parts.index_select(0, places[:, 0])
    weights = None if weights is None else weights.detach().to(wide)
    out = parts.new_empty(places.shape[0], parts.shape[1])
    if not out.numel():
        return out
    if parts.device.type == "cpu" and parts.dtype == torch.float32:
        # one pass, begun at zero; a product may go into its sum unrounded
        return F.embedding_bag(places, parts, per_sample_weights=weights, mode="sum")
    for some in stretches(out.shape[0], out.shape[1], wide, parts.device):
        _sum_into(out[some], parts, places[some], None if weights is None else weights[some])
    return out


def _sum_into(out: Tensor, parts: Tensor, places: Tensor, weights: Tensor | None) -> None:
    """out [n, N] = sum_j weights[:, j] * parts[places[:, j]], j ascending; weights in the accumulator's dtype."""
    if weights is None and places.shape[1] == 2:  # torch adds two of 16 bits in fp32 and rounds once
        first, second = (parts.index_select(0, place) for place in places.unbind(1))
        torch.add(first, second, out=out)
        return
    wide = accumulator(out.dtype)
    total = out if out.dtype == wide else torch.empty_like(out, dtype=wide)
    for j, place in enumerate(places.unbind(1)):
        part = parts.index_select(0, place)
        if weights is None:
            total.copy_(part) if j == 0 else total.add_(part)
        elif j == 0:
            torch.mul(part.to(wide), weights[:, :1], out=total)
        else:
            total.addcmul_(part.to(wide), weights[:, j : j + 1])
    if total is not out:
        out.copy_(total)


def weigh_rows(rows: Tensor, weights: Tensor | None, others: Tensor, dots: Tensor | None) -> None:
    """rows [R, N] times weights [R], in place; before that dots [R] = the inner products of rows and others [R, N].

    Both in fp32 (fp64); weights and dots may be None.
    """
    wide = accumulator(rows.dtype)
    for some in stretches(rows.shape[0], rows.shape[1], wide, rows.device):
        if dots is None:
            if weights is not None:
                rows[some].mul_(weights[some, None])  # the product of both dtypes is made in the wider one
            continue
        mine = rows[some].to(wide)
        torch.sum(mine * others[some].to(wide), 1, out=dots[some])
        if weights is not None:
            torch.mul(mine, weights[some, None], out=mine)
            if mine.dtype != rows.dtype:
                rows[some] = mine


def weighed(rows: Tensor, weights: Tensor, some: slice) -> Tensor:
    """rows [R, N] times weights [R], as `weigh_rows` has it, of those in `some`; the others are undefined."""
    out = rows.new_empty(rows.shape)
    here, there, factors = rows[some], out[some], weights[some, None]
    for part in stretches(here.shape[0], here.shape[1], weights.dtype, rows.device):
        torch.mul(here[part], factors[part], out=there[part])
    return out
