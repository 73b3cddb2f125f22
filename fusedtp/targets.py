"""Target GPUs, which this host may lack: their limits, and compiling a launch for them with Triton.

Limits: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; AMD Instinct MI300 (CDNA3) ISA
guide, "Vector General-Purpose Registers" and "LDS"; LLVM "User Guide for AMDGPU Backend" for the granules of gfx942.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

KIB = 1024
TENSOR_COLUMNS = 512


@dataclass(frozen=True)
class Target:
    """One kind of GPU.

    arch               as Triton's GPUTarget takes it
    wave               threads of a warp or wavefront
    processors         SMs or CUs
    shared_limit       bytes of shared memory that one program may use
    shared_processor   bytes of one SM or CU; the system reserves `shared_reserved` of them for each program
    registers          registers of one lane of a SIMD (AMD), or of the whole SM (NVIDIA), allocated in granules
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
        """Programs that are resident on one SM or CU at once; 0 if not even one fits.

        NVIDIA: a warp's registers are allocated in units of 256, and warps are spread evenly over an SM's four parts,
        as in the occupancy calculator (Nsight Compute, "Occupancy"). AMD: a SIMD's 512 registers are divided among
        its waves in granules of 8; a program's waves are spread over the four SIMDs. Blackwell's tensor memory has
        512 columns per SM (PTX ISA, "Tensor Memory").
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
    """The target of this name. Raises ValueError that lists the known targets."""
    if name not in TARGETS:
        raise ValueError(f"unknown target {name!r}: it must be one of {', '.join(TARGETS)}")
    return TARGETS[name]


def specialised(kernel: Any, args: dict[str, Any], options: dict[str, int], gpu: Any) -> tuple[Any, Any]:
    """(source, options) that a launch with these arguments would compile, with the same specialisation."""
    from triton.compiler import ASTSource

    backend, binder = _binder(kernel, gpu)
    bound, specialization, chosen = binder(**args, **options)
    packed = kernel._pack_args(backend, {"debug": False, **options}, bound, specialization, chosen)
    chosen, signature, constants, attributes = packed
    kind: Any = ASTSource
    if kernel.is_gluon():
        from triton.experimental.gluon import _runtime

        kind = _runtime.GluonASTSource
    return kind(kernel, signature, constants, attributes), chosen.__dict__


@lru_cache
def _binder(kernel: Any, gpu: Any) -> tuple[Any, Any]:
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(gpu)
    return backend, create_function_from_signature(kernel.signature, kernel.params, backend)


@contextmanager
def environment(apart: str = "") -> Iterator[None]:
    """While entered: this Triton's default of FP fusion, unless told otherwise, and a private cache for this checkout.

    Triton's cache identifies a kernel by its text, not its path, so an entry of another checkout would name that
    checkout's files. `apart` distinguishes further entries.
    """
    from triton import knobs

    fuses = str(int(getattr(knobs.language, "default_fp_fusion", True)))  # named, it gives no warning
    given = os.environ.get("TRITON_CACHE_DIR")
    whole = Path(given) if given else Path.home() / ".triton" / "cache"
    chosen = {
        "TRITON_CACHE_DIR": str(whole / ("fusedtp-" + hashlib.sha256(f"{__file__} {apart}".encode()).hexdigest()[:16])),
        "TRITON_DEFAULT_FP_FUSION": os.environ.get("TRITON_DEFAULT_FP_FUSION", fuses),
    }
    before = {name: os.environ.get(name) for name in chosen}
    os.environ.update(chosen)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


def compiled_to_ptx(source: Any, options: dict[str, Any], gpu: Any, replace: Mapping[Any, Any]) -> Any:
    """Compile the output of `specialised` to PTX: Triton's CompiledKernel without a cubin.

    replace   device function -> the function to call instead, or None to drop the call
    """
    import triton

    file = source.fn.fn.__code__.co_filename  # a cache entry names lines of this file
    with _replaced(replace) as key, _inlined(), environment(f"{file} {key}"), _without_assembler():
        return triton.compile(source, target=gpu, options=dict(options))


@contextmanager
def _replaced(replace: Mapping[Any, Any]) -> Iterator[str]:
    """While entered, calls of these device functions compile to others. Yields the part of the cache key for this."""
    import triton.language as tl
    from triton.compiler.code_generator import CodeGenerator

    own: Any = CodeGenerator.call_Function
    bodies: dict[int, Any] = {id(tl.device_print): None}
    bodies |= {id(theirs): ours for theirs, ours in replace.items()}

    def call(self: Any, node: Any, fn: Any, args: Any, kws: Any) -> Any:
        if id(fn) not in bodies:
            return own(self, node, fn, args, kws)
        body = bodies[id(fn)]
        return None if body is None else own(self, node, body, args, kws)

    names = [[_identity(function) for function in pair] for pair in replace.items()]
    with patch.object(CodeGenerator, "call_Function", call):
        yield hashlib.sha256(repr(sorted(names)).encode()).hexdigest() if names else ""


@contextmanager
def _inlined() -> Iterator[None]:
    """While entered, triton.jit(noinline=True) functions are inlined: the PTX machine does not support calls."""
    from triton.compiler.code_generator import CodeGenerator

    own: Any = CodeGenerator.call_JitFunction

    def call(self: Any, fn: Any, *args: Any, **kws: Any) -> Any:
        with patch.object(fn, "noinline", False):
            return own(self, fn, *args, **kws)

    with patch.object(CodeGenerator, "call_JitFunction", call):
        yield


def _identity(function: Any) -> str:
    """A name that is the same in every process; for a triton.jit function it covers its source and its callees."""
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__name__', function)}"
    return f"{name} {getattr(function, 'cache_key', '')}"


@contextmanager
def _without_assembler() -> Iterator[None]:
    """While entered, compilation stops at PTX: ptxas takes longer than all earlier stages, and no cubin is needed."""
    import triton

    def hook(
        backend: Any = None,
        stages: Any = None,
        options: Any = None,
        language: Any = None,
        capability: Any = None,
    ) -> Any:
        if stages is None:
            return "ptx only", "ptx only"
        stages["cubin"] = lambda source, metadata: b""
        return None

    runtime = triton.knobs.runtime
    before = runtime.add_stages_inspection_hook
    runtime.add_stages_inspection_hook = hook
    try:
        yield
    finally:
        runtime.add_stages_inspection_hook = before
