"""The plan by kernels is the plan by torch: bit for bit, whatever is chosen."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fusedtp.ops.moe.plan import Exchange, places_of, plan_index, plan_sort, sort_choices
from fusedtp.sim import Launch, Run, Schedule, compare, run_schedule
from tests.harness import world

from .plan_laws import check_index, drawn, plan_law, unfilled_index


@st.composite
def exchanges(draw):
    """sizes, experts on a rank, choices of a token."""
    sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    here = draw(st.integers(1, 5))
    return sizes, here, draw(st.integers(1, min(4, here * len(sizes))))


@given(
    exchanges(),
    st.sampled_from([torch.int32, torch.int64]),
    st.sampled_from([0.0, 0.2, 1.0]),
    st.booleans(),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from([16, 64]),
    st.integers(0, 99),
)
@example(
    ([7, 0, 5], 3, 4), torch.int32, 0.2, True, 0.5, 16, 0
)  # more than a block, no tokens, too little room
@example(([0], 1, 1), torch.int64, 0.0, False, 1.0, 16, 0)
def test_kernels_make_the_plan_of_the_formula(exchange, dtype, dropped, skewed, bound, block, seed):
    pytest.importorskip("triton")
    world(1).run(plan_law, "cpu", dtype, *exchange, dropped, skewed, bound, block, seed)


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_the_compiled_kernels_make_it_too(target):
    """What Triton compiled, run thread by thread, in several blocks: values, bounds, races."""
    pytest.importorskip("triton")
    sizes, here, top_k = [9, 4], 3, 3
    ids = drawn(sizes, here, top_k, 0.2, False, 3)
    sorted_ = [sort_choices(each, 2 * here) for each in ids]
    table = torch.stack([counts for counts, _ in sorted_])
    at = Exchange("", 1, tuple(sizes), 2 * here, top_k, 0, "triton")
    at = at._replace(max_rows=int(table[:, here:].sum()) - 2)  # too little room

    def sorting() -> Run:
        launch, words, places = plan_sort(ids[0], 2 * here, 16)
        wanted = [torch.cat(sorted_[0]), places_of(sorted_[0][1]).int()]
        return Run([[as_case(launch)]], check=lambda: compare("words", [words, places], wanted))

    def indexing() -> Run:
        index = unfilled_index(table, at)
        launch, _ = plan_index(table, index, at, 16)
        return Run([[as_case(launch)]], check=lambda: check_index(index, table, at) or [])

    for make in (sorting, indexing):
        for seed in range(3):
            schedule = Schedule("random", seed, weak=True, fine=seed > 0, target=target)
            run_schedule(make(), schedule)


def as_case(launch):
    return Launch(launch.kernel, launch.programs, launch.args, options=launch.options)
