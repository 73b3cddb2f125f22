"""The experts' last matmul fused with its combine equals the two separate calls, and the dense formula."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import fusedtp
from fusedtp.comm import communicator
from fusedtp.nn.experts import Experts
from fusedtp.ops.engines import has_triton
from fusedtp.ops.moe import moe_dispatch_gated, moe_matmul_combine
from fusedtp.ops.moe.plan import (
    Exchange,
    RoutingPlan,
    index_formula,
    offsets_of,
    packed_index,
    places_of,
    sort_choices,
    unpacked,
)
from tests.harness import WorldError, world
from tests.ops.moe.laws import SKEWS, Case, split_backward
from tests.ops.moe.matmul_combine_laws import Cut, equals_the_formula, same_bits

needs_triton = pytest.mark.skipif(not has_triton(), reason="needs triton")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@st.composite
def cases(draw: st.DrawFn, engine: str = "triton", dtypes: tuple[torch.dtype, ...] = DTYPES) -> Case:
    size = draw(st.integers(1, 3))
    experts = size * draw(st.integers(1, 2))
    a_count = st.one_of(st.just(0), st.integers(0, 3), st.integers(0, 12))
    return Case(
        engine=engine,
        sizes=tuple(draw(a_count) for _ in range(size)),
        num_experts=experts,
        top_k=draw(st.integers(1, min(3, experts))),
        width=draw(st.integers(1, 7)),
        dtype=draw(st.sampled_from(dtypes)),
        skew=draw(st.sampled_from(SKEWS)),
        dropped=draw(st.sampled_from([0.0, 0.3, 1.0])),
        seed=draw(st.integers(0, 2**32)),
        room=draw(st.sampled_from([None, 0, 3])),
    )


cuts = st.builds(
    Cut,
    part_tiles=st.integers(1, 3),
    programs=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    halves=st.booleans(),
)
widths = st.integers(0, 24)


@pytest.mark.slow
@needs_triton
@settings(max_examples=4)
@example(Case("triton", (7, 0, 12), 6, 3, 5, torch.bfloat16, "skewed", 0.3, 1), 37, Cut(2))
@given(cases(), widths, cuts)
def test_out_and_all_gradients_are_those_of_the_formula(case, width, cut):
    world(len(case.sizes)).run(equals_the_formula, case, width, cut)


@pytest.mark.slow
@needs_triton
@settings(max_examples=2)
@example(Case("triton", (9, 4), 4, 2, 7, torch.float32, "uniform", 0.0, 0), 24, Cut())
@example(Case("triton", (3, 20), 4, 2, 7, torch.bfloat16, "skewed", 0.3, 0, 3), 17, Cut(halves=True))
@given(cases(), widths, cuts)
def test_the_bits_are_those_of_two_kernels_and_gradients_within_a_rounding(case, width, cut):
    world(len(case.sizes)).run(same_bits, case, width, cut)


ENGINES = [pytest.param("triton", marks=needs_triton), "chunked"]
WIDE = (*DTYPES, torch.float64)


@pytest.mark.slow
@settings(max_examples=60)
@given(cases("chunked", WIDE), widths)
def test_cpu_ranks_multiply_into_their_peers_memory(case, width):
    world(len(case.sizes)).run(equals_the_formula, case, width, Cut())


@pytest.mark.slow
@settings(max_examples=30)
@example(Case("chunked", (300, 4), 2, 2, 33, torch.bfloat16, "skewed", 0.3, 0), 40)
@given(cases("chunked", WIDE).filter(lambda case: len(case.sizes) > 1), widths)
def test_on_a_cpu_the_bits_are_those_of_two_calls_and_gradients_within_a_rounding(case, width):
    world(len(case.sizes)).run(same_bits, case, width, Cut())


SIZES, EXPERTS = (2, 0, 4), 6
IDS = torch.tensor([[2 * (t % 3), 2 * ((t + 1) % 3) + 1] for t in range(6)])  # 4 rows for every rank: none undefined


def check_op(group, engine: str) -> None:
    fusedtp.reserve(group, 4096)  # registers the group; custom ops know it by name
    parts = [sort_choices(part, EXPERTS) for part in IDS.split(list(SIZES))]
    table = torch.stack([counts for counts, _order in parts])
    at = Exchange(group.group_name, group.rank(), SIZES, EXPERTS, 2, 4, engine)
    packed = packed_index(table, places_of(parts[group.rank()][1]), at)
    plan = RoutingPlan(table, torch.cat([order for _counts, order in parts]), packed)
    h, experts, weights = (torch.ones(*shape) for shape in ((4, 3), (2, 5, 3), (at.tokens, 2)))
    for some in (weights, None):
        given = ([h], [experts], offsets_of(plan, at), some, *plan, at.max_rows, *at.spec)
        torch.library.opcheck(torch.ops.fusedtp.moe_matmul_combine.default, given)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_opcheck(engine):
    world(3).run(check_op, engine)


def compiled(group, engine: str) -> None:
    """A compiled layer equals the eager one, gradients included, in one graph."""
    fusedtp.reserve(group, 1 << 16)
    ids = IDS.split(list(SIZES))[group.rank()]

    def layer(x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        rows, _offsets, handle = fusedtp.moe_dispatch(
            x, ids, weights, EXPERTS, group, sizes=SIZES, engine=engine, max_rows=4
        )
        return moe_matmul_combine(rows.relu(), experts, handle)

    results = []
    for compute in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        g = torch.Generator().manual_seed(group.rank())
        leaves = [
            torch.randint(-3, 4, shape, generator=g).float().requires_grad_()
            for shape in ((len(ids), 4), (len(ids), 2), (2, 5, 4))
        ]
        y = compute(*leaves)
        y.backward(torch.ones_like(y))
        results.append([y.detach(), *(leaf.grad for leaf in leaves)])
    for eager, graph in zip(*results, strict=True):
        assert torch.equal(eager, graph)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_compiled_layer_equals_an_eager_one(engine):
    world(3).run(compiled, engine, timeout=120)


def experts_by_kernels(group) -> None:
    """A layer of experts with engine "triton" uses the fused kernel, and its result equals the chunked one."""
    rank, g = group.rank(), torch.Generator().manual_seed(0)
    layer = Experts(3, 4, EXPERTS, gated=False, act="relu")
    x, weights, up, down = (
        torch.randint(-2, 3, shape, generator=g).float() for shape in ((6, 3), (6, 2), (EXPERTS, 4, 3), (EXPERTS, 3, 4))
    )
    of_rank = [t.split(list(SIZES))[rank] for t in (x, IDS, weights)]
    own = [None, up[2 * rank : 2 * rank + 2], down[2 * rank : 2 * rank + 2]]
    communicator(group).engine_calls.clear()
    ys = [layer.compute(*of_rank, EXPERTS, own, group, SIZES, engine) for engine in ("chunked", "triton")]
    assert torch.equal(*ys)
    assert communicator(group).engine_calls["moe_matmul_combine", "triton"] == 1


@needs_triton
def test_experts_take_the_one_kernel():
    world(3).run(experts_by_kernels)


def split(group, engine: str) -> None:
    """A layer's backward in an input pass and a weight pass, see tests/ops/test_split_backward.py."""
    rank, g, comm = group.rank(), torch.Generator().manual_seed(0), communicator(group)
    x, weights = (torch.randint(-2, 3, (6, n), generator=g).float().split(list(SIZES))[rank].clone() for n in (3, 2))
    gate, up, down = own = [
        nn.Parameter(torch.randint(-2, 3, shape, generator=g).float()) for shape in ((2, 4, 3), (2, 4, 3), (2, 3, 4))
    ]

    def layer() -> torch.Tensor:
        given = (x, IDS.split(list(SIZES))[rank], weights, gate, up, EXPERTS, group)
        hidden, _, handle = moe_dispatch_gated(*given, sizes=SIZES, engine=engine)
        return moe_matmul_combine(hidden, down, handle)

    seen = []

    def between() -> None:
        seen.append({name: n for (name, _), n in comm.engine_calls.items()})
        comm.engine_calls.clear()

    split_backward(layer, x.requires_grad_(), own, between)
    assert seen[1:] == [{"moe_dispatch_matmul": 1, "moe_matmul_combine": 1}, {}], "the weight pass is local"


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_split_backward_communicates_in_its_first_pass_alone(engine):
    world(3).run(split, engine)


def under_autocast(group) -> dict:
    """The calls of an fp32 layer under autocast to fp16. There gradients are weighted before they are sent."""
    ids = IDS.split(list(SIZES))[group.rank()]
    x, weights = torch.ones(len(ids), 4), torch.ones(len(ids), 2)
    rows, _, handle = fusedtp.moe_dispatch(x, ids, weights, EXPERTS, group, sizes=SIZES)
    calls = communicator(group).engine_calls
    calls.clear()
    with torch.autocast("cpu", torch.float16):
        assert moe_matmul_combine(rows, torch.ones(2, 5, 4), handle).dtype == torch.float16
    return dict(calls)


def test_fp16_of_autocast_stays_apart():
    assert world(3).run(under_autocast) == [{("moe_combine", "chunked"): 1}] * 3


def apart(group, engine: str) -> None:
    """The experts' gradients, in a pass of their own, after a pass that used another dout."""
    rank, g = group.rank(), torch.Generator().manual_seed(0)
    ids = IDS.split(list(SIZES))[rank]
    draw = lambda *shape: torch.randn(shape, generator=g)  # noqa: E731
    x, weights, experts = (
        draw(6, 3).split(list(SIZES))[rank],
        draw(6, 2).split(list(SIZES))[rank],
        draw(2, 4, 3),
    )
    leaves = [t.clone().requires_grad_() for t in (x, weights, experts)]
    given = (leaves[0], ids, leaves[1], EXPERTS, group)
    rows, _, handle = fusedtp.moe_dispatch(*given, sizes=SIZES, engine=engine)
    y, dout = moe_matmul_combine(rows, leaves[2], handle), draw(len(ids), 4)
    (whole,) = torch.autograd.grad(y, leaves, dout, retain_graph=True)[2:]
    torch.autograd.grad(y, leaves[:2], 3 * dout, retain_graph=True)
    assert torch.equal(torch.autograd.grad(y, leaves[2], dout)[0], whole)


@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_of_experts_may_come_in_a_pass_of_their_own(engine):
    world(3).run(apart, engine)


def test_homes_are_where_a_combine_looks():
    """A row's place is its index in the sorted slots of its source."""
    parts = [sort_choices(part, EXPERTS) for part in IDS.split(list(SIZES))]
    table = torch.stack([counts for counts, _order in parts])
    for rank in range(3):
        at = Exchange("", rank, SIZES, EXPERTS, 2, 4, "triton", bound=4)
        found = unpacked(index_formula(table, places_of(parts[rank][1]), at), at)
        wanted = []
        for expert in (2 * rank, 2 * rank + 1):
            for source, ids in enumerate(IDS.split(list(SIZES))):
                order = parts[source][1].tolist()
                wanted += [(source, at) for at, slot in enumerate(order) if ids[slot // 2, slot % 2] == expert]
        assert [*zip(found.to.tolist(), found.to_places.tolist(), strict=True)] == wanted
        assert found.counts[:EXPERTS].tolist() == torch.bincount(IDS.flatten(), minlength=EXPERTS).tolist()


def short(group) -> None:
    ids = IDS.split(list(SIZES))[group.rank()]
    x, weights = torch.ones(len(ids), 4), torch.ones(len(ids), 2)
    rows, _, handle = fusedtp.moe_dispatch(x, ids, weights, EXPERTS, group, sizes=SIZES, engine="triton")
    moe_matmul_combine(rows[1:], torch.ones(2, 5, 4), handle)


@needs_triton
def test_rows_of_another_number_are_refused():
    with pytest.raises(WorldError, match=r"rank \d: h has shape \(11, 4\); wanted \[12, K\] as dispatched"):
        world(3).run(short)
