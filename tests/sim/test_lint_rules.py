"""Each rule of the lint passes a right kernel and is broken by a wrong one, for the reason it names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

from fusedtp.checks.lint import OWN, own_cases
from fusedtp.sim import lint
from fusedtp.sim.lint import widths
from fusedtp.sim.lint.compiler import Compiled
from fusedtp.sim.lint.facts import Facts

pytestmark = pytest.mark.slow
COMMUNICATING = [name for name in OWN if name.startswith(("all_gather_", "matmul_reduce", "moe_"))]
COMMUNICATING += ["one_shot_kernel", "two_shot_kernel"]
PATH = str(Path(__file__).with_name("lint_kernels.py"))
POINTERS = {"w": "*fp16", "y": "*fp16", "table": "*i64", "flags": "*i64"}


@pytest.fixture(scope="module")
def using() -> Iterator[lint.Compiler]:
    with lint.compiler() as made:
        yield made


def exchange(
    target: str, fault: str = "", *, m: int = 128, n: int = 128, dtype: str = "*fp16", **options: int
) -> lint.CompileCase:
    numbers = dict.fromkeys(("rank", "tiles", "K", "limit"), "i32")
    return lint.CompileCase(
        "exchange",
        target,
        fault,
        path=PATH,
        signature={**dict.fromkeys("xwy", dtype), "table": "*i64", "flags": "*i64", **numbers},
        constexprs=dict(M=m, N=n, BLOCK_K=64, FAULT=fault),
        options=dict(num_warps=8, num_stages=2 if target == "gfx942" else 3) | options,
        aligned=("x", "w", "y", "table", "flags", "K"),
        shared=(),
        aligned_rows=True,
    )


def by_tma(fault: str = "") -> lint.CompileCase:
    return lint.CompileCase(
        "by_tma",
        "sm_90",
        fault,
        path=PATH,
        signature={**POINTERS, "rank": "i32", "limit": "i32"},
        constexprs=dict(M=64, FAULT=fault),
        aligned=("w", "y"),
        shared=(),
    )


def compiled(case: lint.CompileCase, using: lint.Compiler) -> Compiled:
    (made,) = using.compile(case)
    return made


def broken(report: lint.Report) -> set[str]:
    return set(report.broken)


FAULTS = {
    "relaxed release": "signal-order",
    "acquire as release": "signal-order",
    "relaxed acquire": "signal-order",
    "ordinary poll": "signal-order",
    "device release": "system-scope",
    "device acquire": "system-scope",
    "unbounded": "bounded-spin",
    "wait in the K loop": "gated-load",
    "wait and barrier in the K loop": "pipelined",
    "wait after the loads": "gated-load",
    "widened": "tensor-core",
}


@pytest.fixture(scope="module")
def reports(using) -> dict[tuple[str, str], lint.Report]:
    """(target, fault) -> report, compiled a few at once; no fault is ""."""
    cases = [exchange(target) for target in lint.TARGETS]
    cases += [exchange(target, fault) for target in ("sm_90", "gfx942") for fault in FAULTS]
    return {(report.target, report.config): report for report in lint.check_cases(cases, using=using)}


@pytest.mark.parametrize("target", list(lint.TARGETS))
def test_a_right_kernel_breaks_no_rule(reports, target):
    report = reports[target, ""]
    assert not report.findings, [str(finding) for finding in report.findings]
    assert report.registers > 0 and report.shared_bytes > 0 and report.occupancy > 0


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_fault_breaks_its_rule_and_names_the_line(reports, fault, target):
    report, rule = reports[target, fault], FAULTS[fault]
    assert rule in report.broken, [str(finding) for finding in report.findings]
    finding = next(finding for finding in report.findings if finding.rule == rule)
    assert finding.line and finding.frames[0][0] == PATH
    source = Path(PATH).read_text().splitlines()[finding.frames[0][1] - 1]
    assert any(word in source for word in ("atomic", "load", "while", "dot")), source


def test_stores_need_a_block_barrier_before_the_release(using):
    """From 3.9 on the compiler puts one there; so the barriers of the compiled code are removed, too."""
    for target in ("sm_90", "gfx942"):
        made = compiled(exchange(target, "no barrier"), using)
        if made.version < (3, 9):
            assert "barrier-before-release" in broken(lint.judge(made))
        kind = "ptx" if target == "sm_90" else "amdgcn"
        for rule in ("barrier-before-release", "barrier-after-acquire"):
            bare = re.sub(r"(bar\.sync\s+0;|s_barrier)", "", made.files[kind])
            report = lint.judge(replace(made, files={**made.files, kind: bare}))
            finding = next(finding for finding in report.findings if finding.rule == rule)
            assert finding.frames[0][0] == PATH


def test_the_scope_of_the_compiled_code_counts(using):
    made = compiled(exchange("sm_90"), using)
    narrowed = made.files["ptx"].replace(".sys", ".gpu")
    assert "system-scope" in broken(lint.judge(replace(made, files={**made.files, "ptx": narrowed})))


def test_what_a_peer_reads_is_not_stored_by_tma_before_3_8(using):
    made = compiled(by_tma("TMA store"), using)
    assert ("tma-store" in broken(lint.judge(made))) == (made.version < (3, 8))
    assert "tma-store" in broken(lint.judge(replace(made, triton="3.7.1")))
    unlanded = made.files["ptx"].replace("bulk.wait_group \t0", "bulk.wait_group.read \t0")
    newer = replace(made, triton="3.9.0", files={**made.files, "ptx": unlanded})
    assert "tma-store" in broken(lint.judge(newer))


def test_tma_loads_of_what_a_peer_wrote_need_a_proxy_fence(using):
    for fault, rules in (("", set()), ("no proxy fence", {"proxy-fence"})):
        (report,) = lint.check_case(by_tma(fault), using=using)
        assert broken(report) == rules, (fault, report.findings)


def test_arguments_that_are_named_as_shared_count(using):
    case = lint.CompileCase(
        "direct",
        "sm_90",
        path=PATH,
        signature={"inbox": "*fp32", "lock": "*i32", "y": "*fp32"},
        constexprs=dict(N=256),
    )
    assert broken(lint.check_case(case, using=using)[0]) == {"system-scope", "bounded-spin"}
    assert not broken(lint.check_case(replace(case, shared=()), using=using)[0])
    assert broken(lint.check_case(replace(case, shared=("lock",)), using=using)[0]) >= {"system-scope"}


def test_the_launches_of_a_simulator_s_case_are_compiled(using):
    """What two ranks reach is shared, the rest is not; ranks that launch the same give one report."""
    right = lint.CompileCase("", "sm_90", "right", path=PATH, launch="right")
    (report,) = lint.check_case(right, using=using)
    assert report.kernel == "push_direct" and not report.findings, report.findings
    (report,) = lint.check_case(replace(right, launch="wrong"), using=using)
    assert broken(report) == {"system-scope"} and len(report.findings) == 1
    (report,) = lint.check_case(replace(right, launch="wrong_among_programs"), using=using)
    assert broken(report) == {"system-scope", "block-scope"} and len(report.findings) == 2


def test_a_hint_before_the_cast_to_a_pointer_is_lost(using):
    case = exchange("sm_90", "hint before the cast")
    (report,) = lint.check_case(case, using=using)
    assert broken(report) == {"vector-width"}
    (finding,) = report.findings
    assert "2 bytes at a time" in finding.message and finding.line.startswith("st.global")
    assert "tl.store(out" in Path(PATH).read_text().splitlines()[finding.frames[0][1] - 1]
    (report,) = lint.check_case(replace(case, aligned_rows=False), using=using)
    assert not broken(report), "rows that may begin anywhere move element by element"


def test_the_width_of_every_move_between_ranks_is_read(using):
    """Of each kernel that communicates, loads and stores both; narrower instructions are found at each of them."""
    for case in own_cases(COMMUNICATING, ["sm_90"], ["bf16"]):
        made = compiled(case, using)
        ops = widths.exchanged(Facts(made))
        assert {"st" if op.name == "tt.store" else "ld" for op in ops} == {"st", "ld"}, case.key
        assert not list(widths.vector_width.check(made, Facts(made))), case.key
        narrowed = re.sub(r"((?:ld|st)\.global)\.v4", r"\1", made.files["ptx"]).replace(", 0x10, ", ", 0x4, ")
        narrow = replace(made, files={**made.files, "ptx": narrowed})
        found = list(widths.vector_width.check(narrow, Facts(narrow)))
        assert {finding.frames for finding in found} == {op.frames for op in ops}, case.key


def test_the_best_matrix_unit_is_wanted(using):
    made = compiled(exchange("sm_80"), using)
    assert not broken(lint.judge(made))
    on_newer = replace(made, case=replace(made.case, target="sm_90"))
    assert broken(lint.judge(on_newer)) == {"tensor-core"}
    few_rows = exchange("sm_90", m=16, num_warps=4)
    assert not broken(lint.check_case(few_rows, using=using)[0]), "wgmma takes no 16 rows"
    precise = exchange("sm_90", m=64, n=64, dtype="*fp32", num_warps=4)
    assert not broken(lint.check_case(precise, using=using)[0]), "fp32 in full precision has no matrix unit"


def test_too_large_a_kernel_is_told(using):
    (report,) = lint.check_case(exchange("sm_80", num_stages=8), using=using)
    assert broken(report) == {"shared-memory", "occupancy"} and report.occupancy == 0
    (report,) = lint.check_case(exchange("sm_80", m=128, n=64, num_warps=1), using=using)
    assert broken(report) == {"spills"} and report.spills > 0


def test_a_program_that_does_not_fit_a_multiprocessor_is_told(using):
    """8 warps may have 255 registers a thread, 16 warps may not."""
    made = compiled(exchange("sm_90"), using)
    most = replace(made, usage=re.sub(r"REG:\d+", "REG:255", made.usage))
    assert not broken(lint.judge(most)) and lint.judge(most).occupancy == 1
    report = lint.judge(replace(most, num_warps=16))
    assert broken(report) == {"occupancy"} and report.occupancy == 0


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_one_register_in_memory_is_a_spill(using, target):
    made = compiled(exchange(target), using)
    if target == "sm_90":
        spilt = replace(made, usage=made.usage + "/*0a10*/ STL [R1], R4 ;\n")
    else:
        listing = made.files["amdgcn"].replace(".vgpr_spill_count: 0", ".vgpr_spill_count: 1")
        spilt = replace(made, files={**made.files, "amdgcn": listing})
    report = lint.judge(spilt)
    assert broken(report) == {"spills"} and report.spills == 1


def test_one_stage_is_no_pipeline(using):
    (report,) = lint.check_case(exchange("sm_90", num_stages=1), using=using)
    assert broken(report) == {"pipelined"}


def by_descriptor(target: str, *, specialized: bool = False, num_stages: int = 3) -> lint.CompileCase:
    return lint.CompileCase(
        "by_descriptor",
        target,
        path=PATH,
        signature={"x": "*fp16", "w": "*fp16", "y": "*fp16", "K": "i32"},
        constexprs=dict(M=128, BLOCK_K=64, SPECIALIZED=specialized),
        options=dict(num_warps=8, num_stages=num_stages),
        aligned=("x", "w", "y", "K"),
        shared=(),
    )


def test_copies_by_descriptor_are_ahead_and_specialised_where_that_is_asked_for(using):
    for target, specialized in (("sm_80", False), ("sm_90", False), ("sm_100", False), ("sm_100", True)):
        (report,) = lint.check_case(by_descriptor(target, specialized=specialized), using=using)
        assert not report.findings, (target, [str(finding) for finding in report.findings])
    (report,) = lint.check_case(by_descriptor("sm_90", num_stages=1), using=using)
    assert broken(report) == {"tma", "pipelined"} and "in flight" in str(report.findings)
    (report,) = lint.check_case(by_descriptor("sm_90", specialized=True), using=using)
    assert broken(report) == {"tma"} and "is not" in str(report.findings), "8 warps of sm_90 are not divided"
    without = {**compiled(by_descriptor("sm_90"), using).files}
    without["ttgir"] = compiled(by_descriptor("sm_80"), using).files["ttgir"]
    made = replace(compiled(by_descriptor("sm_90"), using), files=without)
    assert "is no TMA copy" in str(lint.judge(made).findings)


def test_a_kernel_that_does_not_compile_says_why(using):
    case = replace(exchange("sm_90"), kernel="missing")
    with pytest.raises(lint.CompileError, match="has no 'missing'"):
        lint.check_case(case, using=using)
    with pytest.raises(ValueError, match="no target 'sm_70'"):
        lint.check_case(exchange("sm_70"), using=using)
    with pytest.raises(lint.CompileError, match="power of 2"):
        lint.check_case(
            replace(case, kernel="exchange", constexprs={**case.constexprs, "M": 100}), using=using
        )
