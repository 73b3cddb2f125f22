"""What the matmuls of one device must fulfil, on any device: fp64's formula, exactly where sums of integers are exact.

Everything that a launcher allocates comes filled with NaN, so that what is not written shows.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedtp.ops import launch, linear
from fusedtp.ops.launch import Config, Epilogue, plain
from fusedtp.ops.launch.config import HOST
from fusedtp.ops.launch.operands import describable
from tests.nn.support import assert_within

E = torch.finfo(torch.float32).eps
LAYOUTS = ("plain", "transposed", "strided", "misaligned", "gap", "expanded")
new_empty = torch.Tensor.new_empty


@dataclass(frozen=True)
class Draw:
    """Operands of one test, of small integers. tma, splits, halves as in Config; chosen: the launcher's own."""

    dtype: torch.dtype
    m: int
    n: int
    k: int
    layout: str = "plain"
    tma: bool = False
    splits: int = 1
    halves: bool = False
    seed: int = 0
    device: str = "cpu"
    chosen: bool = False

    @property
    def config(self) -> Config | None:
        if self.chosen:
            return None
        return Config(16, 16, 16, group=2, tma=self.tma, splits=self.splits, halves=self.halves)

    def integers(self, *shapes: tuple[int, ...], layout: str = "") -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        drawn = [torch.randint(-2, 3, shape, generator=generator).to(self.dtype) for shape in shapes]
        return [laid_out(x.to(self.device), layout or self.layout) for x in drawn]


def laid_out(x: Tensor, layout: str) -> Tensor:
    """x in memory that has NaN around it: columns apart, rows apart by no multiple of 16 bytes, one element late."""
    if x.dim() != 2 or layout == "plain":
        return x
    rows, cols = x.shape
    if layout == "transposed":
        return x.t().contiguous().t()
    if layout == "expanded":  # every row is the first one
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


def activated(x: Tensor, activation: str) -> Tensor:
    return (
        F.silu(x)
        if activation == "silu"
        else F.gelu(x, approximate="tanh" if activation == "gelu_pytorch_tanh" else "none")
    )


@patch.object(torch.Tensor, "new_empty", poisoned)
def matmul_law(draw: Draw, biased: bool, added: bool, scale: float | None) -> None:
    """scale * x @ w.T + bias + residual of integers and a scale that is a power of two: bit for bit."""
    x, w = draw.integers((draw.m, draw.k), (draw.n, draw.k))
    bias, residual = draw.integers((draw.n,), (draw.m, draw.n))
    y = launch.matmul(
        x, w, bias if biased else None, draw.config, residual=residual if added else None, scale=scale
    )
    want = (scale or 1.0) * (exact(x) @ exact(w).t()) + biased * exact(bias) + added * exact(residual)
    assert y.is_contiguous()
    assert torch.equal(y.cpu(), want.to(draw.dtype)), (y.cpu().double() - want).abs().max()


@patch.object(torch.Tensor, "new_empty", poisoned)
def gated_law(draw: Draw, activation: str, biased: bool, keep: bool) -> None:
    """The two products bit for bit, what is made of them within what their activation loses in fp32."""
    x, gate, up = draw.integers((draw.m, draw.k), (draw.n, draw.k), (draw.n, draw.k))
    if draw.seed % 2:  # strides of its own
        up = laid_out(up.contiguous(), "transposed")
    gate_bias, up_bias = draw.integers((draw.n,), (draw.n,)) if biased else (None, None)
    y, g, u = launch.gated_matmul(x, gate, up, gate_bias, up_bias, activation, keep, draw.config)
    wanted = [exact(x) @ exact(w).t() for w in (gate, up)]
    if biased:
        wanted = [want + exact(bias) for want, bias in zip(wanted, (gate_bias, up_bias), strict=True)]
    if keep:
        for got, want in zip((g, u), wanted, strict=True):
            assert torch.equal(got.cpu(), want.to(draw.dtype))
    else:
        assert g is None and u is None
    a, b = wanted
    assert_within("y", y, activated(a, activation) * b, lost_by(activation, a) * b.abs())


def lost_by(activation: str, x: Tensor) -> Tensor:
    """What an activation of exact numbers and a product lose in fp32.

    exp(t) loses (2 + |t|) E, of which 1 / (1 + exp(t)) takes its share; t is -x, or for the tanh form a cubic of x
    with four roundings. What overflows, or is below the smallest normal number, becomes 0. The error function is off by
    2 E of one; torch takes tanh's difference from one, in fp64, where that is small.
    """
    size = activated(x, activation).abs()
    if activation == "gelu":
        return 2 * E * x.abs() + 2 * E * size
    t = 1.5957691216 * (x + 0.044715 * x**3) if activation == "gelu_pytorch_tanh" else x
    share = torch.sigmoid(-t) * (2 + 3 * t.abs())
    return (3 + share) * E * size + (torch.finfo(torch.float32).tiny + 2**-52) * (1 + x.abs())


def activation_law(activation: str) -> None:
    """The activation alone, of many numbers: x times one, and one."""
    x = torch.linspace(-9, 9, 1001)[:, None]
    y, _, _ = launch.gated_matmul(x, torch.ones(1, 1), torch.zeros(1, 1), None, torch.ones(1), activation)
    assert_within("y", y, activated(exact(x), activation), lost_by(activation, exact(x)))


@patch.object(torch.Tensor, "new_empty", poisoned)
def fp8_law(draw: Draw, by_row: bool, out: torch.dtype, added: bool) -> None:
    """fp8 operands that no rounding touches, with scales that are powers of two: bit for bit."""
    x, w = (t.to(torch.float8_e4m3fn) for t in draw.integers((draw.m, draw.k), (draw.n, draw.k)))
    generator = torch.Generator().manual_seed(draw.seed)
    shapes = ((draw.m, 1), (draw.n, 1)) if by_row else ((), (1, 1))
    x_scale, w_scale = ((2.0 ** torch.randint(-2, 3, s, generator=generator)).to(draw.device) for s in shapes)
    bias = torch.ones(draw.n, dtype=out, device=draw.device)
    residual = torch.full((draw.m, draw.n), 2.0, dtype=out, device=draw.device)
    y = linear.scaled_matmul(
        x, w, x_scale, w_scale, bias if added else None, residual=residual if added else None, out_dtype=out
    )
    want = exact(x) @ exact(w).t() * exact(x_scale) * exact(w_scale).reshape(1, -1) + 3 * added
    assert torch.equal(y.cpu(), want.to(out))
    parts = plain.scaled_matmul(x, w, Epilogue(None, None, None, x_scale, w_scale), out, draw.config)
    assert torch.equal(parts.cpu(), (want - 3 * added).to(out))


@patch.object(torch.Tensor, "new_empty", poisoned)
def gated_fp8_law(draw: Draw, activation: str, scaled: tuple[bool, bool, bool], out: torch.dtype) -> None:
    """fp8 operands, each with scales of its rows or one, powers of two: what the activation loses, and one rounding."""
    shapes = (draw.m, draw.k), (draw.n, draw.k), (draw.n, draw.k)
    x, gate, up = given = [t.to(torch.float8_e4m3fn) for t in draw.integers(*shapes)]
    generator = torch.Generator().manual_seed(draw.seed)
    scales = [
        2.0 ** torch.randint(-2, 2, (len(t), 1) if by_row else (), generator=generator)
        for t, by_row in zip(given, scaled, strict=True)
    ]
    bias = torch.arange(draw.n).remainder(5).to(out)
    full = [exact(t) * exact(scale) for t, scale in zip(given, scales, strict=True)]
    g, u = full[0] @ full[1].t() + exact(bias), full[0] @ full[2].t()
    want = activated(g, activation) * u
    lost = lost_by(activation, g) * u.abs()
    lost = lost + torch.finfo(out).eps / 2 * (want.abs() + lost) + torch.finfo(out).smallest_normal
    y = linear.scaled_gated_matmul(x, gate, up, *scales, activation=activation, gate_bias=bias, out_dtype=out)
    assert y.dtype == out
    assert_within("y", y, want, lost)
    y = plain.scaled_gated_matmul(x, gate, up, tuple(scales), bias, None, activation, out, draw.config)
    assert_within("y of this draw's tiles", y, want, lost)


def every_fp8_law() -> None:
    """Each of the 256 bit patterns means what torch takes it for, by either path."""
    x = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(16, 16)
    finite = x.clone()
    finite.view(torch.uint8)[x.float().isnan()] = 0
    one = torch.eye(16).to(x.dtype)
    for config in (Config(16, 16, 16), Config(16, 16, 16, tma=True)):
        y = plain.scaled_matmul(finite, one, Epilogue(), torch.float32, config)
        assert torch.equal(y, finite.float())
        y = plain.scaled_matmul(x, one, Epilogue(), torch.float32, config)
        assert torch.equal(y.isnan(), x.float().isnan().any(1, keepdim=True).expand(16, 16))


def widened_fp8_law() -> list[str]:
    """Where there are no units for an fp8 its values go as bf16: the same result, and what is said."""
    import warnings

    x = torch.arange(-8, 8.0).view(4, 4).to(torch.float8_e4m3fnuz)
    one = torch.ones(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y = linear.scaled_matmul(x, x, one, 2 * one, out_dtype=torch.float32)
        z = linear.scaled_gated_matmul(x, x, x, one, 2 * one, one, out_dtype=torch.float32)
    product = x.float() @ x.float().t()
    assert torch.equal(y, 2 * product)
    assert_within("z", z, F.silu(2 * exact(product)) * exact(product), 64 * E * product.square().double())
    return [str(each.message) for each in caught if each.category is UserWarning]


def gradient_law(draw: Draw, gated: str) -> None:
    """Values and gradients of the public operations against autograd's of the same formula in fp64."""
    shape, (m, n, k) = (2, draw.m, draw.k), (2 * draw.m, draw.n, draw.k)
    generator = torch.Generator().manual_seed(draw.seed)
    shapes = (shape, (n, k), (n, k) if gated else (2, draw.m, n), (n,), (n,))
    given = [torch.randint(-2, 3, s, generator=generator).to(draw.dtype) for s in shapes]
    mine = [t.to(draw.device, copy=True).requires_grad_() for t in given]
    theirs = [t.double().requires_grad_() for t in given]
    if gated:
        x, a, b, c, d = mine
        y = linear.gated_linear(x, a, b, activation=gated, gate_bias=c, up_bias=d)
        x, a, b, c, d = theirs
        want = activated(F.linear(x, a, c), gated) * F.linear(x, b, d)
    else:
        x, a, r, b, _ = mine
        y = linear.linear(x, a, b, residual=r, scale=0.5)
        x, a, r, b, _ = theirs
        want = 0.5 * F.linear(x, a) + b + r
    dy = torch.randint(-2, 3, y.shape, generator=generator)
    y.backward(dy.to(y))
    want.backward(dy.double())
    assert y.shape == want.shape and y.dtype == draw.dtype
    for name, got, wanted in (
        ("y", y, want),
        *((f"d{i}", p.grad, q.grad) for i, (p, q) in enumerate(zip(mine, theirs))),
    ):
        if wanted is None:
            assert got is None
            continue
        got, wanted = got.detach().cpu().double(), wanted.detach()
        # the factors of a gate and their gradients are rounded to dtype, then sums of up to max(m, n, k) such terms;
        # activations bend by less than 1.2, so the second derivative times a rounding stays below 2 of it
        size = torch.finfo(draw.dtype).eps if gated else 0.0
        bound = 8 * size * (max(m, n, k) + 2) * max(1.0, float(wanted.abs().max() if wanted.numel() else 0))
        assert not wanted.numel() or float((got - wanted).abs().max()) <= bound, name


def far_law(which: str) -> None:
    """Rows (or columns) of an operand over 2^31 elements apart, in memory of which only their pages are there."""
    rows, cols, step = 5, 20, 2**31 + 8
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randint(-2, 3, (r, cols), generator=generator).half() for r in (rows, 6))
    if which == "columns":
        x, w = x[:, :3], w[:, :3]
    memory = sparse((5 if which == "rows" else 3) * step)
    apart = memory.as_strided(x.shape, (step, 1) if which == "rows" else (1, step)).copy_(x)
    for config in (Config(16, 16, 16), Config(16, 16, 16, tma=True), Config(16, 16, 16, splits=2)):
        assert torch.equal(launch.matmul(apart, w, None, config), (x.float() @ w.float().t()).half())
        y, _, _ = launch.gated_matmul(w, apart, apart, None, None, "silu", False, config)
        product = w.float() @ x.float().t()
        assert_within("y", y, exact(F.silu(product.double()) * product), 20 * E * product.square())


def sparse(elements: int) -> Tensor:
    """fp16, of which only what is touched takes memory."""
    no_reserve = 0x4000  # MAP_NORESERVE of Linux, which Python names from 3.13 on
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return torch.frombuffer(mmap.mmap(-1, 2 * elements, flags=flags), dtype=torch.float16)


def far_result_law() -> None:
    """The last tile of a y of over 2^31 elements: one program of as many as there are tiles."""
    from fusedtp.kernels.gated_matmul import gated_matmul_kernel
    from fusedtp.kernels.matmul import matmul_kernel
    from fusedtp.kernels.split_k import join_parts_kernel, split_matmul_kernel
    from fusedtp.sim.interpreter import Builder, arguments, call, interpreted

    m, n, k, block = 3, 2**30 + 8, 8, 16
    x, w = torch.ones(m, k).half(), torch.full((1, k), 2.0).half().expand(n, k)
    tiles = -(-n // block)
    y = sparse(m * n).view(m, n)
    config = Config(block, block, block, group=1)
    epilogue = plain.Epilogue(residual=y)
    (one,), _ = plain.plan_linear(x[:0], w, epilogue, x.dtype, config, "ieee", HOST)
    (gated,), _ = plain.plan_gated(x[:0], w, w, None, None, "silu", False, config, "ieee", HOST)
    parts = sparse(4 * m * n).view(torch.float32).view(2, m, n)
    join = plain.plan_join(parts, None, epilogue, None, y, None, None, "silu", config)
    split, _ = plain.plan_parts(x[:0], w, config, "ieee", HOST)
    last, value = parts[1, -1, -8:], torch.full((8,), 16.0)
    builder = Builder()
    for kernel, args, programs, got, want in (
        (matmul_kernel, one.args | dict(x=x, y=y, M=m), tiles, y[-1, -8:], value),
        (
            split_matmul_kernel,
            split.args | dict(x=x, parts=parts, M=m, splits=2, k_each=4),
            2 * tiles,
            last,
            value / 2,
        ),
        (gated_matmul_kernel, gated.args | dict(x=x, y=y, M=m), tiles, y[-1, -8:], value * value),
        (join_parts_kernel, join.args, join.programs, y[-1, -8:], value / 2 + value * value),
    ):
        builder.stand_at(programs - 1, (programs, 1, 1))
        function = interpreted(kernel)
        language = builder.module._patch_lang(function)
        call(function, arguments(kernel, args))
        language.restore()
        assert torch.equal(got, want.half() if got.dtype == torch.float16 else want), (kernel, got)


def path_law() -> None:
    """TMA is taken where all operands allow it, and pointers where one does not."""
    x = torch.zeros(16, 32, dtype=torch.bfloat16)
    allowed = [x, x[::2], x[:, 8:], x[:, :24], x[:, :9]]
    refused = [x[:, 1:], x[:, ::2], x.t(), x[:1].expand(16, 32), x[:0], x[:, :0], laid_out(x, "gap")]
    assert all(map(describable, allowed)) and not any(map(describable, refused))
    config = Config(16, 16, 16, tma=True)
    for w in (*allowed[:1], *refused):
        if w.shape[1] == 32:
            (one,), _ = plain.plan_linear(x, w, Epilogue(), x.dtype, config, "ieee", HOST)
            assert one.args["TMA"] == describable(w), w.stride()
    (one,), _ = plain.plan_linear(x.float(), x.float(), Epilogue(), torch.float32, config, "ieee", HOST)
    assert not one.args["TMA"], "full-precision fp32 has no matrix unit"
    (one,), _ = plain.plan_linear(x.float(), x.float(), Epilogue(), torch.float32, config, "tf32", HOST)
    assert one.args["TMA"]
