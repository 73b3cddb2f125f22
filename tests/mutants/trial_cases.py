"""The calls that mutants must survive, as cases: small shapes of three ranks; see trials.py for what each is for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fusedtp.checks.cases import fused_case, operands, plan, slot_bytes
from fusedtp.checks.dense import DECLARED, Call, SimulatedWorld, launches, meeting
from fusedtp.sim.case import Case, Copy, Mismatch, Run, Work, compare

WORLD = 3
LAST_NUMBER = 2**31 - 2
KINDS = ("moe_dispatch", "moe_dispatch_matmul", "moe_matmul_combine")  # there are two kinds of: Call.keep
FLAGS = 64  # of a source
PULLED = "moe_dispatch"  # whose data peers read in the slot


def calls(operation: str) -> list[Call]:
    """Three small calls that between them have every tail, several chunks and an empty shard."""
    shapes = (((3, 18, 2), 20), ((3, 0, 2), 5), ((2, 2, 1), 16))
    kernel = DECLARED[operation][1] if operation in DECLARED else None
    first: dict[str, Any] = dict(widths=(40,), chunk=2)
    if operation.startswith("all_gather"):  # an odd number of tiles: the next shard's are another program's
        first = dict(widths=(33,) if kernel is not None and kernel.pairs else (17, 5), chunk=8)
    made = [Call(operation, sizes, k=k, widths=(5,)) for sizes, k in shapes]
    made[0] = replace(made[0], keep=kernel is not None and kernel.keeps, **first)
    if operation in KINDS:  # the last one of the other kind
        made[2] = replace(made[2], keep=True)
    if operation == "all_gather_wgrad":  # its launcher pads rows of the result to multiples of 16
        return [replace(call, tile=32) for call in made]
    return made if operation.startswith("all_gather") else [replace(call, chunk=2) for call in made]


def none_between(operation: str) -> list[Call]:
    """A call without rows between two others, the later of which covers more of the slot, results too."""
    large, _, small = calls(operation)
    return [small, replace(small, sizes=(0,) * WORLD), large]


def by_tma(operation: str) -> list[Call]:
    """The first of the calls in 16 bits, by TMA, which takes a weight gradient only of shards that are whole blocks."""
    call = replace(calls(operation)[0], k=24, dtype=torch.float16, tma=True)
    return [replace(call, sizes=(32, 0, 16), tile=16) if operation == "all_gather_wgrad" else call]


def beside_copies(operation: str) -> list[Call]:
    """The calls of a gather, the rows of some ranks carried by copies."""
    ranks = ((1,), (), tuple(range(WORLD)))
    return [replace(call, copied=copied) for call, copied in zip(calls(operation), ranks, strict=True)]


def idle(operation: str) -> Case:
    """The calls of a gather whose first rank only sends: it has no rows of the weights."""

    def make() -> Run:
        made = calls(operation)
        world = SimulatedWorld(WORLD, max(slot_bytes(call) for call in made), FLAGS)
        work: list[list[Work]] = [[] for _ in range(WORLD)]
        results: list[tuple[str, int, Tensor, Tensor]] = []
        for i, call in enumerate(made):
            for rank in range(WORLD):
                own = call if rank else replace(call, widths=(0,), keep=False)
                given = operands(own, 3 + i)  # the same x, whatever the widths
                planned, outs = plan(own, given, world, rank, 101 + i)
                work[rank].extend(launches(planned, world.epochs.tensors[rank]))
                results += [
                    (f"{name} of call {i}", rank, out, given.wanted[name][rank]) for name, out in outs.items()
                ]

        def check() -> list[Mismatch]:
            return [
                replace(m, rank=rank)
                for name, rank, out, want in results
                for m in compare(name, [out], [want])
            ]

        return Run(work, world.memory, check)

    return Case(f"idle of {operation}", make)


def wrapping(operation: str) -> Case:
    """The calls numbered 2**31 - 1, -2**31, -2**31 + 1."""
    case = fused_case(f"wrap of {operation}", calls(operation), seed=3)

    def make() -> Run:
        run = case.make()
        for memory in run.memory:
            if memory.name in ("flags", "epoch"):
                for tensor in memory.tensors:
                    tensor.fill_(LAST_NUMBER)
        return run

    return Case(case.name, make, case.kernels)


def other_call(call: Call) -> Case:
    """Rank 1 is in another call, without any rows: each rank notices, says so rightly, and ends."""
    odd = replace(call, sizes=(0,) * WORLD)
    return _disagreeing(f"other of {call.operation}", [odd if r == 1 else call for r in range(WORLD)])


def late(call: Call) -> Case:
    """Rank 2 alone, while rank 1 has arrived in another call and rank 0 nowhere."""

    def make() -> Run:
        world = SimulatedWorld(WORLD, slot_bytes(call), FLAGS)
        signatures = [7, 8, 7]
        planned, _outs = plan(call, operands(call, 0), world, 2, signatures[2])
        world.flags.tensors[2][1, 0] = 1
        world.signatures.tensors[2][1, 1] = signatures[1]
        work: list[list[Work]] = [[], [], [*launches(planned, world.epochs.tensors[2])]]
        return Run(work, world.memory, lambda: [m for m in _noticed(world, signatures) if m.rank == 2])

    return Case(f"late of {call.operation}", make)


def mixed(operation: str, parity: int) -> Case:
    """A gather by copies after a fused call and before another. Its slot is the host's choice, not the epoch's.

    Ranks meet first where peers may still read a slot, see Note [After a fused kernel] in comm/workspace.py.
    """
    first, _, last = calls(operation)

    def make() -> Run:
        world = SimulatedWorld(WORLD, max(16, slot_bytes(first), slot_bytes(last)), FLAGS)
        work: list[list[Work]] = [[] for _ in range(WORLD)]
        checks = []
        for i, call in enumerate((first, last)):
            given = operands(call, 3 + i)
            made = [plan(call, given, world, rank, 101 + i) for rank in range(WORLD)]
            for rank, (planned, _outs) in enumerate(made):
                work[rank] += launches(planned, world.epochs.tensors[rank])
            checks.append((given.wanted, [outs for _planned, outs in made]))
            if i == 0:
                if operation == PULLED:
                    for rank in range(WORLD):
                        work[rank] += meeting(world, rank, 200)
                copied = [_gathered(world, work[rank], rank, parity) for rank in range(WORLD)]

        def check() -> list[Mismatch]:
            found = compare("copied", copied, [torch.arange(float(WORLD))[:, None].repeat(1, 4)] * WORLD)
            for wanted, outs in checks:
                for name, want in wanted.items():
                    found += compare(name, [named[name] for named in outs], want)
            return found

        return Run(work, world.memory, check)

    return Case(f"mixed of {operation}, slot {parity}", make)


def _gathered(world: SimulatedWorld, work: list[Work], rank: int, parity: int, number: int = 0) -> Tensor:
    """Append a gather by copies to a rank's work; returns where the rows will be: 100 number + each rank's number."""
    slots = [data[parity, :16].view(torch.float32) for data in world.data.tensors]
    y = torch.full((WORLD, 4), torch.nan)
    meet = meeting(world, rank, 201 + number)
    work += [Copy(slots[rank], torch.full((4,), 100.0 * number + rank)), *meet]
    work += [*(Copy(y[peer], slots[peer]) for peer in range(WORLD)), *meet]
    return y


def no_rows(operation: str, copied: tuple[int, ...] = ()) -> Case:
    """Rank 1 of two is in another call, and none has any rows. A third would be read after the failure, unordered."""
    call = replace(calls(operation)[0], sizes=(0, 0), copied=copied)
    return _disagreeing(f"nothing of {operation}", [call] * 2)


def _disagreeing(name: str, wanted: list[Call]) -> Case:
    def make() -> Run:
        world = SimulatedWorld(len(wanted), max(slot_bytes(call) for call in wanted), FLAGS)
        work: list[list[Work]] = []
        signatures = [7 + (r == 1) for r in range(len(wanted))]
        for rank, call in enumerate(wanted):
            planned, _outs = plan(call, operands(call, 0), world, rank, signatures[rank])
            work.append([*launches(planned, world.epochs.tensors[rank])])
        return Run(work, world.memory, lambda: _noticed(world, signatures))

    return Case(name, make)


def _noticed(world: SimulatedWorld, signatures: list[int]) -> list[Mismatch]:
    """Every rank has recorded a peer with another signature than its own, and what that was."""
    found = []
    for rank, tensor in enumerate(world.statuses.tensors):
        code, peer, index, wanted, seen = tensor[:5].tolist()
        other = 0 <= peer < world.world_size and signatures[peer] != signatures[rank]
        right = (
            2,
            peer,
            peer * world.flags_per_source,
            signatures[rank],
            signatures[peer if other else rank],
        )
        if not other or (code, peer, index, wanted, seen) != right:
            found.append(Mismatch("status", rank, (0,), str(right), str(tensor[:5].tolist()), 1))
    return found


def meetings() -> Case:
    """What engines that copy do: x to the own slot, meet, all slots to y, meet; in one slot, three times over."""

    def make() -> Run:
        world = SimulatedWorld(WORLD, 16, FLAGS)
        work: list[list[Work]] = [[] for _ in range(WORLD)]
        got = [[_gathered(world, work[rank], rank, 0, i) for rank in range(WORLD)] for i in range(3)]

        def check() -> list[Mismatch]:
            want = torch.arange(float(WORLD))[:, None].repeat(1, 4)
            return [
                m for i, ys in enumerate(got) for m in compare(f"y of call {i}", ys, [want + 100 * i] * WORLD)
            ]

        return Run(work, world.memory, check)

    return Case("meetings", make)


def strangers() -> Case:
    """Rank 1 of two meets for another call."""

    def make() -> Run:
        world = SimulatedWorld(2, 16, FLAGS)
        signatures = [7, 8]
        work: list[list[Work]] = [[*meeting(world, rank, signatures[rank])] for rank in range(2)]
        return Run(work, world.memory, lambda: _noticed(world, signatures))

    return Case("strangers meet", make)
