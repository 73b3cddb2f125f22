"""How a model's blocks run: compiled or not, and what of their activations is kept for backward.

    forward --torch.compile--> compiled --recompute_--> checkpointed --FSDP2's hooks around it--> called

Checkpointing is outside of the compiled code: inside, torch 2.13 cannot order what communicates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fusedtp.nn import TransformerBlock, recompute_
from fusedtp.train.options import BlockOptions


def blocks_of(model: nn.Module) -> Sequence[nn.Module]:
    """The layers of either kind of model."""
    found: Sequence[nn.Module] | None = getattr(model, "blocks", None)
    return found or [module for module in model.modules() if isinstance(module, TransformerBlock)]


def prepare_(model: nn.Module, options: BlockOptions, two_passes: bool = False) -> None:
    """Compile and checkpoint a model's blocks as asked, in place; before FSDP2 shards them.

    two_passes   of backward, as zero-bubble schedules have them
    """
    blocks = blocks_of(model)
    if options.compile:
        # Blocks share their code, so that each graph counts against the limit of one function.
        limit = torch._dynamo.config.recompile_limit
        torch._dynamo.config.recompile_limit = max(limit, 4 * len(blocks))
        torch._functorch.config.activation_memory_budget = options.memory_budget
        for block in blocks:
            block.forward = torch.compile(block.forward, backend=options.compile_backend)
    if options.recompute != "none":
        recompute_(blocks, options.recompute, two_passes)
