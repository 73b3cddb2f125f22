"""Tensor parallelism for third-party modules, unchanged: the forwards by which a split module runs.

A plan's words choose them; foreign_styles.py says what each word splits and refuses.

    colwise                       nn.Linear: one gather for all linears that share an input, `columns`
    colwise_gather_output         the same, and each rank gets all features
    rowwise                       nn.Linear: matmul, then reduce-scatter into a TokenShard, or all-reduce, `rows`
    rowwise_split_input           the same, but the input is whole, and each rank takes its features of it
    embedding_rowwise             nn.Embedding: lookup of this rank's ids, then as rowwise
    moe_tp_experts, all_reduce    runs the module's own forward on this rank's parameter shards: a partial sum
    mla_kv_a_proj                 replicated; the gradients of the rotary keys are partial on each rank
    replicated_with_grad_allreduce  replicated; each rank sees only some of the heads
    anything else                 the module's own forward, with its parameters as plain local tensors

A forward is replaced only if it is known to be that of nn.Linear or nn.Embedding: if a class overrides it, or an
instance was patched, it is called with local parameters, or rejected. Each call decides whether tokens are split:
a layer that gets a TokenShard gathers its rows; a layer that gets a plain tensor assumes it is the same on all ranks.
Rows are split if a call has more than one position per sequence; one new token per sequence (decoding) stays whole.

The objects at `module.parallel` are those of layers.py; state of the whole model (such as how often each operation had
to gather) is shared by all its modules.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from fusedtp.comm.draws import Watched
from fusedtp.ops.main_grad import main_grad_of
from fusedtp.ops.rows import split
from fusedtp.ops.tokens import (
    all_gather_tokens,
    all_gather_tokens_of,
    all_reduce_sum,
    copy_to_group,
    gather_tokens,
    reduce_scatter_tokens,
    take_tokens,
)

from .agree import check_draws, named_leaves
from .attention_maps import gather_maps
from .layers import (
    ColumnParallel,
    RowParallel,
    VocabParallel,
    accumulated,
    draws_in_part,
    draws_in_whole,
    with_reduced_grad,
)
from .placement import is_compiled, is_replicated, local, opened
from .question import Question, precision
from .siblings import Siblings, in_autocast, project_all
from .table_rows import Table, as_parameter
from .token_shard import Tokens, TokenShard
from .vocab_shard import Columns as VocabColumns
from .vocab_shard import VocabShard


@dataclass
class Model:
    """State shared by the modules of one model.

    group      name of the communicator
    gathered   operation -> how often it had to gather tokens
    calls      number of calls of split linears: "fused" (token communication inside the matmul) or "whole"
    siblings   linears that share their input
    maps       True: attention maps that the model returns cover only this rank's heads
    whole      module that the plan would have split -> why it stays whole
    compiled   True once the model or a part of it is compiled. Tokens then stay whole, since a compiler cannot trace a
               TokenShard. Never reset, since backward may run a forward again
    watched    records random draws of a forward that ranks started with different generator states
    running    whether the model's forward runs; after one that raised, True until the next one ends
    """

    group: str = ""
    gathered: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    siblings: list[Siblings] = field(default_factory=list)
    maps: bool = False
    whole: dict[str, str] = field(default_factory=dict)
    compiled: bool = False
    watched: Watched | None = None
    running: bool = False

    def drawing(self, part: bool) -> None:
        """Random numbers are now drawn for this rank's features (part), or for whole tensors."""
        if self.watched is not None and not torch.compiler.is_compiling():
            self.watched.part(part)

    def count(self, fused: bool) -> None:
        """Count a call of a split linear. Not in compiled code: each new value would trigger a recompile."""
        if not torch.compiler.is_compiling():
            self.calls["fused" if fused else "whole"] += 1


@dataclass(frozen=True, kw_only=True)
class Columns(ColumnParallel):
    """A linear layer of a third-party model, with output features split.

    vocabulary   its outputs are logits
    transposed   its weight is [in, out]
    """

    model: Model = field(compare=False)
    siblings: Siblings = field(default_factory=Siblings, compare=False)
    vocabulary: bool = False
    transposed: bool = False

    def _weight(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        return super()._weight(turned(weight) if self.transposed else weight, dtype)

    def _is_operand(self, parameter: Tensor, x: Tensor) -> bool:
        return not self.transposed and super()._is_operand(parameter, x)


@dataclass(frozen=True, kw_only=True)
class Rows(RowParallel):
    """A linear layer with input features split.

    split_input   its input is whole, and each rank takes its part
    transposed    its weight is [in, out]
    """

    model: Model = field(compare=False)
    split_input: bool = False
    transposed: bool = False


class Linear(NamedTuple):
    """What RowParallel reads of a linear layer."""

    weight: Tensor
    bias: Tensor | None


def turned(weight: Any) -> Tensor:
    """This rank's part of a weight [in, out] as that of nn.Linear, [out, in], with its `main_grad`."""
    own, main_grad = local(weight).t(), main_grad_of(weight)
    if main_grad is not None:
        own.main_grad = local(main_grad).t()  # type: ignore[attr-defined]
    return own


@dataclass(frozen=True, kw_only=True)
class Vocabulary(VocabParallel):
    """An embedding split over the vocabulary."""

    model: Model = field(compare=False)


@dataclass
class Seen:
    """Whether ranks see different heads in a module that no plan names, learned from its forwards and backwards.

    inputs      whether its inputs differ between ranks
    asking      this call's inputs do not show it, so the gradients of its parameters are compared
    gradients   parameter -> whether its gradient differs; used if children are split, or while `asking`
    """

    inputs: Question = field(default_factory=Question)
    asking: bool = False
    gradients: defaultdict[str, Question] = field(default_factory=partial(defaultdict, Question))


@dataclass(frozen=True, kw_only=True)
class Own:
    """A module that keeps its forward. Not a Member, since its output is not split.

    members    name of the communicator
    partial    each rank has only a partial sum of its parameters' gradients
    sharded    names of the sharded parameters; the gradient of this rank's shard is complete
    divided    names of the parameters that every rank adds to a sum over ranks
    children   names of child modules whose parameters it may read without calling them
    below      for a stack of layers and for each layer: names of modules inside, at any depth, whose gradients are
               summed in one call. The stack's list is used unless its layers' parameters are held back until they run,
               as FSDP2 does
    splits     some of its children are split, so its own parameters may be applied to only some of the heads
    inside     it is inside such a module, within the same layer
    inner      the instance's own forward, if it has one
    alike      its class's forward, if that is known to treat every token alike
    """

    members: str
    world_size: int
    partial: bool = False
    sharded: frozenset[str] = frozenset()
    divided: frozenset[str] = frozenset()
    children: tuple[str, ...] = ()
    below: tuple[str, ...] = ()
    splits: bool = False
    inside: bool = False
    inner: Callable[..., Any] | None = None
    alike: Callable[..., Any] | None = None
    rotary_width: int = 0
    seen: Seen = field(default_factory=Seen, compare=False)

    def trained(self, module: Any) -> list[str]:
        """Names of the trainable parameters that every rank holds whole."""
        own = module._parameters.items()
        return [name for name, p in own if p is not None and p.requires_grad and name not in self.sharded]

    def adapted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as the module's own forward gets them."""
        return args, kwargs

    def look(self, module: Any, inputs: Any) -> None:
        """Learn from a call's inputs whether each rank has only some of the heads. Collective until that is known."""
        seen = self.seen
        seen.asking = False
        if self.partial or seen.inputs.differ is not None or self.world_size == 1 or not torch.is_grad_enabled():
            return
        leaves = tree_leaves(inputs)
        if any(isinstance(x, TokenShard) and x._rows.is_floating_point() and x._rows.numel() for x in leaves):
            return  # every call of a norm gets here, so read _rows: a TokenShard's own methods take ten times as long
        if not self.trained(module):
            return
        # by name: the order may differ between ranks
        floats = [x for _, x in named_leaves(inputs) if isinstance(x, Tensor) and x.is_floating_point()]
        if not floats or any(isinstance(x, TokenShard | DTensor) for x in floats):
            return
        seen.inputs.ask(floats, [precision(x) for x in floats], self.members, self.world_size)
        seen.asking = seen.inputs.differ is None

    def unknown(self, module: Any) -> bool:
        """Whether results of `look` and `look_at_gradient` are needed but missing: compiled code cannot ask ranks."""
        if self.partial or self.seen.inputs.differ or self.world_size == 1 or not torch.is_grad_enabled():
            return False
        trained = self.trained(module)
        if self.inside and self.seen.inputs.differ is None and trained:
            return True
        return self.splits and any(self._unanswered(name) for name in trained)

    def _unanswered(self, name: str) -> bool:
        return name not in self.seen.gradients or self.seen.gradients[name].differ is None

    def read(self, name: str, parameter: Tensor) -> Tensor:
        """The parameter as a plain tensor, its gradient summed over ranks if it is partial."""
        if name in self.sharded:
            return accumulated(parameter)
        if name in self.divided:
            divided_by: Tensor = _Divided.apply(accumulated(parameter), self.world_size)
            return divided_by
        seen = self.seen
        if self.partial or seen.inputs.differ or (name in seen.gradients and seen.gradients[name].differ):
            return with_reduced_grad(parameter, self.members)
        own = accumulated(parameter)
        whole = is_replicated(parameter) or not isinstance(parameter, DTensor)  # virtual ranks have plain ones
        asked = whole and (seen.asking or (self.splits and self.world_size > 1 and self._unanswered(name)))
        if asked and own.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            own = own.view_as(own) if own is parameter else own  # other modules may read the same parameter
            own.register_hook(partial(self.look_at_gradient, name, precision(own)))
        return own

    def look_at_gradient(self, name: str, bits: int, gradient: Tensor) -> Tensor:
        """As `look`, but from a parameter's gradient, which it sums if partial. Collective until that is known."""
        question = self.seen.gradients[name]
        differ = question.differ
        if differ is None:
            differ = question.ask([gradient], [bits], self.members, self.world_size)
        return all_reduce_sum(gradient, self.members) if differ else gradient


class _Divided(Function):
    """1 / W of a parameter that every rank adds to a sum over W ranks; every rank gets the whole gradient."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, world_size: int) -> Tensor:
        return parameter / world_size

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


# --- forwards ---------------------------------------------------------------------------------------------------


def columns(self: Any, input: Tensor) -> Tensor:
    """The forward of a column-parallel linear."""
    at: Columns = self.parallel
    at.model.count(isinstance(input, TokenShard) and input.dim() == len(input.lead) + 1)
    y = at.siblings.project(input, self) if len(at.siblings.linears) > 1 else project_all(input, [self])[0]
    if not at.vocabulary:
        draws_in_part(at, self, y)
        at.model.drawing(not at.gather_output)
        return y
    if torch.compiler.is_compiling():
        return at._gathered(y, self)
    return VocabShard.of(y, VocabColumns(at.group, at.rank, at.world_size, self.out_features, at.model.gathered))


def rows(self: Any, input: Tensor) -> Tensor:
    """The forward of a row-parallel linear."""
    at: Rows = self.parallel
    x = input.full_tensor("linear") if isinstance(input, TokenShard) else input
    x = in_autocast(x)
    if at.split_input:
        parts = split(x.shape[-1], at.world_size)
        x = take_tokens(x.movedim(-1, 0), at.group, parts, at.layer).movedim(0, -1)
    else:
        draws_in_whole(at, self, x)
    at.model.drawing(False)
    lead = x.shape[:-1]
    fused = splits(at, lead)
    at.model.count(fused)
    linear = Linear(turned(self.weight), self.bias) if at.transposed else self
    if not fused:
        return at.summed(x, linear) if lead else at.summed(x[None], linear)[0]
    tokens = tokens_of(at, lead)
    return TokenShard.of(at.scattered(x.reshape(-1, x.shape[-1]), linear, tokens.sizes), lead, tokens)


def embedding(self: Any, input: Tensor) -> Tensor:
    """The forward of an embedding split over the vocabulary."""
    at: Vocabulary = self.parallel
    if isinstance(self._parameters["weight"], Table):
        with as_parameter(self):
            return embedding(self, input)
    return _summed(at, at.lookup(input, self), input.shape)


def own_embedding(self: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The same for an embedding class with its own forward, which transforms each row that it looks up."""
    at: Vocabulary = self.parallel
    if isinstance(self._parameters["weight"], Table):
        with as_parameter(self):
            return own_embedding(self, input, *args, **kwargs)
    begin = sum(split(self.num_embeddings, at.world_size)[: at.rank])
    weight = accumulated(self.weight)
    count = weight.shape[0]
    mine = (input >= begin) & (input < begin + count)
    padding = self.padding_idx
    kept = self._parameters["weight"]
    try:
        self._parameters["weight"] = weight if count else F.pad(weight, (0, 0, 0, 1))
        self.padding_idx = padding - begin if padding is not None and begin <= padding < begin + count else None
        y = type(self).forward(self, (input - begin).where(mine, 0), *args, **kwargs)
    finally:
        self._parameters["weight"] = kept
        self.padding_idx = padding
    return _summed(at, y.masked_fill(~mine[..., None], 0), input.shape)


def embedding_columns(self: Any, input: Tensor) -> Tensor:
    """The forward of an embedding split over its features, which are then gathered on all ranks."""
    at: Vocabulary = self.parallel
    y = F.embedding(input, accumulated(self.weight), self.padding_idx)
    widths = split(self.embedding_dim, at.world_size)
    return gather_tokens(y.movedim(-1, 0), at.group, widths, at.layer).movedim(0, -1)


def _summed(at: Vocabulary, y: Tensor, lead: tuple[int, ...]) -> Tensor:
    """A partial [*lead, H] -> the sum over ranks; its tokens are split if `splits` says so."""
    if not splits(at, lead):
        return all_reduce_sum(y, at.group, at.layer)
    tokens = tokens_of(at, lead)
    own = reduce_scatter_tokens(y.reshape(-1, y.shape[-1]), at.group, tokens.sizes, at.layer)
    return TokenShard.of(own, lead, tokens)


def splits(at: Rows | Vocabulary, lead: tuple[int, ...]) -> bool:
    """Whether a call on [*lead, H] returns only this rank's rows; the same on all ranks."""
    # in this order, compiled code gets no guards
    compiled = torch.compiler.is_compiling() or at.model.compiled
    return at.sequence_parallel and len(lead) > 0 and lead[-1] > 1 and not compiled


def tokens_of(at: Any, lead: tuple[int, ...]) -> Tokens:
    """How the tokens of a call are split."""
    return Tokens(at.group, at.rank, tuple(split(math.prod(lead), at.world_size)), at.model.gathered)


def own_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of any other module: runs its own forward with its parameters as plain local tensors."""
    at: Own = self.parallel
    if at.alike is type(self).forward and len(args) == 1 and not kwargs:
        x = args[0]
        if isinstance(x, TokenShard) and x.features:  # otherwise its last dimension is tokens
            return each_token(self, x)
    if self._parameters and not torch.compiler.is_compiling():
        at.look(self, (args, kwargs))
    elif self._parameters and at.unknown(self):
        from torch._dynamo.comptime import comptime

        comptime(_refuse_unknown)
    args, kwargs = at.adapted(args, kwargs)
    reads = self._parameters or at.children or at.below
    if reads and at.inner is None and _runs_again(self):
        return _opened_inside(self, args, kwargs)
    with plain_parameters(self) if reads else nullcontext():
        return type(self).forward(self, *args, **kwargs) if at.inner is None else at.inner(*args, **kwargs)


def _refuse_unknown(context: Any) -> None:
    kind = context.get_local("self").python_type().__name__
    raise RuntimeError(
        f"{kind} is not in the plan, so one uncompiled forward and backward must show whether ranks see different "
        "heads in it (several, if a gradient is a single number or zero); run such a step before compiling, or add "
        "it to the plan as 'replicated_with_grad_allreduce'"
    )


def _runs_again(module: Any) -> bool:
    """Whether it is a transformers layer whose class forward runs its inner forward under activation checkpointing."""
    asked = getattr(module, "gradient_checkpointing", False) and module.training
    if not asked or torch.compiler.is_compiling():
        return False
    wraps = hasattr(type(module).forward, "__wrapped__")  # and the class's forward has not been replaced
    return wraps and any(each.__name__ == "GradientCheckpointingLayer" for each in type(module).__mro__)


def _opened_inside(self: Any, args: Any, kwargs: Any) -> Any:
    """The forward of such a layer; its parameters are plain tensors inside the function that backward runs again."""
    checkpoint = self._gradient_checkpointing_func

    def inside(forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        def opening(*given: Any, **named: Any) -> Any:
            with plain_parameters(self):
                return forward(*given, **named)

        return checkpoint(opening, *inputs, **options)

    self._gradient_checkpointing_func = inside
    try:
        return type(self).forward(self, *args, **kwargs)
    finally:
        self._gradient_checkpointing_func = checkpoint


def each_token(self: Any, x: TokenShard) -> TokenShard:
    """The forward of a module that treats every token alike (see by_token.py): runs on this rank's rows as a tensor."""
    at, rows, parameters = self.parallel, x.local, self._parameters
    kept = dict(parameters)
    try:
        for name, parameter in kept.items():
            if parameter is not None:
                parameters[name] = with_reduced_grad(parameter, at.members)
        y = at.alike(self, rows)
    finally:
        parameters.update(kept)
    return x if y is rows else x.like(y)


def mla_down_projection(self: Any, *args: Any, **kwargs: Any) -> Tensor:
    """The projection to a latent and rotary keys (DeepSeek-V2, section 2.1), replicated.

    The latent goes into a split projection, which returns a complete input gradient. The keys go directly to this
    rank's heads, so their gradient is partial.
    """
    y: Tensor = own_forward(self, *args, **kwargs)
    width = self.parallel.rotary_width
    latent, keys = y.split([y.shape[-1] - width, width], dim=-1)
    keys = _for_parts(self.parallel.members)(keys)
    return torch.cat([latent.full_tensor("linear") if isinstance(latent, TokenShard) else latent, keys], dim=-1)


def partial_sum(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a module whose output is a partial sum: experts, with some of their features on each rank."""
    at: Own = self.parallel
    every = [x for x in (*args, *kwargs.values()) if isinstance(x, TokenShard)]
    args, kwargs = tree_map(_for_parts(at.members, every), (args, kwargs))
    y = own_forward(self, *args, **kwargs)
    like = every[0] if every else None
    if like is None or y.shape[: len(like.lead)] != like.lead:
        return all_reduce_sum(y, at.members)
    own = reduce_scatter_tokens(y.reshape(sum(like.tokens.sizes), -1), at.members, like.tokens.sizes)
    return like.like(own.reshape(own.shape[0], *y.shape[len(like.lead) :]))


def _for_parts(group: str, shards: Sequence[TokenShard] = ()) -> Callable[[Any], Any]:
    """A function that prepares an input of partial sums: gathers its tokens; its gradient is summed over ranks.

    shards   TokenShards that will be passed to it; they are gathered in one call
    """
    gathered: dict[int, Tensor] = {}
    if len(shards) > 1 and len({x.tokens.sizes for x in shards}) == 1:
        fulls = all_gather_tokens_of([x.local for x in shards], group, shards[0].tokens.sizes)
        gathered = {id(x): full for x, full in zip(shards, fulls, strict=True)}

    def whole(x: Any) -> Any:
        if isinstance(x, TokenShard):
            full = gathered.get(id(x))
            if full is None:
                full = all_gather_tokens(x.local, group, x.tokens.sizes)
            return full.reshape(*x.lead, *full.shape[1:])
        if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
            return copy_to_group(x, group)
        return x

    return whole


def enter(shared: Model, module: Any, args: Any) -> None:
    """A forward pre-hook of the model and of its stacks of layers: notes whether anything inside is compiled by now."""
    if not torch.compiler.is_compiling():
        shared.running = True
    if not shared.compiled:
        shared.compiled = torch.compiler.is_compiling() or any(map(is_compiled, module.modules()))


def leave(model: Any, args: Any, outputs: Any) -> Any:
    """A hook after the model's forward: converts outputs to plain tensors, except logits that need a gradient."""
    for siblings in model._fusedtp.siblings:
        siblings.ended()
    if not torch.compiler.is_compiling():
        model._fusedtp.running = False
    if model._fusedtp.watched is not None:
        check_draws(model)
    return plain_outputs(gather_maps(model, outputs) if model._fusedtp.maps else outputs)


def plain_outputs(outputs: Any) -> Any:
    """The outputs of a model with plain tensors in place of shards."""

    def plain(x: Any) -> Any:
        if isinstance(x, TokenShard):
            return x.full_tensor("leaving the model")
        if isinstance(x, VocabShard) and not x.requires_grad:
            return x.full_tensor("leaving the model")
        return x

    return tree_map(plain, outputs)


def divided(self: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The forward of a module that every rank adds to a sum, although its output is the same on all ranks."""
    return own_forward(self, input / self.parallel.world_size, *args, **kwargs)


@contextmanager
def plain_parameters(module: Any) -> Iterator[None]:
    at: Own = module.parallel
    children = [module._modules[name] for name in at.children]
    # if ranks have different heads, a module checks the gradients of its parameters itself
    modules = [module, *(each for each in children if not _splits(each))]
    kept: list[tuple[dict[str, Any], str, Tensor]] = []
    with opened([(module, name) for name in at.below], at.members) if at.below else nullcontext():
        try:
            for each in modules:
                for name, parameter in each._parameters.items():
                    if parameter is None or (each is not module and not _is_on_one_mesh(parameter)):
                        continue  # a child that FSDP2 still keeps sharded
                    kept.append((each._parameters, name, parameter))
                    each._parameters[name] = at.read(name, parameter) if each is module else accumulated(parameter)
            yield
        finally:
            for parameters, name, parameter in kept:
                parameters[name] = parameter


def sum_apart(model: nn.Module) -> None:
    """For a two-pass backward: if one graph node reads several parameters, torch cannot defer their gradients."""
    for module in model.modules():
        at = getattr(module, "parallel", None)
        if isinstance(at, Own) and at.below:
            module.parallel = replace(at, below=())  # type: ignore[assignment]
        if hasattr(module, "replicas"):
            module.replicas = None  # type: ignore[assignment]


def _splits(module: Any) -> bool:
    at = getattr(module, "parallel", None)
    return isinstance(at, Own) and at.splits


def _is_on_one_mesh(parameter: Tensor) -> bool:
    return not isinstance(parameter, DTensor) or parameter.device_mesh.ndim == 1
