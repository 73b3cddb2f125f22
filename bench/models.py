"""One stack of Transformer blocks in four ways that compute the same.

    single    unparallelized, all tokens
    torch     torch's parallelize_module: ColwiseParallel, RowwiseParallel, SequenceParallel, over gloo
    ours      fusedtp.parallelize
    ceiling   the same shards as ours, every transfer replaced by a copy inside this process: the time that remains if
              communication costs no more than the copy (its numbers are wrong, its matmuls are the same)

All use the blocks of fusedtp.nn, so that norms, rotary embedding, attention and the gated activation are the same code.
torch and single use nn.Linear, which parallelize_module requires.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fusedtp.nn import ModelConfig, TokenLayout, TransformerBlock
from fusedtp.nn.linear import Linear
from fusedtp.parallel import parallelize

from .rivals import widens

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROWS = ("o_proj", "down_proj")


def same_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T; 16 bits through fp32 where that is faster (rivals.py)."""
    return F.linear(x.float(), weight.float()).to(x.dtype) if widens(x.dtype) else F.linear(x, weight)


class PlainLinear(nn.Linear):
    """nn.Linear without bias that accepts and ignores a layout."""

    def forward(self, x: Tensor, layout: TokenLayout | None = None) -> Tensor:
        """x [..., K] -> [..., N]."""
        return same_linear(x, self.weight)


class Stack(nn.Module):
    """config.num_hidden_layers blocks: x [T_r, H] -> [T_r, H]."""

    def __init__(self, config: ModelConfig, linear: type[nn.Linear] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(TransformerBlock(config, i) for i in range(config.num_hidden_layers))
        self.tp_plan = {f"blocks.*.{name}": style for name, style in TransformerBlock.tp_plan.items()}
        if linear is None:
            return
        for parent in list(self.modules()):
            for name, old in list(parent.named_children()):
                if name in COLUMNS + ROWS:
                    assert isinstance(old, Linear)
                    new = linear(old.in_features, old.out_features, bias=False, dtype=old.weight.dtype)
                    new.weight = old.weight
                    setattr(parent, name, new)

    def forward(self, x: Tensor, layout: TokenLayout) -> Tensor:
        """x [T_r, H] -> [T_r, H]."""
        for block in self.blocks:
            x = block(x, layout)
        return x


def single(config: ModelConfig) -> Stack:
    """The unparallelized stack."""
    return Stack(config, PlainLinear)


def by_torch(config: ModelConfig, mesh: DeviceMesh) -> Stack:
    """One gather for q, k, v and one for gate, up, as in ours."""
    stack = Stack(config, PlainLinear)
    gather = PrepareModuleInput(input_layouts=(Shard(0), None), desired_input_layouts=(Replicate(), None))
    plan: dict[str, Any] = {
        "input_layernorm": SequenceParallel(sequence_dim=0),
        "post_attention_layernorm": SequenceParallel(sequence_dim=0),
        "self_attn": gather,
        "mlp": gather,
    }
    for name in TransformerBlock.tp_plan:
        is_row = name.endswith(ROWS)
        plan[name] = RowwiseParallel(output_layouts=Shard(0)) if is_row else ColwiseParallel()
    for block in stack.blocks:
        parallelize_module(block, mesh, plan)
    return stack


def ours(config: ModelConfig, mesh: DeviceMesh, engine: str) -> Stack:
    """The stack parallelized by fusedtp."""
    stack = Stack(config)
    parallelize(stack, mesh, engine=engine)
    return stack


class _Gather(Function):
    """x [T_r, K] -> [T, K], W copies of x; backward sums the W parts of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, world_size: int) -> Tensor:
        ctx.world_size = world_size
        return x.repeat(world_size, 1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _Scatter.forward(ctx, dy, ctx.world_size), None


class _Scatter(Function):
    """x [T, N] -> [T_r, N], the sum of W parts of x; backward copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, world_size: int) -> Tensor:
        ctx.world_size = world_size
        first, second, *others = x.chunk(world_size)
        return sum(others, first + second)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy.repeat(ctx.world_size, 1), None


class Copies:
    """A `module.parallel` (fusedtp/nn/hooks.py) that copies where a parallel layer communicates."""

    gather_output = False

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def project(self, x: Tensor, linears: Any, layout: TokenLayout, gathering: Any = None) -> tuple[Tensor, ...]:
        """x [T_r, K] -> [T, N_i] each."""
        full = _Gather.apply(x, self.world_size)
        return tuple(same_linear(full, each.weight) for each in linears)

    def linear(self, x: Tensor, linear: Any, layout: TokenLayout) -> Tensor:
        """x [T, K_r] -> [T_r, N]."""
        return _Scatter.apply(same_linear(x, linear.weight), self.world_size)


def ceiling(config: ModelConfig, rank: int, world_size: int) -> Stack:
    """Plain shards, no communication."""
    stack = Stack(config)
    for name, module in stack.named_modules():
        if name.endswith(COLUMNS + ROWS):
            dim = 0 if name.endswith(COLUMNS) else 1
            shard = module.weight.detach().chunk(world_size, dim)[rank].clone()
            module.weight, module.parallel = nn.Parameter(shard), Copies(world_size)
    return stack
