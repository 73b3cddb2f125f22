"""Dispatch and combine as users call them: shapes and values checked, then the custom ops of library.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fusedtp.comm import Group, Place, place, propagate_errors

from . import library as _library
from . import weigh
from .exchange import engine_of
from .plan import Blocks, Exchange, Plan, offsets_of
from .wire import fault

assert _library

ALONE = Place("", 0, 1, "")  # without a group


@dataclass(frozen=True, eq=False)
class MoEHandle:
    """What a combine needs of its dispatch.

    weights       [T_r, k]    as given, with their graph; zero where a choice is dropped
    row_weights   [max_rows]  of the rows that this rank's experts got
    plan, at                  see plan.py
    offsets       [E_r + 1]   int32
    """

    weights: Tensor
    row_weights: Tensor = field(repr=False)
    plan: Plan = field(repr=False)
    at: Exchange
    offsets: Tensor

    @property
    def counts(self) -> Tensor:
        """int32 [E]: rows of every expert, of all ranks' tokens."""
        return self.plan.table.sum(0, dtype=torch.int32)


def moe_dispatch(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    num_experts: int,
    group: Group | None,
    *,
    max_rows: int | None = None,
    sizes: Sequence[int] | None = None,
    engine: str = "auto",
    layer: str = "",
    weights_sum: float | None = None,
    wire: str = "",
) -> tuple[Tensor, Tensor, MoEHandle]:
    """Send each token to the experts that it chose. Rank r owns the experts r E / W, ..., (r + 1) E / W - 1.

        x            [T_r, K]  this rank's tokens, which may be none
        expert_ids   [T_r, k]  integers below num_experts, those of a token all different; -1 drops a choice
        weights      [T_r, k]  what the combine multiplies the experts' outputs by; of dropped choices never looked at
        group                  ProcessGroup, 1-D DeviceMesh, VirtualGroup or name; None where all experts are here
        max_rows               room for rows of this rank's experts, the same on all ranks; default what any routing
                               needs, T * min(k, E / W), or on CPU in eager code what did come
        sizes                  tokens of every rank; default as many as here on all of them
        weights_sum            what the weights of a token should sum to; checked on CPU, of tokens without a dropped
                               choice, up to the rounding of weights.dtype
        wire                   "": rows travel as x is; "fp8": in fp8-e4m3 with a scale for each 128 columns, rounded so
                               on one rank too; see wire.py. Gradients pass as if it were not there
        return rows  [max_rows, K]  by expert, source rank and slot (token * k + choice)
               offsets  int32 [E / W + 1]  where each expert's rows begin; rows past the last one are undefined
               handle   for moe_combine

    Gradients reach x here, the weights in moe_combine. Rows of an expert are in the order of all ranks' tokens, so
    what an expert computes does not depend on how tokens or experts are split.
    Raises ValueError for shapes, ids, or weights that do not fit (on CPU also for their values), and for more rows
    than max_rows, on all ranks alike (what a kernel finds, fusedtp.check raises as TooManyRows); SignatureMismatch
    naming the rank that differs in num_experts, k, max_rows, dtype or width.
    """
    at = ALONE if group is None else place(group)
    with propagate_errors(at):
        plan, where = planned(
            x, expert_ids, weights, num_experts, at, max_rows, sizes, engine, layer, weights_sum, wire
        )
        if host_knows(plan, where):
            where = _known_room(plan, where)
        return send(x, without_dropped(weights, expert_ids), plan, where)


def planned(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    num_experts: int,
    at: Place,
    max_rows: int | None,
    sizes: Sequence[int] | None,
    engine: str,
    layer: str,
    weights_sum: float | None,
    wire: str,
) -> tuple[Plan, Exchange]:
    """What was given, checked, and the plan that all ranks make of it. Whether there is room is not looked at."""
    where = _exchange(x, expert_ids, weights, num_experts, at, max_rows, sizes, engine, layer, wire)
    ids = expert_ids.detach()
    if ids.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_values(ids, weights.detach(), num_experts, at)
        if weights_sum is not None:
            _check_sums(ids, weights.detach(), weights_sum, at)
    return Plan(*torch.ops.fusedtp.moe_plan(ids, *where.flat)), where


def without_dropped(weights: Tensor, expert_ids: Tensor) -> Tensor:
    """Zero, whatever was given, where a choice is dropped: a NaN there would come out of a product with nothing."""
    return weights.masked_fill(expert_ids < 0, 0.0)


def send(x: Tensor, weights: Tensor, plan: Plan, at: Exchange) -> tuple[Tensor, Tensor, MoEHandle]:
    """The rows of a plan on their way, as moe_dispatch returns them."""
    weights = weights.to(weigh.accumulator(x.dtype))
    rows, row_weights = torch.ops.fusedtp.moe_dispatch(x, weights.detach(), *plan, *at.flat)
    offsets = offsets_of(plan.table, at)
    return rows, offsets, MoEHandle(weights, row_weights, plan, at, offsets)


def host_knows(plan: Plan, at: Exchange) -> bool:
    """Whether the host reads the plan anyhow, in eager code: on CPU, and for the process group's all_to_all."""
    on_host = plan.table.device.type == "cpu" or at.engine == "collective"
    return on_host and not torch.compiler.is_compiling()


def check_outputs(y: Tensor, at: Exchange) -> None:
    """Raises ValueError for outputs of experts of another number of rows than they were given."""
    if y.dim() != 2 or y.shape[0] != at.max_rows:
        raise ValueError(
            f"rank {at.rank}: y has shape {tuple(y.shape)}, wanted [{at.max_rows}, N] as it was dispatched"
        )


def moe_combine(y: Tensor, handle: MoEHandle) -> Tensor:
    """Bring the experts' outputs back and add up each token's.

        y        [max_rows, N]  in the order of the dispatched rows; rows past offsets[-1] are never read
        handle                  of the dispatch
        return   [T_r, N]       sum over a token's choices of weight * y, in their order, in fp32, rounded once

    Dropped choices add nothing. Gradients reach y and the weights.
    Raises ValueError for a y of another number of rows.
    """
    at = handle.at
    with propagate_errors(ALONE if not at.group else place(at.group)):
        check_outputs(y, at)
        out: Tensor = torch.ops.fusedtp.moe_combine(
            y, handle.weights, handle.row_weights, *handle.plan, *at.flat
        )
        return out


def _exchange(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    num_experts: int,
    at: Place,
    max_rows: int | None,
    sizes: Sequence[int] | None,
    engine: str,
    layer: str,
    wire: str,
) -> Exchange:
    who = f"rank {at.rank}: "
    _check_shapes(x, expert_ids, weights, num_experts, at)
    k = expert_ids.shape[1]
    if num_experts < 1 or num_experts % at.world_size:
        raise ValueError(f"{who}num_experts is {num_experts}, no multiple of the {at.world_size} ranks")
    counts = (x.shape[0],) * at.world_size if sizes is None else tuple(int(n) for n in sizes)
    if len(counts) != at.world_size or min(counts) < 0 or counts[at.rank] != x.shape[0]:
        raise ValueError(
            f"{who}sizes is {list(counts)}; wanted {at.world_size} token counts, {x.shape[0]} of them here"
        )
    if max_rows is not None and max_rows < 0:
        raise ValueError(f"{who}max_rows is {max_rows}, must not be negative")
    cannot = fault(wire, x.dtype)
    if cannot:
        raise ValueError(who + cannot)
    chosen = engine_of(at.name or None, engine, x.dtype)
    bound = -1 if max_rows is None else max_rows
    where = Exchange(at.name, at.rank, counts, num_experts, k, 0, chosen, layer, bound, wire)
    most = where.most_rows
    return where._replace(max_rows=most if max_rows is None else min(max_rows, most))


def check_choices(x: Tensor, expert_ids: Tensor, weights: Tensor, num_experts: int, at: Place) -> None:
    """Raises ValueError for choices that do not fit x, and where the host may look, for their values."""
    _check_shapes(x, expert_ids, weights, num_experts, at)
    if expert_ids.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_values(expert_ids.detach(), weights.detach(), num_experts, at)


def _check_shapes(x: Tensor, expert_ids: Tensor, weights: Tensor, num_experts: int, at: Place) -> None:
    who = f"rank {at.rank}: "
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"{who}x is {x.dtype} {tuple(x.shape)}; wanted floating-point tokens [T_r, K]")
    if expert_ids.dim() != 2 or expert_ids.shape[0] != x.shape[0] or expert_ids.shape[1] < 1:
        raise ValueError(
            f"{who}expert_ids has shape {tuple(expert_ids.shape)}; wanted [{x.shape[0]}, k >= 1]"
        )
    if expert_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{who}expert_ids is {expert_ids.dtype}; wanted int32 or int64")
    if weights.shape != expert_ids.shape or not weights.is_floating_point():
        raise ValueError(
            f"{who}weights is {weights.dtype} {tuple(weights.shape)}; wanted one for each of expert_ids, "
            f"{tuple(expert_ids.shape)}"
        )
    k = expert_ids.shape[1]
    if k > num_experts:
        raise ValueError(f"{who}{k} choices a token of {num_experts} experts")


def _check_values(ids: Tensor, weights: Tensor, num_experts: int, at: Place) -> None:
    """On CPU, where looking costs no wait."""
    who = f"rank {at.rank}: "
    if not ids.numel():
        return
    least, most = ids.aminmax()
    if least < -1 or most >= num_experts:
        t, j = ((ids < -1) | (ids >= num_experts)).nonzero()[0].tolist()
        raise ValueError(f"{who}expert_ids[{t}, {j}] is {int(ids[t, j])}; there are {num_experts} experts")
    ordered = ids.sort(1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if twice.any():
        t, j = twice.nonzero()[0].tolist()
        raise ValueError(f"{who}token {t} chose expert {int(ordered[t, j])} twice: {ids[t].tolist()}")
    if weights.sum().isfinite():  # in one pass; a sum may overflow where no weight does
        return
    bad = ~weights.isfinite() & (ids >= 0)
    if bad.any():
        t, j = bad.nonzero()[0].tolist()
        raise ValueError(f"{who}weights[{t}, {j}] is {float(weights[t, j])}")


def _check_sums(ids: Tensor, weights: Tensor, wanted: float, at: Place) -> None:
    """Each of k weights has a few roundings (a score, a sum of k, a quotient, the scale); their sum here has none."""
    wide = weights.double()
    sums, k = wide.sum(1), ids.shape[1]
    explained = (k + 8) * torch.finfo(weights.dtype).eps * wide.abs().sum(1).clamp(min=abs(wanted))
    bad = ((sums - wanted).abs() > explained) & (ids >= 0).all(1)
    if bad.any():
        t = int(bad.nonzero()[0])
        raise ValueError(
            f"rank {at.rank}: the weights of token {t} sum to {float(sums[t]):.9g}, wanted {wanted:.9g}"
        )


def _known_room(plan: Plan, at: Exchange) -> Exchange:
    """Where the host knows the plan: ValueError on all ranks where one has too many rows, room for no more else."""
    blocks = Blocks(plan.table, at)
    blocks.check_room(at)
    return at if at.bound >= 0 or at.engine == "triton" else at._replace(max_rows=blocks.rows[at.rank])
