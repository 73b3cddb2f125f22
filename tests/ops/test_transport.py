"""The rows of a fused gather are moved by the kernel's programs or by copies beside it; results are the same."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fusedtp
from fusedtp.comm import communicator
from fusedtp.comm.copies import Copies, parts
from fusedtp.ops.engines import BY_COPY
from fusedtp.ops.operation import OPERATIONS, Spec
from fusedtp.ops.rows import Rows
from tests.harness import PerRank, world

SIZES = [(53, 42, 44), (0, 133, 5), (270, 1, 20), (0, 0, 0), (8, 8, 8)]  # the third grows the slots, two are few rows
K = 24


def whole(number: int, *shape: int) -> Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(number)).float()


def mixed_calls(group, transports: list[str]) -> None:
    """Gathers of every size with this rank's `transports` in turn, and calls of other kinds between them."""
    comm = communicator(group)
    for i in range(len(SIZES) + 2):
        rows = Rows(SIZES[i % len(SIZES)])
        by, x, w = transports[i % len(transports)], whole(i, rows.total, K), whole(100 + i, 17, K)
        mine, bias = x[rows.offset(comm.rank) :][: rows.local(comm.rank)], whole(200 + i, 17)
        mine = mine.t().contiguous().t() if i % 2 else mine  # a copy needs contiguous rows
        spec = Spec(comm.name, comm.rank, rows.sizes, engine={"copy": BY_COPY, "programs": "triton"}[by])
        y, kept = OPERATIONS["all_gather_matmul"](spec, mine, [w], [bias], True)
        assert torch.equal(kept, x) and torch.equal(y, x @ w.T + bias), (i, by)
        dy = whole(300 + i, rows.total, 5)
        (dw,) = OPERATIONS["all_gather_wgrad"](spec, mine, [dy], torch.float32)
        assert torch.equal(dw, dy.T @ x), (i, by)
        if i % 3 == 0:
            z = fusedtp.matmul_all_reduce(x, w, group, engine=("chunked", "triton", "collective")[i % 2])
            assert torch.equal(z, comm.world_size * (x @ w.T)), i
        comm.world.barrier()  # peers may still read
        comm.workspace.poison()
        comm.world.barrier()


@pytest.mark.slow
@pytest.mark.parametrize("transports", [["copy"] * 3, ["copy", "programs", "copy"]], ids=["all", "mixed"])
def test_the_results_do_not_tell_who_brought_the_rows(transports):
    """All ranks with the same transport; then each rank with its own, changing from call to call."""
    pytest.importorskip("triton")
    if transports[1] == "copy":
        world(3).run(mixed_calls, ["copy"])
    else:
        ways = (["copy", "programs"], ["programs"], ["copy", "copy", "programs"])
        world(3).run(mixed_calls, PerRank(ways))


def asked_for_copies(group, operation: str) -> list[bool]:
    """Whether copies move the rows: once with few rows, once with more."""
    comm, fp8 = communicator(group), operation.startswith("scaled")
    x, w = (torch.ones(n, 8).to(torch.float8_e4m3fn if fp8 else torch.float32) for n in (90, 16))
    for each in (40, 90):
        if fp8:
            one = torch.ones(1)
            fusedtp.scaled_all_gather_matmul(x[:each], one, [w], [one], group, engine=BY_COPY)
        else:
            getattr(fusedtp, operation)(x[:each], [w, w], group, engine=BY_COPY)
    return [plan.copies for plan in comm.plans.values()]


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["all_gather_matmul", "all_gather_gated_matmul", "scaled_all_gather_matmul"])
def test_copies_bring_no_few_rows(operation):
    """The few-rows kernel waits for one flag of each rank, and copies would set that flag too."""
    pytest.importorskip("triton")
    assert world(3).run(asked_for_copies, operation, fresh=True) == [[False, True]] * 3


@given(st.integers(1, 6), st.integers(0, 5), st.integers(0, 300), st.integers(1, 50), st.integers(1, 5))
def test_parts_are_every_row_once_a_peer_with_the_flags_of_its_chunks(w, rank, num_rows, chunk, pieces):
    rank %= w
    made = list(parts(rank, w, num_rows, chunk, pieces))
    peers = list(dict.fromkeys(part.peer for part in made))
    assert peers == [(rank + step) % w for step in range(1, w)][: len(peers)] and (num_rows == 0 or len(peers) == w - 1)
    for peer in peers:
        mine = [part for part in made if part.peer == peer]
        assert len(mine) <= pieces
        assert [r for part in mine for r in range(part.first, part.last)] == list(range(num_rows))
        chunks = [c for part in mine for c in range(part.flag, part.flag + part.flags)]
        assert chunks == list(range(-(-num_rows // chunk)))
        for part in mine:
            assert part.first == part.flag * chunk
            assert part.last == min((part.flag + part.flags) * chunk, num_rows)


@pytest.mark.parametrize("num_rows", [1, 64, 65, 128, 300])
def test_large_shards_go_in_two_pieces(num_rows, monkeypatch):
    monkeypatch.setattr("fusedtp.comm.copies.IN_TWO", 128 * 16)
    copies = Copies(0, [torch.empty(0)] * 4, [], torch.zeros(4, dtype=torch.int32), None)
    sent = copies.of(torch.empty(num_rows, 4), 0, chunk_rows=64)
    assert len(sent.parts) == 3 * (2 if num_rows >= 128 else 1)
