"""Copies of models for trials and proofs."""

from __future__ import annotations

import copy
from types import CellType, FunctionType
from typing import Any

from torch import Tensor, nn


def deep_copy(module: nn.Module, memo: dict[int, Any] | None = None) -> Any:
    """copy.deepcopy, but functions that modules hold refer to the copy, where deepcopy keeps the function as it is.

    Such is the head `self.to_logits = lambda x: x @ self.embedding.weight.t()`. Functions inside partials, hooks and
    objects other than lists, tuples and dicts are kept.
    """
    memo = {} if memo is None else memo
    made = copy.deepcopy(module, memo)
    moving = Moving(memo)
    for each in made.modules():
        for key, held in vars(each).items():
            if not key.startswith("_") or isinstance(held, FunctionType):
                vars(each)[key] = moving.moved(held)
    return made


class Moving:
    """Finds what something refers to in a copy. memo: of copy.deepcopy, id of an original -> its copy."""

    def __init__(self, memo: dict[int, Any]) -> None:
        self.memo = memo
        self.under_way: set[int] = set()  # a function or a list may refer to itself

    def moved(self, held: Any) -> Any:
        """The copy of a module, or a function or container that refers to copies; itself if nothing was copied."""
        if isinstance(held, nn.Module | Tensor):
            return self.memo.get(id(held), held)
        if type(held) not in (FunctionType, dict, list, tuple) or id(held) in self.under_way:
            return held
        self.under_way.add(id(held))
        try:
            return self._function(held) if isinstance(held, FunctionType) else self._container(held)
        finally:
            self.under_way.remove(id(held))

    def _container(self, held: Any) -> Any:
        values = list(held.values() if isinstance(held, dict) else held)
        moved = [self.moved(x) for x in values]
        if all(new is old for new, old in zip(moved, values, strict=True)):
            return held
        return dict(zip(held, moved, strict=True)) if isinstance(held, dict) else type(held)(moved)

    def _function(self, held: FunctionType) -> FunctionType:
        closure = held.__closure__ or ()
        cells = tuple(self._cell(cell) for cell in closure)
        defaults, named = self.moved(held.__defaults__), self.moved(held.__kwdefaults__)
        same = all(new is old for new, old in zip(cells, closure, strict=True))
        if same and defaults is held.__defaults__ and named is held.__kwdefaults__:
            return held
        made = FunctionType(held.__code__, held.__globals__, held.__name__, defaults, cells or None)
        made.__kwdefaults__ = named
        vars(made).update(vars(held))
        return made

    def _cell(self, cell: CellType) -> CellType:
        try:
            held = cell.cell_contents
        except ValueError:  # the variable has no value yet
            return cell
        moved = self.moved(held)
        return cell if moved is held else CellType(moved)
