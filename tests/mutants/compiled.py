"""Mutants of memory order under the lint: compiled by the oldest supported Triton, which repairs least by itself."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path

from fusedtp.checks.lint import OWN, VARIANTS, check
from fusedtp.sim.lint import Compiler, Finding, compiler
from fusedtp.sim.lint.compiler import CompileError

from . import fit
from .mutant import Mutant
from .source import File, Sources
from .verdict import CRASHED, EQUIVALENT, KILLED, MISDIAGNOSED, SURVIVED, UNJUDGED, Verdict

OLDEST = "3.6"
TARGETS = ("sm_90", "gfx942", "sm_80", "sm_100")  # one after another until one shows the mutant
VARIANT = "bf16"
Case = tuple[str, str, str]  # kernel, target, variant


def try_compiled(
    mutants: Sequence[Mutant], sources: Sources, python: str | None, done: Callable[[Verdict], None]
) -> None:
    """`done` with a verdict on each.

    python   an interpreter whose Triton is 3.6, as `make test-triton-old` leaves one; None: this one
    """
    with compiler(python, workers=1) as using:
        clean: dict[Case, set[str]] = {}
        for mutant in mutants:
            done(_verdict(mutant, sources, using, clean))


def _verdict(mutant: Mutant, sources: Sources, using: Compiler, clean: dict[Case, set[str]]) -> Verdict:
    """What the lint says of one mutant, beyond the rules that the kernel breaks without it.

    A barrier is equivalent to none if in every kernel that runs it, in each of its variants and on every target,
    another one stands on every path: that is what the rules of barriers have then shown, of the code without it.
    """
    begin, tried = time.monotonic(), 0
    kernels = [name for name in OWN if name in sources.kernels_of(mutant.function)]
    everywhere = mutant.operator == "drop barrier"
    variants = [VARIANT, *(name for name in VARIANTS if everywhere and name != VARIANT)]
    seen: list[str] = []

    def verdict(result: str, rule: str = "", where: str = "", report: str = "") -> Verdict:
        return Verdict(mutant, "lint", result, rule, where, report, tried, time.monotonic() - begin)

    if not kernels or not fit.ORDER.get(mutant.expects):
        return verdict(UNJUDGED, report="the lint has no compile case or no rule for it")
    for variant, kernel, target in product(variants, kernels if everywhere else kernels[:1], TARGETS):
        if VARIANTS[variant].targets and target not in VARIANTS[variant].targets:
            continue
        where, tried, case = f"{kernel} for {target}, {variant}", tried + 1, (kernel, target, variant)
        try:
            if case not in clean:
                clean[case] = {f.rule for f in _findings(sources.texts, case, using)[1]}
            triton, findings = _findings(sources.edited(mutant.edits), case, using)
        except CompileError as error:
            return verdict(CRASHED, where=where, report=str(error))
        if not triton.startswith(OLDEST):
            return verdict(UNJUDGED, where=where, report=f"compiled by Triton {triton}, not {OLDEST}")
        found = [f for f in findings if f.rule in fit.ORDER[mutant.expects] - clean[case]]
        if found:
            fits = [f for f in found if _points_at(f, mutant, sources)]
            report = "\n".join(map(str, fits or found))
            return verdict(KILLED if fits else MISDIAGNOSED, found[0].rule, where, report)
        seen += [f"{target}: {finding}" for finding in findings]
    if everywhere and not any(broken & fit.ORDER[mutant.expects] for broken in clean.values()):
        return verdict(EQUIVALENT, "another barrier stands on every path")
    return verdict(SURVIVED, where=", ".join(TARGETS), report="\n".join(seen))


def _points_at(finding: Finding, mutant: Mutant, sources: Sources) -> bool:
    """Whether the source lines of a finding lead through the mutated function, or the one to which a wait was moved.

    What is weakened or narrowed must itself be the innermost line.
    """
    text = sources.edited(mutant.edits)[mutant.file]
    lines = {
        line
        for function in File(mutant.file, text).functions
        if function.name == mutant.function or function.name.endswith("_gated")
        for line in range(function.lineno, (function.end_lineno or 0) + 1)
    }
    frames = [line for file, line in finding.frames if Path(file).name == mutant.file]
    if mutant.operator in ("weaken release", "weaken acquire", "narrow scope"):
        return mutant.line in frames
    return any(line in lines for line in frames)


def _findings(texts: dict[str, str], case: Case, using: Compiler) -> tuple[str, tuple[Finding, ...]]:
    """Triton's version and what the lint says of these kernels."""
    kernel, target, variant = case
    with _folder(texts) as folder:
        (report,) = check([kernel], [target], variants=[variant], package=folder, using=using)
    return report.triton, report.findings


@contextmanager
def _folder(texts: dict[str, str]) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="fusedtp-mutant-") as folder:
        for file, text in texts.items():
            (Path(folder) / file).write_text(text)
        yield folder
