"""Runs multi-rank Triton kernels on simulated ranks on one CPU, and finds their races and deadlocks.

It runs the PTX that Triton compiles (ptx/), so TRITON_INTERPRET must not be set. See docs/checking-kernels.md.
"""

from .case import Await, Case, Copy, Launch, Run, Signal, compare
from .explore import Outcome, Schedule, exhaust, explore, run, run_schedule
from .faults import RULES, Access, Fault, Mismatch, Moment, SimulationFault, Site, UnsupportedKernel, Wait
from .memory import Memory, symmetric
from .strategies import DEFAULT, STRATEGIES

__all__ = [
    "DEFAULT", "RULES", "STRATEGIES", "Access", "Await", "Case", "Copy", "Fault", "Launch", "Memory", "Mismatch",
    "Moment", "Outcome", "Run", "Schedule", "Signal", "SimulationFault", "Site", "UnsupportedKernel", "Wait", "compare",
    "exhaust", "explore", "run", "run_schedule", "symmetric",
]  # fmt: skip
