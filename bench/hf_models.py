"""Hugging Face models, parallelized in six ways that compute the same loss of the same batch.

    ours      fusedtp.parallelize of the unmodified model
    nn        fusedtp.nn.CausalLM of the same shape, parallelized
    same      nn with transformers' own norm, rotary embedding, attention and activation between its fused linears:
              the extra time of ours over same is the cost of supporting foreign models
    stock     transformers' own tensor parallelism: all tokens on every rank, all-reduces, all logits gathered
    torch     torch's parallelize_module on the model's own modules, with sequence parallelism and loss_parallel
    ceiling   the shards of ours, every transfer replaced by a copy inside this process: its numbers are wrong, its
              matmuls are the same

The ceiling also runs the model's own code, on plain tensors: hooks repeat rows W times before attention, MLP and head,
and sum W parts of the output of embedding, attention and MLP. It does not use the tensors that represent all tokens in
ours, so their overhead counts as part of the gap.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from fusedtp.nn import MLP, Attention, CausalLM, ModelConfig
from fusedtp.nn.layout import TokenLayout
from fusedtp.nn.linear import project
from fusedtp.ops.rows import split
from fusedtp.parallel import parallelize

from .models import COLUMNS, ROWS, _Gather, _Scatter

KINDS = ("llama", "qwen3", "mixtral")


def config_of(kind: str, dtype: torch.dtype, **shape: int) -> Any:
    """A configuration of this kind; `shape` sets its fields. Dropout is off and no weights are tied."""
    from transformers import CONFIG_MAPPING

    fields: dict[str, Any] = {**shape, "tie_word_embeddings": False, "dtype": dtype}
    if kind == "qwen3":
        fields["head_dim"] = shape["hidden_size"] // shape["num_attention_heads"]
    if kind == "mixtral":  # a token uses two experts, with as many parameters as a dense layer
        fields |= {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": shape["intermediate_size"] // 2,
        }
    return CONFIG_MAPPING[kind](**fields)


def plain(config: Any, device: torch.device) -> Any:
    """Random weights, the same on every rank."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=config.dtype).to(device).eval()


class Step:
    """A call runs one forward and backward of the whole batch, ids and labels [B, S], and returns the loss."""

    def __init__(self, model: nn.Module, loss: Callable[[], Tensor], within: Callable[[], Any] = nullcontext) -> None:
        self.model, self.loss, self.within = model, loss, within

    def __call__(self) -> Tensor:
        with self.within():
            loss = self.loss()
            loss.backward()
        for parameter in self.model.parameters():
            parameter.grad = None
        return loss.detach()


def _by_itself(model: Any, ids: Tensor, **more: Any) -> Callable[[], Tensor]:
    """The loss that a Hugging Face model computes itself."""
    return lambda: model(input_ids=ids, labels=ids, use_cache=False, **more).loss


def single(model: Any, ids: Tensor) -> Tensor:
    """The loss of the plain model."""
    with torch.no_grad():
        loss: Tensor = _by_itself(model, ids)()
    return loss


def ours(model: Any, mesh: DeviceMesh, ids: Tensor, engine: str) -> Step:
    """fusedtp.parallelize of a copy."""
    made = parallelize(copy.deepcopy(model), mesh, engine=engine)
    return Step(made, _by_itself(made, ids))


class _Attention(Attention):
    """Attention with the operations of transformers' Llama between the projections."""

    is_causal = True
    rotary: tuple[Tensor, Tensor]  # cos and sin [B, S, D], set before each forward

    @property
    def num_key_value_groups(self) -> int:
        return self.config.num_attention_heads // (self.config.num_key_value_heads or 1)

    def forward(self, x: Tensor, layout: TokenLayout | None = None) -> Tensor:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        assert layout is not None
        parts = project(x, (self.q_proj, self.k_proj, self.v_proj), layout)
        q, k, v = (t.view(layout.batch, layout.length, -1, self.head_dim).transpose(1, 2) for t in parts)
        q, k = apply_rotary_pos_emb(q, k, *self.rotary)
        y, _ = sdpa_attention_forward(self, q, k, v, None, scaling=self.head_dim**-0.5)
        return self.o_proj(y.reshape(layout.tokens, -1), layout)


class _MLP(MLP):
    """MLP with a separate activation, not fused into the matmul."""

    def forward(self, x: Tensor, layout: TokenLayout | None = None) -> Tensor:
        gate, up = project(x, (self.gate_proj, self.up_proj), layout)
        return self.down_proj(F.silu(gate) * up, layout)


def by_nn(model: Any, mesh: DeviceMesh, ids: Tensor, engine: str, same: bool = False) -> Step:
    """A model of fusedtp.nn with the weights of a Llama; `same`: with transformers' own operations."""
    config, dtype = model.config, str(model.dtype).removeprefix("torch.")
    shape = ModelConfig(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers, num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads, rms_norm_eps=config.rms_norm_eps,
        rope_theta=config.rope_parameters["rope_theta"], dtype=dtype, param_dtype=dtype,  # type: ignore[arg-type]
    )  # fmt: skip
    made = CausalLM(shape, device=ids.device)
    if same:
        made.norm = copy.deepcopy(model.model.norm)
        for layer, own in zip(made.layers, model.model.layers, strict=True):
            layer.self_attn.__class__, layer.mlp.__class__ = _Attention, _MLP
            layer.input_layernorm = copy.deepcopy(own.input_layernorm)
            layer.post_attention_layernorm = copy.deepcopy(own.post_attention_layernorm)
    made.load_state_dict({name.removeprefix("model."): x for name, x in model.state_dict().items()})
    parallelize(made, mesh, engine=engine)
    labels = F.pad(ids, (0, 1), value=-100)[:, 1:].contiguous()
    rotary_embedding = model.model.rotary_emb
    positions = torch.arange(ids.shape[1], device=ids.device)[None]

    def loss() -> Tensor:
        if same:
            rotary = rotary_embedding(torch.empty(0, dtype=model.dtype, device=ids.device), positions)
            for layer in made.layers:
                layer.self_attn.rotary = rotary  # type: ignore[union-attr]
        found = made(ids, labels).loss
        assert found is not None
        return found

    return Step(made, loss)


def stock(folder: str, mesh: DeviceMesh, ids: Tensor, dtype: torch.dtype) -> Step:
    """transformers' own tensor parallelism, from a folder that save_pretrained wrote. Collective."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    made = AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(tp_size=mesh.size()), dtype=dtype
    ).eval()
    return Step(made, _by_itself(made, ids))


def by_torch(model: Any, mesh: DeviceMesh, ids: Tensor) -> Step:
    """The plan for a Llama in torch's documentation, on a copy.

    Tokens are split between layers ([B, S_r, H]), so positions must be given: the model would number its local rows.
    """
    made = copy.deepcopy(model)
    parallelize_module(
        made, mesh,
        {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "model.norm": SequenceParallel(),
            "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        },
    )  # fmt: skip
    plan: dict[str, Any] = {
        "input_layernorm": SequenceParallel(),
        "post_attention_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    }
    for name, _ in made.model.layers[0].named_modules():
        if name.endswith(COLUMNS):
            plan[name] = ColwiseParallel()
        elif name.endswith(ROWS):
            plan[name] = RowwiseParallel(output_layouts=Shard(1))
        elif name.endswith(("q_norm", "k_norm")):  # local heads: partial gradients, summed below
            plan[name] = HeadNorm()
    for layer in made.model.layers:
        parallelize_module(layer, mesh, plan)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    return Step(made, _by_itself(made, ids, position_ids=positions), loss_parallel)


class HeadNorm(SequenceParallel):
    """A norm over the features of heads [B, S, heads, D], with heads split over ranks: plain tensors in and out."""

    def __init__(self) -> None:
        super().__init__(sequence_dim=2, use_local_output=True)


def ceiling(model: Any, mesh: DeviceMesh, ids: Tensor) -> Step:
    """Plain shards of a copy, no communication."""
    made, rank, world_size = copy.deepcopy(model), mesh.get_local_rank(), mesh.size()
    for name, parameter in list(made.named_parameters()):
        parent = made.get_submodule(name.rpartition(".")[0])
        shard = _shard(name, parameter.detach(), rank, world_size)
        setattr(parent, name.rpartition(".")[2], nn.Parameter(shard.clone()))

    def gather(x: Tensor) -> Tensor:
        y: Tensor = _Gather.apply(x.flatten(0, 1), world_size)
        return y.unflatten(0, (1, -1))

    def scatter(x: Tensor) -> Tensor:
        y: Tensor = _Scatter.apply(x.flatten(0, 1), world_size)
        return y.unflatten(0, (1, -1))

    def before_attention(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "hidden_states": gather(kwargs["hidden_states"])}

    made.model.layers[0].register_forward_pre_hook(lambda module, args: (scatter(args[0]), *args[1:]))
    for layer in made.model.layers:
        layer.self_attn.register_forward_pre_hook(before_attention, with_kwargs=True)
        layer.self_attn.register_forward_hook(lambda module, args, y: (scatter(y[0]), *y[1:]))
        layer.mlp.register_forward_pre_hook(lambda module, args: (gather(args[0]),))
        layer.mlp.register_forward_hook(lambda module, args, y: scatter(y))
    known = ids % made.lm_head.weight.shape[0]
    labels = F.pad(known, (0, 1), value=-100)[0, 1:]

    def loss() -> Tensor:
        x = made.model(input_ids=known, use_cache=False).last_hidden_state
        return F.cross_entropy(made.lm_head(gather(x))[0].float(), labels)

    return Step(made, loss)


def _shard(name: str, full: Tensor, rank: int, world_size: int) -> Tensor:
    """A rank's shard of a parameter, by the model's own plan."""
    module = name.removesuffix(".weight")
    if module.endswith("experts.gate_up_proj"):
        return torch.cat([half.chunk(world_size, 1)[rank] for half in full.chunk(2, 1)], 1)
    if module.endswith((*COLUMNS, "lm_head", "embed_tokens")):
        return full.chunk(world_size)[rank]
    return full.chunk(world_size, -1)[rank] if module.endswith(ROWS) else full


def even(config: Any, tokens: int, world_size: int) -> None:
    """Raises ValueError for sizes that do not split evenly, as the ceiling requires."""
    sizes = {
        "tokens": tokens, "heads": config.num_attention_heads, "kv heads": config.num_key_value_heads,
        "vocabulary": config.vocab_size, "intermediate size": config.intermediate_size,
    }  # fmt: skip
    wrong = [f"{size} {name}" for name, size in sizes.items() if len(set(split(size, world_size))) > 1]
    if wrong:
        raise ValueError(f"{', '.join(wrong)} do not split evenly over {world_size} ranks")
