"""Small calls of every kernel, planned for a GPU: what a fault is tried in, the cheapest and most telling first.

calls      three ranks, four calls on one workspace: tails in all directions, an empty shard, no rows at all; their
           numbers wrap from 2**31 - 1 to -2**31
other      of experts, the second kind of call, see checks/experts.py
copied     of gathers, the rows of one rank, of none, of all brought by copies beside the kernel
strangers  two ranks in calls of different signatures, without rows: each must notice, and say so rightly
pipelined  16 bits, several steps over K in three stages; on sm_90 by TMA and wgmma
local      kernels of one rank: matmuls whole and by halves, by pointers and by TMA; with tails
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fusedtp.checks.cases import fused_case, meeting_case, operands, plan, slot_bytes
from fusedtp.checks.dense import DECLARED, Call, SimulatedWorld, launches, meeting
from fusedtp.checks.experts import OPERATIONS as EXPERTS
from fusedtp.ops.launch import Launch as Planned
from fusedtp.ops.launch import cross_entropy, plain, pointwise
from fusedtp.ops.launch.config import Config, Machine
from fusedtp.ops.moe import grouped
from fusedtp.sim import Case, Launch, Mismatch, Run, Schedule, compare, run_schedule

FUSED = {kernel.function: name for name, (_, kernel) in DECLARED.items()}
FUSED |= dict(zip([f"{name}_kernel" for name in EXPERTS], EXPERTS))
PRODUCTS = ("grouped_matmul", "grouped_gated", "grouped_wgrad", "matmul")
ROWS = "grouped_gated_backward rms_norm rms_norm_wide rms_norm_backward rms_norm_wide_backward swiglu swiglu_backward"
LOCAL = (*PRODUCTS, *ROWS.split(), "rope", "logit_stats", "logit_gradient")
KERNELS = (*FUSED, *(f"{name}_kernel" for name in (*LOCAL, "meet")), "bump_epoch")
MOST_FUSED = 3  # kernels in which a fault of what they share is tried


@dataclass(frozen=True)
class Trial:
    """A case and the target for which its kernels are compiled.

    resident    programs of a rank alive at once; None: it varies. Of strangers 1: a failed rank sends nothing more, so
                all of it must have arrived before another program sees the failure
    """

    case: Case
    target: str
    resident: int | None = None

    def schedules(self, count: int, fine: bool) -> Iterator[Schedule]:
        """All late effects; strategies and residencies in turn, each second a warp at a time; with `fine` all."""
        for i in range(count):
            strategy, alive = ("random", "pct", "run_to_block")[i % 3], (None, "varying", 1, 2)[i // 2 % 4]
            alive, warps = self.resident or alive, fine or i % 2 == 1
            yield Schedule(strategy, i, alive, weak=True, fine=warps, target=self.target)


def gpu(target: str) -> Machine:
    return Machine("cuda", 3, 160 * 1024, capability=int(target.removeprefix("sm_")))


def trials(kernels: Iterable[str], only: str = "") -> Iterator[Trial]:
    """What tries these kernels. only: this target, and of fused kernels strangers and the pipelined calls."""
    wanted = {"meet_kernel" if name == "bump_epoch" else name for name in kernels}
    targets, first = (only,) if only else ("sm_80", "sm_90"), only or "sm_80"
    for name in [name for name in LOCAL if f"{name}_kernel" in wanted]:
        for target in targets if name in PRODUCTS else (first,):
            yield Trial(local(name, target == "sm_90", target), target)
    if "meet_kernel" in wanted:
        yield Trial(strangers(None, first), first, resident=1)
        yield Trial(meeting_case(2, machine=gpu(first)), first)
    fused = [name for kernel, name in FUSED.items() if kernel in wanted][:MOST_FUSED]
    for name in () if only else fused:
        yield Trial(wrapping(case_of("calls", calls(name), first)), first)
    for name in fused:
        yield Trial(strangers(name, first), first, resident=1)
        if not only and name in EXPERTS and name != "moe_combine":
            yield Trial(
                case_of("other", [replace(call, keep=True) for call in calls(name)[::3]], first), first
            )
        if not only and name.startswith("all_gather"):
            pairs = zip(calls(name), ((1,), (), (), (0, 1, 2)), strict=True)
            yield Trial(
                case_of("copied", [replace(call, copied=ranks) for call, ranks in pairs], first), first
            )
    yield from (Trial(pipelined(name, target), target) for target in targets for name in fused)


# -- fused kernels -----------------------------------------------------------------------------------------------------


def calls(name: str) -> list[Call]:
    kernel = DECLARED[name][1] if name in DECLARED else None
    gathers = name.startswith("all_gather")
    widths = (17, 5) if gathers and kernel and not kernel.pairs else (37,)
    first = Call(
        name, (3, 18, 2), widths, k=20, chunk=8 if gathers else 2, keep=bool(kernel and kernel.keeps)
    )
    # tiles of a weight's gradient have 32 rows: its launcher pads rows of the result to multiples of 16
    first = replace(first, tile=32) if name == "all_gather_wgrad" else first
    return [
        first,
        *(replace(first, sizes=sizes, programs=(2, 2)) for sizes in ((3, 0, 2), (0, 0, 0), (2, 2, 33))),
    ]


def case_of(what: str, made: list[Call], target: str) -> Case:
    return fused_case(f"{what} of {made[0].operation}", made, seed=3, machine=gpu(target))


def pipelined(name: str, target: str) -> Case:
    """Calls of two ranks, whose steps over K are whole: on sm_90 by TMA and by pointers. The last has one step."""
    tile, chunk = {"sm_80": 32, "sm_90": 64}[target], 16 if name.startswith("all_gather") else 1
    call = Call(name, (64, 32), (40,), k=128, dtype=torch.float16, tile=tile, block_k=32, chunk=chunk)
    first = replace(call, tma=True) if target == "sm_90" else replace(call, sizes=(40, 24))
    return case_of("pipelined calls", [first, call, replace(call, k=32)], target)


def wrapping(case: Case) -> Case:
    def make() -> Run:
        run = case.make()
        for memory in run.memory:
            if memory.name in ("flags", "epoch"):
                for tensor in memory.tensors:
                    tensor.fill_(2**31 - 2)
        return run

    return replace(case, make=make)


def strangers(name: str | None, target: str) -> Case:
    """None: at a meeting."""
    call = None if name is None else replace(calls(name)[0], sizes=(0, 0))

    def make() -> Run:
        world = SimulatedWorld(2, slot_bytes(call) if call else 16, 64, gpu(target))
        work: list[list[Launch]] = [[], []]
        for rank, of_rank in enumerate(work):
            if call is None:
                of_rank += meeting(world, rank, 7 + rank)
            else:
                planned, _ = plan(call, operands(call, 0), world, rank, 7 + rank)
                of_rank += launches(planned, world.epochs.tensors[rank])

        def check() -> list[Mismatch]:
            said = [status[:5] for status in world.statuses.tensors]
            return compare(
                "status", said, [torch.tensor([2, 1 - r, (1 - r) * 64, 7 + r, 8 - r]) for r in range(2)]
            )

        return Run(work, world.memory, check)

    return Case(f"strangers in {name or 'a meeting'}", make)


# -- kernels of one rank -----------------------------------------------------------------------------------------------


@lru_cache
def local(name: str, halves: bool, target: str) -> Case:
    """What the kernel gives now must come out later. halves: of tiles, by TMA where the kernel can."""

    def made() -> tuple[Launch, list[Tensor]]:
        launch, given = plan_local(name, halves, gpu(target))
        outs = [y for y in ([given] if isinstance(given, Tensor) else given) if y is not None]
        for y in outs:
            y.fill_(torch.nan)
        return Launch(launch.kernel, launch.programs, launch.args, options=launch.options), outs

    launch, wanted = made()
    run_schedule(Run([[launch]]), Schedule(target=target))

    def make() -> Run:
        launch, outs = made()
        return Run(
            [[launch]],
            check=lambda: [m for y, want in zip(outs, wanted) for m in compare("out", [y], [want])],
        )

    return Case(f"{name}_kernel{', halves' * halves}", make)


def plan_local(name: str, halves: bool, machine: Machine) -> tuple[Planned, Any]:
    """The launch and its outputs: tails everywhere, an expert without rows, rows behind the last expert's."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=generator).float()

    config = Config(16, 32 if halves else 16, 16, group=2, tma=halves, halves=halves, num_stages=3)
    if name == "matmul":
        precision, scales = "tf32" if halves else "ieee", (draw(36, 1), draw(40, 1))
        given = draw(36, 56), draw(40, 56), draw(40), torch.float32, config, precision, machine
        return plain.plan_matmul(*given, scales)
    if name.startswith("grouped"):
        offsets = torch.tensor([0, 17, 17, 20, 56], dtype=torch.int32)
        x, dy, w, up, bias = draw(59, 20), draw(59, 40), draw(4, 40, 20), draw(4, 40, 20), draw(4, 40)
        how = config, "ieee", machine
        if name == "grouped_matmul":
            return grouped.plan_matmul([x] * (1 + halves), [w, up][: 1 + halves], offsets, bias, *how)
        if name == "grouped_gated":
            return grouped.plan_gated(x, w, up, offsets, "silu", True, *how)
        if name == "grouped_wgrad":
            return grouped.plan_wgrad(dy, x, offsets, torch.float32, *how)
        return grouped.plan_gated_backward(dy, draw(59, 40), draw(59, 40), offsets, "silu", machine)
    t, h = (5, 9000) if "wide" in name else (70, 40)  # the first in three parts
    x, other, dy, weight, r = draw(t, h), draw(t, h), draw(t, h), draw(h), draw(t)
    if name in ("rms_norm", "rms_norm_wide"):
        return pointwise.plan_rms_norm(x, other, weight, 1e-5, machine)
    if name.startswith("rms_norm"):  # one program walks all rows
        return pointwise.plan_rms_norm_backward(dy, other, x, weight, r, replace(machine, programs=0))
    if name == "swiglu":
        return pointwise.plan_swiglu(x, dy, "silu")
    if name == "swiglu_backward":
        return pointwise.plan_swiglu_backward(other, x, dy, "silu")
    if name == "rope":
        return pointwise.plan_rotate(
            draw(2, 3, 5, 12), draw(2, 3, 2, 12), draw(2, 3, 1, 6), draw(2, 3, 1, 6), 1
        )
    labels, y = torch.arange(t), torch.empty_like(x)  # one in every column, some in none
    if name == "logit_stats":
        return cross_entropy.plan_logit_stats(x, labels, 3, machine)
    return cross_entropy.plan_logit_gradient(x, y, labels, 3, r, dy[:, 0].contiguous(), machine), y
