"""Each rule of the lint passes a right kernel and fails a wrong one, for the reason it names.

Where the lint does not judge on sm_80 and sm_90, execution does: the same kernel with the same faults.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from fusedtp import lint
from fusedtp.checks.lint import own_cases
from tests.sim import lint_kernels as kernels
from tests.sim.ptx.running import once

pytestmark = pytest.mark.slow
PATH = str(Path(__file__).with_name("lint_kernels.py"))
JUDGED = ("sm_100", "gfx942")  # whose memory order the lint judges


@cache
def exchange(target: str, fault: str = "", **sizes: int) -> lint.Compiled:
    launch = partial(kernels.exchange_launch, target, fault, **sizes)
    (made,) = lint.compiled(lint.CompileCase("exchange", target, launch, fault, aligned_rows=True))
    return made


def broken(made: lint.Compiled) -> set[str]:
    return set(lint.judge(made).broken)


def edited(made: lint.Compiled, edit: Callable[[str], str]) -> lint.Compiled:
    kind = "ptx" if "ptx" in made.files else "amdgcn"
    text = edit(made.files[kind])
    assert text != made.files[kind]
    return replace(made, files={**made.files, kind: text})


@pytest.mark.parametrize("target", list(lint.TARGETS))
def test_a_right_kernel_breaks_no_rule(target: str) -> None:
    report = lint.judge(exchange(target))
    assert not report.findings, [str(finding) for finding in report.findings]
    assert report.registers > 0 and report.shared_bytes > 0 and report.occupancy > 0


def test_specializations_of_a_case_are_told_apart_by_their_first_launch_unless_they_are_alike() -> None:
    """Triton makes a step of 1 a constant. Steps of 3 and 5 share their code."""
    for steps, places in (((3, 5), [""]), ((3, 1, 5, 1), ["rank 0", "rank 1"])):
        run = partial(kernels.spread_run, *steps)
        assert [report.config for report in lint.check_case(lint.CompileCase("case", "sm_90", run))] == places


@pytest.mark.parametrize(
    "target, fault, rule",
    [
        ("sm_100", "wait in the K loop", "gated-load"),
        ("gfx942", "wait in the K loop", "gated-load"),
        ("sm_90", "wait and barrier in the K loop", "pipelined"),
        ("gfx942", "wait and barrier in the K loop", "pipelined"),
        ("sm_90", "widened", "tensor-core"),
        ("gfx942", "widened", "tensor-core"),
    ],
)
def test_a_fault_breaks_its_rule_and_names_the_line(target: str, fault: str, rule: str) -> None:
    report = lint.judge(exchange(target, fault))
    assert rule in report.broken, [str(finding) for finding in report.findings]
    finding = next(finding for finding in report.findings if finding.rule == rule)
    assert finding.line and finding.frames[0][0] == PATH
    source = Path(PATH).read_text().splitlines()[finding.frames[0][1] - 1]
    assert ("dot" if rule == "tensor-core" else "tl.load(") in source, source


# -- memory order where the code is not run ----------------------------------------------------------------------------


@pytest.mark.parametrize("target", JUDGED)
def test_a_block_barrier_is_wanted_before_a_release_and_after_an_acquire(target: str) -> None:
    bare = edited(exchange(target), lambda text: re.sub(r"(bar\.sync\s+0;|s_barrier)", "", text))
    report = lint.judge(bare)
    for rule in ("barrier-before-release", "barrier-after-acquire"):
        finding = next(finding for finding in report.findings if finding.rule == rule)
        assert finding.frames[0][0] == PATH


@pytest.mark.parametrize("target", JUDGED)
def test_the_scope_of_the_compiled_code_counts(target: str) -> None:
    narrowed = edited(exchange(target), lambda text: text.replace(".sys", ".gpu").replace(" sc0 sc1", " sc1"))
    report = lint.judge(narrowed)
    assert report.broken == ("system-scope",) and len(report.findings) == 2, "of the release and of the acquire"


# -- memory order where it is run --------------------------------------------------------------------------------------

SHOWN = {
    "relaxed release": "read-write race",
    "acquire as release": "read-write race",
    "relaxed acquire": "read-write race",
    "ordinary poll": "read-write race",
    "device release": "scope",
    "device acquire": "scope",
    "wait in the K loop": "read-write race",
    "wait after the loads": "read-write race",
}


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_a_right_kernel_runs_without_a_fault(target: str) -> None:
    assert [once(kernels.exchange_case(), target, seed) for seed in range(3)] == [None] * 3
    assert not {"barriers", "system_scope", "gated_load"} & {rule.__name__ for rule in lint.RULES}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("fault", list(SHOWN))
def test_what_the_lint_leaves_to_execution_is_shown_by_it(target: str, fault: str) -> None:
    found = [once(kernels.exchange_case(fault), target, seed) for seed in range(3)]
    assert {each.rule for each in found if each} & {SHOWN[fault], "never written"}, found


# -- what no run shows -------------------------------------------------------------------------------------------------


def test_a_hint_before_the_cast_to_a_pointer_is_lost() -> None:
    made = exchange("sm_90", "hint before the cast")
    (finding,) = lint.judge(made).findings
    assert finding.rule == "vector-width" and "2 bytes at a time" in finding.message
    assert finding.line.startswith("st.global")
    assert "tl.store(out" in Path(PATH).read_text().splitlines()[finding.frames[0][1] - 1]
    anywhere = replace(made, case=replace(made.case, aligned_rows=False))
    assert not broken(anywhere), "rows that may begin anywhere move element by element"


def test_what_two_ranks_reach_is_shared_by_a_case_of_the_simulator() -> None:
    """Ranks with the same launch share one compilation. The rule does not cover the narrow load of a rank's own row."""

    def narrow(hint: bool) -> list[str]:
        case = lint.CompileCase("push", "sm_90", partial(kernels.push_case, hint), aligned_rows=True)
        (made,) = lint.compiled(case)
        assert made.name == "push" and set(made.shared) == {"inbox", "flag"}
        return [finding.message for finding in lint.judge(made).findings]

    assert narrow(True) == []
    assert narrow(False) == ["4 bytes at a time, 16 are possible"]


def test_the_best_matrix_unit_is_wanted() -> None:
    made = exchange("sm_80")
    on_newer = replace(made, case=replace(made.case, target="sm_90"))
    assert broken(on_newer) == {"tensor-core"}
    assert not broken(exchange("sm_90", m=16, num_warps=4)), "wgmma takes no 16 rows"
    precise = exchange("sm_90", m=64, n=64, dtype=torch.float32, num_warps=4)
    assert not broken(precise), "fp32 in full precision has no matrix unit"


def test_one_stage_is_no_pipeline() -> None:
    assert broken(exchange("sm_90", num_stages=1)) == {"pipelined"}


def by_descriptor(target: str, **options: int) -> lint.Compiled:
    launch = partial(kernels.descriptor_launch, **options)
    (made,) = lint.compiled(lint.CompileCase("by_descriptor", target, launch))
    return made


def test_copies_by_descriptor_are_ahead_and_specialised_where_that_is_asked_for() -> None:
    for target, specialized in (("sm_80", False), ("sm_90", False), ("sm_100", False), ("sm_100", True)):
        report = lint.judge(by_descriptor(target, specialized=specialized))
        assert not report.findings, (target, [str(finding) for finding in report.findings])
    one = lint.judge(by_descriptor("sm_90", num_stages=1))
    assert one.broken == ("pipelined",) and "ahead of the loop" in str(one.findings)
    eight = lint.judge(by_descriptor("sm_90", specialized=True))
    assert eight.broken == ("pipelined",) and "not specialized" in str(eight.findings), (
        "8 warps of sm_90 are not divided"
    )
    by_pointers = edited(by_descriptor("sm_90"), lambda _: by_descriptor("sm_80").files["ptx"])
    assert "no TMA copy" in str(lint.judge(by_pointers).findings)


def test_what_loops_carry_is_not_lost() -> None:
    """Triton 3.6 loses a value that only bounds an inner loop. The library's kernels lose none, see `dealt` there."""
    inside, bound = (
        lint.compiled(lint.CompileCase("walk", "sm_90", partial(kernels.walk_launch, bound)))[0]
        for bound in (False, True)
    )
    assert not broken(inside)
    assert broken(bound) <= {"carried"} and (broken(bound) or not bound.triton.startswith("3.6."))
    lost = inside.files["ttgir"].replace("-> (i32, i32)", "-> (i32)", 1)
    assert lost != inside.files["ttgir"]
    (finding,) = lint.judge(replace(inside, files={**inside.files, "ttgir": lost})).findings
    assert finding.rule == "carried" and "carry 3 scalars in the source, 2 in" in finding.message
    for case in own_cases(["grouped_matmul_kernel"], ["sm_90"], ["bf16"]):
        assert [report.broken for report in lint.check_case(case)] == [()]


@pytest.mark.slow
def test_too_large_a_kernel_is_told() -> None:
    report = lint.judge(exchange("sm_80", num_stages=8))
    assert set(report.broken) == {"shared-memory", "occupancy"} and report.occupancy == 0
    report = lint.judge(exchange("sm_80", m=128, n=64, num_warps=1))
    assert report.broken == ("spills",) and report.spills > 0


def test_a_program_that_does_not_fit_a_multiprocessor_is_told() -> None:
    """8 warps may have 255 registers per thread, 16 warps may not."""
    made = exchange("sm_90")
    most = replace(made, usage=re.sub(r"REG:\d+", "REG:255", made.usage))
    assert not broken(most) and lint.judge(most).occupancy == 1
    report = lint.judge(replace(most, num_warps=16))
    assert report.broken == ("occupancy",) and report.occupancy == 0


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_one_register_in_memory_is_a_spill(target: str) -> None:
    made = exchange(target)
    if target == "sm_90":
        spilt = replace(made, usage=made.usage + "/*0a10*/ STL [R1], R4 ;\n")
    else:
        spilt = edited(made, lambda text: text.replace(".vgpr_spill_count: 0", ".vgpr_spill_count: 1"))
    report = lint.judge(spilt)
    assert report.broken == ("spills",) and report.spills == 1
    if target == "gfx942":
        stack = edited(made, lambda text: re.sub(r"(private_segment_fixed_size:\s+)0", r"\g<1>20", text))
        assert not broken(stack), "of which nothing is used"
        used = edited(stack, lambda text: text.replace("s_endpgm", "scratch_store_dword off, v1, s0\n\ts_endpgm"))
        assert broken(used) == {"spills"}


def test_a_kernel_that_does_not_compile_says_why() -> None:
    refused = lint.CompileCase("exchange", "sm_90", partial(kernels.exchange_launch, "sm_90", m=100))
    with pytest.raises(lint.CompileError, match="power of 2"):
        lint.check_case(refused)
    with pytest.raises(ValueError, match="unknown target 'sm_70'"):
        lint.check_cases([replace(refused, target="sm_70")])


@pytest.mark.slow
def test_cases_are_compiled_in_clean_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that interprets cannot compile. A refused case comes after the others."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    right = lint.CompileCase("push", "sm_80", partial(kernels.push_launch))
    done: list[str] = []
    with pytest.raises(lint.CompileError, match="power of 2"):
        wrong = lint.CompileCase("exchange", "sm_80", partial(kernels.exchange_launch, "sm_80", m=100))
        lint.check_cases([wrong, right], workers=1, done=lambda report: done.append(report.key))
    assert done == ["sm_80/push"]
