"""A suite for every operation that declares an example: the fused operation against what it replaces.

The declaration (fusedtp/ops/operation.py, Example) provides the layers, the operands, the matmul alone, the
communication alone, both one after the other, the call of each engine, bytes and FLOPs, and a reference for the error.
Only two baselines are named here: torch's own fusion, and the kernel with all its data already there (arrived.py). The
latter needs a whole GPU: in a virtual world only the first rank runs it, while the others are idle. In a virtual world
"matmul alone" uses the whole GPU for each rank in turn, but each fused kernel only a part of it. So another row
measures the plain kernels side by side, each on its part.

Everything is sampled in one interleaved run. Each fused row stores the times of the two parts, which give its share of
hidden communication.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusedtp.nn.mlp import gated
from fusedtp.ops.launch import plain
from fusedtp.ops.launch.config import machine_of
from fusedtp.ops.operation import OPERATIONS
from fusedtp.ops.rows import Rows, split
from fusedtp.ops.shards import gather_rows, scatter_rows

from .. import arrived, errors, rivals
from ..arrived import Pair
from ..cases import Case, even, layer_cases
from ..errors import Error
from ..options import Plan
from ..rank import Rank
from ..rivals import matmul
from ..rows import Row
from ..ways import NO_SWITCH, Function, Ways

MATMUL, OURS_ALONE = "matmul alone", "communication alone: ours"
ARRIVED, PLAIN = "fusedtp triton, data there", "plain Triton matmul"
SIDE_BY_SIDE = "plain Triton matmul, side by side"
LocalError = Callable[[Tensor], Error]
TORCHS = {  # operation -> (torch.ops.symm_mem, group) -> a function of both operands
    "all_gather_matmul": lambda library, group: (
        lambda x, w: library.fused_all_gather_matmul(x, [w.t()], 0, group.group_name)[1][0]
    ),
    "matmul_reduce_scatter": lambda library, group: (
        lambda x, w: library.fused_matmul_reduce_scatter(x, w.t(), "sum", 0, group.group_name)
    ),
}


def suite_of(operation: str) -> str:
    """The suite's name on the command line."""
    return operation.replace("_", "-")


SUITES = {suite_of(name): name for name, operation in OPERATIONS.items() if operation.example is not None}


def cases(suite: str, plan: Plan, tp: int) -> list[Case]:
    """Cases on all matching layers. Raises ValueError for tokens that do not split evenly, if required."""
    found = layer_cases(plan, tp, SUITES[suite])
    return found if found and found[0].example.moves == "all_reduce" else even(found, suite)


class Parts:
    """The parts of an operation on one case and rank; every function takes both operands.

    alone     our own copies through the workspace
    local     the matmul with its activation
    """

    def __init__(self, rank: Rank, case: Case) -> None:
        comm, example = rank.comm, case.example
        assert comm is not None
        self.rank, self.case, self.factors, self.has_switch = rank, case, example.factors, comm.has_switch
        self.rows, self.own = Rows(split(case.tokens, case.tp)), case.tokens // case.tp
        self.gathers = example.moves == "gather"
        self.sampled, self.want = errors.sampled(case.tokens), None
        self.first = case.draw(rank)(0)
        x, w = self.first
        self.full = gather_rows(comm, x, self.rows) if self.gathers else None
        self.partial = None if self.gathers else rank.randn(case.tokens, case.n, dtype=case.dtype, seed=99)
        a, b = self.factors(x if self.full is None else self.full, w)
        self.sampled = errors.sampled(a.shape[0])
        part = errors.product(a, b, self.sampled)
        self.finish: Callable[[Tensor], Tensor] = lambda y: y
        if example.gated:
            part = errors.gated(part)
            self.finish = lambda y: gated(y[:, : y.shape[1] // 2], y[:, y.shape[1] // 2 :], "silu")
        self.terms, self.local_part = a.shape[1], part
        if self.gathers:
            self.want = part
        else:
            total, terms, parts = (comm.all_reduce(t) for t in (part.y, part.terms, part.y.abs()))
            self.want = errors.Reference(total, terms, parts)
        mine = (self.sampled >= rank.rank * self.own) & (self.sampled < (rank.rank + 1) * self.own)
        # Sampled rows of the result on this rank, and their places in it.
        self.here = mine if example.moves == "scatter" else torch.ones_like(mine)
        self.places = self.sampled[self.here] - (rank.rank * self.own if example.moves == "scatter" else 0)

    def alone(self, x: Tensor, w: Tensor) -> Tensor:
        comm = self.rank.comm
        assert comm is not None
        if self.partial is None:
            return gather_rows(comm, x, self.rows)
        mine = scatter_rows(comm, self.partial, self.rows)
        return mine if self.case.example.moves == "scatter" else gather_rows(comm, mine, self.rows)

    def local(self, x: Tensor, w: Tensor) -> Tensor:
        return self.finish(matmul(*self.factors(x if self.full is None else self.full, w)))

    def side_by_side(self, x: Tensor, w: Tensor) -> Tensor:
        """`local` with the plain kernel, on this rank's part of a GPU."""
        comm = self.rank.comm
        assert comm is not None
        a, b = self.factors(x if self.full is None else self.full, w)
        machine = machine_of(a.device, comm.world.ranks_per_device)
        launch, y = plain.plan_matmul(a, b, None, a.dtype, None, "ieee", machine)
        launch.start(a.device)
        return self.finish(y)

    def by_hand(self, hand: Any) -> tuple[Function, Function]:
        """(communication alone, communication and matmul one after the other), by the group's collectives."""
        if self.gathers:
            whole = lambda x, w: self.finish(matmul(*self.factors(hand.gather(x), w)))  # noqa: E731
            return lambda x, w: hand.gather(x), whole
        move = getattr(hand, {"scatter": "reduce_scatter"}.get(self.case.example.moves, "all_reduce"))
        return lambda x, w: move(self.partial), lambda x, w: move(matmul(*self.factors(x, w)))

    def error(self, y: Tensor, is_ours: bool) -> Error:
        """The error of the result of the first operands, over all ranks. Collective."""
        # Ours sums in fp32; a collective may round after each addition, in any order.
        roundings, ranks = (1, 1) if self.gathers else (1 if is_ours else self.case.tp, self.case.tp)
        want = self._here(self.want)
        found = errors.compare(y[self.places.to(y.device)], want, self.terms, ranks, roundings)
        return Error(*self.rank.worst(*found))

    def _here(self, want: errors.Reference | None) -> errors.Reference:
        assert want is not None
        y, terms, parts = (None if t is None else t[self.here.to(t.device)] for t in want)
        assert y is not None and terms is not None
        return errors.Reference(y, terms, parts)

    def there(self) -> tuple[Pair, LocalError]:
        """The fused kernel with all data there and the plain one, and a function for the error of their results."""
        x, w = self.first
        number = self.rank.rank
        if self.gathers:
            assert self.full is not None
            places, part = self.places, self._here(self.local_part)
            return arrived.gather(number, self.rows, self.full, w), lambda y: errors.compare(
                y[places.to(y.device)], part, self.terms
            )
        parts = self.rank.randn(self.case.tp, self.own, self.case.n, dtype=self.case.dtype, seed=98)
        others = torch.cat([parts[:number], parts[number + 1 :]])[:, self.places.to(x.device)].double()
        part = self._here(self.local_part)
        total = errors.Reference(part.y + others.sum(0), part.terms + others.abs().sum(0), part.y.abs())

        def local_error(y: Tensor) -> Error:
            return errors.compare(y[self.places.to(y.device)], total, self.terms, self.case.tp)

        return arrived.scatter(number, self.rows, parts, x, w), local_error


@torch.no_grad()
def measure(rank: Rank, case: Case) -> list[Row]:
    """Result rows of one case: all ways, interleaved. Collective."""
    parts, ways = Parts(rank, case), Ways(rank, suite_of(case.operation), case)
    collective = rivals.collective_name(rank.device)
    collective_alone, both = f"communication alone: {collective}", f"{collective} + matmul"
    ways.functions |= {MATMUL: parts.local, OURS_ALONE: parts.alone}
    hand, why = rivals.by_hand(rank.group, rank.device)
    if hand is not None:
        ways.functions[collective_alone], ways.functions[both] = parts.by_hand(hand)
    else:
        ways.absent[both] = why
    library, why = rivals.symm_mem(rank.group, rank.device)
    torchs = TORCHS.get(case.operation) if library is not None else None
    ways.add("torch symm_mem", torchs and torchs(library, rank.group), why or "torch has no such operation")
    for engine in rank.plan.engines:
        if engine == "triton-copy" and not parts.gathers:
            ways.absent[f"fusedtp {engine}"] = "the copy engine moves rows of gathers only"
        elif engine == "multimem" and case.operation != "matmul_all_reduce":
            ways.absent[f"fusedtp {engine}"] = "the switch sums all-reduces only"
        elif engine == "multimem" and rank.world != "virtual" and not parts.has_switch:
            ways.absent[f"fusedtp {engine}"] = NO_SWITCH
        else:
            ways.add_engine(engine, case.call(rank, engine))
    ours, is_wrong = [f"fusedtp {engine}" for engine in rank.plan.engines], None
    if case.operation in TORCHS and "triton" in rank.plan.engines:
        if "fusedtp triton" in ways.absent:
            ways.absent[ARRIVED] = ways.absent["fusedtp triton"]
        elif rank.world == "virtual" and rank.rank > 0:
            ways.functions |= {ARRIVED: _nothing, PLAIN: _nothing}
        else:
            pair, is_wrong = parts.there()
            ways.functions |= {ARRIVED: pair.fused, PLAIN: pair.plain}
    if rank.world == "virtual" and "fusedtp triton" in ways.functions:
        ways.functions[SIDE_BY_SIDE] = parts.side_by_side
    ways.prepare(rank.copies(case.draw(rank)))
    wrong = {
        name: parts.error(function(*parts.first), name in ours)
        for name, function in ways.functions.items()
        if "alone" not in name and name not in (ARRIVED, PLAIN, SIDE_BY_SIDE)
    }
    if ARRIVED in ways.functions:
        y = ways.functions[ARRIVED](*parts.first)
        wrong[ARRIVED] = Error(*rank.worst(*(is_wrong(y) if is_wrong is not None else Error(0.0, 0.0))))
    spreads = rank.measure(ways.timed)
    alone = [spreads[name].median for name in (collective_alone, OURS_ALONE) if name in spreads]
    t_comm, t_matmul = min(alone), spreads[MATMUL].median
    rows = []
    for name, spread in spreads.items():
        figures: dict[str, Any] = {}
        if name in (OURS_ALONE, collective_alone):
            # Each byte that a rank receives is read once and written once, as in the roof's copy.
            figures |= dict(moved_bytes=2 * case.moved, roof=rank.roofs["copy"])
        else:
            one = rank.world == "virtual" and name in (ARRIVED, PLAIN)
            flops = case.flops / case.tp if one else case.flops
            figures |= dict(flops=flops, roof=rank.roofs[case.dtype], error=wrong.get(name))
        if name == ARRIVED:
            figures |= dict(t_plain=spreads[PLAIN].median if PLAIN in spreads else None)
        elif name not in (OURS_ALONE, collective_alone, MATMUL, PLAIN, SIDE_BY_SIDE):
            figures |= dict(t_comm=t_comm, t_matmul=t_matmul)
        rows.append(ways.row(name, spread, **figures))
    return rows + ways.missing()


def _nothing(*_: Any) -> Any:
    """The work of a rank while another one uses the GPU."""
