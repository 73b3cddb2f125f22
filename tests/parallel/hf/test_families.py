"""Split transformers models compute what they compute on one device.

Covers every family with a tensor-parallel plan and a causal language model, and text towers without one. A plain run
tests a sample; FUSEDTP_ALL_MODELS=1 (`make test-models`) tests all of them.
"""

import copy
import inspect
import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import CONFIG_MAPPING

import fusedtp
from fusedtp import ExpertSplit
from fusedtp.parallel.plan import generic
from fusedtp.parallel.twin import twin_of
from tests.harness import world
from tests.parallel.support import tp_mesh

from . import parity
from .families import LARGE, UNPLANNED, class_of, families, model_of, towers

ALL = os.environ.get("FUSEDTP_ALL_MODELS") == "1"
# Families that differ in kind: scaled and tied embeddings, packed and gated attention, norms per head and over all
# heads, sinks, latent attention, mixtures of experts in each layout, state spaces, linear attention, wrong plans.
SAMPLE = (
    "afmoe apertus bamba cohere deepseek_v3 deepseek_v4 doge gemma gemma2 gemma3n_text gemma4_text gpt_neox gpt_oss "
    "granite_swa granitemoehybrid inkling_text llama longcat_flash mixtral olmo2 phi3 phi qwen2 qwen3 qwen3_moe "
    "qwen3_next starcoder2"
)


def chosen() -> list[str]:
    return [name for name in families() if name not in LARGE] if ALL else SAMPLE.split()


# Families whose transformers plan is wrong in part. The proof detects each one.
NOT_ALL_SPLIT = {
    *("doge", "gemma3n_text", "inkling2_text", "inkling_text"),
    *("esmc", "glm5_next_text", "neomme"),
    *("bamba", "diffllama"),  # transformers' plan has no layers, and inference finds a plan for only some of them
}
# The default configuration cannot build a model.
NO_DEFAULT = {
    *("cohere_compass_text", "dots1", "hunyuan_v1_moe", "lfm2_moe", "ministral", "nemotron", "qwen4_exp_text")
}
NO_LINEAR_SPLIT = {"nemotron_h"}  # its plan names only its embedding and its experts


def parity_of(name: str, world_size: int, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = world(world_size, strangers=True).run(parity.compare, name, options, timeout=300)[0]
    assert found["excess"] <= 1, f"{found['worst']} is off by {found['excess']:.1f} times what roundoff explains"
    assert found.get("generate", True), "other tokens"
    return found


def check(name: str, world_size: int, **options: Any) -> dict[str, Any]:
    found = parity_of(name, world_size, **options)
    assert name in NOT_ALL_SPLIT or not found["whole"], found["whole"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", chosen())
def test_with_sequence_parallelism(name: str):
    found = check(name, 2)
    assert (found["calls"].get("fused", 0) > 0) == (name not in NO_LINEAR_SPLIT)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*chosen(), "flint"} - NO_DEFAULT))
def test_all_code_of_the_full_size_is_in_the_small_copy(name: str):
    """The full-size model has the default configuration."""
    config = CONFIG_MAPPING[name]()
    text = config.get_text_config()
    with torch.device("meta"):
        model = class_of(name)._from_config(text if class_of(name).config_class is type(text) else config)
    twin_of(model, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    towers() if ALL else ["diffusion_gemma_text", "embedding_gemma2_text", "esmc", "qwen3_vl_moe_text"],
)
@pytest.mark.parametrize("world_size", [2, 4] if ALL else [2])
def test_towers_of_text(name: str, world_size: int):
    found = check(name, world_size)
    assert found["calls"].get("fused", 0) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", chosen() if ALL else ["llama", "gemma3_text", "qwen3_moe", "gpt_neox"])
def test_without_sequence_parallelism(name: str):
    found = check(name, 2, sequence_parallel=False)
    assert not found["gathered"] and "fused" not in found["calls"]


@pytest.mark.slow
@pytest.mark.parametrize("name", chosen() if ALL else ["llama", "qwen3_next", "deepseek_v3", "phi3"])
def test_on_four_ranks(name: str):
    check(name, 4)


REFUSED = {"big_bird", "bitnet", "falcon_mamba", "jetmoe", "mamba", "xlnet", "xmod"}  # docs/models.md says why


@pytest.mark.parametrize("name", sorted({*UNPLANNED} - REFUSED) if ALL else ["bloom"])
def test_families_without_a_plan(name: str):
    """A small copy of BLOOM is split whole: its attention gets ALiBi for all heads, in one dimension with samples."""
    found = parity_of(name, 4 if ALL else 2)
    assert not (found["whole"] and name in ("bloom", "cpmant", "gptj", "mpt"))


@pytest.mark.slow
@pytest.mark.parametrize("name", chosen() if ALL else ["llama", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_with_checkpointing(name: str, reentrant: bool):
    changes = dict.fromkeys(("attention_dropout", "residual_dropout"), 0.0) if name == "seed_oss" else {}
    check(name, 2, checkpointing={"use_reentrant": reentrant}, generate=False, changes=changes)


def split_parameters(group: Any, name: str) -> set[str]:
    model = fusedtp.parallelize(model_of(name), tp_mesh(group))
    shards = {each for each, p in model.named_parameters() if not any(at.is_replicate() for at in p.placements)}
    return {generic(each).removeprefix("model.layers.*.") for each in shards}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, whole",
    [
        ("gpt_oss", {"self_attn.o_proj.bias", "mlp.router.weight", "mlp.router.bias", "mlp.experts.down_proj_bias"}),
        ("bamba", {"mamba", "self_attn"}),
        ("diffllama", {"self_attn"}),
    ],
)
def test_a_plan_of_the_head_alone_is_completed(name: str, whole: set[str]):
    """The rest comes from this library's own plan or from inference; norms stay whole."""
    (split, *_) = world(2).run(split_parameters, name)
    every = {generic(each).removeprefix("model.layers.*.") for each, _ in model_of(name).named_parameters()}
    kept = {each for each in every - split if "norm" not in each}
    assert {each for each in kept if each not in whole and each.partition(".")[0] not in whole} == set()
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= split


def other_signatures(group: Any, name: str) -> list[str]:
    plain = model_of(name)
    split = fusedtp.parallelize(copy.deepcopy(plain), tp_mesh(group))
    own = {each: inspect.signature(module.forward) for each, module in plain.named_modules()}
    return [each for each, module in split.named_modules() if inspect.signature(module.forward) != own[each]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "roberta-prelayernorm"])
def test_forwards_keep_their_signatures(name: str):
    """transformers reads signatures: generate to pass position ids, Trainer to select data columns."""
    assert world(2).run(other_signatures, name)[0] == []


@pytest.mark.slow
def test_a_model_whose_head_reads_a_child_generates_the_same():
    """Its own forward is replaced, so generate must find the arguments of the class's forward."""
    found = world(2).run(parity.compare, "roberta-prelayernorm", {})[0]
    assert found["excess"] <= 1 and found["generate"]


def products_are_kept() -> tuple[Any, Any]:
    """Selective checkpointing: outputs of torch's own matmuls are kept, not recomputed."""
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default, torch.ops.aten.addmm.default])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_with_selective_checkpointing(name: str):
    options = {"use_reentrant": False, "context_fn": products_are_kept}
    check(name, 2, checkpointing=options, generate=False)


def mixtures() -> list[str]:
    """Skip DeepSeek-V4: its small copy routes by a table of zeros, to one expert twice, which the exchange refuses."""
    own = [name for name in families() if getattr(CONFIG_MAPPING[name], "base_model_ep_plan", None)]
    return [name for name in own if name not in {*LARGE, "deepseek_v4"}]


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("name", mixtures() if ALL else ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_experts_behind_the_exchange(name: str, sequence_parallel: bool):
    check(name, 2, experts=ExpertSplit(), sequence_parallel=sequence_parallel)


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "mixtral", "gpt_oss"])
def test_fewer_kv_heads_than_ranks(name: str, kv_heads: int):
    check(name, 4, changes={"num_key_value_heads": kv_heads})


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [(1, 1), (1, 2), (3, 1), (1, 7), (2, 3), (5, 4)])
def test_any_number_of_tokens(tokens: tuple[int, int]):
    check("qwen3", 4, tokens=tokens)


@pytest.mark.slow
@settings(max_examples=60 if ALL else 12)
@given(
    name=st.sampled_from(["llama", "gemma2", "qwen3_moe", "phi3", "gpt_neox", "deepseek_v3"]),
    world_size=st.sampled_from([1, 2, 4]),
    tokens=st.tuples(st.integers(1, 5), st.integers(1, 13)),
    padding=st.integers(0, 6),
    side=st.sampled_from(["left", "right"]),
    sequence_parallel=st.booleans(),
)
def test_any_batch(name: str, world_size: int, tokens: tuple[int, int], **options: Any):
    check(name, world_size, tokens=tokens, generate=False, **options)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_implementations(attention: str):
    check("llama", 2, attention=attention)


def forward_with_flex(group: Any) -> None:
    """Forward only: FlexAttention has no backward on a CPU."""
    plain = model_of("gemma3_text", attention="flex_attention")
    parallel: Any = fusedtp.parallelize(copy.deepcopy(plain), tp_mesh(group))
    assert not parallel._fusedtp.whole
    inputs = parity.batch()
    real = inputs["attention_mask"].bool()
    del inputs["labels"]
    with torch.no_grad():
        want, got = (model(**inputs).logits[real] for model in (plain, parallel))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not ALL, reason="FlexAttention compiles for longer than the rest of this file takes")
def test_flex_attention():
    world(2).run(forward_with_flex, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, fault",
    [
        ("inkling_text", "model.layers.*.mlp.experts"),
        ("doge", "model.layers.*.self_attn"),
        ("gemma3n_text", "mlp"),
    ],
)
def test_what_a_plan_breaks_stays_whole(name: str, fault: str):
    whole = check(name, 2)["whole"]
    assert any(fault in module for module in whole), whole
    assert all("small copy" in why for why in whole.values())
