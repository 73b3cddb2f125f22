"""Calls of fused kernels whose links are held (Note [A held link] in kernels/signals.py), and what they must book.

Simulated time stands still, so that a link on which a byte takes no time is all that a kernel can leave again. What it
carried is counted: every byte that goes to another rank or, of a dispatch, comes from one, once, and none that stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fusedtp.ops.rows import split

from .case import Case, Mismatch, Run, compare
from .cases import Call, Given, fused_case, operands
from .exchange_cases import EXPERTS, Routed, row_width

AT_ONCE = 0  # femtoseconds a byte


def held_case(name: str, calls: Sequence[Call], *, seed: int = 0) -> Case:
    """A fused case of these calls: the same results, and the bytes that each rank's link has carried."""
    case = fused_case(name, calls, seed=seed, link=AT_ONCE)
    wanted = torch.stack([crossing(call, operands(call, seed + i)) for i, call in enumerate(calls)]).sum(0)

    def make() -> Run:
        run = case.make()
        check, (words,) = run.check, (memory for memory in run.memory if memory.name == "failure")
        assert check is not None

        def also_bytes() -> Sequence[Mismatch]:
            from fusedtp.kernels.signals import LINK_BYTES

            carried = [of_rank[LINK_BYTES.value].clone() for of_rank in words.tensors]
            return [*(check() or ()), *compare("bytes carried", carried, list(wanted))]

        return replace(run, check=also_bytes)

    return Case(name, make, case.kernels)


def crossing(call: Call, given: Given) -> torch.Tensor:
    """int64 [W]: the bytes that each rank's programs move over its link."""
    world, itemsize = len(call.sizes), call.dtype.itemsize
    if isinstance(given, Routed):
        rows = torch.stack(
            [of_owner.sum(1) for of_owner in given.table.split(EXPERTS, 1)], 1
        )  # [source, owner]
        rows = rows.long() - torch.diag(rows.diagonal())
        return rows.sum(1 if call.operation == "moe_dispatch_matmul" else 0) * row_width(call) * itemsize
    own, every = torch.tensor(call.sizes) * call.batch, call.rows.total
    if call.operation.startswith("all_gather"):
        sends = torch.tensor([rank not in call.copied for rank in range(world)])
        return own * (world - 1) * call.k * itemsize * sends
    row = call.widths[0] * itemsize
    if call.operation == "matmul_reduce_scatter":
        return (every - own) * row
    if call.operation == "one_shot_all_reduce":
        return torch.full((world,), every * (world - 1) * row)
    summed = torch.tensor(split(every, world))  # partials go to who sums them, sums to all
    return (every - summed + (world - 1) * summed) * row
