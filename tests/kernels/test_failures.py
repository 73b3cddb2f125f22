"""A rank that is missing or in another call is named within the timeout, and publishes nothing afterwards."""

import pytest

OPS = ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "all_gather_wgrad"]
NOBODY = -1
ARRIVAL = -1  # instead of a chunk


@pytest.mark.slow
@pytest.mark.parametrize("op, in_one", [(op, False) for op in OPS] + [("matmul_all_reduce", True)])
def test_a_missing_peer_is_named_in_time(worlds, op, in_one):
    replies, later = worlds.fail(3, dict(op=op, sizes=(5, 0, 9), in_one=in_one, absent=1, other=NOBODY))
    for rank in (0, 2):
        code, peer, chunk, wanted, seen = replies[rank]["status"][:5]
        assert (code, peer, wanted, seen) == (1, 1, 1, 0) and ARRIVAL <= chunk < 4096
        assert 2 <= replies[rank]["seconds"] < 30
        assert later[rank]["status"] == replies[rank]["status"]
        assert later[rank]["quiet"] and not replies[rank]["quiet"]


@pytest.mark.slow
def test_nothing_is_published_after_a_failure(worlds):
    """The second stage of an all-reduce fails on all ranks; the flags of its third stage do not change."""
    _, later = worlds.fail(3, dict(op="matmul_all_reduce", sizes=(5, 5, 9), in_one=False, absent=1, other=NOBODY))
    assert all(reply["highest_flag"] == 0 for reply in later)


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_another_signature_is_named(worlds, op):
    replies, _ = worlds.fail(3, dict(op=op, sizes=(5, 0, 9), absent=NOBODY, other=1, sig=-5))
    for rank, other in ((0, 1), (2, 1)):
        code, peer, chunk, wanted, seen = replies[rank]["status"][:5]
        assert (code, peer, chunk, wanted, seen) == (2, other, ARRIVAL, -5, -4)
    code, peer, _, wanted, seen = replies[1]["status"][:5]
    assert code == 2 and peer in (0, 2) and (wanted, seen) == (-4, -5)
