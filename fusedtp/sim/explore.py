"""Runs a case under one schedule, many, or all schedules with few preemptions, and shrinks the fault it finds."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

from fusedtp.limits import OutOfTime, time_limit

from .case import Case, Launch, Run
from .faults import Fault, Mismatch, Moment, SimulationFault, Site, unwaivable
from .launching import plain
from .memory import Memory
from .ptx import TARGETS
from .ptx.launch import Compiler
from .ptx.machine import Machine
from .strategies import DEFAULT, STRATEGIES, Replay, Strategy, Switch

TARGET = "sm_90"  # the default
SHRINK_SCHEDULES = 8
SHRINK_SECONDS = 120.0  # at most, to shrink a fault
SCHEDULE_SECONDS = 600.0  # time limit of one schedule if none is given
compiler_for = lru_cache(Compiler)  # one per target, shared by all schedules of a process: a kernel is compiled once


@dataclass(frozen=True)
class Schedule:
    """Everything that decides a schedule.

    resident   programs of a rank that may be alive at once; None: all; "varying": changes during the run
    weak       model all late effects: stale values of flags (ptx.memory), async copies and MMAs that land at their wait
    fine       run one warp at a time, in random order; otherwise the warps of a program run in lockstep
    target     run the code compiled for this target, one of ptx.TARGETS
    waive      names of findings (Fault.name) that do not stop the schedule, as hardware would not stop
    """

    strategy: str = "random"
    seed: int = 0
    resident: int | str | None = None
    weak: bool = False
    fine: bool = False
    target: str = TARGET
    waive: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, value, known in (("strategy", self.strategy, STRATEGIES), ("target", self.target, TARGETS)):
            if value not in known:
                raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(known)}")
        number = self.resident if isinstance(self.resident, int) else 1
        if self.resident not in (None, "varying", number) or number < 1:
            raise ValueError(f"resident is {self.resident!r}; it must be None, 'varying' or at least 1")
        wrong = [why for name in self.waive if (why := unwaivable(name))]
        if wrong:
            raise ValueError("; ".join(wrong))


@dataclass
class Outcome:
    """The result of `explore`."""

    case: str
    schedules: int = 0
    switches: int = 0
    seconds: float = 0.0
    fault: Fault | None = None
    raised: BaseException | None = field(default=None, repr=False)  # by the user's code, with its own traceback
    late: str = ""  # where a schedule that ran out of time stopped; that schedule is not counted
    waived: dict[str, int] = field(default_factory=dict)  # how often each waived finding occurred
    left: int = 0  # `exhaust` only: schedules skipped because of its limit; each may lead to more

    @property
    def passed(self) -> bool:
        """No schedule showed a fault, and not all of them ran out of time."""
        return self.fault is None and not (self.late and not self.schedules)

    def raise_fault(self) -> None:
        """Raises SimulationFault if there is a fault."""
        if self.fault is not None:
            raise SimulationFault(self.fault) from self.raised


def run(
    kernel: Any, grid: int | tuple[int, ...], args_of_rank: Callable[[int], dict[str, Any]] | Sequence[dict[str, Any]],
    world_size: int, *, seed: int = 0, resident: int | str | None = None, strategy: str = "random", weak: bool = False,
    fine: bool = False, target: str = TARGET, waive: Sequence[str] = (), memory: Sequence[Memory] = (),
) -> int:  # fmt: skip
    """Runs one schedule with one launch per rank; returns the number of context switches.

        kernel         a triton.jit function
        grid           programs of a rank
        args_of_rank   rank -> arguments by name, or a list of them; tensors are on the CPU
        memory         memory that kernels reach by address, see `symmetric`
        resident, strategy, weak, fine, target, waive   see `Schedule`

    Raises SimulationFault (an AssertionError) for a race, a deadlock, a read of never-written memory or an access
    outside every allocation; ValueError if the arguments do not fit the kernel; UnsupportedKernel.
    """
    given = [args_of_rank(r) for r in range(world_size)] if callable(args_of_rank) else list(args_of_rank)
    if len(given) != world_size:
        raise ValueError(f"got arguments for {len(given)} ranks, wanted {world_size}")
    made = Run([[Launch(kernel, grid, args)] for args in given], memory)
    return run_schedule(made, Schedule(strategy, seed, resident, weak, fine, target, tuple(waive)))


def run_schedule(run: Run, schedule: Schedule) -> int:
    """Runs one schedule and checks the result; returns the number of switches. Raises as `run` does."""
    return _execute(run, schedule).switches


def trace(run: Run, schedule: Schedule) -> tuple[tuple[Moment, ...], Fault | None]:
    """The actions of every program in one schedule, up to its end or its fault, for a timeline."""
    try:
        return tuple(_execute(run, schedule, trace=True).line.trace or ()), None
    except SimulationFault as error:
        return error.fault.trace, error.fault


def _execute(
    run: Run, schedule: Schedule, strategy: Callable[..., Strategy] | None = None, trace: bool = False,
    waived: dict[str, int] | None = None,
) -> Machine:  # fmt: skip
    """waived: receives the number of times each waived finding occurred."""
    run, waived = plain(run, schedule.seed), {} if waived is None else waived
    for name in schedule.waive:
        waived.setdefault(name, 0)
    machine = Machine(
        run, strategy or STRATEGIES[schedule.strategy], compiler_for(schedule.target), seed=schedule.seed,
        resident=schedule.resident, weak=schedule.weak, fine=schedule.fine, trace=trace, waived=waived,
    )  # fmt: skip
    cause = None
    try:
        machine.run()
        fault = _recorded(run) or _wrong(run)
        if fault is not None and fault.mismatch is not None:
            fault = replace(fault, accesses=machine.line.last_write(fault.mismatch.address))
    except SimulationFault as error:
        cause = error  # its traceback leads to the kernel's line
        machine.line.land()  # a failure that a kernel recorded may not be in its tensor yet
        fault = _recorded(run) or error.fault
    if fault is None:
        return machine
    trace_of = tuple(machine.line.trace or ())
    raise SimulationFault(replace(_shown(fault, schedule), switches=machine.switches, trace=trace_of)) from cause


def _shown(fault: Fault, schedule: Schedule) -> Fault:
    """The fault with the fields of the schedule that shows it."""
    return replace(fault, **{**vars(schedule), "resident": str(schedule.resident)})


def _recorded(run: Run) -> Fault | None:
    """A failure that kernels recorded themselves. It takes precedence: later faults are its consequences."""
    said = run.failures() if run.failures else ()
    return Fault("timed out", "; ".join(said)) if said else None


def _wrong(run: Run) -> Fault | None:
    """The first output that differs from the reference."""
    found = run.check() if run.check else None
    found = () if found is None else found
    if not isinstance(found, list | tuple) or not all(isinstance(each, Mismatch) for each in found):
        wanted = "it must return the mismatches of `compare`, or None, or raise"
        raise ValueError(f"the run's check returned {type(found).__name__}; {wanted}")
    return next((Fault("wrong value", f"{each} differ from the reference", mismatch=each) for each in found), None)


def schedules(
    count: int, strategies: Sequence[str] = DEFAULT, *, first_seed: int = 0, residents: Sequence[Any] | None = None,
    target: str = TARGET,
) -> Iterator[Schedule]:  # fmt: skip
    """`count` schedules that cycle through the strategies, and through residents: all, one, varying, two.

    Three in four are weak and one in three runs warp by warp, in turn for each strategy and residency.
    """
    residents = (None, 1, "varying", 2) if residents is None else residents
    for i in range(count):
        turn, at = divmod(i, len(strategies))
        weak, fine = (at + turn // len(residents)) % 4 != 0, (at + turn) % 3 == 2
        yield Schedule(strategies[at], first_seed + i, residents[turn % len(residents)], weak, fine, target)


def explore(
    case: Case, schedules: int | Iterable[Schedule] = 200, strategies: Sequence[str] = DEFAULT, *,
    seconds: float | None = None, first_seed: int = 0, progress: Callable[[int], None] | None = None,
    shrink: bool = True, waive: Sequence[str] = (),
) -> Outcome:  # fmt: skip
    """Runs many schedules of a case until one shows a fault.

    schedules   the schedules, or their number
    seconds     time limit, enforced inside a schedule too; shrinking a fault may take as long again
    progress    called with the number of schedules done
    waive       names of findings (Fault.name) to ignore, in addition to those of the schedules; `waived` counts them

    An exception of the kernel or of the case becomes a fault with rule "raised"; `raised` keeps its traceback.
    UnsupportedKernel and ValueError concern the case as a whole and are raised.
    """
    begin = time.monotonic()
    outcome = Outcome(case.name)
    chosen = _schedules(schedules, strategies, first_seed=first_seed) if isinstance(schedules, int) else schedules
    for each in chosen:
        schedule = replace(each, waive=(*each.waive, *waive)) if waive else each
        left = SCHEDULE_SECONDS if seconds is None else seconds - (time.monotonic() - begin)
        if left <= 0:
            break
        try:
            with time_limit(left):
                fault = attempt(case, schedule, outcome)
        except OutOfTime as error:
            outcome.late = _place(error)
            break
        outcome.schedules += 1
        if progress is not None:
            progress(outcome.schedules)
        if fault is not None:
            spare = min(SHRINK_SECONDS, SHRINK_SECONDS if seconds is None else seconds)
            outcome.fault = _shortest(case, fault, schedule, spare) if shrink else fault
            break
    outcome.seconds = time.monotonic() - begin
    return outcome


_schedules = schedules


def _place(error: OutOfTime) -> str:
    """The kernel's line at which a schedule ran out of time, if a machine was running it."""
    holders = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    sites = [site for each in holders if isinstance(site := getattr(each, "site", None), Site) and site.line > 0]
    return str(sites[-1]) if sites else "before its kernels ran"


def attempt(
    case: Case, schedule: Schedule, outcome: Outcome, strategy: Callable[..., Strategy] | None = None
) -> Fault | None:
    """Runs one schedule; returns its fault, if any. Adds its switches and the user's exception to `outcome`."""
    made = case.make()
    if made.check is None:
        raise ValueError(f"case {case.name!r} has no reference: its Run needs a `check`")
    try:
        outcome.switches += _execute(made, schedule, strategy, waived=outcome.waived).switches
        return None
    except SimulationFault as error:
        return error.fault
    except ValueError:  # UnsupportedKernel is one
        raise
    except Exception as error:
        outcome.raised = error
        return _shown(Fault("raised", f"{type(error).__name__}: {error}"), schedule)


def _shortest(case: Case, fault: Fault, schedule: Schedule, seconds: float) -> Fault:
    """Tries some more schedules for the same fault with the fewest context switches, and adds its trace.

    The search takes at most half of the time. Then the best schedule runs again to record the trace.
    """
    best, found, alike = schedule, fault, fault.rule == "wrong value"
    try:
        with time_limit(seconds / 2):
            for seed in range(SHRINK_SCHEDULES):
                other = replace(schedule, strategy=("run_to_block", "pct")[seed % 2], seed=seed)
                again = attempt(case, other, Outcome(case.name))
                alike = alike and again is not None and again.mismatch == fault.mismatch
                if again is not None and again.name == fault.name and again.switches < found.switches:
                    best, found = other, again
    except OutOfTime:
        alike = False
    except Exception:
        return found
    if alike:  # no interleaving explains it
        return replace(found, message=f"{found.message}, the same in every schedule that was tried", trace=())
    try:
        with time_limit(seconds / 2):
            return trace(case.make(), best)[1] or found
    except (Exception, OutOfTime):
        return found


def exhaust(
    case: Case, preemptions: int = 1, *, limit: int = 10_000, resident: int | str | None = None, weak: bool = False,
    target: str = TARGET, waive: Sequence[str] = (),
) -> Outcome:  # fmt: skip
    """Runs every schedule of a small case that preempts a runnable program at most `preemptions` times.

    Programs switch before any instruction that may observe another program. weak: late effects are drawn from one seed,
    not enumerated. Stops after `limit` schedules. Source: Musuvathi and Qadeer 2007, "Iterative Context Bounding".
    """
    begin = time.monotonic()
    outcome = Outcome(case.name)
    schedule = Schedule("replay", 0, resident, weak, target=target, waive=tuple(waive))
    todo: list[tuple[tuple[int, ...], int]] = [((), preemptions)]
    while todo and outcome.schedules < limit and outcome.fault is None:
        choices, left = todo.pop()
        seen: list[Switch] = []
        outcome.fault = attempt(case, schedule, outcome, partial(Replay, choices=choices, seen=seen))
        outcome.schedules += 1
        for step in range(len(choices), len(seen)):
            chosen, options = seen[step]
            cost = 1 if step > 0 and seen[step - 1][0] in options else 0  # it could have gone on
            if left >= cost:
                before = tuple(each for each, _ in seen[:step])
                todo.extend(((*before, other), left - cost) for other in options if other != chosen)
    outcome.left, outcome.seconds = len(todo) * (outcome.fault is None), time.monotonic() - begin
    return outcome
