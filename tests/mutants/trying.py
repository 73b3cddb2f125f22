"""One mutant under the trials, in a process that interprets."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from fusedtp.sim.case import Run
from fusedtp.sim.explore import Schedule, run_schedule, trace
from fusedtp.sim.faults import Fault, SimulationFault

from . import fit
from .evidence import Evidence, gather
from .load import in_place_of_kernels
from .mutant import Mutant
from .source import Sources
from .trials import Trial, trials
from .verdict import CRASHED, KILLED, MISDIAGNOSED, OVERTIME, SURVIVED, Verdict


class Overtime(BaseException):
    """Not an Exception: no kernel and no case catches it."""


def try_mutant(mutant: Mutant, sources: dict[str, str], count: int, cpu_seconds: float) -> Verdict:
    """Schedules until one shows a fault; `count` of the calls, see trials.py."""
    begin, tried = time.process_time(), 0
    original = Sources(sources)
    kernels = original.kernels_of(mutant.function)

    def verdict(result: str, rule: str = "", where: str = "", report: str = "") -> Verdict:
        spent = time.process_time() - begin
        return Verdict(mutant, "schedules", result, rule, where, report, tried, spent)

    where = ""
    try:
        with in_place_of_kernels(original.edited(mutant.edits)), _limited(cpu_seconds):
            for trial in trials(kernels, count):
                for schedule in trial.schedules:
                    where = f"{trial.case.name}, {schedule}"
                    tried += 1
                    evidence = _evidence(mutant, original, trial, schedule)
                    if evidence is not None:
                        wrong = fit.objections(evidence)
                        said = wrong or [f"shows {sign}" for sign in fit.shown(evidence)]
                        result = MISDIAGNOSED if wrong else KILLED
                        return verdict(result, evidence.rule, where, "\n".join([*said, str(evidence.fault)]))
        return verdict(SURVIVED)
    except Overtime:
        return verdict(OVERTIME, where=where)
    except Exception as error:
        return verdict(CRASHED, where=where, report=f"{type(error).__name__}: {error}")


def _evidence(mutant: Mutant, sources: Sources, trial: Trial, schedule: Schedule) -> Evidence | None:
    """What a schedule shows, None for nothing."""
    run = trial.case.make()
    fault = _fault(run, trial, schedule)
    if fault is None:
        return None
    words = {memory.name: [tensor.tolist() for tensor in memory.tensors] for memory in run.memory}
    return gather(
        mutant, sources, fault, agreeing=trial.succeeds, kernel=trial.kernel,
        own_rows=trial.own_rows if trial.calls else None,
        epochs=[epoch[0] for epoch in words.get("epoch", ())],
        statuses=[tuple(status[:5]) for status in words.get("status", ())],
        traced=lambda: trace(trial.case.make(), schedule, detect=trial.detect)[0],
    )  # fmt: skip


def _fault(run: Run, trial: Trial, schedule: Schedule) -> Fault | None:
    """That a rank took the call for failed comes before what followed from it.

    A failed call reads and writes what is not there yet, see Note [A failed call] in kernels/signals.py.
    """
    try:
        run_schedule(run, schedule, detect=trial.detect)
    except SimulationFault as error:
        failed = [s.tolist() for m in run.memory if m.name == "status" for s in m.tensors if int(s[0])]
        if failed and trial.succeeds:
            return Fault("timed out", f"ranks of one call have recorded failures: {failed}")
        return error.fault
    return None


@contextmanager
def _limited(cpu_seconds: float) -> Iterator[None]:
    """Raises Overtime after that much of this process's own time; for the main thread."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise Overtime

    before = signal.signal(signal.SIGVTALRM, ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
