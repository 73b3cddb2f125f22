"""The configuration of a fused kernel: tile sizes, warps, stages, and how many programs send.

These are defaults; nothing is searched at run time. Values measured to be faster on a GPU override them (tuned.py).
Ranks must agree on the extent of a chunk and the order of sums, so these depend only on values that all ranks share:
the rows of every rank, dtype, the scattered columns, and the kind of GPU, which the signature of a call compares.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch

from fusedtp.comm.device_view import clock_of
from fusedtp.ops.measured import kind_of


@dataclass(frozen=True)
class Machine:
    """The resources of a launch: `programs` that run at once, shared memory per program, and the kernel's clock.

    name   kind of machine, the key of its tables of measured values; "" for a GPU that this host lacks
    """

    clock: str  # "cuda", "hip", or "host": the interpreter
    programs: int
    shared_bytes: int
    shared_gpu: bool = False  # several ranks on one GPU
    name: str = ""
    capability: int = 0  # CUDA only: 90 is sm_90


@dataclass(frozen=True)
class Config:
    """The configuration of one launch. `chunk` is what one flag covers: rows in a gather, tiles in a reduction.

    part           elements of a tile per warp that are summed at once
    max_registers  limit on registers per thread; 0 leaves it to the compiler
    part_tiles     matmul with its combine: tiles in a part of the columns
    tma            load operands that no peer writes by TMA, where their layouts allow it
    specialized    plain matmul only: a dedicated warp issues the TMA copies
    halves         plain and grouped matmuls: the epilogue stores a tile's columns in two halves
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 1
    group: int = 8
    send_programs: int = 1
    other_programs: int = 2
    chunk: int = 1
    part: int = 512
    part_tiles: int = 1
    max_registers: int = 0
    tma: bool = False
    specialized: bool = False
    halves: bool = False

    @property
    def programs(self) -> int:
        return self.send_programs + self.other_programs


# The most registers a thread can address. By default ptxas uses fewer, and spills, to fit one more program on an SM,
# but grids here have one or two per SM. Not for the largest tile: it gets all anyway, and 3.7 spills with this limit.
ALL_REGISTERS = 255
VECTOR = 16  # elements: all the compiler knows about an integer is whether 16 divides it

NARROWEST = 32  # columns of a tile
IN_FLIGHT = 32 << 10  # bytes that an SM reads during memory's latency of 1 us: 3.4 TB/s over 132 SMs
MOST_STAGES = 8

HOST = Machine(clock="host", programs=3, shared_bytes=0, name="interpreter")


@cache
def machine_of(device: torch.device, ranks_per_device: int = 1) -> Machine:
    """The machine behind `device`; if several ranks share a GPU, this rank's part of it."""
    if device.type != "cuda":
        return HOST
    props = torch.cuda.get_device_properties(device)
    shared = getattr(props, "shared_memory_per_block_optin", 64 * 1024)
    programs = max(1, props.multi_processor_count // ranks_per_device)
    clock = clock_of(device)
    capability = 10 * props.major + props.minor if clock == "cuda" else 0
    shared_gpu = ranks_per_device > 1
    return Machine(clock, programs, shared, shared_gpu, name=kind_of(device), capability=capability)


def tiles(machine: Machine, dtype: torch.dtype, rows: int, cols: int, even: bool = True) -> Config:
    """Tile sizes for an output of rows x cols; large tiles only if they fill the machine.

    even: VECTOR divides the length of the output's rows. If not, rows are stored element by element, and a thread holds
    an address for each row of its part of the tile: 32 of them fit in its registers, 64 do not.
    """
    if machine.clock == "host":  # a step costs the same up to 64
        return Config(block(rows, 16, 64), block(cols, 16, 64), 64)
    block_m = block(rows, 16, 128)
    if machine.clock == "cuda":
        config = _cuda_tiles(machine, dtype, rows, cols, block_m, even)
        config = replace(config, tma=machine.capability >= 90 and dtype != torch.float32)
        return of_fp8(config, machine) if dtype.itemsize == 1 else config
    if dtype == torch.float32:  # full-precision products run on the plain units
        return Config(min(block_m, 64), 64, 32, num_stages=2)
    return Config(block_m, 128, 64, num_warps=8 if block_m == 128 else 4, num_stages=2)


def of_fp8(config: Config, machine: Machine) -> Config:
    """Adapt tiles of 16-bit operands to fp8: the same depth in bytes. sm_90 keeps sums twice: at most 128 columns."""
    config = replace(config, block_k=2 * config.block_k)
    if machine.capability != 90:
        return config
    return replace(config, block_n=min(config.block_n, 128), max_registers=ALL_REGISTERS)


def _cuda_tiles(machine: Machine, dtype: torch.dtype, rows: int, cols: int, block_m: int, even: bool) -> Config:
    every = ALL_REGISTERS
    if dtype == torch.float32:  # a thread holds all BLOCK_K elements of its rows and columns
        return Config(min(block_m, 64), 64, 16, num_warps=8, num_stages=4, max_registers=every)
    reads_shared = machine.shared_bytes >= 200 * 1024  # tensor cores read operands from shared memory, not registers
    if block_m < 128 or not even:
        # Four warps have too few registers if rows are not even or operands pass through registers.
        roomy = block_m < 64 or (even and reads_shared)
        warps, stages = 4 if roomy else 8, 4 if reads_shared else 3
        return Config(min(block_m, 64), 128, 64, warps, stages, part=256, max_registers=every)
    many = -(-rows // 128) * -(-cols // 256) >= machine.programs
    if many and reads_shared:
        return Config(128, 256, 64, num_warps=8, num_stages=4, part=1024)
    stages = 3 if machine.shared_bytes >= 100 * 1024 else 2
    return Config(128, 128, 64, num_warps=8, num_stages=stages, max_registers=every)


def narrowed(
    shape: Config, machine: Machine, rows: int, n: int, *, each: int = 1, narrowest: int = NARROWEST
) -> Config:
    """Narrow the tile as long as no program gets more than `each` tiles.

    A product of few rows is bound by loading the weights, so the load is spread over as many programs as possible.
    """
    while shape.block_n > narrowest:
        half = replace(shape, block_n=shape.block_n // 2)
        if -(-rows // half.block_m) * -(-n // half.block_n) > each * machine.programs:
            break
        shape = half
    return shape


def deep(shape: Config, machine: Machine, dtype: torch.dtype, weights: int = 1) -> Config:
    """The tile with enough stages to keep IN_FLIGHT bytes of the weights in flight, if they fit.

    A tile too narrow for that doubles block_k, but not in fp32, where that would take registers.
    """
    if machine.clock != "cuda":
        return shape
    step, columns = shape.block_k * dtype.itemsize, weights * shape.block_n
    if dtype != torch.float32 and MOST_STAGES * columns * step < IN_FLIGHT:
        shape, step = replace(shape, block_k=2 * shape.block_k), 2 * step
    fit = (machine.shared_bytes - 1024) // ((shape.block_m + columns) * step)
    stages = min(-(-IN_FLIGHT // (columns * step)), fit, MOST_STAGES)
    return replace(shape, num_stages=max(shape.num_stages, stages))


def gather_programs(machine: Machine) -> tuple[int, int]:
    """(senders, others): about an eighth of a GPU's programs saturate its links."""
    senders = max(1, min(16, machine.programs // 8))
    return senders, max(1, machine.programs - senders)


def gather_chunk(rows_max: int, flags: int) -> int:
    """Rows per flag: enough chunks that all senders can work on one peer, but no more chunks than flags."""
    return max(1, min(128, -(-rows_max // 16)), -(-rows_max // flags))


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n; 1 for 0."""
    return 1 << max(n - 1, 0).bit_length()


def block(extent: int, low: int, high: int) -> int:
    """The smallest power of two in [low, high] that covers `extent`, or high."""
    size = low
    while size < min(extent, high):
        size *= 2
    return size
