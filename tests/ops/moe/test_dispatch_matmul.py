"""The fused dispatch and matmul: equal to two calls bit for bit, to the formula on integers, compiled, in a layer."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fusedtp
from fusedtp.ops.moe import moe_dispatch_matmul
from fusedtp.ops.moe.plan import Exchange, RoutingPlan, offsets_of, packed_index, places_of, sort_choices
from fusedtp.ops.pointwise import ACTIVATIONS
from tests.harness import WorldError, world
from tests.ops.moe import matmul_laws as laws
from tests.ops.moe.laws import SKEWS, Case
from tests.ops.moe.matmul_laws import Matmul

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
needs_triton = pytest.mark.skipif(not fusedtp.ops.engines.has_triton(), reason="needs triton")
ENGINES = [pytest.param("triton", marks=needs_triton), "chunked"]


@st.composite
def matmuls(
    draw: st.DrawFn,
    gated: bool | None = None,
    engine: str = "triton",
    dtypes: tuple[torch.dtype, ...] = (FP32, BF16, FP16),
) -> Matmul:
    size = draw(st.integers(1, 4))
    experts = size * draw(st.integers(1, 4))
    gated = draw(st.booleans()) if gated is None else gated
    case = Case(
        engine=engine if size > 1 else "auto",
        sizes=tuple(draw(st.one_of(st.just(0), st.integers(1, 3), st.integers(1, 20))) for _ in range(size)),
        num_experts=experts,
        top_k=draw(st.integers(1, min(4, experts))),
        width=draw(st.integers(1, 7)),
        dtype=draw(st.sampled_from([FP32] if gated else dtypes)),
        skew=draw(st.sampled_from(SKEWS)),
        dropped=draw(st.sampled_from([0.0, 0.0, 0.3, 1.0])),
        seed=draw(st.integers(0, 2**32)),
        room=draw(st.sampled_from([None, None, 0, 3])),
    )
    return Matmul(case, draw(st.integers(1, 5)), draw(st.sampled_from(ACTIVATIONS)) if gated else "")


def case(
    sizes=(9, 0, 12), experts=6, top_k=2, width=5, dtype=FP32, skew="uniform", dropped=0.0, room=None, engine="triton"
):  # fmt: skip
    return Case(engine, sizes, experts, top_k, width, dtype, skew, dropped, 3, room)


LARGE = Matmul(case((150, 40), 4, 2, 70, room=5), 80, "silu")  # several tiles per expert, chunks that span experts


@pytest.mark.slow
@needs_triton
@settings(max_examples=2)
@given(matmuls())
@example(LARGE)
@example(Matmul(case((70, 0, 3), 3, 3, 65, BF16, "one", 0.3), 3))
@example(Matmul(case((5, 3), 2, 1, 257), 200))  # four tiles per row, each storing an uneven part of it
@example(Matmul(case((0, 0), 2, 1), 3, "gelu"))
def test_the_bits_are_those_of_two_calls(law):
    world(len(law.case.sizes)).run(laws.equals_two_calls, law)


@pytest.mark.slow
@needs_triton
@settings(max_examples=2)
@given(matmuls(gated=False))
@example(Matmul(case(skew="one"), 3))
@example(Matmul(case((4, 0, 40), 9, 4, dtype=FP16, dropped=0.3), 4))
def test_integers_give_the_formula_of_the_tokens(law):
    world(len(law.case.sizes)).run(laws.equals_dense, law)


@pytest.mark.slow
@needs_triton
@settings(max_examples=1)
@given(matmuls(gated=True))
@example(Matmul(case((4, 0, 40), 9, 4), 4, "gelu_pytorch_tanh"))
def test_gated_integers_give_the_formula_of_the_tokens(law):
    world(len(law.case.sizes)).run(laws.equals_dense, law)


@pytest.mark.slow
@settings(max_examples=50)
@given(matmuls(engine="chunked", dtypes=(FP32, BF16, FP16, FP64)))
@example(Matmul(case((600, 40), 4, 2, 70, BF16, "skewed", 0.3, room=5, engine="chunked"), 80))
def test_on_a_cpu_the_bits_are_those_of_two_calls(law):
    world(len(law.case.sizes)).run(laws.equals_two_calls, law)


@pytest.mark.slow
@settings(max_examples=50)
@given(matmuls(gated=False, engine="chunked", dtypes=(FP32, BF16, FP16, FP64)))
def test_on_a_cpu_integers_give_the_formula_of_the_tokens(law):
    world(len(law.case.sizes)).run(laws.equals_dense, law)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("act", ["", "silu"])
def test_a_layer_of_experts_takes_it_and_fills_main_grads(act, engine):
    world(3).run(laws.layer, Matmul(case(engine=engine), 4, act))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("act", ["", "gelu"])
def test_a_compiled_graph_equals_eager_code(act, engine):
    world(3).run(laws.compiled, Matmul(case(engine=engine), 4, act), timeout=120)


@needs_triton
def test_more_rows_than_there_is_room_for_are_noticed_by_every_rank():
    with pytest.raises(WorldError, match="has room for max_rows = 1") as raised:
        world(2).run(laws.refuses, Matmul(case((9, 4), 4), 3))
    assert str(raised.value).count("TooManyRows: rank") >= 2


def compiled_without_room(group, joined: bool) -> None:
    """Rank 0's experts have room for two rows and receive three."""
    ids = torch.zeros(2 - group.rank(), 1, dtype=torch.int64)
    x, weights = torch.ones(len(ids), 3), torch.ones(len(ids), 1)
    how = dict(sizes=(2, 1), max_rows=2, engine="chunked")

    def layer(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if joined:
            y, _, handle = moe_dispatch_matmul(x, ids, weights, torch.ones(1, 3, 3), 2, group, **how)
        else:
            y, _, handle = fusedtp.moe_dispatch(x, ids, weights, 2, group, **how)
        return fusedtp.moe_combine(y, handle)

    fusedtp.reserve(group, 1 << 16)
    torch.compile(layer, backend="aot_eager", fullgraph=True)(x, weights)


@pytest.mark.slow
@pytest.mark.parametrize("joined", [True, False])
def test_a_compiled_graph_on_a_cpu_notices_it_on_every_rank_too(joined):
    with pytest.raises(WorldError) as raised:
        world(2).run(compiled_without_room, joined, timeout=120)
    said = "3 rows go to the experts of rank 0, which has room for max_rows = 2"
    assert all(f"rank {rank}: {said}" in str(raised.value) for rank in range(2))


def check_op(group, act: str, engine: str) -> None:
    """Three rows per rank and no spare room: all outputs of the op are defined."""
    fusedtp.reserve(group, 4096)  # registers the group; custom ops know it by name
    routed = [torch.tensor(ids).view(-1, 2) for ids in ([[0, 2], [1, 4]], [], [[0, 3], [2, 5], [4, -1]])]
    ids = routed[group.rank()].int()
    sorted_ = [sort_choices(each.int(), 6) for each in routed]
    table, orders = torch.stack([counts for counts, _ in sorted_]), torch.cat([order for _, order in sorted_])
    at = Exchange(group.group_name, group.rank(), (2, 0, 3), 6, 2, 3, engine)
    x, weights = torch.ones(len(ids), 4), torch.ones(ids.shape)
    matrices = [torch.ones(2, 3, 4) for _ in range(2 if act else 1)]
    plan = RoutingPlan(table, orders, packed_index(table, places_of(sorted_[group.rank()][1]), at))
    given = (x, weights, matrices, offsets_of(plan, at), act, bool(act), bool(act), *plan, at.max_rows, *at.spec)
    torch.library.opcheck(torch.ops.fusedtp.moe_dispatch_matmul.default, given)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("act", ["", "silu"])
def test_opcheck(act, engine):
    world(3).run(check_op, act, engine)
