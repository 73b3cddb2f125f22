"""The library's own kernels as its launchers would start them on a GPU that is not here.

Tensors on the CPU stand in for operands: only dtype, strides and alignment count.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from fusedtp.ops.launch import Launch, gather, scatter
from fusedtp.ops.launch.config import VECTOR, tiles

from .cases import Variant


def planned(kernel: str, variant: Variant, machine: Any) -> tuple[Any, dict[str, Any], dict[str, int]]:
    """(kernel, arguments, options) of the library's own launch, as rank 1."""
    w, t, widths, k = variant.world_size, variant.rows, variant.widths, variant.k
    dtype = getattr(torch, variant.dtype)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype)

    weights = [empty(width, k) for width in widths]
    biases = [empty(width) if variant.bias and i == 0 else None for i, width in enumerate(widths)]
    rows, sig, view = SimpleNamespace(sizes=(t // w,) * w, batch=1), 12345, _view(w)
    x, full = empty(t // w, k), empty(t, k)
    where, end = (view, 1, w), (sig, None, machine)
    if kernel == "bump_epoch":
        from fusedtp.kernels.signals import bump_epoch

        return bump_epoch, dict(epoch=view.epoch), {}
    if kernel == "matmul_kernel":
        from fusedtp.kernels.matmul import matmul_kernel

        config = tiles(machine, dtype, t, widths[0], widths[0] % VECTOR == 0)
        args = scatter.matmul_args(full, weights[0], biases[0], config)
        del args["PART_M"]
        return matmul_kernel, args | dict(y=empty(t, widths[0]), M=t), Launch(None, 1, {}, config).options
    if kernel == "all_gather_matmul_kernel":
        launch = gather.plan_matmul(*where, x, weights, biases, rows, sig, variant.keep, None, machine)[0]
    elif kernel == "all_gather_wgrad_kernel":
        grads = getattr(torch, variant.grads) if variant.grads else None
        launch = gather.plan_wgrad(*where, x, [empty(t, width) for width in widths], rows, *end, grads)[0]
    elif kernel == "matmul_reduce_scatter_kernel":
        launch = scatter.plan_reduce_scatter(*where, full, weights[0], biases[0], rows, *end)[0]
    elif kernel == "one_shot_kernel":
        launch = scatter.plan_one_shot(*where, full, weights[0], biases[0], *end)[0]
    elif kernel == "two_shot_kernel":
        launch = scatter.plan_two_shot(*where, full, weights[0], biases[0], *end)[0]
    else:
        raise ValueError(f"no plan for {kernel!r}")
    return launch.kernel, launch.args, launch.options


def _view(world_size: int) -> SimpleNamespace:
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
        meet=None,
        failure=words,
        timeout_s=600.0,
    )
