"""Dispatch, then combine: no row or gradient is lost or duplicated, for any world, routing and engine."""

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fusedtp
from fusedtp.comm import VirtualWorld
from tests.harness import world
from tests.ops.moe.laws import SKEWS, Case, conserves_rows


@st.composite
def cases(draw: st.DrawFn, engines: tuple[str, ...] = ("chunked", "collective", "auto")) -> Case:
    size = draw(st.integers(1, 4))
    experts = size * draw(st.integers(1, 64 // size))
    a_count = st.one_of(st.just(0), st.integers(0, 3), st.integers(0, 20))
    return Case(
        engine=draw(st.sampled_from(engines)),
        sizes=tuple(draw(a_count) for _ in range(size)),
        num_experts=experts,
        top_k=draw(st.integers(1, min(8, experts))),
        width=draw(st.one_of(st.integers(0, 3), st.integers(1, 7))),
        dtype=draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])),
        skew=draw(st.sampled_from(SKEWS)),
        dropped=draw(st.sampled_from([0.0, 0.0, 0.3, 1.0])),
        seed=draw(st.integers(0, 2**32)),
        room=draw(st.sampled_from([None, None, 0, 3])),
    )


# Cases that are rarely drawn: tokens with several features on several ranks, ragged, with an empty rank, dropped
# choices or spare room, in each dtype.
SHAPES = (
    ((5, 2, 7), 6, 3, 0.3, None),
    ((4, 0, 6), 6, 2, 0.0, 3),
    ((3, 3), 4, 2, 0.3, 0),
    ((6, 1, 0, 4), 8, 3, 0.0, None),
)
FULL = [
    Case("", sizes, experts, k, 5, dtype, SKEWS[i % 3], dropped, seed=i, room=room)
    for i, (dtype, (sizes, experts, k, dropped, room)) in enumerate(
        zip((torch.float32, torch.bfloat16, torch.float16, torch.float64), SHAPES, strict=True)
    )
]


def also_full(*engines: str):
    """Decorate a law of one case: also run the cases in FULL with each engine; "triton" has no fp64."""

    def decorate(law):
        for engine in engines:
            for case in FULL:
                if (engine, case.dtype) != ("triton", torch.float64):
                    law = example(replace(case, engine=engine))(law)
        return law

    return decorate


@pytest.mark.slow
@also_full("chunked", "collective", "auto")
@settings(max_examples=150)
@given(cases())
def test_rows_are_conserved(case):
    world(len(case.sizes)).run(conserves_rows, case)


@settings(max_examples=15)
@given(cases(engines=("chunked",)), st.sampled_from([2500, 9000, 30000]))
def test_wide_rows_are_conserved(case, width):
    """A core's cache holds only a few of these rows, so they are copied and summed in several stretches."""
    world(len(case.sizes)).run(conserves_rows, replace(case, width=width))


@pytest.mark.slow
@also_full("chunked", "collective")
@settings(max_examples=50)
@given(cases())
def test_rows_are_conserved_between_threads(case):
    VirtualWorld(len(case.sizes)).run(lambda group: conserves_rows(group, case))


@pytest.mark.slow
@also_full("triton")
@settings(max_examples=15)
@given(cases(engines=("triton",)).filter(lambda case: case.dtype != torch.float64))
def test_rows_are_conserved_by_kernels(case):
    pytest.importorskip("triton")
    world(len(case.sizes)).run(conserves_rows, case)


@pytest.mark.parametrize("max_rows", [1, 2, 10])
def test_rounds_never_look_at_the_weight_of_a_dropped_choice(max_rows):
    ids = torch.tensor([[0, -1], [-1, 1], [0, 1], [-1, -1]])
    weights = torch.full(ids.shape, 0.5).masked_fill(ids < 0, torch.nan)
    y, _room = fusedtp.moe_rounds(torch.ones(4, 3), ids, weights, 2, None, lambda rows, _: rows, max_rows=max_rows)
    assert y[:, 0].tolist() == [0.5, 0.5, 1.0, 0.0]
