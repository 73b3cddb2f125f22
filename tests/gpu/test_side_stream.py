"""A shared expert on its own stream: the layer's output and gradients are those of a single stream."""

import pytest
import torch

from fusedtp.nn import MoE, init_
from fusedtp.nn.side_stream import run_on_side_stream


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_with_a_shared_expert_is_the_sum_of_its_parts(dtype: torch.dtype):
    """The reference runs the parts in order on one stream: same kernels, same operands, so the same bits."""
    moe = init_(MoE(64, 96, 8, 2, shared=128, normalize=True), 0, std=0.2).to("cuda", dtype)
    x = torch.randn(257, 64, generator=torch.Generator().manual_seed(0)).to("cuda", dtype).requires_grad_()
    results = []
    for together in (True, False, True):
        moe.zero_grad()
        x.grad = None
        if together:
            y = moe(x)
        else:
            routing = moe.router(x)
            y = moe.experts(x, routing.expert_ids, routing.weights) + moe.shared(x)
        y.backward(torch.ones_like(y))
        shared = [p.grad.clone() for p in moe.shared.parameters()]
        results.append([y.detach(), *shared])
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            assert torch.equal(got, want)


def test_the_second_part_runs_on_a_stream_of_its_own():
    here, seen = torch.cuda.current_stream(), []

    def where(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.cuda.current_stream())
        return x

    x = torch.ones(3, device="cuda")
    assert torch.equal(run_on_side_stream(where, where, x), x + x)
    assert seen[0] == here and seen[1] != here
