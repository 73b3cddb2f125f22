"""Split the encoders of images and sounds inside a model whose plan covers only its text.

transformers' plans of vision-language models name the layers of the language model alone, and a plan that is inferred
covers what a run on token ids reaches. Each encoder beside it is a transformers model of its own, so a plan is inferred
for it (infer.py), on a small copy with the same number of heads. An encoder of which no small copy can be run stays
whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from .foreign import Model
from .foreign_plan import foreign_steps
from .foreign_styles import is_linear
from .infer import Inferred, infer, small_copy
from .plan import generic, matches


def with_towers(
    model: nn.Module, world_size: int, plan: Mapping[str, Any], whole: Mapping[str, str], sequence_parallel: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    """The plan with what is inferred for the towers added; module -> why it stays whole."""
    found, reasons = dict(plan), dict(whole)
    for name, tower in towers(model, plan):
        own = _inferred(tower, world_size, sequence_parallel)
        more = {f"{name}.{pattern}": word for pattern, word in own.plan.items()}
        within = f"{generic(name)}."
        reasons = {module: why for module, why in reasons.items() if not f"{generic(module)}.".startswith(within)}
        reasons |= {f"{name}.{module}".rstrip("."): why for module, why in own.whole.items()}
        try:
            foreign_steps(model, {**found, **more}, world_size, False, Model(), False)
        except ValueError as error:
            reasons[name] = " ".join(str(error).split())
        else:
            found |= more
    return found, reasons


def towers(model: nn.Module, plan: Mapping[str, Any]) -> Iterator[tuple[str, nn.Module]]:
    """The outermost transformers models inside it, with two linear layers or more, in which the plan names nothing."""
    every = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
    planned = [f"{name}." for name in every if any(matches(pattern, name) for pattern in plan)]
    outer = ""
    for name, module in model.named_modules():
        if not name or (outer and name.startswith(outer)) or not hasattr(type(module), "_from_config"):
            continue
        if not any(each.startswith(f"{name}.") for each in planned) and sum(map(is_linear, module.modules())) > 1:
            outer = f"{name}."
            yield name, module


def _inferred(tower: nn.Module, world_size: int, sequence_parallel: bool) -> Inferred:
    if small_copy(tower) is None:
        return Inferred({}, {"": "it has no small copy on which a split could be tried"})
    return infer(tower, world_size, sequence_parallel)
