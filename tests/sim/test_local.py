"""The library's kernels of one rank, as compiled, equal their formulas; `fusedtp check NAME` runs more schedules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedtp.checks.dense import GPU, gpu
from fusedtp.checks.lint import OWN, SIGNALS
from fusedtp.checks.local import (
    KERNELS,
    MAKES_FP8,
    PRODUCTS,
    Variant,
    local_case,
    local_cases,
    mismatches,
    variants,
)
from fusedtp.checks.workers import names_of
from fusedtp.sim import explore
from fusedtp.sim.explore import schedules
from tests.sampling import examples
from tests.seeded.trials import FUSED

TARGETS = ("sm_80", "sm_90")


@pytest.mark.slow
def test_every_kernel_of_the_library_has_a_case():
    assert {f"{name}_kernel" for name in KERNELS} | {*FUSED, *SIGNALS} == {*OWN}
    assert {case.name for case in local_cases("sm_80")} == {*KERNELS} - {*MAKES_FP8}
    for name in KERNELS:
        assert names_of(name, target="sm_90") == [name]


@pytest.mark.slow
@pytest.mark.parametrize("name, target", [(c.name, target) for target in TARGETS for c in local_cases(target)])
def test_a_kernel_of_one_rank_equals_its_formula(name: str, target: str) -> None:
    """In every variant, in lockstep and with late copies, and a warp at a time."""
    (case,) = [case for case in local_cases(target) if case.name == name]
    count = examples(6, 2)
    outcome = explore(case, schedules(count, target=target))
    assert outcome.fault is None, outcome.fault
    assert outcome.schedules == count


@settings(max_examples=examples(20, 3))
@given(
    name=st.sampled_from(PRODUCTS),
    target=st.sampled_from(TARGETS),
    k=st.integers(1, 130),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_products_of_any_depth_equal_their_formula(name: str, target: str, k: int, dtype: torch.dtype) -> None:
    case = local_case(name, Variant(gpu(target), k, dtype))
    outcome = explore(case, schedules(2, target=target))
    assert outcome.fault is None, outcome.fault


@pytest.mark.parametrize("name", KERNELS)
def test_one_wrong_element_of_any_output_is_seen(name: str) -> None:
    """An integer off by one, fp32 off by five ulps, 16 bits by two; and an element that may not be written."""
    for variant in variants(name, GPU):
        made = KERNELS[name](variant)
        for out, want in zip(made.outs, made.wanted, strict=True):
            out.copy_(want)
        assert mismatches(made) == []
        for out in made.outs:
            largest = torch.unravel_index(out.nan_to_num().abs().argmax(), out.shape)
            step: Any = 1
            if out.is_floating_point():
                step = (5 if out.dtype == torch.float32 else 2) * torch.finfo(out.dtype).eps * out[largest].abs()
            wrong = [(largest, out[largest] + step)]
            if out.isnan().any():
                wrong.append((torch.unravel_index(out.isnan().to(torch.int8).argmax(), out.shape), torch.tensor(0)))
            for at, value in wrong:
                kept = out[at].clone()
                out[at] = value
                assert len(mismatches(made)) == 1, (variant, at)
                out[at] = kept
