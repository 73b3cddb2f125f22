"""Compiles the kernel of a launch with Triton and packs its parameters. Needs no GPU and no assembler.

Kernels are compiled with device_assert enabled and device_print disabled. A device function that the launch replaces
is compiled with the body of its replacement.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusedtp.targets import compiled_to_ptx, environment, specialised
from fusedtp.targets import target as target_named

from ..case import Launch
from ..faults import UnsupportedKernel
from ..memory import symmetric
from . import TARGETS
from .descriptors import NBYTES, TensorMap
from .kernel import Kernel, translated
from .parse import UnsupportedPtx

Edit = Callable[[str], str]
SCRATCH = "%scratch"
CHECKED = {"debug": True, "sanitize_overflow": False}  # device_assert, but no checks of integer overflow


class Compiler:
    """Compiles launches for one target, each specialization once. edit: changes the PTX, to seed a fault."""

    def __init__(self, target: str, edit: Edit | None = None) -> None:
        if target not in TARGETS:
            raise ValueError(f"target is {target!r}; it must be one of {', '.join(TARGETS)}")
        self.target, self.edit = target, edit
        self._made: dict[Any, tuple[str, int, list, int]] = {}

    def compiled(self, launch: Launch) -> tuple[Kernel, dict[str, Any]]:
        """The kernel, and its parameters by name, including the special registers that the launch sets.

        A kernel that needs scratch memory for device-side descriptors gets it; the parameters hold it as SCRATCH.
        Raises UnsupportedPtx for an opcode, UnsupportedKernel for a kernel that does not compile for this target.
        """
        import triton
        from triton.backends.compiler import GPUTarget

        if hasattr(triton.language.zeros, "rewrite"):  # an InterpretedFunction
            raise UnsupportedKernel(
                "triton was imported to interpret kernels: unset TRITON_INTERPRET before triton is imported"
            )
        chosen = target_named(self.target)
        gpu = GPUTarget(chosen.backend, chosen.arch, chosen.wave)
        if launch.options.get("num_ctas", 1) > 1:
            raise UnsupportedPtx(f"{launch.name} needs clusters (unsupported): num_ctas={launch.options['num_ctas']}")
        if launch.options.get("launch_pdl"):
            raise UnsupportedPtx(f"{launch.name} may overlap the previous launch (unsupported): launch_pdl")
        try:
            with environment():
                source, options = specialised(launch.kernel, launch.args, {**launch.options, **CHECKED}, gpu)
            chosen_by = (source.signature, source.constants, source.attrs, sorted(launch.options.items()))
            replaced = tuple((id(theirs), id(ours)) for theirs, ours in launch.replace.items())
            key = launch.kernel.fn, *map(repr, chosen_by), replaced
            if key not in self._made:
                self._made[key] = self._compile(source, options, gpu, launch.replace)
        except (UnsupportedKernel, MemoryError):
            raise
        except Exception as error:
            raise UnsupportedKernel(f"{launch.name} does not compile for {self.target}: {_said(error)}") from error
        text, shared, described, scratch = self._made[key]
        made, maps = translated(text, shared), iter(described)
        if made.listing.shared > chosen.shared_limit:
            most = f"but a program of {self.target} has {chosen.shared_limit}"
            raise UnsupportedKernel(f"{launch.name} needs {made.listing.shared} bytes of shared memory, {most}")
        given = [bits for name, t in source.signature.items() for bits in _flat(t, launch.args.get(name), maps)]
        memory = {}
        if scratch:
            size = scratch * int(np.prod(launch.shape))
            (held,) = symmetric("scratch", 1, (size + NBYTES,), torch.uint8).tensors
            first = -held.data_ptr() % NBYTES  # aligned for descriptors, like Triton's allocation
            memory[SCRATCH] = held[first : first + size]
            given.append(memory[SCRATCH].data_ptr())
        sizes = made.listing.parameters
        given += [0] * (len(sizes) - len(given))  # unused scratch, and that of Triton's profiler
        held_in = zip(given, sizes.items(), strict=True)
        parameters = {n: x if isinstance(x, TensorMap) else x & ((1 << 8 * size) - 1) for x, (n, size) in held_in}
        parameters |= {f"%envreg{n}": value for n, value in enumerate(getattr(launch, "environment", ()))}
        return made, parameters | memory

    def _compile(self, source: Any, options: Any, gpu: Any, replace: Mapping[Any, Any]) -> tuple[str, int, list, int]:
        """PTX, bytes of shared memory, the compiler's metadata of TMA descriptors, and bytes of scratch memory."""
        made = compiled_to_ptx(source, options, gpu, replace)
        text = made.asm["ptx"]
        maps = [dict(each) for each in getattr(made.metadata, "tensordesc_meta", None) or ()]
        scratch = int(getattr(made.metadata, "global_scratch_size", 0))
        return (self.edit(text) if self.edit else text), int(made.metadata.shared), maps, scratch


def _said(error: BaseException) -> str:
    """The compiler's messages: each helper call that led to the error, with the kernel's lines, then the reason."""
    words = []
    at: BaseException | None = error
    while at is not None:
        words.append(f"{type(at).__name__}: {at}" if at.__cause__ is None or at is error else str(at))
        at = at.__cause__
    return "\n".join(dict.fromkeys(each for each in words if each.strip()))


def _flat(t: Any, value: Any, maps: Iterator[dict[str, Any]]) -> Iterator[int | TensorMap]:
    """The parameters of an argument of type t, expanded as by Triton's launcher."""
    if isinstance(t, tuple | list):
        for inner, item in zip(t, value, strict=True):
            yield from _flat(inner, item, maps)
    elif t == "constexpr":
        return
    elif str(t).startswith("tensordesc"):
        said = next(maps, None)
        sizes = [int(n) for n in (*value.shape, *value.strides)]
        if said is None:  # without TMA: triton.backends.driver.decompose_descriptor
            yield from (value.base.data_ptr(), *sizes, int(value.padding == "nan"))
            yield from (int(value.round_f32_to_tf32) for _ in range(hasattr(value, "round_f32_to_tf32")))
        else:
            yield _tensor_map(value, said)
        yield from sizes
    elif t in ("fp32", "f32", "fp64", "fp16"):
        form, bits = {"fp64": ("d", "Q"), "fp16": ("e", "H")}.get(t, ("f", "I"))
        yield int(struct.unpack(bits, struct.pack(form, float(value)))[0])
    else:
        yield int(value.data_ptr() if hasattr(value, "data_ptr") else value)


OF_DTYPE = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.float64: "f64"}
OF_DTYPE |= {torch.int32: "s32", torch.int64: "s64"}


def _tensor_map(descriptor: Any, said: dict[str, Any]) -> TensorMap:
    shape, strides, box = (tuple(map(int, each)) for each in (descriptor.shape, descriptor.strides, said["block_size"]))
    if said.get("fp4_padded") or said.get("is_im2col") or getattr(descriptor, "padding", "zero") == "nan":
        raise UnsupportedPtx("unsupported tensor descriptor: fp4, im2col, or padded with NaN")
    base: Tensor = descriptor.base
    kind = OF_DTYPE.get(base.dtype, f"u{8 * base.element_size()}")
    return TensorMap(base.data_ptr(), shape, strides, box, kind, int(said["swizzle"]))
