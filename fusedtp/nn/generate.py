"""Sampling from a causal language model without a KV cache: every new token runs the whole context."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedtp.comm import place
from fusedtp.ops.rows import split
from fusedtp.ops.tokens import gather_tokens

from .model import CausalLM


@torch.no_grad()
def generate(
    model: CausalLM,
    input_ids: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
    max_context: int | None = None,
) -> Tensor:
    """Extend every sequence by max_new_tokens.

    input_ids     [B, S]   S at least 1, the same on all ranks
    temperature   0: the most likely token; otherwise sampled, the same on all ranks for the same seed
    max_context   number of last tokens that the model sees; None: all
    return        [B, S + max_new_tokens]
    """
    if input_ids.dim() != 2 or input_ids.shape[1] == 0:
        raise ValueError(f"wanted input_ids [B, S] with S at least 1, got {tuple(input_ids.shape)}")
    generator = torch.Generator().manual_seed(seed)
    training = model.training
    model.eval()
    try:
        for _ in range(max_new_tokens):
            context = input_ids if max_context is None else input_ids[:, -max_context:]
            logits = last_logits(model, context).float().cpu()
            token = _pick(logits, temperature, top_k, generator)
            input_ids = torch.cat((input_ids, token.to(input_ids)), dim=1)
    finally:
        model.train(training)
    return input_ids


def last_logits(model: CausalLM, input_ids: Tensor) -> Tensor:
    """[B, V]: logits after each sequence's last token, with the full vocabulary on every rank."""
    batch, length = input_ids.shape
    layout = model.layout(input_ids)
    logits = model.compute_logits(model.hidden_states(input_ids, layout), layout)
    if logits.shape[0] != layout.tokens:
        logits = gather_tokens(logits, model.token_group, layout.sizes, "generate")
    last = logits.view(batch, length, -1)[:, -1]
    vocab_size = model.config.vocab_size
    if last.shape[1] == vocab_size:
        return last
    group = model.lm_head.parallel.group
    sizes = split(vocab_size, place(group).world_size)
    return gather_tokens(last.t(), group, sizes, "generate").t()


def _pick(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    """[B, V] -> [B, 1]."""
    if temperature <= 0.0:
        return logits.argmax(dim=-1, keepdim=True)
    if top_k is not None and top_k < logits.shape[-1]:
        smallest = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    return torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)
