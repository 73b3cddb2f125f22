"""Apply a plan to a third-party model: a style for every module; all faults are found before anything is changed.

The style names are those of transformers' plans (see foreign.py). A pattern matches modules or parameters. A pattern
of the model's own plan may match nothing, since one plan serves many configurations; one that the user wrote must
match. Modules that no pattern matches keep their forward, and their parameters stay whole.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from fusedtp.comm import communicator
from fusedtp.nn.heads import heads_split, sizes_that_split

from . import multihead
from .agree import check_same_inputs, watch_draws
from .attention_maps import mark_maps
from .features import open_features
from .foreign import Model, enter, leave
from .foreign_experts import ExpertsByRank
from .foreign_styles import (
    PARAMETERS,
    Colwise,
    Embedding,
    EmbeddingColumns,
    Foreign,
    LatentProjection,
    PartialGradients,
    Rowwise,
    Shared,
    Summed,
    features_of,
)
from .local_view import WORDS as OF_LOCAL_VIEW
from .local_view import OfHeads, Words, heads_faults
from .placement import Mesh, Way
from .plan import Step, apply_steps, generic, has_more_dimensions, matches, parent_of, placed, refuse, sharing_faults
from .saving import prepare
from .siblings import Siblings
from .styles import already_parallel
from .table_rows import show_rows

WORDS: dict[str, Callable[..., Foreign]] = Words({
    "colwise": Colwise,
    "colwise_gather_output": lambda *a, **k: Colwise(*a, gather_output=True, **k),
    "colwise_rep": lambda *a, **k: Colwise(*a, gather_output=True, **k),
    "packed_colwise": lambda *a, **k: Colwise(*a, packed=2, **k),
    "rowwise": Rowwise,
    "rowwise_split_input": lambda *a, **k: Rowwise(*a, split_input=True, **k),
    "rowwise_rep": lambda *a, **k: Rowwise(*a, split_input=True, **k),
    "packed_rowwise": lambda *a, **k: Rowwise(*a, packed=2, **k),
    "embedding_rowwise": Embedding,
    "embedding_colwise": EmbeddingColumns,
    "replicated_with_grad_allreduce": PartialGradients,
    "mla_kv_a_proj": LatentProjection,
    "moe_tp_experts": Summed,
    "all_reduce": Summed,
    "moe_identity_expert": Shared,
    "local_params": Foreign,
    "replicate": Foreign,
    "sequence_parallel": Foreign,
    "ep_dispatch_experts": ExpertsByRank,
    multihead.WORD: multihead.MultiheadAttention,
    **OF_LOCAL_VIEW,
})  # fmt: skip

# A module with such an argument does cross-attention: keys and values come from other tokens than queries.
OTHER_TOKENS = {"key_value_states", "encoder_hidden_states", "cross_attention_states", "memory", "context"}
KEY_OR_VALUE = re.compile(r"w?[kv](_proj|_lin)?|(key|value)(_proj|_layer)?")
QUERY = re.compile(r"w?q(_proj|_lin)?|query(_proj|_layer)?")

# Attributes of PEFT layers besides A and B -> the method that they belong to.
UNSPLIT_ADAPTERS = {
    "lora_embedding_A": "", "lora_magnitude_vector": " (DoRA)", "lora_variant": "", "lora_E": " (AdaLoRA)",
}  # fmt: skip


def adopt(
    model: nn.Module,
    mesh: Mesh,
    plan: Mapping[str, str],
    *,
    complete: bool,
    engine: str = "auto",
    sequence_parallel: bool = True,
    whole: Mapping[str, str] | None = None,
) -> None:
    """Split a third-party model over the ranks of a mesh, in place. Collective.

    complete   every pattern of the plan must match something
    whole      module -> why it is not split, for explain
    Raises one ValueError that lists every fault; the model is then unchanged.
    """
    comm = communicator(mesh)
    shared = Model(comm.name, whole=dict(whole or {}))
    steps = foreign_steps(
        model, plan, comm.world_size, has_more_dimensions(mesh), shared, complete,
        engine=engine, sequence_parallel=sequence_parallel,
    )  # fmt: skip
    prepare(model)
    named = dict(model.named_modules())
    _regroup_heads(named, steps, comm.world_size)
    apply_steps(steps, mesh)
    show_rows(model)
    holders = dict.fromkeys(
        parent_of(_without_adapter(step.name))
        for step in steps
        if isinstance(step.style, Colwise) and not step.style.gather_output
    )
    shared.maps = comm.world_size > 1 and bool(holders)
    mark_maps((named[name] for name in holders), comm.name, comm.world_size)
    model._fusedtp = shared  # type: ignore[assignment]
    open_features(model, shared)
    _introduce(model, mesh, comm.world_size)
    model.register_forward_pre_hook(check_same_inputs, with_kwargs=True)
    for module in model.modules():  # stacks may also be called without the model
        if module is model or any(isinstance(child, nn.ModuleList) for child in module.children()):
            module.register_forward_pre_hook(partial(enter, shared))
    if isinstance(mesh, DeviceMesh):  # virtual ranks share one generator
        model.register_forward_pre_hook(watch_draws)
    model.register_forward_hook(leave)


def check_plan(model: nn.Module, mesh: Mesh, plan: Mapping[str, str], *, complete: bool) -> None:
    """Raises one ValueError that lists every fault of a plan; changes nothing."""
    foreign_steps(model, plan, communicator(mesh).world_size, has_more_dimensions(mesh), Model(), complete)


def foreign_ways(model: nn.Module, mesh: Mesh, plan: Mapping[str, str]) -> dict[str, Way]:
    """How adopt would place each parameter. Raises ValueError as check_plan does."""
    world_size = communicator(mesh).world_size
    steps = foreign_steps(model, plan, world_size, has_more_dimensions(mesh), Model(), False)
    return placed(model, steps, world_size)


def _introduce(model: Any, mesh: Mesh, world_size: int) -> None:
    """Set what transformers sets on a model that it split itself, so that Trainer and accelerate treat it likewise.

    They then know which ranks share a batch, that gradients are complete, and that saving has to gather. Also disables
    resizing of embeddings, and nested tensors in torch's encoder.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
        if hasattr(type(module), "resize_token_embeddings") and hasattr(module, "get_input_embeddings"):
            module.resize_token_embeddings = MethodType(_not_resized, module)
    total = mesh._get_root_mesh().size() if isinstance(mesh, DeviceMesh) else world_size
    for module in model.modules():
        if hasattr(type(module), "is_distributed_loading_by_transformers"):
            from transformers.distributed.configuration_utils import DistributedConfig

            module.config.distributed_config = DistributedConfig(tp_size=world_size, fsdp_size=total // world_size)
            module._tp_size = world_size
            module._is_distributed_loading_by_transformers = True


def _not_resized(self: Any, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
    """The resize_token_embeddings of a split model."""
    if new_num_tokens not in (None, self.get_input_embeddings().weight.shape[0]) or args or any(kwargs.values()):
        raise ValueError(
            "embeddings of a split model cannot be resized: call resize_token_embeddings before parallelize"
        )
    return type(self).resize_token_embeddings(self, new_num_tokens)


def foreign_steps(
    model: nn.Module,
    plan: Mapping[str, str],
    world_size: int,
    fully_sharded: bool,
    shared: Model,
    complete: bool,
    **options: Any,
) -> list[Step]:
    """The style of every module that has parameters or is named in the plan.

    fully_sharded   the mesh has further dimensions, so FSDP2 will shard the rest
    complete        every pattern must match a module or parameter
    Raises one ValueError that lists all faults of the plan, the model and the world size.
    """
    named = dict(model.named_modules())
    words, parameters, faults = _named_by(plan, model, named, complete)
    faults += _adapt(words, named)
    for name in [name for name, word in words.items() if word == multihead.WORD]:
        last = f"{name}.{multihead.OUT}".lstrip(".")
        if words.setdefault(last, "rowwise") != "rowwise":
            faults.append(f"{last}: {words[last]!r} does not go with {multihead.WORD!r}; only 'rowwise' does")
    styles: dict[str, Foreign] = {}
    for name, module in named.items():
        own = dict(module.named_parameters(recurse=False))
        its = {key: parameters[f"{name}.{key}".lstrip(".")] for key in own if f"{name}.{key}".lstrip(".") in parameters}
        word = words.get(name)
        if word is not None and _keeps_all(word, module):
            word = "replicate"
        if word is not None:
            extra = {"rotary_width": _rotary_width(model)} if word == "mla_kv_a_proj" else {}
            styles[name] = WORDS[word](shared, named=its, **extra, **options)
        elif own:
            styles[name] = Foreign(shared, named=its, **options)
    _tie(named, styles, lambda word: WORDS[word](shared, **options))
    faults += _heads(named, styles, world_size)
    for name, style in styles.items():
        faults += [f"{generic(name)}: {fault}" for fault in already_parallel(named[name])]
        faults += [f"{generic(name)}: {fault}" for fault in style.faults(named[name], world_size)]
    faults += _sums_of_wholes(named, styles, world_size) + heads_faults(named, styles)
    faults += multihead.out_faults(named, styles, world_size)
    if not faults:
        faults = sharing_faults(named, styles, world_size, fully_sharded)
    refuse(model, world_size, faults)
    head = _head(model)
    for name, style in styles.items():
        owner = named[re.sub(r"\.(original_module|modules_to_save\.[^.]+)$", "", name)]
        if isinstance(style, Colwise) and style.gather_output and owner is head:
            style.vocabulary = True
    _group_siblings(named, styles, shared)
    _readers(named, styles, lambda: Foreign(shared, **options))
    return [Step(name, module, styles[name]) for name, module in named.items() if name in styles]


def _named_by(
    plan: Mapping[str, str], model: nn.Module, named: Mapping[str, Any], complete: bool
) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """Module -> style name, parameter -> style name, and the faults found."""
    words: dict[str, str] = {}
    parameters: dict[str, str] = {}
    faults: list[str] = []
    by_kind: dict[str, list[str]] = {}
    of_modules = set(named)
    for name in [*named, *(name for name, _ in model.named_parameters(remove_duplicate=False))]:
        by_kind.setdefault(generic(name), []).append(name)
    for pattern, word in plan.items():
        matching = by_kind.get(pattern) or [
            name for names in by_kind.values() for name in names if matches(pattern, name)
        ]
        if not matching and complete:
            faults.append(f"{pattern}: no module or parameter has such a name")
        if matching and word not in WORDS and word not in PARAMETERS:
            faults.append(f"{pattern}: unknown style {word!r}; known are {', '.join({**WORDS, **PARAMETERS})}")
            continue
        for name in matching:
            found = words if name in of_modules else parameters
            if name in found and complete:
                faults.append(f"{name}: more than one pattern of the plan matches it; the last is {pattern}")
            if word not in (WORDS if name in of_modules else PARAMETERS):
                kind = "parameters, but this is a module" if name in of_modules else "modules, but this is a parameter"
                faults.append(f"{name}: {word!r} is for {kind}")
                continue
            found[name] = word
    if not words and not parameters and not faults:
        faults.append("its plan matches none of its modules")
    return words, parameters, faults


def _sums_of_wholes(named: Mapping[str, Any], styles: Mapping[str, Foreign], world_size: int) -> list[str]:
    """Faults: modules with outputs summed over ranks, but no split parameter (quantized weights may be renamed)."""
    split = [
        name
        for name, style in styles.items()
        if any(not isinstance(at, Replicate) for at in style.placements(named[name], world_size).values())
    ]
    return [
        f"{generic(name)}: its outputs are summed over ranks, but the plan splits none of its parameters; load a "
        "quantized model unquantized"
        for name, style in styles.items()
        if type(style) is Summed and world_size > 1 and not any(f"{each}.".startswith(f"{name}.") for each in split)
    ]


def _adapt(words: dict[str, str], named: Mapping[str, Any]) -> list[str]:
    """Move the style of an adapted linear (PEFT's LoRA) to the base linear inside, and to A or B.

    x A B is added to x W: if W's output features are split, B's must be too; if W's input features are, A's must be.
    """
    faults: list[str] = []
    for name, word in list(words.items()):
        module = named[name]
        if hasattr(module, "original_module") and hasattr(module, "modules_to_save"):
            del words[name]  # PEFT's wrapper; the copies inside, which are trained in full, get the style
            copies = (f"modules_to_save.{adapter}" for adapter in module.modules_to_save)
            words |= {f"{name}.{copy}": word for copy in ("original_module", *copies)}
            continue
        if not hasattr(module, "base_layer") or not hasattr(module, "lora_A"):
            continue
        del words[name]
        if word in ("replicate", "local_params"):
            continue
        special = [f"{kind}{whose}" for kind, whose in UNSPLIT_ADAPTERS.items() if len(getattr(module, kind, ()))]
        half = {"colwise": "lora_B", "colwise_gather_output": "", "rowwise": "lora_A"}.get(word)
        if special or half is None:
            what = special[0] if special else word
            faults.append(
                f"{name}: {type(module).__name__} with {what} cannot be split; merge the adapter first, "
                "or leave this layer out of its targets"
            )
            continue
        words[f"{name}.base_layer"] = word
        if half:
            words |= {f"{name}.{half}.{adapter}": word for adapter in getattr(module, half)}
    return faults


def _keeps_all(word: str, module: Any) -> bool:
    """Whether an embedding must stay replicated: it applies parameters besides its table to every token."""
    others = sum(1 for _ in module.parameters()) > 1
    return word.startswith("embedding") and (
        others or (word == "embedding_colwise" and type(module).forward is not nn.Embedding.forward)
    )


def _head(model: Any) -> Any:
    """The linear layer that computes the logits; None if the model does not name one."""
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


def _rotary_width(model: Any) -> int | None:
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(config, "qk_rope_head_dim", None)


def _readers(named: Mapping[str, Any], styles: dict[str, Foreign], make: Callable[[], Foreign]) -> None:
    """Tell modules which children keep their parameters whole: code may read those without calling the child."""
    plain = {name for name, style in styles.items() if type(style) in (Foreign, PartialGradients)}
    for name, style in list(styles.items()):
        parent = parent_of(name)
        if name == "" or parent not in named or type(named[parent]).forward is _FORWARD_OF_NONE:
            continue
        if parent not in styles and name in plain:
            styles[parent] = make()
        above = styles.get(parent)
        if above is None or isinstance(above, Colwise | Rowwise | Embedding):
            continue
        if name in plain:
            above.children += (_last(name),)
        above.splits |= isinstance(style, Colwise | Rowwise)
    for name, style in styles.items():
        outer = parent_of(name)
        while len(outer) > len(_layer_of(name)):
            style.inside |= outer in styles and styles[outer].splits
            outer = parent_of(outer)
    # in dict order, since a set's order differs between ranks and gradients are summed in one buffer
    for name in [name for name in styles if name in plain]:
        if styles[name].children or styles[name].splits or styles[name].named:
            continue
        layer = _layer_of(name)
        outers = (parent_of(name),) if layer == name else (layer, parent_of(parent_of(layer)))
        for outer in outers:
            if type(styles.get(outer)) is Foreign:
                styles[outer].below += (name.removeprefix(f"{outer}." if outer else ""),)


def _layer_of(name: str) -> str:
    """model.layers.3.self_attn.q_norm -> model.layers.3; the name itself if it is not inside a list of modules."""
    parts = name.split(".")
    ends = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: ends[0] + 1]) if ends else name


_FORWARD_OF_NONE = nn.ModuleList.forward


def _tie(named: Mapping[str, Any], styles: dict[str, Foreign], style_of: Callable[[str], Foreign]) -> None:
    """A tied embedding and head: if the plan splits one of them, split the other too."""
    owners: dict[int, list[str]] = {}
    for name in styles:
        weight = getattr(named[name], "weight", None)
        if isinstance(weight, nn.Parameter):
            owners.setdefault(id(weight), []).append(name)
    for names in owners.values():
        kinds = {type(styles[name]) for name in names}
        if len(names) == 1 or len(kinds) == 1 or Foreign not in kinds or OfHeads in kinds:  # that one is replicated
            continue
        split = {
            name: style_of("embedding_rowwise" if isinstance(named[name], nn.Embedding) else "colwise_gather_output")
            for name in names
            if type(styles[name]) is Foreign
        }
        fit = all(
            not style.faults(named[name], 1) and not _keeps_all("embedding_rowwise", named[name])
            for name, style in split.items()
        )
        for name in names:
            styles[name] = split.get(name, styles[name]) if fit else style_of("replicate")


def _heads(named: Mapping[str, Any], styles: Mapping[str, Foreign], world_size: int) -> list[str]:
    """Set the head width of key and value projections; returns faults of the number of heads."""
    attentions: dict[str, dict[str, Colwise]] = {}
    for name, style in styles.items():
        if isinstance(style, Colwise) and not style.gather_output:
            attentions.setdefault(parent_of(_without_adapter(name)), {})[name] = style
    faults: list[str] = []
    for parent, projections in attentions.items():
        last = {name: _last(_without_adapter(name)) for name in projections}
        widths = {name: _head_width(named[parent], last[name]) for name in projections}
        heads = {
            name: divmod(named[name].weight.shape[0], width)
            for name, width in widths.items()
            if width > 0 and isinstance(named[name], nn.Linear)
        }
        queries = [n for name, (n, rest) in heads.items() if not rest and QUERY.fullmatch(last[name])]
        keys = {name: n for name, (n, rest) in heads.items() if not rest and KEY_OR_VALUE.fullmatch(last[name])}
        if not queries or not keys:
            continue
        least = min(keys.values())
        if not heads_split(world_size, max(queries), least):
            faults.append(
                f"{generic(parent)}: {world_size} ranks cannot evenly share {max(queries)} query heads and {least} kv "
                f"heads; sizes that would work: {sizes_that_split(max(queries), least)}"
            )
        elif least < world_size:
            for name in keys:
                projections[name].head_dim = widths[name]
                projections[name].kv_heads = least
    return faults


def _head_width(attention: Any, projection: str) -> int:
    """The width of this projection's heads; 0 if unknown."""
    width = getattr(attention, "head_dim", None)
    if "v" in projection:
        width = getattr(attention, "v_head_dim", width)
    return width if isinstance(width, int) else 0


def _regroup_heads(named: Mapping[str, Any], steps: list[Step], world_size: int) -> None:
    """Adjust attention that repeats kv heads: if ranks share kv heads, each rank's query heads use only one of them."""
    for step in steps:
        attention = named[parent_of(_without_adapter(step.name))]
        groups = getattr(attention, "num_key_value_groups", None)
        shares = isinstance(step.style, Colwise) and step.style.head_dim is not None and isinstance(groups, int)
        if shares and "_all_key_value_groups" not in attention.__dict__:
            attention._all_key_value_groups = groups
            attention.num_key_value_groups = groups * step.style.kv_heads // world_size


def _without_adapter(name: str) -> str:
    """The name of the adapted linear that this linear is inside of, see _adapt."""
    return re.sub(r"\.(base_layer|lora_[AB]\.[^.]+)$", "", name)


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _group_siblings(named: Mapping[str, Any], styles: Mapping[str, Foreign], shared: Model) -> None:
    """Group column-parallel linears of one module by input width; equal widths are assumed to be the same input."""
    groups: dict[tuple[Any, ...], Siblings] = {}
    for name, style in styles.items():
        if isinstance(style, Colwise):
            parent = parent_of(name)
            arguments = set(inspect.signature(type(named[parent]).forward).parameters)
            asks = bool(arguments & OTHER_TOKENS) and QUERY.fullmatch(_last(name)) is not None
            key = (parent, features_of(named[name])[0], style.gather_output, asks)
            if key not in groups:
                groups[key] = style.siblings
                shared.siblings.append(style.siblings)
            style.siblings = groups[key]
