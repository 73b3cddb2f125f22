"""The same modules on a GPU: kernels and branches that never run on a CPU."""

import copy
import math

import pytest
import torch

from fusedtp.nn import CausalLM, ModelConfig, TokenLayout, init_
from fusedtp.nn.attention import attend
from fusedtp.nn.dropout import dropout_mask, dropout_state
from fusedtp.nn.mask import attention_mask
from fusedtp.parallel import clip_grad_norm_
from tests.nn import formulas
from tests.nn.support import assert_close, randn, roundings_of
from tests.nn.test_linear import several_law

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("use_flex", [False, True])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("documents", [False, True])
def test_attention(dtype: torch.dtype, use_flex: bool, window: int | None, documents: bool) -> None:
    q, k, v = randn(2, 20, 4, 16, seed=1), randn(2, 20, 2, 16, seed=2), randn(2, 20, 2, 16, seed=3)
    ids = torch.arange(40).view(2, 20) // 7 if documents else None
    layout, device = TokenLayout(2, 20, document_ids=ids), torch.device("cuda")
    want = formulas.attention(q, k, v, True, window, ids)
    mask = attention_mask(layout, True, window, device, use_flex=use_flex)
    got = attend(q.to(device, dtype), k.to(device, dtype), v.to(device, dtype), mask)
    assert_close("y", got.cpu(), want, attention_roundings(q, k, dtype))


def attention_roundings(q: torch.Tensor, k: torch.Tensor, dtype: torch.dtype) -> float:
    """The error bound for attention, as a multiple of the dtype's eps and relative to the largest value.

    q, k, v and the probabilities are rounded to the dtype, all else is fp32 (tf32 is off by default). An error of d in
    all scores turns a probability p into p exp(2 d) at most.
    """
    unit = torch.finfo(dtype).eps / 2
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", q.abs(), k.abs()).max().item() / math.sqrt(q.shape[3])
    wide = roundings_of(4, q.shape[1]) * torch.finfo(torch.float32).eps * (1 + scores)
    lost = math.expm1(2 * (2 * unit + unit**2) * scores) + 2 * unit + wide
    return lost / torch.finfo(dtype).eps + 0.5


def test_model() -> None:
    """Loss and gradients in fp64: the same formulas in other kernels.

    A sum of L terms errs as if its weights were off by (L + 2) / 2 eps; the effect of one eps on a gradient is
    measured.
    """
    config = ModelConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_key_value_heads=2, qk_norm=True,
        residual_dropout=0.2, dtype="float64", param_dtype="float64",
    )  # fmt: skip
    model = init_(CausalLM(config), 0, std=0.2)
    ids, labels = torch.randint(0, 256, (2, 2, 33), generator=torch.Generator().manual_seed(4))

    def gradients(model: CausalLM, device: str) -> dict[str, torch.Tensor]:
        model.set_dropout(1, 2)
        loss = model(ids.to(device), labels.to(device)).loss
        loss.backward()
        return {"loss": loss.detach().cpu()} | {n: p.grad.cpu() for n, p in model.named_parameters()}

    want, got = gradients(copy.deepcopy(model), "cpu"), gradients(copy.deepcopy(model).cuda(), "cuda")
    one_eps = dict.fromkeys(want, 0.0)
    for seed in range(4):
        shaken, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in shaken.parameters():
                signs = torch.randint(0, 2, p.shape, generator=generator) * 2 - 1
                p.mul_(1 + signs.to(p.dtype) * torch.finfo(p.dtype).eps)
        for name, value in gradients(shaken, "cpu").items():
            one_eps[name] = max(one_eps[name], (value - want[name]).abs().max().item())
    for name in want:
        error = (got[name] - want[name]).abs().max().item()
        bound = roundings_of(1, 96) * one_eps[name]
        assert error <= bound, f"{name}: off by {error:.3e}, allowed {bound:.3e}"


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seen", [[True, True, True], [False, True, False]])
def test_several_linear_layers_on_one_input(kept: torch.dtype, seen: list[bool]) -> None:
    several_law("cuda", [64, 33, 8], torch.bfloat16, kept, seen)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_clipping(norm_type: float) -> None:
    """Norms of many gradients take few kernels and equal those of the CPU, up to the order of a sum."""
    shapes = [
        ((70, 33), torch.float32),
        ((5,), torch.bfloat16),
        ((0, 4), torch.float32),
        ((9, 9), torch.float32),
    ]
    here = [torch.nn.Parameter(torch.empty(shape, dtype=dtype)) for shape, dtype in shapes]
    for i, p in enumerate(here):
        p.grad = randn(*p.shape, seed=i).to(p.dtype)
    there = [torch.nn.Parameter(torch.empty_like(p, device="cuda")) for p in here]
    for p, q in zip(here, there, strict=True):
        assert p.grad is not None
        q.grad = p.grad.cuda()
    # A largest magnitude is exact; a sum in another order differs like a random walk of its roundings.
    count = sum(p.numel() for p in here)
    off = 0.0 if norm_type == math.inf else math.sqrt(count) * torch.finfo(torch.float32).eps
    want, got = clip_grad_norm_(here, 1.0, norm_type), clip_grad_norm_(there, 1.0, norm_type)
    assert got.is_cuda and math.isclose(got.item(), want.item(), rel_tol=off)
    for p, q in zip(here, there, strict=True):
        assert q.grad is not None
        rounded = 2 * torch.finfo(p.dtype).eps  # the scale and its product
        torch.testing.assert_close(q.grad.cpu(), p.grad, rtol=rounded + off, atol=0.0)


def test_dropout_mask_is_that_of_the_cpu() -> None:
    state = dropout_state(1, 2, 3)
    got = dropout_mask(state.cuda(), 0.3, 4, 5, 100, 70)
    assert torch.equal(got.cpu(), dropout_mask(state, 0.3, 4, 5, 100, 70))
