"""Reports a fault as text: the accesses, the cause, the shortest interleaving as a table, and how to replay it."""

from __future__ import annotations

import linecache
import math
import shlex
from bisect import insort_left
from collections.abc import Iterable, Sequence
from io import StringIO

from rich.box import ASCII
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .faults import RULES, WAIVABLE, Access, Fault, Moment, Site, place_of

ROWS = 15
WIDTH = 110


def report(
    fault: Fault, *, name: str = "", world_size: int | None = None, width: int = WIDTH, command: str = ""
) -> str:
    """Everything known about a fault, as text.

    name, world_size   of the case, as `fusedtp check` takes them
    command            replays the fault if a seed alone does not
    """
    lines = [f"{fault.rule}: {fault.message}", f"({RULES.get(fault.rule, '')})"]
    lines += ["", f"Cause: {fault.cause}"] if fault.cause else []
    for end in fault.ends:
        value = f", initially {end.value}" if isinstance(end, Access) and end.value else ""
        lines += ["", f"rank {end.rank}, {end.launch}, program {end.program}: {end.said}{value}", *_source(end.site)]
    lines += ["", f"wanted {wrong.wanted}, seen {wrong.seen}"] if (wrong := fault.mismatch) else []
    if rows := relevant(fault):
        said = f"The shortest interleaving found has {fault.switches} switches between programs; time runs downward:"
        lines += ["", said, interleaving(rows, width)]
    if fault.strategy:
        lines += ["", "Replay:", *(f"  {line}" for line in replay(fault, name, world_size, command))]
    if fault.rule in WAIVABLE:
        lines += ["", "To continue past this finding:", f"  --waive {shlex.quote(fault.name)}"]
    return "\n".join(lines)


def _source(site: Site) -> list[str]:
    if site.line <= 0:
        return ["    on the host"]
    text = linecache.getline(site.file, site.line).strip()
    return [f"    {site}", *([f"        {text}"] if text else [])]


def replay(fault: Fault, name: str, world_size: int | None, command: str = "") -> list[str]:
    """A command line and a Python call that replay the fault; only the call if the case has no name."""
    if fault.strategy == "replay":
        return [command] if command else []
    resident = "all" if fault.resident in ("None", "") else fault.resident
    size = [] if world_size is None else ["--world-size", str(world_size)]
    words = ["fusedtp", "check", name, *size, "--schedules", "1", "--strategies", fault.strategy]
    words += ["--seed", str(fault.seed), "--resident", resident, "--weak", "yes" if fault.weak else "no"]
    words += [*(["--fine"] if fault.fine else []), "--target", fault.target, *waivers(fault.waive)]
    value = {"all": "None", "varying": "'varying'"}.get(resident, resident)
    target = f"target={fault.target!r}"
    more = target + (f", waive={fault.waive!r}" if fault.waive else "")
    schedule = f"Schedule({fault.strategy!r}, {fault.seed}, {value}, weak={fault.weak}, fine={fault.fine}, {more})"
    names = "from fusedtp.sim import Schedule, run_schedule"
    if not name:
        return [names, f"run_schedule(a_run_of_the_case, {schedule})"]
    case = f"case_of({name!r}{'' if world_size is None else f', {world_size}'}, {target})"
    python = names, "from fusedtp.checks.workers import case_of", f"run_schedule({case}.make(), {schedule})"
    return [shlex.join(words), "or in Python:", *(f"  {line}" for line in python)]


def waivers(names: Iterable[str]) -> list[str]:
    """The `--waive` options of a command line."""
    return [word for name in names for word in ("--waive", name)]


def relevant(fault: Fault) -> list[Moment]:
    """The last ROWS moments of a trace that access the fault's memory or synchronize the programs of the fault."""
    if not fault.trace:
        return []
    programs = {(end.rank, end.launch, end.program) for end in fault.ends}
    tensors = {end.tensor for end in fault.ends}
    if not programs:
        tensors = {m.tensor for m in fault.trace if m.tensor and f"{m.tensor} [" in fault.message}
    low = min((each.first for each in fault.accesses), default=())  # without accesses: all elements
    high = max((each.last for each in fault.accesses), default=(math.inf,))

    def concerns(moment: Moment) -> bool:
        who = moment.rank, moment.launch, moment.program
        if moment.kind in ("atomic", "wait"):
            return not programs or who in programs or moment.tensor in tensors
        near = moment.first <= high and moment.last >= low
        return near and moment.kind in ("load", "store", "copy") and moment.tensor in tensors

    kept = _without_polls([m for m in fault.trace if concerns(m)])
    before: list[Moment] = []
    if fault.accesses:
        kept.append(_now(fault.accesses[-1]))  # the trace ends before it
        first = fault.accesses[0]
        if not any(moment.shows(first) for moment in kept):  # such as the read of a copy
            insort_left(kept, _now(first), key=lambda moment: moment.step)
        before = [moment for moment in kept[:-ROWS] if moment.shows(first)][-1:]  # replaces the earliest row
    return [*before, *kept[len(before) - ROWS :]]


def _now(access: Access) -> Moment:
    return Moment(
        access.step, access.rank, access.launch, access.program, access.what, access.site, kind="load",
        tensor=access.tensor, first=access.first, last=access.last,
    )  # fmt: skip


def _without_polls(moments: Sequence[Moment]) -> list[Moment]:
    """Merges the polls of a word into the wait that follows, and repeated waits in vain into one."""
    kept: dict[int, Moment] = {}
    mine: dict[tuple[int, str, int], list[int]] = {}
    for number, moment in enumerate(moments):
        own = mine.setdefault((moment.rank, moment.launch, moment.program), [])
        if moment.kind == "wait":
            while own and _polls(kept[own[-1]], moment):
                del kept[own.pop()]
            if own and kept[own[-1]]._replace(step=moment.step) == moment:
                continue
        own.append(number)
        kept[number] = moment
    return list(kept.values())


def _polls(before: Moment, wait: Moment) -> bool:
    same = (before.tensor, before.first) == (wait.tensor, wait.first)
    return same and before.kind == "atomic" and " reads " in before.what


def interleaving(moments: Sequence[Moment], width: int = WIDTH) -> str:
    """A table with ranks from left to right and time running down."""
    ranks = sorted({moment.rank for moment in moments})
    several = {rank: len({(m.launch, m.program) for m in moments if m.rank == rank}) > 1 for rank in ranks}
    launches = len({moment.launch for moment in moments}) > 1
    table = Table(box=ASCII, pad_edge=False, show_lines=False)
    table.add_column("step", justify="right", no_wrap=True)
    for rank in ranks:
        table.add_column(f"rank {rank}", overflow="fold")
    for moment in moments:
        who = f"{moment.launch if launches else 'program'} {moment.program}: " if several[moment.rank] else ""
        line = f" (line {moment.site.line})" if moment.site and moment.site.line > 0 else ""
        place = place_of(moment.tensor, moment.first, moment.last)
        cell = f"{who}{moment.what}{f': {place}' if place else ''}{line}"
        table.add_row(str(moment.step), *(Text(cell if moment.rank == rank else "") for rank in ranks))
    out = StringIO()
    Console(file=out, width=width, no_color=True).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())
