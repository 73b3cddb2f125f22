"""How ranks share MoE experts: whole experts, parts of their features, copies of them, or all three.

    rank = (block * replicas + replica) * tensor_parallel + part

A block of ranks has E / blocks experts. `tensor_parallel` ranks share each expert, with a part of its features each: a
token that chose the expert goes to all of them, and their outputs, which are partial sums, are added on the token's own
rank. `replicas` such sets of ranks hold the same experts and take turns with the tokens.

The exchange therefore sees a finer MoE, with E * replicas * tensor_parallel experts and k * tensor_parallel choices,
and needs no special cases. Rows and their partial sums travel tensor_parallel times, as often as with a gather and a
reduce-scatter among those ranks.

ExpertSplit is what the user requests, Shares the resulting division, and ExpertParallel the object stored at
`module.parallel` of such experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from fusedtp.comm import Place, VirtualGroup, communicator, place, propagate_errors
from fusedtp.ops.main_grad import main_grad_of
from fusedtp.ops.moe import moe_in_stages
from fusedtp.ops.moe.plan import check_choices
from fusedtp.ops.rows import split
from fusedtp.ops.tokens import gather_tokens, take_tokens

from .layers import Member, with_main_grad
from .placement import Mesh, Placement, Way, local, read

DIMS = ("experts", "replicas", "features")


class Shares(NamedTuple):
    """The division of ranks: number of expert blocks, copies of each block, ranks per expert."""

    blocks: int
    replicas: int
    tensor_parallel: int

    @property
    def are_finer(self) -> bool:
        """Whether one expert corresponds to several experts of the exchange."""
        return self.replicas * self.tensor_parallel > 1

    @property
    def named(self) -> dict[str, int]:
        """The dimensions with more than one rank; the first dimension if there are none."""
        sizes = dict(zip(DIMS, self, strict=True))
        return {name: size for name, size in sizes.items() if size > 1} or {DIMS[0]: 1}

    def way(self, features: int) -> Way:
        """The placement of a parameter with experts in dimension 0 and split features in dimension `features`."""
        placements: dict[str, Placement] = {
            "experts": Shard(0),
            "replicas": Replicate(),
            "features": Shard(features),
        }
        return Way(tuple(placements[name] for name in self.named), tuple(self.named.values()))

    def choices(self, expert_ids: Tensor, weights: Tensor, num_experts: int) -> tuple[Tensor, Tensor, int]:
        """expert_ids and weights [T_r, k] of num_experts -> the same for the finer MoE of the exchange.

        Token t of a rank goes to copy t % replicas.
        """
        if not self.are_finer:
            return expert_ids, weights, num_experts
        each = num_experts // self.blocks
        turns = torch.arange(expert_ids.shape[0], device=expert_ids.device)[:, None] % self.replicas
        first = (expert_ids // each * self.replicas + turns) * self.tensor_parallel
        parts = torch.arange(self.tensor_parallel, device=expert_ids.device)
        fine = (first[..., None] + parts) * each + (expert_ids % each)[..., None]
        fine = fine.where(expert_ids[..., None] >= 0, -1).flatten(1).to(expert_ids.dtype)
        return (
            fine,
            weights.repeat_interleave(self.tensor_parallel, 1),
            num_experts * self.replicas * self.tensor_parallel,
        )


@dataclass(frozen=True)
class ExpertSplit:
    """Which ranks share the experts, and how.

    mesh              1-D, made of whole consecutive tensor-parallel groups, so that experts are also split over
                      data-parallel ranks; all its ranks must have batches of one shape. None: the tensor-parallel ranks
    tensor_parallel   number of ranks that share each expert, with a part of its features each
    replicas          number of ranks (or sets of tensor_parallel ranks) that hold the same experts; None: one, or if
                      there are fewer experts than ranks, as many as there are ranks per expert
    nodes             number of nodes, with equally many consecutive ranks on each: rows then travel in two stages, once
                      to each node that has an expert of a token, and from there to its experts (ops/moe/stages.py)
    num_ranks         number of ranks the mesh will have, to make a plan before the mesh exists
    """

    mesh: DeviceMesh | None = None
    tensor_parallel: int = 1
    replicas: int | None = None
    nodes: int = 1
    num_ranks: int | None = None

    def ranks(self, world_size: int) -> int:
        """Number of ranks that share the experts, if world_size ranks are tensor-parallel."""
        return self.num_ranks or world_size if self.mesh is None else self.mesh.size()

    def check(self, mesh: DeviceMesh | VirtualGroup) -> None:
        """Raises ValueError unless the expert mesh consists of whole groups of the model's mesh."""
        if self.mesh is None:
            return
        if not isinstance(mesh, DeviceMesh) or self.mesh.ndim != 1:
            raise ValueError(f"the experts' mesh {self.mesh} must be 1-D, and the model's mesh a DeviceMesh")
        everyone, own = self.mesh.mesh.tolist(), mesh.mesh.tolist()
        begin = everyone.index(own[0]) if own[0] in everyone else -1
        if begin < 0 or begin % len(own) or everyone[begin : begin + len(own)] != own:
            raise ValueError(
                f"the model's ranks {own} must be one of the blocks of {len(own)} consecutive ranks in the "
                f"experts' mesh {everyone}"
            )

    def shares(self, num_experts: int, ranks: int) -> Shares:
        """The division of num_experts over the ranks. Raises ValueError if they cannot be shared this way."""
        sets, rest = divmod(ranks, self.tensor_parallel) if self.tensor_parallel > 0 else (0, 1)
        if rest:
            raise ValueError(f"tensor_parallel is {self.tensor_parallel}, must be a divisor of {ranks} ranks")
        replicas = self.replicas
        if replicas is None:
            replicas = sets // num_experts if num_experts < sets and sets % num_experts == 0 else 1
        blocks, rest = divmod(sets, replicas) if replicas > 0 else (0, 1)
        if rest:
            raise ValueError(f"replicas is {replicas}, must be a divisor of {sets} (ranks / tensor_parallel)")
        if num_experts % blocks:
            among = f"{blocks} ranks" if blocks == ranks else f"{blocks} of {ranks} ranks"
            advice = _what_would(num_experts, ranks)
            raise ValueError(f"{num_experts} experts cannot be divided evenly among {among}{advice}")
        return Shares(blocks, replicas, self.tensor_parallel)

    def faults(self, module: Any, ranks: int) -> list[str]:
        """Why a fusedtp.nn.Experts cannot be shared this way."""
        try:
            shares = self.shares(module.num_experts, ranks)
        except ValueError as error:
            return [str(error)]
        found = []
        if 0 in shares.way(1).sizes(1, module.hidden):
            found.append(
                f"hidden is {module.hidden}, too small for {shares.tensor_parallel} ranks: one would get no features"
            )
        if self.nodes < 1 or ranks % self.nodes:
            found.append(f"nodes is {self.nodes}, must be a divisor of {ranks} ranks")
        if self.nodes > 1 and module.bounded:
            found.append(f"nodes is {self.nodes}, which does not support max_rows, recv_capacity or on_overflow")
        return found


def _what_would(num_experts: int, ranks: int) -> str:
    found = [str(n) for n in range(2, ranks + 1) if ranks % n == 0 and num_experts % (ranks // n) == 0]
    return f"; use ExpertSplit(tensor_parallel={' or '.join(found)})" if found else ""


@dataclass(frozen=True, kw_only=True)
class ExpertParallel(Member):
    """Experts shared by ranks that each have their own tokens: rows travel to their experts and back.

    group, rank, world_size   all ranks that share the experts
    shares                    the division of the experts
    copies                    communicator of the ranks that hold the same experts; "" if there are none
    stages                    two communicators for the two stages of the exchange: ranks with this rank's position on
                              every node, and ranks of its node; (): a single stage
    averaged                  divisor of the experts' gradients: the number of data-parallel ranks that share them,
                              since each has its own loss; not applied to main_grad
    tokens                    this rank's place among the ranks of one batch: each has a part of its tokens or, without
                              sequence parallelism, all of them, and then dispatches a part of them
    """

    shares: Shares
    copies: str = ""
    stages: tuple[str, ...] = ()
    averaged: int = 1
    tokens: Place

    @property
    def token_group(self) -> str | None:
        """The ranks that each hold a part of one batch's tokens; None if this rank holds all of them."""
        return self.tokens.name if self.sequence_parallel else None

    def token_sizes(self, layout: Any) -> tuple[int, ...] | None:
        sizes = getattr(layout, "sizes", ())
        if len(sizes) == self.tokens.world_size:
            return tuple(sizes) * (self.world_size // len(sizes))
        return self.sizes

    def experts(self, x: Tensor, expert_ids: Tensor, weights: Tensor, module: Any, layout: Any = None) -> Tensor:
        """x [T_r, H], expert_ids and weights [T_r, k] -> [T_r, H]; without sequence parallelism T rows of each."""
        if self.sequence_parallel:
            return self._exchanged(x, expert_ids, weights, module, self.token_sizes(layout))
        at = self.tokens
        parts = split(x.shape[0], at.world_size)
        own = [take_tokens(each, at.name, parts, self.layer) for each in (x, weights)]
        begin = sum(parts[: at.rank])
        ids = expert_ids[begin : begin + parts[at.rank]]
        sizes = tuple(parts) * (self.world_size // at.world_size)
        y = self._exchanged(own[0], ids, own[1], module, sizes)
        return gather_tokens(y, at.name, parts, self.layer)

    def _exchanged(
        self, x: Tensor, expert_ids: Tensor, weights: Tensor, module: Any, sizes: tuple[int, ...] | None
    ) -> Tensor:
        if self.shares.are_finer:  # check now: the original ids are not available afterwards
            at = place(self.group)
            with propagate_errors(at):
                check_choices(x, expert_ids, weights, module.num_experts, at)
        choices = self.shares.choices(expert_ids, weights, module.num_experts)
        own = [None if w is None else self._own(w, x) for w in (module.gate_proj, module.up_proj, module.down_proj)]
        if self.stages:
            return self._in_stages(x, choices, own, module, sizes)
        y: Tensor = module.compute(x, *choices, own, self.group, sizes, self.engine, self.layer)
        return y

    def _in_stages(
        self,
        x: Tensor,
        choices: tuple[Tensor, Tensor, int],
        own: Sequence[Tensor | None],
        module: Any,
        sizes: tuple[int, ...] | None,
    ) -> Tensor:
        between, within = self.stages
        places = place(within).world_size
        ids, weights, num_experts = choices
        by_node = None
        if sizes is not None:
            by_node = [sizes[i : i + places] for i in range(0, self.world_size, places)]
        return moe_in_stages(
            x, ids, weights, num_experts, between, within, lambda rows, offsets: module.matmuls(rows, offsets, own),
            sizes=by_node, engine=self.engine, comm_dtype=module.comm_dtype, layer=self.layer,
        )  # fmt: skip

    def _own(self, weight: Tensor, x: Tensor) -> Tensor:
        if main_grad_of(weight) is not None:
            return with_main_grad(weight, x.dtype, self.copies or None)
        own = read(weight, self.copies) if self.copies else local(weight)
        return (own if self.averaged == 1 else _Averaged.apply(own, self.averaged)).to(x.dtype)


class _Averaged(Function):
    """Identity; divides the gradient by n."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, n: int) -> Tensor:
        ctx.n = n
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy / ctx.n, None


def stages_of(mesh: Mesh, nodes: int) -> tuple[str, str]:
    """Communicators of the ranks with this rank's position on every node, and of the ranks of its node. Collective."""
    shape = (nodes, mesh.size() // nodes)
    if isinstance(mesh, DeviceMesh):
        both = mesh._unflatten(0, shape, ("nodes", "places"))
        return communicator(both["nodes"]).name, communicator(both["places"]).name
    return communicator(mesh.along(shape, 0)).name, communicator(mesh.along(shape, 1)).name


def copies_of(mesh: Mesh, shares: Shares) -> str:
    """The communicator of the ranks that hold the same experts as this one; "" if there are none. Collective.

    mesh   all ranks that share the experts; a DeviceMesh has the shape of `shares.named`
    """
    if shares.replicas == 1:
        return ""
    if isinstance(mesh, DeviceMesh):
        return communicator(mesh["replicas"] if mesh.ndim > 1 else mesh).name
    shape, dim = tuple(shares.named.values()), list(shares.named).index("replicas")
    return communicator(mesh.along(shape, dim)).name
