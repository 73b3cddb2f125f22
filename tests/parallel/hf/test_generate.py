"""A split model generates the same tokens as one device, for every cache and decoding method, with ragged prompts."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fusedtp
from tests.harness import world
from tests.parallel.support import tp_mesh

from .families import model_of

CHOICES: dict[str, dict[str, Any]] = {
    "static cache": {"cache_implementation": "static"},
    "hybrid cache": {"cache_implementation": "hybrid"},
    "no cache": {"use_cache": False},
    "prompt in chunks": {"prefill_chunk_size": 4},
    "beams": {"num_beams": 3},
    "top k": {"do_sample": True, "top_k": 10, "temperature": 0.8},
    "top p": {"do_sample": True, "top_p": 0.7, "num_return_sequences": 2},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 5},
    "guidance": {"guidance_scale": 1.5},
}


def prompts(lengths: list[int]) -> dict[str, torch.Tensor]:
    """One prompt of each length, padded on the left."""
    longest = max(lengths)
    ids = torch.randint(3, 50, (len(lengths), longest), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for i, length in enumerate(lengths):
        mask[i, : longest - length] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


@torch.no_grad()
def generated(model: Any, lengths: list[int], choice: dict[str, Any]) -> torch.Tensor:
    torch.manual_seed(7)  # every rank samples the same tokens
    tokens: torch.Tensor = model.generate(**prompts(lengths), **{"do_sample": False, "max_new_tokens": 10, **choice})
    return tokens


def same_tokens(group: Any, name: str, changes: dict[str, Any], lengths: list[int], choices: dict[str, Any]) -> None:
    plain = model_of(name, **changes)
    parallel = fusedtp.parallelize(copy.deepcopy(plain), tp_mesh(group))
    for title, choice in choices.items():
        want, got = (generated(model, lengths, choice) for model in (plain, parallel))
        assert want.shape[1] > max(lengths) and torch.equal(got, want), title


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "deepseek_v3"])
def test_every_cache_and_choice(name: str):
    """gemma3's sliding windows hold four tokens, fewer than some prompts."""
    changes = {"sliding_window": 4} if name == "gemma3_text" else {}
    world(2, strangers=True).run(same_tokens, name, changes, [9, 3, 6], CHOICES, timeout=200)


@pytest.mark.slow
@settings(max_examples=8)
@given(
    name=st.sampled_from(["llama", "gemma3_text", "qwen3_moe"]),
    world_size=st.sampled_from([2, 4]),
    lengths=st.lists(st.integers(1, 11), min_size=1, max_size=5),
    cache=st.sampled_from(["dynamic", "static"]),
)
def test_ragged_prompts(name: str, world_size: int, lengths: list[int], cache: str):
    changes = {"sliding_window": 4} if name == "gemma3_text" else {}
    choices = {cache: {"cache_implementation": cache}}
    world(world_size, strangers=True).run(same_tokens, name, changes, lengths, choices, timeout=200)


def assisted(group: Any) -> None:
    """The prompt's own words or a small model propose tokens, and the split model checks several at once."""
    plain, small = model_of("llama"), model_of("llama", num_hidden_layers=1)
    parallel = fusedtp.parallelize(copy.deepcopy(plain), tp_mesh(group))
    for choice in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": small}):
        want, got = (generated(model, [8], choice) for model in (plain, parallel))
        assert torch.equal(got, want)


@pytest.mark.slow
def test_assisted_generation():
    world(2).run(assisted)
