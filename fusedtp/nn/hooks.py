"""What a module asks of its `.parallel` object.

The modules of this package are ordinary single-device modules. `fusedtp.parallel.parallelize` gives some
of them an attribute `parallel`; where it is not None, the module hands over the few steps that differ:

    module                    step                      hook
    Linear, several on one x  one gather, W matmuls     parallel.project(x, linears, layout, gathering) -> tuple
    Linear                    the whole layer           parallel.linear(x, linear, layout) -> Tensor
    VocabParallelEmbedding    the lookup                parallel.embed(input_ids, embedding, layout)
    Experts                   the whole layer           parallel.experts(x, expert_ids, weights, experts, layout)
    MoE.experts               whose tokens are balanced parallel.token_group
    RMSNorm, Router           reading a parameter       parallel.read(parameter) -> plain tensor
    CausalLM.lm_head          which ranks hold vocab    parallel.group, parallel.gather_output
                              the loss by pieces        parallel.cross_entropy(x, linear, labels, layout, **options)

A TransformerBlock also gets an attribute `replicas`. With it, the block or a model of such blocks reads the parameters
that all ranks hold in one autograd node: replicas.opened(block) and replicas.all_opened(blocks) -> context managers.

Besides, these know that ranks exist: TokenLayout (which rows are mine), CausalLM (token_split and token_group, set by
parallelize), the loss and `generate` (which read sharded logits), init_ (which draws a DTensor's own part), and Router
and its neighbours balance.py and capacity.py (whose batch is that of all ranks of a group passed in).
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
    """Every hook; an object implements those that its kind of module asks for."""

    # What communicator() takes. On lm_head: the ranks that hold the other vocabulary shards of the logits.
    group: Any
    # True: `linear` and `project` return full columns on every rank (the plan "colwise_gather_output").
    gather_output: bool

    def read(self, parameter: Tensor) -> Tensor:
        """The plain local tensor of a parameter, with gradients summed over ranks where each sees a part."""

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

        gathering   an operation to do it by, where x is gathered; called as all_gather_matmul is
        """

    def embed(self, input_ids: Tensor, embedding: nn.Module, layout: TokenLayout) -> Tensor:
        """[T] ids of all ranks -> [T_r, H]."""


def parallel_of(module: nn.Module) -> Any:
    """The module's `.parallel` object, or None where it is an ordinary module."""
    return getattr(module, "parallel", None)


def is_called_plainly(module: nn.Module) -> bool:
    """Whether a call runs the forward of its class and nothing else: no hooks, no forward of its own, not compiled."""
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
    """For the forward of a block: `replicas.opened`, in eager code that records gradients."""
    replicas = _replicas([block])
    context: AbstractContextManager[None] = nullcontext() if replicas is None else replicas.opened(block)
    return context


def all_opened(blocks: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """For calls of several blocks: `replicas.all_opened`, likewise."""
    replicas = _replicas(blocks)
    context: AbstractContextManager[None] = nullcontext() if replicas is None else replicas.all_opened(blocks)
    return context


def _replicas(blocks: Sequence[nn.Module]) -> Any:
    """The first block's that has some, where they are to be used."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None
    return next((found for block in blocks if (found := getattr(block, "replicas", None)) is not None), None)
