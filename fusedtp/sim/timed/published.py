"""Published times of others' kernels on eight H100s, and what this model says of the same problems.

No row sets any number of the model. Where a source gives the time of its product alone, a second prediction takes the
rate of products from there, as one would who knows his matmul; it is listed apart and says so.

The kernels measured are others'. They differ from ours in transport (both sources let copy engines bring the data)
and in their matmul (tensor descriptors, warp specialisation), so the problem is what is the same, not the program.

MESH     https://github.com/yifuwang/symm-mem-recipes, symm_mem_recipes/README.md (all nine rows) and
         triton_all_gather_matmul.py (one copy and one flag a rank, tiles in groups of 4 rows)
KRAKEN   https://github.com/meta-pytorch/kraken, pull request 19
MOE      the same, pull request 32
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fusedtp.ops.launch import Config

from .cases import ENGINE, GATHER, SCATTER, Problem, matmul_run
from .engine import Engine
from .measure import collective_time, measure
from .node import Node

MESH = "symm-mem-recipes, 8xH100 HBM2e, 500 W"
KRAKEN = "kraken pull request 19, 8xH100"
MOE = "kraken pull request 32, 2xH100"


@dataclass(frozen=True)
class Published:
    """A row of a source; seconds.

    product            of the product alone, by the source's own kernel
    library            of the product alone, by a library
    memory_bandwidth   of the source's GPUs, if theirs is another
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
    """A prediction beside what was published; seconds. predicted None: the library has no such kernel."""

    source: str
    what: str
    quantity: str
    predicted: float | None
    published: float

    @property
    def error(self) -> float | None:
        return None if self.predicted is None else self.predicted / self.published - 1


# H100 with HBM2e at 500 W: https://github.com/pytorch/torchtitan, benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md,
# says 2.4 TB/s of Meta's; that symm-mem-recipes measured on the same is inferred from "HBM2e, at 500W".
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
    config = Config(
        *tile, num_warps=8, num_stages=3, group=4, send_programs=0, other_programs=132, chunk=shard
    )
    problem = Problem(GATHER, m, (n,), k, config=config, transport=ENGINE, written=True)
    library, product, unfused, fused = (t * 1e-6 for t in times)
    return Published(MESH, f"{model} all-gather, M {m}", problem, fused, unfused, product, library, HBM2E)


def _scatter(tokens: int) -> Problem:
    """K = 14336 is each rank's own: with an eighth of it even the unfused time could not be spent."""
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
    """Every published number with the model's."""
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
    "topology inside of switches, congestion, multicast, reduction in the switch",
    "a library's collective apart from its rings; its kernels beside others",
    "the way back of a store: a release waits until its stores have landed, not until the sender knows it",
    "more than one program on an SM, host time but for latencies, other kernels",
)


def at_rate(node: Node, problem: Problem, product: float) -> Node:
    """The node with SMs whose plain matmul of this problem takes `product` seconds: all its rates scaled alike."""
    changed = node
    for _ in range(3):
        now = Engine(matmul_run(problem, changed), changed).run().total
        factor = now / product
        flops = {name: rate * factor for name, rate in changed.flops.items()}
        changed = replace(changed, flops=flops, sm_bandwidth=changed.sm_bandwidth * factor)
    return changed
