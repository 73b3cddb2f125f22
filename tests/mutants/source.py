"""The kernels' source as trees: where each function stands, what it calls, and how a copy with one edit is made."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import NamedTuple


class Edit(NamedTuple):
    """Put `text` in place of file[start:end], in characters."""

    file: str
    start: int
    end: int
    text: str


def kernels_folder() -> Path:
    """Where the installed package keeps its kernels."""
    import fusedtp.kernels

    return Path(fusedtp.kernels.__path__[0])


class File:
    """One module of kernels."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text
        self.tree = ast.parse(text)
        self._lines = [0]
        for line in text.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self.functions = [node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef)]

    def span(self, node: ast.AST) -> tuple[int, int]:
        """First character and the one after the last."""
        assert isinstance(node, ast.expr | ast.stmt | ast.keyword)
        assert node.end_lineno is not None and node.end_col_offset is not None
        return (
            self._lines[node.lineno - 1] + node.col_offset,
            self._lines[node.end_lineno - 1] + node.end_col_offset,
        )

    def of(self, node: ast.AST) -> str:
        """The node's own text."""
        start, end = self.span(node)
        return self.text[start:end]

    def replace(self, node: ast.AST, text: str) -> Edit:
        return Edit(self.name, *self.span(node), text)

    def function_of(self, node: ast.AST) -> ast.FunctionDef | None:
        """The innermost function that holds the node."""
        at: ast.AST | None = node
        while at is not None and not isinstance(at, ast.FunctionDef):
            at = self.parents.get(at)
        return at

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of every function, once."""
        return [
            node
            for function in self.functions
            for node in ast.walk(function)
            if self.function_of(node) is function
        ]

    def block_of(self, statement: ast.stmt) -> list[ast.stmt]:
        """The list of statements that holds this one."""
        parent = self.parents[statement]
        for name in ("body", "orelse"):
            block = getattr(parent, name, [])
            if statement in block:
                return block
        raise AssertionError(ast.dump(statement))

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """What encloses a node in its function, the innermost first."""
        at = self.parents.get(node)
        while at is not None and not isinstance(at, ast.FunctionDef):
            yield at
            at = self.parents.get(at)


def called(node: ast.AST) -> str:
    """The last name of a call's function: "wait" of `signals.wait(...)`; "" for what is no call."""
    if not isinstance(node, ast.Call):
        return ""
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def keyword(call: ast.Call, name: str) -> str | None:
    """The text constant given as `name=`."""
    for each in call.keywords:
        if each.arg == name and isinstance(each.value, ast.Constant) and isinstance(each.value.value, str):
            return each.value.value
    return None


class Sources:
    """All modules of a kernels folder, by file name."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.texts = dict(texts)
        self.files = {name: File(name, text) for name, text in texts.items()}

    @classmethod
    def read(cls, folder: Path | None = None) -> Sources:
        folder = folder or kernels_folder()
        return cls({path.name: path.read_text() for path in sorted(folder.glob("*.py"))})

    def edited(self, edits: tuple[Edit, ...]) -> dict[str, str]:
        """The texts with these edits done; they must not overlap."""
        texts = dict(self.texts)
        for edit in sorted(edits, key=lambda e: e.start, reverse=True):
            text = texts[edit.file]
            texts[edit.file] = text[: edit.start] + edit.text + text[edit.end :]
        return texts

    def walk(self) -> Iterator[tuple[File, ast.FunctionDef, ast.AST]]:
        """Every node inside a function, in the order of the text."""
        for file in self.files.values():
            for function in file.functions:
                for node in ast.walk(function):
                    yield file, function, node

    @cached_property
    def calls(self) -> dict[str, set[str]]:
        """Function -> names that it calls, or hands to what it calls."""
        known = {function.name for file in self.files.values() for function in file.functions}
        found: dict[str, set[str]] = {}
        for _file, function, node in self.walk():
            names = found.setdefault(function.name, set())
            names.add(called(node))
            if isinstance(node, ast.Call):
                names |= known & {each.id for each in node.args if isinstance(each, ast.Name)}
        return found

    @cached_property
    def kernels(self) -> set[str]:
        """Functions that are launched."""
        return {
            function.name
            for file in self.files.values()
            for function in file.functions
            if any("jit" in file.of(decorator) for decorator in function.decorator_list)
        }

    def reaches(self, function: str, goals: set[str]) -> bool:
        """Whether `function` calls one of `goals`, directly or not, or is one."""
        seen, todo = set(), [function]
        while todo:
            name = todo.pop()
            if name in goals:
                return True
            if name not in seen:
                seen.add(name)
                todo.extend(self.calls.get(name, ()))
        return False

    def kernels_of(self, function: str) -> set[str]:
        """Kernels in which this function runs, or before which, where it is the launch that numbers the calls."""
        found = {kernel for kernel in self.kernels if self.reaches(kernel, {function})}
        return set(self.kernels) if found & self.numbering else found

    @cached_property
    def numbering(self) -> set[str]:
        """Kernels that are given the call's number itself: launched before every other."""
        return {
            function.name
            for file in self.files.values()
            for function in file.functions
            if function.name in self.kernels and "epoch" in [each.arg for each in function.args.args]
        }

    @cached_property
    def waits(self) -> set[str]:
        """Functions, kernels apart, through which a program comes to acquire."""
        return self._through("acquire")

    @cached_property
    def notifies(self) -> set[str]:
        """Functions, kernels apart, through which a program comes to release."""
        return self._through("release")

    @cached_property
    def publishers(self) -> set[str]:
        """Functions that release themselves: one signal a call."""
        return {
            function.name
            for _file, function, node in self.walk()
            if isinstance(node, ast.Call) and keyword(node, "sem") == "release"
        }

    def _through(self, sem: str) -> set[str]:
        own = {
            function.name
            for _file, function, node in self.walk()
            if isinstance(node, ast.Call) and keyword(node, "sem") == sem
        }
        return {name for name in self.calls if name not in self.kernels and self.reaches(name, own)}


def segments(function: ast.FunctionDef) -> list[ast.Call]:
    """Where a function looks up the rows that a peer has for this rank, or this one for a peer."""
    calls = [each for each in ast.walk(function) if isinstance(each, ast.Call)]
    return [each for each in calls if called(each) == "segment"]
