"""Random inputs: errors within their bounds, reproducible bits, NaN and inf, and results that do not depend on W."""

from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedtp.ops.rows import split
from tests.engines import ENGINES
from tests.harness import world
from tests.properties.cases import Case
from tests.properties.covering import COVERING, covered, on
from tests.properties.laws import Error, errors, repeated, with_nan_and_inf
from tests.properties.strategies import OPERATIONS, cases


def a_case(operation: str, engine: str, dtype: torch.dtype, size: int, **changes) -> Case:
    """Ragged rows, two weights if the operation takes several, a few thousand entries per result."""
    gathers = operation.startswith("all_gather")
    sizes = split(40, size) if operation == "matmul_all_reduce" else (23, 0, 9, 8)[:size]
    local = ((36, 20) if gathers else (45,),) * size
    biased = (True, False) if gathers else (True,)
    return Case(operation, engine, dtype, sizes, 72, local, biased=biased, random=True, **changes)


def together(outcomes: list[dict[str, Error]]) -> dict[str, tuple[float, float, float]]:
    """Combine all ranks: name -> (rms error over plain torch's, worst multiple of the bound)."""
    squares, plain, worst = defaultdict(float), defaultdict(float), defaultdict(float)
    for outcome in outcomes:
        for name, error in outcome.items():
            squares[name] += error.squares
            plain[name] += error.plain_squares
            worst[name] = max(worst[name], error.worst)
    return {name: ((squares[name] / plain[name]) ** 0.5, worst[name]) for name in squares}


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_fp32_errors_are_within_the_bound_of_the_sums(operation, engine, size):
    case = a_case(operation, engine, torch.float32, size)
    for name, (_, worst) in together(world(size).run(errors, case)).items():
        assert worst <= 1, f"{name}: {worst:.2f} times the bound"


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_16_bit_errors_are_at_most_twice_those_of_plain_torch(operation, engine, dtype, size):
    case = a_case(operation, engine, dtype, size)
    for name, (ratio, worst) in together(world(size).run(errors, case)).items():
        assert ratio <= 2, f"{name}: rms error {ratio:.2f} times that of plain torch"
        assert worst <= 1, f"{name}: {worst:.2f} times the bound of W + 1 roundings"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_repeated_run_gives_the_same_bits_whoever_comes_first(operation, engine, dtype):
    world(3).run(repeated, a_case(operation, engine, dtype, 3), 3, 0.01)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@covered(*COVERING, share=0.03)
@settings(max_examples=30)
@given(
    case=cases(engine="auto", world_sizes=(2, 3), rows=8, width=12, features=20),
    share=st.sampled_from([0.003, 0.03]),
)
def test_nan_and_inf_come_out_as_plain_torch_gives_them(engine, case, share):
    case = replace(on(case, engine), unused=())  # plain torch makes no 0 * NaN for an unused output
    world(case.world_size).run(with_nan_and_inf, case, share)
