"""Every kernel and operator is tried, the stored verdicts are right, and a sample of the faults is found."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fusedtp.sim import Schedule, run_schedule
from fusedtp.sim.ptx.launch import Compiler
from tests.seeded import __main__ as command
from tests.seeded import verdicts
from tests.seeded.source import OPERATORS, faults, functions, put, reached
from tests.seeded.trials import KERNELS, trials
from tests.seeded.trying import Task, in_ptx, in_source, run, tasks
from tests.seeded.verdicts import Kept, Verdict, key, load, save

FAULT = "drop wait | kernel | wait()"
FOUND = Verdict(FAULT, "", "found", "deadlock", 1)
MEET, GATHER, MATMUL = "meet_kernel", "all_gather_matmul_kernel", "matmul_kernel"


@pytest.mark.slow
def test_every_kernel_is_tried_and_every_operator_has_a_site() -> None:
    launched = [f for f in functions() if f.raw_src[0].startswith("@triton.jit")]
    assert {f.__name__ for f in launched} == {*KERNELS}
    assert {fault.operator for fault in faults()} == {*OPERATORS}


@pytest.mark.slow
def test_each_fault_changes_its_function_and_is_python() -> None:
    for fault in faults():
        compile(fault.source, fault.text, "exec")
        assert fault.source != functions()[fault.at].src, fault


@pytest.mark.slow
def test_verdicts_that_are_kept_are_right(capsys: Any) -> None:
    """For the current kernels: found, or in the table. Stale verdicts do not count."""
    assert command.main(["--report"]) == 0, capsys.readouterr().out


IN_SOURCE = [
    ("drop wait", MEET, MEET), ("narrow scope", "leave", GATHER), ("swap", "two_shot_kernel", "two_shot_kernel"),
    ("weaken order", "publish", MEET), ("old number", "slot", GATHER), ("round down", MATMUL, MATMUL),
    ("another peer", "shard_source", GATHER), ("shift index", "store_tile", "grouped_wgrad_kernel"),
]  # fmt: skip
IN_PTX = [(MEET, "sm_80", "weaken"), (MEET, "sm_90", "system scope"), (MATMUL, "sm_90", "mbarrier")]


@pytest.mark.slow
@pytest.mark.parametrize("operator, function, kernel", IN_SOURCE)
def test_faults_in_the_source_are_found(operator: str, function: str, kernel: str) -> None:
    fault = next(fault for fault in faults() if fault[:2] == (operator, function))
    (verdict,) = in_source([kernel], fault)
    assert verdict.right, verdict


@pytest.mark.slow
@pytest.mark.parametrize("kernel, target, only", IN_PTX)
def test_faults_in_ptx_are_found(kernel: str, target: str, only: str) -> None:
    made = in_ptx(kernel, target, only)
    assert made and all(verdict.right for verdict in made), made


def test_a_fault_that_does_not_compile_is_not_found() -> None:
    fault = next(fault for fault in faults() if fault.function == MEET)
    (verdict,) = in_source([MEET], fault._replace(source="def meet_kernel(peers):\n    arrive(nobody)\n"))
    assert verdict.result == "crashed" and "does not compile" in verdict.said and not verdict.right


def test_a_fault_that_is_missed_is_tried_where_waits_look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def shown(chosen: Any, compilers: dict[str, Compiler]) -> tuple[str, str, int]:
        (launch,) = (each for each in next(iter(chosen)).case.make().work[0])
        compilers["sm_90"].compiled(launch)
        ((text, *_),) = compilers["sm_90"]._made.values()
        tried.append(text)
        return ("survived", "", 4) if len(tried) % 3 else ("found", "deadlock", 1)

    monkeypatch.setattr("tests.seeded.trying.shown", shown)
    shown(trials([MEET]), {"sm_90": Compiler("sm_90")})
    fault = next(fault for fault in faults() if fault[:2] == ("narrow scope", "leave"))
    fault = fault._replace(source=functions()[fault.at].src)  # changes nothing
    assert in_source([MEET], fault) == [Verdict(fault.name, "", "found", "deadlock", 5)]
    as_it_ships, once_more, looking_at_once = tried
    assert as_it_ships == once_more != looking_at_once
    shown(trials([MEET]), {"sm_90": Compiler("sm_90")})
    assert tried[-1] == as_it_ships


def test_the_table_must_be_right_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    survived, of_ptx = FOUND._replace(result="survived"), FOUND._replace(where="kernel sm_80")
    assert FOUND.right and not survived.right
    for where in ([""], ["kernel"], ["other", "kernel sm_80"]):
        monkeypatch.setattr(verdicts, "TABLE", [{"where": where, "faults": [FAULT], "why": "a reason"}])
        assert of_ptx._replace(result="survived").kind == "equivalent" and not of_ptx.right
        assert survived.right == (where == [""]) and not FOUND._replace(result="crashed").right


def test_every_row_of_the_table_is_of_a_fault_that_survived() -> None:
    survived = [v for kept in load(verdicts.KEPT).values() for v in kept.verdicts if v.result == "survived"]
    for row, fault in [(each, fault) for each in verdicts.TABLE for fault in each["faults"]]:
        where = tuple(row.get("where", [""]))
        assert any(v.fault == fault and v.where.startswith(where) for v in survived), (fault, where)


@pytest.mark.slow
def test_a_change_of_a_kernel_makes_its_own_verdicts_stale() -> None:
    def keys() -> dict[str, str]:
        return {task.name: task.key for task in tasks() if task.name.startswith(("none", "weaken", "off"))}

    fault, before = next(fault for fault in faults() if fault.function == "swiglu_kernel"), keys()
    source = functions()[fault.at].src
    with put(fault._replace(source=source.replace(":\n", ":  # calls publish\n", 1) + "    # a remark\n")):
        reached.cache_clear()
        assert keys() == before
    with put(fault._replace(source=source + "    tl.debug_barrier()\n")):
        changed = {name for name, key in keys().items() if before[name] != key}
    reached.cache_clear()
    assert "none | swiglu_kernel" in changed and all("swiglu_kernel" in name for name in changed)
    assert key([MEET]) != key([MEET], "def f(): wait()") != key([MEET], "def f(): arrive()")


def test_what_is_saved_is_loaded_sorted(tmp_path: Path) -> None:
    file, names = tmp_path / "kept", [f"wait | {n}" for n in range(20)]
    save(file, {name: Kept(name, "key", "3.9.0", [FOUND]) for name in names})
    assert [*load(file).items()] == [(name, Kept(name, "key", "3.9.0", [FOUND])) for name in sorted(names)]


@pytest.mark.slow
def test_the_command_goes_on_from_what_is_kept(capsys: Any, monkeypatch: Any, tmp_path: Path) -> None:
    file = tmp_path / "verdicts.jsonl"
    arguments = ["--workers", "1", "--keep", str(file)]
    for result, code in (("found", 0), ("survived", 1)):
        task = Task(FAULT, f"key of {result}", partial(list, [FOUND._replace(result=result)]))
        monkeypatch.setattr(command, "tasks", lambda only, task=task: [task])
        assert command.main([*arguments, "--report"]) == 0
        assert f"{code} stale" in capsys.readouterr().out
        assert command.main(arguments) == code
        monkeypatch.setattr(command, "tasks", lambda only, task=task: [task._replace(run=partial(int, "tried again"))])
        assert command.main(arguments) == code
    monkeypatch.setattr(command, "tasks", lambda only: [])
    assert command.main(["--only", "no such"]) == 2


@pytest.mark.slow
def test_a_run_ends_when_its_time_is_over() -> None:
    assert [*run([*tasks("none")], 1, seconds=0.01)] == []


@pytest.mark.slow
def test_a_program_that_starts_gets_its_turn_from_one_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """One program of a rank is resident; all had slept, so waiting ones poll for long, and one of them goes first."""
    monkeypatch.setattr("fusedtp.sim.ptx.machine.MOST_TURNS", 60_000)
    case = next(t.case for t in trials(["moe_dispatch_matmul_kernel"], "sm_80") if "pipelined" in t.case.name)
    run_schedule(case.make(), Schedule("pct", 4, 1, weak=True, fine=True, target="sm_80"))
