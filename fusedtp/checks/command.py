"""`fusedtp check`: runs kernels on simulated ranks under many schedules and reports the first fault of each.

Exit codes, the first that applies:

    1   a fault was found, or the lint found something
    3   a user's case, or its reference, raised; or a worker died
    2   something cannot be checked: an option, a case, an opcode, a kernel that does not compile; or no schedule of a
        case ended in time
    0   everything was checked and nothing found
"""

from __future__ import annotations

import itertools
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fusedtp.sim.explore import TARGET, Schedule, schedules
from fusedtp.sim.faults import Fault, unwaivable
from fusedtp.sim.ptx import TARGETS
from fusedtp.sim.report import WIDTH, replay, report, waivers
from fusedtp.sim.strategies import DEFAULT, STRATEGIES

from .export import as_json
from .workers import (
    CRASHED,
    DIED,
    FAULTY,
    REFUSED,
    Found,
    Part,
    Pool,
    Result,
    UserError,
    case_of,
    cores,
    find,
    is_users,
    pool,
    resident_of,
    run_exhaust,
    run_part,
    run_trace,
    schedule_of,
)

if TYPE_CHECKING:
    from fusedtp.lint import Report

INTERRUPTED = 130

PART = 25  # at most so many schedules per task of a worker
SCHEDULES = 200
EXHAUST_LIMIT = 10_000


@dataclass(frozen=True)
class CheckOptions:
    """Find races, deadlocks and wrong results of multi-rank Triton kernels on simulated ranks."""

    cases: tyro.conf.Positional[tuple[str, ...]] = ()
    """The library's kernels by name, or files: ring.py::exchange is one case, ring.py is all cases that it defines.
    Default: every fused kernel of the library."""
    module: tuple[str, ...] = ()
    """Cases of modules: PKG.MODULE:case is one case, PKG.MODULE is all cases that it defines."""
    world_size: tuple[int, ...] = ()
    """Number of ranks; if several are given, each is checked. Default: 4, or the case's own number."""
    schedules: int | None = None
    """Schedules per case. Default: 200, or as many as fit if --seconds is given."""
    seconds: float | None = None
    """Time limit per case, enforced inside a schedule too. Shrinking a fault may take as long again."""
    seed: int = 0
    """Seed of the first schedule; each next schedule adds 1."""
    strategies: tuple[str, ...] = DEFAULT
    """Strategies that choose the next program, used in turn."""
    resident: Annotated[tuple[str, ...], tyro.conf.arg(metavar="{all,varying,N}...")] = ()
    """Programs of a rank that may be alive at once, used in turn. Default: all 1 varying 2."""
    target: tuple[str, ...] = (TARGET,)
    """Targets to compile for and run, without such a GPU: sm_80, sm_90. Each target takes the same time, so only one is
    the default; the code for the other has different instructions for copies and matmuls."""
    weak: Literal["no", "yes", "both"] = "both"
    """Whether effects become visible to other programs as late as PTX allows; both: in three of four schedules."""
    fine: bool = False
    """Run one warp at a time, in random order, in every schedule. Default: in one of three schedules."""
    exhaust: int | None = None
    """Instead, run every schedule with at most this many preemptions of runnable programs. For small cases."""
    waive: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME")] = ()
    """Continue past the finding of this name, as hardware would, to see later ones. Reports show the name. May be
    repeated."""
    workers: int | None = None
    """Number of processes. Default: one per core."""
    lint: bool = True
    """Compile the kernels for several GPUs, which need not be present, and check what running them cannot show:
    registers, occupancy, vector widths, pipelines. Default: only if no case is named."""
    timeline: Path | None = None
    """Write an HTML timeline of the fault, or of one schedule if there is none."""
    json: bool = False
    """Print the results as one JSON document instead of the table and the reports."""

    def faults(self) -> list[str]:
        """Errors in the options themselves."""
        found = [f"--strategies {name!r} must be one of {', '.join(DEFAULT)}" for name in self.strategies
                 if name not in STRATEGIES or name == "replay"]  # fmt: skip
        for word in self.resident:
            try:
                resident_of(word)
            except ValueError as error:
                found.append(str(error))
        for name in ("schedules", "seconds", "workers", "exhaust"):
            value = getattr(self, name)
            if value is not None and not value >= (0 if name == "exhaust" else 1e-9):  # NaN too
                found.append(f"--{name} {value} is too small")
        found += [f"--world-size {w} must be at least 1" for w in self.world_size if w < 1]
        found += [f"--target {name!r} must be one of {', '.join(TARGETS)}" for name in self.target
                  if name not in TARGETS]  # fmt: skip
        if self.exhaust is not None and self.seconds is not None:
            found.append("--seconds does not limit --exhaust; use --schedules")
        found += [f"--waive {why}" for name in self.waive if (why := unwaivable(name))]
        if not self.target:
            found.append("--target is empty; name at least one")
        if not self.strategies:
            found.append("--strategies is empty; name at least one")
        if self.timeline is not None and not self.timeline.absolute().parent.is_dir():
            found.append(f"--timeline {self.timeline}: no such folder")
        elif self.timeline is not None and self.timeline.is_dir():
            found.append(f"--timeline {self.timeline} is a folder; name a file")
        return found

    def names(self) -> tuple[str, ...]:
        """Names of all requested cases; "" refers to all fused kernels of the library."""
        modules = [name if ":" in name else f"{name}:" for name in self.module]
        return (*self.cases, *modules) or ("",)

    def residents(self) -> tuple[int | str | None, ...] | None:
        return tuple(resident_of(word) for word in self.resident) or None

    def chosen(self, target: str = TARGET) -> Iterator[Schedule]:
        """An endless iterator over the schedules of a case."""
        for schedule in schedules(
            1 << 40, self.strategies, first_seed=self.seed, residents=self.residents(), target=target
        ):
            weak = {"no": False, "yes": True, "both": schedule.weak}[self.weak]
            yield replace(schedule, fine=self.fine or schedule.fine, weak=weak, waive=self.waive)

    def limit(self) -> int | None:
        """Number of schedules per case; None: as many as time allows."""
        return SCHEDULES if self.schedules is None and self.seconds is None else self.schedules


def main(argv: list[str]) -> int:
    """Run the command and return its exit code."""
    options = tyro.cli(CheckOptions, prog="fusedtp check", args=argv)
    if options.cases or options.module or options.json:
        options = tyro.cli(CheckOptions, prog="fusedtp check", args=argv, default=CheckOptions(lint=False))
    wrong = options.faults()
    if wrong:
        return _refuse(wrong)
    try:
        with pool(options.workers or cores()) as workers:
            results = check(options, workers)
        codes = [result.code for result in results]
        findings: list[str] = []
        if options.lint:
            codes.append(_lint([result.found for result in results], options, findings))
    except KeyboardInterrupt:
        return INTERRUPTED
    code = next((each for each in (FAULTY, CRASHED, REFUSED) if each in codes), 0)
    if options.json:
        print(json.dumps(as_json(results, findings, code), indent=2))
    return code


def _refuse(wrong: Sequence[str]) -> int:
    for line in wrong:
        print(f"fusedtp check: error: {line}", file=sys.stderr)
    return REFUSED


def check(options: CheckOptions, workers: Pool) -> list[Result]:
    """Check every case that the options name, and print the table and the reports, except with --json."""
    asked = [
        (name, world_size, target)
        for target in options.target
        for world_size in options.world_size or (None,)
        for name in options.names()
    ]
    call = partial(_called, workers)
    found = [each for name in asked for each in find(*name, options.seconds, call)]
    if any(each.runs for each in found):
        with _progress() as progress:
            results = [_result(each, options, workers, progress) for each in found]
    else:
        results = [Result(each) for each in found]
    if not options.json:
        _report(results, options)
    ran = [result for result in results if result.schedules]
    if options.timeline is not None and ran:
        _write_timeline(options, workers, next((r for r in ran if r.part.fault is not None), ran[0]))
    return results


def _result(found: Found, options: CheckOptions, workers: Pool, progress: Progress) -> Result:
    if not found.runs:
        return Result(found)
    task = progress.add_task(f"{_label(found)} ({found.world_size} ranks)", total=options.limit())
    return run_case(found, options, workers, lambda count: progress.advance(task, count))


def _called(workers: Pool, function: Callable[..., Any], name: str, asked: int | None, target: str, *more: Any) -> Any:
    try:
        return workers.submit(function, name, asked, target, *more).result()
    except BrokenProcessPool:
        workers.start()
        return Found(name, asked, asked or 0, (), target, raised=f"{name}: the process died while building it\n")


def _report(results: Sequence[Result], options: CheckOptions) -> None:
    """Print the table, and a paragraph for each case that failed. If nothing ran, print only the errors."""
    if not any(result.schedules or result.part.ends for result in results):
        for result in results:
            if result.found.raised:
                print(result.found.raised, end="", file=sys.stderr)
            elif result.found.refused:
                _refuse([result.found.refused])
            elif result.verdict == "out of time":
                _refuse([f"{_label(result.found)}: {_late(result)}"])
        return
    console = _console()
    console.print(table(results))
    for line in _waived(results, options):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for result in results:
        if result.verdict != "ok" or result.part.late:
            heading = _heading(result.found)
            text = f"\n{heading}\n{'-' * len(heading)}\n{_words(result, options, console.width)}"
            console.print(text, markup=False, highlight=False, soft_wrap=True)


def _late(result: Result) -> str:
    if result.found.late:
        return f"out of time while building it, at {result.found.late}"
    place = f", at {result.part.late}" if result.part.late else ""
    return f"out of time in schedule {result.schedules + 1}{place}"


def _label(found: Found) -> str:
    return f"{found.name} ({found.target})"


def _heading(found: Found) -> str:
    return _label(found) + (f" on {found.world_size} ranks" if found.world_size else "")


def _waived(results: Sequence[Result], options: CheckOptions) -> Iterator[str]:
    """How often each waived finding occurred, and in which cases."""
    for name in dict.fromkeys(options.waive):
        met = [f"{count} times in {_heading(r.found)}" for r in results if (count := r.waived.get(name))]
        yield f"waived: {name}, met {', '.join(met)}" if met else f"never met, maybe stale: --waive {name!r}"


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else WIDTH)


def _lint(found: Sequence[Found], options: CheckOptions, findings: list[str]) -> int:
    """Run the lint and append its findings; returns its exit code."""
    with _progress("compilations") as progress:
        task = progress.add_task("compiling for GPUs", total=None)
        try:
            passed, words = lint(
                [each for each in found if each.runs],
                lambda: progress.advance(task),
            )
        except UserError as error:
            print(error, end="", file=sys.stderr)
            return REFUSED
    if not options.json:
        _print(words)
    findings += words[1:]
    return 0 if passed else FAULTY


def _print(words: Sequence[Any]) -> None:
    """Print tables with markup, and strings as they are."""
    for part in words:
        _console().print(part, markup=not isinstance(part, str), highlight=False, soft_wrap=isinstance(part, str))


def _words(result: Result, options: CheckOptions, width: int) -> str:
    """The report of a fault, the traceback of the user's exception, or the reason why nothing was checked."""
    found, part = result.found, result.part
    if found.refused or part.refused:
        return f"cannot be checked: {found.refused or part.refused}"
    if part.left:
        return f"stopped at the limit of --schedules; at least {part.left} more schedules are left"
    if part.fault is None:
        return found.raised or part.raised or _late(result)
    command = _exhaust_command(found, options)
    if part.raised:
        lines = replay(part.fault, found.name, found.asked, command)
        return "\n".join([part.raised, "Replay:", *(f"  {line}" for line in lines)])
    return report(
        part.fault, name=found.name, world_size=found.asked, width=max(width, WIDTH), command=command,
    )  # fmt: skip


def _progress(counted: str = "schedules") -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed} " + counted),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True)


def table(results: Sequence[Result]) -> Table:
    """A table with one row per case."""
    made = Table()
    made.add_column("case", overflow="fold")
    for name in ("ranks", "schedules", "switches", "schedules/s"):
        made.add_column(name, justify="right")
    made.add_column("result")
    for each in results:
        rate = f"{each.schedules / max(each.seconds, 1e-9):.1f}"
        size = str(each.found.world_size)
        made.add_row(_label(each.found), size, str(each.schedules), str(each.switches), rate, each.verdict)
    return made


def run_case(found: Found, options: CheckOptions, workers: Pool, advance: Callable[[int], None]) -> Result:
    """Run all schedules of a case in parts on the workers, until the earliest part that ends it is known."""
    begin = time.monotonic()
    if options.exhaust is not None:
        parts = _exhaustive(options)
    else:
        parts = _parts(options, workers.workers, found.target)
    running: dict[Future[Part], int] = {}
    done: dict[int, Part] = {}
    number = itertools.count()
    while True:
        left = None if options.seconds is None else options.seconds - (time.monotonic() - begin)
        while len(running) < workers.workers and (left is None or left > 0) and not _ending(done):
            arguments = next(parts, None)
            if arguments is None:
                break
            limit = () if options.exhaust is not None else (left,)
            running[workers.submit(arguments[0], found, *arguments[1:], *limit)] = next(number)
        if not running:
            break
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            at = running.pop(future)
            try:
                part = future.result()
            except BrokenProcessPool:
                part, running = Part(raised=DIED), {}
                workers.start()
            done[at] = part
            advance(part.schedules)
            if not running:
                break
    ran, switches = (
        sum(part.schedules for part in done.values()),
        sum(part.switches for part in done.values()),
    )
    late = next((part for part in done.values() if part.late or part.left), Part())
    waived = {name: sum(part.waived.get(name, 0) for part in done.values()) for name in options.waive}
    return Result(found, ran, switches, time.monotonic() - begin, next(iter(_ending(done)), late), waived)


def _ending(done: dict[int, Part]) -> list[Part]:
    """Parts that end the case, earliest first, so that the report does not depend on the speed of workers."""
    return [part for _, part in sorted(done.items()) if part.ends]


def _parts(options: CheckOptions, workers: int, target: str) -> Iterator[tuple[Any, ...]]:
    limit, chosen = options.limit(), options.chosen(target)
    size, given = 1, 0
    while limit is None or given < limit:
        share = size if limit is None else min(size, -(-(limit - given) // workers))
        yield run_part, tuple(itertools.islice(chosen, share))
        given += share
        size = min(2 * size, PART)  # start small: most faults show at once


def _exhaustive(options: CheckOptions) -> Iterator[tuple[Any, ...]]:
    limit = options.schedules or EXHAUST_LIMIT
    for resident in options.residents() or (None, 1):
        for weak in {"no": (False,), "yes": (True,), "both": (False, True)}[options.weak]:
            yield run_exhaust, options.exhaust, limit, resident, weak, options.waive


def _exhaust_command(found: Found, options: CheckOptions) -> str:
    if options.exhaust is None:
        return ""
    size = "" if found.asked is None else f" --world-size {found.asked}"
    words = f"fusedtp check {found.name}{size} --exhaust {options.exhaust} --target {found.target}"
    return " ".join([words, *map(shlex.quote, waivers(options.waive))])


def _write_timeline(options: CheckOptions, workers: Pool, result: Result) -> None:
    from .timeline import html

    assert options.timeline is not None
    fault: Fault | None = result.part.fault
    if fault is None or fault.strategy == "replay":
        schedule = next(options.chosen(result.found.target))
    else:
        schedule = schedule_of(fault)
    moments = fault.trace if fault and fault.trace else workers.submit(run_trace, result.found, schedule).result()
    title = f"{result.found.name} on {result.found.world_size} ranks"
    options.timeline.write_text(html(moments, title=title, fault=fault), encoding="utf-8")
    print(f"timeline: {options.timeline}", file=sys.stderr if options.json else sys.stdout)


def lint(found: Sequence[Found], compiled: Callable[[], None]) -> tuple[bool, list[Any]]:
    """Compile and lint the kernels of these cases for every target; returns whether all passed, and the output.

    compiled   called after each compilation
    Raises UserError if the compiler refuses a kernel.
    """
    from fusedtp.lint import TARGETS, CompileCase, CompileError, check_cases, table

    from .lint import OWN, check

    names = {name for each in found for name in each.kernels if not is_users(each.name)}
    own = [name for name in OWN if name in names]
    users = dict.fromkeys((each.name, each.asked) for each in found if is_users(each.name))
    cases = [
        CompileCase(name.rpartition(":")[2], target, partial(case_of, name, asked), f"{asked} ranks" if asked else "")
        for name, asked in users
        for target in TARGETS
    ]

    def done(_: Report) -> None:
        compiled()

    try:
        reports = check(own, done=done) if own else []
        reports += check_cases(cases, done=done) if cases else []
    except CompileError as error:
        raise UserError(f"{error}\n") from None
    reports = list(dict.fromkeys(reports))  # different specializations may compile to the same code
    words = _by_finding(reports)
    return not words, [table(reports), *words]


def _by_finding(reports: Sequence[Report]) -> list[str]:
    """Each finding once, with its targets."""
    targets: dict[tuple[str, str], dict[str, None]] = {}
    for each in reports:
        for finding in each.findings:
            targets.setdefault((each.kernel, str(finding)), {})[each.target] = None
    return [f"{kernel} on {', '.join(on)}\n  {finding}" for (kernel, finding), on in targets.items()]
