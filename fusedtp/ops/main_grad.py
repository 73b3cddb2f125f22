"""Gradients accumulated in fp32: a parameter with an attribute `main_grad` gets its gradient added there.

Note [main_grad]
`main_grad` is a plain tensor (or a DTensor) of the parameter's own shape, or of this rank's shard of it, fp32 where
the parameter is of 16 bits. `.grad` then stays None, and what a loop reads instead is `main_grad`:

    weight of a linear layer     dw is made in fp32 and added unrounded, whatever the dtype of the activations: column-
                                 and row-parallel, replicated, with and without sequence parallelism, under autocast
    any other parameter of a     the gradient that autograd made is added: of a 16-bit bias, norm or embedding it has
    parallel layer               been rounded to 16 bits once for each use in a step
    under torch.compile          raises: a compiled graph cannot add to a tensor that it does not take

A weight that every rank holds and each multiplies only a part of has its dw summed over ranks, in fp32, first. The
operations themselves (fusedtp.all_gather_matmul ...) look at their weights only; the layers of fusedtp.parallel at
every parameter. Modules that are not parallel are torch's alone and look at none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from fusedtp.comm import communicator
from fusedtp.comm.constant import constant_to_compiler

from .first_order import first_order
from .matmul import matmul_as
from .operation import OPERATIONS, Spec, parts
from .rows import split


class MainGrad(Protocol):
    """What takes a gradient: a tensor, or a part of one that all ranks hold."""

    def add_(self, gradient: Tensor, /) -> Any: ...


@dataclass(frozen=True)
class SharedMainGrad:
    """The main_grad [N, ...] of a weight that all ranks hold; this rank computes its rows from `begin` on."""

    total: Tensor
    group: str
    begin: int = 0

    def add_(self, dw: Tensor) -> None:
        """Collective: dw [n, ...] of every rank, summed over ranks."""
        full = dw
        if dw.shape != self.total.shape:
            full = dw.new_zeros(self.total.shape)
            full[self.begin : self.begin + dw.shape[0]] = dw
        comm = communicator(self.group)
        rows = full.flatten(1)
        spec = Spec(self.group, comm.rank, split(rows.shape[0], comm.world_size))
        self.total.add_(OPERATIONS["all_reduce_rows"](spec, rows).view_as(full))


def main_grad_of(parameter: Tensor) -> Any:
    """Where the parameter's gradient goes in place of `.grad`; None: it goes there.

    Raises RuntimeError where it is being compiled.
    """
    if not parameter.requires_grad or not torch.is_grad_enabled():
        return None
    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is not None and torch.compiler.is_compiling():
        _refuse_to_compile()
    return main_grad


# Runs while tracing. An error that is traced would only break the graph, and what is compiled of the rest go wrong.
@constant_to_compiler
def _refuse_to_compile() -> None:
    raise RuntimeError(
        "a parameter with main_grad is used in a compiled function: the graph would put its gradient into .grad and "
        "leave main_grad as it is. Compile without main_grad, or keep this layer out of the graph "
        "(torch.compiler.disable)"
    )


def main_grads_of(weights: Sequence[Tensor]) -> list[MainGrad | None]:
    """Of weights as they were given, before a cast loses the attribute. Raises ValueError for another shape."""
    main_grads = []
    for w in weights:
        main_grad = main_grad_of(w)
        if main_grad is not None:
            (main_grad, w), _ = parts((main_grad, w))
        main_grads.append(main_grad)
        if isinstance(main_grad, Tensor) and main_grad.shape != w.shape:
            raise ValueError(
                f"the weight has shape {tuple(w.shape)}, its main_grad {tuple(main_grad.shape)}; one is wanted"
            )
    return main_grads


def accumulate_grad(dw: Tensor, main_grad: MainGrad | None, dtype: torch.dtype) -> Tensor | None:
    """What a node returns for a weight of `dtype`: None where it is added to main_grad, else dw rounded to dtype."""
    if main_grad is None:
        return dw if dw.dtype is dtype else dw.to(dtype)
    main_grad.add_(dw)
    return None


def wgrad_dtype(x: Tensor, main_grads: Sequence[MainGrad | None]) -> torch.dtype:
    """The dtype in which weight gradients are computed: fp32 for 16-bit x and a main_grad, else x.dtype."""
    if x.dtype.itemsize == 2:
        for main_grad in main_grads:
            if main_grad is not None:
                return torch.float32
    return x.dtype


def weight_grad(dy: Tensor, x: Tensor, main_grad: MainGrad | None) -> Tensor | None:
    """dy [T, N], x [T, K] -> dw [N, K], or None where it was added to main_grad."""
    return accumulate_grad(matmul_as(dy.t(), x, wgrad_dtype(x, [main_grad])), main_grad, x.dtype)


def accumulating(parameter: Tensor, main_grad: Tensor) -> Tensor:
    """The parameter itself, whose gradient is added to main_grad as autograd made it."""
    return _Accumulating.apply(parameter, main_grad)


class _Accumulating(Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, main_grad: Tensor) -> Tensor:
        ctx.main_grad = main_grad
        ctx.set_materialize_grads(False)
        return parameter.view_as(parameter)

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, None]:
        if gradient is not None:
            ctx.main_grad.add_(gradient)
        return None, None
