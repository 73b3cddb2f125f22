"""Calls of fused matmuls on simulated ranks: the group's memory, operands of small integers, launches, copies.

An operation is known here only by the declarations in its file: its kernels (ops.operation.FusedKernel) and its
`reference`. Sums of the operands are exact in fp32, so results must equal the reference bit for bit.

A gather that sends rows by copies is issued as the host does, see Note [Copies beside a kernel]:

    stream 0      event 0 | the kernel, without senders             | event 1 awaited
    stream copy                event 0 awaited | rows | flags | rows | ... | event 1
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import fusedtp.ops  # noqa: F401  (the operations enter themselves in OPERATIONS)
from fusedtp.comm import DeviceView
from fusedtp.comm.copies import Part, parts
from fusedtp.comm.device_view import epoch_words, meet_options, peers_of
from fusedtp.ops.launch import Config
from fusedtp.ops.launch import Launch as Planned
from fusedtp.ops.launch.config import Machine, block
from fusedtp.ops.matmul_reduce_scatter import FEW_ROWS
from fusedtp.ops.operation import OPERATIONS, FusedKernel, OnRank, Operation, Shared
from fusedtp.ops.rows import Rows
from fusedtp.sim.case import Await, Copy, Launch, Signal, Work
from fusedtp.sim.memory import Memory, symmetric

GPU = Machine("cuda", 3, 160 * 1024, capability=90)  # three SMs
TILE = 16
STREAM = "copy"
DECLARED: dict[str, tuple[Operation, FusedKernel]] = {
    kernel.name: (operation, kernel) for operation in OPERATIONS.values() for kernel in operation.kernels
}


def gpu(target: str) -> Machine:
    """A machine of this target with as many SMs."""
    return replace(GPU, capability=int(target.removeprefix("sm_")))


# -- the group -------------------------------------------------------------------------------------------------------


class SimulatedWorld:
    """A workspace of W ranks: two rotating slots (poisoned), flags, arrivals, epochs.

    slot_bytes         size of one slot; every rank's data region holds two
    flags_per_source   number of chunks that one source can signal
    machine            machine for which launches are planned
    number             number of calls made before
    by_switch          slots have a multicast address: only compiled code has multimem
    """

    def __init__(
        self,
        world_size: int,
        slot_bytes: int,
        flags_per_source: int,
        machine: Machine = GPU,
        number: int = 0,
        by_switch: bool = False,
    ) -> None:
        w = world_size
        self.machine = machine
        self.world_size, self.flags_per_source = w, flags_per_source
        self.slot_bytes = -(-slot_bytes // 16) * 16
        self.data = symmetric("slots", w, (2, self.slot_bytes), torch.uint8)
        self.flags = symmetric("flags", w, (w, flags_per_source), torch.int32, poisoned=False)
        self.arrivals = symmetric("arrivals", w, (2, w), torch.int64, poisoned=False)
        self.epochs = symmetric("epoch", w, (epoch_words(w),), torch.int32, poisoned=False)
        for flags, epoch in zip(self.flags.tensors, self.epochs.tensors):
            flags.fill_(number)
            epoch[0] = number + 1
        self.failures = symmetric("failure", w, (8,), torch.int64, poisoned=False)
        self.statuses = symmetric("status", w, (8,), torch.int64, poisoned=False)
        self.multicast = torch.tensor([self.data.multicast]) if by_switch else None

    @property
    def memory(self) -> tuple[Memory, ...]:
        return self.data, self.flags, self.arrivals, self.epochs, self.failures, self.statuses

    def view(self, rank: int) -> DeviceView:
        """The rank's view for launchers. Its waits never time out: the simulator finds deadlocks itself."""
        return DeviceView(
            data_ptrs=self.data.pointers,
            flag_ptrs=self.flags.pointers,
            arrival_ptrs=self.arrivals.pointers,
            epoch=self.epochs.tensors[rank],
            status=self.statuses.tensors[rank],
            failure=self.failures.tensors[rank],
            slot_bytes=self.slot_bytes,
            flags_per_source=self.flags_per_source,
            timeout_s=600.0,
            multicast=self.multicast,
        )

    def recorded(self) -> list[str]:
        """Describes the failed waits that the kernels of each rank recorded."""
        from fusedtp.kernels.signals import OTHER_SIGNATURE, TIMED_OUT

        meant = {TIMED_OUT.value: "a wait timed out", OTHER_SIGNATURE.value: "a peer is in another call"}
        found = []
        for rank, (failure, status) in enumerate(zip(self.failures.tensors, self.statuses.tensors)):
            if code := int(failure[0]):
                peer, chunk, wanted, seen = status[1:5].tolist()
                said = f"{meant.get(code, 'unknown')} (peer {peer}, chunk {chunk}, wanted {wanted}, seen {seen})"
                found.append(f"rank {rank} recorded status {code}: {said}")
        return found


def launched(planned: Planned) -> Launch:
    """The launch of a call on its rank's stream."""
    return Launch(planned.kernel, planned.programs, planned.args, options=planned.options)


def meeting(world: SimulatedWorld, rank: int, signature: int) -> Launch:
    """The launch of a meeting of all ranks on `rank`'s stream."""
    from fusedtp.kernels.meet import meet_kernel

    clock = world.machine.clock
    peers = peers_of(world.view(rank), rank, world.world_size, signature, clock)
    return Launch(meet_kernel, 1, dict(peers=peers), options=meet_options(clock))


# -- a call ----------------------------------------------------------------------------------------------------------


def in_fp8(operation: str) -> bool:
    """Whether the operation's kernel multiplies fp8."""
    return operation in DECLARED and DECLARED[operation][1].in_fp8


@dataclass(frozen=True)
class Call:
    """One call of a fused kernel.

    operation  name of its cases: FusedKernel.name, or one of experts.OPERATIONS
    sizes      rows of every rank, per batch entry (for an all-reduce only their sum matters)
    widths     N of each weight (a sum over ranks uses the first)
    k          columns of x; if K is sharded, rank r has k + r, or with tma k + 8 r (in fp8 16 r)
    chunk      rows (gather) or tiles (reduction) per flag
    programs   (senders, others)
    tile       rows and columns of a tile; it has more rows if one tile must hold all rows
    block_k    columns of x per step of a matmul; in fp8 at least 32
    copied     for a gather: ranks that send their rows by copies beside the kernel
    products   number of parts of K whose products a reduce-scatter adds
    transposed whether weights are stored as [K, N], as in a gradient
    tma        use TMA for operands that no peer writes, if their rows are multiples of 16 bytes long
    routing    routing of an exchange's tokens, one of experts.ROUTINGS
    """

    operation: str
    sizes: tuple[int, ...]
    widths: tuple[int, ...] = (17,)
    k: int = 16
    batch: int = 1
    bias: bool = True
    keep: bool = False
    dtype: torch.dtype = torch.float32
    chunk: int = 16
    programs: tuple[int, int] = (1, 2)
    tile: int = TILE
    block_k: int = TILE
    copied: tuple[int, ...] = ()
    products: int = 1
    transposed: bool = False
    tma: bool = False
    routing: str = "any"

    def k_of(self, rank: int) -> int:
        """Columns of x on a rank if K is sharded."""
        step = 16 if in_fp8(self.operation) else 8
        return self.k + rank * (step if self.tma else 1)

    @property
    def rows(self) -> Rows:
        return Rows(self.sizes, self.batch)

    def config(self, machine: Machine) -> Config:
        """The configuration; three stages, to exercise the software pipeliner."""
        senders, others = self.programs
        one_tile = self.operation in DECLARED and DECLARED[self.operation][1].one_tile
        return Config(
            block(self.rows.total, self.tile, FEW_ROWS) if one_tile else self.tile,
            self.tile,
            max(self.block_k, 32) if in_fp8(self.operation) else self.block_k,
            num_stages=3,
            send_programs=senders,
            other_programs=others,
            chunk=self.chunk,
            tma=self.tma and machine.capability >= 90,
        )


@dataclass
class Operands:
    """A call's inputs by rank and the expected outputs. others: weights, or dys for a weight gradient."""

    x: list[Tensor]
    others: list[list[Tensor]]
    biases: list[list[Tensor | None]]
    wanted: dict[str, list[Tensor]]


def slot_bytes(call: Call) -> int:
    """Bytes that the call needs in a slot."""
    operation, kernel = DECLARED[call.operation]
    needed = kernel.slot_bytes or operation.slot_bytes["triton"]
    width = call.k if kernel.gathers else call.widths[0]  # of the rows that are sent
    return needed(call.rows, Shared(call.dtype, width))


def operands(call: Call, seed: int) -> Operands:
    """Random operands from `seed`, with the results of the reference."""
    operation, kernel = DECLARED[call.operation]
    generator = torch.Generator().manual_seed(seed)
    w, rows = len(call.sizes), call.rows

    def draw(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=generator).to(call.dtype)

    def exact(*given: Any) -> Any:
        """The formula in fp64, rounded once."""
        formula = kernel.formula or operation.reference
        assert formula is not None
        wide = [[None if t is None else t.double() for t in g] if isinstance(g, list) else g for g in given]
        got = formula(*(g.double() if isinstance(g, Tensor) else g for g in wide))
        return [y.to(call.dtype) for y in got] if isinstance(got, list) else got.to(call.dtype)

    if not kernel.gathers:
        xs = [draw(rows.total, call.k_of(r)) for r in range(w)]
        weights = [draw(call.widths[0], call.k_of(r)) for r in range(w)]
        bias = draw(call.widths[0]) if call.bias else None
        full = exact(torch.cat(xs, 1), torch.cat(weights, 1), bias)
        y = [torch.cat([*rows.blocks(full, r)]) if kernel.scatters else full for r in range(w)]
        return Operands(xs, [[weight] for weight in weights], [[bias]] * w, {"y": y})
    x = draw(rows.total, call.k)
    widths = call.widths[:1] * 2 if kernel.pairs else call.widths
    sides = {"T": rows.total, "K": call.k}
    others = [[draw(*((sides | {"N": n})[side] for side in kernel.others)) for n in widths] for _ in range(w)]
    biased = call.bias and kernel.others == "NK"
    biases: list[list[Tensor | None]] = [
        [draw(n) if biased and (kernel.pairs or i == 0) else None for i, n in enumerate(widths)] for _ in range(w)
    ]
    ys = [exact(x, others[r], *([biases[r]] if kernel.others == "NK" else [])) for r in range(w)]
    wanted = {f"y{i}": [of_rank[i] for of_rank in ys] for i in range(len(widths))}
    if call.keep and kernel.keeps:
        wanted["gathered"] = [x] * w
    return Operands([torch.cat([*rows.blocks(x, r)]) for r in range(w)], others, biases, wanted)


def plan(
    call: Call, given: Operands, world: SimulatedWorld, rank: int, signature: int
) -> tuple[Planned, dict[str, Tensor]]:
    """This rank's launch of the call and its outputs by name."""
    machine = world.machine
    config = call.config(machine)
    at = OnRank(world.view(rank), rank, world.world_size, call.rows, signature, config, machine)
    others = [t.clone() for t in given.others[rank]]
    if call.products > 1:
        width = -(-call.k_of(rank) // (8 * call.products)) * 8
        others = list(others[0].split(width, 1))
    if call.transposed:
        others = [w.t().contiguous().t() for w in others]
    biases = [None if b is None else b.clone() for b in given.biases[rank]]
    launch = DECLARED[call.operation][1].launch
    return launch(at, given.x[rank].clone(), others, biases, call.keep, rank in call.copied, None)


# -- copies beside a kernel ------------------------------------------------------------------------------------------


def beside_copies(
    planned: Planned, world: SimulatedWorld, rank: int, rows: Rows, number: int, pieces: int = 3
) -> list[Work]:
    """The work of one call on `rank`. number: the host's number of this call."""
    forked, done = (torch.zeros(1, dtype=torch.int32) for _ in range(2))
    x, chunk = planned.args["x"], planned.args["chunk_rows"]
    work: list[Work] = [Signal(forked, 1), Await(forked, 1, STREAM)]
    for part in parts(rank, world.world_size, x.shape[0], chunk, pieces):
        there = place_of(world, part, x, rows.batch * rows.offset(rank), number)
        if there.numel():
            work.append(Copy(there, x[part.first : part.last].view(-1), pieces=2, stream=STREAM))
        flags = world.flags.tensors[part.peer][rank]
        work += [Signal(flags[part.flag + i :][:1], number, STREAM) for i in range(part.flags)]
    return [*work, Signal(done, 1, STREAM), launched(planned), Await(done, 1)]


def place_of(world: SimulatedWorld, part: Part, x: Tensor, begin: int, number: int) -> Tensor:
    """The place of a part's rows in its peer's slot. begin: first row of the shard in [T, K]."""
    row = x.shape[1] * x.element_size()
    slot = world.data.tensors[part.peer][number & 1]
    return slot[(begin + part.first) * row : (begin + part.last) * row].view(x.dtype)
