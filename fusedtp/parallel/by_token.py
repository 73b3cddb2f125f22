"""Decide from a module's source code whether its forward treats every token independently.

Norms are the important case: third-party decoder layers have two or more, each of five to ten operations, and an
operation on a TokenShard costs more host time than one on a plain tensor. If the source shows that no operation mixes
tokens, the forward runs once on the plain rows instead, see `each_token` in foreign.py.

The source is a proof because only a small subset of Python is accepted: straight-line code without conditions or loops;
arithmetic on the input, numbers and the module's own 1-D parameters; elementwise functions; means over the last
dimension; the norms of torch.nn.functional; and methods of the module written in the same way. Anything else is "no".
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import threading
from collections.abc import Callable
from functools import lru_cache
from numbers import Number
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .torch_names import names

ELEMENTWISE = names("rsqrt sqrt square abs reciprocal neg sigmoid tanh float half bfloat16 double")
WITH_NUMBERS = names("pow clamp clamp_min clamp_max")
OVER_FEATURES = names("mean var")
NORMS = names("layer_norm rms_norm")
_PARSING = threading.Lock()  # Python 3.11's parser fails if two threads are in it (python/cpython 106905)
MODULES: dict[str, Any] = {"torch": torch, "nn": nn, "F": F}


class Text(NamedTuple):
    """Attributes that an accepted forward reads from its module, and methods that it calls."""

    attributes: frozenset[str]
    methods: frozenset[str]


def by_token(module: Any) -> Callable[..., Any] | None:
    """Its class's forward, if module(x) [..., H] is a function of each x[..., :] and of the module's parameters."""
    forward = type(module).forward
    cls: Any = type(module)
    text = None if module._modules or "forward" in module.__dict__ else _read(forward, cls)
    if text is None or not all(_is_of_features(module, name) for name in text.attributes):
        return None
    return None if any(name in module.__dict__ for name in text.methods) else forward


def _is_of_features(module: Any, name: str) -> bool:
    """Whether the module's attribute is a number, a 1-D tensor of features, or a shape of one dimension."""
    value = getattr(module, name, None)
    if isinstance(value, Tensor):
        return value.dim() <= 1 and (name in module._parameters or not value.requires_grad)
    if isinstance(value, tuple | list):  # normalized_shape of F.layer_norm: must be one dimension
        return len(value) == 1 and isinstance(value[0], int)
    return value is None or isinstance(value, Number)


@lru_cache(512)
def _read(function: Any, cls: type, within: tuple[Any, ...] = ()) -> Text | None:
    """What a function reads from its module; None if it may mix tokens. `within`: the methods that call it."""
    if not inspect.isfunction(function) or function in within:
        return None
    if hasattr(function, "__wrapped__") or function.__closure__:
        return None  # the source may be another function's, or use names from outside its module
    try:
        with _PARSING:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        runs = _is_what_runs(function)
    except (OSError, SyntaxError):
        return None
    definition = tree.body[0]
    if not runs or not isinstance(definition, ast.FunctionDef) or definition.decorator_list:
        return None
    reader = _Reader(cls, function.__globals__, (*within, function))
    return Text(frozenset(reader.attributes), frozenset(reader.methods)) if reader.reads(definition) else None


def _is_what_runs(function: Any) -> bool:
    """Whether the source file still contains the code that was imported."""
    found = [compile("".join(inspect.findsource(function)[0]), "", "exec", dont_inherit=True)]
    for code in found:
        found += [each for each in code.co_consts if inspect.iscode(each)]
    own = function.__code__
    return any(
        (code.co_qualname, code.co_code, code.co_names, code.co_consts)
        == (own.co_qualname, own.co_code, own.co_names, own.co_consts)
        for code in found
    )


class _Reader:
    """Reads one function. `known`: names of variables that hold tensors of the tokens, or a dtype."""

    def __init__(self, cls: type, scope: dict[str, Any], within: tuple[Any, ...]) -> None:
        self.cls, self.scope, self.within = cls, scope, within
        self.known: set[str] = set()
        self.attributes: set[str] = set()
        self.methods: set[str] = set()

    def reads(self, definition: ast.FunctionDef) -> bool:
        """def forward(self, x): straight-line code with a final return."""
        a = definition.args
        if len(a.args) != 2 or a.posonlyargs or a.kwonlyargs or a.vararg or a.kwarg or a.defaults:
            return False
        self.own, first = (each.arg for each in a.args)
        self.known.add(first)
        body = [line for line in definition.body if not _is_text(line)]
        return bool(body) and isinstance(body[-1], ast.Return) and all(map(self.line, body))

    def line(self, line: ast.stmt) -> bool:
        if isinstance(line, ast.Return):
            return line.value is not None and self.value(line.value)
        if not isinstance(line, ast.Assign) or len(line.targets) != 1 or not self.value(line.value):
            return False
        target = line.targets[0]
        if not isinstance(target, ast.Name) or target.id == self.own:
            return False
        self.known.add(target.id)
        return True

    def value(self, at: ast.expr) -> bool:
        """Whether an expression is a tensor over tokens or features, a number, or a dtype."""
        match at:
            case ast.Name(id=name):
                return name in self.known
            case ast.Constant(value=value):
                return isinstance(value, Number) or value is None
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div() | ast.Pow(), right=right):
                return self.value(left) and self.value(right)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self.value(operand)
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name == self.own:
                self.attributes.add(attribute)
                return True
            case ast.Attribute(value=value, attr="dtype"):
                return self.value(value)
            case ast.Attribute():
                return isinstance(self.constant(at), torch.dtype)
            case ast.Call(func=ast.Attribute() as function):
                return self.call(function, at)
        return False

    def constant(self, at: ast.expr) -> Any:
        """The object that torch.float32 or nn.functional.layer_norm names; None if it is not from torch."""
        if isinstance(at, ast.Attribute):
            return getattr(self.constant(at.value), at.attr, None)
        if isinstance(at, ast.Name) and at.id not in self.known:
            return MODULES.get(at.id) if self.scope.get(at.id) is MODULES.get(at.id) else None
        return None

    def call(self, function: ast.Attribute, at: ast.Call) -> bool:
        name, options = function.attr, {each.arg: each.value for each in at.keywords}
        if None in options or any(isinstance(each, ast.Starred) for each in at.args):
            return False
        if isinstance(function.value, ast.Name) and function.value.id == self.own:
            return not options and len(at.args) == 1 and self.method(name) and self.value(at.args[0])
        of = self.constant(function.value)
        if of is F and name in NORMS:
            return all(map(self.value, [*at.args, *options.values()]))
        args = at.args if of is torch else [function.value, *at.args]
        if of not in (None, torch) or not args or not self.value(args[0]):
            return False
        rest = args[1:]
        if name in ELEMENTWISE:
            return not rest and not options
        if name in WITH_NUMBERS or name == "type_as":
            return all(map(self.value, [*rest, *options.values()]))
        if name in ("to", "type"):
            return len(rest) + len(options) == 1 and all(map(self.value, [*rest, *options.values()]))
        if name in OVER_FEATURES:  # the second argument of var is not keepdim
            places = ("dim", "keepdim") if name == "mean" else ("dim",)
            if len(rest) > len(places) or (places[0] in options and rest):
                return False
            given = dict(zip(places, rest)) | options
            of_features = _constant(given.pop("dim", None)) == -1
            keeps = _constant(given.pop("keepdim", None)) is True
            return of_features and keeps and all(isinstance(each, ast.Constant) for each in given.values())
        return False

    def method(self, name: str) -> bool:
        """A method of the class, written in the same way."""
        function = inspect.getattr_static(self.cls, name, None)
        text = _read(function, self.cls, self.within)
        if text is None:
            return False
        self.attributes |= text.attributes
        self.methods |= text.methods | {name}
        return True


def _constant(at: ast.expr | None) -> Any:
    try:
        found = ast.literal_eval(at) if at is not None else None
    except ValueError:
        return None
    return found[0] if isinstance(found, tuple | list) and len(found) == 1 else found


def _is_text(line: ast.stmt) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)
