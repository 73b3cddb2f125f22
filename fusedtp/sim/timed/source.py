"""A kernel's own source, executed with another `tl`: same branches, loops, waits and tiles, no arithmetic on data.

The function is parsed anew and put among globals in which triton.language is the language of language.py. Device
functions that it calls, and modules they stand in, follow. Three things change in the text, none of them its meaning:

    x.to(t), x.dtype, a // b, a % b, ~a    are calls, because a scalar is a plain Python int here
    tl.atomic_xchg(...) as a statement     is told that nobody looks at the result, so it need not come back
    for k in range(...)                    may skip iterations that do what the ones before did, see loops.py

Line numbers are those of the source.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import sys
import textwrap
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import CodeType, FrameType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

from ..faults import Site, UnsupportedKernel
from .values import converted, dtype_of, inverted, quotient, remainder

HOST = Site("host", 0, "host", 0)


def python_function(kernel: Any) -> FunctionType:
    """The function behind a kernel, compiled or interpreted, and whatever wraps it."""
    seen = kernel
    while not isinstance(seen, FunctionType):
        inner = getattr(seen, "fn", None)
        if inner is None:
            raise UnsupportedKernel(f"{kernel!r} is no Triton kernel and no function")
        seen = inner
    return seen


def constant(value: Any) -> Any:
    """What stands in a tl.constexpr, also inside of tuples."""
    import triton.language as tl

    if isinstance(value, tl.constexpr):
        return value.value
    if isinstance(value, tuple):
        items = [constant(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


class Program:
    """Functions of kernels among globals in which `tl` is `language`; `clock` stands for the module `time`."""

    def __init__(self, language: Any, loop: Callable[..., Any], clock: Any) -> None:
        import triton
        import triton.language as tl

        self._language, self._clock = language, clock
        self._tl, self._triton = tl, triton
        self._instead = {"INTERPRETED": False}  # a run stands for compiled kernels
        self._made: dict[int, Callable] = {}
        self._codes: set[CodeType] = set()
        self._spaces: dict[int, dict[str, Any]] = {}
        self._helpers = dict(
            __to__=converted, __dtype__=dtype_of, __quotient__=quotient, __remainder__=remainder,
            __inverted__=inverted, __loop__=loop,
        )  # fmt: skip

    def function(self, kernel: Any) -> Callable:
        """The kernel or device function, ready to be called with stand-ins."""
        original = python_function(kernel)
        if id(original) in self._made:
            return self._made[id(original)]
        space = self._spaces.setdefault(id(original.__globals__), {"__builtins__": builtins, **self._helpers})
        aliases = frozenset(n for n, v in original.__globals__.items() if v is self._tl)
        local: dict[str, Any] = {}
        code = _compiled(original, aliases)
        if original.__closure__:
            names = original.__code__.co_freevars
            space.update(
                {
                    n: self._converted(c.cell_contents)
                    for n, c in zip(names, original.__closure__, strict=True)
                }
            )
        exec(code, space, local)
        made = local[original.__name__]
        made.__defaults__ = constant(original.__defaults__)
        if original.__kwdefaults__:
            made.__kwdefaults__ = {k: constant(v) for k, v in original.__kwdefaults__.items()}
        self._made[id(original)] = made
        self._codes.add(made.__code__)
        for name in _names(original.__code__):
            if name in original.__globals__ and name not in space:
                space[name] = self._instead.get(name, self._converted(original.__globals__[name]))
        return made

    def site(self) -> Site:
        """Where the running kernel stands: its innermost line, and the kernel's own that led there."""
        frames = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code in self._codes:
                frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
        return Site(*frames[0], frames[-1][1]) if frames else HOST

    def _converted(self, value: Any) -> Any:
        """A global of a kernel as the timed run has it."""
        if value is self._tl or value is self._tl.math:
            return self._language
        if isinstance(value, ModuleType):
            if value.__name__ == "time":
                return self._clock
            if value is self._triton or value.__name__.startswith("triton."):
                return value
            return _Module(self, value)
        if isinstance(value, FunctionType) or hasattr(value, "fn"):
            module = getattr(value, "__module__", "") or ""
            if module.startswith("triton."):
                return getattr(self._language, value.__name__)
            return self.function(value)
        return constant(value)


class _Module(SimpleNamespace):
    """A module of device functions; its members are converted when asked for."""

    def __init__(self, program: Program, module: ModuleType) -> None:
        super().__init__()
        self.__dict__["_program"], self.__dict__["_module"] = program, module

    def __getattr__(self, name: str) -> Any:
        value = self._program._converted(getattr(self._module, name))
        self.__dict__[name] = value
        return value


def _names(code: Any) -> set[str]:
    names = set(code.co_names)
    for inner in code.co_consts:
        if hasattr(inner, "co_names"):
            names |= _names(inner)
    return names


@lru_cache(maxsize=512)
def _compiled(function: FunctionType, aliases: frozenset[str]) -> Any:
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
    """The changes that the module's text lists."""

    OPERATORS = {ast.FloorDiv: "__quotient__", ast.Mod: "__remainder__"}

    def __init__(self, aliases: frozenset[str]) -> None:
        self.aliases, self.loops = aliases, 0

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Attribute) and node.func.attr == "to":
            self.generic_visit(node)
            return ast.copy_location(
                _call("__to__", node.func.value, *node.args, keywords=node.keywords), node
            )
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
        return (
            ast.copy_location(_call("__inverted__", node.operand), node)
            if isinstance(node.op, ast.Invert)
            else node
        )

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
            ast.Assign([ast.Name(n, ast.Store())], ast.Subscript(load(), ast.Constant(n), ast.Load()))
            for n in carried
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
    """Names that an iteration may take over from the one before: read in the body before they are surely stored."""
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
    """(names read that were not surely stored before, names surely stored after)."""
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
