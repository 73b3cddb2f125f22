"""Laws of the quantization kernels on any device: they equal fusedtp/ops/fp8.py on a CPU, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fusedtp.ops import fp8, launch
from fusedtp.ops.moe import fp8 as to_experts
from tests.properties.laws import assert_same

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SPECIAL = (torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 448.0, 464.0, 465.0, 2.0**-126, 2.0**-149, 3.4e38)


@dataclass(frozen=True)
class Draw:
    """A matrix of magnitudes from 2**-spread to 2**spread, with a share of the numbers in SPECIAL."""

    dtype: torch.dtype
    rows: int
    k: int
    transposed: bool = False
    spread: int = 20
    special: float = 0.05  # the share of special numbers
    seed: int = 0
    device: str = "cpu"

    def matrix(self) -> Tensor:
        g = torch.Generator().manual_seed(self.seed)
        shape = (self.k, self.rows) if self.transposed else (self.rows, self.k)
        x = torch.randn(shape, generator=g)
        x *= 2.0 ** torch.randint(-self.spread, self.spread + 1, shape, generator=g)
        some = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), shape, generator=g)]
        x = torch.where(torch.rand(shape, generator=g) < self.special, some, x).to(self.dtype)
        return x.t() if self.transposed else x


def rows_law(draw: Draw, kind: torch.dtype) -> None:
    """Values and scales of rows, followed by zeros, in the row format of `pack` for the results of `quantize`."""
    x = draw.matrix()
    filled = fp8.row_bytes(draw.k) - fp8.SCALE_BYTES
    got = launch.quantize.packed_rows(x.to(draw.device), kind, filled).cpu()
    values, scale = fp8.quantize(x, kind)
    want = fp8.pack(values, scale)
    assert_same("scales", got[:, filled:].view(torch.float32), want[:, filled:].view(torch.float32))
    assert_same("values", got.view(kind)[:, : draw.k].float(), values.float())
    assert not got[:, draw.k : filled].any()


def given_law(draw: Draw, kind: torch.dtype, exponent: int) -> None:
    """Values quantized with a given scale."""
    x, scale = draw.matrix(), torch.tensor([2.0**exponent])
    got = launch.quantize.values(x.to(draw.device), scale.to(draw.device), kind).cpu()
    assert_same("values", got.float(), fp8.values_of(x, scale, kind).float())


def largest_law(draw: Draw) -> None:
    x = draw.matrix()
    assert_same("largest", launch.quantize.largest(x.to(draw.device)).cpu(), fp8.largest_of(x, by_row=False))


def blocks_law(draw: Draw) -> None:
    """Blocks quantized for the exchange, and back. draw.k is a multiple of 4, and not 0."""
    x, k = draw.matrix(), draw.k
    packed = launch.quantize.packed_blocks(x.to(draw.device))
    want = to_experts.pack(x)
    assert_same("scales", packed.cpu()[:, k:].view(torch.float32), want[:, k:].view(torch.float32))
    e4m3 = torch.float8_e4m3fn
    assert_same("values", packed.cpu().view(e4m3)[:, :k].float(), want.view(e4m3)[:, :k].float())
    got = launch.quantize.unpacked_blocks(packed, k, draw.dtype)
    assert_same("rows", got.cpu(), to_experts.unpack(want, k, draw.dtype))


def every_value_law(kind: torch.dtype, device: str = "cpu") -> None:
    """All fp8 numbers, the midpoints between neighbours, and the fp32 numbers next to each of them."""
    bits = torch.arange(256, dtype=torch.uint8).view(kind).float()
    exact = bits[bits.isfinite()].sort().values
    between = (exact[1:] + exact[:-1]) / 2
    up, down = (between.nextafter(torch.tensor(side)) for side in (torch.inf, -torch.inf))
    x = torch.cat([exact, between, up, down]).view(1, -1)
    got = launch.quantize.values(x.to(device), torch.ones(1, device=device), kind).cpu()
    assert_same("values", got.float(), x.to(kind).float())
    assert torch.equal(got.float().signbit(), x.signbit())
