"""PTX text to instructions: operands with their registers, blocks between jumps, and the source lines of each.

    .loc 2 97 12, function_name ..., inlined_at 1 67 12     line 97 of file 2, called at line 67 of file 1
    @!%p3 ld.global.v2.b32 {%r1, %r2}, [%rd4 + 16];         guard, opcode, operands

Registers are numbered by width. Those of inline PTX in braces get numbers of their own, and so do its labels.
PTX ISA 8.8: section 4 (syntax), 5.2 (types), 6 (operands), 11.5 (.loc).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..faults import Site

WIDTHS = {"pred": 1, "8": 16, "16": 16, "32": 32, "64": 64}  # of a type's digits; no register has 8 bits
BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}


class UnsupportedPtx(ValueError):
    """An opcode, type or operand that the machine does not know; the message names it and its source line."""


class Reg(NamedTuple):
    """A register: its width (1 for a predicate) and its number among those of that width."""

    width: int
    number: int
    name: str


class Imm(NamedTuple):
    """A number as it is written."""

    text: str


class Special(NamedTuple):
    """%tid.x and the like, without the %."""

    name: str


class Symbol(NamedTuple):
    """A parameter, a label, a variable in shared memory."""

    name: str


class Vector(NamedTuple):
    """{a, b, ...}, or a|b."""

    items: tuple[Operand, ...]


class Address(NamedTuple):
    """[base + offset], and the coordinates of a tensor copy."""

    base: Operand
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()


Operand = Reg | Imm | Special | Symbol | Vector | Address


@dataclass(frozen=True)
class Instruction:
    """op: the opcode with its modifiers; guard: the predicate under which it is executed, if any."""

    op: str
    args: tuple[Operand, ...]
    site: Site
    text: str
    guard: Reg | None = None
    negated: bool = False
    parts: tuple[str, ...] = field(default=(), compare=False)

    @property
    def root(self) -> str:
        return self.parts[0]

    def has(self, *modifiers: str) -> bool:
        return any(each in self.parts for each in modifiers)

    def unsupported(self, why: str = "") -> UnsupportedPtx:
        reason = f" ({why})" if why else ""
        return UnsupportedPtx(
            f"the PTX machine does not know `{self.op}`{reason}\n    {self.text}\n    at {self.site}"
        )


@dataclass(frozen=True)
class Parameter:
    name: str
    size: int


@dataclass
class Listing:
    """A kernel's instructions in order.

    registers   how many there are of each width
    labels      name -> index of the instruction that follows
    threads     of a program
    """

    name: str
    parameters: list[Parameter]
    threads: int
    instructions: list[Instruction]
    labels: dict[str, int]
    registers: dict[int, int]


def parse(text: str) -> Listing:
    """The text's only kernel. Raises UnsupportedPtx for what is no instruction."""
    entry = re.search(r"^\.visible \.entry (\w+)\(", text, re.M)
    if entry is None:
        raise UnsupportedPtx("the text has no .visible .entry")
    begin = text.index("{", entry.end())
    head, body = text[entry.end() : begin], _enclosed(text[begin:])
    threads = re.search(r"\.(?:reqntid|maxntid) (\d+)", head)
    if threads is None:
        raise UnsupportedPtx(f"{entry[1]} does not say how many threads a program has")
    reader = _Reader(entry[1], dict(re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', text, re.M)))
    for statement in _statements(body):
        reader.read(statement)
    return Listing(
        entry[1],
        list(_parameters(head)),
        int(threads[1]),
        reader.instructions,
        reader.labels,
        {width: count for width, count in reader.counts.items() if count},
    )


def _enclosed(text: str) -> str:
    """What stands in the first braces, which may hold others, without comments."""
    depth, kept = 0, []
    for line in text.splitlines():
        kept.append(line.split("//")[0])
        depth += kept[-1].count("{") - kept[-1].count("}")
        if depth == 0:
            break
    return "\n".join(kept).strip()[1:-1]


def _parameters(head: str) -> Iterator[Parameter]:
    for line in head.splitlines():
        if found := re.search(r"\.param .*?\.([a-z])(\d+)\s.*?(\w+_param_\d+)(?:\[(\d+)\])?", line):
            yield Parameter(found[3], int(found[4] or 1) * BYTES[found[2]])


def _statements(body: str) -> Iterator[str]:
    """Instructions, labels, directives and the braces around inline PTX."""
    kept = ""
    for line in body.splitlines():
        line = line.strip()
        if line.startswith(".loc"):
            yield line
            continue
        kept = f"{kept} {line}".strip() if line else kept
        while kept:
            if kept[0] in "{}":
                yield kept[0]
                kept = kept[1:].lstrip()
            elif label := re.match(r"[$%\w]+:(?!:)", kept):
                yield label[0]
                kept = kept[label.end() :].lstrip()
            elif ";" in kept:
                statement, _, kept = kept.partition(";")
                yield statement.strip()
                kept = kept.lstrip()
            elif re.match(r"\.(pragma|section)", kept):
                kept = ""
            else:
                break


class _Reader:
    def __init__(self, name: str, files: dict[str, str]) -> None:
        self.name, self.files = name, files
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.counts = {1: 0, 16: 0, 32: 0, 64: 0}
        self.scopes: list[dict[str, Reg]] = [{}]
        self.families: dict[str, tuple[int, int]] = {}  # "%r" -> width, index of its first
        self.numbers = [0]  # of the open scopes
        self.opened = 0
        self.callers: dict[tuple[str, ...], tuple[str, ...]] = {}
        self.site = Site("", 0, name, 0)

    def read(self, statement: str) -> None:
        if statement == "{":
            self.opened += 1
            self.scopes.append({})
            self.numbers.append(self.opened)
        elif statement == "}":
            self.scopes.pop()
            self.numbers.pop()
        elif statement.startswith(".loc"):
            self._locate(statement)
        elif statement.startswith(".reg"):
            self._declare(statement)
        elif statement.endswith(":"):
            self.labels[self._label(statement[:-1])] = len(self.instructions)
        elif statement and not statement.startswith("."):
            self.instructions.append(self._instruction(statement))

    def _locate(self, statement: str) -> None:
        """Line 0 stands for no line: what came before holds on."""
        found = re.match(r"\.loc\s+(\d+) (\d+) (\d+)(?:.*inlined_at (\d+) (\d+) (\d+))?", statement)
        if found is None or found[2] == "0":
            return
        here, caller = found.groups()[:3], found.groups()[3:]
        if caller[0] is None:
            self.callers.pop(here, None)
        else:
            self.callers[here] = caller
        kernel, steps = here, 0
        while kernel in self.callers and steps < 100:
            kernel, steps = self.callers[kernel], steps + 1
        file = self.files.get(here[0], "")
        of_kernel = self.files.get(kernel[0], "")
        self.site = Site(
            file, int(here[1]), self.name, int(kernel[1]), "" if of_kernel == file else of_kernel
        )

    def _declare(self, statement: str) -> None:
        found = re.match(r"\.reg\s+\.([a-z]+)(\d*)(?:x\d)?\s+(.*)", statement, re.S)
        if found is None:
            raise UnsupportedPtx(f"`{statement}` at {self.site}")
        width = WIDTHS["pred" if found[1] == "pred" else found[2]]
        for name in found[3].split(","):
            if family := re.fullmatch(r"\s*([$%\w]+)<(\d+)>\s*", name):
                self.families[family[1]] = width, self.counts[width]
                self.counts[width] += int(family[2])
            else:
                self.scopes[-1][name.strip()] = Reg(width, self.counts[width], name.strip())
                self.counts[width] += 1

    def _label(self, name: str) -> str:
        return name if self.numbers[-1] == 0 else f"{name}@{self.numbers[-1]}"

    def _instruction(self, statement: str) -> Instruction:
        text, guard, negated = statement, None, False
        if statement.startswith("@"):
            word, statement = statement.split(None, 1)
            negated = word[1] == "!"
            found = self._register(word.lstrip("@!"))
            assert found is not None, text
            guard = found
        matched = re.match(r"([a-z][\w.:]*)\s*(.*)", statement, re.S)
        if matched is None:
            raise UnsupportedPtx(f"`{text}` is no instruction, at {self.site}")
        op = matched[1]
        made = Instruction(op, (), self.site, " ".join(text.split()), guard, negated, tuple(op.split(".")))
        jumps = made.root in ("bra", "call", "brx")
        args = tuple(self._operand(each, jumps, made) for each in _split(matched[2]))
        return replace(made, args=args)

    def _operand(self, text: str, jumps: bool, of: Instruction) -> Operand:
        if text.startswith("{"):
            return Vector(tuple(self._operand(each, jumps, of) for each in _split(text[1:-1])))
        if text.startswith("["):
            return self._address(text[1:-1].strip(), of)
        if "|" in text:
            return Vector(tuple(self._operand(each.strip(), jumps, of) for each in text.split("|")))
        if (register := self._register(text)) is not None:
            return register
        if text.startswith("%"):
            return Special(text[1:])
        if re.match(r"[-\d]", text):
            return Imm(text)
        if jumps:
            own = self._label(text)
            return Symbol(own if own in self.labels or self.numbers[-1] else text)
        return Symbol(text)

    def _address(self, text: str, of: Instruction) -> Address:
        parts = _split(text)
        found = re.fullmatch(r"(\S+?)\s*(?:\+\s*(-?\w+))?", parts[0])
        if found is None:
            raise of.unsupported(f"address [{text}]")
        rest = [self._operand(each, False, of) for each in parts[1:]]
        coordinates = tuple(x for each in rest for x in (each.items if isinstance(each, Vector) else (each,)))
        return Address(self._operand(found[1], False, of), int(found[2] or "0", 0), coordinates)

    def _register(self, text: str) -> Reg | None:
        for scope in reversed(self.scopes):
            if text in scope:
                return scope[text]
        if (found := re.fullmatch(r"([$%_a-zA-Z]\w*?)(\d+)", text)) and found[1] in self.families:
            width, first = self.families[found[1]]
            return Reg(width, first + int(found[2]), text)
        return None


def _split(text: str) -> list[str]:
    """At commas outside of brackets."""
    found, depth, current = [], 0, ""
    for letter in text:
        depth += (letter in "{[(") - (letter in "}])")
        if letter == "," and not depth:
            found.append(current.strip())
            current = ""
        else:
            current += letter
    if current.strip():
        found.append(current.strip())
    return found
