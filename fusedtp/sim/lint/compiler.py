"""Compiles kernels for GPUs that need not be here, and keeps what the rules read.

    made = compiled(CompileCase("kernel", "sm_90", launch))   # one of each kernel and specialisation

Limits of targets: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; AMD Instinct MI300
(CDNA3) ISA guide, "Vector General-Purpose Registers" and "LDS"; LLVM "User Guide for AMDGPU Backend" for the granules
of gfx942.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from ..case import Case, Launch, Run
from ..launching import plain
from .listing import AMD, PTX, Listing, Source

# -- targets -----------------------------------------------------------------------------------------------------------

KIB = 1024
TENSOR_COLUMNS = 512


@dataclass(frozen=True)
class Target:
    """One kind of GPU.

    arch               as Triton's GPUTarget takes it
    wave               threads of a warp or wavefront
    processors         SMs or CUs
    shared_limit       bytes of shared memory that one program may use
    shared_processor   bytes of one SM or CU; `shared_reserved` of them the system takes for each program
    registers          a lane's registers in one SIMD (AMD) or the SM's in all (NVIDIA); granule: of an allocation
    """

    name: str
    backend: str
    arch: int | str
    wave: int
    processors: int
    shared_limit: int
    shared_processor: int
    shared_reserved: int
    registers: int
    register_granule: int
    max_waves: int  # of one SM, or of one SIMD
    max_programs: int
    simds: int = 4

    def occupancy(self, registers: int, shared: int, num_warps: int, tensor_columns: int = 0) -> int:
        """Programs that one SM or CU holds at once; 0: not one.

        NVIDIA: a warp's registers are allocated in units of 256 and the warps of an SM's four parts in equal numbers,
        as in the occupancy calculator (Nsight Compute, "Occupancy"). AMD: a SIMD's 512 registers are divided among
        its waves in granules of 8; a program's waves are spread over the four SIMDs. Blackwell's tensor memory has
        512 columns an SM (PTX ISA, "Tensor Memory").
        """
        by_shared = self.max_programs
        if shared:
            by_shared = self.shared_processor // (shared + self.shared_reserved)
        if shared > self.shared_limit:
            return 0
        if self.backend == "hip":
            granules = -(-max(1, registers) // self.register_granule) * self.register_granule
            waves = min(self.max_waves, self.registers // granules)
            by_registers = waves * self.simds // num_warps if num_warps >= self.simds else waves
        else:
            of_a_warp = -(-registers * self.wave // self.register_granule) * self.register_granule
            part = self.registers // self.simds // max(1, of_a_warp)
            by_registers = min(part * self.simds, self.max_waves) // num_warps
        by_tensor = TENSOR_COLUMNS // tensor_columns if tensor_columns else self.max_programs
        return min(by_shared, by_registers, by_tensor, self.max_programs)


TARGETS = {
    target.name: target
    for target in (
        # A100, H100, B200, MI300X
        Target("sm_80", "cuda", 80, 32, 108, 163 * KIB, 164 * KIB, KIB, 65536, 256, 64, 32),
        Target("sm_90", "cuda", 90, 32, 132, 227 * KIB, 228 * KIB, KIB, 65536, 256, 64, 32),
        Target("sm_100", "cuda", 100, 32, 148, 227 * KIB, 228 * KIB, KIB, 65536, 256, 64, 32),
        Target("gfx942", "hip", "gfx942", 64, 304, 64 * KIB, 64 * KIB, 0, 512, 8, 8, 16),
    )
}


def target(name: str) -> Target:
    """The target of this name. Raises ValueError that lists those there are."""
    if name not in TARGETS:
        raise ValueError(f"no target {name!r}: there are {', '.join(TARGETS)}")
    return TARGETS[name]


# -- compilations ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CompileCase:
    """One compilation, or one of each kernel that a case of the simulator launches.

    kernel        its name, or the case's
    target        a name of TARGETS
    make          a launch; or a case or run of the simulator, where what two ranks reach is shared
    config        what tells this case from others of the kernel; with kernel and target it names the report
    aligned_rows  whether every row in memory that ranks share begins at a multiple of 16 bytes, and so moves 16 bytes
                  at a time
    """

    kernel: str
    target: str
    make: Callable[[], Launch | Run | Case]
    config: str = ""
    aligned_rows: bool = False

    @property
    def key(self) -> str:
        return f"{self.target}/{self.kernel}/{self.config}" if self.config else f"{self.target}/{self.kernel}"


class CompileError(RuntimeError):
    """A kernel that the compiler refuses; the message holds its traceback."""


@dataclass
class Compiled:
    """What one compilation gave.

    case     what was asked for
    files    "ttir", "ttgir" and "ptx" or "amdgcn" -> text
    usage    what the assembler says of registers, stack and spills (NVIDIA)
    shared   arguments through which the kernel reaches memory that other ranks reach too
    """

    case: CompileCase
    name: str
    triton: str
    files: dict[str, str]
    usage: str
    shared: tuple[str, ...]
    shared_bytes: int
    tensor_columns: int
    num_warps: int

    @property
    def target(self) -> Target:
        return target(self.case.target)

    @cached_property
    def source(self) -> Source:
        return Source(self.files["ttir"], self.shared)

    @cached_property
    def listing(self) -> Listing:
        kind = "ptx" if "ptx" in self.files else "amdgcn"
        return Listing(self.files[kind], PTX if kind == "ptx" else AMD)


def compiled(case: CompileCase) -> list[Compiled]:
    """Compiles in this process, which must not interpret. Raises CompileError; ValueError for an unknown target."""
    chosen = target(case.target)
    try:
        with environment():
            return _compiled(case, chosen)
    except Exception as error:
        said = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        raise CompileError(f"{case.key}: {said}") from error


def _compiled(case: CompileCase, chosen: Target) -> list[Compiled]:
    import triton
    from triton.backends.compiler import GPUTarget

    gpu, made, seen = GPUTarget(chosen.backend, chosen.arch, chosen.wave), [], set()
    for launch, shared in _launches(case.make()):
        source, options = specialised(launch.kernel, launch.args, launch.options, gpu)
        if (key := (source.hash(), repr(options))) in seen:
            continue
        seen.add(key)
        done = triton.compile(source, target=gpu, options=dict(options))
        said = done.metadata
        made.append(
            Compiled(
                case=case,
                name=said.name,
                triton=triton.__version__,
                files={
                    kind: done.asm[kind] for kind in ("ttir", "ttgir", "ptx", "amdgcn") if kind in done.asm
                },
                usage=_usage(done.asm["cubin"]) if "cubin" in done.asm else "",
                shared=shared,
                shared_bytes=said.shared,
                tensor_columns=getattr(said, "tmem_size", None) or 0,
                num_warps=said.num_warps,
            )
        )
    return made


def _launches(made: Launch | Run | Case) -> list[tuple[Launch, tuple[str, ...]]]:
    """Launches, each with its shared arguments: those in memory of all ranks, or that two ranks were given."""
    if isinstance(made, Launch):
        return [(made, ())]
    run = plain(made.make() if isinstance(made, Case) else made)
    launches = [
        (rank, each) for rank, work in enumerate(run.work) for each in work if isinstance(each, Launch)
    ]
    owners: dict[int, set[int]] = {}
    for rank, launch in launches:
        for _, tensor in _tensors(launch):
            owners.setdefault(tensor.untyped_storage().data_ptr(), set()).add(rank)
    for memory in run.memory:
        for tensor in memory.tensors:
            owners.setdefault(tensor.untyped_storage().data_ptr(), set()).update((-1, -2))
    return [
        (launch, tuple(n for n, t in _tensors(launch) if len(owners[t.untyped_storage().data_ptr()]) > 1))
        for _, launch in launches
    ]


def _tensors(launch: Launch) -> list[tuple[str, torch.Tensor]]:
    return [(name, each) for name, each in launch.args.items() if isinstance(each, torch.Tensor)]


def specialised(kernel: Any, args: dict[str, Any], options: dict[str, int], gpu: Any) -> tuple[Any, Any]:
    """(source, options) that a launch with these arguments would compile: the same specialisation of them."""
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(gpu)
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, chosen = binder(**args, **options)
    packed = kernel._pack_args(backend, {"debug": False, **options}, bound, specialization, chosen)
    chosen, signature, constants, attributes = packed
    return ASTSource(kernel, signature, constants, attributes), chosen.__dict__


def environment() -> Any:
    """While entered: FP fusion as every supported Triton does it by default, and a cache of this checkout's own.

    Triton's cache knows a kernel by its text, not its place: another checkout's entry names that one's files.
    """
    given = os.environ.get("TRITON_CACHE_DIR")
    whole = Path(given) if given else Path.home() / ".triton" / "cache"
    chosen = {
        "TRITON_CACHE_DIR": str(
            whole / ("lint-" + hashlib.sha256(str(Path(__file__)).encode()).hexdigest()[:16])
        ),
        "TRITON_DEFAULT_FP_FUSION": os.environ.get("TRITON_DEFAULT_FP_FUSION", "1"),
    }
    return patch.dict(os.environ, chosen)


def _usage(cubin: bytes) -> str:
    """What the assembler says of registers and local memory; of each instruction that spills, its text."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        dump = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
        if " STACK:0 " in said and " LOCAL:0 " in said:
            return said
        dump[1] = "-sass"
        sass = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    return said + "".join(f"{line.strip()}\n" for line in sass.splitlines() if "STL" in line or "LDL" in line)
