"""Rules on a kernel's resource usage: registers, shared memory, occupancy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from fusedtp.targets import TENSOR_COLUMNS

from .compiler import Compiled
from .listing import Finding


@dataclass(frozen=True)
class Resources:
    """Registers per thread, spilled registers, and bytes of stack and local memory."""

    registers: int
    spills: int
    stack: int


def resources(made: Compiled) -> Resources:
    """Reads the resource usage from cuobjdump's -res-usage and the SASS, or from the remarks in amdgcn."""
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


def spills(made: Compiled) -> Iterator[Finding]:
    """No register is spilled to memory. (AMD's scalar registers may be spilled to lanes of vector registers. That is
    allowed, although some stack is reserved for it.)

    Source: ptxas' stack and local memory, STL and LDL in the SASS; amdgcn's .vgpr_spill_count and scratch_store,
    scratch_load.
    """
    used = resources(made)
    first = re.search(r".*\b(?:STL|LDL|scratch_(?:store|load)\w*)\b.*", made.usage + made.files.get("amdgcn", ""))
    if used.spills or (first and made.target.backend == "hip"):
        said = f"{used.spills} spills, {used.stack} bytes of stack, {used.registers} registers"
        yield Finding("spills", said, first[0] if first else "")


def shared_memory(made: Compiled) -> Iterator[Finding]:
    """A program's shared memory (and Blackwell's tensor memory) fits the target. Source: see targets.py."""
    if made.shared_bytes > made.target.shared_limit:
        said = f"needs {made.shared_bytes} bytes of shared memory; {made.target.name} has {made.target.shared_limit}"
        yield Finding("shared-memory", said)
    if made.tensor_columns > TENSOR_COLUMNS:
        said = f"needs {made.tensor_columns} columns of tensor memory; {made.target.name} has {TENSOR_COLUMNS}"
        yield Finding("shared-memory", said)


def programs(made: Compiled) -> int:
    """The number of programs that fit on a multiprocessor."""
    used = resources(made)
    return made.target.occupancy(used.registers, made.shared_bytes, made.num_warps, made.tensor_columns)


def occupancy(made: Compiled) -> Iterator[Finding]:
    """A multiprocessor has enough registers and shared memory for at least one program.

    The grids of communicating kernels assume exactly one program per multiprocessor; later programs start when earlier
    ones end. Source: Target.occupancy; fusedtp.ops.launch.config, gather_programs.
    """
    if not programs(made):
        said = (
            f"with {resources(made).registers} registers per thread, {made.num_warps} warps and {made.shared_bytes} "
            f"bytes of shared memory, no program fits on a multiprocessor of {made.target.name}"
        )
        yield Finding("occupancy", said)
