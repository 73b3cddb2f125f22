"""Small whole models with images, sound or an encoder, and a batch for each.

A case is a family, what differs from the shrunken default configuration, and the inputs besides token ids. In each of
two rows, some tokens stand for features of an image or a sound; the first row is padded. Families without such tokens
read all features by cross-attention.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedModel

from fusedtp.parallel.twin import small_config

from .families import random_model
from .parity import batch, compared

IMAGE, VIDEO, SOUND, BEGIN, END = range(49, 44, -1)  # ids of special tokens, the last ones of the vocabulary
PLAIN = 40  # other token ids are below
MAPPINGS = (
    transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING,
    transformers.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)
Inputs = dict[str, Tensor]


class Case(NamedTuple):
    """changes: of the shrunken configuration, nested as it is; inputs: makes the batch."""

    changes: dict[str, Any]
    inputs: Callable[[], Inputs]


# --- inputs ---------------------------------------------------------------------------------------------------------


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def rows(*counts: int, token: int = IMAGE, length: int = 0) -> Inputs:
    """Two rows of ids, with counts[i] feature tokens in row i between a begin and an end token."""
    length = length or max(counts) + 8
    made = batch((len(counts), length))
    ids = made["input_ids"] % PLAIN
    for row, count in zip(ids, counts, strict=True):
        row[3 : 5 + count] = torch.tensor([BEGIN, *[token] * count, END])
    ids[ids < 3] = 3
    made["input_ids"] = ids.masked_fill(made["attention_mask"] == 0, 0)
    made["labels"] = ids.masked_fill((made["attention_mask"] == 0) | (ids >= END), -100)
    kinds = {IMAGE: 1, VIDEO: 2, SOUND: 3}
    made["mm_token_type_ids"] = made["token_type_ids"] = (ids == token).long() * kinds[token]
    return made


def images(tokens: int, *shape: int) -> Callable[[], Inputs]:
    """One image [3, H, W] a row, of this many tokens."""
    return lambda: {**rows(tokens, tokens), "pixel_values": normal(2, *(shape or (3, 16, 16)))}


def sized_images(tokens: int, *shape: int, size: tuple[int, int] = (16, 16)) -> Callable[[], Inputs]:
    return lambda: {**images(tokens, *shape)(), "image_sizes": torch.tensor([size, size])}


def patches(*shape: int) -> Callable[[], Inputs]:
    """Images of 4 x 4 and of 2 x 4 patches of this shape; four patches give a token."""
    grids = torch.tensor([[1, 4, 4], [1, 2, 4]])
    return lambda: {**rows(4, 2), "pixel_values": normal(24, *shape), "image_grid_thw": grids}


def sound(tokens: int, bins: int, frames: int, **more: Tensor) -> Callable[[], Inputs]:
    """A sound [bins, frames] a row, of this many tokens."""
    return lambda: {**rows(tokens, tokens, token=SOUND), "input_features": normal(2, bins, frames), **more}


def placed_images() -> Inputs:
    """Images of 4 x 4 patches, with the position of each patch."""
    at = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), -1).reshape(1, 16, 2)
    return {**images(4, 16, 48)(), "image_position_ids": at.repeat(2, 1, 1)}


def shaped_images() -> Inputs:
    """Images of 4 x 4 and of 2 x 4 patches, padded to 16."""
    shapes = torch.tensor([[4, 4], [2, 4]])
    made = {"spatial_shapes": shapes, "pixel_attention_mask": (torch.arange(16) < shapes.prod(1)[:, None]).long()}
    return {**rows(4, 2), "pixel_values": normal(2, 16, 48), **made}


def tiled_images() -> Inputs:
    """Two tiles a row, which tokens read by cross-attention."""
    made = rows(1, 1)
    return {
        **made,
        "pixel_values": normal(2, 1, 2, 3, 16, 16),
        "aspect_ratio_ids": torch.tensor([[2], [1]]),
        "aspect_ratio_mask": torch.tensor([[[1, 1]], [[1, 0]]]),
        "cross_attention_mask": torch.ones(*made["input_ids"].shape, 1, 2).long(),
    }


def read_images(tokens: int) -> Callable[[], Inputs]:
    """Images in front of what an encoder reads."""
    return lambda: {**images(tokens)(), "labels": translation()["labels"]}


def translation() -> Inputs:
    """Sources of 7 tokens, the first one padded on the right, and targets of 5 tokens, one padded."""
    made = batch((2, 7), side="right")
    made["labels"] = batch((2, 5), side="right")["labels"]
    return made


def transcript(*shape: int, name: str = "input_features") -> Callable[[], Inputs]:
    return lambda: {name: normal(2, *shape), "labels": batch((2, 5), side="right")["labels"]}


# --- configurations -------------------------------------------------------------------------------------------------

VIT: dict[str, Any] = {"image_size": 16, "patch_size": 8}
FINE_VIT: dict[str, Any] = {"image_size": 16, "patch_size": 4}
GRID_VIT: dict[str, Any] = {
    "depth": 2, "num_heads": 4, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32, "image_size": 16,
    "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 16,
}  # fmt: skip
WIDE_VIT = {**GRID_VIT, "out_hidden_size": 64}
WIDTH = 3 * 2 * 4 * 4  # of a flattened patch: channels, frames, height, width
STAGES: dict[str, Any] = {  # a tower of two stages
    "depths": [1, 1], "patch_size": [3, 3], "patch_stride": [4, 2], "patch_padding": [1, 1],
    "patch_prenorm": [False, True], "embed_dim": [16, 32], "num_heads": [2, 4], "num_groups": [2, 4],
    "window_size": 4, "drop_path_rate": 0.0, "projection_dim": 32,
}  # fmt: skip
RESAMPLER = {
    "hidden_size": 64, "resampler_n_latents": 3, "resampler_depth": 1, "resampler_n_heads": 4, "resampler_head_dim": 8,
    "num_key_value_heads": 2,
}  # fmt: skip
TILES = {"attention_heads": 4, "num_global_layers": 1, "max_num_tiles": 2, "vision_output_dim": 64}
PIXEL_SHUFFLE = {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
PINPOINTS = {"image_grid_pinpoints": [[16, 32], [32, 16]]}
MEL: dict[str, Any] = {"num_mel_bins": 8, "max_source_positions": 8}
SPEECH = {**MEL, "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48}
BOTH = {
    "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_layers": 2,
    "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "decoder_start_token_id": 2, "forced_eos_token_id": None,
    "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
}  # fmt: skip
T5: dict[str, Any] = {
    "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip


def rotary(*sections: int, **more: Any) -> dict[str, Any]:
    own = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections), **more}
    return {"text_config": {"rope_parameters": own}}


def small(name: str, **changes: Any) -> dict[str, Any]:
    """A part that the default configuration leaves out."""
    return {**small_config(CONFIG_MAPPING[name](), 4).to_dict(), **changes}


def vision(own: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"vision_config": own, **more}


CASES: dict[str, Case] = {
    # images
    "aya_vision": Case(vision(FINE_VIT), images(4)),
    "cohere2_vision": Case(vision(FINE_VIT, alignment_intermediate_size=48), images(4)),
    "deepseek_vl": Case(vision(VIT), images(4)),
    "florence2": Case(vision(STAGES, text_config=BOTH), read_images(5)),
    "gemma3": Case(vision(VIT, mm_tokens_per_image=4), images(4)),
    "gemma4": Case(
        vision(small("gemma4_vision", patch_size=4, pooling_kernel_size=2, position_embedding_size=8)), placed_images
    ),
    "glm4v": Case(vision(GRID_VIT, **rotary(2, 1, 1)), patches(WIDTH)),
    "glm4v_moe": Case(vision(WIDE_VIT, **rotary(1, 1, 0, partial_rotary_factor=0.5)), patches(WIDTH)),
    "idefics2": Case(vision(FINE_VIT, perceiver_config=RESAMPLER), images(3, 1, 3, 16, 16)),
    "idefics3": Case(vision(FINE_VIT), images(4, 1, 3, 16, 16)),
    "internvl": Case(vision({"image_size": [16, 16], "patch_size": [4, 4]}), images(4)),
    "kimi_k25": Case(
        vision({"patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4}, projection_hidden_size=32), patches(3, 4, 4)
    ),
    "lfm2_vl": Case(vision({"patch_size": 4, "num_patches": 16}, projector_hidden_size=32), shaped_images),
    "lighton_ocr": Case(vision({**FINE_VIT, "head_dim": 8}), sized_images(4)),
    "llama4": Case(vision({**FINE_VIT, **PIXEL_SHUFFLE, "intermediate_size": 128}), images(4)),
    "llava": Case(vision(VIT), images(4)),
    "llava_next": Case(vision(VIT, **PINPOINTS), sized_images(14, 3, 3, 16, 16, size=(16, 32))),
    "llava_onevision": Case(vision(VIT, **PINPOINTS), sized_images(14, 3, 3, 16, 16, size=(16, 32))),
    "mistral3": Case(vision({**FINE_VIT, "head_dim": 8}), sized_images(4)),
    "mllama": Case(
        vision(
            {**FINE_VIT, **TILES, "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]]},
            text_config={"vocab_size": IMAGE},
        ),
        tiled_images,
    ),
    "ovis2": Case(
        vision(
            {**FINE_VIT, "vocab_size": 16, "hidden_stride": 2},
            vocab_size=50, hidden_size=32, visual_indicator_token_ids=[41, 42, 43, 44, 45],
        ),
        images(4),
    ),
    "paligemma": Case(vision(VIT, projection_dim=32, hidden_size=32), images(4)),
    "qwen2_vl": Case(vision({**GRID_VIT, "embed_dim": 32, "hidden_size": 64}, **rotary(2, 1, 1)), patches(WIDTH)),
    "qwen2_5_vl": Case(
        vision({**WIDE_VIT, "window_size": 16, "fullatt_block_indexes": [1]}, **rotary(2, 1, 1)), patches(WIDTH)
    ),
    "qwen3_5": Case(vision(WIDE_VIT), patches(WIDTH)),
    "qwen3_5_moe": Case(vision(GRID_VIT), patches(WIDTH)),
    "qwen3_vl": Case(vision({**GRID_VIT, "deepstack_visual_indexes": [0]}), patches(WIDTH)),
    "qwen3_vl_moe": Case(vision({**GRID_VIT, "deepstack_visual_indexes": [0]}), patches(WIDTH)),
    "smolvlm": Case(vision(FINE_VIT), images(4, 1, 3, 16, 16)),
    "vipllava": Case(vision(VIT, vision_feature_layer=[-1, -2]), images(4)),
    # sound
    "moonshine": Case(
        {
            **dict.fromkeys(("encoder_num_hidden_layers", "decoder_num_hidden_layers"), 2),
            **dict.fromkeys(("encoder_num_attention_heads", "decoder_num_attention_heads"), 4),
            **dict.fromkeys(("encoder_num_key_value_heads", "decoder_num_key_value_heads"), 4),
        },
        transcript(2000, name="input_values"),
    ),
    "qwen2_audio": Case(
        {"audio_config": SPEECH}, sound(4, 8, 16, feature_attention_mask=torch.ones(2, 16, dtype=torch.long))
    ),
    "speech_to_text": Case(
        {**BOTH, "input_feat_per_channel": 8, "conv_channels": 16, "max_source_positions": 16}, transcript(16, 8)
    ),
    "voxtral": Case({"audio_config": {**MEL, "intermediate_size": 128}}, sound(2, 8, 16)),
    "whisper": Case({**BOTH, **SPEECH}, transcript(8, 16)),
    # an encoder
    **dict.fromkeys(("bart", "blenderbot", "m2m_100", "mbart", "pegasus", "plbart"), Case(BOTH, translation)),
    "led": Case(
        {
            **BOTH, "attention_window": 4, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64,
        },
        translation,
    ),
    "marian": Case({**BOTH, "decoder_vocab_size": 50}, translation),
    "nllb-moe": Case({**BOTH, "encoder_sparse_step": 2, "decoder_sparse_step": 2}, translation),
    **dict.fromkeys(("longt5", "mt5", "t5", "umt5"), Case(T5, translation)),
    "switch_transformers": Case({**T5, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}, translation),
    "t5gemma": Case({}, translation),
}  # fmt: skip

SPECIAL = {
    "image_token_id": IMAGE, "image_token_index": IMAGE, "video_token_id": VIDEO, "video_token_index": VIDEO,
    "audio_token_id": SOUND, "audio_token_index": SOUND, "vision_start_token_id": BEGIN, "vision_end_token_id": END,
    "image_start_token_id": BEGIN, "image_end_token_id": END,
}  # fmt: skip


def merged(fields: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    found = dict(fields)
    for name, value in changes.items():
        nested = isinstance(value, dict) and isinstance(found.get(name), dict) and name.endswith("_config")
        found[name] = merged(found[name], value) if nested else value
    return found


def class_of(name: str) -> type[PreTrainedModel]:
    config = CONFIG_MAPPING[name]
    found: type[PreTrainedModel] = next(each[config] for each in MAPPINGS if config in each)
    return found


def config_of(name: str) -> Any:
    """The default configuration, shrunken, with the case's changes."""
    fields = small_config(CONFIG_MAPPING[name](), 4).to_dict()
    fields |= {token: i for token, i in SPECIAL.items() if token in fields}
    return CONFIG_MAPPING[name](**merged(fields, CASES[name].changes))


def model_of(name: str) -> nn.Module:
    return random_model(class_of(name), config_of(name))


def inputs_of(name: str) -> Inputs:
    """The case's batch, without what the model does not take."""
    taken = inspect.signature(class_of(name).forward).parameters
    return {key: x for key, x in CASES[name].inputs().items() if key in taken}


def compare(group: Any, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """parity.compare for a case."""
    inputs = inputs_of(name)
    return compared(group, model_of(name), inputs, inputs, options)
