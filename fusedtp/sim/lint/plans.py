"""The library's own kernels as its launchers would start them on a GPU that is not here.

Tensors on the CPU stand in for operands: only dtype, strides and alignment count.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from fusedtp.comm.device_view import meet_options, peers_of
from fusedtp.ops.all_gather_matmul import plan_all_gather_matmul
from fusedtp.ops.all_gather_wgrad import plan_all_gather_wgrad
from fusedtp.ops.launch import (
    Launch,
    cross_entropy,
    plain,
    pointwise,
)
from fusedtp.ops.launch.config import VECTOR
from fusedtp.ops.launch.operands import by_pointers, local_config
from fusedtp.ops.matmul_all_reduce import plan_one_shot, plan_two_shot
from fusedtp.ops.matmul_reduce_scatter import plan_matmul_reduce_scatter
from fusedtp.ops.moe import combine, dispatch, grouped
from fusedtp.ops.moe.plan import Exchange, combine_index, index_size, unpacked
from fusedtp.ops.rows import Rows

from .cases import ARRIVING, ELEMENTWISE, EXCHANGES, GROUPED, LOCAL, SIGNALS, Variant


def planned(kernel: str, variant: Variant, machine: Any) -> tuple[Any, dict[str, Any], dict[str, int]]:
    """(kernel, arguments, options) of the library's own launch, as rank 1."""
    w, t, widths, k = variant.world_size, variant.rows, variant.widths, variant.k
    dtype = getattr(torch, variant.dtype)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype)

    weights = [empty(width, k) for width in widths]
    biases = [empty(width) if variant.bias and i == 0 else None for i, width in enumerate(widths)]
    batch = variant.batch
    rows, sig, view = Rows((t // w // batch,) * w, batch), 12345, _view(w, variant.link)
    x, full = empty(t // w, k), empty(t, k)
    if kernel not in LOCAL and not variant.tma:  # as on a GPU that has none
        machine = replace(machine, capability=0)
    where, end = (view, 1, w), (sig, None, machine)
    if kernel in SIGNALS:
        return _signal(kernel, w, machine.clock)
    if kernel in ELEMENTWISE:
        launch = _elementwise(kernel, variant, machine)
        return launch.kernel, launch.args, launch.options
    if kernel in GROUPED:
        launch = _grouped(kernel, variant, machine)
        return launch.kernel, launch.args, launch.options
    if kernel in LOCAL:
        launch = _local(variant, machine)
        return launch.kernel, launch.args, launch.options
    if kernel in (*EXCHANGES, *ARRIVING):
        launch = _exchange(kernel, variant, machine)
    elif kernel == "all_gather_matmul_kernel":
        launch = plan_all_gather_matmul(*where, x, weights, biases, rows, sig, variant.keep, None, machine)[0]
    elif kernel == "all_gather_wgrad_kernel":
        grads = getattr(torch, variant.grads) if variant.grads else None
        launch = plan_all_gather_wgrad(*where, x, [empty(t, width) for width in widths], rows, *end, grads)[0]
    elif kernel == "matmul_reduce_scatter_kernel":
        launch = plan_matmul_reduce_scatter(*where, full, weights[0], biases[0], rows, *end)[0]
    elif kernel == "one_shot_kernel":
        launch = plan_one_shot(*where, full, weights[0], biases[0], *end)[0]
    elif kernel == "two_shot_kernel":
        launch = plan_two_shot(*where, full, weights[0], biases[0], *end)[0]
    else:
        raise ValueError(f"no plan for {kernel!r}")
    return launch.kernel, launch.args, launch.options


def _exchange(kernel: str, variant: Variant, machine: Any) -> Launch:
    """Rows of K elements between 8 experts a rank, of which a token chooses 4."""
    w, t, dtype = variant.world_size, variant.rows // variant.world_size, getattr(torch, variant.dtype)
    at = Exchange("", 1, (t,) * w, 8 * w, 4, 0, "triton")
    at = at._replace(max_rows=at.max_recv_rows)
    words = unpacked(torch.empty(index_size(at), dtype=torch.int32), at)
    end = (words, at, 12345, None, machine)
    width = variant.k + variant.widths[0] % VECTOR  # or one of which the compiler knows no alignment
    view = _view(w, variant.link)
    if kernel in ARRIVING:
        index = torch.empty(t * at.top_k, dtype=torch.int32)
        gated = len(variant.widths) > 1
        shape, offsets = (8, variant.widths[0], variant.k), torch.empty(9, dtype=torch.int32)
        matrices = [torch.empty(shape, dtype=dtype, device="meta") for _ in range(1 + gated)]
        return dispatch.plan_dispatch_matmul(
            view, 1, torch.empty(t, variant.k, dtype=dtype), index, matrices, offsets, words, at, 12345,
            variant.activation if gated else "", gated and variant.keep, None, variant.precision, machine,
        )[0]  # fmt: skip
    if kernel == "moe_dispatch_kernel":
        orders = torch.empty(w * t * at.top_k, dtype=torch.int32)
        return dispatch.plan_dispatch(view, 1, torch.empty(t, width, dtype=dtype), at.top_k, orders, *end)[0]
    choices = torch.empty(t, at.top_k, dtype=torch.int32)
    weights = torch.empty(t, at.top_k) if variant.bias else None
    if kernel == "moe_matmul_combine_kernel":
        h, n, e = torch.empty(at.max_rows, variant.k, dtype=dtype), variant.widths[0], at.experts_here
        experts, offsets = torch.empty(e, n, variant.k, dtype=dtype), torch.empty(e + 1, dtype=torch.int32)
        back = combine_index(torch.zeros(w, at.num_experts, dtype=torch.int32), at)
        pairs = 1 if variant.bias else 2  # of a product with weights, and of the gradients of gate and up
        sums = (choices, weights, words, at, 12345, None, variant.precision)
        given = (view, 1, [h] * pairs, [experts] * pairs, offsets, back, *sums)
        return combine.plan_matmul_combine(*given, machine)[0]
    return combine.plan_combine(
        view, 1, torch.empty(at.max_rows, width, dtype=dtype), choices, weights, *end
    )[0]


def _signal(kernel: str, world_size: int, clock: str) -> tuple[Any, dict[str, Any], dict[str, int]]:
    from fusedtp.kernels.meet import meet_kernel
    from fusedtp.kernels.signals import bump_epoch

    view = _view(world_size)
    if kernel == "bump_epoch":
        return bump_epoch, dict(epoch=view.epoch), {}
    return meet_kernel, dict(peers=peers_of(view, 1, world_size, 12345, clock)), meet_options(clock)


def _local(variant: Variant, machine: Any) -> Launch:
    """The plain matmul, of fp8 with scales."""
    m, n, k, precision = variant.rows, variant.widths[0], variant.k, variant.precision
    dtype = getattr(torch, variant.dtype)
    fp8 = dtype.itemsize == 1
    out = torch.bfloat16 if fp8 else dtype

    def empty(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=of, device="meta")

    x, weight, bias = empty(m, k), empty(n, k), empty(n, of=out) if variant.bias else None
    config = local_config(machine, dtype, precision, m, n)
    config = config if variant.tma else by_pointers(config)
    scales = (empty(m, 1, of=torch.float32), empty(n, 1, of=torch.float32)) if fp8 else (None, None)
    return plain.plan_matmul(x, weight, bias, out, config, precision, machine, scales)[0]


def _grouped(kernel: str, variant: Variant, machine: Any) -> Launch:
    """Eight experts; forward with a bias, or dgrad of two weights."""
    experts, r, n, k, precision = 8, variant.rows, variant.widths[0], variant.k, variant.precision
    dtype = getattr(torch, variant.dtype)

    def empty(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=of, device="meta")

    x, dy, offsets = empty(r, k), empty(r, n), empty(experts + 1, of=torch.int32)
    weight, transposed = empty(experts, n, k), empty(experts, k, n).mT
    if (
        n % VECTOR
    ):  # rows of an odd length are not copied asynchronously, so that a loop over them has no pipeline
        transposed = weight
    act, how = variant.activation, (None, precision, machine)
    if kernel == "grouped_matmul_kernel":
        if variant.bias:
            return grouped.plan_matmul([x], [weight], offsets, empty(experts, n), *how)[0]
        return grouped.plan_matmul([x, x], [transposed, transposed], offsets, None, *how)[0]
    if kernel == "grouped_gated_kernel":
        return grouped.plan_gated(x, weight, weight, offsets, act, variant.keep, *how)[0]
    if kernel == "grouped_wgrad_kernel":
        grads = getattr(torch, variant.grads) if variant.grads else dtype
        return grouped.plan_wgrad(dy, x, offsets, grads, *how)[0]
    return grouped.plan_gated_backward(dy, dy, dy, offsets, act, machine)[0]


def _elementwise(kernel: str, variant: Variant, machine: Any) -> Launch:
    dtype, rows, width, wide = getattr(torch, variant.dtype), variant.rows, variant.k, variant.widths[0]

    def empty(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=of, device="meta")

    x, gate, weight = empty(rows, width), empty(rows, wide), empty(width, of=torch.float32)
    act = {"bf16": "silu", "fp32": "gelu"}.get(variant.name, "gelu_pytorch_tanh")
    if "_wide_" in kernel:
        wider = 16384 - width % VECTOR  # or a width of which the compiler knows no alignment
        x, weight = empty(rows, wider), empty(wider, of=torch.float32)
    if kernel in ("rms_norm_kernel", "rms_norm_wide_kernel"):
        return pointwise.plan_rms_norm(x, x, weight, 1e-5, machine)[0]
    if kernel in ("rms_norm_backward_kernel", "rms_norm_wide_backward_kernel"):
        inverse_rms = empty(rows, of=torch.float32)
        return pointwise.plan_rms_norm_backward(x, x, x, weight, inverse_rms, machine)[0]
    if kernel == "swiglu_kernel":
        return pointwise.plan_swiglu(gate, gate, act)[0]
    if kernel == "swiglu_backward_kernel":
        return pointwise.plan_swiglu_backward(gate, gate, gate, act)[0]
    if kernel.startswith("logit_"):
        logits, labels, row = gate, empty(rows, of=torch.int64), empty(rows, of=torch.float32)
        if kernel == "logit_stats_kernel":
            return cross_entropy.plan_logit_stats(logits, labels, wide, machine)[0]
        return cross_entropy.plan_logit_gradient(logits, logits, labels, wide, row, row, machine)
    q, k, table = empty(1, rows, 32, 128), empty(1, rows, 8, 128), empty(1, rows, 1, 64, of=torch.float32)
    return pointwise.plan_rotate(q, k, table, table, 1)[0]


def _view(world_size: int, link: int | None = None) -> SimpleNamespace:
    """A workspace's device view, of which a plan takes nothing but types."""
    words = torch.zeros(max(8, world_size), dtype=torch.int64)
    return SimpleNamespace(
        data_ptrs=words,
        flag_ptrs=words,
        sig_ptrs=words,
        epoch=torch.zeros(1, dtype=torch.int32),
        status=words,
        slot_bytes=1 << 30,
        flags_per_source=4096,
        ranks_per_device=1,
        link=link,
        meet=None,
        failure=words,
        timeout_s=600.0,
    )
