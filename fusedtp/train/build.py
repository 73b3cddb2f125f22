"""The model of a config: on one device, or parallel over the ranks of a world. The same start in both.

    meta model --parallelize(tp)--> DTensors --cut(pp)--> stages --shard(dp)--> FSDP2 --to_empty--> memory --init_(seed)

Each rank makes only its own part, and each parameter is drawn from (seed, name), so ranks need not agree.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from fusedtp.comm import communicator
from fusedtp.nn import CausalLM, ModelConfig, MoEConfig, init_
from fusedtp.nn.heads import heads_split
from fusedtp.parallel import ExpertSplit, parallelize
from fusedtp.parallel.plan import ways_of
from fusedtp.train.blocks import prepare_
from fusedtp.train.config import TrainConfig, sharing_faults
from fusedtp.train.foreign import TransformersModel
from fusedtp.train.foreign_build import build_foreign, sizes
from fusedtp.train.shard import dtypes_of, empty_shards, shard
from fusedtp.train.stages import Pipeline, costs, cut, prune_, stage_count, stages_of, two_passes
from fusedtp.train.tokenizer import tokenizer_of
from fusedtp.train.world import World

Model = CausalLM | TransformersModel
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def model_config(config: TrainConfig) -> ModelConfig:
    """The library's configuration for these options."""
    model = config.model
    return ModelConfig(
        vocab_size=tokenizer_of(config.data.tokenizer).vocab_size,
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
        dtype=DTYPES[config.run.dtype],  # type: ignore[arg-type]
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
    if model.experts and sharing_faults(config, dp, tp):
        return []
    on_meta = CausalLM(model_config(config), device="meta")
    ep = config.parallel.ep or tp
    split = ExpertSplit(tensor_parallel=config.parallel.expert_tp, num_ranks=ep)
    ways = ways_of(on_meta, tp, split) if max(tp, ep) > 1 else {}
    return empty_shards(on_meta, ways, dp // max(1, config.parallel.copies(dp)) * tp)


def num_parameters(config: TrainConfig) -> int:
    """Of the whole model."""
    if config.foreign.model is not None:
        return sizes(config)[2]
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
    pipeline = None if world.pp_mesh is None else pipeline_of(model, config, world.pp_mesh)
    prepare_(model, config.blocks, two_passes(config.parallel.schedule, world.pp))
    if world.dp_mesh is not None:
        assert world.shard_mesh is not None
        stages = list(pipeline.stages.values()) if pipeline else ()
        shard(
            model,
            world.shard_mesh,
            world.outer_mesh,
            stages,
            config.parallel.kind,
            dtypes_of(config.parallel),
        )
        everyone = world.token_ranks(config.parallel.sequence_parallel)
        assert everyone is not None
        model.balance_group, model.data_parallel = communicator(everyone).name, world.dp
    init_(model.to_empty(device=world.device), config.run.seed)
    return model, pipeline


def pipeline_of(model: CausalLM, config: TrainConfig, mesh: DeviceMesh) -> Pipeline:
    """Cut a model on meta into stages of like cost, and leave this rank's of it."""
    parallel = config.parallel
    layers, head = costs(model.config, config.data.length)
    parts = cut(layers, head, stage_count(parallel.schedule, mesh.size(), parallel.virtual_stages))
    here = stages_of(parallel.schedule, mesh.size(), mesh.get_local_rank(), parallel.virtual_stages)
    prune_(model, parts, here)
    return Pipeline(model, mesh, parallel.schedule, parts, here)
