"""FP8Linear: exact where fp8 is exact, else within the bounds of Note [What fp8 loses]; alone and parallel."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.tensor import DeviceMesh, DTensor

import fusedtp
from fusedtp.comm import communicator
from fusedtp.nn import FP8Linear, Linear, advance_fp8_, project
from fusedtp.nn.fp8 import Current
from fusedtp.nn.mlp import GatedMLP
from fusedtp.ops.fp8 import E4M3, E5M2
from fusedtp.ops.rows import split
from tests.engines import ENGINES, TRITON
from tests.harness import WorldError, world
from tests.nn.support import assert_within, randn
from tests.properties.laws import assert_same, poison

FP32, BF16 = torch.float32, torch.bfloat16
LOST = {
    E4M3: (2.0**-4, 2.0**-17),
    E5M2: (2.0**-3, 2.0**-31),
}  # relative to the number, and to the largest magnitude in its row


@dataclass(frozen=True)
class Case:
    """A layer [N, K] of one kind: "column", "row", or "local", which is not parallel."""

    kind: str
    engine: str
    sizes: tuple[int, ...]
    k: int
    n: int
    dtype: torch.dtype = FP32
    batch: int | None = None
    biased: bool = True
    sequence_parallel: bool = True
    scales: str = "row"
    seed: int = 0

    @property
    def dim(self) -> int:
        return int(self.batch is not None)


@st.composite
def cases(draw, engine: str, dtypes=(FP32,), rows: int = 10, most: int = 24) -> Case:
    size = draw(st.integers(1, 4))
    return Case(
        draw(st.sampled_from(["column", "row"])),
        engine,
        tuple(draw(st.one_of(st.just(0), st.integers(1, rows))) for _ in range(size)),
        draw(st.integers(1, most)),
        draw(st.integers(1, most)),
        draw(st.sampled_from(dtypes)),
        draw(st.sampled_from([None, None, 2])),
        draw(st.booleans()),
        draw(st.sampled_from([True, True, False])),
        draw(st.sampled_from(["row", "row", "tensor"])),
        draw(st.integers(0, 2**31)),
    )


def drawn(case: Case, whole: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, w, b and dy: small integers that fp8 holds and no sum rounds, or rows of very different magnitudes."""
    g = torch.Generator().manual_seed(case.seed)

    def draw(*shape: int) -> Tensor:
        if whole:
            return torch.randint(-2, 3, shape, generator=g).to(case.dtype)
        rows = 2.0 ** torch.randint(-8, 9, (*shape[:-1], 1), generator=g)
        return (torch.randn(shape, generator=g) * rows).to(case.dtype)

    lead = () if case.batch is None else (case.batch,)
    total = sum(case.sizes)
    return draw(*lead, total, case.k), draw(case.n, case.k), draw(case.n), draw(*lead, total, case.n)


def formula(case: Case, x: Tensor, w: Tensor, b: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """The single-device results in fp64."""
    leaves = [t.double().requires_grad_() for t in (x, w, b)]
    y = F.linear(*leaves[:2], leaves[2] if case.biased else None)
    y.backward(dy.double())
    named = dict(y=y.detach(), dx=leaves[0].grad, dw=leaves[1].grad)
    return named | (dict(db=leaves[2].grad) if case.biased else {})


def layer_of(case: Case, w: Tensor, b: Tensor, min_rows: int = 0, kind: type[Linear] = FP8Linear) -> Linear:
    how = {} if kind is Linear else dict(min_rows=min_rows, scales=case.scales)
    layer = kind(case.k, case.n, case.biased, dtype=case.dtype, **how)
    with torch.no_grad():
        layer.weight.copy_(w)
        if case.biased:
            layer.bias.copy_(b)
    return layer


def whole_of(grad: Tensor) -> Tensor:
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def computed(group, case: Case, given: tuple[Tensor, ...], **of_layer) -> dict[str, Tensor]:
    """This rank's results of the parallel layer."""
    x, w, b, dy = given
    rank, rows, scattered = group.rank(), list(case.sizes), case.sequence_parallel
    layer = layer_of(case, w, b, **of_layer)
    style = fusedtp.FusedColwise if case.kind == "column" else fusedtp.FusedRowwise
    options = dict(engine=case.engine, sizes=rows, dim=case.dim, sequence_parallel=scattered)
    fusedtp.parallelize(layer, DeviceMesh.from_group(group, "cpu"), plan={"": style(**options)})
    features = list(split(case.n if case.kind == "column" else case.k, len(rows)))
    if case.kind == "column":
        mine, grad = (x.split(rows, case.dim)[rank] if scattered else x), dy.split(features, -1)[rank]
    else:
        mine, grad = x.split(features, -1)[rank], (dy.split(rows, case.dim)[rank] if scattered else dy)
    mine = mine.clone().requires_grad_()
    poison(group)
    y = layer(mine)
    poison(group)
    y.backward(grad)
    named = dict(y=y.detach(), dx=mine.grad, dw=whole_of(layer.weight.grad))
    return named | (dict(db=whole_of(layer.bias.grad)) if case.biased else {})


def part_of(case: Case, name: str, full: Tensor, rank: int) -> Tensor:
    """A rank's part of a result."""
    column, rows = case.kind == "column", list(case.sizes)
    features = list(split(case.n if column else case.k, len(rows)))
    if (name == "y") == column and name in ("y", "dx"):
        return full.split(features, -1)[rank]
    if name in ("y", "dx") and case.sequence_parallel:
        return full.split(rows, case.dim)[rank]
    return full


def equals_the_formula(group, case: Case) -> None:
    given = drawn(case, whole=True)
    want, got = formula(case, *given), computed(group, case, given)
    for name, right in want.items():
        right = part_of(case, name, right, group.rank())
        assert_same(f"rank {group.rank()}: {name}", got[name], right.to(case.dtype))


@pytest.mark.slow
@settings(max_examples=40)
@given(st.sampled_from(["chunked", "collective"]).flatmap(cases))
def test_a_parallel_layer_equals_the_formula(case):
    world(len(case.sizes)).run(equals_the_formula, case)


@pytest.mark.slow
@TRITON.marks[0]
@settings(max_examples=6)
@given(cases("triton", rows=4))
def test_by_the_kernels_too(case):
    world(len(case.sizes)).run(equals_the_formula, case, timeout=200)


@settings(max_examples=30)
@given(cases("auto", (FP32,)))
def test_a_layer_of_one_device_equals_the_formula(case):
    x, w, b, dy = drawn(case, whole=True)
    layer, x = layer_of(case, w, b), x.requires_grad_()
    y = layer(x)
    y.backward(dy)
    got = dict(y=y.detach(), dx=x.grad, dw=layer.weight.grad, db=layer.bias.grad if case.biased else None)
    for name, right in formula(case, x.detach(), w, b, dy).items():
        assert_same(name, got[name], right.to(case.dtype))


# -- errors of fp8 ---------------------------------------------------------------------------------------------------


def lost_of(case: Case, x: Tensor, kind: torch.dtype, dim: int) -> Tensor:
    """e(x): the largest error of each number; `dim` is the dimension that is summed over."""
    of_number, of_largest = LOST[kind]
    if x.numel() == 0:
        return x.clone()
    largest = x.abs().amax(dim, keepdim=True) if case.scales == "row" else x.abs().amax()
    return torch.maximum(of_number * x.abs(), of_largest * largest)


def bounds(case: Case, x: Tensor, w: Tensor, b: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """The bounds of Note [What fp8 loses], with fp32 sums of products, and ranks' partials rounded once.

    A rank quantizes its part of a row; the part's largest magnitude is at most the row's.
    """
    x, w, b, dy = (t.double() for t in (x.flatten(0, -2), w, b, dy.flatten(0, -2)))
    wide, narrow = torch.finfo(FP32).eps, torch.finfo(case.dtype).eps
    off: dict[str, Tensor] = {}

    def product(left: Tensor, right: Tensor, of_left: Tensor, of_right: Tensor, terms: int, rounded: bool) -> Tensor:
        most = (left.abs() + of_left) @ (right.abs() + of_right)
        sums = (terms + 4) * wide + (narrow / 2 * 1.01 if rounded else 0)
        return most - left.abs() @ right.abs() + sums * most

    parallel = len(case.sizes) > 1 and case.kind != "local"
    of_x, of_dy = lost_of(case, x, E4M3, 1), lost_of(case, dy, E5M2, 1)
    off["y"] = product(x, w.t(), of_x, lost_of(case, w, E4M3, 1).t(), case.k, parallel and case.kind == "row")
    off["dx"] = product(dy, w, of_dy, lost_of(case, w, E4M3, 0), case.n, parallel and case.kind == "column")
    off["dw"] = product(dy.t(), x, of_dy.t(), of_x, len(x), False)
    if case.biased:
        off["y"] = off["y"] + wide * b.abs()
        off["db"] = (len(x) + 4) * narrow * dy.abs().sum(0)  # summed over ranks in the layer's dtype
    return off


def near_the_formula(group, case: Case) -> None:
    """Within the bounds of the fp64 formula, and thus near the layer in the working dtype, one rounding of sums off."""
    given, rank = drawn(case, whole=False), group.rank()
    want, off = formula(case, *given), bounds(case, *given)
    got = computed(group, case, given)
    for name, right in want.items():
        lost = part_of(case, name, off[name].view(right.shape), rank)
        assert_within(f"rank {rank}: {name}", got[name], part_of(case, name, right, rank), lost)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, FP32])
@settings(max_examples=12)
@given(st.data())
def test_errors_are_those_of_fp8(dtype, data):
    case = data.draw(st.sampled_from(["chunked", "collective"]).flatmap(lambda e: cases(e, (dtype,))))
    world(len(case.sizes)).run(near_the_formula, case)


@settings(max_examples=20)
@given(st.integers(1, 40), st.integers(1, 80), st.integers(1, 40), st.integers(0, 2**31))
def test_a_layer_is_near_that_in_bf16(rows, k, n, seed):
    """The difference is at most fp8's error plus the rounding of the bf16 layer: y, dx and dw."""
    case = Case("local", "", (rows,), k, n, BF16, biased=False, seed=seed)
    x, w, b, dy = given = drawn(case, whole=False)
    results = []
    for kind in (FP8Linear, Linear):
        layer, mine = layer_of(case, w, b, kind=kind), x.clone().requires_grad_()
        y = layer(mine)
        y.backward(dy)
        results.append(dict(y=y.detach(), dx=mine.grad, dw=layer.weight.grad))
    exact, eps = formula(case, *given), torch.finfo(BF16).eps
    sizes = formula(case, x.abs(), w.abs(), b, dy.abs())
    for name, lost in bounds(case, *given).items():
        terms = dict(y=k, dx=n, dw=rows)[name]
        of_bf16 = (terms + 4) * torch.finfo(FP32).eps * sizes[name] + eps * exact[name].abs()
        assert_within(name, results[0][name], results[1][name].double(), lost + 2 * of_bf16)


# -- when it is fp8 --------------------------------------------------------------------------------------------------


def called(group) -> set[str]:
    calls = {name for name, _ in communicator(group).engine_calls}
    communicator(group).engine_calls.clear()
    return calls


SHARDED = {"scaled_all_gather_matmul", "scaled_matmul_reduce_scatter"}  # with sequence parallelism
FP8_CALLS = SHARDED | {"scaled_matmul_all_reduce"}


def falls_back(group, case: Case) -> None:
    """With one row fewer than min_rows, the layer equals the working dtype's, bit for bit; at min_rows it uses fp8."""
    given, total = drawn(case, whole=False), sum(case.sizes) * (case.batch or 1)
    called(group)
    small = computed(group, case, given, min_rows=total + 1)
    assert not called(group) & FP8_CALLS
    computed(group, case, given, min_rows=total)
    ran = called(group)
    if case.kind == "column":
        wanted = {"scaled_all_gather_matmul"} if case.sequence_parallel else set()
    else:
        wanted = {"scaled_matmul_reduce_scatter" if case.sequence_parallel else "scaled_matmul_all_reduce"}
    assert wanted <= ran and (case.sequence_parallel or ran & FP8_CALLS == wanted)
    for name, right in computed(group, case, given, kind=Linear).items():
        assert_same(name, small[name], right)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_few_rows_fall_back(kind, sequence_parallel, batch):
    case = Case(kind, "chunked", (3, 0, 2), 7, 8, FP32, batch, sequence_parallel=sequence_parallel)
    world(3).run(falls_back, case)


def shares_a_gather(group) -> None:
    """fp8 layers on one input share its gather; a plain one among them has its own; a gated MLP uses them."""
    mesh, x = DeviceMesh.from_group(group, "cpu"), torch.ones(2, 6)
    for kinds, gathers in (((FP8Linear, FP8Linear), 1), ((FP8Linear, Linear), 2)):
        layers = nn.ModuleList([_small(kind, 6, 4) for kind in kinds])
        fusedtp.parallelize(layers, mesh, plan={"0": fusedtp.FusedColwise(), "1": fusedtp.FusedColwise()})
        comm = communicator(group)
        comm.engine_calls.clear()
        project(x, [*layers])
        counts = {name: n for (name, _), n in comm.engine_calls.items()}
        assert sum(counts.values()) == gathers and counts["scaled_all_gather_matmul"] == 1, counts
    mlp = GatedMLP(6, 12)
    mlp.gate_proj, mlp.up_proj, mlp.down_proj = (_small(FP8Linear, *s) for s in ((6, 12), (6, 12), (12, 6)))
    fusedtp.parallelize(mlp, mesh)
    comm.engine_calls.clear()
    mlp(x)
    assert {name for name, _ in comm.engine_calls} == SHARDED
    said = {layer.name: layer.operation for layer in fusedtp.explain(mlp).layers}
    assert said.pop("down_proj") == "scaled_matmul_reduce_scatter"
    assert set(said.values()) == {"scaled_all_gather_matmul"} and len(said) == 2
    mlp.down_proj.operations = replace(mlp.down_proj.operations, min_rows=4097)
    assert fusedtp.explain(mlp).layers[-1].operation == "matmul_reduce_scatter"


def _small(kind: type[Linear], k: int, n: int) -> Linear:
    return kind(k, n) if kind is Linear else FP8Linear(k, n, min_rows=0)


def explained_without_sequence_parallelism(group) -> None:
    """`explain` names the operations and engines that actually run."""
    mlp = nn.Sequential(*(FP8Linear(8, 8, min_rows=0) for _ in range(2)))
    plan = {
        "0": fusedtp.FusedColwise(sequence_parallel=False),
        "1": fusedtp.FusedRowwise(sequence_parallel=False, engine="chunked"),
    }
    fusedtp.parallelize(mlp, DeviceMesh.from_group(group, "cpu"), plan=plan)
    said = [(layer.operation, layer.engine) for layer in fusedtp.explain(mlp).layers]
    assert said == [("fp8 matmul", "local"), ("scaled_matmul_all_reduce", "chunked")]
    communicator(group).engine_calls.clear()
    mlp(torch.ones(4, 8))
    assert set(communicator(group).engine_calls) == {said[1]}


def test_products_without_sequence_parallelism_are_named():
    world(2).run(explained_without_sequence_parallelism)


def test_layers_on_one_input_share_a_gather():
    world(2).run(shares_a_gather)


# -- gradients -------------------------------------------------------------------------------------------------------

SPLIT = Case("column", "chunked", (2, 0, 3), 5, 6)


def splits(group, case: Case, first: set[str] | None = None) -> None:
    """Each gradient communicates once: dgrad in the input pass, wgrad's gather in the weight pass (for a row-parallel
    layer in the input pass).
    """
    x, w, b, dy = drawn(case, whole=True)
    want = formula(case, x, w, b, dy)
    layer, rank = layer_of(case, w, b), group.rank()
    style = (fusedtp.FusedColwise if case.kind == "column" else fusedtp.FusedRowwise)(
        engine=case.engine, sizes=case.sizes
    )
    fusedtp.parallelize(layer, DeviceMesh.from_group(group, "cpu"), plan={"": style})
    x, dy = part_of(case, "dx", x, rank), part_of(case, "y", dy, rank)
    x = x.clone().requires_grad_()
    y = layer(x)
    called(group)
    (dx,), groups = stage_backward_input([y], [dy], [x], iter([layer.weight]))
    column = case.kind == "column"
    assert called(group) == (first or {f"scaled_{'matmul_reduce_scatter' if column else 'all_gather_matmul'}"})
    stage_backward_weight(iter([layer.weight]), groups)
    assert called(group) == ({"all_gather_rows"} if column else set())
    assert_same("dx", dx, part_of(case, "dx", want["dx"], rank).float())
    assert_same("dw", whole_of(layer.weight.grad), want["dw"].float())


@pytest.mark.parametrize("kind", ["column", "row"])
def test_a_split_backward_communicates_once(kind):
    world(3).run(splits, replace(SPLIT, kind=kind))


def quantizes_dy_once(group) -> int:
    """The scale of dy takes a collective; the weight pass does not repeat it."""
    case, calls, gradient = replace(SPLIT, kind="column", scales="tensor"), [], Current.gradient

    def counted(self, *given):
        calls.append(given)
        return gradient(self, *given)

    with patch.object(Current, "gradient", counted):
        splits(group, case, {"scaled_matmul_reduce_scatter", "all_gather_rows"})
    return len(calls)


def test_a_split_backward_quantizes_once():
    assert world(3).run(quantizes_dy_once) == [1] * 3


def accumulates(group, case: Case) -> None:
    """Accumulates into main_grad in fp32, without rounding to bf16: the sums need more than its 8 bits."""
    case = replace(case, sizes=(90, 0, 101))
    x, w, b, dy = drawn(case, whole=True)
    x, dy = x.abs() + 1, dy.abs() + 1
    want = formula(case, x, w, b, dy)["dw"].float()
    assert (want.bfloat16().float() != want).any()
    layer, rank = layer_of(case, w, b), group.rank()
    style = (fusedtp.FusedColwise if case.kind == "column" else fusedtp.FusedRowwise)(sizes=case.sizes)
    fusedtp.parallelize(layer, DeviceMesh.from_group(group, "cpu"), plan={"": style})
    part = layer.weight.to_local()
    layer.weight.main_grad = torch.ones(part.shape)
    layer(part_of(case, "dx", x, rank)).backward(part_of(case, "y", dy, rank))
    assert layer.weight.grad is None
    dim = int(case.kind == "row")
    mine = want.split(list(split(want.shape[dim], 3)), dim)[rank]
    assert_same("main_grad", layer.weight.main_grad - 1, mine)


@pytest.mark.parametrize("kind", ["column", "row"])
def test_main_grad_takes_the_gradient(kind):
    world(3).run(accumulates, replace(SPLIT, kind=kind, dtype=BF16, biased=False))


def compiled(group, kind: str, engine: str, sequence_parallel: bool) -> None:
    torch._dynamo.reset()  # graphs of the other cases count against the limit
    case = replace(SPLIT, kind=kind, engine=engine, sequence_parallel=sequence_parallel)
    x, w, b, dy = drawn(case, whole=True)
    want, rank = formula(case, x, w, b, dy), group.rank()
    fusedtp.reserve(group, 1 << 16)
    layer = layer_of(case, w, b)
    kind_of = fusedtp.FusedColwise if kind == "column" else fusedtp.FusedRowwise
    style = kind_of(engine=engine, sizes=case.sizes, sequence_parallel=sequence_parallel)
    fusedtp.parallelize(layer, DeviceMesh.from_group(group, "cpu"), plan={"": style})
    mine = part_of(case, "dx", x, rank).clone().requires_grad_()
    y = torch.compile(layer, backend="aot_eager", fullgraph=True)(mine)
    y.backward(part_of(case, "y", dy, rank))
    got = dict(y=y.detach(), dx=mine.grad, dw=whole_of(layer.weight.grad))
    for name, right in got.items():
        assert_same(name, right, part_of(case, name, want[name], rank).float())


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind, sequence_parallel", [("column", True), ("row", True), ("row", False)])
def test_a_compiled_layer_equals_the_formula(kind, sequence_parallel, engine):
    world(3).run(compiled, kind, engine, sequence_parallel, timeout=200)


@pytest.mark.slow
def test_a_compiled_layer_of_one_device_equals_an_eager_one():
    layer, x = FP8Linear(7, 5, True, min_rows=0), randn(4, 7, seed=1).float()
    results = []
    for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        mine = x.clone().requires_grad_()
        layer.zero_grad()
        run(mine).sum().backward()
        results.append([mine.grad, layer.weight.grad])
    for eager, graph in zip(*results, strict=True):
        assert torch.equal(eager, graph)


# -- a Linear in all else --------------------------------------------------------------------------------------------


def test_it_has_the_parameters_of_a_linear():
    plain, layer = Linear(6, 4, True), FP8Linear(6, 4, True, min_rows=0)
    layer.load_state_dict(plain.state_dict())
    assert layer.state_dict().keys() == plain.state_dict().keys() == {"weight", "bias"}


def test_nan_and_infinity_come_out():
    x = torch.ones(4, 6)
    x[1, 2], x[2, 0] = torch.nan, torch.inf
    y = FP8Linear(6, 3, min_rows=0)(x)
    assert y[[0, 3]].isfinite().all() and y[[1, 2]].isnan().all()


def takes(group, dtype: torch.dtype) -> None:
    layer = FP8Linear(6, 4, min_rows=0, dtype=dtype)
    fusedtp.parallelize(layer, DeviceMesh.from_group(group, "cpu"), plan={"": fusedtp.FusedColwise()})
    layer(torch.ones(2, 6, dtype=dtype))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_another_dtype_is_refused(dtype):
    said = f"FP8Linear got x of {dtype}"
    with pytest.raises(ValueError, match=said):
        FP8Linear(6, 4, min_rows=0, dtype=dtype)(torch.ones(2, 6, dtype=dtype))
    with pytest.raises(WorldError, match=said):
        world(2).run(takes, dtype)


# -- delayed scaling -------------------------------------------------------------------------------------------------

DELAYED = replace(SPLIT, scales="tensor", biased=False)


def delayed_layer(w: Tensor, history: int = 3, margin: int = 0) -> FP8Linear:
    n, k = w.shape
    layer = FP8Linear(k, n, scales="tensor", history=history, margin=margin, min_rows=0)
    with torch.no_grad():
        layer.weight.copy_(w)
    return layer


def step(layer: FP8Linear, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(dy)
    return dict(y=y.detach(), dx=x.grad, dw=whole_of(layer.weight.grad))


def remembers(group, kind: str) -> None:
    """A parallel layer has the histories and results of a single device, step by step, also after saving and loading.

    The numbers are small integers times a power of two per step, so they are exact as long as they fit.
    """
    case, rank = replace(DELAYED, kind=kind), group.rank()
    x, w, _, dy = drawn(case, whole=True)
    alone, layer = delayed_layer(w), delayed_layer(w)
    style = (fusedtp.FusedColwise if kind == "column" else fusedtp.FusedRowwise)(engine="chunked", sizes=case.sizes)
    fusedtp.parallelize(layer, DeviceMesh.from_group(group, "cpu"), plan={"": style})
    for i in range(6):
        scaled = [t * 2.0 ** (10 * (i % 2)) for t in (x, dy)]
        want = step(alone, *scaled)
        got = step(layer, part_of(case, "dx", scaled[0], rank), part_of(case, "y", scaled[1], rank))
        for name, right in want.items():
            assert_same(f"step {i}: {name}", got[name], part_of(case, name, right, rank))
        assert i == 0 or all(layer.operations.scaling.seen)
        advance_fp8_(alone)
        called(group)
        advance_fp8_(layer)
        assert called(group) == {"all_gather_rows"}
        assert_same(f"step {i}: history", layer.amax_history, alone.amax_history)
        assert layer.amax_history[0].tolist() == [t.abs().max() for t in (scaled[0], w, scaled[1])]
        if i == 3:  # reload from the parallel layer
            fresh = delayed_layer(torch.zeros_like(w))
            fresh.load_state_dict(layer.state_dict() | {"weight": whole_of(layer.weight)})
            assert all(fresh.operations.scaling.seen)
            alone = fresh


@pytest.mark.parametrize("kind", ["column", "row"])
def test_histories_are_those_of_one_device(kind):
    world(3).run(remembers, kind)


def test_scales_are_of_the_largest_of_the_last_steps():
    """Scales are 2**margin times what the window needs; larger values saturate; evaluation records nothing."""
    w, x = torch.eye(4), torch.full((2, 4), 448.0)
    layer = delayed_layer(w, history=2)
    assert torch.equal(layer(x * 2), x * 2)  # current scaling: there is no history yet
    advance_fp8_(layer)
    assert torch.equal(layer(x * 4), x * 2)  # saturates
    layer.eval()
    assert torch.equal(layer(x * 64), x * 2)
    layer.train()
    advance_fp8_(layer)
    assert layer.amax_history[:, 0].tolist() == [4 * 448, 2 * 448]
    assert torch.equal(layer(x * 8), x * 4)
    for _ in range(2):  # the window then holds no step with large values
        layer.amax.zero_()
        layer(x)
        advance_fp8_(layer)
    assert torch.equal(layer(x * 8), x)
    wide = delayed_layer(w, history=2, margin=2)
    wide(x)
    advance_fp8_(wide)
    assert torch.equal(wide(x * 8), x * 4)
    wide.reset_parameters()
    assert not wide.amax_history.any() and not any(wide.operations.scaling.seen)


def test_a_layer_with_a_history_is_not_compiled():
    layer = delayed_layer(torch.eye(4))
    with pytest.raises(Exception, match="an FP8Linear with a history cannot be compiled"):
        torch.compile(layer, backend="aot_eager")(torch.ones(2, 4))


@pytest.mark.parametrize(
    "options",
    [
        dict(scales="block"),
        dict(history=4),
        dict(scales="tensor", history=-1),
        dict(scales="tensor", margin=1),
    ],
)
def test_options_that_do_not_go_together_are_refused(options):
    with pytest.raises(ValueError, match=r"scales is|history is"):
        FP8Linear(4, 4, **options)


# -- docs ------------------------------------------------------------------------------------------------------------


def runs(group, code: str) -> None:
    torch.manual_seed(0)
    scope = {"mesh": {"tp": DeviceMesh.from_group(group, "cpu")}}
    called(group)
    exec(code, scope)
    assert called(group) == SHARDED | {"all_gather_rows"}
    assert scope["x"].grad is not None


def test_the_page_runs():
    """The first code block of the page runs unchanged."""
    code = (Path(fusedtp.__file__).parents[1] / "docs" / "fp8.md").read_text().split("```python\n")[1].split("```")[0]
    world(2).run(runs, code)


SEES_NOTHING = {
    "few rows": lambda layer, x: layer(x[:2]),
    "no gradient": lambda layer, x: layer(x.detach()).detach(),
    "evaluation": lambda layer, x: (layer.eval()(x), layer.train()),
    "gradients of zeros": lambda layer, x: (layer(x) * 0).sum().backward(),
    "nothing": lambda layer, x: None,
}


@pytest.mark.parametrize("first", SEES_NOTHING)
@pytest.mark.parametrize("known", [False, True])
def test_what_a_step_has_not_seen_is_scaled_as_before(first, known):
    """Three such steps with a history of two: before anything is recorded, and after a complete step."""
    generator = torch.Generator().manual_seed(0)
    layer = FP8Linear(32, 32, scales="tensor", history=2, min_rows=4)
    x, dy = (torch.randn(64, 32, generator=generator) for _ in range(2))
    if known:
        step(layer, x, dy)
        advance_fp8_(layer)
    for _ in range(3):
        SEES_NOTHING[first](layer, x)
        advance_fp8_(layer)
    got, w = step(layer, x, dy), layer.weight.detach()
    off = {kind: LOST[kind][0] / math.sqrt(3) for kind in (E4M3, E5M2)}  # rms of roundings uniform within a unit
    for name, want, kind in (("y", x @ w.T, E4M3), ("dx", dy @ w, E5M2), ("dw", dy.T @ x, E5M2)):
        # twice the standard deviation of a product of normal numbers; saturated numbers would be off by nearly all of
        # their value
        assert (got[name] - want).norm() <= 2 * math.hypot(off[kind], off[E4M3]) * want.norm(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_magnitudes_stay_fp32_where_a_layer_is_cast(dtype):
    layer = FP8Linear(8, 8, scales="tensor", history=2, min_rows=0)
    layer.amax_history[0] = torch.tensor([1e6, 1.0 + 2**-20, 3.0])
    before = layer.amax_history.clone()
    layer.to(dtype)
    assert layer.weight.dtype == dtype and layer.amax.dtype == torch.float32
    assert torch.equal(layer.amax_history, before)
    assert torch.equal(layer.double().float().amax_history, before)


def test_a_cast_layer_with_a_history_multiplies_what_it_says():
    layer = FP8Linear(16, 16, scales="tensor", history=2, min_rows=0).bfloat16()
    x, dy = torch.ones(8, 16, dtype=torch.bfloat16), torch.ones(8, 16, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.fill_(0.5)
    for _ in range(2):
        got = step(layer, x, dy)
        assert got["y"].eq(8).all() and got["dx"].eq(8).all() and got["dw"].eq(8).all()
        advance_fp8_(layer)


def test_state_dicts_of_linears_and_of_other_lengths_load():
    layer, plain = FP8Linear(4, 4, scales="tensor", history=2), Linear(4, 4)
    layer.amax_history.fill_(1.0)
    layer.load_state_dict(plain.state_dict())
    assert torch.equal(layer.weight, plain.weight)
    assert not layer.amax_history.any() and not any(layer.operations.scaling.seen)
    layer.amax_history[:] = torch.tensor([[5.0, 6.0, 7.0], [1.0, 2.0, 3.0]])
    for length, rows in ((1, [[5, 6, 7]]), (3, [[5, 6, 7], [1, 2, 3], [0, 0, 0]])):
        other = FP8Linear(4, 4, scales="tensor", history=length)
        other.load_state_dict(layer.state_dict())
        assert other.amax_history.tolist() == rows and all(other.operations.scaling.seen)


def reduced_under_autocast(group) -> torch.dtype:
    layer = FP8Linear(4, 4, bias=True, min_rows=0)
    with torch.autocast("cpu", torch.bfloat16):
        return layer.operations.all_reduce(torch.ones(3, 4), layer.weight, group, bias=layer.bias).dtype


def test_a_sum_over_ranks_has_the_dtype_of_autocast():
    assert world(2).run(reduced_under_autocast) == [torch.bfloat16] * 2
