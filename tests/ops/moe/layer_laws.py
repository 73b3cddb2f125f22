"""Experts behind an exchange, on any device and engine, equal a dense loop over all experts and tokens in fp64.

With integers and powers of two no sum rounds, so results are equal bit for bit, for a `SMALL` layer also in 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import fusedtp
from fusedtp.comm import VirtualGroup
from fusedtp.nn.experts import Experts
from fusedtp.ops.moe import MoEHandle
from fusedtp.ops.moe.dispatch import dispatch_rows
from fusedtp.ops.moe.plan import Exchange, RoutingPlan, offsets_of
from tests.properties.laws import assert_same


@dataclass(frozen=True)
class Layer:
    """The tokens of every rank and the shape of E ReLU experts."""

    sizes: tuple[int, ...]
    num_experts: int
    top_k: int
    dim: int
    hidden: int
    dtype: torch.dtype = torch.float32
    engine: str = "chunked"
    device: str = "cpu"
    recv_capacity: float | None = None  # capacity in even shares, with further rounds on overflow; None: the default

    def mine(self, rank: int) -> slice:
        return slice(sum(self.sizes[:rank]), sum(self.sizes[: rank + 1]))

    def own(self, rank: int) -> slice:
        each = self.num_experts // len(self.sizes)
        return slice(rank * each, (rank + 1) * each)


SMALL = dict(num_experts=12, top_k=3, dim=5, hidden=4)


@dataclass
class Drawn:
    """The data of all ranks, the same on every rank, in fp64 on the CPU."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    dy: Tensor
    up: Tensor
    down: Tensor


def drawn(layer: Layer, number: int, skew: float = 0.0, dropped: float = 0.1) -> Drawn:
    """skew: 1 sends all tokens to the first quarter of the experts."""
    g = torch.Generator().manual_seed(number)
    tokens, e = sum(layer.sizes), layer.num_experts
    whole = lambda *shape: torch.randint(-1, 2, shape, generator=g).double()  # noqa: E731
    scores = torch.rand(tokens, e, generator=g)
    scores[:, : max(layer.top_k, e // 4)] += skew
    ids = scores.argsort(1, descending=True)[:, : layer.top_k]
    ids = ids.masked_fill(torch.rand(ids.shape, generator=g) < dropped, -1)
    weights = 2.0 ** torch.randint(-1, 2, ids.shape, generator=g)
    shape = (e, layer.hidden, layer.dim)
    return Drawn(
        whole(tokens, layer.dim),
        ids,
        weights.double(),
        whole(tokens, layer.dim),
        whole(*shape),
        whole(*shape).mT,
    )


@torch.enable_grad()
def wanted(given: Drawn) -> list[Tensor]:
    """The expected out and gradients of x, weights, up and down."""
    leaves = [t.clone().requires_grad_() for t in (given.x, given.weights, given.up, given.down)]
    x, weights, up, down = leaves
    out = torch.zeros_like(given.x)
    for e in range(len(up)):
        chosen = (weights * (given.ids == e)).sum(1, keepdim=True)
        out = out + chosen * ((x @ up[e].T).relu() @ down[e].T)
    return [out.detach(), *torch.autograd.grad(out, leaves, given.dy)]


def check(layer: Layer, rank: int, given: Drawn, got: list[Tensor], what: str) -> None:
    """Check this rank's out and gradients, bit for bit."""
    names = ("out", "dx", "dweights", "dup", "ddown")
    for name, g, want in zip(names, got, wanted(given), strict=False):
        part = want[layer.own(rank) if name in names[3:] else layer.mine(rank)]
        dtype = torch.float32 if name == "dweights" else layer.dtype
        assert_same(f"{what}, rank {rank}: {name}", g.detach().cpu(), part.to(dtype))


def on_device(layer: Layer, rank: int, given: Drawn) -> tuple[Tensor, ...]:
    """(x, weights, up, down, dy, ids) of this rank; weights in fp32."""
    here, own = layer.mine(rank), layer.own(rank)
    as_is = lambda t: t.to(layer.device, layer.dtype)  # noqa: E731
    weights, ids = given.weights[here].float().to(layer.device), given.ids[here].to(layer.device)
    return (
        as_is(given.x[here]),
        weights,
        as_is(given.up[own]),
        as_is(given.down[own]),
        as_is(given.dy[here]),
        ids,
    )


def experts_law(group: Any, layer: Layer, numbers: range) -> list[Any]:
    """A parallel layer of experts is right on consecutive batches of varying skew; return the RecvUsage of each."""
    rank = group.rank()
    mesh = group if isinstance(group, VirtualGroup) else DeviceMesh.from_group(group, layer.device)
    used = []
    for number in numbers:
        given = drawn(layer, number, (number % 3) / 2, 0.1 if number % 4 else 1.0)
        x, weights, _up, _down, dy, ids = on_device(layer, rank, given)
        room = {} if layer.recv_capacity is None else dict(recv_capacity=layer.recv_capacity, on_overflow="rounds")
        how = dict(act="relu", gated=False, dtype=layer.dtype, **room)
        experts = Experts(layer.dim, layer.hidden, layer.num_experts, **how)
        experts.load_state_dict({"up_proj": given.up, "down_proj": given.down})
        style = fusedtp.FusedExperts(sizes=layer.sizes, engine=layer.engine)
        fusedtp.parallelize(experts, mesh, plan={"": style})
        out = experts(x.requires_grad_(), ids, weights.requires_grad_())
        out.backward(dy)
        whole = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in experts.parameters()]
        check(layer, rank, given, [out, x.grad, weights.grad, *whole], f"batch {number}")
        used.append(experts.used)
    return used


class Planned:
    """A layer with a precomputed plan: its tensors keep their addresses, and `refresh` refills them."""

    def __init__(self, group: Any, layer: Layer, number: int) -> None:
        self.group, self.layer, self.rank = group, layer, group.rank()
        self.given = drawn(layer, number)
        tensors = on_device(layer, self.rank, self.given)
        self.leaves = [t.requires_grad_() for t in tensors[:4]]
        self.dy = tensors[4]
        self.plan, self.at = self._planned(tensors)

    def _planned(self, tensors: tuple[Tensor, ...]) -> tuple[RoutingPlan, Exchange]:
        most = sum(self.layer.sizes) * self.layer.top_k
        _rows, _offsets, handle = fusedtp.moe_dispatch(
            tensors[0].detach(), tensors[5], tensors[1].detach(), self.layer.num_experts, self.group,
            max_rows=most, sizes=self.layer.sizes, engine=self.layer.engine,
        )  # fmt: skip
        return handle.plan, handle.at

    def refresh(self, number: int, skew: float) -> None:
        """Write other tokens, routing and weights into the same tensors."""
        self.given = drawn(self.layer, number, skew)
        tensors = on_device(self.layer, self.rank, self.given)
        with torch.no_grad():
            for old, new in zip((*self.leaves, self.dy), tensors, strict=False):
                old.copy_(new)
            for old, new in zip(self.plan, self._planned(tensors)[0], strict=True):
                old.copy_(new)

    def forward(self) -> Tensor:
        """The layer run with its plan; nothing here reads values on the host."""
        x, weights, up, down = self.leaves
        rows, row_weights = dispatch_rows(x, weights.detach(), self.plan, self.at)
        offsets = offsets_of(self.plan, self.at)
        handle = MoEHandle(weights, row_weights, self.plan, self.at, offsets)
        hidden = fusedtp.grouped_matmul(rows, up, offsets).relu()
        return fusedtp.moe_combine(fusedtp.grouped_matmul(hidden, down, offsets), handle)

    def both(self) -> list[Tensor]:
        """The output and the gradients."""
        out = self.forward()
        return [out, *torch.autograd.grad(out, self.leaves, self.dy)]

    def check(self, got: list[Tensor], what: str) -> None:
        check(self.layer, self.rank, self.given, got, what)
