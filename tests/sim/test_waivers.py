"""A waived finding: the run goes past it and reports later ones, how often it was met, and which waiver is stale."""

from __future__ import annotations

import json
import shlex
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedtp.checks.command import main
from fusedtp.checks.workers import schedule_of
from fusedtp.sim import (
    Case,
    Fault,
    Launch,
    Outcome,
    Run,
    Schedule,
    SimulationFault,
    Site,
    exhaust,
    explore,
    run_schedule,
    symmetric,
)
from fusedtp.sim.faults import RULES, WAIVABLE, finding, unwaivable
from fusedtp.sim.testing import Finding, assert_no_finding
from tests.sim import exchange
from tests.sim.ptx.running import BEFORE_3_8

HERE = Path(__file__)
N = 16


@triton.jit
def fill(to, N: tl.constexpr):
    tl.store(to + tl.arange(0, N), 1.0)  # fills


@triton.jit
def tangled(a, b, flags, dst, rank: tl.constexpr, N: tl.constexpr, KIND: tl.constexpr):
    """Ranks 1 and 2 come before rank 0, by a relaxed count, which orders nothing."""
    at = tl.arange(0, N)
    a0, b0 = tl.load(a).to(tl.pointer_type(tl.float32)), tl.load(b).to(tl.pointer_type(tl.float32))
    word = tl.load(flags).to(tl.pointer_type(tl.int32))
    if rank == 0:
        while tl.atomic_add(word + 1, 0, sem="relaxed", scope="sys") < 2:
            pass
        if KIND == "stores":
            tl.store(a0 + at, 0.0)  # a of 0
            tl.store(b0 + at, 0.0)  # b of 0
        elif KIND == "one store":
            tl.store(a0 + at, 0.0)  # a of 0 alone
        elif KIND == "helper":
            fill(a0, N)  # call 1
            fill(b0, N)  # call 2
        elif KIND == "weak store":
            tl.store(word, 7)  # weak
        elif KIND == "weak load":
            tl.store(dst + at, (tl.load(word) + at).to(tl.float32))  # weak load
        elif KIND == "strong":
            tl.atomic_add(word, 1, sem="relaxed", scope="sys")  # strong of 0
        elif KIND == "scopes":
            tl.atomic_add(word, 1, sem="relaxed", scope="gpu")  # gpu of 0
        elif KIND == "nobody":
            tl.store(dst + at, tl.load(a0 + at) + tl.load(b0 + at))  # nobody wrote
    else:
        if KIND == "stores" or KIND == "helper":
            if rank == 1:
                tl.store(a0 + at, 1.0)  # a of 1
            else:
                tl.store(b0 + at, 2.0)  # b of 2
        elif KIND == "one store":
            if rank == 1:
                tl.store(dst + at, tl.load(a0 + at))  # load of 1
            else:
                tl.store(dst + at, tl.load(a0 + at))  # load of 2
        elif KIND == "weak store" or KIND == "weak load":
            if rank == 1:
                tl.atomic_add(word, 1, sem="relaxed", scope="sys")  # strong of 1
            else:
                tl.atomic_add(word, 1, sem="relaxed", scope="sys")  # strong of 2
        elif KIND == "strong":
            if rank == 1:
                tl.store(dst + at, (tl.load(word) + at).to(tl.float32))  # weak of 1
            else:
                tl.store(dst + at, (tl.load(word) + at).to(tl.float32))  # weak of 2
        elif KIND == "scopes":
            if rank == 1:
                tl.atomic_add(word, 1, sem="relaxed", scope="sys")  # sys of 1
            else:
                tl.atomic_add(word, 1, sem="relaxed", scope="sys")  # sys of 2
        tl.debug_barrier()
        tl.atomic_add(word + 1, 1, sem="relaxed", scope="sys")


def tangled_run(kind: str) -> Run:
    a, b = (symmetric(name, 3, (N,), poisoned=kind == "nobody") for name in "ab")
    flags = symmetric("flags", 3, (4,), torch.int32, poisoned=False)
    given = dict(a=a.pointers, b=b.pointers, flags=flags.pointers, N=N, KIND=kind)
    work = [[Launch(tangled, 1, dict(dst=torch.zeros(N), rank=rank, **given))] for rank in range(3)]
    return Run(work, [a, b, flags], list)


def case_stores(): return tangled_run("stores")  # fmt: skip


def at(mark: str) -> str:
    """The place, as names show it, of the line that ends with this comment."""
    (line,) = [n for n, text in enumerate(HERE.read_text().splitlines(), 1) if text.endswith(f"# {mark}")]
    return f"{HERE.name}:{line}"


FIRST, SECOND = (f"write-write race {at(f'{x} of 0')} {at(f'{x} of {rank}')}" for x, rank in ("a1", "b2"))
BEHIND = {
    "stores": [FIRST, SECOND],
    "one store": [f"read-write race {at('a of 0 alone')} {at(f'load of {r}')}" for r in (1, 2)],
    "helper": [f"write-write race {at('fills')} {at(f'{x} of {n}')}" for n, x in enumerate("ab", 1)]
    if BEFORE_3_8
    else [f"write-write race {at('fills')}@{at(f'call {n}')} {at(f'{x} of {n}')}" for n, x in enumerate("ab", 1)],
    "weak store": [f"write-write race {at('weak')} {at(f'strong of {r}')}" for r in (1, 2)],
    "weak load": [f"read-write race {at('weak load')} {at(f'strong of {r}')}" for r in (1, 2)],
    "strong": [f"read-write race {at('strong of 0')} {at(f'weak of {r}')}" for r in (1, 2)],
    "scopes": [f"scope {at('gpu of 0')} {at(f'sys of {r}')}" for r in (1, 2)],
    "nobody": [f"never written {at('nobody wrote')}"],
}


def explored(kind: str, waive: Any = (), schedules: int = 6) -> Outcome:
    return explore(Case(kind, lambda: tangled_run(kind)), schedules, waive=waive)


@pytest.mark.slow
@pytest.mark.parametrize("kind", BEHIND)
def test_each_finding_hides_the_next_until_it_is_waived(kind):
    """Even if one access races with two others: the order of the lines above is that of the ranks."""
    waived: list[str] = []
    while (fault := explored(kind, waived).fault) is not None:
        assert fault.name in BEHIND[kind] and fault.name not in waived and f"name: {fault.name}" in str(fault)
        assert fault.waive == tuple(waived)
        waived.append(fault.name)
    assert sorted(waived) == sorted(BEHIND[kind])
    outcome = explored(kind, waived)
    assert outcome.passed and outcome.schedules == 6
    assert outcome.waived.keys() == set(waived) and min(outcome.waived.values()) >= 6


def test_waivers_of_a_schedule_and_of_the_call_add_up():
    case = Case("stores", lambda: tangled_run("stores"))
    outcome = explore(case, [Schedule(waive=(FIRST,))], waive=[SECOND])
    assert outcome.passed and outcome.waived == {FIRST: 1, SECOND: 1}


@settings(max_examples=12, deadline=None)
@given(exchange.schedules("sm_80", "sm_90"), st.booleans(), st.booleans())
def test_a_name_is_the_same_in_every_schedule_and_a_schedule_waives_by_itself(schedule, first, second):
    waive = tuple(name for name, chosen in ((FIRST, first), (SECOND, second)) if chosen)
    schedule = Schedule(**{**vars(schedule), "waive": waive})
    try:
        run_schedule(tangled_run("stores"), schedule)
        assert first and second
    except SimulationFault as error:
        assert error.fault.name == (SECOND if first else FIRST)
        assert schedule_of(error.fault) == schedule


def test_exhausting_a_case_goes_past_a_finding_too():
    case = Case("stores", lambda: tangled_run("stores"))
    fault = exhaust(case, 0, waive=[FIRST]).fault
    assert fault is not None and fault.name == SECOND
    outcome = exhaust(case, 0, limit=4, waive=[FIRST, SECOND])
    assert outcome.passed and outcome.waived == {FIRST: outcome.schedules, SECOND: outcome.schedules}


# -- names -------------------------------------------------------------------------------------------------------------

lines = st.integers(1, 10**5)
files = st.sampled_from(["ring.py", "put.py", "two words.py"])
sites = st.builds(lambda f, n, m, g: Site(f, n, "k", m, g), files, lines, lines, st.just("") | files)


@given(st.sampled_from(WAIVABLE), st.lists(sites, min_size=1, max_size=2), st.text("ab/", max_size=9))
def test_a_name_holds_no_folder_and_no_order_and_can_be_waived(rule, ends, folder):
    moved = [
        end._replace(file=f"/{folder}/{end.file}", kernel_file=end.kernel_file and f"/{folder}/{end.kernel_file}")
        for end in ends
    ]
    name = finding(rule, ends)
    assert name == finding(rule, moved[::-1]) and shlex.split(shlex.quote(name)) == [name]
    assert unwaivable(name) == ""
    for end in ends:
        assert f"{end.file}:{end.line}" in name
        file, line = end.kernel_place
        assert (file, line) == (end.file, end.line) or f"@{file}:{line}" in name


def test_what_is_no_finding_or_cannot_be_gone_past_is_refused_with_why():
    for rule in RULES:
        if rule not in WAIVABLE:
            with pytest.raises(ValueError, match=f"'{rule} x.py:3' cannot be waived: no run can continue past it"):
                Schedule(waive=(f"{rule} x.py:3",))
    for name in ("race x.py:3", "read-write race", "scoped x.py:3", ""):
        with pytest.raises(ValueError, match="must be a rule and its lines, in quotes"):
            explored("stores", [name], 1)


# -- the command and tests ---------------------------------------------------------------------------------------------

CASE = "tests.sim.test_waivers:case_stores"
STALE = "scope ring.py:1 ring.py:2"


def check(capsys: Any, *words: str) -> tuple[int, str, str]:
    waive = [each for name in words if not name.startswith("--") for each in ("--waive", name)]
    options = [word for word in words if word.startswith("--")]
    code = main(["--schedules", "4", "--workers", "1", *options, *waive, "--module", CASE])
    return code, *capsys.readouterr()


@pytest.mark.slow
def test_the_command_tells_what_was_waived_how_often_and_what_was_never_met(capsys):
    code, out, _ = check(capsys, FIRST, SECOND, STALE)
    assert code == 0 and " ok " in out
    for name in (FIRST, SECOND):
        assert f"waived: {name}, met 4 times in {CASE} (sm_90) on 3 ranks\n" in out
    assert f"never met, maybe stale: --waive {STALE!r}\n" in out


@pytest.mark.slow
def test_a_report_gives_the_name_to_waive_and_a_replay_repeats_those_waived(capsys):
    code, out, _ = check(capsys, FIRST)
    assert code == 1 and f"\n  --waive {shlex.quote(SECOND)}\n" in out and f"waived: {FIRST}, met" in out
    command = next(line for line in out.splitlines() if line.startswith("  fusedtp check"))
    assert command.endswith(f" --waive {shlex.quote(FIRST)}")
    assert main([*shlex.split(command)[2:], "--workers", "1"]) == 1
    again = capsys.readouterr().out
    assert f"\n  --waive {shlex.quote(SECOND)}\n" in again
    python = [line.strip() for line in again.splitlines() if line.startswith("    ") and "case_of" in line]
    with pytest.raises(SimulationFault) as error:
        exec("\n".join(["from fusedtp.sim import Schedule, run_schedule", *python]), {})
    assert error.value.fault.name == SECOND


@pytest.mark.slow
def test_json_has_names_and_counts(capsys):
    code, out, _ = check(capsys, "--json", FIRST, STALE)
    (case,) = json.loads(out)["cases"]
    assert code == 1 and case["fault"]["name"] == SECOND and case["fault"]["waive"] == [FIRST, STALE]
    assert case["waived"][FIRST] >= 1 and case["waived"][STALE] == 0
    assert case["replay"].endswith(shlex.join(["--waive", FIRST, "--waive", STALE]))


@pytest.mark.slow
def test_exhaust_takes_waivers_and_its_command_repeats_them(capsys):
    code, out, _ = check(capsys, "--exhaust=0", "--resident=all", "--weak=no", FIRST)
    assert code == 1 and f"  --waive {shlex.quote(SECOND)}\n" in out
    assert f"--exhaust 0 --target sm_90 --waive {shlex.quote(FIRST)}\n" in out


@pytest.mark.parametrize(("name", "said"), [("deadlock x.py:3", "no run can continue"), ("race x.py:3", "in quotes")])
def test_a_waiver_that_cannot_be_ends_the_command_with_two(name, said, capsys):
    code, out, err = check(capsys, name)
    assert code == 2 and out == "" and len(err.splitlines()) == 1
    assert err.startswith(f"fusedtp check: error: --waive {name!r} ") and said in err


def test_a_test_goes_past_findings_and_is_warned_of_stale_waivers():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_no_finding(case_stores, schedules=2, waive=[FIRST, SECOND])
        kinds = iter(["stores", "stores", "nothing"])  # made once to see what it is, then once a target
        assert_no_finding(lambda: tangled_run(next(kinds)), schedules=1, waive=[FIRST, SECOND])
    with pytest.warns(UserWarning, match="case_stores: no schedule met 'scope ring.py:1 ring.py:2'"):
        assert_no_finding(case_stores, schedules=1, targets="sm_90", waive=[FIRST, SECOND, STALE])
    with pytest.raises(Finding) as error:
        assert_no_finding(case_stores, schedules=1, waive=[FIRST])
    fault: Fault = error.value.fault
    assert fault.name == SECOND and fault.waive == (FIRST,)
    assert f"--waive {shlex.quote(SECOND)}" in str(error.value)
