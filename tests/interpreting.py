"""Run kernels under Triton's interpreter in a worker process; the pytest process itself never interprets."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from tests.harness import world


def interpreted(function: Callable[..., Any], *arguments: Any, timeout: float = 120) -> Any:
    """`function(*arguments)` in a process with TRITON_INTERPRET=1."""
    return world(1).run(_without_group, function, arguments, timeout=timeout)[0]


def _without_group(group: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return function(*arguments)


def run_program(kernel: Any, number: int, grid: tuple[int, int, int], given: dict[str, Any]) -> None:
    """Run one program of a grid in a process that interprets. number: the program's index along x."""
    from triton.runtime import interpreter

    function = kernel.rewrite()
    constexprs = set(interpreter.GridExecutor(function, kernel.arg_names, grid).constexprs)
    bound = inspect.getcallargs(function, **given)
    args = {key: x if key in constexprs else interpreter._implicit_cvt(x) for key, x in bound.items()}
    builder = interpreter.interpreter_builder
    builder.grid_dim, builder.grid_idx = grid, (number, 0, 0)
    language = interpreter._patch_lang(function)
    try:
        function(**args)
    finally:
        language.restore()
