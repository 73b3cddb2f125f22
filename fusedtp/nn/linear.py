"""Linear layers that cast their weights to the activations' dtype on use.

With fp32 parameters and bf16 activations they compute in bf16, while the optimizer still updates fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedtp.ops.first_order import first_order
from fusedtp.ops.matmul import matmul, matmul_add, matmul_as, widens
from fusedtp.ops.operation import wanted

from .hooks import is_called_plainly, parallel_of
from .layout import TokenLayout


class Linear(nn.Module):
    """y = x @ w.T + b.

    x        [T, K]   any float dtype
    weight   [N, K]   cast to x.dtype
    return   [T, N]
    forward: one matmul; dgrad: dy @ w; wgrad: dy.T @ x. Parallel: see hooks.py.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.parallel: Any = None
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A usable initialization; `init_` gives the same model at any world size."""
        nn.init.normal_(self.weight, std=0.02)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, layout: TokenLayout | None = None) -> Tensor:
        if self.parallel is not None:
            return self.parallel.linear(x, self, layout)
        return self.alone(x)

    def alone(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N] in x's dtype, for a layer that is not parallel."""
        return linears(x, [self.weight], [self.bias])[0]

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, bias={self.bias is not None}"


def linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """F.linear of one x [..., K] with several weights [N_i, K], which are cast to x.dtype: [..., N_i] each.

    For 16-bit x on an NVIDIA GPU, or on a CPU without 16-bit instructions, this is one autograd node: it does not
    support double backward, and a backward through one output frees what the others need, unless it retains the graph.
    """
    if _takes_one_node(x, weights):
        return _in_one_node(x, weights, biases)
    return tuple(
        F.linear(x, w.to(x.dtype), None if b is None else b.to(x.dtype)) for w, b in zip(weights, biases, strict=True)
    )


def _in_one_node(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    if x.dim() == 2:  # avoid views: a pipeline stage may end here, and torch detaches its output in place
        found: tuple[Tensor, ...] = _Linears.apply(x, len(weights), *weights, *biases)
        return found
    ys = _Linears.apply(x.reshape(-1, x.shape[-1]), len(weights), *weights, *biases)
    return tuple(y.view(*x.shape[:-1], y.shape[-1]) for y in ys)


def _takes_one_node(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether _Linears supports these and is faster than torch: eager mode, plain tensors, no torch.func transform, no
    autocast to another dtype.
    """
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and not torch.compiler.is_compiling()
        and ((x.is_cuda and torch.version.hip is None) or widens(x))
        and type(x) in PLAIN
        and not torch._C._are_functorch_transforms_active()
        and not (torch.is_autocast_enabled(x.device.type) and torch.get_autocast_dtype(x.device.type) != x.dtype)
        and all(type(w) in PLAIN and w.dtype in (x.dtype, torch.float32) for w in weights)
    )


PLAIN = (Tensor, nn.Parameter)


class _Linears(torch.autograd.Function):
    """x [T, K], W weights [N_i, K] and W biases [N_i] or None -> y_i [T, N_i].

    The matmuls for the gradient of x also accumulate it, and gradients of fp32 weights are computed in fp32. torch's
    own nodes, one per layer, accumulate in separate passes, and round weight gradients to 16 bits before converting
    them. On a CPU without 16-bit instructions this is ten times faster, see Note [16-bit matmuls on CPU] in
    ops/matmul.py.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, *operands: Any) -> tuple[Tensor, ...]:
        weights = [w.to(x.dtype) for w in operands[:count]]
        biases = [None if b is None else b.to(x.dtype) for b in operands[count:]]
        of_x, _, *of_operands = ctx.needs_input_grad
        ctx.save_for_backward(x if any(of_operands[:count]) else None, *(w if of_x else None for w in weights))
        ctx.dtypes = [None if operand is None else operand.dtype for operand in operands]
        ctx.set_materialize_grads(False)
        return tuple(matmul(x, w.t(), b) for w, b in zip(weights, biases, strict=True))

    @staticmethod
    @first_order
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        wants, count = wanted(ctx), len(weights)
        dx: Tensor | None = None
        found: list[Tensor | None] = [None] * (2 * count)
        for i, dy in enumerate(dys):
            if dy is None:
                continue
            if wants[0]:
                if dx is None:
                    dx = matmul(dy, weights[i])
                else:
                    matmul_add(dx, dy, weights[i])
            if wants[2 + i]:
                found[i] = matmul_as(dy.t(), x, ctx.dtypes[i])
            if wants[2 + count + i]:
                found[count + i] = dy.sum(0, dtype=torch.float32).to(ctx.dtypes[count + i])
        return dx, None, *found


def _is_plain(module: nn.Module) -> bool:
    """Whether a call runs only the forward of Linear, which FP8Linear has too, and nothing else."""
    return type(module).forward is Linear.forward and is_called_plainly(module)


def project(
    x: Tensor,
    modules: Sequence[nn.Module],
    layout: TokenLayout | None = None,
    gathering: Callable[..., tuple[Tensor, ...]] | None = None,
) -> tuple[Tensor, ...]:
    """All linears on the same x. If they are parallel, x is gathered once for all of them, unless one of them has
    hooks or its own forward: then each is called separately.

    x          [T_r, K]
    gathering  if x is gathered, the operation to use instead of all_gather_matmul
    return     one [T, N_i] per linear (N_i: this rank's columns), or what `gathering` returns
    """
    parallel = parallel_of(modules[0])
    plain = all(map(_is_plain, modules))
    if parallel is not None and plain:
        return parallel.project(x, modules, layout, gathering)
    if parallel is not None:
        return tuple(each(x) if layout is None else each(x, layout) for each in modules)
    plain = plain and all(type(each) is Linear for each in modules)
    weights: list[Any] = [each.weight for each in modules] if plain else []
    if plain and _takes_one_node(x, weights):
        return _in_one_node(x, weights, [each.bias for each in modules])  # type: ignore[misc]
    return tuple(each(x) for each in modules)
