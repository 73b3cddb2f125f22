"""Models of other libraries, small and with random weights, and an example of each one's inputs.

None has a plan. The libraries are no requirement of the tests: libraries.txt lists them, and `make libraries-table`
installs them into a venv of their own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fusedtp
from tests.parallel.support import tp_mesh

from .parity import against

Inputs = dict[str, Any]


class Case(NamedTuple):
    """make: builds the model; inputs: makes an example."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def ids(name: str) -> Inputs:
    return {name: torch.randint(1, 64, (2, 8), generator=torch.Generator().manual_seed(1))}


def image(name: str, size: int = 32) -> Inputs:
    return {name: normal(2, 3, size, size)}


def built(path: str, *args: Any, **options: Any) -> nn.Module:
    """path: package.module:class"""
    module, _, name = path.partition(":")
    made: nn.Module = getattr(importlib.import_module(module), name)(*args, **options)
    return made


def timm(path: str, size: int = 32, **options: Any) -> Case:
    return Case(partial(built, f"timm.models.{path}", num_classes=10, **options), partial(image, "x", size))


def hiera() -> nn.Module:
    return built("timm:create_model", "hiera_tiny_224", num_classes=10, embed_dim=32, num_heads=4, stages=(1, 1, 1, 1))


def vit_pytorch(path: str, **options: Any) -> Case:
    small = {"image_size": 32, "patch_size": 8, "num_classes": 10, "dim": 32, "heads": 4, "mlp_dim": 64, "dim_head": 8}
    return Case(partial(built, f"vit_pytorch.{path}", depth=2, **small, **options), partial(image, "img"))


def x_decoder(tied: bool = False, **options: Any) -> Case:
    def make() -> nn.Module:
        layers = built("x_transformers:Decoder", dim=32, depth=2, heads=4, attn_dim_head=8, **options)
        sizes: dict[str, Any] = {"num_tokens": 64, "max_seq_len": 16, "tie_embedding": tied}
        return built("x_transformers:TransformerWrapper", attn_layers=layers, **sizes)

    return Case(make, partial(ids, "x"))


def litgpt(**options: Any) -> Case:
    small: dict[str, Any] = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 16}

    def make() -> nn.Module:
        library = importlib.import_module("litgpt")
        made: nn.Module = library.GPT(library.Config(vocab_size=64, padded_vocab_size=64, **small, **options))
        return made

    return Case(make, partial(ids, "idx"))


def open_clip() -> nn.Module:
    library = importlib.import_module("open_clip.model")
    of_images = library.CLIPVisionCfg(layers=2, width=32, head_width=8, patch_size=8, image_size=32)
    of_text = library.CLIPTextCfg(context_length=8, vocab_size=64, width=32, heads=4, layers=2)
    made: nn.Module = library.CLIP(32, of_images, of_text)
    return made


def whisper() -> nn.Module:
    library = importlib.import_module("whisper.model")
    made: nn.Module = library.Whisper(library.ModelDimensions(8, 16, 32, 4, 2, 64, 16, 32, 4, 2))
    return made


VIT: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
SWIN: dict[str, Any] = {"img_size": 32, "patch_size": 4, "window_size": 4, "embed_dim": 32, "depths": (2, 2)}
LLAMA: dict[str, Any] = {
    "parallel_residual": False, "bias": False, "norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP",
    "intermediate_size": 64, "rotary_percentage": 1.0,
}  # fmt: skip
CASES: dict[str, Case] = {
    "litgpt: Llama": litgpt(**LLAMA, n_query_groups=2),
    "litgpt: Mixtral": litgpt(**LLAMA | {"mlp_class_name": "LLaMAMoE"}, n_expert=4, n_expert_per_token=2),
    "litgpt: Pythia": litgpt(),
    "open_clip: CLIP": Case(open_clip, lambda: image("image") | ids("text")),
    "openai-whisper": Case(whisper, lambda: {"mel": normal(2, 8, 32)} | ids("tokens")),
    "timm: BEiT": timm("beit:Beit", **VIT, use_rel_pos_bias=True, init_values=0.5),
    "timm: CaiT": timm("cait:Cait", **VIT, init_values=0.5),
    "timm: ConvNeXt": timm("convnext:ConvNeXt", depths=(1, 1, 1, 1), dims=(16, 32, 32, 32)),
    "timm: DeiT, distilled": timm("deit:VisionTransformerDistilled", **VIT),
    "timm: EVA-02": timm("eva:Eva", **VIT, swiglu_mlp=True, scale_mlp=True, use_rot_pos_emb=True, mlp_ratio=2.0),
    "timm: Hiera": Case(hiera, partial(image, "x", 224)),
    "timm: MLP-Mixer": timm("mlp_mixer:MlpMixer", img_size=32, patch_size=8, embed_dim=32, num_blocks=2),
    "timm: PVT v2": timm(
        "pvt_v2:PyramidVisionTransformerV2", 64, embed_dims=(32,) * 4, depths=(1,) * 4, num_heads=(4,) * 4
    ),
    "timm: Swin": timm("swin_transformer:SwinTransformer", **SWIN, num_heads=(4, 4)),
    "timm: Swin v2": timm("swin_transformer_v2:SwinTransformerV2", **SWIN, num_heads=(4, 4)),
    "timm: ViT": timm("vision_transformer:VisionTransformer", **VIT),
    "timm: ViT, pooled by attention": timm(
        "vision_transformer:VisionTransformer",
        **VIT, qk_norm=True, init_values=0.5, class_token=False, global_pool="map",
    ),
    "timm: XCiT": timm("xcit:Xcit", **VIT, eta=1.0),
    "torch: Transformer": Case(
        partial(built, "torch.nn:Transformer", 32, 4, 2, 2, 64, dropout=0.0),
        lambda: {"src": normal(8, 2, 32), "tgt": normal(6, 2, 32)},
    ),
    "torchvision: Swin": Case(
        partial(built, "torchvision.models:SwinTransformer", [4, 4], 32, [2, 2], [4, 4], [4, 4], num_classes=10),
        partial(image, "x"),
    ),
    "torchvision: ViT": Case(
        partial(built, "torchvision.models:VisionTransformer", 32, 8, 2, 4, 32, 64, num_classes=10), partial(image, "x")
    ),
    "vit-pytorch: CaiT": vit_pytorch("cait:CaiT", cls_depth=1),
    "vit-pytorch: DeepViT": vit_pytorch("deepvit:DeepViT"),
    "vit-pytorch: parallel ViT": vit_pytorch("parallel_vit:ViT", num_parallel_branches=2),
    "vit-pytorch: SimpleViT": vit_pytorch("simple_vit:SimpleViT"),
    "vit-pytorch: ViT": vit_pytorch("vit:ViT"),
    "x-transformers: ALiBi": x_decoder(alibi_pos_bias=True, alibi_num_heads=4),
    "x-transformers: cross-attention": Case(
        partial(built, "x_transformers:Decoder", dim=32, depth=2, heads=4, attn_dim_head=8, cross_attend=True),
        lambda: {"x": normal(2, 8, 32), "context": normal(2, 5, 32)},
    ),
    "x-transformers: grouped queries": x_decoder(attn_flash=True, attn_kv_heads=2, attn_qk_norm=True),
    "x-transformers: plain, tied": x_decoder(tied=True),
    "x-transformers: rotary, gated": x_decoder(rotary_pos_emb=True, ff_glu=True, ff_swish=True, use_rmsnorm=True),
}  # fmt: skip


def model_of(name: str) -> nn.Module:
    """In evaluation mode; all weights are random, since some start at zero."""
    torch.manual_seed(0)
    model = CASES[name].make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            matrix = parameter.dim() > 1
            parameter.normal_(0.0 if matrix else 0.5, parameter[:1].numel() ** -0.5 if matrix else 0.1)
    return model


def floats(outputs: Any) -> list[Tensor]:
    """The outputs that depend on weights."""
    if isinstance(outputs, Tensor):
        return [outputs] if outputs.requires_grad else []
    found = outputs.values() if isinstance(outputs, dict) else outputs if isinstance(outputs, list | tuple) else ()
    return [x for each in found for x in floats(each)]


def results(model: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    """Outputs, a random weighted sum of them, and all gradients of that, by name."""
    first, *more = floats(model(**inputs))
    every = {"logits": first} | {f"output {i}": x for i, x in enumerate(more, 1)}
    weighted = [(x * torch.randn(x.shape, generator=torch.Generator().manual_seed(2))).sum() for x in every.values()]
    every["loss"] = torch.stack(weighted).sum()
    model.zero_grad()
    every["loss"].backward()  # type: ignore[no-untyped-call]
    own = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: x.detach() for name, x in (every | own).items()}


def compare(group: Any, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """parity.compare for a case. options: of fusedtp.parallelize."""
    plain, inputs = model_of(name), CASES[name].inputs()
    parallel = fusedtp.parallelize(model_of(name), tp_mesh(group), example=inputs, **options)
    return against(group, plain, parallel, lambda model: results(model, inputs))
