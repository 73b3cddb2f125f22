"""A held link: the results are the same, and what a rank's programs send takes bytes / rate or longer, all together."""

import pytest

OPS = ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "all_gather_wgrad"]
SLOW = 5 * 10**10  # femtoseconds a byte: 20 kB/s, at which the rows of a rank take half a second and longer


@pytest.mark.parametrize("op, in_one", [(op, False) for op in OPS] + [("matmul_all_reduce", True)])
def test_a_call_takes_as_long_as_its_bytes_do(worlds, op, in_one):
    """Each rank compares its results, and its time with what its link has carried; between, and after, none is held."""
    call = dict(op=op, sizes=(70, 33), k=64, widths=(48,), in_one=in_one)
    worlds.check(2, call, {**call, "link": SLOW}, call, {**call, "link": SLOW, "seed": 1})
