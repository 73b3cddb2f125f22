"""What a parallel layer does: the objects stored at `module.parallel`.

    ColumnParallel   x [T_r, K] -> gather, matmul -> [T, N_i]       one gather for all linears of `project`
    RowParallel      x [T, K_r] -> matmul, reduce-scatter -> [T_r, N]
    VocabParallel    ids [T] -> lookup of this rank's ids, reduce-scatter -> [T_r, H]
    ExpertParallel   x [T_r, K] -> dispatch, matmuls of this rank's experts, combine -> [T_r, K]   expert_parallel.py
    Replica          parameters that every rank holds whole
    Replicas         the replicated parameters of a block's modules, read by one autograd node

Without sequence parallelism every rank holds the whole activations between layers: ColumnParallel passes x through
`copy_to_group`, RowParallel and the embedding end in an all-reduce. With dim=1, tokens are [B, S_r, H] instead.

These objects hold only names and numbers, no tensors and no process group, so that a model can be copied and compiled.
Their methods take the module, x and the layout. `fusedtp.nn` modules call them (see nn/hooks.py); a third-party
module gets a `forward` that does.

If a parameter has an attribute `main_grad`, its gradient is added there instead of to `.grad`: the weight gradient of
a linear layer in fp32 without rounding, any other (bias, norm, embedding) as autograd computed it. This cannot be
compiled. See Note [main_grad] in ops/main_grad.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fusedtp import ops
from fusedtp.comm import communicator
from fusedtp.nn.linear_loss import linear_cross_entropy
from fusedtp.ops.main_grad import Runs, SharedMainGrad, accumulating, main_grad_of
from fusedtp.ops.rows import split
from fusedtp.ops.tokens import all_reduce_sum, copy_to_group, gather_tokens, reduce_scatter_tokens

from .placement import local, opened, read, reads_itself


@dataclass(frozen=True)
class Member:
    """This rank's position in the group that shares a layer.

    group                 name of the communicator
    engine                see ops/engines.py
    sequence_parallel     whether tokens are split between layers
    dim                   0: tokens are [T_r, H]; 1: [B, S_r, H]
    sizes                 number of tokens on each rank, if no layout gives it. None: for a gather all ranks have
                          equally many, for a scatter they are split as by torch.chunk
    layer                 the kind of layer that calls are counted for, such as mlp.down_proj
    unequal               number of features on each rank, if they differ
    """

    group: str
    rank: int
    world_size: int
    engine: str = "auto"
    sequence_parallel: bool = True
    dim: int = 0
    sizes: tuple[int, ...] | None = None
    layer: str = ""
    unequal: tuple[int, ...] = ()

    def token_sizes(self, layout: Any) -> tuple[int, ...] | None:
        """Number of tokens on each rank: from the layout, else `sizes`."""
        sizes = getattr(layout, "sizes", ())
        return tuple(sizes) if len(sizes) == self.world_size else self.sizes


class Operations(NamedTuple):
    """The matmuls that a linear layer uses. A linear with its own (nn/fp8.py) has an attribute `operations`."""

    gather: Callable[..., tuple[Tensor, ...]]
    scatter: Callable[..., Tensor]
    local: Callable[..., Tensor]
    all_reduce: Callable[..., Tensor]

    def instead_of(self, operation: str, tokens: int) -> str:
        """The name of the operation that runs instead of one in the working dtype, for this number of tokens."""
        return operation


PLAIN = Operations(ops.all_gather_matmul, ops.matmul_reduce_scatter, ops.local_linear, ops.matmul_all_reduce)


def operations_of(linear: Any) -> Any:
    return getattr(linear, "operations", PLAIN)


def unequal(features: int, world_size: int) -> tuple[int, ...]:
    """Number of features on each rank; empty if they are equal."""
    sizes = split(features, world_size)
    return sizes if len({*sizes}) > 1 else ()


def draws_in_part(at: Member, linear: Any, x: Tensor) -> None:
    """After a column-parallel layer: random numbers are now drawn for this rank's features only."""
    if at.unequal and linear.training and not torch.compiler.is_compiling():
        communicator(at.group).draws.part(x.device)


def draws_in_whole(at: Member, linear: Any, x: Tensor) -> None:
    """Before a row-parallel layer: random numbers are now drawn for whole tensors, the same on all ranks."""
    if at.unequal and linear.training and not torch.compiler.is_compiling():
        communicator(at.group).draws.whole(x.device, 0 in at.unequal)


@dataclass(frozen=True)
class Replica:
    """Parameters that every rank holds whole. Not a Member, since the module's output is not split.

    members   name of the communicator
    partial   whether this rank sees only some of the tokens or heads, so that gradients are summed
    """

    members: str
    partial: bool = True

    def read(self, parameter: Tensor) -> Tensor:
        """The parameter as a plain tensor; its gradient is complete on every rank."""
        return with_reduced_grad(parameter, self.members) if self.partial else accumulated(parameter)

    def _weight(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        if main_grad_of(weight) is None:
            return self.read(weight).to(dtype)
        return with_main_grad(weight, dtype, self.members if self.partial else None)

    def linear(self, x: Tensor, linear: Any, layout: Any = None) -> Tensor:
        """x [..., K] -> [..., N], for any tokens."""
        bias = None if linear.bias is None else self.read(linear.bias).to(x.dtype)
        return operations_of(linear).local(x, self._weight(linear.weight, x.dtype), bias)

    def project(
        self, x: Tensor, linears: Sequence[Any], layout: Any = None, gathering: Any = None
    ) -> tuple[Tensor, ...]:
        """Call each linear separately."""
        return tuple(each(x) for each in linears)


@dataclass(frozen=True)
class ColumnParallel(Member):
    """A linear layer with output features split over ranks.

    gather_output   return all N features on every rank (a second gather, over columns)
    features        runs (begin, count): the weight is replicated and this rank uses these rows of it, one run after
                    another (fewer kv heads than ranks, or queries packed with fewer keys and values); None: the weight
                    is sharded
    """

    gather_output: bool = False
    features: Runs | None = None

    def linear(self, x: Tensor, linear: Any, layout: Any = None) -> Tensor:
        """x [T_r, K] -> [T, N_r]; without sequence parallelism x [..., K] -> [..., N_r]."""
        return self.project(x, (linear,), layout)[0]

    def project(
        self, x: Tensor, linears: Sequence[Any], layout: Any = None, gathering: Any = None
    ) -> tuple[Tensor, ...]:
        """x [T_r, K] -> one [T, N_i] per linear, with one gather of x for all; or the outputs of `gathering`."""
        if not self.sequence_parallel:
            return self.project_whole(x, linears)
        return self.project_rows(x, linears, self.token_sizes(layout), gathering)

    def project_rows(
        self, x: Tensor, linears: Sequence[Any], sizes: Sequence[int] | None, gathering: Any = None
    ) -> tuple[Tensor, ...]:
        """x [T_r, K], `sizes` the number of rows on each rank -> one [T, N_i] per linear."""
        operations = operations_of(linears[0])
        if any(operations_of(each) != operations for each in linears):
            return tuple(self.project_rows(x, (each,), sizes)[0] for each in linears)
        plain = operations is PLAIN
        weights, biases = self._weights(x, linears, fused=plain)
        whole = any(each.parallel.gather_output for each in linears)
        ys = (operations.gather if gathering is None or whole or not plain else gathering)(
            x, weights, self.group, biases=biases, sizes=sizes, dim=self.dim, engine=self.engine,
            layer=joined_kind([each.parallel.layer for each in linears]),
        )  # fmt: skip
        return _outputs(ys, linears) if whole else ys

    def project_whole(self, x: Tensor, linears: Sequence[Any]) -> tuple[Tensor, ...]:
        """x [..., K], the same on every rank -> one [..., N_i] per linear."""
        weights, biases = self._weights(x, linears)
        x = copy_to_group(x, self.group, layer=joined_kind([each.parallel.layer for each in linears]))
        each_with = zip(linears, weights, biases, strict=True)
        ys = tuple(operations_of(each).local(x, w, b) for each, w, b in each_with)
        return _outputs(ys, linears)

    def _weights(
        self, x: Tensor, linears: Sequence[Any], fused: bool = False
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        if any(not isinstance(each.parallel, ColumnParallel) for each in linears):
            raise ValueError(f"linears that share one input must all be column-parallel, not {list(linears)}")
        weights: list[Tensor] = []
        biases: list[Tensor | None] = []
        for each in linears:
            at, weight, bias = each.parallel, each.weight, each.bias
            weights.append(weight if fused and at._is_operand(weight, x) else at._weight(weight, x.dtype))
            if bias is not None and not (fused and at._is_operand(bias, x)):
                bias = at._own(bias).to(x.dtype)
            biases.append(bias)
        return weights, biases

    def cross_entropy(self, x: Tensor, linear: Any, labels: Tensor, layout: Any = None, **options: Any) -> Tensor:
        """The loss of an LM head, computed from chunks of the logits, see nn/linear_loss.py.

        x   [T_r, H]; without sequence parallelism [T, H]
        """
        weight = self._weight(linear.weight, x.dtype)
        bias = None if linear.bias is None else self._own(linear.bias).to(x.dtype)
        sizes = None
        if self.sequence_parallel:
            sizes = self.token_sizes(layout) or (x.shape[0],) * self.world_size
        else:
            x = copy_to_group(x, self.group, layer=self.layer)
        return linear_cross_entropy(x, weight, labels, self.group, bias=bias, sizes=sizes, **options)

    def _is_operand(self, parameter: Tensor, x: Tensor) -> bool:
        return self.features is None and is_operand(parameter, x)

    def _own(self, parameter: Tensor) -> Tensor:
        own = accumulated(parameter)
        return own if self.features is None else rows_of(read(own, self.group), self.features)

    def _weight(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        if main_grad_of(weight) is None:
            return self._own(weight).to(dtype)
        return with_main_grad(weight, dtype, self.group if self.features else None, self.features)

    def _gathered(self, y: Tensor, linear: Any) -> Tensor:
        columns = split(linear.out_features, self.world_size)
        return gather_tokens(y.movedim(-1, 0), self.group, columns, self.layer).movedim(0, -1)


@dataclass(frozen=True)
class RowParallel(Member):
    """A linear layer with input features split over ranks; the bias is added once."""

    def linear(self, x: Tensor, linear: Any, layout: Any = None) -> Tensor:
        """x [T, K_r] -> [T_r, N]; without sequence parallelism x [..., K_r] -> [..., N]."""
        if not self.sequence_parallel:
            return self.summed(x, linear)
        return self.scattered(x, linear, self.token_sizes(layout))

    def scattered(self, x: Tensor, linear: Any, sizes: Sequence[int] | None) -> Tensor:
        """x [T, K_r] -> [T_r, N], `sizes` the number of rows on each rank."""
        weight, bias, operations = linear.weight, linear.bias, operations_of(linear)
        taken = operations is PLAIN and is_operand(weight, x)
        weight = weight if taken else with_main_grad(weight, x.dtype)
        bias = None if bias is None else with_reduced_grad(bias, self.group).to(x.dtype)
        return operations.scatter(
            x, weight, self.group, bias=bias, sizes=sizes, dim=self.dim, engine=self.engine, layer=self.layer
        )

    def summed(self, x: Tensor, linear: Any) -> Tensor:
        """x [..., K_r] -> [..., N] on every rank."""
        weight, bias = with_main_grad(linear.weight, x.dtype), linear.bias
        bias = None if bias is None else accumulated(bias).to(x.dtype)
        how: dict[str, Any] = dict(bias=bias, engine=self.engine, layer=self.layer)
        return operations_of(linear).all_reduce(x, weight, self.group, **how)


@dataclass(frozen=True)
class Replicas:
    """A block's `replicas`: see Note [Gradients of replicated parameters] in placement.py.

    below   names of the block's modules with replicated parameters whose gradients are partial on each rank
    """

    members: str
    below: tuple[str, ...]

    def opened(self, block: nn.Module) -> AbstractContextManager[None]:
        """A context in which these parameters are plain tensors; their gradients are summed in one call."""
        return opened([(block, name) for name in self.below], self.members, _takes_plain)

    def all_opened(self, blocks: Sequence[nn.Module]) -> AbstractContextManager[None]:
        """The same for several blocks, skipping those that must read their own parameters."""
        free: list[Any] = [block for block in dict.fromkeys(blocks) if not reads_itself(block)]
        found = [(block, getattr(block, "replicas", None)) for block in free]
        below = [(block, name) for block, replicas in found if replicas is not None for name in replicas.below]
        return opened(below, self.members, _takes_plain)


def _takes_plain(module: Any) -> bool:
    """Whether the module reads its parameters through `with_reduced_grad`; a module that the user put in does not.

    All ranks must agree, so this must not depend on hooks, which may exist on one rank only.
    """
    return isinstance(getattr(module, "parallel", None), Replica | RowParallel)


@dataclass(frozen=True)
class VocabParallel(Member):
    """An embedding split over the vocabulary."""

    def embed(self, input_ids: Tensor, embedding: Any, layout: Any = None) -> Tensor:
        """ids [T] or [B, S] -> [T_r, H]; [B, S] -> [B, S_r, H] with dim=1; all rows without sequence parallelism."""
        y = self.lookup(input_ids, embedding)
        if not self.sequence_parallel:
            return all_reduce_sum(y, self.group, self.layer)
        sizes = self.token_sizes(layout)
        if self.dim == 0:
            y = y.flatten(0, -2)
            sizes = sizes or split(y.shape[0], self.world_size)
            return reduce_scatter_tokens(y, self.group, sizes, self.layer)
        sizes = sizes or split(y.shape[1], self.world_size)
        return reduce_scatter_tokens(y.transpose(0, 1), self.group, sizes, self.layer).transpose(0, 1)

    def lookup(self, input_ids: Tensor, embedding: Any) -> Tensor:
        """ids [...] -> [..., H]: embeddings of the ids that this rank holds, zeros for the others.

        Raises IndexError (on CPU, if not compiled) for an id outside the vocabulary, as torch does.
        """
        weight, vocab_size = accumulated(embedding.weight), embedding.num_embeddings
        if input_ids.device.type == "cpu" and not torch.compiler.is_compiling():
            wrong = (input_ids < 0) | (input_ids >= vocab_size)
            if bool(wrong.any()):
                raise IndexError(f"id {int(input_ids[wrong][0])} is outside the vocabulary of {vocab_size}")
        rows = weight.shape[0]
        begin = sum(split(vocab_size, self.world_size)[: self.rank])
        if rows == 0:
            weight = F.pad(weight, (0, 0, 0, 1))
        ids = input_ids - begin
        mine = (ids >= 0) & (ids < rows)
        padding = getattr(embedding, "padding_idx", None)
        padding = padding - begin if padding is not None and begin <= padding < begin + rows else None
        y = F.embedding(ids.where(mine, 0), weight, padding)
        return y.masked_fill(~mine[..., None], 0)


def _outputs(ys: Sequence[Tensor], linears: Sequence[Any]) -> tuple[Tensor, ...]:
    return tuple(
        each.parallel._gathered(y, each) if each.parallel.gather_output else y
        for y, each in zip(ys, linears, strict=True)
    )


def kind_of(name: str) -> str:
    """layers.3.self_attn.q_proj -> self_attn.q_proj: the same for all layers of a stack."""
    return ".".join([part for part in name.split(".") if not part.isdigit()][-2:])


def joined_kind(kinds: Sequence[str]) -> str:
    """self_attn.q_proj, self_attn.k_proj -> self_attn.q_proj+k_proj"""
    return "+".join([kinds[0], *(kind.rpartition(".")[2] for kind in kinds[1:])])


def is_operand(parameter: Tensor, x: Tensor) -> bool:
    """Whether a fused operation can take the parameter as it is, along with x."""
    plain = isinstance(parameter, DTensor) and parameter.dtype == x.dtype and not torch.compiler.is_compiling()
    return plain and main_grad_of(parameter) is None


def accumulated(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter; its gradient is added to the parameter's main_grad, if it has one."""
    main_grad = main_grad_of(parameter)
    return local(parameter) if main_grad is None else accumulating(local(parameter), local(main_grad))


def with_reduced_grad(parameter: Tensor, group: str) -> Tensor:
    """The same for a replicated parameter with partial gradients: they are all-reduced over the group first."""
    return read(parameter if main_grad_of(parameter) is None else accumulated(parameter), group)


def rows_of(weight: Tensor, runs: Runs) -> Tensor:
    """These rows of a weight or bias, one run (begin, count) after another; a view if there is only one."""
    parts = [weight.narrow(0, begin, count) for begin, count in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def with_main_grad(
    weight: Tensor, dtype: torch.dtype, group: str | None = None, features: Runs | None = None
) -> Tensor:
    """This rank's part in `dtype`; it keeps the parameter's `main_grad`, if there is one, for wgrad to add to.

    group      ranks that all hold the weight, but each only a part of its gradient
    features   runs (begin, count) of the rows of such a weight that this rank uses
    """
    own = local(weight) if features is None else rows_of(local(weight), features)
    main_grad = main_grad_of(weight)
    own = own.to(dtype)
    if main_grad is not None:
        total = local(main_grad)
        own = own.view_as(own)  # a view, so that main_grad is not set on the parameter itself
        own.main_grad = total if group is None else SharedMainGrad(total, group, features)  # type: ignore[attr-defined]
    return own
