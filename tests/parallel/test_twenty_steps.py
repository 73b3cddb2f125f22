"""Twenty fp32 AdamW steps of a parallel model match those of the same class in one process.

Note [What twenty steps of rounding may cause]
Both runs compute the same fp32 sums in another order. In one step a value passes through n = OPERATIONS operations.
Their sums have up to k terms and are shared by W ranks. That is k + W + 2 roundings of at most u = 2^-24 each. They are
independent, so they add up like a random walk: the relative error in one step's loss and gradient norm is
sqrt(n (k + W + 2)) u. This does not cover how AdamW carries a difference on: where a gradient is nearly zero, its sign
decides the direction of a whole step. That part is measured. A third run in one process moves its parameters by one
unit in the last place (2 u) before every step; it drifts from the first run by s(t). The parallel run may differ by

    sqrt(n (k + W + 2)) u + 4 max(s(0), ..., s(t))

in the loss and the gradient's norm in step t. A parameter at the end may differ by as much of its own norm. The factor
4 is there because s is a single draw. CAP makes the test fail if the bound itself grows too large.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusedtp.parallel import clip_grad_norm_
from tests.harness import world
from tests.parallel.support import OPERATIONS, batch, full, make, make_pair

STEPS, UNIT, CAP = 20, 2.0**-24, 1e-4
SIZES: dict[str, Any] = {
    "dtype": "float32",
    "param_dtype": "float32",
    "num_key_value_heads": 4,
    "qk_norm": True,
}
TOKENS = 4 * 16
TERMS = TOKENS  # the longest sums: over tokens, for weight gradients


def shake_(model: nn.Module, generator: torch.Generator) -> None:
    """Move every number by about one unit in its last place, up or down."""
    with torch.no_grad():
        for parameter in model.parameters():
            signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
            parameter.mul_(1 + 2 * UNIT * signs)


def trained(model: nn.Module, shaken: bool = False) -> Tensor:
    """fp64 [STEPS, 2]: each step's loss and gradient norm."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, fused=True)
    generator, rows = torch.Generator().manual_seed(0), []
    for step in range(STEPS):
        if shaken:
            shake_(model, generator)
        loss = model(*batch(4, 16, seed=step)).loss
        loss.backward()
        norm = clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rows.append([loss.item(), norm.item()])
    return torch.tensor(rows, dtype=torch.float64)


def distances(model: nn.Module, plain: nn.Module) -> Tensor:
    """For each parameter of the plain model: the norm of the difference, relative to the parameter's norm."""
    mine = [full(parameter).detach().double() for parameter in model.parameters()]
    theirs = [parameter.detach().double() for parameter in plain.parameters()]
    return torch.stack([(a - b).norm() / b.norm() for a, b in zip(mine, theirs, strict=True)])


def compare(group: Any, tied: bool) -> None:
    changes = {**SIZES, "tie_word_embeddings": tied}
    plain, parallel = make_pair(group, **changes)
    other = make(**changes)
    want, shaken, got = trained(plain), trained(other, shaken=True), trained(parallel)
    assert want[-1, 0] < want[0, 0] - 0.2, "it does not learn, so nothing is shown"
    one_step = (OPERATIONS * (TERMS + group.size() + 2)) ** 0.5 * UNIT
    bound = one_step + 4 * (shaken / want - 1).abs().cummax(0).values
    assert bound.max() < CAP, f"the bound of {bound.max():.1e} proves little"
    share = ((got / want - 1).abs() / bound).max(1).values
    assert (share <= 1).all(), f"step {int((share > 1).nonzero()[0])} is off by {share.max():.2f} of its bound"
    share = distances(parallel, plain) / (one_step + 4 * distances(other, plain).max())
    names = [name for name, _ in plain.named_parameters()]
    assert (share <= 1).all(), f"{names[int(share.argmax())]} ends {share.max():.2f} of its bound away"


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("world_size", [2, 4])
def test_twenty_steps_are_those_of_one_process(world_size: int, tied: bool):
    world(world_size).run(compare, tied, timeout=120)
