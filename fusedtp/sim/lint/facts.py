"""What the rules ask of a kernel's IR: which address another rank reaches, what gates a load, where loops are."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from .compiler import Compiled
from .mlir import Module, Op, Value, behind

TMA_LOADS = ("ttng.async_tma_copy_global_to_local", "ttng.async_tma_gather")
TMA_STORES = (
    "ttng.async_tma_copy_local_to_global",
    "ttng.async_tma_scatter",
    "ttng.async_tma_reduce",
)
LOADS = (
    "tt.load",
    "ttg.async_copy_global_to_local",
    "amdg.buffer_load",
    "amdg.buffer_load_to_local",
    "amdgpu.buffer_load",
    "amdgpu.buffer_load_to_local",
    *TMA_LOADS,
)
ATOMICS = ("tt.atomic_rmw", "tt.atomic_cas", "tt.atomic_load", "tt.atomic_store", "tt.atomic_poll")
DOTS = ("tt.dot", "tt.dot_scaled", "ttng.warp_group_dot", "ttng.tc_gen5_mma", "ttng.tc_gen5_mma_scaled")
# what a value read from memory was computed from is not what the value is: the walk backwards ends there
_READS = frozenset((*LOADS, *ATOMICS, "ttg.local_load", "ttng.tmem_load"))


@dataclass(frozen=True)
class Atomic:
    """An atomic operation as the source has it. kind: "poll" (changes nothing), "signal" or "lock" (cas)."""

    op: Op
    kind: str
    sem: str
    scope: str
    word: bool  # one integer, as flags are

    @property
    def acquires(self) -> bool:
        return self.sem in ("acquire", "acq_rel")

    @property
    def releases(self) -> bool:
        return self.sem in ("release", "acq_rel")


class Facts:
    """Questions about one compilation's IR, answered once.

    module   its TTGIR where None
    shared   the arguments to count as shared, where not the compilation's own
    """

    def __init__(
        self, made: Compiled, module: Module | None = None, shared: tuple[str, ...] | None = None
    ) -> None:
        self.module = made.ttgir if module is None else module
        self.shared = made.shared if shared is None else shared
        self.bases = self._descriptor_bases()
        self.order = {id(op): number for number, op in enumerate(self.module.ops)}
        self.atomics = [self._atomic(op) for op in self.module.named(*ATOMICS)]
        self.loads = self.module.named(*LOADS)
        self.dots = self.module.named(*DOTS)

    def _descriptor_bases(self) -> dict[int, list[Value]]:
        """What a TMA descriptor made in the kernel points to: it is written to scratch memory and read back."""
        found: dict[int, list[Value]] = {}
        for op in self.module.named("ttng.tensormap_create"):
            found.setdefault(id(op.operands[0]), []).append(op.operands[1])
        return found

    def _behind(self, address: Value) -> list[Value]:
        """What an address is computed from, through descriptors too."""
        found = behind(address, _READS)
        for value in list(found):
            for base in self.bases.get(id(value), ()):
                found += behind(base, _READS)
        return found

    def peer_visible(self, op: Op) -> bool:
        """Whether a memory operation's address is one that another rank may read or write during the kernel.

        It is if it was read from memory (a table of peers) or is computed from an argument that is named as shared.
        """
        if not op.operands:
            return False
        for value in self._behind(op.operands[0]):
            if value.label and any(
                value.label == name or value.label.startswith(name + ".") for name in self.shared
            ):
                return True
            cast = value.op if value.op is not None and value.op.name == "tt.int_to_ptr" else None
            if cast and any(v.op is not None and v.op.name in LOADS for v in self._behind(cast.operands[0])):
                return True
        return False

    def _atomic(self, op: Op) -> Atomic:
        words = re.findall(
            r"\w+", re.sub(r"%[\w.$-]+(#\d+)?", "", op.text.split(op.name, 1)[1].split(" : ")[0])
        )
        sem = next((w for w in words if w in ("relaxed", "acquire", "release", "acq_rel")), "relaxed")
        scope = next((w for w in words if w in ("gpu", "cta", "sys")), "gpu")
        if op.name == "tt.atomic_cas":
            kind = "lock"
        elif op.name in ("tt.atomic_load", "tt.atomic_poll"):
            kind = "poll"
        else:
            value = op.operands[1].op if len(op.operands) > 1 else None
            zero = value is not None and re.search(r"arith\.constant (dense<0>|0) :", value.text) is not None
            kind = "poll" if zero and words[0] in ("add", "or", "xor", "max", "umax") else "signal"
        return Atomic(op, kind, sem, scope, word=re.search(r" : \(!tt\.ptr<i(32|64)>", op.text) is not None)

    @cached_property
    def acquires(self) -> list[Op]:
        return [a.op for a in self.atomics if a.acquires and self.peer_visible(a.op)]

    def gated(self) -> list[Op]:
        """Loads of memory that a peer writes during the kernel."""
        return [op for op in self.loads if self.peer_visible(op)]

    def before(self, first: Op, then: Op) -> bool:
        return self.order[id(first)] < self.order[id(then)]

    def twin_ahead(self, load: Op, loop: Op) -> Op | None:
        """The same load of the source, issued once more ahead of the loop: what a pipeliner leaves there."""
        return next(
            (
                other
                for other in self.loads
                if other.frames == load.frames
                and other is not load
                and self.before(other, loop)
                and innermost_loop(other) is innermost_loop(loop)
            ),
            None,
        )


def innermost_loop(op: Op) -> Op | None:
    return next((outer for outer in op.enclosing() if outer.loop), None)


def loops_around(op: Op) -> list[Op]:
    """The loops that hold an operation, the innermost first."""
    return [outer for outer in op.enclosing() if outer.loop]


def holds(loop: Op, ops: Iterable[Op]) -> bool:
    return any(op.inside(loop) for op in ops)
