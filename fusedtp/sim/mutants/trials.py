"""The schedules that a mutant must survive: the fused kernels at W = 3, in calls that differ in what they leave out.

    calls     three calls on one workspace; uneven shards, one empty in the second call, tails in every direction
    none      a call without any row between two others
    idle      rank 0 has no columns of its own and so reads nothing of its peers
    wrap      the same with a call number that wraps from 2**31 - 1 to -2**31
    other     rank 1 is in another call, with less to send: every rank must notice and none may wait in vain
    nothing   the same with two ranks and no rows: only arrivals are exchanged
    plain     the matmul that has no peers

In `other` what ranks read is garbage by design, see Note [A failed call] in kernels/signals.py, so races are not looked
for there. A failed rank sends nothing more, and what waits for it then would wait for its timeout; so in `other` and
`nothing` one program of a rank is resident: it has signalled its arrival before another sees anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..case import Case, Launch, Mismatch, Run, Work, compare
from ..cases import Call, fused_case, operands, plan
from ..explore import Schedule
from ..strategies import DEFAULT
from ..worlds import SimulatedWorld, launches

WORLD = 3
OPERATIONS = {
    "all_gather_matmul_kernel": "all_gather_matmul",
    "matmul_reduce_scatter_kernel": "matmul_reduce_scatter",
    "one_shot_kernel": "one_shot_all_reduce",
    "two_shot_kernel": "two_shot_all_reduce",
    "all_gather_wgrad_kernel": "all_gather_wgrad",
}
LAST_NUMBER = 2**31 - 2
FLAGS = 64  # of a source


@dataclass(frozen=True)
class Trial:
    """A case and the schedules to try.

    detect    look for races, not only at results and deadlocks
    succeeds  no rank may take the call for failed
    """

    case: Case
    schedules: tuple[Schedule, ...]
    detect: bool = True
    succeeds: bool = True


def schedules(count: int, residents: tuple[Any, ...] = (None, 1, 2, "varying")) -> tuple[Schedule, ...]:
    """Strategies, residencies and lateness of stores in turn, out of step with one another."""
    s, r = len(DEFAULT), len(residents)
    return tuple(
        Schedule(DEFAULT[i % s], i, residents[(i + i // s) % r], weak=(i // r) % 2 == 1) for i in range(count)
    )


def trials(kernels: Iterable[str], count: int = 24) -> Iterator[Trial]:
    """What tries these kernels, the cheapest and most telling first; `count` schedules of the three calls."""
    kernels = set(kernels)
    operations = [name for kernel, name in OPERATIONS.items() if kernel in kernels]
    if "matmul_kernel" in kernels:
        yield Trial(plain(), schedules(2, (None, 1)))
    few = max(1, count // 2)
    for operation in operations:
        yield Trial(no_rows(operation), schedules(min(3, few), (1,)), succeeds=False)
    for operation in operations:
        yield Trial(wrapping(operation), schedules(2))
    for operation in operations:
        yield Trial(fused_case(f"calls of {operation}", calls(operation), seed=3), schedules(count))
    for operation in operations:
        yield Trial(other_call(calls(operation)[0]), schedules(min(6, few), (1,)), False, False)
        yield Trial(fused_case(f"none of {operation}", none_between(operation), seed=5), schedules(few))
        if operation.startswith("all_gather"):
            yield Trial(idle(operation), schedules(few))


def calls(operation: str) -> list[Call]:
    """Three small calls that between them have every tail, several chunks and an empty shard."""
    shapes = (((3, 18, 2), 20), ((3, 0, 2), 5), ((2, 2, 1), 16))
    first: dict[str, Any] = dict(widths=(40,), chunk=2)
    if operation.startswith("all_gather"):
        first = dict(widths=(17, 5), chunk=8)
    made = [Call(operation, sizes, k=k, widths=(5,)) for sizes, k in shapes]
    made[0] = replace(made[0], keep=operation == "all_gather_matmul", **first)
    return made if operation.startswith("all_gather") else [replace(call, chunk=2) for call in made]


def none_between(operation: str) -> list[Call]:
    """A call without rows between two others, the later of which covers more of the slot, results too."""
    large, _, small = calls(operation)
    return [small, replace(small, sizes=(0,) * WORLD), large]


def idle(operation: str) -> Case:
    """The calls of a gather whose first rank only sends: it has no rows of the weights."""

    def make() -> Run:
        made = calls(operation)
        world = SimulatedWorld(WORLD, max(call.slot_bytes() for call in made), FLAGS)
        work: list[list[Work]] = [[] for _ in range(WORLD)]
        results: list[tuple[str, int, Tensor, Tensor]] = []
        for i, call in enumerate(made):
            for rank in range(WORLD):
                own = call if rank else replace(call, widths=(0,), keep=False)
                given = operands(own, 3 + i)  # the same x, whatever the widths
                planned, outs = plan(own, given, world, rank, 101 + i)
                work[rank].extend(launches(planned, world.epochs.tensors[rank]))
                results += [(name, rank, out, given.wanted[name][rank]) for name, out in outs.items()]

        def check() -> list[Mismatch]:
            return [m for name, _, out, want in results for m in compare(name, [out], [want])]

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


def no_rows(operation: str) -> Case:
    """Rank 1 of two is in another call, and none has any rows. A third would be read after the failure, unordered."""
    call = replace(calls(operation)[0], sizes=(0, 0))
    return _disagreeing(f"nothing of {operation}", [call] * 2)


def _disagreeing(name: str, wanted: list[Call]) -> Case:
    def make() -> Run:
        world = SimulatedWorld(len(wanted), max(call.slot_bytes() for call in wanted), FLAGS)
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


def plain() -> Case:
    """y = x @ w.T + bias on one rank, with tails in every direction."""

    def make() -> Run:
        from fusedtp.kernels.matmul import matmul_kernel

        m, n, k, block = 20, 18, 20, 16
        generator = torch.Generator().manual_seed(0)
        x, w, bias = (
            torch.randint(-2, 3, shape, generator=generator).float() for shape in ((m, k), (n, k), (n,))
        )
        y = torch.full((m, n), torch.nan)
        args = dict(
            x=x, stride_xm=k, stride_xk=1, w=w, stride_wn=k, stride_wk=1, bias=bias, y=y, M=m, N=n, K=k,
            BLOCK_M=block, BLOCK_N=block, BLOCK_K=block, GROUP=8, EVEN_K=False,
        )  # fmt: skip
        return Run([[Launch(matmul_kernel, 3, args)]], check=lambda: compare("y", [y], [x @ w.t() + bias]))

    return Case("plain matmul", make)
