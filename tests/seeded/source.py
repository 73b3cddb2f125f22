"""Operators on the kernels' source. Each finds its sites in the syntax tree, and changes the text of one."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple
from unittest.mock import patch

import triton.language as tl

import fusedtp.kernels

from .trials import KERNELS

DROPPED = {  # operator -> the calls that it drops
    "drop wait": r"wait\w*|ready",
    "drop publish": r"arrive\w*|publish|publish_to_all|atomic_xchg",
    "drop barrier": "debug_barrier",
    "drop store": "store",
}
TO_PEER = ("publish", "wait", "wait_chunks", "wait_rows", "slot", "sums_at", "shard", "segment")  # the second argument
OF_CHUNK = {"publish": 2, "wait": 2, "wait_chunks": 2, "publish_to_all": 1}  # call -> the first argument for flags
MOVES = re.compile(r"\b(load|store|atomic\w*|slot|record|\w+_(rows|tile|tiles|chunk|loop|sum|choices|partials))\(")
OPERATORS = (
    *DROPPED, "swap", "weaken order", "narrow scope", "another peer", "another flag", "another slot", "old number",
    "no wrap", "equality", "shift index", "off by one", "round down", "start late",
)  # fmt: skip
Edits = list[tuple[ast.AST, str]]


class Fault(NamedTuple):
    """An operator at a site. text: the site's line, numbered if the function has several such sites."""

    operator: str
    function: str
    text: str
    kernels: frozenset[str]  # that reach the function
    at: int  # of the function among `functions()`
    source: str  # of the function, with the fault

    @property
    def name(self) -> str:
        return " | ".join(self[:3])


@lru_cache
def functions() -> list[Any]:
    """The library's kernels and device functions, as Triton objects."""
    names = [module.name for module in pkgutil.iter_modules(fusedtp.kernels.__path__, "fusedtp.kernels.")]
    of = [(name, each) for name in names for each in vars(importlib.import_module(name)).values()]
    return [f for name, f in of if hasattr(f, "_unsafe_update_src") and f.__module__ == name]


@lru_cache
def plain(source: str) -> str:
    """A function without comments and docstring, in a uniform layout."""
    tree: Any = ast.parse(source)
    body = tree.body[0].body
    if ast.get_docstring(tree.body[0]) is not None:
        body[:1] = [] if len(body) > 1 else [ast.Pass()]
    return ast.unparse(tree)


@lru_cache
def reached(kernel: str) -> frozenset[str]:
    """The kernel and all functions that it calls or passes to its callees, directly or not."""
    words = {f.__name__: {*re.findall(r"\w+", plain(f.src))} for f in functions()}
    found = {kernel}
    while more := {word for name in found for word in words[name] & words.keys()} - found:
        found |= more
    return frozenset(found)


@contextmanager
def put(fault: Fault) -> Iterator[None]:
    """While entered, code that this process compiles anew has the fault."""
    before = functions()[fault.at].src
    try:
        _update(fault.at, fault.source)
        yield
    finally:
        _update(fault.at, before)


def _update(at: int, source: str) -> None:
    functions()[at]._unsafe_update_src(source)
    _forget_keys()


@contextmanager
def looking_at_once() -> Iterator[None]:
    """While entered, code that this process compiles anew checks arrivals and the clock from a wait's second poll on.

    As shipped, a wait polls eight times before its first check, which a small schedule seldom reaches.
    """
    try:
        with patch("fusedtp.kernels.signals.QUICK", tl.constexpr(1)):
            _forget_keys()
            yield
    finally:
        _forget_keys()


def _forget_keys() -> None:
    for each in functions():  # the key of a caller is made of the source of what it calls, and of its constants
        each.hash = None


def faults() -> Iterator[Fault]:
    """Every operator at every site."""
    for at, function in enumerate(functions()):
        name, tree, seen = function.__name__, Tree(function.src), Counter[tuple[str, str]]()
        reaching = frozenset(kernel for kernel in KERNELS if name in reached(kernel))
        for node in tree.nodes:
            for operator, edits in changes(tree, node):
                text = tree.lines[node.lineno - 1].split("  #")[0].strip()
                seen[operator, text] += 1
                text += f" #{seen[operator, text]}" if seen[operator, text] > 1 else ""
                yield Fault(operator, name, text, reaching, at, tree.edited(edits))


class Tree:
    """A function's syntax tree, with its nodes in the order of the text."""

    def __init__(self, text: str) -> None:
        self.text, self.lines = text, text.splitlines(keepends=True)
        every: list[Any] = [*ast.walk(ast.parse(text).body[0])]
        self.parents = {child: node for node in every for child in ast.iter_child_nodes(node)}
        nodes = (node for node in every if isinstance(node, ast.expr | ast.stmt | ast.keyword))
        self.nodes = sorted(nodes, key=lambda node: (node.lineno, node.col_offset))

    def span(self, node: Any) -> tuple[int, int]:
        start, end = (sum(map(len, self.lines[: n - 1])) for n in (node.lineno, node.end_lineno))
        return start + node.col_offset, end + node.end_col_offset

    def of(self, node: ast.AST) -> str:
        return self.text[slice(*self.span(node))]

    def edited(self, edits: Edits) -> str:
        text = self.text
        for (start, end), put_there in sorted(((self.span(node), new) for node, new in edits), reverse=True):
            text = text[:start] + put_there + text[end:]
        return text


def changes(tree: Tree, node: Any) -> Iterator[tuple[str, Edits]]:
    """(operator, edits) for each operator that has a site at this node."""
    of = tree.of
    match node:
        case ast.Expr(ast.Call(called)):
            for operator, names in DROPPED.items():
                if re.fullmatch(rf"(\w+\.)*({names})", of(called)):
                    yield operator, [(node, "pass")]
                    yield from () if operator == "drop store" else swaps(tree, node)
        case ast.While(test):
            yield "drop wait", [(test, f"({of(test)}) & (1 == 0)")]
        case ast.keyword("sem", ast.Constant("release" | "acquire")):
            yield "weaken order", [(node.value, '"relaxed"')]
        case ast.keyword("scope", ast.Constant("sys" | "gpu" as scope)):
            yield "narrow scope", [(node.value, {"sys": '"gpu"', "gpu": '"cta"'}[scope])]
        case ast.Call(called, args):
            name = of(called).rpartition(".")[2]
            if name in ("load", "store") and args:
                index = args[0].elts[-1] if isinstance(args[0], ast.List) else args[0]  # a list: of a descriptor
                yield "shift index", [(index, f"({of(index)}) + 1")]
                if name == "load" and of(index) == "peers.epoch":
                    yield "old number", [(node, f"({of(node)} - 1)")]
            if name in TO_PEER and len(args) > 1:
                world = of(args[2]) if name == "shard" else "peers.world_size" if "peers" in tree.text else "WORLD"
                yield "another peer", [(args[1], f"(({of(args[1])}) + 1) % {world}")]
            for each in args[OF_CHUNK.get(name, len(args)) :]:
                yield "another flag", [(each, f"({of(each)}) + 1")]
            if name == "cdiv":
                yield "round down", [(node, f"(({of(args[0])}) // ({of(args[1])}))")]
            if name in ("range", "static_range"):
                first = f"{of(args[0])} + 1" if len(args) > 1 else f"1, {of(args[0])}"
                yield "start late", [(args[0], first)]
        case ast.BinOp(left, ast.BitAnd(), right) if "epoch" in of(left):
            yield "another slot", [(right, "0")]
        case ast.Compare(left, [ast.Lt()], [right]):
            yield "off by one", [(node, f"{of(left)} <= {of(right)}")]
            if isinstance(left, ast.BinOp) and "epoch" in of(left):
                yield "no wrap", [(node, f"{of(left.left)} < {of(left.right)}")]
                yield "equality", [(node, f"{of(left.left)} != {of(left.right)}")]


def swaps(tree: Tree, node: Any) -> Iterator[tuple[str, Edits]]:
    """Swap the signal, with a condition that covers it alone, and the statement before or after it."""
    while isinstance(at := tree.parents[node], ast.If) and at.body == [node] and not at.orelse:
        node = at
    block = at.body if node in at.body else at.orelse
    place = block.index(node)
    for other in (*block[:place][-1:], *block[place + 1 :][:1]):
        names = [[n for n in ast.walk(each) if isinstance(n, ast.Name)] for each in (node, other)]
        used = [{n.id for n in each} for each in names]
        stored = [{n.id for n in each if isinstance(n.ctx, ast.Store)} for each in names]
        if MOVES.search(tree.of(other)) and not (stored[0] & used[1] or stored[1] & used[0]):
            yield "swap", [(node, tree.of(other)), (other, tree.of(node))]
