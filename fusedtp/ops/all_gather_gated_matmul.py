"""y [T, N] = act(g) * u, g = all_gather(x) @ gate.T + b_gate, u = all_gather(x) @ up.T + b_up: half a gated MLP.

Gate and up projection of SwiGLU or GeGLU on token shards, with one gather for both and the activation in the epilogue,
so that the hidden state is written once. Rows travel as in all_gather_matmul.

rank r, chunked    copy x to slot | publish | g, u, y of x    | wait r+1 | g, u, y of x_{r+1} | ...
rank r, triton     some programs push x to every peer; the others accumulate both products from the same blocks of x
                   and apply the activation before rounding (kernels/all_gather_gated_matmul.py)
rank r, few rows   all programs push x to every rank, then multiply the rows of all ranks together
                   (kernels/all_gather_few_rows.py)

forward  y = act(g) * u
dgrad    dx = matmul_reduce_scatter([dg, du], [gate.T, up.T]), with dg and du from y's gradient
wgrad    dgate, dup = all_gather_wgrad(x, [dg, du]), or local if the gathered x was kept
saved    the shard of x, both weights, g and u; activation checkpointing recomputes all of it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fusedtp.comm import Group
from fusedtp.comm.communicator import copied
from fusedtp.comm.device_view import peers_of
from fusedtp.comm.launching import Launch, layouts

from . import cpu, pointwise
from .all_gather_matmul import (
    column_grads,
    come_together,
    gather_args,
    gather_slot_bytes,
    sending_of,
    together_args,
    with_senders,
    without_senders,
)
from .all_gather_matmul import reference as linear_reference
from .launch import pointwise as launcher
from .launch.config import NARROWEST, Config, Machine, deep, narrowed
from .launch.operands import by_pointers, local_config, of_vectors
from .launch.run import check, machine_for, of_one_layout
from .linear_call import LinearCall, linear_call
from .matmul import linear, matmul_into, to_fp32
from .operation import (
    Example,
    FusedKernel,
    LocalOperation,
    OnRank,
    Operation,
    Plan,
    Shared,
    Spec,
    laid_alike,
    parts,
    wanted,
)
from .rows import Rows, rows_of_shard
from .shards import gathered, shards_as_they_arrive


def all_gather_gated_matmul(
    x: Tensor,
    weights: Sequence[Tensor],
    group: Group,
    *,
    act: str = "silu",
    biases: Sequence[Tensor | None] | None = None,
    sizes: Sequence[int] | None = None,
    dim: int = 0,
    engine: str = "auto",
    keep_gathered: bool = False,
    layer: str = "",
) -> tuple[Tensor]:
    """The first half of a gated MLP on token shards: column-parallel gate and up projection, activated.

        x        [T_r, K]    this rank's rows; with dim=1 [B, S_r, K]
        weights  [N, K]      gate and up: this rank's rows of each full weight
        act      "silu" (SwiGLU), "gelu" or "gelu_pytorch_tanh" (GeGLU), as transformers calls them
        biases   [N]         or None, one entry per weight
        sizes    every rank's rows, the same list on all ranks; None: as many as here
        engine   "auto", "collective", "chunked" or "triton"
        layer    the kind of layer that the call and its backward are counted for
        return   ([T, N],)   act(x @ gate.T) * (x @ up.T); with dim=1 [B, S, N]

    `triton` activates fp32 sums and rounds once; the other engines round both products first. A weight or bias may be a
    DTensor on the group's mesh; each rank uses its shard: Note [DTensors as operands] in operation.py. If a weight has
    an attribute `main_grad`, its gradient is added there: Note [main_grad] in main_grad.py.

    Raises ValueError for shapes or dtypes that do not fit, SignatureMismatch naming the rank that differs.
    Source: Shazeer 2020, "GLU variants"; Korthikanti et al. 2022, section 4.2.2.
    """
    call, operands = linear_call(op, rows_of_shard, group, x, weights, biases, sizes, dim, engine, layer, act)
    spec, x = call.spec, operands.x
    if spec.needs_grad:
        y = _GatedColumnParallel.apply(call, keep_gathered, x, *operands.given, act)
    else:
        y = op(spec, x, operands.own[:2], operands.own[2:], act, False, False, plan=call.plan)[0]
    return (y if dim == 0 else y.view(spec.batch, sum(spec.sizes), y.shape[1]),)


class _GatedColumnParallel(Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: LinearCall,
        keep: bool,
        x: Tensor,
        gate: Tensor,
        up: Tensor,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        act: str,
    ) -> Tensor:
        spec, plan, main_grads, backward = call
        need_x, need_weights = spec.needs_grad & 1, spec.needs_grad >> 1 & 3
        keep = keep and need_weights != 0
        (x, gate, up, gate_bias, up_bias), ctx.lying = parts((x, gate, up, gate_bias, up_bias))
        y, g, u, *gathered = op(spec, x, [gate, up], [gate_bias, up_bias], act, True, keep, plan=plan)
        saved = (gathered[0] if keep else x) if need_weights else None
        ctx.save_for_backward(g, u, saved, *((gate, up) if need_x else ()))
        ctx.spec, ctx.main_grads, ctx.has_gathered = backward, main_grads, keep
        ctx.act, ctx.kept = act, None
        out: Tensor = y
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        needs = wanted(ctx)[2:7]
        g, u, x, *weights = ctx.saved_tensors
        dys = None
        if ctx.kept is not None:
            (of, version, made), ctx.kept = ctx.kept, None
            dys = made if of is dy and version == dy._version else None
        if dys is None:
            dys = gated_grads(dy, g, u, ctx.act)
        if needs[0] and x is not None and not any(needs[1:]):  # a weight pass follows
            ctx.kept = dy, dy._version, dys
        grads = column_grads(ctx, needs, x, weights, dys)
        return None, None, *(laid_alike(grads, ctx.lying) if ctx.lying else grads), None


def _gated_grads(dy: Tensor, g: Tensor, u: Tensor, act: str) -> list[Tensor]:
    if pointwise.serves(g):
        return [*launcher.swiglu_backward(dy.contiguous(), g, u, act)]
    dg, du = torch.empty_like(g), torch.empty_like(u)
    cpu.gated_backward(dy, g, u, act, dg, du)
    return [dg, du]


gated_grads = LocalOperation(
    "gated_grads",
    "Tensor dy, Tensor g, Tensor u, str act",
    "Tensor[]",
    fake=lambda dy, g, u, act: [torch.empty_like(g), torch.empty_like(u)],
    function=_gated_grads,
)


# -- engines ---------------------------------------------------------------------------------------------------------

Result = list[Tensor]  # y, with `products` g and u, with `keep` the gathered x


def reference(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], act: str = "silu") -> Tensor:
    """The formula on one device: the full x [T, K], full weights."""
    g, u = (torch.nn.functional.linear(x, w, b) for w, b in zip(weights, biases, strict=True))
    if act == "silu":
        return torch.nn.functional.silu(g) * u
    return torch.nn.functional.gelu(g, approximate="tanh" if act == "gelu_pytorch_tanh" else "none") * u


def _of_products(g: Tensor, u: Tensor, act: str, products: bool, full: Tensor | None) -> Result:
    y = launcher.swiglu(g, u, act) if pointwise.serves(g) else cpu.gated(g, u, act)
    return [y, *((g, u) if products else ()), *(() if full is None else (full,))]


def local(
    plan: Plan, x: Tensor, weights: list[Tensor], biases: list[Tensor | None], act: str, products: bool, keep: bool
) -> Result:  # fmt: skip
    """A group of one rank."""
    g, u = (linear(x, w, b) for w, b in zip(weights, biases, strict=True))
    return _of_products(g, u, act, products, copied(x) if keep else None)


def collective(
    plan: Plan, x: Tensor, weights: list[Tensor], biases: list[Tensor | None], act: str, products: bool, keep: bool
) -> Result:  # fmt: skip
    """The process group's all_gather, then matmuls and the activation."""
    full = gathered(plan, x)
    g, u = (linear(full, w, b) for w, b in zip(weights, biases, strict=True))
    return _of_products(g, u, act, products, full if keep else None)


def chunked(
    plan: Plan, x: Tensor, weights: list[Tensor], biases: list[Tensor | None], act: str, products: bool, keep: bool
) -> Result:  # fmt: skip
    """Shard by shard as they arrive, own rows first; each shard's products are activated at once."""
    rows, comm, n = plan.rows, plan.comm, weights[0].shape[0]
    y, g, u = (x.new_empty(rows.total, n) for _ in range(3))
    full = x.new_empty(rows.total, x.shape[1]) if keep else None
    transposed = [to_fp32(w).t() for w in weights]
    blocks = [rows.parts(out) for out in (g, u, y)]
    with plan.call() as call:
        for p, shard in shards_as_they_arrive(call, comm, x, rows):
            with comm.span(f"matmul {p}"):
                for run, *outs in zip(rows.runs(shard, p), *(of_out[p] for of_out in blocks), strict=True):
                    for out, w, b in zip(outs[:2], transposed, biases, strict=True):
                        matmul_into(out, [run], [w], b)
                    cpu.gated(outs[0], outs[1], act, outs[2])
            if full is not None:
                rows.put(full, shard, p)
    return [y, *((g, u) if products else ()), *(() if full is None else (full,))]


def triton(
    plan: Plan, x: Tensor, weights: list[Tensor], biases: list[Tensor | None], act: str, products: bool, keep: bool
) -> Result:  # fmt: skip
    """One launch: some programs push x, or copies bring it, while the others multiply. With few rows all push first."""
    rows = plan.rows
    with plan.call() as call:
        copies = call.copies() if plan.copies else None
        x = x if copies is None else x.contiguous()
        weights = of_one_layout(weights)
        view = call.kernel_view()
        key = copies is None, act, products, keep, None if plan.alike else layouts(x, *weights, *biases)
        launch = plan.launches.get(key)
        if launch is None:
            check(view, plan.slot_bytes, x, [*weights, *biases], rows.total)
            machine = machine_for(view, x)
            if come_together(rows, x.dtype):
                launch = prepare_together(x, weights, rows, act, products, None, machine)
            else:
                launch = prepare(view, x, weights, rows, act, products, None, machine, copies is not None)
            plan.launches[key] = launch
        outs = outputs(x, weights, rows, products, keep)
        sending = None if copies is None else sending_of(copies, plan.comm.rank, x, rows, launch.config)
        given = pointers(plan.peers(view), x, weights, biases, outs, products)
        launch.run(view, x.device, sending, given, alike=True)
    return outs


def _fake(
    spec: Spec, x: Tensor, weights: list[Tensor], biases: list[Tensor | None], act: str, products: bool, keep: bool
) -> Result:  # fmt: skip
    total = spec.batch * sum(spec.sizes)
    made = [x.new_empty(total, weights[0].shape[0]) for _ in range(3 if products else 1)]
    return [*made, x.new_empty(total, x.shape[1])] if keep else made


def _launched(
    together: bool, at: OnRank, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], keep: bool,
    copied: bool, _: Any,
) -> tuple[Launch, dict[str, Tensor]]:  # fmt: skip
    """For the checks, which compare both products, not y: y is rounded again, and the property tests cover it."""
    launch, (_, g, u, *gathered) = plan_all_gather_gated_matmul(
        at.view, at.rank, at.world_size, x, weights, biases, at.rows, at.sig, "silu", True, keep, at.config, at.machine,
        copied, together,
    )  # fmt: skip
    return launch, {"y0": g, "y1": u, **({"gathered": gathered[0]} if keep else {})}


op = Operation(
    "all_gather_gated_matmul",
    "Tensor x, Tensor[] weights, Tensor?[] biases, str act, bool products, bool keep",
    "Tensor[]",
    fake=_fake,
    reference=reference,
    shared=lambda x, *_: Shared(x.dtype, x.shape[1], 2),
    linear=lambda x, weights, biases: (x, weights, biases, "silu", False, False),
    engines=dict(local=local, collective=collective, chunked=chunked, triton=triton),
    slot_bytes=dict(
        chunked=lambda rows, shared: rows.longest * shared.features * shared.dtype.itemsize,
        triton=lambda rows, shared: gather_slot_bytes(rows, shared.features, shared.dtype),
    ),
    copied=lambda rows, dtype: not come_together(rows, dtype),
    example=Example(
        "column",
        "gather",
        shapes=lambda own, total, k, n: ((own, k), (2 * n, k)),
        factors=lambda x, both: (x, both),
        call=lambda x, both, group, sizes, engine: all_gather_gated_matmul(
            x, both.chunk(2), group, sizes=sizes, engine=engine
        )[0],
        gated=True,
    ),
    kernels=tuple(
        FusedKernel(
            name,
            f"{name}_kernel",
            partial(_launched, together),
            gathers=True,
            keeps=True,
            in_runs=True,
            pairs=True,
            formula=linear_reference,
            example=dict(widths=(33,), keep=True),
        )
        for name, together in (("all_gather_gated_matmul", False), ("few_rows_gated", True))
    ),
)


# -- the launcher of the kernel --------------------------------------------------------------------------------------


def prepare(
    view: Any,
    x: Tensor,
    weights: Sequence[Tensor],
    rows: Rows,
    act: str,
    products: bool,
    config: Config | None,
    machine: Machine,
    by_copies: bool = False,
) -> Launch:
    """The launch without its pointers, for operands of these shapes, strides and alignments.

    x          [R_r, K]   any strides
    weights    [N, K]     gate and up, any strides, the same for both
    products   whether g and u are stored too
    config     None: the default, with a tile's columns shared by the two weights
    by_copies  copies send x while the kernel runs
    """
    from fusedtp.kernels.all_gather_gated_matmul import all_gather_gated_matmul_kernel

    n, k = weights[0].shape
    if config is None:
        tile = by_pointers(local_config(machine, x.dtype, "ieee", rows.total, n, 2, products))
        tile = of_vectors(tile, machine, x, *weights)
        config = with_senders(tile, machine, rows, view.flags_per_source, x.dtype, k)
    config = without_senders(config, machine) if by_copies else config
    args = gather_args(x, rows, config, machine) | gated_args(config, weights, act)
    return Launch(all_gather_gated_matmul_kernel, config.programs, args, config)


def prepare_together(
    x: Tensor,
    weights: Sequence[Tensor],
    rows: Rows,
    act: str,
    products: bool,
    config: Config | None,
    machine: Machine,
) -> Launch:
    """Like `prepare`, for few rows: all programs send, then multiply."""
    from fusedtp.kernels.all_gather_few_rows import few_rows_gated_kernel

    if config is None:
        n = weights[0].shape[0]
        tile = by_pointers(local_config(machine, x.dtype, "ieee", rows.total, n, 2, products))
        if 0 < machine.capability < 90:  # wider ones spill
            tile = replace(tile, block_n=min(tile.block_n, NARROWEST))
        tile = deep(narrowed(tile, machine, rows.total, n), machine, x.dtype, weights=2)
        tile = of_vectors(tile, machine, *weights)
        config = replace(tile, send_programs=machine.programs, other_programs=0)
    args = together_args(x, rows, config, machine) | gated_args(config, weights, act)
    return Launch(few_rows_gated_kernel, config.programs, args, config)


def gated_args(config: Config, weights: Sequence[Tensor], act: str) -> dict[str, Any]:
    """The arguments of both kernels that describe the weights [N, K]."""
    n, k = weights[0].shape
    return dict(
        stride_wn=weights[0].stride(0),
        stride_wk=weights[0].stride(1),
        N=n,
        EVEN_K=k % config.block_k == 0,
        ACT=act,
    )


def outputs(x: Tensor, weights: Sequence[Tensor], rows: Rows, products: bool, keep: bool) -> Result:
    """Allocate the kernel's outputs."""
    made = [x.new_empty(rows.total, weights[0].shape[0]) for _ in range(3 if products else 1)]
    return [*made, x.new_empty(rows.total, x.shape[1])] if keep else made


def pointers(
    peers: Any,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    outs: Result,
    products: bool,
) -> dict[str, Any]:
    """The remaining arguments of a prepared launch."""
    gate_bias, up_bias = (None if b is None else b.contiguous() for b in biases)
    kept = outs[3 if products else 1 :]
    return dict(
        peers=peers,
        x=x,
        gate=weights[0],
        up=weights[1],
        gate_bias=gate_bias,
        up_bias=up_bias,
        y=outs[0],
        gate_out=outs[1] if products else None,
        up_out=outs[2] if products else None,
        gathered=kept[0] if kept else None,
    )


def plan_all_gather_gated_matmul(
    view: Any,
    rank: int,
    world_size: int,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    rows: Rows,
    sig: int,
    act: str,
    products: bool,
    keep: bool,
    config: Config | None,
    machine: Machine,
    by_copies: bool = False,
    together: bool = False,
) -> tuple[Launch, Result]:
    """The complete launch, not yet run, and its outputs; see `prepare`, `prepare_together` and `pointers`."""
    weights = of_one_layout(weights)
    if together:
        launch = prepare_together(x, weights, rows, act, products, config, machine)
    else:
        launch = prepare(view, x, weights, rows, act, products, config, machine, by_copies)
    outs = outputs(x, weights, rows, products, keep)
    peers = peers_of(view, rank, world_size, sig, machine.clock)
    return launch.given(pointers(peers, x, weights, biases, outs, products)), outs
