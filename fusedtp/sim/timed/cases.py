"""The library's fused operations at the sizes that users run, as launched on a GPU, without memory behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusedtp.comm.copies import PIECES, parts
from fusedtp.comm.workspace import FLAGS_PER_SOURCE
from fusedtp.ops import launch
from fusedtp.ops.all_gather_matmul import (
    gather_slot_bytes,
    plan_all_gather_matmul,
    with_senders,
    without_senders,
)
from fusedtp.ops.launch.config import tiles
from fusedtp.ops.matmul_all_reduce import (
    all_reduce_slot_bytes,
    is_one_shot,
    plan_one_shot,
    plan_two_shot,
)
from fusedtp.ops.matmul_reduce_scatter import plan_matmul_reduce_scatter, reduction, scatter_slot_bytes
from fusedtp.ops.rows import Rows, split

from ..case import Copy, Launch, Run, Signal, Work
from ..memory import Memory
from ..worlds import SimulatedWorld, launches
from .node import Node

GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
OPERATIONS = (GATHER, SCATTER, REDUCE)
PROGRAMS, ENGINE = "programs", "copy engine"
SIGNATURE = 1


@dataclass(frozen=True)
class Problem:
    """One operation of a group.

    tokens      T, rows of all ranks
    widths      N of every weight, of this rank for a gather, of all for a reduction
    k           K of this rank
    config      None: as the launchers choose
    transport   of a gather: PROGRAMS inside the kernel send, or the ENGINE copies chunk by chunk on its own stream
    order       of the engine's copies: "successor" (rank + 1 first) or "same" (all ranks begin with rank 0)
    pieces      copies of a shard to one peer
    written     its flags are written by the stream, as others' kernels have it, and not copied
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
    pieces: int = PIECES
    written: bool = False

    @property
    def rows(self) -> Rows:
        return Rows(split(self.tokens, self.world_size))

    def chosen(self, node: Node) -> launch.Config:
        """The configuration that a launch on this node takes."""
        if self.config is not None:
            return self.config
        machine, owned, n = node.machine, max(self.rows.sizes), self.widths[0]
        if self.operation == GATHER:
            shape = tiles(machine, self.dtype, self.tokens, sum(self.widths))
            config = with_senders(shape, machine, self.rows, FLAGS_PER_SOURCE)
            return without_senders(config, machine) if self.transport == ENGINE else config
        flags, owners = FLAGS_PER_SOURCE - 1, self.world_size
        if self.operation == REDUCE and not is_one_shot(self.tokens, n, self.dtype):
            flags = FLAGS_PER_SOURCE // 2 - 1
        elif self.operation == REDUCE:
            owned, owners = self.tokens, 1
        return reduction(machine, self.dtype, owned, n, flags, owners=owners)

    @property
    def flops(self) -> int:
        """Of one rank, if its tiles had no tails."""
        return 2 * self.tokens * sum(self.widths) * self.k

    @property
    def traffic(self) -> int:
        """Bytes that a rank receives from its peers at least."""
        item, w = self.dtype.itemsize, self.world_size
        others = self.tokens - max(self.rows.sizes)
        if self.operation == GATHER:
            return others * self.k * item
        own = max(self.rows.sizes) * self.widths[0] * item * (w - 1)
        return own if self.operation == SCATTER else own + others * self.widths[0] * item


class EmptyWorld(SimulatedWorld):
    """A workspace of W ranks whose slots nobody touches, so that big ones cost no memory."""

    def __init__(self, world_size: int, slot_bytes: int) -> None:
        super().__init__(world_size, 0, FLAGS_PER_SOURCE)
        self.slot_bytes = -(-slot_bytes // 16) * 16
        slots = (torch.empty(2 * self.slot_bytes, dtype=torch.uint8) for _ in range(world_size))
        self.data = Memory("slots", tuple(slots))


def fused_run(problem: Problem, node: Node) -> Run:
    """One call of the operation on every rank, on a fresh workspace."""
    p, rows, w = problem, problem.rows, problem.world_size
    if p.operation not in OPERATIONS:
        raise ValueError(f"operation {p.operation!r}; known are {', '.join(OPERATIONS)}")
    if p.transport not in (PROGRAMS, ENGINE) or (p.transport == ENGINE and p.operation != GATHER):
        raise ValueError(f"transport {p.transport!r} of {p.operation}: the copy engine serves {GATHER} only")
    config, machine, n = p.chosen(node), node.machine, p.widths[0]
    if p.operation == GATHER:
        nbytes = gather_slot_bytes(rows, p.k, p.dtype)
    elif p.operation == SCATTER:
        nbytes = scatter_slot_bytes(rows, n, p.dtype)
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
            planned, _, _ = plan_all_gather_matmul(
                view, rank, w, x, weights, [None] * len(weights), rows, SIGNATURE, False, config, machine
            )
        elif p.operation == SCATTER:
            planned, _ = plan_matmul_reduce_scatter(
                view, rank, w, x, weights[0], None, rows, SIGNATURE, config, machine
            )
        else:
            one = is_one_shot(p.tokens, n, p.dtype)
            plan = plan_one_shot if one else plan_two_shot
            planned, _ = plan(view, rank, w, x, weights[0], None, SIGNATURE, config, machine)
        mine: list[Work] = list(launches(planned, world.epochs.tensors[rank]))
        if p.transport == ENGINE:
            mine += _copies(p, world, rank, x, config.chunk)
        work.append(mine)
    return Run(work, world.memory)


def _copies(p: Problem, world: EmptyWorld, rank: int, x: Tensor, chunk: int) -> list[Work]:
    """What the sending programs would do, done by the host's copy stream: rows and their flags, piece by piece."""
    w, rows = p.world_size, p.rows
    parity, epoch = 1, 1  # of the first call
    row = p.k * p.dtype.itemsize
    local, begin = x.view(torch.uint8).view(-1), parity * world.slot_bytes + rows.offset(rank) * row
    sent = list(parts(rank, w, x.shape[0], chunk, p.pieces))
    if p.order == "same":
        sent.sort(key=lambda part: part.peer)
    work: list[Work] = []
    for part in sent:
        first, last = part.first * row, part.last * row
        there = world.data.tensors[part.peer][begin + first : begin + last]
        work.append(Copy(there, local[first:last], stream="copy"))
        flags = world.flags.tensors[part.peer][rank][part.flag :][: part.flags]
        if not p.written:  # a copy of their own, which takes its start; as bytes it moves nothing here
            words = flags.view(torch.uint8)
            work.append(Copy(words, torch.empty_like(words), stream="copy"))
        work += [Signal(flag, epoch, stream="copy") for flag in flags.split(1)]
    return work


def matmul_run(problem: Problem, node: Node) -> Run:
    """The same products alone, on one rank that has all operands: one plain matmul, all SMs."""
    from fusedtp.kernels.matmul import matmul_kernel

    p, machine = problem, node.machine
    m, n, k = p.tokens, sum(p.widths), p.k
    config = tiles(machine, p.dtype, m, n) if p.config is None else p.config
    x, w, y = (torch.empty(*shape, dtype=p.dtype) for shape in ((m, k), (n, k), (m, n)))
    args: dict[str, Any] = dict(
        x=x, stride_xm=k, stride_xk=1, w=w, stride_wn=k, stride_wk=1, bias=None, y=y, M=m, N=n, K=k,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP=config.group,
        EVEN_K=k % config.block_k == 0,
    )  # fmt: skip
    return Run([[Launch(matmul_kernel, machine.programs, args)]])


MODELS: dict[str, tuple[int, int]] = {  # hidden size, size inside the MLP
    "llama3-8b": (4096, 14336),
    "llama3-70b": (8192, 28672),
    "llama3-405b": (16384, 53248),
    "qwen3-32b": (5120, 25600),
}


def model_problem(operation: str, shape: str, tokens: int, world_size: int, **options: Any) -> Problem:
    """An MLP's operation: a gather feeds gate and up projection, a reduction follows the down projection.

    shape   a name of MODELS, or "NxK" of one full weight, of which every rank has its part
    """
    if shape in MODELS:
        hidden, inner = MODELS[shape]
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
