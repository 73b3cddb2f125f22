"""Mark functions as constants for torch.compile without importing the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Function = TypeVar("Function", bound=Callable[..., object])


def constant_to_compiler(function: Function) -> Function:
    """Mark `function` like torch.compiler.assume_constant_result: its result is a constant of the graph.

    torch's own decorator imports all of torch._dynamo: a third of the time of `import fusedtp`, even if nothing is ever
    compiled. tests/packaging/test_imports.py compares the two marks.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
