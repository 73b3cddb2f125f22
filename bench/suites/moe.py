"""A layer of experts split over ranks, forward and backward: dispatch, experts, combine, against all_to_all with torch.

Tokens choose `top_k` different experts: "balanced" all with equal chance, "skewed" expert e with a chance like
1 / (1 + e). Gradients reach x, the weights and all of the experts' parameters; the router is not in it. `peak` is the
largest memory a rank held during a call beyond what it held before, and stands beside tokens x k x dim of a rank.
By engine triton rows travel while matmuls run; "one by one" is the same layer without that, in four kernels forward,
and `gain` its time over that of the layer with overlap.
"experts alone" has its rows already, and nothing travels: no exchange, however fast, makes a layer faster than that.
On a CPU without 16-bit matmuls all of these multiply in fp32; "+ F.linear" leaves that to torch, which takes seconds
there, and so is measured in the first layer only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import fusedtp
from fusedtp.ops.moe import moe_dispatch_gated, moe_matmul_combine
from fusedtp.ops.rows import split

from .. import errors, memory, moe_by_hand
from ..by_hand import widens
from ..experts import SKEWS
from ..options import Plan
from ..rank import Rank
from ..rows import Row
from ..sample import Rotating, Way
from .common import drop_what_fails, rows_of

NAME, RANKS = "moe", "several"
ALONE = "experts alone"
ONE_BY_ONE = ", one by one"
TORCHS_OWN = " + F.linear"
SAMPLED = 32  # tokens of a rank that are held against fp64


@dataclass(frozen=True)
class Layer:
    """Sizes of a layer of experts."""

    name: str
    dim: int
    hidden: int
    experts: int
    top_k: int


# On a GPU DeepSeek-V3's widths and top-8, with 64 experts: that of a virtual world holds the experts of all ranks, and
# their gradients, 11 GB instead of 45 GB with 256. Rows that travel are as many.
# On a CPU three widths: hidden / dim as Qwen3-Next-80B-A3B and Qwen3.5-35B-A3B have it (512 / 2048, defaults of their
# configurations in transformers), where moving rows weighs most; as Qwen3-30B-A3B has it (../experts.py: 768 / 2048);
# and experts as wide as the model, which matmuls fill.
LAYERS = {
    "cuda": (Layer("dim-7168", 7168, 2048, 64, 8),),
    "cpu": tuple(Layer(f"dim-512-experts-{width}", 512, width, 16, 2) for width in (128, 192, 512)),
}
TINY = Layer("tiny", 32, 24, 4, 2)


@dataclass(frozen=True)
class Case:
    """T tokens of all ranks through one layer."""

    layer: Layer
    skew: str
    tokens: int
    tp: int
    dtype: str

    @property
    def shape(self) -> dict[str, int | str]:
        layer = self.layer
        return {
            "layer": layer.name, "skew": self.skew, "T": self.tokens, "H": layer.dim, "F": layer.hidden,
            "E": layer.experts, "k": layer.top_k, "tp": self.tp,
        }  # fmt: skip

    @property
    def label(self) -> str:
        return f"{self.layer.name} {self.skew} T={self.tokens} tp={self.tp} {self.dtype}"

    @property
    def flops(self) -> float:
        """Of all ranks, forward and both gradients of three matmuls."""
        return 3 * 6.0 * self.tokens * self.layer.top_k * self.layer.dim * self.layer.hidden


def cases(plan: Plan, tp: int) -> list[Case]:
    """The layers of this device, whatever --shapes says, in two ways of choosing."""
    layers = (TINY,) if plan.smoke else LAYERS[plan.device]
    for layer in layers:
        if layer.experts % tp:
            raise ValueError(f"{NAME} wants ranks that divide {layer.experts} experts, not {tp}")
    return [
        Case(layer, skew, tokens, tp, dtype)
        for layer in layers
        for tokens in sorted(plan.tokens)
        for dtype in plan.dtypes
        for skew in SKEWS
    ]


def chosen(case: Case, rows: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(expert_ids [rows, k], weights [rows, k] that sum to one)."""
    generator = torch.Generator().manual_seed(seed)
    count = case.layer.experts
    chance = torch.ones(count) if case.skew == "balanced" else 1 / (1.0 + torch.arange(count))
    ids = torch.multinomial(chance.expand(rows, count), case.layer.top_k, generator=generator)
    weights = torch.rand(rows, case.layer.top_k, generator=generator)
    return ids.to(device), (weights / weights.sum(1, keepdim=True)).to(device)


def measure(rank: Rank, case: Case) -> list[Row]:
    """Rows of one case. Collective."""
    layer, sizes = case.layer, split(case.tokens, case.tp)
    here, mine = layer.experts // case.tp, sizes[rank.rank]
    dtype = getattr(torch, case.dtype)

    def weight(of: int, which: int, out: int, width: int) -> Tensor:
        """Of all experts of rank `of`."""
        generator = torch.Generator().manual_seed(1000 * which + of)
        drawn = torch.randn(here, out, width, generator=generator) * width**-0.5
        return drawn.to(rank.device, dtype)

    def experts_of(of: int) -> list[Tensor]:
        sides = ((layer.hidden, layer.dim), (layer.hidden, layer.dim), (layer.dim, layer.hidden))
        return [weight(of, which, *side) for which, side in enumerate(sides)]

    own = [w.requires_grad_() for w in experts_of(rank.rank)]

    def operands(seed: int) -> tuple[Any, ...]:
        ids, weights = chosen(case, mine, 100 * seed + rank.rank, rank.device)
        x = rank.randn(mine, layer.dim, dtype=case.dtype, seed=seed)
        return x.requires_grad_(), ids, weights.requires_grad_()

    def ours(engine: str, overlapped: bool = True) -> Callable[..., Tensor]:
        how: dict[str, Any] = dict(sizes=sizes, engine=engine)

        def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            hidden, _, handle = moe_dispatch_gated(
                x, ids, weights, own[0], own[1], layer.experts, rank.group, **how
            )
            return moe_matmul_combine(hidden, own[2], handle)

        def one_by_one(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            rows, offsets, handle = fusedtp.moe_dispatch(x, ids, weights, layer.experts, rank.group, **how)
            hidden = fusedtp.grouped_gated(rows, own[0], own[1], offsets)
            return fusedtp.moe_combine(fusedtp.grouped_matmul(hidden, own[2], offsets), handle)

        return run if overlapped else one_by_one

    def arrived(x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, offsets) of this rank's experts, by the engine that `auto` takes."""
        rows, offsets, _ = fusedtp.moe_dispatch(x, ids, weights, layer.experts, rank.group, sizes=sizes)
        return rows.detach().requires_grad_(), offsets

    functions: dict[str, Callable[..., Tensor]] = {}
    absent: dict[str, str] = {}
    by_hand = f"{'nccl' if rank.device.type == 'cuda' else 'gloo'} all_to_all + torch"
    if isinstance(rank.group, dist.ProcessGroup):
        functions[by_hand] = lambda x, ids, weights: moe_by_hand.layer(x, ids, weights, own, rank.group)
        if rank.device.type == "cpu" and widens(dtype) and layer in (TINY, LAYERS["cpu"][0]):
            functions[by_hand + TORCHS_OWN] = lambda x, ids, weights: moe_by_hand.layer(
                x, ids, weights, own, rank.group, F.linear
            )
    else:
        absent[by_hand] = "a virtual world has no process group"
    for engine in rank.plan.engines:
        if engine == "triton-copy" or (engine == "chunked" and rank.device.type == "cuda"):
            continue  # of a gather alone; of a CPU alone
        if engine == "triton" and rank.device.type == "cpu":
            absent["fusedtp triton"] = "engine triton is interpreted on a CPU: its time says nothing"
            continue
        functions[f"fusedtp {engine}"] = ours(engine)
        if engine == "triton":
            functions["fusedtp triton" + ONE_BY_ONE] = ours(engine, overlapped=False)
    sets = rank.copies(operands)
    ways: dict[str, Way] = {name: Rotating(_both(fn, own), sets) for name, fn in functions.items()}
    ways[ALONE] = _Alone(own, partial(arrived, *sets[0]))
    drop_what_fails(rank, ways, dict.fromkeys(ways), absent)
    functions = {name: fn for name, fn in functions.items() if name in ways}
    some = slice(0, min(SAMPLED, mine))
    x, ids, weights = (t.detach()[some].cpu() for t in sets[0])
    every = [
        expert for of in range(case.tp) for expert in zip(*(w.cpu() for w in experts_of(of)), strict=True)
    ]
    want = moe_by_hand.reference(x, ids, weights, every)
    # Two matmuls and their product round, then each choice and their sum; fp32 sums have as many terms as a row.
    allowed = (4 + layer.top_k) * errors.unit(dtype) + 2 * max(layer.dim, layer.hidden) * errors.unit(
        torch.float32
    )
    allowed *= max(1.0, float(want.abs().max())) if len(want) else 1.0
    found: dict[str, dict[str, Any]] = {}
    for name, fn in functions.items():
        y = fn(*sets[0])[some].detach().double().cpu()
        off = float((y - want).abs().max()) if len(want) else 0.0
        found[name] = {
            "error": errors.Error(*rank.worst(off, off / allowed)),
            "peak_bytes": memory.peak_bytes(rank, ways[name]),
        }
    rows = rows_of(rank, NAME, case, ways, found, absent, flops=case.flops, roof=rank.roofs[case.dtype])
    return with_gain(rows)


def with_gain(rows: list[Row]) -> list[Row]:
    """The same, the time of each engine's layer one by one entered in the row of its layer with overlap."""
    apart = {row.engine: row.seconds.median for row in rows if row.seconds is not None}
    return [replace(row, t_apart=apart.get(row.engine + ONE_BY_ONE)) for row in rows]


class _Alone:
    """The experts' matmuls, forward and backward, of rows that the first call brings: more than any cache holds."""

    def __init__(self, own: list[Tensor], bring: Callable[[], tuple[Tensor, Tensor]]) -> None:
        self.own, self.bring = own, bring
        self.brought: tuple[Tensor, Tensor] | None = None

    def __call__(self) -> object:
        self.brought = rows, offsets = self.brought or self.bring()
        hidden = fusedtp.grouped_gated(rows, self.own[0], self.own[1], offsets)
        y = fusedtp.grouped_matmul(hidden, self.own[2], offsets)
        return torch.autograd.grad(y, [rows, *self.own], y.detach())


def _both(fn: Callable[..., Tensor], own: list[Tensor]) -> Callable[..., object]:
    def run(x: Tensor, ids: Tensor, weights: Tensor) -> object:
        y = fn(x, ids, weights)
        return torch.autograd.grad(y, [x, weights, *own], y.detach())

    return run
