"""A captured graph as ranks replay it: one list of launches, the same arguments every time, eager calls between.

    stream of a rank     new inputs | the graph's launches | results kept | eager call | new inputs | the same launches

Nothing that the host knows changes from replay to replay; the number of a call lives on the device and is counted
there. So an odd number of calls, captured or eager, moves the slots on as it should. What an exchange of a mixture of
experts sends where is on the device too, and another with every replay: of the host's are the tokens and the room.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fusedtp.ops.launch import Launch as Planned

from .call import Call
from .case import Case, Copy, Run, Work
from .cases import Given, Operands, checker, issue, operands, plan, slot_bytes
from .exchange_cases import ROUTINGS, Routed
from .worlds import SimulatedWorld, launches

FLAGS = 64  # of a source
EXCHANGED = (  # what a replay of an exchange reads anew
    "x", "y", "x2", "w", "w2", "weights", "orders", "in_sources", "index", "begins", "places", "sources", "blocks",
    "arrivals", "origins", "offsets", "totals", "choices", "to", "at", "items",
)  # fmt: skip


def replayed_case(
    captured: Sequence[Call], eager: Sequence[Call | None], *, counted: bool = True, seed: int = 0
) -> Case:
    """A graph of the calls `captured`, replayed once for each entry of `eager`, which then runs if it is a call.

    counted: False leaves the epoch where the first replay has put it, as a graph does to which its number is baked in.
    """
    w = len(captured[0].sizes)
    every = [*captured, *(call for call in eager if call is not None)]

    def make() -> Run:
        world = SimulatedWorld(w, max(slot_bytes(call) for call in every), FLAGS)
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
                    work[rank] += [
                        Copy(out, torch.full_like(out, torch.nan)) for out in outs.values() if out.numel()
                    ]
                    both = launches(planned, world.epochs.tensors[rank])
                    work[rank] += both if counted or number == 0 else both[1:]
                    kept.append({name: out.clone() for name, out in outs.items()})
                    work[rank] += [Copy(kept[rank][name], out) for name, out in outs.items() if out.numel()]
                results.append((inputs, kept))
            if call is not None:
                inputs = operands(call, seed + 1000 + number)
                results.append((inputs, issue(work, call, inputs, world, 201 + number)))
        return Run(work, world.memory, checker(results), world.recorded)

    return Case("replays", make, tuple(dict.fromkeys(call.operation for call in every)))


def _refreshed(call: Call, made: Planned, inputs: Given, world: SimulatedWorld, rank: int) -> Iterator[Work]:
    """Copies of new inputs to where the captured launch finds its own."""
    if isinstance(inputs, Routed):
        other, _outs = plan(call, inputs, world, rank, 0)
        pairs = [(made.args[name], other.args[name]) for name in EXCHANGED if name in made.args]
    else:
        pairs = _operands(made.args, inputs, rank)
    for old, fresh in pairs:
        if old is not None and fresh is not None and old.numel():
            yield Copy(old, fresh.clone())


def _operands(args: dict[str, Any], inputs: Operands, rank: int) -> list[tuple[Any, Any]]:
    """Of a fused matmul: where its launch has each operand, and the new one."""
    weights = args["weights"] if "weights" in args else (args["w"],)
    biases = args["biases"] if "biases" in args else (args["bias"],)
    new = (inputs.x[rank], *inputs.weights[rank], *inputs.biases[rank])
    held = (
        getattr(each, "base", each) for each in (args["x"], *weights, *biases)
    )  # of a TMA descriptor its tensor
    return list(zip(held, new, strict=True))


def graph_cases(world_size: int) -> list[Case]:
    """One captured call and three, an eager call between some replays; ragged rows, one rank without any."""
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
    """Captured exchanges, alone, in pairs, with matmuls; other tokens in each replay, one rank without any."""
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
