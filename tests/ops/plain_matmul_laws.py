"""Laws of the single-device matmul, on any device: it equals the fp64 formula, exactly where integer sums are exact.

All memory that a launcher allocates starts filled with NaN, so unwritten elements show.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from itertools import product
from unittest.mock import patch

import torch
from torch import Tensor

from fusedtp.ops import fp8, launch
from fusedtp.ops.launch import Config, plain
from fusedtp.ops.launch.config import HOST
from fusedtp.ops.launch.operands import describable
from tests.interpreting import run_program
from tests.nn.support import assert_within

E = torch.finfo(torch.float32).eps
LAYOUTS = ("plain", "transposed", "strided", "misaligned", "gap", "expanded")
new_empty = torch.Tensor.new_empty


@dataclass(frozen=True)
class Draw:
    """Integer operands of one test. tma, halves as in Config; chosen: use the launcher's own configuration."""

    dtype: torch.dtype
    m: int
    n: int
    k: int
    layout: str = "plain"
    tma: bool = False
    halves: bool = False
    seed: int = 0
    device: str = "cpu"
    chosen: bool = False

    @property
    def config(self) -> Config | None:
        if self.chosen:
            return None
        return Config(16, 16, 16, group=2, tma=self.tma, halves=self.halves)

    def integers(self, *shapes: tuple[int, ...], layout: str = "") -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        drawn = [torch.randint(-2, 3, shape, generator=generator).to(self.dtype) for shape in shapes]
        return [laid_out(x.to(self.device), layout or self.layout) for x in drawn]


def laid_out(x: Tensor, layout: str) -> Tensor:
    """x in memory with NaN around it: gaps between columns, row strides not multiples of 16 bytes, one element late."""
    if x.dim() != 2 or layout == "plain":
        return x
    rows, cols = x.shape
    if layout == "transposed":
        return x.t().contiguous().t()
    if layout == "expanded":  # all rows are the first row
        return x[:1].expand(rows, cols)
    if layout == "misaligned":
        flat = x.new_full((1 + x.numel(),), torch.nan)
        return flat[1:].view(rows, cols).copy_(x)
    step, spare = (2, 1) if layout == "strided" else (1, 3)
    wide = x.new_full((rows, step * cols + spare), torch.nan)
    return wide[:, : step * cols : step].copy_(x)


def poisoned(like: Tensor, *shape: int, **on: object) -> Tensor:
    return new_empty(like, *shape, **on).fill_(torch.nan)


def exact(x: Tensor) -> Tensor:
    return x.detach().cpu().double()


@patch.object(torch.Tensor, "new_empty", poisoned)
def matmul_law(draw: Draw, biased: bool) -> None:
    """x @ w.T + bias of integers is exact, bit for bit."""
    x, w = draw.integers((draw.m, draw.k), (draw.n, draw.k))
    (bias,) = draw.integers((draw.n,))
    y = launch.matmul(x, w, bias if biased else None, draw.config)
    want = exact(x) @ exact(w).t() + biased * exact(bias)
    assert y.is_contiguous()
    assert torch.equal(y.cpu(), want.to(draw.dtype)), (y.cpu().double() - want).abs().max()


@patch.object(torch.Tensor, "new_empty", poisoned)
def fp8_law(draw: Draw, by_row: bool, out: torch.dtype, biased: bool) -> None:
    """fp8 operands that need no rounding, with powers of two as scales: exact, bit for bit."""
    x, w = (t.to(torch.float8_e4m3fn) for t in draw.integers((draw.m, draw.k), (draw.n, draw.k)))
    generator = torch.Generator().manual_seed(draw.seed)
    shapes = ((draw.m, 1), (draw.n, 1)) if by_row else ((), (1, 1))
    x_scale, w_scale = ((2.0 ** torch.randint(-2, 3, s, generator=generator)).to(draw.device) for s in shapes)
    bias = torch.arange(draw.n, device=draw.device).remainder(5).to(out) if biased else None
    y = launch.scaled_matmul(x, w, x_scale, w_scale, bias, out, draw.config)
    want = exact(x) @ exact(w).t() * exact(x_scale) * exact(w_scale).reshape(1, -1)
    want = want if bias is None else want + exact(bias)
    assert torch.equal(y.cpu(), want.to(out))


def quantized_law(draw: Draw) -> None:
    """Rows of any magnitude, each with a scale that is no power of two: the product of the values that fp8 and scales
    represent.

    A product of two fp8 is exact in fp32. Summing K of them loses K E of the sum of their magnitudes; two scales and
    the store lose E each of the result. Hopper's matrix units add 32 products to the accumulator at once and keep 13
    bits of each below the largest (DeepSeek-V3, section 3.3.2).
    """
    generator = torch.Generator().manual_seed(draw.seed)
    x, w = (
        (torch.randn(rows, draw.k, generator=generator) * torch.logspace(-3, 3, rows)[:, None]).to(draw.device)
        for rows in (draw.m, draw.n)
    )
    (x8, x_scale), (w8, w_scale) = fp8.quantize(x), fp8.quantize(w)
    x_scale, w_scale = x_scale * 1.3, w_scale * 0.7
    y = launch.scaled_matmul(x8, w8, x_scale, w_scale, None, torch.float32, draw.config)
    full = [exact(x8) * exact(x_scale), exact(w8) * exact(w_scale)]
    sums = full[0].abs() @ full[1].abs().t()
    lost = (draw.k + 3) * E
    if y.is_cuda and torch.cuda.get_device_capability(y.device) == (9, 0):
        lost += -(-draw.k // 32) * 33 * 2.0**-13
    assert_within("y", y, full[0] @ full[1].t(), lost * sums)


def every_fp8_law() -> None:
    """Each of the 256 bit patterns has the value that torch gives it, by either path."""
    kinds, configs = (
        (torch.float8_e4m3fn, torch.float8_e5m2),
        (Config(16, 16, 16), Config(16, 16, 16, tma=True)),
    )
    for kind, config in product(kinds, configs):
        x = torch.arange(256, dtype=torch.uint8).view(kind).view(16, 16)
        finite = x.clone()
        finite.view(torch.uint8)[~x.float().isfinite()] = 0
        one, scale = torch.eye(16).to(torch.float8_e4m3fn), torch.ones(1)
        y = launch.scaled_matmul(finite, one, scale, scale, None, torch.float32, config)
        assert torch.equal(y, finite.float())
        y = launch.scaled_matmul(x, one, scale, scale, None, torch.float32, config)
        spread = x.float() @ one.float().t()  # infinity times 0 is NaN
        assert torch.equal(y.isnan(), spread.isnan()) and torch.equal(y.isinf(), spread.isinf())


def far_law(which: str) -> None:
    """Rows (or columns) of an operand over 2^31 elements apart; only the pages they touch are allocated."""
    rows, cols, step = 5, 20, 2**31 + 8
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randint(-2, 3, (r, cols), generator=generator).half() for r in (rows, 6))
    if which == "columns":
        x, w = x[:, :3], w[:, :3]
    memory = sparse((5 if which == "rows" else 3) * step)
    apart = memory.as_strided(x.shape, (step, 1) if which == "rows" else (1, step)).copy_(x)
    for config in (Config(16, 16, 16), Config(16, 16, 16, tma=True)):
        assert torch.equal(launch.matmul(apart, w, None, config), (x.float() @ w.float().t()).half())
        assert torch.equal(launch.matmul(w, apart, None, config), (w.float() @ x.float().t()).half())


def sparse(elements: int) -> Tensor:
    """An fp16 tensor that takes memory only for the pages it touches."""
    no_reserve = 0x4000  # MAP_NORESERVE of Linux; Python names it from 3.13 on
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return torch.frombuffer(mmap.mmap(-1, 2 * elements, flags=flags), dtype=torch.float16)


def far_result_law() -> None:
    """The last tile of a y of over 2^31 elements, computed by the last program of the full grid."""
    m, n, k, block = 3, 2**30 + 8, 8, 16
    x, w = torch.ones(m, k).half(), torch.full((1, k), 2.0).half().expand(n, k)
    tiles = -(-n // block)
    y = sparse(m * n).view(m, n)
    config = Config(block, block, block, group=1)
    one, _ = plain.plan_matmul(x[:0], w, None, x.dtype, config, "ieee", HOST)
    run_program(one.kernel, tiles - 1, (tiles, 1, 1), one.args | dict(x=x, y=y, M=m))
    assert torch.equal(y[-1, -8:], torch.full((8,), 16.0).half())


def path_law() -> None:
    """TMA is used if all operands allow it, and pointers if one does not."""
    x = torch.zeros(16, 32, dtype=torch.bfloat16)
    allowed = [x, x[::2], x[:, 8:], x[:, :24], x[:, :9]]
    refused = [x[:, 1:], x[:, ::2], x.t(), x[:1].expand(16, 32), x[:0], x[:, :0], laid_out(x, "gap")]
    assert all(map(describable, allowed)) and not any(map(describable, refused))
    config = Config(16, 16, 16, tma=True)
    for w in (*allowed[:1], *refused):
        if w.shape[1] == 32:
            one, _ = plain.plan_matmul(x, w, None, x.dtype, config, "ieee", HOST)
            assert one.args["TMA"] == describable(w), w.stride()
    one, _ = plain.plan_matmul(x.float(), x.float(), None, torch.float32, config, "ieee", HOST)
    assert not one.args["TMA"], "full-precision fp32 has no matrix unit"
    one, _ = plain.plan_matmul(x.float(), x.float(), None, torch.float32, config, "tf32", HOST)
    assert one.args["TMA"]
