"""Compile every fused kernel for GPUs that are not here, with the configurations the launchers would choose.

    python compile_kernels.py FOLDER sm_90 sm_80 gfx942

writes FOLDER/TARGET-DTYPE-SHAPE-KERNEL.{asm,ttgir,usage}. A process that interprets cannot compile; so this is one
of its own, without TRITON_INTERPRET. Tensors on the CPU stand in for operands: only dtype, strides and alignment
count.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from fusedtp.ops.launch import Machine, gather, scatter
from fusedtp.ops.launch.run import Launch

TARGETS = {
    "sm_90": (GPUTarget("cuda", 90, 32), Machine("cuda", 132, 232448)),
    "sm_80": (GPUTarget("cuda", 80, 32), Machine("cuda", 108, 166912)),
    "gfx942": (GPUTarget("hip", "gfx942", 64), Machine("hip", 304, 65536)),
}
SHAPES = {"large": (8192, 4096, 4096), "odd": (68, 1000, 4112)}  # T, N, K; odd: few rows, tails in N and K
CASES = [("bfloat16", "large"), ("bfloat16", "odd"), ("float32", "large")]


def view() -> SimpleNamespace:
    words = lambda n, dtype=torch.int64: torch.zeros(n, dtype=dtype)  # noqa: E731
    return SimpleNamespace(
        data_ptrs=words(4),
        flag_ptrs=words(4),
        sig_ptrs=words(4),
        epoch=words(1, torch.int32),
        status=words(8),
        slot_bytes=1 << 30,
        flags_per_source=4096,
        ranks_per_device=1,
        meet=None,
        failure=words(8),
        timeout_s=600.0,
    )


def launches(machine: Machine, dtype: torch.dtype, t: int, n: int, k: int) -> Iterator[Launch]:
    """A launch of each kernel, as rank 1 of 4."""
    empty = lambda *shape: torch.empty(*shape, dtype=dtype)  # noqa: E731
    rows, sig = SimpleNamespace(sizes=(t // 4,) * 4, batch=1), 12345
    x, xs, w, bias = empty(t // 4, k), empty(t, k), empty(n, k), empty(n)
    weights, biases = [w, empty(n // 2, k)], [None, empty(n // 2)]
    yield gather.plan_matmul(view(), 1, 4, x, weights, biases, rows, sig, True, None, machine)[0]
    yield gather.plan_wgrad(view(), 1, 4, x, [empty(t, n), empty(t, n // 2)], rows, sig, None, machine)[0]
    yield scatter.plan_reduce_scatter(view(), 1, 4, xs, w, bias, rows, sig, None, machine)[0]
    yield scatter.plan_one_shot(view(), 1, 4, xs, w, bias, sig, None, machine)[0]
    yield scatter.plan_two_shot(view(), 1, 4, xs, w, bias, sig, None, machine)[0]


def compiled(launch: Launch, target: GPUTarget) -> triton.compiler.CompiledKernel:
    """What a launch on such a device would compile: the same specialisation of its arguments."""
    kernel, backend = launch.kernel, make_backend(target)
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = binder(**launch.args, **launch.options)
    packed = kernel._pack_args(backend, {**launch.options, "debug": False}, bound, specialization, options)
    options, signature, constants, attributes = packed
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options=options.__dict__)


def main(folder: Path, targets: list[str]) -> None:
    for name in targets:
        target, machine = TARGETS[name]
        for dtype, shape in CASES if name == "sm_90" else CASES[:1]:
            for launch in launches(machine, getattr(torch, dtype), *SHAPES[shape]):
                made = compiled(launch, target)
                stem = f"{name}-{dtype}-{shape}-{launch.kernel.fn.__name__}"
                (folder / f"{stem}.asm").write_text(made.asm.get("ptx") or made.asm["amdgcn"])
                (folder / f"{stem}.ttgir").write_text(made.asm["ttgir"])
                if "cubin" in made.asm:
                    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                        file.write(made.asm["cubin"])
                        file.flush()
                        dump = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
                        usage = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
                    (folder / f"{stem}.usage").write_text(usage)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
