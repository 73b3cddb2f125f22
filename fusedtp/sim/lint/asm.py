"""PTX and amdgcn as a control flow graph, and questions of the kind "what can have happened since the last barrier".

Both are assembly with labels, branches and `.loc` lines; `Dialect` says which instruction is which.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from .mlir import Frames

_LABEL = re.compile(r"^(\$?[.\w$]+):")
_FILE = re.compile(r'^\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?')
_LOC = re.compile(r"^\.loc\s+(\d+)\s+(\d+)\s+\d+(.*)$")
_INLINED = re.compile(r"inlined_at (\d+) (\d+)")
_INLINE = re.compile(r"^// (begin|end) inline asm")
_AT = re.compile(r"([^\s@\[]+):(\d+):\d+")


@dataclass(frozen=True)
class Dialect:
    """Patterns, matched against an instruction without its predicate."""

    barrier: str
    store: str  # to global memory, by ordinary stores
    load: str  # from global memory, by ordinary loads and asynchronous copies
    release: str
    acquire: str
    branch: str  # group 1: the label
    leaves: str  # nothing follows it
    comment: str


PTX = Dialect(
    barrier=r"(bar|barrier)(\.cta)?\.(sync|red)",
    store=r"st\.(?!\S*(shared|local|release|param))\S*|red\.async|cp\.async\.bulk\S*\.global\S*shared",
    load=r"ld\.(?!\S*(shared|local|acquire|param|relaxed|volatile|const))\S*global|cp\.async\S*\.shared\S*\.global",
    release=r"(atom|red|st)\.\S*(release|acq_rel)|fence\.(acq_rel|sc)\.(gpu|sys)",
    acquire=r"(atom|ld)\.\S*(acquire|acq_rel)",
    branch=r"bra\S*\s+([$\w.]+)",
    leaves=r"bra\.uni|ret|exit|trap",
    comment="//",
)
AMD = Dialect(
    barrier=r"s_barrier",
    store=r"(global|buffer|flat)_store_",
    load=r"(global|buffer|flat)_load_(?!\S.* sc[01])",
    release=r"buffer_wbl2",
    acquire=r"buffer_inv",
    branch=r"s_c?branch\S*\s+([.\w$]+)",
    leaves=r"s_branch|s_endpgm|s_setpc",
    comment=";",
)


@dataclass(frozen=True)
class Instruction:
    text: str
    line: int
    frames: Frames
    predicate: str = ""

    def matches(self, pattern: str) -> bool:
        return re.match(pattern, self.text) is not None


@dataclass
class Block:
    instructions: list[Instruction] = field(default_factory=list)
    successors: list[int] = field(default_factory=list)


@dataclass
class Listing:
    dialect: Dialect
    blocks: list[Block]

    @property
    def instructions(self) -> list[Instruction]:
        return [one for block in self.blocks for one in block.instructions]

    def find(self, pattern: str) -> list[Instruction]:
        return [one for one in self.instructions if one.matches(pattern)]

    def pending(
        self, what: str, cleared_by: str, at: str, counts: Callable[[Instruction], bool] = lambda _: True
    ) -> list[tuple[Instruction, Instruction]]:
        """Pairs (first, then): on some path `then`, matching `at`, follows `first`, matching `what`, with nothing
        that matches `cleared_by` between them. One `first` for each `then`.
        """
        found: dict[int, tuple[Instruction, Instruction]] = {}
        entry: list[Instruction | None] = [None] * len(self.blocks)
        reached = [False] * len(self.blocks)
        todo = [0] if self.blocks else []
        while todo:
            number = todo.pop()
            reached[number] = True
            state = entry[number]
            for one in self.blocks[number].instructions:
                if one.matches(at) and state is not None:
                    found.setdefault(one.line, (state, one))
                if one.matches(cleared_by):
                    state = None
                elif one.matches(what) and counts(one):
                    state = one
            for successor in self.blocks[number].successors:
                if not reached[successor] or (state is not None and entry[successor] is None):
                    entry[successor] = entry[successor] or state
                    todo.append(successor)
        return [found[line] for line in sorted(found)]


class _Files:
    """`.file` and `.loc` directives."""

    def __init__(self, lines: list[str]) -> None:
        found = (m for line in lines if (m := _FILE.match(line.strip())))
        self.names = {m[1]: f"{m[2]}/{m[3]}" if m[3] else m[2] for m in found}

    def frames(self, directive: str) -> Frames | None:
        """Of a `.loc` line; None where it names no line."""
        m = _LOC.match(directive)
        if m is None or m[2] == "0":
            return None
        here = ((self.names.get(m[1], "?"), int(m[2])),)
        calls = tuple((self.names.get(f, "?"), int(line)) for f, line in _INLINED.findall(m[3]))
        if not calls and "@[" in m[3]:
            by_name = {name.rsplit("/", 1)[-1]: name for name in self.names.values()}
            calls = tuple((by_name.get(f, f), int(line)) for f, line in _AT.findall(m[3].split("@[", 1)[1]))
        return here + calls


def parse(text: str, dialect: Dialect) -> Listing:
    """Read PTX or amdgcn. Instructions that stand in one line within inline assembly are told apart.

    Inside inline assembly LLVM counts the `.loc` up line by line, so the one ahead of it holds for all of it.
    """
    lines = text.splitlines()
    files = _Files(lines)
    frames: Frames = ()
    inline = False
    blocks, labels, jumps = [Block()], {}, []
    for number, raw in enumerate(lines, 1):
        line = raw.strip()
        if m := _INLINE.match(line):
            inline = m[1] == "begin"
            continue
        if line.startswith(".loc"):
            frames = frames if inline else files.frames(line) or frames
            continue
        line = line.split(dialect.comment)[0].strip()
        if m := _LABEL.match(line):
            if blocks[-1].instructions:
                blocks.append(Block())
            labels[m[1]] = len(blocks) - 1
            line = line[m.end() :].strip()
        for part in line.split(";"):
            part = part.strip().lstrip("{").strip()
            if not part or part.startswith((".", "}", "/")):
                continue
            predicate, text_of = _predicated(part)
            one = Instruction(text_of, number, frames, predicate)
            blocks[-1].instructions.append(one)
            branch = re.match(dialect.branch, text_of)
            leaves = re.match(dialect.leaves, text_of) is not None and not predicate
            if branch:
                jumps.append((len(blocks) - 1, branch[1]))
            if branch or leaves:
                if not leaves:
                    blocks[-1].successors.append(len(blocks))
                blocks.append(Block())
                blocks[-1].successors = []
    for number, block in enumerate(blocks[:-1]):
        ended = block.instructions and (
            re.match(dialect.branch, block.instructions[-1].text)
            or (
                re.match(dialect.leaves, block.instructions[-1].text) and not block.instructions[-1].predicate
            )
        )
        if not ended:
            block.successors.append(number + 1)
    for number, label in jumps:
        if label in labels:
            blocks[number].successors.append(labels[label])
    return Listing(dialect, blocks)


def _predicated(text: str) -> tuple[str, str]:
    """(predicate, instruction) of a PTX instruction."""
    if text.startswith("@"):
        predicate, _, rest = text.partition(" ")
        return predicate, rest.strip()
    return "", text
