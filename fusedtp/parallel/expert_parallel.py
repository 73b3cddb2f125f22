"""The object that stands at `module.parallel` of experts which ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh

from fusedtp.comm import Place, communicator, place, propagate_errors
from fusedtp.ops.main_grad import main_grad_of
from fusedtp.ops.moe import moe_in_stages
from fusedtp.ops.moe.api import check_choices
from fusedtp.ops.rows import split
from fusedtp.ops.tokens import gather_tokens, take_tokens

from .expert_split import Shares
from .layers import Member, with_main_grad
from .placement import Mesh, local, read


@dataclass(frozen=True, kw_only=True)
class ExpertParallel(Member):
    """Experts shared by ranks, each with its own tokens: rows travel to their experts and back.

    group, rank, world_size   of all that share the experts
    shares                    what each of them has
    copies                    the communicator of the ranks that hold the same; "": none does
    stages                    the communicators of the ranks at this one's place of every node, and of those of its
                              node, by which rows travel; (): at once
    averaged                  what the experts' gradients are divided by: data-parallel ranks among those that share
                              them, each of which has a loss of its own; main_grad's are not
    tokens                    this rank's place among those that hold one batch: they have a part of its tokens each,
                              or, without sequence parallelism, all of them, and each sends a part of them off
    """

    shares: Shares
    copies: str = ""
    stages: tuple[str, ...] = ()
    averaged: int = 1
    tokens: Place

    @property
    def token_group(self) -> str | None:
        """The ranks that each hold a part of one batch's tokens; None where this one holds all."""
        return self.tokens.name if self.sequence_parallel else None

    def token_sizes(self, layout: Any) -> tuple[int, ...] | None:
        sizes = getattr(layout, "sizes", ())
        if len(sizes) == self.tokens.world_size:
            return tuple(sizes) * (self.world_size // len(sizes))
        return self.sizes

    def experts(
        self, x: Tensor, expert_ids: Tensor, weights: Tensor, module: Any, layout: Any = None
    ) -> Tensor:
        """x [T_r, H], expert_ids and weights [T_r, k] -> [T_r, H]; all T of each without sequence parallelism."""
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
        if self.shares.are_finer:  # afterwards nobody knows the ids that were given
            at = place(self.group)
            with propagate_errors(at):
                check_choices(x, expert_ids, weights, module.num_experts, at)
        choices = self.shares.choices(expert_ids, weights, module.num_experts)
        own = [
            None if w is None else self._own(w, x)
            for w in (module.gate_proj, module.up_proj, module.down_proj)
        ]
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
            sizes=by_node, engine=self.engine, wire=module.wire, layer=self.layer,
        )  # fmt: skip

    def _own(self, weight: Tensor, x: Tensor) -> Tensor:
        if main_grad_of(weight) is not None:
            return with_main_grad(weight, x.dtype, self.copies or None)
        own = read(weight, self.copies) if self.copies else local(weight)
        return (own if self.averaged == 1 else _Averaged.apply(own, self.averaged)).to(x.dtype)


class _Averaged(Function):
    """The identity, with a gradient divided by n."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, n: int) -> Tensor:
        ctx.n = n
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy / ctx.n, None


def stages_of(mesh: Mesh, nodes: int) -> tuple[str, str]:
    """The communicators of the ranks at this one's place of every node, and of those of its node. Collective."""
    shape = (nodes, mesh.size() // nodes)
    if isinstance(mesh, DeviceMesh):
        both = mesh._unflatten(0, shape, ("nodes", "places"))
        return communicator(both["nodes"]).name, communicator(both["places"]).name
    return communicator(mesh.along(shape, 0)).name, communicator(mesh.along(shape, 1)).name


def copies_of(mesh: Mesh, shares: Shares) -> str:
    """The communicator of the ranks that hold the same experts as this one; "" where none does. Collective.

    mesh   of all that share the experts; a DeviceMesh in the shape of `shares.named`
    """
    if shares.replicas == 1:
        return ""
    if isinstance(mesh, DeviceMesh):
        return communicator(mesh["replicas"] if mesh.ndim > 1 else mesh).name
    shape, dim = tuple(shares.named.values()), list(shares.named).index("replicas")
    return communicator(mesh.along(shape, dim)).name
