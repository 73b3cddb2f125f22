"""The sum of a token's choices: always in the order of its slots, in fp32 (fp64 of fp64), rounded once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
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
    (tokens, k), width = places.shape, parts.shape[1]
    out = parts.new_empty(tokens, width)
    if weights is not None:
        weights = weights.to(wide)
    for some in stretches(tokens, width, wide, parts.device):
        total = None
        for j in range(k):
            part = parts.index_select(0, places[some, j]).to(wide)
            weight = None if weights is None else weights[some, j : j + 1]
            if total is None:
                total = part if weight is None else part.mul_(weight)
            elif weight is None:
                total.add_(part)
            else:
                total.addcmul_(part, weight)
        assert total is not None
        out[some] = total
    return out


def weighted_rows(rows: Tensor, weights: Tensor, count: int) -> Tensor:
    """rows [R, N] times weights [R], of which the first `count` count, in place; the others stay as they are."""
    wide = accumulator(rows.dtype)
    for some in stretches(count, rows.shape[1], wide, rows.device):
        rows[some] = rows[some].to(wide) * weights[some, None]
    return rows


def dots(a: Tensor, b: Tensor, count: int) -> Tensor:
    """a [R, N], b [R, N] -> [R] of the rows' inner products, in fp32 (fp64); past `count` undefined."""
    wide = accumulator(a.dtype)
    out = torch.empty(a.shape[0], dtype=wide, device=a.device)
    for some in stretches(count, a.shape[1], wide, a.device):
        out[some] = (a[some].to(wide) * b[some].to(wide)).sum(1)
    return out
