"""Baselines: for each, a callable, or the reason why it is not available.

torch.compile    needs a C++ compiler on CPU, Triton on a GPU
Liger-Kernel     the optional extra `liger`; its kernels need a GPU
symm_mem         torch's fused_all_gather_matmul and fused_matmul_reduce_scatter; needs one GPU per process
by hand          the process group's collectives and torch's matmuls, one after another

Parallel linear layers by hand save only the shard of x, as fusedtp does:

    Column   y = gather(x) @ w.T     dx = reduce_scatter(dy @ w)    dw = dy.T @ gather(x)
    Row      y = reduce_scatter(x @ w.T)    dx = gather(dy) @ w     dw = gather(dy).T @ x, of one gather

On a CPU without 16-bit instructions, 16-bit matmuls are computed in fp32, as in fusedtp, so that the comparison covers
the communication.
"""

from __future__ import annotations

import importlib
import os
import shutil
import warnings
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

# torch 2.13 renamed both and warns about the old names.
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Found = tuple[Any, str]  # (the baseline, "") or (None, why not)


def compiled(fn: Callable[..., Any], device: torch.device, wanted: bool) -> Found:
    """torch.compile of fn, compiled at its first call."""
    if not wanted:
        return None, "left out (--no-compile)"
    if device.type == "cpu" and not any(shutil.which(name) for name in ("g++", "clang++", os.environ.get("CXX", ""))):
        return None, "torch.compile: no C++ compiler found"
    torch.compiler.reset()  # otherwise the ninth shape of the same code would run eagerly
    return torch.compile(fn, dynamic=False), ""


def liger(module: str, name: str, device: torch.device) -> Found:
    """liger_kernel.ops.<module>.<name>."""
    try:
        version("liger-kernel")
    except PackageNotFoundError:
        return None, "Liger-Kernel is not installed (extra `liger`)"
    if device.type != "cuda":
        return None, "Liger-Kernel's kernels need a GPU"
    try:
        return getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name), ""
    except (ImportError, AttributeError) as error:
        return None, f"Liger-Kernel: {error}"


def symm_mem(group: Any, device: torch.device) -> Found:
    """torch.ops.symm_mem, ready for `group`."""
    if device.type != "cuda":
        return None, "torch's symmetric memory needs GPUs"
    if not isinstance(group, dist.ProcessGroup):
        return None, "torch's fused operations need a GPU for each process; a virtual world has one for all"
    if torch.cuda.device_count() < group.size():
        return None, f"torch's fused operations need {group.size()} GPUs"
    try:
        from torch.distributed import _symmetric_memory as symmetric

        enable = getattr(symmetric, "enable_symm_mem_for_group", None)
        if enable is not None:  # newer versions do not need it and warn
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                enable(group.group_name)
        return torch.ops.symm_mem, ""
    except (ImportError, AttributeError, RuntimeError) as error:
        return None, f"torch's symmetric memory: {error}"


class ByHand:
    """The process group's collectives called directly, with output buffers that are allocated once per shape."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.world_size = group, group.size()
        self._outputs: dict[tuple[str, int, int, torch.dtype], Tensor] = {}

    def _output(self, use: str, rows: int, width: int, like: Tensor) -> Tensor:
        key = use, rows, width, like.dtype
        if key not in self._outputs:
            self._outputs[key] = like.new_zeros(rows, width)
        return self._outputs[key]

    def gather(self, x: Tensor) -> Tensor:
        """[T_r, K] -> [T, K], equal rows."""
        out = self._output("gather", x.shape[0] * self.world_size, x.shape[1], x)
        gather_into(out, x, group=self.group)
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """[T, N] -> [T_r, N], equal rows."""
        out = self._output("scatter", x.shape[0] // self.world_size, x.shape[1], x)
        reduce_scatter_into(out, x, group=self.group)
        return out

    def all_reduce(self, x: Tensor) -> Tensor:
        """[T, N], summed into a copy."""
        out = self._output("reduce", x.shape[0], x.shape[1], x)
        out.copy_(x)
        dist.all_reduce(out, group=self.group)
        return out


def by_hand(group: Any, device: torch.device) -> Found:
    """(collectives, "") of the process group, or why there are none."""
    if not isinstance(group, dist.ProcessGroup):
        return None, f"{collective_name(device)} does not run several ranks in one process or on one GPU"
    return ByHand(group), ""


def collective_name(device: torch.device) -> str:
    return "NCCL" if device.type == "cuda" else "gloo"


def vendor_name(device: torch.device) -> str:
    """The library that torch.matmul uses."""
    if device.type == "cpu":
        return "torch.matmul"
    return "torch.matmul (hipBLAS)" if torch.version.hip else "torch.matmul (cuBLAS)"


class Nothing(ByHand):
    """No communication: returns the same output buffers unwritten, so only the matmuls remain."""

    def gather(self, x: Tensor) -> Tensor:
        return self._output("gather", x.shape[0] * self.world_size, x.shape[1], x)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self._output("scatter", x.shape[0] // self.world_size, x.shape[1], x)


@cache
def widens(dtype: torch.dtype) -> bool:
    """Whether matmuls of this dtype run faster in fp32 on this CPU."""
    ops = torch.ops.mkldnn
    if dtype == torch.bfloat16:
        return not ops._is_mkldnn_bf16_supported()
    return dtype == torch.float16 and not ops._is_mkldnn_fp16_supported()


def matmul(x: Tensor, w: Tensor) -> Tensor:
    """x [M, K] @ w [N, K].T with the vendor's library; 16 bits through fp32 on CPUs where that is faster."""
    if x.device.type == "cpu" and widens(x.dtype):
        return torch.mm(x.float(), w.float().t()).to(x.dtype)
    return torch.mm(x, w.t())


class Column(Function):
    """x [T_r, K], w [N_r, K] -> y [T, N_r]."""

    @staticmethod
    def forward(ctx: Any, moves: ByHand, x: Tensor, w: Tensor) -> Tensor:
        ctx.moves = moves
        ctx.save_for_backward(x, w)
        return matmul(moves.gather(x), w)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, w = ctx.saved_tensors
        dx = ctx.moves.reduce_scatter(matmul(dy, w.t()))
        return None, dx, matmul(dy.t(), ctx.moves.gather(x).t())


class Row(Function):
    """x [T, K_r], w [N, K_r] -> y [T_r, N]."""

    @staticmethod
    def forward(ctx: Any, moves: ByHand, x: Tensor, w: Tensor) -> Tensor:
        ctx.moves = moves
        ctx.save_for_backward(x, w)
        return moves.reduce_scatter(matmul(x, w)).detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, w = ctx.saved_tensors
        full = ctx.moves.gather(dy)
        return None, matmul(full, w.t()), matmul(full.t(), x.t())
