"""Shared by the router's tests: strategies for its arguments, and routers with given weights."""

from itertools import pairwise
from random import Random

import torch
from hypothesis import strategies as st
from torch import Tensor

from fusedtp.nn import Router

LOSSES = {"balance_loss": 0.5, "sequence_loss": 0.25, "z_loss": 0.125}


@st.composite
def options(draw) -> dict:
    """Arguments of a Router, except its losses. They derive from one seed, so they vary independently of each other."""
    random = Random(draw(st.integers(0, 1 << 30)))
    groups, each = random.randint(1, 4), random.randint(1, 4)
    top_groups = random.randint(1, groups)
    after = random.random() < 0.3
    return {
        "num_experts": groups * each,
        "top_k": random.randint(1, top_groups * each),
        "score": random.choice(["softmax", "sigmoid"]),
        "score_after_topk": after,
        "normalize": random.random() < 0.5,
        "scale": random.choice([1.0, 2.5]),
        "num_groups": groups,
        "top_groups": top_groups,
        "group_score": random.choice(["top2", "max"]),
        "bias": random.random() < 0.7 and not after,
    }


@st.composite
def splits(draw) -> tuple[int, int, tuple[int, ...]]:
    """Batch, length, and the rows of every rank; some ranks may have none."""
    random = Random(draw(st.integers(0, 1 << 30)))
    batch, length = random.choice([0, 1, 2, 2, 3]), random.randint(0 if random.random() < 0.2 else 1, 5)
    cuts = sorted(random.randint(0, batch * length) for _ in range(random.randint(0, 3)))
    return batch, length, tuple(b - a for a, b in pairwise([0, *cuts, batch * length]))


def router_of(weight: Tensor, values: Tensor | None = None, **spec) -> Router:
    """A router with this weight, and these values as its bias."""
    router = Router(weight.shape[1], dtype=weight.dtype, **spec)
    with torch.no_grad():
        router.weight.copy_(weight)
        if values is not None:
            router.bias.copy_(values)
    return router


def routed(logits: Tensor, values: Tensor | None = None, **spec):
    """Route with an identity weight, so that x are exactly the logits."""
    return router_of(torch.eye(logits.shape[1], dtype=logits.dtype), values, **spec)(logits)
