"""Seeded faults of the kernels: sites are found twice, a kill needs the right report, equivalence needs a proof."""

import dataclasses
from collections.abc import Iterator

import pytest

from fusedtp.sim import RULES, Access, Fault, Site
from fusedtp.sim.mutants import Matrix, Mutant, Sources, Verdict, mutants, run
from fusedtp.sim.mutants.census import uncovered
from fusedtp.sim.mutants.equivalent import equivalence
from fusedtp.sim.mutants.fit import EXPECTED, ORDER, objections
from fusedtp.sim.mutants.generate import OPERATORS
from fusedtp.sim.mutants.trying import try_mutant
from fusedtp.sim.workers import Pool, pool


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources.read()


def named(sources: Sources, *words: str) -> Mutant:
    """The one mutant with all these words in its description."""
    found = [mutant for mutant in mutants(sources) if all(word in str(mutant) for word in words)]
    assert len(found) == 1, [str(mutant) for mutant in found]
    return found[0]


def test_every_mutant_is_a_program_of_its_own_that_differs_from_the_kernels(sources: Sources) -> None:
    seen = set()
    for mutant in mutants(sources):
        texts = sources.edited(mutant.edits)
        changed = {name for name in texts if texts[name] != sources.texts[name]}
        assert mutant.file in changed, mutant
        for name in changed:
            compile(texts[name], name, "exec")
        key = tuple(texts.values())
        assert key not in seen, f"{mutant} is another mutant too"
        seen.add(key)


def test_the_text_search_finds_no_site_without_a_mutant(sources: Sources) -> None:
    sites, holes = uncovered(sources.texts, mutants(sources))
    assert not holes
    assert sites > len(OPERATORS)


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.__name__)
def test_the_text_search_misses_every_operator_that_is_left_out(sources: Sources, operator: object) -> None:
    rest = [mutant for each in OPERATORS if each is not operator for mutant in each(sources)]
    _sites, holes = uncovered(sources.texts, rest)
    assert holes


def test_the_text_search_sees_a_site_that_the_operators_overlook(sources: Sources) -> None:
    """A wait whose result is used is no statement, so no operator drops it."""
    texts = dict(sources.texts)
    texts["signals.py"] += "\n\n@inline\ndef sly(peers):\n    wait(peers, 0, 0) if peers else None\n"
    _sites, holes = uncovered(texts, mutants(Sources(texts)))
    assert {hole.operator for hole in holes} >= {"drop wait"}


def test_each_expectation_names_rules_that_there_are(sources: Sources) -> None:
    from fusedtp.sim.lint import RULES as ORDERING

    names = {rule.name for rule in ORDERING}
    for mutant in mutants(sources):
        if "schedules" in mutant.judges:
            assert EXPECTED[mutant.expects] and set(EXPECTED[mutant.expects]) <= set(RULES)
        if "lint" in mutant.judges:
            assert ORDER[mutant.expects] and ORDER[mutant.expects] <= names
    assert not {"raised"} & {rule for rules in EXPECTED.values() for rule in rules}


def test_a_report_must_fit_in_rule_memory_and_kernel() -> None:
    site = Site("signals.py", 1, "wait", 1)
    access = Access(0, "one_shot_kernel", 0, site, "load", "slots of rank 1 ", (0,), (0,), 0)
    race = Fault("read-write race", "", (access, access))
    assert not objections("no wait for data", {"one_shot_kernel"}, race)
    assert objections("no wait for data", {"two_shot_kernel"}, race)
    assert objections("no signal", {"one_shot_kernel"}, race)
    elsewhere = dataclasses.replace(access, tensor="x of rank 1 ")
    assert objections(
        "no wait for data", {"one_shot_kernel"}, Fault("read-write race", "", (access, elsewhere))
    )
    for expected in EXPECTED:
        assert objections(expected, {"one_shot_kernel"}, Fault("raised", "IndexError"))


def test_equivalence_is_proved_for_the_mutant_at_hand(sources: Sources) -> None:
    """A choice of peers that goes round all ranks is equivalent; one that leaves a rank out is not."""
    full = named(sources, "wrong peer @ matmul_all_reduce.py", "in one_shot_kernel", "step) % world", ":93:")
    assert equivalence(full, sources) == "peers in another order"
    part = named(sources, "wrong peer @ signals.py", "in arrive", "step) %")
    assert equivalence(part, sources) is None
    renamed = named(sources, "low epoch", "in slot")
    assert equivalence(renamed, sources) == "slots renamed"
    assert equivalence(named(sources, "low epoch", "in wait_arrival"), sources) is None
    assert equivalence(named(sources, "stages reversed @ matmul.py"), sources) == "no program waits"
    assert equivalence(named(sources, "stages reversed @ all_gather_matmul.py"), sources) is None


def test_equivalence_falls_with_what_it_rests_on(sources: Sources) -> None:
    """Were the slots' table read in a second place, swapped slots would not be only another name."""
    texts = dict(sources.texts)
    texts["tiles.py"] += "\n\n@inline\ndef peek(peers):\n    return tl.load(peers.data)\n"
    changed = Sources(texts)
    assert equivalence(named(changed, "low epoch", "in slot"), changed) is None
    texts = dict(sources.texts)
    texts["matmul_all_reduce.py"] = texts["matmul_all_reduce.py"].replace(
        "        signals.wait_all_arrivals(peers)\n        for chunk in range(pid - send_programs, cdiv(tiles",
        "        for chunk in range(pid - send_programs, cdiv(tiles",
    )
    assert texts["matmul_all_reduce.py"] != sources.texts["matmul_all_reduce.py"]
    changed = Sources(texts)
    assert equivalence(named(changed, "drop wait", "wait_arrival(peers, owner)"), changed) is None
    words = "empty shard: no wait", "in two_shot_kernel: signals.wait_all_arrivals"
    assert equivalence(named(sources, *words), sources) == "another stage visits all"
    texts = dict(sources.texts)
    texts["matmul_all_reduce.py"] = texts["matmul_all_reduce.py"].replace(
        "(rank - step + world)", "(rank - 1 + world)"
    )
    changed = Sources(texts)
    assert equivalence(named(changed, *words), changed) is None


def test_a_matrix_with_a_survivor_a_hole_or_a_gap_is_not_clean(sources: Sources) -> None:
    mutant = named(sources, "equality")
    killed, survived = (Verdict(mutant, "schedules", result) for result in ("killed", "survived"))
    assert Matrix([killed]).clean and Matrix([killed]).table().row_count == 1
    for result in ("survived", "misdiagnosed", "crashed", "ran too long", "not judged"):
        broken = Matrix([killed, dataclasses.replace(survived, result=result)])
        assert not broken.clean and result in broken.lines()[0]
    assert not Matrix([killed], unjudged=[(mutant, "lint")]).clean
    holes = uncovered(sources.texts, [])[1]
    assert not Matrix([killed], holes=holes).clean


@pytest.mark.slow
def test_no_sampled_mutant_survives_its_schedules() -> None:
    matrix = run(judges=("schedules",), sample=True)
    assert matrix.verdicts and not matrix.survivors and not matrix.holes, "\n".join(matrix.lines())


@pytest.fixture(scope="module")
def workers() -> Iterator[Pool]:
    with pool(2) as made:
        yield made


def judged(workers: Pool, sources: Sources, mutant: Mutant, count: int = 2) -> Verdict:
    return workers.submit(try_mutant, mutant, sources.texts, count, 120.0).result(timeout=600)


def test_a_crash_and_a_report_of_something_else_are_no_kills(workers: Pool, sources: Sources) -> None:
    tail = named(sources, "tail skipped @ matmul.py", "cdiv(M, BLOCK_M)")
    assert judged(workers, sources, tail).result == "killed"
    other = judged(workers, sources, dataclasses.replace(tail, expects="no signal"))
    assert other.result == "misdiagnosed" and "no sign of" in other.report
    broken = tuple(edit._replace(text="nobody") for edit in tail.edits)
    assert judged(workers, sources, dataclasses.replace(tail, edits=broken)).result == "crashed"


def test_a_mutant_that_never_ends_is_no_kill(workers: Pool, sources: Sources) -> None:
    tail = named(sources, "tail skipped @ matmul.py", "cdiv(M, BLOCK_M)")
    endless = tuple(edit._replace(text="next(i for i in iter(int, 1) if i)") for edit in tail.edits)
    stuck = dataclasses.replace(tail, edits=endless)
    verdict = workers.submit(try_mutant, stuck, sources.texts, 2, 2.0).result(timeout=120)
    assert verdict.result == "ran too long" and verdict.survived


@pytest.mark.slow
def test_the_kernels_as_they_are_pass_all_that_mutants_must_pass(workers: Pool, sources: Sources) -> None:
    for kernel in sorted(sources.kernels):
        same = Mutant("none", "", 0, 0, kernel, "", "", (), "no signal")
        verdict = judged(workers, sources, same, count=4)
        assert verdict.result == "survived", verdict.report
        assert kernel == "bump_epoch" or verdict.schedules > 1
