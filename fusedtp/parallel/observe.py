"""Run a model, or its modules one by one, and record what `infer.py` needs: which linear layers run, and on what.

guesses    inputs that a module might accept, from its class, its embeddings and the widths of its layers
recorded   inputs of every kind of module in a run of the model itself, on an example from the user
observe    run a copy on one of these
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map

from .foreign_styles import features_of, is_linear
from .multihead import is_multihead
from .trial import Inputs, sharing

BATCH, LENGTH = 2, 5


@dataclass
class Seen:
    """Records of one run.

    root     the module that ran
    inputs   module -> arguments of its first call
    calls    (linear layer, its input), in order
    given    module -> keys of the tensors among these arguments; see key
    """

    root: str
    inputs: dict[str, Inputs] = field(default_factory=dict)
    calls: list[tuple[str, Tensor]] = field(default_factory=list)
    given: dict[str, set[tuple[int, int]]] = field(default_factory=dict)
    alive: list[Any] = field(default_factory=list)


def key(x: Tensor) -> tuple[int, int]:
    """Equal for calls on the same input; a run keeps all inputs alive, so an address identifies them."""
    return x.data_ptr() if x.layout == torch.strided else id(x), x.numel()


def recorded(
    model: nn.Module, example: Inputs, kind_of: Callable[[str, nn.Module], Hashable]
) -> dict[Hashable, Inputs]:
    """Kind of a module -> inputs of the first module of that kind, in fp32 on the CPU, from a run of the model.

    The model runs once, in evaluation mode, where it is and in its own dtype; no activation is kept for a backward.
    Tensors computed from weights require gradients, and so do floats of the example with three or more dimensions, so
    that hidden states are known from masks and tables of positions.
    Raises ValueError if the model is a meta one or cannot run on the example.
    """
    meta = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if meta is not None:
        raise ValueError(f"an example needs a model with weights, and {meta} is on the meta device")
    copied = sharing(model).eval()
    for parameter in copied.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    found: dict[Hashable, Inputs] = {}

    def given(x: Any) -> Any:
        tokens = isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 2
        # a clone of it: code may change its inputs in place
        return x.detach().requires_grad_(tokens).clone() if isinstance(x, Tensor) else x

    def keep(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        kept = x.detach().to("cpu", torch.float32 if x.is_floating_point() else x.dtype, copy=True)
        return kept.requires_grad_(x.requires_grad)

    kinds = {name: kind_of(name, module) for name, module in model.named_modules()}
    for name, module in copied.named_modules():

        def enter(module: Any, args: Any, kwargs: Any, kind: Hashable = kinds[name]) -> None:
            if kind not in found:
                found[kind] = Inputs(*tree_map(keep, (args, kwargs)))

        module.register_forward_pre_hook(enter, with_kwargs=True)
    try:
        with torch.enable_grad(), saved_tensors_hooks(lambda x: None, lambda x: x):
            args, kwargs = tree_map(given, (example.args, {**without_cache(model), **example.kwargs}))
            copied(*args, **kwargs)
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} cannot run on the example: {type(error).__name__}: {error}"
        ) from error
    return found


def guesses(module: Any) -> Iterator[Inputs]:
    """Inputs that it might accept: those that its class names, token ids, hidden states."""
    generator = torch.Generator().manual_seed(1)
    config: Any = getattr(module, "config", None)
    main = getattr(module, "main_input_name", "")
    more = without_cache(module)
    needed = [p.name for p in required(module)]
    tables = [m for m in module.modules() if isinstance(m, nn.Embedding)]
    if main == "pixel_values" and hasattr(config, "image_size"):
        size = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
        image = torch.randn(BATCH, getattr(config, "num_channels", 3), size, size, generator=generator)
        yield Inputs((), {main: image, **more})
    if "grid_thw" in needed and isinstance(getattr(config, "patch_size", None), int):
        side, frames = 2 * getattr(config, "spatial_merge_size", 1), getattr(config, "temporal_patch_size", 1)
        width = getattr(config, "in_channels", 3) * frames * config.patch_size**2
        patches = torch.randn(BATCH * side**2, width, generator=generator)
        yield Inputs((), {needed[0]: patches, "grid_thw": torch.tensor([[1, side, side]] * BATCH)})
    if main == "input_features" and hasattr(config, "max_source_positions"):
        frames, bins = 2 * config.max_source_positions, getattr(config, "num_mel_bins", 1)
        sound = torch.randn(BATCH, bins, frames, generator=generator)
        ids = torch.randint(0, getattr(config, "vocab_size", 1), (BATCH, LENGTH), generator=generator)
        decoder = {"decoder_input_ids": ids} if getattr(config, "is_encoder_decoder", False) else {}
        yield Inputs((), {main: sound, **decoder, **more})
    if tables:
        most = tables[0].num_embeddings
        ids = torch.randint(min(3, most - 1), most, (BATCH, LENGTH), generator=generator)
        if main == "input_ids":
            mask = torch.ones_like(ids)
            mask[0, :2] = 0
            decoder = {"decoder_input_ids": ids} if getattr(config, "is_encoder_decoder", False) else {}
            yield Inputs((), {main: ids, "attention_mask": mask, **decoder, **more})
        elif len(required(module)) == 1:
            yield Inputs((ids,), more)
    if is_multihead(module):
        widths = [module.embed_dim, module.kdim, module.vdim]
        yield Inputs(tuple(torch.randn(BATCH, LENGTH, n, generator=generator).requires_grad_() for n in widths), {})
    if len(required(module)) == 1:
        widths = [features_of(m)[0] for m in module.modules() if is_linear(m)]
        for width in list(dict.fromkeys(widths))[:2]:
            yield Inputs((torch.randn(BATCH, LENGTH, width, generator=generator).requires_grad_(),), {})


def without_cache(module: Any) -> dict[str, Any]:
    """The argument that leaves out the cache, which would grow with each run of a trial."""
    config: Any = getattr(module, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    caches = any(getattr(each, "use_cache", False) for each in (config, text))
    kinds = {p.kind for name, p in inspect.signature(module.forward).parameters.items() if name != "use_cache"}
    takes = "use_cache" in inspect.signature(module.forward).parameters or inspect.Parameter.VAR_KEYWORD in kinds
    return {"use_cache": False} if caches and takes else {}


def required(module: Any) -> list[inspect.Parameter]:
    """The first argument of its forward and those without defaults."""
    kinds = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    )
    found = [p for p in inspect.signature(module.forward).parameters.values() if p.kind in kinds]
    return [p for i, p in enumerate(found) if i == 0 or p.default is inspect.Parameter.empty]


def observe(root: str, copied: nn.Module, inputs: Inputs) -> Seen | None:
    """Run it once; None if it raises."""
    seen = Seen(root)
    handles = []

    def keep(x: Any) -> Any:
        return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x

    for inner, module in copied.named_modules():

        def enter(module: Any, args: Any, kwargs: Any, name: str = join(root, inner)) -> None:
            if name not in seen.inputs:
                seen.inputs[name] = Inputs(*tree_map(keep, (args, kwargs)))
                given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
                seen.given[name] = {key(x) for x in given}
                seen.alive += given
            if is_linear(module) and args:
                seen.calls.append((name, args[0]))

        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
    try:
        with torch.enable_grad():
            fresh = inputs.fresh()
            copied(*fresh.args, **fresh.kwargs)
    except Exception:
        return None
    finally:
        for handle in handles:
            handle.remove()
    return seen


def join(outer: str, inner: str) -> str:
    return f"{outer}.{inner}".strip(".")
