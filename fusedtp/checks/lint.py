"""Lint cases for the library's own kernels, as launched on GPUs that need not be present, in several variants.

CPU tensors replace the operands: only dtype, strides and alignment matter. `python -m fusedtp.checks.lint` compiles
every kernel for every target, prints the table, and exits with 1 on a finding.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from fusedtp.comm.device_view import epoch_words
from fusedtp.lint import TARGETS, CompileCase, Report, Target, check_cases, table
from fusedtp.lint import target as target_named
from fusedtp.ops.all_gather_matmul import most_together
from fusedtp.ops.launch import (
    Launch,
    Machine,
    cross_entropy,
    plain,
    pointwise,
    quantize,
)
from fusedtp.ops.launch.config import VECTOR
from fusedtp.ops.launch.operands import by_pointers, local_config
from fusedtp.ops.matmul_reduce_scatter import FEW_ROWS
from fusedtp.ops.moe import combine, dispatch, grouped
from fusedtp.ops.moe.plan import Exchange, RoutingPlan, index_size, plan_index, plan_sort, unpacked
from fusedtp.ops.moe.rounds import plan_window
from fusedtp.ops.operation import OnRank
from fusedtp.ops.rows import Rows
from fusedtp.sim.case import Launch as Compiles

from .dense import DECLARED, SimulatedWorld, meeting

FUSED = {kernel.function: kernel for _, kernel in DECLARED.values() if not kernel.in_fp8}
IN_FP8 = {kernel.function: kernel for _, kernel in DECLARED.values() if kernel.in_fp8}  # the same functions
SCATTERS = {kernel.function: kernel for _, kernel in DECLARED.values() if kernel.scatters and not kernel.in_fp8}
OWN = (
    *FUSED,
    "matmul_kernel",
    "moe_dispatch_kernel",
    "moe_combine_kernel",
    "moe_dispatch_matmul_kernel",
    "moe_matmul_combine_kernel",
    "moe_sort_kernel",
    "moe_index_kernel",
    "moe_window_kernel",
    "meet_kernel",
    "grouped_matmul_kernel",
    "grouped_gated_kernel",
    "grouped_wgrad_kernel",
    "grouped_gated_backward_kernel",
    "rms_norm_kernel",
    "rms_norm_backward_kernel",
    "swiglu_kernel",
    "swiglu_backward_kernel",
    "rope_kernel",
    "logit_stats_kernel",
    "logit_gradient_kernel",
    "rms_norm_wide_kernel",
    "rms_norm_wide_backward_kernel",
    "quantize_kernel",
    "largest_kernel",
    "pack_kernel",
    "unpack_kernel",
)
MOST_RANKS = 72  # largest NVLink domain
SIGNALS = ("meet_kernel",)  # no configuration
EXCHANGES = ("moe_dispatch_kernel", "moe_combine_kernel")
PLANS = ("moe_sort_kernel", "moe_index_kernel", "moe_window_kernel")  # integers only
LOCAL = ("matmul_kernel",)  # on one device: LOCAL_VARIANTS
GROUPED = OWN[OWN.index("grouped_matmul_kernel") : OWN.index("rms_norm_kernel")]  # ragged groups
ELEMENTWISE = OWN[OWN.index("rms_norm_kernel") :]  # ELEMENTWISE_VARIANTS


@dataclass(frozen=True)
class Variant:
    """A call of one of the library's operations; the launcher plans a launch for it.

    rows     T, of all ranks together
    widths   N of each weight; operations with one weight use the first
    grads    dtype of weight gradients if not that of the operands
    targets  targets to compile for; (): all
    precision, activation   for matmuls on one device
    tma      False: use pointers on every target
    batch    number of batch entries; each rank of a fused operation has a run of rows in each
    products number of parts of K whose products a reduce-scatter adds
    transposed  the weights are stored as [K, N], as in a gradient
    """

    name: str
    dtype: str
    world_size: int
    rows: int
    widths: tuple[int, ...]
    k: int
    bias: bool = False
    keep: bool = False
    grads: str = ""
    targets: tuple[str, ...] = ()
    precision: str = "ieee"
    activation: str = "silu"
    tma: bool = True
    batch: int = 1
    products: int = 1
    transposed: bool = False

    @property
    def aligned_rows(self) -> bool:
        """Whether the compiler knows that every row begins at a multiple of 16 bytes."""
        return all(extent % VECTOR == 0 for extent in (*self.widths, self.k))


def named(*variants: Variant) -> dict[str, Variant]:
    return {variant.name: variant for variant in variants}


# Together these cover every dtype, tiles that fill the machine and few rows, one and two weights, gathered rows kept or
# not, with and without bias, even and odd K, two and eight ranks. The last one has widths of unknown alignment.
VARIANTS = named(
    Variant("bf16", "bfloat16", 8, 8192, (4096, 2048), 4096, bias=True, keep=True),
    Variant("fp16-odd", "float16", 2, 68, (1008, 496), 4112, bias=True, grads="float32"),
    Variant("fp32", "float32", 2, 8192, (4096,), 4096),
    Variant("bf16-unaligned", "bfloat16", 2, 68, (1001, 499), 4112, targets=("sm_90", "gfx942")),
)

# By default, operands that no peer writes use TMA. Rows in two runs: only reductions read them by pointers.
FUSED_VARIANTS = VARIANTS | named(
    replace(VARIANTS["bf16"], name="bf16-pointers", targets=("sm_90", "sm_100"), tma=False),
    replace(VARIANTS["bf16"], name="bf16-runs", targets=("sm_90", "sm_100"), batch=2),
)

WITH_FP8 = ("sm_90", "sm_100")
MAKES_FP8 = ("quantize_kernel", "pack_kernel", "unpack_kernel")

# fp8 rows with their scales, on targets with fp8 matrix units.
FP8_VARIANTS = named(
    Variant(
        "fp8-rows",
        "float8_e4m3fn",
        8,
        8192,
        (4096, 2048),
        4096,
        bias=True,
        keep=True,
        targets=WITH_FP8,
    ),
    Variant("fp8-rows-few", "float8_e5m2", 2, 68, (1001, 499), 4112, targets=WITH_FP8),
)

# Input gradients (dgrad), with weights stored as in their layer; q, k and v give a sum of three products.
SCATTER_VARIANTS = (
    FUSED_VARIANTS
    | FP8_VARIANTS
    | named(
        replace(VARIANTS["bf16"], name="bf16-dgrad", k=12288, products=3, transposed=True),
        replace(
            VARIANTS["fp32"],
            name="fp32-dgrad",
            products=2,
            transposed=True,
            targets=("sm_80", "sm_90", "gfx942"),
        ),
    )
)
FEW_ROWS_VARIANTS = {
    name: replace(variant, rows=FEW_ROWS if variant.world_size == 8 and variant.dtype != "float32" else 64)
    for name, variant in SCATTER_VARIANTS.items()
    if variant.batch == 1
} | named(
    replace(VARIANTS["bf16"], name="bf16-wide", rows=FEW_ROWS, widths=(16384,)),
    replace(SCATTER_VARIANTS["bf16-dgrad"], name="bf16-dgrad-wide", rows=FEW_ROWS, widths=(16384,)),
    replace(FP8_VARIANTS["fp8-rows"], name="fp8-rows-wide", rows=FEW_ROWS, widths=(16384,)),
)
GATHER_VARIANTS = (
    FUSED_VARIANTS
    | FP8_VARIANTS
    | named(replace(VARIANTS["bf16"], name="bf16-dgrad", widths=(4096,), bias=False, keep=True, transposed=True))
)

TOGETHER_VARIANTS = {
    name: replace(variant, rows=most_together(variant.world_size, getattr(torch, variant.dtype)))
    for name, variant in (VARIANTS | FP8_VARIANTS).items()
} | named(
    replace(VARIANTS["bf16"], name="bf16-least", rows=16),
    replace(VARIANTS["bf16"], name="bf16-wide", rows=512, widths=(16384, 16384)),
    replace(VARIANTS["bf16"], name="bf16-wide-pointers", rows=512, widths=(16384, 16384), targets=WITH_FP8, tma=False),
    replace(VARIANTS["bf16"], name="bf16-wide-dgrad", rows=512, widths=(16384,), bias=False, transposed=True),
    replace(FP8_VARIANTS["fp8-rows"], name="fp8-rows-wide", rows=512, widths=(16384, 16384)),
)

# The default is TMA if the target has it; the others cover pointers, TF32, and fp8 on targets with fp8 matrix units.
LOCAL_VARIANTS = VARIANTS | named(
    Variant("bf16-pointers", "bfloat16", 1, 8192, (4096,), 4096, targets=("sm_90", "sm_100"), tma=False),
    Variant("tf32", "float32", 1, 8192, (4096,), 4096, bias=True, precision="tf32", activation="gelu"),
    Variant("fp8", "float8_e4m3fn", 1, 8192, (4096,), 4096, bias=True, targets=("sm_90", "sm_100")),
    Variant("fp8-fnuz", "float8_e4m3fnuz", 1, 8192, (4096,), 4096, bias=True, targets=("gfx942",)),
    Variant("fp8-few", "float8_e4m3fn", 1, 16, (4096,), 4096, targets=("sm_90", "sm_100")),
    Variant("bf16-few", "bfloat16", 1, 16, (4096,), 4096, bias=True, activation="gelu_pytorch_tanh"),
)

# Pointers on every target, no fp8. Without a bias: products of two weights, transposed as in dgrad.
GROUPED_VARIANTS = named(
    *(v for v in LOCAL_VARIANTS.values() if v.tma and not v.dtype.startswith("float8")),
    Variant("bf16-pair", "bfloat16", 1, 8192, (4096,), 4096),
    Variant("tf32-pair", "float32", 1, 8192, (4096,), 4096, precision="tf32"),
)

# Gated if there are two weights.
ARRIVING_VARIANTS = VARIANTS | named(
    Variant("bf16-plain", "bfloat16", 8, 8192, (4096,), 4096),
    Variant("tf32-pair", "float32", 2, 8192, (4096, 4096), 4096, precision="tf32", activation="gelu"),
)

# With routing weights if there is a bias; otherwise the sum of two products without them.
RETURNING_VARIANTS = VARIANTS | named(Variant("bf16-pair", "bfloat16", 8, 8192, (4096,), 4096))

ELEMENTWISE_VARIANTS = named(
    Variant("bf16", "bfloat16", 1, 8192, (14336,), 4096),
    Variant("fp32", "float32", 1, 8192, (14336,), 8192),  # the widest rows
    Variant("fp16-odd", "float16", 1, 8192, (1001,), 1001),
)

# 8 experts per rank; `dtype` is the dtype of ids.
PLAN_VARIANTS = named(Variant("int64", "int64", 8, 8192, (16,), 16), Variant("int32-few", "int32", 2, 6, (16,), 16))

EVERY_VARIANT = (
    PLAN_VARIANTS
    | SCATTER_VARIANTS
    | FEW_ROWS_VARIANTS
    | TOGETHER_VARIANTS
    | LOCAL_VARIANTS
    | GROUPED_VARIANTS
    | ARRIVING_VARIANTS
)


def variants_of(kernel: str) -> dict[str, Variant]:
    """The variants in which a kernel is compiled."""
    if kernel in SIGNALS:
        return {}
    if kernel in MAKES_FP8:
        return {name: replace(v, targets=WITH_FP8) for name, v in ELEMENTWISE_VARIANTS.items()}
    if kernel in ELEMENTWISE:
        return ELEMENTWISE_VARIANTS
    if kernel in PLANS:
        return PLAN_VARIANTS
    if kernel in GROUPED:
        pairs = kernel == "grouped_matmul_kernel"
        return {name: v for name, v in GROUPED_VARIANTS.items() if pairs or not name.endswith("-pair")}
    of = {"matmul_reduce_scatter_kernel": SCATTER_VARIANTS, "all_gather_matmul_kernel": GATHER_VARIANTS}
    of |= dict.fromkeys(("one_shot_kernel", "two_shot_kernel"), FUSED_VARIANTS | FP8_VARIANTS)
    of |= {
        "few_rows_kernel": FEW_ROWS_VARIANTS,
        "few_rows_gather_kernel": TOGETHER_VARIANTS,
        "few_rows_gated_kernel": {n: v for n, v in TOGETHER_VARIANTS.items() if not v.dtype.startswith("float8")},
        "matmul_kernel": LOCAL_VARIANTS,
        "moe_matmul_combine_kernel": RETURNING_VARIANTS,
    }
    of |= {"moe_dispatch_matmul_kernel": ARRIVING_VARIANTS} | dict.fromkeys(EXCHANGES, VARIANTS)
    return of.get(kernel, FUSED_VARIANTS)


def own_cases(
    kernels: Sequence[str] | None, targets: Sequence[str], variants: Sequence[str] | None = None
) -> Iterator[CompileCase]:
    """Every requested (kernel, target, variant); None means all. Raises ValueError for an unknown name."""
    for asked, known, what in ((kernels, OWN, "kernel"), (variants, EVERY_VARIANT, "variant")):
        unknown = [name for name in asked or () if name not in known]
        if unknown:
            raise ValueError(f"unknown {what} {', '.join(unknown)}: it must be one of {', '.join(known)}")
    for target in targets:
        for kernel in kernels or OWN:
            of = variants_of(kernel) or named(Variant("", "bfloat16", 8, 16, (16,), 16))
            for variant in of.values():
                wanted = not variant.name or variant.name in (variants or of)
                if wanted and target in (variant.targets or targets):
                    yield _case(kernel, target, variant)


def _case(kernel: str, target: str, variant: Variant) -> CompileCase:
    made = partial(planned, kernel, variant, machine_of(TARGETS[target]))
    return CompileCase(kernel, target, made, variant.name, bool(variant.name) and variant.aligned_rows)


def check(
    kernels: Sequence[str] | None = None,
    targets: Sequence[str] | None = None,
    *,
    variants: Sequence[str] | None = None,
    done: Callable[[Report], None] | None = None,
) -> list[Report]:
    """Compile the library's kernels for GPUs that need not be present, and check them. None means all.

    kernels, targets, variants   names in OWN, TARGETS, EVERY_VARIANT
    done                         called with each report when it is ready
    Raises ValueError for an unknown name, CompileError if the compiler refuses a kernel.
    """
    names = list(targets or TARGETS)
    for name in names:
        target_named(name)
    return check_cases(list(own_cases(kernels, names, variants)), done=done)


# -- launches ----------------------------------------------------------------------------------------------------------


def machine_of(target: Target) -> Machine:
    """The launchers' description of the target, from which they choose a configuration."""
    capability = target.arch if isinstance(target.arch, int) else 0
    return Machine(target.backend, target.processors, target.shared_limit, capability=capability)


def planned(kernel: str, variant: Variant, machine: Machine) -> Compiles:
    """The library's own launch, on rank 1."""
    if kernel not in LOCAL and not variant.tma:  # as on a GPU without TMA
        machine = replace(machine, capability=0)
    if kernel in SIGNALS:
        return meeting(SimulatedWorld(variant.world_size, 16, 4096, machine), 1, 12345)
    made = _planned(kernel, variant, machine)
    return Compiles(made.kernel, 1, made.args, options=made.options)


def _planned(kernel: str, variant: Variant, machine: Machine) -> Launch:
    if kernel in ELEMENTWISE:
        return _elementwise(kernel, variant, machine)
    if kernel in GROUPED:
        return _grouped(kernel, variant, machine)
    if kernel in LOCAL:
        return _local(variant, machine)
    return _fused(kernel, variant, machine) if kernel in FUSED else _exchange(kernel, variant, machine)


def _fused(kernel: str, variant: Variant, machine: Machine) -> Launch:
    """The launch of a kernel that an operation declares."""
    w, t, k, dtype, batch = variant.world_size, variant.rows, variant.k, variant.dtype, variant.batch
    fp8 = getattr(torch, dtype).itemsize == 1
    rows = Rows((t // w // batch,) * w, batch)
    declared = (IN_FP8 if fp8 else SCATTERS if variant.products > 1 else FUSED)[kernel]

    def empty(*shape: int, of: str = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=getattr(torch, of))

    widths = variant.widths if declared.gathers else variant.widths[:1]
    widths = widths[:1] * 2 if declared.pairs else widths
    sides = {"T": t, "K": k}
    others = [empty(*((sides | {"N": width})[side] for side in declared.others)) for width in widths]
    if variant.transposed:
        count = variant.products if variant.products > 1 else len(widths)
        others = [empty(k // variant.products, widths[0]).t() for _ in range(count)]
    out = "bfloat16" if fp8 else dtype
    biases = [empty(width, of=out) if variant.bias and i == 0 else None for i, width in enumerate(widths)]
    x = empty(t // w if declared.gathers else t, k)
    grads = getattr(torch, variant.grads) if variant.grads else None
    view = _view(w)
    view.multicast = torch.zeros(1, dtype=torch.int64) if machine.capability >= 90 else None
    at = OnRank(view, 1, w, rows, 12345, None, machine)
    return declared.launch(at, x, others, biases, variant.keep, False, grads)[0]


def _exchange(kernel: str, variant: Variant, machine: Any) -> Launch:
    """An exchange of rows of K elements with 8 experts per rank; a token chooses 4."""
    w, t, dtype = variant.world_size, variant.rows // variant.world_size, getattr(torch, variant.dtype)
    at = Exchange("", 1, (t,) * w, 8 * w, 4, 0, "triton")
    at = at._replace(max_rows=at.max_recv_rows)
    index = torch.empty(index_size(at), dtype=torch.int32)
    if kernel == "moe_sort_kernel":
        return plan_sort(torch.empty(t, at.top_k, dtype=dtype), at.num_experts)[0]
    if kernel == "moe_index_kernel":
        return plan_index(torch.empty(w, at.num_experts, dtype=torch.int32), index, at)[0]
    if kernel == "moe_window_kernel":
        most = at._replace(sizes=(t,) * MOST_RANKS, num_experts=4 * MOST_RANKS)  # a program scans all rows of an owner
        shapes = (MOST_RANKS, most.num_experts), (MOST_RANKS * t * at.top_k,)
        table, orders = (torch.empty(shape, dtype=torch.int32) for shape in shapes)
        return plan_window(RoutingPlan(table, orders, index), 1, most)[0]
    words = unpacked(index, at)
    end = (words, at, 12345, None, machine)
    width = variant.k + variant.widths[0] % VECTOR  # may have unknown alignment
    view = _view(w)
    if kernel == "moe_dispatch_matmul_kernel":
        index = torch.empty(t * at.top_k, dtype=torch.int32)
        gated = len(variant.widths) > 1
        shape, offsets = (8, variant.widths[0], variant.k), torch.empty(9, dtype=torch.int32)
        matrices = [torch.empty(shape, dtype=dtype, device="meta") for _ in range(1 + gated)]
        return dispatch.plan_dispatch_matmul(
            view, 1, torch.empty(t, variant.k, dtype=dtype), index, matrices, offsets, words, at, 12345,
            variant.activation if gated else "", gated and variant.keep, None, variant.precision, machine,
        )[0]  # fmt: skip
    if kernel == "moe_dispatch_kernel":
        orders = torch.empty(w * t * at.top_k, dtype=torch.int32)
        return dispatch.plan_dispatch(view, 1, torch.empty(t, width, dtype=dtype), at.top_k, orders, *end)[0]
    choices = torch.empty(t, at.top_k, dtype=torch.int32)
    weights = torch.empty(t, at.top_k) if variant.bias else None
    if kernel == "moe_matmul_combine_kernel":
        h, n, e = torch.empty(at.max_rows, variant.k, dtype=dtype), variant.widths[0], at.experts_here
        experts, offsets = torch.empty(e, n, variant.k, dtype=dtype), torch.empty(e + 1, dtype=torch.int32)
        pairs = 1 if variant.bias else 2  # one product with weights, or the gradients of gate and up
        sums = (choices, weights, words, at, 12345, None, variant.precision)
        given = (view, 1, [h] * pairs, [experts] * pairs, offsets, *sums)
        return combine.plan_matmul_combine(*given, machine)[0]
    return combine.plan_combine(view, 1, torch.empty(at.max_rows, width, dtype=dtype), choices, weights, *end)[0]


def _local(variant: Variant, machine: Any) -> Launch:
    """The plain matmul; fp8 has scales."""
    m, n, k, precision = variant.rows, variant.widths[0], variant.k, variant.precision
    dtype = getattr(torch, variant.dtype)
    fp8 = dtype.itemsize == 1
    out = torch.bfloat16 if fp8 else dtype

    def empty(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=of, device="meta")

    x, weight, bias = empty(m, k), empty(n, k), empty(n, of=out) if variant.bias else None
    config = None if variant.tma else by_pointers(local_config(machine, dtype, precision, m, n))
    scales = (empty(m, 1, of=torch.float32), empty(n, 1, of=torch.float32)) if fp8 else (None, None)
    return plain.plan_matmul(x, weight, bias, out, config, precision, machine, scales)[0]


def _grouped(kernel: str, variant: Variant, machine: Any) -> Launch:
    """Eight experts; forward with a bias, or dgrad with two weights."""
    experts, r, n, k, precision = 8, variant.rows, variant.widths[0], variant.k, variant.precision
    dtype = getattr(torch, variant.dtype)

    def empty(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=of, device="meta")

    x, dy, offsets = empty(r, k), empty(r, n), empty(experts + 1, of=torch.int32)
    weight, transposed = empty(experts, n, k), empty(experts, k, n).mT
    if n % VECTOR:  # rows of odd length are not copied asynchronously, so a loop over them is not pipelined
        transposed = weight
    act, how = variant.activation, (None, precision, machine)
    if kernel == "grouped_matmul_kernel":
        if variant.bias:
            return grouped.plan_matmul([x], [weight], offsets, empty(experts, n), *how)[0]
        return grouped.plan_matmul([x, x], [transposed, transposed], offsets, None, *how)[0]
    if kernel == "grouped_gated_kernel":
        return grouped.plan_gated(x, weight, weight, offsets, act, variant.keep, *how)[0]
    if kernel == "grouped_wgrad_kernel":
        grads = getattr(torch, variant.grads) if variant.grads else dtype
        return grouped.plan_wgrad(dy, x, offsets, grads, *how)[0]
    return grouped.plan_gated_backward(dy, dy, dy, offsets, act, machine)[0]


def _elementwise(kernel: str, variant: Variant, machine: Any) -> Launch:
    dtype, rows, width, wide = getattr(torch, variant.dtype), variant.rows, variant.k, variant.widths[0]

    def empty(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=of, device="meta")

    x, gate, weight = empty(rows, width), empty(rows, wide), empty(width, of=torch.float32)
    act = {"bf16": "silu", "fp32": "gelu"}.get(variant.name, "gelu_pytorch_tanh")
    if "_wide_" in kernel:
        wider = 16384 - width % VECTOR  # may have unknown alignment
        x, weight = empty(rows, wider), empty(wider, of=torch.float32)
    if kernel in ("rms_norm_kernel", "rms_norm_wide_kernel"):
        return pointwise.plan_rms_norm(x, x, weight, 1e-5, machine).whole()[0]
    if kernel in ("rms_norm_backward_kernel", "rms_norm_wide_backward_kernel"):
        inverse_rms = empty(rows, of=torch.float32)
        return pointwise.plan_rms_norm_backward(x, x, x, weight, inverse_rms, machine).whole()[0]
    if kernel == "quantize_kernel":  # rows, columns, and rows too long for one program with a given scale
        kind = torch.float8_e5m2 if variant.name == "bf16" else torch.float8_e4m3fn
        made = torch.empty(rows, width + 16, dtype=kind, device="meta")[:, : width - width % VECTOR]
        scales, one = empty(rows, 4, of=torch.float32), empty(1, of=torch.float32)
        if variant.name == "fp32":
            return quantize.plan_quantize(gate, one, torch.empty_like(gate, dtype=kind), None)
        return quantize.plan_quantize(x if variant.name == "bf16" else empty(width, rows).t(), None, made, scales)
    if kernel in ("pack_kernel", "unpack_kernel"):
        count = width - width % 4
        packed = torch.empty(rows, count + 4 * -(-count // quantize.BLOCK), dtype=torch.uint8, device="meta")
        if kernel == "pack_kernel":
            return quantize.plan_pack(empty(rows, count), packed)
        return quantize.plan_unpack(packed, count, dtype)[0]
    if kernel == "largest_kernel":
        return quantize.plan_largest(x, machine)[0]
    if kernel == "swiglu_kernel":
        return pointwise.plan_swiglu(gate, gate, act, machine).whole()[0]
    if kernel == "swiglu_backward_kernel":
        return pointwise.plan_swiglu_backward(gate, gate, gate, act, machine).whole()[0]
    if kernel.startswith("logit_"):
        logits, labels, row = gate, empty(rows, of=torch.int64), empty(rows, of=torch.float32)
        if kernel == "logit_stats_kernel":
            return cross_entropy.plan_logit_stats(logits, labels, wide, machine)[0]
        return cross_entropy.plan_logit_gradient(logits, logits, labels, wide, row, row, machine)
    q, k, table = empty(1, rows, 32, 128), empty(1, rows, 8, 128), empty(1, rows, 1, 64, of=torch.float32)
    return pointwise.plan_rotate(q, k, table, table, 1, machine).whole()[0]


def _view(world_size: int) -> SimpleNamespace:
    """A device view of a workspace; plans only use the types of its fields."""
    words = torch.zeros(max(8, world_size), dtype=torch.int64)
    return SimpleNamespace(
        data_ptrs=words,
        flag_ptrs=words,
        arrival_ptrs=words,
        epoch=torch.zeros(epoch_words(world_size), dtype=torch.int32),
        status=words,
        slot_bytes=1 << 30,
        flags_per_source=4096,
        ranks_per_device=1,
        multicast=None,
        meet=None,
        failure=words,
        timeout_s=600.0,
    )


# -- the command -------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fusedtp.checks.lint", description=__doc__)
    parser.add_argument("--kernel", action="append", choices=OWN, help="only this one; may be repeated")
    parser.add_argument("--target", action="append", choices=list(TARGETS))
    parser.add_argument("--variant", action="append", choices=list(EVERY_VARIANT))
    given = parser.parse_args(argv)

    from rich.console import Console

    console = Console()
    console.width = max(console.width, 120)
    reports = check(given.kernel, given.target, variants=given.variant)
    console.print(table(reports))
    for report in reports:
        for finding in report.findings:
            console.print(f"{report.key}  {finding}", markup=False, soft_wrap=True)
    return int(any(report.findings for report in reports))


if __name__ == "__main__":
    sys.exit(main())
