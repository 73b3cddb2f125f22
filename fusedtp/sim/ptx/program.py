"""A program of a kernel: its lanes with their registers, its shared memory, and its barriers.

    lockstep       all lanes of a program are one vector: an instruction is one call of numpy
    warp by warp   each warp is a vector, and a random one runs next: this exposes missing barriers

Lanes that diverge at a branch form groups. The group that is furthest behind runs next; groups at the same place merge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from ..faults import Site
from .access import CONSTANT, LOCALLY, SHARED, is_shared, updated
from .alu import TYPES, VIEWS
from .clocks import Clock
from .copies import ALL, POISON, Barrier, BulkCopies, Copies, TensorLoad
from .descriptors import NBYTES, TensorMap, misaligned, of_bytes
from .kernel import Kernel
from .memory import UNSIGNED, WIDEST, Window, rows_of_words
from .numerics import REDUCTIONS
from .parse import CONSTANTS, LOCAL, Imm, Instruction, UnsupportedPtx
from .shared import READ, WRITE, SharedShadow
from .tensor_core import Products, matrix_places, multiply, multiply_doubles

Array = np.ndarray[Any, Any]
PARAMETERS = 0xF0000000  # address of the first parameter, for kernels that take its address
MOST_INSTRUCTIONS = 2_000_000  # of a program in one turn
LOOP = 1000  # blocks to run in order to find the loop's body
POLLS = 4  # polls in vain; one more than machine.PATIENCE
CLOCKS: dict[str, Any] = dict(globaltimer=np.uint64, globaltimer_lo=np.uint32, clock64=np.uint64, clock=np.uint32)


@dataclass(eq=False)
class Group:
    """Lanes at one place. barrier: the barrier where they wait, or None."""

    at: int
    mask: Array
    size: int  # lanes in it
    barrier: int | None = None
    expected: int = 0


class Lanes:
    """Lanes that run as one vector. first, count: threads of the program."""

    def __init__(self, program: Program, first: int, count: int) -> None:
        self.program, self.first, self.count, self.window = program, first, count, program.window
        listing = program.kernel.listing
        self.windows = bool(listing.local or listing.constants)  # whether generic addresses may refer to them
        words = {w: np.zeros((listing.registers.get(w, 0), count), f"u{w // 8}") for w in (16, 32, 64)}
        words[8] = np.zeros((listing.registers.get(1, 0), count), np.uint8)  # predicates
        # by letter of alu.VIEWS: the registers, one row each
        self.views = {view: list(words[8 * dtype.itemsize].view(dtype)) for view, dtype in VIEWS.items()}
        self.blocks, self.u, self.p = program.kernel.blocks, self.views["u"], self.views["p"]
        self.every = np.arange(count)
        self.ids = first + self.every
        self.groups = [Group(0, np.ones(count, bool), count)]
        self.copies, self.bulk, self.products = Copies(count), BulkCopies(count), Products(program.window.line.weak)
        self.shared = program.shared
        self.carry = np.zeros(count, bool)  # CC.CF: PTX ISA 9.7.2

    # -- control -----------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return None in [group.barrier for group in self.groups]

    @property
    def pauses(self) -> bool:
        """Whether the next block of some lanes may observe other programs."""
        return True in [self.blocks[group.at].pauses for group in self.groups if group.barrier is None]

    def run(self, most: int) -> bool:
        """Run ready groups until the program has executed `most` instructions. Returns whether it must pause first."""
        program, blocks, groups = self.program, self.blocks, self.groups
        while program.executed < most:
            group = groups[0] if len(groups) == 1 else self._behind()
            if group is None or group.barrier is not None:
                return False
            block = blocks[group.at]
            program.site = block.site
            if group.size == self.count:
                block.run(self)
            else:
                program.kernel.masked[group.at](self, group.mask)
            program.executed += block.count
            end = block.end
            if end is None:
                group.at += 1
            elif block.jumps:
                self._jump(group, end, block.target)
            else:
                self._arrive(group, end)
            if group.at >= len(blocks) and group in groups:
                groups.remove(group)
            if self.pauses:
                return True
        return False

    def _behind(self) -> Group | None:
        """The group to run next, merged with others at its place: the one furthest behind. If it has polled in vain
        for long, each group gets a turn, because threads of a warp make progress independently."""
        places: dict[int, Group] = {}
        for other in [g for g in self.groups if g.barrier is None]:
            group = places.setdefault(other.at, other)
            if group is not other:
                group.mask, group.size = group.mask | other.mask, group.size + other.size
                self.groups.remove(other)
        order = sorted(places)
        turn = self.window.vain // POLLS if order and self.blocks[order[0]].pauses else 0
        return places[order[turn % len(order)]] if order else None

    def _jump(self, group: Group, end: Instruction, target: int) -> None:
        taken, count, leaves = group.mask, group.size, end.root != "bra"
        if end.guard is not None:
            taken = group.mask & (self.p[end.guard.number] ^ end.negated)
            count = int(np.count_nonzero(taken))
        if count == group.size:
            if leaves:
                self.groups.remove(group)
            else:
                group.at = target
            return
        group.at += 1
        if count:
            group.mask, group.size = group.mask & ~taken, group.size - count
            if not leaves:
                self.groups.append(Group(target, taken, count))

    def _arrive(self, group: Group, end: Instruction) -> None:
        """A group arrives at a barrier; registers may hold its number and thread count. bar.arrive does not wait."""
        if end.guard is not None or end.has("red", "cluster"):
            raise end.unsupported("a barrier that is guarded, reduces, or is for a cluster")
        group.at += 1
        values = [int(x.text, 0) if isinstance(x, Imm) else self._uniform(end, x) for x in end.args]
        number, expected = values[0], values[1] if len(values) > 1 else self.program.threads
        if end.has("arrive"):
            clock = self.window.known.together(self.ids[group.mask])
            self.program.arrivals.setdefault(number, []).append((group.size, clock))
        else:
            group.barrier, group.expected = number, expected

    def _uniform(self, end: Instruction, x: Any) -> int:
        values = self.u[x.number]
        if (values != values[0]).any():
            raise end.unsupported("a barrier whose number differs between threads")
        return int(values[0])

    def whole_warps(self, mask: Any, what: str, site: Site) -> None:
        """Raises if a warp has diverged at an instruction that requires whole warps."""
        if mask is not True:
            by_warp = mask.reshape(-1, 32)
            if (by_warp.any(1) != by_warp.all(1)).any():
                raise UnsupportedPtx(f"the PTX machine does not know {what} in a diverged warp, at {site}")

    def chosen(self, mask: Any) -> Array:
        """The indices of the active lanes."""
        return self.every if mask is True else np.flatnonzero(mask)

    @staticmethod
    def part(value: Array, mask: Any) -> Array:
        """The values of the active lanes."""
        return value if mask is True else value[mask]

    # -- values ------------------------------------------------------------------------------------------------------

    def warps(self, value: Any) -> Array:
        """[warps, 32]"""
        return np.broadcast_to(value, (self.count,)).reshape(-1, 32)

    def by_warp(self, value: Any) -> Array:
        return self.warps(value)[:, 0].copy()

    def special(self, name: str) -> Any:
        """PTX ISA 8.8, section 10. Clocks count instructions: short pauses end, but waits of seconds never time out."""
        if name in self._fixed:
            return self._fixed[name]
        if name in CLOCKS:
            return CLOCKS[name](self.program.executed)
        raise UnsupportedPtx(f"the PTX machine does not know %{name}, at {self.program.site}")

    @cached_property
    def _fixed(self) -> dict[str, Any]:
        program, lane = self.program, self.ids & 31
        fixed: dict[str, Any] = dict(zip(("ctaid.x", "ctaid.y", "ctaid.z"), program.index, strict=True))
        fixed |= dict(zip(("nctaid.x", "nctaid.y", "nctaid.z"), program.grid, strict=True))
        fixed |= {"ntid.x": program.threads, "clusterid.x": program.index[0]}
        zero = ("tid.y", "tid.z", "cluster_ctaid.x", "cluster_ctarank", "globaltimer_hi", "clock_hi", "smid")
        one = ("ntid.y", "ntid.z", "cluster_nctaid.x", "cluster_nctarank", "nsmid")
        fixed |= dict.fromkeys(zero, 0) | dict.fromkeys(one, 1)
        fixed |= {"tid.x": self.ids, "laneid": lane, "warpid": self.ids >> 5}
        fixed |= {"lanemask_lt": (1 << lane) - 1, "lanemask_le": (2 << lane) - 1, "lanemask_eq": 1 << lane}
        fixed |= {"lanemask_ge": -1 << lane, "lanemask_gt": -2 << lane}
        return {name: np.uint32(value & 0xFFFFFFFF) for name, value in fixed.items()}

    def parameter(self, name: str, offset: int, dtype: Any) -> Any:
        value = self.program.parameters[name]
        size = np.dtype(dtype).itemsize
        assert isinstance(value, int)
        return np.array((value >> 8 * offset) & ((1 << 8 * size) - 1), f"u{size}").view(dtype)[()]

    def parameter_address(self, name: str) -> int:
        return PARAMETERS + list(self.program.parameters).index(name)

    def chosen_parameter(self, at: Array, mask: Any, dtype: Any) -> Array:
        """The parameters at addresses that the lanes computed."""
        names = list(self.program.parameters)
        found = np.zeros(self.count, dtype)
        for lane in self.chosen(mask).tolist():
            number = int(at[lane]) - PARAMETERS
            if not 0 <= number < len(names):
                raise UnsupportedPtx(f"a parameter is read in part, by address, at {self.program.site}")
            found[lane] = self.parameter(names[number], 0, dtype)
        return found

    # -- memory ------------------------------------------------------------------------------------------------------

    def load(self, memory: str, at: Array, nb: int, count: int, mask: Any, order: str, scope: str, site: Site) -> Array:
        memory, at = self._placed(memory, at, mask, site)
        if not memory:
            return self.window.load(at, nb, count, self.part(self.ids, mask), order, scope, site)
        rows = self._rows_at(memory, at, nb * count, mask, site)
        if memory == SHARED:
            self.program.shadow.touch(READ, at, nb * count, self.part(self.ids, mask), "load", site, order != "weak")
        return self._rows[memory][nb, count][rows]

    def store(
        self, memory: str, at: Array, values: Sequence[Any], nb: int, mask: Any, order: str, scope: str, site: Site
    ) -> None:
        memory, at = self._placed(memory, at, mask, site)
        words, threads = self.words(values, nb, mask), self.part(self.ids, mask)
        if not memory:
            self.window.store(at, words, threads, order, scope, site)
            return
        if memory == CONSTANT:
            raise self.window.fault("out of bounds", "a store to constant memory", "store", site, memory)
        view, rows = self._rows[memory][nb, len(values)], self._rows_at(memory, at, nb * len(values), mask, site)
        if memory == SHARED:
            how = "store", site, order != "weak", lambda: (view[rows] == words).all(1, keepdims=True)
            self.program.shadow.touch(WRITE, at, nb * len(values), threads, *how)
        view[rows] = words

    def _placed(self, memory: str, at: Array, mask: Any, site: Site) -> tuple[str, Array]:
        """The memory of generic addresses, the same for all lanes ("" for global memory), and the addresses in it."""
        at = self.part(at, mask)
        if not memory and self.windows:
            high = at >> 56
            kinds = {LOCAL >> 56: LOCALLY, CONSTANTS >> 56: CONSTANT}
            if np.isin(high, [*kinds]).any() and (high != high[0]).any():
                raise UnsupportedPtx(f"one access has generic addresses of several kinds of memory, at {site}")
            memory = kinds.get(int(high[0]), "")
        return memory, at & 0xFFFFFFFF if memory in (LOCALLY, CONSTANT) else at

    @cached_property
    def _rows(self) -> dict[str, dict[tuple[int, int], Array]]:
        """Each memory as rows of words. Local memory holds all lanes one after another, each padded to WIDEST bytes."""
        listing = self.program.kernel.listing
        local = np.full(self.count * (-(-listing.local // WIDEST) * WIDEST // 8), POISON).view(np.uint8)
        constants = np.frombuffer(listing.constants + bytes(-len(listing.constants) % WIDEST), np.uint8)
        held = {SHARED: self.shared, LOCALLY: local, CONSTANT: constants}
        return {memory: rows_of_words(each) for memory, each in held.items()}

    def _rows_at(self, memory: str, at: Array, nbytes: int, mask: Any, site: Site) -> Array:
        """The row of nbytes bytes that each lane accesses."""
        rows = self.program.rows_at(at, nbytes, site, memory)
        if memory == LOCALLY:
            rows = rows + self.chosen(mask) * (-(-self.program.kernel.listing.local // WIDEST) * WIDEST // nbytes)
        return rows

    def words(self, values: Sequence[Any], nb: int, mask: Any) -> Array:
        words = np.empty((self.count if mask is True else int(mask.sum()), len(values)), UNSIGNED[nb])
        for n, value in enumerate(values):
            words[:, n] = value if mask is True or not value.ndim else value[mask]
        return words

    def atomic(self, operation: str, t: str, at: Array, values: Sequence[Any], mask: Any, *how: Any) -> Array:
        order, scope, site, returns, reads = how
        places, threads, what = self.part(at, mask), self.part(self.ids, mask), f"atomic_{operation}"
        if t.endswith("x2"):  # two operations, one on each half: PTX ISA 8.2.3
            self.window.places(places, 4, what, site)  # aligned as a whole
            both = [(values[0] >> 16 * n).astype(np.uint16).view(TYPES[t[:-2]][1]) for n in (0, 1)]
            low, high = (self.atomic(operation, t[:-2], at + 2 * n, [x], mask, *how) for n, x in enumerate(both))
            return low | high.astype(np.uint32) << 16
        new, dtype = updated(operation, t, [self.part(np.broadcast_to(x, self.count), mask) for x in values])
        old = self.window.atomic(places, threads, new, dtype, order, scope, site, what, returns, reads=reads)
        return old.view(UNSIGNED[dtype.itemsize])

    def fence(self, mask: Any, order: str, scope: str) -> None:
        self.window.known.fence(self.part(self.ids, mask), order, scope)

    def fence_proxy(self, mask: Any, proxy: int) -> None:
        self.window.known.fence_proxy(self.part(self.ids, mask), proxy)

    def publish_map(self, to: Array, of: Array, mask: Any, scope: str, site: Site) -> None:
        """Copy a descriptor to global memory, one word per thread of a warp, then release."""
        self.whole_warps(mask, "tensormap.cp_fenceproxy", site)
        threads, to, of = (self.part(x, mask) for x in (self.ids, to, of))
        place = NBYTES // 32 * (threads & 31)
        words = self.program.shared_rows[4, 1][self.program.rows_at(of + place, 4, site)]
        self.window.store(to + place, words, threads, "weak", "", site)
        self.window.known.fence(threads, "release", scope)
        self.meet_warps(mask)

    def acquire_map(self, at: Array, mask: Any, scope: str, site: Site) -> None:
        """Later tensor copies of the program may use the descriptor with its current contents."""
        self.window.known.fence(self.part(self.ids, mask), "acquire", scope)
        for address in np.unique(self.part(at, mask)).tolist():
            places, _ = self.window.places(address + np.arange(0, NBYTES, 4), 4, "fence", site)
            self.program.descriptors[address] = self.window.line.newest(places, 4).tobytes()

    def fence_shared(self, mask: Any) -> None:
        self.program.shadow.fence(self.part(self.ids, mask))

    def meet_warps(self, mask: Any) -> None:
        threads = self.part(self.ids, mask)
        for warp in np.unique(threads // 32).tolist():
            self.window.known.meet(threads[threads // 32 == warp])
        self.program.shadow.meet()

    def atomic_shared(self, operation: str, t: str, at: Array, values: Sequence[Any], mask: Any, site: Site) -> Array:
        new, dtype = updated(operation, t, [self.part(np.broadcast_to(x, self.count), mask) for x in values])
        at, threads = self.part(at, mask), self.part(self.ids, mask)
        places = self.program.rows_at(at, dtype.itemsize, site)
        view = self.program.shared.view(dtype)
        old = np.empty(len(places), dtype)
        for number, place in enumerate(places.tolist()):
            old[number] = view[place]
            made = new(number, old[number])
            view[place] = old[number] if made is None else made
        self.program.shadow.touch(WRITE, at, dtype.itemsize, threads, "atomic", site, True)
        return old.view(UNSIGNED[dtype.itemsize])

    def load_matrix(self, at: Array, rows: list[int], transposed: bool, mask: Any, site: Site) -> None:
        self.whole_warps(mask, "ldmatrix", site)
        halves = np.array([matrix_places(at, matrix, transposed) for matrix in range(len(rows))])
        halves = halves if mask is True else halves[..., mask]
        places = self.program.rows_at(halves, 2, site)
        threads = np.broadcast_to(self.part(self.ids, mask), halves.shape).reshape(-1)
        self.program.shadow.touch(READ, halves.reshape(-1), 2, threads, "ldmatrix", site)
        low, high = self.program.shared.view(np.uint16)[places].astype(np.uint32).swapaxes(0, 1)
        for row, words in zip(rows, low | (high << np.uint32(16)), strict=True):
            self.u[row][... if mask is True else mask] = words

    def store_matrix(self, at: Array, rows: list[int], transposed: bool, mask: Any, site: Site) -> None:
        self.whole_warps(mask, "stmatrix", site)
        for matrix, row in enumerate(rows):
            for half, places in enumerate(matrix_places(at, matrix, transposed)):
                words = (self.u[row] >> np.uint32(16 * half)).astype(np.uint16)
                self.store(SHARED, places, [words], 2, mask, "weak", "", site)

    def mma(self, numbers: Any, a: str, b: str, to: str, mask: Any, site: Site) -> None:
        self.whole_warps(mask, "mma", site)
        registers = self.views["F" if to == "f64" else "u"]
        if to == "f64":
            products = [multiply_doubles(registers, number) for number in numbers]
        else:
            products = multiply(registers, numbers, a, b, to)
        for number, made in zip(numbers, products, strict=True):
            for row, words in zip(number[0], made, strict=True):
                np.copyto(registers[row], words, where=mask)

    # -- mbarriers ---------------------------------------------------------------------------------------------------

    def mbarrier_init(self, at: Array, count: Any, mask: Any) -> None:
        lane = self.chosen(mask)[0]
        number = int(np.broadcast_to(count, (self.count,))[lane])
        self.program.barriers[int(at[lane])] = Barrier(number, number)

    def mbarrier_inval(self, at: Array, mask: Any) -> None:
        self.program.barriers.pop(int(at[self.chosen(mask)[0]]), None)

    def mbarrier_arrive(self, at: Array, arrivals: Any, nbytes: Any, mask: Any, site: Site) -> None:
        arrivals, nbytes = (np.broadcast_to(x, (self.count,)) for x in (arrivals, nbytes))
        for lane in self.chosen(mask).tolist():
            barrier = self.program.barrier_at(int(at[lane]), site)
            clock = self.window.known.clock(self.first + lane) if arrivals[lane] else None
            barrier.count_down(clock, int(arrivals[lane]), int(nbytes[lane]))
            if not nbytes[lane]:  # otherwise it expects the bytes of a TMA copy
                self.program.shadow.meet()
        self.window.vain = 0

    def mbarrier_wait(self, at: Array, parity: Any, mask: Any, site: Site) -> Array:
        """Whether the phase of this parity (its lowest bit) is over. Late tensor loads land only here."""
        done, parity = np.zeros(self.count, bool), np.broadcast_to(parity & 1, (self.count,))
        for place, wanted in {(int(at[lane]), int(parity[lane])) for lane in self.chosen(mask)}:
            barrier = self.program.barrier_at(place, site)
            if barrier.phase == wanted:
                self.program.land_load(place)
            through = (at == place) & (parity == wanted) & (barrier.phase != wanted)
            threads = self.ids[through if mask is True else through & mask]
            if barrier.over is not None and len(threads):
                self.window.known.join(threads, barrier.over)
            done |= through
        if not done[self.chosen(mask)].all():
            self.window.vain += 1
        return done

    # -- lanes of a warp ---------------------------------------------------------------------------------------------

    def shuffle(self, kind: str, value: Any, by: Any, clamp: Any) -> tuple[Array, Array]:
        """PTX ISA 9.7.9.6, with its names: the value of lane j, or the lane's own value if j is out of range."""
        value, by, clamp = (np.broadcast_to(x, (self.count,)) for x in (value, by, clamp))
        lane = self.ids & 31
        b, c, segment = (by & 31).astype(int), (clamp & 31).astype(int), ((clamp >> 8) & 31).astype(int)
        most, least = (lane & segment) | (c & ~segment), lane & segment
        j = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": least | (b & ~segment)}[kind]
        inside = j >= most if kind == "up" else j <= most
        return value[np.arange(self.count) - lane + np.where(inside, j, lane)], inside

    def vote(self, kind: str, predicate: Any, mask: Any) -> Array:
        active = self.warps(mask)
        true = self.warps(predicate) & active
        if kind == "ballot":
            return np.repeat(_bits(true), 32)
        every, some = (true | ~active).all(1), true.any(1)
        return np.repeat({"all": every, "any": some, "uni": every | ~some}[kind], 32)

    def reduce(self, operation: str, value: Any, mask: Any) -> Array:
        value, active = self.warps(value), self.warps(mask)
        made = np.zeros(len(value), value.dtype)
        for warp in np.flatnonzero(active.any(1)):
            made[warp] = REDUCTIONS[operation].reduce(value[warp, active[warp]], dtype=value.dtype)
        return np.repeat(made, 32)

    def match(self, kind: str, value: Any, mask: Any) -> tuple[Array, Array]:
        value, active = self.warps(value), self.warps(mask)
        same = (value[:, :, None] == value[:, None, :]) & active[:, None, :]
        alike = (same | ~active[:, None, :]).all(2).reshape(-1)
        if kind == "all":
            same = active[:, None, :] & alike.reshape(-1, 32, 1)
        return _bits(same).reshape(-1), alike

    def elect(self, mask: Any) -> tuple[Array, Array]:
        leader = np.repeat(self.warps(mask).argmax(1), 32).astype(np.uint32)
        return leader, (self.ids & 31) == leader

    def trap(self, site: Site, said: str = "trap") -> None:
        raise self.window.fault("assertion", said, "trap", site)


def _bits(flags: Array) -> Array:
    """Flags of 32 lanes [..., 32] as the bits of a uint32."""
    return (flags * (1 << np.arange(32, dtype=np.uint64))).sum(-1).astype(np.uint32)


class Program:
    """One program of a launch.

    parameters   by name: the bits of a parameter as an integer, or a TensorMap
    lockstep     run all lanes as one vector; otherwise warp by warp
    """

    def __init__(
        self, kernel: Kernel, window: Window, index: tuple[int, int, int], grid: tuple[int, int, int],
        parameters: dict[str, int | TensorMap], *, lockstep: bool,
    ) -> None:  # fmt: skip
        self.kernel, self.window, self.index, self.grid, self.parameters = kernel, window, index, grid, parameters
        self.rng, self.threads = window.line.rng, kernel.listing.threads
        state = self.rng.getstate()[1]  # only read: a draw would change the order of turns
        self.salt = hash((state[0], state[-1], index)) & 0xFFFFFFFF
        self.shared = np.full(-(-kernel.listing.shared // WIDEST) * WIDEST // 8, POISON).view(np.uint8)
        self.shared_rows = rows_of_words(self.shared)
        self.shadow = SharedShadow(window, len(self.shared), self.threads, kernel.grain)
        self.barriers: dict[int, Barrier] = {}
        self.descriptors: dict[int, bytes] = {}  # by address: contents that a fence has made visible to copies
        self.arrivals: dict[int, list[tuple[int, Clock]]] = {}  # by barrier: threads that do not wait, and their clock
        self.loads: list[TensorLoad] = []
        self.executed = 0
        self.site = kernel.blocks[0].site
        width = self.threads if lockstep and not kernel.specialized else 32
        self.vectors = [Lanes(self, first, width) for first in range(0, self.threads, width)]
        window.by_warp = len(self.vectors) > 1

    @property
    def ended(self) -> bool:
        return not any(vector.groups for vector in self.vectors)

    def turn(self) -> None:
        """Run until the next instruction may observe other programs, or to the end."""
        most = self.executed + MOST_INSTRUCTIONS
        while self.executed < most:
            ready = [vector for vector in self.vectors if vector.ready]
            if not ready and self.ended:
                self._finish()
                return
            if (not ready or self.kernel.specialized) and self._meet(everyone=not ready):
                if any(vector.pauses for vector in self.vectors):
                    return
                continue
            vector = ready[0] if len(ready) == 1 else self.rng.choice(ready)
            if vector.run(most):
                return
        said = f"no progress at {self.site} after {MOST_INSTRUCTIONS} steps without an atomic"
        raise self.window.fault("no progress", said, "loops", self.site, cause=self._loop(vector))

    def _loop(self, vector: Lanes) -> str:
        """Describes the loads of a loop without an atomic."""
        seen: set[int] = set()
        for _ in range(LOOP):
            if not vector.ready:
                break
            seen |= {group.at for group in vector.groups}
            if vector.run(self.executed + 1):
                break  # the next block may observe other programs
        body = [i for at in sorted(seen) for i in self.kernel.bodies[at]]
        loads = [i for i in body if i.root == "ld" and not is_shared(i) and not i.has("local", "param")]
        if not loads:
            return "the loop has no load: it is just long, or the compiler moved a plain load that it polls out of it"
        polls = f"the loop has a plain load at {loads[0].site}"
        return f"{polls}: if it polls, it may never see a new value, and the compiler may move it out of the loop"

    def _finish(self) -> None:
        for vector in self.vectors:
            vector.copies.wait(vector, ALL, True)
            vector.bulk.wait(vector, ALL, True, reads=False)
        self.vectors = []  # frees the registers; reference cycles would keep them until garbage collection

    def _meet(self, everyone: bool) -> bool:
        """Release the groups at complete barriers; returns whether any was. everyone: all lanes wait or have ended."""
        alive = [(vector, group) for vector in self.vectors for group in vector.groups]
        gone = self.threads - sum(group.size for _, group in alive)
        waiting = list(dict.fromkeys(group.barrier for _, group in alive if group.barrier is not None))
        met = False
        for number in waiting:
            groups, arrivals = [each for each in alive if each[1].barrier == number], self.arrivals.get(number, [])
            arrived, expected = sum(size for size, _ in arrivals), groups[0][1].expected
            count = arrived + sum(group.size for _, group in groups)
            if count < expected - (gone if expected == self.threads else 0):
                continue
            met = True
            if count > expected:
                groups = self._first_come(groups, expected - arrived)
            threads = np.concatenate([vector.ids[group.mask] for vector, group in groups])
            self.window.known.meet(threads, [clock for _, clock in arrivals])
            self.arrivals.pop(number, None)
            self.shadow.meet(everyone=len(threads) == self.threads)
            for _, group in groups:
                group.barrier = None
        if everyone and not met:
            raise self.window.fault("deadlock", f"threads wait at barriers {sorted(waiting)}", "waits", self.site)
        return met

    def _first_come(self, groups: list[tuple[Lanes, Group]], count: int) -> list[tuple[Lanes, Group]]:
        """More threads wait than a barrier expects: release that many, warps in random order; the rest keep waiting."""
        warps = sorted({int(warp) for v, g in groups for warp in v.ids[g.mask] >> 5})
        self.rng.shuffle(warps)
        passing: list[tuple[Lanes, Group]] = []
        for warp, (vector, group) in product(warps, groups):
            mask = group.mask & (vector.ids >> 5 == warp)
            size = int(np.count_nonzero(mask))
            if count > 0 and size:
                count -= size
                group.mask, group.size = group.mask & ~mask, group.size - size
                part = Group(group.at, mask, size, group.barrier, group.expected)
                vector.groups.append(part)
                passing.append((vector, part))
        for vector, group in groups:
            if not group.size:
                vector.groups.remove(group)
        return passing

    # -- what lanes share --------------------------------------------------------------------------------------------

    def rows_at(self, at: Array, nbytes: int, site: Site, memory: str = SHARED, what: str = "access") -> Array:
        """The rows of nbytes bytes at addresses of a memory. Local memory: addresses of one lane."""
        listing = self.kernel.listing
        size = {SHARED: listing.shared, LOCALLY: listing.local, CONSTANT: len(listing.constants)}[memory]
        bits = int(np.bitwise_or.reduce(at, None))
        far = bits < 0 or bits + nbytes > size  # a cheap upper bound: no address exceeds the union of all bits
        if far and (int(at.min()) < 0 or int(at.max()) + nbytes > size):
            wrong = int(at.min()) if int(at.min()) < 0 else int(at.max())
            raise self.window.fault("out of bounds", f"{memory} has {size} bytes", what, site, memory, (wrong,))
        if bits & (nbytes - 1):
            wrong = int(at[at & (nbytes - 1) != 0][0])
            said = f"an access of {nbytes} bytes to {memory}"
            raise self.window.fault("misaligned", said, what, site, memory, (wrong,))
        return at >> (nbytes.bit_length() - 1)

    def write_shared(self, at: Array, words: Array | np.uint64, size: int, site: Site) -> None:
        """Write words, `size` bytes at each of [n] addresses, of any dtype; or one 8-byte word, truncated, to all."""
        rows = self.rows_at(at, size, site, what="copy")
        whole = self.shared_rows[min(size, 8), max(size // 8, 1)]
        whole[rows] = words if isinstance(words, np.uint64) else words.view(whole.dtype)

    def tensor_map(self, address: int, thread: int, site: Site) -> TensorMap:
        """The descriptor at an address: an argument, or one that the kernel has written."""
        number = address - PARAMETERS
        if 0 <= number < len(self.parameters):
            found = list(self.parameters.values())[number]
            if not isinstance(found, TensorMap):
                raise UnsupportedPtx(f"a tensor copy uses an argument that is not a descriptor, at {site}")
            return found
        at = address + np.arange(0, NBYTES, 4)
        words = self.window.load(at, 4, 1, np.full(len(at), thread), "weak", "", site)
        if self.descriptors.get(address) != words.tobytes():
            said = "a copy uses a descriptor that threads wrote, with no fence.proxy.tensormap in between"
            raise self.window.fault("missing proxy fence", said, "tensor copy", site)
        if wrong := misaligned(words):
            said = f"{wrong} of a tensor descriptor is not a multiple of 16"
            raise self.window.fault("misaligned", said, "tensor copy", site)
        return of_bytes(words)

    def barrier_at(self, place: int, site: Site) -> Barrier:
        if place not in self.barriers:
            raise self.window.fault("assertion", "uninitialized mbarrier", "mbarrier", site, SHARED, (place,))
        return self.barriers[place]

    def land_load(self, barrier: int) -> None:
        """Land one random tensor load of this mbarrier."""
        mine = [load for load in self.loads if load.barrier == barrier]
        if mine:
            load = self.rng.choice(mine)
            self.loads.remove(load)
            load.land(self)
            self.window.vain = 0
