"""The library's fused kernels as simulator cases: several calls on one workspace, small tiles, exact numbers.

A call is an operation with its shapes. Faults in slot rotation and epochs show only from the third call on, so the
cases make three calls, of different shapes, including ragged and empty shards.

    fused_cases     every kernel: those that operations declare and the MoE kernels
    meeting_case    calls of engines that the host sequences, each between two meetings of all ranks
    turns_case      MoE exchanges one after another; a fast rank may be one call ahead
    replayed_case   a captured graph with eager calls between replays
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fusedtp.ops.launch import Launch as Planned
from fusedtp.ops.launch.config import Machine
from fusedtp.ops.rows import split
from fusedtp.sim.case import Case, Copy, Launch, Mismatch, Run, Work, compare

from . import dense, experts
from .dense import (
    DECLARED,
    GPU,
    TILE,
    Call,
    Operands,
    SimulatedWorld,
    beside_copies,
    gpu,
    in_fp8,
    launched,
    meeting,
)
from .experts import ROUTINGS, Routed

Given = Operands | Routed
COLUMNS = 4  # of the tensor that meetings gather
FLAGS = 64  # per source
FP8_SINCE = 89  # sm_89 multiplies e4m3
EXCHANGED = (  # arguments that a replay of an exchange reads again
    "x", "y", "x2", "w", "w2", "weights", "orders", "in_sources", "index", "begins", "places", "sources", "blocks",
    "arrivals", "origins", "offsets", "totals", "choices", "to", "at",
)  # fmt: skip


# -- calls -----------------------------------------------------------------------------------------------------------


def slot_bytes(call: Call) -> int:
    """Bytes that the call needs in a slot."""
    return dense.slot_bytes(call) if call.operation in DECLARED else experts.slot_bytes(call)


def operands(call: Call, seed: int) -> Given:
    """Random operands from `seed`, with the results of the single-device formula."""
    return dense.operands(call, seed) if call.operation in DECLARED else experts.routed(call, seed)


def plan(
    call: Call, given: Given, world: SimulatedWorld, rank: int, signature: int
) -> tuple[Planned, dict[str, Tensor]]:
    """This rank's launch of the call and its outputs by name, filled with NaN."""
    if isinstance(given, Routed):
        planned, outs = experts.plan_exchange(call, given, world.view(rank), rank, signature, world.machine)
    else:
        planned, outs = dense.plan(call, given, world, rank, signature)
    for out in outs.values():
        out.fill_(torch.nan)
    return planned, outs


def issue(
    work: list[list[Work]], call: Call, given: Given, world: SimulatedWorld, signature: int
) -> list[dict[str, Tensor]]:
    """Append the call to every rank's work; return its outputs by rank and name."""
    made = []
    for rank, of_rank in enumerate(work):
        planned, named = plan(call, given, world, rank, signature)
        if rank in call.copied:
            begun = sum(isinstance(each, Launch) for each in of_rank)
            of_rank.extend(beside_copies(planned, world, rank, call.rows, 1 + begun))
        else:
            of_rank.append(launched(planned))
        made.append(named)
    return made


def fused_case(
    name: str,
    calls: Sequence[Call],
    *,
    seed: int = 0,
    machine: Machine = GPU,
    number: int = 0,
    by_switch: bool = False,
) -> Case:
    """A case of these calls, one after another on one workspace, planned for `machine`.

    number      calls made before the case
    by_switch   slots have a multicast address, see SimulatedWorld
    """
    w = len(calls[0].sizes)
    given = [operands(call, seed + i) for i, call in enumerate(calls)]

    def make() -> Run:
        flags = max(2 * _chunks(call) for call in calls)  # for partial sums and for results
        world = SimulatedWorld(w, max(slot_bytes(call) for call in calls), flags, machine, number, by_switch)
        work: list[list[Work]] = [[] for _ in range(w)]
        outs: list[tuple[Given, list[dict[str, Tensor]]]] = []
        for i, (call, inputs) in enumerate(zip(calls, given, strict=True)):
            outs.append((inputs, issue(work, call, inputs, world, 101 + i)))
        return Run(work, world.memory, checker(outs), world.recorded)

    return Case(name, make)


def _chunks(call: Call) -> int:
    rows, columns = call.batch * max(sum(call.sizes), 1), -(-call.widths[0] // TILE)
    return 2 + max(-(-rows // call.chunk), -(-rows // TILE) * columns)


def checker(
    outs: Sequence[tuple[Given, list[dict[str, Tensor]]]],
) -> Callable[[], list[Mismatch]]:
    """A check that compares every call's outputs with the expected ones."""

    def check() -> list[Mismatch]:
        found: list[Mismatch] = []
        for i, (given, made) in enumerate(outs):
            for name, want in given.wanted.items():
                found += compare(f"{name} of call {i}", [named[name] for named in made], want)
        return found

    return check


def fused_cases(world_size: int = 4, dtype: torch.dtype = torch.float32, machine: Machine = GPU) -> list[Case]:
    """Every fused kernel, three calls each: even, ragged with an empty shard, few rows; and "mixed", all kernels.

    The even calls are 16-bit, use TMA for operands that no peer writes, and their reduce-scatter adds two products.
    Kernels with fp8 matmuls quantize to fp8, on machines that support it.
    """
    w = world_size
    ragged = tuple(0 if r == 1 else 9 + 5 * r % 7 for r in range(w))  # uneven; the second rank has none
    shapes = [(16,) * w, ragged, split(w + 1, w)]

    def calls(operation: str, **options: Any) -> list[Call]:
        ks = (16, 20, 5)
        made = [Call(operation, sizes, k=k, dtype=dtype, **options) for sizes, k in zip(shapes, ks, strict=True)]
        first = replace(made[0], dtype=torch.float16 if dtype == torch.float32 else dtype, tma=True)
        if machine.capability >= 90:  # wgmma requires 64 rows
            first = replace(first, tile=64, block_k=32, k=80 if in_fp8(operation) else 72)
        return [first, *made[1:]]

    cases = {
        name: calls(name, **kernel.example)
        for name, (_, kernel) in DECLARED.items()
        if not kernel.in_fp8 or machine.capability >= FP8_SINCE
    }
    cases |= {
        "moe_dispatch": calls("moe_dispatch"),
        "moe_combine": calls("moe_combine"),
        "moe_dispatch_matmul": calls("moe_dispatch_matmul"),
        "moe_matmul_combine": calls("moe_matmul_combine", chunk=1),
    }
    summed = cases["matmul_reduce_scatter"]
    cases["matmul_reduce_scatter"] = [
        replace(summed[0], products=2, transposed=True, widths=(16,)),
        *summed[1:],
    ]
    for name in (
        "matmul_reduce_scatter",
        "two_shot_all_reduce",
    ):  # several chunks per owner in a round, or none
        cases[name][1] = replace(cases[name][1], programs=(2, 2 * w - 1), widths=(33,))
    reduced = cases["multimem_all_reduce"]
    reduced[1] = replace(reduced[1], programs=(1, 1), widths=(33,))  # sums and copies between the matmuls
    if machine.capability >= 90:
        gathered = cases["all_gather_matmul"]
        gathered.append(replace(gathered[0], widths=(16, 8), transposed=True))
    for name in experts.OPERATIONS:  # several senders that share a flag
        plain, two, few = cases[name]
        cases[name] = [plain, replace(two, keep=name != "moe_combine", programs=(2, 2)), few]
    cases["mixed"] = [each[i % 3] for i, each in enumerate(cases.values())]
    made = [fused_case(name, each, seed=7, machine=machine) for name, each in cases.items()]
    if machine.capability >= 90:
        reduced = cases["multimem_all_reduce"]
        made.append(fused_case("switch_all_reduce", reduced, seed=7, machine=machine, by_switch=True))
    return made


def compiled_cases(world_size: int, target: str) -> list[Case]:
    """Every fused kernel as launched on this target: pipelined, with the target's features.

    On sm_90 the 16-bit calls use tiles for wgmma, and TMA; the others use pointers and mma.sync.
    """
    machine = gpu(target)
    fused = fused_cases(world_size, machine=machine)
    return [*fused, turns_case(world_size, machine), meeting_case(world_size, machine=machine)]


# -- meetings ----------------------------------------------------------------------------------------------------------


def meeting_case(world_size: int, *, seed: int = 0, machine: Machine = GPU) -> Case:
    """Gathers by copies, of even, ragged and few rows, with two fused gathers among them.

        stream of a rank     copy x to the own slot | meet | copy peers' slots out | meet

    Both kinds of calls may alternate, and they share slots, flags and the epoch. Copies choose the slot by the host's
    count of calls, kernels by the device's epoch, and the two drift apart. So after a fused kernel all ranks meet
    before they copy (Note [After a fused kernel] in comm/workspace.py).

    The first fused gather has no columns, so a rank leaves it before its peers' rows have landed in the slot that is
    copied to next.
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
        [] if isinstance(call, Call) else [torch.randn(n, COLUMNS, generator=generator) for n in call] for call in calls
    ]
    slot = 4 * COLUMNS * 3 * w

    def make() -> Run:
        world = SimulatedWorld(w, slot, 16, machine)
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

    return Case("meet", make)


def _gather(
    world: SimulatedWorld, work: list[list[Work]], shards: list[Tensor], number: int, opening: bool
) -> list[Tensor]:
    """Append a gather of its shard to every rank's work; return the outputs."""
    outs = []
    slots = [
        world.data.tensors[p][number & 1, : 4 * shard.numel()].view(torch.float32) for p, shard in enumerate(shards)
    ]
    for rank, shard in enumerate(shards):
        out = torch.full((sum(len(s) for s in shards), COLUMNS), torch.nan)
        parts = out.view(-1).split([s.numel() for s in shards])
        meet = meeting(world, rank, 301 + number)
        fetches = [Copy(parts[p], slots[p], pieces=2) for p in range(world.world_size) if p != rank and len(shards[p])]
        own = [Copy(to, shard.view(-1).clone()) for to in (slots[rank], parts[rank]) if len(shard)]
        work[rank] += [*([meet] if opening else []), *own, meet, *fetches, meet]
        outs.append(out)
    return outs


# -- exchanges in turn -------------------------------------------------------------------------------------------------


def turns(world_size: int) -> list[Call]:
    """Six calls; in each, another rank has no tokens. Some route all tokens to the first or last experts or to none."""
    w = world_size
    sizes = [tuple(0 if r == i % w else 3 + (r + i) % 3 for r in range(w)) for i in range(1, 6)]
    return [
        Call("moe_dispatch", sizes[0], k=5, chunk=2, routing="first"),
        Call("moe_combine", sizes[1], (7,), chunk=2, routing="none"),
        Call("moe_combine", sizes[2], (5,), chunk=2),
        Call("moe_dispatch", sizes[3], k=3, chunk=2, routing="last"),
        Call("moe_dispatch", sizes[4], k=7, chunk=2),
        Call("moe_combine", (1,) * w, (5,), chunk=2, routing="first"),
    ]


def turns_case(world_size: int, machine: Machine = GPU) -> Case:
    """The calls of `turns` on one workspace.

    The contents of a slot change from call to call: own tokens that peers read, or rows pushed by many peers, by one,
    or by none; some ranks have no tokens and some experts no rows. Every rank must still receive a signal from every
    other rank in every call, see Note [Two rotating buffers] in kernels/signals.py.
    """
    return fused_case("moe_turns", turns(world_size), seed=11, machine=machine)


# -- replayed graphs ---------------------------------------------------------------------------------------------------


def replayed_case(
    captured: Sequence[Call], eager: Sequence[Call | None], *, counted: bool = True, seed: int = 0,
    machine: Machine = GPU,
) -> Case:  # fmt: skip
    """A graph of the calls `captured`, replayed once for each entry of `eager`; the entry then runs if it is a call.

        stream of a rank     new inputs | the graph's launches | results kept | eager call | new inputs | the same ...

    All host state is the same in every replay; the number of a call is counted on the device. So an odd number of
    calls, captured or eager, rotates the slots correctly. The routing of a MoE exchange is also on the device and
    changes with every replay; only the number of tokens and the capacity are known to the host.

    counted: False resets the epoch to that of the first replay, like a graph with a call number baked in.
    """
    w = len(captured[0].sizes)
    every = [*captured, *(call for call in eager if call is not None)]

    def make() -> Run:
        world = SimulatedWorld(w, max(slot_bytes(call) for call in every), FLAGS, machine)
        work: list[list[Work]] = [[] for _ in range(w)]
        results: list[tuple[Given, list[dict[str, Tensor]]]] = []
        given = [operands(call, seed) for call in captured]
        graph = [
            [plan(call, inputs, world, rank, 101 + i) for rank in range(w)]
            for i, (call, inputs) in enumerate(zip(captured, given, strict=True))
        ]
        for number, call in enumerate(eager):
            for i, made in enumerate(graph):
                routing = ROUTINGS[(number + i) % len(ROUTINGS)]
                inputs = operands(replace(captured[i], routing=routing), seed + 10 * number + i)
                kept: list[dict[str, Tensor]] = []
                for rank, (planned, outs) in enumerate(made):
                    work[rank] += _refreshed(captured[i], planned, inputs, world, rank)
                    work[rank] += [Copy(out, torch.full_like(out, torch.nan)) for out in outs.values() if out.numel()]
                    if not counted:  # the number of the first replay, as if baked into the graph
                        work[rank].append(Copy(world.epochs.tensors[rank][:1], torch.full((1,), 1 + i).int()))
                    work[rank].append(launched(planned))
                    kept.append({name: out.clone() for name, out in outs.items()})
                    work[rank] += [Copy(kept[rank][name], out) for name, out in outs.items() if out.numel()]
                results.append((inputs, kept))
            if call is not None:
                inputs = operands(call, seed + 1000 + number)
                results.append((inputs, issue(work, call, inputs, world, 201 + number)))
        return Run(work, world.memory, checker(results), world.recorded)

    return Case("replays", make)


def _refreshed(call: Call, made: Planned, inputs: Given, world: SimulatedWorld, rank: int) -> Iterator[Work]:
    """Copies of new inputs to the tensors of the captured launch."""
    if isinstance(inputs, Routed):
        other, _outs = plan(call, inputs, world, rank, 0)
        pairs = [(made.args[name], other.args[name]) for name in EXCHANGED if name in made.args]
    else:
        pairs = _operands(made.args, inputs, rank)
    for old, fresh in pairs:
        if old is not None and fresh is not None and old.numel():
            yield Copy(old, fresh.clone())


def _operands(args: dict[str, Any], inputs: Operands, rank: int) -> list[tuple[Any, Any]]:
    """For a fused matmul: pairs of a tensor of its launch and the new operand."""
    new = (inputs.x[rank], *inputs.others[rank], *inputs.biases[rank])
    if "xs" in args:
        held = (*args["xs"], *args["ws"], args["bias"])
    else:
        held = (args["x"], *args["weights"], *args["biases"])
    return list(zip(held, new, strict=True))


def graph_cases(world_size: int) -> list[Case]:
    """Graphs of one call and of three, with eager calls between some replays; ragged rows, one rank has none."""
    w = world_size
    ragged = tuple(0 if r == 1 else 3 + r % 2 for r in range(w))
    gather = Call("all_gather_matmul", ragged, (5,), k=4, chunk=2, keep=True)
    scatter = Call("matmul_reduce_scatter", (2,) * w, (5,), k=8, dtype=torch.float16, chunk=1, tma=True)
    reduce = Call("one_shot_all_reduce", (1,) * w, (5,), k=4, chunk=1)
    eager = Call("two_shot_all_reduce", (2,) * w, (5,), k=4, chunk=1)
    one = replayed_case([gather], [None, eager, replace(gather, sizes=(1,) * w), None])
    three = replayed_case([gather, scatter, reduce], [None, eager, None])
    return [replace(one, name="one call"), replace(three, name="three calls"), *exchange_cases(w)]


def exchange_cases(world_size: int) -> list[Case]:
    """Captured exchanges, alone, in pairs, with matmuls; new routing in each replay; one rank has no tokens."""
    ragged = tuple(0 if r == 1 else 3 + r % 2 for r in range(world_size))
    dispatch = Call("moe_dispatch", ragged, k=5, chunk=2)
    combine = Call("moe_combine", ragged, (5,), chunk=2)
    fewer = replace(dispatch, sizes=(1,) * world_size)
    first = Call("moe_dispatch_matmul", ragged, (5,), k=4, chunk=2, keep=True)
    last = Call("moe_matmul_combine", ragged, (5,), k=4, chunk=1)
    one = replayed_case([dispatch], [None, fewer, combine, None])
    both = replayed_case([dispatch, combine], [None, fewer, None])
    layer = replayed_case([first, last], [None, fewer, None])
    gradients = replayed_case([replace(first, keep=False), replace(last, keep=True)], [None, fewer, None])
    return [
        replace(one, name="a dispatch"),
        replace(both, name="a dispatch and a combine"),
        replace(layer, name="both with their matmuls"),
        replace(gradients, name="their gradients"),
    ]
