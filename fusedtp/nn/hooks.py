"""The interface between a module and its `.parallel` object.

The modules of this package are ordinary single-device modules. `fusedtp.parallel.parallelize` sets the attribute
`parallel` of some of them; if it is not None, the module delegates the few steps that differ to it:

    module                    step                      hook
    Linear, several on one x  one gather, W matmuls     parallel.project(x, linears, layout, gathering) -> tuple
    Linear                    the whole layer           parallel.linear(x, linear, layout) -> Tensor
    VocabParallelEmbedding    the lookup                parallel.embed(input_ids, embedding, layout)
    Experts                   the whole layer           parallel.experts(x, expert_ids, weights, experts, layout)
    MoE.experts               ranks to balance over     parallel.token_group
    RMSNorm, Router           reading a parameter       parallel.read(parameter) -> plain tensor
    CausalLM.lm_head          which ranks hold vocab    parallel.group, parallel.gather_output
                              the loss in pieces        parallel.cross_entropy(x, linear, labels, layout, **options)

A TransformerBlock also gets an attribute `replicas`. With it, the block or a model of such blocks reads replicated
parameters in one autograd node: replicas.opened(block) and replicas.all_opened(blocks) -> context managers.

Apart from these hooks, only the following code is aware of ranks: TokenLayout (this rank's rows), CausalLM (token_split
and token_group, set by parallelize), the loss and `generate` (they read sharded logits), init_ (it draws a DTensor's
local part), and Router with balance.py and capacity.py (their batch is that of all ranks of a given group).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_all_modules

if TYPE_CHECKING:
    from .layout import TokenLayout


class Parallel(Protocol):
    """All hooks; an object implements those that its kind of module uses."""

    # Anything communicator() accepts. On lm_head: the ranks that hold the other vocabulary shards of the logits.
    group: Any
    # True: `linear` and `project` return full columns on every rank (the plan "colwise_gather_output").
    gather_output: bool

    def read(self, parameter: Tensor) -> Tensor:
        """The plain local tensor of a parameter; its gradient is summed over ranks if it is partial."""

    def linear(self, x: Tensor, linear: nn.Module, layout: TokenLayout | None) -> Tensor:
        """Column-parallel: [T_r, K] -> [T, N_r]. Row-parallel: [T, K_r] -> [T_r, N]."""

    def project(
        self,
        x: Tensor,
        linears: Sequence[nn.Module],
        layout: TokenLayout | None,
        gathering: Callable[..., tuple[Tensor, ...]] | None = None,
    ) -> tuple[Tensor, ...]:
        """Column-parallel, several weights on one gathered x: [T_r, K] -> ([T, N_r], ...).

        gathering   if x is gathered, the operation to use; called like all_gather_matmul
        """

    def embed(self, input_ids: Tensor, embedding: nn.Module, layout: TokenLayout) -> Tensor:
        """[T] ids of all tokens -> [T_r, H]."""


def parallel_of(module: nn.Module) -> Any:
    """The module's `.parallel` object, or None for an ordinary module."""
    return getattr(module, "parallel", None)


def is_called_plainly(module: nn.Module) -> bool:
    """Whether a call runs only the forward of its class: no hooks, no forward on the instance, not compiled."""
    hooks = (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
        of_all_modules._global_forward_pre_hooks,
        of_all_modules._global_forward_hooks,
        of_all_modules._global_backward_pre_hooks,
        of_all_modules._global_backward_hooks,
    )
    return not (any(hooks) or module._compiled_call_impl or "forward" in module.__dict__)


def read(module: nn.Module, name: str) -> Any:
    """Parameter `name` of `module` as a plain tensor (None stays None)."""
    parameter = getattr(module, name)
    parallel = parallel_of(module)
    return parameter if parameter is None or parallel is None else parallel.read(parameter)


def opened(block: nn.Module) -> AbstractContextManager[None]:
    """`replicas.opened` for the forward of a block, in eager code with gradients enabled; otherwise no context."""
    replicas = _replicas([block])
    context: AbstractContextManager[None] = nullcontext() if replicas is None else replicas.opened(block)
    return context


def all_opened(blocks: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """`replicas.all_opened` for calls of several blocks, under the same conditions."""
    replicas = _replicas(blocks)
    context: AbstractContextManager[None] = nullcontext() if replicas is None else replicas.all_opened(blocks)
    return context


def _replicas(blocks: Sequence[nn.Module]) -> Any:
    """The first `replicas` found on these blocks; None if they are not used."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None
    return next((found for block in blocks if (found := getattr(block, "replicas", None)) is not None), None)
