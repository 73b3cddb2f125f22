"""One rank's part of a drawn dispatch and combine, and its laws; these functions run in the workers of a world.

The oracle is a loop over tokens and choices on one process. Entries are small integers and weights are powers of two,
so no sum rounds and results are equal bit for bit. Undefined data is NaN: rows past the last expert's, weights of
dropped choices, and tokens, with their gradients, if all of their choices were dropped.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import fusedtp
from fusedtp.comm import communicator
from tests.properties.laws import assert_same, poison

SKEWS = ("uniform", "skewed", "one")


@dataclass(frozen=True)
class Case:
    """One exchange: each rank's tokens, experts, choices per token, width, dtype, skew, share of dropped choices."""

    engine: str
    sizes: tuple[int, ...]
    num_experts: int
    top_k: int
    width: int
    dtype: torch.dtype
    skew: str
    dropped: float
    seed: int
    room: int | None = None  # None: enough for any routing; else the spare rows beyond what this routing needs
    device: str = "cpu"

    @property
    def most(self) -> int:
        """The largest entry: a sum has top_k products, each with a weight and an expert factor of at most 2."""
        return 3


@dataclass
class Data:
    """The data of all ranks, the same on every rank. Expert e multiplies by factors[e]."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    factors: Tensor
    gradients: Tensor


def build(case: Case) -> Data:
    g = torch.Generator().manual_seed(case.seed)
    tokens, k, n = sum(case.sizes), case.top_k, case.num_experts
    whole = lambda *shape: torch.randint(-case.most, case.most + 1, shape, generator=g).to(case.dtype)  # noqa: E731
    scores = torch.rand(tokens, n, generator=g)
    if case.skew != "uniform":
        scores[:, : max(1, n // 4)] += 0.5 if case.skew == "skewed" else 1.0
    ids = scores.argsort(1, descending=True)[:, :k]
    ids = torch.where(torch.rand(tokens, k, generator=g) < case.dropped, -1, ids)
    weights = 2.0 ** torch.randint(-1, 2, (tokens, k), generator=g)
    factors = torch.randint(1, 3, (n,), generator=g).to(case.dtype)
    alone = (ids < 0).all(1, keepdim=True)
    x, gradients = (whole(tokens, case.width).masked_fill(alone, torch.nan) for _ in range(2))
    return Data(x, ids, weights.masked_fill(ids < 0, torch.nan), factors, gradients)


def mine(case: Case, rank: int) -> slice:
    begin = sum(case.sizes[:rank])
    return slice(begin, begin + case.sizes[rank])


def rows_wanted(case: Case, data: Data, rank: int) -> tuple[Tensor, Tensor]:
    """The expected rows of this rank's experts and where each expert begins, by the definition."""
    each = case.num_experts // len(case.sizes)
    rows, offsets = [], [0]
    for e in range(rank * each, (rank + 1) * each):
        rows += [data.x[t] for t in range(sum(case.sizes)) if e in data.ids[t].tolist()]
        offsets.append(len(rows))
    return torch.stack(rows) if rows else data.x[:0], torch.tensor(offsets, dtype=torch.int32)


def wanted(case: Case, data: Data) -> tuple[Tensor, Tensor, Tensor]:
    """The expected (out, dx, dweights) of all tokens, by the definition."""
    x, dy, weights = (t.double().nan_to_num(0.0) for t in (data.x, data.gradients, data.weights))
    kept = data.ids >= 0
    factors = torch.where(kept, data.factors.double()[data.ids.clamp(min=0)], 0.0)
    times = (factors * weights).sum(1, keepdim=True)
    return x * times, dy * times, factors * (x * dy).sum(1, keepdim=True)


def room_of(case: Case, data: Data) -> int | None:
    if case.room is None:
        return None
    each = case.num_experts // len(case.sizes)
    owners = torch.where(data.ids >= 0, data.ids // each, len(case.sizes)).flatten()
    return int(torch.bincount(owners, minlength=len(case.sizes) + 1)[:-1].max()) + case.room


def split_backward(
    layer: Callable[[], Tensor], x: Tensor, own: Sequence[nn.Parameter], between: Callable[[], None] = lambda: None
) -> None:
    """A backward in an input pass and a weight pass gives x and `own` the same gradients as a single backward.

    between   called before the input pass, between the two passes, and after the weight pass
    """
    leaves = [x, *own]
    layer().sum().backward()
    whole = [t.grad.clone() for t in leaves]
    for t in leaves:
        t.grad = None
    y = layer()
    between()
    (dx,), groups = stage_backward_input([y], [torch.ones_like(y)], [x], iter(own))
    between()
    stage_backward_weight(iter(own), groups)
    between()
    for i, (one, other) in enumerate(zip((dx, *(w.grad for w in own)), whole, strict=True)):
        assert_same(f"gradient {i}", one, other)


def conserves_rows(group, case: Case) -> None:
    """Rows arrive in the right place and order; combine gives the sum over choices; gradients match too."""
    rank, data = group.rank(), build(case)
    here = mine(case, rank)
    x, weights = (t[here].to(case.device, copy=True).requires_grad_() for t in (data.x, data.weights))
    communicator(group).engine_calls.clear()
    poison(group)
    rows, offsets, handle = fusedtp.moe_dispatch(
        x, data.ids[here].to(case.device), weights, case.num_experts, group, sizes=case.sizes, engine=case.engine,
        max_rows=room_of(case, data),
    )  # fmt: skip
    who = f"{case.engine} rank {rank}: "
    want_rows, want_offsets = rows_wanted(case, data, rank)
    assert_same(who + "offsets", offsets.cpu(), want_offsets)
    count = int(offsets[-1])
    assert_same(who + "rows", rows[:count].detach().cpu(), want_rows)
    if case.room is None and case.device == "cpu" and handle.at.engine != "triton":
        assert len(rows) == count, "on CPU there is room for what came"
    each = case.num_experts // len(case.sizes)
    factors = data.factors[rank * each : (rank + 1) * each].repeat_interleave(want_offsets.diff()).to(case.device)
    y = _Experts.apply(rows, factors)
    poison(group)
    out = fusedtp.moe_combine(y, handle)
    poison(group)
    out.backward(data.gradients[here].to(case.device))
    for name, got, want in zip(
        ("out", "dx", "dweights"), (out.detach(), x.grad, weights.grad), wanted(case, data), strict=True
    ):
        dtype = torch.float32 if name == "dweights" else case.dtype
        assert_same(who + name, got.cpu(), want[here].to(dtype))
    ran = {engine for _operation, engine in communicator(group).engine_calls}
    assert ran == {"local" if len(case.sizes) == 1 else case.engine} or case.engine == "auto", ran


class _Experts(torch.autograd.Function):
    """Each row times its expert's factor; NaN in rows of no expert, forward and backward."""

    @staticmethod
    def forward(ctx, rows: Tensor, factors: Tensor) -> Tensor:
        ctx.save_for_backward(factors)
        return _Experts._times(rows, factors)

    @staticmethod
    def backward(ctx, dy: Tensor):
        return _Experts._times(dy, *ctx.saved_tensors), None

    @staticmethod
    def _times(rows: Tensor, factors: Tensor) -> Tensor:
        out = torch.full_like(rows, float("nan"))
        n = factors.shape[0]
        out[:n] = rows[:n] * factors[:, None]
        return out
