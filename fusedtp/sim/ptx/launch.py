"""What Triton compiles for a launch, and the bits of the kernel's parameters. Needs no GPU and no assembler.

A process that interprets kernels cannot compile them: TRITON_INTERPRET must not be set here.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor

from ..case import Launch
from ..lint.compiler import cache_dir
from ..lint.targets import target as target_named
from ..lint.worker import specialised
from . import TARGETS
from .copies import TensorMap
from .kernel import Kernel, translated
from .parse import UnsupportedPtx

Edit = Callable[[str], str]


class Compiler:
    """Compiles launches for one target, each specialisation once. edit: changes the PTX, to seed a fault."""

    def __init__(self, target: str, edit: Edit | None = None) -> None:
        if target not in TARGETS:
            raise ValueError(f"the PTX machine runs {', '.join(TARGETS)}, not {target!r}")
        self.target, self.edit = target, edit
        self._made: dict[Any, tuple[str, int, str]] = {}

    def compiled(self, launch: Launch) -> tuple[Kernel, dict[str, int | TensorMap]]:
        """The kernel, and its parameters by name. Raises UnsupportedPtx."""
        from triton.backends.compiler import GPUTarget

        chosen = target_named(self.target)
        gpu = GPUTarget(chosen.backend, chosen.arch, chosen.wave)
        kernel: Any = launch.kernel
        if not hasattr(kernel, "fn") or not hasattr(kernel, "signature"):
            raise UnsupportedPtx(
                f"{launch.name} is interpreted: unset TRITON_INTERPRET to run what is compiled"
            )
        with _environment():
            source, options = specialised(kernel, launch.args, launch.options, gpu)
        chosen_by = (source.signature, source.constants, source.attrs, sorted(launch.options.items()))
        key = kernel.fn, *map(repr, chosen_by)
        if key not in self._made:
            self._made[key] = self._compile(source, options, gpu)
        made = translated(*self._made[key])
        maps = iter(made.maps)
        given = [
            bits for name, t in source.signature.items() for bits in _flat(t, launch.args.get(name), maps)
        ]
        names = made.listing.parameters
        given += [0] * (len(names) - len(given))  # scratch memory, which none of these kernels asks for
        return made, {
            p.name: x if isinstance(x, TensorMap) else x & ((1 << 8 * p.size) - 1)
            for x, p in zip(given, names, strict=True)
        }

    def _compile(self, source: Any, options: Any, gpu: Any) -> tuple[str, int, str]:
        """PTX, bytes of shared memory, and what the compiler says of TMA descriptors."""
        import triton

        with _environment(), _without_assembler():
            made = triton.compile(source, target=gpu, options=dict(options))
        text = made.asm["ptx"]
        maps = [dict(each) for each in getattr(made.metadata, "tensordesc_meta", None) or ()]
        return (self.edit(text) if self.edit else text), int(made.metadata.shared), repr(maps)


def _environment() -> Any:
    """As the lint's compilers have it."""
    chosen = {
        "TRITON_CACHE_DIR": str(cache_dir(os.environ.get("TRITON_CACHE_DIR"))),
        "TRITON_DEFAULT_FP_FUSION": os.environ.get("TRITON_DEFAULT_FP_FUSION", "1"),
    }
    return patch.dict(os.environ, chosen)


@contextmanager
def _without_assembler() -> Iterator[None]:
    """Compilation ends with PTX: what ptxas makes of it is not run here, and takes longer than all before."""
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


def _flat(t: Any, value: Any, maps: Iterator[dict[str, Any]]) -> Iterator[int | TensorMap]:
    """Parameters that an argument of type t becomes, as Triton's launcher expands it."""
    if isinstance(t, tuple | list):
        for inner, item in zip(t, value, strict=True):
            yield from _flat(inner, item, maps)
    elif t == "constexpr":
        return
    elif str(t).startswith("tensordesc"):
        said = next(maps, None)
        if said is None:
            raise UnsupportedPtx("a tensor descriptor without TMA")
        yield _tensor_map(value, said)
        yield from (int(n) for n in value.shape)
        yield from (int(n) for n in value.strides)
    elif isinstance(value, Tensor):
        yield value.data_ptr()
    elif t in ("fp32", "f32", "fp64", "fp16"):
        form, bits = {"fp64": ("d", "Q"), "fp16": ("e", "H")}.get(t, ("f", "I"))
        yield int(struct.unpack(bits, struct.pack(form, float(value)))[0])
    else:
        yield int(value.data_ptr() if hasattr(value, "data_ptr") else value)


def _tensor_map(descriptor: Any, said: dict[str, Any]) -> TensorMap:
    shape, strides = (tuple(int(n) for n in each) for each in (descriptor.shape, descriptor.strides))
    box = tuple(int(n) for n in said["block_size"])
    if said.get("fp4_padded") or said.get("is_im2col") or getattr(descriptor, "padding", "zero") == "nan":
        raise UnsupportedPtx("a tensor descriptor of fp4, of im2col, or padded with NaN")
    base: Tensor = descriptor.base
    return TensorMap(base.data_ptr(), shape, strides, box, int(base.element_size()), int(said["swizzle"]))
