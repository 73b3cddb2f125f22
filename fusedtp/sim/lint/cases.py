"""What is compiled: the library's own kernels in the configurations that launchers choose, and kernels of others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fusedtp.ops.launch.config import VECTOR

OWN = (
    "all_gather_matmul_kernel",
    "all_gather_wgrad_kernel",
    "matmul_reduce_scatter_kernel",
    "one_shot_kernel",
    "two_shot_kernel",
    "matmul_kernel",
    "moe_dispatch_kernel",
    "moe_combine_kernel",
    "moe_dispatch_matmul_kernel",
    "moe_matmul_combine_kernel",
    "bump_epoch",
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
)
SIGNALS = ("bump_epoch", "meet_kernel")  # have no configuration
EXCHANGES = ("moe_dispatch_kernel", "moe_combine_kernel", "moe_matmul_combine_kernel")  # nothing comes by TMA
ARRIVING = ("moe_dispatch_matmul_kernel",)  # products of rows that travel
RETURNING = ("moe_matmul_combine_kernel",)  # and that travel home
LOCAL = ("matmul_kernel",)  # of one device: in more variants
GROUPED = OWN[OWN.index("grouped_matmul_kernel") : OWN.index("rms_norm_kernel")]  # of ragged groups
ELEMENTWISE = OWN[OWN.index("rms_norm_kernel") :]  # in the variants of the same name


@dataclass(frozen=True)
class Variant:
    """A call of one of the library's operations, from which the launcher plans.

    rows     T, of all ranks
    widths   N of each weight; operations of one weight take the first
    grads    dtype of weight gradients where not the operands'
    targets  those it is compiled for; () all
    precision, activation   of matmuls on one device
    tma      not: by pointers, whatever the target
    batch    runs of rows that each rank of a fused operation has
    link     femtoseconds a byte takes on a link that is held; None: none is
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
    link: int | None = None

    @property
    def aligned_rows(self) -> bool:
        """Whether the compiler knows of every row that it begins at a multiple of 16 bytes."""
        return all(extent % VECTOR == 0 for extent in (*self.widths, self.k))


# Between them: every dtype, tiles that fill the machine and few rows, one weight and two, gathered kept or not, bias
# or none, even and odd K, two ranks and eight; last, widths of which the compiler knows no alignment.
VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("bf16", "bfloat16", 8, 8192, (4096, 2048), 4096, bias=True, keep=True),
        Variant("fp16-odd", "float16", 2, 68, (1008, 496), 4112, bias=True, grads="float32"),
        Variant("fp32", "float32", 2, 8192, (4096,), 4096),
        Variant("bf16-unaligned", "bfloat16", 2, 68, (1001, 499), 4112, targets=("sm_90", "gfx942")),
    )
}

# As benchmarks of ranks that share a GPU run them, see Note [A held link] in kernels/signals.py.
HELD = replace(VARIANTS["bf16"], name="bf16-link", targets=("sm_90",), link=17778)
EXCHANGE_VARIANTS = VARIANTS | {HELD.name: HELD}

# Their default is TMA for what no peer writes; rows in two runs, which a reduction reads by pointers and no others do.
FUSED_VARIANTS = EXCHANGE_VARIANTS | {
    variant.name: variant
    for variant in (
        replace(VARIANTS["bf16"], name="bf16-pointers", targets=("sm_90", "sm_100"), tma=False),
        replace(VARIANTS["bf16"], name="bf16-runs", targets=("sm_90", "sm_100"), batch=2),
    )
}

# Their default is TMA where the target has it; beside it pointers, TF32, and fp8 where there are units for it.
LOCAL_VARIANTS = VARIANTS | {
    variant.name: variant
    for variant in (
        Variant("bf16-pointers", "bfloat16", 1, 8192, (4096,), 4096, targets=("sm_90", "sm_100"), tma=False),
        Variant("tf32", "float32", 1, 8192, (4096,), 4096, bias=True, precision="tf32", activation="gelu"),
        Variant("fp8", "float8_e4m3fn", 1, 8192, (4096,), 4096, bias=True, targets=("sm_90", "sm_100")),
        Variant("fp8-fnuz", "float8_e4m3fnuz", 1, 8192, (4096,), 4096, bias=True, targets=("gfx942",)),
        Variant("fp8-few", "float8_e4m3fn", 1, 16, (4096,), 4096, targets=("sm_90", "sm_100")),
        Variant("bf16-few", "bfloat16", 1, 16, (4096,), 4096, bias=True, activation="gelu_pytorch_tanh"),
    )
}

# By pointers whatever the target, and no fp8; without a bias, the products of two weights, transposed as in dgrad.
GROUPED_VARIANTS = {
    variant.name: variant
    for variant in (
        *(v for v in LOCAL_VARIANTS.values() if v.tma and not v.dtype.startswith("float8")),
        Variant("bf16-pair", "bfloat16", 1, 8192, (4096,), 4096),
        Variant("tf32-pair", "float32", 1, 8192, (4096,), 4096, precision="tf32"),
    )
}

# Gated where there are two weights.
ARRIVING_VARIANTS = EXCHANGE_VARIANTS | {
    variant.name: variant
    for variant in (
        Variant("bf16-plain", "bfloat16", 8, 8192, (4096,), 4096),
        Variant("tf32-pair", "float32", 2, 8192, (4096, 4096), 4096, precision="tf32", activation="gelu"),
    )
}

# With weights where there is a bias; else the sum of two products, without.
PAIR = Variant("bf16-pair", "bfloat16", 8, 8192, (4096,), 4096)
RETURNING_VARIANTS = EXCHANGE_VARIANTS | {PAIR.name: PAIR}

ELEMENTWISE_VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("bf16", "bfloat16", 1, 8192, (14336,), 4096),
        Variant("fp32", "float32", 1, 8192, (14336,), 8192),  # the widest rows
        Variant("fp16-odd", "float16", 1, 8192, (1001,), 1001),
    )
}


@dataclass(frozen=True)
class CompileCase:
    """One compilation.

    kernel   name of the function
    target   a name of targets.TARGETS
    config   what tells this case from others of the kernel; with kernel and target it names the report
    variant  of the library's own kernels: the call to plan for
    path     of a kernel of somebody else's: the file that defines it
    launch   of such a file: the case (or a function that makes one) whose launches are compiled; or else
    signature, constexprs, options   as triton.compiler.ASTSource takes them: {"x": "*bf16", "n": "i32"}, {"BLOCK": 16}
    aligned  arguments that are multiples of 16
    shared   arguments that point to memory which another rank reads or writes while the kernel runs; None: all
             pointers. An address that the kernel reads from memory counts always.
    aligned_rows   whether every row in memory that ranks share begins at a multiple of 16 bytes, and so moves 16 bytes
             at a time
    """

    kernel: str
    target: str
    config: str = ""
    variant: Variant | None = None
    path: str = ""
    launch: str = ""
    signature: dict[str, str] = field(default_factory=dict)
    constexprs: dict[str, Any] = field(default_factory=dict)
    options: dict[str, int] = field(default_factory=dict)
    aligned: tuple[str, ...] = ()
    shared: tuple[str, ...] | None = None
    aligned_rows: bool = False

    @property
    def key(self) -> str:
        return f"{self.target}/{self.kernel}/{self.config}" if self.config else f"{self.target}/{self.kernel}"


def variants_of(kernel: str) -> dict[str, Variant]:
    """In which variants a kernel is compiled."""
    if kernel in ELEMENTWISE:
        return ELEMENTWISE_VARIANTS
    if kernel in GROUPED:
        pairs = kernel == "grouped_matmul_kernel"
        return {name: v for name, v in GROUPED_VARIANTS.items() if pairs or not name.endswith("-pair")}
    if kernel in RETURNING:
        return RETURNING_VARIANTS
    if kernel in EXCHANGES:
        return EXCHANGE_VARIANTS
    if kernel in ARRIVING:
        return ARRIVING_VARIANTS
    return LOCAL_VARIANTS if kernel in LOCAL else FUSED_VARIANTS


def own_cases(
    kernels: Sequence[str] | None, targets: Sequence[str], variants: Sequence[str] | None = None
) -> Iterator[CompileCase]:
    """Every (kernel, target, variant) asked for; all where None. Raises ValueError for a name that is none."""
    every = FUSED_VARIANTS | LOCAL_VARIANTS | GROUPED_VARIANTS | ARRIVING_VARIANTS
    for asked, known, what in ((kernels, OWN, "kernel"), (variants, every, "variant")):
        unknown = [name for name in asked or () if name not in known]
        if unknown:
            raise ValueError(f"no {what} {', '.join(unknown)}: there are {', '.join(known)}")
    for target in targets:
        for kernel in kernels or OWN:
            if kernel in SIGNALS:
                yield CompileCase(kernel, target, "", Variant("", "bfloat16", 8, 16, (16,), 16), shared=())
                continue
            known = variants_of(kernel)
            for name in variants or known:
                if name in known and target in (known[name].targets or targets):
                    v = known[name]
                    yield CompileCase(kernel, target, name, v, shared=(), aligned_rows=v.aligned_rows)
