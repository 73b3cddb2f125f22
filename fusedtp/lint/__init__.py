"""What execution cannot tell is read off the code compiled for GPUs: registers, widths, matrix units, pipelines.

    reports = check_cases([CompileCase("kernel", "sm_90", case)])   # no GPU needed
    print(*(f for r in reports for f in r.findings))

Memory order is judged for targets whose code fusedtp.sim.ptx does not run (ordering.py). A rule is one function, whose
docstring has its reason and where that is from: `RULES`. fusedtp.checks.lint has the library's own kernels as cases.
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
