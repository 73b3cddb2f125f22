"""A split vision-language model: image features replace some of the tokens."""

import copy
from typing import Any

import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import fusedtp
from tests.harness import world
from tests.parallel.support import tp_mesh

from .parity import LEAST, MARGIN, errors, perturbed, results

IMAGE = 49  # the token id that image features replace


def small_llava() -> LlavaForConditionalGeneration:
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
    )
    text = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE)
    return LlavaForConditionalGeneration(config).eval()


def with_images(group: Any) -> None:
    plain = small_llava()
    parallel = fusedtp.parallelize(copy.deepcopy(plain), tp_mesh(group))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 48, (2, 9), generator=generator)
    ids[:, 2:6] = IMAGE
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": ids.masked_fill(ids == IMAGE, -100),
        "pixel_values": torch.randn(2, 3, 16, 16, generator=generator),
    }
    want = results(plain, inputs)
    explained = errors(results(perturbed(plain), inputs), want)
    for name, error in errors(results(parallel, inputs), want).items():
        assert error <= max(LEAST, MARGIN * explained.get(name, 0.0)), f"{name} is off by {error:.1e}"
    assert any("vision" in name for name in want) and parallel._fusedtp.calls["fused"] > 0
    prompt = {name: inputs[name] for name in ("input_ids", "attention_mask", "pixel_values")}
    with torch.no_grad():
        got, alone = (m.generate(**prompt, max_new_tokens=4, do_sample=False) for m in (parallel, plain))
    assert torch.equal(got, alone)


def test_images():
    world(2).run(with_images)
