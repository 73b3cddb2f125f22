"""Faults under their trials: one, all that one kernel's PTX can have, everything in several processes."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, astuple, dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from fusedtp.sim import explore
from fusedtp.sim.faults import UnsupportedKernel
from fusedtp.sim.ptx import TARGETS
from fusedtp.sim.ptx.launch import Compiler

from . import ptx
from .equivalent import EQUIVALENT
from .source import OPERATORS, Fault, faults, functions, put
from .trials import KERNELS, Trial, trials

SCHEDULES, WARPS = 4, 16  # of each trial; of a barrier in PTX, which warps show that run one at a time
MOST_TURNS = 30_000  # of a schedule, which then has no end


@dataclass(frozen=True)
class Verdict:
    """What came of a fault. result: found, survived, or crashed, which is not found either.

    where    the kernel and target of a fault in PTX, "" of one in the source
    reason   of the table of equivalent faults, if it has the fault
    """

    operator: str
    function: str
    text: str
    where: str
    result: str
    said: str = ""
    schedules: int = 0

    @property
    def reason(self) -> str:
        wheres = (self.where, self.where.split(" ")[0], "")
        return next(
            (EQUIVALENT[key] for key in ((*astuple(self)[:3], each) for each in wheres) if key in EQUIVALENT),
            "",
        )

    @property
    def right(self) -> bool:
        """Found; of no fault at all, or of one in the table, not found."""
        return self.result == ("survived" if self.reason or self.operator == "none" else "found")

    def __str__(self) -> str:
        table = f" although the table has: {self.reason}" if self.reason else ""
        return (
            f"{self.result}{table}: {self.operator} in {self.function} `{self.text}` {self.where} {self.said}"
        )


def shown(
    chosen: Sequence[Trial], compilers: Callable[[str], Compiler], fine: bool = False
) -> tuple[str, str, int]:
    """(result, what was said, schedules) of trials until one shows a fault. compilers: target -> its compiler."""
    done = 0
    for trial in chosen:
        patched = patch.multiple("fusedtp.sim.explore", compiler_for=compilers)
        try:
            with patched, patch("fusedtp.sim.ptx.machine.MOST_TURNS", MOST_TURNS):
                outcome = explore(
                    trial.case, trial.schedules(WARPS if fine else SCHEDULES, fine), shrink=False
                )
        except Exception as error:
            kind = "does not compile" if isinstance(error, UnsupportedKernel) else type(error).__name__
            return "crashed", f"{kind} in {trial.case.name}: {str(error)[-300:]}", done
        done += outcome.schedules
        if outcome.fault is not None or outcome.late:
            rule, said = (
                (outcome.fault.rule, outcome.fault.message) if outcome.fault else ("late", outcome.late)
            )
            result = "crashed" if rule in ("raised", "late") else "found"
            return result, f"{rule} in {trial.case.name}: {said[:100]}", done
    return "survived", "", done


def in_source(fault: Fault) -> list[Verdict]:
    """A fault in the source."""
    chosen = [*trials(fault.kernels)]  # what those of one rank must give is found without the fault
    with put(fault):
        got = shown(chosen, cache(Compiler))
    return [Verdict(*fault[:3], "", *got)]


def without(kernel: str) -> list[Verdict]:
    """The kernel as it is, in all that faults in it are tried in."""
    got = shown([*trials([kernel])], cache(Compiler))
    return [Verdict("none", kernel, "all trials", "", *got)]


def in_ptx(kernel: str, target: str, only: str = "") -> Iterator[Verdict]:
    """Every fault in the PTX of a kernel, each tried where the kernel was compiled so, first without any."""
    where, last = f"{kernel} {target}", dict[ptx.Site, Verdict]()
    for trial in trials([kernel], target):
        base = Compiler(target)
        clean = shown([trial], {target: base}.__getitem__)
        if clean[0] != "survived":
            yield Verdict("none", kernel, trial.case.name, where, *clean)
        own = {text for text, *_ in base._made.values() if f".entry {kernel}(" in text}
        for site in dict.fromkeys(site for text in own for site in ptx.sites(text) if only in site[0]):
            if site not in last or last[site].result == "survived":
                other = Compiler(target)
                for key, (text, shared, maps) in base._made.items():
                    other._made[key] = ptx.edited(text, site) if text in own else text, shared, maps
                got = shown([trial], {target: other}.__getitem__, site[0] == "ptx: drop barrier")
                last[site] = Verdict(*site, where, *got)
    yield from last.values()


Task = tuple[str, Callable[..., Iterable[Verdict]], tuple[Any, ...]]  # its name, what does it, and of what


def tasks(only: str = "") -> list[Task]:
    """Each fault in the source, and the PTX of each kernel. only: words of an operator's name."""
    chosen = [fault for fault in faults() if only in fault.operator]
    sites = Counter(fault.operator for fault in chosen)
    chosen.sort(key=lambda fault: sites[fault.operator])  # operators with many sites last
    made: list[Task] = [] if only else [(f"none | {kernel}", without, (kernel,)) for kernel in KERNELS]
    made += [(" | ".join(fault[:3]), in_source, (fault,)) for fault in chosen]
    if any(only in name for name in ptx.OPERATORS):
        every = itertools.product(KERNELS, TARGETS, [only])
        made += [(" | ".join(("ptx", *each)), in_ptx, each) for each in every]
    return made


def holes(launched: Iterable[str], operators: Iterable[str]) -> list[str]:
    """Of kernels that are launched those that nobody tries; operators that are not among these."""
    missing = {*OPERATORS, *ptx.OPERATORS} - {*operators}
    return [f"nobody tries {name}" for name in {*launched} - {*KERNELS}] + [
        f"{name} has no site" for name in missing
    ]


def _done(task: Task) -> list[Verdict]:
    return [*task[1](*task[2])]


def run(
    chosen: Sequence[Task], workers: int, keep: Path | None, progress: Callable[[int], Any]
) -> list[Verdict]:
    """All tasks, each kept as it is done. A run that was broken off goes on where the kernels are the same."""
    source = hashlib.sha256("".join(f.src for f in functions()).encode()).hexdigest()
    lines = [json.loads(line) for line in keep.read_text().splitlines()] if keep and keep.exists() else []
    kept = {name: [Verdict(**each) for each in made] for name, of, made in lines if of == source}
    found = [verdict for name, *_ in chosen for verdict in kept.get(name, ())]
    folder = tempfile.TemporaryDirectory(prefix="fusedtp-seeded-")
    with folder as cache, ProcessPoolExecutor(workers, get_context("spawn"), _begin, (cache,)) as pool:
        running = {pool.submit(_done, task): task[0] for task in chosen if task[0] not in kept}
        for n, future in enumerate(as_completed(running), start=1):
            found += future.result()
            if keep:
                with keep.open("a") as file:
                    file.write(
                        json.dumps([running[future], source, [asdict(v) for v in future.result()]]) + "\n"
                    )
            progress(len(chosen) - len(running) + n)
    return found


def _begin(cache: str) -> None:
    """Of a worker. Nobody wants what faults compile to in a cache that stays."""
    os.environ["TRITON_CACHE_DIR"] = cache
    torch.set_num_threads(1)
