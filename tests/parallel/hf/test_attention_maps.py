"""With output_attentions, a split model returns the maps of all heads and their gradients, or says why it cannot."""

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import fusedtp
from tests.harness import world
from tests.parallel.support import tp_mesh

from .families import model_of
from .parity import batch, full


def bart() -> nn.Module:
    """The encoder and the decoder have different numbers of heads."""
    config = transformers.BartConfig(
        vocab_size=50, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=8, encoder_ffn_dim=48, decoder_ffn_dim=48, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.BartForConditionalGeneration(config).eval()


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    return get_peft_model(model_of("llama", attention="eager"), LoraConfig(r=2, target_modules=["q_proj"]))


def made(name: str) -> Any:
    if name in ("bart", "lora"):
        return bart() if name == "bart" else adapted()
    return model_of(name, attention="eager")


def maps_of(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    """Maps by name, after the backward of a loss that depends on them."""
    out = model(**inputs, use_cache=False, output_attentions=True)
    maps = {name: list(value) for name, value in out.items() if "attentions" in name}
    generator = torch.Generator().manual_seed(2)
    loss = torch.zeros(())
    for x in (x for each in maps.values() for x in each):
        loss = loss + (x * torch.randn(x.shape, generator=generator)).sum()
    loss.backward()
    return maps


def compared(group: Any, name: str) -> None:
    plain = made(name)
    parallel = fusedtp.parallelize(copy.deepcopy(plain), tp_mesh(group))
    inputs = batch()
    del inputs["labels"]
    if name == "bart":
        inputs["decoder_input_ids"] = inputs["input_ids"]
    want, got = (maps_of(model, inputs) for model in (plain, parallel))
    assert want.keys() == got.keys() and sum(map(len, want.values())) > 0
    for key in want:
        torch.testing.assert_close(got[key], want[key], rtol=1e-4, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}")
    assert parallel._fusedtp.gathered["attention maps"] > 0
    gradients = {key: p.grad for key, p in parallel.named_parameters()}
    largest = max(float(p.grad.abs().max()) for p in plain.parameters() if p.grad is not None)
    for (
        key,
        parameter,
    ) in plain.named_parameters():  # no maps depend on the last layer's values: None, or zeros
        want_grad, grad = (
            torch.zeros(parameter.shape) if each is None else full(each) for each in (parameter.grad, gradients[key])
        )
        torch.testing.assert_close(grad, want_grad, rtol=1e-3, atol=1e-4 * largest, msg=key)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world_size"), [("llama", 2), ("llama", 4), ("gpt2", 2), ("bart", 2), ("lora", 2)])
def test_maps_of_all_heads(name: str, world_size: int):
    world(world_size).run(compared, name, timeout=120)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (y.unflatten(-1, (4, 4)).transpose(1, 2) for y in (self.q(x), self.k(x)))
        return (q @ k.mT).softmax(-1)


class Layer(nn.Module):
    """Returns the maps of an attention that the plan leaves whole, next to an MLP that it splits."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.fc1, self.fc2 = Attention(), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.fc2(torch.relu(self.fc1(x))), self.attention(x)


def whole(group: Any) -> None:
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(2, 5, 16)
    _, want = layer(x)
    _, maps = fusedtp.parallelize(layer, tp_mesh(group), plan={"fc1": "colwise", "fc2": "rowwise"})(x)
    torch.testing.assert_close(maps, want)


def test_maps_of_an_attention_that_is_whole():
    world(2).run(whole)


def generated(group: Any) -> None:
    plain = made("llama")
    parallel = fusedtp.parallelize(copy.deepcopy(plain), tp_mesh(group))
    ids = batch()["input_ids"]
    want, got = (
        model.generate(ids, max_new_tokens=3, do_sample=False, return_dict_in_generate=True, output_attentions=True)
        for model in (plain, parallel)
    )
    torch.testing.assert_close(got.attentions, want.attentions, rtol=1e-4, atol=1e-5)


def test_generation_gives_maps_of_all_heads():
    world(2).run(generated, timeout=60)


def compiled(group: Any) -> None:
    model = model_of("llama", attention="eager", num_hidden_layers=1)
    parallel = fusedtp.parallelize(model, tp_mesh(group))
    parallel.compile(backend="aot_eager")
    with pytest.raises(ValueError, match="attentions: this rank's 2 of 4 heads"):
        parallel(batch()["input_ids"], output_attentions=True)
    torch._dynamo.reset()


@pytest.mark.slow
def test_compiled_code_is_refused():
    world(2).run(compiled, timeout=200)
