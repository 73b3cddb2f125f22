"""Rows of a split embedding table, for code outside of the embedding that indexes its weight.

Gemma 4 with images reads `embed_tokens.weight[pad_token_id]`. While such a forward runs, the embedding's weight is a
Table: indexing it by a number gives the row as a plain tensor on every rank; any other use sees the DTensor.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from fusedtp.ops.rows import split
from fusedtp.ops.tokens import all_reduce_sum

from .layers import VocabParallel, accumulated
from .torch_names import name_of

INDEXES = re.compile(r"\.weight\[")


class Table(Tensor):
    """weight [V, H] with rows on each rank."""

    weight: Tensor
    at: VocabParallel

    @staticmethod
    def of(weight: Tensor, at: VocabParallel) -> Table:
        made = Tensor._make_wrapper_subclass(Table, weight.shape, dtype=weight.dtype, device=weight.device)
        made.weight, made.at = weight, at
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if name_of(func) == "__getitem__":
            first, *rest = args[1] if isinstance(args[1], tuple) else (args[1],)
            if type(first) is int:
                return args[0].row(first)[tuple(rest)]
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        plain = tree_map(lambda x: x.weight if isinstance(x, Table) else x, (args, kwargs or {}))
        return func(*plain[0], **plain[1])

    def row(self, index: int) -> Tensor:
        """[H], the same on all ranks; its gradient, which is too, goes to the rank that holds the row. Collective."""
        index = range(self.shape[0])[index]
        begin = sum(split(self.shape[0], self.at.world_size)[: self.at.rank])
        rows = accumulated(self.weight)
        mine = begin <= index < begin + rows.shape[0]
        rows = rows if rows.shape[0] else F.pad(rows, (0, 0, 0, 1))
        # every rank's part comes from its rows, so that all graphs are alike
        own = rows[index - begin if mine else 0].masked_fill(torch.tensor(not mine, device=rows.device), 0)
        return all_reduce_sum(own[None], self.at.group)[0]


def show_rows(model: nn.Module) -> None:
    """Register hooks on the modules whose forward indexes the weight of a split embedding inside them."""
    tables = {name: m for name, m in model.named_modules() if isinstance(getattr(m, "parallel", None), VocabParallel)}
    for outer, module in model.named_modules():
        inside = [m for name, m in tables.items() if name != outer and name.startswith(f"{outer}." if outer else "")]
        if inside and _indexes(type(module)):
            module.register_forward_pre_hook(partial(_show, inside))
            module.register_forward_hook(partial(_hide, inside), always_call=True)


def _indexes(kind: Any) -> bool:
    try:
        return INDEXES.search(inspect.getsource(inspect.unwrap(kind.forward))) is not None
    except (OSError, TypeError):
        return False


def _show(tables: list[Any], module: Any, args: Any) -> None:
    for table in tables:
        weight = table._parameters["weight"]
        if isinstance(weight, DTensor) and not torch.compiler.is_compiling():
            table._parameters["weight"] = Table.of(weight, table.parallel)


def _hide(tables: list[Any], module: Any, args: Any, outputs: Any) -> None:
    for table in tables:
        weight = table._parameters["weight"]
        table._parameters["weight"] = weight.weight if isinstance(weight, Table) else weight


@contextmanager
def as_parameter(embedding: Any) -> Iterator[None]:
    """For the embedding's own forward: its weight is the DTensor."""
    shown = embedding._parameters["weight"]
    try:
        _hide([embedding], None, None, None)
        yield
    finally:
        embedding._parameters["weight"] = shown
