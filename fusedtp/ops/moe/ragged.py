"""Matmuls of as many rows as an expert happens to get, on a CPU.

Note [Kernels for every number of rows]
oneDNN, which multiplies 16-bit matrices on a CPU, compiles a kernel for every new shape. An expert's rows are another
number in every step: with AMX such a first matmul takes 3 to 4 ms where a second one takes 0.3. So rows are rounded up
to one of 16 numbers an octave, at most a sixteenth more (and below 512, to multiples of 32):

    forward, dgrad   the window of rows grows into the rows of the next expert, whose turn comes later and overwrites
                     them, or into rows that are nobody's. At the end it grows to the front, and its own part is copied
    wgrad            rows of zeros are added to both operands, in copies: a row of another expert may hold NaN
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ..matmul import is_16_bit, joined, matmul_into, widens

LEAST = 32


def compiles(x: Tensor) -> bool:
    """Whether a matmul of x on this CPU compiles a kernel for every number of rows."""
    return is_16_bit(x.dtype) and not x.is_cuda and not widens(x)


def rounded(n: int) -> int:
    """n or more."""
    step = max(LEAST, (1 << (n.bit_length() - 1)) >> 4)
    return -(-n // step) * step


def window(rows: slice, count: int, x: Tensor) -> slice:
    """The rows of a tensor with `count` that take part in the matmul of an expert's `rows`."""
    n = rows.stop - rows.start
    wide = rounded(n) if compiles(x) else n
    if wide > count:
        return rows
    return slice(rows.start, rows.start + wide) if rows.start + wide <= count else slice(count - wide, count)


def linear_into(
    out: Tensor, rows: slice, xs: Sequence[Tensor], weights: Sequence[Tensor], bias: Tensor | None = None
) -> Tensor:
    """out[rows] = sum_j xs[j][rows] @ weights[j].T + bias; rows past them are overwritten, those before are not.

    out [R, N], xs[j] [R, K_j], weights[j] [N, K_j]; returned are out[rows]
    """
    own = out[rows]
    if not compiles(out):
        matmul_into(own, [x[rows] for x in xs], [w.t() for w in weights], bias)
        return own
    wide = window(rows, out.shape[0], out)
    inputs, weights = joined([x[wide] for x in xs], weights)
    into = out[wide] if wide.start == rows.start else torch.empty_like(out[wide])
    matmul_into(into, inputs, [w.t() for w in weights], bias)
    if wide.start != rows.start:
        begin = rows.start - wide.start
        own.copy_(into[begin : begin + own.shape[0]])
    return own


class Padded:
    """Rows of an expert with rows of zeros behind them, in a buffer for all experts of `offsets`."""

    def __init__(self, x: Tensor, offsets: Sequence[int]) -> None:
        self.x = x
        most = max(end - begin for begin, end in pairwise(offsets))
        self.buffer = x.new_empty(rounded(most), x.shape[1]) if compiles(x) and most else None

    def __getitem__(self, rows: slice) -> Tensor:
        n = rows.stop - rows.start
        if self.buffer is None or not n or rounded(n) == n:
            return self.x[rows]
        wide = rounded(n)
        padded = self.buffer[:wide]
        padded[:n] = self.x[rows]
        padded[n:].zero_()
        return padded
