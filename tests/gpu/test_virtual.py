"""The laws of tests/properties with compiled kernels: the ranks of a virtual world run side by side on one GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fusedtp
from fusedtp import VirtualWorld
from tests.properties.cases import Case
from tests.properties.laws import compare, errors, mixed, repeated, with_nan_and_inf
from tests.properties.strategies import OPERATIONS, cases
from tests.properties.test_numerics import a_case, together

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DEVICE = "cuda"


def _world(world_size: int, law, *arguments) -> list:
    """Run law(group, *arguments) on every rank, on the GPU."""

    def body(group: object):
        fusedtp.set_timeout(group, 60.0)
        return law(group, *arguments, device=DEVICE)

    return VirtualWorld(world_size, device=DEVICE).run(body)


def _compare(group: object, case: Case, device: str) -> None:
    compare(case, group, device)


def _run(case: Case) -> None:
    _world(case.world_size, _compare, case)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_kernels_equal_the_formula(data):
    _run(data.draw(cases(engine="triton", dtypes=KERNEL_DTYPES, rows=300, width=200, features=400)))


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_the_kernel_of_the_switch_equals_the_formula_where_there_is_none(data):
    how = dict(engine="multimem", operation="matmul_all_reduce", dtypes=KERNEL_DTYPES)
    _run(data.draw(cases(**how, rows=300, width=200, features=400)))


@pytest.mark.parametrize("engine", ["collective", "chunked"])
@settings(max_examples=20, deadline=None)
@given(st.data())
def test_the_other_engines_equal_the_formula(engine, data):
    _run(data.draw(cases(engine=engine)))


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_random_inputs_have_errors_within_their_bounds(operation, dtype):
    case = a_case(operation, "triton", dtype, 3)
    for name, (ratio, worst) in together(_world(3, errors, case)).items():
        assert worst <= 1 and (dtype == torch.float32 or ratio <= 2), f"{name}: {worst}, {ratio}"


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_repeated_run_gives_the_same_bits(operation):
    _world(4, repeated, a_case(operation, "triton", torch.bfloat16, 4), 20, 0.002)


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_nan_and_inf_come_out_as_plain_torch_gives_them(data):
    case = data.draw(cases(engine="triton", dtypes=KERNEL_DTYPES, rows=300, width=200, features=400))
    _world(case.world_size, with_nan_and_inf, replace(case, unused=()), 0.01)


@settings(max_examples=1, deadline=None)
@given(st.data())
def test_200_mixed_calls_on_one_workspace(data):
    small = {"world_sizes": (4,), "rows": 40, "width": 60, "features": 100}
    one = st.sampled_from(["triton", "triton", "chunked"]).flatmap(lambda engine: cases(engine=engine, **small))
    drawn = data.draw(st.lists(one, min_size=12, max_size=20))
    _world(4, mixed, drawn, 200, 0.001, data.draw(st.integers(0, 999)))


def test_a_rank_that_does_not_come_is_reported_and_the_workspace_is_not_used_again():
    def body(group: object) -> str:
        fusedtp.set_timeout(group, 2.0)
        x = torch.ones(32, 32, device="cuda")

        def call() -> None:
            fusedtp.all_gather_matmul(x, [x], group, engine="triton")
            torch.cuda.synchronize()

        call()
        if group.rank() == 1:
            return "away"
        with pytest.raises(fusedtp.SignalTimeout, match="rank 1"):
            call()
        with pytest.raises(fusedtp.SignalTimeout):
            fusedtp.check(group)
        return "told"

    assert VirtualWorld(2, device="cuda").run(body) == ["told", "away"]
