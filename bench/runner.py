"""Runs the cases of all requested suites, grouped by world, and writes the result.

A world is started once for all its cases. Each case is written to a journal as soon as it is measured. A case that
raises becomes a row with the error, and the world is started again for the remaining cases.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from . import machine, output
from . import rank as ranks
from .cases import Case
from .options import Options, Plan, Refused, plan_of
from .rank import Rank
from .rows import FAILED, FORMAT, Journal, Row
from .suites import SUITES

Job = tuple[str, Case]  # suite, case


def jobs_of(plan: Plan, suites: Sequence[str]) -> dict[int, list[Job]]:
    """Number of ranks -> its cases, without duplicates. A single-device suite uses --tp only for its shapes."""
    found: dict[int, list[Job]] = {}
    for name in suites:
        suite = SUITES[name]
        for tp in suite.worlds or plan.tp:
            count = 1 if suite.ranks == "one" else tp
            if count > 1 or suite.ranks != "several":
                found.setdefault(count, []).extend((name, case) for case in suite.cases(plan, tp))
    return {count: list(dict.fromkeys(jobs)) for count, jobs in found.items() if jobs}


def run_cases(rank: Rank, jobs: Sequence[Job], seconds: float, path: str, key: dict[str, Any]) -> None:
    """Run every job in this world; rank 0 writes the journal. Collective."""
    journal = Journal(Path(path), key, resume=True) if rank.rank == 0 else None
    rank.seconds = seconds
    rank.measure_roofs()
    if journal is not None:
        journal.add(world=f"{rank.world}x{rank.world_size}", roofs=rank.roofs)
    for suite, case in jobs:
        rows = SUITES[suite].measure(rank, case)
        if journal is not None:
            failed = any(row.note.startswith(FAILED) for row in rows)
            journal.add_case(suite, _name(rank.world_size, case), rows, failed)


def _name(world_size: int, case: Case) -> str:
    return f"{world_size}: {case.label}"


def measure(plan: Plan, suites: Sequence[str], journal: Journal, key: dict[str, Any]) -> None:
    """Measure all cases that are not in the journal yet. Raises Refused for an impossible world."""
    jobs = jobs_of(plan, suites)
    seconds = plan.seconds / max(1, sum(len(each) for each in jobs.values()))
    for count, every in jobs.items():
        while left := [(s, c) for s, c in every if (s, _name(count, c)) not in journal.done()]:
            started = len(journal.lines())
            _free()
            try:
                ranks.run(plan, count, run_cases, left, seconds, str(journal.path), key)
            except (Refused, KeyboardInterrupt):
                raise
            except Exception as error:
                # If not even the roofs were measured, the world itself does not work, so all its cases fail.
                done, dead = journal.done(), len(journal.lines()) == started
                waiting = [(s, c) for s, c in left if (s, _name(count, c)) not in done]
                for suite, case in waiting if dead else waiting[:1]:
                    _fail(plan, journal, count, suite, case, error)


def _free() -> None:
    """Free device memory that a previous world, or its error, still holds. No rank runs now that could wait for it."""
    gc.collect()
    torch.cuda.empty_cache()  # no effect if CUDA was not started


def _fail(plan: Plan, journal: Journal, count: int, suite: str, case: Case, error: Exception) -> None:
    why = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"
    print(f"fusedtp bench: {suite} {case.label} failed: {why}", file=sys.stderr)
    world = plan.world if count > 1 else "one"
    row = Row(suite, case.shape, case.dtype, "all", world, count, note=FAILED + why)
    journal.add_case(suite, _name(count, case), [row], failed=True)


def run(suite: str, argv: Sequence[str], options: Options) -> int:
    """Measure a suite, or several for "all"; print, write, draw. Returns 0; 1 if a case failed; 2 for bad input."""
    try:
        plan = plan_of(options)
        suites = _chosen(suite, options.suites)
        if not jobs_of(plan, suites):
            raise ValueError(f"{suite} has no case for these shapes and --tp")
    except ValueError as error:
        print(f"fusedtp bench: {error}", file=sys.stderr)
        return 2
    about = machine.describe_run(plan.device, [suite, *argv])
    path = Path(options.out) if options.out else machine.folder_of(about, options.save) / f"{suite}.json"
    if why := _unwritable(path):
        print(f"fusedtp bench: --out {path}: {why}", file=sys.stderr)
        return 2
    key = {
        "format": FORMAT, "fusedtp": about["fusedtp"], "commit": about["commit"], "suites": list(suites),
        "plan": _plain(plan),
    }  # fmt: skip
    resume = options.resume and bool(about["commit"])  # without a commit, it is unknown what was measured
    if resume and _finished(path, key):
        print(f"{path}: already measured at this commit")
        return 1 if json.loads(path.read_text())["failures"] else 0
    journal = Journal(path.with_suffix(".partial.jsonl"), key, resume)
    with stopped_by(signal.SIGTERM):
        try:
            measure(plan, suites, journal, key)
        except Refused as error:
            print(f"fusedtp bench: {error}", file=sys.stderr)
            return 2
        except (
            Stopped,
            KeyboardInterrupt,
        ) as end:  # write the results so far, without waiting for the ranks
            for rank in multiprocessing.active_children():
                rank.terminate()
            _write(path, key, about, journal, complete=False)
            said = f"fusedtp bench: stopped; {path} holds what was measured, and --resume continues"
            print(said, file=sys.stderr, flush=True)
            os._exit(124 if isinstance(end, Stopped) else 130)
    about["gpu_state_after"] = machine.gpu_state() if plan.device == "cuda" else None
    result = _write(path, key, about, journal, complete=True)
    rows, roofs = journal.rows(), journal.roofs()
    journal.path.unlink()
    output.show(about, roofs, rows)
    written = [path]
    if options.plots:
        try:
            written += output.draw(path, about, roofs, rows)
        except Exception as error:  # the result is already written
            print(f"fusedtp bench: no pictures: {type(error).__name__}: {error}", file=sys.stderr)
    print(", ".join(map(str, written)))
    return 1 if result["failures"] else 0


def _unwritable(path: Path) -> str:
    """Why no result can be written to this path, or ""; checked before anything is measured."""
    if path.is_dir():
        return "is a folder; name a file"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            return ""
    except OSError as error:
        return error.strerror or str(error)


class Stopped(BaseException):
    """This process received a signal to end."""


@contextmanager
def stopped_by(number: signal.Signals) -> Iterator[None]:
    """In this context the signal raises Stopped (in the main thread only)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise Stopped

    before = signal.signal(number, stop)
    try:
        yield
    finally:
        signal.signal(number, before)


def _write(path: Path, key: dict[str, Any], about: dict[str, Any], journal: Journal, complete: bool) -> dict[str, Any]:
    result = {
        "format": FORMAT, "complete": complete, "key": key, "machine": about, "roofs": journal.roofs(),
        "failures": journal.failures(), "rows": [row.as_dict() for row in journal.rows()],
    }  # fmt: skip
    path.write_text(json.dumps(result, indent=1) + "\n")
    return result


def _chosen(suite: str, only: str) -> tuple[str, ...]:
    if suite != "all":
        if only:
            raise ValueError("--suites can be used only with `all`")
        return (suite,)
    wanted = [name.strip() for name in only.split(",") if name.strip()] or list(SUITES)
    wrong = [name for name in wanted if name not in SUITES]
    if wrong:
        raise ValueError(f"unknown suite {', '.join(wrong)}: it must be one of {', '.join(SUITES)}")
    return tuple(wanted)


def _plain(plan: Plan) -> dict[str, Any]:
    """The plan as read back from JSON, without the time budget."""
    found: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(plan)))
    del found["seconds"]
    return found


def _finished(path: Path, key: dict[str, Any]) -> bool:
    try:
        found = json.loads(path.read_text())
        return bool(found["complete"] and found["key"] == key)
    except (OSError, ValueError, KeyError, TypeError):
        return False
