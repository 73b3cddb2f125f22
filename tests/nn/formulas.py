"""The modules' formulas in a second, slow version from the papers: token by token, head by head."""

import cmath
import math

import torch
from torch import Tensor


def seen(i: int, j: int, causal: bool, window: int | None, documents: Tensor | None) -> bool:
    """Whether the query at position i may attend to the key at position j of the same sequence."""
    if causal and j > i:
        return False
    if window is not None and abs(i - j) >= window:
        return False
    return documents is None or bool(documents[i] == documents[j])


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None = None, documents: Tensor | None = None
) -> Tensor:
    """q [B, S, heads, D], k and v [B, S, kv_heads, D] -> [B, S, heads, D]."""
    batch, length, heads, dim = q.shape
    group = heads // k.shape[2]
    rows = []
    for b in range(batch):
        for i in range(length):
            ids = None if documents is None else documents[b]
            keys = [j for j in range(length) if seen(i, j, causal, window, ids)]
            for h in range(heads):
                scores = torch.stack([(q[b, i, h] * k[b, j, h // group]).sum() for j in keys]) / math.sqrt(dim)
                weights = scores.exp() / scores.exp().sum()
                rows.append(sum(w * v[b, j, h // group] for w, j in zip(weights, keys, strict=True)))
    return torch.stack(rows).view(batch, length, heads, dim) if rows else q * 1.0


def rotation(x: Tensor, position: int, frequencies: list[float]) -> Tensor:
    """x [D]: features i and i + D/2 form a complex number, rotated by position * frequency."""
    half = len(frequencies)
    turned = torch.complex(x[:half], x[half:]) * torch.tensor(
        [cmath.exp(1j * position * f) for f in frequencies], dtype=torch.complex128
    )
    return torch.cat((turned.real, turned.imag))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H]."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
    """logits [T, V] -> mean over the labels that are not ignored, 0 if there are none."""
    losses = [
        -(row.exp()[label] / row.exp().sum()).log()
        for row, label in zip(logits, labels.tolist(), strict=True)
        if label != ignore_index
    ]
    return torch.stack(losses).mean() if losses else logits.sum() * 0.0
