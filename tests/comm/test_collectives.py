"""Plain collectives equal their formulas on integers that every dtype holds exactly, for any number of rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedtp.comm import VirtualWorld, communicator
from tests.harness import world

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def shards(sizes: tuple[int, ...], width: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """The [sizes[r], width] shard of every rank, the same list on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-9, 10, (n, width), generator=generator).to(dtype) for n in sizes]


def run_collectives(group, sizes: tuple[int, ...], width: int, dtype: torch.dtype, seed: int) -> None:
    comm = communicator(group)
    mine = shards(sizes, width, dtype, seed)
    full = [shards((sum(sizes),), width, dtype, seed + 1 + r)[0] for r in range(comm.world_size)]
    summed = torch.stack(full).double().sum(0).to(dtype)
    got = comm.all_gather(mine[comm.rank], sizes)
    assert got.dtype == dtype and torch.equal(got, torch.cat(mine)), "all_gather"
    got = comm.all_reduce(full[comm.rank])
    assert got.dtype == dtype and torch.equal(got, summed), "all_reduce"
    got = comm.reduce_scatter(full[comm.rank], sizes)
    assert got.dtype == dtype and torch.equal(got, summed.split(sizes)[comm.rank]), "reduce_scatter"
    got = comm.all_gather(mine[comm.rank].t().contiguous().t(), sizes)
    assert torch.equal(got, torch.cat(mine)), "all_gather of a transposed shard"


cases = st.integers(1, 4).flatmap(
    lambda size: st.tuples(
        st.tuples(*[st.integers(0, 5)] * size),
        st.integers(0, 4),
        st.sampled_from(DTYPES),
        st.integers(0, 99),
    )
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(cases)
def test_between_processes(case):
    world(len(case[0])).run(run_collectives, *case)


@settings(max_examples=20, deadline=None)
@given(cases)
def test_between_threads(case):
    VirtualWorld(len(case[0])).run(lambda group: run_collectives(group, *case))


def sum_many_small_to_a_large(group) -> torch.Tensor:
    comm = communicator(group)
    return comm.all_reduce(torch.tensor([256.0 if comm.rank == 0 else 1.0], dtype=torch.bfloat16))


def test_16_bit_sums_are_made_in_fp32_and_rounded_once():
    # 256 + 1 + 1 + 1 = 259: 260 if it rounds once, 256 if every step rounds to bf16
    for summed in world(4).run(sum_many_small_to_a_large) + VirtualWorld(4).run(sum_many_small_to_a_large):
        assert summed.item() == 260.0
