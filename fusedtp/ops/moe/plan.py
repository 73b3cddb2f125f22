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
    """Slots of one source for one expert: `size` rows of the owner from `row` on, from `slot` on in the order."""

    row: int
    slot: int
    size: int


class Blocks:
    """The table as host integers."""

    def __init__(self, table: Tensor, at: Exchange) -> None:
        counts = table.tolist()
        self.rows = [0] * at.world_size  # of every owner
        self.sent = [sum(of_source) for of_source in counts]  # slots of every source that are not dropped
        self._blocks: dict[tuple[int, int], list[Block]] = {}
        self.spans: dict[
            tuple[int, int], tuple[int, int]
        ] = {}  # (owner, source) -> its part of the source's order
        sent = [0] * at.world_size
        for owner in range(at.world_size):
            here = range(owner * at.experts_here, (owner + 1) * at.experts_here)
            row, begin = 0, list(sent)
            for e in here:
                for source in range(at.world_size):
                    n = counts[source][e]
                    if n:
                        block = Block(row, sent[source], n)
                        self._blocks.setdefault((owner, source), []).append(block)
                    row, sent[source] = row + n, sent[source] + n
            self.rows[owner] = row
            for source in range(at.world_size):
                self.spans[owner, source] = (begin[source], sent[source])

    def check_room(self, at: Exchange) -> None:
        """Raises ValueError, on all ranks alike, where an owner has more rows than there is room for."""
        room = at.most_rows if at.bound < 0 else min(at.bound, at.most_rows)
        for owner, rows in enumerate(self.rows):
            if rows > room:
                raise ValueError(
                    f"rank {at.rank}: {rows} rows go to the experts of rank {owner}, which has room for max_rows = "
                    f"{room}"
                )

    def between(self, owner: int, source: int) -> list[Block]:
        """What the owner has from the source, expert by expert."""
        return self._blocks.get((owner, source), [])

    def of_owner(self, owner: int) -> list[tuple[int, Block]]:
        """(source, block) of all its rows, the last ones first."""
        pairs = [(p, block) for p in range(len(self.rows)) for block in self.between(owner, p)]
        return sorted(pairs, key=lambda pair: -pair[1].row)
