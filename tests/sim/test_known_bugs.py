"""Each known bug is found with the right diagnosis, and the same kernel made right shows no fault."""

from collections.abc import Iterator

import pytest

from fusedtp.checks.workers import Pool, pool
from fusedtp.sim import RULES, Outcome
from fusedtp.sim.known_bugs import hoisted, judge, known_bugs
from fusedtp.sim.lint import TARGETS, Compiler, compiler

SCHEDULES = 48  # six strategies, four residencies, stores in time and late
NAMES = [bug.name for bug in known_bugs()]


@pytest.fixture(scope="module")
def workers() -> Iterator[Pool]:
    with pool(2) as made:
        yield made


@pytest.fixture(scope="module")
def judged(workers: Pool) -> dict[str, tuple[Outcome, list[str]]]:
    """What exploring each bug shows."""
    running = {name: workers.submit(judge, name, False, SCHEDULES) for name in NAMES}
    return {name: each.result(timeout=300) for name, each in running.items()}


@pytest.mark.parametrize("name", NAMES)
def test_the_bug_is_found_with_its_rule_memory_and_lines(judged, name: str) -> None:
    outcome, objections = judged[name]
    assert not objections, "\n".join(objections)
    assert outcome.schedules <= SCHEDULES, "found by a schedule that the twin need not pass"


@pytest.mark.parametrize("name", NAMES)
def test_the_twin_passes_every_schedule(workers: Pool, name: str) -> None:
    outcome, objections = workers.submit(judge, name, True, SCHEDULES).result(timeout=120)
    assert not objections, "\n".join(objections)
    assert outcome.schedules == SCHEDULES


def test_a_report_of_something_else_does_not_count(judged) -> None:
    """Every bug's own expectation refuses every other bug's report."""
    faults = {name: outcome.fault for name, (outcome, _) in judged.items()}
    for bug in known_bugs():
        assert bug.rule in RULES
        assert bug.objections(None)
        # these show the same way: a store overtakes the load of a buffer in use
        alike = {"single buffer", "replayed epoch", "relaxed signal"}
        for name, fault in faults.items():
            if name != bug.name and not {name, bug.name} <= alike:
                assert bug.objections(fault), f"{name}'s report counts as {bug.name}"


@pytest.fixture(scope="module")
def compilers() -> Iterator[Compiler]:
    with compiler(workers=1) as made:
        yield made


@pytest.mark.parametrize("target", list(TARGETS))
def test_the_load_that_the_compiler_hoists_is_found_in_its_code(compilers: Compiler, target: str) -> None:
    wrong = hoisted(False, target, compilers)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("target", list(TARGETS))
def test_a_wait_outside_the_pipelined_loop_breaks_no_rule(compilers: Compiler, target: str) -> None:
    wrong = hoisted(True, target, compilers)
    assert not wrong, "\n".join(wrong)
