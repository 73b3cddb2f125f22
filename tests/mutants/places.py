"""Mutation operators on who and where: the wrong peer, the wrong slot, the wrong flag."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .mutant import Mutant
from .operators import about, make, nodes
from .source import File, Sources, called

WORLD = ("world", "peers.world_size", "WORLD")
TABLES = ("data", "flags", "signatures")


def wrong_peer(sources: Sources) -> Iterator[Mutant]:
    """Each choice of a peer: the next one instead, or the same one at every step of a loop; each address of another."""
    for file, node in nodes(sources):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and file.of(node.right) in WORLD:
            left, world = file.of(node.left), file.of(node.right)
            subject = _chosen(sources, file, node)
            again = "signal to another, sent again"  # each data are sent before their signal, and once more after it
            if subject == "signal to another" and isinstance(node.left, ast.Name):
                subject = again  # taken out of what was kept: another peer's data of that number may be on their way
            yield make("wrong peer", file, node, f"({left} + 1) % {world}", subject)
            for step in (n for n in ast.walk(node.left) if isinstance(n, ast.Name) and n.id == "step"):
                same = again if subject == "signal to another" else subject
                edit = (file.replace(step, "1"),)
                yield make("same peer", file, node, "", same, edits=edit, after="step 1 always")
        elif isinstance(node, ast.BinOp) and (table := _table(node.left)):
            other = f"{file.of(node.left)} + ({file.of(node.right)} + 1) % peers.world_size"
            yield make("wrong peer", file, node, other, _addressed(file, node, table))


def _chosen(sources: Sources, file: File, node: ast.BinOp) -> str:
    """What a choice of a peer is given to: signals, waits, or addresses of data alone."""
    names = {called(each) for each in _given_to(file, node)}
    function = file.function_of(node)
    arrival = function is not None and "arriv" in function.name
    if names & sources.waits:
        if arrival:
            return "arrival of another"
        return "wait alone for another" if _only_waits(sources, file, node) else "wait for another"
    if names & sources.notifies:
        return "arrival to another" if arrival else "signal to another"
    return "data to another"


def _only_waits(sources: Sources, file: File, node: ast.AST) -> bool:
    """Whether the loop that chooses does nothing but wait: what is read afterwards does not follow the choice."""
    at = node
    while not isinstance(at, (ast.For, ast.FunctionDef)):
        at = file.parents[at]
    body = [part for each in at.body for part in (each.body if isinstance(each, ast.If) else [each])]
    effects = [each for each in body if not isinstance(each, ast.Assign)]
    return isinstance(at, ast.For) and all(
        isinstance(each, ast.Expr)
        and isinstance(each.value, ast.Call)
        and called(each.value) in sources.waits
        for each in effects
    )


def _given_to(file: File, node: ast.AST) -> Iterator[ast.Call]:
    """Calls that take this value, by itself or by the name that it is assigned to."""
    at: ast.AST = node
    while not isinstance(at, ast.stmt):
        at = file.parents[at]
        if isinstance(at, ast.Call):
            yield at
    function = file.function_of(node)
    if isinstance(at, ast.Assign) and at.value is node and function is not None:
        name = file.of(at.targets[0])
        for each in ast.walk(function):
            if isinstance(each, ast.Call) and name in [file.of(a) for a in each.args]:
                yield each
            elif (
                isinstance(each, ast.Assign)
                and _names(each.value, name)
                and not isinstance(each.value, ast.Call)
            ):
                later = file.of(
                    each.targets[0]
                )  # a value that holds it and others, taken apart where it is given
                yield from (c for c in ast.walk(function) if isinstance(c, ast.Call) and _names(c, later))


def _names(node: ast.AST, name: str) -> bool:
    return any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(node))


def _addressed(file: File, node: ast.AST, table: str) -> str:
    """Whose memory is taken for another's: of what, and to read or to write it."""
    function = file.function_of(node)
    if table == "flags":
        signals = function is not None and 'sem="release"' in file.of(function)
        return "flag at another" if signals else "flag of another"
    return "signature of another" if table == "signatures" else "slot of another"


def _table(node: ast.AST) -> str:
    if (
        isinstance(node, ast.Attribute)
        and node.attr in TABLES
        and isinstance(node.value, ast.Name)
        and node.value.id == "peers"
    ):
        return node.attr
    return ""


def wrong_slot(sources: Sources) -> Iterator[Mutant]:
    """Each slot of the other parity; each source's place the first one's; each flag the next one."""
    parameters = {
        f.name: [a.arg for a in f.args.args] for each in sources.files.values() for f in each.functions
    }
    for file, node in nodes(sources):
        name = called(node)
        if name == "slot":
            assert isinstance(node, ast.Call)
            other = f"({file.of(node)} + peers.slot_bytes * (1 - 2 * (tl.load(peers.epoch) & 1)))"
            yield make("wrong slot", file, node, other, "wrong slot")
        elif isinstance(node, ast.Call) and name in sources.waits | sources.notifies:
            side = "awaited" if name in sources.waits else "signalled"
            for argument, parameter in zip(node.args, parameters[name]):
                if parameter in ("chunk", "first") and not _is_row(file, node, parameter):
                    subject = f"flag of {about(node)}, {side}"
                    yield make("wrong flag", file, argument, f"{file.of(argument)} + 1", subject)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and _source(file, node.left):
            stands = "to_int64(0)" if called(node.left) == "to_int64" else "0"
            edit, subject = (file.replace(node.left, stands),), _placed(file, node)
            yield make("wrong place", file, node, "", subject, edits=edit, after="the first one's place")
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            if "parity * peers.world_size" in file.of(node.left):
                text = f"({file.of(node.right)} + 1) % peers.world_size"
                edit = (file.replace(node.right, text),)
                yield make("wrong place", file, node, "", "place of signature", edits=edit, after=text)
            elif file.of(node.right) == "chunk" and "flags_per_source" in file.of(node.left):
                edit = (file.replace(node.right, "chunk + 1"),)
                subject = f"flag {_side(file, node)}"
                yield make("wrong flag", file, node, "", subject, edits=edit, after="chunk + 1")


def _is_row(file: File, call: ast.Call, parameter: str) -> bool:
    """`wait_rows` counts rows, which only choose the flags."""
    return parameter == "first" and called(call) == "wait_rows"


def _source(file: File, node: ast.AST) -> bool:
    """Whether a factor says whose part of a memory is meant."""
    return file.of(node) in ("to_int64(rank)", "to_int64(offset)", "src", "rank_of(peers)")


def _side(file: File, node: ast.AST) -> str:
    """Whether a flag's address is computed to signal it or to await it."""
    function = file.function_of(node)
    return "signalled" if function is not None and 'sem="release"' in file.of(function) else "awaited"


def _placed(file: File, node: ast.BinOp) -> str:
    """What lies at this place: a flag, results, or data, to store or to read them."""
    function = file.function_of(node)
    assert function is not None
    if "flags_per_source" in file.of(node):
        spins = any(isinstance(each, ast.While) for each in ast.walk(function))
        return (
            f"place of flag {_side(file, node)}"
            if spins or "release" in file.of(function)
            else "place recorded"
        )
    calls = list(_given_to(file, node)) or list(_given_to_later(file, node))
    parameters = [each.arg for each in function.args.args]
    stores = [c for c in calls if called(c) in ("store", "copy_rows")]
    results = [c for c in stores if file.of(c.args[0]).split()[0] in parameters and called(c) == "store"]
    reads = [c for c in calls if called(c) == "load"]
    if reads and results:
        return "place of data read and results"
    if results:
        return "place of results"
    return "place of data stored" if stores else "place of data read"


def _given_to_later(file: File, node: ast.AST) -> Iterator[ast.Call]:
    """Calls with a name in their arguments that the node's statement computes."""
    at: ast.AST = node
    while not isinstance(at, ast.stmt):
        at = file.parents[at]
    function = file.function_of(node)
    if isinstance(at, ast.Assign | ast.AugAssign) and function is not None:
        target = at.targets[0] if isinstance(at, ast.Assign) else at.target
        for each in ast.walk(function):
            if isinstance(each, ast.Call) and each.lineno >= at.lineno:
                names = {n.id for a in each.args for n in ast.walk(a) if isinstance(n, ast.Name)}
                if file.of(target) in names:
                    yield each
