"""What an interpreter cannot show is read off the code compiled for GPUs: memory order, pipelining, registers.

    reports = check_case(CompileCase("kernel", "sm_90", path="mine.py", launch="case"))   # no GPU needed
    print(*(f for r in reports for f in r.findings))

Every rule is one function with its name, its reason and where that is from: `RULES`. Compilation runs in processes of
its own, so the caller may interpret. fusedtp.checks.lint has the library's own kernels as cases.
"""

from .check import RULES, check_case, check_cases, judge
from .compiler import CompileCase, CompileError, Compiler, compiler
from .report import Finding, Report, table
from .rule import Rule
from .targets import TARGETS, Target

__all__ = [
    "RULES",
    "TARGETS",
    "CompileCase",
    "CompileError",
    "Compiler",
    "Finding",
    "Report",
    "Rule",
    "Target",
    "check_case",
    "check_cases",
    "compiler",
    "judge",
    "table",
]
