"""The fused operations against what they replace: the skeleton of three suites.

An operation gives its parts (`Parts`): operands, the matmuls alone, the communication alone, the two after each other,
torch's own fusion, ours, and an error. Everything is sampled in one interleaved run, and each fused row carries the
times of the two parts, from which its share of hidden communication follows. The fused kernel is also run with all its
data there, against the plain one (arrived.py): on a GPU of its own, which of a virtual world only the first rank has,
while the others are idle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fusedtp.ops.engines import interpreting

from .. import baselines
from ..arrived import Pair
from ..errors import Error
from ..rank import Rank
from ..rows import Row
from ..sample import Rotating, Way
from .common import COPIED, Case, drop_what_fails, held_gbps, link_of, median, row

MATMUL, OURS_ALONE = "matmul alone", COPIED[0]
ARRIVED, PLAIN = "fusedtp triton, data there", "plain Triton matmul"
Function = Callable[..., Tensor]
LocalError = Callable[[Tensor], Error]


@dataclass(frozen=True)
class Parts:
    """An operation on one case.

    operands   seed -> what every function below takes
    local      the matmuls
    alone      our own copies over the workspace
    ours       (engine, *operands)
    by_hand    (collectives of the group) -> (communication alone, both after each other)
    fused      (torch.ops.symm_mem, group) -> torch's own fusion, or None where torch has none
    error      (result of `operands(0)`, whether it is ours) -> Error
    moved      bytes that all ranks together receive
    there      () -> the fused kernel with all data there and the plain one, and the error of what the first returns
               for `operands(0)`; or None where nobody has measured that
    """

    operands: Callable[[int], tuple[Tensor, ...]]
    local: Function
    alone: Function
    ours: Function
    by_hand: Callable[[Any], tuple[Function, Function]]
    fused: Callable[[Any, Any], Function | None]
    error: Callable[[Tensor, bool], Error]
    moved: float
    there: Callable[[], tuple[Pair, LocalError]] | None = None


def measure(rank: Rank, suite: str, case: Case, parts: Parts) -> list[Row]:
    """All ways of one case, interleaved. Collective."""
    shape, dtype = case.shape, case.dtype
    collective = baselines.collective_name(rank.device)
    collective_alone, both = f"communication alone: {collective}", f"{collective} + matmul"
    absent: dict[str, str] = {}
    functions: dict[str, Function] = {MATMUL: parts.local, OURS_ALONE: parts.alone}
    hand, why = baselines.by_hand(rank.group, rank.device)
    if hand is not None:
        functions[collective_alone], functions[both] = parts.by_hand(hand)
    else:
        absent[both] = why
    library, why = baselines.symm_mem(rank.group, rank.device)
    fused = parts.fused(library, rank.group) if library is not None else None
    if fused is not None:
        functions["torch symm_mem"] = fused
    else:
        absent["torch symm_mem"] = why or "torch has no such operation"
    names = [f"fusedtp {engine}" for engine in rank.plan.engines]
    engines = dict(zip(names, rank.plan.engines))
    for name, engine in engines.items():
        why = _cannot(rank, suite, engine)
        if why:
            absent[name] = why
        else:
            functions[name] = _bound(parts.ours, engine)
    operands, is_wrong = rank.copies(parts.operands), {}
    if parts.there is not None and "triton" in engines.values() and rank.link is None:
        why = _cannot(rank, suite, "triton")
        if why:
            absent[ARRIVED] = why
        elif rank.world == "virtual" and rank.rank > 0:
            functions |= {ARRIVED: _nothing, PLAIN: _nothing}
        else:
            pair, is_wrong[ARRIVED] = parts.there()
            functions |= {ARRIVED: pair.fused, PLAIN: pair.plain}
    ways: dict[str, Way] = {name: Rotating(fn, operands) for name, fn in functions.items()}
    drop_what_fails(rank, ways, functions, absent)
    errors = {
        name: parts.error(fn(*operands[0]), name in engines)
        for name, fn in functions.items()
        if "alone" not in name and name not in (ARRIVED, PLAIN)
    }
    if ARRIVED in functions:
        y = functions[ARRIVED](*operands[0])
        local = is_wrong[ARRIVED](y) if ARRIVED in is_wrong else Error(0.0, 0.0)
        errors[ARRIVED] = Error(*rank.worst(*local))
    spreads = rank.measure(ways)
    t_comm, t_matmul = median(spreads, collective_alone, OURS_ALONE), spreads[MATMUL].median
    of_rank = 2.0 * case.tokens * case.k * case.n
    rows = []
    for name, spread in spreads.items():
        figures: dict[str, Any] = dict(seconds=spread, host_seconds=rank.host(ways[name], spread))
        if name in (OURS_ALONE, collective_alone):
            # Each byte that a rank receives is read once and written once, as the roof's copy does.
            figures |= dict(moved_bytes=2 * parts.moved, roof=rank.roofs["copy"])
        else:
            ranks = 1 if rank.world == "virtual" and name in (ARRIVED, PLAIN) else case.tp
            figures |= dict(flops=ranks * of_rank, roof=rank.roofs[dtype], error=errors.get(name))
        if name == ARRIVED:
            figures |= dict(t_plain=spreads[PLAIN].median if PLAIN in spreads else None)
        elif name not in (OURS_ALONE, collective_alone, MATMUL, PLAIN) and _whole_link(rank, name):
            figures |= dict(t_comm=t_comm, t_matmul=t_matmul)
        rows.append(row(rank, suite, shape, dtype, name, **figures, **link_of(rank, name)))
    return rows + [row(rank, suite, shape, dtype, name, note=why) for name, why in absent.items()]


def _nothing(*_: Any) -> Any:
    """What a rank does while another one has the GPU."""


def _bound(fn: Function, engine: str) -> Function:
    return lambda *operands: fn(engine, *operands)


def _cannot(rank: Rank, suite: str, engine: str) -> str:
    """Why an engine does not run in this world; empty if it does."""
    if engine == "triton-copy" and suite != "all-gather-matmul":
        return "copies carry the rows of a gather only"
    if engine.startswith("triton") and rank.device.type == "cpu" and not (rank.plan.smoke and interpreting()):
        return "engine triton is interpreted on a CPU: its time says nothing"
    return ""


def _whole_link(rank: Rank, name: str) -> bool:
    """Whether all that this way moves takes the link that the communication alone took, or there is none to hold."""
    return rank.link is None or held_gbps(rank, name) is not None
