"""No address of a fused kernel comes of a product of 32 bits, unless that counts rows, tiles or flags.

Strides, offsets and slots reach past 2**31 elements; a product of an index and a stride in 32 bits would wrap there.
What is asked is the compiler's own IR, before any pass has moved anything.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

pytest.importorskip("triton")

from fusedtp.checks.lint import own_cases
from fusedtp.sim import lint
from fusedtp.sim.lint.mlir import Value, behind

pytestmark = pytest.mark.slow
KERNELS = Path(__file__).parents[2] / "kernels"
FUSED = (
    "all_gather_matmul_kernel",
    "all_gather_wgrad_kernel",
    "matmul_reduce_scatter_kernel",
    "one_shot_kernel",
    "two_shot_kernel",
)
COUNTED = {
    "for first in range(chunk * chunk_rows, last, BLOCK_M):",  # rows of a shard
    "for tile in range(start, num_rows * num_cols, programs):",  # tiles, as are the next five
    "for tile in range(start, num_rows * num_cols, tl.num_programs(0) - send_programs):",
    "for tile in range(chunk * group, tl.minimum((chunk + 1) * group, tiles)):",
    "start = next_start(start, num_rows * num_cols, programs)",
    "tiles = num_rows * num_cols",
    "return start + steps * stride - count",
    "flag += rank_of(peers) * peers.flags_per_source + chunk",  # flags, of which there are 4096 a rank
    "index = src * peers.flags_per_source + chunk",
}


def products(kernels: tuple[str, ...], package: Path | None = None) -> set[str]:
    """Source lines of 32-bit products of two unknowns from which an address is computed."""
    found = set()
    with lint.compiler(workers=1) as using:
        for case in own_cases(kernels, ("sm_90",), ("bf16",)):
            for made in using.compile(case, None if package is None else str(package)):
                for op in made.ttir.named("tt.addptr", "tt.int_to_ptr"):
                    for root in op.operands[1:] or op.operands:
                        found |= {line for value in behind(root) if (line := _product(value))}
    return found


def _product(value: Value) -> str:
    op = value.op
    if op is None or op.name != "arith.muli" or not re.search(r": (tensor<[^>]*xi32>|i32)", op.text):
        return ""
    if any(_is_constant(operand) for operand in op.operands):
        return ""
    file, line = op.frames[0]
    return Path(file).read_text().splitlines()[line - 1].strip()


def _is_constant(value: Value) -> bool:
    while value.op is not None and value.op.name in ("tt.splat", "tt.broadcast", "tt.expand_dims"):
        value = value.op.operands[0]
    return value.op is not None and value.op.name == "arith.constant"


def test_addresses_have_64_bits():
    assert products(FUSED) <= COUNTED


def test_a_product_of_32_bits_is_found(tmp_path):
    package = tmp_path / "narrow"
    shutil.copytree(KERNELS, package, ignore=shutil.ignore_patterns("__pycache__"))
    path = package / "matmul_reduce_scatter.py"
    wide = "at = local.to(tl.int64)[:, None] * N + cols[None, :]"
    text = path.read_text()
    assert wide in text
    path.write_text(text.replace(wide, "at = local[:, None] * N + cols[None, :]"))
    (line,) = products(("matmul_reduce_scatter_kernel",), package) - COUNTED
    assert line == "at = local[:, None] * N + cols[None, :]"
