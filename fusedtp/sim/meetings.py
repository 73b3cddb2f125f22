"""Calls of host-sequenced engines as GPUs make them: copies of a copy engine between two meetings of all ranks.

    stream of a rank     copy x to the own slot | meet | copy peers' slots out | meet

A fused kernel runs between two such calls, since all of them share slots, flags and the epoch; the host's count of
calls chooses the slot for copies, the device's epoch for kernels, and the two drift apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedtp.comm.device_view import clock_of, peers_of
from fusedtp.kernels.meet import meet_kernel

from .case import Case, Copy, Launch, Mismatch, Run, Work, compare
from .cases import Call, checker, operands, plan
from .worlds import SimulatedWorld, launches

COLUMNS = 4


def meeting_case(world_size: int, *, seed: int = 0) -> Case:
    """Gathers by copies, of even, ragged and few rows, and a fused gather after the first of them."""
    w = world_size
    shapes = [(2,) * w, tuple(0 if r == 1 else 3 + r for r in range(w)), (1,) * w]
    fused = [Call("all_gather_matmul", shapes[1], k=COLUMNS)]
    given = [operands(call, seed + i) for i, call in enumerate(fused)]
    generator = torch.Generator().manual_seed(seed)
    xs = [[torch.randn(n, COLUMNS, generator=generator) for n in sizes] for sizes in shapes]
    rows = max(sum(sizes) for sizes in shapes)

    def make() -> Run:
        world = SimulatedWorld(w, max(4 * COLUMNS * rows, *(call.slot_bytes() for call in fused)), 16)
        work: list[list[Work]] = [[] for _ in range(w)]
        gathered, outs, number = [], [], 0
        for i, shards in enumerate(xs):
            copies = _gather(world, work, shards, number & 1, 301 + i)
            gathered.append((copies, torch.cat(shards)))
            number += 1
            if i < len(fused):
                made = []
                for rank in range(w):
                    planned, named = plan(fused[i], given[i], world, rank, 401 + i)
                    work[rank].extend(launches(planned, world.epochs.tensors[rank]))
                    made.append(named)
                outs.append((given[i], made))
                number += 1
        fused_right = checker(outs)

        def check() -> list[Mismatch]:
            found = fused_right()
            for i, (got, want) in enumerate(gathered):
                found += compare(f"gather {i}", got, [want] * w)
            return found

        return Run(work, world.memory, check, world.recorded)

    return Case("meet", make, ("meet",))


def _gather(
    world: SimulatedWorld, work: list[list[Work]], shards: list[Tensor], parity: int, signature: int
) -> list[Tensor]:
    """Append to every rank's work a gather of its shard; return where the gathered rows will be."""
    outs = []
    slots = [
        world.data.tensors[p][parity, : 4 * shard.numel()].view(torch.float32)
        for p, shard in enumerate(shards)
    ]
    for rank, shard in enumerate(shards):
        out = torch.full((sum(len(s) for s in shards), COLUMNS), torch.nan)
        parts = out.view(-1).split([s.numel() for s in shards])
        peers = peers_of(world.view(rank), rank, world.world_size, signature, clock_of(out.device))
        meet = Launch(meet_kernel, 1, dict(peers=peers))
        fetches = [
            Copy(parts[p], slots[p], pieces=2)
            for p in range(world.world_size)
            if p != rank and len(shards[p])
        ]
        own = [Copy(slots[rank], shard.view(-1).clone()), Copy(parts[rank], shard.view(-1).clone())]
        work[rank] += [*(own if len(shard) else []), meet, *fetches, meet]
        outs.append(out)
    return outs
