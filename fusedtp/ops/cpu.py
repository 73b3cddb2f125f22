"""CPU helpers of the engines: activations and passes that stay in a core's cache, matmuls with any number of rows.

Note [Kernels for every number of rows]
oneDNN, which multiplies 16-bit matrices on a CPU, compiles a kernel for every new shape. The number of an expert's rows
changes in every step: with AMX the first matmul of a shape takes 3 to 4 ms, a second one 0.3 ms. So rows are rounded up
to one of 16 numbers per octave, at most a sixteenth more (and below 512, to multiples of 32):

    forward, dgrad   extend the window of rows into the rows of the next expert, which overwrites them later, or into
                     rows past the last expert's. At the end of the tensor, extend it to the front, and copy the
                     expert's own part
    wgrad            append rows of zeros to copies of both operands: a row of another expert may hold NaN
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from .matmul import is_16_bit, joined, matmul_into, widens

LEAST = 32
_BLOCK_BYTES = 1 << 18  # of sums in progress, so that they stay in a core's cache


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums of `dtype` are accumulated."""
    return torch.promote_types(dtype, torch.float32)


def cache_blocks(rows: int, width: int, wide: torch.dtype, device: torch.device) -> Iterator[slice]:
    """rows of `width` in blocks: on CPU as many as fit in a core's cache in dtype `wide`, else all at once."""
    in_blocks = device.type == "cpu" and not torch.compiler.is_compiling()
    each = max(1, _BLOCK_BYTES // max(1, width * wide.itemsize)) if in_blocks else max(rows, 1)
    for begin in range(0, rows, each):
        yield slice(begin, min(begin + each, rows))


# -- matmuls ---------------------------------------------------------------------------------------------------------


def compiles(x: Tensor) -> bool:
    """Whether a matmul of x on this CPU compiles a kernel for every number of rows."""
    return is_16_bit(x.dtype) and not x.is_cuda and not widens(x)


def rounded(n: int) -> int:
    """n rounded up: see Note [Kernels for every number of rows]."""
    step = max(LEAST, (1 << (n.bit_length() - 1)) >> 4)
    return -(-n // step) * step


def window(rows: slice, count: int, x: Tensor) -> slice:
    """The rows, of a tensor with `count` rows, that take part in the matmul of an expert's `rows`."""
    n = rows.stop - rows.start
    wide = rounded(n) if compiles(x) else n
    if wide > count:
        return rows
    return slice(rows.start, rows.start + wide) if rows.start + wide <= count else slice(count - wide, count)


def linear_into(
    out: Tensor, rows: slice, xs: Sequence[Tensor], weights: Sequence[Tensor], bias: Tensor | None = None
) -> Tensor:
    """out[rows] = sum_j xs[j][rows] @ weights[j].T + bias; may overwrite later rows, but not earlier ones.

    out [R, N], xs[j] [R, K_j], weights[j] [N, K_j]; returns out[rows]
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
    """An expert's rows followed by rows of zeros, in one buffer that all experts of `offsets` share."""

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


# -- act(g) * u, in fp32 (fp64), each result rounded once --------------------------------------------------------------


def gated(g: Tensor, u: Tensor, act: str, out: Tensor | None = None) -> Tensor:
    """g, u [R, N] -> act(g) * u, in `out` if given. On a GPU too."""
    out = torch.empty_like(g) if out is None else out
    for some in cache_blocks(g.shape[0], g.shape[1], accumulator(g.dtype), g.device):
        into, there = out[some], u[some]
        if not is_16_bit(g.dtype):
            _activate(g[some], act, into).mul_(there)
            continue
        wide = g[some].float()
        into.copy_(_activate(wide, act, wide).mul_(there.float()))
    return out


def gated_backward(dy: Tensor, g: Tensor, u: Tensor, act: str, dg: Tensor, du: Tensor) -> None:
    """dy, g, u [R, N] -> dg = dy u act'(g) and du = dy act(g), both written in place. On a GPU too."""
    for some in cache_blocks(g.shape[0], g.shape[1], accumulator(g.dtype), g.device):
        grad, gate, up, into_g, into_u = (t[some] for t in (dy, g, u, dg, du))
        if is_16_bit(g.dtype):
            grad, gate, up = grad.float(), gate.float(), up.float()
        slope, value = _slope_and_value(gate, act)
        torch.mul(value, grad, out=into_u) if value.dtype == g.dtype else into_u.copy_(value.mul_(grad))
        slope.mul_(grad)
        torch.mul(slope, up, out=into_g) if slope.dtype == g.dtype else into_g.copy_(slope.mul_(up))


def _activate(x: Tensor, act: str, out: Tensor) -> Tensor:
    """act(x) in `out`, which may be x."""
    if act == "silu":
        y: Tensor = torch.ops.aten.silu.out(x, out=out)
    else:
        y = torch.ops.aten.gelu.out(x, approximate=_approximate(act), out=out)
    return y


def _slope_and_value(x: Tensor, act: str) -> tuple[Tensor, Tensor]:
    """(act'(x), act(x))."""
    if act != "silu":
        how = _approximate(act)
        slope = torch.ops.aten.gelu_backward(torch.ones_like(x), x, approximate=how)
        return slope, F.gelu(x, approximate=how)
    part = torch.sigmoid(x)  # one exponential for both: the slope of x s is s + x s (1 - s)
    value = part * x
    return (1 - part).mul_(value).add_(part), value


def _approximate(act: str) -> str:
    return "tanh" if act == "gelu_pytorch_tanh" else "none"
