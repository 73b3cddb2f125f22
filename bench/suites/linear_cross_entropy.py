"""The output head and its cross-entropy, forward and backward, without [T, V] logits; speed and peak memory.

    one rank        x [T, K], w [V, K]: against torch with all logits, compiled and not, and Liger-Kernel
    several ranks   x [T_r, K], w [V_r, K], V split over ranks as torch.chunk does: against all logits [T, V_r] made
                    by the group's collectives and torch's operations, see `Unfused`

Flops are those of three matmuls of T x K x V, of all ranks: logits, dx, dw.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from fusedtp.nn.linear_loss import linear_cross_entropy
from fusedtp.ops.rows import Rows, split
from fusedtp.ops.shards import gather_rows

from .. import baselines, errors
from ..memory import peak_bytes
from ..options import Plan
from ..rank import Rank
from ..rows import Row
from ..sample import Rotating, Way
from .common import OfModel, drop_what_fails, even, matmul, model_cases, offer, rows_of

NAME, RANKS = "linear-cross-entropy", "any"


@dataclass(frozen=True)
class Case(OfModel):
    """Rows of x over all ranks, each of which has a part of the model's vocabulary."""

    @property
    def k(self) -> int:
        return self.sizes.hidden

    @property
    def vocab(self) -> int:
        return self.sizes.vocab

    @property
    def shape(self) -> dict[str, int | str]:
        return {"model": self.model, "T": self.tokens, "K": self.k, "V": self.vocab, "tp": self.tp}


def cases(plan: Plan, tp: int) -> list[Case]:
    """Every model. Raises ValueError for tokens that do not split evenly."""
    return even(model_cases(Case, plan, tp), NAME)


def plain(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    """All logits, then the loss."""
    return F.cross_entropy((x @ w.t()).float(), labels)


class Unfused(Function):
    """x [T_r, K], w [V_r, K], labels [T] -> the mean loss, by collectives and torch's operations one after another.

    forward    x of all ranks; all logits; their maximum, and then sums of exponentials and labels' logits, over ranks
    backward   softmax - onehot in the dtype; dw; dx, summed over ranks
    Source: Shoeybi et al. 2019, section 3.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, labels: Tensor, start: int, hand: Any) -> Tensor:
        full = hand.gather(x)
        logits = matmul(full, w).float()
        top = logits.max(1).values
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=hand.group)
        logits -= top[:, None]
        here = (labels >= start) & (labels < start + w.shape[0])
        column = (labels - start).where(here, 0)
        target = logits.gather(1, column[:, None])[:, 0] * here
        sums = torch.stack([logits.exp_().sum(1), target])
        dist.all_reduce(sums, group=hand.group)
        ctx.save_for_backward(logits, sums[0], column, here, full, w)
        ctx.hand = hand
        return (sums[0].log() - sums[1]).mean()

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Any, ...]:
        exponentials, total, column, here, full, w = ctx.saved_tensors
        gradient = exponentials.div_(total[:, None])
        gradient.scatter_add_(1, column[:, None], -here.to(gradient.dtype)[:, None])
        gradient = gradient.mul_(dloss / len(here)).to(w.dtype)
        dx = ctx.hand.reduce_scatter(matmul(gradient, w.t()))
        return dx, matmul(gradient.t(), full.t()), None, None, None


def exact(rank: Rank, rows: Rows, start: int, x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    """In fp64, some rows at a time. Collective."""
    comm, weight = rank.comm, w.detach().double()
    full = x.detach() if comm is None else gather_rows(comm, x.detach(), rows)
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for some, wanted in zip(full.split(1024), labels.split(1024)):
        logits = some.double() @ weight.t()
        here = (wanted >= start) & (wanted < start + w.shape[0])
        target = logits.gather(1, (wanted - start).where(here, 0)[:, None])[:, 0] * here
        stats = torch.stack([logits.logsumexp(1), target], 1)
        if comm is not None:
            stats = comm.all_gather(stats, (len(some),) * comm.world_size)
        stats = stats.view(-1, len(some), 2)
        total += (stats[..., 0].logsumexp(0) - stats[..., 1].sum(0)).sum()
    return total / len(labels)


def measure(rank: Rank, case: Case) -> list[Row]:
    """Rows of one case. Collective."""
    rows, vocab = Rows(split(case.tokens, rank.world_size)), split(case.vocab, rank.world_size)
    start, mine = sum(vocab[: rank.rank]), vocab[rank.rank]

    def operands(seed: int) -> tuple[Tensor, ...]:
        x = rank.randn(rows.local(rank.rank), case.k, dtype=case.dtype, seed=2 * seed)
        w = rank.randn(mine, case.k, dtype=case.dtype, seed=2 * seed + 1, scale=case.k**-0.5)
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(case.vocab, (case.tokens,), generator=generator)
        return x.requires_grad_(), w.requires_grad_(), labels.to(rank.device)

    functions: dict[str, Callable[..., Tensor]] = {}
    absent: dict[str, str] = {}
    if rank.comm is None:
        functions |= {"torch": plain, "fusedtp": linear_cross_entropy}
        compiled = baselines.compiled(plain, rank.device, rank.plan.compile)
        offer(functions, absent, "torch.compile", compiled)
        offer(functions, absent, "Liger-Kernel", liger(rank.device))
    else:
        group, name = rank.group, f"{baselines.collective_name(rank.device)} + torch"
        hand, why = baselines.by_hand(group, rank.device)
        offer(functions, absent, name, (_unfused(hand, start) if hand is not None else None, why))
        functions["fusedtp"] = lambda x, w, labels: linear_cross_entropy(
            x, w, labels, group, sizes=rows.sizes, vocab_size=case.vocab
        )
    sets = rank.copies(operands)
    want = exact(rank, rows, start, *sets[0])
    ways: dict[str, Way] = {name: Rotating(_both(fn), sets) for name, fn in functions.items()}
    drop_what_fails(rank, ways, functions, absent)
    # A logit, a sum of K products of size K^-1/2 each, is rounded once; the loss is at most as far off as logits.
    allowed = 4 * (errors.unit(sets[0][0].dtype) + (case.k + case.vocab) * errors.unit(torch.float32))
    found: dict[str, dict[str, Any]] = {}
    for name, fn in functions.items():
        # With gradients, as it was compiled.
        off = float((fn(*sets[0]).detach().double() - want).abs())
        error = errors.Error(*rank.worst(off, off / (allowed * max(1.0, float(want)))))
        found[name] = {"error": error, "peak_bytes": peak_bytes(rank, ways[name])}
    flops = 6.0 * case.tokens * case.k * case.vocab
    return rows_of(rank, NAME, case, ways, found, absent, flops=flops, roof=rank.roofs[case.dtype])


def _unfused(hand: Any, start: int) -> Callable[..., Tensor]:
    def loss(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
        y: Tensor = Unfused.apply(x, w, labels, start, hand)
        return y

    return loss


def liger(device: torch.device) -> baselines.Found:
    """Liger-Kernel's, with its defaults."""
    function, why = baselines.liger(
        "fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction", device
    )
    if function is None:
        return None, why

    def loss(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
        made: Any = function.apply(x, w, labels)
        y: Tensor = made[0] if isinstance(made, tuple) else made
        return y

    return loss, ""


def _both(fn: Callable[..., Tensor]) -> Callable[..., object]:
    return lambda x, w, labels: torch.autograd.grad(fn(x, w, labels), [x, w])
