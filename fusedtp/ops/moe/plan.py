"""The routing plan of a mixture of experts: which rows go where, known to every rank after choices are exchanged.

    expert_ids [T_s, k]    the experts that the tokens of source rank s chose; -1: the choice is dropped
    choice                 t * k + j: the j-th choice of a source's t-th token
    order of s             its choices sorted by (expert, choice), dropped ones last: a stable sort, no counters
    table [W, E]           how many choices of s went to expert e; this also gives where each source's rows begin
    rows of an owner       of its E / W experts, by (expert, source, choice): its matmuls run expert by expert

Choices of one source for one expert are contiguous in the source's order and in the owner's rows: a block. An expert's
rows are in global token order, however tokens and experts are split, so its matmuls always see the same operands.

rank r    sort own choices | gather all ranks' counts and orders | dispatch.py | matmuls: grouped.py | combine.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _len_torch_dispatch_stack  # type: ignore[attr-defined]

from fusedtp.comm import Communicator, Group, Place, alone, communicator, place, propagate_errors
from fusedtp.comm.constant import constant_to_compiler
from fusedtp.comm.device_view import odd, runs_kernels
from fusedtp.comm.launching import Launch
from fusedtp.comm.signature import COMM_DTYPES, OF_KERNELS
from fusedtp.comm.streams import is_capturing

from .. import engines
from ..engines import Choice
from ..launch.config import Config, power_of_two
from ..operation import Operation, Shared, Spec, as_autocast
from ..operation import Plan as Call
from ..rows import Rows
from .fp8 import fault

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
UNDEFINED = 2**31 - 1
SMALL = 64 << 20  # bytes of rows up to which there is no limit
SHARES = 2  # default room in even shares, if the worst routing needs more
SORT_BLOCK = 2048  # choices that a program of the sort reads at once


class Exchange(NamedTuple):
    """The parameters of a dispatch that all ranks share, and this rank.

    sizes        tokens of every rank
    max_rows     most rows that this rank receives
    engine       the engine of every call of this exchange
    bound        the requested bound on rows, the same on all ranks; -1: none
    comm_dtype   the format in which rows travel to their experts, see fp8.py
    several      one of several rounds: no rows are kept from an input pass to a weight pass
    limit        what the bound follows from, such as "recv_capacity = 1.25", for an error; default: max_rows itself
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
    comm_dtype: str = ""
    several: bool = False
    limit: str = ""

    @classmethod
    def of(cls, spec: Spec, max_rows: int) -> Exchange:
        """Rebuild the Exchange from an operation's arguments."""
        top_k, num_experts, bound, comm_dtype = spec.routing
        return cls(
            spec.group, spec.rank, spec.sizes, num_experts, top_k, max_rows, spec.engine, spec.layer, bound - 1,
            COMM_DTYPES[comm_dtype],
        )  # fmt: skip

    @property
    def spec(self) -> Spec:
        """The arguments of an operation besides its operands and `max_rows`."""
        routing = self.top_k, self.num_experts, 1 + self.bound, COMM_DTYPES.index(self.comm_dtype)
        return Spec(self.group, self.rank, self.sizes, 1, self.engine, 0, self.layer, routing)

    @property
    def world_size(self) -> int:
        return len(self.sizes)

    @property
    def experts_here(self) -> int:
        """Experts per owner."""
        return self.num_experts // len(self.sizes)

    @property
    def tokens(self) -> int:
        """T_r, of this rank."""
        return self.sizes[self.rank]

    @property
    def max_recv_rows(self) -> int:
        """Rows an owner receives in the worst routing: all tokens choose among its experts."""
        return sum(self.sizes) * min(self.top_k, self.experts_here)

    @property
    def recv_capacity(self) -> int:
        """Rows that every owner has room for."""
        return self.max_recv_rows if self.bound < 0 else min(self.bound, self.max_recv_rows)

    @property
    def local_engine(self) -> str:
        """The engine of this rank's own matmuls, see grouped.py."""
        return self.engine if self.engine in ("chunked", "triton") else "auto"

    def choices_of(self, p: int) -> slice:
        """The slice of `orders` that holds rank p's order."""
        begin = sum(self.sizes[:p]) * self.top_k
        return slice(begin, begin + self.sizes[p] * self.top_k)


class RoutingPlan(NamedTuple):
    """table int32 [W, E] and orders int32 [T * k], one source after another: the same on all ranks.

    packed   int32, this rank's plan in the form that kernels read: see PackedIndex; empty for host engines
    """

    table: Tensor
    orders: Tensor
    packed: Tensor


@dataclass(frozen=True, eq=False)
class MoEHandle:
    """The state that a combine needs from its dispatch.

    weights       [T_r, k]    as given, with their autograd graph; zero for dropped choices
    row_weights   [max_rows]  of the rows that this rank's experts received
    plan, at                  the routing, and the exchange
    offsets       [E_r + 1]   int32
    """

    weights: Tensor
    row_weights: Tensor = field(repr=False)
    plan: RoutingPlan = field(repr=False)
    at: Exchange
    offsets: Tensor

    @property
    def counts(self) -> Tensor:
        """int32 [E]: rows of every expert, over all ranks' tokens."""
        return self.plan.table.sum(0, dtype=torch.int32)


# -- making a plan ---------------------------------------------------------------------------------------------------


def place_of(group: Group | None, x: Tensor) -> Place:
    """The place of `group`, or rank 0 of 1 without a group."""
    return alone(x.device.type) if group is None else place(group)


def make_plan(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    num_experts: int,
    at: Place,
    *,
    max_rows: int | None = None,
    sizes: Sequence[int] | None = None,
    engine: str = "auto",
    layer: str = "",
    weights_sum: float | None = None,
    comm_dtype: str = "",
    limit: str = "",
) -> tuple[RoutingPlan, Exchange]:
    """Check the arguments of moe_dispatch and make the plan of all ranks. Does not check whether there is room.

    limit   what max_rows follows from, as in Exchange
    """
    check_choices(x, expert_ids, weights, num_experts, at)
    who = f"rank {at.rank}: "
    if num_experts < 1 or num_experts % at.world_size:
        raise ValueError(
            f"{who}num_experts is {num_experts}; it must be a positive multiple of the {at.world_size} ranks"
        )
    counts = (x.shape[0],) * at.world_size if sizes is None else tuple(int(n) for n in sizes)
    if len(counts) != at.world_size or min(counts) < 0 or counts[at.rank] != x.shape[0]:
        raise ValueError(
            f"{who}sizes is {list(counts)}; wanted {at.world_size} token counts, {x.shape[0]} for this rank"
        )
    if max_rows is not None and max_rows < 0:
        raise ValueError(f"{who}max_rows is {max_rows}; it must not be negative")
    cannot = fault(comm_dtype, x.dtype) if comm_dtype else None
    if cannot:
        raise ValueError(who + cannot)
    ids, on_cpu = expert_ids.detach(), expert_ids.device.type == "cpu"
    if weights_sum is not None and on_cpu and not torch.compiler.is_compiling():
        _check_sums(ids, weights.detach(), weights_sum, at)
    bound = -1 if max_rows is None else max_rows
    chosen = _engine_of(at.name, engine, x.dtype)
    where = Exchange(
        at.name, at.rank, counts, num_experts, ids.shape[1], 0, chosen, layer, bound, comm_dtype, limit=limit
    )  # fmt: skip
    where = where._replace(max_rows=where.recv_capacity)
    return RoutingPlan(*moe_plan(where.spec, ids, where.max_rows)), where


def usual_room(
    group: Group | None, x: Tensor, expert_ids: Tensor, num_experts: int, sizes: Sequence[int] | None, engine: str
) -> int | None:
    """Rows that a layer's experts have room for by default: SHARES even shares, T k / W each.

    None means no limit: if the worst routing takes no more than that, or than SMALL bytes; if no rows are kept for
    backward; if no kernel runs; or if the host cannot wait. The arguments are those of moe_dispatch.
    """
    at = place_of(group, x)
    with propagate_errors(at):
        (low,) = as_autocast(at.device_type, x[:0])  # for the dtype in which rows travel
        if expert_ids.dim() != 2 or _engine_of(at.name, engine, low.dtype) != "triton":
            return None
        tokens = x.shape[0] * at.world_size if sizes is None else sum(sizes)
        top_k, each = expert_ids.shape[1], num_experts // at.world_size
        most, room = tokens * min(top_k, each), math.ceil(SHARES * tokens * top_k / at.world_size)
        if room >= most or most * x.shape[-1] * low.element_size() <= SMALL:
            return None
        return room if torch.is_grad_enabled() and may_wait() else None


def may_wait() -> bool:
    """Whether the host may wait for the device: not during compilation or graph capture."""
    return not torch.compiler.is_compiling() and not is_capturing()


@constant_to_compiler
def _engine_of(group: str, engine: str, dtype: torch.dtype) -> str:
    comm, key = communicator(group), (engine, dtype)
    if key not in comm.exchanges:
        comm.exchanges[key] = choose(comm, engine, dtype).engine
    return comm.exchanges[key]


def choose(comm: Communicator, engine: str, dtype: torch.dtype) -> Choice:
    """Which engine runs an exchange, and why. Raises ValueError if the requested one cannot run here."""
    if comm.world_size == 1 and engine in (*engines.ENGINES, "local"):
        return Choice("local", "a group of one rank has nothing to communicate")
    if engine not in engines.ENGINES:
        raise ValueError(f"engine is {engine!r}; it must be one of {', '.join(engines.ENGINES)}")
    on_cpu = comm.device.type == "cpu"
    if not comm.has_workspace:
        return Choice("collective", f"no shared memory: {comm.fallback}")
    if engine == "auto":
        if on_cpu:
            return Choice("chunked", "CPU ranks read their peers' tokens in place")
        engines.check_alike(comm, engines.KERNELS)
        if runs_kernels(comm.device) and dtype in KERNEL_DTYPES:
            return Choice("triton", "kernels read the routing on the device")
        return Choice("collective", f"no kernels for {dtype} on this device; the host waits for the routing")
    if engine in OF_KERNELS:
        engines.check_triton(comm, dtype, engine)
        engine = "triton"  # only all-reduces have multimem
    elif engine == "chunked" and not on_cpu:
        raise ValueError(
            "engine 'chunked' moves tokens to experts on CPU only: the host reads peers' memory; use 'triton' or "
            "'collective'"
        )
    return Choice(engine, "asked for")


def as_chosen(name: str, comm: Communicator, spec: Spec, rows: Rows, shared: Shared) -> Choice:
    """Every call uses its exchange's engine, chosen by the dtype of x; the scalars use it too."""
    return Choice(spec.engine, "chosen for the exchange")


def sort_choices(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """expert_ids [T, k], -1 for dropped choices -> (counts [E], order [T * k]), int32. The host does not wait."""
    keys = expert_ids.reshape(-1)
    keys = torch.where(keys < 0, num_experts, keys)
    if keys.device.type == "cpu" and num_experts <= torch.iinfo(torch.int16).max:
        order = torch.from_numpy(keys.to(torch.int16).numpy().argsort(kind="stable"))  # a radix sort for 16 bits
        return keys.bincount(minlength=num_experts)[:num_experts].to(torch.int32), order.to(torch.int32)
    by_expert, order = torch.sort(keys, stable=True)
    bounds = torch.arange(num_experts + 1, dtype=keys.dtype, device=keys.device)
    starts = torch.searchsorted(by_expert, bounds)
    return starts.diff().to(torch.int32), order.to(torch.int32)


Parts = tuple[Tensor, Tensor, Tensor]  # of a RoutingPlan


def _plan_alone(call: Call, expert_ids: Tensor, max_rows: int) -> Parts:
    counts, order = sort_choices(expert_ids, call.spec.routing[1])
    return counts[None], order, order.new_empty(0)


def _plan_by_collective(call: Call, expert_ids: Tensor, max_rows: int) -> Parts:
    at = Exchange.of(call.spec, max_rows)
    return _gathered(call, torch.cat(sort_choices(expert_ids, at.num_experts)), at)


def _plan_in_place(call: Call, expert_ids: Tensor, max_rows: int) -> Parts:
    """On CPU: every rank reads its peers' counts and orders in place."""
    at = Exchange.of(call.spec, max_rows)
    lengths = [at.num_experts + n * at.top_k for n in at.sizes]
    words = torch.cat(sort_choices(expert_ids, at.num_experts))
    with call.call() as running:
        shared = [running.buffer(p, (n,), torch.int32) for p, n in enumerate(lengths)]
        shared[at.rank].copy_(words)
        running.publish_and_wait()
        return _plan_of(torch.cat(shared), lengths, at)


def _plan_for_kernels(call: Call, expert_ids: Tensor, max_rows: int) -> Parts:
    """Like _plan_by_collective, with two kernels on the device."""
    at = Exchange.of(call.spec, max_rows)
    words, places = sorted_words(expert_ids, at.num_experts)
    table, orders, _ = _gathered(call, words, at)
    return table, orders, packed_index(table, places, at)


def _gathered(call: Call, words: Tensor, at: Exchange) -> Parts:
    """One small gather of counts and orders; its shape is known on the host."""
    lengths = [at.num_experts + n * at.top_k for n in at.sizes]
    with call.comm.agreed(call.signature):
        return _plan_of(call.comm.all_gather(words, lengths), lengths, at)


def _plan_of(gathered: Tensor, lengths: Sequence[int], at: Exchange) -> Parts:
    if min(lengths) == max(lengths):
        table, orders = gathered.view(len(lengths), -1).split([at.num_experts, lengths[0] - at.num_experts], 1)
        return table.contiguous(), orders.reshape(-1), gathered.new_empty(0)
    parts = gathered.split(lengths)
    table = torch.stack([part[: at.num_experts] for part in parts])
    orders = torch.cat([part[at.num_experts :] for part in parts])
    return table, orders, orders.new_empty(0)


def _fake_plan(spec: Spec, expert_ids: Tensor, max_rows: int) -> Parts:
    at = Exchange.of(spec, max_rows)
    words = index_size(at) if at.engine == "triton" else 0
    shapes = (at.world_size, at.num_experts), (sum(at.sizes) * at.top_k,), (words,)
    table, orders, index = (expert_ids.new_empty(shape, dtype=torch.int32) for shape in shapes)
    return table, orders, index


moe_plan = Operation(
    "moe_plan",
    "Tensor expert_ids, SymInt max_rows",
    "(Tensor, Tensor, Tensor)",
    fake=_fake_plan,
    shared=lambda expert_ids, max_rows: Shared(torch.int32, 0),
    engines=dict(local=_plan_alone, collective=_plan_by_collective, chunked=_plan_in_place, triton=_plan_for_kernels),
    slot_bytes=dict(chunked=lambda rows, shared, top_k, num_experts, *_: 4 * (num_experts + rows.longest * top_k)),
    choose=as_chosen,
)


def offsets_of(plan: RoutingPlan, at: Exchange) -> Tensor:
    """int32 [E / W + 1]: where each expert of this rank begins among its rows, and where the last one ends."""
    if plan.packed.shape[0]:
        return unpacked(plan.packed, at).offsets[: at.experts_here + 1]
    mine = plan.table[:, at.rank * at.experts_here : (at.rank + 1) * at.experts_here]
    ends = mine.sum(0).cumsum(0)
    return torch.cat([ends.new_zeros(1), ends]).to(torch.int32)


# -- the plan on the host --------------------------------------------------------------------------------------------


class Block(NamedTuple):
    """Choices of `source` for one expert of this rank: `size` rows from `row` on; from `begin` on in the order."""

    source: int
    row: int
    begin: int
    size: int


class Blocks:
    """The table on the host, for this rank.

    lengths   [source][owner]  choices that travel
    rows      [owner]          rows of its experts
    sent      [source]         choices that are not dropped
    received  [source]         rows of this rank's experts
    begins    [source]         where these begin in the source's order
    each      the non-empty blocks in the order of this rank's rows: by expert, then by source
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
        row, begins = 0, list(self.begins)
        mine = slice(firsts[at.rank], firsts[at.rank] + here)
        for of_expert in zip(*(of_source[mine] for of_source in counts), strict=True):
            for source, n in enumerate(of_expert):
                if n:
                    self.each.append(Block(source, row, begins[source], n))
                    row, begins[source] = row + n, begins[source] + n

    def check_room(self, at: Exchange) -> None:
        """Raises ValueError, on all ranks, if any owner has more rows than it has room for."""
        for owner, rows in enumerate(self.rows):
            if rows > (room := at.recv_capacity):
                limit = f"{room} by {at.limit}" if at.limit else f"max_rows = {room}"
                raise ValueError(
                    f"rank {at.rank}: {rows} rows go to the experts of rank {owner}, which has room for {limit}"
                )

    def of(self, source: int) -> list[Block]:
        """The blocks of one source."""
        return [block for block in self.each if block.source == source]


def host_knows(plan: RoutingPlan, at: Exchange) -> bool:
    """Whether the host reads the plan anyway, in eager code: on CPU, and for the process group's all_to_all."""
    on_host = plan.table.device.type == "cpu" or at.engine == "collective"
    return on_host and not torch.compiler.is_compiling()


def known_room(plan: RoutingPlan, at: Exchange) -> Exchange:
    """If the host knows the plan: ValueError on all ranks if one has too many rows, else max_rows trimmed to fit."""
    if not host_knows(plan, at):
        return at
    blocks = Blocks(plan.table, at)
    blocks.check_room(at)
    return at if at.bound >= 0 or at.engine == "triton" else at._replace(max_rows=blocks.rows[at.rank])


# -- the plan on the device, in the form that kernels read -----------------------------------------------------------


class PackedIndex(NamedTuple):
    """Where segments begin and where the rows of a choice belong, int32: views of one tensor, padded to 16 bytes.

    n[s, o]      rows from source s to owner o, a segment
    begins       [W + 1]      this rank's order: where the segment for each owner begins, and where the last one ends
    sources      [W + 1]      this rank's rows by (source, expert, choice): where the segment of each source begins
    at_owners    [W]          where this rank's segment begins among each owner's rows in that same order
    in_sources   [W]          where this rank's segment begins in each source's order
    totals       [W]          rows of each owner
    blocks       [W * E_r + 1]   in the order of `sources`: where the rows of each source for each expert begin
    arrivals     [max_rows]   position by (source, expert, choice) -> position by (expert, source, choice)
    origins      [max_rows]   the inverse of arrivals
    offsets      [E_r + 1]    where each expert of this rank begins among its rows, and where the last one ends
    to, to_places   [max_rows]   the source of each of this rank's rows, and its position in that source's order
    counts       [E]          rows of every expert, of all owners
    places       [T_r k]      the position of each choice of this rank in its order

    Tensors with max_rows entries, the room of every owner, are undefined past the last row.
    """

    begins: Tensor
    sources: Tensor
    at_owners: Tensor
    in_sources: Tensor
    totals: Tensor
    blocks: Tensor
    arrivals: Tensor
    origins: Tensor
    offsets: Tensor
    to: Tensor
    to_places: Tensor
    counts: Tensor
    places: Tensor


def index_lengths(at: Exchange) -> list[int]:
    """Elements of each part of a PackedIndex, without padding."""
    w, each, rows = at.world_size, at.experts_here, at.recv_capacity
    first = [w + 1, w + 1, w, w, w, w * each + 1, rows, rows]
    return [*first, each + 1, rows, rows, at.num_experts, at.tokens * at.top_k]


def _padded_lengths(at: Exchange) -> list[int]:
    return [-(-n // 4) * 4 for n in index_lengths(at)]


def index_size(at: Exchange) -> int:
    """Elements of the tensor that `packed_index` returns."""
    return sum(_padded_lengths(at))


def unpacked(index: Tensor, at: Exchange) -> PackedIndex:
    """Split the tensor of `packed_index` into its parts."""
    return PackedIndex(*index.split(_padded_lengths(at)))


def plans_by_kernel(device: torch.device) -> bool:
    """Whether kernels make the index on this device; not while tracing."""
    traced = torch.compiler.is_compiling() or _len_torch_dispatch_stack()
    return device.type != "cpu" and not traced and runs_kernels(device)


def packed_index(table: Tensor, places: Tensor, at: Exchange) -> Tensor:
    """table [W, E] and places [T_r k] -> a PackedIndex as one int32 tensor.

    Shapes are known on the host, values stay on the device. Uses a kernel where kernels run.
    """
    if not plans_by_kernel(table.device):
        return index_formula(table, places, at)
    index = torch.empty(index_size(at), dtype=torch.int32, device=table.device)
    launch, parts = plan_index(table, index, at)
    launch.start(table.device)
    parts.places[: places.shape[0]].copy_(places)
    return index


def index_formula(table: Tensor, places: Tensor, at: Exchange) -> Tensor:
    """`packed_index` in torch. Undefined entries are far out of bounds, so that reading one is noticed."""
    w, r, each, room = at.world_size, at.rank, at.experts_here, at.recv_capacity
    here = slice(r * each, (r + 1) * each)
    table = table.long()
    n = table.view(w, w, each).sum(2)
    begins, sources = _begins(n[r]), _begins(n[:, r])
    at_owners = (n.cumsum(0) - n)[r]
    in_sources = (n.cumsum(1) - n)[:, r]
    by_source, by_expert = _begins(table[:, here].reshape(-1)), _begins(table[:, here].t().reshape(-1))
    arrivals = _new_rows(by_source, by_expert[:-1].view(each, w).t(), room)
    origins = _new_rows(by_expert, by_source[:-1].view(w, each).t(), room)
    in_order = (table.cumsum(1) - table)[:, here].t()
    to_places = _new_rows(by_expert, in_order, room)
    rows = torch.arange(room, device=table.device)
    to = torch.searchsorted(by_expert[1:], rows, right=True) % w
    last = by_expert[-1]
    arrivals, origins, to, to_places = (
        torch.where(rows < last, part, UNDEFINED) for part in (arrivals, origins, to, to_places)
    )
    parts = [begins, sources, at_owners, in_sources, n.sum(0), by_source, arrivals, origins]
    parts += [by_expert[::w], to, to_places, table.sum(0), places]
    return torch.cat([F.pad(part, (0, -part.shape[0] % 4)) for part in parts]).to(torch.int32)


def _begins(counts: Tensor) -> Tensor:
    """counts [n] -> [n + 1]: where each begins, and where the last one ends."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _new_rows(begins: Tensor, targets: Tensor, rows: int) -> Tensor:
    """[rows]: the new position of each row when block b moves from begins[b] to targets.flatten()[b]."""
    row = torch.arange(rows, device=begins.device)
    block = torch.searchsorted(begins[1:], row, right=True).clamp(max=begins.shape[0] - 2)
    return targets.reshape(-1)[block] + row - begins[block]


def own_places(plan: RoutingPlan, at: Exchange) -> Tensor:
    """[T_r k]: the position of each choice of this rank in its order."""
    if plan.packed.shape[0]:
        return unpacked(plan.packed, at).places[: at.tokens * at.top_k]
    return places_of(plan.orders[at.choices_of(at.rank)])


def places_of(order: Tensor) -> Tensor:
    """order [T * k], a permutation -> the position of each choice in it, int64."""
    places = torch.empty(order.shape[0], dtype=torch.int64, device=order.device)
    return places.scatter_(0, order.long(), torch.arange(order.shape[0], device=order.device))


# -- the launchers of the kernels ------------------------------------------------------------------------------------


def sorted_words(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """expert_ids [T, k] -> counts [E] and order [T k] as one tensor, and places [T k], all int32."""
    if expert_ids.device.type == "cpu":
        counts, order = sort_choices(expert_ids, num_experts)
        return torch.cat([counts, order]), places_of(order).to(torch.int32)
    launch, words, places = plan_sort(expert_ids, num_experts)
    launch.start(expert_ids.device)
    return words, places


def plan_sort(expert_ids: Tensor, num_experts: int, block: int = SORT_BLOCK) -> tuple[Launch, Tensor, Tensor]:
    """The launch that sorts choices by expert, not yet run, and its outputs."""
    from fusedtp.kernels.moe_plan import moe_sort_kernel

    ids = expert_ids.reshape(-1).contiguous()
    count = ids.shape[0]
    words, places = (torch.empty(n, dtype=torch.int32, device=ids.device) for n in (num_experts + count, count))
    block = min(block, max(16, power_of_two(count)))
    args = dict(ids=ids, words=words, places=places, count=count, NUM_EXPERTS=num_experts, BLOCK=block)
    config = Config(0, 0, 0, num_warps=max(1, min(8, block // 256)))
    return Launch(moe_sort_kernel, num_experts + 1, args, config), words, places


def plan_index(table: Tensor, index: Tensor, at: Exchange, block: int = 1024) -> tuple[Launch, PackedIndex]:
    """The launch that fills all parts of `index` except `places`; and the parts."""
    from fusedtp.kernels.moe_plan import moe_index_kernel

    parts, w, each = unpacked(index, at), at.world_size, at.experts_here
    args = parts._asdict() | dict(
        table=table.contiguous(),
        rank2=odd(at.rank),
        max_rows=at.recv_capacity,
        WORLD=w,
        HERE=each,
        SOURCES=power_of_two(w),
        EXPERTS=power_of_two(each),
        ALL=power_of_two(w * each),
        BLOCK=block,
    )
    del args["places"]
    return Launch(moe_index_kernel, w * each + w + 1, args, Config(0, 0, 0, num_warps=4)), parts


# -- argument checks -------------------------------------------------------------------------------------------------


def check_choices(x: Tensor, expert_ids: Tensor, weights: Tensor, num_experts: int, at: Place) -> None:
    """Raises ValueError for choices that do not fit x, and on CPU, where reading needs no wait, for invalid values."""
    who = f"rank {at.rank}: "
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"{who}x is {x.dtype} {tuple(x.shape)}; wanted floating-point tokens [T_r, K]")
    if expert_ids.dim() != 2 or expert_ids.shape[0] != x.shape[0] or expert_ids.shape[1] < 1:
        raise ValueError(f"{who}expert_ids has shape {tuple(expert_ids.shape)}; wanted [{x.shape[0]}, k >= 1]")
    if expert_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{who}expert_ids is {expert_ids.dtype}; wanted int32 or int64")
    if weights.shape != expert_ids.shape or not weights.is_floating_point():
        raise ValueError(
            f"{who}weights is {weights.dtype} {tuple(weights.shape)}; wanted floating point with the shape of "
            f"expert_ids, {tuple(expert_ids.shape)}"
        )
    k = expert_ids.shape[1]
    if k > num_experts:
        raise ValueError(f"{who}expert_ids has {k} choices per token, but there are only {num_experts} experts")
    if expert_ids.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_values(expert_ids.detach(), weights.detach(), num_experts, at)


def _check_values(ids: Tensor, weights: Tensor, num_experts: int, at: Place) -> None:
    who = f"rank {at.rank}: "
    if not ids.numel():
        return
    least, most = ids.aminmax()
    if least < -1 or most >= num_experts:
        t, j = ((ids < -1) | (ids >= num_experts)).nonzero()[0].tolist()
        raise ValueError(f"{who}expert_ids[{t}, {j}] is {int(ids[t, j])}; there are {num_experts} experts")
    ordered = ids.sort(1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if twice.any():
        t, j = twice.nonzero()[0].tolist()
        raise ValueError(f"{who}token {t} chose expert {int(ordered[t, j])} twice: {ids[t].tolist()}")
    if weights.sum().isfinite():  # one pass; the sum may overflow even if all weights are finite
        return
    bad = ~weights.isfinite() & (ids >= 0)
    if bad.any():
        t, j = bad.nonzero()[0].tolist()
        raise ValueError(f"{who}weights[{t}, {j}] is {float(weights[t, j])}; it must be finite")


def _check_sums(ids: Tensor, weights: Tensor, wanted: float, at: Place) -> None:
    """Each of k weights carries a few roundings (a score, a sum of k, a quotient, the scale); this sum is exact."""
    wide = weights.double()
    sums, k = wide.sum(1), ids.shape[1]
    explained = (k + 8) * torch.finfo(weights.dtype).eps * wide.abs().sum(1).clamp(min=abs(wanted))
    bad = ((sums - wanted).abs() > explained) & (ids >= 0).all(1)
    if bad.any():
        t = int(bad.nonzero()[0])
        raise ValueError(f"rank {at.rank}: the weights of token {t} sum to {float(sums[t]):.9g}, wanted {wanted:.9g}")


def check_outputs(y: Tensor, at: Exchange, name: str = "y", width: str = "N") -> None:
    """Raises ValueError if the number of rows differs from the number dispatched."""
    if y.dim() != 2 or y.shape[0] != at.max_rows:
        raise ValueError(
            f"rank {at.rank}: {name} has shape {tuple(y.shape)}; wanted [{at.max_rows}, {width}] as dispatched"
        )


def without_dropped(weights: Tensor, expert_ids: Tensor, x: Tensor) -> Tensor:
    """The weights in the dtype of sums of x, with zeros for dropped choices (0 * NaN is NaN)."""
    return weights.masked_fill(expert_ids < 0, 0.0).to(torch.promote_types(x.dtype, torch.float32))
