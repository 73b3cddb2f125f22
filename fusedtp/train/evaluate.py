"""What a model is worth: its loss on held-out text, and a sample that it writes. All ranks call these together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from fusedtp.nn import CausalLM, generate
from fusedtp.train.build import Model
from fusedtp.train.data import Microbatch
from fusedtp.train.stages import Pipeline
from fusedtp.train.world import World

TEMPERATURE = 0.8


def validation_loss(
    model: Model,
    batches: Iterable[Microbatch],
    world: World,
    pipeline: Pipeline | None = None,
    pieces: int = 1,
) -> float:
    """Mean loss in nats a token over this rank's batches, in `pieces` each, then over the data-parallel ranks."""
    model.eval()
    with torch.no_grad():
        every = list(batches)
        if pipeline is None:
            losses = [model(**batch.arguments()).loss.float() for batch in every]
        else:
            losses = [pipeline.evaluate(every[i : i + pieces]) for i in range(0, len(every), pieces)]
    model.train()
    return world.mean(torch.stack(losses).sum() * pieces / len(every))


def go_on(
    model: Model, tokens: torch.Tensor, size: int, *, temperature: float, seed: int, max_context: int
) -> torch.Tensor:
    """tokens [1, P] and `size` more, drawn from the model; one of transformers ends where a document does."""
    options: dict[str, Any] = {"temperature": temperature, "seed": seed, "max_context": max_context}
    if isinstance(model, CausalLM):
        return generate(model, tokens, size, **options)
    return model.generate(tokens, size, **options)


def sample(model: Model, prompt: list[int], size: int, *, length: int, seed: int) -> list[int]:
    """`size` tokens that the model continues `prompt` with, seeing at most `length` at a time."""
    device = next(model.parameters()).device
    tokens = torch.tensor([prompt], device=device)
    if isinstance(model, FSDPModule):
        model.unshard()  # writing calls parts of the model, around the hooks of its forward
    tokens = go_on(model, tokens, size, temperature=TEMPERATURE, seed=seed, max_context=length)
    if isinstance(model, FSDPModule):
        model.reshard()
    written: list[int] = tokens[0, len(prompt) :].tolist()
    return written
