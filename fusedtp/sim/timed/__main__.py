"""`python -m fusedtp.sim.timed`: how long a fused operation takes on a described node, and what would be better.

python -m fusedtp.sim.timed --operation all_gather_matmul --shape llama3-70b --tokens 16384 --compare programs
python -m fusedtp.sim.timed --published
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table

from ..faults import SimulationFault, UnsupportedKernel
from ..timeline import html
from .cases import model_problem
from .measure import Measured, compared
from .node import Node, load_node, machines
from .published import NOT_MODELLED, predictions
from .timeline import Timeline

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Options:
    """Simulated time of a fused operation on a node.

    machine     a node that comes with the package (h100, h200, a100), or a .json file
    operation   what to run
    shape       a model whose MLP it is part of (llama3-8b, llama3-70b, llama3-405b, qwen3-32b), or NxK of one weight
    tokens      rows of all ranks together
    tp          ranks
    dtype       of all operands
    compare     what to vary: who brings a gather's rows, what a flag covers, programs that send or reduce, tile orders
    path        print what the end of the first row waited for, stretch by stretch
    timeline    write what each program did as HTML, of the first row
    published   compare the model with published times instead; takes some minutes
    """

    machine: str = "h100"
    operation: Literal["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"] = (
        "all_gather_matmul"
    )
    shape: str = "llama3-8b"
    tokens: int = 8192
    tp: int = 8
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    compare: Literal["none", "transport", "chunk", "programs", "order", "all"] = "none"
    path: bool = False
    timeline: Path | None = None
    published: bool = False

    def faults(self) -> list[str]:
        """Everything that is wrong with the options."""
        found = []
        if self.machine not in machines() and not Path(self.machine).is_file():
            found.append(f"--machine {self.machine}: neither a file nor one of {', '.join(machines())}")
        if self.tokens < 1:
            found.append(f"--tokens {self.tokens}: at least 1 is wanted")
        if self.tp < 2:
            found.append(f"--tp {self.tp}: at least 2 ranks are wanted")
        return found


def main(argv: list[str] | None = None) -> int:
    """Print the table; 2 for wrong options, 1 for a schedule that does not end."""
    options = tyro.cli(Options, prog="python -m fusedtp.sim.timed", args=argv)
    console = Console()
    if options.faults():
        console.print("\n".join(options.faults()), style="red", markup=False)
        return 2
    try:
        node = load_node(options.machine)
        if options.published:
            console.print(_published(node))
            console.print("Not modelled:", *NOT_MODELLED, sep="\n  ", markup=False)
        else:
            _compared(options, node, console)
    except (ValueError, UnsupportedKernel) as error:
        console.print(str(error), style="red", markup=False)
        return 2
    except SimulationFault as fault:
        console.print(str(fault), markup=False)
        return 1
    return 0


def _compared(options: Options, node: Node, console: Console) -> None:
    problem = model_problem(
        options.operation, options.shape, options.tokens, options.tp, dtype=DTYPES[options.dtype]
    )
    size = f"{options.shape}, {options.tokens} tokens, {options.dtype}"
    title = f"{options.operation}, {size}, {options.tp} x {node.name}"
    table = Table(title=title, caption="microseconds; the path is what the end waited for")
    for name in (
        "variant",
        "fused",
        "product",
        "copies",
        "unfused",
        "hidden",
        "critical path",
        "simulated in",
    ):
        table.add_column(name, justify="left" if name in ("variant", "critical path") else "right")
    first: Timeline | None = None
    begin = time.perf_counter()
    for name, got in compared(problem, node, options.compare):
        now = time.perf_counter()
        table.add_row(*_cells(name, got), f"{now - begin:.0f} s")
        begin = now
        first = first or got.fused
    console.print(table)
    assert first is not None
    if options.path:
        console.print(_path(first))
    if options.timeline is not None:
        options.timeline.write_text(html(first.moments(), title=title))


def _path(timeline: Timeline) -> Table:
    table = Table(title="critical path", caption="microseconds")
    for name in ("from", "to", "takes", "rank", "launch", "what"):
        table.add_column(name, justify="left" if name in ("launch", "what") else "right")
    for step in timeline.critical_stretches():
        times = [f"{seconds * 1e6:.1f}" for seconds in (step.begin, step.end, step.end - step.begin)]
        table.add_row(*times, str(step.rank), step.launch, step.what)
    return table


def _cells(name: str, got: Measured) -> list[str]:
    parts = sorted(got.fused.critical().items(), key=lambda item: -item[1])
    path = ", ".join(f"{what} {_us(seconds)}" for what, seconds in parts)
    times = [_us(t) for t in (got.fused.total, got.matmul, got.communication, got.unfused)]
    return [name, *times, f"{got.hidden:.0%}", path]


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.0f}"


def _published(node: Node) -> Table:
    table = Table(title=f"published times and those of the model, {node.name}", caption="microseconds")
    for name in ("source", "problem", "what", "predicted", "published", "error"):
        table.add_column(name, justify="right" if name in ("predicted", "published", "error") else "left")
    for row in predictions(node):
        predicted = "no such kernel" if row.predicted is None else _us(row.predicted)
        error = "" if row.error is None else f"{row.error:+.0%}"
        table.add_row(row.source, row.what, row.quantity, predicted, _us(row.published), error)
    return table


if __name__ == "__main__":
    sys.exit(main())
