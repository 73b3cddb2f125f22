"""python -m fusedtp.bench.timed: predicts the time of a fused operation on a described node, and of alternatives.

    --operation all_gather_matmul --shape llama3-70b --tokens 16384 --compare programs
    --published
    --sizes --against bench/results/predicted/h100.json

Runs the operations at the sizes that users run, as launched on a GPU, but without the memory of their tensors. Times
come from the engine of fusedtp.sim.timed; see docs/timed-schedule.md.
"""

from __future__ import annotations

import itertools
import json
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from fusedtp.checks.dense import SimulatedWorld, launched
from fusedtp.checks.timeline import html
from fusedtp.comm.copies import parts, pieces_of
from fusedtp.comm.workspace import FLAGS_PER_SOURCE
from fusedtp.ops import launch
from fusedtp.ops.all_gather_matmul import (
    come_together,
    gather_slot_bytes,
    plan_all_gather_matmul,
    together_tile,
    with_senders,
    without_senders,
)
from fusedtp.ops.launch import Config, Machine
from fusedtp.ops.launch.config import tiles
from fusedtp.ops.matmul_all_reduce import (
    all_reduce_slot_bytes,
    is_one_shot,
    multimem_config,
    multimem_slot_bytes,
    one_shot_config,
    plan_few_rows,
    plan_multimem,
    plan_one_shot,
    plan_two_shot,
)
from fusedtp.ops.matmul_reduce_scatter import (
    are_few,
    few_rows_config,
    plan_few_rows_reduce_scatter,
    plan_matmul_reduce_scatter,
    reduction,
    scatter_slot_bytes,
)
from fusedtp.ops.rows import Rows, split
from fusedtp.sim.case import Copy, Launch, Run, Signal, Work
from fusedtp.sim.faults import SimulationFault, UnsupportedKernel
from fusedtp.sim.memory import Memory
from fusedtp.sim.timed import Engine, Node, Timeline, load_node, machines

from . import machine
from .shapes import MODELS

GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
OPERATIONS = (GATHER, SCATTER, REDUCE)
PROGRAMS, ENGINE, SWITCH = "programs", "copy engine", "switch"
TRANSPORTS = {GATHER: (PROGRAMS, ENGINE), SCATTER: (PROGRAMS,), REDUCE: (PROGRAMS, SWITCH)}
SIGNATURE = 1


def machine_of(node: Node) -> Machine:
    """The launchers' description of the node."""
    return Machine(clock="cuda", programs=node.sms, shared_bytes=node.shared_bytes)


@dataclass(frozen=True)
class Problem:
    """One operation of a group of ranks.

    tokens      T, rows of all ranks
    widths      N of every weight: of this rank for a gather, of all ranks for a reduction
    k           K of this rank
    config      None: the launchers' choice
    transport   for a gather: PROGRAMS inside the kernel send, or the copy ENGINE copies chunk by chunk on its own
                stream; for an all-reduce: PROGRAMS send and sum, or the SWITCH sums (engine "multimem")
    order       of the engine's copies: "successor" (rank + 1 first) or "same" (all ranks begin with rank 0)
    pieces      copies of a shard to one peer; None: chosen by its size
    written     the stream writes the flags, as in other libraries' kernels, instead of copying them
    """

    operation: str
    tokens: int
    widths: tuple[int, ...]
    k: int
    world_size: int = 8
    dtype: torch.dtype = torch.bfloat16
    config: launch.Config | None = None
    transport: str = PROGRAMS
    order: str = "successor"
    pieces: int | None = None
    written: bool = False

    @property
    def rows(self) -> Rows:
        return Rows(split(self.tokens, self.world_size))

    @property
    def few(self) -> bool:
        """Whether the kernels for few rows run, which multiply the rows of all ranks together."""
        if self.operation == GATHER:
            return self.transport == PROGRAMS and come_together(self.rows, self.dtype)
        if self.transport == SWITCH:
            return False
        one = self.operation == REDUCE and is_one_shot(self.tokens, self.widths[0], self.dtype)
        return not one and are_few(self.rows, self.widths[0], self.dtype)

    def chosen(self, node: Node) -> launch.Config:
        """The configuration of a launch on this node."""
        if self.config is not None:
            return self.config
        machine, owned, n = machine_of(node), max(self.rows.sizes), self.widths[0]
        if self.operation == GATHER and self.few:
            at = dict(rows=self.tokens, cols=sum(self.widths), k=self.k, even=True)
            return together_tile(machine, self.dtype, 0, **at)
        if self.operation == GATHER:
            shape = tiles(machine, self.dtype, self.tokens, sum(self.widths))
            config = with_senders(shape, machine, self.rows, FLAGS_PER_SOURCE)
            return without_senders(config, machine) if self.transport == ENGINE else config
        if self.few:
            flags = FLAGS_PER_SOURCE // (2 if self.operation == REDUCE else 1)
            return few_rows_config(machine, self.dtype, self.tokens, n, flags)
        if self.transport == SWITCH:
            return multimem_config(machine, self.dtype, self.tokens, n, FLAGS_PER_SOURCE // 2)
        if self.operation == REDUCE and is_one_shot(self.tokens, n, self.dtype):
            return one_shot_config(machine, self.dtype, self.tokens, n, FLAGS_PER_SOURCE)
        flags = FLAGS_PER_SOURCE // (2 if self.operation == REDUCE else 1)
        return reduction(machine, self.dtype, owned, n, flags, owners=self.world_size)

    @property
    def flops(self) -> int:
        """FLOPs of one rank, not counting tails of tiles."""
        return 2 * self.tokens * sum(self.widths) * self.k

    @property
    def traffic(self) -> int:
        """Minimum bytes that a rank receives from its peers."""
        item, w = self.dtype.itemsize, self.world_size
        others = self.tokens - max(self.rows.sizes)
        if self.operation == GATHER:
            return others * self.k * item
        own = max(self.rows.sizes) * self.widths[0] * item * (w - 1)
        return own if self.operation == SCATTER else own + others * self.widths[0] * item


class EmptyWorld(SimulatedWorld):
    """A workspace of W ranks. Its slots and multicast address are never accessed, so large ones cost no memory."""

    def __init__(self, world_size: int, slot_bytes: int) -> None:
        super().__init__(world_size, 0, FLAGS_PER_SOURCE)
        self.slot_bytes = -(-slot_bytes // 16) * 16
        slots = (torch.empty(2 * self.slot_bytes, dtype=torch.uint8) for _ in range(world_size))
        self.data = Memory("slots", tuple(slots))
        self.multicast = torch.zeros(1, dtype=torch.int64)


def fused_run(problem: Problem, node: Node) -> Run:
    """One call of the operation on every rank, on a fresh workspace."""
    p, rows, w = problem, problem.rows, problem.world_size
    if p.operation not in OPERATIONS:
        raise ValueError(f"operation is {p.operation!r}; it must be one of {', '.join(OPERATIONS)}")
    if p.transport not in TRANSPORTS[p.operation]:
        known = ", ".join(TRANSPORTS[p.operation])
        raise ValueError(f"transport of {p.operation} is {p.transport!r}; it must be one of {known}")
    config, machine, n = p.chosen(node), machine_of(node), p.widths[0]
    if p.operation == GATHER:
        nbytes = gather_slot_bytes(rows, p.k, p.dtype)
    elif p.operation == SCATTER:
        nbytes = scatter_slot_bytes(rows, n, p.dtype)
    elif p.transport == SWITCH:
        nbytes = multimem_slot_bytes(p.tokens, n, p.dtype)
    else:
        nbytes = all_reduce_slot_bytes(p.tokens, n, w, p.dtype)
    world = EmptyWorld(w, nbytes)
    work: list[list[Work]] = []
    for rank in range(w):
        view = world.view(rank)
        height = rows.local(rank) if p.operation == GATHER else p.tokens
        x = torch.empty(height, p.k, dtype=p.dtype)
        weights = [torch.empty(width, p.k, dtype=p.dtype) for width in p.widths]
        if p.operation == GATHER:
            biases = [None] * len(weights)
            planned, _, _ = plan_all_gather_matmul(
                view, rank, w, x, weights, biases, rows, SIGNATURE, False, config, machine, together=p.few
            )
        elif p.operation == SCATTER:
            plan = plan_few_rows_reduce_scatter if p.few else plan_matmul_reduce_scatter
            planned, _ = plan(view, rank, w, [x], weights[:1], None, rows, SIGNATURE, config, machine)
        else:
            one = is_one_shot(p.tokens, n, p.dtype)
            plan = plan_one_shot if one else plan_few_rows if p.few else plan_two_shot
            plan = plan_multimem if p.transport == SWITCH else plan
            planned, _ = plan(view, rank, w, x, weights[0], None, SIGNATURE, config, machine)
        mine: list[Work] = [launched(planned)]
        if p.transport == ENGINE:
            mine += _copies(p, world, rank, x, config.chunk)
        work.append(mine)
    return Run(work, world.memory)


def _copies(p: Problem, world: EmptyWorld, rank: int, x: Tensor, chunk: int) -> list[Work]:
    """The work of the sending programs, done by the host's copy stream: rows and their flags, piece by piece."""
    w, rows = p.world_size, p.rows
    parity, epoch = 1, 1  # values of the first call
    row = p.k * p.dtype.itemsize
    local, begin = x.view(torch.uint8).view(-1), parity * world.slot_bytes + rows.offset(rank) * row
    sent = list(parts(rank, w, x.shape[0], chunk, p.pieces or pieces_of(x.nbytes)))
    if p.order == "same":
        sent.sort(key=lambda part: part.peer)
    work: list[Work] = []
    for part in sent:
        first, last = part.first * row, part.last * row
        there = world.data.tensors[part.peer][begin + first : begin + last]
        work.append(Copy(there, local[first:last], stream="copy"))
        flags = world.flags.tensors[part.peer][rank][part.flag :][: part.flags]
        if not p.written:  # a separate copy of the flags, which costs its startup; byte copies have no effect here
            words = flags.view(torch.uint8)
            work.append(Copy(words, torch.empty_like(words), stream="copy"))
        work += [Signal(flag, epoch, stream="copy") for flag in flags.split(1)]
    return work


def matmul_run(problem: Problem, node: Node) -> Run:
    """The same matmul alone, on one rank that has all operands: the plain kernel on all SMs."""
    from fusedtp.kernels.matmul import matmul_kernel

    p, machine = problem, machine_of(node)
    m, n, k = p.tokens, sum(p.widths), p.k
    config = tiles(machine, p.dtype, m, n) if p.config is None else p.config
    x, w, y = (torch.empty(*shape, dtype=p.dtype) for shape in ((m, k), (n, k), (m, n)))
    args: dict[str, Any] = dict(
        x=x, stride_xm=k, stride_xk=1, w=w, stride_wn=k, stride_wk=1, bias=None, y=y, M=m, N=n, K=k,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP=config.group,
        EVEN_K=k % config.block_k == 0,
    )  # fmt: skip
    return Run([[Launch(matmul_kernel, machine.programs, args)]])


def model_problem(operation: str, shape: str, tokens: int, world_size: int, **options: Any) -> Problem:
    """An MLP's operation: a gather feeds gate and up projection, a reduction follows the down projection.

    shape   a name in shapes.MODELS, or "NxK" of one full weight, which is split over ranks
    """
    if shape in MODELS:
        hidden, inner = MODELS[shape].hidden, MODELS[shape].intermediate
        n, k, copies = (inner, hidden, 2) if operation == GATHER else (hidden, inner, 1)
    else:
        try:
            n, k = (int(part) for part in shape.lower().split("x"))
        except ValueError:
            raise ValueError(f"shape {shape!r} is neither NxK nor one of {', '.join(MODELS)}") from None
        copies = 1
    if operation == GATHER:
        n = -(-n // world_size)
    else:
        k = -(-k // world_size)
    return Problem(operation, tokens, (n,) * copies, k, world_size, **options)


# -- a problem measured ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """Times in seconds.

    matmul          the same matmul by the plain kernel on all SMs
    collective      a library's collective alone
    communication   the faster of the collective and plain copies
    """

    problem: Problem
    fused: Timeline
    matmul: float
    collective: float
    communication: float

    @property
    def unfused(self) -> float:
        """The library's collective and the matmul, one after the other."""
        return self.matmul + self.collective

    @property
    def hidden(self) -> float:
        """The share of the shorter part that fusion hides; negative if fusion costs more than it hides."""
        parts = self.communication, self.matmul
        return (sum(parts) - self.fused.total) / min(parts)


def collective_time(problem: Problem, node: Node) -> float:
    """Time of a library's all-gather, reduce-scatter or all-reduce (both in turn), with the best ring protocol."""
    hops = (problem.world_size - 1) * (2 if problem.operation == REDUCE else 1)
    rings = node.collectives.values()
    return min(r["start"] + hops * r["hop"] + problem.traffic / r["bandwidth"] for r in rings)


def copies_time(problem: Problem, node: Node) -> float:
    """Time of plain copies of the data that each rank needs from its peers, by a copy engine."""
    starts = (problem.world_size - 1) * node.copy_latency
    rate = min(node.link_bandwidth, node.copy_bandwidth)
    return starts + problem.traffic / rate + node.link_latency


def measure(problem: Problem, node: Node, *, matmul: float | None = None, exact: bool = False) -> Measured:
    """Run the operation and its parts. `matmul`: the time of the matmul alone, if known."""
    if matmul is None:
        matmul = Engine(matmul_run(problem, node), node, exact=exact).run().total
    fused = Engine(fused_run(problem, node), node, exact=exact).run()
    collective = collective_time(problem, node)
    return Measured(problem, fused, matmul, collective, min(collective, copies_time(problem, node)))


COMPARISONS = ("none", "transport", "chunk", "programs", "order", "all")


def alternatives(problem: Problem, node: Node, compare: str) -> Iterator[tuple[str, Problem]]:
    """The problem as launched, then with other choices. Raises ValueError for a choice that does not apply."""
    gather = problem.operation == GATHER
    if compare not in COMPARISONS:
        raise ValueError(f"comparison is {compare!r}; it must be one of {', '.join(COMPARISONS)}")
    if compare == "transport" and len(TRANSPORTS[problem.operation]) == 1:
        raise ValueError(f"{problem.operation} has only one transport: its programs store to the owner")
    yield "as launched", problem
    seen = {problem}
    for choice in COMPARISONS[1:-1] if compare == "all" else (compare,):
        one_way = choice == "transport" and len(TRANSPORTS[problem.operation]) == 1
        if not one_way and not (gather and problem.few):  # few rows have only one way to gather
            for name, other in _others(problem, node, choice):
                if other not in seen:
                    yield name, other
                seen.add(other)


def compared(problem: Problem, node: Node, compare: str) -> Iterator[tuple[str, Measured]]:
    """Measures the alternatives, all with the matmul time of the problem as launched."""
    matmul = None
    for name, variant in alternatives(problem, node, compare):
        got = measure(variant, node, matmul=matmul)
        matmul = got.matmul
        yield name, got


def _others(problem: Problem, node: Node, compare: str) -> Iterator[tuple[str, Problem]]:
    config, gather = problem.chosen(node), problem.operation == GATHER
    if compare == "transport":
        (other,) = (each for each in TRANSPORTS[problem.operation] if each != problem.transport)
        yield other, replace(problem, transport=other, config=None)
    elif compare == "chunk":
        what = "rows" if gather else "tiles"
        for times in (0.25, 0.5, 2, 4):
            chunk = max(1, int(config.chunk * times))
            if chunk != config.chunk:
                yield f"{chunk} {what} a flag", replace(problem, config=replace(config, chunk=chunk))
    elif compare == "programs":
        for count in (4, 8, 12, 24, 32, 132):
            if gather:  # the other programs multiply from the start
                name, changed = (
                    " sending",
                    replace(config, send_programs=count, other_programs=node.sms - count),
                )
            else:
                name, changed = "", replace(config, send_programs=count)
            if changed != config and changed.programs <= 2 * node.sms and not (gather and count >= node.sms):
                yield f"{count} programs{name}", replace(problem, config=changed)
    elif compare == "order":
        for group in (1, 4, 16):
            yield f"tiles in groups of {group} rows", replace(problem, config=replace(config, group=group))
        if gather:
            engine = replace(problem, transport=ENGINE, config=None)
            yield "copy engine, successor first", engine
            yield "copy engine, rank 0 first", replace(engine, order="same")


# -- published times ---------------------------------------------------------------------------------------------------


# Published times of other projects' kernels on eight H100s, and the model's predictions for the same problems.
#
# No row was used to fit the model. If a source gives the time of its matmul alone, a second prediction takes the matmul
# rate from there, as for a user who knows the speed of the matmul; it is listed separately.
#
# The measured kernels are not ours. They differ in transport (both sources use copy engines) and in the matmul (tensor
# descriptors, warp specialization), so only the problem is the same, not the program.
#
# MESH     https://github.com/yifuwang/symm-mem-recipes, symm_mem_recipes/README.md (all nine rows) and
#          triton_all_gather_matmul.py (one copy and one flag a rank, tiles in groups of 4 rows)
# KRAKEN   https://github.com/meta-pytorch/kraken, pull request 19
# MOE      the same, pull request 32

MESH = "symm-mem-recipes, 8xH100 HBM2e, 500 W"
KRAKEN = "kraken pull request 19, 8xH100"
MOE = "kraken pull request 32, 2xH100"


@dataclass(frozen=True)
class Published:
    """A row of a source; seconds.

    product            the matmul alone, by the source's own kernel
    library            the matmul alone, by a library
    memory_bandwidth   of the source's GPUs, if it differs
    """

    source: str
    what: str
    problem: Problem | None
    fused: float | None
    unfused: float | None
    product: float | None = None
    library: float | None = None
    memory_bandwidth: float | None = None


@dataclass(frozen=True)
class Row:
    """A prediction and the published time; seconds. predicted: None if this library has no such kernel."""

    source: str
    what: str
    quantity: str
    predicted: float | None
    published: float

    @property
    def error(self) -> float | None:
        return None if self.predicted is None else self.predicted / self.published - 1


# H100 with HBM2e at 500 W: https://github.com/pytorch/torchtitan, benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md,
# gives 2.4 TB/s for Meta's. We infer from "HBM2e, at 500W" that symm-mem-recipes measured on the same GPUs.
HBM2E = 2.4e12
WIDE, TALL, LONG = (128, 256, 64), (256, 128, 64), (128, 128, 128)
MESH_ROWS = (  # model, N of a rank, K, M, tile, then us: library alone, kernel alone, library + NCCL, fused
    ("8B", 1792, 4096, 4096, LONG, 105, 125, 230, 213),
    ("8B", 1792, 4096, 8192, LONG, 194, 236, 416, 318),
    ("8B", 1792, 4096, 16384, TALL, 391, 434, 819, 514),
    ("70B", 3584, 8192, 4096, LONG, 403, 483, 652, 543),
    ("70B", 3584, 8192, 8192, TALL, 828, 849, 1291, 948),
    ("70B", 3584, 8192, 16384, TALL, 1672, 1655, 2541, 1846),
    ("105B", 6656, 16384, 4096, WIDE, 1558, 1595, 2077, 1776),
    ("105B", 6656, 16384, 8192, WIDE, 2879, 2953, 3847, 3243),
    ("105B", 6656, 16384, 16384, WIDE, 5842, 5948, 7801, 6538),
)


def _gather(model: str, n: int, k: int, m: int, tile: tuple[int, int, int], *times: float) -> Published:
    shard = -(-m // 8)
    config = Config(*tile, num_warps=8, num_stages=3, group=4, send_programs=0, other_programs=132, chunk=shard)
    problem = Problem(GATHER, m, (n,), k, config=config, transport=ENGINE, written=True)
    library, product, unfused, fused = (t * 1e-6 for t in times)
    return Published(MESH, f"{model} all-gather, M {m}", problem, fused, unfused, product, library, HBM2E)


def _scatter(tokens: int) -> Problem:
    """K = 14336 must be per rank: an eighth of it could not even explain the unfused time."""
    return Problem(SCATTER, tokens, (4096,), 14336)


PUBLISHED = (
    *(_gather(*row) for row in MESH_ROWS),
    Published(KRAKEN, "reduce-scatter, M 512", _scatter(512), 308e-6, 134e-6),
    Published(KRAKEN, "reduce-scatter, M 1024", _scatter(1024), 315e-6, 224e-6),
    Published(KRAKEN, "reduce-scatter, M 2048", _scatter(2048), 410e-6, 423e-6),
    Published(MOE, "dispatch, 4096 tokens a rank", None, 80.1e-6, None),
    Published(MOE, "combine, 4096 tokens a rank", None, 83.4e-6, None),
)  # fmt: skip


def predictions(node: Node, rows: tuple[Published, ...] = PUBLISHED) -> Iterator[Row]:
    """Every published number with the model's prediction."""
    for row in rows:
        p = row.problem
        if p is None:
            assert row.fused is not None
            yield Row(row.source, row.what, "fused", None, row.fused)
            continue
        gpu = node if row.memory_bandwidth is None else node.but(memory_bandwidth=row.memory_bandwidth)
        got = measure(p, gpu)
        if row.product is not None:
            yield Row(row.source, row.what, "product alone", got.matmul, row.product)
        if row.fused is not None:
            yield Row(row.source, row.what, "fused", got.fused.total, row.fused)
        if row.unfused is not None:
            yield Row(row.source, row.what, "product and NCCL", got.unfused, row.unfused)
        if row.product is None:
            continue
        own = at_rate(gpu, p, row.product)
        if row.fused is not None:
            fused = measure(p, own, matmul=row.product).fused.total
            yield Row(row.source, row.what, "fused, given the product", fused, row.fused)
        if row.unfused is not None and row.library is not None:
            both = row.library + collective_time(p, gpu)
            yield Row(row.source, row.what, "product and NCCL, given the product", both, row.unfused)


NOT_MODELLED = (
    "clocks that fall with power, and products that slow down while copies run",
    "jitter: programs do the same at the same time, so their stores come in bursts",
    "how well a kernel is compiled: one rate stands for all tile shapes, limited by what an SM can fetch",
    "the cache, but for what began to be loaded recently",
    "topology inside of switches, congestion, how much a switch sums or copies at once",
    "a library's collective apart from its rings; its kernels beside others",
    "the way back of a store: a release waits until its stores have landed, not until the sender knows it",
    "more than one program on an SM, host time but for latencies, other kernels",
)


def at_rate(node: Node, problem: Problem, product: float) -> Node:
    """The node with the rates of its SMs scaled so that the plain matmul of this problem takes `product` seconds."""
    changed = node
    for _ in range(3):
        now = Engine(matmul_run(problem, changed), changed).run().total
        factor = now / product
        flops = {name: rate * factor for name, rate in changed.flops.items()}
        changed = replace(changed, flops=flops, sm_bandwidth=changed.sm_bandwidth * factor)
    return changed


# -- the command -------------------------------------------------------------------------------------------------------


SIZES = ("llama3-8b", "llama3-70b"), (16, 128, 512, 4096, 8192, 16384)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Options:
    """Simulated time of a fused operation on a node.

    machine     a node shipped with the package (h100, h200, a100), or a .json file
    operation   the operation to run
    shape       a model, for its MLP (llama3-8b, llama3-70b, llama3-405b, qwen3-32b), or NxK of one weight
    tokens      rows of all ranks together
    tp          ranks
    dtype       of all operands
    compare     what to vary: transport of a gather, rows or tiles per flag, sending or reducing programs, tile order
    path        print the critical path of the first row
    timeline    write an HTML timeline of the first row's programs
    published   instead, compare the model with published times; takes some minutes
    sizes       instead, run every operation at SIZES; takes some minutes
    switch      with sizes: only all-reduces, summed by the NVLink switch (engine "multimem")
    save        with sizes: write the table to this file
    against     with sizes: an earlier file from --save; its times are shown for comparison
    """

    machine: str = "h100"
    operation: Literal["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"] = "all_gather_matmul"
    shape: str = "llama3-8b"
    tokens: int = 8192
    tp: int = 8
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    compare: Literal["none", "transport", "chunk", "programs", "order", "all"] = "none"
    path: bool = False
    timeline: Path | None = None
    published: bool = False
    sizes: bool = False
    switch: bool = False
    save: Path | None = None
    against: Path | None = None

    def faults(self) -> list[str]:
        """All errors in the options."""
        found = []
        if self.machine not in machines() and not Path(self.machine).is_file():
            found.append(f"--machine {self.machine}: neither a file nor one of {', '.join(machines())}")
        if self.tokens < 1:
            found.append(f"--tokens {self.tokens} must be at least 1")
        if self.tp < 2:
            found.append(f"--tp {self.tp} must be at least 2")
        if self.switch and not self.sizes:
            found.append("--switch can be used only with --sizes; otherwise use --compare transport")
        if self.against is not None and not self.against.is_file():
            found.append(f"--against {self.against}: no such file")
        return found


def main(argv: list[str] | None = None) -> int:
    """Print the table; returns 2 for wrong options, 1 for a schedule that does not end."""
    options = tyro.cli(Options, prog="python -m fusedtp.bench.timed", args=argv)
    console = Console()
    if options.faults():
        console.print("\n".join(options.faults()), style="red", markup=False)
        return 2
    try:
        node = load_node(options.machine)
        if options.published:
            console.print(_published(node))
            console.print("Not modelled:", *NOT_MODELLED, sep="\n  ", markup=False)
        elif options.sizes:
            _all_sizes(options, node, console, sys.argv[1:] if argv is None else argv)
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
    problem = model_problem(options.operation, options.shape, options.tokens, options.tp, dtype=DTYPES[options.dtype])
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


def _all_sizes(options: Options, node: Node, console: Console, argv: list[str]) -> None:
    before = json.loads(options.against.read_text())["rows"] if options.against is not None else {}
    title = f"{options.tp} x {node.name}, {options.dtype}"
    caption = "microseconds; by copies: its rows go by the copy engine; fused / unfused below 1 is faster than NCCL"
    table = Table(title=title, caption=caption)
    names = [
        "operation",
        "model",
        "tokens",
        "product",
        "unfused",
        *(["before"] if before else []),
        "fused",
        "by copies",
        "/",
    ]
    for name in names:
        table.add_column(name, justify="left" if name in ("operation", "model") else "right")
    rows: dict[str, dict[str, float]] = {}
    operations, transport = ((REDUCE,), SWITCH) if options.switch else (OPERATIONS, PROGRAMS)
    for operation, shape, tokens in track(list(itertools.product(operations, *SIZES)), "simulated", console=console):
        problem = model_problem(operation, shape, tokens, options.tp, dtype=DTYPES[options.dtype], transport=transport)
        got = measure(problem, node)
        times = {"product": got.matmul, "unfused": got.unfused, "fused": got.fused.total}
        if operation == GATHER and not problem.few:  # few rows never go by the copy engine
            times["copied"] = Engine(fused_run(replace(problem, transport=ENGINE), node), node).run().total
        key = f"{operation} {shape} {tokens}"
        rows[key] = {name: round(seconds * 1e6, 1) for name, seconds in times.items()}
        if key in before:
            rows[key]["before"] = before[key]["fused"]
        was = [f"{before[key]['fused']:.0f}" if key in before else ""] if before else []
        ends = [
            _us(got.matmul),
            _us(got.unfused),
            *was,
            _us(got.fused.total),
            _us(times["copied"]) if "copied" in times else "",
            f"{min(got.fused.total, times.get('copied', got.fused.total)) / got.unfused:.2f}",
        ]
        table.add_row(operation, shape, str(tokens), *ends)
    console.print(table)
    if options.save is not None:
        command = shlex.join(["python", "-m", "fusedtp.bench.timed", *argv])
        about = {"node": node.name, "ranks": options.tp, "unit": "us, predicted"}
        about |= {"commit": machine.commit(), "command": command}
        options.save.parent.mkdir(parents=True, exist_ok=True)
        options.save.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


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
