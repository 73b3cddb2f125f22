"""Activation checkpointing of blocks: what a forward pass saves for backward, and what backward recomputes.

    full        saves a block's input; backward runs the block again, including its communication
    selective   saves the results of matmuls, attention and all communication; norms, activations and the like are
                recomputed (Korthikanti et al. 2022, Reducing Activation Recomputation, section 5, also select by cost)

Both give bitwise the same gradients, since the same operations run on the same numbers.

Note [Backward in two passes]
Zero-bubble schedules call autograd several times for one forward: once for the gradients of a stage's inputs, later for
those of its weights. torch's checkpoint recomputes in each of these calls, including communication (torchtitan issue
3584), and selective checkpointing allows only one call. `_Once` recomputes in the first call and keeps the result until
the graph is freed after the last one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Recompute = Literal["full", "selective"]

_COSTLY = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm")


def recompute_(blocks: Iterable[nn.Module], kind: Recompute = "full", two_passes: bool = False) -> None:
    """Checkpoint these modules in place. Call it before FSDP2 shards them, and after compiling their forward.

    two_passes   backward runs in two passes, as in zero-bubble schedules; see Note [Backward in two passes]
    Raises ValueError for another kind.
    """
    if kind not in ("full", "selective"):
        raise ValueError(f"recompute is {kind!r}, must be full or selective")
    for block in blocks:
        block.forward = _Recomputed(block.forward, kind, two_passes)


class _Recomputed:
    """A block's forward under checkpoint. It is an object, so that a copied block gets one with its own parameters."""

    def __init__(self, forward: Callable[..., Any], kind: Recompute, two_passes: bool) -> None:
        self.forward, self.kind, self.two_passes = forward, kind, two_passes
        functools.update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if self.two_passes:
            return _Once(self.forward, args, kwargs, self.kind)()
        if self.kind == "selective":
            kwargs["context_fn"] = _selective
        return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)


class _Once:
    """One forward with its saved tensors dropped; they are recomputed when backward needs the first, and then kept."""

    def __init__(
        self, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], kind: Recompute
    ) -> None:
        self.forward, self.args, self.kwargs = forward, args, kwargs
        self.contexts = _selective() if kind == "selective" else (nullcontext(), nullcontext())
        tensors = [x for x in args if isinstance(x, Tensor)]
        kind_of_device = tensors[0].device.type if tensors else "cpu"
        self.autocast = torch.autocast(
            kind_of_device,
            torch.get_autocast_dtype(kind_of_device),
            torch.is_autocast_enabled(kind_of_device),
        )
        self.devices = sorted({x.get_device() for x in tensors if x.is_cuda})
        self.random = torch.get_rng_state(), [torch.cuda.get_rng_state(device) for device in self.devices]
        self.dropped, self.saved = 0, list[Tensor]()

    def __call__(self) -> Any:
        with saved_tensors_hooks(self._drop, self._find), self.contexts[0]:
            return self.forward(*self.args, **self.kwargs)

    def _drop(self, tensor: Tensor) -> int:
        self.dropped += 1
        return self.dropped - 1

    def _find(self, index: int) -> Tensor:
        if not self.saved:
            self._again()
        return self.saved[index]

    def _again(self) -> None:
        keep = saved_tensors_hooks(lambda tensor: self.saved.append(tensor.detach()), lambda nothing: nothing)
        with torch.random.fork_rng(self.devices), torch.enable_grad(), self.autocast, keep, self.contexts[1]:
            torch.set_rng_state(self.random[0])
            for device, state in zip(self.devices, self.random[1], strict=True):
                torch.cuda.set_rng_state(state, device)
            self.forward(*self.args, **self.kwargs)
        if len(self.saved) != self.dropped:
            raise RuntimeError(
                f"a block saved {self.dropped} tensors for backward, but {len(self.saved)} when it was recomputed; its "
                "forward must run the same operations both times"
            )


def _selective() -> Any:
    return create_selective_checkpoint_contexts(_keeps)


def _keeps(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Whether to save the result of a call."""
    space, _, name = op.name().partition("::") if hasattr(op, "namespace") else ("", "", op.name())
    name = name.partition(".")[0]
    costly = space == "fusedtp" or name in _COSTLY or "attention" in name
    return CheckpointPolicy.MUST_SAVE if costly else CheckpointPolicy.PREFER_RECOMPUTE
