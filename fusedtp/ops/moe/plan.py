"""Where the rows of a mixture of experts go: what every rank knows once the plan has been exchanged.

    expert_ids [T_s, k]   the experts that the tokens of source s chose; -1 where a choice was dropped
    slot                  t * k + j of a source: the j-th choice of its t-th token
    order of s            its slots sorted by (expert, slot), the dropped ones last: a stable sort, no counters
    table [W, E]          how many slots of s chose expert e; so also where each source's rows begin
    rows of an owner      of its E / W experts, by (expert, source, slot): what it multiplies, expert by expert

Slots of one source for one expert are neighbours in its order and in the owner's rows: a block. Rows of an expert are
in the order of the global tokens, however tokens and experts are split, so its matmuls always see the same operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedtp.comm import Communicator, Signature
from fusedtp.comm.signature import WIRES


class Exchange(NamedTuple):
    """What all ranks share of a dispatch, and who this rank is.

    sizes      tokens of every rank
    max_rows   rows that this rank has room for
    bound      the same bound on all ranks that was asked for; -1: none was
    wire       in which form rows travel to their experts, see wire.py
    """

    group: str
    rank: int
    sizes: tuple[int, ...]
    num_experts: int
    top_k: int
    max_rows: int
    engine: str
    layer: str = ""
    bound: int = -1
    wire: str = ""

    @classmethod
    def of(cls, group: str, engine: str, layer: str, numbers: Sequence[int]) -> Exchange:
        """What `flat` took apart."""
        rank, num_experts, top_k, max_rows, bound, wire, *sizes = numbers
        return cls(group, rank, tuple(sizes), num_experts, top_k, max_rows, engine, layer, bound, WIRES[wire])

    @property
    def flat(self) -> tuple[str, str, str, list[int]]:
        """As custom ops take it: group, engine, layer, and all numbers."""
        numbers = [self.rank, self.num_experts, self.top_k, self.max_rows, self.bound, WIRES.index(self.wire)]
        return self.group, self.engine, self.layer, numbers + list(self.sizes)

    @property
    def world_size(self) -> int:
        return len(self.sizes)

    @property
    def experts_here(self) -> int:
        """Experts an owner has."""
        return self.num_experts // self.world_size

    @property
    def tokens(self) -> int:
        """T_r, of this rank."""
        return self.sizes[self.rank]

    @property
    def most_rows(self) -> int:
        """What any routing needs of an owner: all tokens' choices among its experts."""
        return sum(self.sizes) * min(self.top_k, self.experts_here)

    def slots_of(self, p: int) -> slice:
        """Where rank p's order stands among `orders`."""
        begin = sum(self.sizes[:p]) * self.top_k
        return slice(begin, begin + self.sizes[p] * self.top_k)

    def signature(
        self, operation: str, engine: str, dtype: torch.dtype, features: int, **more: Any
    ) -> Signature:
        """Of a call of this exchange."""
        return Signature(
            operation, engine, dtype, features, self.sizes, top_k=self.top_k, experts=self.num_experts,
            max_rows=1 + self.bound, wire=WIRES.index(self.wire), **more,
        )  # fmt: skip


class Plan(NamedTuple):
    """table int32 [W, E] and orders int32 [T * k], the sources' one after another: the same on all ranks.

    words   int32, the plan as kernels read it (layout.py), for this rank; empty for engines of the host
    """

    table: Tensor
    orders: Tensor
    words: Tensor


def sort_slots(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """expert_ids [T, k], -1 of dropped slots -> (counts [E], order [T * k]), int32. Nothing waits for the device."""
    keys = expert_ids.reshape(-1)
    keys = torch.where(keys < 0, num_experts, keys)
    if keys.device.type == "cpu" and num_experts <= torch.iinfo(torch.int16).max:
        order = torch.from_numpy(keys.to(torch.int16).numpy().argsort(kind="stable"))  # by radix, for 16 bits
        return keys.bincount(minlength=num_experts)[:num_experts].to(torch.int32), order.to(torch.int32)
    by_expert, order = torch.sort(keys, stable=True)
    bounds = torch.arange(num_experts + 1, dtype=keys.dtype, device=keys.device)
    starts = torch.searchsorted(by_expert, bounds)
    return starts.diff().to(torch.int32), order.to(torch.int32)


def exchange(comm: Communicator | None, expert_ids: Tensor, at: Exchange) -> tuple[Tensor, Tensor]:
    """expert_ids [T_r, k] -> (table, orders). One small gather; its shape is known on the host."""
    counts, order = sort_slots(expert_ids, at.num_experts)
    if comm is None:
        return counts[None], order
    words = torch.cat([counts, order])
    by = "chunked" if at.engine == "chunked" else "collective"
    signature = at.signature("moe_plan", by, torch.int32, 0)
    lengths = [at.num_experts + n * at.top_k for n in at.sizes]
    if by == "chunked":
        with comm.workspace.call(signature, 4 * max(lengths)) as call:
            shared = [call.buffer(p, (n,), torch.int32) for p, n in enumerate(lengths)]
            shared[at.rank].copy_(words)
            call.handshake()
            parts = torch.cat(shared).split(lengths)
    else:
        with comm.agreed(signature):
            parts = comm.all_gather(words, lengths).split(lengths)
    table = torch.stack([part[: at.num_experts] for part in parts])
    return table, torch.cat([part[at.num_experts :] for part in parts])


def offsets_of(table: Tensor, at: Exchange) -> Tensor:
    """int32 [E / W + 1]: where each expert of this rank begins among its rows, and where the last one ends."""
    mine = table[:, at.rank * at.experts_here : (at.rank + 1) * at.experts_here]
    ends = mine.sum(0).cumsum(0)
    return torch.cat([ends.new_zeros(1), ends]).to(torch.int32)


class Block(NamedTuple):
    """Slots of `source` for one expert of this rank: `size` of its rows from `row` on, from `slot` on in the order."""

    source: int
    row: int
    slot: int
    size: int


class Blocks:
    """The table as this rank's host integers.

    lengths   [source][owner]  slots that travel
    rows      [owner]          of its experts
    sent      [source]         slots that are not dropped
    received  [source]         rows of this rank's experts
    begins    [source]         where they begin in the source's order
    each      in the order of this rank's rows: by expert, then by source; none is empty
    """

    def __init__(self, table: Tensor, at: Exchange) -> None:
        counts, here = table.tolist(), at.experts_here
        firsts = range(0, here * at.world_size, here)
        self.lengths = [[sum(of_source[e : e + here]) for e in firsts] for of_source in counts]
        self.rows = [sum(of_owner) for of_owner in zip(*self.lengths, strict=True)]
        self.sent = [sum(of_source) for of_source in self.lengths]
        self.received = [of_source[at.rank] for of_source in self.lengths]
        self.begins = [sum(of_source[: at.rank]) for of_source in self.lengths]
        self.each: list[Block] = []
        row, slots = 0, list(self.begins)
        mine = slice(firsts[at.rank], firsts[at.rank] + here)
        for of_expert in zip(*(of_source[mine] for of_source in counts), strict=True):
            for source, n in enumerate(of_expert):
                if n:
                    self.each.append(Block(source, row, slots[source], n))
                    row, slots[source] = row + n, slots[source] + n

    def check_room(self, at: Exchange) -> None:
        """Raises ValueError, on all ranks alike, where an owner has more rows than there is room for."""
        room = at.most_rows if at.bound < 0 else min(at.bound, at.most_rows)
        for owner, rows in enumerate(self.rows):
            if rows > room:
                raise ValueError(
                    f"rank {at.rank}: {rows} rows go to the experts of rank {owner}, which has room for max_rows = "
                    f"{room}"
                )

    def of(self, source: int) -> list[Block]:
        """Those of one source."""
        return [block for block in self.each if block.source == source]
