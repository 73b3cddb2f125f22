"""What the custom ops do, by the engine that was chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedtp.comm import Communicator, communicator
from fusedtp.comm.constant import constant_to_compiler
from fusedtp.comm.device_view import runs_kernels
from fusedtp.comm.workspace import FLAGS_PER_SOURCE

from .. import engines
from ..engines import Choice
from . import alone, chunked, collective, fused, grouped_engines, layout, plan, weigh
from .plan import Blocks, Exchange, Plan

FUSED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@constant_to_compiler
def engine_of(group: str | None, engine: str, dtype: torch.dtype) -> str:
    """Which sibling runs; a constant to torch.compile. Raises as `choose`."""
    return choose(None if group is None else communicator(group), engine, dtype).engine


def choose(comm: Communicator | None, engine: str, dtype: torch.dtype) -> Choice:
    """Which sibling runs, and why. Raises ValueError for one that is not to be had here."""
    if engine not in engines.ENGINES:
        raise ValueError(f"engine is {engine!r}; it must be one of {', '.join(engines.ENGINES)}")
    if comm is None or comm.world_size == 1:
        return Choice("local", "a group of one rank has nothing to communicate")
    on_cpu = comm.device.type == "cpu"
    if not comm.has_workspace:
        return Choice("collective", f"no shared memory: {comm.fallback}")
    if engine == "auto":
        if on_cpu:
            return Choice("chunked", "CPU ranks read their peers' tokens in place")
        if runs_kernels(comm.device) and dtype in FUSED_DTYPES:
            return Choice("triton", "kernels read on the device what goes where")
        return Choice(
            "collective", f"no kernels for {dtype} on this device; the host waits to learn what goes where"
        )
    if engine == "triton":
        engines.check_triton(comm, dtype)
    elif engine == "chunked" and not on_cpu:
        raise ValueError("engine 'chunked' of a mixture of experts reads peers' memory on the host: CPU only")
    return Choice(engine, "asked for")


def _comm(at: Exchange) -> Communicator | None:
    return None if at.engine == "local" else communicator(at.group)


def _sibling(at: Exchange) -> Any:
    return {"local": alone, "chunked": chunked, "collective": collective, "triton": fused}[at.engine]


def _count(at: Exchange, operation: str) -> None:
    if at.group:
        communicator(at.group).count(operation, at.engine, at.layer)


def make_plan(expert_ids: Tensor, at: Exchange) -> Plan:
    """expert_ids [T_r, k] -> the plan."""
    table, orders = plan.exchange(_comm(at), expert_ids, at)
    words = layout.packed(table, at) if at.engine == "triton" else table.new_empty(0)
    return Plan(table, orders, words)


def scatter(
    x: Tensor,
    scalars: Tensor | None,
    at_plan: Plan,
    at: Exchange,
    then: Callable[[Tensor, slice], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """x [T_r, K], scalars [T_r, k] -> rows [max_rows, K] and theirs [max_rows], or [0].

    `then` is called with the rows and which of them it may look at: once for each.
    """
    _count(at, "moe_dispatch")
    if at.engine == "chunked":
        return chunked.move(communicator(at.group), x, scalars, at_plan, at, then)
    rows, of_rows = _sibling(at).move(_comm(at), x, scalars, at_plan, at)
    if then is not None:
        then(rows, slice(0, known_rows(at_plan, at)))
    return rows, of_rows


def scatter_matmul(
    x: Tensor,
    scalars: Tensor | None,
    weights: Sequence[Tensor],
    offsets: Tensor,
    act: str,
    keep: bool,
    at_plan: Plan,
    at: Exchange,
) -> list[Tensor]:
    """As `scatter`, then y [max_rows, N] = rows @ w[e].T, or of gate and up."""
    _count(at, "moe_dispatch_matmul")
    comm = communicator(at.group)
    if at.engine == "triton":
        return fused.move_matmul(comm, x, scalars, weights, offsets, act, keep, at_plan, at)
    moved = chunked.move(comm, x, scalars, at_plan, at)
    if act:
        gate, up = weights
        return [*moved, *grouped_engines.gated(at.engine, moved[0], gate, up, offsets, act, keep)]
    return [*moved, grouped_engines.matmul(at.engine, moved[:1], weights, offsets, None)]


def gather(y: Tensor, weights: Tensor | None, at_plan: Plan, at: Exchange) -> Tensor:
    """y [max_rows, N], weights [T_r, k] or None for ones -> [T_r, N]."""
    return _collect(y, _places(at_plan, at), weights, at_plan, at)


def multiply_and_gather(
    hs: Sequence[Tensor],
    experts: Sequence[Tensor],
    offsets: Tensor,
    weights: Tensor | None,
    at_plan: Plan,
    at: Exchange,
) -> Tensor:
    """hs [max_rows, K], experts [E_r, N, K], one each, weights [T_r, k] or None for ones -> [T_r, N]."""
    _count(at, "moe_matmul_combine")
    comm, places = communicator(at.group), _places(at_plan, at)
    summed: Tensor = _sibling(at).multiply_and_collect(
        comm, hs, experts, offsets, places, weights, at_plan, at
    )
    return summed


def multiplies_and_gathers(at: Exchange, dtype: torch.dtype) -> bool:
    """Whether both are done in one call: by what all ranks share."""
    fits = dtype in FUSED_DTYPES and at.experts_here < FLAGS_PER_SOURCE - 1
    return at.engine == "chunked" or (at.engine == "triton" and fits)


def gather_slots(scalars: Tensor, at_plan: Plan, at: Exchange) -> Tensor:
    """scalars [max_rows] of the rows -> [T_r, k] of the slots, zero of dropped ones."""
    each = _places(at_plan, at).reshape(-1, 1)
    return _collect(scalars[:, None], each, None, at_plan, at).view(at.tokens, at.top_k)


def _places(at_plan: Plan, at: Exchange) -> Tensor:
    """[T_r, k]: where each slot stands in this rank's order."""
    return weigh.places_of(at_plan.orders[at.slots_of(at.rank)]).view(at.tokens, at.top_k)


def _collect(y: Tensor, choices: Tensor, weights: Tensor | None, at_plan: Plan, at: Exchange) -> Tensor:
    _count(at, "moe_combine")
    if at.engine in ("chunked", "triton"):
        summed: Tensor = _sibling(at).collect(communicator(at.group), y, choices, weights, at_plan, at)
        return summed
    return weigh.weighted_sum(_sibling(at).pull(_comm(at), y, at_plan, at), choices, weights)


def known_rows(at_plan: Plan, at: Exchange) -> int:
    """How many rows are worth computing with: this rank's where the host knows, else all that there is room for."""
    on_host = at_plan.table.device.type == "cpu" or at.engine == "collective"
    return Blocks(at_plan.table, at).rows[at.rank] if on_host else at.max_rows
