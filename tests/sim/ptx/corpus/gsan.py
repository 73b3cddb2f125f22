"""python -m tests.sim.ptx.corpus.gsan: run the corpus under Triton's GSan on a GPU, and compare with the simulator.

GSan instruments a compiled kernel and runs it on CUDA GPUs. All ranks of a case run on one GPU here, each on its own
stream. Each kernel has its own process, because a race ends the process. This needs Triton >= 3.9 and a CUDA GPU, and
has not been run on one yet; the parts that need neither are tested. GSan does not see accesses by inline PTX, nor races
between threads of one program, so differences are expected: the table says where.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from fusedtp.sim import Case, explore
from fusedtp.sim.case import Copy, Launch, Run, Work, memory_map
from fusedtp.sim.explore import schedules

from . import right, wrong

MODULE = "tests.sim.ptx.corpus.gsan"
RACES = "race detected"  # what GSan prints of one
UNABLE = 3  # exit code: a stream waits for a value or writes one


@dataclass(frozen=True)
class Options:
    """Run the corpus under GSan, and compare its findings with the simulator's."""

    only: str = ""
    """Only kernels with this in their name."""
    seconds: float = 60.0
    """Time limit per kernel on the GPU; a kernel that exceeds it is in deadlock."""
    run_one: str = ""
    """Used by the command itself: run this kernel on the GPU, in this process."""


def kernels() -> dict[str, tuple[bool, Callable[[], Run]]]:
    """Name -> (whether it is wrong, function that makes a run of it)."""
    found: dict[str, tuple[bool, Callable[[], Run]]] = {
        name.removeprefix("case_"): (False, make) for name, make in vars(right).items() if name.startswith("case_")
    }
    for each in wrong.WRONG:
        make: Any = each.make
        found[each.name] = (True, lambda make=make, bug=each.bug: make(bug))  # type: ignore[misc]
    return found


# -- a run elsewhere ---------------------------------------------------------------------------------------------------


class Moved:
    """A run with copies of its tensors on another device; tables of addresses point to the copies.

    run    the same work, on the copies
    back   copies the results back into the run's own tensors, tables excepted, so that its check can read them
    """

    def __init__(self, run: Run, device: str) -> None:
        self.allocations = memory_map(run).allocations
        self.copies = [each.tensor.to(device, copy=True) for each in self.allocations]
        self.device = device
        self.tables = ["(table of " in each.name for each in self.allocations]
        for copy, table in zip(self.copies, self.tables, strict=True):
            if table:
                held = [self.address(each) for each in copy.flatten().tolist()]
                copy.copy_(torch.tensor(held, dtype=torch.int64).view(copy.shape))
        memory = [replace(each, tensors=tuple(self.tensor(t) for t in each.tensors)) for each in run.memory]
        self.run = replace(run, work=[[self.moved(each) for each in of] for of in run.work], memory=memory)

    def address(self, old: int) -> int:
        at = next(n for n, a in enumerate(self.allocations) if a.base <= old < a.base + a.nbytes)
        return self.copies[at].data_ptr() + old - self.allocations[at].base

    def tensor(self, old: Tensor) -> Tensor:
        if old.untyped_storage().nbytes() == 0:
            return old.to(self.device)
        base = old.untyped_storage().data_ptr()
        copy = self.copies[next(n for n, a in enumerate(self.allocations) if a.base == base)]
        return torch.empty(0, dtype=old.dtype, device=self.device).set_(
            copy.untyped_storage(), old.storage_offset(), old.shape, old.stride()
        )

    def moved(self, work: Work) -> Work:
        if isinstance(work, Launch):
            return replace(work, args={name: self.argument(value) for name, value in work.args.items()})
        if isinstance(work, Copy):
            return replace(work, dst=self.tensor(work.dst), src=self.tensor(work.src))
        return replace(work, flag=self.tensor(work.flag))

    def argument(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.tensor(value)
        if isinstance(value, tuple):
            made = [self.argument(each) for each in value]
            return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
        return value

    def back(self) -> None:
        for each, copy, table in zip(self.allocations, self.copies, self.tables, strict=True):
            if not table:
                each.tensor.copy_(copy)


# -- on the GPU --------------------------------------------------------------------------------------------------------


def run_one(name: str) -> int:
    """Run a kernel's ranks on the GPU under GSan, which ends the process at a race. Returns 1 for a wrong value."""
    from triton.experimental.gsan import create_mem_pool

    triton.knobs.compilation.instrumentation_mode = "gsan"
    run = kernels()[name][1]()
    if any(not isinstance(each, Launch | Copy) for of in run.work for each in of):
        return UNABLE
    with torch.cuda.use_mem_pool(create_mem_pool()):
        moved = Moved(run, "cuda")
        torch.cuda.synchronize()
        for of in moved.run.work:
            streams: dict[str, Any] = {}
            for work in of:
                with torch.cuda.stream(streams.setdefault(work.stream, torch.cuda.Stream())):
                    if isinstance(work, Launch):
                        work.kernel[work.grid](**work.args, **work.options)
                    elif isinstance(work, Copy):
                        work.dst.copy_(work.src, non_blocking=True)
        torch.cuda.synchronize()
    moved.back()
    assert run.check is not None
    return int(bool(run.check()))


def verdict(code: int | None, said: str) -> str:
    """One word for a process, from its exit code (None: it did not end) and its output."""
    if RACES in said:
        return "race"
    if code == UNABLE and not said.strip():
        return "not run"
    return {None: "deadlock", 0: "ok", 1: "crashed" if "Traceback" in said else "wrong value"}.get(code, "crashed")


def by_gsan(name: str, seconds: float) -> str:
    words = [sys.executable, "-m", MODULE, "--run-one", name]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return verdict(None, "")
    return verdict(done.returncode, done.stdout + done.stderr)


def by_machine(make: Callable[[], Run], name: str) -> str:
    outcome = explore(Case(name, make), list(schedules(24, target="sm_90")), shrink=False)
    return "ok" if outcome.fault is None else outcome.fault.rule


def main() -> int:
    """Compare kernel by kernel. Exit code 2 if GSan cannot run."""
    options = tyro.cli(Options, prog=f"python -m {MODULE}")
    if options.run_one:
        return run_one(options.run_one)
    if not torch.cuda.is_available() or importlib.util.find_spec("triton.experimental.gsan") is None:
        print(f"python -m {MODULE}: error: it needs a CUDA GPU and Triton >= 3.9", file=sys.stderr)
        return 2
    console, table = Console(), Table("kernel", "is", "machine", "GSan")
    counts = Counter[tuple[bool, bool, bool]]()
    chosen = {name: each for name, each in kernels().items() if options.only in name}
    for name, (bad, make) in track(chosen.items(), "kernels", console=console):
        ours, theirs = by_machine(make, name), by_gsan(name, options.seconds)
        counts[bad, ours != "ok", theirs not in ("ok", "not run")] += 1
        if (ours != "ok") != (theirs not in ("ok", "not run")) or (ours == "ok") == bad:
            table.add_row(name, "wrong" if bad else "right", ours, theirs)
    console.print(table)
    for (bad, ours, theirs), count in sorted(counts.items()):
        found = [who for who, does in (("the machine", ours), ("GSan", theirs)) if does]
        console.print(f"{count} {'wrong' if bad else 'right'} kernels: found by {' and '.join(found) or 'neither'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
