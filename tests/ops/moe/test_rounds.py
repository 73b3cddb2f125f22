"""An exchange in rounds equals the exchange without a bound, and its experts never see more rows than M.

Equal bit for bit if nothing rounds or if one round has all rows; else each round's sum may round.
"""

import time
import weakref
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import fusedtp
from fusedtp.comm import VirtualWorld
from fusedtp.ops.cpu import accumulator
from tests.harness import PerRank, WorldError, world
from tests.ops.moe.laws import Case, Data, build, mine
from tests.ops.moe.test_exchange import FULL, cases
from tests.properties.laws import assert_same, poison


@dataclass(frozen=True)
class Room:
    """One exchange with room for `rows` rows; `rough`: inputs whose sums round, else small integers."""

    case: Case
    rows: int
    rough: bool


@st.composite
def rooms(draw: st.DrawFn, engines: tuple[str, ...] = ("chunked", "collective", "auto"), rounds: int = 24) -> Room:
    """Needs at most this many rounds."""
    case = draw(cases(engines))
    most = sum(case.sizes) * min(case.top_k, case.num_experts // len(case.sizes))
    rows = draw(st.integers(max(1, -(-most // rounds)), max(2, most + 1)))
    return Room(case, rows, draw(st.booleans()))


class Seen:
    """Experts that multiply each row by a factor; they record the rows that they were given."""

    def __init__(self, factors: Tensor) -> None:
        self.factors = factors.clone().requires_grad_()
        self.rows: list[int] = []
        self.tensors: list[weakref.ref[Tensor]] = []

    def held(self) -> int:
        """How many of the row tensors that it was given are still alive."""
        return sum(tensor() is not None for tensor in self.tensors)

    def __call__(self, rows: Tensor, offsets: Tensor) -> Tensor:
        self.rows.append(len(rows))
        self.tensors.append(weakref.ref(rows))
        count = int(offsets[-1])
        y = rows[:count] * self.factors.repeat_interleave(offsets.diff().long())[:, None]
        return torch.cat([y, y.new_full((len(rows) - count, rows.shape[1]), float("nan"))])


def inputs(room: Room, data: Data) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, dy, factors and weights of all ranks."""
    given = data.x, data.gradients, data.factors, data.weights
    if not room.rough:
        return given
    g = torch.Generator().manual_seed(room.case.seed)
    x, dy, factors, rough = (torch.randn(t.shape, generator=g).to(t.dtype) for t in given)
    # with powers of two, it does not matter how a product enters its sum
    return x, dy, factors, data.weights if room.case.engine == "triton" else rough


def through(group, room: Room, bounded: bool) -> tuple[list[Tensor], Seen, fusedtp.ops.moe.RecvUsage | None]:
    """([y, dx, dweights, dfactors] of this rank, its experts, the usage)."""
    case, rank = room.case, group.rank()
    data, here = build(case), mine(case, rank)
    each = case.num_experts // len(case.sizes)
    x, dy, factors, weights = inputs(room, data)
    x, weights = x[here].clone().requires_grad_(), weights[here].clone().requires_grad_()
    seen = Seen(factors[rank * each : (rank + 1) * each])
    how = dict(sizes=case.sizes, engine=case.engine)
    poison(group)
    used = None
    if bounded:
        y, used = fusedtp.moe_rounds(
            x, data.ids[here], weights, case.num_experts, group, seen, max_rows=room.rows, **how
        )
    else:
        rows, offsets, handle = fusedtp.moe_dispatch(x, data.ids[here], weights, case.num_experts, group, **how)
        y = fusedtp.moe_combine(seen(rows, offsets), handle)
        del rows
    assert seen.held() <= 1, f"{seen.held()} rounds' rows are kept for backward"
    poison(group)
    y.backward(dy[here])
    return [y.detach(), x.grad, weights.grad, seen.factors.grad], seen, used


def magnitudes(room: Room, rank: int) -> tuple[Tensor, Tensor]:
    """Sums of the magnitudes of this rank's summands of y and dx, in fp64."""
    data, here = build(room.case), mine(room.case, rank)
    x, dy, factors, weights = inputs(room, data)
    ids, each = data.ids[here], weights[here].double().abs()
    total = (each * factors.double().abs()[ids.clamp(min=0).long()]).masked_fill(ids < 0, 0).sum(1, keepdim=True)
    return total * x[here].double().abs(), total * dy[here].double().abs()


def equals_the_unbounded(group, room: Room) -> None:
    case, rank = room.case, group.rank()
    got, seen, used = through(group, room, True)
    want, _, _ = through(group, room, False)
    who = f"{case.engine} rank {rank}: "
    ids, owners = build(case).ids, len(case.sizes)
    counts = torch.bincount(ids[ids >= 0] * owners // case.num_experts, minlength=owners)
    rounds = -(-int(counts.max()) // room.rows)
    exact = not room.rough or rounds <= 1
    for name, mine_, theirs, size in zip(("y", "dx"), got, want, magnitudes(room, rank), strict=False):
        if exact:
            assert_same(who + name, mine_, theirs)
        else:  # half an eps per part, per sum, and for the other side; before that, k products and sums on both sides
            eps, of_sums = (torch.finfo(dtype).eps for dtype in (case.dtype, accumulator(case.dtype)))
            explained = (rounds * eps + (case.top_k + 2) * of_sums) * size
            explained += (rounds + 1) * eps * torch.finfo(case.dtype).smallest_normal  # of subnormal numbers
            assert ((mine_.double() - theirs.double()).abs() <= explained).all(), who + name
    assert_same(who + "dweights", got[2], want[2])
    if not room.rough and case.dtype in (torch.float32, torch.float64):  # sums are exact in any order
        assert_same(who + "dfactors", got[3], want[3])
    assert max(seen.rows) <= room.rows, f"{who}{seen.rows} rows at a time with room for {room.rows}"
    assert_same(who + "used", used.used, counts.int())
    assert (used.bound, int(used.rounds)) == (room.rows, rounds)
    assert len(seen.rows) == max(1, 2 * rounds - 1), f"{who}{len(seen.rows)} calls: later rounds are repeated once"


def also_full(law):
    """Run each engine on FULL in several rounds; with entries that round and entries that do not."""
    for engine in ("chunked", "collective"):
        for i, case in enumerate(FULL):
            law = example(Room(replace(case, engine=engine), 4, i % 2 == 0))(law)
    return law


@pytest.mark.slow
@also_full
@settings(max_examples=40)
@given(rooms())
def test_rounds_equal_no_bound(room):
    world(len(room.case.sizes)).run(equals_the_unbounded, room)


@pytest.mark.slow
@settings(max_examples=12)
@given(rooms())
def test_rounds_equal_no_bound_between_threads(room):
    VirtualWorld(len(room.case.sizes)).run(lambda group: equals_the_unbounded(group, room))


@pytest.mark.slow
def test_rounds_of_kernels_equal_no_bound():
    """8 and 6 rows in three rounds; the last round has rows of one owner only."""
    pytest.importorskip("triton")
    case = Case("triton", (5, 3), 4, 2, 3, torch.float32, "one", 0.1, 1)
    world(2).run(equals_the_unbounded, Room(case, 3, True), timeout=200)


def refused(group, max_rows: int) -> None:
    """An exchange in rounds with that room is refused; the group stays usable."""
    ids, weights = torch.tensor([[0], [1]]), torch.ones(2, 1)
    try:
        fusedtp.moe_rounds(torch.ones(2, 3), ids, weights, 2, group, lambda rows, _: rows, max_rows=max_rows)
    finally:
        y, _ = fusedtp.moe_rounds(torch.ones(2, 3), ids, weights, 2, group, lambda rows, _: 2 * rows, max_rows=1)
        assert torch.equal(y, torch.full((2, 3), 2.0))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [0, -1])
def test_no_room_is_refused(rows):
    with pytest.raises(WorldError, match=rf"rank \d: max_rows is {rows}; a round moves at least 1 row") as raised:
        world(2).run(refused, rows)
    assert str(raised.value).count("ValueError: rank") == 2


def test_one_rank_without_room_fails_its_peer_too():
    with pytest.raises(WorldError, match="PeerFailed: rank 1 raised before it began"):
        world(2).run(refused, PerRank([2, 0]))


def test_ranks_with_other_room_are_told():
    with pytest.raises(WorldError, match="max_rows is 2 on rank 0 and 3 on rank 1"):
        world(2).run(refused, PerRank([2, 3]))


def test_outputs_of_another_number_of_rows_are_refused():
    ids = torch.tensor([[0], [1], [0]])
    with pytest.raises(ValueError, match=r"y has shape \(1, 4\); wanted \[2, N\]"):
        fusedtp.moe_rounds(torch.ones(3, 4), ids, torch.ones(3, 1), 2, None, lambda rows, _: rows[:1], max_rows=2)


def compiled(group) -> None:
    """Compiled in one graph, where the host knows no counts: as many rounds as any routing may need."""
    fusedtp.reserve(group, 1 << 16)
    generator = torch.Generator().manual_seed(group.rank())
    ids = torch.rand(4, 4, generator=generator).argsort(1)[:, :2].int()
    given = [torch.randint(-3, 4, (4, n), generator=generator).float() for n in (3, 2)]

    def layer(x: Tensor, weights: Tensor) -> Tensor:
        experts = lambda rows, offsets: rows.relu()  # noqa: E731
        return fusedtp.moe_rounds(x, ids, weights, 4, group, experts, max_rows=6)[0]

    found = []
    torch._dynamo.reset()
    for compute in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        leaves = [t.clone().requires_grad_() for t in given]
        y = compute(*leaves)
        y.backward(torch.ones_like(y))
        found.append([y.detach(), *(leaf.grad for leaf in leaves)])
    for eager, graph in zip(*found, strict=True):
        assert torch.equal(eager, graph)


@pytest.mark.slow
def test_compiled_rounds_equal_eager_ones():
    world(2).run(compiled, timeout=120)


def raises_in_compute(group, max_rows: int) -> None:
    """One rank's experts raise; the others, which wait for their rows, raise at once, and the group stays usable."""
    ids, weights, x = torch.tensor([[0], [1], [1]]), torch.ones(3, 1), torch.ones(3, 4)

    def compute(rows: Tensor, offsets: Tensor) -> Tensor:
        if group.rank() == 1:
            raise KeyError("mine")
        return rows

    begin = time.monotonic()
    with pytest.raises(KeyError if group.rank() == 1 else fusedtp.PeerFailed):
        fusedtp.moe_rounds(x, ids, weights, 2, group, compute, max_rows=max_rows)
    assert time.monotonic() - begin < 20
    y, _ = fusedtp.moe_rounds(x, ids, weights, 2, group, lambda rows, _: rows, max_rows=6)
    assert torch.equal(y, x)


@pytest.mark.parametrize("max_rows", [6, 2])
def test_experts_that_raise_are_told_to_all_ranks(max_rows):
    world(2).run(raises_in_compute, max_rows)
