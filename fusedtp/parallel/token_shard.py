"""A tensor of all tokens, with some rows on each rank: sequence parallelism for models that are unaware of it.

    logical    [B, S, H]             what the model's code sees: shape, dtype, device
    local      [T_r, H]              this rank's rows of the T = B * S flattened tokens, split as torch.chunk does
    meaning    the same tensor on every rank, with the same gradient on every rank

A planned linear layer takes `local` and gathers inside its matmul; the next one reduces and scatters inside its own.
An operation between them runs on local rows if it treats every token alike (sums, norms, dropout, an unplanned linear),
and otherwise on the gathered tensor. So any code is correct, and code that treats tokens alike is fast. Nothing depends
on where layers begin or end, on S being divisible by the number of ranks, or on the model's names.

    operands of an operation on local rows          what is used                    backward
    another TokenShard, split alike                 its local rows                  -
    a plain tensor without token dimensions ([H])   itself                          a sum over ranks
    a plain tensor over tokens ([B, S, H], [S, 1])  its own rows                    a gather
    any other operation                             gathers every TokenShard        each rank takes its rows

A plain tensor has the same value on all ranks, as in transformers' tensor parallelism, and so does its gradient. Each
row of the table is therefore a linear map with its transpose as backward.

Note [Two ways into a TokenShard]
Python code reaches it through `__torch_function__`, which works on `local`, a plain tensor with its autograd graph.
autograd.Function.apply (FSDP2's hooks, third-party kernels), the engine's gradient accumulation and other C++ code
reach it through `__torch_dispatch__`, below autograd. For these the wrapper itself is a node of the graph, made by
_Wrap; if C++ code put a wrapper into the graph, _Unwrap returns its rows. Both ways give the same gradient.

Note [In-place operations]
They change `local`, and autograd keeps the graphs of its views correct. But wrappers of views are unaware of each
other, so Memory lists all wrappers that share values, and _Hang attaches each of them to the new graph of its `local`.
If tokens had to be gathered for a view (x[:, 0]), it is a view of a copy: Memory carries changes from either to the
other, except for inference tensors, which have no version counter.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from fusedtp.ops.rows import split
from fusedtp.ops.tokens import gather_tokens, take_tokens

from .placement import read
from .torch_names import (
    ALONG,
    ELEMENTWISE,
    IN_PLACE,
    LISTS,
    METADATA,
    NEW,
    OF_SOURCE,
    REFUSED,
    SPREADS,
    THIRD,
    VIEWS,
    is_in_place,
    name_of,
    names,
)


class Tokens(NamedTuple):
    """How tokens are split.

    group      name of the communicator
    rank       this rank in it
    sizes      number of rows on each rank
    gathered   operation -> how often it had to gather; shared by all tensors of a model
    """

    group: str
    rank: int
    sizes: tuple[int, ...]
    gathered: Counter[str]

    def own(self, x: Tensor) -> Tensor:
        """x [T, ...] -> this rank's rows; the backward gathers."""
        if x.requires_grad and torch.is_grad_enabled():
            return take_tokens(x, self.group, self.sizes)
        return x.narrow(0, sum(self.sizes[: self.rank]), self.sizes[self.rank])


@dataclass
class Lent:
    """A gathered copy of `local` that has views, with its version and its autograd node when it was last in sync."""

    full: Tensor
    version: int
    node: Any
    local: Tensor
    lead: tuple[int, ...]
    tokens: Tokens


class Memory:
    """State shared by a TokenShard and its views. See Note [In-place operations].

    wrappers   all live wrappers
    lent       gathered copies
    """

    def __init__(self) -> None:
        self.wrappers: list[weakref.ref[TokenShard]] = []
        self.lent: list[Lent] = []

    def read(self) -> None:
        """Before values are used: copy changes of gathered copies back to the shards."""
        for copy in self.lent:
            if copy.full._version != copy.version:
                if not torch.is_grad_enabled() and _base(copy.full).grad_fn is not copy.node:
                    raise RuntimeError(
                        "a view over tokens of a TokenShard was changed in place before the TokenShard was passed to "
                        "an autograd.Function or used without gradients; write x[index] = value instead"
                    )
                copy.version, copy.node = copy.full._version, _base(copy.full).grad_fn
                copy.local.copy_(_rows_of(copy.full, copy.lead, copy.tokens))
                self.changed(copy)

    def changed(self, by: Lent | None = None) -> None:
        """After values were changed, through the shards or a gathered copy: update all wrappers and other copies."""
        self.wrappers = [ref for ref in self.wrappers if ref() is not None]
        for ref in self.wrappers:
            if (wrapper := ref()) is not None:
                wrapper._hang()
        for copy in self.lent:
            if copy is not by:
                full = gather_tokens(copy.local, copy.tokens.group, copy.tokens.sizes)
                copy.full.copy_(full.reshape(copy.full.shape))
                copy.version, copy.node = copy.full._version, _base(copy.full).grad_fn


def _base(x: Tensor) -> Tensor:
    base = x._base if x._is_view() else x
    assert base is not None
    return base


class TokenShard(Tensor):
    """See above. Made by `shard`, or by the layers that reduce-scatter."""

    tokens: Tokens
    lead: tuple[int, ...]  # the logical token dimensions: [B, S], or [T]
    _rows: Tensor  # local, below autograd
    _local: Tensor | None  # local, with its graph; None if only the wrapper is in the graph
    _node: Any  # the wrapper's grad_fn that matches `_local`; if it changed, C++ code has moved the wrapper
    _follows: bool  # whether the wrapper's graph comes from `_local`, or the other way round
    _memory: Memory

    @staticmethod
    def of(local: Tensor, lead: Sequence[int], tokens: Tokens, memory: Memory | None = None) -> TokenShard:
        """local [T_r, ...] -> logical [*lead, ...], prod(lead) = sum(sizes)."""
        assert local.shape[0] == tokens.sizes[tokens.rank] and math.prod(lead) == sum(tokens.sizes)
        if not (torch.is_grad_enabled() and local.requires_grad):
            return TokenShard._bare(local, tuple(lead), tokens, local, memory)
        made: TokenShard = _Wrap.apply(local, tuple(lead), tokens, memory)
        made._local, made._node, made._follows = local, made._autograd("grad_fn"), True
        return made

    @staticmethod
    def _bare(
        rows: Tensor,
        lead: tuple[int, ...],
        tokens: Tokens,
        local: Tensor | None = None,
        memory: Memory | None = None,
    ) -> TokenShard:
        shape = (*lead, *rows.shape[1:])
        made = Tensor._make_wrapper_subclass(
            TokenShard, shape, dtype=rows.dtype, device=rows.device, requires_grad=False
        )
        made.tokens, made.lead = tokens, lead
        made._rows, made._local, made._node, made._follows = rows.detach(), local, None, False
        made._memory = memory or Memory()
        made._memory.wrappers.append(weakref.ref(made))
        return made

    def _autograd(self, name: str) -> Any:
        """An attribute of the wrapper itself."""
        with torch._C.DisableTorchFunctionSubclass():
            return getattr(self, name)

    @property
    def features(self) -> int:
        """Number of dimensions after the token dimensions."""
        return self._rows.dim() - 1

    @property
    def local(self) -> Tensor:
        """[T_r, ...], with its graph."""
        self._memory.read()
        node = self._autograd("grad_fn")
        if self._local is not None and node is self._node:
            return self._local
        if not (torch.is_grad_enabled() and self._autograd("requires_grad")):
            return self._rows
        rows: Tensor = _Unwrap.apply(self)
        if node is not None:  # a leaf would reference itself through the graph of its rows
            self._local, self._node, self._follows = rows, node, False
        return rows

    @property
    def _source(self) -> Tensor:
        """The tensor that receives its whole gradient: the wrapper, if C++ or requires_grad_ put it into the graph."""
        follows = self._follows and self._autograd("grad_fn") is self._node
        if self._autograd("requires_grad") and not follows:
            return self
        return self.local

    def _hang(self) -> None:
        """Attach the wrapper to the current graph of `_local`."""
        if self._autograd("is_inference")():
            return
        if not torch.is_grad_enabled() or not (self.local.requires_grad or self._autograd("requires_grad")):
            torch.autograd.graph.increment_version(self)
            return
        _Hang.apply(self, self.local)
        self._node, self._follows = self._autograd("grad_fn"), True

    def full_tensor(self, why: str = "full_tensor") -> Tensor:
        """The logical tensor as a plain one. Collective. The gather is counted under `why`."""
        self.tokens.gathered[why] += 1
        full = gather_tokens(self.local, self.tokens.group, self.tokens.sizes)
        return full.reshape(*self.lead, *full.shape[1:])

    def like(self, local: Tensor) -> TokenShard:
        """A TokenShard with other values for the same tokens."""
        return TokenShard.of(local, self.lead, self.tokens)

    def view_of(self, local: Tensor, lead: Sequence[int] | None = None) -> TokenShard:
        """A view: the same values in another shape."""
        return TokenShard.of(local, self.lead if lead is None else lead, self.tokens, self._memory)

    def rows_of(self, x: Tensor) -> Tensor:
        """A tensor [*lead, ...] over the same tokens -> this rank's rows."""
        return _rows_of(x, self.lead, self.tokens)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return run(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _below_autograd(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # no collective: any rank may print
        return f"TokenShard({tuple(self.shape)}, rows {tuple(self._rows.shape)} of rank {self.tokens.rank})"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a TokenShard is one rank's part of a forward; save its full_tensor()")


def shard(full: Tensor, group: str, rank: int, world_size: int, gathered: Counter[str]) -> TokenShard:
    """A plain [B, S, H] or [T, H] that all ranks hold -> a TokenShard, with only its rows on each rank."""
    lead = full.shape[:-1]
    tokens = Tokens(group, rank, tuple(split(math.prod(lead), world_size)), gathered)
    return TokenShard.of(tokens.own(full.reshape(math.prod(lead), full.shape[-1])), lead, tokens)


def gathered(tree: Any) -> Any:
    """The tree with every TokenShard as a plain tensor; objects that are not pytree nodes of torch are left alone."""
    return tree_map(lambda x: x.full_tensor("leaving the model") if isinstance(x, TokenShard) else x, tree)


def _rows_of(x: Tensor, lead: tuple[int, ...], tokens: Tokens) -> Tensor:
    if isinstance(x, TokenShard):
        return x.local
    return tokens.own(x.reshape(sum(tokens.sizes), *x.shape[len(lead) :]))


class _Wrap(Function):
    """local -> wrapper. Gradients only get here if they bypassed `local`."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, lead: tuple[int, ...], tokens: Tokens, memory: Memory | None) -> TokenShard:
        ctx.lead, ctx.tokens = lead, tokens
        return TokenShard._bare(local, lead, tokens, None, memory)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _rows_of(grad, ctx.lead, ctx.tokens), None, None, None


class _Unwrap(Function):
    """wrapper -> local."""

    @staticmethod
    def forward(ctx: Any, x: TokenShard) -> Tensor:
        ctx.lead, ctx.tokens = x.lead, x.tokens
        return x._rows.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return TokenShard.of(grad, ctx.lead, ctx.tokens)


class _Hang(Function):
    """wrapper, local -> the wrapper, as if an in-place operation had set it to `local`."""

    @staticmethod
    def forward(ctx: Any, wrapper: TokenShard, local: Tensor) -> TokenShard:
        ctx.lead, ctx.tokens = wrapper.lead, wrapper.tokens
        ctx.mark_dirty(wrapper)
        return wrapper

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, _rows_of(grad, ctx.lead, ctx.tokens)


# --- below autograd ---------------------------------------------------------------------------------------------


SAME = names("detach alias clone _to_copy zeros_like ones_like empty_like mul div add neg add_ mul_ div_ zero_")


def _below_autograd(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs sums and copies of gradients on local rows, everything else on the gathered tensor."""
    name = func.overloadpacket.__name__
    if func.namespace == "c10d":
        raise NotImplementedError(f"{name} of a TokenShard: each rank holds different rows; use its full_tensor()")
    leaves, spec = tree_flatten((args, kwargs))
    first = next(x for x in leaves if isinstance(x, TokenShard))
    for x in leaves:
        if isinstance(x, TokenShard):
            x._memory.read()
    if name in ("view", "_unsafe_view") and tuple(args[1]) == tuple(first.shape):
        return TokenShard._bare(first._rows, first.lead, first.tokens)
    alike = all(
        _alike(x, first) if isinstance(x, TokenShard) else x.dim() == 0 for x in leaves if isinstance(x, Tensor)
    )
    if name in SAME and alike and (isinstance(args[0], TokenShard) or not name.endswith("_")):
        own = [x._rows if isinstance(x, TokenShard) else x for x in leaves]
        own_args, own_kwargs = tree_unflatten(own, spec)
        rows = func(*own_args, **own_kwargs)
        return args[0] if name.endswith("_") else TokenShard._bare(rows, first.lead, first.tokens)
    whole = {id(x): _gathered_rows(x, f"aten.{name}") for x in leaves if isinstance(x, TokenShard)}
    whole_args, whole_kwargs = tree_map(lambda x: whole.get(id(x), x), (args, kwargs))
    done = func(*whole_args, **whole_kwargs)
    for i, argument in enumerate(func._schema.arguments):
        given = args[i] if i < len(args) else kwargs.get(argument.name)
        if argument.is_write:
            for x in tree_leaves(given):
                if isinstance(x, TokenShard):
                    x._rows.copy_(x.rows_of(_of_shape(x, whole[id(x)], name)))
    back = {id(whole[id(x)]): x for x in leaves if isinstance(x, TokenShard)}
    return tree_map(lambda x: back.get(id(x), x), done)


@torch.no_grad()
def _gathered_rows(x: TokenShard, why: str) -> Tensor:
    return TokenShard._bare(x._rows, x.lead, x.tokens, x._rows).full_tensor(why)


def _of_shape(x: TokenShard, full: Tensor, name: str) -> Tensor:
    if full.shape != x.shape:
        raise NotImplementedError(
            f"{name} would change a TokenShard's shape from {tuple(x.shape)} to {tuple(full.shape)}"
        )
    return full


def _alike(x: TokenShard, like: TokenShard) -> bool:
    """Whether the rows of the two correspond."""
    return x.lead == like.lead and x.features == like.features and x.tokens.group == like.tokens.group


# --- from Python code -------------------------------------------------------------------------------------------


def run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """func(*args, **kwargs), with a TokenShard among the arguments."""
    name = name_of(func)
    if name in METADATA:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    first: Any = args[0] if args else None
    if name in AUTOGRAD:
        return AUTOGRAD[name](func, args, kwargs)
    if isinstance(first, TokenShard):
        if name in REFUSED or (name == "data" and len(args) > 1):
            raise NotImplementedError(f"{name} of a TokenShard: no rank holds the whole tensor; use its full_tensor()")
        if name in OF_SOURCE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(first._source, *args[1:], **kwargs)
        if name in NEW:
            return func(first._rows, *_whole(name, args[1:]), **_whole(name, kwargs))
    if "out" in kwargs and any(isinstance(x, TokenShard) for x in tree_leaves(kwargs["out"])):
        raise NotImplementedError(f"{name} does not support a TokenShard as out=")
    in_place = is_in_place(name, kwargs)
    plain = name.strip("_")
    if name in IN_PLACE:
        plain = plain[1:]
    handler = HANDLERS.get(plain) if kwargs.get("out") is None else None
    if handler is not None and (not in_place or isinstance(first, TokenShard)):
        done = handler(plain, func, args, kwargs)
        if done is not NotImplemented:
            if not in_place:
                return done
            first._memory.changed()
            return first
    return _on_whole(name, func, args, kwargs)


def _whole(name: str, tree: Any) -> Any:
    return tree_map(lambda x: x.full_tensor(name) if isinstance(x, TokenShard) else x, tree)


def _on_whole(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run func on gathered tensors. If it changes one in place, this rank's rows are written back."""
    shards = {id(x): x for x in tree_leaves((args, kwargs)) if isinstance(x, TokenShard)}
    whole = {key: x.full_tensor(name) for key, x in shards.items()}
    versions = {key: _version(x) for key, x in whole.items()}
    whole_args, whole_kwargs = tree_map(lambda x: whole.get(id(x), x), (args, kwargs))
    done = func(*whole_args, **whole_kwargs)
    back: dict[int, TokenShard] = {}
    for key, full in whole.items():
        target = shards[key]
        if versions[key] is None:  # inference tensors have no version counter
            changed = is_in_place(name, kwargs) and bool(args) and args[0] is target
        else:
            changed = _version(full) != versions[key]
        if changed:
            target.local.copy_(target.rows_of(_of_shape(target, full, name)))
            target._memory.changed()
            back[id(full)] = target
        elif any(isinstance(x, Tensor) and _is_view_of(x, full) for x in tree_leaves(done)):
            copy = Lent(full, full._version, _base(full).grad_fn, target.local, target.lead, target.tokens)
            target._memory.lent.append(copy)
    return tree_map(lambda x: back.get(id(x), x), done)


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version


def _is_view_of(x: Tensor, full: Tensor) -> bool:
    if full.is_inference() or isinstance(x, TokenShard):
        return False
    return x is full or (x._is_view() and x._base is _base(full))


def _operand(x: Tensor, like: TokenShard, broadcasts: bool = True) -> Tensor | None:
    """The operand to use for x along with the local rows of `like`; None if tokens must be gathered."""
    if isinstance(x, TokenShard):
        return x.local if _alike(x, like) else None
    x = _plain(x)
    features = like.features
    over = x.shape[: max(x.dim() - features, 0)]  # aligned with the last token dimensions
    of_each = x.shape[len(over) :]
    if len(over) > len(like.lead):
        return None
    if broadcasts and all(n == 1 for n in over):
        return _same_for_all(x.reshape(of_each or (1,)) if over else x, like)
    wanted = like.lead[len(like.lead) - len(over) :]
    if any(n not in ((1, size) if broadcasts else (size,)) for n, size in zip(over, wanted, strict=True)):
        return None
    if not broadcasts and len(over) != len(like.lead):
        return None
    return like.tokens.own(x.expand(*like.lead, *of_each).reshape(sum(like.tokens.sizes), *of_each))


def _plain(x: Tensor) -> Tensor:
    if not isinstance(x, DTensor):
        return x
    if not all(p.is_replicate() for p in x.placements):
        raise NotImplementedError(f"a TokenShard works with replicated DTensors only, not with {x.placements}")
    plain: Tensor = x.to_local()
    return plain


def _same_for_all(x: Any, like: TokenShard) -> Any:
    """A value without token dimensions, used along with local rows: its partial gradients are summed over ranks."""
    x = _plain(x)
    if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
        return read(x, like.tokens.group)
    return x


def _wrapped(x: Any, make: Callable[[Tensor], TokenShard]) -> Any:
    if isinstance(x, Tensor):
        return make(x)
    if isinstance(x, tuple):  # also torch.return_types
        return type(x)([_wrapped(each, make) for each in x])
    return x


# --- handlers: they return NotImplemented if tokens must be gathered ---------------------------------------------


def _elementwise(name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    nested = bool(kwargs) or any(isinstance(x, list | tuple) for x in args)
    leaves, spec = tree_flatten((args, kwargs)) if nested else (args, None)

    def call(own: list[Any]) -> Any:
        if spec is None:
            return func(*own)
        own_args, own_kwargs = tree_unflatten(own, spec)
        return func(*own_args, **own_kwargs)

    like = next(x for x in leaves if isinstance(x, TokenShard))
    if name in ("to", "type_as"):  # a tensor argument only specifies the dtype
        own = [x.local if isinstance(x, TokenShard) else x for x in leaves]
        if not isinstance(args[0], TokenShard):
            return call(own)
    else:
        own = [_operand(x, like) if isinstance(x, Tensor) else x for x in leaves]
    if any(x is None and isinstance(was, Tensor) for x, was in zip(own, leaves, strict=True)):
        return NotImplemented
    if name == "where" and len(leaves) == 1:  # nonzero
        return NotImplemented
    done = call(own)
    for x, was in zip(own, leaves, strict=True):
        if done is x and isinstance(was, TokenShard):
            return was
    return _wrapped(done, like.view_of if name in ("detach", "data") else like.like)


def _dropout(name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Draws the mask of the whole tensor, so that all ranks draw the same numbers as one device would."""
    x, *given = args
    if not isinstance(x, TokenShard):
        return NotImplemented
    options = {**dict(zip(("p", "training", "inplace"), given)), **kwargs}
    if not options.get("training", options.get("train", True)):
        return x
    ones = torch.ones(x.shape, dtype=x.dtype, device=x.device)
    mask = x.rows_of(F.dropout(ones, options.get("p", 0.5), True))
    in_place = options.get("inplace") or func.__name__.endswith("_")
    return x.local.mul_(mask) if in_place else x.like(x.local * mask)


def _drawn(name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """rand_like and similar: all ranks draw the whole tensor."""
    x, *rest = args
    return x.like(x.rows_of(func(torch.empty(x.shape, dtype=x.dtype, device=x.device), *rest, **kwargs)))


def _of_features(dim: Any, like: TokenShard, more: int = 0) -> Any:
    """The dimensions as negative ones, which mean the same for local rows; None if one of them is over tokens."""
    if isinstance(dim, tuple | list):
        found = [_of_features(d, like, more) for d in dim]
        return None if not found or None in found else tuple(found)
    if not isinstance(dim, int) or isinstance(dim, bool):
        return None
    n = len(like.lead) + like.features + more
    at = dim if dim < 0 else dim - n
    return at if -(n - len(like.lead)) <= at < 0 else None


def _along(name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    operands: Any = args[0] if args else None
    many = name in LISTS
    if not isinstance(operands, list | tuple if many else TokenShard):
        return NotImplemented
    if name in ("max", "min") and len(args) > 1 and isinstance(args[1], Tensor):
        return _elementwise(name, func, args, kwargs)
    like: Any = next((x for x in operands if isinstance(x, TokenShard)), None) if many else operands
    place = 2 if name in THIRD else 1
    key = next((key for key in ("dim", "axis", "dims") if key in kwargs), None)
    given = kwargs[key] if key else args[place] if len(args) > place else ALONG[name]
    dim = None if like is None else _of_features(given, like, int(name == "stack"))
    if dim is None or (name == "flip" and len(args) > 2):
        return NotImplemented
    own: Any = like.local
    if many:
        own = [_operand(x, like, broadcasts=False) for x in operands]
        if any(x is None for x in own):
            return NotImplemented
    rest = list(args[1:])
    if key or len(args) <= place:
        kwargs = {**kwargs, key or "dim": dim}
    else:
        rest[place - 1] = dim
    if any(isinstance(x, Tensor) for x in [*rest, *kwargs.values()]):
        return NotImplemented
    if name in SPREADS and own.shape[0] == 0:  # torch would warn about too few elements
        some = own.new_zeros(1, *own.shape[1:])
        return _wrapped(func(torch.cat([own, some]), *rest, **kwargs), lambda y: like.like(y[:0]))
    return _wrapped(func(own, *rest, **kwargs), like.view_of if name in VIEWS else like.like)


def _by_index(name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """gather, scatter and similar along features: index and source cover the same tokens."""
    if len(args) < 2:
        return NotImplemented
    x, dim, *rest = args
    at = _of_features(dim, x) if isinstance(x, TokenShard) else None
    if at is None:
        return NotImplemented
    leaves, spec = tree_flatten((rest, kwargs))
    own = [_operand(v, x, broadcasts=False) if isinstance(v, Tensor) else v for v in leaves]
    if any(v is None and isinstance(was, Tensor) for v, was in zip(own, leaves, strict=True)):
        return NotImplemented
    own_rest, own_kwargs = tree_unflatten(own, spec)
    return x.like(func(x.local, at, *own_rest, **own_kwargs))


def _one_hot(name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    x, *rest = args
    count = kwargs.get("num_classes", rest[0] if rest else -1)
    return x.like(func(x.local, count)) if count > 0 else NotImplemented


def _with_weights(name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """linear, norms over features, products with one matrix: tokens are rows, and all rows share the weights."""
    at = 1 if name == "addmm" else 0
    like = args[at] if len(args) > at else None
    rest = [x for i, x in enumerate(args) if i != at] + list(kwargs.values())
    if not isinstance(like, TokenShard) or any(isinstance(x, TokenShard) for x in rest):
        return NotImplemented
    features = like.features
    if name in ("layer_norm", "rms_norm"):
        shape = args[1] if len(args) > 1 else kwargs["normalized_shape"]
        if len(shape) > features:
            return NotImplemented
    elif name == "matmul":
        if features < 1 or len(args) != 2 or not isinstance(args[1], Tensor) or args[1].dim() > 2:
            return NotImplemented
    elif (
        features < 1
        or (name != "linear" and features + len(like.lead) != 2)
        or (name == "addmm" and args[0].dim() != 1)
    ):
        return NotImplemented
    own = [x.local if i == at else _same_for_all(x, like) for i, x in enumerate(args)]
    return like.like(func(*own, **{key: _same_for_all(x, like) for key, x in kwargs.items()}))


def _shape_of(func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[int, ...] | None:
    """The shape of func's result, computed on meta; torch raises what it would raise for the whole tensors."""
    if any(isinstance(x, torch.dtype) for x in tree_leaves((args, kwargs))):
        return None
    metas = tree_map(lambda x: torch.empty(x.shape, device="meta") if isinstance(x, Tensor) else x, (args, kwargs))
    return tuple(func(*metas[0], **metas[1]).shape)


def _arranged(name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """view, reshape and similar: tokens keep their order, and so do local rows."""
    x = args[0]
    shape = _shape_of(func, args, kwargs) if isinstance(x, TokenShard) else None
    if shape is None:
        return NotImplemented
    total = sum(x.tokens.sizes)
    leads = [x.lead, *(shape[:k] for k in range(1, len(shape) + 1))]
    for lead in leads:
        if shape[: len(lead)] == lead and math.prod(lead) == total:
            return x.view_of(x.local.reshape(x.local.shape[0], *shape[len(lead) :]), lead)
    return NotImplemented


def _expanded(name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """expand, repeat over features."""
    x = args[0]
    if not isinstance(x, TokenShard) or (shape := _shape_of(func, args, kwargs)) is None:
        return NotImplemented
    n = len(x.lead)
    if len(shape) != x.dim() or shape[:n] != x.lead:
        return NotImplemented
    features = x.shape[n:]
    if name == "repeat":
        times = [size // max(was, 1) for size, was in zip(shape[n:], features, strict=True)]
        return x.like(x.local.repeat(1, *times)) if 0 not in x.shape else NotImplemented
    return x.view_of(x.local.expand(-1, *shape[n:]))


def _of_all_tokens(index: Any, like: TokenShard) -> tuple[Any, tuple[int, ...]] | None:
    """For an index that takes every token: the same index into local rows, and the resulting token dimensions."""
    index = index if isinstance(index, tuple) else (index,)
    if not all(i is None or i is Ellipsis or isinstance(i, slice) or type(i) is int for i in index):
        return None
    count = sum(i is not None and i is not Ellipsis for i in index)
    if count > like.dim() or sum(i is Ellipsis for i in index) > 1:
        return None
    at = index.index(Ellipsis) if Ellipsis in index else len(index)
    rest = [*index[:at], *[slice(None)] * (like.dim() - count), *index[at + 1 :]]
    lead: list[int] = []
    sizes = list(like.lead)
    while sizes:
        i = rest.pop(0)
        if i is None:
            lead.append(1)
        elif isinstance(i, slice) and i.indices(sizes[0]) == (0, sizes[0], 1):
            lead.append(sizes.pop(0))
        else:
            return None
    return (slice(None), *rest), tuple(lead)


def _indexed(name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    x, index, *values = args
    if not isinstance(x, TokenShard):
        return NotImplemented
    if name == "setitem" and isinstance(index, Tensor) and index.dtype == torch.bool:
        return _fill_where(x, index, values[0])
    if (found := _of_all_tokens(index, x)) is None:
        return NotImplemented
    own, lead = found
    if name == "getitem":
        return x.view_of(func(x.local, own), lead)
    if not isinstance(values[0], Tensor):
        return func(x.local, own, values[0])
    part = x.view_of(x.local[own], lead)
    value = _operand(values[0], part) if values[0].dim() <= part.dim() else None
    return NotImplemented if value is None else part.local.copy_(value)


def _fill_where(x: TokenShard, mask: Tensor, value: Any) -> Any:
    """x[mask] = number"""
    n = mask.dim()
    if isinstance(value, Tensor) or not x.is_floating_point() or n < len(x.lead) or mask.shape != x.shape[:n]:
        return NotImplemented
    own = _operand(mask[(..., *[None] * (x.dim() - n))], x, broadcasts=True)
    return NotImplemented if own is None else x.local.masked_fill_(own, value)


def _transposed(name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    x, *dims = args
    if not isinstance(x, TokenShard) or kwargs:
        return NotImplemented
    n = len(x.lead)
    if name == "permute":
        order = list(dims[0] if isinstance(dims[0], tuple | list) else dims)
        if any(not -x.dim() <= d < x.dim() for d in order):
            return NotImplemented
        order = [d % x.dim() for d in order]
        if order[:n] != list(range(n)) or sorted(order) != list(range(x.dim())):
            return NotImplemented
        return x.view_of(x.local.permute(0, *(d - n + 1 for d in order[n:])))
    found = _of_features(tuple(dims) if name != "mT" else (-2, -1), x)
    return NotImplemented if found is None else x.view_of(x.local.transpose(*found))


HANDLERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(ALONG, _along),
    "dropout": _dropout,
    "one_hot": _one_hot,
    **dict.fromkeys(names("rand_like randn_like randint_like"), _drawn),
    **dict.fromkeys(names("gather scatter scatter_add scatter_reduce"), _by_index),
    **dict.fromkeys(names("linear matmul mm addmm layer_norm rms_norm"), _with_weights),
    **dict.fromkeys(names("view reshape view_as reshape_as unsqueeze squeeze flatten unflatten ravel"), _arranged),
    **dict.fromkeys(names("expand expand_as broadcast_to repeat"), _expanded),
    **dict.fromkeys(names("getitem setitem"), _indexed),
    **dict.fromkeys(names("transpose swapaxes swapdims permute mT"), _transposed),
}


# --- autograd's own functions ---------------------------------------------------------------------------------------


def _requires_grad(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """requires_grad, its setter, requires_grad_. For a new leaf, the wrapper itself is the leaf, not its rows."""
    x, name = args[0], name_of(func)
    if name == "requires_grad" and len(args) == 1:
        return x._source._autograd("requires_grad") if x._source is x else x.local.requires_grad
    wanted = kwargs.get("requires_grad", args[1] if len(args) > 1 else True)
    source = x._source
    if wanted and not source.requires_grad:
        x._local = None
        source = x
    with torch._C.DisableTorchFunctionSubclass():
        source.requires_grad_(wanted)
    return x


def _register_hook(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The hook gets the gradient as a TokenShard."""
    x, hook = args
    source, lead, tokens = x._source, x.lead, x.tokens

    def on_rows(grad: Tensor) -> Tensor | None:
        done = hook(TokenShard.of(_rows_of(grad, lead, tokens) if source_is_shard else grad, lead, tokens))
        return done if done is None or source_is_shard else _rows_of(done, lead, tokens)

    source_is_shard = source is x
    with torch._C.DisableTorchFunctionSubclass():
        return func(source, on_rows)


def _grad(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The attribute `grad`, or torch.autograd.grad."""
    if func is torch.autograd.grad:
        return _autograd_grad(*args, **kwargs)
    x, *value = args
    source = x._source
    with torch._C.DisableTorchFunctionSubclass():
        if not value:
            grad = func(source)
            return grad if grad is None or source is x else x.like(grad)
        given = value[0]
        return func(source, given if given is None or source is x else x.rows_of(given))


def _autograd_grad(outputs: Any, inputs: Any, grad_outputs: Any = None, **options: Any) -> tuple[Any, ...]:
    ys, dys = _local_pairs(outputs, grad_outputs)
    inputs = _as_tuple(inputs)
    sources = [x._source if isinstance(x, TokenShard) else x for x in inputs]
    with torch._C.DisableTorchFunctionSubclass():
        found = torch.autograd.grad(ys, sources, dys, **options)
    return tuple(
        x.like(dx) if isinstance(x, TokenShard) and dx is not None and source is not x else dx
        for x, source, dx in zip(inputs, sources, found, strict=True)
    )


def _backward(func: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """torch.autograd.backward, or the method."""
    tensors, *rest = args
    options = dict(zip(("grad_tensors", "retain_graph", "create_graph", "inputs"), rest)) | kwargs
    grads = options.pop("grad_tensors", None) if "gradient" not in options else options.pop("gradient")
    options.pop("grad_variables", None)
    inputs = options.pop("inputs", None)
    ys, dys = _local_pairs(tensors, grads)
    sources = [x._source if isinstance(x, TokenShard) else x for x in _as_tuple(inputs or ())]
    with torch._C.DisableTorchFunctionSubclass():
        torch.autograd.backward(ys, dys, inputs=sources or None, **options)


@torch.enable_grad()
def _local_pairs(outputs: Any, grads: Any) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    """Outputs and their gradients; TokenShards are replaced by this rank's rows."""
    outputs = _as_tuple(outputs)
    grads = (None,) * len(outputs) if grads is None else _as_tuple(grads)
    pairs = [
        (y.local, None if dy is None else y.rows_of(dy)) if isinstance(y, TokenShard) else (y, dy)
        for y, dy in zip(outputs, grads, strict=True)
    ]
    return tuple(y for y, _ in pairs), tuple(dy for _, dy in pairs)


def _as_tuple(x: Any) -> tuple[Any, ...]:
    return (x,) if isinstance(x, Tensor) else tuple(x)


AUTOGRAD: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(names("requires_grad requires_grad_"), _requires_grad),
    "register_hook": _register_hook,
    "grad": _grad,
    "backward": _backward,
    "_version": lambda func, args, kwargs: args[0].local._version,
}
