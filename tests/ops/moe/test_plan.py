"""The kernels' plan equals torch's, bit for bit, for any routing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fusedtp.comm.launching import Launch as Planned
from fusedtp.ops.moe import plan as exchange
from fusedtp.ops.moe.plan import Exchange, places_of, plan_index, plan_sort, sort_choices
from fusedtp.sim import Launch, Run, Schedule, compare, run_schedule
from tests.harness import world
from tests.sampling import examples

from .plan_laws import check_index, drawn, plan_law, stray_law, unfilled_index


@st.composite
def exchanges(draw):
    """sizes, experts per rank, choices per token."""
    sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    here = draw(st.integers(1, 5))
    return sizes, here, draw(st.integers(1, min(4, here * len(sizes))))


@pytest.mark.slow
@settings(max_examples=examples(100, 30))
@given(
    exchanges(),
    st.sampled_from([torch.int32, torch.int64]),
    st.sampled_from([0.0, 0.2, 1.0]),
    st.booleans(),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from([16, 64]),
    st.integers(0, 99),
)
@example(([7, 0, 5], 3, 4), torch.int32, 0.2, True, 0.5, 16, 0)  # more than a block, no tokens, too little room
@example(([0], 1, 1), torch.int64, 0.0, False, 1.0, 16, 0)
def test_kernels_make_the_plan_of_the_formula(exchange, dtype, dropped, skewed, bound, block, seed):
    pytest.importorskip("triton")
    world(1).run(plan_law, "cpu", dtype, *exchange, dropped, skewed, bound, block, seed)


def test_an_id_of_no_expert_counts_as_a_dropped_choice():
    pytest.importorskip("triton")
    world(1).run(stray_law, "cpu")


def test_the_plan_on_a_gpu_takes_two_kernels_and_few_operations(monkeypatch):
    """Counted on the host: tensors without memory, and kernels that do not start."""
    started, at = [], Exchange("", 1, (8,) * 4, 8, 2, 64, "triton")
    monkeypatch.setattr(exchange, "runs_kernels", lambda device: True)
    monkeypatch.setattr(Planned, "start", lambda launch, device: started.append(launch.kernel.__name__))
    ids = torch.empty(8, 2, dtype=torch.int64, device="meta")
    gathered = torch.empty(4 * 24, dtype=torch.int32, device="meta")

    def planned() -> None:
        _, places = exchange.sorted_words(ids, 8)
        table, _, _ = exchange._plan_of(gathered, [24] * 4, at)
        exchange.packed_index(table, places, at)

    def in_torch() -> None:
        sort_choices(ids, 8)
        table, orders, _ = exchange._plan_of(gathered, [24] * 4, at)
        exchange.index_formula(table, places_of(orders[:16]), at)

    assert len(operations_of(planned)) <= 3 and started == ["moe_sort_kernel", "moe_index_kernel"]
    assert len(operations_of(in_torch)) >= 50


VIEWS = "view split split_with_sizes slice select t transpose permute unsqueeze reshape contiguous empty new_empty"
FREE = {f"aten::{name}" for name in VIEWS.split()}  # views, unless they copy


def operations_of(call) -> list[str]:
    """The torch operations of a call that would start a kernel."""
    with torch.profiler.profile() as profile:
        call()
    outer = [each for each in profile.events() if each.cpu_parent is None]
    copies = [any(child.name == "aten::clone" for child in each.cpu_children) for each in outer]
    return [each.name for each, copy in zip(outer, copies, strict=True) if copy or each.name not in FREE]


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_the_compiled_kernels_make_it_too(target):
    """Triton's compiled code, run thread by thread in several blocks: values, bounds, races."""
    pytest.importorskip("triton")
    sizes, here, top_k = [9, 4], 3, 3
    ids = drawn(sizes, here, top_k, 0.2, False, 3)
    sorted_ = [sort_choices(each, 2 * here) for each in ids]
    table = torch.stack([counts for counts, _ in sorted_])
    at = Exchange("", 1, tuple(sizes), 2 * here, top_k, 0, "triton")
    at = at._replace(bound=int(table[:, here:].sum()) - 2)  # too little room

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
