"""The plain Triton matmul, which the fused kernels add communication to, against the vendor's; one device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fusedtp.ops import launch
from fusedtp.ops import matmul as cpu

from .. import baselines, errors
from ..options import Plan
from ..rank import Rank
from ..rows import Row
from ..sample import Rotating, Way
from .common import Case, drop_what_fails, layer_cases, offer, rows_of
from .common import matmul as vendor

NAME, RANKS = "matmul", "one"


def cases(plan: Plan, tp: int) -> list[Case]:
    """All layers of the shapes as one rank of `tp` has them, and squares."""
    return layer_cases(plan, tp, "column", "row", "square")


def measure(rank: Rank, case: Case) -> list[Row]:
    """Rows of one case."""

    def operands(seed: int) -> tuple[Tensor, ...]:
        x = rank.randn(case.tokens, case.k, dtype=case.dtype, seed=2 * seed)
        return x, rank.randn(case.n, case.k, dtype=case.dtype, seed=2 * seed + 1, scale=case.k**-0.5)

    on_cpu = rank.device.type == "cpu"
    ours = "fusedtp triton" if not on_cpu else "fusedtp (local matmul of chunked)"
    functions: dict[str, Callable[..., Tensor]] = {
        baselines.vendor_name(rank.device): vendor,
        ours: cpu.linear if on_cpu else launch.matmul,
    }
    absent: dict[str, str] = {}
    compiled = baselines.compiled(lambda x, w: x @ w.t(), rank.device, rank.plan.compile)
    offer(functions, absent, "torch.compile", compiled)
    if on_cpu:
        absent["fusedtp triton"] = "Triton's interpreter: its time says nothing"
    sets = rank.copies(operands)
    sampled = errors.sampled(case.tokens).to(rank.device)
    with torch.no_grad():
        x, w = sets[0]
        want = errors.product(x, w, sampled)
        ways: dict[str, Way] = {name: Rotating(fn, sets) for name, fn in functions.items()}
        drop_what_fails(rank, ways, functions, absent)
        found = {
            name: {"error": errors.compare(fn(*sets[0])[sampled], want, case.k)}
            for name, fn in functions.items()
        }
        flops, roof = 2.0 * case.tokens * case.k * case.n, rank.roofs[case.dtype]
        return rows_of(rank, NAME, case, ways, found, absent, flops=flops, roof=roof)
