"""From cases to reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from . import descriptors, ordering, resources, widths
from .compiler import CompileCase, Compiled, CompileError, Compiler, compiler
from .facts import Facts
from .report import Report
from .rule import Rule
from .targets import target

RULES: tuple[Rule, ...] = (
    ordering.barrier_before_release,
    ordering.barrier_after_acquire,
    ordering.system_scope,
    ordering.block_scope,
    ordering.signal_order,
    ordering.gated_load,
    ordering.pipelined,
    ordering.tma_store,
    ordering.proxy_fence,
    ordering.bounded_spin,
    descriptors.tma,
    resources.tensor_core,
    resources.spills,
    resources.shared_memory,
    resources.occupancy,
    widths.vector_width,
)


def judge(made: Compiled) -> Report:
    """All rules over one compilation."""
    facts, used = Facts(made), resources.resources(made)
    findings = [finding for rule in RULES for finding in rule.check(made, facts)]
    config = made.case.config
    return Report(
        key=made.case.key if made.name == made.case.kernel else f"{made.case.key}/{made.name}",
        kernel=made.name,
        config=config,
        target=made.case.target,
        triton=made.triton,
        findings=tuple(dict.fromkeys(findings)),
        registers=used.registers,
        spills=used.spills,
        shared_bytes=made.shared_bytes,
        occupancy=made.target.occupancy(
            used.registers, made.shared_bytes, made.num_warps, made.tensor_columns
        ),
        num_warps=made.num_warps,
    )


def check_cases(
    cases: Sequence[CompileCase],
    *,
    package: str | None = None,
    python: str | None = None,
    using: Compiler | None = None,
    done: Callable[[Report], None] | None = None,
) -> list[Report]:
    """Compile and judge cases; reports in their order.

    package   a folder that stands in for the package fusedtp.kernels, such as one with a modified copy of it
    python    an interpreter whose Triton compiles, this one where None
    using     compiling processes that are kept from call to call, as `with compiler() as using` gives them
    done      called with each report as it is ready
    Raises CompileError for a kernel that the compiler refuses, after all others have been compiled.
    """
    for case in cases:
        target(case.target)
    found: dict[int, list[Report]] = {}
    refused: list[CompileError] = []

    def take(index: int, result: list[Compiled] | CompileError) -> None:
        if isinstance(result, CompileError):
            refused.append(result)
            return
        found[index] = [judge(made) for made in result]
        for report in found[index]:
            if done is not None:
                done(report)

    with ExitStack() as stack:
        using = using or stack.enter_context(compiler(python))
        using.run([(case, package) for case in cases], take)
    if refused:
        raise refused[0]
    return [report for index in sorted(found) for report in found[index]]


def check_case(
    case: CompileCase,
    *,
    package: str | None = None,
    python: str | None = None,
    using: Compiler | None = None,
) -> list[Report]:
    """As `check_cases` of one case; several reports only where it launches several kernels."""
    return check_cases([case], package=package, python=python, using=using)
