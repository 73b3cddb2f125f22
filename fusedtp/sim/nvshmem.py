# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"
"""NVSHMEM's device functions as plain loads, stores and atomics, for `Launch(replace=...)`: docs/checking-kernels.md.

Each body takes the arguments of the C function of its name: addresses (pointers or int64) in symmetric memory, sizes in
bytes. Symmetric memory is the `memory` of the case's Run. An address on another rank has the same offset from the start
of that rank's tensor. An address outside symmetric memory is out of bounds.

All threads of a program call `putmem`, `getmem` and `putmem_signal`, the `_block` functions of NVSHMEM: the transfer
has a barrier before and after it. `signal_op`, `signal_wait_until` and `fence` act for each calling thread.

Whatever NVSHMEM's specification leaves unordered is unordered here: `putmem` alone makes nothing visible to others, a
`fence` or `quiet` orders earlier puts, `putmem_signal` releases its data with the signal, and a wait acquires.

Source: NVSHMEM API documentation, "Remote Memory Access", "Signaling Operations", "Memory Ordering". The bodies know
the rank, the world and the table of memories from %envreg0 to %envreg4 (PTX ISA 10, launching.plain).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import triton
import triton.language as tl

_CHUNK = tl.constexpr(1024)  # bytes per step of a copy


@triton.jit
def _environment(NUMBER: tl.constexpr):
    return tl.inline_asm_elementwise(f"mov.u32 $0, %envreg{NUMBER};", "=r", [], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def my_pe():
    """This rank."""
    return _environment(0)


@triton.jit
def n_pes():
    """The number of ranks."""
    return _environment(1)


@triton.jit
def ptr(address, pe):
    """int64: the address on rank pe that corresponds to this local address; 0 outside symmetric memory."""
    address = tl.cast(address, tl.int64)
    low, high = _environment(3).to(tl.uint32, bitcast=True), _environment(4).to(tl.uint32, bitcast=True)
    table = (low.to(tl.int64) | (high.to(tl.int64) << 32)).to(tl.pointer_type(tl.int64))
    row_size = n_pes() + 1
    found = address * 0
    for memory in range(_environment(2)):
        row = table + memory * row_size
        at = address - tl.load(row + 1 + my_pe())
        found = tl.where((at >= 0) & (at < tl.load(row)), tl.load(row + 1 + pe) + at, found)
    return found


@triton.jit
def _move(to, source, nbytes):
    tl.debug_barrier()
    to, source = to.to(tl.pointer_type(tl.uint8)), tl.cast(source, tl.int64).to(tl.pointer_type(tl.uint8))
    for first in range(0, nbytes, _CHUNK):
        at = first + tl.arange(0, _CHUNK)
        tl.store(to + at, tl.load(source + at, mask=at < nbytes), mask=at < nbytes)
    tl.debug_barrier()


@triton.jit
def putmem(dest, source, nbytes, pe):
    """nvshmemx_putmem_block, nvshmemx_putmem_nbi_block: local memory to rank pe's `dest`."""
    _move(ptr(dest, pe), source, nbytes)
    return 0


@triton.jit
def getmem(dest, source, nbytes, pe):
    """nvshmemx_getmem_block, nvshmemx_getmem_nbi_block: rank pe's `source` to local memory."""
    _move(tl.cast(dest, tl.int64), ptr(source, pe), nbytes)
    return 0


@triton.jit
def putmem_signal(dest, source, nbytes, sig_addr, signal, sig_op, pe):
    """nvshmemx_putmem_signal_block: the signal of rank pe changes once the data is there."""
    _move(ptr(dest, pe), source, nbytes)
    at, signal = ptr(sig_addr, pe).to(tl.pointer_type(tl.uint64)), tl.cast(signal, tl.uint64)
    if (sig_op == 0) | (sig_op == 9):
        tl.atomic_xchg(at, signal, sem="release", scope="sys")
    else:
        tl.atomic_add(at, signal, sem="release", scope="sys")
    return 0


@triton.jit
def signal_op(sig_addr, signal, sig_op, pe):
    """nvshmemx_signal_op, by each calling thread: updates rank pe's signal, not ordered with the data.

    sig_op: 0 and 9 set it (torch documents NVSHMEM_SIGNAL_SET as 0, nvshmem.h has 9); others add.
    """
    at, signal = ptr(sig_addr, pe), tl.cast(signal, tl.uint64)
    if (sig_op == 0) | (sig_op == 9):
        _of_each_thread("atom.global.sys.relaxed.exch.b64 $0, [$1], $2;", at, signal)
    else:
        _of_each_thread("atom.global.sys.relaxed.add.u64 $0, [$1], $2;", at, signal)
    return 0


@triton.jit
def _of_each_thread(ASM: tl.constexpr, at, value):
    return tl.inline_asm_elementwise(ASM, "=l,l,l", [at, value], dtype=tl.uint64, is_pure=False, pack=1)


@triton.jit
def _holds(seen, cmp, value):
    """seen `cmp` value, by NVSHMEM_CMP_EQ, NE, GT, LE, LT, GE: 0 to 5."""
    less, equal = seen < value, seen == value
    above = ((cmp == 1) & (seen != value)) | ((cmp == 2) & (seen > value)) | ((cmp == 5) & (seen >= value))
    return ((cmp == 0) & equal) | above | ((cmp == 3) & (less | equal)) | ((cmp == 4) & less)


@triton.jit
def signal_wait_until(sig_addr, cmp, value):
    """nvshmem_signal_wait_until, by each calling thread: polls the local signal and acquires."""
    at, value = tl.cast(sig_addr, tl.int64), tl.cast(value, tl.uint64)
    seen = _of_each_thread("ld.global.acquire.sys.u64 $0, [$1]; // $2", at, value)
    while not _holds(seen, cmp, value):
        seen = _of_each_thread("ld.global.acquire.sys.u64 $0, [$1]; // $2", at, value)
    return seen


@triton.jit
def fence():
    """nvshmem_fence, nvshmem_quiet, by each calling thread: earlier puts are visible before later accesses."""
    tl.inline_asm_elementwise("fence.acq_rel.sys; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    return 0


quiet = fence


def of_torch() -> Mapping[Any, Any]:
    """`replace` for kernels that use torch.distributed._symmetric_memory._nvshmem_triton.

    torch defines these functions only if it finds a GPU. Without one, the module is reloaded as if there were a GPU.
    """
    from torch.distributed._symmetric_memory import _nvshmem_triton as theirs

    if not hasattr(theirs, "signal_op"):
        with patch("torch.utils._triton.has_triton", lambda: True):
            importlib.reload(theirs)
    wrapped = {
        "putmem_block": putmem, "getmem_block": getmem, "getmem_nbi_block": getmem,
        "putmem_signal_block": putmem_signal, "signal_wait_until": signal_wait_until,
    }  # fmt: skip
    plain = {"signal_op": signal_op, "fence": fence, "quiet": quiet, "my_pe": my_pe, "n_pes": n_pes}
    bodies = {f"{name}_extern_wrapper": body for name, body in wrapped.items()} | plain
    return {getattr(theirs, name): body for name, body in bodies.items()}
