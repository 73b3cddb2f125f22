"""Gradients accumulated in fp32: if a parameter has an attribute `main_grad`, its gradient is added there.

Note [main_grad]
`main_grad` is a plain tensor (or a DTensor) with the shape of the parameter, or of this rank's shard of it, fp32 if the
parameter has 16 bits. `.grad` then stays None, and a training loop reads `main_grad` instead:

    weight of a linear layer     dw is computed in fp32 and added unrounded, whatever the dtype of the activations:
                                 column- and row-parallel, replicated ones of fusedtp.nn, with and without sequence
                                 parallelism, under autocast
    any other parameter of a     autograd's gradient is added: for a 16-bit bias, norm or embedding, and the weight of a
    parallel layer               linear layer that a plan does not split, it has been rounded to 16 bits once for each
                                 use in a step
    under torch.compile          raises: a compiled graph cannot add to a tensor that is not its input
    under FSDP2                  ignored: layers see a gathered parameter, which has no such attribute

If every rank holds a weight but multiplies only a part of it, dw is first summed over ranks, in fp32. The operations
themselves (fusedtp.all_gather_matmul ...) honour main_grad only on their weights; the layers of fusedtp.parallel, and
all modules of a third-party model that is split, on every parameter. Modules that are not parallel ignore it.
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

Runs = tuple[tuple[int, int], ...]


class MainGrad(Protocol):
    """Anything that a gradient can be added to: a tensor, or a part of one that all ranks hold."""

    def add_(self, gradient: Tensor, /) -> Any: ...


@dataclass(frozen=True)
class SharedMainGrad:
    """The main_grad [N, ...] of a weight that all ranks hold.

    runs   (begin, count) of the rows that this rank computes, one after another; None: all
    """

    total: Tensor
    group: str
    runs: Runs | None = None

    def add_(self, dw: Tensor) -> None:
        """Collective: dw [n, ...] of every rank, summed over ranks."""
        full = dw
        if self.runs is not None:
            full = dw.new_zeros(self.total.shape)
            for part, (begin, count) in zip(dw.split([n for _, n in self.runs]), self.runs, strict=True):
                full[begin : begin + count] = part
        comm = communicator(self.group)
        rows = full.flatten(1)
        spec = Spec(self.group, comm.rank, split(rows.shape[0], comm.world_size))
        self.total.add_(OPERATIONS["all_reduce_rows"](spec, rows).view_as(full))


def main_grad_of(parameter: Tensor) -> Any:
    """The target of the parameter's gradient instead of `.grad`; None: `.grad`.

    Raises RuntimeError under torch.compile.
    """
    if not parameter.requires_grad or not torch.is_grad_enabled():
        return None
    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is not None and torch.compiler.is_compiling():
        _refuse_to_compile()
    return main_grad


# Runs while tracing: a traced error would only cause a graph break, and the rest would compile to wrong code.
@constant_to_compiler
def _refuse_to_compile() -> None:
    raise RuntimeError(
        "a parameter with main_grad is used in a compiled function: the graph would put its gradient into .grad and "
        "leave main_grad as it is. Compile without main_grad, or keep this layer out of the graph "
        "(torch.compiler.disable)"
    )


def main_grads_of(weights: Sequence[Tensor]) -> list[MainGrad | None]:
    """The main_grads of weights before a cast, which loses the attribute. Raises ValueError for another shape."""
    main_grads = []
    for w in weights:
        main_grad = main_grad_of(w)
        if main_grad is not None:
            (main_grad, w), _ = parts((main_grad, w))
        main_grads.append(main_grad)
        if isinstance(main_grad, Tensor) and main_grad.shape != w.shape:
            raise ValueError(
                f"the weight has shape {tuple(w.shape)}, its main_grad {tuple(main_grad.shape)}; they must match"
            )
    return main_grads


def accumulate_grad(dw: Tensor, main_grad: MainGrad | None, dtype: torch.dtype) -> Tensor | None:
    """The gradient that a node returns for a weight: None if dw was added to main_grad, else dw rounded to `dtype`."""
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
    """dy [T, N], x [T, K] -> dw [N, K], or None if it was added to main_grad."""
    return accumulate_grad(matmul_as(dy.t(), x, wgrad_dtype(x, [main_grad])), main_grad, x.dtype)


def accumulating(parameter: Tensor, main_grad: Tensor) -> Tensor:
    """The parameter itself; its gradient, as autograd computed it, is added to main_grad."""
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
