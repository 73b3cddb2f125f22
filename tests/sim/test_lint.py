"""The library's kernels, compiled for four kinds of GPU, break no rule.

CI compiles a third of the cases, which take every branch; `make lint-kernels` compiles all, as this does elsewhere.
"""

from __future__ import annotations

import ast
import io
import shutil
from pathlib import Path

import pytest

pytest.importorskip("triton")

from fusedtp.checks.lint import OWN, check, own_cases, variants_of
from fusedtp.sim import lint
from tests.sampling import SAMPLED
from tests.sim.lint_sample import sample, takes

pytestmark = pytest.mark.slow
KERNELS = Path(__file__).parents[2] / "kernels"


@pytest.fixture(scope="module")
def cases() -> list[lint.CompileCase]:
    return list(own_cases(None, list(lint.TARGETS)))


@pytest.fixture(scope="module")
def reports(cases) -> list[lint.Report]:
    return lint.check_cases(sample(cases) if SAMPLED else cases)


def test_the_sample_has_each_kernel_on_each_target_in_each_variant_and_on_each_branch(cases):
    few = sample(cases)
    assert len(few) < 0.4 * len(cases)
    assert {(c.kernel, c.target) for c in few} == {(k, t) for k in OWN for t in lint.TARGETS}
    for kernel in OWN:
        variants = {c.config for c in cases if c.kernel == kernel}
        assert {c.config for c in few if c.kernel == kernel} == variants
        assert variants in ({""}, set(variants_of(kernel)))
    every, by_few = ({each for c in some for each in takes(c)} for some in (cases, few))
    assert by_few == every
    switches = {(name, value) for _, name, value in every}
    known = {
        ("TMA", "True"),
        ("TMA", "False"),
        ("ACT", "gelu"),
        ("gathered", "NoneType"),
        ("gathered", "Tensor"),
    }
    assert known <= switches, sorted(switches)


def test_every_kernel_is_compiled(reports):
    """Every function of kernels/ that is launched: decorated with triton.jit itself."""
    launched = set()
    for path in KERNELS.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            decorators = getattr(node, "decorator_list", [])
            if any("triton.jit" in ast.unparse(decorator) for decorator in decorators):
                launched.add(node.name)
    assert launched == {report.kernel for report in reports} == set(OWN)
    for report in reports:
        assert {r.target for r in reports if r.kernel == report.kernel} == set(lint.TARGETS)


def test_no_kernel_breaks_a_rule(reports):
    for report in reports:
        assert not report.findings, (report.key, [str(finding) for finding in report.findings])


MUTANTS = {
    "weaker release": ('mask=healthy, sem="release"', 'mask=healthy, sem="relaxed"', "signal-order"),
    "weaker acquire": ('(flag, 0, sem="acquire"', '(flag, 0, sem="relaxed"', "signal-order"),
    "narrower scope": ('sem="acquire", scope="sys"', 'sem="acquire", scope="gpu"', "system-scope"),
    "no second exit": (" & (gave_up == 0)", "", "bounded-spin"),
}


def test_a_modified_copy_of_the_kernels_is_linted_in_their_place(tmp_path):
    with lint.compiler(workers=1) as using:
        for name, (old, new, rule) in MUTANTS.items():
            folder = tmp_path / name.replace(" ", "-")
            shutil.copytree(KERNELS, folder, ignore=shutil.ignore_patterns("__pycache__"))
            source = (folder / "signals.py").read_text()
            assert old in source
            (folder / "signals.py").write_text(source.replace(old, new))
            (report,) = check(
                ["one_shot_kernel"], ["sm_80"], variants=["fp32"], package=str(folder), using=using
            )
            assert rule in report.broken, name
            assert any(file == str(folder / "signals.py") for f in report.findings for file, _ in f.frames)
        (report,) = check(["one_shot_kernel"], ["sm_80"], variants=["fp32"], using=using)
        assert not report.findings, "the installed package is back"


def test_the_table_shows_every_report(reports):
    from rich.console import Console

    console = Console(width=140, record=True, file=io.StringIO())
    console.print(lint.table(reports))
    rows = [line.replace("│", " ").split() for line in console.export_text().splitlines()]
    for report in reports:
        figures = (report.num_warps, report.registers, report.spills, report.shared_bytes, report.occupancy)
        assert [*report.key.split("/"), *map(str, figures), "ok"] in rows, report.key


def test_unknown_names_are_refused():
    for asked in (dict(kernels=["nothing"]), dict(targets=["sm_70"]), dict(variants=["int8"])):
        with pytest.raises(ValueError, match="there are"):
            check(**asked)
