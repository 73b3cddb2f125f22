"""How a kernel loads a matmul's operands: by pointer or TMA. For local matmuls also their tiles and precision.

A TMA descriptor holds its operand's address and is a kernel argument, like a pointer: a captured CUDA graph keeps both.
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
MOST_DESCRIPTORS = 4  # number of descriptor parameters of a kernel
# Names of a kernel's parameters. The kernel also gets the pointers and their strides.
DESCRIPTORS, W_DESCRIPTORS, X_DESCRIPTORS = (
    tuple([f"{kind}descriptor{i}" for i in range(MOST_DESCRIPTORS)]) for kind in ("", "w_", "x_")
)
LOW = 64
SHORTEST_BYTES = 32  # bytes of K that one tensor-core instruction takes
BARRIER_BYTES = 1024  # upper bound on the shared memory of a kernel's barriers
FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2)


def describable(x: Tensor) -> bool:
    """Whether TMA can load a matrix: its address and row stride are multiples of 16 bytes, its rows are contiguous and
    do not overlap, it is not empty, its rows and columns fit in 32 bits, and the row stride in bytes fits in 40.

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
    """The TMA descriptor of a matrix that is `describable`, made without its constructor, which would check it again.

    An eager call makes up to eight, and the checks take some microseconds each time.

    across   describe x transposed
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

    TMA needs contiguous rows, either of all weights or of all weights transposed, as in a backward matmul (ACROSS).
    x_i is loaded by TMA only if the weights are, and not if a rank's rows are `batch` separate runs.
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
    """Adapt a default configuration to a kernel with `local_operands`: see `of_vectors`."""
    taken = local_operands(config, xs, weights, batch)
    return of_vectors(config, machine, *(() if taken["X_TMA"] else xs), *(() if taken["TMA"] else weights))


def weights_by_tma(config: Config, weights: Sequence[Tensor]) -> tuple[bool, bool]:
    """Whether TMA can load all weights [N_i, K_i] by contiguous rows or columns, and whether as [K_i, N_i]."""
    if takes_tma(config, *weights):
        return True, False
    across = takes_tma(config, *(w.t() for w in weights))
    return across, across


def describe(
    args: dict[str, Any], names: Sequence[str], matrices: Sequence[Tensor], block: list[int], across: bool = False
) -> None:
    """Add the matrices' descriptors to a launch's arguments: see `described`. across: describe them transposed."""
    for name, x in zip(names, matrices):
        args[name] = described(x, block, across)


def describe_weights(
    args: dict[str, Any], launch: Launch, weights: Sequence[Tensor], names: Sequence[str] = DESCRIPTORS
) -> None:
    """The same for the weights of a launch that loads them by TMA; its ACROSS says whether as [K_i, N_i]."""
    config, across = launch.config, launch.args["ACROSS"]
    block = [config.block_k, config.block_n] if across else [config.block_n, config.block_k]
    describe(args, names, weights, block, across)


def describe_operands(args: dict[str, Any], launch: Launch, xs: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    """The same for a launch with `local_operands`: its weights, and the x_i if they are loaded by TMA too."""
    describe_weights(args, launch, weights, W_DESCRIPTORS)
    if launch.args["X_TMA"]:
        describe(args, X_DESCRIPTORS, xs, [launch.config.block_m, launch.config.block_k])


def group_operands(
    config: Config, xs: Sequence[Tensor], weights: Sequence[Tensor], *, transposed: bool = True
) -> dict[str, Any]:
    """TMA, X_TMA and ACROSS of a kernel of ragged groups, see Note [Groups by TMA] in kernels/grouped_matmul.py.

    xs          [R, K]      rows that no peer writes and no index selects; other rows are loaded by pointers
    weights     [E, N, K]   stacked in memory, plain or transposed
    transposed  whether the kernel supports transposed weights
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
    """The configuration of `of_vectors`, with shorter tiles if that changes it; and its `group_operands`.

    read       rows [R, K] that the kernel multiplies
    by_index   an index selects the rows, which rules out TMA
    """
    taken = group_operands(config, read, weights, transposed=transposed)
    rows = () if taken["X_TMA"] and not by_index else read
    shorter = of_vectors(config, machine, *rows, *(() if taken["TMA"] else weights))
    if shorter is config:
        return config, taken
    shorter = replace(shorter, block_m=min(config.block_m, LOW))
    return shorter, group_operands(shorter, read, weights, transposed=transposed)


def _stacks(config: Config, weights: Sequence[Tensor]) -> bool:
    """Whether TMA can load each [E, N, K] as [E * N, K]."""
    follow = all(w.shape[0] == 1 or w.stride(0) == w.shape[1] * w.stride(1) for w in weights)
    return follow and takes_tma(config, *map(stacked, weights))


def stacked(w: Tensor) -> Tensor:
    """View [E, N, K] as [E * N, K]; one expert's rows must follow another's."""
    e, n, k = w.shape
    return w.as_strided((e * n, k), (w.stride(1), w.stride(2)))


def grouped_descriptors(
    config: Config, args: Mapping[str, Any], xs: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[Sequence[Any], Sequence[Any]]:
    """The x_i and weights of a launch, or their descriptors if TMA loads them. `args` has the launch's
    `group_operands`."""
    if args.get("X_TMA"):
        xs = [described(x, [config.block_m, config.block_k]) for x in xs]
    if args.get("ACROSS"):
        weights = [described(stacked(w.mT), [config.block_k, config.block_n]) for w in weights]
    elif args["TMA"]:
        weights = [described(stacked(w), [config.block_n, config.block_k]) for w in weights]
    return xs, weights


def takes_tma(config: Config, *matrices: Tensor) -> bool:
    """Whether a fused kernel loads these by TMA. It never does for fp32, which it multiplies in full precision."""
    if not config.tma or not 0 < len(matrices) <= MOST_DESCRIPTORS:
        return False
    return all(x.dtype != torch.float32 and describable(x) for x in matrices)


def within_reach(config: Config, precision: str, matrices: Sequence[Tensor]) -> Config:
    """Disable TMA in the configuration if any operand is unsupported.

    fp32 in full precision is multiplied from registers, and TMA cannot load into registers.
    """
    precise = precision == "ieee" and matrices[0].dtype == torch.float32
    if config.tma and (precise or not all(map(describable, matrices))):
        return by_pointers(config)
    return config


def of_vectors(config: Config, machine: Machine, *by_pointer: Tensor) -> Config:
    """The configuration unchanged if all these operands can be loaded in vectors of 16 bytes; else with the shortest
    block_k that tensor cores take.

    Other rows are loaded element by element, and a thread holds an address for each of its elements of a block; with a
    longer block they spill. (Local memory is not only slow. If ranks share a GPU, the first kernel that needs more of
    it than is allocated waits for all running kernels, which may be waiting for it.)
    """
    if machine.clock == "host" or all(x.dtype == torch.float32 or _in_vectors(x) for x in by_pointer):
        return config
    return replace(config, block_k=min(config.block_k, SHORTEST_BYTES // by_pointer[0].element_size()))


def _in_vectors(x: Tensor) -> bool:
    """Whether the compiler can tell that rows, or columns, of [.., M, K] begin and end at multiples of 16 bytes."""
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
    """Tiles of a matmul of m rows by `weights` weights of n rows each, alone on the machine.

    keep: their products are stored too.

    Tiles are as wide as for 16-bit operands, and as deep in bytes: tf32 has half as many k, fp8 twice as many. The
    columns of several weights share a tile. Tiles that the lint shows to spill are smaller: for fp8 on sm_90, which
    keeps sums twice; for products that are kept; for the largest users of a warp partition on sm_100; and for two
    weights in tf32 on sm_80.
    """
    precise = dtype == torch.float32 and precision == "ieee"
    config = tiles(machine, torch.float32 if precise else torch.bfloat16, m, weights * n, n % VECTOR == 0)
    if machine.clock != "host":
        specialized = config.tma and machine.capability // 10 == 10 and config.block_m == 128
        narrow = keep or (dtype in FP8 and machine.capability == 90)
        narrow = narrow or (specialized and (weights > 1 or dtype.itemsize != 2))
        low = weights > 1 and precision == "tf32" and 0 < machine.capability < 90
        limit = ALL_REGISTERS if narrow and machine.clock == "cuda" else config.max_registers
        if specialized:  # a limit would apply to all warps, but partitions need different numbers
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
    """The tile of a tuned entry, or the default if there is none.

    Fields missing from the entry are derived: TMA from the default, halves from the width of the tile.
    """
    tile = tuned.tile(default, found)
    if found and "halves" not in found:
        tile = replace(tile, halves=tile.tma and tile.block_n == 256)
    return tile


def fits(config: Config, x: Tensor, y: Tensor, machine: Machine) -> bool:
    """Whether shared memory holds the part of a tile that TMA stores at once plus the operands of all stages."""
    operands = config.num_stages * (config.block_m + config.block_n) * config.block_k * x.element_size()
    stored = config.block_m * (config.block_n >> config.halves) * y.element_size()
    return machine.clock == "host" or operands + stored + BARRIER_BYTES <= machine.shared_bytes


def even_depth(xs: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Operands [T, K_i] and [N, K_i], padded with columns of zeros if rows are contiguous but not a multiple of 16
    bytes long, as in a layer with an uneven split of columns. Layouts are kept. See `even_columns`.
    """
    deep_xs, deep_weights = list(xs), list(weights)
    for i, (x, w) in enumerate(zip(xs, weights, strict=True)):
        if x.shape[1] * x.element_size() % 16 and 1 in (x.stride(1), w.stride(1)):
            deep_xs[i], deep_weights[i] = even_columns(x), even_columns(w)
            if w.stride(1) != 1:  # columns one after another
                deep_weights[i] = torch.nn.functional.pad(w.t(), (0, 0, 0, -w.shape[1] % VECTOR)).t()
    return deep_xs, deep_weights


def even_columns(dy: Tensor) -> Tensor:
    """dy [T, N], padded with columns of zeros to a multiple of VECTOR.

    Rows of another length can use neither TMA nor asynchronous copies, so the matmul's loop would not be pipelined.
    The copy is one pass over dy; the matmul reads each part of dy several times.
    """
    missing = -dy.shape[1] % VECTOR
    return torch.nn.functional.pad(dy, (0, missing)) if missing else dy
