"""The output head and its cross-entropy, forward and backward, without [T, V] logits; speed and peak memory.

Flops are those of three matmuls of T x K x V: logits, dx, dw. The plain way makes all logits at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedtp.nn.linear_loss import linear_cross_entropy

from .. import baselines, errors
from ..options import Plan
from ..ranks import Rank
from ..rows import Row
from ..sample import Rotating, Way
from ..shapes import MODELS
from .common import drop_what_fails, missing, row

NAME, RANKS = "linear-cross-entropy", "one"


@dataclass(frozen=True)
class Case:
    """x [T, K], w [V, K]: a rank's part of the vocabulary."""

    model: str
    tokens: int
    tp: int
    dtype: str

    @property
    def k(self) -> int:
        return MODELS[self.model].hidden

    @property
    def vocab(self) -> int:
        return -(-MODELS[self.model].vocab // self.tp)

    @property
    def shape(self) -> dict[str, int | str]:
        return {"model": self.model, "T": self.tokens, "K": self.k, "V": self.vocab, "tp": self.tp}

    @property
    def label(self) -> str:
        return " ".join(f"{value}" for value in (*self.shape.values(), self.dtype))


def cases(plan: Plan, tp: int) -> list[Case]:
    """Every model; its whole vocabulary and a rank's part of it are rows of different runs (--tp 1)."""
    return [
        Case(model, tokens, tp, dtype)
        for tokens in sorted(plan.tokens)
        for model in plan.shapes
        for dtype in plan.dtypes
        if model in MODELS
    ]


def plain(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    """All logits, then the loss."""
    return F.cross_entropy((x @ w.t()).float(), labels)


def exact(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    """In fp64, some rows at a time."""
    weight = w.detach().double()
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for some, wanted in zip(x.detach().split(1024), labels.split(1024)):
        total += F.cross_entropy(some.double() @ weight.t(), wanted, reduction="sum")
    return total / len(labels)


def measure(rank: Rank, case: Case) -> list[Row]:
    """Rows of one case."""

    def operands(seed: int) -> tuple[Tensor, ...]:
        x = rank.randn(case.tokens, case.k, dtype=case.dtype, seed=2 * seed)
        w = rank.randn(case.vocab, case.k, dtype=case.dtype, seed=2 * seed + 1, scale=case.k**-0.5)
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(case.vocab, (case.tokens,), generator=generator)
        return x.requires_grad_(), w.requires_grad_(), labels.to(rank.device)

    functions: dict[str, Callable[..., Tensor]] = {"torch": plain, "fusedtp": linear_cross_entropy}
    absent: dict[str, str] = {}
    compiled, why = baselines.compiled(plain, rank.device, rank.plan.compile)
    theirs, why_not = liger(rank.device)
    for name, fn, reason in (("torch.compile", compiled, why), ("Liger-Kernel", theirs, why_not)):
        if fn is not None:
            functions[name] = fn
        else:
            absent[name] = reason
    sets = rank.copies(operands)
    want = exact(*sets[0])
    ways: dict[str, Way] = {name: Rotating(_both(fn), sets) for name, fn in functions.items()}
    drop_what_fails(ways, functions, absent)
    found, peaks = {}, {}
    for name, fn in functions.items():
        # A logit, a sum of K products of size K^-1/2 each, is rounded once; the loss is at most as far off as logits.
        with torch.no_grad():
            loss = fn(*sets[0]).double()
        allowed = 4 * (errors.unit(sets[0][0].dtype) + (case.k + case.vocab) * errors.unit(torch.float32))
        off = float((loss - want).abs())
        found[name] = errors.Error(off, off / (allowed * max(1.0, float(want))))
        peaks[name] = peak_bytes(ways[name], rank.device)
    flops = 6.0 * case.tokens * case.k * case.vocab
    rows = [
        row(
            rank, NAME, case.shape, case.dtype, name,
            seconds=spread, flops=flops, roof=rank.roofs[case.dtype], host_seconds=rank.host(ways[name], spread),
            error=found[name], peak_bytes=peaks[name],
        )
        for name, spread in rank.measure(ways).items()
    ]  # fmt: skip
    return rows + [missing(rank, NAME, case.shape, case.dtype, name, why) for name, why in absent.items()]


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


def peak_bytes(way: Callable[[], object], device: torch.device) -> int | None:
    """What one call allocates at its peak, beyond what was there; None on a CPU, which does not count."""
    if device.type != "cuda":
        return None
    way()  # compiles
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    way()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device) - before)
