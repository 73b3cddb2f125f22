"""The library's own fused kernels as cases: several calls on one workspace, small tiles, exact numbers.

A call is an operation with its shapes. Rotation of the slots and the epochs break only from the third call on, so the
cases make three, of different shapes, ragged and empty shards among them. Inputs are small integers: sums are
exact in fp32 and the result must equal the single-device formula bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fusedtp.ops.all_gather_matmul import gather_slot_bytes, plan_all_gather_matmul
from fusedtp.ops.all_gather_wgrad import plan_all_gather_wgrad
from fusedtp.ops.launch.config import HOST
from fusedtp.ops.matmul_all_reduce import all_reduce_slot_bytes, plan_one_shot, plan_two_shot
from fusedtp.ops.matmul_reduce_scatter import plan_matmul_reduce_scatter, scatter_slot_bytes
from fusedtp.ops.rows import split

from . import exchange_cases
from .call import TILE, Call
from .case import Case, Launch, Run, Work, compare
from .copies import beside_copies
from .exchange_cases import Routed, routed
from .faults import Mismatch
from .worlds import SimulatedWorld, launches


def slot_bytes(call: Call) -> int:
    """What the call needs in a slot."""
    if call.operation in exchange_cases.OPERATIONS:
        return exchange_cases.slot_bytes(call)
    rows, n, w = call.rows, call.widths[0], len(call.sizes)
    if call.operation in ("all_gather_matmul", "all_gather_wgrad"):
        return gather_slot_bytes(rows, call.k, call.dtype)
    if call.operation == "matmul_reduce_scatter":
        return scatter_slot_bytes(rows, n, call.dtype)
    return all_reduce_slot_bytes(rows.total, n, w, call.dtype, call.operation == "one_shot_all_reduce")


@dataclass
class Operands:
    """A call's inputs by rank and the outputs that must come out."""

    x: list[Tensor]
    weights: list[list[Tensor]]  # dys for a weight gradient
    biases: list[list[Tensor | None]]
    wanted: dict[str, list[Tensor]]


Given = Operands | Routed


def operands(call: Call, seed: int) -> Given:
    """Drawn from `seed`, with the single-device formula's results."""
    if call.operation in exchange_cases.OPERATIONS:
        return routed(call, seed)
    generator = torch.Generator().manual_seed(seed)
    w, rows = len(call.sizes), call.rows

    def draw(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=generator).to(call.dtype)

    if call.operation in ("all_gather_matmul", "all_gather_wgrad"):
        x = draw(rows.total, call.k)
        own = [torch.cat([*rows.blocks(x, r)]) for r in range(w)]
        if call.operation == "all_gather_wgrad":
            dys = [[draw(rows.total, n) for n in call.widths] for _ in range(w)]
            dw = {f"dw{i}": [_exact(dys[r][i].t(), x.t()) for r in range(w)] for i in range(len(call.widths))}
            return Operands(own, dys, [[None] * len(call.widths)] * w, dw)
        ws = [[draw(n, call.k) for n in call.widths] for _ in range(w)]
        bs: list[list[Tensor | None]] = [
            [draw(n) if call.bias and i == 0 else None for i, n in enumerate(call.widths)] for _ in range(w)
        ]
        y = {f"y{i}": [_exact(x, ws[r][i], bs[r][i]) for r in range(w)] for i in range(len(call.widths))}
        if call.keep:
            y["gathered"] = [x] * w
        return Operands(own, ws, bs, y)
    xs = [draw(rows.total, call.k_of(r)) for r in range(w)]
    parts = [[draw(call.widths[0], call.k_of(r))] for r in range(w)]
    bias = draw(call.widths[0]) if call.bias else None
    full = _exact(torch.cat(xs, 1), torch.cat([p[0] for p in parts], 1), bias)
    scattered = call.operation == "matmul_reduce_scatter"
    outs = [torch.cat([*rows.blocks(full, r)]) if scattered else full for r in range(w)]
    return Operands(xs, parts, [[bias]] * w, {"y": outs})


def _exact(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    y = x.double() @ w.double().t()
    return (y if b is None else y + b.double()).to(x.dtype)


def plan(
    call: Call, given: Given, world: SimulatedWorld, rank: int, signature: int
) -> tuple[Any, dict[str, Tensor]]:
    """This rank's launch of the call and its outputs by name, filled with NaN."""
    if isinstance(given, Routed):
        planned, outs = exchange_cases.plan_exchange(call, given, world.view(rank), rank, signature)
        for out in outs.values():
            out.fill_(torch.nan)
        return planned, outs
    x = given.x[rank].clone()
    weights = [w.clone() for w in given.weights[rank]]
    biases = [None if b is None else b.clone() for b in given.biases[rank]]
    view, w = world.view(rank), world.world_size
    where, end, copied = (view, rank, w), (signature, call.config, HOST), rank in call.copied
    if call.operation == "all_gather_matmul":
        planned, ys, gathered = plan_all_gather_matmul(
            *where, x, weights, biases, call.rows, signature, call.keep, call.config, HOST, copied
        )
        outs = {f"y{i}": y for i, y in enumerate(ys)}
        outs |= {} if gathered is None else {"gathered": gathered}
    elif call.operation == "all_gather_wgrad":
        planned, dws = plan_all_gather_wgrad(*where, x, weights, call.rows, *end, None, copied)
        outs = {f"dw{i}": dw for i, dw in enumerate(dws)}
    elif call.operation == "matmul_reduce_scatter":
        planned, y = plan_matmul_reduce_scatter(*where, x, weights[0], biases[0], call.rows, *end)
        outs = {"y": y}
    else:
        planner = plan_one_shot if call.operation == "one_shot_all_reduce" else plan_two_shot
        planned, y = planner(*where, x, weights[0], biases[0], *end)
        outs = {"y": y}
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
            begun = sum(isinstance(each, Launch) and each.name == "bump_epoch" for each in of_rank)
            of_rank.extend(beside_copies(planned, world, rank, call.rows, 1 + begun))
        else:
            of_rank.extend(launches(planned, world.epochs.tensors[rank]))
        made.append(named)
    return made


def fused_case(name: str, calls: Sequence[Call], *, seed: int = 0, link: int | None = None) -> Case:
    """A case of these calls, one after another on one workspace; `link` as SimulatedWorld takes it."""
    w = len(calls[0].sizes)
    given = [operands(call, seed + i) for i, call in enumerate(calls)]

    def make() -> Run:
        flags = 1 + max(2 * _chunks(call) for call in calls)
        world = SimulatedWorld(w, max(slot_bytes(call) for call in calls), flags, link)
        work: list[list[Work]] = [[] for _ in range(w)]
        outs: list[tuple[Given, list[dict[str, Tensor]]]] = []
        for i, (call, inputs) in enumerate(zip(calls, given, strict=True)):
            outs.append((inputs, issue(work, call, inputs, world, 101 + i)))
        return Run(work, world.memory, checker(outs), world.recorded)

    return Case(name, make, tuple(dict.fromkeys(call.operation for call in calls)))


def _chunks(call: Call) -> int:
    rows, columns = call.batch * max(sum(call.sizes), 1), -(-call.widths[0] // TILE)
    return 2 + max(-(-rows // call.chunk), -(-rows // TILE) * columns)


def checker(
    outs: Sequence[tuple[Given, list[dict[str, Tensor]]]],
) -> Callable[[], list[Mismatch]]:
    """What compares every call's outputs with what must come out."""

    def check() -> list[Mismatch]:
        found: list[Mismatch] = []
        for i, (given, made) in enumerate(outs):
            for name, want in given.wanted.items():
                found += compare(f"{name} of call {i}", [named[name] for named in made], want)
        return found

    return check


def _ragged(world_size: int, rows: int) -> tuple[int, ...]:
    """Uneven, the second rank without any."""
    return tuple(0 if r == 1 else rows + 5 * r % 7 for r in range(world_size))


def fused_cases(world_size: int = 4, dtype: torch.dtype = torch.float32) -> list[Case]:
    """Every fused kernel, three calls each: even, ragged with an empty shard, few rows; and all of them in a row.

    The even ones are of 16 bits, and what no peer writes goes by TMA.
    """
    w = world_size
    shapes = [(16,) * w, _ragged(w, 9), split(w + 1, w)]

    def calls(operation: str, **options: Any) -> list[Call]:
        ks = (16, 20, 5)
        made = [
            Call(operation, sizes, k=k, dtype=dtype, **options) for sizes, k in zip(shapes, ks, strict=True)
        ]
        half = torch.float16 if dtype == torch.float32 else dtype
        return [replace(made[0], dtype=half, tma=True), *made[1:]]

    cases = {
        "all_gather_matmul": calls("all_gather_matmul", widths=(17, 5), keep=True),
        "matmul_reduce_scatter": calls("matmul_reduce_scatter", chunk=1),
        "one_shot_all_reduce": calls("one_shot_all_reduce", chunk=1),
        "two_shot_all_reduce": calls("two_shot_all_reduce", chunk=1),
        "all_gather_wgrad": calls("all_gather_wgrad"),
        "moe_dispatch": calls("moe_dispatch"),
        "moe_combine": calls("moe_combine"),
        "moe_dispatch_matmul": calls("moe_dispatch_matmul"),
        "moe_matmul_combine": calls("moe_matmul_combine", chunk=1),
    }
    for name in ("moe_dispatch", "moe_dispatch_matmul", "moe_matmul_combine"):
        plain, two, few = cases[name]
        cases[name] = [plain, replace(two, keep=True), few]
    cases["mixed"] = [each[i % 3] for i, each in enumerate(cases.values())]
    return [fused_case(name, each, seed=7) for name, each in cases.items()]
