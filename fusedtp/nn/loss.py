"""Cross-entropy of logits with the vocabulary split over ranks; the logits are never gathered.

A rank that holds columns [start, start + V_r) of the logits needs only two numbers per token from every other
rank, so one small all-gather is enough:

    every rank   lse_r[t] = log sum_v exp(logits[t, v])    target_r[t] = logits[t, label] if here, else 0
    all-gather   [T, 2] in fp32 from every rank
    every rank   lse = logsumexp_r lse_r    target = sum_r target_r    loss[t] = lse - target
    backward     local: (exp(logits - lse) - onehot) * scale

On a GPU each of the two passes over the logits is one kernel (ops/cross_entropy.py). Otherwise logits are read in
chunks of rows that fit into a cache and are upcast one chunk at a time, so there is never a full fp32 copy of 16-bit
logits. An empty part of the vocabulary has lse_r = -inf and contributes nothing. Neither do the logits of an ignored
label, even if they are infinite or nan: its gradient is zero, while plain torch computes 0 * nan.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedtp.comm import Place, place
from fusedtp.ops import cross_entropy
from fusedtp.ops.cpu import accumulator
from fusedtp.ops.first_order import first_order

from .balance import propagating_errors

# Elements of a chunk: on a CPU it fits into a core's cache; on a GPU it fills the device.
CPU_CHUNK, GPU_CHUNK = 1 << 17, 1 << 26


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    group: Any = None,
    ignore_index: int = -100,
    *,
    vocab_size: int | None = None,
    num_labels: int | float | Tensor | None = None,
) -> Tensor:
    """Mean cross-entropy over the labels that are not ignore_index.

    logits       [T, V_r]   this rank's columns (torch.chunk's split of V; may be none), any float dtype
    labels       [T]        integers in [0, V), the same on all ranks
    group        None: V_r = V; else anything communicator() accepts
    vocab_size   V; None asks the other ranks, which costs one more small all-gather
    num_labels   divisor of the sum of losses; None counts the labels here (at least 1, so that a
                 batch without labels has loss 0)
    return       scalar, fp32 (fp64 for fp64 logits), the same on all ranks
    forward: one all-gather of [T, 2]; backward: local. torch.compile traces both.
    Raises ValueError for shapes or dtypes that do not fit, IndexError (on CPU; RuntimeError in compiled code) for a
    label outside the vocabulary; if one rank raises, its peers do too (CPU). Source: Shoeybi et al. 2019, section 3.
    """
    with propagating_errors(group):
        if logits.dim() != 2 or labels.shape != logits.shape[:1]:
            raise ValueError(f"wanted logits [T, V] and labels [T], got {tuple(logits.shape)}, {tuple(labels.shape)}")
        check_kinds(logits, labels)
        labels = labels.to(device=logits.device, dtype=torch.int64)
        if num_labels is None:
            num_labels = (labels != ignore_index).sum().clamp(min=1)
        if group is None and torch.compiler.is_compiling():
            wide = logits.to(accumulator(logits.dtype))
            return F.cross_entropy(wide, labels, ignore_index=ignore_index, reduction="sum") / num_labels
        return vocab_parallel_losses(logits, labels, group, ignore_index, vocab_size=vocab_size).sum() / num_labels


def vocab_parallel_losses(
    logits: Tensor, labels: Tensor, group: Any, ignore_index: int = -100, *, vocab_size: int | None = None
) -> Tensor:
    """The cross-entropy of every token [T], 0 if it is ignored; arguments as above."""
    labels = labels.to(device=logits.device, dtype=torch.int64)
    at, start, total = None, 0, logits.shape[1]
    if group is not None:
        at = place(group)
        start, total = place_in_vocabulary(at, total, vocab_size, logits.device)
    if torch.compiler.is_compiling():
        return _traced_losses(logits, labels, start, total, ignore_index, at)
    check_labels(labels, total, ignore_index)
    losses: Tensor = _CrossEntropy.apply(logits, labels, start, ignore_index, at)
    return losses


def _traced_losses(
    logits: Tensor, labels: Tensor, start: int, total: int, ignore_index: int, at: Place | None
) -> Tensor:
    """vocab_parallel_losses in operations that torch.compile differentiates and fuses, with one all-gather."""
    ignored = labels == ignore_index
    if labels.device.type == "cpu":
        inside = ignored | ((labels >= 0) & (labels < total))
        torch._assert_async(inside.all(), f"a label is outside the vocabulary of {total}")
    wide, world_size = logits.to(accumulator(logits.dtype)).masked_fill(ignored[:, None], 0.0), 1
    here, column = _is_here(labels, start, logits.shape[1])
    if logits.shape[1]:
        nothing = (wide == -torch.inf).all(1)  # the rank's columns have no probability, and no gradient
        own = torch.logsumexp(wide.masked_fill(nothing[:, None], 0.0), 1).masked_fill(nothing, -torch.inf)
        target = wide.gather(1, column[:, None])[:, 0].masked_fill(~here, 0.0)
    else:  # backward must run here too
        target = wide.sum(1)
        own = target - torch.inf
    stats = torch.stack((own, target), 1).detach()
    if at is not None:
        stats, world_size = gathered_stats(at, stats), at.world_size
    lse, of_label = combine_stats(stats.view(world_size, len(labels), 2))
    # zero with a gradient: the derivative of lse by this rank's log-sum-exp is its share of the probability
    share = torch.exp(own.detach() - lse)
    zero = share * _zero_like(own) - _zero_like(target)
    return (lse - of_label + zero).masked_fill(ignored, 0.0)


def _zero_like(x: Tensor) -> Tensor:
    """Zeros, with the gradient of x where x is finite."""
    return (x - x.detach()).masked_fill(~x.isfinite(), 0.0)


def place_in_vocabulary(at: Place, here: int, vocab_size: int | None, device: torch.device) -> tuple[int, int]:
    """The first of the `here` columns that this rank holds, and V."""
    world_size = at.world_size
    if vocab_size is None:
        mine = torch.full((1, 1), here, dtype=torch.float64, device=device)
        sizes = [int(n) for n in gathered_stats(at, mine).flatten().tolist()]
        return sum(sizes[: at.rank]), sum(sizes)
    chunk = -(-vocab_size // world_size)
    start = min(at.rank * chunk, vocab_size)
    wanted = min(start + chunk, vocab_size) - start
    if here != wanted:
        raise ValueError(
            f"rank {at.rank} holds {here} columns of logits, wanted {wanted} of {vocab_size} over {world_size} ranks"
        )
    return start, vocab_size


def gathered_stats(at: Place, x: Tensor) -> Tensor:
    """x [T, n] of every rank -> [W * T, n]. No autograd."""
    from fusedtp.ops.operation import OPERATIONS, Spec

    sizes = (x.shape[0],) * at.world_size
    return OPERATIONS["all_gather_rows"](Spec(at.name, at.rank, sizes), x)


def check_kinds(x: Tensor, labels: Tensor) -> None:
    """Raises ValueError if logits (or their inputs) are not floating-point, or labels are not integers."""
    if not x.is_floating_point() or labels.is_floating_point() or labels.is_complex():
        raise ValueError(f"wanted logits of floats and labels of integers, got {x.dtype}, {labels.dtype}")


def check_labels(labels: Tensor, vocab_size: int, ignore_index: int) -> None:
    """CPU: raises IndexError for a label outside the vocabulary."""
    if labels.device.type != "cpu":
        return
    wrong = (labels != ignore_index) & ((labels < 0) | (labels >= vocab_size))
    if bool(wrong.any()):
        raise IndexError(f"label {int(labels[wrong][0])} is outside the vocabulary of {vocab_size}")


class _CrossEntropy(torch.autograd.Function):
    """Loss of every token [T] (0 if ignored); the gradient of the logits is computed in backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, start: int, ignore_index: int, at: Place | None) -> Tensor:
        stats, world_size = local_stats(logits, labels, start), 1
        own = stats[:, 0]
        if at is not None:
            world_size = at.world_size
            stats = gathered_stats(at, stats)
        lse, target = combine_stats(stats.view(world_size, len(labels), 2))
        ctx.save_for_backward(logits, labels, own, lse)
        ctx.start, ctx.ignore_index = start, ignore_index
        return (lse - target).masked_fill(labels == ignore_index, 0.0)

    @staticmethod
    @first_order
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, labels, own, lse = ctx.saved_tensors
        # dloss is a DTensor if a sum over split parameters was added to the loss
        dloss = dloss.full_tensor() if hasattr(dloss, "full_tensor") else dloss
        scale = dloss.masked_fill(labels == ctx.ignore_index, 0.0)
        return local_gradient(logits, labels, ctx.start, own, lse, scale), None, None, None, None


def _row_chunks(logits: Tensor) -> Iterator[slice]:
    elements = CPU_CHUNK * torch.get_num_threads() if logits.device.type == "cpu" else GPU_CHUNK
    rows = max(1, elements // max(1, logits.shape[1]))
    for first in range(0, logits.shape[0], rows):
        yield slice(first, first + rows)


def _is_here(labels: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Whether each label is among these columns, and its column (0 if it is not)."""
    column = labels - start
    here = (column >= 0) & (column < width)
    return here, column.where(here, 0)


def local_stats(logits: Tensor, labels: Tensor, start: int) -> Tensor:
    """Statistics of one part of the vocabulary: [T, 2] of (log-sum-exp, target logit or 0)."""
    if cross_entropy.serves(logits):
        return cross_entropy.stats(logits, labels, start)
    wide = accumulator(logits.dtype)
    stats = torch.zeros(logits.shape[0], 2, dtype=wide, device=logits.device)
    if logits.shape[1] == 0:
        stats[:, 0] = -torch.inf
        return stats
    for rows in _row_chunks(logits):
        stats[rows, 0] = _log_sum_exp(logits[rows].to(wide))
    here, column = _is_here(labels, start, logits.shape[1])
    stats[:, 1] = logits.gather(1, column[:, None])[:, 0].to(wide).masked_fill(~here, 0.0)
    return stats


def _log_sum_exp(x: Tensor) -> Tensor:
    """torch.logsumexp of rows; on a CPU log_softmax needs fewer passes over them."""
    most = x.amax(1)
    return most.where(most.isinf(), most - torch.log_softmax(x, 1).amax(1))


def combine_stats(stats: Tensor) -> tuple[Tensor, Tensor]:
    """[W, T, 2] of all parts -> lse [T] and target logit [T] of the whole vocabulary."""
    lse = torch.logsumexp(stats[..., 0], dim=0) if stats.shape[0] > 1 else stats[0, :, 0]
    # With an infinite logit log_softmax is inf - inf = nan, as in plain torch.
    return lse.masked_fill(lse == torch.inf, torch.nan), stats[..., 1].sum(0)


def local_gradient(
    logits: Tensor,
    labels: Tensor,
    start: int,
    own: Tensor,
    lse: Tensor,
    scale: Tensor,
    *,
    inplace: bool = False,
) -> Tensor:
    """(exp(logits - lse) - onehot) * scale for one part of the vocabulary, in the logits' dtype; zero if scale is zero.

    own       [T]  log-sum-exp of this part; lse is that of the whole vocabulary
    inplace   write into the memory of the logits, whose rows must be contiguous
    """
    if cross_entropy.serves(logits):
        return cross_entropy.gradient(logits, labels, start, lse, scale, inplace=inplace)
    gradient = logits if inplace else torch.empty_like(logits, memory_format=torch.contiguous_format)
    if logits.shape[1] == 0:
        return gradient
    here, column = _is_here(labels, start, logits.shape[1])
    at_label, ignored = -scale.masked_fill(~here, 0.0), scale == 0
    share = scale * torch.exp(own - lse)  # scale times the probability mass of this part
    by_softmax = not ignored.is_cuda and bool(own.isfinite().all())  # softmax of minus infinities would be 0 / 0
    for rows in _row_chunks(logits):
        none = not ignored.is_cuda and not ignored[rows].any()  # most chunks: often only last tokens lack a label
        part = logits[rows]
        into = gradient[rows] if part.dtype == lse.dtype and not inplace else None
        if by_softmax:
            part = torch.softmax(part, 1, dtype=lse.dtype, out=into).mul_(share[rows, None])
        else:
            part = torch.sub(part, lse[rows, None], out=into).exp_().mul_(scale[rows, None])
        part.scatter_add_(1, column[rows, None], at_label[rows, None])
        if not none:
            part.masked_fill_(ignored[rows, None], 0.0)
        if into is None:
            gradient[rows] = part
    return gradient
