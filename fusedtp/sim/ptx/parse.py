"""Parses PTX text into instructions, with operands, registers, labels and source lines.

    .loc 2 97 12, function_name ..., inlined_at 1 67 12     line 97 of file 2, called at line 67 of file 1
    @!%p3 ld.global.v2.b32 {%r1, %r2}, [%rd4 + 16];         guard, opcode, operands

Registers are numbered by width. Registers and labels that inline PTX declares in braces get separate numbers: a name
refers to its declaration in the innermost enclosing braces. Variables in shared memory are placed after the kernel's
own, those in local memory at addresses from 0, constants of the module at addresses from CONSTANTS.
PTX ISA 8.8: section 4 (syntax), 5.2 (types), 5.4.2 (vectors), 6 (operands), 11.5 (.loc).
"""

from __future__ import annotations

import ast
import linecache
import re
from collections import ChainMap
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple

from ..faults import Site

WIDTHS = {"pred": 1, "8": 16, "16": 16, "32": 32, "64": 64}  # by the digits of a type; no register has 8 bits
# a .loc or .section line, a brace, a label, or a statement that ends with a semicolon
STATEMENT = re.compile(r"\s*(\.(?:loc|section)\s[^\n]*|[{}]|[$%\w]+:(?!:)|[^;]+);?")
LOC = (".loc ", ".loc\t")
LOCAL, CONSTANTS = 1 << 56, 1 << 57  # first generic address of each


class UnsupportedPtx(ValueError):
    """An opcode, type or operand that the machine does not support; the message names it and its source line."""


class Reg(NamedTuple):
    """A register: its width (1 for a predicate) and its number among registers of that width."""

    width: int
    number: int
    name: str


class Imm(NamedTuple):
    text: str  # the number as written


class Special(NamedTuple):
    name: str  # such as %tid.x, without the %


class Symbol(NamedTuple):
    name: str  # a parameter, a label, or a variable in shared memory


class Vector(NamedTuple):
    items: tuple[Operand, ...]  # {a, b, ...}, or a|b


class Address(NamedTuple):
    """[base + offset], with the coordinates of a tensor copy."""

    base: Operand
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()


Operand = Reg | Imm | Special | Symbol | Vector | Address


@dataclass(frozen=True)
class Instruction:
    """An instruction of a kernel."""

    op: str  # the opcode with its modifiers
    args: tuple[Operand, ...]
    site: Site
    text: str
    guard: Reg | None = None  # its predicate, if any
    negated: bool = False
    note: str = ""  # for a call: the string that its first argument points to

    @cached_property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.op.split("."))

    @property
    def root(self) -> str:
        return self.parts[0]

    def has(self, *modifiers: str) -> bool:
        return any(each in self.parts for each in modifiers)

    def among(self, modifiers: Iterable[str], default: str = "") -> str:
        """The first part of the opcode that is one of these modifiers."""
        return next((part for part in self.parts if part in modifiers), default)

    def unsupported(self, why: str = "") -> UnsupportedPtx:
        reason = f" ({why})" if why else ""
        return UnsupportedPtx(f"the PTX machine does not know `{self.op}`{reason}\n    {self.text}\n    at {self.site}")


@dataclass
class Listing:
    """A kernel's instructions in order."""

    name: str
    parameters: dict[str, int]  # size of each in bytes
    threads: int  # per program
    instructions: list[Instruction]
    labels: dict[str, int]  # index of the next instruction
    registers: dict[int, int]  # number of registers by width
    shared: int  # bytes per program, including variables that the text declares
    local: int  # bytes per thread
    constants: bytes  # the constants of the module


def parse(text: str, shared: int = 0) -> Listing:
    """Parses the only kernel of the text. shared: bytes of shared memory. Raises UnsupportedPtx for unknown syntax."""
    entry = re.search(r"^\.visible \.entry (\w+)\(", text, re.M)
    if entry is None:
        raise UnsupportedPtx("the text has no .visible .entry")
    begin = text.index("{", entry.end())
    name, head, body = entry[1], text[entry.end() : begin], _enclosed(text[begin:])
    threads = re.search(r"\.(?:reqntid|maxntid) (\d+)", head)
    if threads is None:
        raise UnsupportedPtx(f"{name} has neither .reqntid nor .maxntid: threads per program are unknown")
    declared = re.findall(r"\.param .*?\.[a-z](\d+)\s.*?(\w+_param_\d+)(?:\[(\d+)\])?", head)
    parameters = {each: int(bits) // 8 * int(count or 1) for bits, each, count in declared}
    reader = _Reader(name, dict(re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', text, re.M)), shared)
    tables = _tables(text)
    constants = b""
    for key, table in tables.items():
        if key.startswith("assert"):  # a string; no load reads it
            continue
        constants += bytes(-len(constants) % 16)
        reader.names[key] = Imm(str(CONSTANTS + len(constants)))
        constants += table
    for statement in STATEMENT.findall(body):
        reader.read(statement.strip())
    reader.finish({key: table.decode(errors="replace").rstrip("\0") for key, table in tables.items()})
    found, size = (reader.instructions, reader.labels, reader.counts), reader.sizes
    return Listing(name, parameters, int(threads[1]), *found, size["shared"], size["local"], constants)


def _enclosed(text: str) -> str:
    """The text inside the first pair of braces, which may be nested, without comments.

    Note [Lines of inline PTX]. LLVM increments the source line with each line of an inline statement, and Triton emits
    loads as inline PTX. So a .loc inside a statement is a real source line only if it is the first line there.
    """
    depth, kept, located = 0, [], -1
    for line in text.splitlines():
        if line.strip().startswith(("// begin inline asm", "// end inline asm")):
            located = 0 if "begin" in line else -1
        elif located >= 0:
            located += 1
            if located > 1 and line.strip().startswith(LOC):
                continue
        kept.append(re.sub(r"/\*.*?\*/", " ", line).split("//")[0])
        depth += kept[-1].count("{") - kept[-1].count("}")
        if depth == 0:
            break
    return "\n".join(kept).strip()[1:-1]


def _tables(text: str) -> dict[str, bytes]:
    """The module's constants by name: strings, such as the message of a device_assert, and tables of numbers."""
    found = re.findall(r"\.b8 ([$\w]+)\[(\d+)\] = \{([\d, ]+)\}", text)
    return {name: bytes(map(int, given.split(","))).ljust(int(size), b"\0") for name, size, given in found}


@lru_cache(1 << 16)
def function_at(file: str, line: int) -> str:
    """The innermost function of a Python file at this line, or "". PTX names only the kernel."""
    return max((each for each in _functions(file) if each[0] <= line <= each[1]), default=(0, 0, ""))[2]


@lru_cache
def _functions(file: str) -> tuple[tuple[int, int, str], ...]:
    """First line, last line and name of each function."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ()
    made = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return tuple((node.lineno, node.end_lineno or node.lineno, node.name) for node in made)


class _Reader:
    def __init__(self, name: str, files: dict[str, str], shared: int) -> None:
        self.name, self.files, self.sizes = name, files, {"shared": shared, "local": 0}
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.counts = {1: 0, 16: 0, 32: 0, 64: 0}
        self.names: ChainMap[str, Operand] = ChainMap()  # by open brace; names of labels end in a colon
        self.jumps: list[tuple[int, ChainMap[str, Operand]]] = []  # jumps, and the names in scope there
        self.callers: dict[tuple[str, ...], tuple[str, ...]] = {}
        self.site = Site("", 0, name, 0)

    def read(self, statement: str) -> None:
        if statement == "{":
            self.names = self.names.new_child()
        elif statement == "}":
            self.names = self.names.parents
        elif statement.startswith(LOC):
            self._locate(statement)
        elif statement.startswith(".reg"):
            self._declare(statement)
        elif re.match(r"\.(extern|shared|local)", statement):
            self._place(statement)
        elif statement.endswith(":"):
            self.names[statement] = label = Symbol(f"{statement}{len(self.labels)}")
            self.labels[label.name] = len(self.instructions)
        elif statement and not statement.startswith("."):
            made = self._instruction(statement)
            if made.root == "bra":
                self.jumps.append((len(self.instructions), self.names))
            self.instructions += _moves(made)

    def finish(self, strings: dict[str, str]) -> None:
        """Resolve jumps to the label in the innermost braces, and attach the strings of calls. Call after all reads."""
        for at, names in self.jumps:
            made = self.instructions[at]
            (target,) = made.args
            if isinstance(target, Symbol):
                self.instructions[at] = replace(made, args=(names.get(f"{target.name}:", target),))
        for at, made in enumerate(self.instructions):
            if made.root == "call":
                self.instructions[at] = replace(made, note=strings.get(self._pointed_to(at), ""))

    def _pointed_to(self, call: int) -> str:
        """The variable whose address is the first argument of a call, traced back through st.param, cvta and mov."""
        wanted: Operand = Address(Symbol("param0"))
        for made in reversed(self.instructions[max(0, call - 200) : call]):
            if made.args and made.args[0] == wanted:
                wanted = made.args[1]
            if isinstance(wanted, Symbol):
                return wanted.name
        return ""

    def _locate(self, statement: str) -> None:
        """Set the current source line. Line 0 means no line: the previous one still applies."""
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
        file, of_kernel = (self.files.get(at[0], "") for at in (here, kernel))
        function = function_at(file, int(here[1])) or self.name
        self.site = Site(file, int(here[1]), function, int(kernel[1]), "" if of_kernel == file else of_kernel)

    def _declare(self, statement: str) -> None:
        found = re.match(r"\.reg\s+(?:\.v(\d)\s*)?\.([a-z]+)(\d*)(?:x\d)?\s+(.*)", statement, re.S)
        if found is None or (found[3] or found[2]) not in WIDTHS:
            raise self._unknown(statement)
        width = WIDTHS[found[3] or "pred"]
        for name in (each.strip() for each in found[4].split(",")):
            family = re.fullmatch(r"([$%\w]+)<(\d+)>", name)
            if family:
                elements = [f"{family[1]}{n}" for n in range(int(family[2]))]
            else:
                elements = [f"{name}.{part}" for part in "xyzw"[: int(found[1])]] if found[1] else [name]
            made = [Reg(width, number, each) for number, each in enumerate(elements, self.counts[width])]
            self.counts[width] += len(made)
            self.names |= {each.name: each for each in made}
            if found[1]:
                self.names[name] = Vector(tuple(made))

    def _place(self, statement: str) -> None:
        """Allocate variables in memory: each name becomes its address."""
        form = r"\.(shared|local)(?:::cta)?\s+(?:\.align\s+(\d+)\s+)?(?:\.v(\d)\s+)?\.[a-z]+(\d+)\s+([^={]*)"
        found = re.fullmatch(form, statement, re.S)
        if found is None:
            raise self._unknown(statement)
        size = int(found[4]) // 8 * int(found[3] or 1)
        align = int(found[2] or size)
        for name in found[5].split(","):
            begin = -(-self.sizes[found[1]] // align) * align
            self.names[name.partition("[")[0].strip()] = Imm(str(begin))
            try:
                counts = [int(n.strip().rstrip("U"), 0) for n in re.findall(r"\[([^\]]*)\]", name)]
            except ValueError:
                raise self._unknown(statement) from None
            self.sizes[found[1]] = begin + size * prod(counts)

    def _unknown(self, statement: str) -> UnsupportedPtx:
        return UnsupportedPtx(f"the PTX machine does not know `{statement}`, at {self.site}")

    def _instruction(self, statement: str) -> Instruction:
        text, guard, negated = statement, None, False
        if statement.startswith("@"):
            word, statement = statement.split(None, 1)
            negated = word[1] == "!"
            found = self.names.get(word.lstrip("@!"))
            if not isinstance(found, Reg):
                raise UnsupportedPtx(f"`{text}`: unknown predicate {word}, at {self.site}")
            guard = found
        matched = re.match(r"([a-z][\w.:]*)\s*(.*)", statement, re.S)
        if matched is None:
            raise UnsupportedPtx(f"`{text}` is not an instruction, at {self.site}")
        made = Instruction(matched[1], (), self.site, " ".join(text.split()), guard, negated)
        return replace(made, args=tuple(self._operand(each, made) for each in _split(matched[2])))

    def _operand(self, text: str, of: Instruction) -> Operand:
        if text[0] in "{(":
            return Vector(tuple(self._operand(each, of) for each in _split(text[1:-1])))
        if text.startswith("["):
            return self._address(text[1:-1].strip(), of)
        if "|" in text:
            return Vector(tuple(self._operand(each.strip(), of) for each in text.split("|")))
        if (known := self.names.get(text)) is not None:
            return known
        if text.startswith("%"):
            return Special(text[1:])
        if re.match(r"[-\d]", text):
            return Imm(text)
        return Symbol(text)

    def _address(self, text: str, of: Instruction) -> Address:
        parts = _split(text)
        found = re.fullmatch(r"(\S+?)\s*(?:\+\s*(-?\w+))?", parts[0])
        if found is None:
            raise of.unsupported(f"address [{text}]")
        rest = [self._operand(each, of) for each in parts[1:]]
        coordinates = tuple(x for each in rest for x in (each.items if isinstance(each, Vector) else (each,)))
        return Address(self._operand(found[1], of), int(found[2] or "0", 0), coordinates)


def _moves(made: Instruction) -> list[Instruction]:
    """Splits a move of a vector register into one per element; returns any other instruction unchanged."""
    if made.root != "mov" or not made.has("v2", "v4"):
        return [made]
    d, a = made.args
    if not isinstance(d, Vector):
        raise made.unsupported("registers")
    op = re.sub(r"\.v[24]\b", "", made.op)
    sources = a.items if isinstance(a, Vector) else (a,) * len(d.items)
    return [replace(made, op=op, args=pair) for pair in zip(d.items, sources, strict=True)]


def _split(text: str) -> list[str]:
    """Splits at commas outside brackets."""
    return [each.strip() for each in re.findall(r"(?:\[[^\]]*\]|\{[^}]*\}|\([^)]*\)|[^,])+", text) if each.strip()]
