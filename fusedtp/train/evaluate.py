"""What a model is worth: its loss on held-out text, and a sample that it writes. All ranks call these together."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from fusedtp.nn import CausalLM, generate
from fusedtp.train.world import World

TEMPERATURE = 0.8


def validation_loss(model: CausalLM, batches: Iterable[tuple[Tensor, Tensor]], world: World) -> float:
    """Mean loss in nats a byte over this rank's batches, then over the data-parallel ranks."""
    model.eval()
    with torch.no_grad():
        losses = [model(input_ids, labels).loss.float() for input_ids, labels in batches]
    model.train()
    return world.mean(torch.stack(losses).mean())


def sample(model: CausalLM, prompt: bytes, size: int, *, length: int, seed: int) -> bytes:
    """`size` bytes that the model continues `prompt` with, seeing at most `length` at a time."""
    device = next(model.parameters()).device
    tokens = torch.tensor([list(prompt)], device=device)
    if isinstance(model, FSDPModule):
        model.unshard()  # generate() calls parts of the model, around the hooks of its forward
    tokens = generate(model, tokens, size, temperature=TEMPERATURE, seed=seed, max_context=length)
    if isinstance(model, FSDPModule):
        model.reshard()
    return bytes(tokens[0, len(prompt) :].tolist())
