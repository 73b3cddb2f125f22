"""Which cases a name stands for: one of the library's own, or what a file defines.

    all_gather_matmul       a fused kernel of the library
    ring.py::exchange       `exchange` of ring.py: a Case, or a function that returns a Case or a Run
    ring.py                 every Case in ring.py, and every function named case_*

A function with a parameter `world_size` gets it.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from .case import Case, Run

WORLD_SIZE = 4  # where nobody says


@lru_cache
def cases_of(name: str = "", world_size: int | None = None) -> tuple[Case, ...]:
    """The cases that `name` stands for; "" for all of the library's own.

    Raises ValueError where it stands for none, or for something that is no case. What the user's file raises passes.
    """
    path, _, wanted = name.partition("::")
    if "::" not in name and not name.endswith(".py"):
        return _own(name, world_size)
    module = _load(path)
    if not wanted:
        found = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, Case) or (key.startswith("case_") and inspect.isfunction(value))
        }
        if not found:
            raise ValueError(f"{path} has no Case and no function named case_*; name one: {path}::NAME")
    elif hasattr(module, wanted):
        found = {wanted: getattr(module, wanted)}
    else:
        raise ValueError(f"{path} has no {wanted!r}")
    return tuple(_case(f"{path}::{key}", key, value, world_size) for key, value in found.items())


def case_of(name: str, world_size: int | None = None) -> Case:
    """The one case of this name: what a report tells you to replay."""
    (case,) = cases_of(name, world_size)
    return case


def _own(name: str, world_size: int | None) -> tuple[Case, ...]:
    from .cases import fused_cases
    from .meetings import meeting_case
    from .turns import turns_case

    w = world_size or WORLD_SIZE
    cases = {case.name: case for case in (*fused_cases(w), turns_case(w), meeting_case(w))}
    if name and name not in cases:
        raise ValueError(
            f"no fused kernel is called {name!r}: it must be one of {', '.join(cases)}, or path/to/file.py::case"
        )
    return (cases[name],) if name else tuple(cases.values())


@lru_cache
def _load(path: str) -> ModuleType:
    """The module in this file; its folder is importable while it loads, as when Python runs it."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"no such file: {path}")
    spec = importlib.util.spec_from_file_location(file.stem, file.resolve())
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(file.stem, module)
    sys.path.insert(0, os.fspath(file.resolve().parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def _case(full_name: str, name: str, value: Any, world_size: int | None) -> Case:
    if isinstance(value, Case):
        if world_size is not None:
            raise ValueError(f"{full_name} is a Case: its world size is its own, --world-size does not apply")
        return Case(full_name, value.make, value.kernels)
    if not inspect.isfunction(value):
        raise ValueError(
            f"{full_name} is {type(value).__name__}; it must be a Case or return a Case or a Run"
        )
    call = _bound(full_name, value, world_size)
    made = call()
    if isinstance(made, Case):
        return Case(full_name, made.make, made.kernels)
    if not isinstance(made, Run):
        raise ValueError(f"{full_name} returned {type(made).__name__}; it must return a Case or a Run")
    return Case(full_name, call)


def _bound(full_name: str, function: Callable[..., Any], world_size: int | None) -> Callable[[], Any]:
    """The function with its world size, if it takes one."""
    parameters = inspect.signature(function).parameters
    needed = [
        key
        for key, each in parameters.items()
        if each.default is each.empty
        and key != "world_size"
        and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    if needed:
        raise ValueError(f"{full_name} wants arguments {needed}; a case takes none but world_size")
    if "world_size" not in parameters:
        if world_size is not None:
            raise ValueError(f"{full_name} takes no world_size, so --world-size does not apply")
        return function
    if world_size is None and parameters["world_size"].default is not inspect.Parameter.empty:
        return function
    return lambda: function(world_size=world_size or WORLD_SIZE)
