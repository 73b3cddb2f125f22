"""Rules of what a kernel uses: matrix instructions, registers, shared memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from .compiler import Compiled
from .facts import Facts
from .mlir import Op, behind
from .report import Finding
from .rule import rule
from .targets import TENSOR_COLUMNS

_TENSOR = re.compile(r"tensor<((?:\d+x)+)([a-z]\w*)(?:, ([^>]*))?")
_MEMDESC = re.compile(r"memdesc<((?:\d+x)+)([a-z]\w*)")
# bf16, fp16 and the 8-bit floats
NARROW = re.compile(r"(bf16|f16|f8\w*|i8)$")


@dataclass(frozen=True)
class Resources:
    """Registers of a thread, and how many of them went to memory."""

    registers: int
    spills: int
    stack: int


def resources(made: Compiled) -> Resources:
    """From cuobjdump's -res-usage and the SASS, or from amdgcn's own remarks."""
    if made.target.backend == "cuda":
        figure = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", made.usage)}
        spills = len(re.findall(r"\b(?:STL|LDL)\b", made.usage))
        return Resources(figure["REG"], spills, figure["STACK"] + figure["LOCAL"])
    text = made.files["amdgcn"]

    def remark(pattern: str) -> int:
        found = re.search(pattern, text)
        return int(found[1]) if found else 0

    registers = remark(r"; TotalNumVgprs: (\d+)") or remark(r"\.vgpr_count:\s+(\d+)")
    return Resources(
        registers, remark(r"\.vgpr_spill_count:\s+(\d+)"), remark(r"\.private_segment_fixed_size:\s+(\d+)")
    )


@rule(
    "spills",
    "No register goes to memory. (AMD's scalar registers may go to lanes of vector registers, which is no memory.)",
    "ptxas: stack and local memory, STL and LDL in the SASS; amdgcn: .vgpr_spill_count, .private_segment_fixed_size",
)
def spills(made: Compiled, facts: Facts) -> Iterator[Finding]:
    used = resources(made)
    if used.spills or (used.stack and made.target.backend == "hip"):
        said = f"{used.spills} spills, {used.stack} bytes of stack, {used.registers} registers"
        first = re.search(r".*\b(?:STL|LDL|scratch_(?:store|load))\b.*", made.usage)
        yield Finding("spills", said, first[0] if first else "")


@rule(
    "shared-memory",
    "A program's shared memory (and Blackwell's tensor memory) fits the target.",
    "CUDA C++ Programming Guide, Technical Specifications; AMD CDNA3 ISA guide, LDS: see targets.py",
)
def shared_memory(made: Compiled, facts: Facts) -> Iterator[Finding]:
    if made.shared_bytes > made.target.shared_limit:
        said = (
            f"{made.shared_bytes} bytes of shared memory, {made.target.name} has {made.target.shared_limit}"
        )
        yield Finding("shared-memory", said)
    if made.tensor_columns > TENSOR_COLUMNS:
        said = f"{made.tensor_columns} columns of tensor memory, {made.target.name} has {TENSOR_COLUMNS}"
        yield Finding("shared-memory", said)


@rule(
    "occupancy",
    "A multiprocessor has registers and shared memory for one program or more. The grids of kernels that communicate "
    "count on one program a multiprocessor, and no more: later programs start when earlier ones end.",
    "fusedtp.ops.launch.config, gather_programs and reduce_programs; the occupancy of targets.Target",
)
def occupancy(made: Compiled, facts: Facts) -> Iterator[Finding]:
    used = resources(made)
    if not made.target.occupancy(used.registers, made.shared_bytes, made.num_warps, made.tensor_columns):
        said = (
            f"{used.registers} registers a thread, {made.num_warps} warps and {made.shared_bytes} bytes of shared "
            f"memory: a multiprocessor of {made.target.name} holds no program"
        )
        yield Finding("occupancy", said)


@rule(
    "tensor-core",
    "A product of 16-bit (or TF32) operands runs on the target's best matrix unit that the tile's shape allows: wgmma "
    "and tcgen05 take 64 rows or more, smaller tiles mma.sync. Full-precision fp32 (`ieee`) has no such unit, but "
    "operands must not be widened to it.",
    "PTX ISA, 'Asynchronous Warpgroup Level Matrix Multiply-Accumulate', 'TensorCore 5th Generation'; CDNA3 ISA, MFMA",
)
def tensor_core(made: Compiled, facts: Facts) -> Iterator[Finding]:
    for op in Facts(made, made.ttir).dots:
        if _precise(op) and any(_widened(operand.op) for operand in op.operands[:2]):
            said = "16-bit operands are widened to fp32 and multiplied without tensor cores"
            yield Finding("tensor-core", said, op.text, op.frames)
    for op in facts.dots:
        if _precise(op):
            continue
        want, have = _best(made, facts, op), _unit(facts, op)
        if have != want:
            yield Finding("tensor-core", f"{have} where {made.target.name} has {want}", op.text, op.frames)
        elif not made.listing.find(_INSTRUCTION[want]):
            yield Finding("tensor-core", f"{want} in the IR, not in the compiled code", op.text, op.frames)


_INSTRUCTION = {
    "mma": r"mma\.sync",
    "wgmma": r"wgmma\.mma_async",
    "tcgen05": r"tcgen05\.mma",
    "mfma": r"v_mfma",
}


def _element(op: Op) -> str:
    """Element type of a dot's first operand."""
    types = op.text.split(" : ", 1)[-1]
    found = _MEMDESC.search(types) or _TENSOR.search(types)
    return found[2] if found else ""


def _precise(op: Op) -> bool:
    """Whether a dot is of fp32 (or fp64) in full precision."""
    return not NARROW.search(_element(op)) and "tf32" not in op.text and "inputPrecision = 0" not in op.text


def _widened(op: Op | None) -> bool:
    """Whether an operand was made by widening a 16-bit tile."""
    if op is None or not op.results:
        return False
    makers = (v.op for v in behind(op.results[0], frozenset(("tt.load", "tt.dot", "arith.extf"))))
    widening = (maker.text for maker in makers if maker is not None and maker.name == "arith.extf")
    return any(re.search(r"x(bf16|f16)\b.* to tensor<", text) for text in widening)


def _tile(op: Op) -> tuple[int, int]:
    """(rows, columns) of a dot's result."""
    types = op.text.split(" : ", 1)[-1]
    if op.name.startswith("ttng.tc_gen5"):
        shape = _MEMDESC.findall(types)[2][0]
    else:
        shape = _TENSOR.findall(types)[-1][0]
    rows, columns = (int(n) for n in shape.strip("x").split("x")[-2:])
    return rows, columns


def _best(made: Compiled, facts: Facts, op: Op) -> str:
    """wgmma: 64 rows for each group of four warps; tcgen05 likewise 64 or 128."""
    if made.target.backend == "hip":
        return "mfma"
    rows, columns = _tile(op)
    if rows < 64 or columns < 8 or made.num_warps % 4 or made.target.name == "sm_80":
        return "mma"
    return {"sm_90": "wgmma", "sm_100": "tcgen05"}[made.target.name]


def _unit(facts: Facts, op: Op) -> str:
    """What a dot of TTGIR becomes: by its name or by its result's layout."""
    if op.name == "ttng.warp_group_dot":
        return "wgmma"
    if op.name.startswith("ttng.tc_gen5"):
        return "tcgen05"
    layout = re.search(r"-> tensor<[^#]*(#\w+)", op.text)
    meaning = facts.module.aliases.get(layout[1], "") if layout else ""
    if "amd_mfma" in meaning:
        return "mfma"
    return "mma" if "nvidia_mma" in meaning else "plain multiply-adds"
