"""Runs PTX that a test writes, or kernels that Triton compiles, on the machine."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton

from fusedtp.sim import DEFAULT, Launch, Run, Schedule, SimulationFault
from fusedtp.sim.case import Case
from fusedtp.sim.faults import Fault
from fusedtp.sim.memory import Memory
from fusedtp.sim.ptx.kernel import Kernel, translated
from fusedtp.sim.ptx.launch import Compiler
from fusedtp.sim.ptx.machine import Machine
from fusedtp.sim.strategies import STRATEGIES

# Triton before 3.8 writes no calls into its line table, lets one thread release without a barrier, lets a program go on
# when a TMA store's source may be reused, and fails to compile some loops of packed words and seqlocks.
BEFORE_3_8 = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8)
REGISTERS = ".reg .pred %p<8>; .reg .b16 %rs<40>; .reg .b32 %r<200>; .reg .b64 %rd<40>;"


@dataclass(frozen=True)
class Text:
    """A kernel as PTX. In its body, %rd<n> is the address of argument n and %r0 the thread."""

    body: str
    arguments: int
    threads: int = 32
    shared: int = 0

    @property
    def __name__(self) -> str:
        return "k"

    @property
    def ptx(self) -> str:
        names = [f"k_param_{n}" for n in range(self.arguments)]
        head = ",\n".join(f"\t.param .u64 {name}" for name in names)
        loads = "".join(f"\tld.param.b64 %rd{n}, [{name}];\n" for n, name in enumerate(names))
        return (
            f".visible .entry k(\n{head}\n)\n.reqntid {self.threads}\n{{\n{REGISTERS}\n{loads}"
            f'\tmov.u32 %r0, %tid.x;\n{self.body}\n\tret;\n}}\n\t.file 1 "kernel.py"\n'
        )


class Given:
    """Stands in for the compiler: launches hold their PTX."""

    def compiled(self, launch: Launch) -> tuple[Kernel, dict[str, Any]]:
        text: Text = launch.kernel
        values = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in launch.args.values()]
        kernel = translated(text.ptx, text.shared)
        return kernel, dict(zip(kernel.listing.parameters, values, strict=True))


def run_text(body: str, *tensors: Any, threads: int = 32, shared: int = 0, grid: int = 1, **options: Any) -> None:
    """One launch on one rank; tensors are changed in place."""
    args = {f"a{n}": t for n, t in enumerate(tensors)}
    run_all([[Launch(Text(body, len(tensors), threads, shared), grid, args)]], **options)


def run_all(
    work: Sequence[Sequence[Launch]], memory: Sequence[Memory] = (), seed: int = 0, weak: bool = False,
    fine: bool = False, resident: Any = None, waived: dict[str, int] | None = None,
) -> None:  # fmt: skip
    """Raises SimulationFault."""
    options: dict[str, Any] = dict(seed=seed, weak=weak, fine=fine, resident=resident, waived=waived)
    Machine(Run(work, memory), STRATEGIES["random"], Given(), **options).run()  # type: ignore[arg-type]


def once(
    case: Case, target: str, seed: int = 0, *, weak: bool = True, fine: bool = False, edit: Any = None
) -> Fault | None:
    """The fault, if any, that a schedule of a case of compiled kernels shows. edit: changes the PTX."""
    run = case.make()
    compiler = compiler_of(target, edit)
    machine = Machine(run, STRATEGIES[DEFAULT[seed % len(DEFAULT)]], compiler, seed=seed, weak=weak, fine=fine)
    try:
        machine.run()
    except SimulationFault as error:
        return error.fault
    assert run.check is not None
    wrong = list(run.check() or ())
    recorded = run.failures() if run.failures else []
    if recorded:
        return Fault("timed out", recorded[0])
    return Fault("wrong value", str(wrong[0]), mismatch=wrong[0]) if wrong else None


_COMPILERS: dict[Any, Compiler] = {}


def compiler_of(target: str, edit: Callable[[str], str] | None = None) -> Compiler:
    """One compiler per target and edit, so that a test process compiles each kernel once."""
    return _COMPILERS.setdefault((target, edit), Compiler(target, edit))


def schedule(seed: int, target: str) -> Schedule:
    return Schedule(DEFAULT[seed % len(DEFAULT)], seed, None, True, False, target)


def edge_words(bits: int, count: int, seed: int) -> np.ndarray[Any, Any]:
    """Unsigned words: edges of the range, small ones, and random ones."""
    rng = random.Random(seed)
    top = (1 << bits) - 1
    edges = [0, 1, 2, top, top - 1, top >> 1, (top >> 1) + 1, 31, 32, 33]
    words = [rng.choice(edges) if rng.random() < 0.4 else rng.getrandbits(bits) for _ in range(count)]
    return np.array(words, f"u{bits // 8}")
