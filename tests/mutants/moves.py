"""Mutation operators that move statements: a signal before the stores it announces, a wait after the loads it gates."""

from __future__ import annotations

import ast
import copy
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

from .mutant import Mutant
from .operators import LINT, about, awaited, make, nodes, signature_gate, statement_calls
from .source import Edit, File, Sources, called, segments


class Place(NamedTuple):
    """A statement of a block that holds what is looked for, and the conditions left behind on the way there."""

    block: list[ast.stmt]
    at: int
    conditions: list[str]


def _places(file: File, statement: ast.stmt) -> Iterator[Place]:
    """The statement's own block, then the enclosing ones, out of `if` (with its condition) and, where the statement is
    all it does, out of `for`."""
    conditions: list[str] = []
    at: ast.stmt = statement
    while True:
        block = file.block_of(at)
        yield Place(block, block.index(at), list(conditions))
        parent = file.parents[at]
        if isinstance(parent, ast.If) and at in parent.body:
            conditions.insert(0, file.of(parent.test))
        elif not (isinstance(parent, ast.For) and block == [at] and not conditions):
            return
        assert isinstance(parent, ast.stmt)
        at = parent


def _does(sources: Sources, statement: ast.stmt, what: str) -> bool:
    """Whether a statement loads or stores anything itself, waits and signals apart."""
    others = sources.waits | sources.notifies
    names = {called(node) for node in ast.walk(statement)} - {""} - others
    return any(sources.reaches(name, {what}) for name in names)


def _indented(file: File, text: str, at: ast.stmt) -> str:
    """A statement's text as it stands in the block of `at`."""
    first, *rest = text.splitlines()
    body = textwrap.dedent("\n".join(rest)).splitlines()
    return "\n".join([first, *(" " * (at.col_offset + 4) + line for line in body)])


def notify_early(sources: Sources) -> Iterator[Mutant]:
    """Each signal, moved before the stores that it announces."""
    for file, node, _call in statement_calls(sources, sources.notifies):
        for block, index, conditions in _places(file, node):
            stores = [each for each in block[:index] if _does(sources, each, "store")]
            if stores and not conditions:
                moved = block[index]
                text = _indented(file, file.of(moved), stores[-1])
                start = file.span(stores[-1])[0]
                edits = (
                    file.replace(moved, "pass"),
                    Edit(file.name, start, start, text + "\n" + " " * stores[-1].col_offset),
                )
                early = "arrival before signature" if signature_gate(file, node) else "signal before store"
                yield make("notify early", file, node, "", early, edits=edits, after="before the store")
                break
    yield from _kept_early(sources)


def _kept_early(sources: Sources) -> Iterator[Mutant]:
    """Each signal that is kept to be sent after the next product: kept, and so sent, before the stores."""
    for file, keeps in nodes(sources):
        if not (isinstance(keeps, ast.Assign) and isinstance(keeps.targets[0], ast.Name)):
            continue
        name, function = keeps.targets[0].id, file.function_of(keeps)
        for sends in ast.walk(function) if function else ():
            if not (isinstance(sends, ast.If) and file.of(sends.test) == f"{name} >= 0"):
                continue
            block = file.block_of(sends)
            after = block[block.index(sends) + 1 :]
            if keeps in sends.body or not any(_does(sources, each, "store") for each in after):
                continue
            if {n.id for n in ast.walk(keeps.value) if isinstance(n, ast.Name)} <= {"tl"}:
                continue  # nothing is kept here
            start, text = file.span(sends)[0], file.of(keeps)
            early = Edit(file.name, start, start, text + "\n" + " " * sends.col_offset)
            edits = (file.replace(keeps, "pass"), early)
            yield make(
                "notify early", file, keeps, "", "signal before store", edits=edits, after="before the store"
            )


def wait_late(sources: Sources) -> Iterator[Mutant]:
    """Each wait, moved after the loads that it gates."""
    for file, node, call in statement_calls(sources, sources.waits):
        for block, index, conditions in _places(file, node):
            loads = [each for each in block[index + 1 :] if _does(sources, each, "load")]
            if loads:
                moved = node if conditions else block[index]
                last = loads[-1]
                indent = "\n" + " " * last.col_offset
                text = _indented(file, file.of(moved), last)
                if conditions:
                    text = "if " + " & ".join(f"({c})" for c in conditions) + ": " + file.of(node)
                end = file.span(last)[1]
                edits = (file.replace(moved, "pass"), Edit(file.name, end, end, indent + text))
                subject = f"wait for {awaited(file, node, call)} after load"
                yield make("wait late", file, node, "", subject, edits=edits, after="after the loads")
                break


def empty_shard(sources: Sources) -> Iterator[Mutant]:
    """Each arrival, signalled or waited for only where the shard has rows."""
    for file, node, call in statement_calls(sources, sources.waits | sources.notifies):
        function, name = file.function_of(node), called(call)
        assert function is not None
        parameters = [each.arg for each in function.args.args]
        looked_up = segments(function)
        if about(call) != "arrival" or not (looked_up or {"sizes", "sources", "M"} & set(parameters)):
            continue
        if looked_up or "sources" in parameters:
            table = file.of(looked_up[0].args[0]) if looked_up else "sources"
            text = _with_a_segment(file, node, call, name in sources.notifies, table)
        elif "sizes" not in parameters:
            text = f"if M > 0: {file.of(node)}"
        elif name in sources.notifies:
            own = "shard(sizes, signals.rank_of(peers), peers.world_size)[0]"
            text = f"if {own} > 0: {file.of(node)}"
        elif len(call.args) > 1:
            text = f"if shard(sizes, {file.of(call.args[1])}, peers.world_size)[0] > 0: {file.of(node)}"
        else:
            peer = "(signals.rank_of(peers) + each) % peers.world_size"
            pad = "\n" + " " * (node.col_offset + 4)
            text = (
                f"for each in range(1, peers.world_size):{pad}"
                f"if shard(sizes, {peer}, peers.world_size)[0] > 0:{pad}    signals.wait_arrival(peers, {peer})"
            )
        kind = "signal" if name in sources.notifies else "wait"
        yield make(f"empty shard: no {kind}", file, node, text, f"no {kind} of an empty shard")


def _with_a_segment(file: File, node: ast.stmt, call: ast.Call, notifies: bool, table: str) -> str:
    """The statement where this rank has rows for anybody, or the peer has some for this rank."""
    if notifies:
        return f"if tl.load({table} + peers.world_size) > 0: {file.of(node)}"
    has_rows = "tl.load({0} + {1} + 1) > tl.load({0} + {1})"
    if len(call.args) > 1:
        return f"if {has_rows.format(table, file.of(call.args[1]))}: {file.of(node)}"
    pad = "\n" + " " * (node.col_offset + 4)
    return (
        f"for each in range(1, peers.world_size):{pad}"
        f"peer = (signals.rank_of(peers) + each) % peers.world_size{pad}"
        f"if {has_rows.format(table, 'peer')}:{pad}    signals.wait_arrival(peers, peer)"
    )


def wait_in_loop(sources: Sources) -> Iterator[Mutant]:
    """Each wait before a matmul, moved into the matmul's loop over K."""
    for file, node, _call in statement_calls(sources, sources.waits):
        for block, index, conditions in _places(file, node):
            chain = next((c for each in block[index + 1 :] if (c := _dot_chain(sources, each))), None)
            if chain:
                edits = (file.replace(node, "pass"), *_gated(sources, file, node, chain, conditions))
                yield make(
                    "wait in K loop", file, node, "", "wait in loop", edits=edits, judges=LINT,
                    after="in the loop of " + called(chain[-1]),
                )  # fmt: skip
                break


def _dot_chain(sources: Sources, statement: ast.stmt) -> list[ast.Call]:
    """Calls that lead from a statement to the function that holds the loop over K, outermost first."""
    chain: list[ast.Call] = []
    at: ast.AST = statement
    while True:
        call = next(
            (n for n in ast.walk(at) if isinstance(n, ast.Call) and sources.reaches(called(n), {"dot"})), None
        )
        if call is None or called(call) == "dot":
            while chain and not _loops(_function(sources, called(chain[-1]))):
                chain.pop()
            return chain
        chain.append(call)
        at = _function(sources, called(call))


def _loops(function: ast.FunctionDef) -> list[ast.For]:
    return [n for n in ast.walk(function) if isinstance(n, ast.For)]


def _function(sources: Sources, name: str) -> ast.FunctionDef:
    return next(f for file in sources.files.values() for f in file.functions if f.name == name)


def _gated(
    sources: Sources, file: File, wait: ast.Expr, chain: list[ast.Call], conditions: list[str]
) -> tuple[Edit, ...]:
    """Copies of the chain's functions with the wait as the first statement of the last one's loop, called instead."""
    text = file.of(wait)
    if conditions:
        text = "if " + " & ".join(f"({c})" for c in conditions) + ": " + text
    (statement,) = ast.parse(text).body
    known = {"tl", "signals"} | set(sources.calls)
    names = sorted({n.id for n in ast.walk(statement) if isinstance(n, ast.Name)} - known)
    for n in ast.walk(statement):
        if isinstance(n, ast.Name) and n.id in names:
            n.id = f"gate_{n.id}"
    copies = []
    for depth, call in enumerate(chain):
        function = copy.deepcopy(_function(sources, called(call)))
        function.args.args += [ast.arg(f"gate_{name}") for name in names]
        function.args.defaults += [ast.Constant(None) for _ in names]  # what stands before them may have one
        function.name += "_gated"
        if depth + 1 < len(chain):
            inner = next(n for n in ast.walk(function) if called(n) == called(chain[depth + 1]))
            assert isinstance(inner, ast.Call)
            _redirect(inner, {f"gate_{name}": f"gate_{name}" for name in names})
        else:
            _loops(function)[0].body.insert(0, statement)
        copies.append(ast.unparse(ast.fix_missing_locations(function)))
    first = copy.deepcopy(chain[0])
    _redirect(first, {f"gate_{name}": name for name in names})
    outer = file.function_of(wait)
    assert outer is not None
    start = file.span(outer.decorator_list[0])[0] - 1  # of the @
    files = {"matmul.py", "tiles.py", *(_file(sources, called(call)) for call in chain)}
    modules = "".join(f"from .{name.removesuffix('.py')} import *\n" for name in sorted(files - {file.name}))
    new = modules + "\n" + "\n\n".join(reversed(copies)) + "\n\n"
    return file.replace(chain[0], ast.unparse(first)), Edit(file.name, start, start, new)


def _file(sources: Sources, name: str) -> str:
    """Where the function of this name stands."""
    return next(file.name for file in sources.files.values() for f in file.functions if f.name == name)


def _redirect(call: ast.Call, arguments: dict[str, str]) -> None:
    assert isinstance(call.func, ast.Name)
    call.func.id += "_gated"
    call.keywords += [ast.keyword(name, ast.Name(value, ast.Load())) for name, value in arguments.items()]
