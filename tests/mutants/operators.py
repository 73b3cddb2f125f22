"""Mutation operators that change one expression or drop one statement: waits, signals, orders, numbers, places.

An operator finds its sites by what the code does, not by a list: what acquires, what releases, what reads the epoch.
Those that move statements are in moves.py.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from .mutant import Mutant, short
from .source import Edit, File, Sources, called, keyword

Operator = Callable[[Sources], Iterator[Mutant]]
SCHEDULES, LINT = ("schedules",), ("lint",)
BARRIERS = {"release": "before release", "acquire": "after acquire"}
ARRIVALS = ("arriv",)  # in the name of what concerns a rank's being in the call, not its data


def make(
    operator: str, file: File, node: ast.AST, text: str, expects: str, *, edits: tuple[Edit, ...] = (),
    judges: tuple[str, ...] = SCHEDULES, after: str = "",
) -> Mutant:  # fmt: skip
    """A mutant with `text` in place of `node`, or with `edits`."""
    function = file.function_of(node)
    assert isinstance(node, ast.expr | ast.stmt | ast.keyword)
    return Mutant(
        operator, file.name, node.lineno, node.col_offset, function.name if function else "",
        short(file.of(node)), after or short(text), edits or (file.replace(node, text),), expects, judges,
    )  # fmt: skip


def nodes(sources: Sources) -> Iterator[tuple[File, ast.AST]]:
    """Every node of every function, once, those that run only compiled apart (see INTERPRETED in tiles.py)."""
    for file in sources.files.values():
        for node in file.nodes:
            yield file, node


def compiled_only(file: File, node: ast.AST) -> bool:
    """Whether an interpreter never comes here: the other branch of `if INTERPRETED`."""
    at: ast.AST = node
    while at in file.parents:
        parent = file.parents[at]
        if isinstance(parent, ast.If) and at in parent.orelse and "INTERPRETED" in file.of(parent.test):
            return True
        at = parent
    return False


def _judges(file: File, node: ast.AST) -> tuple[str, ...]:
    return LINT if compiled_only(file, node) else SCHEDULES + LINT


def statement_calls(sources: Sources, names: set[str]) -> Iterator[tuple[File, ast.Expr, ast.Call]]:
    """Calls of these functions that stand as statements."""
    for file, node in nodes(sources):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and called(node.value) in names:
            yield file, node, node.value


def about(call: ast.Call) -> str:
    """Whether a wait or signal is of an "arrival" or of "data"."""
    name = called(call)
    chunk = call.args[-1] if call.args else None
    zero = isinstance(chunk, ast.Constant) and chunk.value == 0
    return "arrival" if zero or any(word in name for word in ARRIVALS) else "data"


def signature_gate(file: File, node: ast.AST) -> bool:
    """Whether a wait stands in the function that then reads a signature."""
    function = file.function_of(node)
    return function is not None and "peers.signatures" in file.of(function)


def awaited(file: File, node: ast.AST, call: ast.Call) -> str:
    """What a wait is for, as fit.EXPECTED names it."""
    return "signature" if signature_gate(file, node) else about(call)


def announced(sources: Sources, call: ast.Call) -> str:
    """of data", " of arrival", or "" for a stage that sends both."""
    if called(call) in sources.publishers or any(word in called(call) for word in ARRIVALS):
        return f" of {about(call)}"
    return ""


def drop_wait(sources: Sources) -> Iterator[Mutant]:
    """Each call that comes to acquire, and each spin loop itself."""
    for file, statement, call in statement_calls(sources, sources.waits):
        stage = sources.reaches(called(call), {"copy_rows"})  # not a wait alone
        subject = "no receiving" if stage else f"no wait for {awaited(file, statement, call)}"
        yield make("drop wait", file, statement, "pass", subject)
    for file, node in nodes(sources):
        if isinstance(node, ast.While) and any(
            isinstance(n, ast.Call) and keyword(n, "sem") == "acquire" for n in ast.walk(node)
        ):
            edit = (file.replace(node.test, "False"),)
            yield make("drop wait", file, node, "", "no wait at all", edits=edit, after="while False")


def drop_notify(sources: Sources) -> Iterator[Mutant]:
    """Each call that comes to release, each release itself, and what is stored along with an arrival."""
    for file, statement, call in statement_calls(sources, sources.notifies):
        yield make("drop notify", file, statement, "pass", "no signal" + announced(sources, call))
    for file, node in nodes(sources):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            function = file.function_of(node)
            if keyword(node.value, "sem") == "release":
                yield make("drop notify", file, node, "pass", "no signal")
            elif (
                called(node.value) == "store"
                and function is not None
                and function.name in sources.notifies
                and any(word in function.name for word in ARRIVALS)
            ):
                yield make("drop notify", file, node, "pass", "no signature")


def _keywords(sources: Sources, name: str) -> Iterator[tuple[File, ast.keyword, ast.Call, str]]:
    for file, node in nodes(sources):
        if isinstance(node, ast.Call):
            for each in node.keywords:
                value = keyword(node, name)
                if each.arg == name and value is not None:
                    yield file, each, node, value


def weaken_order(sources: Sources) -> Iterator[Mutant]:
    """Each release and each acquire made relaxed."""
    for file, node, _call, sem in _keywords(sources, "sem"):
        if sem != "relaxed":
            subject = "no order of signals" if sem == "release" else "no order"
            yield make(f"weaken {sem}", file, node, 'sem="relaxed"', subject, judges=_judges(file, node))


def narrow_scope(sources: Sources) -> Iterator[Mutant]:
    """Each system scope made device scope, each device scope block scope."""
    for file, node, call, scope in _keywords(sources, "scope"):
        narrower = {"sys": "gpu", "gpu": "cta"}[scope]
        subject = "narrow scope of failures" if "failure" in file.of(call) else "narrow scope"
        yield make("narrow scope", file, node, f'scope="{narrower}"', subject, judges=_judges(file, node))


def drop_barrier(sources: Sources) -> Iterator[Mutant]:
    """Each block barrier and each fence."""
    for file, node in nodes(sources):
        if isinstance(node, ast.Expr) and ("barrier" in called(node.value) or "fence" in called(node.value)):
            function = file.function_of(node)
            text = file.of(function) if function is not None else ""
            side = next((word for sem, word in BARRIERS.items() if f'sem="{sem}"' in text), "elsewhere")
            yield make("drop barrier", file, node, "pass", f"no barrier {side}", judges=LINT)


def reads_epoch(file: File, node: ast.AST) -> bool:
    return called(node) == "load" and file.of(node).endswith("epoch)")


def _parities(sources: Sources) -> Iterator[tuple[File, ast.BinOp]]:
    for file, node in nodes(sources):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd) and reads_epoch(file, node.left):
            yield file, node


def one_buffer(sources: Sources) -> Iterator[Mutant]:
    """One place where two rotate: each parity alone, and all parities of one table at once."""
    tables: dict[str, list[tuple[File, ast.BinOp]]] = {}
    for file, node in _parities(sources):
        function = file.function_of(node)
        assert function is not None
        subject = "signature elsewhere" if "peers.signatures" in file.of(function) else "one buffer"
        yield make(
            "one buffer", file, node, "", subject, edits=(file.replace(node.right, "0"),),
            after=short(file.of(node.left)) + " & 0",
        )  # fmt: skip
        for table in ("data", "signatures"):
            if f"peers.{table}" in file.of(function):
                tables.setdefault(table, []).append((file, node))
    for table, sites in tables.items():
        if len(sites) > 1:
            edits = tuple(file.replace(node.right, "0") for file, node in sites)
            file, node = sites[0]
            subject = "one signature" if table == "signatures" else "one buffer"
            yield make(
                "one buffer", file, node, "", subject, edits=edits, after=f"& 0 wherever {table} rotate"
            )


def low_epoch(sources: Sources) -> Iterator[Mutant]:
    """Each reading of the call's number one too low; of the count itself, no step."""
    for file, node in nodes(sources):
        if reads_epoch(file, node):
            parent = file.parents[node]
            if isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Add):
                edit = (file.replace(parent.right, "0"),)
                yield make("low epoch", file, node, "", "no new number", edits=edit, after="no step")
            else:
                yield make("low epoch", file, node, f"({file.of(node)} - 1)", _low(file, node))


def _low(file: File, node: ast.AST) -> str:
    """What a number that is too low is used for: by what its function does."""
    function = file.function_of(node)
    text = file.of(function) if function is not None else ""
    subjects = {
        "peers.signatures": "signature elsewhere",
        'sem="release"': "low signal",
        'sem="acquire"': "low wait",
    }
    return next((subject for word, subject in subjects.items() if word in text), "wrong slot")


def compare_wrong(sources: Sources) -> Iterator[Mutant]:
    """Each wait for at least a number: for exactly that number, or compared as if it never wrapped."""
    for file, node in nodes(sources):
        if (
            isinstance(node, ast.Compare)
            and isinstance(node.ops[0], ast.Lt)
            and isinstance(node.left, ast.BinOp)
            and isinstance(node.left.op, ast.Sub)
            and any(isinstance(each, ast.While) for each in file.around(node))
        ):
            seen, wanted = file.of(node.left.left), file.of(node.left.right)
            yield make("equality", file, node, f"{seen} != {wanted}", "equality")
            yield make("no wrap", file, node, f"{seen} < {wanted}", "no wrap")


def tail_skipped(sources: Sources) -> Iterator[Mutant]:
    """Each division that rounds up rounds down; each loop over blocks of K ends before the last, uneven one."""
    for file, node in nodes(sources):
        if called(node) == "cdiv":
            assert isinstance(node, ast.Call)
            a, b = (file.of(each) for each in node.args)
            yield make("tail skipped", file, node, f"(({a}) // ({b}))", "tail")
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv):
            up = node.left
            if isinstance(up, ast.BinOp) and isinstance(up.op, ast.Sub) and file.of(up.right) == "1":
                assert isinstance(up.left, ast.BinOp)
                a, b = file.of(up.left.left), file.of(node.right)
                function = file.function_of(node)
                items = function is not None and function.name == "next_start"
                yield make("tail skipped", file, node, f"({a}) // {b}", "tail of items" if items else "tail")
        elif called(node) == "range":
            assert isinstance(node, ast.Call)
            if len(node.args) == 3 and file.of(node.args[0]) == "0":
                end, step = file.of(node.args[1]), file.of(node.args[2])
                yield make(
                    "tail skipped", file, node, f"range(0, {end} // {step} * {step}, {step})", "tail of K"
                )


def reversed_stages(sources: Sources) -> Iterator[Mutant]:
    """Each kernel with its programs numbered the other way round, in the functions it calls too."""
    pids: dict[str, list[Edit]] = {}
    firsts: dict[str, tuple[File, ast.AST]] = {}
    for file, node in nodes(sources):
        if called(node) == "program_id":
            function = file.function_of(node)
            assert function is not None
            text = f"(tl.num_programs(0) - 1 - {file.of(node)})"
            pids.setdefault(function.name, []).append(file.replace(node, text))
            firsts.setdefault(function.name, (file, node))
    for kernel in sorted(sources.kernels & set(pids)):
        edits = tuple(edit for name in pids if sources.reaches(kernel, {name}) for edit in pids[name])
        file, node = firsts[kernel]
        yield make("stages reversed", file, node, "", "stages", edits=edits, after="last program first")
