"""The library's single-rank kernels as simulator cases: small shapes with tails, compared with each kernel's formula.

    local_cases    every kernel, in the variants that its launcher chooses, one launch after another
    local_case     one kernel

The dtype determines the caller's choices (activation, bias, residual, direction of a rotation), so that each choice
occurs once. Sums are of small integers, exact in any order. Results of exp or rsqrt may differ from torch's by
rounding. Elements that no kernel writes, such as rows past the last expert, must stay unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedtp.ops import fp8
from fusedtp.ops.launch import Launch as Planned
from fusedtp.ops.launch import cross_entropy, plain, pointwise, quantize
from fusedtp.ops.launch.config import Config, Machine
from fusedtp.ops.moe import fp8 as rows_to_experts
from fusedtp.ops.moe import grouped, plan, rounds
from fusedtp.sim.case import Case, Launch, Mismatch, Run, compare

from .dense import gpu

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ACTIVATIONS: dict[torch.dtype, tuple[str, Callable[[Tensor], Tensor]]] = {
    F32: ("silu", F.silu),
    F16: ("gelu", F.gelu),
    BF16: ("gelu_pytorch_tanh", partial(F.gelu, approximate="tanh")),
}
UNWRITTEN = -7  # initial value of integers; floats are NaN
ROUNDINGS = 2  # allowed fp32 rounding errors of an inexact result, and of terms as large as the largest element


class Local(NamedTuple):
    """A launch, its outputs, and the expected values before rounding to their dtypes. exact: compare bit for bit."""

    launch: Planned
    outs: Sequence[Tensor]
    wanted: Sequence[Tensor]
    exact: bool = True


@dataclass(frozen=True)
class Variant:
    """The machine and operands for which a kernel is planned.

    k       columns of x
    dtype   of operands
    apart   the row stride of x is odd, which rules out TMA; the gaps hold NaN
    """

    machine: Machine
    k: int
    dtype: torch.dtype
    apart: bool = False

    @property
    def config(self) -> Config:
        """Three stages; on sm_90, TMA if the kernel can use it, and `halves`."""
        halves = self.machine.capability == 90
        tall = 64 if halves and self.dtype.itemsize < 4 else 16  # wgmma requires 64 rows
        return Config(tall, 32 if halves else 16, 16, group=2, tma=halves, halves=halves, num_stages=3)

    def rows(self, x: Tensor) -> Tensor:
        """x in the dtype, with the row stride of the variant."""
        more = 1 + x.shape[1] % 2 if self.apart else 0
        return F.pad(x, (0, more), value=torch.nan).to(self.dtype)[:, : x.shape[1]]


def drawn() -> Callable[..., Tensor]:
    """A function shape -> random integers from -2 to 2 in fp32, the same each time a case is made."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randint(-2, 3, shape, generator=generator).float()


# -- products ----------------------------------------------------------------------------------------------------------


def _matmul(v: Variant) -> Local:
    """With scales of rows and columns, as for fp8; fp32 uses tf32 if there is wgmma."""
    draw = drawn()
    scales, x, w, bias = (draw(36, 1), draw(40, 1)), draw(36, v.k), draw(40, v.k), draw(40)
    out = F32 if v.dtype == E4M3 else v.dtype
    config = replace(v.config, block_k=32) if v.dtype == E4M3 else v.config
    precision = "tf32" if v.config.tma and v.dtype == F32 else "ieee"
    added = None if v.dtype == BF16 else bias.to(out)
    launch, y = plain.plan_matmul(v.rows(x), w.to(v.dtype), added, out, config, precision, v.machine, scales)
    wanted = x @ w.t() * scales[0] * scales[1].t()
    return Local(launch, [y], [wanted if added is None else wanted + bias])


OFFSETS = (0, 17, 17, 20, 104)  # the second expert has no rows; the last three of R rows belong to no expert
R, N = 107, 40


def _by_expert(x: Tensor, weights: Tensor, bias: Tensor | None = None) -> Tensor:
    """[R, N]: each row times its expert's weights; rows without an expert stay NaN."""
    made = [x[i:j] @ w.t() for w, (i, j) in zip(weights, pairwise(OFFSETS))]
    made = made if bias is None else [y + b for y, b in zip(made, bias)]
    return F.pad(torch.cat(made), (0, 0, 0, R - OFFSETS[-1]), value=torch.nan)


def _grouped(name: str, v: Variant) -> Local:
    draw, offsets = drawn(), torch.tensor(OFFSETS, dtype=torch.int32)
    x, dy, w, up, bias = draw(R, v.k), draw(R, N), draw(4, N, v.k), draw(4, N, v.k), draw(4, N)
    x_low, (dy_low, w_low, up_low, bias_low) = v.rows(x), (each.to(v.dtype) for each in (dy, w, up, bias))
    how = v.config, "ieee", v.machine
    if name == "grouped_matmul":  # on sm_90 the sum of two products
        pair = 1 + (v.machine.capability == 90)
        biases = (None, None) if v.dtype == BF16 else (bias_low, bias)
        launch, y = grouped.plan_matmul([x_low] * pair, [w_low, up_low][:pair], offsets, biases[0], *how)
        return Local(launch, [y], [_by_expert(x, w + up if pair > 1 else w, biases[1])])
    if name == "grouped_gated":
        act, formula = ACTIVATIONS[v.dtype]
        launch, (y, *products) = grouped.plan_gated(x_low, w_low, up_low, offsets, act, True, *how)
        g, u = _by_expert(x, w), _by_expert(x, up)
        return Local(launch, [y, *(each for each in products if each is not None)], [formula(g) * u, g, u], False)
    # the result is padded to multiples of 16, so tiles of 16 have no tails; in fp32 there are no rows past the last one
    config = replace(v.config, block_m=max(32, v.config.block_m), block_n=64)
    if v.dtype == F32:
        dy_low, x_low = (each[: OFFSETS[-1]].clone() for each in (dy_low, x_low))
    launch, dw = grouped.plan_wgrad(dy_low, x_low, offsets, F32, config, "ieee", v.machine)
    return Local(launch, [dw], [torch.stack([dy[i:j].t() @ x[i:j] for i, j in pairwise(OFFSETS)])])


# -- gated activations and norms ---------------------------------------------------------------------------------------


def _swiglu(v: Variant) -> Local:
    draw, (act, formula) = drawn(), ACTIVATIONS[v.dtype]
    gate, up = draw(70, 40), draw(70, 40)
    launch, y = pointwise.plan_swiglu(gate.to(v.dtype), up.to(v.dtype), act, v.machine).whole()
    return Local(launch, [y], [formula(gate) * up], False)


def _swiglu_backward(v: Variant, grouped_rows: bool = False) -> Local:
    """grouped_rows: rows of experts; rows without an expert are not written."""
    draw, rows, (act, formula) = drawn(), R if grouped_rows else 70, ACTIVATIONS[v.dtype]
    dy, gate, up = draw(rows, N), draw(rows, N), draw(rows, N)
    given = dy.to(v.dtype), gate.to(v.dtype), up.to(v.dtype)
    gate, up = gate.requires_grad_(), up.requires_grad_()
    wanted = torch.autograd.grad(formula(gate) * up, (gate, up), dy)
    if not grouped_rows:
        return Local(*pointwise.plan_swiglu_backward(*given, act, v.machine).whole(), wanted, False)
    made = grouped.plan_gated_backward(*given, torch.tensor(OFFSETS, dtype=torch.int32), act, v.machine)
    unwritten = torch.arange(R)[:, None] >= OFFSETS[-1]
    return Local(*made, [each.masked_fill(unwritten, torch.nan) for each in wanted], False)


def _norm(v: Variant, rows: int, width: int) -> Local:
    draw = drawn()
    x, residual, weight = draw(rows, width), draw(rows, width), draw(width)
    added = None if v.dtype == BF16 else residual.to(v.dtype)
    launch, (y, total, inverse_rms) = pointwise.plan_rms_norm(x.to(v.dtype), added, weight, 1e-5, v.machine).whole()
    wanted = x if added is None else x + residual
    inverse = torch.rsqrt(wanted.square().mean(1) + 1e-5)
    outs, all_wanted = [y, inverse_rms], [wanted * inverse[:, None] * weight, inverse]
    if added is not None:
        outs, all_wanted = [*outs, total], [*all_wanted, wanted]
    return Local(launch, outs, all_wanted, False)


def _norm_backward(v: Variant, rows: int, width: int) -> Local:
    """One program processes all rows. x and its inverse_rms r are drawn independently."""
    draw = drawn()
    x, residual, dy, weight, r = draw(rows, width), draw(rows, width), draw(rows, width), draw(width), draw(rows)
    low_dy, low_residual, low_x = (each.to(v.dtype) for each in (dy, residual, x))
    alone, added = replace(v.machine, programs=0), None if v.dtype == BF16 else low_residual
    made = pointwise.plan_rms_norm_backward(low_dy, added, low_x, weight, r, alone).whole()
    scaled, r = dy * weight, r[:, None]
    dx = r * scaled - x * r**3 * (scaled * x).sum(1, keepdim=True) / width
    return Local(*made, [dx if added is None else dx + residual, (dy * x * r).sum(0, keepdim=True)], False)


# -- rotary embedding and cross-entropy --------------------------------------------------------------------------------


def _rope(v: Variant) -> Local:
    """Forward and backward rotation, with a table per batch entry or one for all."""
    draw = drawn()
    batch, sign = 1 if v.dtype == BF16 else 2, -1 if v.dtype == F16 else 1
    q, k, cos, sin = draw(2, 3, 5, 12), draw(2, 3, 2, 12), draw(batch, 3, 1, 6), draw(batch, 3, 1, 6)
    launch, outs = pointwise.plan_rotate(q.to(v.dtype), k.to(v.dtype), cos, sin, sign, v.machine).whole()
    halves, sin = (each.chunk(2, -1) for each in (q, k)), sign * sin
    return Local(launch, outs, [torch.cat([a * cos - b * sin, b * cos + a * sin], -1) for a, b in halves])


def _logits(name: str, v: Variant) -> Local:
    """A shard of columns from index 3; every column has a label, and some labels are in no column."""
    draw = drawn()
    t, width, start = 70, 40, 3
    x, scale, lse, labels = draw(t, width), draw(t), draw(t), torch.arange(t)
    low, of_label = x.to(v.dtype), F.one_hot(labels, t + width)[:, start : start + width]
    if name == "logit_stats":
        launch, stats = cross_entropy.plan_logit_stats(low, labels, start, v.machine)
        return Local(launch, [stats], [torch.stack([x.logsumexp(1), (x * of_label).sum(1)], 1)], False)
    y = torch.empty_like(low)
    launch = cross_entropy.plan_logit_gradient(low, y, labels, start, lse, scale, v.machine)
    return Local(launch, [y], [((x - lse[:, None]).exp() - of_label) * scale[:, None]], False)


# -- fp8 ---------------------------------------------------------------------------------------------------------------


def _quantize(v: Variant) -> Local:
    """k = 40: rows, which fit in a program; k = 70: columns, which do not, e5m2; k = 71: columns with a given scale."""
    draw = drawn()
    k, filled, kind = v.k, 16 * -(-v.k // 16), E5M2 if v.k == 70 else E4M3
    x = draw(37, k) * 2.0 ** (torch.arange(k) - k // 2)
    x[1::2] = x[1::2].flip(1)
    x[::5, ::9], x[1::5, 3::9] = torch.inf, torch.nan
    x, one = x if k == 40 else x.t().contiguous().t(), torch.tensor([[0.25]]) if k == 71 else None
    packed, wanted = (
        torch.full((37, filled // 4 + 4), UNWRITTEN, dtype=torch.int32).view(torch.uint8) for _ in range(2)
    )
    values, scales = packed.view(kind)[:, :filled], packed[:, filled:].view(F32)
    launch = quantize.plan_quantize(x, one, values, scales if one is None else None)
    made, scale = fp8.quantize(x, kind) if one is None else (fp8.values_of(x, one, kind), one)
    wanted[:, :filled] = F.pad(made.view(torch.uint8), (0, filled - k))
    if one is None:
        wanted[:, filled:].view(F32)[:] = scale
    return Local(launch, [packed.view(torch.int32)], [wanted.view(torch.int32)])


def _pack(name: str, v: Variant) -> Local:
    """In two parts; the last block may be partial."""
    draw = drawn()
    x = draw(9, v.k) * 2.0 ** (torch.arange(v.k) // 128)
    x[::3, ::50], x[1::3, 3::50] = torch.inf, torch.nan
    packed = rows_to_experts.pack(x)
    if name == "unpack":
        launch, y = quantize.plan_unpack(packed, v.k, F32)
        return Local(launch, [y], [rows_to_experts.unpack(packed, v.k, F32)])
    made = torch.empty_like(packed)
    return Local(quantize.plan_pack(x, made), [made.view(torch.int32)], [packed.view(torch.int32)])


def _largest(v: Variant) -> Local:
    """Of columns, by four programs: the first has two parts with their maxima at different places."""
    x = torch.ones(70, 300)
    x[:, 3:10], x[0, 64], x[69, 150], x[2, 299], x[3, 64:128] = torch.inf, 5.0, -6.0, 7.0, torch.nan
    launch, parts = quantize.plan_largest(x.t(), replace(v.machine, programs=1))
    in_parts = [x[:, i : i + 64] for i in range(0, 300, 64)]
    of_parts = torch.stack([each[each.isfinite()].abs().max() for each in in_parts])
    return Local(launch, [parts], [torch.stack([of_parts[n::4].max() for n in range(4)])])


# -- plans of experts --------------------------------------------------------------------------------------------------


def _sort(v: Variant) -> Local:
    """In blocks of 16; some choices are dropped."""
    ids = torch.randint(-1, 6, (13, 3), generator=torch.Generator().manual_seed(0))
    launch, *outs = plan.plan_sort(ids, 6, 16)
    return Local(launch, outs, plan.sorted_words(ids, 6))


def _index(v: Variant) -> Local:
    """On the second of three ranks, with a capacity of two rows less than needed."""
    table = torch.randint(0, 20, (3, 9), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    room = int(table[:, 3:6].sum()) - 2
    at = plan.Exchange("", 1, (20, 20, 20), 9, 3, room, "triton", bound=room)
    index = torch.empty(plan.index_size(at), dtype=torch.int32)
    launch, made = plan.plan_index(table, index, at, 16)
    parts = plan.unpacked(plan.index_formula(table, torch.zeros(60, dtype=torch.int64), at), at)
    names, lengths = [name for name in parts._fields if name != "places"], plan.index_lengths(at)
    pairs = [(getattr(made, name)[:n], getattr(parts, name)[:n]) for name, n in zip(names, lengths)]  # without padding
    outs, wanted = zip(*pairs)
    return Local(launch, outs, [each.masked_fill(each == plan.UNDEFINED, UNWRITTEN) for each in wanted])


def _window(v: Variant) -> Local:
    """On the second of three ranks, in the second of several rounds; some choices are dropped."""
    generator = torch.Generator().manual_seed(0)
    at = plan.Exchange("", 1, (30, 25, 20), 9, 2, 17, "local", bound=17)
    likes = torch.rand(75, 9, generator=generator) + torch.tensor([0.9, 0.0, 0.6, 0.0, 0.8, 0.4, 0.0, 0.2, 0.0])
    ids = torch.where(torch.rand(75, 2, generator=generator) < 0.1, -1, likes.topk(2).indices)
    sorted_ = [plan.sort_choices(each, 9) for each in ids.split(list(at.sizes))]
    table, orders = torch.stack([counts for counts, _ in sorted_]), torch.cat([order for _, order in sorted_])
    given = plan.RoutingPlan(table, orders, orders.new_empty(0))
    launch, made = rounds.plan_window(given, 1, at, 16)
    wanted = rounds.Windows(given, at).plan(1, at)
    moved = wanted.table.view(3, 3, 3).sum(2)
    read = torch.full_like(orders, UNWRITTEN)
    for source in range(3):
        first, last = (0, 3) if source == at.rank else (at.rank, at.rank + 1)
        begin = at.choices_of(source).start
        part = slice(begin + int(moved[source, :first].sum()), begin + int(moved[source, :last].sum()))
        read[part] = wanted.orders[part]
    own = plan.places_of(wanted.orders[at.choices_of(at.rank)]).int()
    own[own >= moved[at.rank].sum()] = own.shape[0]
    places = plan.unpacked(made.packed, at).places[: own.shape[0]]
    return Local(launch, [made.table, made.orders, places], [wanted.table, read, own])


# -- cases -------------------------------------------------------------------------------------------------------------

HELD, WIDER = (70, 40), (5, 9000)  # rows and width of a norm: a row fits in a program, or does not
PRODUCTS = ("matmul", "grouped_matmul", "grouped_gated", "grouped_wgrad")
KERNELS: dict[str, Callable[[Variant], Local]] = {
    "matmul": _matmul,
    **{name: partial(_grouped, name) for name in PRODUCTS[1:]},
    "grouped_gated_backward": partial(_swiglu_backward, grouped_rows=True),
    "rms_norm": lambda v: _norm(v, *HELD),
    "rms_norm_wide": lambda v: _norm(v, *WIDER),
    "rms_norm_backward": lambda v: _norm_backward(v, *HELD),
    "rms_norm_wide_backward": lambda v: _norm_backward(v, *WIDER),
    "swiglu": _swiglu,
    "swiglu_backward": _swiglu_backward,
    "rope": _rope,
    **{name: partial(_logits, name) for name in ("logit_stats", "logit_gradient")},
    "moe_sort": _sort,
    "moe_index": _index,
    "moe_window": _window,
    "largest": _largest,
    "quantize": _quantize,
    **{name: partial(_pack, name) for name in ("pack", "unpack")},
}
OF_INTEGERS = ("moe_sort", "moe_index", "moe_window")
MAKES_FP8 = ("quantize", "pack", "unpack")  # from fp32 here; for targets with fp8


def variants(name: str, machine: Machine) -> list[Variant]:
    """The variants that launchers choose on this machine: TMA and pointers, each element width."""
    chosen: list[tuple[Any, ...]]
    if name == "quantize":
        chosen = [(40, F32), (70, F32), (71, F32)]
    elif name in ("pack", "unpack"):
        chosen = [(1100, F32), (1152, F32)]
    elif name in PRODUCTS:  # aligned with more steps than stages; unaligned
        deep = 8 if name == "grouped_wgrad" else 104  # on sm_90, the K of wgrad ends in the other half of a tile
        chosen = [(56 if name == "matmul" else 20, F32), (deep, F16), (41, BF16)]
        chosen += [(104, F16, True)] if name in ("grouped_matmul", "grouped_gated") else []
        chosen += [(104, E4M3), (112, E4M3)] if name == "matmul" and machine.capability >= 89 else []
    elif name in (*OF_INTEGERS, "largest"):
        chosen = [(0, F32)]
    else:
        chosen = [(0, F32), (0, BF16)] if "wide" in name else [(0, F32), (0, F16), (0, BF16)]
    fits = machine.capability >= 89 or name not in MAKES_FP8
    return [Variant(machine, *each) for each in chosen if fits]


def local_case(name: str, *chosen: Variant) -> Case:
    """Launches of the kernel in these variants, one after another, on one rank."""

    def make() -> Run:
        made = [KERNELS[name](variant) for variant in chosen]
        for each in made:
            for out in each.outs:
                out.fill_(torch.nan if out.is_floating_point() else UNWRITTEN)
        work = [Launch(m.launch.kernel, m.launch.programs, m.launch.args, options=m.launch.options) for m in made]
        return Run([work], check=lambda: [wrong for each in made for wrong in mismatches(each)])

    return Case(name, make)


def mismatches(made: Local) -> list[Mismatch]:
    """Compares the outputs with the expected ones."""
    found = []
    for n, (out, want) in enumerate(zip(made.outs, made.wanted, strict=True)):
        want = want.to(out.dtype)
        found += compare(f"output {n}", [out], [want if made.exact else _rounded(out, want)])
    return found


def _rounded(got: Tensor, want: Tensor) -> Tensor:
    """`want`, with elements replaced by `got` if they differ only by rounding, in fp32 and to a narrower dtype."""
    computed = ROUNDINGS * torch.finfo(F32).eps
    own = computed if got.dtype == F32 else torch.finfo(got.dtype).eps
    of_terms = computed * float(want.nan_to_num().abs().max())
    return torch.where(torch.isclose(got, want, rtol=own, atol=of_terms), got, want)


def local_cases(target: str) -> list[Case]:
    """Every single-rank kernel that this target supports, in all its variants."""
    chosen = {name: variants(name, gpu(target)) for name in KERNELS}
    return [local_case(name, *each) for name, each in chosen.items() if each]
