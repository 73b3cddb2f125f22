"""Checks a case in a test: runs schedules and raises for a finding. See "In a test" in docs/checking-kernels.md."""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from .case import Case, Run
from .explore import explore
from .explore import schedules as schedules_of
from .faults import Fault, SimulationFault
from .ptx import TARGETS
from .report import report
from .strategies import DEFAULT


class Finding(SimulationFault):
    """A fault, with the report of `fusedtp check` as its message; `fault` holds it."""

    def __init__(self, fault: Fault, path: str, world_size: int | None) -> None:
        super().__init__(fault)
        self.args = (report(fault, name=path, world_size=world_size),)


def assert_no_finding(
    case: Case | Callable[..., Any], *, world_size: int | None = None, targets: str | Sequence[str] = TARGETS,
    schedules: int = 20, seconds: float | None = None, seed: int = 0, strategies: Sequence[str] = DEFAULT,
    residents: Sequence[Any] | None = None, waive: Sequence[str] = (),
) -> None:  # fmt: skip
    """Runs a case under many schedules on each target, until one shows a fault.

    case        a Case, or a function that returns a Run or a Case; it gets `world_size` if it takes one
    targets     run the code compiled for these targets
    schedules   number of schedules per target; seed: of the first
    seconds     time limit per target; an unfinished schedule does not count
    waive       names of findings to ignore, as shown in reports; warns about those that occurred on no target

    Raises Finding (a SimulationFault, an AssertionError) for a fault; AssertionError if no schedule ended in time;
    UnsupportedKernel and ValueError if the case cannot be checked. Exceptions of the case itself pass through.
    """
    made, met = _case(case, world_size), set[str]()
    for target in (targets,) if isinstance(targets, str) else targets:
        chosen = schedules_of(schedules, strategies, first_seed=seed, residents=residents, target=target)
        outcome = explore(made, chosen, seconds=seconds, waive=waive)
        met |= {name for name, count in outcome.waived.items() if count}
        if outcome.raised is not None:
            raise outcome.raised
        if outcome.fault is not None:
            raise Finding(outcome.fault, _path_of(case), world_size)
        if not outcome.passed:
            raise AssertionError(f"{made.name}: no schedule ended in {seconds} s; the first stopped at {outcome.late}")
    for name in [name for name in waive if name not in met]:
        warnings.warn(f"{made.name}: no schedule met {name!r}; the waiver may be stale", stacklevel=2)


def _case(case: Case | Callable[..., Any], world_size: int | None) -> Case:
    if isinstance(case, Case):
        if world_size is not None:
            raise ValueError(f"{case.name} is a Case, which sets its own world size; omit world_size")
        return case
    called = str(getattr(case, "__name__", "the case"))
    if world_size is not None and "world_size" not in inspect.signature(case).parameters:
        raise ValueError(f"{called} takes no world_size")
    given = {} if world_size is None else {"world_size": world_size}
    made = case(**given)
    if isinstance(made, Case):
        return made
    if not isinstance(made, Run):
        raise ValueError(f"{called} returned {type(made).__name__}; it must return a Case or a Run")
    return Case(called, lambda: case(**given))


def _path_of(case: Any) -> str:
    """path/to/file.py::name, as `fusedtp check` takes it; "" if the case is not a name in a module with a file."""
    module = sys.modules.get(getattr(case, "__module__", ""))
    name, file = getattr(case, "__name__", ""), getattr(module, "__file__", None)
    if file is None or getattr(module, name, None) is not case:
        return ""
    path = os.path.relpath(file)
    return f"{file if path.startswith(os.pardir) else path}::{name}"
