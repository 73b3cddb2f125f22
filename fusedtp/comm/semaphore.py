"""Counting semaphores in shared memory: how CPU ranks signal each other.

Note [Memory order of CPU signals]
A rank publishes with plain stores followed by `sem_post`, and its peer reads after `sem_wait`. POSIX (IEEE 1003.1,
4.12 "Memory Synchronization") lists both among the functions that synchronise memory between threads and processes,
so the order holds on every architecture that has the C library: glibc implements them by a release
read-modify-write and an acquire one (`lock xadd`/`cmpxchg` on x86, `ldaddl`/`casa` or `stlxr`/`ldaxr` on aarch64).
This does not rely on the order of plain stores (total store order, x86 only). A waiter sleeps in the kernel, so that
waiting costs no core.

Note [Fence on CPU]
A flag that an interpreted kernel polls is a plain word, which the host can only store. Between the rows and that store
the host posts and takes a private semaphore: a release after the rows, then an acquire of the same word before the
flag. Neither x86 nor aarch64 (whose acquires wait for earlier releases, ARM ARM B2.3 "RCsc") reorders stores across
this pair. The kernel polls with an acquiring atomic.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from typing import NoReturn

SIZE = 64  # bytes reserved for one semaphore: a full cache line; sem_t is 32 with glibc and musl

_SLICE_SECONDS = 0.2  # longest sleep in one system call, so that Python's signal handlers run


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _function(library: ctypes.CDLL, name: str, *argtypes: type) -> ctypes._NamedFuncPointer:
    function = getattr(library, name)
    function.argtypes, function.restype = argtypes, ctypes.c_int
    return function


class _Libc:
    """The four functions used. Those that never block keep the GIL (PyDLL); the one that blocks releases it."""

    def __init__(self) -> None:
        quick, blocking = ctypes.PyDLL(None, use_errno=True), ctypes.CDLL(None, use_errno=True)
        pointer = ctypes.c_void_p
        self.init = _function(quick, "sem_init", pointer, ctypes.c_int, ctypes.c_uint)
        self.post = _function(quick, "sem_post", pointer)
        self.trywait = _function(quick, "sem_trywait", pointer)
        self.timedwait = _function(blocking, "sem_timedwait", pointer, ctypes.POINTER(_Timespec))


LIBC = _Libc()


def fail(what: str) -> NoReturn:
    """Raise OSError for the C library function that has just failed."""
    code = ctypes.get_errno()
    raise OSError(code, f"{what}: {os.strerror(code)}")


def init(address: int) -> None:
    """Make the 64 bytes at `address` a semaphore of value 0 that processes may share."""
    if LIBC.init(address, 1, 0) != 0:
        fail("sem_init")


def post(address: int) -> None:
    """Release: everything this rank stored before is visible to the rank whose wait takes this post."""
    if LIBC.post(address) != 0:
        fail("sem_post")


def try_wait(address: int, put_back: bool = False) -> bool:
    """Acquire: take one post if there is one; `put_back` only looks."""
    if LIBC.trywait(address) == 0:
        if put_back:
            post(address)
        return True
    code = ctypes.get_errno()
    if code not in (errno.EAGAIN, errno.EINTR):
        raise OSError(code, f"sem_trywait: {os.strerror(code)}")
    return False


_own = (ctypes.c_char * (2 * SIZE))()  # a semaphore of this process, not shared
_OWN_ADDRESS = -(-ctypes.addressof(_own) // SIZE) * SIZE
init(_OWN_ADDRESS)


def fence() -> None:
    """Order this thread's earlier stores before its later ones for all observers; see Note [Fence on CPU]."""
    post(_OWN_ADDRESS)
    taken = try_wait(_OWN_ADDRESS)  # never fails: each thread takes as often as it posts
    assert taken


def wait_slice(address: int, seconds: float) -> bool:
    """Acquire: sleep up to min(seconds, 0.2 s) for a post; True if one was taken.

    The caller bounds the whole wait by a monotonic clock: `sem_timedwait` reads the settable one.
    """
    until = time.time() + max(0.0, min(seconds, _SLICE_SECONDS))
    limit = _Timespec(int(until), int((until % 1.0) * 1e9))
    if LIBC.timedwait(address, ctypes.byref(limit)) == 0:
        return True
    code = ctypes.get_errno()
    if code not in (errno.ETIMEDOUT, errno.EINTR):
        raise OSError(code, f"sem_timedwait: {os.strerror(code)}")
    return False
