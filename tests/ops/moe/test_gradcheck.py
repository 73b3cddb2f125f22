"""fp64 gradcheck of the exchange, of experts behind it, and of a whole layer: on one process, and on all ranks at once.

As in tests/properties/test_gradcheck.py, every rank passes the same full tensors and all perturb the same element.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.func import functional_call

import fusedtp
from fusedtp.nn import MoE, TokenLayout
from fusedtp.nn.layout import Collected
from fusedtp.ops.moe import combine
from tests.harness import world
from tests.parallel.support import tp_mesh
from tests.properties.test_gradcheck import _Enter as Enter
from tests.properties.test_gradcheck import _inputs as inputs
from tests.properties.test_gradcheck import _Leave as Leave

# Four experts. Expert 2 has no row, 1 and 3 lose some: tokens with all, one, and none of their choices.
IDS = torch.tensor([[0, 1], [3, -1], [-1, -1], [1, 0], [-1, 3]])
SIZES = [(5,), (2, 3), (5, 0)]
WIDTH = 2


def mine(sizes: tuple[int, ...], rank: int) -> slice:
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def check_dispatch(group, sizes: tuple[int, ...], engine: str) -> None:
    """The dispatch alone, without its combine."""
    here = mine(sizes, group.rank())

    def everything(x: Tensor) -> Tensor:
        rows, offsets, _handle = fusedtp.moe_dispatch(
            Enter.apply(x, group)[here],
            IDS[here],
            torch.ones(IDS[here].shape),
            4,
            group,
            sizes=sizes,
            engine=engine,
        )
        return Leave.apply(rows[: int(offsets[-1])], group)

    assert gradcheck(everything, inputs((5, WIDTH)))


def check_combine(group, sizes: tuple[int, ...], engine: str) -> None:
    """The combine alone, with arbitrary rows."""
    here = mine(sizes, group.rank())
    counts = [2, 2, 0, 2]  # rows per expert
    rows_here = torch.tensor(counts).split(4 // group.size())[group.rank()].sum()
    begin = sum(counts[: group.rank() * 4 // group.size()])

    def everything(y: Tensor, weights: Tensor) -> Tensor:
        y, weights = Enter.apply(y, group)[begin : begin + rows_here], Enter.apply(weights, group)[here]
        x = torch.ones(len(IDS[here]), 1, dtype=torch.float64)
        _rows, _offsets, handle = fusedtp.moe_dispatch(x, IDS[here], weights, 4, group, sizes=sizes, engine=engine)
        return Leave.apply(fusedtp.moe_combine(y, handle), group)

    assert gradcheck(everything, inputs((6, 3), (5, 2)))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["chunked", "collective"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("check", [check_dispatch, check_combine])
def test_gradients_of_the_exchange(check, sizes, engine):
    world(len(sizes)).run(check, sizes, engine)


# -- a whole layer -----------------------------------------------------------------------------------------------------

TOKENS = [[2.0, 1.0], [1.5, -0.5], [2.5, 0.5], [1.0, 1.5], [3.0, -1.0]]


def layer(capacity: float | None, drop: str) -> MoE:
    """No token chooses expert 2, so a capacity of 0.8, two tokens an expert, drops at least four of the ten choices."""
    options = dict(normalize=True, scale=1.5, balance_loss=0.7, z_loss=0.3, sequence_loss=0.2, shared=2)
    moe = MoE(WIDTH, 2, 4, 2, capacity=capacity, drop=drop, dtype=torch.float64, **options)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        moe.router.weight[2] = torch.tensor([-9.0, 0.0])
    return moe


def part_of(full: Tensor, parameter: Tensor, group) -> Tensor:
    """This rank's shard of a parameter; the layer itself sums the gradients of replicated ones."""
    (placement,) = parameter.placements
    if placement.is_replicate():
        return full.view_as(full)
    return Enter.apply(full, group).chunk(group.size(), placement.dim)[group.rank()]


def whole_layer(group, sizes: tuple[int, ...], capacity: float | None, drop: str) -> list[int]:
    """y and the sum of the router's losses as one function of x and every parameter; the dropped choices by expert."""
    plain, rank, dropped = layer(capacity, drop), group.rank(), [0] * 4
    full = [parameter.detach().clone().requires_grad_() for parameter in plain.parameters()]
    parallel = fusedtp.parallelize(plain, tp_mesh(group))
    held = dict(parallel.named_parameters())

    def everything(x: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        layout = TokenLayout(1, len(TOKENS), sizes, rank, routings=Collected())
        own = {name: part_of(t, p, group) for (name, p), t in zip(held.items(), given, strict=True)}
        y = functional_call(parallel, own, (Enter.apply(x, group)[mine(sizes, rank)], layout))
        (routing,) = layout.routings.found
        if routing.dropped is not None:
            dropped[:] = routing.dropped.tolist()
        return Leave.apply(y, group), torch.stack([*routing.losses.values()]).sum()

    assert gradcheck(everything, (torch.tensor(TOKENS, dtype=torch.float64, requires_grad=True), *full))
    return dropped


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes, capacity, drop",
    [((5,), None, "position"), ((2, 3), 0.8, "position"), ((5, 0), 0.8, "probability")],
    ids=str,
)
def test_gradients_of_a_whole_layer(sizes, capacity, drop):
    dropped = world(len(sizes)).run(whole_layer, sizes, capacity, drop)
    total = torch.tensor(dropped).sum(0)
    assert total[2] == 0 and (int(total.sum()) >= 4 if capacity else not total.any())


def test_no_token_of_the_layer_is_near_a_tie():
    """Otherwise a step of gradcheck, 1e-6, could reroute it."""
    moe, x = layer(None, "position"), torch.tensor(TOKENS, dtype=torch.float64)
    logits = (x @ moe.router.weight.T).sort(1).values
    assert logits.diff(dim=1).min() > 1e-2
    weights = moe.router(x, TokenLayout(1, len(TOKENS))).weights.flatten().sort().values
    assert weights.diff().min() > 1e-4


def of_one_choice_alone(group) -> None:
    """A broken dispatch: its backward takes the first choice's gradient in place of every choice's."""

    def first_alone(parts, places, weights):
        first = places[:, :1].expand_as(places).contiguous()
        return weighted_sum(parts, places if weights is not None else first, weights)

    weighted_sum = combine.weighted_sum
    with patch.object(combine, "weighted_sum", first_alone):
        check_dispatch(group, (2, 3), "chunked")


def test_a_gradient_that_loses_a_choice_is_seen():
    for outcome in world(2).outcomes(of_one_choice_alone):
        assert outcome.is_a("GradcheckError"), outcome
