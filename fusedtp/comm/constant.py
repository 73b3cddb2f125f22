"""What torch.compile takes for a constant, said without importing the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Function = TypeVar("Function", bound=Callable[..., object])


def constant_to_compiler(function: Function) -> Function:
    """Marks `function` as torch.compiler.assume_constant_result does: its result is a constant of the graph.

    torch's own decorator imports all of torch._dynamo first: a third of the time that `import fusedtp` would take, also
    where nothing is ever compiled. tests/packaging/test_imports.py holds the two marks against each other.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
