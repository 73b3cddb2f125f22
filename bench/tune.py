"""fusedtp bench tune: find the fastest configuration of every kernel and shape class, and write the table of this GPU.

For each class, the default and its neighbors that fit the GPU are compiled; those that fail or spill are dropped. The
others are sampled in interleaved rounds with successive halving. Then single fields of the best one are varied. The
default is kept unless the winner is at least 1 % faster. The table is written after each class, and an interrupted run
resumes from it. fusedtp/ops/launch/tuned.py reads it. Not measured on a GPU yet.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import exp, fsum, log, log2
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch

from fusedtp.comm.device_view import epoch_words
from fusedtp.comm.workspace import FLAGS_PER_SOURCE
from fusedtp.ops import measured
from fusedtp.ops.all_gather_matmul import come_together, plan_all_gather_matmul, together_tile
from fusedtp.ops.all_gather_wgrad import plan_all_gather_wgrad
from fusedtp.ops.launch import plain, tuned
from fusedtp.ops.launch.config import (
    ALL_REGISTERS,
    VECTOR,
    Machine,
    gather_chunk,
    gather_programs,
    machine_of,
    tiles,
)
from fusedtp.ops.launch.operands import local_config
from fusedtp.ops.matmul_all_reduce import is_one_shot, one_shot_config, plan_one_shot, plan_two_shot
from fusedtp.ops.matmul_reduce_scatter import (
    are_few,
    few_rows_config,
    plan_few_rows_reduce_scatter,
    plan_matmul_reduce_scatter,
    reduction,
)
from fusedtp.ops.rows import Rows, split

from . import options, tables
from . import rank as ranks
from .cases import Case, linear
from .cli import before_cuda
from .options import Shared, known, parse
from .output import progress, table
from .rank import Rank
from .sample import Rotating, Way
from .shapes import MODELS, Layer, layers

# -- what is tuned, and what is tried: jobs, and configurations around the default of each ----------------------------


Values = dict[str, int]
PART_OF_CLASS = 3  # jobs measured per class
MOST_SUMS = 128  # fp32 accumulators of a tile per thread; a thread has 255 registers


@dataclass(frozen=True)
class Job:
    """A kernel on one shape: x has `rows` tokens in total; N and K are those of a rank's weight."""

    kernel: str
    dtype: str
    ranks: int
    rows: int
    n: int
    k: int

    @property
    def extents(self) -> dict[str, int]:
        """The extents with which the launcher looks up the table."""
        each = -(-self.rows // self.ranks)
        columns = self.k if self.kernel == "all_gather_wgrad" else self.n
        found = {
            "matmul": dict(rows=self.rows, cols=self.n, k=self.k),
            "all_gather_matmul": dict(rows=self.rows, cols=self.n, k=self.k),
            "all_gather_wgrad": dict(rows=self.n, cols=self.k, k=self.rows),
            "all_gather": dict(rows=each, k=self.k),
            "matmul_reduce_scatter": dict(rows=each, cols=self.n),
            "one_shot": dict(rows=self.rows, cols=self.n),
            "two_shot": dict(rows=each, cols=self.n),
            "few_rows": dict(rows=self.rows, cols=self.n),
        }[self.kernel]
        found |= dict(world=self.ranks, even=int(columns % VECTOR == 0))
        return {axis: n for axis, n in found.items() if axis in tuned.KERNELS[self.kernel].axes}

    @property
    def together(self) -> bool:
        """Whether a gather first collects all rows, so that there is no transport to choose."""
        return come_together(Rows(split(self.rows, self.ranks)), getattr(torch, self.dtype))

    @property
    def case(self) -> Case:
        """The call that launches this kernel."""
        names = {
            "all_gather": "all_gather_wgrad" if self.together else "all_gather_matmul",
            "one_shot": "matmul_all_reduce",
            "two_shot": "matmul_all_reduce",
            "few_rows": "matmul_reduce_scatter",
        }
        operation = names.get(self.kernel, self.kernel)
        kind = "column" if operation.startswith("all_gather") else "row"
        layer = Layer("", self.kernel, kind, self.k, self.n)
        return linear(operation, self.dtype, self.rows, layer, self.ranks)

    @property
    def label(self) -> str:
        """One line that names the job."""
        return f"{self.kernel} {self.dtype} {self.rows} x {self.n} x {self.k}"

    def default(self, machine: Machine) -> Values:
        """The launcher's configuration without a table, in the form of a table entry."""
        dtype, at = getattr(torch, self.dtype), self.extents
        if self.kernel == "all_gather":
            senders, chunk = gather_programs(machine)[0], gather_chunk(at["rows"], FLAGS_PER_SOURCE)
            return dict(chunk=chunk, send_programs=senders)
        flags = FLAGS_PER_SOURCE // (2 if self.kernel == "two_shot" else 1)
        if self.kernel == "few_rows":
            config = few_rows_config(machine, dtype, at["rows"], at["cols"], flags)
        elif self.kernel == "one_shot":
            config = one_shot_config(machine, dtype, at["rows"], at["cols"], flags)
        elif "chunk" in tuned.KERNELS[self.kernel].sets:
            config = reduction(machine, dtype, at["rows"], at["cols"], flags, owners=self.ranks)
        elif self.kernel == "all_gather_matmul" and self.together:
            config = together_tile(machine, dtype, **(at | dict(world=0)))
        elif self.kernel == "matmul":
            config = local_config(machine, dtype, "ieee", at["rows"], at["cols"])
        else:
            config = tiles(machine, dtype, at["rows"], at["cols"], bool(at["even"]))
        return {name: int(value) for name, value in asdict(config).items() if name in tuned.KERNELS[self.kernel].sets}


def reduction_kernel(rows: int, n: int, dtype: str) -> str:
    """The kernel of an all-reduce of [rows, n]."""
    if is_one_shot(rows, n, getattr(torch, dtype)):
        return "one_shot"
    found = scatter_kernel(rows, n, dtype)
    return "two_shot" if found == "matmul_reduce_scatter" else found


def scatter_kernel(rows: int, n: int, dtype: str) -> str:
    """The kernel of a reduce-scatter of [rows, n]."""
    return "few_rows" if are_few(Rows((rows,)), n, getattr(torch, dtype)) else "matmul_reduce_scatter"


def candidates(job: Job, machine: Machine, limit: int) -> list[Values]:
    """The default, then at most `limit` others that fit this machine, the nearest to the default first."""
    default = job.default(machine)
    space = _transports(machine) if job.kernel == "all_gather" else _tiles(job, machine, default)
    found = [values for values in space if values != default and _possible(job, machine, values)]
    found.sort(key=lambda values: (_distance(values, default), sorted(values.items())))
    return [default, *found[:limit]]


def refinements(job: Job, machine: Machine, values: Values) -> list[Values]:
    """Configurations that differ from this one in one field that the tile search does not vary."""
    grouped = machine.clock != "host" and not (job.kernel == "all_gather_matmul" and job.together)
    choices: dict[str, tuple[int, ...]] = {"group": (1, 4, 8, 16, 32)} if grouped else {}
    sets = tuned.KERNELS[job.kernel].sets
    if "send_programs" in sets and job.kernel != "all_gather":
        choices |= {"chunk": (1, 2, 4)} if "chunk" in sets else {}
        if machine.clock != "host":
            choices |= {"part": (128, 256, 512, 1024)}
        if not machine.shared_gpu:  # if ranks share a GPU, its split is fixed
            # two programs per multiprocessor, if they fit
            choices |= {"send_programs": (machine.programs, 2 * machine.programs)}
    if machine.clock != "host":  # `_possible` keeps what machine and dtype support
        toggles = dict(tma=(0, 1), specialized=(0, 1), halves=(0, 1))
        choices |= {name: known for name, known in toggles.items() if name in sets}
    found = [values | {name: n} for name, known in choices.items() for n in known if values.get(name) != n]
    return [each for each in found if _possible(job, machine, each)]


def _transports(machine: Machine) -> Iterator[Values]:
    senders = (1, 2, 4, 8, 12, 16, 24, 32)
    for chunk, count in product((4, 8, 16, 32, 64, 128, 256, 512), senders):
        if count < machine.programs:
            yield dict(chunk=chunk, send_programs=count)


def _tiles(job: Job, machine: Machine, default: Values) -> Iterator[Values]:
    at, wide = job.extents, job.dtype == "float32"
    host = machine.clock == "host"
    sides, depths, warps, stages = [16, 32, 64, 128, 256], [16, 32, 64, 128], [4, 8], [2, 3, 4, 5]
    if host:  # the interpreter: warps and stages have no cost
        sides, depths, warps, stages = [16, 32, 64], [16, 32, 64], [4], [1]
    for m, n, k, w, s in product(sides, sides, depths, warps, stages):
        sums = m * n // (32 * w)
        if job.kernel == "few_rows" and m < at["rows"]:
            continue
        if m > max(16, 2 * at["rows"] - 1) or n > max(16, 2 * at["cols"] - 1) or sums > MOST_SUMS:
            continue
        if not host and ((wide and (m * n > 64 * 64 or k > 32)) or sums < 4):
            continue
        every = ALL_REGISTERS if machine.clock == "cuda" and sums < MOST_SUMS else 0
        tile = dict(block_m=m, block_n=n, block_k=k, num_warps=w, num_stages=s, max_registers=every)
        yield default | tile | (_plain(default, tile) if job.kernel == "matmul" else {})


def _plain(default: Values, tile: Values) -> Values:
    """The fields that a plain matmul's launcher derives from a tile."""
    specialized = default["specialized"] and tile["block_m"] == 128
    found = dict(specialized=int(specialized), halves=int(default["tma"] and tile["block_n"] == 256))
    return found | (dict(max_registers=0) if specialized else {})


def _possible(job: Job, machine: Machine, values: Values) -> bool:
    return not tuned.config_faults(tuned.KERNELS[job.kernel], values, job.dtype, machine)


def _distance(values: Mapping[str, int], other: Mapping[str, int]) -> float:
    """The number of doublings between the two configurations."""
    return sum(abs(log2(values[name] / other[name])) for name in other if values[name] > 0 and other[name] > 0)


# -- how it is measured: ways to run a job, successive halving --------------------------------------------------------


GAIN = 0.01  # below which the default is kept
FINALISTS = 4
WARM_SECONDS = {"cuda": 0.5, "cpu": 0.0}


@dataclass(frozen=True)
class Winner:
    """The fastest configuration of a class; seconds are geometric means over its jobs."""

    values: Values
    seconds: float
    default_seconds: float


def halving(count: int, sample: Callable[[int], float], keep: Sequence[int] = (), rounds: int = 2) -> dict[int, float]:
    """Candidate -> median of its samples, for the finalists.

    All candidates are sampled in interleaved rounds. Then the slower half is dropped, and the rest gets twice as many
    rounds, until FINALISTS are left besides those in `keep` (at most FINALISTS), which always stay. Ranks with equal
    samples make the same decisions.
    """
    times: dict[int, list[float]] = {i: [] for i in range(count)}
    left = list(range(count))
    while True:
        for turn in range(rounds):
            for i in left if turn % 2 == 0 else reversed(left):
                times[i].append(sample(i))
        medians = {i: median(times[i]) for i in left}
        if len(left) <= FINALISTS + len(keep):
            return medians
        ranked = sorted(left, key=lambda i: (medians[i], i))
        left = sorted({*ranked[: max(FINALISTS, len(left) // 2)], *keep})
        rounds *= 2


def tune(rank: Rank, jobs: Sequence[Job], limit: int, held: Mapping[str, Values]) -> Winner:
    """The best configuration for these jobs of one class. Collective: all ranks get the same result.

    held   configurations of other kernels in the same call
    """
    for other, values in held.items():
        tuned.hold(other, values)
    try:
        found = _tune(rank, jobs, limit)
        rank.meet()  # no rank launches after this
    finally:
        for name in (jobs[0].kernel, *held):
            tuned.hold(name, None)
    rank.meet()  # no rank clears a configuration that another has already set for the next jobs
    return found


def _tune(rank: Rank, jobs: Sequence[Job], limit: int) -> Winner:
    machine = machine_of(rank.device, 1 if rank.comm is None else rank.comm.world.ranks_per_device)

    def usable(pool: list[Values]) -> list[Values]:
        return [values for values in pool if not any(_refuses(rank, machine, job, values) for job in jobs)]

    default, *others = candidates(jobs[0], machine, limit)
    pool = [default, *usable(others)]
    medians = _race(rank, jobs, pool)
    best = min(medians, key=lambda i: (medians[i], i))
    final = usable(refinements(jobs[0], machine, pool[best]))[:limit]
    if final:
        pool = [default, *([pool[best]] if best else []), *final]
        medians = _race(rank, jobs, pool)
        best = min(medians, key=lambda i: (medians[i], i))
    if medians[best] * (1 + GAIN) > medians[0]:
        best = 0
    return Winner(pool[best], medians[best], medians[0])


def _race(rank: Rank, jobs: Sequence[Job], pool: list[Values]) -> dict[int, float]:
    """Index in `pool` -> geometric mean of the jobs' seconds, for the finalists, which include the first."""
    kernel, ways = jobs[0].kernel, [way_of(rank, job) for job in jobs]
    _hold(rank, kernel, pool[0])
    calls = [rank.calls(way) for way in ways]

    def sample(i: int) -> float:
        _hold(rank, kernel, pool[i])
        times = rank.worst(*(rank.once(way, n) for way, n in zip(ways, calls, strict=True)))
        return exp(fsum(map(log, times)) / len(times))

    for i in range(len(pool)):  # compile, and grow the workspace
        sample(i)
    _hold(rank, kernel, pool[0])
    rank.warm(ways[0], WARM_SECONDS[rank.device.type])  # the GPU has idled while the host compiled
    return halving(len(pool), sample, keep=(0,))


def _hold(rank: Rank, kernel: str, values: Values) -> None:
    """Set the configuration after every rank has made its last call: ranks of a virtual world share it."""
    rank.meet()
    tuned.hold(kernel, values)


def way_of(rank: Rank, job: Job) -> Way:
    """One call of the job, with the next set of operands. "matmul" is the library's own plain kernel."""
    if job.kernel == "matmul":

        def operands(seed: int) -> tuple[torch.Tensor, ...]:
            x = rank.randn(job.rows, job.k, dtype=job.dtype, seed=2 * seed)
            return x, rank.randn(job.n, job.k, dtype=job.dtype, seed=2 * seed + 1)

        return Rotating(plain.matmul, rank.copies(operands))
    case = job.case
    return Rotating(case.call(rank, "triton"), rank.copies(case.draw(rank)))


def _refuses(rank: Rank, machine: Machine, job: Job, values: Values) -> bool:
    """Whether this configuration fails to compile or spills on any rank; checked before any collective call."""
    failed = False
    if machine.clock != "host":
        _hold(rank, job.kernel, values)
        try:
            if job.kernel == "matmul":  # not collective
                way_of(rank, job)()
            else:
                launch = launch_of(rank, machine, job)
                compiled = launch.kernel.warmup(**launch.args, **launch.options, grid=(launch.programs,))
                compiled._init_handles()
                failed = bool(compiled.n_spills)
        except Exception:  # the compiler, the assembler and the driver each have exceptions of their own
            failed = True
    return rank.worst(float(failed))[0] > 0


def launch_of(rank: Rank, machine: Machine, job: Job) -> Any:
    """The launch of a fused job with dummy pointers: to be compiled, not run."""
    dtype, world = getattr(torch, job.dtype), job.ranks
    rows = Rows(split(job.rows, world))

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=rank.device)

    words = torch.zeros(epoch_words(world), dtype=torch.int64, device=rank.device)
    view = SimpleNamespace(
        data_ptrs=words, flag_ptrs=words, arrival_ptrs=words, epoch=words.int(),
        status=words, failure=words,
        slot_bytes=1 << 30, flags_per_source=FLAGS_PER_SOURCE, timeout_s=600.0, meet=None,
        ranks_per_device=1 if rank.comm is None else rank.comm.world.ranks_per_device,
    )  # fmt: skip
    where, end = (view, rank.rank, world), (1, None, machine)
    x, w = empty(job.rows, job.k), empty(job.n, job.k)
    shard = x[: rows.sizes[rank.rank]]
    if job.case.operation == "all_gather_matmul":
        given = (*where, shard, [w], [None], rows, 1, False, None, machine)
        return plan_all_gather_matmul(*given, together=job.together)[0]
    if job.case.operation == "all_gather_wgrad":
        return plan_all_gather_wgrad(*where, shard, [empty(job.rows, job.n)], rows, *end)[0]
    if job.kernel in ("matmul_reduce_scatter", "few_rows"):
        scatter = plan_few_rows_reduce_scatter if job.kernel == "few_rows" else plan_matmul_reduce_scatter
        return scatter(*where, [x], [w], None, rows, *end)[0]
    plan = plan_one_shot if job.kernel == "one_shot" else plan_two_shot
    return plan(*where, x, w, None, *end)[0]


# -- the command ------------------------------------------------------------------------------------------------------


DEFAULTS = {  # shapes, tokens, tp, dtype
    "cuda": ("llama3-8b,llama3-70b", "512,2048,8192,16384", "1,8", "bfloat16"),
    "cpu": ("tiny", "32", "1,2", "float32"),
}
CANDIDATES = {"cuda": 48, "cpu": 2}


GATHERS = (
    "all_gather_matmul",
    "all_gather_wgrad",
    "all_gather",
)  # the transport last, with the best of the first


@dataclass(frozen=True)
class TuneOptions(Shared):
    """Find the fastest configuration of each kernel and shape class on this GPU, and write a table of them.

    Lists are comma-separated. Defaults: llama3-8b,llama3-70b at 512,2048,8192,16384 tokens on 1,8 ranks (1: the plain
    matmul) in bfloat16; on a CPU, tiny at 32 tokens on 1,2 ranks in float32 with interpreted kernels, which only shows
    that the tuner runs. Each world has separate entries. --save writes to fusedtp/ops/tables, which ships with the
    package.
    """

    kernels: str = ""
    """Only these kernels."""
    candidates: int | None = None
    """Configurations to try per class, besides the default. Default: 48; on a CPU 2."""
    out: Path | None = None
    """Folder of the table. Default: bench/out/tables."""
    resume: bool = True
    """Keep the classes that are already in the table."""


@dataclass(frozen=True)
class Plan:
    """Options with every default filled in."""

    ranks: options.Plan
    jobs: tuple[Job, ...]
    candidates: int
    folder: Path
    resume: bool
    about: dict[str, Any]


def plan_of(given: TuneOptions, argv: Sequence[str]) -> Plan:
    """Fill in defaults and check. Raises ValueError that lists every fault."""
    faults: list[str] = []
    at, folder = tables.plan_of(given, DEFAULTS, tuned.DTYPES, given.out, faults)
    wanted = known("kernels", given.kernels, tuned.KERNELS, faults) or tuple(tuned.KERNELS)
    if given.candidates is not None and given.candidates < 0:
        faults.append(f"--candidates {given.candidates} must not be negative")
    if faults:
        raise ValueError("; ".join(faults))
    jobs = [
        job
        for dtype in at.dtypes
        for name in at.shapes
        for w in at.tp
        for rows in at.tokens
        for job in jobs_of(name, dtype, w, rows)
        if job.kernel in wanted
    ]
    limit = CANDIDATES[at.device] if given.candidates is None else given.candidates
    about = tables.about(at.device, "fusedtp bench tune", argv)
    at = replace(at, interpret=at.device == "cpu")
    return Plan(at, tuple(dict.fromkeys(jobs)), limit, folder, given.resume, about)


def jobs_of(model: str, dtype: str, ranks: int, rows: int) -> list[Job]:
    """The kernels that a block of this model launches for this many tokens; the plain matmuls on one rank."""
    hidden = MODELS[model].hidden
    kernels = {
        "column": GATHERS,
        "row": dict.fromkeys((scatter_kernel(rows, hidden, dtype), reduction_kernel(rows, hidden, dtype))),
    }
    found = []
    for kind, names in kernels.items():
        for kernel in names if ranks > 1 else ("matmul",):
            for layer in layers(model, ranks):
                if layer.kind == kind:
                    found.append(Job(kernel, dtype, ranks, rows, layer.n, layer.k))
    return found


Key = tuple[str, str, tuple[int, ...]]  # kernel, dtype, class


def classes(jobs: Sequence[Job], machine: Machine) -> dict[Key, list[Job]]:
    """Jobs grouped by table entry."""
    found: dict[Key, list[Job]] = {}
    for job in jobs:
        key = job.kernel, job.dtype, tuned.shape_class(job.kernel, machine, **job.extents)
        found.setdefault(key, []).append(job)
    return found


def entry_of(key: Key, jobs: Sequence[Job], winner: Winner) -> dict[str, Any]:
    """The table entry."""
    kernel, dtype, at = key
    return {
        "kernel": kernel,
        "dtype": dtype,
        "class": dict(zip(tuned.KERNELS[kernel].axes, at, strict=True)),
        "config": winner.values,
        "seconds": winner.seconds,
        "default_seconds": winner.default_seconds,
        "shapes": [[job.rows, job.n, job.k] for job in jobs],
    }


def kept(path: Path, machine: Machine) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """All tables of a machine's file, and the entries for this Triton version. Raises ValueError for a bad file."""
    return tables.kept(path, machine.name, tuned.table_name(), lambda entry: tuned.faults(entry, machine))


def run(rank: Rank, plan: Plan) -> Path:
    """Tune the jobs of this rank's world. Collective; rank 0 writes the table."""
    machine = machine_of(rank.device, 1 if rank.comm is None else rank.comm.world.ranks_per_device)
    path = plan.folder / measured.file_of(machine.name)
    others, earlier = kept(path, machine)
    entries = {tuned.key_of(entry): entry for entry in earlier}
    winners: dict[Key, Values] = {key: entry["config"] for key, entry in entries.items()}
    jobs = classes([job for job in plan.jobs if job.ranks == rank.world_size], machine)
    missing = {key: of for key, of in jobs.items() if not (plan.resume and key in entries)}
    rank.meet()  # all ranks have read the file before rank 0 writes it
    with progress(len(missing), shown=rank.rank == 0) as begin:
        for key, of in missing.items():
            begin(f"{rank.world_size} ranks: {of[0].label}")
            some = of[:PART_OF_CLASS]
            winner = tune(rank, some, plan.candidates, held_beside(some[0], machine, winners))
            entries[key], winners[key] = entry_of(key, some, winner), winner.values
            if rank.rank == 0:
                name, made = tuned.table_name(), list(entries.values())
                tables.write(path, machine.name, name, plan.about, made, others)
    return path


def held_beside(job: Job, machine: Machine, winners: dict[Key, Values]) -> dict[str, Values]:
    """The configuration of a gather's matmul while its transport is tuned."""
    if job.kernel != "all_gather":
        return {}
    other = replace(job, kernel=job.case.operation)
    key = other.kernel, other.dtype, tuned.shape_class(other.kernel, machine, **other.extents)
    return {other.kernel: winners[key]} if key in winners else {}


def show(path: Path) -> None:
    """Print the written table."""
    lines = []
    for entry in measured.parse(path.read_bytes(), path.stem)[tuned.table_name()]["entries"]:
        config = " ".join(f"{name} {value}" for name, value in entry["config"].items())
        mine, default = entry["seconds"], entry["default_seconds"]
        at = tuned.described(*tuned.key_of(entry))
        lines.append([at, config, f"{1e6 * mine:.1f}", f"{1e6 * default:.1f}", f"{default / mine - 1:.1%}"])
    header = ["kernel, dtype, class", "configuration", "us", "default us", "gain"]
    table(path.name, header, lines, wide=header[:2])


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code: 2 for bad input."""
    given = parse(TuneOptions, argv, "fusedtp bench tune")
    try:
        plan, path = plan_of(given, argv), None
        if plan.ranks.device != "cpu":
            before_cuda()
        for count in sorted({job.ranks for job in plan.jobs}):
            path = ranks.run(plan.ranks, count, run, plan)
    except ValueError as error:
        print(f"fusedtp bench tune: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    if path is None:
        print("fusedtp bench tune: error: none of these kernels runs on this number of ranks", file=sys.stderr)
        return 2
    show(path)
    print(f"{path}; to use it: FUSEDTP_TABLES={path.parent}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
