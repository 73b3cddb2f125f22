"""Executes a kernel's own source with another `tl`: same branches, loops, waits and tiles, no arithmetic on data.

The function is parsed again and executed with globals in which triton.language is the language of language.py. The
device functions that it calls, and their modules, are converted in the same way. rewrite.py lists the source changes.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterable
from traceback import walk_stack, walk_tb
from types import CodeType, FrameType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

from ..faults import Site, UnsupportedKernel
from .rewrite import compiled
from .scalars import converted, dtype_of, inverted, quotient, remainder

HOST = Site("host", 0, "host", 0)


def python_function(kernel: Any) -> FunctionType:
    """The Python function of a kernel, compiled or interpreted, with all wrappers removed."""
    seen = kernel
    while not isinstance(seen, FunctionType):
        inner = getattr(seen, "fn", None)
        if inner is None:
            raise UnsupportedKernel(f"{kernel!r} is neither a Triton kernel nor a function")
        seen = inner
    return seen


def constant(value: Any) -> Any:
    """The value of a tl.constexpr, also inside tuples."""
    import triton.language as tl

    if isinstance(value, tl.constexpr):
        return value.value
    if isinstance(value, tuple):
        items = [constant(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


class Program:
    """Functions of kernels with globals in which `tl` is `language`; `clock` replaces the module `time`."""

    def __init__(self, language: Any, loop: Callable[..., Any], clock: Any) -> None:
        import triton
        import triton.language as tl

        self._language, self._clock = language, clock
        self._tl, self._triton = tl, triton
        self._instead = {"INTERPRETED": False}  # a timed run models compiled kernels
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
        code = compiled(original, aliases)
        if original.__closure__:
            names = original.__code__.co_freevars
            space.update(
                {n: self._converted(c.cell_contents) for n, c in zip(names, original.__closure__, strict=True)}
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
        """The current site of the running kernel: its innermost line, and the kernel's own line that led to it."""
        return self._site(walk_stack(sys._getframe(1)))

    def raised_at(self, error: BaseException) -> Site:
        """The same for a kernel that raised an error."""
        return self._site(reversed([*walk_tb(error.__traceback__)]))

    def _site(self, walked: Iterable[tuple[FrameType, int]]) -> Site:
        """The site of these frames, innermost first."""
        codes = self._codes
        frames = [(f.f_code.co_filename, line, f.f_code.co_name) for f, line in walked if f.f_code in codes]
        return Site(*frames[0], frames[-1][1], frames[-1][0]) if frames else HOST

    def _converted(self, value: Any) -> Any:
        """The timed run's replacement of a kernel's global."""
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
    """A module of device functions; its members are converted on first access."""

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
