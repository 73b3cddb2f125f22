"""Tensor descriptors of tensor copies (TMA), made by the host or by a kernel.

PTX ISA 8.8: 5.5 (tensors, swizzling), 9.7.9.27 (tensormap.replace), 9.7.13.16 (tensormap.cp_fenceproxy), 9.7.13.4
(fence.proxy.tensormap).

A kernel sets the fields of a descriptor in shared memory, copies it to global memory, and makes it visible to tensor
copies with a fence. The hardware's layout of the 128 bytes is not documented; the machine uses FIELDS.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .access import SHARED, scope_of
from .alu import Emitter, handles, size_of
from .parse import Imm, Instruction, UnsupportedPtx
from .tensor_core import swizzled

Array = np.ndarray[Any, Any]
NBYTES = 128
FIELDS: Any = np.dtype(
    [
        ("global_address", "u8"), ("global_stride", "u8", 4), ("global_dim", "u4", 5), ("box_dim", "u4", 5),
        ("element_stride", "u4", 5), ("rank", "u4"), ("elemtype", "u4"), ("interleave_layout", "u4"),
        ("swizzle_mode", "u4"), ("fill_mode", "u4"), ("rest", "u4", 2),
    ]
)  # fmt: skip
ELEMENTS = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f32", "f64", "bf16", "f32", "f32")


@dataclass(frozen=True)
class TensorMap:
    """A decoded descriptor: a tensor in memory, and the box that a copy moves. Outermost first, in elements."""

    base: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    type: str  # PTX type of an element
    swizzle: int  # 0: none; 1, 2, 3: rows of 32, 64, 128 bytes in shared memory

    @property
    def itemsize(self) -> int:
        return size_of(self.type)

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.box)) * self.itemsize

    def places(self, start: int) -> Array:
        """Places of the box's elements in shared memory, outermost first."""
        at = start + np.arange(int(np.prod(self.box))) * self.itemsize
        return swizzled(at, (1 << self.swizzle) - 1).reshape(self.box)

    def elements(self, coordinates: tuple[int, ...]) -> tuple[Array, Array]:
        """Addresses of the box's elements, and whether each lies in the tensor. coordinates: innermost first."""
        at, inside = np.array(self.base, np.int64), np.array(True)
        for dim, (first, extent) in enumerate(zip(reversed(coordinates), self.box, strict=True)):
            index = first + np.arange(extent).reshape(-1, *(1,) * (len(self.box) - dim - 1))
            at = at + index * (self.strides[dim] * self.itemsize)
            inside = inside & (index >= 0) & (index < self.shape[dim])
        return np.broadcast_to(at, self.box), np.broadcast_to(inside, self.box)


def of_bytes(words: Array) -> TensorMap:
    """Decodes a descriptor that a kernel has written. Raises UnsupportedPtx for layouts that Triton does not use."""
    said = words.reshape(-1).view(FIELDS)[0]
    element, dims = int(said["elemtype"]), int(said["rank"]) + 1
    if not element < len(ELEMENTS) or said["interleave_layout"] or said["fill_mode"]:
        raise UnsupportedPtx("unsupported tensor descriptor: fp4, interleaved, or padded with NaN")
    if dims > 5 or int(said["swizzle_mode"]) > 3 or (said["element_stride"][:dims] != 1).any():
        raise UnsupportedPtx("unsupported tensor descriptor: its dimensions, steps or swizzling are invalid")
    kind = ELEMENTS[element]
    inner_first = [int(n) // size_of(kind) for n in said["global_stride"][: dims - 1]]
    shape, box = (tuple(int(n) for n in said[field][:dims][::-1]) for field in ("global_dim", "box_dim"))
    base, swizzle = int(said["global_address"]), int(said["swizzle_mode"])
    return TensorMap(base, shape, (*inner_first[::-1], 1), box, kind, swizzle)


def misaligned(words: Array) -> str:
    """The field that is no multiple of 16 bytes, as required by cuTensorMapEncodeTiled (CUDA Driver API); else ""."""
    said = words.reshape(-1).view(FIELDS)[0]
    strides = said["global_stride"][: int(said["rank"])]
    return "the address" if said["global_address"] % 16 else "a stride" if (strides % 16).any() else ""


@handles("tensormap")
def _tensormap(e: Emitter, i: Instruction) -> list[str] | None:
    if i.has("cp_fenceproxy"):
        to, of, size = i.args
        where = f"{e.address(to)}, {e.address(of)}, {e.mask}, {scope_of(i)!r}, {e.const(i.site)}"
        return [f"S.publish_map({where})"] if size == Imm("128") or size == Imm("0x80") else None
    field = next((part for part in i.parts if part in FIELDS.names), "")
    if not i.has("replace") or not i.has("shared::cta") or not field:
        return None
    at, *number, value = i.args
    ordinal = sum(int(x.text, 0) for x in number if isinstance(x, Imm))
    dtype, first = FIELDS.fields[field][:2]
    size = dtype.base.itemsize
    if size * ordinal >= dtype.itemsize:
        return None
    word = e.read(value, f"b{8 * size}")
    where = f"{e.address(at)} + {e.const(np.int64(first + size * ordinal))}"
    return [f"S.store({SHARED!r}, {where}, [{word}], {size}, {e.mask}, 'weak', '', {e.const(i.site)})"]
