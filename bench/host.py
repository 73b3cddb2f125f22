"""fusedtp bench host: host time of eager fused calls, of shapes seen before, down to the driver's launch.

Two processes on CPU take the paths of ranks on GPUs: no signal of the host's, no wait. All runs: checks, autograd, the
plan of the call, the workspace, the prepared launch and its pointers, and what Triton does to launch a kernel compiled
for sm_90, its C code included. Only the driver does nothing (idle_driver.py). So CUDA's own time is missing: that of
two launches, and of the order of streams.
"""

from __future__ import annotations

import json
import statistics
import tempfile
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
from fusedtp.ops import engines, operation
from fusedtp.ops.launch import run as launch
from fusedtp.ops.launch.config import Machine

from .idle_driver import install
from .options import Plan
from .rank import Rank, run

RANKS = 2
H100 = Machine("cuda", 132, 232448, name="H100", capability=90)


@dataclass(frozen=True)
class Options:
    """Host time of eager fused calls beside a driver that starts nothing. Microseconds, medians."""

    rounds: int = 2000
    """Interleaved repetitions of each call."""
    tokens: int = 64
    """Rows of all ranks; they cost the host nothing."""
    save: bool = False
    """Keep the result in the repository."""


def measure(rank: Rank, rounds: int, tokens: int) -> dict[str, dict[str, float]]:
    """call -> pass -> microseconds, of this rank. Collective."""
    with tempfile.TemporaryDirectory() as folder:
        install(folder)
        return _measured(rank, rounds, tokens)


def as_on_gpus(rank: Rank) -> None:
    """From now on this rank on a CPU takes the paths of one on a GPU, with compiled kernels."""
    assert rank.comm is not None
    workspace = rank.comm.workspace
    workspace.on_cpu, workspace.meets = False, True
    engines.interpreting = lambda: True  # type: ignore[assignment]
    operation.clock_of = lambda device: "cuda"  # type: ignore[assignment]
    launch.require_triton = lambda device: None
    launch.machine_of = lambda device, ranks: H100  # type: ignore[assignment]


def _measured(rank: Rank, rounds: int, tokens: int) -> dict[str, dict[str, float]]:
    torch.set_num_threads(1)
    group = rank.group
    fusedtp.reserve(group, 1 << 20)
    as_on_gpus(rank)
    bf16 = dict(dtype=torch.bfloat16)
    x, full = torch.zeros(tokens // RANKS, 64, **bf16), torch.zeros(tokens, 64, **bf16)
    w1, w2, w3 = (torch.zeros(64, 64, **bf16) for _ in range(3))
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
    found = run(Plan(), RANKS, measure, options.rounds, options.tokens)
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
