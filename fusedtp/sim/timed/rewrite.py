"""Rewrites the source of a kernel so that Python can run it with another `tl`. The meaning does not change.

    x.to(t), x.dtype, a // b, a % b, ~a    become calls, because a scalar is a plain Python int here
    tl.atomic_xchg(...) as a statement     is marked as unused, so the program does not wait for its result
    for k in range(...)                    may skip iterations that repeat the previous ones, see loops.py

Line numbers are those of the source.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Sequence
from functools import lru_cache
from types import FunctionType
from typing import Any

from ..faults import UnsupportedKernel


@lru_cache(maxsize=512)
def compiled(function: FunctionType, aliases: frozenset[str]) -> Any:
    """Compiles the rewritten source. `aliases` are the kernel's names for triton.language."""
    try:
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError) as error:
        raise UnsupportedKernel(f"the source of {function.__name__} cannot be read: {error}") from error
    tree = ast.parse(textwrap.dedent("".join(lines)))
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list, definition.returns = [], None
    arguments = definition.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    nothing = lambda node: ast.copy_location(ast.Constant(None), node)  # noqa: E731
    arguments.defaults = [nothing(d) for d in arguments.defaults]
    arguments.kw_defaults = [d if d is None else nothing(d) for d in arguments.kw_defaults]
    tree = _Rewriter(aliases).visit(tree)
    ast.fix_missing_locations(tree)
    ast.increment_lineno(tree, first - 1)
    return compile(tree, inspect.getsourcefile(function) or "?", "exec")


def _call(name: str, *args: ast.expr, keywords: list[ast.keyword] | None = None) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(args), keywords or [])


class _Rewriter(ast.NodeTransformer):
    """Makes the changes listed in the module docstring."""

    OPERATORS = {ast.FloorDiv: "__quotient__", ast.Mod: "__remainder__"}

    def __init__(self, aliases: frozenset[str]) -> None:
        self.aliases, self.loops = aliases, 0

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Attribute) and node.func.attr == "to":
            self.generic_visit(node)
            return ast.copy_location(_call("__to__", node.func.value, *node.args, keywords=node.keywords), node)
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        named = isinstance(node.value, ast.Name) and node.value.id in self.aliases  # tl.dtype
        if node.attr == "dtype" and isinstance(node.ctx, ast.Load) and not named:
            return ast.copy_location(_call("__dtype__", node.value), node)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        name = self.OPERATORS.get(type(node.op))
        return ast.copy_location(_call(name, node.left, node.right), node) if name else node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        name = self.OPERATORS.get(type(node.op))
        if name is None or not isinstance(node.target, ast.Name):
            return node
        value = _call(name, ast.Name(node.target.id, ast.Load()), node.value)
        return ast.copy_location(ast.Assign([node.target], value), node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        return ast.copy_location(_call("__inverted__", node.operand), node) if isinstance(node.op, ast.Invert) else node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        call = node.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            owner, name = call.func.value, call.func.attr
            named = isinstance(owner, ast.Name) and owner.id in self.aliases
            if named and name.startswith("atomic_"):
                call.keywords.append(ast.keyword("_posted", ast.Constant(True)))
        return self.generic_visit(node)

    def visit_For(self, node: ast.For) -> Any:
        carried = _carried(node)
        self.generic_visit(node)
        call = node.iter
        if not isinstance(call, ast.Call) or not self._is_range(call.func):
            return node
        self.loops += 1
        name = f"__loop{self.loops}__"
        load = lambda: ast.Name(name, ast.Load())  # noqa: E731
        keep = [k for k in call.keywords if k.arg in ("arg1", "arg2", "step")]
        begin = ast.Assign([ast.Name(name, ast.Store())], _call("__loop__", *call.args, keywords=keep))
        node.iter = load()
        turn = ast.Call(
            ast.Attribute(load(), "turn", ast.Load()),
            [_call("locals"), ast.Tuple([ast.Constant(n) for n in carried], ast.Load())], [],
        )  # fmt: skip
        resume: list[ast.stmt] = [
            ast.Assign([ast.Name(n, ast.Store())], ast.Subscript(load(), ast.Constant(n), ast.Load())) for n in carried
        ]
        active = ast.Attribute(load(), "active", ast.Load())
        node.body.append(ast.If(ast.BoolOp(ast.And(), [active, turn]), resume or [ast.Pass()], []))
        for new in (begin, node.body[-1]):
            ast.copy_location(new, node)
        return [begin, node]

    def _is_range(self, function: ast.expr) -> bool:
        if isinstance(function, ast.Name):
            return function.id == "range"
        return (
            isinstance(function, ast.Attribute)
            and function.attr == "range"
            and isinstance(function.value, ast.Name)
            and function.value.id in self.aliases
        )


def _carried(loop: ast.For) -> list[str]:
    """Names that may be loop-carried: the body may read them before it stores them."""
    targets = _stored(loop.target)
    used, _ = _reads(loop.body, set(targets))
    return sorted((used & _stored(*loop.body)) - targets)


def _stored(*nodes: ast.AST) -> set[str]:
    names = (n for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name))
    return {n.id for n in names if isinstance(n.ctx, ast.Store)}


def _loaded(*nodes: ast.AST) -> set[str]:
    names = (n for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name))
    return {n.id for n in names if isinstance(n.ctx, ast.Load)}


def _reads(statements: Sequence[ast.stmt], fresh: set[str]) -> tuple[set[str], set[str]]:
    """(names that may be read before they are stored, names that are certainly stored after the statements)."""
    used: set[str] = set()
    for s in statements:
        if isinstance(s, ast.If):
            used |= _loaded(s.test) - fresh
            (yes, after_yes), (no, after_no) = _reads(s.body, set(fresh)), _reads(s.orelse, set(fresh))
            used |= yes | no
            fresh = after_yes & after_no
        elif isinstance(s, ast.For):
            used |= _loaded(s.iter) - fresh
            used |= _reads(s.body, fresh | _stored(s.target))[0]
        else:
            used |= _loaded(s) - fresh
            if isinstance(s, ast.AugAssign):
                used |= _stored(s.target) - fresh
            if isinstance(s, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
                fresh = fresh | _stored(s)
    return used, fresh
