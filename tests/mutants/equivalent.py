"""Mutants that change nothing: classes of them, each with a check that proves it of a mutant's own source.

A class is asked only about a mutant that no schedule and no target showed; what no check proves is a survivor. That
schedules found nothing is no proof: wherever a difference could be thought of, a trial was made that shows it (an
arrival looked for later than it might be, a slot in a neighbour's memory, slots by each other's names where the host
copies to one of them), and the class is gone.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from .mutant import Mutant
from .source import File, Sources, called, segments

Check = Callable[[Mutant, Sources], bool]
PROGRAMS = (*range(1, 17), 78, 108, 132)  # of a stage; counts of items go to twice that


def _node(mutant: Mutant, file: File, kind: type[ast.AST]) -> ast.AST | None:
    """The node at the mutant's site."""
    for node in ast.walk(file.tree):
        if isinstance(node, kind) and (getattr(node, "lineno", 0), getattr(node, "col_offset", -1)) == (
            mutant.line, mutant.column,
        ):  # fmt: skip
            return node
    return None


def full_cycle(mutant: Mutant, sources: Sources) -> bool:
    """A choice of peers whose loop goes round all ranks anyway: only the order of its rounds has changed.

    Proved: by enumeration for 2 to 8 ranks the same peers are chosen, each as often; the loop's variable has no other
    part in the body; the body waits or signals, not both, so no rank's round is waited for by another's; and what one
    round leaves to the next is a sum or the next place in a list, neither of which depends on the order, or what it has
    still to signal, which names its peer itself.
    """
    file = sources.files[mutant.file]
    node = _node(mutant, file, ast.BinOp)
    if mutant.operator != "wrong peer" or not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mod):
        return False
    loop = next((each for each in file.around(node) if isinstance(each, ast.For)), None)
    if loop is None or not isinstance(loop.target, ast.Name):
        return False
    step = loop.target.id
    if _count(loop.body, step) != _count([node], step):
        return False
    calls = {called(each) for part in loop.body for each in ast.walk(part)}
    if (calls & sources.waits and calls & sources.notifies) or not _order_free(loop, sources):
        return False
    before, after = (_arithmetic(text) for text in (file.of(node), mutant.edits[0].text))
    bounds = _arithmetic(file.of(loop.iter))
    for world in range(2, 9):
        for rank in range(world):
            names = {"rank": rank, "world": world}
            try:
                steps = eval(bounds, {"range": range}, names)
            except NameError:  # as many as somebody else says
                return False
            peers = [[eval(code, {}, {**names, step: i}) for i in steps] for code in (before, after)]
            if sorted(peers[0]) != sorted(peers[1]):
                return False
    return True


def _count(parts: list[Any], name: str) -> int:
    return sum(isinstance(n, ast.Name) and n.id == name for part in parts for n in ast.walk(part))


def _left_to_signal(loop: ast.For, name: str, sources: Sources) -> bool:
    """Whether the loop reads `name` only to signal what it holds, and then forgets it."""
    inside: set[int] = set()
    for each in (n for part in loop.body for n in ast.walk(part)):
        if isinstance(each, ast.If) and not each.orelse and _count([each.test], name):
            notices, *rest = each.body
            call = notices.value if isinstance(notices, ast.Expr) else None
            signals = isinstance(call, ast.Call) and called(call) in sources.notifies
            forgets = [r for r in rest if isinstance(r, ast.Assign) and not _count([r.value], name)]
            if signals and rest == forgets and [_targets(r) for r in forgets] == [{name}]:
                inside |= {id(n) for n in ast.walk(each)}
    reads = [
        n
        for part in loop.body
        for n in ast.walk(part)
        if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)
    ]
    return bool(reads) and all(id(n) in inside for n in reads)


def _order_free(loop: ast.For, sources: Sources) -> bool:
    """Whether all that a round takes over from the one before is summed up, or advanced by `next_start`."""
    assigned = [n for part in loop.body for n in ast.walk(part) if isinstance(n, ast.Assign | ast.AugAssign)]
    for name in sorted(_carried(loop)):
        if _left_to_signal(loop, name, sources):
            continue
        for each in assigned:
            if name not in _targets(each):
                continue
            if isinstance(each, ast.AugAssign):
                return False
            call = each.value
            if not isinstance(call, ast.Call) or _first(call) != name:
                return False
            if called(call) != "next_start" and not _sums(called(call), sources):
                return False
            if called(call) == "next_start" and not _bijective(sources):
                return False
    return True


def _carried(loop: ast.For) -> set[str]:
    """Names that the body assigns, and reads before it has assigned them, in the order of the text."""
    known: set[str] = set()
    carried: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Assign | ast.AugAssign):
            visit(node.value)
            if isinstance(node, ast.AugAssign):
                visit_read(_targets(node))
            known.update(_targets(node))
            return
        if isinstance(node, ast.For):
            visit(node.iter)
            known.update(_targets(node))
            for child in node.body:
                visit(child)
            return
        if isinstance(node, ast.Name):
            visit_read({node.id})
            return
        for part in ast.iter_child_nodes(node):
            visit(part)

    def visit_read(names: set[str]) -> None:
        carried.update(names - known)

    for statement in loop.body:
        visit(statement)
    stored = {
        name
        for part in loop.body
        for n in ast.walk(part)
        if isinstance(n, ast.Assign | ast.AugAssign)
        for name in _targets(n)
    }
    return carried & stored


def _targets(node: ast.Assign | ast.AugAssign | ast.For) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}


def _first(call: ast.Call) -> str:
    return getattr(call.args[0], "id", "") if call.args else ""


def _sums(name: str, sources: Sources) -> bool:
    """Whether a function only adds to its first parameter: `tl.dot(..., acc)` or another such, and returns it."""
    bodies = [f for file in sources.files.values() for f in file.functions if f.name == name]
    if len(bodies) != 1:
        return False
    acc = bodies[0].args.args[0].arg
    for node in ast.walk(bodies[0]):
        if isinstance(node, ast.Return) and getattr(node.value, "id", "") != acc:
            return False
        if isinstance(node, ast.Assign | ast.AugAssign) and acc in _targets(node):
            call = node.value
            adds = (
                called(call) == "dot"
                and isinstance(call, ast.Call)
                and getattr(call.args[2], "id", "") == acc
            )
            inner = isinstance(call, ast.Call) and _first(call) == acc and _sums(called(call), sources)
            if not adds and not inner:
                return False
    return True


def _arithmetic(text: str) -> str:
    """A peer's expression with the kernel's ways to say rank and world made plain names."""
    return (
        text.replace("signals.rank_of(peers)", "rank")
        .replace("rank_of(peers)", "rank")
        .replace("peers.world_size", "world")
    )


def not_reached(mutant: Mutant, sources: Sources) -> bool:
    """The arrival of a rank whose shard is empty, where a program looks for it only if the shard has tiles.

    Proved: the wait stands under `x < a * b`, where a is `cdiv(size * ..., ...)` of the shard's size, or under `x < a`,
    where a is `cdiv(count, ...)` of its segment's rows; so nothing is less than 0 tiles, a program's number being at
    least 0 by what `next_start` returns.
    """
    file = sources.files[mutant.file]
    statement = _node(mutant, file, ast.Expr)
    if mutant.operator != "empty shard: no wait" or not isinstance(statement, ast.Expr):
        return False
    function = file.function_of(statement)
    assert function is not None
    guards = [each.test for each in file.around(statement) if isinstance(each, ast.If)]
    for test in guards:
        if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.Lt):
            continue
        bound = test.comparators[0]
        tiles = isinstance(bound, ast.BinOp) and isinstance(bound.op, ast.Mult)
        if not tiles and not isinstance(bound, ast.Name):
            continue
        rows = file.of(bound.left if isinstance(bound, ast.BinOp) else bound)
        given = [
            each.value
            for each in ast.walk(function)
            if isinstance(each, ast.Assign) and file.of(each.targets[0]) == rows
        ]
        counts = [
            file.of(each.args[0]) for each in given if isinstance(each, ast.Call) and called(each) == "cdiv"
        ]
        of = "size" if tiles else _rows_of_its_segment(file, function)
        if len(counts) == len(given) == 1 and counts[0].split(" * ")[0] == of and _bijective(sources):
            return True
    return False


def _rows_of_its_segment(file: File, function: ast.FunctionDef) -> str:
    """What the function calls the rows of the one segment that it looks up; "" where there is not one alone."""
    kept = [file.parents[each] for each in segments(function)]
    names = [file.of(each.targets[0]).split(", ")[-1] for each in kept if isinstance(each, ast.Assign)]
    return names[0] if len(names) == 1 else ""


def no_peer(mutant: Mutant, sources: Sources) -> bool:
    """Another numbering of programs of which none waits for another: every tile is still done once.

    Proved: the kernel reaches neither wait nor signal, and P - 1 - p takes each of 0 .. P - 1 once.
    """
    return mutant.operator == "stages reversed" and not sources.reaches(
        mutant.function, sources.waits | sources.notifies
    )


def shared_otherwise(mutant: Mutant, sources: Sources) -> bool:
    """Which program goes on with which item: each item of the next list is still done once.

    Proved: the mutant changes the count given to `next_start`, which for any count starts each program at another one
    of 0 .. P - 1; and in the loop that name only begins a range or goes to `next_start` again.
    """
    file = sources.files[mutant.file]
    site = _node(mutant, file, ast.Call)
    call = file.parents[site] if site is not None else None
    if not isinstance(call, ast.Call) or called(call) != "next_start" or call.args[1] is not site:
        return False
    name = _first(call)
    loop = next((each for each in file.around(call) if isinstance(each, ast.For)), None)
    if loop is None or not name:
        return False
    begins = [
        n
        for part in loop.body
        for n in ast.walk(part)
        if isinstance(n, ast.Call) and called(n) in ("range", "next_start") and _first(n) == name
    ]
    stored = sum(
        name in _targets(n) for part in loop.body for n in ast.walk(part) if isinstance(n, ast.Assign)
    )
    return _count(loop.body, name) == len(begins) + stored and _bijective(sources)


def _bijective(sources: Sources) -> bool:
    """Whether `next_start` gives programs 0 .. P - 1 the numbers 0 .. P - 1, each once."""
    (body,) = [f for each in sources.files.values() for f in each.functions if f.name == "next_start"]
    plain = ast.parse(ast.unparse(body))
    assert isinstance(plain.body[0], ast.FunctionDef)
    plain.body[0].decorator_list.clear()
    scope: dict[str, Any] = {"tl": SimpleNamespace(maximum=max)}
    exec(compile(plain, "next_start", "exec"), scope)
    return all(
        sorted(scope["next_start"](start, count, programs) for start in range(programs)) == [*range(programs)]
        for programs in PROGRAMS
        for count in range(2 * programs + 2)
    )


CLASSES: dict[str, Check] = {
    "peers in another order": full_cycle,
    "not reached for an empty shard": not_reached,
    "no program waits": no_peer,
    "items shared otherwise": shared_otherwise,
}


def equivalence(mutant: Mutant, sources: Sources) -> str | None:
    """The class whose check proves the mutant equivalent, or None."""
    return next((name for name, check in CLASSES.items() if check(mutant, sources)), None)
