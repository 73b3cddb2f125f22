"""transformers' experts with this library's exchange: each rank holds whole experts, and tokens travel to them.

    own rows of the tokens --moe_dispatch--> rows by expert --the experts' own forward--> rows --moe_combine--> own rows

The module of the experts keeps its forward. It is called with the received rows, each with a single choice: the local
index of its expert on this rank, and a weight of one; routing weights are applied on the token's own rank. Without
sequence parallelism, a rank takes its part of the tokens first and gathers afterwards.

The style names are those of an ep_plan: `ep_dispatch_experts` for the module, `grouped_gemm` for its weights.
registry.py offers the same to transformers itself, as ep_implementation="fusedtp".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Shard

from fusedtp.comm import Communicator
from fusedtp.ops.moe import moe_combine, moe_dispatch, moe_rounds, usual_room
from fusedtp.ops.rows import split
from fusedtp.ops.tokens import gather_tokens, take_tokens

from .foreign import Own, own_forward
from .foreign_styles import Foreign, install
from .placement import Mesh, Placement
from .token_shard import TokenShard


def exchanged(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    experts: Callable[[Tensor, Tensor, Tensor], Tensor],
    num_here: int,
    world_size: int,
    group: str,
    sizes: Sequence[int],
    engine: str = "auto",
    layer: str = "",
) -> Tensor:
    """x [T_r, H], expert_ids and weights [T_r, k] -> [T_r, H].

    experts    (rows [R, H], local expert index [R, 1], weights [R, 1]) -> [R, H]; the index num_here means no expert
    num_here   number of experts on each rank

    The capacity is the default of fusedtp.nn.Experts: see fusedtp.ops.moe.usual_room.
    """

    def compute(rows: Tensor, offsets: Tensor) -> Tensor:
        at = torch.arange(rows.shape[0], device=x.device)
        numbers = torch.searchsorted(offsets[1:].contiguous(), at, right=True)  # num_here for rows past the last
        used = numbers < num_here
        rows = rows.masked_fill(~used[:, None], 0.0)
        ones = used.to(rows.dtype)[:, None]
        if rows.shape[0]:
            return experts(rows, numbers[:, None], ones)
        # use a row of zeros, so that every rank has the graph and its exchanges
        return experts(rows.sum(0, keepdim=True), numbers.new_zeros(1, 1), rows.new_zeros(1, 1))[:0]

    given = x, expert_ids, weights, num_here * world_size, group
    how: dict[str, Any] = dict(sizes=sizes, engine=engine, layer=layer)
    room = usual_room(group, x, expert_ids, num_here * world_size, sizes, engine)
    if room is not None:
        y, _ = moe_rounds(*given, compute, max_rows=room, **how)
        return y
    rows, offsets, handle = moe_dispatch(*given, **how)
    return moe_combine(compute(rows, offsets), handle)


@dataclass(frozen=True, kw_only=True)
class Dispatched(Own):
    """Experts of a module, some of them on this rank."""

    rank: int
    engine: str
    num_here: int

    def look(self, module: Any, inputs: Any) -> None:
        """Nothing to learn: ranks see different tokens and hold different experts, so no gradient is partial."""


def dispatched(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward of such experts: hidden [T, H], index and weights [T, k] -> [T, H]."""
    at: Dispatched = self.parallel

    def experts(rows: Tensor, numbers: Tensor, ones: Tensor) -> Tensor:
        y: Tensor = own_forward(self, rows, numbers, ones)
        return y

    parts = tuple(split(hidden_states.shape[:-1].numel(), at.world_size))
    if isinstance(hidden_states, TokenShard):
        like, parts = hidden_states, hidden_states.tokens.sizes
        x, index, weights = (_rows(each, like) for each in (hidden_states, top_k_index, top_k_weights))
        y = exchanged(x, index, weights.to(x.dtype), experts, at.num_here, at.world_size, at.members, parts, at.engine)
        return like.like(y)
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    x, weights = (
        take_tokens(each, at.members, parts) for each in (x, top_k_weights.reshape(x.shape[0], -1).to(x.dtype))
    )
    begin = sum(parts[: at.rank])
    index = top_k_index.reshape(-1, weights.shape[1])[begin : begin + parts[at.rank]]
    y = exchanged(x, index, weights, experts, at.num_here, at.world_size, at.members, parts, at.engine)
    return gather_tokens(y, at.members, parts).reshape(hidden_states.shape)


def _rows(x: Tensor, like: TokenShard) -> Tensor:
    """This rank's rows of a tensor over the same tokens as `like`."""
    if isinstance(x, TokenShard):
        return x.local
    return like.tokens.own(x.reshape(sum(like.tokens.sizes), -1))


class ExpertsByRank(Foreign):
    """Whole experts on every rank."""

    def faults(self, module: Any, world_size: int) -> list[str]:
        if not isinstance(getattr(module, "num_experts", None), int):
            return [f"{type(module).__name__} has no integer attribute num_experts"]
        if module.num_experts % world_size:
            return [f"{module.num_experts} experts cannot be divided evenly among {world_size} ranks"]
        of_each = [p.shape[0] == module.num_experts for p in module.parameters()]
        if not all(of_each) or not of_each:
            return [f"{type(module).__name__} needs parameters [num_experts, ...], with one entry per expert"]
        return []

    def placement(self, name: str, parameter: Tensor) -> Placement:
        return Shard(0)

    def install(self, module: Any, comm: Communicator, mesh: Mesh) -> None:
        module.num_experts //= comm.world_size
        module._is_expert_parallel = True  # its forward skips rows with the index num_experts
        parallel = Dispatched(
            **self.own(module, comm),
            rank=comm.rank,
            engine=self.options["engine"],
            num_here=module.num_experts,
        )
        install(module, parallel, dispatched)
