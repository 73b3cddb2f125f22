"""The scaled_ operations of fp8: their declared formulas on the values that fp8 and scales represent, and errors."""

from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import fusedtp
from fusedtp.comm import VirtualWorld, communicator
from fusedtp.ops import fp8
from fusedtp.ops.fp8 import E4M3, E5M2
from fusedtp.ops.rows import split as even
from fusedtp.ops.scaled_all_gather_matmul import reference as gathered_formula
from fusedtp.ops.scaled_matmul_reduce_scatter import reference as summed_formula
from tests.engines import ENGINES, TRITON
from tests.harness import WorldError, world
from tests.nn.support import assert_within
from tests.properties.laws import assert_same, poison

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
GATHER, SCATTER = "scaled_all_gather_matmul", "scaled_matmul_reduce_scatter"
REDUCE = "scaled_matmul_all_reduce"


@dataclass(frozen=True)
class Case:
    """One call. sizes: rows of every rank, per batch entry (an all-reduce uses only their sum); ks, widths: of every
    rank, K and N_i.

    kinds    of x and of the weights
    by_row   whether x and the weights have one scale per row, or a single one
    """

    operation: str
    engine: str
    sizes: tuple[int, ...]
    ks: tuple[int, ...]
    widths: tuple[tuple[int, ...], ...]
    kinds: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3)
    by_row: tuple[bool, bool] = (True, True)
    dtype: torch.dtype = FP32
    batch: int | None = None
    biased: bool = False
    transposed: bool = False
    seed: int = 0

    @property
    def dim(self) -> int:
        return int(self.batch is not None)

    def mine(self, full: Tensor, rank: int) -> Tensor:
        return full.split(list(self.sizes), self.dim)[rank]


@st.composite
def cases(draw, engine: str, dtypes=(FP32,), rows: int = 12, most: int = 40) -> Case:
    operation = draw(st.sampled_from([GATHER, SCATTER, REDUCE]))
    size = draw(st.integers(1, 4))
    count = st.one_of(st.just(0), st.integers(1, 3), st.integers(1, rows))
    k = st.one_of(st.integers(1, most), st.sampled_from([16, 32]))
    n = st.integers(0, 20)
    if operation == GATHER:
        ks = (draw(k),) * size
        number = draw(st.integers(1, 3))
        widths = tuple(tuple(draw(n) for _ in range(number)) for _ in range(size))
    else:
        ks, widths = tuple(draw(k) for _ in range(size)), ((draw(n),),) * size
    kinds = draw(st.sampled_from([(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2), (E5M2, E5M2)]))
    return Case(
        operation,
        engine,
        tuple(draw(count) for _ in range(size)),
        ks,
        widths,
        kinds,
        (draw(st.booleans()), draw(st.booleans())),
        draw(st.sampled_from(dtypes)),
        draw(st.sampled_from([None, None, 1, 3])),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.integers(0, 2**31)),
    )


@dataclass
class Operand:
    """One operand of a rank: fp8 values, and scales of rows, or a single scale."""

    values: Tensor
    scale: Tensor

    @property
    def meant(self) -> Tensor:
        return self.values.double() * self.scale.double()

    def on(self, device: torch.device) -> "Operand":
        return Operand(self.values.to(device), self.scale.to(device))


@dataclass
class Given:
    """For each rank: x (its own rows in a gather, else all), weights and biases."""

    xs: list[Operand]
    weights: list[list[Operand]]
    biases: list[list[Tensor | None]]


def drawn(case: Case, whole: bool = True) -> Given:
    """Small integers times powers of two, so that no sum rounds in fp32; or normal numbers, quantized."""
    g = torch.Generator().manual_seed(case.seed)

    def draw(*shape: int, kind: torch.dtype, by_row: bool) -> Operand:
        scaled = (*shape[:-1], 1) if by_row else (1,)
        if whole:
            values = torch.randint(-2, 3, shape, generator=g).to(kind)
            return Operand(values, 2.0 ** torch.randint(-2, 3, scaled, generator=g))
        x = torch.randn(shape, generator=g) * 4.0 ** torch.randn((*shape[:-1], 1), generator=g)
        values, scale = fp8.quantize(x.flatten(0, -2), kind, by_row=by_row)
        return Operand(values.view(shape), scale.view(scaled) * 1.1)  # an arbitrary scale

    lead = () if case.batch is None else (case.batch,)
    full = [draw(*lead, sum(case.sizes), k, kind=case.kinds[0], by_row=case.by_row[0]) for k in case.ks]
    if case.operation == GATHER:
        of_all, full = full[0], []
        for rank in range(len(case.sizes)):
            scale = case.mine(of_all.scale, rank) if case.by_row[0] else of_all.scale * 2.0**rank
            full.append(Operand(case.mine(of_all.values, rank), scale))
    weights = [
        [draw(n, k, kind=case.kinds[1], by_row=case.by_row[1]) for n in of_rank]
        for of_rank, k in zip(case.widths, case.ks, strict=True)
    ]
    if case.transposed:
        weights = [[Operand(w.values.t().contiguous().t(), apart(w.scale)) for w in of_rank] for of_rank in weights]
        full = [Operand(x.values, apart(x.scale)) for x in full]
    draw_bias = lambda n: torch.randint(-2, 3, (n,), generator=g).to(case.dtype)  # noqa: E731
    biases: list[list[Tensor | None]] = [
        [draw_bias(n) if case.biased and i != 1 else None for i, n in enumerate(of_rank)] for of_rank in case.widths
    ]
    if case.operation != GATHER:
        biases = [biases[0]] * len(biases)
    return Given(full, weights, biases)


def apart(scale: Tensor) -> Tensor:
    """Row scales that are not contiguous, like those of packed rows."""
    return scale if scale.shape == (1,) else torch.cat([scale, scale * 3], -1)[..., :1]


def wanted(case: Case, given: Given, rank: int) -> list[Tensor]:
    """The expected results by the declared formula in fp64."""
    biases = [None if b is None else b.double() for b in given.biases[rank]]
    if case.operation == GATHER:
        x = torch.cat([x.meant for x in given.xs], case.dim)
        return gathered_formula(x, [w.meant for w in given.weights[rank]], biases)
    x, weight = (torch.cat([each.meant for each in of], -1) for of in (given.xs, [w[0] for w in given.weights]))
    y = summed_formula(x, weight, biases[0])
    return [case.mine(y, rank) if case.operation == SCATTER else y]


def computed(group, case: Case, given: Given) -> list[Tensor]:
    rank, comm = group.rank(), communicator(group)
    x, *weights = (each.on(comm.device) for each in (given.xs[rank], *given.weights[rank]))
    biases = [None if b is None else b.to(comm.device) for b in given.biases[rank]]
    how = dict(dtype=case.dtype, engine=case.engine)
    split = how if case.operation == REDUCE else how | dict(sizes=case.sizes, dim=case.dim)
    poison(group)
    comm.engine_calls.clear()
    if case.operation == GATHER:
        values, scales = [w.values for w in weights], [w.scale for w in weights]
        ys = fusedtp.scaled_all_gather_matmul(x.values, x.scale, values, scales, group, biases=biases, **split)
    else:
        (w,), (bias,) = weights, biases
        call = getattr(fusedtp, case.operation)
        ys = (call(x.values, x.scale, w.values, w.scale, group, bias=bias, **split),)
    ran = {engine for name, engine in comm.engine_calls if name == case.operation}
    assert ran == {case.engine if len(case.sizes) > 1 else "local"}
    return [y.cpu() for y in ys]


def equals_the_formula(group, case: Case) -> None:
    """On integers, where no sum rounds, results are exact; a gather's 16-bit results equal fp64's, rounded once."""
    given = drawn(case)
    got, want = computed(group, case, given), wanted(case, given, group.rank())
    for i, (mine, right) in enumerate(zip(got, want, strict=True)):
        assert_same(f"rank {group.rank()}: y{i}", mine, right.to(case.dtype))


FEW = Case(GATHER, "triton", (70, 0, 37), (135,) * 3, ((67, 5), (40, 3), (3, 64)), (E5M2, E4M3), biased=True)
MANY = replace(FEW, sizes=(90, 0, 60), batch=2, by_row=(True, True))  # more rows than the few-rows kernel takes
SUMMED = Case(SCATTER, "triton", (70, 0, 37), (135, 64, 3), ((67,),) * 3, by_row=(True, False), biased=True)
IN_ONE_SHOT = replace(SUMMED, operation=REDUCE)
IN_TWO_SHOTS = replace(SUMMED, operation=REDUCE, sizes=(500, 0, 400), ks=(16, 5, 3), widths=((80,),) * 3)


@pytest.mark.slow
@TRITON.marks[0]
@settings(max_examples=15)
@example(FEW)
@example(MANY)
@example(SUMMED)
@example(IN_ONE_SHOT)
@example(IN_TWO_SHOTS)
@given(cases("triton", rows=5))
def test_the_kernels_equal_the_formula(case):
    world(len(case.sizes)).run(equals_the_formula, case, timeout=200)


OTHERS = st.sampled_from(["chunked", "collective"])


@pytest.mark.slow
@settings(max_examples=60)
@example(replace(IN_TWO_SHOTS, engine="chunked", sizes=(3000, 0, 400)))
@given(OTHERS.flatmap(cases))
def test_the_other_engines_equal_the_formula(case):
    world(len(case.sizes)).run(equals_the_formula, case)


@settings(max_examples=30)
@given(OTHERS.flatmap(cases))
def test_threads_equal_the_formula(case):
    VirtualWorld(len(case.sizes)).run(lambda group: equals_the_formula(group, case))


def rounds_once(group, case: Case, of_unit: float = 0.0) -> None:
    """Random operands: fp32 sums and one rounding of the result; a sum over ranks also rounds each partial.

    A product of two fp8 is exact in fp32. Summing K of them loses K eps of the sum of their magnitudes; two scales, the
    bias and the ranks' sum lose eps each. gloo sums 16-bit partials in fp32 here, one rank after another.

    of_unit   the extra error of a matrix unit that sums in fewer bits
    """
    given, rank, size = drawn(case, whole=False), group.rank(), len(case.sizes)
    got, want = computed(group, case, given), wanted(case, given, rank)
    magnitudes = Given(
        [Operand(x.values.float().abs(), x.scale) for x in given.xs],
        [[Operand(w.values.float().abs(), w.scale) for w in ws] for ws in given.weights],
        [[None if b is None else b.abs() for b in bs] for bs in given.biases],
    )
    lost = (max(case.ks) + 3 + size) * torch.finfo(FP32).eps + of_unit
    if case.operation != GATHER and size > 1:
        lost += torch.finfo(case.dtype).eps / 2 * 1.01
    for mine, right, most in zip(got, want, wanted(case, magnitudes, rank), strict=True):
        assert_within(f"rank {rank}: y", mine, right, lost * most)


NARROW = [pytest.param("triton", marks=TRITON.marks), "chunked", "collective"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("engine", NARROW)
@settings(max_examples=6)
@given(st.data())
def test_results_are_rounded_once(engine, dtype, data):
    case = data.draw(cases(engine, (dtype,), 5).filter(lambda case: dtype != FP16 or E5M2 not in case.kinds))
    world(len(case.sizes)).run(rounds_once, case, timeout=200)


SIZES = (2, 0, 3)
GATHERED = Case(GATHER, "", SIZES, (20,) * 3, ((5, 2), (3, 1), (2, 2)), biased=True)
SCATTERED = Case(SCATTER, "", SIZES, (20, 7, 16), ((5,),) * 3, (E5M2, E4M3), biased=True)
EACH = pytest.mark.parametrize(
    "case", [GATHERED, SCATTERED, replace(SCATTERED, operation=REDUCE)], ids=["gather", "scatter", "reduce"]
)


def repeats(group, case: Case) -> None:
    given = drawn(case, whole=False)
    for first, again in zip(computed(group, case, given), computed(group, case, given), strict=True):
        assert torch.equal(first, again)


@EACH
@pytest.mark.parametrize("engine", ENGINES)
def test_a_repeated_call_gives_the_same_bits(engine, case):
    world(3).run(repeats, replace(case, engine=engine))


def keeps_nan_in_its_row(group, case: Case, value: float) -> None:
    """NaN or infinity in a value, in a scale of a row of x, or in a weight's row scale reaches its own results only.

    An infinite scale is left out, because it multiplies the sum.
    """
    rank = group.rank()
    for part in ("value", "x_scale", "w_scale") if value != value else ("value",):
        given = drawn(case)
        for x, (w, *_) in zip(given.xs, given.weights, strict=True):
            if len(x.values) and part == "value":
                x.values.view(torch.uint8)[0, 0] = torch.tensor(value).to(case.kinds[0]).view(torch.uint8)
            if len(x.values) and part == "x_scale":
                x.scale[0] = value
            if part == "w_scale":
                w.scale[0] = value
        want, got = wanted(case, given, rank), computed(group, case, given)
        for mine, right in zip(got, want, strict=True):
            assert_same(f"rank {rank}: y with {value} as {part}", mine, right.to(case.dtype))


@pytest.mark.slow
@EACH
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("engine", ENGINES)
def test_nan_and_infinity_stay_where_they_are(engine, value, case):
    world(3).run(keeps_nan_in_its_row, replace(case, engine=engine, kinds=(E5M2, E4M3)), value)


def compiled(group, case: Case) -> None:
    """One compiled graph equals eager code; torch's checks of the op pass."""
    torch._dynamo.reset()  # graphs of the other cases count against the limit
    fusedtp.reserve(group, 1 << 16)
    given, rank = drawn(case), group.rank()
    x, weights, biases = given.xs[rank], given.weights[rank], given.biases[rank]
    how = dict(dtype=case.dtype, engine=case.engine)
    split = how if case.operation == REDUCE else how | dict(sizes=SIZES)

    def layer(x: Tensor, scale: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor) -> Tensor:
        if case.operation == GATHER:
            return fusedtp.scaled_all_gather_matmul(x, scale, [w], [w_scale], group, biases=[bias], **split)[0]
        return getattr(fusedtp, case.operation)(x, scale, w, w_scale, group, bias=bias, **split)

    w, bias = weights[0], biases[0]
    operands = (x.values, x.scale, w.values, w.scale, bias)
    graph = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert_same("y", graph(*operands), layer(*operands))
    sizes = even(sum(SIZES), len(SIZES)) if case.operation == REDUCE else SIZES
    spec = (group.group_name, rank, list(sizes), 1, case.engine, 0, "", [])
    if case.operation == GATHER:
        packed = fp8.pack(x.values, x.scale)
        given_op = (packed, x.values.dtype, [w.values], [w.scale], [bias], case.dtype, True)
    else:
        given_op = (x.values, x.scale, w.values, w.scale, bias, case.dtype)
    # the others compare operands by allclose, which does not support fp8
    checks = ("test_autograd_registration", "test_faketensor")
    torch.library.opcheck(getattr(torch.ops.fusedtp, case.operation).default, (*given_op, *spec), test_utils=checks)
    of_one = (x.values, x.scale, w.values, w.scale, bias, case.dtype)
    torch.library.opcheck(torch.ops.fusedtp.scaled_product.default, of_one, test_utils=checks)


@pytest.mark.slow
@EACH
@pytest.mark.parametrize("engine", ENGINES)
def test_a_compiled_call_equals_an_eager_one(engine, case):
    world(3).run(compiled, replace(case, engine=engine), timeout=200)


# -- errors ----------------------------------------------------------------------------------------------------------


def disagrees(group, case: Case, kinds: tuple[torch.dtype, torch.dtype], dtype: torch.dtype) -> None:
    computed(group, case if group.rank() else replace(case, kinds=kinds, dtype=dtype), drawn(case))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_with_other_dtypes_are_told(engine):
    case = replace(SCATTERED, engine=engine, biased=False)
    with pytest.raises(WorldError, match=r"dtype is torch\.(bfloat16|float32) on rank"):
        world(3).run(disagrees, case, case.kinds, BF16)


def gathers_other_formats(group, engine: str) -> None:
    kind = E5M2 if group.rank() == 1 else E4M3
    x, w, one = torch.ones(2, 16).to(kind), torch.ones(3, 16).to(E4M3), torch.ones(1)
    fusedtp.scaled_all_gather_matmul(x, one, [w], [one], group, engine=engine)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_with_other_formats_are_told(engine):
    fp8 = r"torch\.float8_e(4m3fn|5m2)"
    with pytest.raises(WorldError, match=rf"dtype is {fp8} on rank . and {fp8} on"):
        world(2).run(gathers_other_formats, engine)


X, W, ONE = torch.ones(2, 16).to(E4M3), torch.ones(3, 16).to(E4M3), torch.ones(1)
REFUSED = {
    "x": (dict(x=X.float()), "rank 0: x is torch.float32"),
    "weight": (dict(w=W.half()), "the weight is torch.float16"),
    "columns": (dict(w=W[:, :5]), r"x has shape \(2, 16\), the weight \(3, 5\)"),
    "rows": (
        dict(x_scale=torch.ones(3, 1)),
        r"scale of x is \(3, 1\) torch.float32; wanted one element or \[2, 1\]",
    ),
    "scale": (dict(w_scale=ONE.half()), r"scale of the weight is \(1,\) torch.float16"),
    "bias": (dict(bias=torch.ones(3)), r"the bias is \(3,\) torch.float32; wanted \[3\] of torch.bfloat16"),
    "dtype": (dict(dtype=torch.float64), "dtype of the result is torch.float64"),
    "gradient": (dict(bias=torch.ones(3, dtype=BF16, requires_grad=True)), "requires a gradient"),
}


def refused(group, operation: str, what: str) -> None:
    given = dict(x=X, x_scale=ONE, w=W, w_scale=ONE, bias=None, dtype=BF16) | REFUSED[what][0]
    x, x_scale, w, w_scale, bias, dtype = given.values()
    if operation == GATHER:
        fusedtp.scaled_all_gather_matmul(x, x_scale, [w], [w_scale], group, biases=[bias], dtype=dtype)
    else:
        getattr(fusedtp, operation)(x, x_scale, w, w_scale, group, bias=bias, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("operation", [GATHER, SCATTER, REDUCE])
@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused(what, operation):
    with pytest.raises(WorldError, match=REFUSED[what][1]):
        world(2).run(refused, operation, what)


def chosen(group) -> None:
    comm = communicator(group)
    shared, spec = fp8.Shared(E4M3, 16), fp8.Spec(comm.name, comm.rank, (2, 2), engine="auto")
    choice = fp8.engines.Choice("triton", "rows")
    with (
        patch.object(fp8.engines, "choose", lambda *_: choice),
        patch.object(fp8, "multiplies", lambda *_: False),
    ):
        assert fp8.choose("", comm, spec, fp8.Rows((2, 2)), shared).engine == "collective"
        with pytest.raises(ValueError, match="engine 'triton': cpu does not multiply fp8"):
            fp8.choose("", comm, spec._replace(engine="triton"), fp8.Rows((2, 2)), shared)


def test_a_gpu_that_multiplies_no_fp8_gets_no_kernel():
    VirtualWorld(2).run(chosen)
