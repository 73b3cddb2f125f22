"""Copies beside a kernel: which driver calls are made, and in which order. tests/gpu/test_graphs.py runs a real one."""

import ctypes
import subprocess
from types import SimpleNamespace

import pytest
import torch

from fusedtp.bench.idle_driver import c_compiler
from fusedtp.comm import SignalTimeout, streams
from fusedtp.comm.copies import Copies
from fusedtp.comm.streams import Driver, SideStream
from fusedtp.comm.workspace import Call, Workspace

HANDLE = (1 << 40) + 9


class Side(SideStream):
    """A stream that copies immediately; its fake driver calls `look` after each copy."""

    def __init__(self, look):
        self._handle, self.look, self.forks = HANDLE, look, 0

    def fork(self):
        self.forks += 1

    def made(self, there: int, source: int, nbytes: int, stream: int) -> int:
        assert stream == HANDLE and nbytes > 0 and self.forks
        ctypes.memmove(there, source, nbytes)
        self.look()
        return 0


@pytest.mark.parametrize("epoch", [1, -(2**31) + 5])
@pytest.mark.parametrize("by", ["host", "stream"])
def test_a_peer_has_all_rows_of_a_flag_that_is_set(by, epoch, monkeypatch):
    """Check all flags after each copy, both of a stream and, on CPU, of the host."""
    rank, w, chunk, x = 1, 3, 4, torch.arange(30.0).view(15, 2) + 1
    slots = [torch.zeros(400, dtype=torch.uint8) for _ in range(w)]
    flags = [torch.zeros(10, dtype=torch.int32) for _ in range(w)]
    counted = torch.tensor([epoch, 0, 0, 0], dtype=torch.int32)
    monkeypatch.setattr("fusedtp.comm.copies.IN_TWO", 100)
    looked = []

    def look():
        for p in range(w):
            there = slots[p][16 : 16 + x.nbytes].view(torch.float32).view_as(x)
            for c in (flags[p] == epoch).nonzero().flatten().tolist():
                assert torch.equal(there[c * chunk : (c + 1) * chunk], x[c * chunk : (c + 1) * chunk]), (p, c)
        looked.append(sum(int((f == epoch).sum()) for f in flags))

    side = Side(look) if by == "stream" else None
    monkeypatch.setattr("fusedtp.comm.semaphore.fence", look)
    monkeypatch.setattr(streams, "driver", lambda: Driver(None, side.made))
    copies = Copies(rank, slots, flags, counted, side)
    sending = copies.of(x, 16, chunk)
    assert not copies.begun
    sending.send()
    look()
    assert looked == ([0, 2, 2, 4, 4, 6, 6, 8, 8] if side else [0, 2, 4, 6, 8]) and copies.begun
    assert [f[:4].tolist() for f in flags] == [[epoch] * 4, [0] * 4, [epoch] * 4]
    assert not any(f[4:].any() for f in flags)
    for p in range(w):
        assert not slots[p][:16].any() and not slots[p][16 + x.nbytes :].any()


def test_rows_without_columns_are_announced(monkeypatch):
    flags, side = [torch.zeros(4, dtype=torch.int32) for _ in range(2)], Side(lambda: None)
    monkeypatch.setattr(streams, "driver", lambda: Driver(None, side.made))
    slots = [torch.zeros(16, dtype=torch.uint8)] * 2
    Copies(0, slots, flags, torch.full((4,), 7, dtype=torch.int32), side).of(torch.empty(9, 0), 0, 4).send()
    assert [f.tolist() for f in flags] == [[0] * 4, [7, 7, 7, 0]]


def test_what_the_driver_refuses_is_raised(monkeypatch):
    monkeypatch.setattr(streams, "driver", lambda: Driver(None, lambda *given: 700))
    with pytest.raises(RuntimeError, match="cuMemcpyDtoDAsync: CUDA error 700"):
        Side(lambda: None).copy(1 << 20, 2 << 20, 64)


STUB = r"""
#include <stdint.h>
#include <stddef.h>
uint64_t seen[4];
int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
  seen[0] = flags; seen[1] = (uint64_t)(int64_t)priority; *stream = (void *)0x7fedcba987654320; return 0;
}
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t nbytes, void *stream) {
  seen[0] = to; seen[1] = from; seen[2] = nbytes; seen[3] = (uint64_t)stream; return 0;
}
"""


@pytest.mark.skipif(c_compiler() is None, reason="needs a C compiler")
def test_the_driver_gets_every_bit_of_addresses_sizes_and_handles(tmp_path, monkeypatch):
    source, library = tmp_path / "stub.c", tmp_path / "libcuda.so.1"
    source.write_text(STUB)
    subprocess.run([c_compiler(), "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    stub = ctypes.CDLL(str(library))
    seen = (ctypes.c_uint64 * 4).in_dll(stub, "seen")
    monkeypatch.setattr(streams.ctypes, "CDLL", {"libcuda.so.1": stub}.__getitem__)
    made = streams.driver.__wrapped__()
    handle = ctypes.c_void_p()
    assert made.create(ctypes.byref(handle), streams.NON_BLOCKING, streams.HIGH) == 0
    assert seen[0] == 1 and seen[1] == 2**64 - 1 and handle.value == 0x7FEDCBA987654320
    wide = [2**63 + 1, 2**62 + 5, 2**40 + 3, handle.value]
    assert made.copy(*wide) == 0 and list(seen) == wide


@pytest.mark.parametrize("begun", [False, True])
def test_a_group_is_given_up_where_copies_may_have_gone_without_their_kernel(begun):
    """The flags say that the call's rows have arrived, and the next call would use the same epoch."""
    workspace = SimpleNamespace(failed=None, meets=False, end=lambda: None)
    workspace.give_up = lambda call, error: Workspace.give_up(workspace, call, error)
    call = object.__new__(Call)
    call.ws, call.on_cpu, call.copying = workspace, False, SimpleNamespace(begun=begun)
    call.leave_peers = lambda: None
    call._leave(RuntimeError("no room for this kernel"))
    assert isinstance(workspace.failed, SignalTimeout) == begun
    assert not begun or "no room for this kernel" in str(workspace.failed)
