"""The same modules on a GPU: kernels and branches that a CPU never takes."""

import copy

import pytest
import torch

from fusedtp.nn import CausalLM, ModelConfig, TokenLayout, init_
from fusedtp.nn.attention import attend
from fusedtp.nn.dropout import dropout_mask, dropout_state
from fusedtp.nn.mask import attention_mask
from tests.nn import formulas
from tests.nn.support import assert_close, randn

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
    assert_close("y", got.cpu(), want, roundings=4 if dtype == torch.bfloat16 else 1 << 14)


def test_model() -> None:
    """Loss and gradients, in fp64: the same formulas in other kernels."""
    config = ModelConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_key_value_heads=2, qk_norm=True,
        residual_dropout=0.2, dtype="float64", param_dtype="float64",
    )  # fmt: skip
    model = init_(CausalLM(config), 0, std=0.2)
    twin = copy.deepcopy(model).cuda()
    ids, labels = torch.randint(0, 256, (2, 2, 33))
    losses = []
    for each, device in ((model, "cpu"), (twin, "cuda")):
        each.set_dropout(1, 2)
        losses.append(each(ids.to(device), labels.to(device)).loss)
        losses[-1].backward()
    assert_close("loss", losses[1].cpu(), losses[0])
    for (name, want), got in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert_close(name, got.grad.cpu(), want.grad, roundings=1 << 12)


def test_dropout_mask_is_that_of_the_cpu() -> None:
    state = dropout_state(1, 2, 3)
    got = dropout_mask(state.cuda(), 0.3, 4, 5, 100, 70)
    assert torch.equal(got.cpu(), dropout_mask(state, 0.3, 4, 5, 100, 70))
