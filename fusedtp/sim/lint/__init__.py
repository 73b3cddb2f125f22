"""What an interpreter cannot show is read off the code compiled for GPUs: memory order, pipelining, registers.

    reports = check()                                  # the library's kernels, four kinds of GPU, no GPU needed
    print(*(f for r in reports for f in r.findings))   # nothing
    reports = check_case(CompileCase("kernel", "sm_90", path="mine.py", launch="case"))

Every rule is one function with its name, its reason and where that is from: `RULES`. Compilation runs in processes of
its own, so the caller may interpret. `python -m fusedtp.sim.lint` prints the table.
"""

from .cases import OWN, VARIANTS, CompileCase, Variant
from .check import RULES, check, check_case, check_cases, judge
from .compiler import CompileError, Compiler, compiler
from .report import Finding, Report, table
from .rule import Rule
from .targets import TARGETS, Target

__all__ = [
    "OWN",
    "RULES",
    "TARGETS",
    "VARIANTS",
    "CompileCase",
    "CompileError",
    "Compiler",
    "Finding",
    "Report",
    "Rule",
    "Target",
    "Variant",
    "check",
    "check_case",
    "check_cases",
    "compiler",
    "judge",
    "table",
]
