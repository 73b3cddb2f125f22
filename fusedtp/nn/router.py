"""The router: which experts each token goes to, and with which weights.

    logits = x @ w.T                            in fp32 (fp64 for fp64 x)
    scores = softmax or sigmoid of logits
    key    = scores (+ bias)                    experts are chosen by it; or logits, or in training sinkhorn's plan
    ids    = top k of key                       with groups, only among experts of the top groups
    weight = scores of the chosen               divided by their sum, or computed from the chosen logits; times `scale`

There is no host synchronization, and no shape depends on the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedtp.comm import Group, place

from . import balance as _balance
from . import dropout
from .choice import GROUP_SCORES, best, best_in_groups
from .hooks import read
from .layout import TokenLayout
from .wide_logits import WideLogits

SCORES = ("softmax", "sigmoid")


class Routing(NamedTuple):
    """A router's decision for this rank's tokens.

    expert_ids          int32 [T_r, k]   distinct in each row, in the order of their scores
    weights             [T_r, k]         fp32 (fp64 for fp64 x); the gradient reaches x and the router
    losses              name -> scalar over all ranks' tokens, including its coefficient: add each to the loss. Empty
                        in evaluation. Gradients: Note [Gradients of a global loss] in balance.py
    tokens_per_expert   int64 [E]        of this rank
    mean_probability    fp32 [E]         of this rank; zeros if it has no tokens
    max_violation       fp32 scalar      MaxVio of this rank's tokens; for all ranks use max_violation(summed counts)
    dropped             int64 [E]        choices of this rank dropped by a capacity, which are -1 in expert_ids; None
                        without a capacity. tokens_per_expert includes them
    recv_usage          fusedtp.ops.moe.RecvUsage: the experts' use of their capacity; None if they take no rounds
    """

    expert_ids: Tensor
    weights: Tensor
    losses: dict[str, Tensor]
    tokens_per_expert: Tensor
    mean_probability: Tensor
    max_violation: Tensor
    dropped: Tensor | None = None
    recv_usage: Any = None


class Router(nn.Module):
    """x [T_r, H] -> Routing.

    weight              [E, H]
    score               "softmax" over all experts, or "sigmoid" of each
    score_after_topk    choose by logits, then compute scores from the chosen logits only (Shazeer et al. 2017, Mixtral)
    normalize           weights sum to `scale`; computed from logits, so that it is never 0 / 0
    scale               DeepSeek-V3's routed scaling factor
    num_groups, top_groups, group_score
                        choose only experts of the best groups: groups of neighbouring experts, ranked by their
                        best key ("max", DeepSeek-V2, section 2.2.2) or the sum of their two best ("top2", DeepSeek-V3,
                        section 2.1.2, with K_r / M = 2 as in its code)
    bias                a buffer [E] added for the choice, but not for the weight; the trainer calls
                        balance.update_bias_ (Wang et al. 2024; DeepSeek-V3). Stays fp32 if the module is cast
    sinkhorn            number of iterations to choose experts in training, top_k = 1 (S-BASE, Clark et al. 2022);
                        0: none
    jitter              in training, x is multiplied by numbers from [1 - jitter, 1 + jitter] (Fedus et al. 2021); needs
                        `layout.dropout`; the numbers do not depend on how tokens are split
    balance_loss, balance, sequence_loss, z_loss
                        coefficients of the losses of balance.py; `balance` names the formula of the first one
    layer               index of this layer in the model, for jitter

    Ties go to the lower expert id. A NaN counts as the largest key: it shows up in the weights, and ids stay distinct
    and in range. Raises one ValueError with all faults of the arguments.
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int,
        *,
        score: str = "softmax",
        score_after_topk: bool = False,
        normalize: bool = False,
        scale: float = 1.0,
        num_groups: int = 1,
        top_groups: int = 1,
        group_score: str = "top2",
        bias: bool = False,
        sinkhorn: int = 0,
        jitter: float = 0.0,
        balance_loss: float = 0.0,
        balance: str = "switch",
        sequence_loss: float = 0.0,
        z_loss: float = 0.0,
        layer: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.num_experts, self.top_k = dim, num_experts, top_k
        self.score, self.score_after_topk = score, score_after_topk
        self.normalize, self.scale = normalize, scale
        self.num_groups, self.top_groups, self.group_score = num_groups, top_groups, group_score
        self.has_bias, self.sinkhorn, self.jitter = bias, sinkhorn, jitter
        self.balance_loss, self.balance, self.sequence_loss = balance_loss, balance, sequence_loss
        self.z_loss, self.layer = z_loss, layer
        found = self.faults()
        if found:
            raise ValueError("Router: " + "; ".join(found))
        self.parallel: Any = None
        self.weight = nn.Parameter(torch.empty(num_experts, dim, device=device, dtype=dtype))
        self.bias: Tensor | None
        zeros = torch.zeros(num_experts, device=device, dtype=torch.float32) if bias else None
        self.register_buffer("bias", zeros)
        self.reset_parameters()

    def faults(self) -> list[str]:
        """Descriptions of everything that is wrong with the arguments."""
        positive = ("dim", "num_experts", "top_k", "num_groups", "top_groups")
        small = [name for name in positive if getattr(self, name) < 1]
        found = [f"{name} is {getattr(self, name)}, must be at least 1" for name in small]
        for name, known in (("score", SCORES), ("group_score", GROUP_SCORES), ("balance", _balance.KINDS)):
            if getattr(self, name) not in known:
                found.append(f"{name} is {getattr(self, name)!r}, must be one of {', '.join(known)}")
        for name in ("sinkhorn", *_balance.LOSSES):
            if not 0 <= getattr(self, name) < math.inf:
                found.append(f"{name} is {getattr(self, name)}, must not be negative")
        if not 0 <= self.jitter < 1:
            found.append(f"jitter is {self.jitter}, must be in [0, 1)")
        if not 0 < self.scale < math.inf:
            found.append(f"scale is {self.scale}, must be positive")
        if self.top_k > self.num_experts:
            found.append(f"top_k is {self.top_k}, must be at most num_experts {self.num_experts}")
        if self.top_groups > self.num_groups:
            found.append(f"top_groups is {self.top_groups}, must be at most num_groups {self.num_groups}")
        if min(self.num_experts, self.num_groups) >= 1:
            each, rest = divmod(self.num_experts, self.num_groups)
            if rest:
                found.append(f"num_groups is {self.num_groups}, must be a divisor of num_experts {self.num_experts}")
            elif self.top_groups * each < self.top_k:
                found.append(
                    f"top_groups is {self.top_groups}, with {each} experts each: fewer experts than top_k {self.top_k}"
                )
        if self.has_bias and self.score_after_topk:
            found.append("bias is added to scores, so it does not work with score_after_topk")
        if self.sinkhorn and self.top_k != 1:
            found.append(f"top_k is {self.top_k}, must be 1 with sinkhorn")
        if self.sinkhorn and (self.has_bias or self.num_groups > 1):
            found.append("sinkhorn balances over all experts: it takes no bias and no groups")
        return found

    def reset_parameters(self) -> None:
        """A usable initialization; `init_` gives the same model at any world size."""
        nn.init.normal_(self.weight, std=0.02)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Router:
        """The bias moves with the module but stays fp32 (16 bits lose its small steps); off meta, it becomes zeros."""
        old = self.bias
        super()._apply(fn, recurse)
        if old is not None and self.bias is not None:
            empty = old.is_meta and not self.bias.is_meta
            self.bias = torch.zeros_like(self.bias).float() if empty else old.to(self.bias.device)
        return self

    def forward(
        self,
        x: Tensor,
        layout: TokenLayout | None = None,
        group: Group | None = None,
        *,
        sequence_group: Group | None = None,
    ) -> Routing:
        """Chooses experts for x [T_r, H], any float dtype.

        layout           needed by sequence_loss and jitter
        group            the ranks whose tokens form the batch of the losses and of sinkhorn; None: this rank only
        sequence_group   the ranks over which `layout` splits its tokens, if they are not all of `group`
        Every rank must make the same calls, even with no rows. Raises ValueError for bad arguments, naming the rank.
        """
        with _balance.propagating_errors(group):
            self._check(x, layout, sequence_group if sequence_group is not None else group)
            logits = self._logits(x, layout)
            scores = logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()
            ids = self._choose(logits.detach(), scores.detach(), group)
            weights = self._weights(logits, scores, ids)
            # DeepSeek-V3, equation 19; for sigmoid computed from logs, so that it is never 0 / 0.
            probability = scores if self.score == "softmax" else F.logsigmoid(logits).softmax(-1)
            losses = self._losses(logits, probability, ids, layout, group, sequence_group)
            with torch.no_grad():
                counts = _balance.count(ids, self.num_experts)
                mean = (probability.sum(0, dtype=torch.float64) / max(x.shape[0], 1)).float()
                violation = _balance.max_violation(counts)
        return Routing(ids.int(), weights, losses, counts, mean, violation)

    def _check(self, x: Tensor, layout: TokenLayout | None, group: Group | None) -> None:
        at = "" if group is None else f"rank {place(group).rank}: "
        if x.dim() != 2 or x.shape[1] != self.dim or not x.is_floating_point():
            raise ValueError(f"{at}wanted x [T, {self.dim}] of floats, got {tuple(x.shape)} of {x.dtype}")
        needed_by = [name for name in ("sequence_loss", "jitter") if self.training and getattr(self, name)]
        if layout is None:
            if needed_by:
                raise ValueError(f"{at}layout is None, but {' and '.join(needed_by)} needs a TokenLayout")
            return
        if layout.rows != x.shape[0]:
            raise ValueError(f"{at}x has {x.shape[0]} rows, the layout {layout.rows}")
        if "jitter" in needed_by and layout.dropout is None:
            raise ValueError(f"{at}jitter needs a seed and a step: call CausalLM.set_dropout before each step")
        world_size = 1 if group is None else place(group).world_size
        if "sequence_loss" in needed_by and layout.is_split and len(layout.sizes) != world_size:
            raise ValueError(
                f"{at}the layout splits sequences over {len(layout.sizes)} ranks, but the group has {world_size}; "
                "sequence_loss needs the layout's ranks as sequence_group"
            )

    def _logits(self, x: Tensor, layout: TokenLayout | None) -> Tensor:
        weight = read(self, "weight")
        wide = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
        if self.training and self.jitter:
            assert layout is not None and layout.dropout is not None
            site = 4 * self.layer + dropout.ROUTER
            bits = dropout.random_bits(layout.dropout.to(x.device), site, layout.start, *x.shape)
            x = x.to(wide) * torch.add(1.0, bits.to(wide), alpha=self.jitter * 2.0**-31)
        with torch.autocast(x.device.type, enabled=False):
            if x.dtype == wide or torch.compiler.is_compiling():
                return x.to(wide) @ weight.to(wide).t()
            logits: Tensor = WideLogits.apply(x, weight, wide)
            return logits

    def _choose(self, logits: Tensor, scores: Tensor, group: Group | None) -> Tensor:
        """int64 [T_r, k]."""
        if self.sinkhorn and self.training:
            return best(_balance.sinkhorn(logits, self.sinkhorn, group), 1)
        key = logits if self.score_after_topk else scores
        if self.bias is not None:
            key = key + self.bias
        if self.num_groups == self.top_groups:
            return best(key, self.top_k)
        return best_in_groups(key, self.top_k, self.num_groups, self.top_groups, self.group_score)

    def _weights(self, logits: Tensor, scores: Tensor, ids: Tensor) -> Tensor:
        if self.score_after_topk and self.score == "softmax":
            weights = logits.gather(1, ids).softmax(-1)
        elif self.normalize and self.score == "softmax":
            weights = logits.log_softmax(-1).gather(1, ids).softmax(-1)  # a NaN spreads, even from an expert not chosen
        elif self.normalize:
            weights = F.logsigmoid(logits.gather(1, ids)).softmax(-1)
        else:
            weights = scores.gather(1, ids)
        return weights * self.scale if self.scale != 1.0 else weights

    def _losses(
        self,
        logits: Tensor,
        probability: Tensor,
        ids: Tensor,
        layout: TokenLayout | None,
        group: Group | None,
        sequence_group: Group | None,
    ) -> dict[str, Tensor]:
        scales = {name: getattr(self, name) for name in _balance.LOSSES}
        if not self.training or not any(scales.values()):
            return {}
        free = ids  # the top k by scores alone; logits have the same order
        limited = self.bias is not None or self.num_groups != self.top_groups or self.sinkhorn
        if self.sequence_loss and limited:
            free = best(logits.detach(), self.top_k)
        chosen = _balance.Chosen(logits, probability, ids, free)
        found = _balance.losses(chosen, scales, self.balance, layout, group, sequence_group)
        return {name: (loss * scales[name]).to(logits.dtype) for name, loss in found.items()}

    def extra_repr(self) -> str:
        return f"{self.dim} -> {self.top_k} of {self.num_experts}, score={self.score}"
