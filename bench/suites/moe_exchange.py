"""Dispatch and combine of a mixture of experts alone, forward: rows to the experts' ranks and back, without a matmul.

Bytes are the payload, which a copy reads once and writes once: T k rows there, T k rows back. The roof is a copy of all
ranks at once in the same run, so a share of one is an exchange that takes no longer than copying its rows in place.
What else it does is in its time and not in its bytes: in a dispatch the tokens' one copy to where peers read them, the
choices' weights, and the plan, for which choices are sorted and their counts exchanged; in a combine the second pass
over its rows, which are summed out of the slot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import fusedtp
from fusedtp.ops.moe.api import MoEHandle
from fusedtp.ops.rows import split

from .. import errors
from ..experts import SKEWS
from ..options import Plan
from ..rank import Rank
from ..rows import Row
from ..sample import Rotating, Way
from . import moe
from .common import drop_what_fails, rows_of
from .moe import TINY, Layer, chosen

NAME, RANKS = "moe-exchange", "several"
Operands = tuple[Tensor, Tensor, Tensor, Tensor, MoEHandle]  # x, expert_ids, weights, rows, handle
Function = Callable[..., Tensor]  # of Operands
LAYERS = {"cuda": Layer("deepseek-v3", 7168, 0, 256, 8), "cpu": Layer("dim-512", 512, 0, 16, 2)}


@dataclass(frozen=True)
class Case(moe.Case):
    """T tokens of all ranks; `which` is "dispatch" or "combine"."""

    which: str = "dispatch"

    @property
    def shape(self) -> dict[str, int | str]:
        return {"op": self.which, **{name: n for name, n in super().shape.items() if name != "F"}}

    @property
    def label(self) -> str:
        return f"{self.which} {super().label}"

    @property
    def moved(self) -> float:
        """Bytes of the payload, read and written."""
        itemsize = int(getattr(torch, self.dtype).itemsize)
        return 2.0 * self.tokens * self.layer.top_k * self.layer.dim * itemsize


def cases(plan: Plan, tp: int) -> list[Case]:
    """One layer for this device, whatever --shapes says."""
    layer = TINY if plan.smoke else LAYERS[plan.device]
    if layer.experts % tp:
        raise ValueError(f"{NAME} wants ranks that divide {layer.experts} experts, not {tp}")
    return [
        Case(layer, skew, tokens, tp, dtype, which)
        for tokens in sorted(plan.tokens)
        for dtype in plan.dtypes
        for skew in SKEWS
        for which in ("dispatch", "combine")
    ]


def measure(rank: Rank, case: Case) -> list[Row]:
    """Rows of one case. Collective."""
    layer, sizes = case.layer, split(case.tokens, case.tp)
    on_cpu = rank.device.type == "cpu"
    functions: dict[str, Function] = {}
    absent: dict[str, str] = {}
    inputs: dict[str, list[Operands]] = {}

    def operands(engine: str, seed: int) -> Operands:
        ids, weights = chosen(case, sizes[rank.rank], 100 * seed + rank.rank, rank.device)
        x = rank.randn(sizes[rank.rank], layer.dim, dtype=case.dtype, seed=seed)
        rows, _, handle = dispatch(engine, x, ids, weights)
        return x, ids, weights, rows, handle

    def dispatch(engine: str, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, MoEHandle]:
        return fusedtp.moe_dispatch(x, ids, weights, layer.experts, rank.group, sizes=sizes, engine=engine)

    def function(engine: str) -> Function:
        if case.which == "combine":
            return lambda x, ids, weights, rows, handle: fusedtp.moe_combine(rows, handle)
        return lambda x, ids, weights, rows, handle: dispatch(engine, x, ids, weights)[0]

    for engine in rank.plan.engines:
        name = f"fusedtp {engine}"
        if engine == "triton" and on_cpu:
            absent[name] = "engine triton is interpreted on a CPU: its time says nothing"
        elif engine == "collective" or engine == ("chunked" if on_cpu else "triton"):
            functions[name] = function(engine)
            inputs[name] = rank.copies(partial(operands, engine))
    ways: dict[str, Way] = {name: Rotating(fn, inputs[name]) for name, fn in functions.items()}
    drop_what_fails(rank, ways, functions, absent)
    firsts = {name: sets[0] for name, sets in inputs.items()}
    found = {
        name: {"error": _error(rank, case, fn(*firsts[name]), firsts[name])} for name, fn in functions.items()
    }
    return rows_of(rank, NAME, case, ways, found, absent, moved_bytes=case.moved, roof=rank.roofs["copy"])


def _error(rank: Rank, case: Case, result: Tensor, operands: Operands) -> errors.Error:
    """Experts that change nothing and weights that sum to one give the tokens again, rounded once."""
    x, _ids, _weights, _rows, handle = operands
    y = result if case.which == "combine" else fusedtp.moe_combine(result, handle)
    off = (y.double() - x.double()).abs()
    # The weights are fp32 and so are the sums: k roundings of each.
    unit = errors.unit(x.dtype) + 2 * case.layer.top_k * errors.unit(torch.float32)
    share = off / (unit * x.double().abs()).clamp(min=1e-30)
    largest, most = (float(t.max()) if len(x) else 0.0 for t in (off, share))
    return errors.Error(*rank.worst(largest, most))
