"""Builds the model of a configuration, on one device or parallelized over ranks, with the same initial weights.

    meta model --parallelize(tp)--> DTensors --cut(pp)--> stages --shard(dp)--> FSDP2 --to_empty--> memory --init_(seed)

Each rank creates only its own part. Each parameter is drawn from (seed, name), so ranks need not communicate.

A model of transformers comes from a folder, a config.json or a model type:

    on meta --adapters--> --parallelize(tp)--> --prune_(pp)--> --shard(dp)--> memory --weights--> trained

Weights are filled last, when this rank's shards are known: each rank reads only its shards from the files of a folder.
Random weights are drawn on the CPU by the model's own code, layer by layer, each from (seed, name). So a rank never
holds more than its shards and one layer, and the initial weights are the same on every mesh.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fusedtp.comm import communicator
from fusedtp.nn import CausalLM, ModelConfig, MoEConfig, init_
from fusedtp.nn.heads import heads_split
from fusedtp.parallel import ExpertSplit, parallelize
from fusedtp.parallel.placement import Way, share, way_of
from fusedtp.parallel.plan import ways_of
from fusedtp.parallel.pretrained import Checkpoint, Files, build_on_meta, on_meta, region, untie
from fusedtp.train.config import ModelOptions, TrainConfig, sharing_faults, stages_faults
from fusedtp.train.foreign import ALIBI, Anatomy, Model, NotCut, TransformersModel
from fusedtp.train.mesh import World
from fusedtp.train.shard import DTYPES, dtypes_of, empty_shards, prepare_, shard
from fusedtp.train.stages import Pipeline, costs, cut, prune_, stage_costs, stage_count, stages_of, two_passes

# -- the library's own model -------------------------------------------------------------------------------------------

DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def model_config(config: TrainConfig) -> ModelConfig:
    """The fusedtp.nn configuration of these options."""
    model = config.model
    return ModelConfig(
        vocab_size=config.data.vocabulary.vocab_size,
        hidden_size=model.width,
        intermediate_size=model.mlp_width,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        qk_norm=model.qk_norm,
        tie_word_embeddings=model.tie_embeddings,
        residual_dropout=model.dropout,
        moe=moe_config(config),
        embedding_dropout=model.dropout,
        dtype=DTYPE_NAMES[config.run.dtype],  # type: ignore[arg-type]
        param_dtype="float32",
    )


def moe_config(config: TrainConfig) -> MoEConfig | None:
    """The MoE configuration of these options; None without experts."""
    model = config.model
    if not model.experts:
        return None
    return MoEConfig(
        num_experts=model.experts,
        top_k=model.top_k,
        hidden=model.expert_width,
        shared=model.shared_width,
        first_dense=model.dense_layers,
        capacity=model.capacity,
        recv_capacity=model.recv_capacity,
        on_overflow="error" if model.recv_capacity is None else "rounds",
        bias=model.balance_bias > 0,
        balance_loss=model.balance,
    )


def shard_faults(config: TrainConfig, dp: int, tp: int) -> list[str]:
    """Errors if some of dp x tp ranks would hold no row of a parameter, from the shapes of the model on meta.

    A model that cannot be built or split over tp ranks is not checked here; other checks report it.
    """
    model = config.model
    if config.foreign.model is not None:
        return []  # foreign_faults checks this
    if dp < 2 or model.faults() or config.data.faults() or not heads_split(tp, model.heads, model.kv_heads):
        return []
    if dp % (copies := max(1, config.parallel.copies(dp))) or (model.experts and sharing_faults(config, dp, tp)):
        return []
    on_meta = CausalLM(model_config(config), device="meta")
    ep = config.parallel.ep or tp
    split = ExpertSplit(tensor_parallel=config.parallel.expert_tp, num_ranks=ep)
    ways = ways_of(on_meta, tp, split) if max(tp, ep) > 1 else {}
    return empty_shards(on_meta, ways, dp // copies * tp)


def num_parameters(config: TrainConfig) -> int:
    """Number of parameters of the whole model."""
    if config.foreign.model is not None:
        return foreign_sizes(config)[2]
    return CausalLM(model_config(config), device="meta").num_parameters()


def build(config: TrainConfig, world: World, weights: bool = True) -> Model:
    """The initialised model; with several ranks, this rank's part of it."""
    return build_stages(config, world, weights)[0]


def build_stages(config: TrainConfig, world: World, weights: bool = True) -> tuple[Model, Pipeline | None]:
    """The initialised model, and its pipeline if the world has one. Collective.

    weights   False: skip the weights of a --model, since a checkpoint is loaded next
    """
    if config.foreign.model is not None:
        return build_foreign(config, world, weights)
    model = CausalLM(model_config(config), device="meta")
    if world.tp_mesh is not None:
        parallelize(
            model,
            world.tp_mesh,
            engine=config.parallel.engine,
            sequence_parallel=config.parallel.sequence_parallel,
            experts=ExpertSplit(world.ep_mesh, config.parallel.expert_tp),
        )
    pipeline = cut_and_shard(model, config, world, partial(costs, model.config))
    if world.dp_mesh is not None:
        everyone = world.token_ranks(config.parallel.sequence_parallel)
        assert everyone is not None
        model.balance_group, model.data_parallel = communicator(everyone).name, world.dp
    init_(model.to_empty(device=world.device), config.run.seed)
    return model, pipeline


def cut_and_shard(
    model: Model, config: TrainConfig, world: World, costs_of: Callable[[int], tuple[list[float], float]]
) -> Pipeline | None:
    """Cut a model on meta into stages of similar cost, keep only this rank's, prepare its blocks, and shard it.

    costs_of   sequence length -> (costs of every layer, cost of the head)
    """
    parallel, pipeline = config.parallel, None
    if (mesh := world.pp_mesh) is not None:
        layers, head = costs_of(config.data.length)
        parts = cut(layers, head, stage_count(parallel.schedule, mesh.size(), parallel.virtual_stages))
        here = stages_of(parallel.schedule, mesh.size(), mesh.get_local_rank(), parallel.virtual_stages)
        prune_(model, parts, here)
        pipeline = Pipeline(model, mesh, parallel.schedule, parts, here, stage_costs(layers, head, parts))
    prepare_(model, config.blocks, two_passes(parallel.schedule, world.pp))
    if world.shard_mesh is not None:
        stages = list(pipeline.stages.values()) if pipeline else ()
        shard(model, world.shard_mesh, world.outer_mesh, stages, parallel.kind, dtypes_of(parallel))
    return pipeline


# The configuration of --model llama. Other model types get the small configuration that plans are tested with.
LLAMA = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
Values = Iterator[tuple[str, Callable[[list[list[range]]], Tensor]]]  # name -> a region of the whole tensor


# -- of transformers: the configuration --------------------------------------------------------------------------------


def config_of(config: TrainConfig) -> Any:
    """The configuration of a run's transformers model. Raises ValueError, OSError if --model cannot be trained."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    from fusedtp.parallel.twin import NoTwin, small_config

    name = str(config.foreign.model)
    if Path(name).exists():
        if Path(name).is_dir() and not Path(name, "config.json").exists():
            raise ValueError(f"{name} has no config.json, so it is not the folder of a transformers model")
        try:
            found = AutoConfig.from_pretrained(name, local_files_only=True)
        except (ValueError, KeyError, OSError) as error:
            raise ValueError(f"--model {name} has no configuration that transformers knows: {error}") from error
        if getattr(found, "quantization_config", None) is not None:
            raise ValueError(f"{name} is quantized; only weights in a floating-point dtype can be trained")
        if type(found) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ValueError(f"--model {name} has a {type(found).__name__}, which is not a causal language model")
        if Path(name).is_dir() and not any(Path(name).glob("*.safetensors*")):
            raise ValueError(
                f"{name} holds no weights (*.safetensors); --model {Path(name) / 'config.json'} starts from random ones"
            )
        return found
    if name not in CONFIG_MAPPING or CONFIG_MAPPING[name] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"--model {name} is neither a folder nor a causal language model type of transformers, such as llama"
        )
    tokenizer = config.data.vocabulary
    words: dict[str, Any] = {
        "vocab_size": tokenizer.vocab_size,
        "bos_token_id": tokenizer.end,
        "eos_token_id": tokenizer.end,
        "pad_token_id": None,
        ALIBI.get(name, "max_position_embeddings"): max(64, config.data.length),
    }
    if name == "llama":
        return CONFIG_MAPPING[name](**{**words, **LLAMA})
    try:
        return small_config(CONFIG_MAPPING[name](), max(config.parallel.tp or 1, 4), **words)
    except (NoTwin, TypeError) as why:
        raise ValueError(f"--model {name} has no small configuration; give a folder ({why})") from why


def has_weights(config: TrainConfig) -> bool:
    return Path(str(config.foreign.model)).is_dir()


def meta_model(config: TrainConfig) -> tuple[Any, Checkpoint | None]:
    """(the causal model on meta with computed buffers, the files of its weights or None)."""
    from transformers import AutoModelForCausalLM

    if not has_weights(config):
        return build_on_meta(AutoModelForCausalLM, config_of(config), torch.float32), None
    config_of(config)  # raises if the folder cannot be trained
    name, hub = str(config.foreign.model), {"local_files_only": True}
    files = Files(name, None, hub)
    model = on_meta(name, files, None, torch.float32, hub, {})
    checkpoint = Checkpoint(model, files)
    untie(model, checkpoint.differently_tied(0, 1))
    return model, checkpoint


def adapted(model: Any, rank: int) -> Any:
    """A model on meta with LoRA adapters on all linear layers, on meta too."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))


def foreign_sizes(config: TrainConfig) -> tuple[int, int, int]:
    """(number of layers, features of the widest matrix, number of parameters)."""
    from transformers import AutoModelForCausalLM

    model = build_on_meta(AutoModelForCausalLM, config_of(config), torch.float32)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    text = model.config.get_text_config()
    widest = max(min(p.shape[-2:]) for p in matrices)
    return text.num_hidden_layers, widest, sum(p.numel() for p in model.parameters())


# -- of transformers: the model ----------------------------------------------------------------------------------------


def build_foreign(config: TrainConfig, world: World, weights: bool = True) -> tuple[TransformersModel, Pipeline | None]:
    """This rank's part of the model, and its pipeline if the world has one. Collective.

    weights   False: leave the memory uninitialised, since a checkpoint is loaded next
    """
    hf, checkpoint = meta_model(config)
    names = {id(module): name for name, module in hf.named_modules()}  # adapters change them
    shapes: dict[str, torch.Size] = {}
    if config.foreign.lora:
        hf = adapted(hf, config.foreign.lora)
        names = {id(module): name for name, module in hf.named_modules()} | names
        shapes = {name: p.shape for name, p in hf.named_parameters() if ".lora_" in name}
    parallel = config.parallel
    split_tokens = parallel.sequence_parallel and not config.blocks.compile  # compiled layers take whole sequences
    if world.tp_mesh is not None:
        parallelize(hf, world.tp_mesh, engine=parallel.engine, sequence_parallel=split_tokens)
    model = TransformersModel(hf, DTYPES[config.run.dtype], split_tokens)
    model.token_split = (world.rank % world.tp, world.tp)
    ways = {id(module): own_ways(module) for module in model.modules()}
    pipeline = cut_and_shard(model, config, world, model.costs)
    to_memory(model, world.device)
    if weights:
        values = drawn(config) if checkpoint is None else read(checkpoint)
        fill_(model, names, ways, chain(values, drawn_adapters(shapes, config.run.seed)))
    return model, pipeline


def own_ways(module: nn.Module) -> dict[str, Way]:
    """How a module's own parameters are split over tensor-parallel ranks, by name."""
    return {name: way_of(p) for name, p in module.named_parameters(recurse=False) if isinstance(p, DTensor)}


def to_memory(model: nn.Module, device: torch.device) -> None:
    """nn.Module.to_empty for tensors on meta; computed buffers are moved with their values."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((module, name))
    model._apply(lambda x: torch.empty_like(x, device=device) if x.is_meta else x.to(device))
    for (first, name), *others in owners.values():  # tie shared parameters again
        for module, other in others:
            module._parameters[other] = first._parameters[name]


# -- of transformers: weights ------------------------------------------------------------------------------------------


@torch.no_grad()
def fill_(model: nn.Module, names: Mapping[int, str], ways: Mapping[int, Mapping[str, Way]], values: Values) -> None:
    """Fill parameters and buffers with this rank's part of their values.

    names, ways   by id of a module: its name in `values`, and how its parameters are split over tensor-parallel ranks
    """
    wanted: dict[str, tuple[Tensor, Way | None]] = {}
    for module in model.modules():
        if id(module) in names:
            tensors = {**module._parameters, **module._buffers}
            for last, tensor in tensors.items():
                if tensor is not None:
                    name = f"{names[id(module)]}.{last}".removeprefix(".")
                    wanted[name] = (tensor, ways[id(module)].get(last))
    done: set[int] = set()
    for name, part in values:
        if name not in wanted:
            continue  # belongs to another stage
        tensor, way = wanted[name]
        if id(tensor) not in done:
            done.add(id(tensor))
            own = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            own.copy_(part(held(tensor, way)))
    if missing := sorted(
        name for name, (tensor, _) in wanted.items() if isinstance(tensor, nn.Parameter) and id(tensor) not in done
    ):
        raise ValueError(f"no values for {', '.join(missing[:3])}")


def held(tensor: Tensor, way: Way | None) -> list[list[range]]:
    """Indices that this rank holds in every dimension, after the tensor-parallel split and FSDP2's sharding of it."""
    if not isinstance(tensor, DTensor):
        return [[range(size)] for size in tensor.shape]
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    inner = 0 if way is None else len(way.shape)
    outer = mesh.ndim - inner
    found = [[range(size)] for size in tensor.shape]
    if way is not None:
        found = way.ranges(tensor.shape, coordinate[outer:])
    for dim, placement in enumerate(tensor.placements[:outer]):
        if hasattr(placement, "dim"):
            found[placement.dim] = share(found[placement.dim], mesh.size(dim), coordinate[dim])
    return found


def read(checkpoint: Checkpoint) -> Values:
    """The tensors of the files, converted to the model's names."""
    for conversion in checkpoint.conversions:
        made = conversion.tensors(checkpoint.model)
        for name in conversion.targets:
            yield name, partial(region, made[name])


def drawn(config: TrainConfig) -> Values:
    """Random weights drawn by the model's own code, one layer after the other."""
    model, _ = meta_model(config)
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    named = dict(model.named_modules())
    layers = [name for name, module in named.items() if type(module).__name__ in kinds]
    layers = [name for name in layers if not any(name.startswith(f"{other}.") for other in layers)]
    inside = {name for layer in layers for name in named if name == layer or name.startswith(f"{layer}.")}
    for name, module in named.items():
        if name in layers or name not in inside:
            yield from drawn_of(model, name, module, name in layers, config.run.seed)


def drawn_of(model: Any, name: str, module: nn.Module, recurse: bool, seed: int) -> Values:
    """Random weights of a module, with those of its children if `recurse`."""
    own = {**dict(module.named_parameters(recurse=recurse)), **dict(module.named_buffers(recurse=recurse))}
    if not own:
        return
    module.to_empty(device="cpu", recurse=recurse)
    with seeded(seed, name):
        inner = list(module.named_modules()) if recurse else [("", module)]
        for _, each in reversed(inner):  # children first
            model._init_weights(each)
    for last, values in module.named_parameters(recurse=recurse):
        yield f"{name}.{last}".removeprefix("."), partial(region, values)
    module.to_empty(device="meta", recurse=recurse)


def drawn_adapters(shapes: Mapping[str, torch.Size], seed: int) -> Values:
    """LoRA's A and B as PEFT initialises them: A uniform, B zero, so that adapters do not change the initial model."""
    for name, shape in shapes.items():
        values = torch.zeros(shape)
        if ".lora_A." in name:
            with seeded(seed, name):
                nn.init.kaiming_uniform_(values, a=math.sqrt(5))
        yield name, partial(region, values)


@contextmanager
def seeded(seed: int, name: str) -> Iterator[None]:
    """In this context, random numbers depend only on (seed, name); the generator is restored on exit."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        yield


# -- of transformers: faults -------------------------------------------------------------------------------------------


def foreign_faults(config: TrainConfig, dp: int, tp: int) -> list[str]:
    """Errors of a run with a model of transformers that can be found without reading weights."""
    try:
        found = option_faults(config)
        model, _ = meta_model(config)
        if config.foreign.lora > 0:
            model = adapted(model, config.foreign.lora)
    except ModuleNotFoundError as error:
        return [f"{error}: pip install 'fusedtp[hf]'" + (" peft" if config.foreign.lora else "")]
    except (ValueError, OSError) as error:
        return [*found, " ".join(str(error).split())]
    adapter = TransformersModel(model)
    vocabulary = adapter.config.vocab_size
    tokenizer = config.data.vocabulary
    if vocabulary < tokenizer.vocab_size and config.data.vocab_size is not None:
        found.append(f"{config.foreign.model} has {vocabulary} tokens, fewer than --vocab-size {tokenizer.vocab_size}")
    elif vocabulary < tokenizer.vocab_size:
        what = "has no tokenizer" if config.data.tokenizer is None else f"does not fit {config.data.tokenizer}"
        kind = "bytes" if config.data.tokenizer is None else f"the tokenizer's {tokenizer.vocab_size}"
        found.append(f"{config.foreign.model} {what}: its vocabulary of {vocabulary} is too small for {kind}")
    found += length_faults(config, adapter)
    found += tp_faults(config, model, dp, tp)
    cuttable = True
    if config.parallel.pp > 1:
        try:
            Anatomy(adapter.causal)
        except NotCut as why:
            cuttable = False
            found.append(f"--pp {config.parallel.pp}: {why}")
        layers = adapter.config.num_hidden_layers
        found += stages_faults(config, layers)
    return found + (trial_faults(config, adapter, cuttable) if not found else [])


def option_faults(config: TrainConfig) -> list[str]:
    """Errors of options that apply only to the library's own model, but are given with --model."""
    import dataclasses

    given = [
        f"--{field.name.replace('_', '-')}"
        for field in dataclasses.fields(ModelOptions)
        if getattr(config.model, field.name) != field.default
    ]
    found = []
    if given:
        found.append(f"{', '.join(given)} with --model {config.foreign.model}: the model's configuration sets these")
    if (config.parallel.ep or 1) > 1 or config.parallel.expert_tp > 1:
        found.append("--ep and --expert-tp with --model: the model's plan determines how experts are split")
    return found


def length_faults(config: TrainConfig, model: TransformersModel) -> list[str]:
    """An error if --length exceeds the model's table of positions, if it has one."""
    length, most = config.data.length, model.positions
    if most is None or length <= most:
        return []
    return [f"--length {length}: {config.foreign.model} has positions for {most} tokens"]


def tp_faults(config: TrainConfig, model: Any, dp: int, tp: int) -> list[str]:
    """Errors if the model cannot be split over tp ranks, or if a rank would hold no row of a parameter."""
    from fusedtp.comm import VirtualWorld
    from fusedtp.parallel.foreign_plan import foreign_ways
    from fusedtp.parallel.plan import plan_of

    ways: dict[str, Way] = {}
    plan: Any = plan_of(model) if tp > 1 else None
    if plan:
        try:
            (ways, *_) = VirtualWorld(tp).run(lambda group: foreign_ways(model, group, plan))
        except ValueError as error:
            return [" ".join(str(error).split())]
    shards = dp // max(1, config.parallel.copies(dp))
    return empty_shards(model, ways, shards * tp) if shards > 1 else []


def trial_faults(config: TrainConfig, model: TransformersModel, cut: bool) -> list[str]:
    """Errors found on a small copy: another loss, attention across documents, stages that change the result."""
    from fusedtp.parallel.twin import NoTwin, twin_of

    documents, stages = config.data.documents == "separate", config.parallel.pp > 1 and cut
    try:
        with torch.no_grad():
            return [*trial(TransformersModel(twin_of(model.causal, 2)), documents, stages)]
    except (NoTwin, RuntimeError, TypeError) as why:  # the code does not work with a small copy's sizes
        asked = ["--documents separate"] * documents + ["--pp"] * stages
        return [f"{' and '.join(asked)} cannot be tested on a small copy of the model: {why}"] if asked else []


def trial(twin: TransformersModel, documents: bool, stages: bool) -> Iterator[str]:
    """The errors of a small model in one process; see trial_faults."""
    name, length = type(twin.causal).__name__, 12
    ids = torch.arange(2 * length).view(2, length) % 7 + 3
    labels, count = ids.roll(-1, 1), 2.0 * length
    losses = []

    def loss(**more: Any) -> float:
        return twin(ids, labels, num_labels=count, **more).loss.item()

    whole = loss()
    logits = twin.causal(input_ids=ids, use_cache=False).logits.float()
    direct = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()
    if not math.isclose(whole, direct, rel_tol=1e-4):
        yield f"the loss of {name} is not the cross entropy of the next tokens"
    if documents:
        half = length // 2
        positions = torch.arange(length).expand(2, -1) % half
        packed = loss(positions=positions)
        for part in (slice(0, half), slice(half, length)):
            losses.append(twin(ids[:, part], labels[:, part], num_labels=count).loss.item())
        if not math.isclose(packed, sum(losses), rel_tol=1e-4):
            yield f"--documents separate: in {name}, documents of a row attend to each other"
    if stages:
        depth = twin.config.num_hidden_layers
        first, last = twin.stage([0], True, False), twin.stage(range(1, depth), False, True)
        options: dict[str, Any] = {"labels": labels, "dropout": torch.zeros(1), "num_labels": count}
        if not math.isclose(last(first(ids, **options), **options).item(), whole, rel_tol=1e-5):
            yield f"--pp: {name} computes another loss when it is cut into stages"
