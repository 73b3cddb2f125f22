"""Published times of others' kernels on eight H100s, and what this model says of the same problems.

No row sets any number of the model. Where a source gives the time of its product alone, a second prediction takes the
rate of products from there, as one would who knows his matmul; it is listed apart and says so.

The kernels measured are others'. They differ from ours in transport (both sources let copy engines bring the data)
and in their matmul (tensor descriptors, warp specialisation), so the problem is what is the same, not the program.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fusedtp.ops.launch import Config

from .cases import ENGINE, GATHER, SCATTER, Problem, matmul_run
from .engine import Engine
from .measure import collective_time, measure
from .node import Node

MESH = "symm-mem-recipes, 8xH100 500 W"
KRAKEN = "kraken pull request 19, 8xH100"
MOE = "kraken pull request 32, 2xH100"


@dataclass(frozen=True)
class Published:
    """A row of a source; seconds. product: what the source measured of the product alone with its own kernel."""

    source: str
    what: str
    problem: Problem | None
    fused: float | None
    unfused: float | None
    product: float | None = None
    library: float | None = None


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


def _gather(tokens: int, blocks: tuple[int, int, int]) -> Problem:
    m, n, k = blocks
    chunk = -(-tokens // 8 // 4)
    config = Config(m, n, k, num_warps=8, num_stages=3, send_programs=0, other_programs=132, chunk=chunk)
    return Problem(GATHER, tokens, (3584,), 8192, config=config, transport=ENGINE)


def _scatter(tokens: int) -> Problem:
    """K = 14336 is each rank's own: with an eighth of it even the unfused time could not be spent."""
    return Problem(SCATTER, tokens, (4096,), 14336)


PUBLISHED = (
    Published(MESH, "70B all-gather, M 4096", _gather(4096, (128, 128, 128)), 543e-6, 652e-6, 483e-6, 403e-6),
    Published(MESH, "70B all-gather, M 8192", _gather(8192, (256, 128, 64)), 948e-6, 1291e-6, 849e-6, 828e-6),
    Published(
        MESH, "70B all-gather, M 16384", _gather(16384, (256, 128, 64)), 1846e-6, 2541e-6, 1655e-6, 1672e-6
    ),
    Published(KRAKEN, "reduce-scatter, M 512", _scatter(512), 308e-6, 134e-6),
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
        got = measure(p, node)
        if row.product is not None:
            yield Row(row.source, row.what, "product alone", got.matmul, row.product)
        if row.fused is not None:
            yield Row(row.source, row.what, "fused", got.fused.total, row.fused)
        if row.unfused is not None:
            yield Row(row.source, row.what, "product and NCCL", got.unfused, row.unfused)
        if row.product is None:
            continue
        own = at_rate(node, p, row.product)
        if row.fused is not None:
            fused = measure(p, own, matmul=row.product).fused.total
            yield Row(row.source, row.what, "fused, given the product", fused, row.fused)
        if row.unfused is not None and row.library is not None:
            both = row.library + collective_time(p, node)
            yield Row(row.source, row.what, "product and NCCL, given the product", both, row.unfused)


def at_rate(node: Node, problem: Problem, product: float) -> Node:
    """The node with SMs whose plain matmul of this problem takes `product` seconds: all its rates scaled alike."""
    changed = node
    for _ in range(3):
        now = Engine(matmul_run(problem, changed), changed).run().total
        factor = now / product
        flops = {name: rate * factor for name, rate in changed.flops.items()}
        changed = replace(changed, flops=flops, sm_bandwidth=changed.sm_bandwidth * factor)
    return changed
