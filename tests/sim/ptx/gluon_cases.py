# mypy: ignore-errors
"""A kernel of Gluon in a module of its own: with the interpreter, the language does not import."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def by_gluon(boxes, flags, src, dst, rank, N: gl.constexpr, SEM: gl.constexpr = "release"):
    at, to = gl.arange(0, N, layout=gl.BlockedLayout([1], [32], [4], [0])), 1 - rank
    gl.store(gl.load(boxes + to).to(gl.pointer_type(gl.float32)) + at, gl.load(src + at))
    gl.barrier()
    gl.atomic_xchg(gl.load(flags + to).to(gl.pointer_type(gl.int32)), 1, sem=SEM, scope="sys")
    while gl.atomic_add(gl.load(flags + rank).to(gl.pointer_type(gl.int32)), 0, sem="acquire", scope="sys") != 1:
        pass
    gl.barrier()
    gl.store(dst + at, gl.load(gl.load(boxes + rank).to(gl.pointer_type(gl.float32)) + at))
