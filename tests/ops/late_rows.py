"""A grouped matmul whose rows come during the launch: `ready`, where one would wait for them, brings them."""

import triton
import triton.language as tl

from fusedtp.kernels.grouped_matmul import group_tiles
from fusedtp.kernels.tiles import inline


@inline
def fetch(peers, arrivals, expert):
    """Copy the expert's rows [.., 16], and count that this program has asked for them."""
    source, rows, offsets, asked = arrivals
    begin, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    cols = tl.arange(0, 16)
    for row in range(begin, end):
        tl.store(rows + row * 16 + cols, tl.load(source + row * 16 + cols))
    count = asked + tl.program_id(0) * 64 + expert
    tl.store(count, tl.load(count) + 1)


@triton.jit
def late_rows_kernel(source, rows, w, strides, y, offsets, asked, E, R, N):
    group_tiles(
        fetch, None, (source, rows, offsets, asked), None, rows, w, None, None, strides, None, y, None, None, offsets,
        E, R, N, 16, tl.program_id(0), tl.num_programs(0), 16, 16, 16, 2, True, False, "", "ieee",
    )  # fmt: skip
