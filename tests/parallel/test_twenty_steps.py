"""The law, over a training run: twenty fp32 AdamW steps of a parallel model are those of the same class in one process.

Note [What twenty steps of rounding may cause]
Both runs do the same fp32 sums in another order. In one step a value passes through n = OPERATIONS operations, whose
sums have up to k terms and are shared by W ranks: k + W + 2 roundings of at most u = 2^-24 each, which are independent
and so add as a random walk does, to a relative error of sqrt(n (k + W + 2)) u in one step's loss and gradient norm.
This does not say how AdamW carries a difference on: where a gradient is nearly zero, its sign decides on a whole
step. So that is measured: a third run in one process, whose parameters move by a unit in the last place (2 u) before
every step, drifts from the first by s(t). The parallel run may differ by

    sqrt(n (k + W + 2)) u + 4 max(s(0), ..., s(t))

of the loss and the gradient's norm in step t, and a parameter at the end by as much of its own norm. The factor 4 pays
for s being a single draw. The cap makes sure that the bound stays a sharp one.
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
TERMS = TOKENS  # the longest sums: over tokens, in weight gradients


def shake_(model: nn.Module, generator: torch.Generator) -> None:
    """Move every number by about a unit in its last place, up or down."""
    with torch.no_grad():
        for parameter in model.parameters():
            signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
            parameter.mul_(1 + 2 * UNIT * signs)


def trained(model: nn.Module, shaken: bool = False) -> Tensor:
    """fp64 [STEPS, 2]: loss and gradient norm of every step."""
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
    """Of every parameter of the plain model: the norm of the difference, relative to its own."""
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


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("world_size", [2, 4])
def test_twenty_steps_are_those_of_one_process(world_size: int, tied: bool):
    world(world_size).run(compare, tied, timeout=120)
