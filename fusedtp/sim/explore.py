"""Run a case under one schedule, under many, or under all with few preemptions, and make a found fault small."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch

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
SHRINK_SECONDS = 120.0  # that a found fault is made smaller for, at most
SCHEDULE_SECONDS = 600.0  # that a schedule may take where no limit is given
compiler_for = lru_cache(Compiler)  # one a target for all schedules of a process: each kernel is compiled once


@dataclass(frozen=True)
class Schedule:
    """Everything that decides a schedule.

    resident   programs of a rank that are alive at once; None: all; "varying": changes during the run
    weak       with all late effects: old values of flags (ptx.memory), copies and products that land at their wait
    fine       a warp at a time, in random order; else the warps of a program in step
    target     whose compiled code runs, one of ptx.TARGETS
    waive      names of findings (Fault.name) that the schedule goes past, as hardware would
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
    """What `explore` did."""

    case: str
    schedules: int = 0
    switches: int = 0
    seconds: float = 0.0
    fault: Fault | None = None
    raised: BaseException | None = field(default=None, repr=False)  # by the user's code, with its own traceback
    late: str = ""  # where a schedule stood that did not end in time; it does not count
    waived: dict[str, int] = field(default_factory=dict)  # how often each waived finding was met
    left: int = 0  # of `exhaust`: schedules that its limit left out, and those that they lead to

    @property
    def passed(self) -> bool:
        """Some schedule ended, and none showed a fault."""
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
    """One schedule of one launch a rank; returns the number of context switches.

        kernel         a triton.jit function
        grid           programs of a rank
        args_of_rank   rank -> arguments by name, or a list of those; tensors on the CPU
        memory         what kernels reach through addresses, see `symmetric`
        resident, strategy, weak, fine, target, waive   as `Schedule` has them

    Raises SimulationFault (an AssertionError) for a race, a deadlock, a read of never-written memory or an access
    outside every allocation; ValueError where ranks' arguments do not fit together; UnsupportedKernel.
    """
    given = [args_of_rank(r) for r in range(world_size)] if callable(args_of_rank) else list(args_of_rank)
    if len(given) != world_size:
        raise ValueError(f"arguments for {len(given)} ranks, the world has {world_size}")
    made = Run([[Launch(kernel, grid, args)] for args in given], memory)
    check_arguments(made)
    return run_schedule(made, Schedule(strategy, seed, resident, weak, fine, target, tuple(waive)))


def check_arguments(run: Run) -> None:
    """Launches of one kernel that all ranks make in the same place have the same arguments, of one kind or None.

    Raises ValueError naming the rank.
    """
    launches = [[each for each in work if isinstance(each, Launch)] for work in run.work]
    if len({len(each) for each in launches}) != 1:
        return
    for first, *others in zip(*launches, strict=True):
        if any(each.kernel is not first.kernel for each in others):
            continue
        wanted = _kinds(first.args)
        for rank, kinds in enumerate((_kinds(each.args) for each in others), start=1):
            if kinds.keys() != wanted.keys():
                raise ValueError(f"rank {rank} and rank 0 differ in arguments {sorted(kinds.keys() ^ wanted.keys())}")
            for name, kind in kinds.items():
                if kind != wanted[name] and "NoneType" not in (kind, wanted[name]):
                    raise ValueError(f"argument {name!r} is {kind} on rank {rank}, {wanted[name]} on 0")


def _kinds(args: dict[str, Any]) -> dict[str, str]:
    """What a kernel is specialised on: a tensor's dtype, the type of anything else."""
    return {key: str(x.dtype) if isinstance(x, torch.Tensor) else type(x).__name__ for key, x in args.items()}


def run_schedule(run: Run, schedule: Schedule) -> int:
    """One schedule of a run, its result checked; returns the number of switches. Raises as `run` does."""
    return _execute(run, schedule).switches


def trace(run: Run, schedule: Schedule) -> tuple[tuple[Moment, ...], Fault | None]:
    """What every program did in one schedule of a run, up to its end or its fault: what a timeline draws."""
    try:
        return tuple(_execute(run, schedule, trace=True).line.trace or ()), None
    except SimulationFault as error:
        return error.fault.trace, error.fault


def _execute(
    run: Run, schedule: Schedule, strategy: Callable[..., Strategy] | None = None, trace: bool = False,
    waived: dict[str, int] | None = None,
) -> Machine:  # fmt: skip
    """waived: counts findings that are waived."""
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
        cause = error  # with the way to the kernel's line
        machine.line.land()  # what a kernel wrote down may be on its way
        fault = _recorded(run) or error.fault
    if fault is None:
        return machine
    trace_of = tuple(machine.line.trace or ())
    raise SimulationFault(replace(_shown(fault, schedule), switches=machine.switches, trace=trace_of)) from cause


def _shown(fault: Fault, schedule: Schedule) -> Fault:
    """The fault with the schedule that shows it, whose fields it has."""
    return replace(fault, **{**vars(schedule), "resident": str(schedule.resident)})


def _recorded(run: Run) -> Fault | None:
    """A failure that kernels noticed themselves: what follows it in a schedule comes of it."""
    said = run.failures() if run.failures else ()
    return Fault("timed out", "; ".join(said)) if said else None


def _wrong(run: Run) -> Fault | None:
    """The first output that is not the reference."""
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
    """`count` schedules: strategies in turn; all resident, one, a varying number and two in turn.

    Three of four are weak and one of three goes warp by warp, in turn for each strategy and residency.
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
    """Many schedules of a case, until one shows a fault.

    schedules   how many, or which
    seconds     stop after that long, inside a schedule too; the search for a shorter one may take as long again
    progress    called with the number of schedules done
    waive       names of findings (Fault.name) to go past, beside those of the schedules; `waived` counts them

    An exception of the kernel or of the case itself comes out as a fault with rule "raised" and keeps its traceback
    in `raised`; UnsupportedKernel and ValueError, which concern the case as a whole, are raised.
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
    """The kernel's line at which a schedule stood when its time was over, if a machine was running it."""
    holders = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    sites = [site for each in holders if isinstance(site := getattr(each, "site", None), Site) and site.line > 0]
    return str(sites[-1]) if sites else "before its kernels ran"


def attempt(
    case: Case, schedule: Schedule, outcome: Outcome, strategy: Callable[..., Strategy] | None = None
) -> Fault | None:
    """The fault of one schedule, if any; what it cost and what the user's code raised go to `outcome`."""
    made = case.make()
    if made.check is None:
        raise ValueError(f"case {case.name!r} has no reference: its Run needs a `check`")
    check_arguments(made)
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
    """The same fault with the fewest context switches among some more schedules, with a trace.

    Half of the time is for the search; what it found until then is run again for its trace.
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
    """Every schedule of a small case that switches away at most `preemptions` times from a program that could go on.

    Programs switch before what may see others' doing. weak: late effects too, drawn from one seed, not all of them.
    Stops after `limit` schedules. Source: Musuvathi and Qadeer 2007, "Iterative Context Bounding".
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
