"""How the custom ops of an exchange are declared: what all of them take stands here once.

AT     who takes part: Exchange.flat
PLAN   a Plan, taken apart, and AT
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .plan import Exchange, Plan

AT = "str group, str engine, str layer, SymInt[] numbers"
PLAN = f"Tensor table, Tensor orders, Tensor words, {AT}"
PLAN_LENGTH = len(PLAN.split(","))


def custom_op(name: str, takes: str, gives: str) -> Callable[[Callable[..., Any]], Any]:
    """A function as fusedtp::<name>; `takes` and `gives` in the words of torch's schemas."""
    return torch.library.custom_op(f"fusedtp::{name}", mutates_args=(), schema=f"({takes}) -> {gives}")


def taken(table: Tensor, orders: Tensor, words: Tensor, *at: Any) -> tuple[Plan, Exchange]:
    """PLAN, put together again."""
    return Plan(table, orders, words), Exchange.of(*at)
