"""What to do with a step whose loss or gradients are not finite, and where that began.

The norm of the gradients and the mean loss are the same on all ranks, so all take the same turn here. The step is
computed once more, from the same samples with the same random numbers, and hooks on every module look at its output:

    a parameter was not finite before the step       it is named, with the ranks that hold it
    else a module made infinities out of finite inputs     the first one in the forward pass, with its ranks
    else a gradient did                                    the first one in the backward pass
    else                                                   the fault did not repeat: hardware, or a race

A step costs nothing for this until one is bad. Source: the idea of running a suspicious step again is Megatron's
(`rerun_state_machine`); names come from hooks here.
"""

from __future__ import annotations

import math
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from fusedtp.train.world import World

PATIENCE = 10  # steps in a row that are skipped before the run ends all the same


class NotFinite(RuntimeError):
    """A step's loss or gradients were not finite, and the run was to stop then."""


@dataclass(frozen=True)
class Event:
    """Something that is not finite: a module's output, or the gradient of one.

    order      how many modules had been called before, in that pass; the same on ranks with the same layers
    made       whether what the module was given was finite
    """

    order: int
    name: str
    microbatch: int
    made: bool = True


@dataclass
class Found:
    """What a rank found in its part of the model."""

    rank: int
    host: str
    parameters: list[str] = field(default_factory=list)
    forward: Event | None = None
    backward: Event | None = None
    gradients: list[str] = field(default_factory=list)


def finite(value: Any) -> bool:
    """Whether every number in the tensors of a nested value is finite; shards of DTensors count as they lie here."""
    tensors = [each for each in tree_leaves(value) if isinstance(each, Tensor) and each.is_floating_point()]
    return all(bool(_local(each).isfinite().all()) for each in tensors)


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def find(model: nn.Module, again: Callable[[], Any], rank: int = 0) -> Found:
    """Run a step's forward and backward again and look for the first value of this rank that is not finite.

    Compiled blocks run eagerly for it. Gradients are cleared before and after. Collective where `again` is.
    """
    found = Found(rank, socket.gethostname())
    found.parameters = [name for name, p in model.named_parameters() if not finite(p.detach())]
    model.zero_grad()
    with _hooked(model, found), torch.random.fork_rng(), torch.compiler.set_stance("force_eager"):
        again()
    found.gradients = [
        name for name, p in model.named_parameters() if p.grad is not None and not finite(p.grad)
    ]
    model.zero_grad()
    return found


@contextmanager
def _hooked(model: nn.Module, found: Found) -> Iterator[None]:
    """Within, `found` hears of the first outputs and gradients of modules that are not finite."""
    calls, orders = Counter[str](), Counter[str]()

    def after(name: str, module: nn.Module, args: Any, options: Any, output: Any) -> None:
        orders["forward"] += 1
        calls[name] += 1
        if found.forward is None and not finite(output):
            made = finite((args, options))
            found.forward = Event(orders["forward"], name, calls[name] - 1, made)
        for each in tree_leaves(output):
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(partial(back, name, calls[name] - 1))

    def back(name: str, microbatch: int, gradient: Tensor) -> None:
        orders["backward"] += 1
        if found.backward is None and not finite(gradient):
            found.backward = Event(orders["backward"], name, microbatch)

    handles = [
        module.register_forward_hook(partial(after, name), with_kwargs=True)
        for name, module in model.named_modules()
        if name
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def where(found: Sequence[Found]) -> str:
    """In words, what all ranks found together: the module or parameter at which it began, and the ranks."""
    if any(each.parameters for each in found):
        held = [
            f"{_first(each.parameters)} of rank {each.rank} ({each.host})"
            for each in found
            if each.parameters
        ]
        return "parameters were not finite before the step: " + "; ".join(held)
    for direction, what in (("forward", "the output of"), ("backward", "the gradient that arrives at")):
        events = [(getattr(each, direction), each) for each in found]
        events = [(event, each) for event, each in events if event is not None]
        events = [(event, each) for event, each in events if event.made] or events
        if not events:
            continue
        first = min(event.order for event, _ in events)
        same = [(event, each) for event, each in events if event.order == first]
        ranks = ", ".join(f"{each.rank} ({each.host})" for _, each in same)
        of = "all ranks" if len(same) == len(found) > 1 else ("rank " if len(same) == 1 else "ranks ") + ranks
        event = same[0][0]
        return f"it began in {direction} with {what} {event.name}, microbatch {event.microbatch}, on {of}"
    if any(each.gradients for each in found):
        held = [f"{_first(each.gradients[::-1])} on rank {each.rank}" for each in found if each.gradients]
        return "every module is finite, but these gradients are not: " + "; ".join(held)
    return "computed again, the same step is finite: a fault of memory, of a link or of timing, not of the numbers"


def _first(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


class Guard:
    """Decides about steps that are not finite. tell: called on rank 0 with a line for each that is skipped."""

    def __init__(
        self,
        world: World,
        on_nan: Literal["stop", "skip"] = "stop",
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.world, self.on_nan = world, on_nan
        self._tell = tell if world.rank == 0 else lambda line: None
        self.skipped, self._row = 0, 0

    def takes(
        self,
        step: int,
        loss: float,
        norm: float,
        model: nn.Module,
        again: Callable[[], Any],
        scaled: bool = False,
    ) -> bool:
        """Whether a step is as it should be; else it has no gradients any more. Raises NotFinite to stop.

        loss, norm   of all ranks
        again        runs the step's forward and backward once more
        scaled       fp16: gradients alone that overflow are the loss scale's to judge
        """
        if math.isfinite(loss) and (scaled or math.isfinite(norm)):
            self._row = 0
            return True
        self.skipped, self._row = self.skipped + 1, self._row + 1
        found = self.world.gather_objects(find(model, again, self.world.rank))
        line = f"step {step + 1}: the loss is {loss:g}, the norm of the gradients {norm:g}; {where(found)}"
        if self.on_nan == "stop":
            raise NotFinite(line + "; --on-nan skip would leave such steps out")
        if self._row == PATIENCE:
            raise NotFinite(f"{line}; {PATIENCE} steps in a row were left out")
        self._tell(line + "; the step was left out")
        return False
