"""Compiles kernels for GPUs that need not be present, and keeps the intermediate files that the rules read.

made = compiled(CompileCase("kernel", "sm_90", launch))   # one per kernel and specialization
"""

from __future__ import annotations

import subprocess
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from fusedtp.sim.case import Case, Launch, Run
from fusedtp.sim.launching import plain
from fusedtp.targets import Target, environment, specialised, target

from .listing import AMD, PTX, Listing, Source


@dataclass(frozen=True)
class CompileCase:
    """One compilation, or one for each kernel that a case of the simulator launches.

    kernel        name of the kernel, or of the case
    target        a name in TARGETS
    make          returns a launch; or a case or run of the simulator, in which memory that two ranks reach is shared
    config        distinguishes the cases of a kernel; with kernel and target it names the report
    aligned_rows  whether every row in shared memory of the ranks begins at a multiple of 16 bytes, so that 16-byte
                  accesses are required
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
    """The compiler refuses a kernel; the message contains its traceback."""


@dataclass
class Compiled:
    """The result of one compilation.

    case     the case that was compiled
    files    "ttir", "ttgir" and "ptx" or "amdgcn" -> text
    usage    the assembler's report on registers, stack and spills (NVIDIA)
    shared   arguments that point to memory that other ranks access too
    place    the first launch that specialises the kernel so, in words
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
    place: str = ""

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
    """Compile a case in this process, which must not interpret. Raises CompileError; ValueError for unknown targets."""
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
    for launch, shared, place in _launches(case.make()):
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
                files={kind: done.asm[kind] for kind in ("ttir", "ttgir", "ptx", "amdgcn") if kind in done.asm},
                usage=_usage(done.asm["cubin"]) if "cubin" in done.asm else "",
                shared=shared,
                shared_bytes=said.shared,
                tensor_columns=getattr(said, "tmem_size", None) or 0,
                num_warps=said.num_warps,
                place=place,
            )
        )
    return made


def _launches(made: Launch | Run | Case) -> list[tuple[Launch, tuple[str, ...], str]]:
    """Launches, the names of their shared arguments (in memory of all ranks, or passed on two ranks), their places."""
    if isinstance(made, Launch):
        return [(made, (), "")]
    run = plain(made.make() if isinstance(made, Case) else made)
    of_ranks = [[each for each in work if isinstance(each, Launch)] for work in run.work]
    launches = [(rank, at, each) for rank, work in enumerate(of_ranks) for at, each in enumerate(work)]
    owners: dict[int, set[int]] = {}
    for rank, _, launch in launches:
        for _, tensor in _tensors(launch):
            owners.setdefault(tensor.untyped_storage().data_ptr(), set()).add(rank)
    for memory in run.memory:
        for tensor in memory.tensors:
            owners.setdefault(tensor.untyped_storage().data_ptr(), set()).update((-1, -2))
    return [
        (
            launch,
            tuple(n for n, t in _tensors(launch) if len(owners[t.untyped_storage().data_ptr()]) > 1),
            f"rank {rank}, launch {at + 1}" if len(of_ranks[rank]) > 1 else f"rank {rank}",
        )
        for rank, at, launch in launches
    ]


def _tensors(launch: Launch) -> list[tuple[str, torch.Tensor]]:
    return [(name, each) for name, each in launch.args.items() if isinstance(each, torch.Tensor)]


def _usage(cubin: bytes) -> str:
    """The assembler's report on registers and local memory, with the text of each spilling instruction."""
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
