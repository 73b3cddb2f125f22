"""Tensor core instructions (mma, wgmma), and the loads and stores of their fragments.

Fragment layouts: PTX ISA 8.8, 9.7.14.5 (mma fragments), 9.7.14.5.15-16 (ldmatrix, stmatrix), 9.7.15.5 (wgmma:
fragments, layouts in shared memory, descriptors). With g = lane / 4, t = lane % 4 and e elements in 32 bits:

    A [16, 8e]   register hk * 2 + hm holds row g + 8 hm, columns from 4e hk + t e
    B [8e, 8]    register hk holds rows from 4e hk + t e, column g
    C [16, 8]    register 2 hm + j holds row g + 8 hm, column 2 t + j; if C is fp16, register hm holds both j

numpy sums the products in fp32, in its own order, and rounds once if C is fp16. Tensor cores sum in another order and
drop more bits. Integer products are exact.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..faults import Site
from .alu import Emitter, handles
from .numerics import ELEMENTS, elements, saturate
from .parse import Imm, Instruction, Operand, Reg, UnsupportedPtx
from .shared import READ

Lanes = Any  # program.Lanes; program.py imports this file
Array = np.ndarray[Any, Any]


# -- mma.sync ----------------------------------------------------------------------------------------------------------


# by type of the accumulator
FACTORS = {"f32": {"tf32", "bf16", "f16", "e4m3", "e5m2"}, "f16": {"f16"}, "s32": {"s8", "u8"}, "f64": {"f64"}}
Numbers = tuple[tuple[int, ...], ...]  # register numbers of D, A, B, C


def unpacked(words: Array, to: str) -> Array:
    """Accumulator registers [..., n, lanes] -> sums, fp32 or int32; fp16 registers hold two each."""
    if to != "f16":
        return words.view(np.float32 if to == "f32" else np.int32)
    return np.moveaxis(elements(words, "f16"), -1, -2).reshape(*words.shape[:-2], -1, words.shape[-1])


def packed(sums: Array, to: str) -> Array:
    """The inverse of `unpacked`."""
    if to != "f16":
        return np.ascontiguousarray(sums).view(np.uint32)
    halves = sums.astype(np.float16).reshape(*sums.shape[:-2], -1, 2, sums.shape[-1])
    return np.ascontiguousarray(np.moveaxis(halves, -2, -1)).view(np.uint32)[..., 0]


@handles("mma")
def _mma(e: Emitter, i: Instruction) -> list[str] | None:
    return products(e, [i])


def products(e: Emitter, run: list[Instruction]) -> list[str] | None:
    """Translates independent mma instructions of one kind into one numpy matmul."""
    first = run[0]
    if first.parts[1:3] != ("sync", "aligned") or not first.has("row") or first.has("sp", "block_scale"):
        return None
    shape, (to, a, b, c) = first.parts[3], first.parts[-4:]
    numbers = e.const([tuple(_numbers(e, x) for x in i.args[:4]) for i in run])
    sizes = "m8n8k4" if to == "f64" else r"m16n8k\d+"
    if not re.fullmatch(sizes, shape) or to != c or not {a, b} <= FACTORS.get(to, set()):
        return None
    to += ".sat" if first.has("satfinite") else ""
    return [f"S.mma({numbers}, {a!r}, {b!r}, {to!r}, {e.mask}, {e.const(first.site)})"]


def _numbers(e: Emitter, x: Operand) -> tuple[int, ...]:
    return tuple(each.number for each in e.items(x) if isinstance(each, Reg))


def _rows(registers: list[Array], numbers: tuple[int, ...]) -> Array:
    return np.stack([registers[x] for x in numbers])


def multiply(registers: list[Array], numbers: list[Numbers], a: str, b: str, to: str) -> list[Array]:
    """D of each product, uint32 [4 or 2, lanes]. registers: rows of uint32 [lanes].

    to   f32, f16, s32, or s32.sat, which saturates
    """
    lanes = len(registers[0])
    warps = lanes // 32
    as_, bs = (list(dict.fromkeys(n[operand] for n in numbers)) for operand in (1, 2))
    left = np.stack([_left(_rows(registers, group), a, warps) for group in as_])
    right = np.stack([_right(_rows(registers, group), b, warps) for group in bs])
    made = left[[as_.index(n[1]) for n in numbers]] @ right[[bs.index(n[2]) for n in numbers]]
    made = made.reshape(len(numbers), warps, 2, 8, 4, 2).transpose(0, 2, 5, 1, 3, 4).reshape(len(numbers), 4, lanes)
    sums = unpacked(np.stack([_rows(registers, n[3]) for n in numbers]), to)
    if to == "s32.sat":
        return list(packed(saturate(sums.astype(np.int64) + made, np.int32), to))
    return list(packed(sums + made, to))


def multiply_doubles(registers: list[Array], numbers: Numbers) -> Array:
    """D of one product of fp64, m8n8k4: [2, lanes]. registers: rows of float64.

    9.7.14.5.2: A [8, 4] has row g, column t; B [4, 8] row t, column g; C [8, 8] row g, columns 2t and 2t + 1.
    """
    _, (a,), (b,), c = numbers
    made = registers[a].reshape(-1, 8, 4) @ registers[b].reshape(-1, 8, 4).transpose(0, 2, 1)
    return _rows(registers, c) + made.reshape(-1, 2).T


def _left(words: Array, kind: str, warps: int) -> Array:
    """[registers, lanes] -> A of each warp [warps, 16, k]."""
    values = elements(words.reshape(-1, 2, warps, 8, 4), kind)  # hk, hm, warp, g, t, e
    return values.transpose(2, 1, 3, 0, 4, 5).reshape(warps, 16, -1)


def _right(words: Array, kind: str, warps: int) -> Array:
    """[registers, lanes] -> B of each warp [warps, k, 8]."""
    values = elements(words.reshape(-1, warps, 8, 4), kind)  # hk, warp, g, t, e
    return values.transpose(1, 0, 3, 4, 2).reshape(warps, -1, 8)


# -- ldmatrix, stmatrix ------------------------------------------------------------------------------------------------


@handles("ldmatrix", "stmatrix")
def _matrix(e: Emitter, i: Instruction) -> list[str] | None:
    at, registers = (i.args[1], i.args[0]) if i.root == "ldmatrix" else i.args[:2]
    rows = _numbers(e, registers)
    if not i.has("m8n8") or not i.has("b16") or not i.has(f"x{len(rows)}"):
        return None
    name = "load_matrix" if i.root == "ldmatrix" else "store_matrix"
    return [f"S.{name}({e.address(at)}, {e.const(rows)}, {i.has('trans')}, {e.mask}, {e.const(i.site)})"]


def matrix_places(at: Array, matrix: int, transposed: bool) -> list[Array]:
    """Byte addresses of each lane's two elements of an 8x8 matrix. at: addresses of its rows of 16 bytes, [lanes].

    Lane 8 * matrix + row of the warp provides a row's address. If not transposed, the two elements are adjacent.
    """
    lane = np.arange(len(at))
    g, t, first = (lane & 31) >> 2, lane & 3, lane & ~31
    if not transposed:
        return [at[first + 8 * matrix + g] + 4 * t + byte for byte in (0, 2)]
    return [at[first + 8 * matrix + 2 * t + each] + 2 * g for each in (0, 1)]


# -- wgmma -------------------------------------------------------------------------------------------------------------


@handles("wgmma")
def _wgmma(e: Emitter, i: Instruction) -> list[str] | None:
    what = i.parts[1]
    if what == "fence":
        return []
    if what == "commit_group":
        return ["S.products.commit()"]
    if what == "wait_group":
        (left,) = i.args
        assert isinstance(left, Imm)
        return [f"S.products.wait(S, {int(left.text, 0)})"]
    if what != "mma_async" or i.has("sp", "satfinite"):
        return None
    shape, to, a, b = i.parts[4:8]
    size = re.fullmatch(r"m64n(\d+)k\d+", shape)
    if size is None or not {a, b} <= FACTORS.get(to, set()):
        return None
    d, left, right, scale, *rest = i.args
    sign_a, sign_b, *flags = [int(x.text, 0) for x in rest if isinstance(x, Imm)] or [1, 1]
    transposed = (0, 0, *flags)[-2:]  # A in registers has no flag
    described = f"S.by_warp({e.read(left, 'b64')})" if isinstance(left, Reg) else "None"
    held = "None" if isinstance(left, Reg) else e.const(_numbers(e, left))
    made = (
        f"Product({size[1]}, {to!r}, {a!r}, {b!r}, {sign_a * sign_b}, {transposed}, {e.const(_numbers(e, d))}, {held}, "
        f"{described}, S.by_warp({e.read(right, 'b64')}), S.by_warp({e.read(scale, 'pred')}))"
    )
    return [f"S.products.issue(S, {made}, {e.mask}, {e.const(i.site)})"]


class Product(NamedTuple):
    """One wgmma. left: descriptors by warp, or None if A is in registers (`held`); scale: accumulate into D."""

    n: int
    to: str
    a: str
    b: str
    sign: int
    transposed: tuple[int, int]
    d: tuple[int, ...]
    held: tuple[int, ...] | None
    left: Array | None
    right: Array
    scale: Array

    def _operand(self, operand: int, descriptor: int) -> tuple[int, int, int, bool]:
        itemsize = np.dtype(ELEMENTS[self.a][0]).itemsize
        return descriptor, self.n if operand else 64, itemsize, bool(self.transposed[operand])

    def places(self, operand: int, descriptor: int) -> Array:
        """Places of A (operand 0) or B (1) in shared memory."""
        return operand_places(*self._operand(operand, descriptor))

    def cells(self, shift: int) -> list[Array]:
        """The cells, of 1 << shift bytes, of each operand of each warp: [1, n]."""
        given = [(1, d) for d in {*self.right.tolist()}]
        given += [(0, d) for d in {*self.left.tolist()}] if self.left is not None else []
        return [operand_cells(shift, *self._operand(*each)) for each in given]


PENDING = np.uint32(0x7FC0DEAD)  # a NaN: the contents of D until the wait


class Products:
    """The wgmmas that lanes have issued. Late ones read their operands and write D only at their wait."""

    def __init__(self, late: bool) -> None:
        self.late, self.group = late, 0
        self.issued: list[tuple[int, Product, Site]] = []
        self.sums: dict[tuple[int, ...], Array] = {}  # by D's registers

    def issue(self, lanes: Lanes, product: Product, mask: Any, site: Site) -> None:
        lanes.whole_warps(mask, "wgmma", site)
        if mask is not True:
            raise UnsupportedPtx(f"the PTX machine does not know wgmma by only some warps in lockstep, at {site}")
        for cells in product.cells(lanes.program.shadow.shift):
            lanes.program.shadow.touch_async(READ, cells, lanes.ids[:1], "wgmma", site)
        if product.d not in self.sums:
            self.sums[product.d] = unpacked(_rows(lanes.u, product.d), product.to)
            if self.late:
                for x in product.d:
                    lanes.u[x][:] = PENDING
        self.issued.append((self.group, product, site))
        if not self.late:
            self._run(lanes, len(self.issued))

    def commit(self) -> None:
        self.group += 1

    def wait(self, lanes: Lanes, left: int) -> None:
        self._run(lanes, sum(group < self.group - left for group, *_ in self.issued))

    def _run(self, lanes: Lanes, count: int) -> None:
        done, self.issued = self.issued[:count], self.issued[count:]
        shadow = lanes.program.shadow
        for _, product, site in done:
            self._multiply(lanes, product)
            for cells in product.cells(shadow.shift):
                shadow.note(READ, cells, lanes.ids[::32], "wgmma", site, unfenced=False)
        for d, to in {product.d: product.to for _, product, _ in done}.items():
            if all(product.d != d for _, product, _ in self.issued):
                for x, made in zip(d, packed(self.sums.pop(d), to), strict=True):
                    lanes.u[x][:] = made

    def _multiply(self, lanes: Lanes, product: Product) -> None:
        n, total, warps = product.n, self.sums[product.d], len(product.right)
        lefts = [0] * warps if product.left is None else product.left.tolist()
        keys = [*zip(product.right.tolist(), lefts, product.scale.tolist(), strict=True)]
        for key in dict.fromkeys(keys):
            own = [w for w in range(warps) if keys[w] == key]
            right, left, scale = key
            b = shared_elements(lanes.shared, product.places(1, right), product.b)
            if product.held is not None:
                a = _left(_rows(lanes.u, product.held), product.a, warps)[own]
            else:
                a = shared_elements(lanes.shared, product.places(0, left), product.a).reshape(4, 16, -1)
                a = a[[(lanes.first // 32 + w) % 4 for w in own]]
            made = a @ b.T * total.dtype.type(product.sign)
            made = made.reshape(len(own), 2, 8, n // 8, 4, 2).transpose(3, 1, 5, 0, 2, 4).reshape(n // 2, len(own), 32)
            sums = total.reshape(n // 2, warps, 32)
            sums[:, own] = made + (sums[:, own] if scale else 0)


def shared_elements(shared: Array, places: Array, kind: str) -> Array:
    """Decodes elements in shared memory at these places to fp32 (or int32)."""
    word, decoded = ELEMENTS[kind]
    return decoded(shared.view(word)[places // np.dtype(word).itemsize])


SWIZZLES = {0: (16, 0), 1: (128, 7), 2: (64, 3), 3: (32, 1)}  # bytes per row of the pattern, and the mask of its bits


def swizzled(places: Array, mask: int) -> Array:
    """Swizzles a place in shared memory: XORs bits 4 and up with bits 7 and up. PTX ISA 5.5.7."""
    return places ^ (((places >> 7) & mask) << 4)


@lru_cache(maxsize=4096)
def operand_cells(shift: int, *operand: Any) -> Array:
    return np.unique(operand_places(*operand) >> shift)[None]


@lru_cache(maxsize=4096)
def operand_places(descriptor: int, rows: int, itemsize: int, transposed: bool) -> Array:
    """Places in shared memory of an operand's elements [rows, k]; rows are the rows of A or the columns of B.

    The canonical layouts of PTX ISA 9.7.15.5.1, in units of 16 bytes, with u units per row of the swizzle:

        K-major    row r, unit c of k:   (r % 8) u + (r / 8) SBO + c
        MN-major   unit c of rows, k:    c % u + (c / u) LBO + (k % 8) u + (k / 8) SBO
    """
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    width, mask = SWIZZLES[descriptor >> 62 & 3]
    r, c = np.arange(rows)[:, None], np.arange(32 // itemsize)[None, :]
    if not transposed:
        within = c * itemsize
        at = r // 8 * stride + r % 8 * width
        at = at + (within // 16 * leading + within % 16 if mask == 0 else within)
    else:
        unit, inside, units = r * itemsize // 16, r * itemsize % 16, width // 16
        if mask == 0:
            at = unit * stride + c % 8 * 16 + c // 8 * leading + inside
        else:
            at = unit % units * 16 + unit // units * leading + c % 8 * width + c // 8 * stride + inside
    return swizzled(start + at, mask)
