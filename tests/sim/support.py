"""Simulations run in a worker process that interprets; pytest's own process never does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.harness import world


def interpreted(function: Callable[..., Any], *arguments: Any, timeout: float = 120) -> Any:
    """`function(*arguments)` in a process with TRITON_INTERPRET=1."""
    return world(1).run(_without_group, function, arguments, timeout=timeout)[0]


def _without_group(group: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return function(*arguments)
