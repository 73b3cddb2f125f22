"""python -m fusedtp.bench.timed_exchange: simulated time of MoE dispatch and combine on a described node, and of a
dispatch fused with the matmuls of gate and up.

    --machine h200 --model deepseek-v3 --tokens 128 1024
    --save bench/results/predicted/exchange-h200.json --against before.json

Tokens choose different experts with equal probability; in a dispatch with matmuls, "gated", all experts get the same
number of rows. Rows are bf16, one per choice. Bandwidth is the number of bytes that the busiest rank sends over its
links, divided by the time of the whole operation, so it is at most the rate of a link. For comparison, UCCL-EP's
authors measured 320 GB/s in a dispatch and 319 in a combine on eight H200, with different kernels: they send a token
only once to a rank even if it chose several experts there. See docs/timed-schedule.md.
"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from fusedtp.checks.dense import launched
from fusedtp.ops.moe.combine import combine_bytes, plan_combine
from fusedtp.ops.moe.dispatch import dispatch_bytes, dispatch_matmul_bytes, plan_dispatch, plan_dispatch_matmul
from fusedtp.ops.moe.plan import Exchange, packed_index, places_of, sort_choices, unpacked
from fusedtp.sim.case import Run, Work
from fusedtp.sim.timed import Engine, Node, load_node

from . import machine
from .shapes import EXPERTS, Experts
from .timed import SIGNATURE, EmptyWorld, machine_of

# GB/s on eight H200: uccl-project/uccl on GitHub, ep/README.md
UCCL_EP = {"dispatch": 320, "combine": 319}
DTYPE = torch.bfloat16


def exchange_run(operation: str, model: Experts, tokens: int, world_size: int, node: Node) -> Run:
    """One operation on every rank, with `tokens` per rank, on a fresh workspace."""
    generator, gpu = torch.Generator().manual_seed(0), machine_of(node)
    sizes, k, hidden = (tokens,) * world_size, model.top_k, model.hidden
    ids = torch.rand(tokens * world_size, model.experts, generator=generator).argsort(1)[:, :k]
    if operation == "gated":
        ids = torch.arange(ids.numel()).view(ids.shape) % model.experts
    sorted_ = [sort_choices(part, model.experts) for part in ids.to(torch.int32).split(tokens)]
    table = torch.stack([counts for counts, _order in sorted_])
    shared = Exchange("", 0, sizes, model.experts, k, 0, "triton")
    shared = shared._replace(max_rows=shared.max_recv_rows)
    if operation == "dispatch":
        nbytes = dispatch_bytes(shared, k, hidden, DTYPE)
    elif operation == "gated":
        shared = shared._replace(max_rows=tokens * k, bound=tokens * k)
        nbytes = dispatch_matmul_bytes(shared, hidden, DTYPE)
    else:
        nbytes = combine_bytes(tokens, k, hidden, DTYPE)
    world = EmptyWorld(world_size, nbytes)
    orders = [order for _counts, order in sorted_]
    work: list[list[Work]] = []
    for rank in range(world_size):
        at, places = shared._replace(rank=rank), places_of(orders[rank])
        words = unpacked(packed_index(table, places, at), at)
        end = words, at, SIGNATURE, None, gpu
        if operation == "gated":
            pair = [torch.empty(at.experts_here, model.intermediate, hidden, dtype=DTYPE) for _ in range(2)]
            planned, _ = plan_dispatch_matmul(
                world.view(rank), rank, torch.empty(tokens, hidden, dtype=DTYPE), orders[rank] // k, pair,
                words.offsets, words, at, SIGNATURE, "silu", True, None, "ieee", gpu,
            )  # fmt: skip
        elif operation == "dispatch":
            x = torch.empty(tokens, hidden, dtype=DTYPE)
            planned, _ = plan_dispatch(world.view(rank), rank, x, k, torch.cat(orders), *end)
        else:
            y = torch.empty(at.max_rows, hidden, dtype=DTYPE)
            choices = places.view(-1, k).to(torch.int32)
            planned, _ = plan_combine(world.view(rank), rank, y, choices, torch.ones(tokens, k), *end)
        work.append([launched(planned)])
    return Run(work, world.memory)


def measured(operation: str, model: Experts, tokens: int, world_size: int, node: Node) -> dict[str, float]:
    """us: time of the operation; MB: sent by the busiest rank; GB/s: their ratio."""
    timeline = Engine(exchange_run(operation, model, tokens, world_size, node), node).run()
    sent = [0] * world_size
    for (source, _destination), nbytes in timeline.sent.items():
        sent[source] += nbytes
    seconds, most = timeline.total, max(sent)
    return {
        "us": round(seconds * 1e6, 1), "MB": round(most / 1e6, 1), "GB/s": round(most / seconds / 1e9, 1)
    }  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Simulated time of dispatch and combine on a node."""

    machine: str = "h100"
    """h100, h200 or a100, or a .json file."""
    model: Literal["mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3"] = "deepseek-v3"
    tokens: list[int] = field(default_factory=lambda: [128, 1024])
    """Tokens per rank; multiples of 8, because the engine does not support data-dependent masks."""
    operations: list[Literal["dispatch", "combine", "gated"]] = field(default_factory=lambda: ["dispatch", "combine"])
    ranks: int = 8
    save: Path | None = None
    """Write the table to this file."""
    against: Path | None = None
    """An earlier file from --save; its times are shown for comparison."""

    def faults(self) -> list[str]:
        """Errors in the options."""
        experts = next(each for each in EXPERTS if each.name == self.model).experts
        found = [f"--tokens {n} must be a positive multiple of 8" for n in self.tokens if n < 1 or n % 8]
        if self.ranks < 2 or experts % self.ranks:
            found.append(f"--ranks {self.ranks} must be at least 2 and divide {experts} experts")
        if self.against is not None and not self.against.is_file():
            found.append(f"--against {self.against}: no such file")
        return found


def main(argv: list[str] | None = None) -> int:
    """Print the table; returns 2 for wrong options."""
    options, console = tyro.cli(Options, prog="python -m fusedtp.bench.timed_exchange", args=argv), Console()
    try:
        faults, node = options.faults(), load_node(options.machine)
    except ValueError as error:
        console.print(str(error), style="red", markup=False)
        return 2
    if faults:
        console.print("\n".join(faults), style="red", markup=False)
        return 2
    model = next(each for each in EXPERTS if each.name == options.model)
    before = json.loads(options.against.read_text())["rows"] if options.against is not None else {}
    table = Table(title=f"{model.name}, {options.ranks} x {node.name}, predicted")
    was = ["us before"] if before else []
    for name in ("operation", "tokens a rank", "MB sent", *was, "us", "GB/s", "UCCL-EP on H200"):
        table.add_column(name, justify="left" if name == "operation" else "right")
    rows: dict[str, dict[str, float]] = {}
    every = [(operation, tokens) for tokens in options.tokens for operation in options.operations]
    for operation, tokens in track(every, "simulated", console=console, transient=True):
        key, row = f"{operation} {tokens}", measured(operation, model, tokens, options.ranks, node)
        rows[key] = row
        was = [f"{before[key]['us']:.0f}" if key in before else ""] if before else []
        table.add_row(
            operation, str(tokens), f"{row['MB']:.1f}", *was, f"{row['us']:.0f}", f"{row['GB/s']:.0f}",
            str(UCCL_EP.get(operation, "")),
        )  # fmt: skip
    console.print(table)
    if options.save is not None:
        words = ["python", "-m", "fusedtp.bench.timed_exchange", *(sys.argv[1:] if argv is None else argv)]
        about = {
            "node": node.name,
            "unit": "predicted",
            "commit": machine.commit(),
            "command": shlex.join(words),
        }
        options.save.parent.mkdir(parents=True, exist_ok=True)
        options.save.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
