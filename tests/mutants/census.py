"""A second count of mutation sites, by patterns over the plain text: a site that has no mutant is a hole in the matrix.

Nothing here is shared with the operators: those walk the syntax tree and follow calls, this reads lines.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from .mutant import Mutant

_WAIT = r"^\s*(?:signals\.)?wait\w*\("
_GATED_WAIT = r"^\s*(?:signals\.)?wait(?:_rows|_chunk_of_all)?\("
_ARRIVAL = r"^\s*(?:signals\.)?(?:wait_arrival|wait_all_arrivals|arrive)\(peers"

# operators -> (pattern, which functions of which files). Several operators: any of them will do.
PATTERNS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("drop wait",), _WAIT, ""),
    (("drop wait",), r"^\s*while ", ""),
    (("drop notify",), r"^\s*(?:signals\.)?(?:publish|arrive|push_\w+)\(", ""),
    (("drop notify",), r"atomic_xchg\(", ""),
    (("weaken release",), r'sem="release"', ""),
    (("weaken acquire",), r'sem="acquire"', ""),
    (("narrow scope",), r'scope="(?:sys|gpu)"', ""),
    (("drop barrier",), r"\w*(?:barrier|fence)\w*\(", ""),
    (("one buffer",), r"epoch\) & 1", ""),
    (("low epoch",), r"load\((?:peers\.)?epoch\)", ""),
    (("equality",), r"\) < 0\)", ""),
    (("no wrap",), r"\) < 0\)", ""),
    (("wrong peer",), r"% (?:peers\.)?world(?:_size)?\b", ""),
    (("same peer",), r"step\b[^%]*% (?:peers\.)?world(?:_size)?\b", ""),
    (("wrong peer",), r"peers\.(?:data|flags|signatures) \+", ""),
    (("wrong slot",), r"\bslot\(peers", ""),
    (("wrong flag",), r"\bpublish\(peers|\bwait\(peers|\bwait_chunk_of_all\(peers|\bwait_chunks\(peers", ""),
    (("wrong flag",), r"flags_per_source \+ chunk", ""),
    (("wrong place",), r"wide\((?:rank|offset)\) \*|\bsrc \* |rank_of\(peers\) \* ", ""),
    (("wrong place",), r"parity \* peers\.world_size", ""),
    # What is published late is published early where it is kept early.
    (("notify early",), r"^\s*(?:signals\.)?publish\((?!.*\bstored\b)", r"^(?!publish_)"),
    (("notify early",), r"^\s*stored = (?!tl\.)", ""),
    (("wait late",), _GATED_WAIT, r"^(?!wait_)"),
    (("wait in K loop",), r"^\s*wait_rows\(", ""),
    (("tail skipped",), r"\bcdiv\(", ""),
    (("tail skipped",), r"\+ \w+ - 1\) // ", ""),
    (("tail skipped",), r"range\(0, K, ", ""),
    (
        ("empty shard: no wait", "empty shard: no signal"),
        _ARRIVAL,
        r"^(?!wait|arrive|meet)",
    ),  # meeting, no shards
    (("stages reversed",), r"^def \w+_kernel\((?!peers\))", ""),  # one that takes nothing else is one program
)


class Site(NamedTuple):
    """A place that the text search finds. missing: how many mutants it lacks."""

    operator: str
    file: str
    line: int
    text: str
    missing: int


def uncovered(texts: Mapping[str, str], mutants: Iterable[Mutant]) -> tuple[int, list[Site]]:
    """How many sites the text search finds, and those with fewer mutants than sites on a line."""
    made: Counter[tuple[str, str, object]] = Counter()
    for mutant in mutants:
        made[mutant.operator, mutant.file, mutant.line] += 1
        made[mutant.operator, mutant.file, mutant.function] += 1
    found: Counter[tuple[tuple[str, ...], str, object]] = Counter()
    lines: dict[tuple[tuple[str, ...], str, object], tuple[int, str]] = {}
    for file, text in texts.items():
        function = ""
        for number, line in enumerate(code(text).splitlines(), start=1):
            if name := re.match(r"\s*def (\w+)", line):
                function = name[1]
            for operators, pattern, where in PATTERNS:
                is_def = pattern.startswith("^def")
                if (name and not is_def) or not re.search(where, function):
                    continue
                hits = len(re.findall(pattern, line))
                if hits:
                    at: object = function if is_def else number
                    key = operators, file, at
                    found[key] += hits
                    lines[key] = number, line.strip()
    holes = []
    for key, count in found.items():
        operators, file, at = key
        missing = count - sum(made[operator, file, at] for operator in operators)
        if missing > 0:
            number, line = lines[key]
            holes.append(Site(" or ".join(operators), file, number, line, missing))
    return sum(found.values()), holes


def unlisted(texts: Mapping[str, str], tried: Callable[[str], bool], compiled: Iterable[str]) -> list[Site]:
    """Kernels that no trial runs or that the lint does not compile: their mutants would survive unseen."""
    lists = {"trial": tried, "compile case": set(compiled).__contains__}
    return [
        Site(f"any {what}", file, text[: kernel.start()].count("\n") + 1, kernel[0].splitlines()[-1], 1)
        for file, text in texts.items()
        for kernel in re.finditer(r"^@triton\.jit[^\n]*\ndef (\w+)", text, re.MULTILINE)
        for what, knows in lists.items()
        if not knows(kernel[1])
    ]


def code(text: str) -> str:
    """The text with comments and docstrings blanked, line by line."""
    text = re.sub(r'"""[\s\S]*?"""', lambda m: "\n" * m[0].count("\n"), text)
    return re.sub(r"#.*", "", text)
