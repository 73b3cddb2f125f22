"""Activation checkpointing of blocks: what of a forward pass is kept for backward, and what is computed again there.

    full        a block's input; backward runs the block again, its communication too
    selective   the results of matmuls, of attention and of all that communicates; norms, activations and the like are
                computed again (Korthikanti et al. 2022, Reducing Activation Recomputation, section 5, keep by cost too)

Either gives the same gradients to the last bit, since the same operations run on the same numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Recompute = Literal["full", "selective"]

_COSTLY = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm")


def recompute_(blocks: Iterable[nn.Module], kind: Recompute = "full") -> None:
    """Let these modules keep less for backward, in place. Before FSDP2 shards them; compile their forward before this.

    Raises ValueError for another kind.
    """
    if kind not in ("full", "selective"):
        raise ValueError(f"recompute {kind!r}: it is full or selective")
    for block in blocks:
        block.forward = _Recomputed(block.forward, kind)


class _Recomputed:
    """A block's forward under checkpoint. An object, so that a copy of the block has one with its own parameters."""

    def __init__(self, forward: Callable[..., Any], kind: Recompute) -> None:
        self.forward, self.kind = forward, kind
        functools.update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if self.kind == "selective":
            kwargs["context_fn"] = _selective
        return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)


def _selective() -> Any:
    return create_selective_checkpoint_contexts(_keeps)


def _keeps(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Whether the result of a call is kept."""
    space, _, name = op.name().partition("::") if hasattr(op, "namespace") else ("", "", op.name())
    name = name.partition(".")[0]
    costly = space == "fusedtp" or name in _COSTLY or "attention" in name
    return CheckpointPolicy.MUST_SAVE if costly else CheckpointPolicy.PREFER_RECOMPUTE
