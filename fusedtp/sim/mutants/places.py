"""Mutation operators on who and where: the wrong peer, the wrong slot, the wrong flag."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .mutant import Mutant
from .operators import make, nodes
from .source import File, Sources, called

WORLD = ("world", "peers.world_size", "WORLD")
TABLES = ("data", "flags", "signatures")


def wrong_peer(sources: Sources) -> Iterator[Mutant]:
    """Each choice of a peer: the next one instead, or the same one at every step of a loop; each address of another."""
    for file, node in nodes(sources):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and file.of(node.right) in WORLD:
            left, world = file.of(node.left), file.of(node.right)
            yield make("wrong peer", file, node, f"({left} + 1) % {world}", "wrong peer")
            steps = [n for n in ast.walk(node.left) if isinstance(n, ast.Name) and n.id == "step"]
            for step in steps:
                edit = (file.replace(step, "1"),)
                yield make("same peer", file, node, "", "wrong peer", edits=edit, after="step 1 always")
        elif isinstance(node, ast.BinOp) and _table(node.left):
            other = f"{file.of(node.left)} + ({file.of(node.right)} + 1) % peers.world_size"
            yield make("wrong peer", file, node, other, "wrong peer")


def _table(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr in TABLES
        and isinstance(node.value, ast.Name)
        and node.value.id == "peers"
    )


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
            for argument, parameter in zip(node.args, parameters[name]):
                if parameter in ("chunk", "first") and not _is_row(file, node, parameter):
                    yield make("wrong flag", file, argument, f"{file.of(argument)} + 1", "wrong flag")
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and _source(file, node.left):
            stands = "wide(0)" if called(node.left) == "wide" else "0"
            edit = (file.replace(node.left, stands),)
            yield make(
                "wrong place", file, node, "", "wrong place", edits=edit, after="the first one's place"
            )
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            if "parity * peers.world_size" in file.of(node.left):
                text = f"({file.of(node.right)} + 1) % peers.world_size"
                edit = (file.replace(node.right, text),)
                yield make("wrong place", file, node, "", "wrong signature place", edits=edit, after=text)
            elif file.of(node.right) == "chunk" and "flags_per_source" in file.of(node.left):
                edit = (file.replace(node.right, "chunk + 1"),)
                yield make("wrong flag", file, node, "", "wrong flag", edits=edit, after="chunk + 1")


def _is_row(file: File, call: ast.Call, parameter: str) -> bool:
    """`wait_rows` counts rows, which only choose the flags."""
    return parameter == "first" and called(call) == "wait_rows"


def _source(file: File, node: ast.AST) -> bool:
    """Whether a factor says whose part of a memory is meant."""
    return file.of(node) in ("wide(rank)", "wide(offset)", "src", "rank_of(peers)")
