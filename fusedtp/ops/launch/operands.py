"""How a matmul's operands reach its kernel, by pointer or TMA; of the plain ones also in what tiles and precision.

A descriptor holds its operand's address, as a pointer does, and is an argument of the kernel like one: a captured CUDA
graph keeps both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fusedtp.comm.launching import Launch

from . import tuned
from .config import ALL_REGISTERS, VECTOR, Config, Machine, tiles

INT32 = 2**31 - 1
MOST_DESCRIPTORS = 4  # that a kernel has parameters for
# Names of a kernel's parameters. Strides stay those of pointers, which it is given as well.
DESCRIPTORS, W_DESCRIPTORS, X_DESCRIPTORS = (
    tuple([f"{kind}descriptor{i}" for i in range(MOST_DESCRIPTORS)]) for kind in ("", "w_", "x_")
)
LOW = 64
SHORTEST_BYTES = 32  # of a row that one instruction of the matrix units takes
BARRIER_BYTES = 1024  # at least what a kernel's barriers take of shared memory
FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2)


def describable(x: Tensor) -> bool:
    """Whether TMA takes a matrix: its address and the stride of its rows are multiples of 16 bytes, its rows are
    contiguous and do not overlap, it is not empty, and 32 bits count its rows and columns, 40 the bytes of a stride.

    Source: CUDA Driver API, cuTensorMapEncodeTiled.
    """
    rows, cols = x.shape
    stride = x.stride(0) * x.element_size()
    return (
        x.stride(1) == 1
        and x.data_ptr() % 16 == 0
        and stride % 16 == 0
        and cols * x.element_size() <= stride < 2**40
        and 0 < rows <= INT32
        and 0 < cols <= INT32
    )


def described(x: Tensor, block: list[int], across: bool = False) -> Any:
    """The TMA descriptor of a matrix that TMA takes, made without its constructor, whose checks `describable` has made.

    An eager call makes up to eight, and the checks take some microseconds each time.

    across   of x transposed
    """
    kind = _descriptor()
    made = kind.__new__(kind)
    made.base, made.shape, made.strides, made.block_shape = x, [*x.shape], [*x.stride()], block
    if across:
        made.shape.reverse()
        made.strides.reverse()
    return made


@cache
def _descriptor() -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor


def local_operands(config: Config, xs: Sequence[Tensor], weights: Sequence[Tensor], batch: int = 1) -> dict[str, Any]:
    """Strides, TMA, X_TMA and ACROSS of a kernel whose operands [T, K_i] and [N, K_i] no peer writes.

    TMA takes rows that are contiguous: those of the weights, or of all of them transposed, as a gradient has them
    (ACROSS). x_i goes by TMA only where the weights do, and not where a rank's rows are `batch` runs apart.
    """
    by_tma, across = weights_by_tma(config, weights)
    x_by_tma = by_tma and batch == 1 and all(map(describable, xs))
    return dict(
        strides_xm=tuple(0 if x_by_tma else x.stride(0) for x in xs),
        strides_xk=tuple(0 if x_by_tma else x.stride(1) for x in xs),
        strides_wn=tuple(0 if by_tma else w.stride(0) for w in weights),
        strides_wk=tuple(0 if by_tma else w.stride(1) for w in weights),
        TMA=by_tma,
        X_TMA=x_by_tma,
        ACROSS=across,
    )


def local_tiles(
    config: Config, machine: Machine, xs: Sequence[Tensor], weights: Sequence[Tensor], batch: int = 1
) -> Config:
    """A default configuration as it serves a kernel with `local_operands`: see `of_vectors`."""
    taken = local_operands(config, xs, weights, batch)
    return of_vectors(config, machine, *(() if taken["X_TMA"] else xs), *(() if taken["TMA"] else weights))


def weights_by_tma(config: Config, weights: Sequence[Tensor]) -> tuple[bool, bool]:
    """Whether TMA takes all these [N_i, K_i], whose rows or columns are contiguous, and whether as [K_i, N_i]."""
    if takes_tma(config, *weights):
        return True, False
    across = takes_tma(config, *(w.t() for w in weights))
    return across, across


def describe(
    args: dict[str, Any], names: Sequence[str], matrices: Sequence[Tensor], block: list[int], across: bool = False
) -> None:
    """Adds the matrices' descriptors to a launch's arguments: see `described`. across: of the matrices transposed."""
    for name, x in zip(names, matrices):
        args[name] = described(x, block, across)


def describe_weights(
    args: dict[str, Any], launch: Launch, weights: Sequence[Tensor], names: Sequence[str] = DESCRIPTORS
) -> None:
    """The same of a launch that takes weights by TMA, which has ACROSS for whether as [K_i, N_i]."""
    config, across = launch.config, launch.args["ACROSS"]
    block = [config.block_k, config.block_n] if across else [config.block_n, config.block_k]
    describe(args, names, weights, block, across)


def describe_operands(args: dict[str, Any], launch: Launch, xs: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    """The same of a launch with `local_operands`: its weights, and the x_i if those go by TMA too."""
    describe_weights(args, launch, weights, W_DESCRIPTORS)
    if launch.args["X_TMA"]:
        describe(args, X_DESCRIPTORS, xs, [launch.config.block_m, launch.config.block_k])


def group_operands(
    config: Config, xs: Sequence[Tensor], weights: Sequence[Tensor], *, transposed: bool = True
) -> dict[str, Any]:
    """TMA, X_TMA and ACROSS of a kernel of ragged groups, see Note [Groups by TMA] in kernels/grouped_matmul.py.

    xs          [R, K]      which no peer writes and no index picks; the others go by pointers
    weights     [E, N, K]   one after another, or transposed one after another
    transposed  whether the kernel takes those
    """
    whole = transposed and weights[0].shape[2] % config.block_k == 0
    by_tma = _stacks(config, weights)
    across = not by_tma and whole and _stacks(config, [w.mT for w in weights])
    by_tma = by_tma or across
    return dict(TMA=by_tma, X_TMA=by_tma and all(map(describable, xs)), ACROSS=across)


def group_tiles(
    config: Config,
    machine: Machine,
    read: Sequence[Tensor],
    weights: Sequence[Tensor],
    *,
    by_index: bool = False,
    transposed: bool = True,
) -> tuple[Config, dict[str, Any]]:
    """The configuration as `of_vectors` has it, with tiles of fewer rows where that changes it; its `group_operands`.

    read       rows [R, K] that the kernel multiplies
    by_index   an index picks them, so that no TMA can
    """
    taken = group_operands(config, read, weights, transposed=transposed)
    rows = () if taken["X_TMA"] and not by_index else read
    shorter = of_vectors(config, machine, *rows, *(() if taken["TMA"] else weights))
    if shorter is config:
        return config, taken
    shorter = replace(shorter, block_m=min(config.block_m, LOW))
    return shorter, group_operands(shorter, read, weights, transposed=transposed)


def _stacks(config: Config, weights: Sequence[Tensor]) -> bool:
    """Whether TMA takes each [E, N, K] as [E * N, K]."""
    follow = all(w.shape[0] == 1 or w.stride(0) == w.shape[1] * w.stride(1) for w in weights)
    return follow and takes_tma(config, *map(stacked, weights))


def stacked(w: Tensor) -> Tensor:
    """[E, N, K], where one expert's rows follow another's, as [E * N, K]."""
    e, n, k = w.shape
    return w.as_strided((e * n, k), (w.stride(1), w.stride(2)))


def grouped_descriptors(
    config: Config, args: Mapping[str, Any], xs: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[Sequence[Any], Sequence[Any]]:
    """The x_i and weights of a launch whose arguments have its kernel's part of `group_operands`: as they are, or their
    descriptors where they go by TMA."""
    if args.get("X_TMA"):
        xs = [described(x, [config.block_m, config.block_k]) for x in xs]
    if args.get("ACROSS"):
        weights = [described(stacked(w.mT), [config.block_k, config.block_n]) for w in weights]
    elif args["TMA"]:
        weights = [described(stacked(w), [config.block_n, config.block_k]) for w in weights]
    return xs, weights


def takes_tma(config: Config, *matrices: Tensor) -> bool:
    """Whether a fused kernel gets these by TMA. fp32, which it multiplies in full precision, does not go by it."""
    if not config.tma or not 0 < len(matrices) <= MOST_DESCRIPTORS:
        return False
    return all(x.dtype != torch.float32 and describable(x) for x in matrices)


def within_reach(config: Config, precision: str, matrices: Sequence[Tensor]) -> Config:
    """The configuration as it is where TMA is not asked for or takes all of these operands, or else by pointers.

    fp32 in full precision is multiplied from registers, where TMA does not bring it.
    """
    precise = precision == "ieee" and matrices[0].dtype == torch.float32
    if config.tma and (precise or not all(map(describable, matrices))):
        return by_pointers(config)
    return config


def of_vectors(config: Config, machine: Machine, *by_pointer: Tensor) -> Config:
    """The configuration as it is where all of these operands can be loaded by vectors of 16 bytes; else with blocks of
    K as short as the matrix units take.

    Other rows are loaded element by element, and a thread holds an address for each of its elements of a block: those
    of a longer one spill. (Local memory is not only slow. Where ranks share a GPU, the first kernel that needs more of
    it than there is waits for all kernels that run, which may wait for it.)
    """
    if machine.clock == "host" or all(x.dtype == torch.float32 or _in_vectors(x) for x in by_pointer):
        return config
    return replace(config, block_k=min(config.block_k, SHORTEST_BYTES // by_pointer[0].element_size()))


def _in_vectors(x: Tensor) -> bool:
    """Whether the compiler can know that rows, or columns, of [.., M, K] begin and end at multiples of 16 bytes."""
    for dim, other in ((-1, -2), (-2, -1)):
        if x.stride(dim) == 1:
            return x.shape[dim] % VECTOR == x.stride(other) % VECTOR == x.data_ptr() % 16 == 0
    return False


def by_pointers(config: Config) -> Config:
    """The same tiles without TMA."""
    registers = ALL_REGISTERS if config.specialized else config.max_registers
    return replace(config, tma=False, specialized=False, max_registers=registers)


def operands(config: Config, precision: str, x: Tensor, weight: Tensor) -> dict[str, Any]:
    """The plain kernel's arguments for x [M, K] and w [N, K], in the tiles of `config`."""
    by_tma, k = config.tma, x.shape[1]
    return dict(
        x=described(x, [config.block_m, config.block_k]) if by_tma else x,
        stride_xm=0 if by_tma else x.stride(0),
        stride_xk=0 if by_tma else x.stride(1),
        w=described(weight, [config.block_n, config.block_k]) if by_tma else weight,
        stride_wn=0 if by_tma else weight.stride(0),
        stride_wk=0 if by_tma else weight.stride(1),
        K=k,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP=config.group,
        EVEN_K=by_tma or k % config.block_k == 0,
        TMA=by_tma,
        SPECIALIZED=config.specialized,
        PRECISION=precision,
    )


def local_config(
    machine: Machine,
    dtype: torch.dtype,
    precision: str,
    m: int,
    n: int,
    weights: int = 1,
    keep: bool = False,
) -> Config:
    """Tiles of a matmul of m rows by `weights` of n rows each, alone on the machine.

    keep: their products are stored too.

    Tiles are as wide as those of 16-bit operands, and as deep in bytes: tf32 has half as many k, fp8 twice as many.
    The columns of several weights share a tile. Smaller are those that would spill, by what the lint shows: of fp8 on
    sm_90, whose sums are held twice, of products that are kept, of what needs most in a partition of warps on sm_100,
    and of two weights in tf32 on sm_80.
    """
    precise = dtype == torch.float32 and precision == "ieee"
    config = tiles(machine, torch.float32 if precise else torch.bfloat16, m, weights * n, n % VECTOR == 0)
    if machine.clock != "host":
        specialized = config.tma and machine.capability // 10 == 10 and config.block_m == 128
        narrow = keep or (dtype in FP8 and machine.capability == 90)
        narrow = narrow or (specialized and (weights > 1 or dtype.itemsize != 2))
        low = weights > 1 and precision == "tf32" and 0 < machine.capability < 90
        limit = ALL_REGISTERS if narrow and machine.clock == "cuda" else config.max_registers
        if specialized:  # a limit would be of all warps alike, which partitions are not
            limit = 0
        config = replace(
            config,
            block_m=min(config.block_m, 64 if low else 128),
            block_n=min(config.block_n, 128 if narrow else 256) // weights,
            block_k=config.block_k if precise else config.block_k * 2 // dtype.itemsize,
            max_registers=limit,
            specialized=specialized,
            halves=config.tma and weights == 1 and config.block_n == 256 and not narrow,
        )
    return config


def with_tile(default: Config, found: Mapping[str, int]) -> Config:
    """The tile of a tuned entry, or the default where there is none.

    What the entry leaves open follows from its tile: by TMA if the default is, halves if it is wide.
    """
    tile = tuned.tile(default, found)
    if found and "halves" not in found:
        tile = replace(tile, halves=tile.tma and tile.block_n == 256)
    return tile


def fits(config: Config, x: Tensor, y: Tensor, machine: Machine) -> bool:
    """Whether shared memory holds what TMA stores of a tile at once beside the operands of all stages."""
    operands = config.num_stages * (config.block_m + config.block_n) * config.block_k * x.element_size()
    stored = config.block_m * (config.block_n >> config.halves) * y.element_size()
    return machine.clock == "host" or operands + stored + BARRIER_BYTES <= machine.shared_bytes


def even_depth(xs: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Operands [T, K_i] and [N, K_i], padded with columns of zeros where rows are contiguous but not a multiple of 16
    bytes long, as in a layer whose columns the ranks do not divide evenly. Layouts are kept. See `even_columns`.
    """
    deep_xs, deep_weights = list(xs), list(weights)
    for i, (x, w) in enumerate(zip(xs, weights, strict=True)):
        if x.shape[1] * x.element_size() % 16 and 1 in (x.stride(1), w.stride(1)):
            deep_xs[i], deep_weights[i] = even_columns(x), even_columns(w)
            if w.stride(1) != 1:  # columns one after another
                deep_weights[i] = torch.nn.functional.pad(w.t(), (0, 0, 0, -w.shape[1] % VECTOR)).t()
    return deep_xs, deep_weights


def even_columns(dy: Tensor) -> Tensor:
    """dy [T, N], N a multiple of VECTOR: columns of zeros are appended where it is not.

    Rows of another length go neither by TMA nor by asynchronous copies, so the matmul's loop would not be pipelined.
    The copy is one pass over dy, of which the matmul reads each part several times.
    """
    missing = -dy.shape[1] % VECTOR
    return torch.nn.functional.pad(dy, (0, missing)) if missing else dy
