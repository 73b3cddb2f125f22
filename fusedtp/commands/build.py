"""The model of a config: on one device, or parallel over the ranks of a world. The same start in both.

    meta model --parallelize(tp)--> DTensors --cut(pp)--> stages --shard(dp)--> FSDP2 --to_empty--> memory --init_(seed)

Each rank makes only its own part, and each parameter is drawn from (seed, name), so ranks need not agree.

A model of transformers comes from a folder, a config.json or a model type:

    on meta --adapters--> --parallelize(tp)--> --prune_(pp)--> --shard(dp)--> memory --weights--> trained

Weights come last, when it is known what this rank holds: of a folder's files each rank reads that and no more. Random
weights are drawn layer by layer on the CPU by the model's own code, each layer from (seed, name), so that a rank never
holds more than its part and one layer, and starts as it does on any other mesh.
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
from fusedtp.parallel.pretrained import Checkpoint, Files, Lazy, build_on_meta, on_meta, region, untie
from fusedtp.train.config import ModelOptions, TrainConfig, sharing_faults, stages_faults
from fusedtp.train.foreign import Anatomy, Model, NotCut, TransformersModel
from fusedtp.train.mesh import World
from fusedtp.train.shard import DTYPES, dtypes_of, empty_shards, prepare_, shard
from fusedtp.train.stages import Pipeline, costs, cut, prune_, stage_costs, stage_count, stages_of, two_passes

# -- the library's own model -------------------------------------------------------------------------------------------

DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def model_config(config: TrainConfig) -> ModelConfig:
    """The library's configuration for these options."""
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
    """The experts of these options; None where there are none."""
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
    """Whether some of dp x tp ranks would hold nothing of a parameter, by the shapes of the model on meta.

    A model that cannot be made, or not be split over tp ranks, has faults of its own and is not looked at.
    """
    model = config.model
    if config.foreign.model is not None:
        return []  # foreign_faults says so
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
    """Of the whole model."""
    if config.foreign.model is not None:
        return foreign_sizes(config)[2]
    return CausalLM(model_config(config), device="meta").num_parameters()


def build(config: TrainConfig, world: World, weights: bool = True) -> Model:
    """The initialised model, this rank's part of it where the world has several."""
    return build_stages(config, world, weights)[0]


def build_stages(config: TrainConfig, world: World, weights: bool = True) -> tuple[Model, Pipeline | None]:
    """The same, and its pipeline where the world has one. Collective.

    weights   False: a checkpoint is read next, so those of a --model are left out
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
    """Of a model on meta: cut it into stages of like cost, leave this rank's of it, prepare its blocks, shard it.

    costs_of   a sequence's length -> costs of every layer, and of the head
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


# The Llama that a run of the type alone trains; other types are as small as the copies that plans are proved on.
LLAMA = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
Values = Iterator[tuple[str, Callable[[list[list[range]]], Tensor]]]  # name -> a region of the whole tensor


# -- of transformers: what is asked for --------------------------------------------------------------------------------


def config_of(config: TrainConfig) -> Any:
    """The configuration of a run's transformers model. Raises ValueError, OSError where there is none to train."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    from fusedtp.parallel.twin import NoTwin, small_config

    name = str(config.foreign.model)
    if Path(name).exists():
        if Path(name).is_dir() and not Path(name, "config.json").exists():
            raise ValueError(f"{name} has no config.json, so it is no folder of a transformers model")
        try:
            found = AutoConfig.from_pretrained(name, local_files_only=True)
        except (ValueError, KeyError, OSError) as error:
            raise ValueError(f"--model {name} has no configuration that transformers knows: {error}") from error
        if getattr(found, "quantization_config", None) is not None:
            raise ValueError(f"{name} is quantized; only weights in a floating-point dtype can be trained")
        if type(found) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ValueError(f"--model {name} is a {type(found).__name__}, of no causal language model")
        if Path(name).is_dir() and not any(Path(name).glob("*.safetensors*")):
            raise ValueError(
                f"{name} holds no weights (*.safetensors); --model {Path(name) / 'config.json'} starts from random ones"
            )
        return found
    if name not in CONFIG_MAPPING or CONFIG_MAPPING[name] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"--model {name} is no folder and no causal language model of transformers, such as llama")
    tokenizer = config.data.vocabulary
    words: dict[str, Any] = {
        "vocab_size": tokenizer.vocab_size,
        "bos_token_id": tokenizer.end,
        "eos_token_id": tokenizer.end,
        "pad_token_id": None,
        "max_position_embeddings": max(64, config.data.length),
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
    """The causal model on meta, its buffers computed, and the files of its weights, where it has any."""
    from transformers import AutoModelForCausalLM

    if not has_weights(config):
        return build_on_meta(AutoModelForCausalLM, config_of(config), torch.float32), None
    config_of(config)  # says what is wrong
    name, hub = str(config.foreign.model), {"local_files_only": True}
    files = Files(name, None, hub)
    model = on_meta(name, files, None, torch.float32, hub, {})
    checkpoint = Checkpoint(model, files)
    untie(model, checkpoint.differently_tied(0, 1))
    return model, checkpoint


def adapted(model: Any, rank: int) -> Any:
    """A model on meta with LoRA on all linear layers, on meta too."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))


def foreign_sizes(config: TrainConfig) -> tuple[int, int, int]:
    """Layers, the widest matrix's features, and parameters."""
    from transformers import AutoModelForCausalLM

    model = build_on_meta(AutoModelForCausalLM, config_of(config), torch.float32)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    text = model.config.get_text_config()
    widest = max(min(p.shape[-2:]) for p in matrices)
    return text.num_hidden_layers, widest, sum(p.numel() for p in model.parameters())


# -- of transformers: the model ----------------------------------------------------------------------------------------


def build_foreign(config: TrainConfig, world: World, weights: bool = True) -> tuple[TransformersModel, Pipeline | None]:
    """The model, this rank's part of it, and its pipeline where the world has one. Collective.

    weights   False: memory is not filled, as a checkpoint will be read
    """
    hf, checkpoint = meta_model(config)
    names = {id(module): name for name, module in hf.named_modules()}  # adapters change them
    shapes: dict[str, torch.Size] = {}
    if config.foreign.lora:
        hf = adapted(hf, config.foreign.lora)
        names = {id(module): name for name, module in hf.named_modules()} | names
        shapes = {name: p.shape for name, p in hf.named_parameters() if ".lora_" in name}
    parallel = config.parallel
    split_tokens = parallel.sequence_parallel and not config.blocks.compile  # compiled layers take whole ones
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
    """How a module's own parameters lie over the tensor-parallel ranks."""
    return {name: way_of(p) for name, p in module.named_parameters(recurse=False) if isinstance(p, DTensor)}


def to_memory(model: nn.Module, device: torch.device) -> None:
    """nn.Module.to_empty of what is on meta; buffers, which are computed, move with their values."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((module, name))
    model._apply(lambda x: torch.empty_like(x, device=device) if x.is_meta else x.to(device))
    for (first, name), *others in owners.values():  # tied ones have become several
        for module, other in others:
            module._parameters[other] = first._parameters[name]


# -- of transformers: weights ------------------------------------------------------------------------------------------


@torch.no_grad()
def fill_(model: nn.Module, names: Mapping[int, str], ways: Mapping[int, Mapping[str, Way]], values: Values) -> None:
    """Give parameters and buffers their values: of each this rank's part.

    names, ways   of modules, by id: as the values call them, and how they lie over tensor-parallel ranks
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
            continue  # another stage's
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
    """Indices of every dimension that this rank holds: by its tensor-parallel way, and FSDP2's shards of that."""
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
    """What the files hold, converted to the model's names."""
    for conversion in checkpoint.conversions:
        of = (lambda lazy: lazy) if conversion.is_lazy else Lazy.full
        made = conversion.run(checkpoint.model, of)
        for name in conversion.targets:
            yield name, partial(region, made[name])


def drawn(config: TrainConfig) -> Values:
    """Random weights, as the model's own code draws them, of one layer after the other."""
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
    """Those of a module, with its children's or without."""
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
    """LoRA's halves as PEFT draws them: A uniform, B zero, so that a model starts as it is without."""
    for name, shape in shapes.items():
        values = torch.zeros(shape)
        if ".lora_A." in name:
            with seeded(seed, name):
                nn.init.kaiming_uniform_(values, a=math.sqrt(5))
        yield name, partial(region, values)


@contextmanager
def seeded(seed: int, name: str) -> Iterator[None]:
    """Draws in here depend on these two alone, and no draws elsewhere on them."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        yield


# -- of transformers: faults -------------------------------------------------------------------------------------------


def foreign_faults(config: TrainConfig, dp: int, tp: int) -> list[str]:
    """What is wrong with a model of transformers for this run, all that is known without reading weights."""
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
        what = "has no tokenizer" if config.data.tokenizer is None else f"has not that of {config.data.tokenizer}"
        kind = "bytes" if config.data.tokenizer is None else f"its {tokenizer.vocab_size}"
        found.append(f"{config.foreign.model} {what}, and its {vocabulary} tokens are too few for {kind}")
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
    """Options of the library's own model beside --model."""
    import dataclasses

    given = [
        f"--{field.name.replace('_', '-')}"
        for field in dataclasses.fields(ModelOptions)
        if getattr(config.model, field.name) != field.default
    ]
    found = []
    if given:
        found.append(f"{', '.join(given)} with --model {config.foreign.model}: the shape is that of its configuration")
    if (config.parallel.ep or 1) > 1 or config.parallel.expert_tp > 1:
        found.append("--ep and --expert-tp with --model: experts of other models lie as their plan says")
    return found


def length_faults(config: TrainConfig, model: TransformersModel) -> list[str]:
    """Whether windows are longer than the model's table of positions, where it has one: learned, or of sines."""
    most = getattr(model.config, "max_position_embeddings", None)
    if not isinstance(most, int):
        return []
    tables: list[tuple[int, int | None]] = []
    for module in model.causal.modules():
        if isinstance(module, nn.Embedding) and module.weight is not model.embedding:
            tables.append((module.num_embeddings, module.padding_idx))
        buffers = module.named_buffers(recurse=False)
        tables += [(len(buffer), None) for name, buffer in buffers if "pos" in name and buffer.dim() == 2]
    # OPT's table has two rows more; RoBERTa counts from the row after the padding's.
    room = [most - (0 if padding is None else padding + 1) for rows, padding in tables if rows in (most, most + 2)]
    if not room or config.data.length <= min(room):
        return []
    return [f"--length {config.data.length}: {config.foreign.model} has positions for {min(room)} tokens"]


def tp_faults(config: TrainConfig, model: Any, dp: int, tp: int) -> list[str]:
    """Whether so many ranks can share it, and each would hold a row of all."""
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
    """What a small copy shows: a loss of its own, documents that see each other, stages that compute something else."""
    from fusedtp.parallel.twin import NoTwin, twin_of

    documents, stages = config.data.documents == "separate", config.parallel.pp > 1 and cut
    try:
        with torch.no_grad():
            return [*trial(TransformersModel(twin_of(model.causal, 2)), documents, stages)]
    except (NoTwin, RuntimeError, TypeError) as why:  # sizes that a small copy should not have
        asked = ["--documents separate"] * documents + ["--pp"] * stages
        return [f"{' and '.join(asked)} cannot be tried on a small copy: {why}"] if asked else []


def trial(twin: TransformersModel, documents: bool, stages: bool) -> Iterator[str]:
    """The faults of a small model in one process; see trial_faults."""
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
        yield f"the loss of {name} is not that of the next tokens alone"
    if documents:
        half = length // 2
        positions = torch.arange(length).expand(2, -1) % half
        packed = loss(positions=positions)
        for part in (slice(0, half), slice(half, length)):
            losses.append(twin(ids[:, part], labels[:, part], num_labels=count).loss.item())
        if not math.isclose(packed, sum(losses), rel_tol=1e-4):
            yield f"--documents separate: {name} lets documents of a row see each other"
    if stages:
        depth = twin.config.num_hidden_layers
        first, last = twin.stage([0], True, False), twin.stage(range(1, depth), False, True)
        options: dict[str, Any] = {"labels": labels, "dropout": torch.zeros(1), "num_labels": count}
        if not math.isclose(last(first(ids, **options), **options).item(), whole, rel_tol=1e-5):
            yield f"--pp: {name}, cut into stages, computes something else"
