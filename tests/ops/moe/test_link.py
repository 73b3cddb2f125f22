"""Experts whose rows travel over a held link: the same bits, in bytes / rate or longer."""

import time

import pytest
import torch

import fusedtp
from fusedtp.comm import communicator
from fusedtp.ops.engines import has_triton
from fusedtp.ops.moe import moe_dispatch_gated, moe_matmul_combine
from tests.harness import world
from tests.properties.laws import assert_same

pytestmark = pytest.mark.skipif(not has_triton(), reason="needs triton")
EXPERTS, TOP_K, TOKENS, WIDTH, HIDDEN = 4, 2, 24, 32, 20
RATE = 3e3  # bytes a second: the rows of a rank take two seconds


def layer(group, overlapped: bool, x, ids, weights, gate, up, down):
    how = dict(sizes=(TOKENS,) * group.size(), engine="triton")
    if overlapped:
        hidden, _, handle = moe_dispatch_gated(x, ids, weights, gate, up, EXPERTS, group, **how)
        return moe_matmul_combine(hidden, down, handle)
    rows, offsets, handle = fusedtp.moe_dispatch(x, ids, weights, EXPERTS, group, **how)
    hidden = fusedtp.grouped_gated(rows, gate, up, offsets)
    return fusedtp.moe_combine(fusedtp.grouped_matmul(hidden, down, offsets), handle)


def held(group, overlapped: bool) -> None:
    g = torch.Generator().manual_seed(5)
    rank, size = group.rank(), group.size()
    ids = torch.rand(size, TOKENS, EXPERTS, generator=g).argsort(-1)[..., :TOP_K]
    x, weights = (torch.randn(size, TOKENS, n, generator=g)[rank] for n in (WIDTH, TOP_K))
    here = slice(rank * EXPERTS // size, (rank + 1) * EXPERTS // size)
    shapes = ((HIDDEN, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN))
    experts = [torch.randn(EXPERTS, *shape, generator=g)[here] for shape in shapes]
    given = (x, ids[rank], weights, *experts)
    workspace = communicator(group).workspace

    def run():
        before, begin = workspace.carried(), time.monotonic()
        y = layer(group, overlapped, *given)
        return y, time.monotonic() - begin, workspace.carried() - before

    plain, _, nothing = run()
    workspace.hold_link(RATE)
    y, seconds, carried = run()
    workspace.hold_link(None)
    again, _, nothing_again = run()
    assert_same("y", y, plain)
    assert_same("y afterwards", again, plain)
    assert nothing == nothing_again == 0, "nothing is held"
    owners = ids // (EXPERTS // size)
    sent = int((owners[rank] != rank).sum())  # rows that leave for their experts, each with its weight
    home = int((owners == rank).sum() - (owners[rank] == rank).sum())  # and those that go home
    crossing = sent * (WIDTH + 1) * 4 + home * WIDTH * 4
    travelled = communicator(group).world.exchange((carried, crossing))
    assert sum(one for one, _ in travelled) == sum(other for _, other in travelled), travelled
    assert carried > 0 and seconds >= carried / RATE, (seconds, carried)


@pytest.mark.parametrize("overlapped", [True, False])
def test_a_layer_takes_as_long_as_its_rows_do(overlapped):
    world(2).run(held, overlapped, timeout=300)
