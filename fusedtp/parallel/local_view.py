"""More styles that `infer.py` needs: for modules with code that depends on tensor widths.

    local_view(n_head, n_embd)      the module's own forward; attributes n_head and n_embd are divided by world size
    local_view(n_head, input.shape) the same, and its input reports the width of this rank's part
    local_view(n_head, bias[1 of 4])    the same, and of dimension 1 of its argument `bias` with 4 dimensions, which has
                                    n_head elements, it gets those of this rank's heads
    local_view(n_head, bias[0 of 3 per sample])    the same for a dimension of samples x n_head
    local_view(h)                   of a Rearrange layer of einops: the length of axis h is divided
    norm_of_all_heads               nn.RMSNorm over the features of all heads, of which each rank has some
    local_view(config.n_head)       the same for an attribute of the module's config, of which it gets a view
    packed_colwise_n, packed_rowwise_n   n matrices in one, as packed_colwise has two
    colwise_of_heads(8, 2, 2)       matrices of 8, 2 and 2 heads in one: each rank uses the rows of its heads. The
                                    weight is replicated, since a DTensor cannot split parts of different lengths
    no_fast_path                    nn.TransformerEncoderLayer, which otherwise reads weights without calling its layers

Attention code gets the number of heads or the width from one of three places: the tensor (`view(B, S, -1, head_dim)`),
an attribute (`view(B, S, self.num_heads, -1)`), or its input (`B, S, C = x.shape`, then `view(B, S, C)` of heads). The
first needs nothing, the second a local attribute, the third an input with the shape of this rank's heads. The linear
layers inside unwrap the whole input from it; any other use of it raises. What code outside computes for all heads and
passes in, such as ALiBi or a relative position bias, is cut.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from einops.layers.torch import Rearrange
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from fusedtp.comm import Communicator
from fusedtp.ops.main_grad import Runs
from fusedtp.ops.tokens import all_reduce_sum, copy_to_group

from .foreign import Model, Own, own_forward
from .foreign_styles import Colwise, Foreign, Rowwise, faults_of_linear, install, is_linear
from .layers import accumulated
from .placement import Mesh, Placement
from .plan import generic, parent_of
from .token_shard import TokenShard
from .torch_names import METADATA, name_of

INPUT = "input.shape"
CONFIG = "config."
VIEW = re.compile(r"local_view\((.+)\)")
ARGUMENT = re.compile(r"(\w+)\[(\d+) of (\d+)( per sample)?\]")
PACKED = re.compile(r"packed_(colwise|rowwise)_([1-9]\d*)")
OF_HEADS = re.compile(r"colwise_of_heads\((\d+(?:, *\d+)+)\)")
# Names of attributes with a number of heads; of heads, or of queries for each key.
COUNTS_HEADS = re.compile(r"(?!.*(dim|size|width|group)).*head.*|(config\.)?(n|num)_query_groups")
GROUP = re.compile(r"_groups?$")
NUMBERS = re.compile(f"{COUNTS_HEADS.pattern}|.*{GROUP.pattern}")


class Words(dict[str, Callable[..., Foreign]]):
    """Style name -> style; also `local_view` and `colwise_of_heads` with any arguments, and `packed_colwise_n`."""

    def __contains__(self, word: object) -> bool:
        forms = (VIEW, PACKED, OF_HEADS)
        return super().__contains__(word) or (isinstance(word, str) and any(form.fullmatch(word) for form in forms))

    def __missing__(self, word: str) -> Callable[..., Foreign]:
        if VIEW.fullmatch(word):
            return partial(LocalView, attributes=names_in(word))
        if heads := heads_in(word):
            return partial(OfHeads, heads=heads)
        found = PACKED.fullmatch(word)
        if found is None:
            raise KeyError(word)
        return partial(Colwise if found[1] == "colwise" else Rowwise, packed=int(found[2]))


def packed(kind: str, matrices: int) -> str:
    """The style name for a linear layer that packs so many matrices; kind: colwise or rowwise."""
    return kind if matrices == 1 else f"packed_{kind}" if matrices == 2 else f"packed_{kind}_{matrices}"


def names_in(word: str) -> tuple[str, ...]:
    """The names listed in a style name local_view(...)."""
    found = VIEW.fullmatch(word)
    return () if found is None else tuple(name.strip() for name in found[1].split(","))


def heads_in(word: str) -> tuple[int, ...]:
    """The numbers of heads in a style name colwise_of_heads(...)."""
    found = OF_HEADS.fullmatch(word)
    return () if found is None else tuple(map(int, found[1].split(",")))


def local_view(names: tuple[str, ...]) -> str:
    """The style name for these attributes; "" if there are none."""
    return f"local_view({', '.join(dict.fromkeys(names))})" if names else ""


def of_heads(*heads: int) -> str:
    """The style name for a linear layer that packs matrices of so many heads."""
    return f"colwise_of_heads({', '.join(map(str, heads))})"


@dataclass(frozen=True)
class HeadsArgument:
    """An argument of a forward, a tensor of `dims` dimensions, of which number `dim` is of all heads.

    position    where it is if it is passed without its name; None if it cannot be
    per_sample  the dimension has samples x heads
    heads       number of all heads
    first, own  this rank's first head, and how many it has
    """

    name: str
    position: int | None
    dim: int
    dims: int
    per_sample: bool
    heads: int
    first: int
    own: int

    def of_rank(self, x: Any, samples: int, members: str) -> Any:
        """This rank's heads of x [..., heads or samples x heads, ...]; a gradient is summed over ranks.

        samples   number of samples in this call
        members   name of the communicator

        A tensor with length 1 there, or with another number of dimensions, is common to all heads and passed whole. One
        that has only this rank's heads already, because a split module made it, is passed as it is.
        Raises ValueError for any other length, and if one head may be common to all or this rank's.
        """
        if not isinstance(x, Tensor):
            return x
        x = x.full_tensor(self.name) if isinstance(x, TokenShard) else x
        learned = x.requires_grad and torch.is_grad_enabled()
        if x.dim() != self.dims:
            return copy_to_group(x, members) if learned else x
        each = samples if self.per_sample else 1
        length, every, mine = x.shape[self.dim], each * self.heads, each * self.own
        if length == mine != every:
            if length > 1:
                return x
            if learned:
                raise ValueError(
                    f"{self.name} has shape {tuple(x.shape)} and a gradient: with as many ranks as heads, its one head "
                    "may be common to all or this rank's; use fewer ranks, or leave this attention and its layers whole"
                )
        if length not in (1, every):
            raise ValueError(
                f"{self.name} has shape {tuple(x.shape)}; dimension {self.dim} should be 1 or {every}, for "
                f"{f'{samples} samples x ' * self.per_sample}{self.heads} heads"
            )
        x = copy_to_group(x, members) if learned else x
        if length != every:
            return x
        at = self.dim
        return x.unflatten(at, (each, self.heads)).narrow(at + 1, self.first, self.own).flatten(at, at + 1)


@dataclass(frozen=True, kw_only=True)
class LocalOwn(Own):
    """A module whose code sees only this rank's heads.

    attributes   name -> the global value; the module's own attribute is this value divided by world size
    narrow       its input reports the width of this rank's part
    arguments    arguments with a dimension of all heads, of which it gets this rank's
    names        of all its arguments, in order
    """

    attributes: Mapping[str, int] = field(default_factory=dict)
    narrow: bool = False
    arguments: tuple[HeadsArgument, ...] = ()
    names: tuple[str, ...] = ()

    def describe(self) -> str:
        """n_head 4 -> 2, ..."""
        parts = [f"{name} {value} -> {value // self.world_size}" for name, value in self.attributes.items()]
        parts += [f"its heads of {each.name}" for each in self.arguments]
        return ", ".join([*parts, *(["the width of its input"] if self.narrow else [])])

    def adapted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not self.arguments and not self.narrow:
            return args, kwargs
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        places = (*range(len(args)), *self.names, *kwargs)
        first = next((place for place in places if isinstance(given.get(place), Tensor)), None)
        if first is None:
            return args, kwargs
        samples = given[first].shape[0] if given[first].dim() else 1
        for each in self.arguments:
            place = each.name if each.name in kwargs else each.position
            if place in given:
                given[place] = each.of_rank(given[place], samples, self.members)
        if self.narrow:
            given[first] = NarrowInput.of(given[first], self.world_size)
        return tuple(given[i] for i in range(len(args))), {name: given[name] for name in kwargs}

    def look(self, module: Any, inputs: Any) -> None:
        """As Own.look. Arguments with heads tell nothing: a split module may have made them of this rank's heads."""
        if not self.arguments:
            return super().look(module, inputs)
        args, kwargs = inputs
        cut = {each.name for each in self.arguments} | {each.position for each in self.arguments}
        kept = [x for i, x in enumerate(args) if i not in cut], {key: x for key, x in kwargs.items() if key not in cut}
        return super().look(module, kept)


class LocalView(Foreign):
    """Divides attributes, arguments and the reported width of the input by the number of ranks. See above."""

    def __init__(self, model: Model, *, attributes: tuple[str, ...], **options: Any) -> None:
        super().__init__(model, **options)
        self.narrow = INPUT in attributes
        found = [match for name in attributes if (match := ARGUMENT.fullmatch(name))]
        self.arguments = [(match[1], int(match[2]), int(match[3]), bool(match[4])) for match in found]
        self.attributes = tuple(name for name in attributes if name != INPUT and not ARGUMENT.fullmatch(name))

    def faults(self, module: Any, world_size: int) -> list[str]:
        found = super().faults(module, world_size)
        for name in self.attributes:
            value = value_of(module, name)
            if type(value) is not int:
                of = ", or argument with a dimension, as bias[1 of 4]" if "[" in name else ""
                found.append(f"it has no integer attribute {name}{of}")
            elif value % world_size:
                found.append(f"{name} is {value}, which {world_size} ranks cannot share evenly")
        if not found:
            found += view_faults(module, {name: value_of(module, name) // world_size for name in self.attributes})
        takes = parameters_of(module) if self.arguments else {}
        names = [name for name, *_ in self.arguments]
        found += [f"its forward has no argument {name}" for name in names if name not in takes]
        found += [f"{name} is listed twice" for name in dict.fromkeys(names) if names.count(name) > 1]
        found += [f"{name} has no dimension {dim} of {dims}" for name, dim, dims, _ in self.arguments if dim >= dims]
        if names and not self.attributes:
            found.append(f"{names[0]} is cut by heads, but no attribute says how many there are")
        return found

    def install(self, module: Any, comm: Communicator, mesh: Mesh) -> None:
        whole: dict[str, int] = {name: value_of(module, name) for name in self.attributes}
        takes = parameters_of(module) if self.arguments or self.narrow else {}
        heads = next(iter(whole.values()), 0)
        own_heads = heads // comm.world_size
        cut = tuple(
            HeadsArgument(name, takes[name], dim, dims, per_sample, heads, comm.rank * own_heads, own_heads)
            for name, dim, dims, per_sample in self.arguments
        )
        view = LocalOwn(
            **self.own(module, comm), attributes=whole, narrow=self.narrow, arguments=cut, names=tuple(takes)
        )
        install(module, view, own_forward)
        own = {name: value // comm.world_size for name, value in whole.items()}
        if isinstance(module, Rearrange):
            made = Rearrange(module.pattern, **{**module.axes_lengths, **own})
            own = {name: value for name, value in vars(made).items() if name not in vars(nn.Module())}
        counts = of_config(own)
        if counts:
            module.config = view_of(module.config, counts)
        for name, value in own.items():
            if not name.startswith(CONFIG):
                setattr(module, name, value)
        if self.narrow:
            for child in module.modules():
                if is_linear(child):
                    child.register_forward_pre_hook(_take_whole)


def value_of(module: Any, name: str) -> Any:
    """The value that `local_view(name)` divides; None if the module does not have it."""
    if name.startswith(CONFIG):
        config = vars(module).get("config")
        return getattr(config, name.removeprefix(CONFIG), None) if hasattr(config, "__dict__") else None
    return lengths(module).get(name)


def of_config(values: Mapping[str, int]) -> dict[str, int]:
    """Those of the module's config, without its name."""
    return {name.removeprefix(CONFIG): value for name, value in values.items() if name.startswith(CONFIG)}


def view_of(config: Any, values: Mapping[str, int]) -> Any:
    """The same config, but for these attributes: all others are read from it and written to it, now and later.

    Its properties are computed from its own values, such as the width of a head from all heads; but one that is an
    integer and is divided as these attributes are, such as the width of all heads, from the local values.
    Raises TypeError if its class cannot have such a view.
    """
    kind = type(config)
    renamed = getattr(config, "attribute_map", {})  # of transformers: the name in the code -> the one that is stored
    counts: dict[str, Any] = {renamed.get(name, name): property(partial(_constant, n)) for name, n in values.items()}
    local = _with(config, counts)
    ranks = max((getattr(config, name) // n for name, n in values.items() if n), default=1)
    members = {name: x for each in reversed(kind.__mro__) for name, x in vars(each).items()}
    own: dict[str, Any] = {
        name: property(partial(_read, config, local, name, ranks), partial(_write, config, name))
        for name, x in members.items()
        if isinstance(x, property | cached_property)
    }
    own["__deepcopy__"] = lambda self, memo: view_of(deepcopy(config, memo), values)
    return _with(config, own | counts)


def _with(config: Any, members: dict[str, Any]) -> Any:
    """The config with these members in its class; both have the same attributes."""
    kind = type(config)
    view: Any = object.__new__(type(f"Local{kind.__name__}", (kind,), members))
    object.__setattr__(view, "__dict__", config.__dict__)
    return view


def _constant(value: int, view: Any) -> int:
    return value


def _read(config: Any, local: Any, name: str, ranks: int, view: Any) -> Any:
    """A property, from the local values if that divides it by the number of ranks."""
    whole = getattr(config, name)
    if type(whole) is not int or isinstance(getattr(type(config), name), cached_property):
        return whole
    own = getattr(local, name)
    return own if own * ranks == whole else whole


def _write(config: Any, name: str, view: Any, value: Any) -> None:
    setattr(config, name, value)


def view_faults(module: Any, values: Mapping[str, int]) -> list[str]:
    """Why the module's config cannot have a view with these values."""
    counts = of_config(values)
    if not counts:
        return []
    config = module.config
    try:
        view = view_of(config, counts)
    except TypeError as error:
        return [f"its config, a {type(config).__name__}, cannot be shown with local values: {error}"]
    return [f"its config's {name} cannot be set" for name, value in counts.items() if getattr(view, name) != value]


def lengths(module: Any) -> dict[str, Any]:
    """The attributes of a module that may be divided; for a Rearrange layer, the lengths of axes."""
    return module.axes_lengths if isinstance(module, Rearrange) else vars(module)


def parameters_of(module: Any) -> dict[str, int | None]:
    """Argument of a module's forward -> its position; None if it is passed by its name only."""
    every = inspect.signature(module.forward).parameters.items()
    named = {name: each.kind for name, each in every if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}
    by_name = inspect.Parameter.KEYWORD_ONLY
    return {name: None if kind is by_name else i for i, (name, kind) in enumerate(named.items())}


def _take_whole(module: Any, args: Any) -> Any:
    return tuple(x.whole if isinstance(x, NarrowInput) else x for x in args)


class NarrowInput(Tensor):
    """Wraps `whole` [..., H] but has the shape [..., H / ranks]. Linear layers use `whole`; any other use raises."""

    whole: Tensor

    @staticmethod
    def of(x: Tensor, ranks: int) -> NarrowInput:
        if x.shape[-1] % ranks:
            raise ValueError(f"{ranks} ranks cannot share a width of {x.shape[-1]} evenly")
        shape = (*x.shape[:-1], x.shape[-1] // ranks)
        made = Tensor._make_wrapper_subclass(NarrowInput, shape, dtype=x.dtype, device=x.device)
        made.whole = x
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = name_of(func)
        if name == "requires_grad":
            return args[0].whole.requires_grad
        if name not in METADATA:
            raise RuntimeError(f"{name} of an input that reports this rank's width; only linear layers can use it")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise RuntimeError(f"{func} of an input that reports this rank's width; only linear layers can use it")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"NarrowInput({tuple(self.shape)} of {tuple(self.whole.shape)})"


class NoFastPath(Foreign):
    """nn.TransformerEncoderLayer, without the evaluation fast path, which passes all weights to one kernel."""

    def faults(self, module: Any, world_size: int) -> list[str]:
        found = [] if hasattr(module, "activation_relu_or_gelu") else ["it has no fast path to switch off"]
        return found + super().faults(module, world_size)

    def install(self, module: Any, comm: Communicator, mesh: Mesh) -> None:
        super().install(module, comm, mesh)
        module.activation_relu_or_gelu = 0


# --- packed heads -----------------------------------------------------------------------------------------------


class OfHeads(Colwise):
    """See colwise_of_heads.

    heads   number of heads in each of the matrices, which are concatenated along the output features. If there are
            fewer than ranks, as in multi-query attention, several ranks use the same one
    """

    def __init__(self, model: Model, *, heads: tuple[int, ...], **options: Any) -> None:
        super().__init__(model, **options)
        self.heads = heads

    def faults(self, module: Any, world_size: int) -> list[str]:
        found = faults_of_linear(module) or super().faults(module, world_size)
        if found:
            return found
        features, listed = module.weight.shape[0], ", ".join(map(str, self.heads))
        if 0 in self.heads or features % sum(self.heads):
            return [f"{features} output features are not matrices of {listed} heads of one width"]
        if max(self.heads) < world_size:
            return [f"{max(self.heads)} heads cannot be divided among {world_size} ranks"]
        return [
            f"{count} heads cannot be divided evenly among {world_size} ranks"
            for count in dict.fromkeys(self.heads)
            if count % world_size and world_size % count
        ]

    def placements(self, module: Any, world_size: int) -> dict[str, Placement]:
        return {}

    def rows_of_rank(self, module: Any, comm: Communicator) -> Runs:
        width = module.weight.shape[0] // sum(self.heads)
        first = [sum(self.heads[:i]) + count * comm.rank // comm.world_size for i, count in enumerate(self.heads)]
        own = [max(count // comm.world_size, 1) for count in self.heads]
        return tuple((begin * width, count * width) for begin, count in zip(first, own, strict=True))


def heads_faults(named: Mapping[str, Any], styles: Mapping[str, Foreign]) -> list[str]:
    """Faults: packed heads, of which the module around them counts others."""
    faults = []
    for name, style in styles.items():
        around = styles.get(parent_of(name))
        if isinstance(style, OfHeads) and isinstance(around, LocalView):
            module = named[parent_of(name)]
            counts = {each: value_of(module, each) for each in around.attributes if NUMBERS.fullmatch(each)}
            several = len({n for each, n in counts.items() if COUNTS_HEADS.fullmatch(each)}) > 1  # keys are counted too
            known = {*counts.values(), 1}
            others = [count for count in style.heads[: None if several else 1] if count not in known]
            if counts and others:
                listed = ", ".join(f"{each} {count}" for each, count in counts.items())
                faults.append(f"{generic(name)}: its plan says {others[0]} heads, the module around it {listed}")
    return faults


# --- norms over all heads ---------------------------------------------------------------------------------------


def is_norm_of_features(module: Any) -> bool:
    """Whether it is torch's RMSNorm over the last dimension."""
    return type(module) is nn.RMSNorm and "forward" not in vars(module) and len(module.normalized_shape) == 1


def norm_of_all_heads(self: Any, x: Tensor) -> Tensor:
    """The forward of an nn.RMSNorm whose features are split over ranks: x [..., n_r] -> [..., n_r].

    The mean square is that of all n features, so every rank's x contributes to the gradient of every other rank's.
    """
    at: Own = self.parallel
    if x.shape[-1] == self.normalized_shape[0] and at.world_size > 1:
        raise ValueError(f"x has all {x.shape[-1]} features; norm_of_all_heads is for outputs of colwise layers")
    wide = x if x.dtype == torch.float64 else x.float()
    eps = torch.finfo(wide.dtype).eps if self.eps is None else self.eps
    squares = copy_to_group(all_reduce_sum(wide.square().sum(-1, keepdim=True), at.members), at.members)
    y = wide * torch.rsqrt(squares / self.normalized_shape[0] + eps)
    return (y if self.weight is None else y * accumulated(self.weight)).to(x.dtype)


class NormOfAllHeads(Foreign):
    """See norm_of_all_heads."""

    forward = staticmethod(norm_of_all_heads)

    def faults(self, module: Any, world_size: int) -> list[str]:
        if is_norm_of_features(module):
            return super().faults(module, world_size)
        return [f"{type(module).__name__} is not an nn.RMSNorm over the last dimension"]

    def placement(self, name: str, parameter: Tensor) -> Placement:
        return Shard(0)


WORDS: dict[str, Callable[..., Foreign]] = {
    "no_fast_path": NoFastPath,
    "norm_of_all_heads": NormOfAllHeads,
}
