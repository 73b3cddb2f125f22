"""Parses the inputs of the rules: a kernel's TTIR, which is close to its source, and its PTX or amdgcn.

    Source     operations with their data flow, their loops, and whether their addresses are peers'
    Listing    instructions in blocks, with their loops and source lines

Both identify an operation by its `Frames`, so a rule can match an operation of the source with its compiled code. The
parts of MLIR's printed form used here are the same from Triton 3.6 to 3.9; its Python bindings are not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

Frames = tuple[tuple[str, int], ...]  # (file, line), the innermost call first

# -- the source as TTIR ------------------------------------------------------------------------------------------------

_OP = re.compile(r'^(?:(?P<results>%[^=]*?) = )?"?(?P<name>[a-z_]+\.[a-z_0-9.]+)"?(?P<rest>.*)$')
_VALUE = re.compile(r"%[\w.$-]+(?:#\d+)?")
_CARRIED = re.compile(r"(%[\w.$-]+) = (%[\w.$-]+(?:#\d+)?)")
_LABEL = re.compile(r"(%[\w.$-]+): (?:[^%]*?loc\(\"([^\"]*)\")?")
LOADS = ("tt.load", "tt.descriptor_load", "tt.descriptor_gather")
ATOMICS = ("tt.atomic_rmw", "tt.atomic_cas", "tt.atomic_load", "tt.atomic_store", "tt.atomic_poll")
DOTS = ("tt.dot", "tt.dot_scaled")


@dataclass(eq=False)
class Value:
    """An SSA value: defined by `op`, or an argument. sources: the values it is computed from, also through loops."""

    op: Op | None = None
    sources: list[Value] = field(default_factory=list)
    label: str = ""  # for an argument of the kernel: its name in the source


@dataclass(eq=False)
class Op:
    name: str
    text: str
    parent: Op | None
    frames: Frames
    operands: list[Value]
    results: list[Value]
    arguments: list[Value] = field(default_factory=list)  # loop-carried values
    passed: list[Value] = field(default_factory=list)  # values passed to the body of an scf.while

    @property
    def loops(self) -> list[Op]:
        """The enclosing loops, the innermost first."""
        above = [self.parent] if self.parent else []
        while above and above[-1].parent:
            above.append(above[-1].parent)
        return [op for op in above if op.name in ("scf.for", "scf.while")]

    @property
    def order(self) -> tuple[bool, bool, bool]:
        """For an atomic: whether it acquires, whether it releases, whether its scope is the system."""
        words = set(re.findall(r"\w+", _VALUE.sub("", self.text)))
        both = "acq_rel" in words
        return both or "acquire" in words, both or "release" in words, "sys" in words


def behind(value: Value, stop: tuple[str, ...] = ()) -> list[Value]:
    """`value` and all values it is computed from; does not go past operations named in `stop`."""
    seen: dict[int, Value] = {}
    todo = [value]
    while todo:
        here = todo.pop()
        if id(here) not in seen:
            seen[id(here)] = here
            if here.op is None or here.op.name not in stop:
                todo.extend(here.sources)
    return list(seen.values())


class Source:
    """Parsed TTIR. shared: arguments that point to memory that other ranks access too."""

    def __init__(self, text: str, shared: tuple[str, ...] = ()) -> None:
        self.shared = shared
        self.ops: list[Op] = []
        self._open: list[Op] = []
        self._scopes: list[dict[str, Value]] = [{}]
        lines = text.splitlines()
        locations = (re.match(r"#(loc\d*) = loc\((.*)\)$", line) for line in lines)
        self._places = {m[1]: m[2] for m in locations if m}
        for line in lines:
            self._read(line.strip())

    def named(self, *names: str) -> list[Op]:
        return [op for op in self.ops if op.name in names]

    def peers(self, op: Op) -> bool:
        """Whether the operation's address may be a peer's: it was read from memory, or comes from a shared argument."""
        reads = (*LOADS, *ATOMICS)
        for value in behind(op.operands[0], reads) if op.operands else ():
            if value.label and value.label.partition(".")[0] in self.shared:
                return True
            table = value.op is not None and value.op.name == "tt.int_to_ptr" and value.op.operands
            if table and any(v.op is not None and v.op.name in LOADS for v in behind(table[0], reads)):
                return True
        return False

    def _read(self, line: str) -> None:
        at = line.rfind(" loc(")
        body, location = (line, "") if at < 0 or line.endswith("{") else (line[:at], line[at + 5 : -1])
        if body.startswith("}"):
            self._scopes.pop() if len(self._scopes) > 1 else None
            if body.endswith("{"):  # another region follows: `} else {`, `} do {`
                self._scopes.append({})
            elif self._open:
                self._open.pop()
        elif line.startswith("^"):  # arguments of the body of an scf.while
            for (name, _), value in zip(_LABEL.findall(line), self._open[-1].passed):
                self._scopes[-1][name] = Value(sources=[value])
        elif (m := _OP.match(body)) and m["name"] != "module":
            self._operation(m, body, location)

    def _operation(self, m: re.Match[str], body: str, location: str) -> None:
        name, rest = m["name"], m["rest"]
        bounds, _, entry = rest.partition(" iter_args(") if name == "scf.for" else ("", "", rest)
        carried = _CARRIED.findall(entry) if name in ("scf.for", "scf.while") else []
        inputs = [initial for _, initial in carried] + _VALUE.findall(bounds or ("" if carried else rest))
        operands = [value for each in inputs if (value := self._find(each))]
        parent = self._open[-1] if self._open else None
        op = Op(name, body, parent, self._frames(location), operands, [])
        self.ops.append(op)
        for item in filter(None, (each.strip() for each in (m["results"] or "").split(","))):
            result, _, count = item.partition(":")
            for i in range(int(count or 1)):
                op.results.append(Value(op, [] if body.endswith("{") else list(operands)))
                self._scopes[-1][f"{result}#{i}" if count else result] = op.results[-1]
        if body.endswith("{"):
            self._open.append(op)
            self._scopes.append({})
            if name == "tt.func":
                named = _LABEL.findall(rest)
                self._scopes[-1] = {each: Value(label=label or each[1:]) for each, label in named}
            if name == "scf.for":
                self._scopes[-1][rest.split("=")[0].strip()] = Value(sources=operands[len(carried) :])
            for (each, _), initial in zip(carried, operands):
                op.arguments.append(Value(sources=[initial]))
                self._scopes[-1][each] = op.arguments[-1]
            for result, initial in zip(op.results, operands[: len(carried)]):
                result.sources.append(initial)
        elif parent and name == "scf.condition":
            parent.passed = operands[1:]
            self._flow(operands[1:], parent.results)
        elif parent and name == "scf.yield":
            self._flow(operands, parent.arguments)
            self._flow(operands, parent.results if parent.name != "scf.while" else [])

    @staticmethod
    def _flow(values: list[Value], targets: list[Value]) -> None:
        for target, value in zip(targets, values):
            target.sources.append(value)

    def _find(self, name: str) -> Value | None:
        return next((scope[name] for scope in reversed(self._scopes) if name in scope), None)

    def _frames(self, text: str) -> Frames:
        if text.startswith("#"):
            return self._frames(self._places.get(text[1:], "unknown"))
        if m := re.match(r"callsite\((.*) at (.*)\)$", text):
            return self._frames(m[1]) + self._frames(m[2])
        if m := re.match(r'"([^"]*)":(\d+):\d+', text):
            return ((m[1], int(m[2])),)
        if m := re.match(r'"[^"]*"\((.*)\)$', text) or re.match(r"fused.*?\[(.*?)[,\]]", text):
            return self._frames(m[1].strip())  # a named location, or the first of several
        return ()


# -- the compiled code -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dialect:
    """Patterns that are matched against an instruction without its predicate."""

    barrier: str
    store: str  # ordinary stores to global memory
    load: str  # ordinary loads and asynchronous copies from global memory
    release: str
    acquire: str
    system: str  # searched in a release or acquire: system scope
    branch: str  # group 1: the label
    leaves: str  # does not fall through
    comment: str


PTX = Dialect(
    barrier=r"(bar|barrier)(\.cta)?\.(sync|red)",
    store=r"st\.(?!\S*(shared|local|release|param))\S*|red\.async|cp\.async\.bulk\S*\.global\S*shared",
    load=r"ld\.(?!\S*(shared|local|acquire|param|relaxed|volatile|const))\S*global|cp\.async\S*\.shared\S*\.global",
    release=r"(atom|red|st)\.\S*(release|acq_rel)|fence\.(acq_rel|sc)\.(gpu|sys)",
    acquire=r"(atom|ld)\.\S*(acquire|acq_rel)",
    system=r"\.sys",
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
    system=r"sc0 sc1",
    branch=r"s_c?branch\S*\s+([.\w$]+)",
    leaves=r"s_branch|s_endpgm|s_setpc",
    comment=";",
)
_FILE = re.compile(r'^\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?')
_LOC = re.compile(r"^\.loc\s+(\d+)\s+(\d+)\s+\d+(.*)$")
_INLINED = re.compile(r"inlined_at (\d+) (\d+)")
_AT = re.compile(r"([^\s@\[]+):(\d+):\d+")


@dataclass(frozen=True)
class Instruction:
    text: str
    line: int
    frames: Frames
    block: int

    def matches(self, pattern: str) -> bool:
        return re.match(pattern, self.text) is not None


@dataclass
class Block:
    """loop: header of the innermost enclosing loop."""

    instructions: list[Instruction] = field(default_factory=list)
    successors: list[int] = field(default_factory=list)
    label: str = ""
    loop: str = ""


class Listing:
    """PTX or amdgcn as a control flow graph. Loops are taken from LLVM's comments on blocks."""

    def __init__(self, text: str, dialect: Dialect) -> None:
        self.dialect = dialect
        self.blocks = [Block()]
        self.parents: dict[str, str] = {}  # header of a loop -> header of the enclosing loop
        self._lines = text.splitlines()
        files = (m for line in self._lines if (m := _FILE.match(line.strip())))
        self._files = {m[1]: f"{m[2]}/{m[3]}" if m[3] else m[2] for m in files}
        self._parse()
        self._places: dict[Frames, list[Instruction]] = {}
        for one in self.instructions:
            self._places.setdefault(one.frames, []).append(one)

    @property
    def instructions(self) -> Iterator[Instruction]:
        for block in self.blocks:
            yield from block.instructions

    def find(self, pattern: str) -> list[Instruction]:
        return [one for one in self.instructions if one.matches(pattern)]

    def of(self, op: Op, pattern: str) -> list[Instruction]:
        """The compiled instructions of an operation. PTX keeps at most the two innermost frames of a line."""
        ends = (op.frames[:n] for n in range(1, len(op.frames) + 1))
        return [one for end in ends for one in self._places.get(end, ()) if one.matches(pattern)]

    def loops(self, one: Instruction) -> list[str]:
        """Headers of the loops around an instruction, the innermost first, then "" for the kernel."""
        found = [self.blocks[one.block].loop]
        while found[-1]:
            found.append(self.parents.get(found[-1], ""))
        return found

    def ahead(self, one: Instruction, loop: str) -> bool:
        """Whether a load of the same source line occurs before a loop, in its enclosing loop, as pipeliners emit it."""
        first = next(k for k, block in enumerate(self.blocks) if block.label == loop)
        return any(
            other.block < first and self.blocks[other.block].loop == self.parents.get(loop, "")
            for other in self._places[one.frames]
            if other.matches(self.dialect.load)
        )

    def _parse(self) -> None:
        frames: Frames = ()
        inline = False  # LLVM increments `.loc` within inline assembly: keep the one before it
        labels: dict[str, int] = {}
        jumps: list[tuple[int, str]] = []
        for number, raw in enumerate(self._lines, 1):
            line, _, comment = raw.strip().partition(self.dialect.comment)
            if line.startswith(".loc"):
                frames = frames if inline else self._place(raw.strip()) or frames
                continue
            if line.startswith(("$L__tmp", ".Ltmp")):
                continue
            if comment.startswith((" begin inline asm", " end inline asm")):
                inline = comment.startswith(" begin")
            m = re.match(r"(?:\$L__|\.L|\$)?([.\w$]+):", line)
            if m or comment.startswith(" %bb."):
                if self.blocks[-1].instructions:
                    self._begin(True)
                if not m or m[1].startswith("BB"):  # otherwise a label of inline assembly: the loop continues
                    self.blocks[-1].loop = ""
            if m:
                self.blocks[-1].label = self.blocks[-1].label or m[1]
                labels[m[0][:-1]] = len(self.blocks) - 1
            self._loop(comment)
            for part in (line[m.end() :] if m else line).split(";"):
                part = part.strip().lstrip("{").strip()
                if not part or part.startswith((".", "}", "/")):
                    continue
                guard, _, rest = part.partition(" ") if part.startswith("@") else ("", "", part)
                one = Instruction(rest.strip(), number, frames, len(self.blocks) - 1)
                self.blocks[-1].instructions.append(one)
                branch = re.match(self.dialect.branch, one.text)
                leaves = one.matches(self.dialect.leaves) and not guard
                if branch:
                    jumps.append((one.block, branch[1]))
                if branch or leaves:
                    self._begin(not leaves)
        for block, label in jumps:
            if label in labels:
                self.blocks[block].successors.append(labels[label])

    def _begin(self, follows: bool) -> None:
        if follows:
            self.blocks[-1].successors.append(len(self.blocks))
        self.blocks.append(Block(loop=self.blocks[-1].loop))

    def _loop(self, comment: str) -> None:
        """`in Loop: Header=BB0_6 Depth=1`; for a header, `Parent Loop BB0_6 Depth=1`s, then `=> This Loop Header`."""
        block = self.blocks[-1]
        if block.instructions:
            return
        if m := re.search(r"(?:in Loop: Header=|Parent Loop )(BB\w+)", comment):
            block.loop = m[1]
        elif "Loop Header: Depth" in comment:
            self.parents[block.label], block.loop = block.loop, block.label

    def _place(self, directive: str) -> Frames:
        """The source lines of a `.loc`; () if it names none."""
        m = _LOC.match(directive)
        if m is None or m[2] == "0":
            return ()
        calls = tuple((self._files.get(file, "?"), int(line)) for file, line in _INLINED.findall(m[3]))
        if not calls and "@[" in m[3]:
            by_name = {name.rsplit("/", 1)[-1]: name for name in self._files.values()}
            calls = tuple((by_name.get(f, f), int(line)) for f, line in _AT.findall(m[3].split("@[", 1)[1]))
        return ((self._files.get(m[1], "?"), int(m[2])), *calls)


# -- what rules say ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """A broken rule.

    line     the offending line of the compiled code or the TTIR
    frames   its source location: (file, line), the innermost call first
    """

    rule: str
    message: str
    line: str = ""
    frames: Frames = ()

    @property
    def source(self) -> str:
        return " < ".join(f"{Path(file).name}:{line}" for file, line in self.frames)

    def __str__(self) -> str:
        where = f" at {self.source}" if self.frames else ""
        return f"{self.rule}: {self.message}{where}" + (f"\n    {self.line.strip()}" if self.line else "")
