"""Convert transformers' Llama, Mistral, Qwen2, Qwen3, Mixtral and Qwen3-MoE to fusedtp.nn.CausalLM, and back.

    from_transformers   configuration -> ModelConfig -> CausalLM on meta -> parallelize -> each parameter: read, copy
    to_transformers     ModelConfig -> configuration -> each parameter: gather -> first rank: save_pretrained

    transformers                            CausalLM
    model.<name>                            <name>
    model.layers.i.mlp.gate.weight          layers.i.mlp.router.weight
    model.layers.i.mlp.experts.gate_up_proj [E, 2F, H]
                                            layers.i.mlp.experts.gate_proj, up_proj [E, F, H]
    lm_head.weight                          lm_head.weight

A configuration is translated field by field. Unknown fields are rejected, and so are values that CausalLM does not
support. Rotary frequencies are compared numerically. For the way back, the configuration to be written is translated
again and must give the model's own ModelConfig.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fusedtp.comm import communicator
from fusedtp.nn import CausalLM, ModelConfig, MoEConfig, RopeScaling
from fusedtp.nn.config import DTYPES
from fusedtp.nn.rope import inverse_frequencies

from .agree import check_same_weights
from .expert_parallel import ExpertSplit
from .parallelize import parallelize
from .placement import local, way_of
from .pretrained import (
    Checkpoint,
    Files,
    Lazy,
    build_on_meta,
    on_meta,
    read_generation_config,
    region,
)
from .saving import exchange, mesh_of, together

# Options of a CausalLM that a checkpoint cannot store; to_transformers warns about them.
UNWRITTEN = (
    "residual_dropout", "embedding_dropout", "balance_loss", "balance", "sequence_loss", "z_loss", "jitter", "sinkhorn",
    "comm_dtype",
)  # fmt: skip
# All options that from_transformers takes in addition to a checkpoint.
OPTIONS = (
    *UNWRITTEN, "attention_dropout", "initializer_range", "max_logits_bytes", "split_shared", "max_rows",
    "recv_capacity", "on_overflow",
)  # fmt: skip


def from_transformers(
    source: Any,
    mesh: DeviceMesh | None = None,
    *,
    dtype: torch.dtype | str = "auto",
    param_dtype: torch.dtype | str = "auto",
    device: torch.device | str | None = None,
    options: Mapping[str, Any] | None = None,
    ignore: Collection[str] = (),
    engine: str = "auto",
    sequence_parallel: bool = True,
    plan: Mapping[str, Any] | None = None,
    experts: ExpertSplit | None = None,
    variant: str | None = None,
    hub: Mapping[str, Any] | None = None,
    **config_changes: Any,
) -> CausalLM:
    """Load a transformers model into a CausalLM that computes the same, in evaluation mode.

        source            a folder with config.json and safetensors files, a name on the hub, or a model in memory:
                          LlamaForCausalLM, Mistral, Qwen2, Qwen3, Mixtral or Qwen3Moe
        mesh              a 1-D DeviceMesh: parallelize the model, each rank reads only its part; the call is collective
        dtype             dtype of activations; "auto": param_dtype
        param_dtype       dtype of parameters; "auto": the configuration's, or else the checkpoint's
        device            default: the mesh's, or that of a model in memory, or the CPU
        options           fields of ModelConfig and MoEConfig that checkpoints do not store: dropout, router losses,
                          the exchange of experts
        ignore            unknown fields of the configuration that you know have no effect
        engine, sequence_parallel, plan, experts   see fusedtp.parallelize
        variant, hub      see fusedtp.from_pretrained
        config_changes    fields of the transformers configuration

    CausalLM expects shifted labels, transformers does not; CausalLM's router losses apply in training only.
    Raises one ValueError that lists everything in the configuration that CausalLM does not compute, or all tensors that
    are missing, unexpected or have another shape; and what fusedtp.parallelize raises. With a mesh, on every rank.
    """
    if mesh is not None and (not isinstance(mesh, DeviceMesh) or mesh.ndim != 1):
        raise ValueError(f"from_transformers needs a 1-D DeviceMesh, not {mesh!r}")
    in_memory = isinstance(source, nn.Module)
    with _together(mesh):
        opened = _InMemory(source, config_changes) if in_memory else _OnDisk(source, variant, hub, config_changes)
        different = opened.differently_tied(mesh)
    if mesh is not None:
        different = any(exchange(mesh, different))
    with _together(mesh):
        theirs = opened.model
        opened.config.tie_word_embeddings = opened.config.tie_word_embeddings and not different
        kept = _dtype(param_dtype, opened.dtype)
        more = {"dtype": _dtype(dtype, kept), "param_dtype": kept}
        model = CausalLM(_translated(theirs, opened.config, ignore, options or {}, **more), device="meta")
        _check_shapes(theirs, {name: x.shape for name, x in opened.tensors.items()}, model)
    if mesh is not None:
        if in_memory:
            check_same_weights(source, communicator(mesh))
        parallelize(model, mesh, engine=engine, sequence_parallel=sequence_parallel, plan=plan, experts=experts)
    with _together(mesh):
        if model.config.tie_word_embeddings and HEAD in opened.tensors:  # a file may store either of the tied ones
            opened.tensors.setdefault(EMBEDDING, opened.tensors[HEAD])
        model.to_empty(device=device or (opened.device if mesh is None else mesh.device_type))
        _fill(model, opened.tensors.__getitem__)
    model.pretrained = opened.config, getattr(theirs, "generation_config", None)
    return model.eval()


def to_transformers(
    model: CausalLM,
    folder: Any,
    *,
    max_shard_size: int | str = "50GB",
    variant: str | None = None,
    **config_changes: Any,
) -> None:
    """Write a CausalLM as a transformers checkpoint that AutoModelForCausalLM.from_pretrained loads.

        model            whole, or parallel: then every rank must call this, and the first one writes
        folder           gets config.json, generation_config.json and safetensors files
        max_shard_size, variant   as in transformers' save_pretrained
        config_changes   fields of the configuration, such as eos_token_id or max_position_embeddings

    The configuration is the one that the model was loaded with, or else of the first of Llama, Qwen2, Mistral, Qwen3,
    Mixtral and Qwen3-MoE that computes what the model does. Ranks gather one parameter at a time, and only the writing
    rank keeps it, on its CPU. Warns about options that transformers cannot store: dropout between layers, router
    losses, fp8. If none of these computes the model, raises ValueError on every rank that lists the differences.
    """
    parallel = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    mesh = mesh_of(model) if parallel else None
    with _together(mesh):
        theirs = _theirs(model, config_changes)
        shapes = {name: x.shape for name, x in theirs.state_dict().items()}
        _check_shapes(theirs, shapes, model)
        on_meta_still = [name for name, parameter in model.named_parameters() if parameter.is_meta]
        if on_meta_still:
            raise ValueError(f"still on the meta device: {', '.join(on_meta_still)}; load their values first")
    writes = mesh is None or not any(mesh._get_root_mesh().get_coordinate() or ())
    full = _gathered(model, writes)
    with _together(mesh):
        if writes:
            theirs.should_save_on_this_rank = bool  # transformers asks for rank 0 of all processes
            theirs.save_pretrained(folder, state_dict=full, max_shard_size=max_shard_size, variant=variant)


def _together(mesh: DeviceMesh | None) -> AbstractContextManager[None]:
    return nullcontext() if mesh is None else together(mesh)


# --- where weights come from ------------------------------------------------------------------------------------------


class _OnDisk:
    """The files of a checkpoint.

    model     the transformers model, on meta
    tensors   transformers' name -> a lazy tensor; any region of it can be read
    """

    device = torch.device("cpu")

    def __init__(self, name: Any, variant: str | None, hub: Mapping[str, Any] | None, changes: dict[str, Any]) -> None:
        where = dict(hub or {})
        files = Files(name, variant, where)
        self.model = on_meta(name, files, None, "auto", where, dict(changes))
        read_generation_config(self.model, name, where)
        self.config, self.dtype = self.model.config, next(self.model.parameters()).dtype
        _family(self.model)
        self.checkpoint = Checkpoint(self.model, files)
        self.tensors = {
            name: made
            for conversion in self.checkpoint.conversions
            for name, made in conversion.tensors(self.model).items()
        }

    def differently_tied(self, mesh: DeviceMesh | None) -> bool:
        """Whether the configuration ties the head but the files do not; with a mesh, each rank compares its rows."""
        rank, world_size = (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size())
        return bool(self.checkpoint.differently_tied(rank, world_size))


class _InMemory:
    """The same for a model in memory."""

    def __init__(self, model: Any, changes: dict[str, Any]) -> None:
        family = _family(model)
        self.model, self.config = model, deepcopy(model.config)
        unknown = [name for name in changes if not hasattr(self.config, name)]
        strange = [
            f"{name} is a {type(module).__name__}, which is not part of {family.model_class}"
            for name, module in model.named_modules()
            if not type(module).__module__.startswith(("torch.nn.", "transformers."))
        ]
        self.tensors: dict[str, Tensor] = model.state_dict(keep_vars=True)
        dtypes = {x.dtype for x in self.tensors.values()}
        faults = [f"the config has no {name}" for name in unknown] + strange
        faults += [f"{name} is a DTensor" for name, x in self.tensors.items() if isinstance(x, DTensor)]
        faults += [
            f"{name} is on the meta device; load its values first" for name, x in self.tensors.items() if x.is_meta
        ]
        if len(dtypes) > 1:
            faults.append(f"its parameters have several dtypes: {', '.join(sorted(map(str, dtypes)))}")
        self.tied = model.lm_head.weight is model.model.embed_tokens.weight
        if changes.get("tie_word_embeddings", self.tied) != self.tied:
            found = "tied" if self.tied else "not tied"
            faults.append(f"tie_word_embeddings is {changes['tie_word_embeddings']}, but the weights are {found}")
        _refuse(f"from_transformers cannot read this {type(model).__name__}", faults)
        for name, value in changes.items():
            setattr(self.config, name, value)
        self.config.tie_word_embeddings = self.tied
        self.dtype, self.device = model.lm_head.weight.dtype, model.lm_head.weight.device

    def differently_tied(self, mesh: DeviceMesh | None) -> bool:
        return False


@torch.no_grad()
def _fill(model: CausalLM, read: Callable[[str], Tensor | Lazy]) -> None:
    """Copy each parameter, or this rank's part of it, from the transformers tensor that contains it."""
    for name, parameter in model.named_parameters():
        theirs, half = their_name(name)
        full = read(theirs)
        if half is not None:  # [E, 2F, H]
            width = full.shape[1] // 2
            full = full.narrow(1, half * width, width)
        ranges = [[range(size)] for size in parameter.shape]
        if isinstance(parameter, DTensor):
            coordinate = parameter.device_mesh.get_coordinate()
            assert coordinate is not None
            ranges = way_of(parameter).ranges(parameter.shape, coordinate)
        local(parameter).copy_(region(full, ranges))


def _gathered(model: CausalLM, keep: bool) -> dict[str, Tensor]:
    """transformers' name -> full tensor on the CPU, if keep; otherwise empty. Collective."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        full = parameter.detach()
        full = full.full_tensor() if isinstance(full, DTensor) else full
        if keep:
            theirs, half = their_name(name)
            full = full.cpu()
            found[theirs] = torch.cat([found[theirs], full], 1) if half == 1 else full
        del full
    if keep and model.config.tie_word_embeddings:
        found[HEAD] = found[EMBEDDING]
    return found


# --- names ------------------------------------------------------------------------------------------------------------

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
RENAMED: dict[str, tuple[str, int | None]] = {
    "mlp.router.weight": ("mlp.gate.weight", None),
    "mlp.experts.gate_proj": ("mlp.experts.gate_up_proj", 0),
    "mlp.experts.up_proj": ("mlp.experts.gate_up_proj", 1),
}


def their_name(name: str) -> tuple[str, int | None]:
    """Name of a CausalLM parameter -> its name in transformers, and which half of that tensor's dim 1 it is, if any."""
    if name.startswith("lm_head."):
        return name, None
    for own, (theirs, half) in RENAMED.items():
        if name.endswith(own):
            return f"model.{name.removesuffix(own)}{theirs}", half
    return f"model.{name}", None


def _check_shapes(theirs: Any, got: Mapping[str, torch.Size], model: CausalLM) -> None:
    """Raises one ValueError that lists missing and unexpected tensors and those with another shape than CausalLM's."""
    wanted: dict[str, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        their, half = their_name(name)
        shape = tuple(parameter.shape)
        wanted[their] = shape if half is None else (shape[0], 2 * shape[1], *shape[2:])
    missing = wanted.keys() - got.keys()
    if model.config.tie_word_embeddings and len(missing & {HEAD, EMBEDDING}) == 1:
        missing -= {HEAD, EMBEDDING}  # one is enough
    faults = [f"{name} is missing" for name in missing]
    faults += [f"{name} is unexpected" for name in got.keys() - wanted.keys()]
    faults += [
        f"{name} has shape {tuple(got[name])}, but {wanted[name]} in CausalLM"
        for name in wanted.keys() & got.keys()
        if tuple(got[name]) != wanted[name]
    ]
    _refuse(f"weights of {type(theirs).__name__} and CausalLM differ", sorted(faults))


def _refuse(what: str, faults: Collection[str]) -> None:
    if faults:
        raise ValueError(f"{what}:" + "".join(f"\n  - {fault}" for fault in faults))


# --- configurations ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """A model class of transformers.

    reads       fields of its configuration that change what it computes, besides those of all families
    qk_norm     whether queries and keys are normalized
    qkv_bias    None: the field attention_bias decides, for the output projection too
    experts     whether it is an MoE
    """

    model_class: str
    reads: tuple[str, ...]
    qk_norm: bool = False
    qkv_bias: bool | None = False
    experts: bool = False


WINDOWS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
ROUTER = ("num_local_experts", "num_experts_per_tok", "output_router_logits", "router_aux_loss_coef")
FAMILIES = {
    "llama": Family("LlamaForCausalLM", ("attention_bias", "mlp_bias"), qkv_bias=None),
    "qwen2": Family("Qwen2ForCausalLM", WINDOWS, qkv_bias=True),
    "mistral": Family("MistralForCausalLM", ("sliding_window",)),
    "qwen3": Family("Qwen3ForCausalLM", ("attention_bias", *WINDOWS), qk_norm=True, qkv_bias=None),
    "mixtral": Family("MixtralForCausalLM", ("sliding_window", "router_jitter_noise", *ROUTER), experts=True),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        ("attention_bias", "sliding_window", "use_sliding_window", "max_window_layers", "moe_intermediate_size",
         "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers", *ROUTER),
        qk_norm=True, qkv_bias=None, experts=True,
    ),
}  # fmt: skip
SAME = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "hidden_act", "rms_norm_eps", "tie_word_embeddings", "initializer_range",
)  # fmt: skip
READ = (*SAME, "head_dim", "attention_dropout", "rope_parameters", "pad_token_id")
# Names, start and stop tokens of generation, which outputs to return: none of these changes a logit or a loss.
HARMLESS = (
    "architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "auto_map",
    "id2label", "label2id", "problem_type", "use_cache", "bos_token_id", "eos_token_id", "max_position_embeddings",
    "return_dict", "output_attentions", "output_hidden_states", "pretraining_tp",
)  # fmt: skip


def _family(model: Any) -> Family:
    """Raises ValueError for any other class, also for subclasses of a known one, since they may compute anything."""
    for family in FAMILIES.values():
        if type(model).__name__ == family.model_class and type(model).__module__.startswith("transformers."):
            return family
    known = ", ".join(family.model_class for family in FAMILIES.values())
    raise ValueError(f"CausalLM does not support {type(model).__name__}, only {known}")


def _translated(
    model: Any, config: Any, ignore: Collection[str], options: Mapping[str, Any], **more: Any
) -> ModelConfig:
    """The ModelConfig of a transformers model with that configuration.

    Raises one ValueError that lists everything that CausalLM does not compute.
    """
    family = _family(model)
    faults = [
        *_unknown(config, family, ignore),
        *(f"unknown option {name}" for name in options.keys() - {*OPTIONS}),
    ]
    own = {name: getattr(config, name) for name in SAME}
    own["head_dim"] = getattr(config, "head_dim", None)
    own["attention_dropout"] = config.attention_dropout or 0.0
    bias = config.attention_bias if family.qkv_bias is None else family.qkv_bias
    own |= {"qk_norm": family.qk_norm, "attention_bias": bias}
    own["attention_output_bias"] = bias and family.qkv_bias is None
    own["mlp_bias"] = "mlp_bias" in family.reads and config.mlp_bias
    own["sliding_window"] = _window(config, family, faults)
    own |= _rope(model, config, faults)
    if config.pad_token_id is not None:
        faults.append(
            f"pad_token_id is {config.pad_token_id}, and transformers does not train its embedding; pass "
            "pad_token_id=None if your data has no padding"
        )
    wanted = dict(options)
    moe = _experts(config, wanted, faults) if family.experts else None
    made = None
    try:
        made = ModelConfig(**{**own, **wanted, **more, "moe": moe})
    except (ValueError, TypeError) as error:
        faults.append(str(error))
    _refuse(f"CausalLM does not support this {type(model).__name__}", faults)
    assert made is not None
    return made


def _unknown(config: Any, family: Family, ignore: Collection[str]) -> list[str]:
    """Faults: fields that are not handled here and differ from their default or have none."""
    known = {*READ, *HARMLESS, *family.reads, *ignore}
    defaults = type(config)().to_dict()
    return [
        f"{name} is {value!r}, which CausalLM does not read; list it in ignore if it does not change the result"
        for name, value in config.to_dict().items()
        if name not in known and not (name in defaults and defaults[name] == value)
    ]


def _window(config: Any, family: Family, faults: list[str]) -> int | None:
    """The sliding window, which must be the same in all layers."""
    if "sliding_window" not in family.reads:
        return None
    window: int | None = config.sliding_window
    if "layer_types" not in family.reads:
        return window
    kinds = set(config.layer_types)
    if window is None or kinds <= {"full_attention"}:
        return None
    if kinds != {"sliding_attention"}:
        faults.append(
            f"layer_types has {', '.join(sorted(kinds))}; all layers must be full_attention or all sliding_attention"
        )
    return window


def _rope(model: Any, config: Any, faults: list[str]) -> dict[str, Any]:
    """rope_theta and rope_scaling; the resulting frequencies are compared numerically with those of transformers."""
    given = dict(config.rope_parameters)
    kind, theta = given.get("rope_type", "default"), float(given["rope_theta"])
    if kind not in ("default", "linear", "llama3", "yarn"):
        faults.append(f"rope_type is {kind!r}, must be default, linear, llama3 or yarn")
        return {}
    rotary = type(model.model.rotary_emb)(config=config)
    names = {f.name for f in fields(RopeScaling)} - {"rope_type"}
    chosen = {name: given[name] for name in names if given.get(name) is not None}
    if kind == "yarn":
        chosen["attention_factor"] = float(rotary.attention_scaling)
    scaling = None if kind == "default" else RopeScaling(kind, **chosen)
    width = config.hidden_size // config.num_attention_heads
    want = rotary.inv_freq
    got, factor = inverse_frequencies(getattr(config, "head_dim", None) or width, theta, scaling)
    near = 8 * torch.finfo(torch.float32).eps  # both are in fp32, but the formulas differ in the order of operations
    same = got.shape == want.shape and torch.allclose(got, want, rtol=near, atol=0.0)
    if not same or not math.isclose(factor, rotary.attention_scaling, rel_tol=near):
        strange = sorted(given.keys() - names - {"rope_type", "type", "rope_theta"})
        faults.append(
            f"rope_parameters {given} give other frequencies than in CausalLM"
            + (f", which does not read {', '.join(strange)}" if strange else "")
        )
    return {"rope_theta": theta, "rope_scaling": scaling}


def _experts(config: Any, options: dict[str, Any], faults: list[str]) -> MoEConfig | None:
    """The MoEConfig; removes its fields from the options. None if all layers are dense."""
    layers, own = config.num_hidden_layers, {f.name for f in fields(MoEConfig)}
    dense: set[int] = set()
    if hasattr(config, "decoder_sparse_step"):
        every, named = config.decoder_sparse_step, config.mlp_only_layers or ()
        dense = {i for i in range(layers) if i in named or (i + 1) % every or config.num_experts <= 0}
    if dense != set(range(len(dense))):
        faults.append(
            f"layers {sorted(dense)} are dense, not only the first ones (mlp_only_layers, decoder_sparse_step)"
        )
    chosen = {name: options.pop(name) for name in list(options) if name in own}
    if len(dense) == layers:
        return None
    if getattr(config, "router_jitter_noise", 0.0):
        faults.append(
            f"router_jitter_noise is {config.router_jitter_noise}, and transformers also applies it to the input of "
            "experts; pass router_jitter_noise=0.0, and options={'jitter': ...} for the router alone"
        )
    balance = 0.0
    if config.output_router_logits:
        balance = config.router_aux_loss_coef * config.num_experts_per_tok
        if layers - len(dense) > 1 and balance:
            faults.append(
                "output_router_logits is True: transformers computes one balance loss over all layers, CausalLM one "
                "per layer; pass output_router_logits=False and options={'balance_loss': ...}"
            )
    try:
        return MoEConfig(
            **{
                "num_experts": config.num_experts,
                "top_k": config.num_experts_per_tok,
                "hidden": getattr(config, "moe_intermediate_size", config.intermediate_size),
                "normalize": getattr(config, "norm_topk_prob", True),
                "first_dense": len(dense),
                "balance_loss": balance,
                **chosen,
            }
        )
    except TypeError as error:
        faults.append(str(error))
        return None


# --- the way back -----------------------------------------------------------------------------------------------------


def _theirs(model: CausalLM, changes: dict[str, Any]) -> Any:
    """The transformers model for a CausalLM, on meta. Raises one ValueError that lists what it does not compute."""
    from transformers import AutoModelForCausalLM

    given, generation = model.pretrained if model.pretrained is not None else (_written(model.config), None)
    config = deepcopy(given)
    unknown = [name for name in changes if not hasattr(config, name)]
    _refuse(f"{type(config).__name__} has no such field", unknown)
    same = {
        "attention_dropout": model.config.attention_dropout,
        "initializer_range": model.config.initializer_range,
    }
    for name, value in {**same, **changes}.items():
        setattr(config, name, value)
    theirs = build_on_meta(AutoModelForCausalLM, config, model.config.parameter_dtype)
    if generation is not None:
        theirs.generation_config = deepcopy(generation)
    checked = deepcopy(config)
    checked.pad_token_id = None  # changes no logit
    read = _translated(theirs, checked, tuple(checked.to_dict()), {})
    found, wanted = _flat(read), _flat(model.config)
    different = {name for name in wanted if found.get(name) != wanted[name]} - {*OPTIONS} | {
        name for name in UNWRITTEN if found.get(name, 0) != wanted.get(name, 0)
    }
    _refuse(
        f"{type(theirs).__name__} cannot represent this CausalLM",
        [f"{name} is {wanted[name]!r}, but {found.get(name)!r} there" for name in sorted(different - {*UNWRITTEN})],
    )
    lost = sorted(different & {*UNWRITTEN})
    if lost:
        named = ", ".join(f"{name}={wanted[name]!r}" for name in lost)
        warnings.warn(f"not saved, because transformers has no such option: {named}", stacklevel=3)
    return theirs


def _flat(config: ModelConfig) -> dict[str, Any]:
    """Fields of a ModelConfig and its MoEConfig by name, normalized: equal for configs that compute the same."""
    found = {f.name: getattr(config, f.name) for f in fields(config)}
    moe, scaling = found.pop("moe"), config.rope_scaling
    for name in ("dtype", "param_dtype"):
        del found[name]
    if scaling is not None and scaling.rope_type == "yarn" and scaling.attention_factor is None:
        found["rope_scaling"] = replace(scaling, attention_factor=0.1 * math.log(scaling.factor) + 1.0)
    if moe is None:
        return found
    if moe.score == "softmax" and moe.score_after_topk:  # softmax over the top-k = full softmax, renormalized
        moe = replace(moe, score_after_topk=False, normalize=True)
    if moe.first_dense >= config.num_hidden_layers:
        return found
    inert = {
        "drop": moe.capacity is None,
        "group_score": moe.num_groups == 1,
        "balance": not moe.balance_loss,
    }
    own = {f.name: getattr(moe, f.name) for f in fields(moe)}
    found |= {name: value for name, value in own.items() if not inert.get(name)}
    if not moe.first_dense:
        del found["intermediate_size"]  # no layer uses it
    return found


def _written(config: ModelConfig) -> Any:
    """The configuration of the closest family."""
    from transformers import AutoConfig

    moe, changes = config.moe, {name: getattr(config, name) for name in SAME}
    if moe is not None and moe.first_dense < config.num_hidden_layers:
        name = "qwen3_moe" if config.qk_norm else "mixtral"
    elif config.qk_norm:
        name = "qwen3"
    elif config.attention_bias and not config.attention_output_bias:
        name = "qwen2"
    elif config.sliding_window is not None or config.hidden_size % config.num_attention_heads:
        name = "mistral"
    else:
        name = "llama"
    reads = FAMILIES[name].reads
    changes |= {"head_dim": config.head_dim, "rope_parameters": _rope_parameters(config)}
    changes |= {own: getattr(config, own) for own in ("attention_bias", "mlp_bias") if own in reads}
    if "sliding_window" in reads:
        changes["sliding_window"] = config.sliding_window
    if "use_sliding_window" in reads:
        changes |= {"use_sliding_window": config.sliding_window is not None, "max_window_layers": 0}
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        changes["max_position_embeddings"] = int(scaling.factor * scaling.original_max_position_embeddings)
    if "num_local_experts" in reads:
        assert moe is not None
        layers = config.num_hidden_layers - (moe.first_dense if "mlp_only_layers" in reads else 0)
        width = "moe_intermediate_size" if "moe_intermediate_size" in reads else "intermediate_size"
        changes |= {"num_experts": moe.num_experts, "num_experts_per_tok": moe.top_k, width: moe.hidden}
        changes["router_aux_loss_coef"] = moe.balance_loss / moe.top_k
        changes["output_router_logits"] = layers == 1 and moe.balance == "switch" and moe.balance_loss > 0
        if "norm_topk_prob" in reads:
            changes["norm_topk_prob"] = moe.normalize or moe.score_after_topk
            changes["mlp_only_layers"] = list(range(moe.first_dense))
    return AutoConfig.for_model(name, **changes)


def _rope_parameters(config: ModelConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    if scaling is None:
        return {"rope_type": "default", "rope_theta": config.rope_theta}
    names = {
        "linear": (),
        "llama3": ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
        "yarn": ("original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
    }[scaling.rope_type]
    own = {name: getattr(scaling, name) for name in ("rope_type", "factor", *names)}
    return {"rope_theta": config.rope_theta, **{name: x for name, x in own.items() if x is not None}}


def _dtype(wanted: torch.dtype | str, default: torch.dtype | str) -> str:
    """ModelConfig's name for the dtype; it rejects unknown ones."""
    dtype = default if wanted == "auto" else wanted
    return next((name for name, known in DTYPES.items() if dtype in (name, known)), str(dtype))
