"""Checks compiled code for properties that running it cannot show: registers, vector widths, matrix units, pipelines.

    reports = check_cases([CompileCase("kernel", "sm_90", case)])   # no GPU needed
    print(*(f for r in reports for f in r.findings))

Memory order is also checked, but only for targets that fusedtp.sim.ptx does not run (ordering.py). Each rule in `RULES`
is one function; its docstring gives the reason and the source. fusedtp.checks.lint has cases for the library's kernels.
"""

from fusedtp.targets import TARGETS, Target, target

from .check import RULES, Report, check_case, check_cases, judge, table
from .compiler import CompileCase, Compiled, CompileError, compiled
from .listing import Finding

__all__ = [
    "RULES",
    "TARGETS",
    "CompileCase",
    "CompileError",
    "Compiled",
    "Finding",
    "Report",
    "Target",
    "check_case",
    "check_cases",
    "compiled",
    "judge",
    "table",
    "target",
]
