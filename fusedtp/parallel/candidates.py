"""Ways to split linear layers that `infer.py` has paired, and the modules around them: what a trial may try.

    linears     packed as their sizes allow
    beside      norms over the features of all heads, and parameters with a part for each head
    views       attributes that hold a number of heads or a width, the reported width of an input, and arguments with a
                dimension of all heads, divided by the number of ranks (local_view.py)

Each candidate is a guess that a trial proves or refutes; a wrong one costs time only.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product
from typing import Any

from einops.layers.torch import Rearrange
from torch import Tensor, nn

from .foreign_styles import features_of, is_conv1d, is_linear
from .local_view import (
    CONFIG,
    COUNTS_HEADS,
    GROUP,
    INPUT,
    is_norm_of_features,
    lengths,
    local_view,
    names_in,
    of_heads,
    packed,
    parameters_of,
    value_of,
)
from .observe import join
from .plan import parent_of
from .trial import Inputs

CUTS = 4  # ways to cut arguments of a module that are tried, beside none
# Attributes that may equal a width by chance but count something else.
NO_WIDTH = re.compile(r"block|pos|seq|len|context|window|max|vocab|bucket|layer|rank")


def widths_between(module: nn.Module | None, columns: list[str], rows: list[str]) -> set[str]:
    """Names of attributes, on modules directly around these layers, that hold the number of features between them."""
    try:
        linears = {name: module.get_submodule(name) for name in (*columns, *rows)} if module is not None else {}
    except AttributeError:
        linears = {}
    if module is None or not linears:
        return set()
    between = {features_of(linears[name])[0] for name in rows} | {features_of(linears[name])[1] for name in columns}
    return {
        name
        for name, value in _attributes(module, [*columns, *rows]).items()
        if value in between and not COUNTS_HEADS.fullmatch(name) and not NO_WIDTH.search(name)
    }


def candidates(
    module: Any,
    columns: list[str],
    rows: list[str],
    taken: dict[str, str],
    wide: set[str],
    ran: set[str],
    given: Mapping[str, Inputs],
) -> Iterator[dict[str, str]]:
    """Style names to try for linear layers `columns` and `rows` of a module and what is around them, likeliest first.

    taken   style names that the module has already
    wide    attributes that hold the number of features between the layers
    ran     modules and parameters inside that the trial uses; of others it could not tell whether they may be split
    given   module inside -> its arguments in the trial
    """
    if not rows:
        yield dict.fromkeys(columns, "colwise_gather_output")
        return
    row = rows[0]
    inside = {name: module.get_submodule(name) for name in (*columns, *rows)}
    attributes = _attributes(module, [*columns, row])
    heads = tuple(name for name in attributes if COUNTS_HEADS.fullmatch(name))
    widths = tuple(name for name in attributes if name in wide)
    first = parent_of(columns[0])
    narrow = ((), (INPUT,)) if features_of(inside[columns[0]])[0] == features_of(inside[row])[0] else ((),)
    counts = {attributes[name] for name in heads}
    norms = _norms(module, columns)
    every = _by_head(module, [*columns, row], counts)
    deep = {name: word for name, word in every.items() if name in ran}
    by_head = {name: word for name, word in deep.items() if parent_of(name) in {*_parents([*columns, row]), ""}}
    beside = [norms, {}, norms | by_head, by_head, norms | deep, deep]  # split no more than is needed
    ways = _ways(inside, columns, rows, counts)
    for linears in [way | each for way in ways for i, each in enumerate(beside) if each not in beside[:i]]:
        tried: list[dict[str, str]] = []
        numbers = _numbers(attributes, heads, widths, linears[columns[0]])
        for cut, claimed, within in product(range(CUTS + 1), narrow, (False, True)):
            for names in numbers:
                views: dict[str, str] = {}
                for at in dict.fromkeys((first, parent_of(row), *_parents(columns), "")):
                    each = module.get_submodule(at) if at else module
                    own = tuple(n for n in names if type(value_of(each, n)) is int) + (claimed if at == first else ())
                    before = names_in(taken.get(at, ""))
                    cuts = _cuts(each, own, given[at]) if cut and at in given else []
                    if cut <= len(cuts) and cuts:
                        views[at] = local_view((*cuts[cut - 1], *before))
                    elif own:
                        views[at] = local_view((*before, *own))
                    elif isinstance(each, nn.TransformerEncoderLayer):
                        views[at] = "no_fast_path"
                    if within and names:
                        views |= {name: word for name, word in _inside(at, each, counts).items() if name in ran}
                if views not in tried:
                    tried.append(views)
                    yield linears | views


def _numbers(
    attributes: dict[str, int], heads: tuple[str, ...], widths: tuple[str, ...], column: str
) -> list[tuple[str, ...]]:
    """Sets of attributes that may be divided, likeliest first. column: the style name of the first layer.

    In multi-query attention also the number of queries for each key: as many as this rank has queries.
    """
    counts = {attributes[name] for name in heads}
    groups: tuple[str, ...] = ()
    if column in {of_heads(count, 1, 1) for count in counts}:
        groups = tuple(name for name, value in attributes.items() if GROUP.search(name) and value in counts)
    own = tuple(name for name in heads if not name.startswith(CONFIG))
    alone = tuple(name for name in own if "group" not in name)
    every = [(*some, *wide, *more) for more in (groups, ()) for some in (heads, own, alone) for wide in ((), widths)]
    return [*dict.fromkeys((*every, ()))]


def _ways(inside: dict[str, Any], columns: list[str], rows: list[str], counts: set[int]) -> list[dict[str, str]]:
    """Style names for linear layers: of packed matrices first, if their sizes allow it.

    A row that takes two outputs of A and B features in one is like g = gcd(A, B) wide matrices packed: every rank has a
    part of each, in the same order as its parts of the outputs, if these are split as A / g and B / g matrices.

    counts   numbers that may be that of heads, for queries packed with fewer keys and values
    """
    outs = {name: features_of(inside[name])[1] for name in columns}
    width = features_of(inside[rows[0]])[0]
    if concatenated(set(outs.values()), width):
        unit = math.gcd(*outs.values())
        row = {rows[0]: packed("rowwise", width // unit)}
        return [{name: packed("colwise", out // unit) for name, out in outs.items()} | row]
    several = {2 * width: (2, 1), 3 * width: (3, 1)} if len(columns) == 1 else {}
    after = dict.fromkeys(rows, "rowwise")
    ways = [dict.fromkeys(columns, packed("colwise", n)) | after for n in several.get(outs[columns[0]], (1,))]
    if len(columns) > 1 or is_conv1d(inside[columns[0]]):
        return ways
    return ways + [{columns[0]: of_heads(*heads)} | after for heads in grouped(outs[columns[0]], width, counts)]


def grouped(out: int, width: int, counts: set[int]) -> list[tuple[int, int, int]]:
    """Numbers of heads of queries, keys and values packed in `out` features, of which the queries have `width`.

    counts   numbers that may be that of the queries' heads; there are more of these than of keys
    """
    found = []
    for heads in sorted(counts, reverse=True):
        each, rest = divmod(width, heads)
        few, odd = divmod(out - width, 2 * each) if each else (0, 1)
        if not rest and not odd and 0 < few < heads and heads % few == 0:
            found.append((heads, few, few))
    return found


def concatenated(outs: set[int], width: int) -> bool:
    """Whether outputs of two widths may be concatenated to this one."""
    return len(outs) == 2 and sum(outs) == width


def _norms(module: Any, columns: list[str]) -> dict[str, str]:
    """Norms beside these layers over as many features as one of them outputs."""
    widths = {features_of(module.get_submodule(name))[1] for name in columns}
    return {
        join(at, name): "norm_of_all_heads"
        for at in dict.fromkeys(_parents(columns))
        for name, each in module.get_submodule(at).named_children()
        if is_norm_of_features(each) and each.normalized_shape[0] in widths
    }


def _cuts(module: Any, names: tuple[str, ...], given: Inputs) -> list[tuple[str, ...]]:
    """These names, with arguments [..., heads, queries, keys] to cut: all of them, then each alone.

    All first: code may use one of two in one implementation of attention, and both in another. The number of heads that
    they count comes first in the names. An argument of which the inputs do not show whether a dimension counts samples
    or heads is not cut, nor is the first tensor, the hidden states.
    """
    takes = parameters_of(module)
    named = {name: given.args[at] for name, at in takes.items() if at is not None and at < len(given.args)}
    named |= {name: x for name, x in given.kwargs.items() if name in takes}
    tensors = [(name, x) for name, x in named.items() if isinstance(x, Tensor)]
    samples = len(tensors[0][1]) if tensors and tensors[0][1].dim() else 0
    for count in (name for name in names if COUNTS_HEADS.fullmatch(name)):
        heads, found = value_of(module, count), []
        for name, x in tensors[1:]:
            at, length = (x.dim() - 3, x.shape[-3]) if x.dim() > 2 else (0, 0)
            if at == 0 and length == samples * heads and samples > 1:
                found.append(f"{name}[0 of 3 per sample]")
            elif length == heads and (at > 0 or length != samples):
                found.append(f"{name}[{at} of {x.dim()}]")
        if found:
            some = [tuple(found), *((each,) for each in found if len(found) > 1)]
            return [tuple(dict.fromkeys((count, *names, *each))) for each in some]
    return []


def _by_head(module: Any, linears: list[str], heads: set[int]) -> dict[str, str]:
    """Style names for parameters around these layers with a first or last dimension as long as there are heads.

    Those of modules beside the layers too, such as a table with a bias for each head.
    """
    found: dict[str, str] = {}
    for at in dict.fromkeys((*_parents(linears), "")):
        for inner, each in module.get_submodule(at).named_modules():
            own = () if is_linear(each) else each.named_parameters(recurse=False)
            for name, parameter in own:
                if parameter.dim() > 1 and parameter.shape[-1] in heads:
                    found[join(join(at, inner), name)] = "rowwise"
                elif parameter.dim() and parameter.shape[0] in heads:
                    found[join(join(at, inner), name)] = "grouped_gemm"
    return found


def _inside(at: str, module: nn.Module, heads: set[int]) -> dict[str, str]:
    """Style names for children without parameters that know the number of heads, such as the kernel of an attention.

    In a Rearrange layer of einops it is the length of axis h.
    """
    found: dict[str, str] = {}
    for name, each in module.named_children():
        if any(True for _ in each.parameters()):
            continue
        known = re.compile("h|(n_|num_)?heads?") if isinstance(each, Rearrange) else COUNTS_HEADS
        values = lengths(each).items()
        own = tuple(key for key, n in values if type(n) is int and n in heads and known.fullmatch(key))
        found |= {join(at, name): local_view(own)} if own else {}
    return found


def _parents(names: list[str]) -> list[str]:
    return [parent_of(name) for name in names]


def _attributes(module: Any, linears: list[str]) -> dict[str, int]:
    """Attributes of the modules directly around these layers that are integers above one.

    Of a module's config, those that count heads and that its forward reads there, as `config.n_head`.
    """
    found: dict[str, int] = {}
    for at in dict.fromkeys((*_parents(linears), "")):
        each = module.get_submodule(at) if at else module
        kind: Any = type(each)
        values = dict(each.__dict__)
        for name in read_of_config(kind) if "config" in values else ():
            values[CONFIG + name] = value_of(each, CONFIG + name)
        found.update({name: value for name, value in values.items() if type(value) is int and value > 1})
    return found


@cache
def read_of_config(kind: Any) -> tuple[str, ...]:
    """What the forward of a class reads of its config that may count heads, or groups of queries with one key each."""
    try:
        source = inspect.getsource(kind.forward)
        own = next(iter(inspect.signature(kind.forward).parameters))
    except (OSError, TypeError, AttributeError, ValueError, StopIteration):
        return ()
    config = rf"{own}\.config"
    called = [config, *re.findall(rf"\b(\w+) *= *{config}\b(?!\.)", source)]  # as in: c = self.config
    names = dict.fromkeys(re.findall(rf"(?<![\w.])(?:{'|'.join(called)})\.(\w+)", source))
    return tuple(name for name in names if COUNTS_HEADS.fullmatch(CONFIG + name))
