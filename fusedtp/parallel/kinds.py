"""Which modules of a model are of one kind, so that one of them stands for all; a copy of it with fewer layers."""

from __future__ import annotations

import re
from enum import Enum
from functools import cache, partial
from types import CodeType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from .observe import join
from .plan import generic
from .trial import sharing

SIMPLE = (int, float, str, bool, type(None), torch.dtype, torch.device)
INDEX = re.compile(r".*(idx|index|layer_(id|number)).*")
OF_TORCH = {"_parameters", "_buffers", "_modules"}
HOOKS = vars(nn.Module()).keys() - OF_TORCH  # among others
MANY, DEEP = 1000, 8  # elements of a container, and objects and containers inside others, that are looked at


def kind_of(name: str, module: nn.Module) -> tuple[Any, ...]:
    """Equal for the same layer of several blocks that are alike."""
    return generic(name), fingerprint(module)


def fingerprint(module: nn.Module) -> tuple[Any, ...]:
    """Equal for two modules of one kind: classes, shapes, settings, functions. Their index in a stack is included only
    if code of the class other than __init__ reads it; transformers code is skipped: it reads it to find a cache."""
    found: list[Any] = []
    known: dict[int, Any] = {}
    for name, each in module.named_modules():
        shapes = [(key, tuple(p.shape)) for key, p in each.named_parameters(recurse=False)]
        named = each.named_buffers(recurse=False)  # statistics differ, and do not matter
        buffers = [(key, (tuple(x.shape),) if x.is_floating_point() else _setting(x, known)) for key, x in named]
        found.append((name, type(each), tuple(shapes), tuple(buffers), _attributes(each, known)))
    return tuple(found)


def _attributes(each: Any, known: dict[int, Any], depth: int = 0) -> tuple[Any, ...]:
    """The settings in the attributes of an object."""
    kind: Any = type(each)
    reads = _reads(kind)
    own = [(key, _rate(key, x, kind)) for key, x in vars(each).items() if key not in OF_TORCH]
    own = [(key, list(x.values()) if key in HOOKS and isinstance(x, dict) else x) for key, x in own]  # keys are ids
    return tuple((key, _setting(x, known, depth)) for key, x in own if not INDEX.fullmatch(key) or key in reads)


def _rate(key: str, value: Any, kind: type) -> Any:
    """Of a rate of dropout, or of stochastic depth, which grows from layer to layer, whether it is above zero."""
    rate = type(value) is float and ("drop" in key or (key == "p" and issubclass(kind, _DropoutNd))) and 0 <= value < 1
    return value > 0 if rate else value


def _setting(value: Any, known: dict[int, Any], depth: int = 0) -> Any:
    """Equal if the attributes of two modules are equal. Of objects such as a config the attributes count, of tensors
    the shape and, if they are integers, such as a mask or indices, or one number, the values. A function with a closure
    and a long container are only equal to themselves.

    known   id of an object -> its setting
    """
    if type(value) in SIMPLE or isinstance(value, Enum):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (slice, range, bytes, complex)):
        return repr(value)
    if depth > DEEP:
        return type(value)
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, _values(value.detach())
    if isinstance(value, (tuple, list, dict, set, frozenset)) and len(value) > MANY:
        return id(value)
    if isinstance(value, (tuple, list)):
        return tuple(_setting(x, known, depth + 1) for x in value)
    if isinstance(value, (set, frozenset)):
        return frozenset(_setting(x, known, depth + 1) for x in value)
    if isinstance(value, dict):
        return tuple((_setting(key, known, depth + 1), _setting(x, known, depth + 1)) for key, x in value.items())
    if isinstance(value, partial):
        return tuple(_setting(x, known, depth + 1) for x in (value.func, value.args, value.keywords))
    if isinstance(value, nn.Module):
        return type(value)
    if not callable(value):
        if id(value) not in known:
            known[id(value)] = type(value)  # where it leads back to itself
            found = _attributes(value, known, depth + 1) if hasattr(value, "__dict__") else ()
            found += tuple(_setting(getattr(value, key, None), known, depth + 1) for key in _slots(type(value)))
            known[id(value)] = type(value), found if found or hasattr(value, "__dict__") else id(value)
        return known[id(value)]
    value = getattr(value, "__func__", value)
    closed = getattr(value, "__closure__", None) or getattr(value, "__defaults__", None)
    return id(value) if closed else getattr(value, "__code__", id(value))


def _values(x: Tensor) -> Any:
    """Of integers, and of one number."""
    if x.layout != torch.strided or x.is_meta or x.is_complex():
        return ()
    if x.is_floating_point():
        return float(x) if x.numel() == 1 else ()
    return hash(x.cpu().numpy().tobytes())


def _slots(kind: type) -> list[str]:
    found = [vars(each).get("__slots__", ()) for each in kind.__mro__]
    return [key for keys in found for key in ([keys] if isinstance(keys, str) else keys) if not key.startswith("__")]


@cache
def _reads(kind: Any) -> frozenset[str]:
    """Names that the code of a class reads outside __init__."""
    theirs = [
        each for each in kind.__mro__ if each.__module__.partition(".")[0] not in ("builtins", "torch", "transformers")
    ]
    todo = [getattr(f, "__code__", None) for each in theirs for key, f in vars(each).items() if key != "__init__"]
    found: set[str] = set()
    while todo:
        code = todo.pop()
        if isinstance(code, CodeType):
            found.update(code.co_names, (each for each in code.co_consts if isinstance(each, str)))  # as for getattr
            todo += code.co_consts
    return frozenset(found)


# --- fewer layers -----------------------------------------------------------------------------------------------------


class Short(NamedTuple):
    """A copy of a model with fewer layers, whose names are the model's.

    lacks   layer that it lacks -> those of the same kind, in the same list, that it has
    """

    model: nn.Module
    lacks: dict[str, list[str]]


def shortened(model: nn.Module) -> Short | None:
    """A copy that shares the model's weights, with the first two layers of each kind in each list.

    None if nothing can be left out: layers are all unlike, or share parameters with the rest.
    """
    lacks: dict[str, list[str]] = {}

    def visit(name: str, module: nn.Module) -> None:
        children = dict(module.named_children())
        if isinstance(module, nn.ModuleList | nn.Sequential):
            alike: dict[Any, list[str]] = {}
            for child, layer in list(children.items()):
                kept = alike.setdefault(fingerprint(layer), [])
                if len(kept) < 2 or not any(layer.children()):  # code may name each of several linear layers
                    kept.append(join(name, child))
                else:
                    lacks[join(name, child)] = kept
                    del children[child]
        for child, layer in children.items():
            visit(join(name, child), layer)

    visit("", model)
    try:
        copied: nn.Module = sharing(model)
    except Exception:  # it holds what cannot be copied; its modules may not
        return None
    for name in lacks:
        inside, _, child = name.rpartition(".")
        del copied.get_submodule(inside)._modules[child]  # so the others keep their names
    left_out = {id(p) for name in lacks for p in model.get_submodule(name).parameters()}
    kept = {name for name, _ in copied.named_parameters(remove_duplicate=False)}
    shared = any(id(p) in left_out for name, p in model.named_parameters(remove_duplicate=False) if name in kept)
    return Short(copied, lacks) if lacks and not shared else None


def names_of(model: nn.Module) -> list[str]:
    """Of all modules and parameters."""
    named = model.named_modules(), model.named_parameters(remove_duplicate=False)
    return [name for each in named for name, _ in each]
