"""Simulated ranks: every schedule of a multi-rank Triton kernel on one CPU, with its races and deadlocks found.

Kernels must be decorated under TRITON_INTERPRET=1 if their text runs, and without it if what Triton compiled of them
runs (`Schedule(compiled=...)`, `testing`, `nvshmem`). See docs/checking-kernels.md.
"""

from .case import Await, Case, Copy, Launch, Run, Signal, compare
from .explore import Outcome, Schedule, exhaust, explore, run, run_schedule
from .faults import RULES, Access, Fault, Mismatch, Moment, SimulationFault, Site, UnsupportedKernel, Wait
from .memory import Memory, symmetric
from .strategies import DEFAULT, STRATEGIES

__all__ = [
    "DEFAULT",
    "RULES",
    "STRATEGIES",
    "Access",
    "Await",
    "Case",
    "Copy",
    "Fault",
    "Launch",
    "Memory",
    "Mismatch",
    "Moment",
    "Outcome",
    "Run",
    "Schedule",
    "Signal",
    "SimulationFault",
    "Site",
    "UnsupportedKernel",
    "Wait",
    "compare",
    "exhaust",
    "explore",
    "run",
    "run_schedule",
    "symmetric",
]
