"""Seeded faults of the kernels: sites are found twice, a kill needs the right report, equivalence needs a proof."""

import dataclasses
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from fusedtp.checks.lint import ELEMENTWISE, OWN
from fusedtp.checks.workers import Pool, pool
from fusedtp.sim.explore import Schedule
from fusedtp.sim.lint import RULES as ORDERING
from tests.mutants import Matrix, Mutant, Sources, Verdict, mutants, run
from tests.mutants.__main__ import main
from tests.mutants.census import uncovered, unlisted
from tests.mutants.equivalent import equivalence
from tests.mutants.fit import ORDER
from tests.mutants.generate import OPERATORS, made_by
from tests.mutants.kept import Kept
from tests.mutants.operators import Operator
from tests.mutants.trials import trials, tried
from tests.mutants.trying import try_mutant
from tests.mutants.verdict import KILLED, SURVIVED
from tests.sampling import examples


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
def test_the_text_search_misses_every_operator_that_is_left_out(sources: Sources, operator: Operator) -> None:
    rest = [mutant for each in OPERATORS if each is not operator for mutant in made_by(each, sources)]
    _sites, holes = uncovered(sources.texts, rest)
    assert holes


def test_the_text_search_sees_a_site_that_the_operators_overlook(sources: Sources) -> None:
    """A wait whose result is used is no statement, so no operator drops it."""
    texts = dict(sources.texts)
    texts["signals.py"] += "\n\n@inline\ndef sly(peers):\n    wait(peers, 0, 0) if peers else None\n"
    _sites, holes = uncovered(texts, mutants(Sources(texts)))
    assert {hole.operator for hole in holes} >= {"drop wait"}


def test_a_kernel_that_nobody_tries_or_compiles_is_a_hole(sources: Sources) -> None:
    texts = dict(sources.texts)
    texts["new.py"] = "@triton.jit\ndef new_kernel(x):\n    pass\n"
    found = {(hole.operator, hole.file) for hole in unlisted(texts, tried, OWN)}
    assert {("any trial", "new.py"), ("any compile case", "new.py")} <= found
    listed = unlisted(texts, lambda kernel: True, [*Sources(texts).kernels])
    assert not listed
    assert not [hole for hole in unlisted(sources.texts, tried, OWN) if "matmul" in hole.file]


def test_each_lint_expectation_names_rules_that_there_are(sources: Sources) -> None:
    names = {rule.name for rule in ORDERING}
    assert set().union(*ORDER.values()) <= names
    for mutant in mutants(sources):
        if "lint" in mutant.judges and mutant.expects != "no barrier elsewhere":
            assert ORDER[mutant.expects], mutant


def test_equivalence_is_proved_for_the_mutant_at_hand(sources: Sources) -> None:
    """A choice of peers that goes round all ranks is equivalent; one that leaves a rank out is not."""
    full = [m for m in mutants(sources) if m.operator == "wrong peer" and m.function == "one_shot_kernel"]
    assert {equivalence(mutant, sources) for mutant in full} == {"peers in another order"}
    part = named(sources, "wrong peer @ signals.py", "in arrive", "step) %")
    assert equivalence(part, sources) is None
    assert equivalence(named(sources, "stages reversed @ matmul.py"), sources) == "no program waits"
    assert equivalence(named(sources, "stages reversed @ all_gather_matmul.py"), sources) is None


def test_equivalence_falls_with_what_it_rests_on(sources: Sources) -> None:
    """Were a shard's tiles counted otherwise, a program might look for the arrival of an empty one; and so on."""
    words = "empty shard: no wait", "in moe_dispatch_kernel: signals.wait_arrival"
    assert equivalence(named(sources, *words), sources) == "not reached for an empty shard"
    other = edited(
        sources,
        "moe_exchange.py",
        "if start < blocks:\n                    signals",
        "if src >= 0:\n                    signals",
    )
    assert equivalence(named(other, *words), other) is None
    words = "empty shard: no wait", "in all_gather_matmul_kernel: signals.wait_arrival"
    assert equivalence(named(sources, *words), sources) == "not reached for an empty shard"
    guard = "if start < num_rows * num_cols:\n                    signals"
    changed = edited(
        sources, "all_gather_matmul.py", guard, "if start < num_cols:\n                    signals"
    )
    assert equivalence(named(changed, *words), changed) is None
    words = "wrong peer", "in push_partials: (rank + step)"
    assert equivalence(named(sources, *words), sources) == "peers in another order"
    for old, new in (
        ("pid = next_start(pid,", "pid = least(pid,"),  # what a round leaves to the next
        (
            "        out += to_int64(rank) * limit",
            "        signals.wait(peers, owner, 0)\n        out += to_int64(rank) * limit",
        ),
    ):
        changed = edited(sources, "matmul_reduce_scatter.py", old, new)
        assert equivalence(named(changed, *words), changed) is None
    shared = "items shared otherwise"
    (again,) = [
        m for m in mutants(sources) if m.operator == "tail skipped" and equivalence(m, sources) == shared
    ]
    assert again.function == "push_partials"
    changed = edited(sources, "tiles.py", "steps * stride - count", "steps * stride - count + 1")
    assert equivalence(again, changed) is None


def edited(sources: Sources, file: str, old: str, new: str) -> Sources:
    assert old in sources.texts[file]
    return Sources(sources.texts | {file: sources.texts[file].replace(old, new)})


def test_what_only_some_trial_shows_is_not_called_equivalent(sources: Sources) -> None:
    """Slots in a neighbour's memory or by each other's names, and arrivals of empty shards that are looked for."""
    words = (
        ("low epoch", "in slot"),
        ("low epoch", "in wait_arrival"),
        ("in slot: peers.data",),
        ("empty shard: no wait", "in all_gather_wgrad_kernel: signals.wait_arrival"),
    )
    for each in words:
        assert equivalence(named(sources, *each), sources) is None


def test_a_run_goes_on_where_it_was_broken_off(sources: Sources, tmp_path: Path) -> None:
    mutant, file = named(sources, "equality"), tmp_path / "kept"
    verdict = Verdict(mutant, "schedules", "killed", "deadlock", "where", "report", 3, 1.5)
    Kept(file, sources, "12").add(verdict)
    with file.open("a") as kept:
        kept.write('{"key": "cut o')
    assert Kept(file, sources, "12").verdict(mutant, "schedules") == verdict
    assert Kept(file, sources, "12").verdict(mutant, "lint") is None
    assert Kept(file, sources, "13").verdict(mutant, "schedules") is None
    changed = edited(sources, "signals.py", "polls += 1", "polls += 2")
    assert Kept(file, changed, "12").verdict(named(changed, "equality"), "schedules") is None
    asked: list[Verdict] = []
    matrix = run(
        wanted=lambda m: m == mutant,
        judges=("schedules",),
        workers=1,
        keep=file,
        progress=lambda v, *_: asked.append(v),
    )
    assert [v.result for v in matrix.verdicts] == ["killed"] and len(asked) == 1  # kept under another `how`
    again = run(
        wanted=lambda m: m == mutant,
        judges=("schedules",),
        workers=1,
        keep=file,
        progress=lambda v, *_: asked.append(v),
    )
    assert again.verdicts == matrix.verdicts and len(asked) == 1


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
    holes = [hole for hole in matrix.holes if not hole.operator.startswith("any ")]
    assert matrix.verdicts and not matrix.survivors and not holes, "\n".join(matrix.lines())


@pytest.fixture(scope="module")
def workers() -> Iterator[Pool]:
    with pool(2) as made:
        yield made


def judged(workers: Pool, sources: Sources, *asked: Mutant, count: int = 2) -> list[Verdict]:
    running = [workers.submit(try_mutant, mutant, sources.texts, count, 120.0) for mutant in asked]
    return [each.result(timeout=600) for each in running]


def test_a_crash_and_a_report_of_something_else_are_no_kills(workers: Pool, sources: Sources) -> None:
    tail = named(sources, "tail skipped @ matmul.py", "cdiv(M, BLOCK_M)")
    other = dataclasses.replace(tail, expects="no signal")
    broken = dataclasses.replace(tail, edits=tuple(edit._replace(text="nobody") for edit in tail.edits))
    verdicts = judged(workers, sources, tail, other, broken)
    assert [verdict.result for verdict in verdicts] == ["killed", "misdiagnosed", "crashed"]
    assert "no sign of" in verdicts[1].report


def test_a_mutant_that_never_ends_is_no_kill(workers: Pool, sources: Sources) -> None:
    tail = named(sources, "tail skipped @ matmul.py", "cdiv(M, BLOCK_M)")
    endless = tuple(edit._replace(text="next(i for i in iter(int, 1) if i)") for edit in tail.edits)
    stuck = dataclasses.replace(tail, edits=endless)
    verdict = workers.submit(try_mutant, stuck, sources.texts, 2, 2.0).result(timeout=120)
    assert verdict.result == "ran too long" and verdict.survived


def tried_as(kernels: Iterable[str], count: int) -> set[tuple[str, str, tuple[Schedule, ...]]]:
    return {(trial.kernel, trial.case.name, trial.schedules) for trial in trials(kernels, count)}


@pytest.mark.slow
def test_the_kernels_as_they_are_pass_all_that_mutants_must_pass(workers: Pool, sources: Sources) -> None:
    """`bump_epoch` is launched with every other kernel that waits, and its trials are all of theirs."""
    kernels, count = sorted({*sources.kernels} - {"bump_epoch"}), examples(2, 1)
    every = {each for kernel in kernels for each in tried_as([kernel], count)}
    assert tried_as(sources.kernels_of("bump_epoch"), count) <= every
    same = [Mutant("none", "", 0, 0, kernel, "", "", (), "no signal") for kernel in kernels]
    for kernel, verdict in zip(kernels, judged(workers, sources, *same, count=count), strict=True):
        assert verdict.result == "survived", verdict.report
        alone = kernel in ELEMENTWISE  # waits for nobody: one schedule is as good as another
        assert verdict.schedules > (0 if alone else 1)


@pytest.mark.parametrize("survivors", [0, 1])
def test_the_command_prints_the_matrix_and_survivors_end_with_one(survivors, capsys, monkeypatch):
    mutant = Mutant("drop wait", "kernel.py", 3, 0, "kernel", "wait()", "", (), "unordered")
    made = Matrix([Verdict(mutant, "schedules", KILLED, "deadlock")], holes=[])
    made.verdicts += survivors * [Verdict(mutant, "lint", SURVIVED)]
    asked = {}
    monkeypatch.setattr("tests.mutants.runner.run", lambda **how: asked.update(how) or made)
    assert main(["--oldest-python", sys.executable, "--workers", "3"]) == survivors
    out = capsys.readouterr().out
    assert "drop wait" in out and "deadlock 1" in out and ("survived: " in out) == bool(survivors)
    assert (asked["workers"], asked["oldest_python"]) == (3, sys.executable)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--oldest-python", "/no/python"], "--oldest-python /no/python: no such file"),
        (["--keep", "/no/such/folder/verdicts"], "--keep /no/such/folder/verdicts: no such folder"),
        (["--workers", "0"], "--workers 0 is too small"),
    ],
)
def test_wrong_options_of_the_command_are_said_in_one_line(words, said, capsys):
    code = main(words)
    out, err = capsys.readouterr()
    assert code == 2 and out == "" and len(err.splitlines()) == 1 and said in err
