"""Calls of host-sequenced engines as GPUs make them: copies of a copy engine between two meetings of all ranks.

    stream of a rank     copy x to the own slot | meet | copy peers' slots out | meet

Fused kernels run between such calls, since all of them share slots, flags and the epoch. The host's count of calls
chooses the slot for copies, the device's epoch for kernels, and the two drift apart; so after a fused kernel all ranks
meet before they copy (Note [After a fused kernel] in comm/workspace.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .call import Call
from .case import Case, Copy, Mismatch, Run, Work, compare
from .cases import Given, checker, issue, operands
from .worlds import SimulatedWorld, meeting

COLUMNS = 4


def meeting_case(world_size: int, *, seed: int = 0) -> Case:
    """Gathers by copies, of even, ragged and few rows, with two fused gathers among them.

    The first has no columns, so that a rank leaves it before its peers' rows have landed in the slot that is copied to
    next.
    """
    w = world_size
    ragged = tuple(0 if r == 1 else 2 + r % 2 for r in range(w))
    calls: list[Call | tuple[int, ...]] = [
        (2,) * w,
        ragged,
        Call("all_gather_matmul", (2,) * w, widths=(0,), k=COLUMNS, bias=False),
        (1,) * w,
        Call("all_gather_matmul", ragged, k=COLUMNS),
        (2,) * w,
    ]
    given = [operands(call, seed + i) if isinstance(call, Call) else None for i, call in enumerate(calls)]
    generator = torch.Generator().manual_seed(seed)
    shards = [
        [] if isinstance(call, Call) else [torch.randn(n, COLUMNS, generator=generator) for n in call]
        for call in calls
    ]
    slot = 4 * COLUMNS * 3 * w

    def make() -> Run:
        world = SimulatedWorld(w, slot, 16)
        work: list[list[Work]] = [[] for _ in range(w)]
        gathered: list[tuple[list[Tensor], Tensor]] = []
        outs: list[tuple[Given, list[dict[str, Tensor]]]] = []
        for number, (call, inputs) in enumerate(zip(calls, given, strict=True)):
            if isinstance(call, Call) and inputs is not None:
                outs.append((inputs, issue(work, call, inputs, world, 101 + number)))
                continue
            opening = number > 0 and isinstance(calls[number - 1], Call)
            got = _gather(world, work, shards[number], number, opening)
            gathered.append((got, torch.cat(shards[number])))
        fused_right = checker(outs)

        def check() -> list[Mismatch]:
            found = fused_right()
            for i, (got, want) in enumerate(gathered):
                found += compare(f"gather {i}", got, [want] * w)
            return found

        return Run(work, world.memory, check, world.recorded)

    return Case("meet", make, ("meet",))


def _gather(
    world: SimulatedWorld, work: list[list[Work]], shards: list[Tensor], number: int, opening: bool
) -> list[Tensor]:
    """Append to every rank's work a gather of its shard; return where the gathered rows will be."""
    outs = []
    slots = [
        world.data.tensors[p][number & 1, : 4 * shard.numel()].view(torch.float32)
        for p, shard in enumerate(shards)
    ]
    for rank, shard in enumerate(shards):
        out = torch.full((sum(len(s) for s in shards), COLUMNS), torch.nan)
        parts = out.view(-1).split([s.numel() for s in shards])
        meet = meeting(world, rank, 301 + number)
        fetches = [
            Copy(parts[p], slots[p], pieces=2)
            for p in range(world.world_size)
            if p != rank and len(shards[p])
        ]
        own = [Copy(to, shard.view(-1).clone()) for to in (slots[rank], parts[rank]) if len(shard)]
        work[rank] += [*(meet if opening else []), *own, *meet, *fetches, *meet]
        outs.append(out)
    return outs
