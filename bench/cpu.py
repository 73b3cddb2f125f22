"""fusedtp bench cpu, or python -m bench: operations and one training step on this machine's CPU, in five minutes.

Operations are compared with gloo collectives and matmuls:

    share removed   (t_gloo - t_ours) / (t_gloo - t_bare), of the time that gloo adds to the bare matmuls

A training step of a small model (forward, loss, backward and AdamW) is compared with torch:

    gap closed   (t_torch - t_ours) / (t_torch - t_ceiling)

`collective` is ours with the process group's own collectives. Its difference from torch comes not from fusion but from
other host operations between the matmuls, so the gain is split at this point.
"""

from __future__ import annotations

import gc
import json
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import matplotlib
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh

from fusedtp.nn import ModelConfig, TokenLayout
from fusedtp.ops.rows import split

from . import machine, models, timeline
from .cases import OPERATIONS, Case, ways
from .errors import unit
from .options import Plan
from .rank import Rank, pin, run
from .sample import Spread

matplotlib.use("Agg")

# -- operations -------------------------------------------------------------------------------------------------------


SHAPES = ((512, 512, 1408), (2048, 1024, 2816), (4096, 2048, 2048))  # tokens, K, N
DTYPES = ("float32", "bfloat16")
CASE = ("operation", "dtype", "tokens", "k", "n", "backward")


@dataclass(frozen=True)
class Row:
    """One measured case."""

    case: Case
    bare: Spread
    gloo: Spread
    ours: Spread

    @property
    def ratio(self) -> float:
        return self.gloo.median / self.ours.median

    @property
    def share(self) -> float:
        return (self.gloo.median - self.ours.median) / (self.gloo.median - self.bare.median)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        sizes = {name: getattr(self.case, name) for name in CASE}
        return {**asdict(self), "case": sizes, "ratio": self.ratio, "share_removed": self.share}


@dataclass(frozen=True)
class Result:
    """All rows, and the symmetric memory of their group at the end."""

    rows: list[Row]
    symmetric_bytes: int
    control_bytes: int
    largest_moved_bytes: int

    @property
    def median_share(self) -> float:
        return statistics.median(row.share for row in self.rows)

    @property
    def least_share(self) -> float:
        return min(row.share for row in self.rows)

    @property
    def mean_ratio(self) -> float:
        """Geometric mean."""
        return math.exp(statistics.fmean(math.log(row.ratio) for row in self.rows))

    @property
    def bound_bytes(self) -> int:
        """The bound of DESIGN.md: two slots of the largest gathered or scattered tensor, and flags."""
        return 2 * self.largest_moved_bytes + self.control_bytes

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "rows": [row.as_dict() for row in self.rows],
            "median_share_removed": self.median_share,
            "least_share_removed": self.least_share,
            "geometric_mean_ratio": self.mean_ratio,
            "symmetric_bytes": self.symmetric_bytes,
            "symmetric_bound_bytes": self.bound_bytes,
        }


def moved_bytes(case: Case) -> int:
    """Bytes of the largest tensor that one call gathers or scatters."""
    width = max(case.k, case.width) if case.backward else case.width
    return case.tokens * width * case.itemsize


def all_cases() -> list[Case]:
    """The case of every row of the table: by dtype, then shape, then operation."""
    return [
        Case(operation, dtype, *shape, backward)
        for dtype in DTYPES
        for shape in SHAPES
        for operation in OPERATIONS
        for backward in (False, True)
    ]


def measure_operations(rank: Rank, cases: list[Case], engine: str, budget: float) -> Result:
    """Measure all cases in about `budget` seconds, divided by the square root of their work. Collective."""
    weights = [math.sqrt(case.flops * (3 if case.backward else 1)) for case in cases]
    rows = []
    for case, weight in zip(cases, weights, strict=True):
        rows.append(Row(case, **rank.measure(ways(case, engine), budget * weight / sum(weights))))
    comm = rank.comm
    assert comm is not None
    if not comm.has_workspace:
        return Result(rows, 0, 0, 0)
    held, control = comm.workspace.nbytes, comm.workspace.control.nbytes
    return Result(rows, held, control, max(moved_bytes(case) for case in cases))


# -- the training step ------------------------------------------------------------------------------------------------


TOKENS = 2048
SHAPE = {"hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 1408, "num_hidden_layers": 4}


class Step:
    """A call runs one training step on this rank's rows of the same batch."""

    def __init__(self, model: models.Stack, layout: TokenLayout, config: ModelConfig) -> None:
        self.model, self.layout = model, layout
        x = torch.randn(layout.tokens, config.hidden_size, generator=torch.Generator().manual_seed(1))
        self.x = layout.take(x).to(config.compute_dtype).requires_grad_()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def __call__(self) -> torch.Tensor:
        loss = self.model(self.x, self.layout).float().pow(2).sum() / self.layout.tokens
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.x.grad = None
        return loss.detach()


def _alone(step: Step, threads: int) -> Callable[[], object]:
    """The step on rank 0 with this many threads and cores, while the others wait."""

    def run() -> None:
        if dist.get_rank() != 0:
            return
        cores = os.sched_getaffinity(0)
        if threads > 1:
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
            torch.set_num_threads(threads)
        step()
        pin(0) if threads > 1 else None
        os.sched_setaffinity(0, cores)

    return run


def _difference(steps: dict[str, Step]) -> dict[str, float]:
    """Relative difference of each way's first loss from the unparallelized model's."""
    losses = {}
    for name, step in steps.items():
        loss = step().double()
        if name != "single":
            dist.all_reduce(loss)
        losses[name] = float(loss)
    return {name: abs(loss / losses["single"] - 1) for name, loss in losses.items()}


def _ways(rank: int, mesh: DeviceMesh, config: ModelConfig, engine: str, tokens: int) -> dict[str, Step]:
    """Every way to run the step, `single` on one process. Collective."""
    world_size = mesh.size()
    whole = TokenLayout(1, tokens)
    shared = TokenLayout(1, tokens, split(tokens, world_size), rank)
    return {
        "single": Step(models.single(config), whole, config),
        "torch": Step(models.by_torch(config, mesh), shared, config),
        "collective": Step(models.ours(config, mesh, "collective"), shared, config),
        "ours": Step(models.ours(config, mesh, engine), shared, config),
        "ceiling": Step(models.ceiling(config, rank, world_size), shared, config),
    }


def tolerance(config: ModelConfig) -> float:
    """Allowed relative difference between two orders of the same sums.

    8 operations per layer round to the dtype, after fp32 sums with up to `intermediate` (or `hidden`) terms. The
    roundings are independent, so they add up like a random walk.
    """
    terms = max(config.hidden_size, config.intermediate_size)
    return (8 * config.num_hidden_layers) ** 0.5 * (unit(config.compute_dtype) + terms**0.5 * unit(torch.float32))


def measure_step(
    rank: Rank, dtype: str, engine: str, budget: float, tokens: int = TOKENS, shape: Mapping[str, int] = SHAPE
) -> dict[str, Any]:
    """Times of each way as Spreads, and the results of the checks. Collective.

    Raises RuntimeError if the first loss of a way differs from the unparallelized model's.
    """
    config = ModelConfig(**shape, dtype=dtype, param_dtype=dtype)  # type: ignore[arg-type]
    steps = _ways(rank.rank, rank.mesh, config, engine, tokens)
    difference = _difference({name: step for name, step in steps.items() if name != "ceiling"})
    if not max(difference.values()) <= tolerance(config):
        raise RuntimeError(f"the losses of the models differ: {difference}")
    ways: dict[str, Callable[[], object]] = {k: v for k, v in steps.items() if k != "single"}
    times = rank.measure(ways, 0.8 * budget)
    alone = {f"single, {n} thread{'s' * (n > 1)}": _alone(steps["single"], n) for n in (1, 2)}
    times |= rank.measure(alone, 0.2 * budget)
    comm = rank.comm
    assert comm is not None
    gc.collect()
    moved = tokens * config.hidden_size * config.compute_dtype.itemsize
    held, control = (comm.workspace.nbytes, comm.workspace.control.nbytes) if comm.has_workspace else (0, 0)
    return {
        "dtype": dtype,
        "seconds": {name: vars(spread) for name, spread in times.items()},
        "first_loss_difference": difference,
        "symmetric_bytes": held,
        "symmetric_bound_bytes": 2 * moved + control,  # two slots of the gathered or scattered tensor, and flags
    }


# -- tables, a picture and JSON ---------------------------------------------------------------------------------------


WAYS = ("torch", "collective", "ours", "ceiling", "single, 1 thread", "single, 2 threads")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    return table


def print_ops(console: Console, result: Result) -> None:
    """One row per case, then the three summary figures, then memory."""
    table = _table(
        "Operations: ms, median +- half the interquartile range",
        "",
        "bare",
        "gloo",
        "ours",
        "gloo / ours",
        "removed",
    )
    for row in result.rows:
        table.add_row(
            row.case.label,
            str(row.bare),
            str(row.gloo),
            str(row.ours),
            f"{row.ratio:.2f}",
            f"{row.share:.2f}",
        )
    console.print(table)
    console.print(
        f"share of gloo's overhead removed: median {result.median_share:.2f}, least {result.least_share:.2f}; "
        f"geometric mean of gloo / ours {result.mean_ratio:.2f}"
    )
    console.print(
        f"symmetric memory of the group: {result.symmetric_bytes / 1e6:.1f} MB a rank; bound (twice the largest "
        f"gathered or scattered tensor, and flags): {result.bound_bytes / 1e6:.1f} MB"
    )


def print_steps(console: Console, steps: list[dict[str, Any]]) -> None:
    """One row per way, one column per dtype."""
    table = _table("Training step: s, median +- half the interquartile range", "", *(step["dtype"] for step in steps))
    for way in WAYS:
        cells = []
        for step in steps:
            spread = Spread(**step["seconds"][way])
            cells.append(f"{spread.median:.3f} +-{(spread.high - spread.low) / 2:.3f}")
        table.add_row(way, *cells)
    gaps = [gap(step) for step in steps]
    table.add_section()
    for name in gaps[0]:
        table.add_row(name, *(f"{values[name]:.2f}" for values in gaps))
    console.print(table)


def gap(step: dict[str, Any]) -> dict[str, float]:
    """The share of the gap between torch and the ceiling that ours closes, and the part of it due to fusion."""
    t = {way: spread["median"] for way, spread in step["seconds"].items()}
    whole = t["torch"] - t["ceiling"]
    return {
        "torch / ours": t["torch"] / t["ours"],
        "torch / ceiling": t["torch"] / t["ceiling"],
        "gap closed": (t["torch"] - t["ours"]) / whole,
        "  by chunked instead of collective": (t["collective"] - t["ours"]) / whole,
        "  by our layers on collective instead of torch's": (t["torch"] - t["collective"]) / whole,
    }


def save_json(path: Path, machine: dict[str, Any], ops: Result | None, steps: list[dict[str, Any]]) -> None:
    """Everything, for later comparison."""
    whole = {
        "machine": machine,
        "operations": ops.as_dict() if ops is not None else None,
        "training_step": [{**step, "gap": gap(step)} for step in steps],
    }
    path.write_text(json.dumps(whole, indent=1) + "\n")


def save_picture(path: Path, machine: dict[str, Any], ops: Result | None, steps: list[dict[str, Any]]) -> None:
    """Time relative to the bare matmuls (top) and the training step (bottom)."""
    parts = [part for part in (ops, steps) if part]
    height = 1.5 + (0.32 * len(ops.rows) if ops else 0) + (2.2 if steps else 0)
    figure, axes = plt.subplots(
        len(parts), 1, figsize=(9, height), squeeze=False, layout="constrained",
        height_ratios=[0.32 * len(ops.rows) if part is ops and ops else 2.2 for part in parts],
    )  # fmt: skip
    each = iter(axes[:, 0])
    if ops:
        _draw_ops(next(each), ops)
    if steps:
        _draw_steps(next(each), steps)
    figure.suptitle(f"{machine['cpu']}, {machine['ranks']} ranks, torch {machine['torch']}", fontsize=9)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_ops(axis: Any, ops: Result) -> None:
    places = range(len(ops.rows))
    for way, shift, color in (("gloo", -0.2, "tab:gray"), ("ours", 0.2, "tab:blue")):
        times = [getattr(row, way).median / row.bare.median for row in ops.rows]
        axis.barh([p + shift for p in places], times, 0.38, label=way, color=color)
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set_yticks(list(places), [row.case.label for row in ops.rows], fontsize=7)
    axis.set(xlim=(0.8, None), xlabel="time / time of the bare matmuls")
    axis.invert_yaxis()
    axis.legend(fontsize=8)


def _draw_steps(axis: Any, steps: list[dict[str, Any]]) -> None:
    ways = [way for way in WAYS if way in steps[0]["seconds"]]
    for i, step in enumerate(steps):
        spreads = [step["seconds"][way] for way in ways]
        axis.barh(
            [p + 0.4 * (i - 0.5) for p in range(len(ways))],
            [s["median"] for s in spreads],
            0.38,
            xerr=[[s["median"] - s["low"] for s in spreads], [s["high"] - s["median"] for s in spreads]],
            label=step["dtype"],
        )
    axis.set_yticks(range(len(ways)), ways, fontsize=8)
    axis.set_xlabel("seconds a training step")
    axis.invert_yaxis()
    axis.legend(fontsize=8)


# -- the command ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """Benchmarks of fusedtp on CPU ranks, one core and thread each, against gloo and torch's parallelize_module.

    Results go to bench/out/, or with --save to bench/results/<machine>/.
    """

    only: Literal["all", "ops", "step"] = "all"
    """What to measure."""
    timeline: bool = False
    """Draw one call of each operation instead: the matmuls that run while shards are awaited."""
    minutes: float = 5.0
    """Approximate time of the measurement."""
    ranks: int = 2
    """World size."""
    engine: Literal["chunked", "collective", "auto"] = "chunked"
    """The engine of "ours"."""
    match: Annotated[str, tyro.conf.arg(metavar="TEXT")] = ""
    """Only rows of operations with this text in their name."""
    save: bool = False
    """Keep the result in the repository."""


def main(argv: Sequence[str]) -> int:
    """Measure, print, write."""
    options = tyro.cli(Options, args=list(argv), prog="fusedtp bench cpu", description=Options.__doc__)
    console = Console(width=None if Console().is_terminal else 130)
    about = machine.describe(options.ranks, list(argv))
    folder = machine.folder_of(about, options.save)
    folder.mkdir(parents=True, exist_ok=True)
    console.print(", ".join(f"{key} {value}" for key, value in about.items()), style="dim", soft_wrap=True)
    if about["cores"] < options.ranks:
        console.print(f"{options.ranks} ranks share {about['cores']} cores: these figures say little")
    plan = Plan(world="processes", device="cpu")
    if options.timeline:
        calls = run(plan, options.ranks, _timeline)
        timeline.draw(folder / "timeline.png", calls)
        for operation, ranks in calls.items():
            overlap = ", ".join(
                f"rank {r} {1e3 * timeline.overlapped(operation, ranks, r):.1f}" for r in range(len(ranks))
            )
            console.print(f"{operation}: ms of matmuls before the last shard had arrived: {overlap}")
        console.print(f"{folder / 'timeline.png'}")
        return 0
    seconds = 60 * options.minutes * 0.8  # the rest: startup, warm-up, at least three rounds of the longest rows
    share = 0.65 if options.only == "all" else 1.0
    result = None
    if options.only != "step":
        cases = [case for case in all_cases() if options.match in case.label]
        result = run(plan, options.ranks, measure_operations, cases, options.engine, share * seconds)
        print_ops(console, result)
    steps = []
    if options.only != "ops":
        share = 0.35 if options.only == "all" else 1.0
        for dtype in DTYPES:
            budget = share * seconds / len(DTYPES)
            steps.append(run(plan, options.ranks, measure_step, dtype, options.engine, budget))
        print_steps(console, steps)
    save_json(folder / "bench.json", about, result, steps)
    save_picture(folder / "bench.png", about, result, steps)
    console.print(f"{folder / 'bench.json'}, {folder / 'bench.png'}", soft_wrap=True)
    return 0


def _timeline(rank: Rank) -> dict[str, list[timeline.Call]]:
    return timeline.record(rank.rank, 2048, 1024, 2816)
