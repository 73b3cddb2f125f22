"""Column-parallel linears of third-party models that share an input: the first call computes all of them.

    q_proj(x)   gathers x, multiplies by q, k and v     k_proj(x), v_proj(x)   return the stored results

The same, unchanged x is recognized by its identity and version. In compiled code a version is a constant, so it is
checked at compile time, and a change is an error.
"""

from __future__ import annotations

import weakref
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from .token_shard import TokenShard


class Siblings:
    """Linears that one module calls on one input: the first call computes all outputs, the others return theirs.

    The grouping is a guess (see foreign_plan.py). If it is wrong, some products are computed for nothing, until the
    first forward of the model has ended: then those that had inputs of their own are `apart`.
    """

    linears: list[Any]
    apart: dict[int, Siblings]  # place in `linears` -> its siblings; empty if all share an input
    _seen: list[tuple[Any, set[int]]] | None  # of the first forward: an input (a weak reference), places that took it
    _input: Any  # a weak reference
    _when: tuple[Any, ...]
    _ready: list[Tensor | None]

    def __init__(self) -> None:
        self.linears, self.apart, self._seen = [], {}, []
        self.forget()

    def of(self, linear: Any) -> list[Any]:
        """The linears that are computed with this one."""
        place = [each is linear for each in self.linears].index(True)
        return self.apart[place].linears if self.apart else self.linears

    def project(self, x: Tensor, linear: Any) -> Tensor:
        """x -> this linear's columns."""
        place = [each is linear for each in self.linears].index(True)
        if self.apart:
            return self.apart[place].project(x, linear)
        if torch.compiler.is_compiling():
            from torch._dynamo.comptime import comptime

            first = self.linears[0].weight  # noqa: F841  # _unchanged and _taken read this local
            comptime(_unchanged)
            version = None
        else:
            version = _version(x)
            self._see(x, place)
            if self.apart:
                return self.apart[place].project(x, linear)
        when = (version, torch.is_grad_enabled(), torch.is_autocast_enabled(x.device.type))
        if self._input() is not x or self._when != when or self._ready[place] is None:
            self._ready = list(project_all(x, self.linears))
            self._input, self._when = weakref.ref(x), when
        y, self._ready[place] = self._ready[place], None
        if all(each is None for each in self._ready):
            self.forget()
            if torch.compiler.is_compiling():
                from torch._dynamo.comptime import comptime

                comptime(_taken)
        assert y is not None
        return y

    def _see(self, x: Tensor, place: int) -> None:
        if self._seen is None:
            return
        for seen, places in self._seen:
            if seen() is x:
                places.add(place)
                return
        self._seen.append((weakref.ref(x), {place}))
        if len(self._seen) > len(self.linears):  # of several forwards, if layers are called without the model
            self._learn(self._seen[:-1])

    def ended(self) -> None:
        """A forward of the model has ended: drop stored results."""
        self.forget()
        if self._seen:
            self._learn(self._seen)

    def _learn(self, seen: list[tuple[Any, set[int]]]) -> None:
        """Set apart linears that took different inputs."""
        self._seen = None
        inputs = [frozenset(i for i, (_, places) in enumerate(seen) if n in places) for n in range(len(self.linears))]
        if len(set(inputs)) == 1:
            return
        made = {each: Siblings() for each in inputs}
        for n, each in enumerate(inputs):
            made[each].linears.append(self.linears[n])
            made[each]._seen = None
            self.apart[n] = made[each]

    def forget(self) -> None:
        """Drop stored results. Compiled code guards these fields, so they must be in this state before each call."""
        self._input, self._when, self._ready = _nothing, (), []
        for each in self.apart.values():
            each.forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> Siblings:
        made = memo[id(self)] = Siblings()
        made.linears = [deepcopy(each, memo) for each in self.linears]
        return made


def _nothing() -> None:
    """Stands in for a weak reference if there is no input."""


def _version(x: Tensor) -> Any:
    """A value that changes when x is changed in place; inference tensors have none, so it is always a new object."""
    if isinstance(x, TokenShard):
        x = x.local
    return object() if x.is_inference() else x._version


def _unchanged(context: Any) -> None:
    """At compile time of `Siblings.project`: RuntimeError if x was changed in place since a sibling's call."""
    x, first = (context.get_local(name).as_fake() for name in ("x", "first"))
    seen = x.__dict__.setdefault("_fusedtp_seen", {})
    if seen.setdefault(id(first), x._version) != x._version:
        raise RuntimeError(
            "the input that linear layers share is changed in place between their calls, which compiled code does not "
            "support; use an out-of-place operation, such as x = x + y"
        )


def _taken(context: Any) -> None:
    """At compile time, once all siblings have used x: it may be changed from now on."""
    x, first = (context.get_local(name).as_fake() for name in ("x", "first"))
    x.__dict__["_fusedtp_seen"].pop(id(first))


def project_all(x: Tensor, linears: list[Any]) -> tuple[Tensor, ...]:
    """x [..., K], plain or a TokenShard -> outputs [..., N_i] of column-parallel linears for all tokens."""
    parallel = linears[0].parallel
    x = in_autocast(x)
    if isinstance(x, TokenShard):
        if x.dim() == len(x.lead) + 1:
            ys = parallel.project_rows(x.local, linears, x.tokens.sizes)
            return tuple(y.reshape(*x.lead, y.shape[-1]) for y in ys)
        x = x.full_tensor("linear")
    done: tuple[Tensor, ...] = parallel.project_whole(x, linears)
    return done


def in_autocast(x: Tensor) -> Tensor:
    """x in the dtype in which nn.Linear would compute."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x
