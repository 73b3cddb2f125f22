"""Rules of what a kernel uses of a multiprocessor: registers, shared memory, room for a program."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from fusedtp.targets import TENSOR_COLUMNS

from .compiler import Compiled
from .listing import Finding


@dataclass(frozen=True)
class Resources:
    """Registers of a thread, and how many of them went to memory; bytes of stack and of memory for them."""

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


def spills(made: Compiled) -> Iterator[Finding]:
    """No register goes to memory. (AMD's scalar registers may go to lanes of vector registers, which is no memory,
    though some stack is set aside for it.)

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
        said = f"{made.shared_bytes} bytes of shared memory, {made.target.name} has {made.target.shared_limit}"
        yield Finding("shared-memory", said)
    if made.tensor_columns > TENSOR_COLUMNS:
        said = f"{made.tensor_columns} columns of tensor memory, {made.target.name} has {TENSOR_COLUMNS}"
        yield Finding("shared-memory", said)


def programs(made: Compiled) -> int:
    """How many programs a multiprocessor holds."""
    used = resources(made)
    return made.target.occupancy(used.registers, made.shared_bytes, made.num_warps, made.tensor_columns)


def occupancy(made: Compiled) -> Iterator[Finding]:
    """A multiprocessor has registers and shared memory for one program or more.

    The grids of kernels that communicate count on one program a multiprocessor, and no more: later programs start when
    earlier ones end. Source: Target.occupancy; fusedtp.ops.launch.config, gather_programs.
    """
    if not programs(made):
        said = (
            f"{resources(made).registers} registers a thread, {made.num_warps} warps and {made.shared_bytes} bytes of "
            f"shared memory: a multiprocessor of {made.target.name} holds no program"
        )
        yield Finding("occupancy", said)
