"""The stages of a kernel, by number: which of its programs send, which reduce or multiply, which collect.

A kernel chooses what a program does by comparing its number with `send_programs` and the like; the branches of that
`if`, in order, are stages 0, 1, 2. A kernel without it has one stage.
"""

from __future__ import annotations

import ast
from functools import lru_cache

from .source import File, Sources, called


@lru_cache(maxsize=256)
def branches(sources: Sources, kernel: str) -> tuple[File, ast.FunctionDef, tuple[tuple[ast.stmt, ...], ...]]:
    """Where the kernel stands, and its stages' statements."""
    file, function = next(
        (file, f) for file in sources.files.values() for f in file.functions if f.name == kernel
    )
    for statement in function.body:
        found = []
        while isinstance(statement, ast.If) and "send_programs" in file.of(statement.test):
            found.append(tuple(statement.body))
            if len(statement.orelse) == 1 and isinstance(statement.orelse[0], ast.If):
                statement = statement.orelse[0]
            else:
                return file, function, (*found, tuple(statement.orelse))
    return file, function, (tuple(function.body),)


def stage_at(sources: Sources, kernel: str, line: int) -> int | None:
    """The stage to which a line of the kernel belongs; None for a line that all stages run."""
    for number, block in enumerate(branches(sources, kernel)[2]):
        if block and block[0].lineno <= line <= (block[-1].end_lineno or block[-1].lineno):
            return number
    return None


def stages_of(sources: Sources, function: str, line: int) -> dict[str, frozenset[int]]:
    """kernel -> the stages that run this line of this function."""
    found = {}
    for kernel in sources.kernels_of(function):
        _file, body, blocks = branches(sources, kernel)
        everywhere = frozenset(range(len(blocks)))
        if kernel == function:
            own = stage_at(sources, kernel, line)
            found[kernel] = everywhere if own is None else frozenset({own})
            continue
        at = {
            number
            for number, block in enumerate(blocks)
            if any(_runs(sources, each, function) for each in block)
        }
        inside = {id(node) for block in blocks for each in block for node in ast.walk(each)}
        shared = (n for n in ast.walk(body) if id(n) not in inside)
        if any(called(n) and sources.reaches(called(n), {function}) for n in shared):
            at = set(everywhere)
        found[kernel] = frozenset(at) or everywhere  # or it runs in a launch before the kernel
    return found


def _runs(sources: Sources, statement: ast.stmt, function: str) -> bool:
    return any(called(n) and sources.reaches(called(n), {function}) for n in ast.walk(statement))
