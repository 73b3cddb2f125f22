"""MoE suites: grouped matmuls, dispatch and combine, and the whole layer.

grouped-matmul   rows times the weights of their experts, against torch's grouped_mm; one device, with the work of one
                 of `--tp` expert-parallel ranks: E / tp experts and T k / tp rows

    up     rows [R, hidden]         weights [E, 2 x intermediate, hidden], gate and up in one
    down   rows [R, intermediate]   weights [E, hidden, intermediate]
    fwd, dgrad, wgrad               y = rows @ w[e].T;  drows = dy @ w[e];  dw[e] = dy[rows of e].T @ rows[rows of e]

                 Uses all MoE models of shapes.py, regardless of --shapes; on a CPU those with weights below CPU_BYTES

moe-exchange     dispatch and combine alone, forward: rows to the experts' ranks and back, without a matmul. Bytes are
                 the payload, read once and written once: T k rows there, T k rows back. The roof is a copy by all
                 ranks at once in the same run, so a share of one means that the exchange takes no longer than copying
                 its rows in place. The time includes work that is not in the bytes: for a dispatch, one copy of the
                 tokens to where peers read them, the routing weights, and the plan, which sorts the choices and
                 exchanges their counts; for a combine, a second pass over its rows, which are summed from the slot

moe              a layer split over ranks, forward and backward: dispatch, experts, combine, against all_to_all with
                 torch. Tokens choose `top_k` different experts: "balanced" with equal probability, "skewed" expert e
                 with probability proportional to 1 / (1 + e). Gradients reach x, the weights and all parameters of the
                 experts; the router is not included. `peak` is the largest memory that a rank allocates during a call,
                 to compare with tokens x k x dim of a rank. Engine triton overlaps the exchange with the matmuls; "one
                 by one" is the same layer without overlap, in four kernels forward, and `gain` is its time over that
                 with overlap. "experts alone" already has its rows and sends nothing: a lower bound for any exchange.
                 On a CPU without 16-bit matmuls all of these multiply in fp32; "+ F.linear" leaves that to torch,
                 which takes seconds there, so it is measured in the first layer only
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import fusedtp
from fusedtp.nn.linear import linears
from fusedtp.ops.moe import MoEHandle, moe_dispatch_gated, moe_matmul_combine
from fusedtp.ops.moe import grouped as engines
from fusedtp.ops.rows import split

from .. import errors
from ..cases import Case
from ..options import Plan
from ..rank import Rank
from ..rivals import matmul, widens
from ..rows import Row
from ..shapes import EXPERTS, SKEWS, TINY_EXPERTS, shared_out
from ..ways import INTERPRETED, Ways

CPU_BYTES = 1 << 28
DIRECTIONS = ("fwd", "dgrad", "wgrad")
ALONE = "experts alone"
ONE_BY_ONE = ", one by one"
TORCHS_OWN = " + F.linear"
SAMPLED = {"cuda": 2, "cpu": 32}  # tokens per rank that are compared with fp64


# -- grouped-matmul --------------------------------------------------------------------------------------------------


def grouped_cases(plan: Plan, tp: int) -> list[Case]:
    """Both matmuls of every model's experts on one of `tp` ranks, in each direction; small sizes first."""
    models = [each for each in ((TINY_EXPERTS,) if plan.smoke else EXPERTS) if each.experts % tp == 0]
    found = []
    for tokens in sorted(plan.tokens):
        for model in models:
            for layer in ("up",) if plan.smoke else ("up", "down"):
                k, n = model.hidden, 2 * model.intermediate
                if layer == "down":
                    k, n = model.intermediate, model.hidden
                for direction in DIRECTIONS:
                    for skew in SKEWS:
                        names: dict[str, int | str] = dict(
                            model=model.name, layer=layer, direction=direction, skew=skew, T=tokens,
                            E=model.experts // tp, R=tokens * model.top_k // tp, K=k, N=n, tp=tp,
                        )  # fmt: skip
                        found += [
                            Case("grouped_matmul", dtype, tokens, k, n, names=tuple(names.items()), model=model)
                            for dtype in plan.dtypes
                        ]
    return [
        case
        for case in found
        if plan.device == "cuda" or int(case.shape["E"]) * case.n * case.k * case.itemsize <= CPU_BYTES
    ]


def measure_grouped(rank: Rank, case: Case) -> list[Row]:
    """Result rows of one case."""
    rows, experts = int(case.shape["R"]), int(case.shape["E"])
    bounds = [0, *accumulate(shared_out(rows, experts, str(case.shape["skew"])))]
    offsets = torch.tensor(bounds, dtype=torch.int32, device=rank.device)
    direction = str(case.shape["direction"])

    def operands(seed: int) -> tuple[Tensor, ...]:
        def draw(which: int, *shape: int, scale: float = 1.0) -> Tensor:
            return rank.randn(*shape, dtype=case.dtype, seed=3 * seed + which, scale=scale)

        x, dy = (lambda: draw(0, rows, case.k)), (lambda: draw(1, rows, case.n))
        if direction == "wgrad":
            return dy(), x()
        w = draw(2, experts, case.n, case.k, scale=(case.n if direction == "dgrad" else case.k) ** -0.5)
        return (x(), w) if direction == "fwd" else (dy(), w.mT)

    ways = Ways(rank, "grouped-matmul", case)
    if rank.device.type == "cpu":
        ways.add("loop of torch.matmul", loop(direction, bounds))
        ways.add("fusedtp chunked", ours(direction, offsets, "chunked"))
        ways.add("fusedtp triton", None, INTERPRETED)
    else:
        ways.add("torch grouped_mm", grouped_mm(direction, offsets))
        ways.add("fusedtp triton", ours(direction, offsets, "triton"))
    sets = rank.copies(operands)
    with torch.no_grad():
        ways.prepare(sets)
        found = {
            name: {"error": grouped_error(direction, bounds, fn(*sets[0]), *sets[0])}
            for name, fn in ways.functions.items()
        }
        return ways.rows(found, flops=2.0 * rows * case.k * case.n, roof=rank.roofs[case.dtype])


def ours(direction: str, offsets: Tensor, engine: str) -> Callable[..., Tensor]:
    """The engine's matmul for the operands of this direction."""
    if direction == "wgrad":
        return lambda dy, x: engines.wgrad_engine(engine, [dy], x, offsets, x.dtype)[0]
    return lambda x, w: engines.matmul_engine(engine, [x], [w], offsets, None)


def grouped_mm(direction: str, offsets: Tensor) -> Callable[..., Tensor]:
    """torch's grouped_mm."""
    ends = offsets[1:]
    if direction == "wgrad":
        return lambda dy, x: F.grouped_mm(dy.t(), x, offs=ends)
    return lambda x, w: F.grouped_mm(x, w.mT, offs=ends)


def loop(direction: str, bounds: list[int]) -> Callable[..., Tensor]:
    """One torch.matmul per expert, as written by hand; 16 bits through fp32 on CPUs where that is faster."""
    groups = [slice(begin, end) for begin, end in pairwise(bounds)]
    if direction == "wgrad":
        return lambda dy, x: torch.stack([matmul(dy[rows].t(), x[rows].t()) for rows in groups])
    return lambda x, w: torch.cat([matmul(x[rows], w[e]) for e, rows in enumerate(groups)])


def grouped_error(direction: str, bounds: list[int], got: Tensor, a: Tensor, b: Tensor) -> errors.Error:
    """The error at sampled rows of y or drows, or of all experts' dw."""
    flat = got.flatten(0, -2)
    chosen = errors.sampled(len(flat)).tolist()
    worst = errors.Error(0.0, 0.0)
    for row in chosen:
        if direction == "wgrad":
            e, n = divmod(row, got.shape[1])
            rows = slice(bounds[e], bounds[e + 1])
            left, right = a[rows, n][None], b[rows].t()
        else:
            e = next(i for i, end in enumerate(bounds[1:]) if row < end)
            left, right = a[row][None], b[e]
        want = errors.product(left, right, torch.zeros(1, dtype=torch.int64))
        found = errors.compare(flat[row][None], want, left.shape[1])
        worst = errors.Error(*map(max, worst, found))
    return worst


# -- layers of experts -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """Sizes of a MoE layer."""

    name: str
    dim: int
    hidden: int
    experts: int
    top_k: int


# On a GPU: DeepSeek-V3's widths and top-8, with 64 experts. The GPU of a virtual world holds the experts of all ranks
# and their gradients: 11 GB instead of 45 GB with 256. The number of rows sent is the same.
# On a CPU three widths: hidden / dim of Qwen3-Next-80B-A3B and Qwen3.5-35B-A3B (512 / 2048, defaults of their
# configurations in transformers), where moving rows takes the largest share; that of Qwen3-30B-A3B (../shapes.py:
# 768 / 2048); and experts as wide as the model, where matmuls dominate.
LAYERS = {
    "cuda": (Layer("dim-7168", 7168, 2048, 64, 8),),
    "cpu": tuple(Layer(f"dim-512-experts-{width}", 512, width, 16, 2) for width in (128, 192, 512)),
}
TINY = Layer("tiny", 32, 24, 4, 2)


EXCHANGED = {"cuda": Layer("deepseek-v3", 7168, 0, 256, 8), "cpu": Layer("dim-512", 512, 0, 16, 2)}


def cases_of(suite: str, layers: Sequence[Layer], plan: Plan, tp: int, parts: Sequence[str]) -> list[Case]:
    """T tokens of all ranks through these layers, regardless of --shapes, with balanced and skewed routing."""
    for layer in layers:
        if layer.experts % tp:
            raise ValueError(f"{suite} needs a number of ranks that divides {layer.experts} experts, not {tp}")
    found = []
    for layer in layers:
        for tokens in sorted(plan.tokens):
            for dtype in plan.dtypes:
                for skew in SKEWS:
                    for part in parts:
                        names: dict[str, int | str] = {"op": part} if part else {}
                        names |= dict(layer=layer.name, skew=skew, T=tokens, H=layer.dim, F=layer.hidden)
                        names |= dict(E=layer.experts, k=layer.top_k, tp=tp)
                        if part:
                            del names["F"]
                        found.append(Case(part or suite, dtype, tokens, tp=tp, names=tuple(names.items()), model=layer))
    return found


def chosen(case: Case, rows: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(expert_ids [rows, k], weights [rows, k] that sum to one)."""
    generator = torch.Generator().manual_seed(seed)
    count = case.model.experts
    chance = torch.ones(count) if case.shape["skew"] == "balanced" else 1 / (1.0 + torch.arange(count))
    ids = torch.multinomial(chance.expand(rows, count), case.model.top_k, generator=generator)
    weights = torch.rand(rows, case.model.top_k, generator=generator)
    return ids.to(device), (weights / weights.sum(1, keepdim=True)).to(device)


# -- moe-exchange ----------------------------------------------------------------------------------------------------

Operands = tuple[Tensor, Tensor, Tensor, Tensor, MoEHandle]  # x, expert_ids, weights, rows, handle


def exchange_cases(plan: Plan, tp: int) -> list[Case]:
    """One layer for this device."""
    layer = TINY if plan.smoke else EXCHANGED[plan.device]
    return cases_of("moe-exchange", (layer,), plan, tp, ("dispatch", "combine"))


def measure_exchange(rank: Rank, case: Case) -> list[Row]:
    """Result rows of one case. Collective."""
    layer, sizes = case.model, split(case.tokens, case.tp)
    ways, inputs = Ways(rank, "moe-exchange", case), dict[str, list[Operands]]()

    def operands(engine: str, seed: int) -> Operands:
        ids, weights = chosen(case, sizes[rank.rank], 100 * seed + rank.rank, rank.device)
        x = rank.randn(sizes[rank.rank], layer.dim, dtype=case.dtype, seed=seed)
        rows, _, handle = dispatch(engine, x, ids, weights)
        return x, ids, weights, rows, handle

    def dispatch(engine: str, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, MoEHandle]:
        return fusedtp.moe_dispatch(x, ids, weights, layer.experts, rank.group, sizes=sizes, engine=engine)

    def function(engine: str) -> Callable[..., Tensor]:
        if case.operation == "combine":
            return lambda x, ids, weights, rows, handle: fusedtp.moe_combine(rows, handle)
        return lambda x, ids, weights, rows, handle: dispatch(engine, x, ids, weights)[0]

    on_cpu = rank.device.type == "cpu"
    for engine in rank.plan.engines:
        name = f"fusedtp {engine}"
        if engine == "triton" and on_cpu:
            ways.add(name, None, INTERPRETED)
        elif engine == "collective" or engine == ("chunked" if on_cpu else "triton"):
            ways.add(name, function(engine))
            inputs[name] = rank.copies(partial(operands, engine))
    ways.prepare(inputs)
    found = {
        name: {"error": exchange_error(rank, case, fn(*inputs[name][0]), inputs[name][0])}
        for name, fn in ways.functions.items()
    }
    payload = 2.0 * case.tokens * layer.top_k * layer.dim * case.itemsize  # read and written
    return ways.rows(found, moved_bytes=payload, roof=rank.roofs["copy"])


def exchange_error(rank: Rank, case: Case, result: Tensor, operands: Operands) -> errors.Error:
    """Identity experts and weights that sum to one must return the tokens, rounded once."""
    x, _ids, _weights, _rows, handle = operands
    y = result if case.operation == "combine" else fusedtp.moe_combine(result, handle)
    off = (y.double() - x.double()).abs()
    # Weights and sums are fp32: k roundings each.
    unit = errors.unit(x.dtype) + 2 * case.model.top_k * errors.unit(torch.float32)
    share = off / (unit * x.double().abs()).clamp(min=1e-30)
    largest, most = (float(t.max()) if len(x) else 0.0 for t in (off, share))
    return errors.Error(*rank.worst(largest, most))


# -- moe -------------------------------------------------------------------------------------------------------------


def moe_cases(plan: Plan, tp: int) -> list[Case]:
    """The layers of this device."""
    return cases_of("moe", (TINY,) if plan.smoke else LAYERS[plan.device], plan, tp, ("",))


def measure_moe(rank: Rank, case: Case) -> list[Row]:
    """Result rows of one case. Collective."""
    layer, sizes = case.model, split(case.tokens, case.tp)
    here, mine = layer.experts // case.tp, sizes[rank.rank]
    dtype = getattr(torch, case.dtype)

    sides = ((layer.hidden, layer.dim), (layer.hidden, layer.dim), (layer.dim, layer.hidden))

    def weight(expert: int, which: int) -> Tensor:
        """Gate, up or down of an expert, the same on every rank."""
        generator = torch.Generator(rank.device).manual_seed(3 * expert + which)
        drawn = torch.randn(sides[which], generator=generator, device=rank.device)
        return (drawn * sides[which][1] ** -0.5).to(dtype)

    first = rank.rank * here
    own = [torch.stack([weight(e, which) for e in range(first, first + here)]).requires_grad_() for which in range(3)]

    def operands(seed: int) -> tuple[Any, ...]:
        ids, weights = chosen(case, mine, 100 * seed + rank.rank, rank.device)
        x = rank.randn(mine, layer.dim, dtype=case.dtype, seed=seed)
        return x.requires_grad_(), ids, weights.requires_grad_()

    def ours(engine: str, overlapped: bool = True) -> Callable[..., Tensor]:
        how: dict[str, Any] = dict(sizes=sizes, engine=engine, max_rows=room)

        def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            hidden, _, handle = moe_dispatch_gated(x, ids, weights, own[0], own[1], layer.experts, rank.group, **how)
            return moe_matmul_combine(hidden, own[2], handle)

        def one_by_one(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            rows, offsets, handle = fusedtp.moe_dispatch(x, ids, weights, layer.experts, rank.group, **how)
            hidden = fusedtp.grouped_gated(rows, own[0], own[1], offsets)
            return fusedtp.moe_combine(fusedtp.grouped_matmul(hidden, own[2], offsets), handle)

        return run if overlapped else one_by_one

    def arrived(x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, offsets) of this rank's experts, by the engine that `auto` chooses."""
        rows, offsets, _ = fusedtp.moe_dispatch(x, ids, weights, layer.experts, rank.group, sizes=sizes, max_rows=room)
        return rows.detach().requires_grad_(), offsets

    sets = rank.copies(operands)
    room = rows_of_one_rank(rank, [ids for _, ids, _ in sets], here)
    ways = Ways(rank, "moe", case)
    by_hand = f"{'nccl' if rank.device.type == 'cuda' else 'gloo'} all_to_all + torch"
    if isinstance(rank.group, dist.ProcessGroup):
        ways.add(by_hand, lambda x, ids, weights: layer_by_hand(x, ids, weights, own, rank.group))
        if rank.device.type == "cpu" and widens(dtype) and layer in (TINY, LAYERS["cpu"][0]):
            torchs = F.linear
            ways.add(
                by_hand + TORCHS_OWN,
                lambda x, ids, weights: layer_by_hand(x, ids, weights, own, rank.group, torchs),
            )
    else:
        ways.add(by_hand, None, "a virtual world has no process group")
    for engine in rank.plan.engines:
        if engine in ("triton-copy", "multimem") or (engine == "chunked" and rank.device.type == "cuda"):
            continue  # triton-copy: gathers only; multimem: all-reduces only; chunked: CPU only
        if engine == "triton" and rank.device.type == "cpu":
            ways.add("fusedtp triton", None, INTERPRETED)
            continue
        ways.add(f"fusedtp {engine}", ours(engine))
        if engine == "triton":
            ways.add("fusedtp triton" + ONE_BY_ONE, ours(engine, overlapped=False))
    ways.add(ALONE, _Alone(own, partial(arrived, *sets[0])))
    ways.prepare({"": sets, ALONE: [()]}, lambda name, fn: fn if name == ALONE else _both(fn, own))
    some = slice(0, min(SAMPLED[rank.device.type], mine))
    x, ids, weights = (t.detach()[some].cpu() for t in sets[0])
    want = reference(x, ids, weights, lambda e: [weight(e, which) for which in range(3)])
    # Two matmuls and their product round, then each choice and the sum; fp32 sums have as many terms as a row.
    allowed = (4 + layer.top_k) * errors.unit(dtype) + 2 * max(layer.dim, layer.hidden) * errors.unit(torch.float32)
    allowed *= max(1.0, float(want.abs().max())) if len(want) else 1.0
    found: dict[str, dict[str, Any]] = {}
    for name, fn in ways.functions.items():
        if name == ALONE:
            continue
        y = fn(*sets[0])[some].detach().double().cpu()
        off = float((y - want).abs().max()) if len(want) else 0.0
        found[name] = {
            "error": errors.Error(*rank.worst(off, off / allowed)),
            "peak_bytes": errors.peak_bytes(rank, ways.timed[name]),
        }
    # All ranks: forward and both gradients of three matmuls.
    flops = 3 * 6.0 * case.tokens * layer.top_k * layer.dim * layer.hidden
    return with_gain(ways.rows(found, flops=flops, roof=rank.roofs[case.dtype]))


def rows_of_one_rank(rank: Rank, every: Sequence[Tensor], here: int) -> int:
    """The most rows that any rank receives with any of these choices. As `max_rows`, it keeps the buffers of all ranks
    of a virtual world small enough for one GPU; buffers for the worst case (one rank gets all rows) would not fit.
    """
    assert rank.comm is not None
    owners = [torch.bincount((ids // here).flatten(), minlength=rank.world_size) for ids in every]
    return int(rank.comm.all_reduce(torch.stack(owners)).max())


def with_gain(rows: list[Row]) -> list[Row]:
    """Adds the time of each engine's layer without overlap (`t_apart`) to the row of its layer with overlap."""
    apart = {row.engine: row.seconds.median for row in rows if row.seconds is not None}
    return [replace(row, t_apart=apart.get(row.engine + ONE_BY_ONE)) for row in rows]


class _Alone:
    """The experts' matmuls, forward and backward. The first call brings the rows, which exceed any cache."""

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


# -- by hand ---------------------------------------------------------------------------------------------------------

Linear = Callable[[Tensor, Tensor], Tensor]  # x [T, K], weight [N, K] -> [T, N]


class _AllToAll(torch.autograd.Function):
    """Rows sorted by destination rank -> rows sorted by source rank; backward the reverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.way = received, sent, group
        out = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        sent, received, group = ctx.way
        dx = dy.new_empty(sum(received), dy.shape[1])
        dist.all_to_all_single(dx, dy.contiguous(), received, sent, group=group)
        return dx, None, None, None


class _Permute(torch.autograd.Function):
    """x[order]; backward indexes with the inverse, while plain indexing would accumulate into a buffer of zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return dy.index_select(0, ctx.inverse), None, None


def linear(x: Tensor, w: Tensor) -> Tensor:
    """The linear of fusedtp's layers."""
    return linears(x, [w], [None])[0]


def layer_by_hand(
    x: Tensor, ids: Tensor, weights: Tensor, own: Sequence[Tensor], group: Any, by: Linear = linear
) -> Tensor:
    """A MoE layer written without a library: sort, all_to_all_single, a matmul per expert, and back.

    By default it uses the matmuls of fusedtp's single-device layers, so that the comparison covers the exchange and the
    sorting.

    x [T_r, H], ids and weights [T_r, k], gate and up [E_r, F, H] and down [E_r, H, F] of this rank -> [T_r, H]
    """
    world, here, k = dist.get_world_size(group), own[0].shape[0], ids.shape[1]
    order = ids.flatten().argsort(stable=True)
    counts = torch.bincount(ids.flatten(), minlength=world * here)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts, group=group)  # [W, E_r]: by source and local expert
    sent = counts.view(world, here).sum(1).tolist()
    received = theirs.view(world, here).sum(1).tolist()
    arrived = _AllToAll.apply(x[order // k], sent, received, group)
    by_expert = torch.arange(here).repeat(world).repeat_interleave(theirs).argsort(stable=True)
    back, places = _inverse(by_expert), _inverse(order)
    rows = _Permute.apply(arrived, by_expert, back).split(theirs.view(world, here).sum(0).tolist())
    outs = [_expert(by, part, *each) for part, *each in zip(rows, *own, strict=True)]
    returned = _AllToAll.apply(_Permute.apply(torch.cat(outs), back, by_expert), received, sent, group)
    parts = _Permute.apply(returned, places, order).view(*ids.shape, -1)
    return (parts * weights[..., None].to(parts.dtype)).sum(1)


def _inverse(order: Tensor) -> Tensor:
    """The inverse of a permutation."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    return inverse


def _expert(by: Linear, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return by(F.silu(by(x, gate)) * by(x, up), down)


def reference(x: Tensor, ids: Tensor, weights: Tensor, expert: Callable[[int], Sequence[Tensor]]) -> Tensor:
    """The layer in fp64 for a few tokens x [n, H], expert by expert; expert(e) returns its gate, up and down."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for e in ids.unique().tolist():
        gate, up, down = (w.cpu().double() for w in expert(e))
        token, choice = (ids == e).nonzero(as_tuple=True)
        h = x[token].double()
        y = (F.silu(h @ gate.t()) * (h @ up.t())) @ down.t()
        out.index_add_(0, token, y * weights[token, choice, None].double())
    return out
