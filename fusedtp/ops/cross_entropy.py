"""Cross-entropy statistics and gradient for one part of a vocabulary with Triton kernels: for GPUs, in eager mode.

fusedtp.nn.loss uses these if `serves` is true, else torch's own operations. Neither function is differentiable.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import launch, pointwise


def serves(logits: Tensor) -> bool:
    """Whether the kernels support these logits: fp32, fp16 or bf16 on a GPU supported by Triton, in eager mode."""
    return pointwise.serves(logits)


def stats(logits: Tensor, labels: Tensor, start: int) -> Tensor:
    """Statistics of this part of the vocabulary: (log-sum-exp, label's logit or 0), fp32 [T, 2].

    logits   [T, V_r]   columns from `start` on of the full logits; V_r may be 0
    labels   [T]        int64, of the whole vocabulary; labels outside of this part are ignored
    Raises ValueError for shapes or dtypes that do not fit.
    """
    _check(logits, labels)
    return launch.cross_entropy.logit_stats(_unit(logits), labels.contiguous(), start)


def gradient(
    logits: Tensor, labels: Tensor, start: int, lse: Tensor, scale: Tensor, *, inplace: bool = False
) -> Tensor:
    """(exp(logits - lse) - onehot) * scale, in fp32, rounded once; zero where scale is zero, whatever the logits are.

    logits, labels, start   as in `stats`
    lse, scale              fp32 [T], of the whole vocabulary
    inplace                 overwrite logits, whose rows must be contiguous, and return them
    return                  [T, V_r] in logits' dtype
    Raises ValueError for shapes, dtypes or (in place) strides that do not fit.
    """
    _check(logits, labels)
    for name, given in (("lse", lse), ("scale", scale)):
        if given.shape != labels.shape or given.dtype != torch.float32:
            raise ValueError(f"wanted {name} [{len(labels)}] in fp32, got {tuple(given.shape)} in {given.dtype}")
    if inplace and logits.stride(1) != 1 and logits.shape[1] > 1:
        raise ValueError(f"logits of strides {logits.stride()} cannot be overwritten: rows must be contiguous")
    source = _unit(logits)
    out = logits if inplace else torch.empty_like(logits, memory_format=torch.contiguous_format)
    launch.cross_entropy.logit_gradient(source, out, labels.contiguous(), start, lse.contiguous(), scale.contiguous())
    return out


def _check(logits: Tensor, labels: Tensor) -> None:
    if logits.dim() != 2 or labels.shape != logits.shape[:1] or labels.dtype != torch.int64:
        raise ValueError(
            f"got logits {tuple(logits.shape)} and labels {tuple(labels.shape)} {labels.dtype}, wanted logits [T, V] "
            "and int64 labels [T]"
        )
    if logits.dtype not in pointwise.DTYPES:
        raise ValueError(f"the kernels take logits in {', '.join(map(str, pointwise.DTYPES))}, not {logits.dtype}")


def _unit(logits: Tensor) -> Tensor:
    """logits with contiguous rows."""
    return logits if logits.stride(1) == 1 or logits.shape[1] <= 1 else logits.contiguous()
