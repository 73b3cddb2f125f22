"""The signature of a call, which must be equal on all ranks, and the error that names the rank that differs.

Every rank publishes the words of its signature next to its flag; the peer that waits for the flag compares them. So the
check needs no extra communication and cannot hang (Note [Signatures] in workspace.py).
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from sys import byteorder

import numpy as np
import torch

from .errors import PeerFailed, SignatureMismatch

FAILED, REFUSED = (
    "failed",
    "refused",
)  # published by a rank that raised during a call, or before it began
ENGINES = ("collective", "chunked", "triton", "multimem")
OF_KERNELS = ("triton", "multimem")  # a call is one kernel, which signals and advances the epoch
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.bool,
          torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)  # fmt: skip
COMM_DTYPES = ("", "fp8")  # format of rows sent to experts: their own dtype, or fp8
NAME_WORDS = 4  # words of an operation's name, 8 characters each
FIELDS = (
    "call number",
    "engine",
    "dtype",
    "features",
    "batch",
    "weights",
    "needs_grad",
    "with_bias",
    "tables",
    "tf32",
    "top_k",
    "num_experts",
    "max_rows",
    "comm_dtype",
)
MAX_SIZES = 72
CALL_AT = NAME_WORDS  # the first field
SIZES_AT = NAME_WORDS + len(FIELDS)
NUM_WORDS = SIZES_AT + MAX_SIZES


@dataclass(frozen=True)
class Signature:
    """`features` is the width all ranks share: K of a gathered x, N of a reduced output. `needs_grad` is a bit mask.

    tables   digest of the source of a fused kernel's configuration: the tuned table and the kind of GPU
    tf32     whether fp32 operands are multiplied in tf32
    top_k, experts, max_rows   mixture of experts only; max_rows is 1 + the requested bound, or 0 without one
    comm_dtype   index into COMM_DTYPES
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
    tf32: int = 0
    top_k: int = 0
    experts: int = 0
    max_rows: int = 0
    comm_dtype: int = 0

    @cached_property
    def around(self) -> tuple[bytes, bytes]:
        """The bytes before the call's number, and those after it."""
        words = _template(self).tobytes()
        return words[: 8 * CALL_AT], words[8 * (CALL_AT + 1) :]

    def words(self, call: int) -> bytes:
        """NUM_WORDS of int64. Only the first `published_bytes` are significant."""
        before, behind = self.around
        return before + call.to_bytes(8, byteorder) + behind

    @cached_property
    def hash32(self) -> int:
        """A nonzero int32 for kernels. It omits the call number, so that a captured graph can be replayed."""
        return _hash32(self)


RAISED = Signature(FAILED, "collective", torch.float32, 0, ())  # CUDA: of a rank that raised before its kernel


@lru_cache(256)
def _template(s: Signature) -> np.ndarray:
    out = np.zeros(NUM_WORDS, np.int64)
    out[:NAME_WORDS] = _name_words(s.operation)
    dtype = DTYPES.index(s.dtype) if s.dtype in DTYPES else -1
    out[NAME_WORDS:SIZES_AT] = (
        0, ENGINES.index(s.engine), dtype, s.features, s.batch,
        s.weights, s.needs_grad, s.with_bias, s.tables, s.tf32, s.top_k, s.experts, s.max_rows, s.comm_dtype,
    )  # fmt: skip
    sizes = s.sizes[:MAX_SIZES]
    out[SIZES_AT : SIZES_AT + len(sizes)] = sizes
    return out


@cache
def _name_words(name: str) -> np.ndarray:
    given = name.encode()
    assert 0 < len(given) <= 8 * NAME_WORDS, name
    return np.frombuffer(given.ljust(8 * NAME_WORDS, b"\0"), np.int64)


def published_bytes(world_size: int) -> int:
    """Bytes of a signature that ranks exchange: sizes only up to `world_size`."""
    return 8 * (SIZES_AT + min(world_size, MAX_SIZES))


def operation_of(words: bytes) -> str:
    """The name of the operation that published these words; FAILED or REFUSED if the rank raised."""
    return words[: 8 * NAME_WORDS].rstrip(b"\0").decode(errors="replace")


@lru_cache(256)
def _hash32(s: Signature) -> int:
    return (zlib.crc32(_template(s).tobytes()) & 0x7FFFFFFF) or 1


def failure_words(call: int, kind: str = FAILED) -> bytes:
    """The words of a rank that raised during a call (FAILED) or instead of it (REFUSED)."""
    out = np.zeros(NUM_WORDS, np.int64)
    out[:NAME_WORDS] = _name_words(kind)
    out[CALL_AT] = call
    return out.tobytes()


def _show(field: str, value: int) -> str:
    if field == "engine":
        return ENGINES[value] if 0 <= value < len(ENGINES) else str(value)
    if field == "max_rows":
        return str(value - 1) if value else "None"
    if field == "comm_dtype":
        return repr(COMM_DTYPES[value]) if 0 <= value < len(COMM_DTYPES) else str(value)
    if field == "dtype":
        return str(DTYPES[value]) if 0 <= value < len(DTYPES) else "another dtype"
    return str(value)


def compare(mine: bytes, theirs: bytes, rank: int, peer: int, world_size: int) -> None:
    """Raises SignatureMismatch naming both ranks and the first different field, or PeerFailed if the peer raised."""
    if mine == theirs:
        return
    ours, other = operation_of(mine), operation_of(theirs)
    call = int.from_bytes(mine[8 * CALL_AT : 8 * (CALL_AT + 1)], byteorder)
    if other in (FAILED, REFUSED):
        when = "during" if other == FAILED else "before it began"
        raise PeerFailed(f"rank {peer} raised {when} {ours} (call {call}); rank {rank} stops too")
    detail = f"operation is {ours} on rank {rank} and {other} on rank {peer}"
    if ours == other:
        detail = _difference(mine, theirs, rank, peer, world_size)
    raise SignatureMismatch(f"ranks disagree on {ours} (call {call}): {detail}")


def _difference(mine: bytes, theirs: bytes, rank: int, peer: int, world_size: int) -> str:
    """The first field that differs, in words."""
    both = [np.frombuffer(words, np.int64).tolist() for words in (mine, theirs)]
    for name, a, b in zip(FIELDS, *(words[NAME_WORDS:] for words in both), strict=False):
        if a != b:
            detail = f"{name} is {_show(name, a)} on rank {rank} and {_show(name, b)} on rank {peer}"
            if name == "tables":
                detail += (
                    " (tuned configurations differ: set FUSEDTP_TABLES to the same folder on all ranks; or their GPUs "
                    "have different numbers of multiprocessors: use engine='chunked')"
                )
            return detail
    a, b = (words[SIZES_AT : SIZES_AT + world_size] for words in both)
    return f"sizes is {a} on rank {rank} and {b} on rank {peer} (pass the same `sizes` on all ranks)"
