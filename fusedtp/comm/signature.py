"""What must be equal on all ranks in a call, and who is named when it is not.

Every rank publishes the words of its signature beside its flag; the peer that waits for the flag compares them, so
the check costs no communication of its own and cannot hang (Note [Signatures] in workspace.py).
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from .errors import PeerFailed, SignatureMismatch

FAILED, REFUSED = 0, 1  # a rank that raised in the middle of a call, or before it began
OPERATIONS = (
    "failed", "refused", "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "all_gather_wgrad",
    "all_gather", "reduce_scatter", "all_reduce", "moe_plan", "moe_move", "moe_pull",
    "moe_move_matmul",
    "moe_matmul_pull",
)  # fmt: skip
ENGINES = ("collective", "chunked", "triton")
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.bool,
          torch.uint8)  # fmt: skip
WIRES = ("", "fp8")  # how rows travel to their experts: as they are, or in another form
FIELDS = (
    "operation",
    "call number",
    "engine",
    "dtype",
    "features",
    "batch",
    "weights",
    "needs_grad",
    "with_bias",
    "tables",
    "top_k",
    "num_experts",
    "max_rows",
    "wire",
)
MAX_SIZES = 64
NUM_WORDS = len(FIELDS) + MAX_SIZES


@dataclass(frozen=True)
class Signature:
    """`features` is the width all ranks share: K of a gathered x, N of a reduced output. `needs_grad` is a bit mask.

    tables   digest of the table of tuned configurations that a fused kernel is launched by, 0 of none
    top_k, experts   of a mixture of experts; max_rows likewise: 1 + the bound that was asked for, or 0;
    wire a number of WIRES
    """

    operation: str
    engine: str
    dtype: torch.dtype
    features: int
    sizes: tuple[int, ...]
    batch: int = 1
    weights: int = 1
    needs_grad: int = 0
    with_bias: int = 0
    tables: int = 0
    top_k: int = 0
    experts: int = 0
    max_rows: int = 0
    wire: int = 0

    def words(self, call: int) -> np.ndarray:
        """[NUM_WORDS] int64."""
        out = _template(self).copy()
        out[1] = call
        return out

    def hash32(self) -> int:
        """A nonzero int32 for kernels; without the call number, so that a captured graph can be replayed."""
        return _hash32(self)


@lru_cache(256)
def _template(s: Signature) -> np.ndarray:
    out = np.zeros(NUM_WORDS, np.int64)
    dtype = DTYPES.index(s.dtype) if s.dtype in DTYPES else -1
    out[: len(FIELDS)] = (
        OPERATIONS.index(s.operation), 0, ENGINES.index(s.engine), dtype, s.features, s.batch,
        s.weights, s.needs_grad, s.with_bias, s.tables, s.top_k, s.experts, s.max_rows, s.wire,
    )  # fmt: skip
    sizes = s.sizes[:MAX_SIZES]
    out[len(FIELDS) : len(FIELDS) + len(sizes)] = sizes
    return out


@lru_cache(256)
def _hash32(s: Signature) -> int:
    return (zlib.crc32(_template(s).tobytes()) & 0x7FFFFFFF) or 1


def failure_words(call: int, kind: int = FAILED) -> np.ndarray:
    """What a rank publishes that raised in the middle of a call, or (REFUSED) in place of it."""
    out = np.zeros(NUM_WORDS, np.int64)
    out[0], out[1] = kind, call
    return out


def _show(index: int, words: np.ndarray) -> str:
    value = int(words[index])
    if index == 0:
        return OPERATIONS[value] if 0 <= value < len(OPERATIONS) else str(value)
    if index == 2:
        return ENGINES[value] if 0 <= value < len(ENGINES) else str(value)
    if FIELDS[index] == "max_rows":
        return str(value - 1) if value else "None"
    if FIELDS[index] == "wire":
        return repr(WIRES[value]) if 0 <= value < len(WIRES) else str(value)
    if index == 3:
        return str(DTYPES[value]) if 0 <= value < len(DTYPES) else "another dtype"
    return str(value)


def compare(mine: np.ndarray, theirs: np.ndarray, rank: int, peer: int, world_size: int) -> None:
    """Raises SignatureMismatch naming both ranks and the first field that differs, PeerFailed if the peer raised."""
    if mine.tobytes() == theirs.tobytes():
        return
    if theirs[0] in (FAILED, REFUSED):
        when = "during" if theirs[0] == FAILED else "before it began"
        raise PeerFailed(
            f"rank {peer} raised {when} {_show(0, mine)} (call {int(mine[1])}); rank {rank} stops too"
        )
    for i, name in enumerate(FIELDS):
        if mine[i] != theirs[i]:
            detail = f"{name} is {_show(i, mine)} on rank {rank} and {_show(i, theirs)} on rank {peer}"
            if name == "tables":
                detail += " (tuned configurations differ: set FUSEDTP_TABLES to the same folder on all ranks)"
            break
    else:
        n = len(FIELDS)
        a, b = mine[n : n + world_size].tolist(), theirs[n : n + world_size].tolist()
        detail = f"sizes is {a} on rank {rank} and {b} on rank {peer} (pass the same `sizes` on all ranks)"
    raise SignatureMismatch(f"ranks disagree on {_show(0, mine)} (call {int(mine[1])}): {detail}")
