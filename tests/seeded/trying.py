"""Faults under their trials: one in the source, all of them in a kernel's PTX, all faults in several processes."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import NamedTuple
from unittest.mock import patch

import triton

from fusedtp.sim import UnsupportedKernel, explore
from fusedtp.sim.ptx import TARGETS
from fusedtp.sim.ptx.launch import Compiler

from . import ptx
from .source import Fault, faults, looking_at_once, put
from .trials import KERNELS, Trial, trials, under_trial
from .verdicts import Kept, Verdict, key

MOST_TURNS = 200_000  # of a schedule, which then has no end; without a fault it has up to 80,000


@patch("fusedtp.sim.ptx.machine.MOST_TURNS", MOST_TURNS)
def shown(chosen: Iterable[Trial], compilers: dict[str, Compiler]) -> tuple[str, str, int]:
    """Run trials until one shows a fault: (result, message, number of schedules). compilers: by target."""
    every = [(trial, each) for trial in chosen for each in trial.schedules()]
    with patch("fusedtp.sim.explore.compiler_for", compilers.__getitem__):
        for done, (trial, schedule) in enumerate(every, start=1):
            name = trial.case.name
            try:
                outcome = explore(trial.case, [schedule], shrink=False)
            except Exception as error:
                kind = "does not compile" if isinstance(error, UnsupportedKernel) else type(error).__name__
                return "crashed", f"{kind} in {name}: {str(error)[-300:]}", done
            rule, harmless = (outcome.fault.rule, trial.forgives(outcome.fault)) if outcome.fault else ("", True)
            if outcome.late or rule == "raised":
                return "crashed", f"{outcome.fault or outcome.late} in {name}"[:400], done
            if not harmless:
                return "found", f"{rule} in {name}", done
    return "survived", "", len(every)


def in_source(kernels: Collection[str], fault: Fault | None = None) -> list[Verdict]:
    """Try a fault in the source of these kernels, or no fault, in all trials of these kernels."""
    name = fault.name if fault else f"none | {', '.join(kernels)}"
    chosen = [*trials(kernels)]  # what those of one rank must give is found without the fault
    with put(fault) if fault else nullcontext():
        made = Verdict(name, "", *shown(chosen, {target: Compiler(target) for target in TARGETS}))
        if made.missed:
            with looking_at_once():
                result, said, more = shown(chosen, {target: Compiler(target) for target in TARGETS})
            made = Verdict(name, "", result, said, made.schedules + more)
    return [made]


def in_ptx(kernel: str, target: str, only: str = "") -> list[Verdict]:
    """Try every fault in the PTX of a kernel, each in the trials that compile its site; first without a fault."""
    where, wrong, last = f"{kernel} {target}", list[Verdict](), dict[ptx.Site, Verdict]()
    for look in (nullcontext, looking_at_once):
        for trial in trials([kernel], target):
            first = look is nullcontext
            again = {site for site, made in last.items() if made.missed or (first and made.result == "survived")}
            if not first and not again:
                break
            base = Compiler(target)
            with look():
                clean = Verdict(f"none | {kernel}", where, *shown([trial], {target: base}))
            wrong += [] if clean.right else [clean]
            own = {text for text, *_ in base._made.values() if f".entry {kernel}(" in text}
            for site in dict.fromkeys(site for text in own for site in ptx.sites(text) if only in site[0]):
                if site not in last or site in again:
                    other = Compiler(target)
                    for of, (text, shared, maps, scratch) in base._made.items():
                        other._made[of] = ptx.edited(text, site) if text in own else text, shared, maps, scratch
                    last[site] = Verdict(" | ".join(site), where, *shown([trial], {target: other}))
    return [*wrong, *last.values()]


class Task(NamedTuple):
    """The name begins with the operator, or with "ptx" for a kernel's PTX."""

    name: str
    key: str
    run: Callable[[], list[Verdict]]

    def tried(self) -> Kept:
        return Kept(self.name, self.key, triton.__version__, self.run())


def tasks(only: str = "") -> list[Task]:
    """Each kernel as it is, each fault in the source, the PTX of each kernel. only: part of a task's name."""
    made = [Task(f"none | {name}", key(under_trial([name])), partial(in_source, [name])) for name in KERNELS]
    every = [*faults()]
    sites = Counter(fault.operator for fault in every)
    every.sort(key=lambda fault: sites[fault.operator])  # operators with many sites last
    made += [Task(f.name, key(under_trial(f.kernels), f.source), partial(in_source, f.kernels, f)) for f in every]
    patterns = repr([(name, pattern.pattern) for name, (pattern, _) in ptx.OPERATORS.items()])
    for kernel, target in itertools.product(KERNELS[::-1], TARGETS):  # the fused ones last
        of = key(under_trial([kernel]), "", target, patterns)
        made.append(Task(f"ptx | {kernel} | {target}", of, partial(in_ptx, kernel, target)))
    return [task for task in made if only in task.name]


def run(chosen: Sequence[Task], workers: int, seconds: float | None = None) -> Iterator[Kept]:
    """Yield each task's verdicts as they come, from several processes. Unfinished tasks are dropped after `seconds`."""
    if not chosen:
        return
    end = time.monotonic() + (seconds or 1e9)
    with (
        tempfile.TemporaryDirectory(prefix="fusedtp-seeded-") as cache,  # one that stays is no place for faults
        patch.dict(os.environ, TRITON_CACHE_DIR=cache, OMP_NUM_THREADS="1"),
        multiprocessing.get_context("spawn").Pool(workers) as pool,
        suppress(multiprocessing.TimeoutError),
    ):
        results = pool.imap_unordered(Task.tried, chosen)
        for _ in chosen:
            yield results.next(max(0, end - time.monotonic()))
