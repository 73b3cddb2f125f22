"""The LM head fused with its cross-entropy: logits are computed, used and dropped for one piece of rows at a time.

    every rank   gather x [T, K], once
    each piece   logits = x[rows] @ w.T, at most `max_logits_bytes` of them
                 their log-sum-exp and target, one all-gather of [rows, 2]        as in loss.py
                 g = softmax - onehot, in place of the logits;  dx[rows] = g @ w;  dw += g.T @ x[rows]
    every rank   dx [T_r, K] = reduce-scatter

Since the loss is a sum over tokens, the gradients of a piece do not depend on later pieces: the forward computes them
from the logits at hand, and the backward only multiplies them by its scalar. So no logit is computed twice, and memory
is one piece of logits, x, dx and dw, independent of T times V; see Note [Memory of the loss].

Note [Memory of the loss]
In bytes, in addition to x, weight and labels; e is the size of an element of x, a = max(4, e) that of a sum:

    forward    max(max_logits_bytes, V_r e)     logits, later their gradient; never more than T V_r e
               T K e                            x of all ranks, if it is sharded
               T K e                            dx of all rows, if x needs a gradient
               V_r K a                          dweight, if weight needs one: it is added to main_grad only at the end
               a few numbers per row of a piece; on a CPU also its chunks, see loss.py
    backward   dx, dweight, and their products with the loss's gradient: T_r K e, and V_r K e unless into a main_grad

A bias adds V_r a, and on a CPU an fp32 copy of a 16-bit piece, from which its gradient is summed. A CPU without 16-bit
instructions (Note [16-bit matmuls on CPU] in ops/matmul.py) also holds the weight in fp32 and 512 rows of logits; a CPU
with them also a copy of a 16-bit piece if V_r is not a multiple of 32 (Note [Steps of K on CPU] there).

A piece reads and writes dweight once: on an H200 that takes as long as the three matmuls of 230 rows. Therefore pieces
are larger on a GPU: 1024 rows for a vocabulary of 128 Ki.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedtp.comm import Place, place
from fusedtp.ops.cpu import accumulator
from fusedtp.ops.first_order import first_order
from fusedtp.ops.main_grad import accumulate_grad, main_grads_of
from fusedtp.ops.matmul import matmul_add, matmul_into, to_fp32
from fusedtp.ops.operation import OPERATIONS, Spec
from fusedtp.ops.rows import Rows

from .balance import propagating_errors
from .loss import (
    check_kinds,
    check_labels,
    combine_stats,
    gathered_stats,
    local_gradient,
    local_stats,
    place_in_vocabulary,
)

CPU_LOGITS_BYTES, GPU_LOGITS_BYTES = 1 << 26, 1 << 28


class _Call(NamedTuple):
    """The non-tensor arguments. `rows`: how x is split over ranks; None: x is whole. `grad`: whether autograd is on."""

    at: Place | None
    rows: Rows | None
    start: int
    ignore_index: int
    piece: int
    main_grad: Any
    grad: bool


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    group: Any = None,
    *,
    bias: Tensor | None = None,
    sizes: Sequence[int] | None = None,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    num_labels: int | Tensor | None = None,
    max_logits_bytes: int | None = None,
) -> Tensor:
    """Mean cross-entropy of logits = x @ weight.T + bias, computed piece by piece.

    x            [T, K]     all rows; with `sizes` [T_r, K], this rank's
    weight       [V_r, K]   this rank's part of the vocabulary (torch.chunk's split of V); V without a group
    labels       [T]        integers in [0, V), the same on all ranks
    group        None: V_r = V; else anything communicator() accepts
    bias         [V_r]
    sizes        number of rows on each rank, if x is sharded; its gradient is then sharded too, otherwise it is a
                 partial sum
    vocab_size   V; None asks the other ranks
    num_labels   divisor of the sum of losses; None counts the labels here (at least 1)
    max_logits_bytes   size of one piece; the same on all ranks; None: 64 MiB, 256 MiB on a GPU. A piece has at least
                 one row
    return       scalar, fp32 (fp64 for fp64 x), the same on all ranks. Double backward raises.
    memory       a piece, dx, dweight and, if it is sharded, all of x: in bytes in Note [Memory of the loss]
    Raises ValueError for shapes or dtypes that do not fit, IndexError (on CPU) for a label outside the vocabulary.
    Source: the loss of Shoeybi et al. 2019, section 3, computed in pieces with the gradients
    in the forward as in Hsu et al. 2024, "Liger Kernel" (fused linear cross-entropy).
    """
    at = None if group is None else place(group)
    with propagating_errors(group):
        _check(x, weight, bias, labels, at, sizes)
        (main_grad,) = main_grads_of([weight])
        labels = labels.to(device=x.device, dtype=torch.int64)
        if num_labels is None:
            num_labels = (labels != ignore_index).sum().clamp(min=1)
        start, total, widest = 0, weight.shape[0], weight.shape[0]
        if at is not None:
            start, total = place_in_vocabulary(at, total, vocab_size, x.device)
            widest = -(-total // at.world_size)  # all ranks must use the same pieces
        check_labels(labels, total, ignore_index)
        if max_logits_bytes is None:
            max_logits_bytes = CPU_LOGITS_BYTES if x.device.type == "cpu" else GPU_LOGITS_BYTES
        piece = max(1, max_logits_bytes // max(1, widest * x.element_size()))
        rows = None if sizes is None else Rows(tuple(sizes))
        call = _Call(at, rows, start, ignore_index, piece, main_grad, torch.is_grad_enabled())
        loss: Tensor = _LinearCrossEntropy.apply(x, weight, bias, labels, call)
    return loss / num_labels


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, at: Place | None, sizes: Sequence[int] | None
) -> None:
    if sizes is not None and at is None:
        raise ValueError("sizes are the rows of x on each rank: they need a group")
    total = (x.shape[0] if x.dim() else 0) if sizes is None else sum(sizes)
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or labels.shape != (total,):
        raise ValueError(
            f"wanted x [T, K], weight [V, K] and labels [{total}], got {tuple(x.shape)}, {tuple(weight.shape)}, "
            f"{tuple(labels.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {tuple(bias.shape)}, wanted [V] for weight {tuple(weight.shape)}")
    check_kinds(x, labels)
    if weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        kinds = ", ".join(str(t.dtype) for t in (x, weight, bias) if t is not None)
        raise ValueError(f"x, weight and bias must have one dtype, not {kinds}")
    if sizes is not None and at is not None and (len(sizes) != at.world_size or x.shape[0] != sizes[at.rank]):
        raise ValueError(f"rank {at.rank} has {x.shape[0]} rows; sizes is {list(sizes)} for {at.world_size} ranks")


class _LinearCrossEntropy(torch.autograd.Function):
    """The sum of the losses of all tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, call: _Call) -> Tensor:
        at, rows = call.at, call.rows
        spec = None if rows is None or at is None else Spec(at.name, at.rank, rows.sizes, layer="lm_head")
        full = x if spec is None else OPERATIONS["all_gather_rows"](spec, x)
        wanted = [call.grad and needed for needed in ctx.needs_input_grad[:3]]
        operand = to_fp32(weight)  # once for all pieces
        made = _Gradients(full, operand, wanted)
        loss = torch.zeros((), dtype=accumulator(x.dtype), device=x.device)
        buffer = full.new_empty(min(call.piece, full.shape[0]), weight.shape[0])
        for piece in _pieces(full.shape[0], call.piece):
            own = labels[piece]
            logits = buffer[: len(own)]
            matmul_into(logits, [full[piece]], [operand.t()], bias)
            stats, world_size = local_stats(logits, own, call.start), 1
            here = stats[:, 0]
            if at is not None:
                stats, world_size = gathered_stats(at, stats), at.world_size
            lse, target = combine_stats(stats.view(world_size, len(own), 2))
            ignored = own == call.ignore_index
            loss += (lse - target).masked_fill(ignored, 0.0).sum()
            if any(wanted):
                scale = (~ignored).to(lse.dtype)
                made.add(piece, local_gradient(logits, own, call.start, here, lse, scale, inplace=True))
        dx = made.dx
        if dx is not None and spec is not None:
            dx = OPERATIONS["reduce_scatter_rows"](spec, dx)
        ctx.save_for_backward(dx, made.dweight, made.dbias)
        ctx.dtype, ctx.main_grad = x.dtype, call.main_grad
        return loss

    @staticmethod
    @first_order
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        dx, dweight, dbias = ctx.saved_tensors
        if dx is not None:
            dx = (dx * dloss).to(dx.dtype)
        if dweight is not None:
            dweight = _deliver_product(dweight, dloss.to(dweight.dtype), ctx.main_grad, ctx.dtype)
        if dbias is not None:
            dbias = (dbias * dloss).to(ctx.dtype)
        return dx, dweight, dbias, None, None


class _Gradients:
    """Gradients of the sum of losses; for parameters in fp32 or wider, since they are summed over pieces."""

    def __init__(self, x: Tensor, weight: Tensor, wanted: Sequence[bool]) -> None:
        self._x, self._weight, dtype = x, weight, accumulator(x.dtype)
        self.dx = torch.empty_like(x, memory_format=torch.contiguous_format) if wanted[0] else None
        self.dweight = torch.zeros(weight.shape, dtype=dtype, device=x.device) if wanted[1] else None
        self.dbias = torch.zeros(weight.shape[:1], dtype=dtype, device=x.device) if wanted[2] else None

    def add(self, piece: slice, dlogits: Tensor) -> None:
        """dlogits [rows of the piece, V_r]."""
        if self.dx is not None:
            matmul_into(self.dx[piece], [dlogits], [self._weight])
        if self.dweight is not None:
            matmul_add(self.dweight, dlogits.t(), self._x[piece])
        if self.dbias is not None:
            self.dbias += dlogits.sum(0, dtype=self.dbias.dtype)


def _deliver_product(dw: Tensor, factor: Tensor, main_grad: Any, dtype: torch.dtype) -> Tensor | None:
    """accumulate_grad(dw * factor, ...), avoiding an fp32 copy of the product if possible."""
    if main_grad is None:
        return torch.mul(dw, factor, out=torch.empty_like(dw, dtype=dtype))
    if type(main_grad) is Tensor:
        main_grad.addcmul_(dw, factor)
        return None
    return accumulate_grad(dw * factor, main_grad, dtype)


def _pieces(total: int, rows: int) -> Iterator[slice]:
    for first in range(0, total, rows):
        yield slice(first, min(first + rows, total))
