"""Operators on the PTX of a kernel: each changes all matching instructions of one source line."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable

from fusedtp.sim.ptx.parse import function_at

Site = tuple[str, str, str]  # operator, and of the innermost source line its function and its text


def later(found: re.Match[str]) -> str:
    return f"{found[1]}{int(found[2], 0) + 1}"


# wgmma.fence is left alone: the machine does not model the registers of products under way
# operator -> what it looks for in a line, and what it puts there
OPERATORS: dict[str, tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = {
    "ptx: weaken acquire": (re.compile(r"\.acquire\b"), ".relaxed"),
    "ptx: weaken release": (re.compile(r"\.release\b"), ".relaxed"),
    "ptx: narrow system scope": (re.compile(r"\.sys\b"), ".gpu"),
    "ptx: narrow device scope": (re.compile(r"\.gpu\b"), ".cta"),
    "ptx: drop fence": (re.compile(r"^\s*(@!?%p\d+\s+)?fence\.[\w.:]+;"), ""),
    "ptx: drop barrier": (re.compile(r"^\s*(@!?%p\d+\s+)?bar(rier)?\.[\w.]+\s[^;]*;"), ""),
    "ptx: later wait for copies": (re.compile(r"(cp\.async\.wait_group\s+)(\w+)"), later),
    "ptx: later wait for products": (re.compile(r"(wgmma\.wait_group\.sync\.aligned\s+)(\w+)"), later),
    "ptx: drop wait at mbarrier": (re.compile(r"mbarrier\.try_wait\.[^;]*;"), "setp.eq.u32 complete, 0, 0;"),
}


def sites(text: str) -> dict[Site, list[int]]:
    """For every operator and source line: the lines of the text in which the operator finds something."""
    found: dict[Site, list[int]] = {}
    files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', text, re.M))
    file, number = "", 0
    inline = -1  # lines since inline PTX began: Note [Lines of inline PTX] in parse.py
    for n, line in enumerate(text.split("\n")):
        inline += inline >= 0
        if "inline asm" in line:
            inline = 0 if "begin" in line else -1
        if inline < 2 and (made := re.match(r"\s*\.loc\s+(\d+) ([1-9]\d*) ", line)):
            file, number = files[made[1]], int(made[2])
        for operator, (pattern, _) in OPERATORS.items():
            if pattern.search(line):
                place = function_at(file, number), linecache.getline(file, number).split("  #")[0].strip()
                found.setdefault((operator, *place), []).append(n)
    return found


def edited(text: str, site: Site) -> str:
    """The text with the fault, if it contains the site."""
    pattern, put = OPERATORS[site[0]]
    lines = text.split("\n")
    for n in sites(text).get(site, ()):
        lines[n] = pattern.sub(put, lines[n])
    return "\n".join(lines)
