"""Gate and up projection with gather and activation: the formula on integers, bitwise results, gradients and errors."""

from dataclasses import dataclass, replace
from itertools import product
from unittest.mock import Mock, patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.tensor import DeviceMesh

import fusedtp
from fusedtp.comm import VirtualWorld, communicator
from fusedtp.nn.mlp import GatedMLP
from fusedtp.ops.all_gather_gated_matmul import gated_grads, reference
from fusedtp.ops.pointwise import ACTIVATIONS
from tests.engines import ENGINES, TRITON
from tests.harness import WorldError, world
from tests.properties.laws import assert_same, poison

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
NAMES = ("y", "dx", "dgate", "dup", "db_gate", "db_up")


@dataclass(frozen=True)
class Case:
    """sizes: rows of every rank, per batch entry if there is a batch; widths: N of every rank."""

    engine: str
    sizes: tuple[int, ...]
    k: int
    widths: tuple[int, ...]
    dtype: torch.dtype = FP32
    act: str = "silu"
    batch: int | None = None
    biased: tuple[bool, bool] = (False, False)
    keep: bool = False
    transposed: bool = False
    seed: int = 0

    def mine(self, full: Tensor, rank: int) -> Tensor:
        dim = 0 if self.batch is None else 1
        return full.split(list(self.sizes), dim)[rank]


@st.composite
def cases(draw, engine: str, dtypes=(FP32, BF16, FP16), rows: int = 12, width: int = 20) -> Case:
    size = draw(st.integers(1, 4))
    count = st.one_of(st.just(0), st.integers(1, 3), st.integers(1, rows))
    return Case(
        engine,
        tuple(draw(count) for _ in range(size)),
        draw(st.integers(1, width)),
        tuple(draw(st.integers(0, width)) for _ in range(size)),
        draw(st.sampled_from(dtypes)),
        draw(st.sampled_from(ACTIVATIONS)),
        draw(st.sampled_from([None, None, 1, 3])),
        (draw(st.booleans()), draw(st.booleans())),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.integers(0, 2**31)),
    )


@dataclass
class Given:
    """The data of all ranks: x; per rank gate, up and their biases; and the gradient of its y."""

    x: Tensor
    weights: list[list[Tensor]]
    biases: list[list[Tensor | None]]
    dys: list[Tensor]


def drawn(case: Case, whole: bool) -> Given:
    """Small integers with exact sums, or normal numbers.

    Integer gates have products above 128 or below -128, where act is its argument or 0: 64 times 3 or -3, plus other
    terms that sum to at most 63.
    """
    g = torch.Generator().manual_seed(case.seed)

    def draw(*shape: int) -> Tensor:
        if not whole:
            return torch.randn(shape, generator=g, dtype=FP64).to(case.dtype)
        return torch.randint(-1, 2, shape, generator=g).to(case.dtype)

    lead = () if case.batch is None else (case.batch,)
    x = draw(*lead, sum(case.sizes), case.k)
    weights = [[draw(n, case.k) for _ in range(2)] for n in case.widths]
    if whole:
        x[..., 0] = 64
        for gate, up in weights:
            gate[:, 0], up[:, 0] = 3, 0
            gate[::2, 0] = -3
    if case.transposed:
        weights = [[w.t().contiguous().t() for w in of_rank] for of_rank in weights]
    biases = [[draw(n) if b else None for b in case.biased] for n in case.widths]
    return Given(x, weights, biases, [draw(*lead, sum(case.sizes), n) for n in case.widths])


def wanted(case: Case, given: Given, rank: int) -> list[Tensor | None]:
    """The expected results of one rank, by the declared formula in fp64: dx is the sum of all ranks' parts."""
    named: list[Tensor | None] = []
    dx = torch.zeros(given.x.shape, dtype=FP64)
    for r, (weights, biases, dy) in enumerate(zip(given.weights, given.biases, given.dys, strict=True)):
        zeros = torch.zeros(case.widths[r])
        leaves = [
            t.to(FP64, copy=True).requires_grad_()
            for t in (given.x, *weights, *(zeros if b is None else b for b in biases))
        ]
        y = reference(leaves[0], leaves[1:3], leaves[3:], case.act)
        grads = torch.autograd.grad(y, leaves, dy.double())
        dx += grads[0]
        if r == rank:
            named = [y.detach(), None, *grads[1:]]
    named[1] = case.mine(dx, rank)
    return [t if i < 4 or case.biased[i - 4] else None for i, t in enumerate(named)]


def computed(group, case: Case, given: Given, backward: bool = True) -> list[Tensor | None]:
    rank = group.rank()
    x = case.mine(given.x, rank).clone().requires_grad_(backward)
    weights = [w.clone(memory_format=torch.preserve_format).requires_grad_(backward) for w in given.weights[rank]]
    biases = [None if b is None else b.clone().requires_grad_(backward) for b in given.biases[rank]]
    poison(group)
    (y,) = fusedtp.all_gather_gated_matmul(
        x, weights, group, act=case.act, biases=biases, sizes=case.sizes, dim=int(case.batch is not None),
        engine=case.engine, keep_gathered=case.keep,
    )  # fmt: skip
    ran = {engine for (name, engine) in communicator(group).engine_calls if name == "all_gather_gated_matmul"}
    assert ran == {case.engine if len(case.sizes) > 1 else "local"}
    communicator(group).engine_calls.clear()
    if backward:
        poison(group)
        y.backward(given.dys[rank])
    grads = [leaf if leaf is None else leaf.grad for leaf in (x, *weights, *biases)]
    return [y.detach(), *grads]


def equals_the_formula(group, case: Case) -> None:
    """On integers, where no sum rounds, results are exact; 16-bit results equal the fp64 formula rounded once."""
    given = drawn(case, whole=True)
    want, got = wanted(case, given, group.rank()), computed(group, case, given)
    bare = computed(group, case, given, backward=False)
    assert_same("y without gradients", bare[0], got[0])
    for name, mine, right in zip(NAMES, got, want, strict=True):
        assert (mine is None) == (right is None), name
        if mine is not None and right is not None:
            assert_same(f"rank {group.rank()}: {name}", mine, right.to(case.dtype))


EXACT = (FP32,)  # 192 times a few others does not fit 16 bits, and in fp64 silu(-192) is not 0
LARGE = Case("triton", (70, 0, 37), 135, (67, 40, 3), FP32, "gelu", None, (True, False), True)


@pytest.mark.slow
@TRITON.marks[0]
@settings(max_examples=15)
@example(LARGE)
@given(cases("triton", (FP32,), 5, 10))
def test_the_kernel_equals_the_formula(case):
    world(len(case.sizes)).run(equals_the_formula, case, timeout=200)


@pytest.mark.slow
@settings(max_examples=60)
@given(st.sampled_from(["chunked", "collective"]).flatmap(lambda engine: cases(engine, EXACT)))
def test_the_other_engines_equal_the_formula(case):
    world(len(case.sizes)).run(equals_the_formula, case)


@pytest.mark.slow
@settings(max_examples=30)
@given(st.sampled_from(["chunked", "collective"]).flatmap(lambda engine: cases(engine, EXACT)))
def test_threads_equal_the_formula(case):
    VirtualWorld(len(case.sizes)).run(lambda group: equals_the_formula(group, case))


def rounds_once(group, case: Case) -> None:
    """y of random operands: the kernel is within one rounding of the fp64 formula; the other engines round products
    too.

    Each product's sum of K terms in fp32 (fp64) is off by (K + 3) eps |x| |w|, and so is the formula's in fp64. This
    error is multiplied by the slope of act, at most 1.13, or by act(g), at most |g|.
    """
    given, eps = drawn(case, whole=False), torch.finfo(case.dtype).eps
    wide = torch.finfo(torch.promote_types(case.dtype, FP32)).eps
    (y, *_), (want, *_) = computed(group, case, given, False), wanted(case, given, group.rank())
    x, (gate, up) = given.x.double().flatten(0, -2), (w.double() for w in given.weights[group.rank()])
    biases = [0 if b is None else b.double() for b in given.biases[group.rank()]]
    g, u = x @ gate.t() + biases[0], x @ up.t() + biases[1]
    sums = 2 * (case.k + 3) * wide * torch.stack([x.abs() @ w.abs().t() + 1 for w in (gate, up)])
    if case.engine != "triton":
        sums = sums + eps / 2 * torch.stack([g.abs(), u.abs()]) * 1.01
    off = 1.13 * sums[0] * (u.abs() + sums[1]) + g.abs() * sums[1] + 16 * wide * (g * u).abs()
    want = want.double().flatten(0, -2)
    bound = off + eps / 2 * (want.abs() + off) + torch.finfo(case.dtype).smallest_normal
    over = (y.double().flatten(0, -2) - want).abs() - bound
    assert over.numel() == 0 or over.max() <= 0, over.max()


SIXTEEN = [pytest.param("triton", dtype, marks=TRITON.marks) for dtype in (BF16, FP16)]


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "dtype"), [*product(ENGINES[:2], (BF16, FP16, FP64)), *SIXTEEN])
@settings(max_examples=6)
@given(st.data())
def test_results_are_rounded_once(engine, dtype, data):
    case = data.draw(cases(engine, (dtype,), 5, 12).filter(lambda case: len(case.sizes) > 1))
    world(len(case.sizes)).run(rounds_once, case)


def differentiates(group, case: Case) -> None:
    """Gradients of random fp64 inputs: sums of a few dozen terms of about one, each off by at most 2^-52."""
    given = drawn(case, whole=False)
    want, got = wanted(case, given, group.rank()), computed(group, case, given)
    for name, mine, right in zip(NAMES, got, want, strict=True):
        assert (mine is None) == (right is None), name
        if mine is not None:
            torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("act", ACTIVATIONS)
@settings(max_examples=10)
@given(st.data())
def test_gradients_are_those_of_the_activation(act, data):
    case = data.draw(st.sampled_from(["chunked", "collective"]).flatmap(lambda engine: cases(engine, (FP64,))))
    world(len(case.sizes)).run(differentiates, replace(case, act=act))


SIZES = (2, 0, 3)
PLAIN = Case("chunked", SIZES, 4, (5, 3, 2))


def repeats(group, engine: str) -> None:
    case = Case(engine, SIZES, 9, (5, 3, 2), biased=(True, True))
    given = drawn(case, whole=False)
    for first, again in zip(computed(group, case, given), computed(group, case, given), strict=True):
        assert torch.equal(first, again)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_repeated_call_gives_the_same_bits(engine):
    world(3).run(repeats, engine)


def leaves_of(case: Case, rank: int) -> tuple[Tensor, list[Tensor], Tensor]:
    given = drawn(case, whole=True)
    x = case.mine(given.x, rank).clone().requires_grad_()
    return x, [nn.Parameter(w.clone()) for w in given.weights[rank]], given.dys[rank]


def split(group, engine: str, keep: bool) -> None:
    """Each gradient communicates once: dgrad in the input pass, the gather of wgrad in the weight pass. The
    activation's backward runs once."""
    x, weights, dy = leaves_of(PLAIN, group.rank())
    comm, how = communicator(group), dict(sizes=SIZES, engine=engine, keep_gathered=keep)
    fusedtp.all_gather_gated_matmul(x, weights, group, **how)[0].backward(dy)
    whole = [x.grad, *(w.grad for w in weights)]
    x.grad = weights[0].grad = weights[1].grad = None
    (y,) = fusedtp.all_gather_gated_matmul(x, weights, group, **how)
    comm.engine_calls.clear()
    with patch.object(gated_grads, "function", Mock(wraps=gated_grads.function)) as activation:
        (dx,), groups = stage_backward_input([y], [dy], [x], iter(weights))
        assert [name for name, _ in comm.engine_calls] == ["matmul_reduce_scatter"]
        stage_backward_weight(iter(weights), groups)
    assert activation.call_count == 1
    assert [name for name, _ in comm.engine_calls][1:] == ([] if keep else ["all_gather_wgrad"])
    for name, one, other in zip(NAMES[1:], (dx, *(w.grad for w in weights)), whole, strict=False):
        assert_same(name, one, other)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_split_backward_communicates_once(engine, keep):
    world(3).run(split, engine, keep)


def compiled(group, engine: str) -> None:
    """One compiled graph equals eager code, gradients included; torch's checks of the op pass."""
    fusedtp.reserve(group, 1 << 16)
    x, weights, dy = leaves_of(PLAIN, group.rank())

    def layer(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        return fusedtp.all_gather_gated_matmul(x, [gate, up], group, sizes=SIZES, engine=engine)[0]

    results = []
    for compute in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        y = compute(x, *weights)
        results.append([y.detach(), *torch.autograd.grad(y, [x, *weights], dy)])
    for name, eager, graph in zip(NAMES, *results, strict=False):
        assert_same(name, graph, eager)
    plain = [w.detach() for w in weights]
    given = (x.detach(), plain, [None, None], "gelu", True, True)
    spec = (group.group_name, group.rank(), list(SIZES), 1, engine, 7, "", [])
    torch.library.opcheck(torch.ops.fusedtp.all_gather_gated_matmul.default, (*given, *spec))
    torch.library.opcheck(torch.ops.fusedtp.gated_grads.default, (y.detach(), y.detach(), y.detach(), "silu"))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_compiled_layer_equals_an_eager_one(engine):
    world(3).run(compiled, engine, timeout=200)


def main_grads(group, frozen: int) -> None:
    """wgrad with gate or up frozen, accumulated into main_grad if there is one."""
    want = wanted(PLAIN, drawn(PLAIN, whole=True), group.rank())
    x, weights, dy = leaves_of(PLAIN, group.rank())
    weights[frozen].requires_grad_(False)
    weights[1 - frozen].main_grad = torch.ones_like(weights[1 - frozen])
    fusedtp.all_gather_gated_matmul(x, weights, group, sizes=SIZES)[0].backward(dy)
    assert weights[0].grad is None and weights[1].grad is None
    assert_same("main_grad", weights[1 - frozen].main_grad - 1, want[3 - frozen].float())
    assert_same("dx", x.grad, want[1].float())


@pytest.mark.parametrize("frozen", [0, 1])
def test_main_grad_takes_the_gradient_of_a_weight_beside_a_frozen_one(frozen):
    world(3).run(main_grads, frozen)


def mlp(group, engine: str, checkpointed: bool) -> None:
    """A parallel GatedMLP uses it in forward and again under activation checkpointing; equal to one process."""
    torch.manual_seed(0)
    plain = GatedMLP(6, 12, "silu", bias=True).double()
    layer = GatedMLP(6, 12, "silu", bias=True).double()
    layer.load_state_dict(plain.state_dict())
    mesh = DeviceMesh.from_group(group, "cpu")
    fusedtp.parallelize(layer, mesh, plan={name: _style(style, engine) for name, style in layer.tp_plan.items()})
    x, rank = torch.randn(5, 6, dtype=FP64), group.rank()
    one = x.clone().requires_grad_()
    plain(one).sum().backward()
    mine = x.split(list(SIZES))[rank].clone().requires_grad_()
    run = torch.utils.checkpoint.checkpoint if checkpointed else lambda f, x, **_: f(x)
    calls = communicator(group).engine_calls
    calls.clear()
    run(layer, mine, use_reentrant=False).sum().backward()
    assert calls["all_gather_gated_matmul", engine] == 1 + checkpointed
    joined = [each.operation for each in fusedtp.explain(layer, tokens=5).layers]
    assert joined == ["all_gather_gated_matmul"] * 2 + ["matmul_reduce_scatter"]
    torch.testing.assert_close(mine.grad, one.grad.split(list(SIZES))[rank], rtol=1e-12, atol=1e-12)
    for name, parameter in layer.named_parameters():
        want = plain.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad.full_tensor(), want, rtol=1e-12, atol=1e-12, msg=name)


def _style(style: str, engine: str):
    kind = {"colwise": fusedtp.FusedColwise, "rowwise": fusedtp.FusedRowwise}[style]
    return kind(engine=engine, sizes=SIZES)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("engine", ["collective", "chunked"])
def test_a_gated_mlp_runs_it(engine, checkpointed):
    world(3).run(mlp, engine, checkpointed)


def refused(group, what: str) -> None:
    x, weights = torch.ones(2, 3), [torch.ones(4, 3), torch.ones(4, 3)]
    if what == "act":
        fusedtp.all_gather_gated_matmul(x, weights, group, act="relu")
    if what == "one":
        fusedtp.all_gather_gated_matmul(x, weights[:1], group)
    if what == "shapes":
        fusedtp.all_gather_gated_matmul(x, [weights[0], torch.ones(5, 3)], group)
    if what == "bias":
        fusedtp.all_gather_gated_matmul(x, weights, group, biases=[torch.ones(3), None])


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("act", r"rank 0: act is 'relu'; it must be one of silu"),
        ("one", r"rank 0: got weights \[\(4, 3\)\] and 1 biases; wanted gate and up of one shape"),
        ("shapes", r"rank 0: got weights \[\(4, 3\), \(5, 3\)\]"),
        ("bias", r"rank 0: the bias has shape \(3,\); the weight \(4, 3\) needs \[4\]"),
    ],
)
def test_what_does_not_fit_is_refused(what, said):
    with pytest.raises(WorldError, match=said):
        world(2).run(refused, what)
