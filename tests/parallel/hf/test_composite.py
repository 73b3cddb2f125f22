"""Split models with images, sound or an encoder compute what they compute on one device.

A plain run tests a sample; FUSEDTP_ALL_MODELS=1 (`make test-models`) tests all of them.
"""

import copy
import os
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

import fusedtp
from fusedtp.parallel.twin import twin_of
from tests.harness import world
from tests.parallel.support import tp_mesh

from . import composite

ALL = os.environ.get("FUSEDTP_ALL_MODELS") == "1"
# Families that differ in kind: sound; images, in a model without a plan; encoder-decoders with our and their plan.
SAMPLE = ["qwen2_audio", "qwen3_vl", "t5", "t5gemma"]
# Some linear layers stay whole, for reasons that docs/models.md gives.
NOT_ALL_SPLIT = {
    *("cohere2_vision", "deepseek_vl", "florence2", "gemma3", "glm4v", "glm4v_moe", "idefics2", "idefics3", "kimi_k25"),
    *("led", "lfm2_vl", "mllama", "moonshine", "nllb-moe", "ovis2", "smolvlm", "speech_to_text"),
    *("switch_transformers"),
}


def check(name: str, world_size: int) -> dict[str, Any]:
    found = world(world_size, strangers=True).run(composite.compare, name, {}, timeout=300)[0]
    assert found["excess"] <= 1, f"{found['worst']} is off by {found['excess']:.1f} times what roundoff explains"
    assert found["generate"], "other tokens"
    assert found["calls"]["fused"] > 0
    assert name in NOT_ALL_SPLIT or not found["whole"], found["whole"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", composite.CASES if ALL else SAMPLE)
def test_images_sound_and_encoders(name: str):
    found = check(name, 2)
    towers = {"model.vision_tower", "model.vision_model", "model.visual", "model.audio_tower", "vision_model"}
    assert towers.isdisjoint(found["unsplit"])


@pytest.mark.skipif(not ALL, reason="two ranks show the same")
@pytest.mark.parametrize("name", composite.CASES)
def test_on_four_ranks(name: str):
    check(name, 4)


def features_alone(group: Any) -> None:
    plain: Any = composite.model_of("llava_next")
    split = fusedtp.parallelize(copy.deepcopy(plain), tp_mesh(group))
    given = {
        name: x for name, x in composite.inputs_of("llava_next").items() if name in ("pixel_values", "image_sizes")
    }
    want, got = (model.get_image_features(**given).pooler_output for model in (plain, split))
    assert all(type(x) is torch.Tensor for x in got)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_features_of_images_without_a_forward():
    world(2).run(features_alone)


@pytest.mark.slow
@pytest.mark.parametrize("name", composite.CASES if ALL else ["mllama", "qwen2_audio"])
def test_the_full_size_has_a_small_copy(name: str):
    """The full-size model has the default configuration. Otherwise its plan would not be proved."""
    with torch.device("meta"):
        model: Any = composite.class_of(name)._from_config(CONFIG_MAPPING[name]())
    twin_of(model, getattr(model.config, "num_attention_heads", 2))
