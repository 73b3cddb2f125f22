"""Experts behind an exchange equal a dense loop over experts and tokens; a plan may be changed in place."""

import pytest
import torch

from tests.harness import world
from tests.ops.moe.layer_laws import SMALL, Layer, Planned, experts_law

SIZES = [(6, 0, 5), (4,), (3, 9)]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("engine", ["chunked", "collective"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_equal_the_dense_formula(sizes, engine, dtype):
    world(len(sizes)).run(experts_law, Layer(sizes, **SMALL, dtype=dtype, engine=engine), range(4))


def by_a_plan(group, layer: Layer) -> None:
    planned = Planned(group, layer, 0)
    planned.check(planned.both(), "first plan")
    for number, skew in enumerate((1.0, 0.0, 0.5), 1):
        planned.refresh(number, skew)
        planned.check(planned.both(), f"plan {number}")


@pytest.mark.parametrize("engine", ["chunked", "collective"])
def test_a_plan_may_be_changed_in_place(engine):
    world(3).run(by_a_plan, Layer((6, 0, 5), **SMALL, engine=engine))


@pytest.mark.slow
def test_a_plan_may_be_changed_in_place_for_kernels():
    pytest.importorskip("triton")
    world(2).run(by_a_plan, Layer((2, 3), 4, 2, 4, 3, engine="triton"))
