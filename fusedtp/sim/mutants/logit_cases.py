"""The kernels of cross-entropy as trial_cases.elementwise wants them: a launch, its outputs, what they must be."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedtp.ops.launch import Launch, cross_entropy
from fusedtp.ops.launch.config import HOST

START = 3


def logit_case(
    kernel: str, logits: Tensor, scale: Tensor
) -> tuple[Launch, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """logits [T, V] with T > V, scale [T]. A label lies in every column, some in none."""
    rows, width = logits.shape
    labels, lse = torch.arange(rows), logits.logsumexp(1)
    here = (labels >= START) & (labels < START + width)
    column = (labels - START).where(here, 0)
    if kernel == "logit_stats_kernel":
        launch, stats = cross_entropy.plan_logit_stats(logits, labels, START, HOST)
        target = logits.gather(1, column[:, None])[:, 0].where(here, 0.0)
        return launch, (stats,), (torch.stack((lse, target), 1),)
    gradient = torch.empty_like(logits)
    launch = cross_entropy.plan_logit_gradient(logits, gradient, labels, START, lse, scale, HOST)
    onehot = F.one_hot(column, width) * here[:, None]
    return launch, (gradient,), (((logits - lse[:, None]).exp() - onehot) * scale[:, None],)
