"""The library's kernels, compiled for four kinds of GPU, break no rule; their figures are known.

CI compiles a third of the cases, which take every branch; `make lint-kernels` compiles all, as this does elsewhere.
"""

from __future__ import annotations

import ast
import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

from fusedtp.sim import lint
from fusedtp.sim.lint import baseline
from fusedtp.sim.lint.cases import own_cases, variants_of
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
    assert {(c.kernel, c.target) for c in few} == {(k, t) for k in lint.OWN for t in lint.TARGETS}
    for kernel in lint.OWN:
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
    assert launched == {report.kernel for report in reports} == set(lint.OWN)
    for report in reports:
        assert {r.target for r in reports if r.kernel == report.kernel} == set(lint.TARGETS)


def test_no_kernel_breaks_a_rule(reports):
    for report in reports:
        assert not report.findings, (report.key, [str(finding) for finding in report.findings])
    for triton, figures in baseline.read().items():
        assert not [key for key, entry in figures.items() if "broken" in entry], triton


def test_the_figures_are_the_baseline_s_or_better(reports):
    worse = [str(change) for change in lint.compare(reports) if change.worse]
    assert not worse, "python -m fusedtp.sim.lint --write-baseline keeps the new ones:\n" + "\n".join(worse)
    assert not lint.missing(reports)


def test_a_worse_figure_is_told_from_a_better_one(tmp_path, reports):
    path = tmp_path / "baseline.json"
    report = replace(reports[0], registers=100, spills=0, shared_bytes=1000, occupancy=2, findings=())
    lint.write([report, *reports[1:]], path)
    assert not lint.compare([report, *reports[1:]], path)
    spilt = replace(
        report, registers=90, spills=4, occupancy=1, findings=(lint.Finding("spills", "4 spills"),)
    )
    changes = lint.compare([spilt], path)
    assert {change.figure for change in changes if change.worse} == {"spills", "occupancy"}
    assert [str(change) for change in changes if not change.worse] == [f"{report.key}: registers 100 -> 90"]
    kept = json.loads(path.read_text())
    lint.write([replace(report, triton="4.1.0")], path)
    assert json.loads(path.read_text()).keys() == {*kept, "4.1"}, "another Triton's figures stay"
    assert lint.missing([replace(report, key="another")], path) == ["another"]


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
            (report,) = lint.check(
                ["one_shot_kernel"], ["sm_80"], variants=["fp32"], package=str(folder), using=using
            )
            assert rule in report.broken, name
            assert any(file == str(folder / "signals.py") for f in report.findings for file, _ in f.frames)
        (report,) = lint.check(["one_shot_kernel"], ["sm_80"], variants=["fp32"], using=using)
        assert not report.findings, "the installed package is back"


def test_the_table_shows_every_report_and_what_changed(reports):
    from rich.console import Console

    console = Console(width=140, record=True, file=io.StringIO())
    change = lint.Change(reports[0].key, "registers", 1, reports[0].registers)
    console.print(lint.table(reports, [change]))
    text = console.export_text()
    assert f"1 -> {reports[0].registers}" in text
    assert all(report.kernel in text for report in reports)


def test_unknown_names_are_refused():
    for asked in (dict(kernels=["nothing"]), dict(targets=["sm_70"]), dict(variants=["int8"])):
        with pytest.raises(ValueError, match="there are"):
            lint.check(**asked)
