"""Mutants of memory order under the lint: compiled by the oldest supported Triton, which repairs least by itself."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path

from ..lint import OWN, Compiler, Finding, check, compiler
from ..lint.compiler import CompileError
from . import fit
from .mutant import Mutant
from .source import Sources
from .verdict import CRASHED, EQUIVALENT, KILLED, MISDIAGNOSED, SURVIVED, UNJUDGED, Verdict

OLDEST = "3.6"
TARGETS = ("sm_90", "gfx942", "sm_80", "sm_100")  # one after another until one shows the mutant
VARIANT = "bf16"


def try_compiled(
    mutants: Sequence[Mutant], sources: Sources, python: str | None, done: Callable[[Verdict], None]
) -> None:
    """`done` with a verdict on each.

    python   an interpreter whose Triton is 3.6, as `make test-triton-old` leaves one; None: this one
    """
    with compiler(python, workers=1) as using:
        clean: dict[tuple[str, str], set[str]] = {}
        for mutant in mutants:
            done(_verdict(mutant, sources, using, clean))


def _verdict(
    mutant: Mutant, sources: Sources, using: Compiler, clean: dict[tuple[str, str], set[str]]
) -> Verdict:
    """What the lint says of one mutant, beyond the rules that the kernel breaks without it.

    A barrier is equivalent to none if in every kernel and on every target another one stands on every path: that is
    what the rules of barriers have then shown, of the code without it.
    """
    begin, tried = time.monotonic(), 0
    kernels = [name for name in OWN if name in sources.kernels_of(mutant.function)]
    everywhere = mutant.expects == "no barrier"
    seen: list[str] = []

    def verdict(result: str, rule: str = "", where: str = "", report: str = "") -> Verdict:
        return Verdict(mutant, "lint", result, rule, where, report, tried, time.monotonic() - begin)

    for kernel, target in product(kernels if everywhere else kernels[:1], TARGETS):
        where, tried = f"{kernel} for {target}", tried + 1
        try:
            if (kernel, target) not in clean:
                clean[kernel, target] = {f.rule for f in _findings(sources.texts, kernel, target, using)[1]}
            triton, findings = _findings(sources.edited(mutant.edits), kernel, target, using)
        except CompileError as error:
            return verdict(CRASHED, where=where, report=str(error))
        if not triton.startswith(OLDEST):
            return verdict(UNJUDGED, where=where, report=f"compiled by Triton {triton}, not {OLDEST}")
        found = [f for f in findings if f.rule in fit.ORDER[mutant.expects] - clean[kernel, target]]
        if found:
            fits = [f for f in found if _points_at(f, mutant)]
            report = "\n".join(map(str, fits or found))
            return verdict(KILLED if fits else MISDIAGNOSED, found[0].rule, where, report)
        seen += [f"{target}: {finding}" for finding in findings]
    if everywhere and not any(broken & fit.ORDER[mutant.expects] for broken in clean.values()):
        return verdict(EQUIVALENT, "another barrier stands on every path")
    return verdict(SURVIVED, where=", ".join(TARGETS), report="\n".join(seen))


def _points_at(finding: Finding, mutant: Mutant) -> bool:
    """Whether the source lines of a finding lead through the mutated file."""
    return any(Path(file).name == mutant.file for file, _line in finding.frames)


def _findings(
    texts: dict[str, str], kernel: str, target: str, using: Compiler
) -> tuple[str, tuple[Finding, ...]]:
    """Triton's version and what the lint says of these kernels."""
    with _folder(texts) as folder:
        (report,) = check([kernel], [target], variants=[VARIANT], package=folder, using=using)
    return report.triton, report.findings


@contextmanager
def _folder(texts: dict[str, str]) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="fusedtp-mutant-") as folder:
        for file, text in texts.items():
            (Path(folder) / file).write_text(text)
        yield folder
