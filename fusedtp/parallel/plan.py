"""Turn a model's tp_plan into one style per module; all faults are found before anything is changed.

A plan maps names to styles in transformers' vocabulary: {"layers.*.mlp.up_proj": "colwise", ...}; `*` matches one
part of a name (a layer number), and a style may also be a ParallelStyle. If a model has no plan, the plans of its
outermost submodules that have one are used. OWN_PLANS has plans for models that lack one in transformers.
Modules that no pattern matches keep their parameters whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from fusedtp.nn import TransformerBlock
from fusedtp.nn.heads import heads_split, sizes_that_split

from .expert_parallel import ExpertSplit
from .layers import Member, Replicas, kind_of
from .placement import Mesh, Way
from .styles import (
    FusedColwise,
    FusedEmbedding,
    FusedExperts,
    FusedRowwise,
    Replicated,
    Style,
    already_parallel,
    computed,
)

STYLES = {
    "colwise": lambda **options: FusedColwise(**options),
    "colwise_gather_output": lambda **options: FusedColwise(gather_output=True, **options),
    "rowwise": lambda **options: FusedRowwise(**options),
    "embedding_rowwise": lambda **options: FusedEmbedding(**options),
    "replicated_with_grad_allreduce": lambda **_: Replicated(),
}


class Step(NamedTuple):
    """A module of the model and its style."""

    name: str
    module: Any
    style: Any


LIKE_T5 = ("T5", "MT5", "UMT5", "LongT5")
# A layer's scores include a position bias of its heads. In T5 the first layer computes it for all layers. Its table is
# split by heads, like the projections.
T5_STACK = {
    "embed_tokens": "embedding_rowwise",
    **{
        f"block.*.layer.*.{attention}{part}": word
        for attention in ("SelfAttention", "LocalSelfAttention", "TransientGlobalSelfAttention", "EncDecAttention")
        for part, word in {
            "": "local_view(n_heads, inner_dim)",
            ".q": "colwise",
            ".k": "colwise",
            ".v": "colwise",
            ".o": "rowwise",
            ".relative_attention_bias.weight": "rowwise",
            ".global_relative_attention_bias.weight": "rowwise",
        }.items()
    },
    "block.*.layer.*.DenseReluDense.wi": "colwise",
    "block.*.layer.*.DenseReluDense.wi_0": "colwise",
    "block.*.layer.*.DenseReluDense.wi_1": "colwise",
    "block.*.layer.*.DenseReluDense.wo": "rowwise",
}

# Class -> plan, if transformers has none for the layers. gpt-oss interleaves gate and up in its experts.
OWN_PLANS: dict[str, dict[str, str]] = {
    **{f"{family}Stack": T5_STACK for family in LIKE_T5},
    **{f"{family}ForConditionalGeneration": {"lm_head": "colwise_gather_output"} for family in LIKE_T5},
    "GptOssModel": {
        "embed_tokens": "embedding_rowwise",
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.sinks": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.experts.gate_up_proj": "rowwise_pairs",
        "layers.*.mlp.experts.gate_up_proj_bias": "rowwise_pairs",
        "layers.*.mlp.experts.down_proj": "colwise",
        "layers.*.mlp.experts.down_proj_bias": "divided",
        "layers.*.mlp.experts": "moe_tp_experts",
    },
}


def plan_of(model: nn.Module) -> dict[str, str | ParallelStyle]:
    """The model's tp_plan, or the plans of its outermost submodules that have one, prefixed with their names.

    If the model's own plan names only the ends (an embedding, a head), the plans of its submodules are added.
    """
    # A wrapper may forward tp_plan of the model inside it, whose names lack the prefix: read the model's own only.
    own = getattr(model, "tp_plan", None) if hasattr(type(model), "tp_plan") or "tp_plan" in vars(model) else None
    if own and not names_only_ends(model, own):
        return dict(own)
    found: dict[str, str | ParallelStyle] = dict(OWN_PLANS.get(type(model).__name__, {}))
    for name, child in model.named_children():
        found.update({f"{name}.{pattern}": style for pattern, style in plan_of(child).items()})
    return {**found, **(own or {})}


def names_only_ends(model: Any, plan: Mapping[str, Any]) -> bool:
    """Whether a plan names only the embedding and the head of a transformers model, but no layer."""
    if not hasattr(model, "get_output_embeddings") or not hasattr(model, "get_input_embeddings"):
        return False
    try:
        ends = {id(model.get_output_embeddings()), id(model.get_input_embeddings())}
    except NotImplementedError:  # transformers raises it for models without an embedding or a head
        return False
    return all(
        id(module) in ends for name, module in model.named_modules() if any(matches(pattern, name) for pattern in plan)
    )


def make_steps(
    model: nn.Module,
    plan: Mapping[str, Any],
    world_size: int,
    fully_sharded: bool,
    experts: ExpertSplit | None = None,
    **options: Any,
) -> list[Step]:
    """The style of every module that has parameters or is named in the plan.

    fully_sharded   the mesh has further dimensions, so FSDP2 will shard the rest
    experts         how to share the modules that the plan calls "experts"
    Raises one ValueError that lists all faults of the plan, the model and the world size.
    """
    named = dict(model.named_modules())
    styles, faults = _planned(named, plan, {"experts": FusedExperts(split=experts, **options)}, options)
    heads = _head_faults(named, styles, world_size)
    faults += heads.values()
    for name, style in styles.items():
        if parent_of(name) not in heads:
            found = style.faults(named[name], style.ranks(world_size)) or computed(
                named[name], style.placements(named[name], style.ranks(world_size))
            )
            faults += [f"{generic(name)}: {fault}" for fault in found]
    between = {parent_of(name) for name, style in styles.items() if isinstance(style, FusedRowwise)}
    for name, module in named.items():
        if name not in styles and any(True for _ in module.parameters(recurse=False)):
            # A sibling of a row-parallel layer (q_norm next to o_proj) sees only this rank's heads.
            partial = options["sequence_parallel"] or (name != "" and parent_of(name) in between)
            styles[name] = Replicated(partial=partial)
    faults += [f"{generic(name)}: {fault}" for name in styles for fault in already_parallel(named[name])]
    if not faults:
        faults = sharing_faults(named, styles, world_size, fully_sharded)
    refuse(model, world_size, faults)
    return [Step(name, module, styles[name]) for name, module in named.items() if name in styles]


def ways_of(model: nn.Module, world_size: int, experts: ExpertSplit | None = None) -> dict[str, Way]:
    """How parallelize would place every parameter on world_size ranks. Raises ValueError as make_steps does."""
    options = dict(engine="auto", sequence_parallel=True)
    return placed(model, make_steps(model, plan_of(model), world_size, False, experts, **options), world_size)


def placed(model: nn.Module, steps: list[Step], world_size: int) -> dict[str, Way]:
    """How these steps would place every parameter; a tied one is listed under its first name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, Way] = {}
    for step in steps:
        for key, way in step.style.ways(step.module, step.style.ranks(world_size)).items():
            found.setdefault(names[id(getattr(step.module, key))], way)
    return found


def _planned(
    named: Mapping[str, Any], plan: Mapping[str, Any], shared: Mapping[str, Style], options: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Module name -> style, and the faults found; `shared` are styles with one instance for all modules."""
    styles: dict[str, Any] = {}
    faults: list[str] = []
    if not plan:
        faults.append("neither it nor any submodule has a tp_plan; pass one, such as plan={'...up_proj': 'colwise'}")
    for pattern, style in plan.items():
        if not isinstance(style, ParallelStyle) and style not in (*STYLES, *shared):
            known = ", ".join([*STYLES, *shared])
            faults.append(f"{pattern}: unknown style {style!r}; known are {known}")
            continue
        matching = [name for name in named if matches(pattern, name)]
        if not matching:
            faults.append(f"{pattern}: no module has such a name")
        for name in matching:
            if name in styles:
                faults.append(f"{name}: more than one pattern of the plan matches it; the last is {pattern}")
            style = shared.get(style, style) if isinstance(style, str) else style
            styles[name] = style if isinstance(style, ParallelStyle) else _styled(named, name, style, options)
    foreign = [name for name, style in styles.items() if not isinstance(style, Style)]
    faults += [f"{name}: {type(styles.pop(name)).__name__} is not a style of fusedtp" for name in foreign]
    return styles, faults


def matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", "[^.]+"), name) is not None


def _styled(named: Mapping[str, Any], name: str, style: str, options: dict[str, Any]) -> Any:
    head_dim = getattr(named[parent_of(name)], "head_dim", None)
    if style == "colwise" and isinstance(head_dim, int):
        return STYLES[style](head_dim=head_dim, **options)
    return STYLES[style](**options)


def _head_faults(named: Mapping[str, Any], styles: Mapping[str, Any], world_size: int) -> dict[str, str]:
    """Faults of attention layers with query heads that do not divide; there may be fewer kv heads than ranks."""
    heads: dict[str, set[int]] = {}
    for name, style in styles.items():
        head_dim = getattr(style, "head_dim", None)
        if head_dim is not None and hasattr(named[name], "weight"):
            heads.setdefault(parent_of(name), set()).add(named[name].weight.shape[0] // head_dim)
    return {
        parent: f"{generic(parent)}: {world_size} ranks cannot evenly share {max(counts)} query heads and "
        f"{min(counts)} kv heads; sizes that would work: {sizes_that_split(max(counts), min(counts))}"
        for parent, counts in heads.items()
        if not heads_split(world_size, max(counts), min(counts))
    }


def sharing_faults(
    named: Mapping[str, Any], styles: Mapping[str, Any], world_size: int, fully_sharded: bool
) -> list[str]:
    """Faults: a tied parameter with two different placements; an empty shard, which FSDP2 cannot reduce."""
    faults: list[str] = []
    seen: dict[int, tuple[str, Way]] = {}
    for name, style in styles.items():
        for key, way in style.ways(named[name], style.ranks(world_size)).items():
            full_name, parameter = f"{name}.{key}", getattr(named[name], key)
            first, other = seen.setdefault(id(parameter), (full_name, way))
            if other != way:
                one, two = ("x".join(map(repr, each.placements)) for each in (other, way))
                faults.append(f"{first} and {full_name} are one parameter, but planned as {one} and {two}")
            if fully_sharded and any(0 in way.sizes(dim, n) for dim, n in enumerate(parameter.shape)):
                faults.append(
                    f"{full_name} of shape {tuple(parameter.shape)} leaves a rank with an empty shard, which FSDP2 "
                    f"cannot reduce; use fewer ranks for tensor parallelism"
                )
    return faults


def apply_steps(steps: list[Step], mesh: Mesh) -> None:
    """Split every module, in place."""
    for step in steps:
        step.style._apply(step.module, mesh)
        if isinstance(getattr(step.module, "parallel", None), Member):
            step.module.parallel = replace(step.module.parallel, layer=kind_of(step.name))


def add_replicas(model: nn.Module, steps: list[Step], members: str) -> None:
    """Give each block its Replicas, the replicated parameters with partial gradients."""
    partial = [step.name for step in steps if _has_partial_grads(step)]
    for outer, block in model.named_modules():
        if isinstance(block, TransformerBlock):
            start = f"{outer}." if outer else ""
            inside = [name.removeprefix(start) for name in partial if name.startswith(start) and name != outer]
            block.replicas = Replicas(members, tuple(inside)) if inside else None


def _has_partial_grads(step: Step) -> bool:
    if isinstance(step.style, Replicated):
        return step.style.partial
    with_bias = isinstance(step.style, FusedRowwise) and getattr(step.module, "bias", None) is not None
    return with_bias and step.module.parallel.sequence_parallel


def has_more_dimensions(mesh: Mesh) -> bool:
    """Whether the mesh is one dimension of a larger mesh, so that FSDP2 may shard the rest."""
    return isinstance(mesh, DeviceMesh) and mesh._get_root_mesh().size() > mesh.size()


def refuse(model: nn.Module, world_size: int, faults: list[str]) -> None:
    """Raise one ValueError that lists all faults, if there are any."""
    if faults:
        lines = "".join(f"\n  - {fault}" for fault in dict.fromkeys(faults))
        raise ValueError(f"{type(model).__name__} cannot be parallelized over {world_size} ranks:{lines}")


def parent_of(name: str) -> str:
    return name.rpartition(".")[0]


def generic(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name) or "the model"
