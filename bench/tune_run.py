"""How the tuner measures: operands, ways to run a job, successive halving."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, fsum, log
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch

from fusedtp.comm.workspace import FLAGS_PER_SOURCE
from fusedtp.ops.all_gather_matmul import plan_all_gather_matmul
from fusedtp.ops.all_gather_wgrad import plan_all_gather_wgrad
from fusedtp.ops.launch import plain, tuned
from fusedtp.ops.launch.config import Machine, machine_of
from fusedtp.ops.matmul_all_reduce import plan_one_shot, plan_two_shot
from fusedtp.ops.matmul_reduce_scatter import plan_matmul_reduce_scatter
from fusedtp.ops.rows import Rows, split

from .rank import Rank
from .sample import Rotating, Way
from .tune_space import Job, Values, candidates, refinements

GAIN = 0.01  # below which the default is kept
FINALISTS = 4
WARM_SECONDS = {"cuda": 0.5, "cpu": 0.0}


@dataclass(frozen=True)
class Winner:
    """The fastest configuration of a class; seconds are geometric means over its jobs."""

    values: Values
    seconds: float
    default_seconds: float


def halving(
    count: int, sample: Callable[[int], float], keep: Sequence[int] = (), rounds: int = 2
) -> dict[int, float]:
    """Candidate -> median of its samples, of those that were left at the end.

    All are sampled in interleaved rounds; then the slower half goes, and the rest gets twice as many rounds, until
    FINALISTS are left beside those in `keep` (no more than FINALISTS), which always stay. Ranks whose samples agree
    decide alike.
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
    """The best configuration for these jobs of one class. Collective: all ranks get the same answer.

    held   what other kernels of the same call are launched with
    """
    for other, values in held.items():
        tuned.hold(other, values)
    try:
        found = _tune(rank, jobs, limit)
        rank.meet()  # nobody launches any more
    finally:
        for name in (jobs[0].kernel, *held):
            tuned.hold(name, None)
    rank.meet()  # nor takes away what another has put there for the next jobs
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
    """Index in `pool` -> geometric mean of the jobs' seconds, of those that were left; the first always is."""
    kernel, ways = jobs[0].kernel, [way_of(rank, job) for job in jobs]
    _hold(rank, kernel, pool[0])
    calls = [rank.calls(way) for way in ways]

    def sample(i: int) -> float:
        _hold(rank, kernel, pool[i])
        times = rank.worst(*(rank.once(way, n) for way, n in zip(ways, calls, strict=True)))
        return exp(fsum(map(log, times)) / len(times))

    for i in range(len(pool)):  # compiles, and grows the workspace
        sample(i)
    _hold(rank, kernel, pool[0])
    rank.warm(ways[0], WARM_SECONDS[rank.device.type])  # the GPU has idled while the host compiled
    return halving(len(pool), sample, keep=(0,))


def _hold(rank: Rank, kernel: str, values: Values) -> None:
    """Not before every rank has made its last call: those of a virtual world share it."""
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
    """Whether this configuration does not compile or spills, on any rank; asked before a call that peers wait for."""
    failed = False
    if machine.clock != "host":
        _hold(rank, job.kernel, values)
        try:
            if job.kernel == "matmul":  # nobody waits for it
                way_of(rank, job)()
            else:
                launch = plan_of(rank, machine, job)
                compiled = launch.kernel.warmup(**launch.args, **launch.options, grid=(launch.programs,))
                compiled._init_handles()
                failed = bool(compiled.n_spills)
        except Exception:  # the compiler, the assembler and the driver each have exceptions of their own
            failed = True
    return rank.worst(float(failed))[0] > 0


def plan_of(rank: Rank, machine: Machine, job: Job) -> Any:
    """The launch of a fused job, with nothing behind its pointers: to be compiled, not run."""
    dtype, world = getattr(torch, job.dtype), job.ranks
    rows = Rows(split(job.rows, world))

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=rank.device)

    words = torch.zeros(max(8, world), dtype=torch.int64, device=rank.device)
    view = SimpleNamespace(
        data_ptrs=words, flag_ptrs=words, sig_ptrs=words, epoch=words[:1].int(), status=words, failure=words,
        slot_bytes=1 << 30, flags_per_source=FLAGS_PER_SOURCE, timeout_s=600.0, link=None, meet=None,
        ranks_per_device=1 if rank.comm is None else rank.comm.world.ranks_per_device,
    )  # fmt: skip
    where, end = (view, rank.rank, world), (1, None, machine)
    x, w = empty(job.rows, job.k), empty(job.n, job.k)
    shard = x[: rows.sizes[rank.rank]]
    if job.kernel in ("all_gather_matmul", "all_gather"):
        return plan_all_gather_matmul(*where, shard, [w], [None], rows, 1, False, None, machine)[0]
    if job.kernel == "all_gather_wgrad":
        return plan_all_gather_wgrad(*where, shard, [empty(job.rows, job.n)], rows, *end)[0]
    if job.kernel == "matmul_reduce_scatter":
        return plan_matmul_reduce_scatter(*where, x, w, None, rows, *end)[0]
    plan = plan_one_shot if job.kernel == "one_shot" else plan_two_shot
    return plan(*where, x, w, None, *end)[0]
