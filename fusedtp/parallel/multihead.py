"""torch's nn.MultiheadAttention with its heads split over ranks: the style name `multihead_attention`.

    query, key, value [B, L, E] --all-gather, matmul--> q, k, v of this rank's heads --attention-->
        [B, L, E / W] --out_proj: matmul, reduce-scatter--> [B, L, E]

torch's own forward reads all weights itself and calls none of its layers, so it is replaced by one that calls a
column-parallel projection and `out_proj`, which is row-parallel. It takes the same arguments and returns the same:
masks, biases and zeros appended to keys and values, dropout, and attention weights of all heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

from fusedtp.comm import Communicator
from fusedtp.ops.tokens import all_reduce_sum, copy_to_group, gather_tokens

from .foreign import Model
from .foreign_styles import Foreign, install
from .layers import ColumnParallel, accumulated
from .placement import Mesh, Placement
from .plan import generic, parent_of
from .siblings import project_all
from .styles import NEVER_CALLED, computed
from .token_shard import TokenShard

WORD = "multihead_attention"
OUT = "out_proj"
WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias", "bias_k", "bias_v")


def is_multihead(module: Any) -> bool:
    """Whether it is torch's attention, with torch's forward."""
    return _runs_torchs(module) and not computed(module, WEIGHTS)


def _runs_torchs(module: Any) -> bool:
    plain = isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward
    return plain and "forward" not in vars(module)


def out_faults(named: Mapping[str, Any], styles: Mapping[str, Foreign], world_size: int) -> list[str]:
    """Faults: an `out_proj` that the plan splits alone."""
    return [
        f"{generic(name)}: {NEVER_CALLED}"
        for name, style in styles.items()
        if _runs_torchs(named.get(parent_of(name)))
        if any(not isinstance(each, Replicate) for each in style.placements(named[name], world_size).values())
        if not isinstance(styles.get(parent_of(name)), MultiheadAttention)
    ]


class MultiheadAttention(Foreign):
    """See the top of this file. The model's plan splits `out_proj` along with it (foreign_plan.py)."""

    def faults(self, module: Any, world_size: int) -> list[str]:
        found = computed(module, WEIGHTS) if isinstance(module, nn.MultiheadAttention) else []
        if found:
            return found
        if not is_multihead(module):
            return [f"{type(module).__name__} is not torch's MultiheadAttention with its own forward"]
        if module.num_heads % world_size:
            return [f"{world_size} ranks cannot evenly share {module.num_heads} heads"]
        return super().faults(module, world_size)

    def placement(self, name: str, parameter: Tensor) -> Placement:
        if name.startswith("in_proj"):
            return StridedShard(0, split_factor=3)
        return Shard(2 if name.startswith("bias") else 0)

    def install(self, module: Any, comm: Communicator, mesh: Mesh) -> None:
        install(module, Heads(**self.member(comm), model=self.model), multihead_attention)


@dataclass(frozen=True, kw_only=True)
class Heads(ColumnParallel):
    """The projections to queries, keys and values of this rank's heads."""

    model: Model = field(compare=False)


class Projection(NamedTuple):
    """What layers.py reads of a linear layer."""

    weight: Tensor
    bias: Tensor | None
    parallel: Heads


def multihead_attention(
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The forward of a split nn.MultiheadAttention; arguments and results are those of torch's forward.

    Raises RuntimeError for masks and batches that do not fit, and ValueError for nested tensors.
    """
    at: Heads = self.parallel
    if is_causal and attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    if any(type(x) is Tensor and x.is_nested for x in (query, key, value)):
        raise ValueError("split attention does not take nested tensors; pad them, and pass key_padding_mask")
    batched, first = query.dim() == 3, self.batch_first or query.dim() == 2
    q, k, v = _projected(self, query, key, value)
    q, k, v = (_by_heads(x if batched else x[None], first, self.head_dim) for x in (q, k, v))
    if k.shape != v.shape or k.shape[0] != q.shape[0]:
        raise RuntimeError(
            f"query, key and value have batches of {q.shape[0]}, {k.shape[0]} and {v.shape[0]}, "
            f"key and value {k.shape[2]} and {v.shape[2]} tokens"
        )
    at.model.drawing(True)  # dropout draws for this rank's heads
    causal = is_causal and key_padding_mask is None and not need_weights
    mask = None if causal else _masked(self, q, k, attn_mask, key_padding_mask, batched)
    extra = int(self.bias_k is not None) + int(self.add_zero_attn)
    if self.bias_k is not None:
        k, v = (_appended(x, accumulated(bias)) for x, bias in ((k, self.bias_k), (v, self.bias_v)))
    if self.add_zero_attn:
        k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
    mask = None if mask is None else F.pad(mask, (0, extra))
    dropout = self.dropout if self.training else 0.0
    weights = None
    if need_weights:
        scores = (q / math.sqrt(self.head_dim)) @ k.transpose(-2, -1)
        weights = F.dropout((scores if mask is None else scores + mask.to(scores.dtype)).softmax(-1), dropout)
        y = weights @ v
        weights = _of_all_heads(weights, at, self.num_heads, average_attn_weights)
        weights = weights if batched else weights[0]
    else:
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
    y = (y.transpose(1, 2) if first else y.permute(2, 0, 1, 3)).flatten(2)
    return self.out_proj(y if batched else y[0]), weights


def _projected(self: Any, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """q, k, v [..., E / W] of this rank's heads, with one gather for each different input."""
    at: Heads = self.parallel
    inputs = (query, key, value)
    packed, bias = self.in_proj_weight, self.in_proj_bias
    if packed is not None and query is key is value:
        return list(_project(at, query, [Projection(packed, bias, at)])[0].chunk(3, -1))
    own = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
    weights = accumulated(packed).chunk(3) if packed is not None else own
    biases = (None,) * 3 if bias is None else accumulated(bias).chunk(3)
    linears = [Projection(w, b, at) for w, b in zip(weights, biases, strict=True)]
    found: dict[int, Tensor] = {}
    for i, x in enumerate(inputs):
        if i not in found:
            same = [j for j in range(i, 3) if inputs[j] is x]
            found.update(zip(same, _project(at, x, [linears[j] for j in same]), strict=True))
    return [found[i] for i in range(3)]


def _project(at: Heads, x: Tensor, linears: list[Projection]) -> tuple[Tensor, ...]:
    at.model.count(isinstance(x, TokenShard) and x.dim() == len(x.lead) + 1)
    return project_all(x, linears)


def _by_heads(x: Tensor, batch_first: bool, width: int) -> Tensor:
    """[B, L, n d] or, if the batch is not first, [L, B, n d] -> [B, n, L, d]"""
    x = x.unflatten(-1, (-1, width))
    return x.transpose(1, 2) if batch_first else x.permute(1, 2, 0, 3)


def _appended(x: Tensor, bias: Tensor) -> Tensor:
    """Append a learned key or value: x [B, n, S, d], bias [1, 1, n d] -> [B, n, S + 1, d]"""
    own = bias.to(x.dtype).view(1, x.shape[1], 1, x.shape[3])
    return torch.cat([x, own.expand(x.shape[0], -1, -1, -1)], 2)


def _masked(
    self: Any, q: Tensor, k: Tensor, attn_mask: Tensor | None, padding: Tensor | None, batched: bool
) -> Tensor | None:
    """What to add to the scores [B, n, L, S]; None if there is no mask."""
    at: Heads = self.parallel
    batch, heads, length, keys = q.shape[0], self.num_heads, q.shape[2], k.shape[2]
    total = None
    if attn_mask is not None:
        want = (length, keys) if attn_mask.dim() == 2 else (batch * heads, length, keys)
        if attn_mask.dim() not in (2, 3) or tuple(attn_mask.shape) != want:
            raise RuntimeError(f"attn_mask has shape {tuple(attn_mask.shape)} instead of {want}")
        total = _added(attn_mask, at, q.dtype)
        if attn_mask.dim() == 3:
            own = heads // at.world_size
            total = total.view(batch, heads, length, keys).narrow(1, at.rank * own, own)
    if padding is not None:
        wanted = (batch, keys) if batched else (keys,)
        if tuple(padding.shape) != wanted:
            raise RuntimeError(f"key_padding_mask has shape {tuple(padding.shape)} instead of {wanted}")
        absent = _added(padding, at, q.dtype).view(batch, 1, 1, keys)
        total = absent if total is None else total + absent
    return total


def _added(mask: Tensor, at: Heads, dtype: torch.dtype) -> Tensor:
    """A mask as numbers to add, in their own dtype if they are such; True means that a position is not attended to."""
    mask = mask.full_tensor("attention mask") if isinstance(mask, TokenShard) else mask
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, -math.inf)
    if not mask.is_floating_point():
        raise RuntimeError(f"a mask is bool or floating point, not {mask.dtype}")
    learned = mask.requires_grad and torch.is_grad_enabled()  # every rank has the gradient of its own heads
    return copy_to_group(mask, at.group, layer=at.layer) if learned else mask


def _of_all_heads(weights: Tensor, at: Heads, heads: int, average: bool) -> Tensor:
    """[B, n / W, L, S] -> [B, n, L, S], or the average over heads, [B, L, S]."""
    if average:
        return all_reduce_sum(weights.sum(1) / heads, at.group, at.layer)
    sizes = (weights.shape[1],) * at.world_size
    return gather_tokens(weights.movedim(1, 0), at.group, sizes, at.layer).movedim(0, 1)
