"""Every kernel and operator is tried, and a sample of the faults is found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.seeded import ptx, trying
from tests.seeded.__main__ import main
from tests.seeded.source import faults, functions, kernels
from tests.seeded.trying import Verdict, holes, in_ptx, in_source, tasks

FOUND = Verdict("drop wait", "kernel", "wait()", "", "found", "deadlock", 1)


def test_every_kernel_is_tried_and_every_operator_has_a_site() -> None:
    operators = [*ptx.OPERATORS, *(fault.operator for fault in faults())]
    assert holes(kernels(), operators) == []
    assert holes([*kernels(), "new_kernel"], operators) == ["nobody tries new_kernel"]
    assert holes(kernels(), {*operators} - {"swap"}) == ["swap has no site"]


def test_each_fault_changes_its_function_and_is_python() -> None:
    for fault in faults():
        compile(fault.source, fault.text, "exec")
        assert fault.source != functions()[fault.at].src, fault


MEET, GATHER, MATMUL = "meet_kernel", "all_gather_matmul_kernel", "matmul_kernel"
IN_SOURCE = [("drop wait", MEET, MEET), ("drop store", "bump_epoch", MEET), ("swap", "arrive", MEET)]
IN_SOURCE += [
    ("weaken order", "publish", MEET),
    ("old number", "slot", GATHER),
    ("round down", MATMUL, MATMUL),
]
IN_SOURCE += [("another peer", "shard_source", GATHER), ("shift index", "store_tile", "grouped_wgrad_kernel")]
IN_PTX = [(MEET, "sm_80", "weaken"), (MEET, "sm_90", "system scope"), (MATMUL, "sm_90", "mbarrier")]


@pytest.mark.parametrize("operator, function, kernel", IN_SOURCE)
def test_faults_in_the_source_are_found(operator: str, function: str, kernel: str) -> None:
    fault = next(fault for fault in faults() if fault[:2] == (operator, function))
    (verdict,) = in_source(fault._replace(kernels=frozenset({kernel})))
    assert verdict.right, verdict


@pytest.mark.parametrize("kernel, target, only", IN_PTX)
def test_faults_in_ptx_are_found(kernel: str, target: str, only: str) -> None:
    verdicts = [*in_ptx(kernel, target, only)]
    assert verdicts and all(verdict.right for verdict in verdicts), verdicts


def test_a_fault_that_does_not_compile_is_not_found() -> None:
    fault = next(fault for fault in faults() if fault.function == "meet_kernel")
    (verdict,) = in_source(fault._replace(source="def meet_kernel(peers):\n    arrive(nobody)\n"))
    assert verdict.result == "crashed" and "does not compile" in verdict.said and not verdict.right


def test_the_table_must_be_right_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    survived = replace(FOUND, result="survived")
    assert FOUND.right and not survived.right
    for where in ("", "kernel", "kernel sm_80"):
        monkeypatch.setattr(trying, "EQUIVALENT", {("drop wait", "kernel", "wait()", where): "why"})
        assert (
            replace(survived, where="kernel sm_80").right and not replace(FOUND, where="kernel sm_80").right
        )
        assert survived.right == (not where) and not replace(FOUND, result="crashed").right


def test_the_command(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for result, code in (("found", 0), ("survived", 1)):
        monkeypatch.setattr("tests.seeded.__main__.run", lambda *given, r=result: [replace(FOUND, result=r)])
        assert main(["--only", "drop", "--workers", "1"]) == code
        assert "drop wait" in capsys.readouterr().out
    for wrong in (["--only", "no such"], ["--workers", "-1"], ["--keep", str(tmp_path / "no" / "file")]):
        assert main(wrong) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_run_goes_on_where_it_was_broken_off(tmp_path: Path) -> None:
    keep, (task, *_) = tmp_path / "verdicts", tasks("weaken order")
    first = trying.run([task], 1, keep, lambda done: None)
    asked: trying.Task = (task[0], pytest.fail, ("tried again",))
    assert trying.run([asked], 1, keep, lambda done: None) == first and first[0].right
