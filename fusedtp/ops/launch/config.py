"""How a fused kernel is cut up: tile sizes, warps, stages, and how many programs do what.

Defaults, no search at run time; what was measured to be faster on a GPU goes before them (tuned.py). What ranks
must agree on, the extent of a chunk and the order of sums, depends only on numbers that all ranks share: rows of every
rank, dtype, the columns that are scattered, and the kind of GPU, which the signature of a call compares.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch

from fusedtp.comm.device_view import clock_of
from fusedtp.ops.measured import kind_of


@dataclass(frozen=True)
class Machine:
    """What a launch may use: `programs` that run at once, shared memory of one, and which clock a kernel reads.

    name   of the kind, by which tables of measured values are found; "" of a GPU that is not here
    """

    clock: str  # "cuda", "hip", or "host": the interpreter
    programs: int
    shared_bytes: int
    shared_gpu: bool = False  # several ranks on one GPU
    name: str = ""
    capability: int = 0  # of CUDA: 90 is sm_90


@dataclass(frozen=True)
class Config:
    """One launch. `chunk` is what one flag covers: rows in a gather, tiles in a reduction.

    part           elements of a tile, for each warp, that are summed at once
    max_registers  what a thread may use; 0 leaves that to the compiler
    part_tiles     tiles of a part of the columns, of a matmul with its combine
    tma            operands that no peer writes by TMA, where they allow it
    specialized    of the plain matmul alone: a warp of its own for TMA's copies
    halves         of the plain and the grouped matmuls: a tile's columns end half by half
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


# What a thread can name. ptxas by itself stops at fewer, and spills, so that one more program would fit a processor;
# the grids here hold one or two for each. Not for the largest tile: it has them all anyway, and 3.7 spills if told so.
ALL_REGISTERS = 255
VECTOR = 16  # elements: the compiler knows of an integer whether 16 divides it, and no more

NARROWEST = 32  # columns of a tile
IN_FLIGHT = 32 << 10  # bytes that an SM reads in the microsecond that memory takes to answer: 3.4 TB/s of 132 SMs
MOST_STAGES = 8

HOST = Machine(clock="host", programs=3, shared_bytes=0, name="interpreter")


@cache
def machine_of(device: torch.device, ranks_per_device: int = 1) -> Machine:
    """The machine behind `device`; of a GPU that several ranks share, this rank's part."""
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
    """Tile sizes for an output of rows x cols; the large ones only where they fill the machine.

    even: VECTOR divides the length of the output's rows. Where not, they are stored element by element, and a thread
    holds an address for each row of its part of the tile: 32 of them fit its registers, 64 do not.
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
    """Tiles of 16-bit operands for fp8: as deep in bytes. On sm_90, whose sums are held twice, no wider than 128."""
    config = replace(config, block_k=2 * config.block_k)
    if machine.capability != 90:
        return config
    return replace(config, block_n=min(config.block_n, 128), max_registers=ALL_REGISTERS)


def _cuda_tiles(machine: Machine, dtype: torch.dtype, rows: int, cols: int, block_m: int, even: bool) -> Config:
    every = ALL_REGISTERS
    if dtype == torch.float32:  # a thread holds all of BLOCK_K of its rows and columns
        return Config(min(block_m, 64), 64, 16, num_warps=8, num_stages=4, max_registers=every)
    reads_shared = machine.shared_bytes >= 200 * 1024  # the matrix unit its operands, not registers
    if block_m < 128 or not even:
        # Four warps have too few registers where rows are odd, or operands go through registers as well.
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
    """The tile, of fewer columns as long as a program has `each` tiles at most.

    A product of few rows takes as long as the weights take to come, and one program loads only so fast.
    """
    while shape.block_n > narrowest:
        half = replace(shape, block_n=shape.block_n // 2)
        if -(-rows // half.block_m) * -(-n // half.block_n) > each * machine.programs:
            break
        shape = half
    return shape


def deep(shape: Config, machine: Machine, dtype: torch.dtype, weights: int = 1) -> Config:
    """The tile in so many stages that IN_FLIGHT bytes of the weights are on their way, if they fit.

    A tile too narrow for that takes twice as much of K in a stage, but not in fp32, where that would take registers.
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
    """(senders, others): about an eighth of a GPU stores as fast as its links carry."""
    senders = max(1, min(16, machine.programs // 8))
    return senders, max(1, machine.programs - senders)


def gather_chunk(rows_max: int, flags: int) -> int:
    """Rows a flag covers: enough chunks that all senders work on one peer, few enough for its flags."""
    return max(1, min(128, -(-rows_max // 16)), -(-rows_max // flags))


def power_of_two(n: int) -> int:
    """The least that is no less than n; 1 for 0."""
    return 1 << max(n - 1, 0).bit_length()


def block(extent: int, low: int, high: int) -> int:
    """The power of two in [low, high] that covers `extent`, or high."""
    size = low
    while size < min(extent, high):
        size *= 2
    return size
