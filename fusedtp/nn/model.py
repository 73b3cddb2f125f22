"""A Llama-style causal language model made of ordinary modules; `parallelize` makes the same class parallel.

    input_ids [B, S] -> embed_tokens -> [T_r, H] -> layers -> norm -> lm_head -> logits [T, V_r] -> loss

T_r = T = B * S and V_r = V on one device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .attention import prepared
from .balance import mean_over_ranks
from .block import TransformerBlock, prefixed
from .config import ModelConfig
from .dropout import EMBEDDING, HiddenDropout, dropout_state
from .embedding import VocabParallelEmbedding
from .hooks import all_opened
from .layout import Collected, TokenLayout
from .linear import Linear
from .linear_loss import linear_cross_entropy
from .loss import vocab_parallel_cross_entropy
from .norm import RMSNorm
from .router import Routing


class CausalLMOutput(NamedTuple):
    """loss: scalar, the mean over labels. logits: [B, S, V_r], or [T_r, V] if the head is not in the plan.

    routings: each router's decisions for this rank's tokens, in layer order.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    routings: tuple[Routing, ...] = ()


class CausalLM(nn.Module):
    """Embedding, blocks, norm and head.

    input_ids        [B, S]   integers in [0, vocab_size), the same on all ranks of a tensor-parallel group
    labels           [B, S]   the next token of each position (already shifted), ignore_index if there is none
    positions        [B, S]   for RoPE; default 0..S-1
    document_ids     [B, S]   attention never crosses documents; default one document per sequence
    num_labels       divisor of the sum of token losses: the number of labels over all microbatches and data
                     parallel ranks; default the number in `labels`
    return_logits    return logits even with labels; without labels they are always returned

    parallelize sets token_split (rank, world_size), which splits tokens between layers, and token_group, their group.
    If gradients are averaged over data parallel ranks, set balance_group (all ranks) and data_parallel (the number of
    averaged ranks): routers then balance the whole batch, and their losses count once. fusedtp.from_transformers sets
    `pretrained`: the configuration and the generation configuration that the model was loaded with.
    """

    def __init__(self, config: ModelConfig, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.config = config
        dtype, hidden = config.parameter_dtype, config.hidden_size
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, hidden, device=device, dtype=dtype)
        self.embedding_dropout = HiddenDropout(config.embedding_dropout, 0, EMBEDDING)
        self.layers = nn.ModuleList(
            TransformerBlock(config, layer, device=device) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(hidden, config.rms_norm_eps, device=device, dtype=dtype)
        self.lm_head = Linear(hidden, config.vocab_size, device=device, dtype=dtype)
        self.token_split: tuple[int, int] = (0, 1)
        self.token_group: Any = None
        self.balance_group: Any = None
        self.data_parallel = 1
        self.pretrained: tuple[Any, Any] | None = None
        self._dropout: Tensor | None = None
        self.tie_weights()

    @property
    def tp_plan(self) -> dict[str, str]:
        """Module name -> style, in transformers' vocabulary; `*` matches any layer, if all have the same plan."""
        plans = [layer.tp_plan for layer in self.layers if isinstance(layer, TransformerBlock)]
        alike = all(plan == plans[0] for plan in plans)
        layers = {f"layers.{i}": plan for i, plan in enumerate(plans)} if not alike else {"layers.*": plans[0]}
        named = [prefixed(name, plan) for name, plan in layers.items()] if plans else []
        between = {key: style for plan in named for key, style in plan.items()}
        return {"embed_tokens": "embedding_rowwise", **between, "lm_head": "colwise"}

    def tie_weights(self) -> None:
        """Tie the head's weight to the embedding's, if the configuration says so."""
        if self.config.tie_word_embeddings and self.lm_head is not None:  # a pipeline stage may have none
            self.lm_head.weight = self.embed_tokens.weight

    def _apply(self, *args: Any, **kwargs: Any) -> CausalLM:
        super()._apply(*args, **kwargs)  # to(), to_empty(), ... split a shared parameter in two
        self.tie_weights()
        return self

    def set_dropout(self, seed: int, step: int, first_token: int = 0) -> None:
        """Set the dropout state of the next forward, see dropout.py. Required if any dropout is on."""
        self._dropout = dropout_state(seed, step, first_token)

    def layout(
        self, input_ids: Tensor, positions: Tensor | None = None, document_ids: Tensor | None = None
    ) -> TokenLayout:
        """The tokens of a batch and their split over ranks; tables shared by all layers are computed once."""
        batch, length = input_ids.shape
        rank, world_size = self.token_split
        sizes: tuple[int, ...] = ()
        if world_size > 1:
            from fusedtp.ops.rows import split

            sizes = tuple(split(batch * length, world_size))
        device = input_ids.device
        dropout = None if self._dropout is None else self._dropout.to(device)
        plain = TokenLayout(
            batch, length, sizes, rank, positions, document_ids, dropout=dropout,
            routings=None if self.config.moe is None else Collected(), balance_group=self.balance_group,
        )  # fmt: skip
        return prepared(plain, self.config, device, self.config.compute_dtype)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        *,
        num_labels: int | float | Tensor | None = None,
        ignore_index: int = -100,
        return_logits: bool = False,
    ) -> CausalLMOutput:
        if input_ids.dim() != 2 or (labels is not None and labels.shape != input_ids.shape):
            wrong = f"{tuple(input_ids.shape)}, {None if labels is None else tuple(labels.shape)}"
            raise ValueError(f"wanted input_ids and labels of one shape [B, S], got {wrong}")
        layout = self.layout(input_ids, positions, document_ids)
        loss: Tensor | None = None
        hidden = self.hidden_states(input_ids, layout)
        if labels is not None and not return_logits:
            loss = self.loss_of(hidden, labels, layout, num_labels, ignore_index)
            return CausalLMOutput(loss, None, _routings(layout))
        logits = self.compute_logits(hidden, layout)
        if labels is not None:
            flat = labels.reshape(-1)
            whole = self.compute_loss(logits, flat, layout, num_labels, ignore_index)
            routers = self.routers_loss(layout, labels, num_labels, ignore_index)
            loss = whole if routers is None else whole + routers.to(whole.dtype)
        if logits.shape[0] == layout.tokens:
            logits = logits.view(*input_ids.shape, logits.shape[-1])
        return CausalLMOutput(loss, logits, _routings(layout))

    def hidden_states(self, input_ids: Tensor, layout: TokenLayout) -> Tensor:
        """[B, S] -> [T_r, H], after the last norm."""
        return self.norm(self.through(self.layers, self.embed(input_ids, layout), layout))

    def embed(self, input_ids: Tensor, layout: TokenLayout) -> Tensor:
        """[B, S] -> [T_r, H], before the first layer."""
        x = self.embed_tokens(input_ids.reshape(-1), layout).to(self.config.compute_dtype)
        return self.embedding_dropout(x, layout)

    def through(self, layers: Iterable[nn.Module], x: Tensor, layout: TokenLayout) -> Tensor:
        """Run x [T_r, H] through some of the layers in order -> [T_r, H]."""
        layers = list(layers)
        with all_opened(layers):
            for layer in layers:
                x = layer(x, layout)
        return x

    def loss_of(
        self,
        hidden: Tensor,
        labels: Tensor,
        layout: TokenLayout,
        num_labels: int | float | Tensor | None = None,
        ignore_index: int = -100,
    ) -> Tensor:
        """The loss of hidden states [T_r, H] and labels [B, S], including routers' losses; see forward."""
        flat = labels.reshape(-1)
        if self._takes_pieces(layout):
            whole = self.loss_by_pieces(hidden, flat, layout, num_labels, ignore_index)
        else:
            logits = self.compute_logits(hidden, layout)
            whole = self.compute_loss(logits, flat, layout, num_labels, ignore_index)
        routers = self.routers_loss(layout, labels, num_labels, ignore_index)
        return whole if routers is None else whole + routers.to(whole.dtype)

    def compute_logits(self, hidden: Tensor, layout: TokenLayout) -> Tensor:
        """[T_r, H] -> [T, V_r] with a vocab-parallel head, else [T_r, V]."""
        logits: Tensor = self.lm_head(hidden, layout)
        return logits

    def compute_loss(
        self,
        logits: Tensor,
        labels: Tensor,
        layout: TokenLayout,
        num_labels: int | float | Tensor | None = None,
        ignore_index: int = -100,
    ) -> Tensor:
        """Mean loss over the labels [T] of all ranks, the same on all ranks."""
        head = self.lm_head.parallel
        if num_labels is None:
            num_labels = (labels != ignore_index).sum().clamp(min=1)
        sharded = head is not None and getattr(head, "group", None) is not None and not head.gather_output
        if sharded:
            return vocab_parallel_cross_entropy(
                logits,
                labels,
                head.group,
                ignore_index,
                vocab_size=self.config.vocab_size,
                num_labels=num_labels,
            )
        if logits.shape[0] == layout.tokens:
            return vocab_parallel_cross_entropy(logits, labels, None, ignore_index, num_labels=num_labels)
        loss = vocab_parallel_cross_entropy(logits, layout.take(labels), None, ignore_index, num_labels=num_labels)
        from fusedtp.ops.tokens import all_reduce_sum

        return all_reduce_sum(loss, self.token_group)

    def routers_loss(
        self,
        layout: TokenLayout,
        labels: Tensor,
        num_labels: int | float | Tensor | None = None,
        ignore_index: int = -100,
    ) -> Tensor | None:
        """The sum of the routers' losses recorded in `layout`, fp64; None if there are none.

        A microbatch is weighted by its share of the labels [B, S] of all ranks that balance together, so that a step
        has one mean: a rank with few labels routes as many tokens as the others. Collective over balance_group.
        """
        found = [value for routing in _routings(layout) for value in routing.losses.values()]
        if not found:
            return None
        total = torch.stack([value.double() for value in found]).sum()
        # The loss is over all ranks, a rank's gradient only over its tokens: averaging gradients would be too small.
        total = total.detach() + (total - total.detach()) * self.data_parallel
        if num_labels is not None:
            own = (labels != ignore_index).sum(dtype=total.dtype)
            total = total * (mean_over_ranks(own, self.balance_group) / num_labels)
        return total

    def _takes_pieces(self, layout: TokenLayout) -> bool:
        """Whether this rank's logits would be too large and the head can avoid them; the same on all ranks.

        A head with hooks (such as FSDP2's, which gather its weight) must be called as a module.
        """
        head, config = self.lm_head.parallel, self.config
        if torch.compiler.is_compiling() or self.lm_head._forward_pre_hooks or self.lm_head._forward_hooks:
            return False
        if head is None:
            if self.token_split[1] > 1:
                return False  # every rank has the whole head and applies it to its own rows
            columns = config.vocab_size
        elif hasattr(head, "cross_entropy") and not head.gather_output:
            columns = -(-config.vocab_size // head.world_size)
        else:
            return False
        return layout.tokens * columns * config.compute_dtype.itemsize > config.max_logits_bytes

    def loss_by_pieces(
        self,
        hidden: Tensor,
        labels: Tensor,
        layout: TokenLayout,
        num_labels: int | float | Tensor | None = None,
        ignore_index: int = -100,
    ) -> Tensor:
        """compute_loss of compute_logits, with at most `max_logits_bytes` of logits at a time."""
        head = self.lm_head
        options: dict[str, Any] = dict(
            num_labels=num_labels, ignore_index=ignore_index, vocab_size=self.config.vocab_size,
            max_logits_bytes=self.config.max_logits_bytes,
        )  # fmt: skip
        if head.parallel is not None:
            loss: Tensor = head.parallel.cross_entropy(hidden, head, labels, layout, **options)
            return loss
        bias = None if head.bias is None else head.bias.to(hidden.dtype)
        return linear_cross_entropy(hidden, head.weight.to(hidden.dtype), labels, bias=bias, **options)

    def num_parameters(self) -> int:
        """Number of parameters of the whole model; a shared parameter counts once."""
        return sum(parameter.numel() for parameter in self.parameters())


def _routings(layout: TokenLayout) -> tuple[Routing, ...]:
    return () if layout.routings is None else tuple(layout.routings.found)
