"""Laws of the fused matmul and combine: it equals the two separate calls bit for bit, and the formula's numbers.

Gradients of h and of the weights round differently than those of the separate calls, see `allowed`; so do those of the
experts, unless weights are powers of two.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import fusedtp
from fusedtp.comm import communicator
from fusedtp.ops.launch import Config
from fusedtp.ops.moe import MoEHandle, combine, grouped, moe_matmul_combine
from tests.ops.moe.laws import Case, Data, build, mine, room_of
from tests.properties.laws import assert_same, poison

NAMES = ("out", "dx", "dweights", "dexperts")


@dataclass(frozen=True)
class Cut:
    """The tiling of the kernel: column tiles per part, programs that send and others."""

    part_tiles: int = 1
    programs: tuple[int, int] = (2, 1)
    halves: bool = False

    @contextmanager
    def used(self) -> Iterator[None]:
        """Use small tiles, for the separate matmul too."""
        senders, others = self.programs
        more: dict[str, Any] = dict(send_programs=senders, other_programs=others)
        tile = Config(16, 16, 16, halves=self.halves)
        config = Config(16, 16, 16, halves=self.halves, part_tiles=self.part_tiles, **more)
        with (
            patch.object(combine, "matmul_combine_config", lambda *_: config),
            patch.object(grouped, "group_config", lambda *_, **__: tile),
        ):
            yield


def dispatched(group, case: Case, data: Data) -> tuple[Tensor, Tensor, Tensor, MoEHandle]:
    """(x and weights of this rank, with requires_grad, rows, handle)."""
    here = mine(case, group.rank())
    x, weights = data.x[here].clone().requires_grad_(), data.weights[here].clone().requires_grad_()
    rows, _offsets, handle = fusedtp.moe_dispatch(
        x, data.ids[here], weights, case.num_experts, group, sizes=case.sizes, engine=case.engine,
        max_rows=room_of(case, data),
    )  # fmt: skip
    return x, weights, rows, handle


def equals_the_formula(group, case: Case, width: int, cut: Cut) -> None:
    """With integers, out and all gradients equal the single-process ones; experts [E, width, K] use main_grad too."""
    rank, data = group.rank(), build(case)
    g = torch.Generator().manual_seed(case.seed + 1)
    every = torch.randint(-1, 2, (case.num_experts, width, case.width), generator=g).to(case.dtype)
    dout = torch.randint(-1, 2, (sum(case.sizes), width), generator=g).to(case.dtype)
    each, here = case.num_experts // len(case.sizes), mine(case, rank)
    own = slice(rank * each, (rank + 1) * each)
    experts = every[own].clone().requires_grad_()
    if case.seed % 2:
        experts.main_grad = torch.zeros(experts.shape)
    x, weights, rows, handle = dispatched(group, case, data)
    communicator(group).engine_calls.clear()
    communicator(group).plans.clear()  # the kept plans have other tiles
    poison(group)
    with cut.used():
        out = moe_matmul_combine(rows, experts, handle)
    poison(group)
    fused = ("moe_matmul_combine", case.engine) in communicator(group).engine_calls
    assert fused == (len(case.sizes) > 1 and case.dtype != torch.float16)
    out.backward(dout[here])
    got = (out.detach(), x.grad, weights.grad, experts.main_grad if case.seed % 2 else experts.grad)
    assert (experts.grad is None) == case.seed % 2
    for name, mine_, want in zip(NAMES, got, dense(data, every, dout), strict=True):
        want = want[own if name == "dexperts" else here]
        wide = name == "dweights" or (name == "dexperts" and case.seed % 2)
        assert_same(f"rank {rank}: {name}", mine_, want.to(torch.float32 if wide else case.dtype))


def dense(data: Data, every: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    """(out, dx, dweights, dexperts) of all tokens and experts, by autograd of the definition in fp64."""
    leaves = [t.double().nan_to_num(0.0).requires_grad_() for t in (data.x, data.weights, every)]  # undefined entries
    x, weights, w = leaves
    out = x.new_zeros(x.shape[0], every.shape[1])
    for j in range(weights.shape[1]):
        kept = (data.ids[:, j : j + 1] >= 0).double()
        out = out + kept * weights[:, j : j + 1] * torch.einsum("tk,tnk->tn", x, w[data.ids[:, j].clamp(min=0)])
    out.backward(dout.double())
    return out.detach(), *(torch.zeros_like(t) if t.grad is None else t.grad for t in leaves)


def drawn(case: Case, width: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Experts [E_r, width, K] and dout [T_r, width] of a rank, and the factor of its rows."""
    g = torch.Generator().manual_seed(case.seed + rank)
    each = case.num_experts // len(case.sizes)
    shapes = (each, width, case.width), (case.sizes[rank], width), (sum(case.sizes) * case.top_k, case.width)
    experts, dout, noise = (torch.randn(shape, generator=g).to(case.dtype) for shape in shapes)
    return experts, dout, noise


def allowed(case: Case, width: int, data: Data) -> tuple[Tensor, Tensor]:
    """How far dx [T, K] and dweights [T, k] of the fused and the separate calls may differ.

    With A the sum of |weight dout E| over the width, dh is off by eps A because each weight dout is rounded, or because
    the sum and then its product with the weight are, and by (N + 2) eps32 A for sums in fp32; dx, which is made of dh
    and of x times noise, is rounded once more. dweights are sums over N and K of |dout E h|; one way rounds the sums
    over K, the other the sums over N.
    """
    parts = [drawn(case, width, rank) for rank in range(len(case.sizes))]
    experts = torch.cat([p[0] for p in parts]).double().abs()
    dout = torch.cat([p[1] for p in parts]).double().abs()
    largest = max([float(p[2].double().abs().max()) for p in parts if p[2].numel()], default=0.0)
    eps = 4 * torch.finfo(case.dtype).eps + (width + case.width + 4) * torch.finfo(torch.float32).eps
    each = torch.einsum("tn,tjnk->tjk", dout, experts[data.ids.clamp(min=0)]) * (data.ids >= 0)[..., None]
    by_weight = each * data.weights.double().abs().nan_to_num(0.0)[..., None]
    x = data.x.double().abs().nan_to_num(0.0)
    return eps * largest * by_weight.sum(1), eps * largest * (each * x[:, None]).sum(2)


def same_bits(group, case: Case, width: int, cut: Cut) -> None:
    """Random numbers, with powers of two as weights: the separate calls and the fused call give the same bits."""
    rank, data, found = group.rank(), build(case), []
    made, dout, noise = drawn(case, width, rank)
    for fused in (False, True):
        experts = made.clone().requires_grad_()
        x, weights, rows, handle = dispatched(group, case, data)
        communicator(group).plans.clear()  # the kept plans have other tiles
        count = int(handle.offsets[-1])
        h = torch.cat((rows[:count] * noise[:count], torch.full_like(rows[count:], torch.nan)))
        poison(group)
        with cut.used():
            if fused:
                out = moe_matmul_combine(h, experts, handle)
            else:
                y = fusedtp.grouped_matmul(h, experts, handle.offsets, engine=case.engine)
                out = fusedtp.moe_combine(y, handle)
            out.backward(dout)
        found.append((out.detach(), x.grad, weights.grad, experts.grad))
    bounds = dict(zip(("dx", "dweights"), allowed(case, width, data), strict=True))
    for name, apart, one in zip(NAMES, *found, strict=True):
        if name in bounds:
            off = (one.double() - apart.double()).abs()
            assert (off <= bounds[name][mine(case, rank)]).all(), f"rank {rank}: {name} is off by {off.max()}"
        else:
            assert_same(f"rank {rank}: {name}", one, apart)
