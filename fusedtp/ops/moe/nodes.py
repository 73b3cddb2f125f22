"""What the operations of experts share: how they are declared, and their autograd of several nodes.

Note [Split backward]
A pipeline that defers weight gradients runs backward twice: once for the inputs, later for the weights. One node with
both gradients would run, and communicate, in both passes. So a layer of experts is three nodes:

    x ------> input node  ---- y ----+
                                     +--> Join --> y
    w, b ---> weight node -- token --+

Join hands dy to both. A token has y's shape and no memory (one element, expanded); it exists so that dy reaches the
weight node.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.library import CustomOpDef  # type: ignore[attr-defined]
from torch.utils._python_dispatch import _len_torch_dispatch_stack  # type: ignore[attr-defined]

BODIES: dict[str, Any] = {}  # name -> what the custom op runs


def op(name: str) -> Any:
    """The custom op fusedtp::name; its body where nothing would see the op, in eager code without a dispatch mode.

    The dispatch of a Python custom op runs some 100 kB of cold code between two matmuls, 0.2 ms.
    """
    if torch.compiler.is_compiling() or _len_torch_dispatch_stack():
        return getattr(torch.ops.fusedtp, name)
    return BODIES[name]


def ordered(*ops: CustomOpDef) -> None:
    """Keep the calls of these in the order of the program, see _keep_order in ops/operation.py."""
    if not hasattr(CustomOpDef, "register_effect"):
        return
    from torch.library import EffectType  # type: ignore[attr-defined]

    for each in ops:
        each.register_effect(EffectType.ORDERED)


def autocast_disabled(x: Tensor) -> AbstractContextManager[Any]:
    """Compute in the operands' dtype: what autocast wants has been done to them."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def record_function(name: str) -> AbstractContextManager[Any]:
    """torch's record_function where a profiler runs; entering and leaving it costs 0.1 ms when caches are cold."""
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return torch.profiler.record_function(name)
    return nullcontext()


class Join(Function):
    """(y_1..y_n, token_1..token_n) -> y_1..y_n; every dy goes to both."""

    @staticmethod
    def forward(ctx: Any, *ys_and_tokens: Tensor) -> Any:
        ys = ys_and_tokens[: len(ys_and_tokens) // 2]
        ctx.mark_dirty(*ys)
        return ys if len(ys) > 1 else ys[0]

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor, ...]:
        return (*dys, *dys)


def token(like: Tensor, rows: int, width: int) -> Tensor:
    """[rows, width] without memory."""
    return like.new_empty(1).expand(rows, width)
