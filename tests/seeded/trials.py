"""Small calls of every kernel, planned for a GPU, in which faults are tried; the cheapest and most telling first.

calls      three ranks, four calls on one workspace: tails in all directions, an empty shard, no rows at all; call
           numbers wrap from 2**31 - 1 to -2**31
other      for experts, the second kind of call, see checks/experts.py
copied     for gathers: copies beside the kernel move the rows of one rank, of none, or of all
strangers  two ranks in calls of different signatures: each must notice, and report it correctly; and in equal calls
overflow   for experts, more rows than there is room for: each rank must report it
pipelined  16 bits, several steps over K in three stages; on sm_90 by TMA and wgmma
switch     slots summed by a switch, if the kernel supports it, on sm_90; and a call of it without rows between two
           exchanges of experts, which read peers' slots
fp8        for kernels that multiply fp8, the first and the last call, on sm_90
local      kernels of one rank in every variant, see checks/local.py
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from fusedtp.checks import experts, local
from fusedtp.checks.cases import fused_case, meeting_case, operands, plan, slot_bytes
from fusedtp.checks.dense import DECLARED, TILE, Call, SimulatedWorld, gpu, launched, meeting
from fusedtp.sim import Case, Fault, Run, Schedule, compare
from fusedtp.sim.ptx import TARGETS
from fusedtp.sim.ptx.access import SHARED

FUSED: dict[str, list[str]] = {}  # function -> names of its cases
IN_FP8: dict[str, list[str]] = {}  # of functions in FUSED
for case, (_, declared) in DECLARED.items():
    (IN_FP8 if declared.in_fp8 else FUSED).setdefault(declared.function, []).append(case)
FUSED |= {f"{case}_kernel": [case] for case in experts.OPERATIONS}
for name in ("few_rows_gather_kernel", "few_rows_gated_kernel"):  # what they share is tried in those before
    FUSED[name] = FUSED.pop(name)
KERNELS = (*FUSED, *(f"{name}_kernel" for name in (*local.KERNELS, "meet")))
MOST_FUSED = 3  # kernels in which a fault of what they share is tried
SCHEDULES = 4  # of each trial


class Trial(NamedTuple):
    """A case and the target for which its kernels are compiled.

    fails    its calls must fail. One program per rank is resident at a time: a failed rank sends nothing more, so all
             of it must have arrived before another program sees the failure
    """

    case: Case
    target: str
    fails: bool = False

    def schedules(self) -> Iterator[Schedule]:
        """All late effects; strategies and residencies alternate, and every second schedule runs a warp at a time."""
        for i in range(SCHEDULES):
            strategy = ("random", "pct", "run_to_block")[i % 3]
            alive = 1 if self.fails else (None, "varying", 1, 2)[i // 2 % 4]
            yield Schedule(strategy, i, alive, weak=True, fine=i % 2 == 1, target=self.target)

    def forgives(self, fault: Fault) -> bool:
        """A race between ranks is harmless in a call that fails: a program that gives up ignores what it reads."""
        return self.fails and fault.rule.endswith("race") and fault.accesses[0].tensor != SHARED


def under_trial(kernels: Iterable[str]) -> list[str]:
    """The kernels that the trials of these launch: of fused ones only the first few."""
    wanted = [name for name in KERNELS if name in {*kernels}]
    return [name for name in wanted if name not in FUSED] + [name for name in wanted if name in FUSED][:MOST_FUSED]


def trials(kernels: Iterable[str], only: str = "") -> Iterator[Trial]:
    """The trials of these kernels. only: this target, and of fused kernels strangers, then pipelined, then others."""
    chosen, targets, first = under_trial(kernels), (only,) if only else TARGETS, only or "sm_80"
    for name in [name for name in local.KERNELS if f"{name}_kernel" in chosen]:
        for target in targets if name in (*local.PRODUCTS, *local.MAKES_FP8) else (first,):
            yield from (Trial(local.local_case(name, each), target) for each in local.variants(name, gpu(target)))
    if "meet_kernel" in chosen:
        yield strangers("meet", first)
        yield Trial(meeting_case(2, machine=gpu(first)), first)
    fused = [name for kernel in chosen for name in FUSED.get(kernel, ())]
    wrapping = [called("calls", calls(name), first, number=2**31 - 2) for name in fused]
    yield from () if only else wrapping
    for name in fused:
        yield strangers(name, first)
        if not only and name in experts.OPERATIONS:
            yield overflowing(name, first)
            if name != "moe_combine":
                yield called("other", [replace(call, keep=True) for call in calls(name)[::3]], first)
        if not only and name.startswith("all_gather"):
            brought = (1,), (), (), (0, 1, 2)
            yield called("copied", [replace(call, copied=by) for call, by in zip(calls(name), brought)], first)
    if "multimem_all_reduce" in fused:
        first_call, _, empty, last_call = calls("multimem_all_reduce")
        if only in ("", "sm_90"):
            yield called("by a switch", [first_call, replace(last_call, tile=32)], "sm_90", by_switch=True)
        exchange = calls("moe_dispatch")[0]
        yield called("between exchanges", [exchange, empty, exchange], first)
    yield from (pipelined(name, target) for target in targets for name in fused)
    in_fp8 = [name for kernel in chosen for name in IN_FP8.get(kernel, ())]
    yield from wrapping if only else (called("calls", calls(name)[::3], "sm_90") for name in in_fp8)
    if only:  # the code of strangers, in calls whose values count
        yield from (
            called("calls of two ranks", [replace(calls(name)[0], sizes=(5, 6), k=16)], first) for name in fused
        )


# -- fused kernels -----------------------------------------------------------------------------------------------------


def calls(name: str) -> list[Call]:
    kernel = DECLARED[name][1] if name in DECLARED else None
    gathers, keeps = bool(kernel and kernel.gathers), bool(kernel and kernel.keeps)
    widths = (17, 5) if gathers and kernel and not kernel.pairs else (37,)
    pads = name == "all_gather_wgrad"  # rows of its result to multiples of 16; without any no tile waits
    first = Call(name, (3, 18, 2), widths, k=20, chunk=8 if gathers else 2, keep=keeps, tile=32 if pads else TILE)
    if name == "moe_dispatch_matmul":  # three tiles a row keep two steps of it each
        first = replace(first, k=50)
    several = replace(first, programs=(2, 2))
    few = bool(kernel and kernel.one_tile)  # of which an all-reduce of 4 leaves the last rank none to sum
    made = [
        first,
        replace(several, sizes=(3, 0, 1 if few else 2), k=5, batch=2 if kernel and not few else 1),
        replace(several, sizes=(0, 0, 0), widths=(0,) if pads else widths),
        replace(several, sizes=(2, 2, 33)),
    ]
    if name in ("matmul_reduce_scatter", "two_shot_all_reduce"):  # windows of two chunks, the last with one
        made[-1] = replace(made[-1], programs=(3, 4), chunk=1)
    return made


def called(what: str, made: Sequence[Call], target: str, number: int = 0, by_switch: bool = False) -> Trial:
    """number: of calls made before."""
    name = f"{what} of {made[0].operation}"
    case = fused_case(name, made, seed=3, machine=gpu(target), number=number, by_switch=by_switch)
    return Trial(case, target)


def pipelined(name: str, target: str) -> Trial:
    """Whole steps over K, on sm_90 by TMA and by pointers; then one step; then weights laid out like a gradient's."""
    tile, chunk = {"sm_80": 32, "sm_90": 64}[target], 16 if name.startswith("all_gather") else 1
    call = Call(name, (64, 32), (40,), k=128, dtype=torch.float16, tile=tile, block_k=32, chunk=chunk)
    first = replace(call, tma=True) if target == "sm_90" else replace(call, sizes=(40, 24))
    made = [first, call, replace(call, k=32)]
    if name in ("all_gather_matmul", "few_rows_gather", "matmul_reduce_scatter"):
        made.append(replace(first, k=64, transposed=True))
    if name in (
        *experts.OPERATIONS,
        "multimem_all_reduce",
    ):  # tile after tile by one program, whose last step fills the first buffer
        made.append(replace(first, k=96, programs=(1, 1)))
    return called("pipelined calls", made, target)


def strangers(name: str, target: str) -> Trial:
    """Each rank waits for rows that the other, in its own call, does not send; or only one rank waits, or none."""
    of_own = ("matmul_reduce_scatter", "few_rows_reduce_scatter", "moe_matmul_combine")  # wait for their own rows
    sizes = [(5, 0), (0, 5)] if name in of_own else [(0, 5), (5, 0)]
    if "all_reduce" in name or name == "moe_combine":  # whose ranks send in any case
        sizes = [(0, 0), (0, 0) if name.startswith("one") else (0, 5)]
    made = [None] * 2 if name == "meet" else [replace(calls(name)[0], sizes=each, k=16) for each in sizes]
    said = [[2, 1 - rank, -1, 7 + rank, 8 - rank] for rank in range(2)]
    return Trial(failing(f"strangers in {name}", made, said, target), target, fails=True)


def overflowing(name: str, target: str) -> Trial:
    """All rows go to the first rank, which has no room for them."""
    call = replace(calls(name)[0], routing="first")
    rows = int(experts.routed(call, 0).table.sum())
    return Trial(failing(f"overflow in {name}", [call] * 3, [[3, 0, 0, 9, rows]] * 3, target, max_rows=9), target)


def failing(what: str, made: Sequence[Call | None], said: list[list[int]], target: str, **args: int) -> Case:
    """Each rank's call, None for a meeting, and the failure that it must record. args: changes to the launches."""
    slot = max([16, *(slot_bytes(call) for call in made if call)])

    def make() -> Run:
        world, work = SimulatedWorld(len(made), slot, 64, gpu(target)), []
        for rank, call in enumerate(made):
            if call is None:
                work.append([meeting(world, rank, 7 + rank)])
            else:
                planned, _ = plan(call, operands(call, 0), world, rank, 7 + rank)
                work.append([launched(replace(planned, args=planned.args | args))])
        memory = [replace(each, poisoned=False) for each in world.memory]  # what a failed call reads is not used
        status = [each[:5] for each in world.statuses.tensors]
        return Run(work, memory, lambda: compare("status", status, [*torch.tensor(said)]))

    return Case(what, make)
