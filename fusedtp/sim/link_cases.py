"""Calls of fused kernels whose links are held (Note [A held link] in kernels/signals.py), and what they must book.

Simulated time stands still, and a kernel would stay on its link for ever. So the word that says what programs last saw
of the clock says from the beginning that all is long over, and nobody stays; bookings begin at zero and a byte takes a
nanosecond. What a link carried is counted: every byte that goes to another rank or, of a dispatch, comes from one,
once, and none that stays; and it is free that many nanoseconds later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fusedtp.ops.rows import split

from .call import Call
from .case import Case, Mismatch, Run, compare
from .cases import Given, fused_case, operands
from .exchange_cases import EXPERTS, Routed, row_width

NANOSECOND = 1_000_000  # femtoseconds, of a byte
OVER = 1 << 40  # ns: later than all bookings


def held_case(name: str, calls: Sequence[Call], *, seed: int = 0) -> Case:
    """A fused case of these calls: the same results, and the bytes that each rank's link has carried."""
    case = fused_case(name, calls, seed=seed, link=NANOSECOND)
    wanted = torch.stack([crossing(call, operands(call, seed + i)) for i, call in enumerate(calls)]).sum(0)

    def make() -> Run:
        from fusedtp.kernels.signals import CLOCK_WORD, LINK_BYTES, LINK_FREE

        run = case.make()
        check, (words,) = run.check, (memory for memory in run.memory if memory.name == "failure")
        assert check is not None
        for of_rank in words.tensors:
            of_rank[CLOCK_WORD.value] = OVER

        def also_bytes() -> Sequence[Mismatch]:
            carried = [of_rank[LINK_BYTES.value].clone() for of_rank in words.tensors]
            free = [of_rank[LINK_FREE.value].clone() for of_rank in words.tensors]
            of_bytes = compare("bytes carried", carried, list(wanted))
            return [*(check() or ()), *of_bytes, *compare("ns until the link is free", free, list(wanted))]

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
