"""fusedtp bench host: host time of eager fused calls, of shapes seen before, with kernels' launches stubbed.

Two processes on CPU take the paths of ranks on GPUs: no signal of the host's, no wait. All else runs: checks,
autograd, the plan of the call, the workspace, the prepared launch and its pointers. Stubbed is what Triton does from
`kernel[grid]` on, its binding of arguments included. Missing beside a GPU are CUDA's own calls: two for the order of
streams and one to enter the device.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.table import Table

import fusedtp

from . import machine
from .options import Plan
from .rank import Rank, run

RANKS = 2
PLAN = Plan(interpret=True)


@dataclass(frozen=True)
class Options:
    """Host time of eager fused calls, launches stubbed. Microseconds, medians."""

    rounds: int = 2000
    """Interleaved repetitions of each call."""
    tokens: int = 64
    """Rows of all ranks; they cost the host nothing."""
    save: bool = False
    """Keep the result in the repository."""


def measure(rank: Rank, rounds: int, tokens: int) -> dict[str, dict[str, float]]:
    """call -> pass -> microseconds, of this rank. Collective."""
    from triton.runtime.interpreter import InterpretedFunction

    torch.set_num_threads(1)
    group, comm = rank.group, rank.comm
    assert comm is not None
    fusedtp.reserve(group, 1 << 20)
    workspace = comm.workspace
    workspace.on_cpu, workspace.meets = False, True
    InterpretedFunction.__getitem__ = lambda self, grid: lambda *args, **kwargs: None
    x, full = torch.zeros(tokens // RANKS, 64), torch.zeros(tokens, 64)
    w1, w2, w3 = (torch.zeros(64, 64) for _ in range(3))
    calls: dict[str, Callable[..., Any]] = {
        "all_gather_matmul": lambda x, full, w: fusedtp.all_gather_matmul(x, [w], group, engine="triton")[0],
        "all_gather_matmul, 3 weights": lambda x, full, w: fusedtp.all_gather_matmul(
            x, [w, w2, w3], group, engine="triton"
        )[0],
        "matmul_reduce_scatter": lambda x, full, w: fusedtp.matmul_reduce_scatter(
            full, w, group, engine="triton"
        ),
        "matmul_all_reduce": lambda x, full, w: fusedtp.matmul_all_reduce(full, w, group, engine="triton"),
    }
    taken: dict[str, dict[str, list[float]]] = {name: {} for name in calls}

    def timed(name: str, which: str, call: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        made = call()
        taken[name].setdefault(which, []).append(1e6 * (time.perf_counter() - begin))
        return made

    for _ in range(rounds + 10):
        for name, call in calls.items():
            with torch.no_grad():
                timed(name, "no gradients", lambda: call(x, full, w1))  # noqa: B023
                for _ in range(4):  # as in a loop that does nothing else: all is in the core's caches
                    timed(name, "repeated", lambda: call(x, full, w1))  # noqa: B023
            leaves = x.detach().requires_grad_(), full.detach().requires_grad_(), w1.detach().requires_grad_()
            y = timed(name, "forward", lambda: call(*leaves))  # noqa: B023
            dy = torch.ones_like(y)
            timed(name, "backward", lambda: y.backward(dy))  # noqa: B023
    return {
        name: {which: statistics.median(each[10:]) for which, each in of.items()}
        for name, of in taken.items()
    }


def main(argv: Sequence[str]) -> int:
    """Measure, print, write."""
    options = tyro.cli(Options, args=list(argv), prog="fusedtp bench host", description=Options.__doc__)
    about = machine.describe(RANKS, list(argv))
    found = run(PLAN, RANKS, measure, options.rounds, options.tokens)
    table = Table("call", "no gradients", "repeated", "forward", "backward", title="host time, us")
    for name, of in found.items():
        table.add_row(name, *(f"{us:.1f}" for us in of.values()))
    console = Console(width=None if Console().is_terminal else 130)
    console.print(", ".join(f"{key} {value}" for key, value in about.items()), style="dim", soft_wrap=True)
    console.print(table)
    if options.save:
        path = machine.folder_of(about, True) / "host.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dict(about=about, us=found), indent=1) + "\n")
        console.print(str(path), soft_wrap=True)
    return 0
