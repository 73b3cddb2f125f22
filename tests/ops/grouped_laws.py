"""Laws of the grouped matmuls, for any engine on any device: they equal the fp64 formula, expert by expert.

Rows that belong to no expert hold NaN, in operands and in output gradients, and so does all newly allocated memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

import fusedtp
from fusedtp.ops.launch import Config
from fusedtp.ops.launch.config import machine_of
from fusedtp.ops.moe import grouped as engines
from tests.nn.support import assert_within
from tests.ops.plain_matmul_laws import E, exact

LAYOUTS = ("plain", "transposed", "strided", "misaligned", "halves")
NAN = float("nan")
new_empty = torch.Tensor.new_empty


@dataclass(frozen=True)
class Draw:
    """The operands of one test. sizes: rows of each expert; spare: rows after them that belong to no expert."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    n: int
    k: int
    spare: int = 0
    layout: str = "plain"
    engine: str = "chunked"
    act: str = "silu"
    seed: int = 0
    device: str = "cpu"

    @property
    def used(self) -> int:
        return sum(self.sizes)

    @property
    def offsets(self) -> Tensor:
        return torch.tensor([0, *accumulate(self.sizes)], dtype=torch.int32, device=self.device)

    def experts(self) -> list[slice]:
        return [slice(a, b) for a, b in pairwise([0, *accumulate(self.sizes)])]

    def rows(self, width: int, most: int = 2, seed: int = 0) -> Tensor:
        """[R, width] of integers up to `most`."""
        x = integers((self.used, width), most, self.seed + seed)
        return self.spared(x)

    def spared(self, x: Tensor) -> Tensor:
        """x followed by the spare rows, laid out on the device in the dtype."""
        x = torch.cat((x, x.new_full((self.spare, x.shape[1]), NAN)))
        return laid_out(x.to(self.device, self.dtype), self.layout)

    def weights(self, *shape: int, most: int = 2, seed: int = 1) -> Tensor:
        w = integers((len(self.sizes), *shape), most, self.seed + seed)
        return laid_out(w.to(self.device, self.dtype), self.layout)


def poisoned(like: Tensor, *shape: int, **on: object) -> Tensor:
    """new_empty filled with NaN; offsets, which the interpreter also copies with new_empty, are left as they are."""
    made = new_empty(like, *shape, **on)
    return made.fill_(NAN) if made.is_floating_point() else made


def integers(shape: tuple[int, ...], most: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(-most, most + 1, shape, generator=generator).double()


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers on x's device with NaN around them in memory: a copy to another device would drop the gaps."""
    if layout == "plain":
        return x
    if layout == "transposed":
        return x.mT.contiguous().mT
    if layout == "misaligned":
        return x.new_full((1 + x.numel(),), NAN)[1:].view(x.shape).copy_(x)
    *outer, rows, cols = x.shape
    if layout == "strided":
        return x.new_full((*outer, rows, 2 * cols + 1), NAN)[..., : 2 * cols : 2].copy_(x)
    return x.new_full((*outer, 2 * rows, cols), NAN)[..., :rows, :].copy_(x)  # the first half of a larger tensor


def activated(x: Tensor, activation: str) -> Tensor:
    return (
        F.silu(x)
        if activation == "silu"
        else F.gelu(x, approximate="tanh" if activation == "gelu_pytorch_tanh" else "none")
    )


def lost_by(activation: str, x: Tensor) -> Tensor:
    """The fp32 error of an activation of an exact number, times a factor.

    exp(t) has an error of (2 + |t|) E, and 1 / (1 + exp(t)) inherits part of it; t is -x, or for the tanh form a cubic
    of x with four roundings. An overflow, or a value below the smallest normal number, becomes 0. The error function is
    off by 2 E of one; torch takes tanh's difference from one, in fp64, where that is small.
    """
    size = activated(x, activation).abs()
    if activation == "gelu":
        return 2 * E * x.abs() + 2 * E * size
    t = 1.5957691216 * (x + 0.044715 * x**3) if activation == "gelu_pytorch_tanh" else x
    share = torch.sigmoid(-t) * (2 + 3 * t.abs())
    return (3 + share) * E * size + (torch.finfo(torch.float32).tiny + 2**-52) * (1 + x.abs())


def wanted_matmul(draw: Draw, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """The rows that belong to experts, in fp64."""
    out = exact(x).new_zeros(draw.used, w.shape[1])
    for e, rows in enumerate(draw.experts()):
        out[rows] = exact(x)[rows] @ exact(w)[e].t() + (0 if bias is None else exact(bias)[e])
    return out


def wanted_wgrad(draw: Draw, dy: Tensor, x: Tensor) -> Tensor:
    return torch.stack([exact(dy)[rows].t() @ exact(x)[rows] for rows in draw.experts()])


def check(name: str, got: Tensor, want: Tensor) -> None:
    """Bitwise equal, except for the sign of zero, to the fp64 number rounded once."""
    assert got.shape == want.shape, (name, got.shape, want.shape)
    assert torch.equal(got.detach().cpu(), want.to(got.dtype)), (
        name,
        (got.cpu().double() - want).abs().max(),
    )


@patch.object(torch.Tensor, "new_empty", poisoned)
def matmul_law(draw: Draw, biased: bool) -> None:
    """y and all gradients of integer inputs are exact, bit for bit."""
    x, w = draw.rows(draw.k), draw.weights(draw.n, draw.k)
    bias = integers((len(draw.sizes), draw.n), 2, draw.seed + 2).to(draw.dtype).to(draw.device) if biased else None
    dy = draw.rows(draw.n, seed=3)
    leaves = [t.detach().requires_grad_() for t in (x, w, *([bias] if biased else []))]
    y = fusedtp.grouped_matmul(
        leaves[0], leaves[1], draw.offsets, bias=leaves[2] if biased else None, engine=draw.engine
    )
    y.backward(dy)
    check("y", y[: draw.used], wanted_matmul(draw, x, w, bias))
    check("dx", leaves[0].grad[: draw.used], wanted_matmul(draw, dy, w.mT))
    check("dw", leaves[1].grad, wanted_wgrad(draw, dy, x))
    if biased:
        check("db", leaves[2].grad, torch.stack([exact(dy)[rows].sum(0) for rows in draw.experts()]))
    assert y.shape[0] == draw.used + draw.spare
    if draw.engine == "triton":
        assert y[draw.used :].isnan().all(), "rows of nobody are written"


def saturated(draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
    """x, gate, up with gate's product above 128 or below -128: act is its argument or 0 there, and its slope 1 or 0."""
    x = integers((draw.used, draw.k), 1, draw.seed)
    gate = integers((len(draw.sizes), draw.n, draw.k), 1, draw.seed + 1)
    up = integers((len(draw.sizes), draw.n, draw.k), 1, draw.seed + 2)
    sign = integers((len(draw.sizes), draw.n), 1, draw.seed + 4).sign().add(0.5).sign()
    x[:, 0], gate[:, :, 0], up[:, :, 0] = 64, 3 * sign, 0
    weights = [laid_out(w.to(draw.device, draw.dtype), draw.layout) for w in (gate, up)]
    return draw.spared(x), *weights


@patch.object(torch.Tensor, "new_empty", poisoned)
def gated_law(draw: Draw) -> None:
    """act(g) * u and all gradients are exact, bit for bit, where the activation is exact."""
    x, gate, up = saturated(draw)
    dy = draw.rows(draw.n, most=1, seed=3)
    leaves = [t.detach().requires_grad_() for t in (x, gate, up)]
    y = fusedtp.grouped_gated(*leaves, draw.offsets, act=draw.act, engine=draw.engine)
    y.backward(dy)
    g, u = wanted_matmul(draw, x, gate), wanted_matmul(draw, x, up)
    check("y", y[: draw.used], g.relu() * u)
    grad = exact(dy)[: draw.used]
    dg, du = grad * u * (g > 0), grad * g.relu()
    check("dx", leaves[0].grad[: draw.used], wanted_matmul(draw, dg, gate.mT) + wanted_matmul(draw, du, up.mT))
    check("dgate", leaves[1].grad, wanted_wgrad(draw, dg, x))
    check("dup", leaves[2].grad, wanted_wgrad(draw, du, x))
    with torch.no_grad():
        again = fusedtp.grouped_gated(x, gate, up, draw.offsets, act=draw.act, engine=draw.engine)
    check("y without gradients", again[: draw.used], g.relu() * u)


@patch.object(torch.Tensor, "new_empty", poisoned)
def activation_law(draw: Draw) -> None:
    """act(g) * u of small integers, and its gradients, are within the activation's fp32 error."""
    assert draw.k == 1 and draw.used
    x = draw.spared(torch.linspace(-9, 9, draw.used).double()[:, None])
    one = torch.ones(len(draw.sizes), draw.n, 1, dtype=draw.dtype, device=draw.device)
    dy = draw.rows(draw.n, seed=3)
    y, g, u = engines.gated_engine(draw.engine, x, one, one, draw.offsets, draw.act, True)
    dg, du = engines.gated_backward_engine(draw.engine, dy, g, u, draw.offsets, draw.act)
    a, grad = exact(x)[: draw.used].expand(-1, draw.n), exact(dy)[: draw.used]
    leaf = a.clone().requires_grad_()
    activated(leaf, draw.act).sum().backward()
    lost = lost_by(draw.act, a)
    assert_within("y", y[: draw.used], activated(a, draw.act) * a, (lost + E * a.abs()) * a.abs())
    assert_within("du", du[: draw.used], activated(a, draw.act) * grad, (lost + E * a.abs()) * grad.abs())
    # the slope's derivative is below 2; the slope uses the same exponential and a few more roundings
    size = (grad * a).abs()
    assert_within("dg", dg[: draw.used], leaf.grad * a * grad, 32 * E * (1 + a.abs()) * size)


def bounds_law(draw: Draw) -> None:
    """Random numbers: each sum is within its rounding error of the fp64 sum."""
    x, w, dy = numbers(draw)
    leaves = [t.detach().requires_grad_() for t in (x, w)]
    y = fusedtp.grouped_matmul(*leaves, draw.offsets, engine=draw.engine)
    y.backward(dy)
    eps = torch.finfo(torch.promote_types(draw.dtype, torch.float32)).eps
    pairs = (
        ("y", y[: draw.used], wanted_matmul, (x, w), draw.k),
        ("dx", leaves[0].grad[: draw.used], wanted_matmul, (dy, w.mT), draw.n),
        ("dw", leaves[1].grad, wanted_wgrad, (dy, x), max(draw.sizes)),
    )
    for name, got, want, operands, terms in pairs:
        sizes = want(draw, *(t.abs() for t in operands))
        assert_within(name, got, want(draw, *operands), (terms + 2) * eps * sizes)


def numbers(draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(draw.seed)
    x, dy = (torch.randn(draw.used, width, generator=generator) for width in (draw.k, draw.n))
    w = torch.randn(len(draw.sizes), draw.n, draw.k, generator=generator)
    return draw.spared(x), laid_out(w.to(draw.device, draw.dtype), draw.layout), draw.spared(dy)


def repeat_law(draw: Draw) -> None:
    """Repeated runs give the same bits, forward and backward."""
    x, w, dy = numbers(draw)

    def run() -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in (x, w, w.clone())]
        bias = torch.ones(len(draw.sizes), draw.n, dtype=draw.dtype, device=draw.device, requires_grad=True)
        y = fusedtp.grouped_matmul(*leaves[:2], draw.offsets, bias=bias, engine=draw.engine)
        z = fusedtp.grouped_gated(*leaves, draw.offsets, act=draw.act, engine=draw.engine)
        (y + z).backward(dy)
        return [t[: draw.used] for t in (y, z, leaves[0].grad)] + [leaves[1].grad, leaves[2].grad, bias.grad]

    first = run()
    assert all(t.isfinite().all() for t in first), "NaN of rows that belong to nobody shows"
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


def launched(plan: Any, *args: Any) -> Any:
    """Start a planned launch and return its outputs."""
    device = next(t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, Tensor)).device
    launch, outs = plan(*args, machine_of(device))
    launch.start(device)
    return outs


@patch.object(torch.Tensor, "new_empty", poisoned)
def tiles_law(draw: Draw, config: Config) -> None:
    """The launchers with small tiles: several per expert, with tails; two weights, gate, wgrad."""
    x, x2, dy = draw.rows(draw.k), draw.rows(draw.k, seed=5), draw.rows(draw.n, seed=3)
    w, w2 = draw.weights(draw.n, draw.k), draw.weights(draw.n, draw.k, seed=2)
    bias = integers((len(draw.sizes), draw.n), 2, draw.seed + 4).to(draw.dtype).to(draw.device)
    strided = draw.offsets.repeat_interleave(2)[::2]
    y = launched(engines.plan_matmul, [x, x2], [w, w2], strided, bias, config, "ieee")
    check("y", y[: draw.used], wanted_matmul(draw, x, w, bias) + wanted_matmul(draw, x2, w2))
    other = laid_out(w2.contiguous(), "transposed" if draw.layout == "plain" else "plain")
    for second in (w2, other):  # with w's strides, and with other strides
        _, g, u = launched(engines.plan_gated, x, w, second, draw.offsets, draw.act, True, config, "ieee")
        check("g", g[: draw.used], wanted_matmul(draw, x, w))
        check("u", u[: draw.used], wanted_matmul(draw, x, w2))
    dw = launched(engines.plan_wgrad, dy, x, draw.offsets, torch.float32, config, "ieee")
    assert dw.dtype == torch.float32
    check("dw", dw, wanted_wgrad(draw, dy, x))
    for out in (y, g, u):
        assert out[draw.used :].isnan().all(), "rows of nobody are written"


@patch.object(torch.Tensor, "new_empty", poisoned)
def reach_law(draw: Draw) -> None:
    """Offsets outside the rows, which nothing checks on a GPU, are clamped: no access is out of bounds."""
    assert draw.spare == 0 and len(draw.sizes) == 3
    a, r = draw.sizes[0], draw.used
    wild = torch.tensor([-5, a, r + 1000, r + 2000], dtype=torch.int32, device=draw.device)
    cut = replace(draw, sizes=(a, r - a, 0))
    x, w, dy = draw.rows(draw.k), draw.weights(draw.n, draw.k), draw.rows(draw.n, seed=3)
    check("y", engines.matmul_engine("triton", [x], [w], wild, None), wanted_matmul(cut, x, w))
    check("dw", engines.wgrad_engine("triton", [dy], x, wild, x.dtype)[0], wanted_wgrad(cut, dy, x))
    down = torch.tensor([0, a, a - 2, r], dtype=torch.int32, device=draw.device)
    got = engines.matmul_engine("triton", [x], [w], down, None)
    check("y", got, wanted_matmul(replace(draw, sizes=(a, 0, r - a)), x, w))
    dg, du = engines.gated_backward_engine("triton", dy, dy, dy, wild, draw.act)
    assert dg.isfinite().all() and du.isfinite().all()


def main_grad_law(draw: Draw) -> None:
    """Weights with a main_grad: integer products accumulate in fp32, where 16 bits could not hold the sums."""
    x, gate, up = saturated(draw)
    dy, offsets = draw.rows(draw.n, most=1, seed=3), draw.offsets
    weights = [torch.nn.Parameter(w.detach().clone()) for w in (gate, up, gate)]
    for w in weights:
        w.main_grad = torch.ones(w.shape, device=draw.device)
    y = fusedtp.grouped_gated(x, *weights[:2], offsets, act=draw.act, engine=draw.engine)
    z = fusedtp.grouped_matmul(x, weights[2], offsets, engine=draw.engine)
    torch.autograd.backward([y, z], [dy, dy])
    g, u, grad = wanted_matmul(draw, x, gate), wanted_matmul(draw, x, up), exact(dy)[: draw.used]
    for w, d in zip(weights, (grad * u * (g > 0), grad * g.relu(), grad), strict=True):
        assert w.grad is None
        check("main_grad", w.main_grad, wanted_wgrad(draw, d, x) + 1)


def composed_law(draw: Draw) -> None:
    """An expert MLP that uses its rows twice: undefined rows do not taint defined rows or their gradients."""
    x, gate, up = saturated(draw)
    down, dz = draw.weights(draw.k, draw.n, most=1, seed=7), draw.rows(draw.k, most=1, seed=8)
    leaf = x.detach().requires_grad_()
    h = fusedtp.grouped_gated(leaf, gate, up, draw.offsets, act=draw.act, engine=draw.engine)
    z = fusedtp.grouped_matmul(h, down, draw.offsets, engine=draw.engine) + leaf
    z.backward(dz)
    g, u = wanted_matmul(draw, x, gate), wanted_matmul(draw, x, up)
    dh = wanted_matmul(draw, dz, down.mT)
    dg, du = dh * u * (g > 0), dh * g.relu()
    want = wanted_matmul(draw, dg, gate.mT) + wanted_matmul(draw, du, up.mT) + exact(dz)[: draw.used]
    assert draw.dtype in (torch.float32, torch.float64)
    check("z", z[: draw.used], wanted_matmul(draw, g.relu() * u, down) + exact(x)[: draw.used])
    check("dx", leaf.grad[: draw.used], want)


def vendor_law(draw: Draw, biased: bool) -> None:
    """The `chunked` engine on a GPU, through torch's grouped_mm."""
    x, x2, dy = draw.rows(draw.k), draw.rows(draw.k, seed=5), draw.rows(draw.n, seed=3)
    w, w2 = draw.weights(draw.n, draw.k), draw.weights(draw.n, draw.k, seed=2)
    bias = integers((len(draw.sizes), draw.n), 2, draw.seed + 4).to(draw.dtype).to(draw.device) if biased else None
    y = engines._vendor_matmul([x], [w], draw.offsets, bias)
    check("y", y[: draw.used], wanted_matmul(draw, x, w, bias))
    y = engines._vendor_matmul([x, x2], [w, w2], draw.offsets, None)
    check("sum", y[: draw.used], wanted_matmul(draw, x, w) + wanted_matmul(draw, x2, w2))
    check("dw", engines._vendor_wgrad(dy, x, draw.offsets), wanted_wgrad(draw, dy, x))


def opcheck_law(engine: str) -> None:
    """torch's own checks of every op; all rows belong to experts, because other rows are undefined."""
    draw = Draw(torch.float32, (2, 0, 3), 4, 3, engine=engine)
    x, gate, up = draw.rows(3), draw.weights(4, 3), draw.weights(4, 3, seed=2)
    bias, dy, offsets = torch.ones(3, 4), draw.rows(4, seed=3), draw.offsets
    ops = torch.ops.fusedtp
    for op, arguments in (
        (ops.grouped_matmul, ([x], [gate], offsets, bias, engine)),
        (ops.grouped_matmul, ([x, x], [gate, up], offsets, None, engine)),
        (ops.grouped_wgrad, ([dy, dy[:, 1:].contiguous()], x.detach(), offsets, engine, torch.float32)),
        (ops.grouped_bias_grad, (dy, offsets, engine)),
        (ops.grouped_gated, (x, gate, up, offsets, "silu", engine, True)),
        (ops.grouped_gated_backward, (dy, dy, dy, offsets, "gelu", engine)),
    ):
        torch.library.opcheck(op.default, arguments)


def compiled_law(engine: str) -> None:
    """A compiled expert MLP equals the eager one, gradients included, without a graph break."""
    draw = Draw(torch.float32, (2, 0, 3), 4, 3, engine=engine)

    def experts(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
        h = fusedtp.grouped_gated(x, gate, up, draw.offsets, engine=engine)
        return fusedtp.grouped_matmul(h, down, draw.offsets, bias=bias, engine=engine)

    operands = [
        draw.rows(3),
        draw.weights(4, 3),
        draw.weights(4, 3, seed=2),
        draw.weights(2, 4),
        torch.ones(3, 2),
    ]
    found = []
    for function in (experts, torch.compile(experts, backend="aot_eager", fullgraph=True)):
        leaves = [t.detach().clone().requires_grad_() for t in operands]
        y = function(*leaves)
        y.square().sum().backward()
        found.append([y, *(t.grad for t in leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def dense(x: Tensor, gate: Tensor, up: Tensor, act: str) -> Tensor:
    """The gated half of one expert."""
    g = x @ gate.t()
    return (F.silu(g) if act == "silu" else activated(g, act)) * (x @ up.t())
