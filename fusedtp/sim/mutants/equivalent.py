"""Mutants that change nothing: classes of them, each with a check that proves it of a mutant's own source.

A class is asked only about a mutant that no schedule and no target showed; what no check proves is a survivor.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from .mutant import Mutant
from .source import File, Sources, called

Check = Callable[[Mutant, Sources], bool]
MANY = 2**31  # where a call's number wraps


def _node(mutant: Mutant, file: File, kind: type[ast.AST]) -> ast.AST | None:
    """The node at the mutant's site."""
    for node in ast.walk(file.tree):
        if isinstance(node, kind) and (getattr(node, "lineno", 0), getattr(node, "col_offset", -1)) == (
            mutant.line, mutant.column,
        ):  # fmt: skip
            return node
    return None


def full_cycle(mutant: Mutant, sources: Sources) -> bool:
    """A choice of peers whose loop goes round all ranks anyway: only where it starts has changed.

    Proved by enumeration for 2 to 8 ranks, and by the loop's variable having no other part in its body.
    """
    file = sources.files[mutant.file]
    node = _node(mutant, file, ast.BinOp)
    if mutant.operator != "wrong peer" or not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mod):
        return False
    loop = next((each for each in file.around(node) if isinstance(each, ast.For)), None)
    if loop is None or not isinstance(loop.target, ast.Name):
        return False
    step = loop.target.id
    uses = [n for part in loop.body for n in ast.walk(part) if isinstance(n, ast.Name) and n.id == step]
    inside = [n for n in ast.walk(node) if isinstance(n, ast.Name) and n.id == step]
    if len(uses) != len(inside):
        return False
    before, after = (_arithmetic(text) for text in (file.of(node), mutant.edits[0].text))
    bounds = _arithmetic(file.of(loop.iter))
    for world in range(2, 9):
        for rank in range(world):
            names = {"rank": rank, "world": world}
            steps = eval(bounds, {"range": range}, names)
            peers = [[eval(code, {}, {**names, step: i}) for i in steps] for code in (before, after)]
            if sorted(peers[0]) != sorted(peers[1]):
                return False
    return True


def _arithmetic(text: str) -> str:
    """A peer's expression with the kernel's ways to say rank and world made plain names."""
    return (
        text.replace("signals.rank_of(peers)", "rank")
        .replace("rank_of(peers)", "rank")
        .replace("peers.world_size", "world")
    )


def slots_renamed(mutant: Mutant, sources: Sources) -> bool:
    """The data slots under other names on every rank alike: of the other parity, or in the next rank's memory.

    Proved: one function alone reads the table of data, and what the mutant puts in place of the parity or of the rank
    takes each of their values once. (In a neighbour's memory the same things happen, only slower.)
    """
    file = sources.files[mutant.file]
    readers = [
        function.name
        for _file, function, each in sources.walk()
        if isinstance(each, ast.Attribute)
        and each.attr == "data"
        and getattr(each.value, "id", "") == "peers"
    ]
    if readers != [mutant.function]:
        return False
    if mutant.operator == "wrong peer":
        address = _node(mutant, file, ast.BinOp)
        if address is None or file.of(address) != "peers.data + rank":
            return False
        other = _arithmetic(mutant.edits[0].text.removeprefix("peers.data + "))
        worlds = {w: [eval(other, {}, {"rank": rank, "world": w}) for rank in range(w)] for w in range(2, 9)}
        return all(sorted(places) == list(range(w)) for w, places in worlds.items())
    number = _node(mutant, file, ast.Call)
    parity = file.parents[number] if number is not None else None
    if mutant.operator != "low epoch" or not isinstance(parity, ast.BinOp) or number is None:
        return False
    if file.of(parity).replace(file.of(number), "e") != "e & 1":
        return False
    numbers = [*range(-4, 5), *range(MANY - 4, MANY)]
    return all((e - 1) & 1 == 1 - (e & 1) for e in numbers)


def waits_at_its_end(mutant: Mutant, sources: Sources) -> bool:
    """The arrival of a rank whose shard is empty: nothing of it is read, and the launch waits for all before it ends.

    Proved: the kernel has a wait for every arrival that depends on no shard, only on which program asks.
    """
    if mutant.operator != "empty shard: no wait" or "wait_arrival(" not in mutant.before:
        return False
    return bool(_other_waits(mutant, sources))


def waited_for_by_others(mutant: Mutant, sources: Sources) -> bool:
    """An arrival that the programs of another stage of the same launch wait for too, and their failure ends this wait.

    Proved: the kernel's other stage waits for every arrival without a condition, and what this stage reads is gated
    by a wait of its own for that very data, after the one that the mutant changed.
    """
    file = sources.files[mutant.file]
    statement = _node(mutant, file, ast.Expr)
    if "wait_arrival(" not in mutant.before or not isinstance(statement, ast.Expr):
        return False
    loops = [each for each in file.around(statement) if isinstance(each, ast.For)]
    if not loops:
        return False
    gates = [n for n in ast.walk(loops[0]) if isinstance(n, ast.Call) and called(n) in sources.waits]
    others = [n for n in gates if n is not statement.value]
    branch = _branch(file, statement)
    return bool(others) and any(_branch(file, wait) is not branch for wait in _other_waits(mutant, sources))


def visited_by_others(mutant: Mutant, sources: Sources) -> bool:
    """The arrivals of empty shards, of which nothing is read and for which another stage waits one by one.

    Proved: in another stage a wait for an arrival stands in a loop without any condition, and by enumeration for 2 to 8
    ranks the loop goes through all peers.
    """
    file = sources.files[mutant.file]
    statement = _node(mutant, file, ast.Expr)
    if mutant.operator != "empty shard: no wait" or statement is None:
        return False
    branch = _branch(file, statement)
    for node in ast.walk(file.tree):
        if called(node) != "wait_arrival" or _branch(file, node) is branch or _branch(file, node) is None:
            continue
        assert isinstance(node, ast.Call)
        function = file.function_of(node)
        loop, *outer = [each for each in file.around(node) if isinstance(each, ast.For | ast.If | ast.While)]
        if function is None or function.name != mutant.function or not isinstance(loop, ast.For):
            continue
        if all(isinstance(each, ast.If) and "send_programs" in file.of(each.test) for each in outer):
            return _all_peers(file, loop, file.of(node.args[1]))
    return False


def _all_peers(file: File, loop: ast.For, name: str) -> bool:
    """Whether `name`, assigned in the loop's body, takes every other rank in turn."""
    for statement in loop.body:
        if isinstance(statement, ast.Assign) and file.of(statement.targets[0]) == name:
            peer, bounds, step = (
                _arithmetic(file.of(each)) for each in (statement.value, loop.iter, loop.target)
            )
            return all(
                sorted(
                    eval(peer, {}, {"rank": rank, "world": world, step: i})
                    for i in eval(bounds, {"range": range}, {"world": world})
                )
                == [other for other in range(world) if other != rank]
                for world in range(2, 9)
                for rank in range(world)
            )
    return False


def _other_waits(mutant: Mutant, sources: Sources) -> list[ast.AST]:
    """Waits for all arrivals in the same kernel that depend only on which program asks."""
    file = sources.files[mutant.file]
    found: list[ast.AST] = []
    for function in file.functions:
        if function.name != mutant.function:
            continue
        for node in ast.walk(function):
            if called(node) != "wait_all_arrivals":
                continue
            tests = [each.test for each in file.around(node) if isinstance(each, ast.If)]
            names = {n.id for test in tests for n in ast.walk(test) if isinstance(n, ast.Name)}
            looped = any(isinstance(each, ast.For | ast.While) for each in file.around(node))
            if not looped and names <= {"pid", "send_programs", "reduce_programs", "leader", "start", "tl"}:
                found.append(node)
    return found


def _branch(file: File, node: ast.AST) -> ast.AST | None:
    """The statement of the outermost stage branch that holds the node."""
    at: ast.AST | None = node
    while at is not None:
        parent = file.parents.get(at)
        if isinstance(parent, ast.If) and "send_programs" in file.of(parent.test):
            block = parent.body if at in parent.body else parent.orelse
            return block[0]
        at = parent
    return None


def no_peer(mutant: Mutant, sources: Sources) -> bool:
    """Another numbering of programs of which none waits for another: every tile is still done once.

    Proved: the kernel reaches neither wait nor signal, and P - 1 - p takes each of 0 .. P - 1 once.
    """
    return mutant.operator == "stages reversed" and not sources.reaches(
        mutant.function, sources.waits | sources.notifies
    )


def shared_otherwise(mutant: Mutant, sources: Sources) -> bool:
    """Which program goes on with which item: each item of the next list is still done once.

    Proved: the mutant changes the count given to `next_start`, which for every count up to 40 and up to 8 programs
    starts each program at another one of 0 .. P - 1.
    """
    file = sources.files[mutant.file]
    site = _node(mutant, file, ast.Call)
    call = file.parents[site] if site is not None else None
    if not isinstance(call, ast.Call) or called(call) != "next_start" or call.args[1] is not site:
        return False
    (body,) = [f for each in sources.files.values() for f in each.functions if f.name == "next_start"]
    plain = ast.parse(ast.unparse(body))
    assert isinstance(plain.body[0], ast.FunctionDef)
    plain.body[0].decorator_list.clear()
    scope: dict[str, Any] = {"tl": SimpleNamespace(maximum=max)}
    exec(compile(plain, "next_start", "exec"), scope)
    return all(
        sorted(scope["next_start"](start, count, programs) for start in range(programs))
        == list(range(programs))
        for programs in range(1, 9)
        for count in range(41)
    )


CLASSES: dict[str, Check] = {
    "peers in another order": full_cycle,
    "slots renamed": slots_renamed,
    "launch waits for all at its end": waits_at_its_end,
    "another stage waits for all": waited_for_by_others,
    "another stage visits all": visited_by_others,
    "no program waits": no_peer,
    "items shared otherwise": shared_otherwise,
}


def equivalence(mutant: Mutant, sources: Sources) -> str | None:
    """The class whose check proves the mutant equivalent, or None."""
    return next((name for name, check in CLASSES.items() if check(mutant, sources)), None)
