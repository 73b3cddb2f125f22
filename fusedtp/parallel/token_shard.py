"""A tensor of all tokens of which each rank holds some rows: sequence parallelism for models that know nothing of it.

    logical    [B, S, H]             what the model's code sees: shape, dtype, device
    local      [T_r, H]              this rank's rows of the T = B * S flattened tokens, split as torch.chunk does
    meaning    the same tensor on every rank, with the same gradient on every rank

A planned linear layer takes `local` and gathers inside its matmul; the next one reduces and scatters inside its own.
What lies between runs on local rows where it treats every token alike (sums, norms, dropout, an unplanned linear), and
on the gathered tensor where it may not: so any code is right, and code that treats tokens alike is fast. Nothing
depends on where layers begin or end, on S dividing by the number of ranks, or on a model's names.

    operands of an operation on local rows          what is done with them          backward
    another TokenShard, split alike                 its local rows                  -
    a plain tensor without token dimensions ([H])   itself                          a sum over ranks
    a plain tensor over tokens ([B, S, H], [S, 1])  its own rows                    a gather
    any other operation                             gathers every TokenShard        each rank takes its rows

A plain tensor stands for a value that all ranks hold alike, as in transformers' tensor parallelism, and so does its
gradient. That makes all rows of the table linear maps and their transposes.

Note [Two ways into a TokenShard]
Python code reaches it by `__torch_function__`, which works on `local`, a plain tensor with the graph that made it.
autograd.Function.apply (FSDP2's hooks, kernels of others), the engine's sums of gradients and other C++ reach it by
`__torch_dispatch__`, below autograd. For these the wrapper itself hangs in the graph, by _Wrap; a wrapper that C++ made
gets its rows back into the graph by _Unwrap. Both ways give the same gradient.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from fusedtp.ops.rows import split
from fusedtp.ops.tokens import copy_to_group, gather_tokens, take_tokens


class Tokens(NamedTuple):
    """How tokens are split.

    group      the communicator's name
    rank       this one's place in it
    sizes      every rank's rows
    gathered   counts, by operation, how often one had to gather; shared by all tensors of a model
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


class TokenShard(Tensor):
    """See above. Made by `shard`, or by the layers that reduce and scatter."""

    tokens: Tokens
    lead: tuple[int, ...]  # the logical dimensions that count tokens: [B, S], or [T]
    _rows: Tensor  # local, below autograd
    _local: Tensor | None  # local, in the graph; None: only the wrapper is
    _changed: list[bool]  # whether an in-place operation has left the wrapper's own place in the graph behind

    @staticmethod
    def of(local: Tensor, lead: Sequence[int], tokens: Tokens) -> TokenShard:
        """local [T_r, ...] -> logical [*lead, ...], prod(lead) = sum(sizes)."""
        if not (torch.is_grad_enabled() and local.requires_grad):
            return TokenShard._bare(local, tuple(lead), tokens, local)
        changed = [False]
        made: TokenShard = _Wrap.apply(local, tuple(lead), tokens, changed)
        made._local, made._changed = local, changed
        return made

    @staticmethod
    def _bare(rows: Tensor, lead: tuple[int, ...], tokens: Tokens, local: Tensor | None) -> TokenShard:
        shape = (*lead, *rows.shape[1:])
        made = Tensor._make_wrapper_subclass(
            TokenShard, shape, dtype=rows.dtype, device=rows.device, requires_grad=False
        )
        made.tokens, made.lead = tokens, lead
        made._rows, made._local, made._changed = rows.detach(), local, [False]
        return made

    @property
    def local(self) -> Tensor:
        """[T_r, ...], with its graph, also where an autograd.Function of others has put out the wrapper."""
        with torch._C.DisableTorchFunctionSubclass():
            outside = self.requires_grad
        if self._local is not None and (self._local.requires_grad or not outside):
            return self._local
        rows: Tensor = _Unwrap.apply(self)
        return rows

    def full_tensor(self, why: str = "full_tensor") -> Tensor:
        """The logical tensor as a plain one. Collective. `why` is what it is counted for."""
        self.tokens.gathered[why] += 1
        full = gather_tokens(self.local, self.tokens.group, self.tokens.sizes)
        return full.reshape(*self.lead, *full.shape[1:])

    def like(self, local: Tensor) -> TokenShard:
        """Other values of the same tokens."""
        return TokenShard.of(local, self.lead, self.tokens)

    def view_of(self, local: Tensor, lead: Sequence[int] | None = None) -> TokenShard:
        """The same values, arranged otherwise."""
        made = TokenShard.of(local, self.lead if lead is None else lead, self.tokens)
        made._changed = self._changed
        return made

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

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a TokenShard is one rank's part of a forward; save its full_tensor()")


def shard(full: Tensor, group: str, rank: int, world_size: int, gathered: Counter[str]) -> TokenShard:
    """A plain [B, S, H] or [T, H] that all ranks hold -> the same, with each holding its rows."""
    lead = full.shape[:-1]
    tokens = Tokens(group, rank, tuple(split(math.prod(lead), world_size)), gathered)
    return TokenShard.of(tokens.own(full.reshape(-1, full.shape[-1])), lead, tokens)


def gathered(tree: Any) -> Any:
    """Every TokenShard in it as a plain tensor; what is no list, tuple, dict or dataclass of torch's is left alone."""
    return tree_map(lambda x: x.full_tensor("leaving the model") if isinstance(x, TokenShard) else x, tree)


class _Wrap(Function):
    """local -> wrapper. A gradient that comes here has gone around `local`."""

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, lead: tuple[int, ...], tokens: Tokens, changed: list[bool]
    ) -> TokenShard:
        ctx.lead, ctx.tokens, ctx.changed = lead, tokens, changed
        return TokenShard._bare(local, lead, tokens, None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.changed[0]:
            raise RuntimeError("a TokenShard was changed in place and then used by an autograd.Function")
        if isinstance(grad, TokenShard):
            return grad._rows, None, None, None
        rows = grad.reshape(sum(ctx.tokens.sizes), *grad.shape[len(ctx.lead) :])
        return ctx.tokens.own(rows), None, None, None


class _Unwrap(Function):
    """wrapper -> local."""

    @staticmethod
    def forward(ctx: Any, x: TokenShard) -> Tensor:
        ctx.lead, ctx.tokens = x.lead, x.tokens
        return x._rows.view_as(x._rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return TokenShard._bare(grad, ctx.lead, ctx.tokens, None)


# --- below autograd ---------------------------------------------------------------------------------------------

SAME = {
    "detach",
    "alias",
    "clone",
    "_to_copy",
    "zeros_like",
    "ones_like",
    "empty_like",
    "mul",
    "div",
    "add",
    "neg",
}


def _below_autograd(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Sums and copies of gradients on local rows; all else on the gathered tensor."""
    name = func.overloadpacket.__name__
    leaves, spec = tree_flatten((args, kwargs))
    shards = [x for x in leaves if isinstance(x, TokenShard)]
    first = shards[0]
    same_view = name in ("view", "view_as", "_unsafe_view") and tuple(args[1]) == tuple(first.shape)
    if same_view:
        return TokenShard._bare(first._rows, first.lead, first.tokens, None)
    alike = all(x.lead == first.lead for x in shards) and all(
        isinstance(x, TokenShard) or x.dim() == 0 for x in leaves if isinstance(x, Tensor)
    )
    if name in SAME and alike:
        own = [x._rows if isinstance(x, TokenShard) else x for x in leaves]
        own_args, own_kwargs = tree_unflatten(own, spec)
        return TokenShard._bare(func(*own_args, **own_kwargs), first.lead, first.tokens, None)
    with torch.no_grad():
        whole = [
            TokenShard._bare(x._rows, x.lead, x.tokens, x._rows).full_tensor(f"aten.{name}")
            if isinstance(x, TokenShard)
            else x
            for x in leaves
        ]
    whole_args, whole_kwargs = tree_unflatten(whole, spec)
    return func(*whole_args, **whole_kwargs)


# --- what Python code calls -------------------------------------------------------------------------------------


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


# Attributes and methods that ask for no values: the wrapper's own.
METADATA = _names(
    "size dim ndimension numel nelement is_floating_point is_complex is_signed element_size stride is_contiguous "
    "storage_offset get_device __len__ __hash__ is_inference shape dtype device ndim layout is_meta is_cuda is_cpu "
    "is_xpu is_mps is_quantized is_sparse is_sparse_csr is_nested is_mkldnn itemsize nbytes names name is_mtia is_maia "
    "is_ipu is_xla is_hpu is_vulkan"
)
# Those of the plain tensor in the graph.
OF_LOCAL = _names(
    "requires_grad requires_grad_ grad_fn is_leaf retains_grad register_hook retain_grad output_nr _version"
)
# Each element of the result comes from the same place in the operands.
ELEMENTWISE = _names(
    "add sub mul div true_divide floor_divide remainder fmod pow float_power rsub neg negative abs absolute square "
    "sqrt rsqrt reciprocal exp exp2 expm1 log log2 log10 log1p sin cos tanh sinh cosh sigmoid erf erfc logit sign "
    "floor ceil round trunc frac clamp clamp_min clamp_max clip maximum minimum fmax fmin where masked_fill lerp "
    "addcmul addcdiv nan_to_num isnan isinf isfinite eq ne lt le gt ge logical_and logical_or logical_not logical_xor "
    "bitwise_and bitwise_or bitwise_not atan atan2 hypot logaddexp xlogy subtract multiply divide radd rmul rdiv "
    "rtruediv rpow rfloordiv truediv floordiv mod invert and or xor iadd isub imul itruediv ipow pos positive relu "
    "relu6 gelu silu mish elu selu celu leaky_relu softplus softsign hardtanh hardswish hardsigmoid hardshrink "
    "softshrink tanhshrink threshold logsigmoid to float half bfloat16 double int long bool short type type_as "
    "contiguous clone detach zeros_like ones_like full_like empty_like"
)
# `dim` says along which dimensions; on local rows where none of those counts tokens. The default, where there is one.
ALONG: dict[str, int | None] = {
    **dict.fromkeys(_names("topk sort argsort glu"), -1),
    **dict.fromkeys(
        _names(
            "mean sum prod var std var_mean norm vector_norm amax amin max min argmax argmin all any logsumexp softmax "
            "log_softmax normalize cumsum cumprod median unbind chunk split tensor_split cat concat concatenate "
            "stack"
        )
    ),
}
THIRD = _names("chunk split tensor_split topk norm vector_norm normalize")  # `dim` is their third
LISTS = _names("cat concat concatenate stack")
OTHER_SHAPES = _names(
    "unsqueeze_ squeeze_ transpose_ swapaxes_ swapdims_ t_ resize_ resize_as_ set_ as_strided_"
)


def run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """func(*args, **kwargs), with a TokenShard among them."""
    name = _name(func)
    if name in METADATA:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if name in OF_LOCAL:
        done = func(args[0].local, *args[1:], **kwargs)
        return args[0] if name == "requires_grad_" else done
    plain = name.strip("_")
    in_place = _is_in_place(name)
    handler = HANDLERS.get(plain) if kwargs.get("out") is None and name not in OTHER_SHAPES else None
    if handler is not None and (not in_place or isinstance(args[0], TokenShard)):
        done = handler(plain, func, args, kwargs)
        if done is not NotImplemented:
            if not in_place:
                return done
            args[0]._changed[0] = True
            return args[0]
    if in_place and isinstance(args[0], TokenShard):
        if name in OTHER_SHAPES:
            raise RuntimeError(f"{name} gives a tensor of which ranks hold rows another shape; use {plain}")
        return _change(name, func, args, kwargs)
    return func(*_whole(name, args), **_whole(name, kwargs))


def _name(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", str(func))
    return func.__self__.__name__ if name in ("__get__", "__set__") and hasattr(func, "__self__") else name


def _is_in_place(name: str) -> bool:
    if name.startswith("__"):
        return name in ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__")
    return name.endswith("_")


def _whole(name: str, tree: Any) -> Any:
    return tree_map(lambda x: x.full_tensor(name) if isinstance(x, TokenShard) else x, tree)


def _change(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> TokenShard:
    """An in-place operation by way of the gathered tensor, whose own rows are written back."""
    target: TokenShard = args[0]
    full = target.full_tensor(name).clone()
    func(full, *_whole(name, args[1:]), **_whole(name, kwargs))
    rows = full.reshape(sum(target.tokens.sizes), *target.local.shape[1:])
    target.local.copy_(target.tokens.own(rows))
    target._changed[0] = True
    return target


def _operand(x: Tensor, like: TokenShard, broadcasts: bool = True) -> Tensor | None:
    """What stands for x beside the local rows of `like`; None: nothing does."""
    if isinstance(x, TokenShard):
        lead = len(like.lead)  # the same tokens, if not by as many dimensions: some are of size one
        if x.dim() != like.dim() or x.shape[:lead] != like.lead or x.tokens.sizes != like.tokens.sizes:
            return None
        return x.local if len(x.lead) == lead else x.local.reshape(x.local.shape[0], *x.shape[lead:])
    if isinstance(x, DTensor):
        x = x.to_local()
    features = like.dim() - len(like.lead)
    over = x.shape[: max(x.dim() - features, 0)]  # aligned with the last of the dimensions that count tokens
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


def _same_for_all(x: Any, like: TokenShard) -> Any:
    """A value without token dimensions, beside local rows: its gradient is this rank's part of a sum."""
    if isinstance(x, DTensor):
        x = x.to_local()
    if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
        return copy_to_group(x, like.tokens.group)
    return x


def _wrapped(x: Any, like: TokenShard, make: Callable[[Tensor], TokenShard]) -> Any:
    if isinstance(x, Tensor):
        return make(x)
    if isinstance(x, tuple):  # also torch.return_types
        return type(x)([_wrapped(each, like, make) for each in x])
    return x


def _elementwise(name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    leaves, spec = tree_flatten((args, kwargs))
    like = next(x for x in leaves if isinstance(x, TokenShard))
    for x in leaves:
        if isinstance(x, TokenShard) and x.dim() > like.dim():
            return NotImplemented
    own = [_operand(x, like) if isinstance(x, Tensor) else x for x in leaves]
    if any(x is None and isinstance(was, Tensor) for x, was in zip(own, leaves, strict=True)):
        return NotImplemented
    own_args, own_kwargs = tree_unflatten(own, spec)
    if name in ("to", "type") and any(isinstance(x, torch.device | str) for x in leaves):
        moved = func(*own_args, **own_kwargs)
        if isinstance(moved, Tensor) and moved.device != like.device:
            return NotImplemented
        return _wrapped(moved, like, like.like)
    return _wrapped(func(*own_args, **own_kwargs), like, like.like)


def _dropout(name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The mask of the whole tensor, so that all ranks draw as often as one device would, and draw the same."""
    x = args[0]
    inplace = kwargs.get("inplace", args[3] if len(args) > 3 else False)
    training = kwargs.get("training", args[2] if len(args) > 2 else True)
    if not isinstance(x, TokenShard) or inplace:
        return NotImplemented
    if not training:
        return x
    with torch.no_grad():
        ones = torch.ones(x.shape, dtype=x.dtype, device=x.device)
        mask = func(ones, *args[1:], **kwargs).reshape(sum(x.tokens.sizes), *x.local.shape[1:])
    return x.like(x.local * x.tokens.own(mask))


def _of_features(dim: Any, like: TokenShard, more: int = 0) -> Any:
    """The dimensions counted from the last, so that they mean the same for local rows; None where one counts tokens."""
    if isinstance(dim, tuple | list):
        found = [_of_features(d, like, more) for d in dim]
        return None if not found or None in found else tuple(found)
    if not isinstance(dim, int) or isinstance(dim, bool):
        return None
    n = like.dim() + more
    at = dim if dim < 0 else dim - n
    return at if -(n - len(like.lead)) <= at < 0 else None


def _along(name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    operands: Any = args[0] if args else kwargs.get("tensors", kwargs.get("input"))
    many = name in LISTS
    if not isinstance(operands, list | tuple if many else TokenShard):
        return NotImplemented
    like: Any = next(x for x in operands if isinstance(x, TokenShard)) if many else operands
    place = 2 if name in THIRD else 1
    key = next((key for key in ("dim", "axis") if key in kwargs), None)
    given = kwargs[key] if key else args[place] if len(args) > place else ALONG[name]
    dim = _of_features(given, like, int(name == "stack"))
    if dim is None or not args:
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
    make = like.view_of if name in ("chunk", "split", "tensor_split", "unbind") else like.like
    return _wrapped(func(own, *rest, **kwargs), like, make)


def _with_weights(name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """linear, norms over features, products with one matrix: tokens as rows, and weights that all rows share."""
    at = 1 if name == "addmm" else 0
    like = args[at] if len(args) > at else None
    rest = [x for i, x in enumerate(args) if i != at] + list(kwargs.values())
    if not isinstance(like, TokenShard) or any(isinstance(x, TokenShard) for x in rest):
        return NotImplemented
    features = like.dim() - len(like.lead)
    if name in ("layer_norm", "rms_norm"):
        shape = args[1] if len(args) > 1 else kwargs["normalized_shape"]
        if len(shape) > features:
            return NotImplemented
    elif name in ("matmul", "mm", "rmatmul"):
        if features != 1 or len(args) != 2 or not isinstance(args[1], Tensor) or args[1].dim() > 2:
            return NotImplemented
    elif features < 1 or (name == "addmm" and (like.dim() != 2 or args[0].dim() != 1)):
        return NotImplemented
    own = [x.local if i == at else _same_for_all(x, like) for i, x in enumerate(args)]
    return like.like(func(*own, **{key: _same_for_all(x, like) for key, x in kwargs.items()}))


def _arranged(name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """view, reshape and their kind: tokens stay in order, so local rows do."""
    x: TokenShard = args[0]
    if not isinstance(x, TokenShard) or kwargs:
        return NotImplemented
    shape, numbers = list(x.shape), args[1:]
    if len(numbers) == 1 and isinstance(numbers[0], tuple | list):
        numbers = tuple(numbers[0])
    if not all(type(n) is int for n in numbers):
        return NotImplemented
    if name in ("view", "reshape"):
        known = math.prod(n for n in numbers if n != -1)
        if x.numel() == 0 or known == 0:
            return NotImplemented
        shape = [x.numel() // known if n == -1 else n for n in numbers]
    elif name == "unsqueeze":
        at = numbers[0] if numbers[0] >= 0 else numbers[0] + x.dim() + 1
        shape.insert(at, 1)
    elif name == "squeeze":
        which = [n % x.dim() for n in numbers] if numbers else range(x.dim())
        shape = [n for i, n in enumerate(shape) if not (i in which and n == 1)]
    else:  # flatten
        begin, end = (
            (numbers[0] if numbers else 0) % x.dim(),
            (numbers[1] if len(numbers) > 1 else -1) % x.dim(),
        )
        shape[begin : end + 1] = [math.prod(shape[begin : end + 1])]
    total, kept = sum(x.tokens.sizes), list(x.local.shape[1:])
    found = [k for k in range(1, len(shape) + 1) if math.prod(shape[:k]) == total > 0]
    if not found:
        return NotImplemented
    # Dimensions of one may count tokens or not: best as before, or so that features stay.
    k = min(found, key=lambda k: (tuple(shape[:k]) != x.lead, shape[k:] != kept))
    return x.view_of(x.local.reshape(x.local.shape[0], *shape[k:]), tuple(shape[:k]))


def _of_all_tokens(index: Any, like: TokenShard) -> Any:
    """An index that takes every token, as one of local rows; None where it may not."""
    index = index if isinstance(index, tuple) else (index,)
    if not all(i is None or i is Ellipsis or isinstance(i, slice) or type(i) is int for i in index):
        return None
    features, uses = like.dim() - len(like.lead), [i for i in index if i is not None and i is not Ellipsis]
    if index[0] is Ellipsis and Ellipsis not in index[1:] and len(uses) <= features:
        return index
    before = index[: len(like.lead)]
    every = (None, 0), (None,), (None, 1)
    if len(before) == len(like.lead) and all(
        isinstance(i, slice) and i.start in every[0] and i.stop is None and i.step in every[2] for i in before
    ):
        after = index[len(like.lead) :]
        return (slice(None), *after)
    return None


def _indexed(name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    x, index, *values = args
    if not isinstance(x, TokenShard) or (own := _of_all_tokens(index, x)) is None:
        return NotImplemented
    if name == "getitem":
        return x.view_of(func(x.local, own))
    if any(isinstance(v, Tensor) for v in values):
        return NotImplemented
    return func(x.local, own, *values)


def _transposed(name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    x = args[0]
    dims = _of_features(tuple(args[1:]), x) if isinstance(x, TokenShard) and not kwargs else None
    return NotImplemented if dims is None else x.view_of(func(x.local, *dims))


def _permuted(name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    x, *dims = args
    if len(dims) == 1 and isinstance(dims[0], tuple | list):
        dims = list(dims[0])
    if (
        not isinstance(x, TokenShard)
        or kwargs
        or len(dims) != x.dim()
        or not all(type(d) is int for d in dims)
    ):
        return NotImplemented
    lead, dims = len(x.lead), [d % x.dim() for d in dims]
    if dims[:lead] != list(range(lead)):
        return NotImplemented
    return x.view_of(x.local.permute(0, *(d - lead + 1 for d in dims[lead:])))


def _picked(name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """gather and scatter along features, of which each token has its own choice: a router's."""
    if len(args) < 2:
        return NotImplemented
    x, dim, *rest = args
    at = _of_features(dim, x) if isinstance(x, TokenShard) and not kwargs else None
    if at is None:
        return NotImplemented
    own = []
    for operand in rest:
        if isinstance(operand, Tensor) and operand.dim():
            if operand.shape[: len(x.lead)] != x.lead or operand.dim() != x.dim():
                return NotImplemented
            operand = _operand(operand, x, broadcasts=False)
            if operand is None:
                return NotImplemented
        own.append(
            _same_for_all(operand, x) if isinstance(operand, Tensor) and not operand.dim() else operand
        )
    return x.like(func(x.local, at, *own))


def _repeated(name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """expand, repeat, repeat_interleave, unflatten over features."""
    x, *rest = args
    if not isinstance(x, TokenShard) or (kwargs and name != "repeat_interleave"):
        return NotImplemented
    lead = len(x.lead)
    if name == "repeat_interleave":
        given = kwargs.get("dim", rest[1] if len(rest) > 1 else None)
        dim = _of_features(given, x)
        plain = rest and type(rest[0]) is int and set(kwargs) <= {"dim"}
        return x.like(func(x.local, rest[0], dim=dim)) if plain and dim is not None else NotImplemented
    if name == "unflatten":
        dim = _of_features(rest[0], x)
        return NotImplemented if dim is None else x.view_of(func(x.local, dim, *rest[1:]))
    if len(rest) == 1 and isinstance(rest[0], tuple | list):
        rest = list(rest[0])
    if len(rest) != x.dim() or not all(type(n) is int for n in rest):
        return NotImplemented
    if name == "repeat":
        return x.like(func(x.local, 1, *rest[lead:])) if all(n == 1 for n in rest[:lead]) else NotImplemented
    if any(n not in (-1, size) for n, size in zip(rest[:lead], x.lead, strict=True)):
        return NotImplemented
    return x.view_of(func(x.local, -1, *rest[lead:]))


def _padded(name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    x, pad = args[0], args[1] if len(args) > 1 else kwargs.get("pad")
    if not isinstance(x, TokenShard) or pad is None or len(pad) > 2 * (x.dim() - len(x.lead)):
        return NotImplemented
    if (args[2] if len(args) > 2 else kwargs.get("mode", "constant")) != "constant":
        return NotImplemented
    return x.like(func(x.local, *args[1:], **kwargs))


def _one_hot(name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    x, classes = args[0], args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
    return x.like(func(x.local, classes)) if isinstance(x, TokenShard) and classes > 0 else NotImplemented


HANDLERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(ALONG, _along),
    "dropout": _dropout,
    **dict.fromkeys(_names("linear matmul mm addmm layer_norm rms_norm"), _with_weights),
    **dict.fromkeys(_names("view reshape unsqueeze squeeze flatten"), _arranged),
    **dict.fromkeys(_names("getitem setitem"), _indexed),
    **dict.fromkeys(_names("transpose swapaxes"), _transposed),
    "permute": _permuted,
    **dict.fromkeys(_names("gather scatter scatter_add"), _picked),
    **dict.fromkeys(_names("expand repeat repeat_interleave unflatten"), _repeated),
    "pad": _padded,
    "one_hot": _one_hot,
}
