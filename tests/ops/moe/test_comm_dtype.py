"""Rows sent in fp8: when they are exact, the error otherwise, agreement of engines, and fewer bytes sent."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fusedtp
from fusedtp.comm import communicator
from fusedtp.ops.moe.fp8 import BLOCK, DTYPES, pack, unpack
from tests.harness import PerRank, WorldError, world
from tests.ops.moe.laws import Case, build, mine
from tests.properties.laws import assert_same, poison


def through(x: Tensor) -> Tensor:
    return unpack(pack(x), x.shape[1], x.dtype)


def blocks(x: Tensor) -> list[Tensor]:
    return [row for part in x.split(BLOCK, 1) for row in part]


shapes = st.tuples(st.integers(0, 4), st.sampled_from([0, 1, 5, 127, 128, 129, 300]))
dtypes = st.sampled_from(DTYPES)


@settings(max_examples=60)
@given(shapes, dtypes, st.integers(-8, 7), st.integers(0, 2**32))
def test_what_fp8_holds_comes_out_exactly(shape, dtype, power, seed):
    """Integers up to 16 (four bits) times a power of two, of any size in each row; zeros keep their sign."""
    g = torch.Generator().manual_seed(seed)
    x = (
        torch.randint(-16, 17, shape, generator=g)
        * 2.0**power
        * 2.0 ** torch.randint(-3, 4, (shape[0], 1), generator=g)
    )
    x = x.to(dtype)
    packed = pack(x)
    assert packed.dtype == torch.uint8 and packed.shape == (shape[0], shape[1] + 4 * -(-shape[1] // BLOCK))
    assert_same("x", through(x), x)
    assert torch.equal(through(-x.abs()).signbit(), (-x.abs()).signbit())


@settings(max_examples=60)
@given(shapes, dtypes, st.sampled_from([1.0, 1e-4, 3e4, 1e30]), st.floats(0.0, 4.0), st.integers(0, 2**32))
def test_no_element_is_off_by_more_than_a_sixteenth_of_its_blocks_largest(shape, dtype, size, spread, seed):
    """Magnitudes within a row differ by factors of up to about e**(3 spread)."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g) * (spread * torch.randn(shape, generator=g)).exp()
    x = (x * (size if dtype != torch.float16 or size < 10 else 1.0)).to(dtype)
    values = pack(x)[:, : shape[1]].view(torch.float8_e4m3fn).float()
    for got, want, held in zip(blocks(through(x).double()), blocks(x.double()), blocks(values), strict=True):
        if want.isfinite().all() and len(want):
            off, largest = (got - want).abs(), want.abs().max()
            assert (off <= 2**-4 * want.abs() + 2**-17 * largest).all()
            assert off.max() <= 2**-4 * largest
            assert largest < 2**-117 or 224 <= held.abs().max() <= 448, "no smaller scale would do"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scale_grows_only_above_448_times_itself(dtype):
    """Blocks with largest magnitude 448 * 2**p, its neighbours, 224 * 2**p, and the number after that."""
    powers = torch.arange(-8, 8)
    at = 2.0**powers
    step = torch.finfo(dtype).eps * 2**8  # spacing of the dtype's numbers from 256 to 512
    for largest, times in (
        (448.0, 1), (448.0 + step, 2), (448.0 - step, 1), (224.0, 0.5), (224.0 + step / 2, 1)
    ):  # fmt: skip
        x = torch.stack([largest * at, -at, -largest * at], 1).to(dtype)
        assert torch.equal(x[:, 0].double(), largest * at.double()), "the dtype holds the boundary"
        assert torch.equal(pack(x)[:, 3:].clone().view(torch.float32)[:, 0], times * at), largest


@settings(max_examples=40)
@given(st.integers(1, 4), st.sampled_from([1, 129, 300]), dtypes, st.integers(0, 2**32))
def test_what_is_not_finite_is_seen_and_touches_nothing_else(tokens, width, dtype, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(-8, 9, (tokens, width), generator=g).to(dtype)
    at = torch.rand(tokens, width, generator=g) < 0.1
    bad = torch.tensor([float("inf"), float("-inf"), float("nan")])[torch.randint(3, (tokens, width), generator=g)]
    want = torch.where(at, torch.nan, x.float()).to(dtype)
    assert_same("x", through(torch.where(at, bad, x.float()).to(dtype)), want)


def exchanged(group, case: Case, comm_dtype: str, rough: bool) -> list[Tensor]:
    """[rows, y, dx, dweights] of this rank."""
    rank, data = group.rank(), build(case)
    here = mine(case, rank)
    x, dy = data.x, data.gradients
    if rough:
        g = torch.Generator().manual_seed(case.seed)
        x, dy = (torch.randn(t.shape, generator=g).to(t.dtype) for t in (x, dy))
    x, weights = x[here].clone().requires_grad_(), data.weights[here].clone().requires_grad_()
    poison(group)
    rows, offsets, handle = fusedtp.moe_dispatch(
        x,
        data.ids[here],
        weights,
        case.num_experts,
        group,
        sizes=case.sizes,
        engine=case.engine,
        comm_dtype=comm_dtype,
    )
    y = fusedtp.moe_combine(rows, handle)
    poison(group)
    y.backward(dy[here])
    return [rows[: int(offsets[-1])].detach(), y.detach(), x.grad, weights.grad]


def engines_agree(group, case: Case, engines: tuple[str, ...], rough: bool) -> None:
    """All engines give the same bits; rows are rounded as by `through`; exact inputs give the results without fp8."""
    found = {}
    for engine in engines:
        of_engine = Case(**{**vars(case), "engine": engine})
        found[engine] = exchanged(group, of_engine, "fp8", rough)
    plain = exchanged(group, case, "", rough)
    for engine, got in found.items():
        for name, one, first, bare in zip(("rows", "y", "dx", "dweights"), got, found[engines[0]], plain, strict=True):
            assert_same(f"{engine}: {name}", one, first)
            if name == "rows":
                assert_same(f"{engine}: rounded {name}", one, through(bare))
            if name == "dx" or not rough:
                assert_same(f"{engine}: {name} without comm_dtype", one, bare)


@pytest.mark.slow
@settings(max_examples=25)
@given(
    st.integers(1, 3), st.integers(0, 9), st.sampled_from([1, 5, 130]), st.sampled_from(DTYPES), st.booleans(),
    st.integers(0, 2**32),
)  # fmt: skip
def test_engines_agree(size, tokens, width, dtype, rough, seed):
    sizes = (tokens,) + (3,) * (size - 1)
    case = Case("collective", sizes, 2 * size, 2, width, dtype, "skewed", 0.1, seed)
    world(size).run(engines_agree, case, ("chunked", "collective", "auto"), rough)


def test_kernels_agree():
    pytest.importorskip("triton")
    case = Case("collective", (5, 3), 4, 2, 131, torch.bfloat16, "skewed", 0.1, 1)
    world(2).run(engines_agree, case, ("chunked", "triton"), True, timeout=200)


def bytes_of_a_dispatch(group, comm_dtype: str, width: int) -> tuple[int, int]:
    """The slot bytes that a dispatch of four tokens declares, and the bytes that the collective one sends to peers."""
    comm = communicator(group)
    fusedtp.reserve(group, 1 << 16)
    sent, all_to_all = [], comm.all_to_all
    comm.plans.clear()

    def counted_all_to_all(x, *counts):
        sent.append(x.shape[1] * x.element_size() if x.dim() == 2 else 0)
        return all_to_all(x, *counts)

    comm.all_to_all = counted_all_to_all
    x, ids = torch.ones(4, width, dtype=torch.bfloat16), torch.tensor([[0], [1], [0], [1]])
    try:
        for engine in ("chunked", "collective"):
            fusedtp.moe_dispatch(x, ids, torch.ones(4, 1), 2, group, engine=engine, comm_dtype=comm_dtype)
    finally:
        del comm.all_to_all
    declared = [p.slot_bytes for p in comm.plans.values() if p.signature.operation == "moe_dispatch"]
    return max(declared), max(sent)


def test_half_the_bytes_travel():
    k, slots = 512, 4 * 4  # for the weights, beside the rows
    for plain, packed in zip(
        *(world(2).run(bytes_of_a_dispatch, comm_dtype, k) for comm_dtype in ("", "fp8")), strict=True
    ):
        assert plain == (4 * 2 * k + slots, 2 * k)
        assert packed == (4 * (k + 16) + slots, k + 16)


def dispatch(group, comm_dtype: str, dtype: torch.dtype) -> None:
    ids = torch.tensor([[0], [1]])
    fusedtp.moe_dispatch(torch.ones(2, 3, dtype=dtype), ids, torch.ones(2, 1), 2, group, comm_dtype=comm_dtype)


def test_ranks_of_another_wire_are_told():
    with pytest.raises(WorldError, match="comm_dtype is 'fp8' on rank 0 and '' on rank 1"):
        world(2).run(dispatch, PerRank(["fp8", ""]), torch.float32)


@pytest.mark.parametrize(
    ("comm_dtype", "dtype", "words"),
    [
        ("fp4", torch.float32, "comm_dtype is 'fp4'; it must be one of '', 'fp8'"),
        ("fp8", torch.float64, "comm_dtype='fp8' supports .*, not torch.float64"),
    ],
)
def test_an_unknown_comm_dtype_is_refused(comm_dtype, dtype, words):
    with pytest.raises(ValueError, match=f"rank 0: {words}"):
        dispatch(None, comm_dtype, dtype)
