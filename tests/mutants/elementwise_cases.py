"""The kernels without peers or products as cases: RMSNorm, SwiGLU, rotary embedding, cross-entropy."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedtp.ops.launch import Launch as Planned
from fusedtp.ops.launch import cross_entropy, pointwise
from fusedtp.ops.launch.config import HOST, Machine
from fusedtp.sim.case import Case, Launch, Mismatch, Run, compare

EPS = torch.finfo(torch.float32).eps
ONE_PROGRAM = Machine(clock="host", programs=0, shared_bytes=0)  # walks all rows
START = 3  # of the logits' columns in the vocabulary


def elementwise(kernel: str) -> Case:
    """On one rank, with tails; the formula within what fp32 may lose."""

    def make() -> Run:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        shape = (5, 9000) if "_wide_" in kernel else (70, 40)  # the first in three parts, each with a tail
        x, residual, dy, dtotal, weight = (
            draw(*shape),
            draw(*shape),
            draw(*shape),
            draw(*shape),
            draw(shape[1]),
        )
        h = x + residual
        r = (h.square().mean(1) + 1e-5).rsqrt()
        outs: tuple[Tensor, ...]
        wanted: tuple[Tensor, ...]
        if kernel in ("rms_norm_kernel", "rms_norm_wide_kernel"):
            launch, outs = pointwise.plan_rms_norm(x, residual, weight, 1e-5, HOST)
            wanted = (h * r[:, None] * weight, h, r)
        elif kernel in ("rms_norm_backward_kernel", "rms_norm_wide_backward_kernel"):
            launch, outs = pointwise.plan_rms_norm_backward(dy, dtotal, h, weight, r, ONE_PROGRAM)
            normed, grad = h * r[:, None], dy * weight
            dx = (grad - normed * (grad * normed).mean(1, keepdim=True)) * r[:, None] + dtotal
            wanted = (dx, (dy * normed).sum(0, keepdim=True))
        elif kernel == "swiglu_kernel":
            launch, y = pointwise.plan_swiglu(x, dy, "silu")
            outs, wanted = (y,), (F.silu(x) * dy,)
        elif kernel == "swiglu_backward_kernel":
            launch, outs = pointwise.plan_swiglu_backward(dtotal, x, dy, "silu")
            wanted = (torch.ops.aten.silu_backward(dtotal * dy, x), dtotal * F.silu(x))
        elif kernel.startswith("logit_"):
            launch, outs, wanted = _logits(kernel, x, dy[:, 0].contiguous())
        else:
            q, k, cos, sin = draw(2, 3, 5, 12), draw(2, 3, 2, 12), draw(2, 3, 1, 6), draw(2, 3, 1, 6)
            launch, outs = pointwise.plan_rotate(q, k, cos, sin, 1)
            wanted = tuple(
                torch.cat((t[..., :6] * cos - t[..., 6:] * sin, t[..., 6:] * cos + t[..., :6] * sin), -1)
                for t in (q, k)
            )
        for out in outs:
            if out is not h:
                out.fill_(torch.nan)

        def check() -> list[Mismatch]:
            # a sum has 70 terms at most, or as many as a row has, of factors that such sums made: 36 eps each, or 4501
            lost = 2 * (max(70, shape[1]) + 2) / 2 * EPS
            near = [
                torch.where((out - want).abs() <= lost * want.abs().clamp(min=1), want, out)
                for out, want in zip(outs, wanted, strict=True)
            ]
            return [
                m
                for i, (g, w) in enumerate(zip(near, wanted, strict=True))
                for m in compare(f"out {i}", [g], [w])
            ]

        return Run([[Launch(launch.kernel, launch.programs, launch.args)]], check=check)

    return Case(kernel, make)


def _logits(
    kernel: str, logits: Tensor, scale: Tensor
) -> tuple[Planned, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """logits [T, V] with T > V, scale [T]. A label lies in every column, some in none."""
    rows, width = logits.shape
    labels, lse = torch.arange(rows), logits.logsumexp(1)
    here = (labels >= START) & (labels < START + width)
    column = (labels - START).where(here, 0)
    if kernel == "logit_stats_kernel":
        launch, stats = cross_entropy.plan_logit_stats(logits, labels, START, HOST)
        target = logits.gather(1, column[:, None])[:, 0].where(here, 0.0)
        return launch, (stats,), (torch.stack((lse, target), 1),)
    gradient = torch.empty_like(logits)
    launch = cross_entropy.plan_logit_gradient(logits, gradient, labels, START, lse, scale, HOST)
    onehot = F.one_hot(column, width) * here[:, None]
    return launch, (gradient,), (((logits - lse[:, None]).exp() - onehot) * scale[:, None],)
