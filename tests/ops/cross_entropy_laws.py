"""Laws of the cross-entropy kernels on any device: they equal the fp64 values within fp32's rounding error.

pointwise_laws.py bounds the error of a sum and of an exponential. Each term of the sum is an exponential of the logit's
distance to the largest logit, taken in steps: from one maximum to the next larger one. The steps add up to that
distance.
"""

from __future__ import annotations

from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedtp.nn import linear_cross_entropy, vocab_parallel_cross_entropy
from fusedtp.ops import cross_entropy
from tests.nn.support import assert_within
from tests.ops.pointwise_laws import Draw, E, exact

FEWEST = 16  # columns per step
TINY = torch.finfo(torch.float32).tiny  # below this an exponential may flush to 0


def labels_of(draw: Draw, start: int) -> Tensor:
    """Some labels are columns of this rank, some belong to other ranks, some are ignored."""
    generator = torch.Generator().manual_seed(draw.seed + 1)
    labels = torch.randint(start - 2, start + draw.width + 2, (draw.rows,), generator=generator)
    labels[torch.rand(draw.rows, generator=generator) < 0.2] = -100
    return labels.to(draw.device)


def onehot(labels: Tensor, start: int, width: int) -> Tensor:
    return (labels.cpu()[:, None] - start == torch.arange(width)).double()


def stats_law(draw: Draw, start: int) -> None:
    (logits,), labels = draw.tensors((draw.rows, draw.width)), labels_of(draw, start)
    stats, x = cross_entropy.stats(logits, labels, start), exact(logits)
    assert stats.shape == (draw.rows, 2) and stats.dtype == torch.float32
    at_label = torch.where(onehot(labels, start, draw.width) == 1, x, torch.zeros(()).double()).sum(1)
    assert torch.equal(stats[:, 1].cpu().double(), at_label), "the label's logit is a copy"
    if draw.width == 0:
        assert (stats[:, 0] == -torch.inf).all()
        return
    lse, largest = x.logsumexp(1), x.amax(1, keepdim=True)
    distance = ((largest - x) * (x - lse[:, None]).exp()).sum(1)  # softmax-weighted distance to the largest logit
    steps = draw.width / FEWEST + 3
    relative = (draw.width + 2) / 2 + 3 * steps + 2 * distance  # error of the sum, in eps
    lost = (relative + 2 + 2 * (lse - largest[:, 0]).abs() + lse.abs()) * E
    assert_within("lse", stats[:, 0], lse, lost)


def gradient_law(draw: Draw, start: int, inplace: bool) -> None:
    (logits,), labels = draw.tensors((draw.rows, draw.width)), labels_of(draw, start)
    x, hot = exact(logits), onehot(labels, start, draw.width)
    generator = torch.Generator().manual_seed(draw.seed + 2)
    lse = x.logsumexp(1).clamp(min=-1e30).float() + torch.rand(draw.rows, generator=generator)
    scale = torch.randn(draw.rows, generator=generator).masked_fill(labels.cpu() == -100, 0.0)
    parent = logits._base
    given = (labels, start, lse.to(draw.device), scale.to(draw.device))
    got = cross_entropy.gradient(logits, *given, inplace=inplace)
    assert got.dtype == draw.dtype and (got is logits) == inplace
    if not inplace:
        assert torch.equal(exact(logits), x), "the logits survive"
    if draw.layout == "sliced" and parent is not None:
        assert parent[:, draw.width :].isnan().all(), "what lies between rows is left alone"
    away, factor = (x - lse.double()[:, None]), scale.double()[:, None]
    p = away.exp()
    lost = ((3 + 2 * away.abs()) * p + (p - hot).abs()) * E * factor.abs() + TINY * (1 + factor.abs())
    assert_within("gradient", got, (p - hot) * factor, lost)


def exact_law(draw: Draw, start: int) -> None:
    """All logits are one number or -inf: the exponentials are 1 or 0, and only the logarithm rounds."""
    generator = torch.Generator().manual_seed(draw.seed)
    level = torch.randint(-8, 9, (draw.rows, 1), generator=generator).double()
    present = torch.rand(draw.rows, draw.width, generator=generator) < 0.5
    logits = draw.laid_out(torch.where(present, level, -torch.inf))
    labels, scale = labels_of(draw, start), torch.randint(-9, 10, (draw.rows,), generator=generator).float()
    stats = cross_entropy.stats(logits, labels, start).cpu()
    count = present.sum(1).double()
    for rows in (count == 0, count == 1):
        assert torch.equal(stats[rows, 0].double(), (count.log() + level[:, 0])[rows])
    assert_within("lse", stats[count > 0, 0], (count.log() + level[:, 0])[count > 0], torch.tensor(24 * E))
    given = (labels, start, level[:, 0].float().to(draw.device), scale.to(draw.device))
    want = (present.double() - onehot(labels, start, draw.width)) * scale[:, None].double()
    assert torch.equal(exact(cross_entropy.gradient(logits, *given)), want)


def odd_law(draw: Draw, share: float) -> None:
    """Infinite and NaN logits give what torch gives; where the scale is zero, so is the gradient."""
    (logits,), labels = draw.tensors((draw.rows, draw.width)), labels_of(draw, 0)
    generator = torch.Generator().manual_seed(draw.seed + 3)
    for odd in (torch.inf, -torch.inf, torch.nan):
        where = torch.rand(draw.rows, 1, generator=generator) < 0.4
        where = where & (torch.rand(draw.rows, draw.width, generator=generator) < share)
        logits.masked_fill_(where.to(draw.device), odd)
    want = exact(logits).logsumexp(1)
    lse = cross_entropy.stats(logits, labels, 0)[:, 0]
    torch.testing.assert_close(exact(lse), want, rtol=0, atol=1e-4, equal_nan=True)  # finite logits: see stats_law
    scale = (labels != -100).float()
    got = exact(cross_entropy.gradient(logits, labels, 0, lse, scale))
    x, total = exact(logits), exact(lse)[:, None]
    formula = ((x - total).exp() - onehot(labels, 0, draw.width)) * exact(scale)[:, None]
    formula[exact(scale) == 0] = 0.0
    assert torch.equal(got.isnan(), formula.isnan()), "nan in other places than wanted"
    assert torch.equal(got[exact(scale) == 0], formula[exact(scale) == 0])


def loss_law(draw: Draw, piece_rows: int) -> None:
    """The losses of fusedtp.nn equal torch's where these kernels run, and the caller's logits are not overwritten."""
    x, w = (t.requires_grad_() for t in draw.tensors((draw.rows, 8), (draw.width, 8)))
    labels = labels_of(draw, 0)
    labels = labels.where((labels >= 0) & (labels < draw.width), -100)
    theirs = [t.detach().cpu().double().requires_grad_() for t in (x, w)]
    logits = (x @ w.t()).detach()
    before = logits.clone().requires_grad_()
    count = max(1, int((labels != -100).sum()))
    with patch.object(cross_entropy, "serves", lambda logits: True):
        limit = piece_rows * draw.width * x.element_size()
        loss = linear_cross_entropy(x, w, labels, max_logits_bytes=limit)
        loss.backward()
        apart = vocab_parallel_cross_entropy(before, labels)
        apart.backward()
    assert torch.equal(before.detach(), logits), "the logits survive"
    want = F.cross_entropy(theirs[0] @ theirs[1].t(), labels.cpu(), reduction="sum") / count
    want.backward()
    # logits, gradient and dx are rounded to the dtype, each in proportion to its size below
    eps = torch.finfo(draw.dtype).eps
    size = float(theirs[0].detach().abs().max() * theirs[1].detach().abs().max()) * 8 if draw.rows else 0.0
    for name, got in (("pieces", loss), ("whole", apart)):
        assert_within(name, got, want.detach(), torch.tensor(4 * eps * (1 + size)))
    largest = [float(t.detach().abs().max()) if t.numel() else 0.0 for t in theirs]
    terms = (draw.width, draw.rows)
    for name, got, other, length, wide in zip(("dx", "dw"), (x, w), theirs, terms, largest[::-1], strict=True):
        lost = eps * (2 + size) * (length + 2) * wide / count
        assert_within(name, got.grad, other.grad, torch.full_like(other, lost))
