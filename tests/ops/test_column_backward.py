"""The gradients of several column-parallel layers in one call equal those of separate calls, bit by bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fusedtp
from fusedtp.comm import communicator
from fusedtp.ops import column_backward
from fusedtp.ops.operation import OPERATIONS, Spec
from tests.harness import PerRank, world


def randoms(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def in_one_call_and_in_two(group, sizes, batch, k, widths, dtype, total) -> None:
    comm = communicator(group)
    spec = Spec(comm.name, comm.rank, tuple(sizes), batch)
    rows = batch * sum(sizes)
    x = randoms(batch * sizes[comm.rank], k, seed=comm.rank, dtype=dtype)
    dys = [randoms(rows, n, seed=10 + 10 * comm.rank + i, dtype=dtype) for i, n in enumerate(widths)]
    weights = [randoms(n, k, seed=50 + 10 * comm.rank + i, dtype=dtype) for i, n in enumerate(widths)]
    for _ in range(3):  # both slots, then the first again
        dx, *dws = column_backward.op(spec, x, dys, weights, total)
        transposed = [w.t() for w in weights]
        assert torch.equal(dx, OPERATIONS["matmul_reduce_scatter"](spec, dys, transposed, None))
        apart = OPERATIONS["all_gather_wgrad"](spec, x, dys, total)
        assert len(dws) == len(apart) and all(map(torch.equal, dws, apart))
        assert all(dw.dtype == total for dw in dws)


@pytest.mark.slow
@given(data=st.data())
def test_one_call_gives_what_two_give(data):
    w = data.draw(st.sampled_from((2, 3, 4)))
    sizes = data.draw(st.lists(st.integers(0, 5), min_size=w, max_size=w))
    batch, k = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    widths = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=3))
    dtype = data.draw(st.sampled_from((torch.float32, torch.float64, torch.bfloat16, torch.float16)))
    total = data.draw(st.sampled_from((dtype, torch.float32) if dtype.itemsize == 2 else (dtype,)))
    world(w).run(in_one_call_and_in_two, sizes, batch, k, widths, dtype, total)


def calls(group, engine: str, needs: tuple[bool, bool], keep: bool) -> dict[str, int]:
    comm = communicator(group)
    x, w = torch.ones(2, 4, requires_grad=needs[0]), torch.ones(5, 4, requires_grad=needs[1])
    (y,) = fusedtp.all_gather_matmul(x, [w], group, engine=engine, keep_gathered=keep)
    comm.engine_calls.clear()
    y.sum().backward()
    assert (x.grad is not None, w.grad is not None) == needs
    return {name: n for (name, _), n in comm.engine_calls.items()}


@pytest.mark.parametrize("engine", ["auto", "chunked", "collective"])
def test_one_call_where_both_are_wanted(engine):
    two = {"matmul_reduce_scatter": 1, "all_gather_wgrad": 1}
    both = two if engine == "collective" else {"column_grads": 1}
    assert world(2).run(calls, engine, (True, True), False) == [both] * 2
    assert world(2).run(calls, engine, (True, False), False) == [{"matmul_reduce_scatter": 1}] * 2
    assert world(2).run(calls, engine, (False, True), False) == [{"all_gather_wgrad": 1}] * 2
    assert world(2).run(calls, engine, (True, True), True) == [{"matmul_reduce_scatter": 1}] * 2


def of_other_widths(group, k: int) -> None:
    comm = communicator(group)
    x, w, dy = torch.ones(2, k), torch.ones(3, k), torch.ones(4, 3)
    column_backward.op(Spec(comm.name, comm.rank, (2, 2)), x, [dy], [w], torch.float32)


def test_ranks_that_disagree_are_named():
    for outcome in world(2).outcomes(of_other_widths, PerRank([4, 5])):
        assert outcome.is_a("SignatureMismatch") and "features" in outcome.message, outcome
    world(2).run(of_other_widths, 4)
