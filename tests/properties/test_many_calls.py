"""Consecutive calls of mixed operations, shapes, dtypes and engines on one workspace, ranks at their own pace."""

from importlib.util import find_spec

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.harness import world
from tests.properties.cases import Case
from tests.properties.covering import COVERING, on
from tests.properties.laws import mixed
from tests.properties.strategies import cases

ENGINES = ("collective", "chunked")  # the triton engine takes seconds per case here; it is among the drawn calls


def always(size: int) -> list[Case]:
    """Cases that every world of this size runs, in addition to the drawn ones."""
    return [on(case, engine) for engine in ENGINES for case in COVERING if case.world_size == size]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
@settings(max_examples=2, phases=[Phase.generate])  # the first example is the simplest; shrinking shows nothing more
@given(st.data())
def test_200_calls_with_ranks_delayed_at_random(size, data):
    engines = ["collective", *["chunked"] * 4, *["triton"] * (find_spec("triton") is not None)]
    small = {"rows": 6, "width": 12, "features": 40}
    one = st.sampled_from(engines).flatmap(lambda engine: cases(engine=engine, world_sizes=(size,), **small))
    drawn = data.draw(st.lists(one, min_size=12, max_size=20))
    world(size).run(mixed, always(size) + drawn, 200, 0.002, data.draw(st.integers(0, 999)), fresh=True, timeout=200)
