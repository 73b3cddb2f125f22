"""Triton's IR as text (TTIR, TTGIR) into operations, regions, values and source lines.

Only what the rules ask: which operation stands before which, in which loop, and what a value is computed from. MLIR's
printed form is the same from Triton 3.6 to 3.9 in all of this; its Python bindings are not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

Frames = tuple[tuple[str, int], ...]  # (file, line), the innermost call first

_LOC_DEF = re.compile(r"^#(loc\d*) = loc\((.*)\)$")
_TRAILING = re.compile(r" ?loc\((#loc\d*|.*)\)$")
_OP = re.compile(r'^(?:(?P<results>%[^=]*?) = )?"?(?P<name>[a-z_]+\.[a-z_0-9.]+)"?(?P<rest>.*)$')
_VALUE = re.compile(r"%[\w.$-]+(?:#\d+)?")
_CARRIED = re.compile(r"(%[\w.$-]+) = (%[\w.$-]+(?:#\d+)?)")
_ARGUMENT = re.compile(r"(%[\w.$-]+): ")


@dataclass(eq=False)
class Value:
    """An SSA value: `op` defines it, or it is an argument (of a function, a loop, a block)."""

    name: str
    op: Op | None = None
    sources: list[Value] = field(
        default_factory=list
    )  # what it is computed from, loops and branches included
    label: str = ""  # of an argument of the kernel: its name in the source


@dataclass(eq=False)
class Op:
    name: str
    text: str
    line: int
    parent: Op | None
    region: int = 0  # which region of the parent
    results: list[Value] = field(default_factory=list)
    operands: list[Value] = field(default_factory=list)
    body: list[Op] = field(default_factory=list)
    carried: list[list[Value]] = field(default_factory=list)  # arguments of each region
    frames: Frames = ()

    def enclosing(self) -> Iterator[Op]:
        op = self.parent
        while op is not None:
            yield op
            op = op.parent

    def walk(self) -> Iterator[Op]:
        for op in self.body:
            yield op
            yield from op.walk()

    def inside(self, other: Op) -> bool:
        return any(op is other for op in self.enclosing())

    @property
    def loop(self) -> bool:
        return self.name in ("scf.for", "scf.while")


@dataclass
class Module:
    ops: list[Op]  # in the order of the text
    aliases: dict[str, str]  # "#mma" -> what it stands for

    def named(self, *names: str) -> list[Op]:
        return [op for op in self.ops if op.name in names]

    @property
    def loops(self) -> list[Op]:
        return [op for op in self.ops if op.loop]


def behind(value: Value, through: object = None) -> list[Value]:
    """`value` and all it is computed from. Stops behind a value whose operation's name is in `through` (a set)."""
    stop = through if isinstance(through, (set, frozenset)) else frozenset()
    seen: dict[int, Value] = {}
    todo = [value]
    while todo:
        here = todo.pop()
        if id(here) in seen:
            continue
        seen[id(here)] = here
        if here.op is None or here.op.name not in stop:
            todo.extend(here.sources)
    return list(seen.values())


class _Locations:
    """The table of #loc definitions, resolved on demand to the lines of the source."""

    def __init__(self, lines: list[str]) -> None:
        self.table = {m[1]: m[2] for line in lines if (m := _LOC_DEF.match(line))}

    def frames(self, text: str) -> Frames:
        if text.startswith("#"):
            return self.frames(self.table.get(text[1:], "unknown"))
        if m := re.match(r"callsite\((.*) at (.*)\)$", text):
            return self.frames(m[1]) + self.frames(m[2])
        if m := re.match(r'"([^"]*)":(\d+):\d+', text):
            return ((m[1], int(m[2])),)
        if m := re.match(r'"[^"]*"\((.*)\)$', text):  # a name, around a location
            return self.frames(m[1])
        if m := re.match(r"fused.*?\[(.*?)[,\]]", text):
            return self.frames(m[1].strip())
        return ()


class _Reader:
    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        self.locations = _Locations(self.lines)
        self.module = Module([], {})
        self.open: list[Op] = []
        self.scopes: list[dict[str, Value]] = [{}]

    def read(self) -> Module:
        for number, raw in enumerate(self.lines, 1):
            line = raw.strip()
            if line.startswith("#"):
                name, _, meaning = line.partition(" = ")
                self.module.aliases[name] = meaning
                continue
            self.line(number, line)
        return self.module

    def line(self, number: int, line: str) -> None:
        body, location = self.split(line)
        if body.startswith("}"):
            self.close(body, location)
            return
        if body.startswith("^"):
            self.block(line)
            return
        if m := _OP.match(body):
            self.op(m, number, body, location)

    @staticmethod
    def split(line: str) -> tuple[str, str]:
        """An operation and its trailing location."""
        at = line.rfind(" loc(")
        if at < 0 or line.endswith("{"):
            return line, ""
        return line[:at], line[at + 5 : -1]

    def op(self, m: re.Match[str], number: int, body: str, location: str) -> None:
        name, rest = m["name"], m["rest"]
        parent = self.open[-1] if self.open else None
        op = Op(name, body, number, parent, max(0, len(parent.carried) - 1) if parent else 0)
        if name == "module" or name.startswith("builtin."):
            return
        self.module.ops.append(op)
        if parent is not None:
            parent.body.append(op)
        carried = _CARRIED.findall(rest) if op.loop else []
        if name == "tt.func":
            inputs: list[str] = []
        elif op.loop:
            inputs = [initial for _, initial in carried] + _VALUE.findall(rest.split(" iter_args(")[0])
        else:
            inputs = _VALUE.findall(rest)
        op.operands = [value for name in inputs if (value := self.find(name))]
        op.frames = self.locations.frames(location) if location else ()
        self.define(op, m["results"] or "")
        if body.endswith("{"):
            self.enter(op, rest, carried)
        else:
            self.flow(op)

    def define(self, op: Op, results: str) -> None:
        for item in filter(None, (r.strip() for r in results.split(","))):
            name, _, count = item.partition(":")
            for i in range(int(count or 1)):
                value = Value(f"{name}#{i}" if count else name, op)
                if not op.loop and op.name != "scf.if":
                    value.sources = list(op.operands)
                op.results.append(value)
                self.scopes[-1][value.name] = value

    def enter(self, op: Op, rest: str, carried: list[tuple[str, str]]) -> None:
        self.open.append(op)
        self.scopes.append({})
        arguments = []
        if op.name == "tt.func":
            for m in re.finditer(r"(%[\w.$-]+): (?:[^%]*?loc\(\"([^\"]*)\")?", rest):
                arguments.append(self.argument(m[1], label=m[2] or m[1][1:]))
        elif op.name == "scf.for":
            induction = rest.split("=")[0].strip()
            self.argument(induction).sources = op.operands[len(carried) :]
        for (name, _), initial in zip(carried, op.operands):
            value = self.argument(name)
            value.sources = [initial]
            arguments.append(value)
        op.carried.append(arguments)

    def argument(self, name: str, label: str = "") -> Value:
        value = Value(name, None, label=label)
        self.scopes[-1][name] = value
        return value

    def block(self, line: str) -> None:
        """Arguments of a block, as in `^bb0(%a: i32 loc(...), ...):`."""
        names = [m[1] for m in _ARGUMENT.finditer(line)]
        values = [self.argument(name) for name in names]
        if self.open and self.open[-1].name == "scf.while":
            loop = self.open[-1]
            for value, passed in zip(values, loop.carried[-1]):
                value.sources = list(passed.sources)
            loop.carried[-1] = values

    def close(self, body: str, location: str) -> None:
        if not self.open:
            return
        op = self.open[-1]
        self.scopes.pop()
        if not body.endswith("{"):  # else another region follows: `} else {`, `} do {`
            op.frames = self.locations.frames(location) if location else op.frames
            self.open.pop()
            return
        self.scopes.append({})
        if op.name == "scf.while":
            # stand-ins of what scf.condition passes, until the block's own names are read
            op.carried.append([Value(f"{r.name}'", None, sources=list(r.sources)) for r in op.results])
        else:
            op.carried.append([])

    def flow(self, op: Op) -> None:
        """What leaves a region comes out of its operation, or goes round the loop."""
        parent = op.parent
        if parent is None or op.name not in ("scf.yield", "scf.condition"):
            return
        passed = op.operands[1:] if op.name == "scf.condition" else op.operands
        targets = [parent.results]
        if op.name == "scf.yield" and parent.loop:
            targets = (
                [parent.carried[0]] if parent.name == "scf.while" else [parent.results, parent.carried[0]]
            )
        for values in targets:
            for target, source in zip(values, passed):
                target.sources.append(source)
        if parent.name == "scf.for":
            for result, initial in zip(parent.results, parent.operands):
                result.sources.append(initial)

    def find(self, name: str) -> Value | None:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return self.scopes[0].get(name)


def parse(text: str) -> Module:
    """Read a TTIR or TTGIR listing."""
    return _Reader(text).read()
