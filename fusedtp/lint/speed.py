"""Rules on the speed of loads and matmuls, which a run on a CPU cannot show: vector widths, matrix units, pipelines."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from .compiler import Compiled
from .listing import DOTS, Finding, Instruction, Op, Value, behind

VECTOR_BYTES = 16
UNITS = {"mma": r"mma\.sync", "wgmma": r"wgmma\.mma_async", "tcgen05": r"tcgen05\.mma", "mfma": r"v_mfma"}
PRODUCTS = "|".join((*UNITS.values(), r"fma\."))
_POINTERS = re.compile(r"tensor<((?:\d+x)+)!tt\.ptr<[a-z]+(\d+)")
_TENSOR = re.compile(r"tensor<((?:\d+x)+)([a-z]\w*)")
_LOOP = re.compile(r"scf\.for [^\n]*?iter_args\([^\n]*?\) -> \(([^\n]*?)\)\s*: i\d+")


# -- what ranks exchange -----------------------------------------------------------------------------------------------


def vector_width(made: Compiled) -> Iterator[Finding]:
    """Loads and stores of a peer's slot move 16 bytes per thread if every row begins at a multiple of 16 bytes.

    tl.multiple_of must come after the cast to a pointer: a hint on an integer before the cast is lost.
    Source: CUDA C++ Best Practices Guide, "Coalesced Access to Global Memory"; PTX ISA, ld, st and cp.async.
    """
    if made.target.backend != "cuda" or not made.case.aligned_rows:
        return
    for op in exchanged(made):
        shape, bits = _POINTERS.findall(op.text)[0]
        share = math.prod(map(int, shape.strip("x").split("x"))) * int(bits) // 8
        want = min(VECTOR_BYTES, share // (made.target.wave * made.num_warps))
        found = moves(made, op)
        if not found:
            yield Finding("vector-width", "no instruction has this source line", op.text, op.frames)
        narrow = next((one for one in found if width(one) < want), None)
        if narrow:
            said = f"{width(narrow)} bytes at a time, {want} are possible"
            yield Finding("vector-width", said, narrow.text, op.frames)


def exchanged(made: Compiled) -> list[Op]:
    """Loads and stores of tiles in memory that ranks share, without TMA copies, which have no vector width."""
    ops = made.source.named("tt.load", "tt.store")
    return [op for op in ops if _POINTERS.search(op.text) and made.source.peers(op)]


def moves(made: Compiled, op: Op) -> list[Instruction]:
    """The compiled instructions of a load or store by pointers."""
    return made.listing.of(op, r"st\.\S*global" if op.name == "tt.store" else r"ld\.\S*global|cp\.async\.c[ag]\.")


def width(one: Instruction) -> int:
    """Bytes that one instruction moves per thread."""
    if one.text.startswith("cp.async"):
        return int(re.findall(r"(?:0x)?[0-9a-f]+", one.text.split("],")[-1])[0], 0)
    vector, bits = re.search(r"(?:\.v(\d))?\.[a-z](\d+)\s", one.text).groups()  # type: ignore[union-attr]
    return int(vector or 1) * int(bits) // 8


# -- products ----------------------------------------------------------------------------------------------------------


def tensor_core(made: Compiled) -> Iterator[Finding]:
    """A matmul of 16-bit (or TF32) operands runs on the best matrix unit of the target that supports the tile shape.

    wgmma and tcgen05 require at least 64 rows; smaller tiles use mma.sync. Full-precision fp32 (`ieee`) has no matrix
    unit, but 16-bit operands must not be widened to it. Source: PTX ISA, "Asynchronous Warpgroup Level Matrix
    Multiply-Accumulate", "TensorCore 5th Generation"; CDNA3 ISA, MFMA.
    """
    for op in made.source.named(*DOTS):
        types = _TENSOR.findall(op.text.split(" : ")[-1])
        if not re.fullmatch(r"bf16|f16|f8\w*|i8", types[0][1]) and "tf32" not in op.text:
            if any(map(_widened, op.operands[:2])):
                said = "16-bit operands are widened to fp32 and multiplied without tensor cores"
                yield Finding("tensor-core", said, op.text, op.frames)
            continue
        rows, columns = (int(n) for n in types[-1][0].strip("x").split("x")[-2:])
        wide = rows >= 64 and columns >= 8 and made.num_warps % 4 == 0
        want = {"gfx942": "mfma", "sm_90": "wgmma", "sm_100": "tcgen05"}.get(made.target.name, "mma")
        want = want if wide or want == "mfma" else "mma"
        if not made.listing.of(op, UNITS[want]):
            have = [name for name, each in UNITS.items() if made.listing.of(op, each)]
            have = have or ["plain multiply-adds"]
            said = f"{', '.join(have)} where {made.target.name} has {want}"
            yield Finding("tensor-core", said, op.text, op.frames)


def _widened(operand: Value) -> bool:
    """Whether an operand is a widened 16-bit tile."""
    makers = (v.op.text for v in behind(operand, ("tt.load", "tt.dot", "arith.extf")) if v.op)
    return any("arith.extf" in text and re.search(r"x(bf16|f16)\b.* to tensor<", text) for text in makers)


def pipelined(made: Compiled) -> Iterator[Finding]:
    """The loads of a matmul are software-pipelined: copies for later iterations are in flight during the matmul.

    The copies are asynchronous (cp.async; TMA for descriptors; on AMD loads into registers), and some are issued before
    the loop. An acquire or a barrier in the loop disables pipelining. A loop that requests warp specialization must be
    warp-specialized: then separate warps copy. Source: triton-lang/triton, software pipeliner; PTX ISA, "Asynchronous
    copy".
    """
    source, listing = made.source, made.listing
    specialised = "ttg.warp_specialize" in made.files["ttgir"]
    if "{tt.warp_specialize" in made.files["ttir"] and made.target.backend == "cuda" and not specialised:
        yield Finding("pipelined", "a loop requests warp specialization but was not specialized")
    products: dict[int, set[str]] = {}  # loop of the source -> compiled loops with its matmuls
    for op in source.named(*DOTS):
        if op.loops:
            ones = listing.of(op, PRODUCTS)
            products.setdefault(id(op.loops[0]), set()).update(listing.loops(one)[0] for one in ones)
    copies = listing.dialect.load if made.target.backend == "hip" else r"cp\.async\.c[ag]\."
    for op in source.named("tt.load", "tt.descriptor_load"):
        if "tensor<" not in op.text or not op.loops or id(op.loops[0]) not in products:
            continue
        by_tma = op.name == "tt.descriptor_load"
        found = listing.of(op, r"cp\.async\.bulk\.tensor" if by_tma else copies)
        inside = products[id(op.loops[0])]
        ahead = any(loop and listing.ahead(one, loop) for one in found for loop in inside & {listing.loops(one)[0]})
        if not found and made.target.backend == "cuda":
            said = "uses a descriptor, but no TMA copy" if by_tma else "is not an asynchronous copy"
            yield Finding("pipelined", f"a matmul's load {said}", op.text, op.frames)
        elif not specialised and not ahead:
            yield Finding("pipelined", "no copy of this load is issued ahead of the loop", op.text, op.frames)


# -- loops -------------------------------------------------------------------------------------------------------------


def carried(made: Compiled) -> Iterator[Finding]:
    """Loop-carried scalars of the source are loop-carried in the compiled code too.

    Triton 3.6 treats a scalar as dead if only the bounds of an inner loop depend on it, and replaces it by its first
    value (pass tritongpu-remove-layout-conversions). If the scalar is the next item of a work list that programs share,
    all work is still done, but by fewer programs. Loops that carry tiles are not compared: pipelining adds counters.
    """
    before, after = (_carried_by_loops(made.files[kind]) for kind in ("ttir", "ttgir"))
    if after < before:
        said = f"loops carry {before} scalars in the source, {after} in the compiled code"
        yield Finding("carried", f"{said}; use the scalar inside the inner loop, not only as its bound")


def _carried_by_loops(text: str) -> int:
    found = 0
    for types in _LOOP.findall(text):
        if "<" not in types:  # neither tiles nor the buffers for their copies
            found += types.count(",") + 1
    return found
