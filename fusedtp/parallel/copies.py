"""Copies of models for trials and proofs."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import CellType, FunctionType
from typing import Any

from torch import Tensor, nn


def deep_copy(module: nn.Module, memo: dict[int, Any] | None = None) -> Any:
    """copy.deepcopy, but functions that modules hold refer to the copy, where deepcopy keeps the function as it is.

    Such is the head `self.to_logits = lambda x: x @ self.embedding.weight.t()`.
    """
    memo = {} if memo is None else memo
    made = copy.deepcopy(module, memo)
    for each in made.modules():
        for key, held in vars(each).items():
            if isinstance(held, FunctionType) and held.__closure__ is not None:
                vars(each)[key] = _moved(held, held.__closure__, memo)
    return made


def _moved(function: FunctionType, closure: tuple[CellType, ...], memo: Mapping[int, Any]) -> FunctionType:
    """A function that refers to the copies of modules and tensors; the same one if it refers to none."""
    cells = tuple(_of_copy(cell, memo) for cell in closure)
    if all(new is old for new, old in zip(cells, closure, strict=True)):
        return function
    made = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    vars(made).update(vars(function))
    return made


def _of_copy(cell: CellType, memo: Mapping[int, Any]) -> CellType:
    try:
        held = cell.cell_contents
    except ValueError:  # the variable has no value yet
        return cell
    moved = memo.get(id(held), held) if isinstance(held, nn.Module | Tensor) else held
    return cell if moved is held else CellType(moved)
