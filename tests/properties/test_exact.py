"""On integers small enough that no sum rounds, forward and every gradient equal the single-device formula bit for bit.

The laws cover any engine, world size, rows per rank (including none), widths, number of weights, dtype, bias and input
layout. The workspace is filled with NaN before each pass, and the requested engine must be the one that ran.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedtp.comm import VirtualWorld
from tests.engines import TRITON
from tests.harness import world
from tests.properties.cases import Case
from tests.properties.covering import COVERING, covered, on
from tests.properties.laws import compare, exact
from tests.properties.strategies import OPERATIONS, cases

NARROW = (torch.float32, torch.float16, torch.bfloat16)

TRITON_300 = pytest.param("triton", 300, marks=TRITON.marks)  # a partial over 256 KiB; for the others over 1 MiB


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["collective", "chunked", "auto"])
@covered(*COVERING)
@settings(max_examples=200)
@given(case=cases(engine="auto"))
def test_equals_the_formula(engine, case):
    world(case.world_size).run(exact, on(case, engine))


THREADED = ("collective", "chunked")


@pytest.mark.slow
@covered(*(on(case, engine) for engine in THREADED for case in COVERING))
@settings(max_examples=60)
@given(case=st.sampled_from(THREADED).flatmap(lambda engine: cases(engine=engine)))
def test_equals_the_formula_between_threads(case):
    VirtualWorld(case.world_size).run(lambda group: compare(case, group))


# The interpreter takes 1 to 2 ms per step of 64: small drawn cases, and few in which every loop runs repeatedly.
SMALL = {"rows": 5, "width": 10, "features": 30}


@pytest.mark.slow
@covered(*(on(case, "triton") for case in COVERING))
@settings(max_examples=40)
@given(case=cases(engine="triton", world_sizes=(2, 3, 4), **SMALL))
def test_fused_kernels_equal_the_formula(case):
    pytest.importorskip("triton")
    world(case.world_size).run(exact, case)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 2), (torch.bfloat16, 3), (torch.float16, 4)], ids=str)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_fused_kernels_of_several_tiles_and_steps_equal_the_formula(operation, dtype, size):
    """Tiles of 64: several tiles of rows and of columns, several steps of K, tails everywhere, a rank without rows."""
    pytest.importorskip("triton")
    gathers = operation.startswith("all_gather")
    sizes = (36, 36, 36, 33)[:size] if operation == "matmul_all_reduce" else (70, 0, 37, 41)[:size]
    local = ((67, 11) if gathers else (70,),) * size
    biased = (True, False)[: 1 + gathers]
    case = Case(operation, "triton", dtype, sizes, 135 if gathers else 77, local, biased=biased)
    world(size).run(exact, case, timeout=200)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "rows"), [("collective", 900), ("chunked", 900), TRITON_300])
def test_large_results_which_take_other_ways_equal_the_formula(engine, rows):
    """An all-reduce larger than its one-shot size, and sums of partials that are computed block by block."""
    sizes, features = (rows // 3,) * 3, 620
    for operation in ("matmul_all_reduce", "matmul_reduce_scatter"):
        case = Case(operation, engine, torch.float16, sizes, features, ((20,),) * 3, biased=(True,))
        world(3).run(exact, case, timeout=200)


@pytest.mark.slow
@given(st.data())
def test_cases_of_any_size_can_be_summed_exactly(data):
    """The cases in tests/gpu are larger than the ones here."""
    drawn = data.draw(cases(engine="triton", rows=300, width=200, features=400))
    assert drawn.most >= 1
