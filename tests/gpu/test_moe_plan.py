"""The plan of an exchange with compiled kernels: the laws of tests/ops/moe/plan_laws.py."""

from __future__ import annotations

import pytest
import torch

from tests.ops.moe.plan_laws import plan_law, stray_law

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("sizes", "here", "top_k"),
    [([1024] * 8, 32, 8), ([5, 0, 3], 2, 2), ([4096], 128, 4), ([333] * 4, 3, 5), ([0, 0], 1, 1)],
)
def test_kernels_make_the_plan_of_the_formula(dtype, sizes, here, top_k):
    for seed, (dropped, skewed, bound) in enumerate([(0.0, False, 1.0), (0.2, True, 0.3), (1.0, False, 0.0)]):
        plan_law(None, "cuda", dtype, sizes, here, top_k, dropped, skewed, bound, 2048, seed)


def test_an_id_of_no_expert_counts_as_a_dropped_choice():
    stray_law(None, "cuda")
