"""What the tuner tunes, and what it tries: jobs, and configurations around the default of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from math import log2

import torch

from fusedtp.comm.workspace import FLAGS_PER_SOURCE
from fusedtp.ops.launch import tuned
from fusedtp.ops.launch.config import (
    ALL_REGISTERS,
    VECTOR,
    Machine,
    gather_chunk,
    gather_programs,
    tiles,
)
from fusedtp.ops.launch.operands import local_config
from fusedtp.ops.matmul_all_reduce import is_one_shot
from fusedtp.ops.matmul_reduce_scatter import reduction

from .cases import Case, linear
from .shapes import Layer

Values = dict[str, int]
PART_OF_CLASS = 3  # jobs of a class that are measured
MOST_SUMS = 128  # fp32 sums of a tile in each thread; a thread names 255 registers


@dataclass(frozen=True)
class Job:
    """A kernel on one shape: x of `rows` tokens in all, N and K of the weight as a rank has it."""

    kernel: str
    dtype: str
    ranks: int
    rows: int
    n: int
    k: int

    @property
    def extents(self) -> dict[str, int]:
        """As the launcher asks the table for it."""
        each = -(-self.rows // self.ranks)
        columns = self.k if self.kernel == "all_gather_wgrad" else self.n
        found = {
            "matmul": dict(rows=self.rows, cols=self.n, k=self.k),
            "all_gather_matmul": dict(rows=self.rows, cols=self.n, k=self.k),
            "all_gather_wgrad": dict(rows=self.n, cols=self.k, k=self.rows),
            "all_gather": dict(rows=each, k=self.k),
            "matmul_reduce_scatter": dict(rows=each, cols=self.n),
            "one_shot": dict(rows=self.rows, cols=self.n),
            "two_shot": dict(rows=each, cols=self.n),
        }[self.kernel]
        found |= dict(world=self.ranks, even=int(columns % VECTOR == 0))
        return {axis: n for axis, n in found.items() if axis in tuned.KERNELS[self.kernel].axes}

    @property
    def case(self) -> Case:
        """What is called to launch it."""
        names = {
            "all_gather": "all_gather_matmul",
            "one_shot": "matmul_all_reduce",
            "two_shot": "matmul_all_reduce",
        }
        operation = names.get(self.kernel, self.kernel)
        kind = "column" if operation.startswith("all_gather") else "row"
        layer = Layer("", self.kernel, kind, self.k, self.n)
        return linear(operation, self.dtype, self.rows, layer, self.ranks)

    @property
    def label(self) -> str:
        """One line that names it."""
        return f"{self.kernel} {self.dtype} {self.rows} x {self.n} x {self.k}"

    def default(self, machine: Machine) -> Values:
        """What the launcher takes without a table, as an entry of one."""
        dtype, at = getattr(torch, self.dtype), self.extents
        if self.kernel == "all_gather":
            senders, chunk = gather_programs(machine)[0], gather_chunk(at["rows"], FLAGS_PER_SOURCE)
            return dict(chunk=chunk, send_programs=senders)
        flags = FLAGS_PER_SOURCE // (2 if self.kernel == "two_shot" else 1) - 1
        if "chunk" in tuned.KERNELS[self.kernel].sets:
            owners = 1 if self.kernel == "one_shot" else self.ranks
            config = reduction(machine, dtype, at["rows"], at["cols"], flags, owners=owners)
        elif self.kernel == "matmul":
            config = local_config(machine, dtype, "ieee", at["rows"], at["cols"])
        else:
            config = tiles(machine, dtype, at["rows"], at["cols"], bool(at["even"]))
        return {
            name: int(value)
            for name, value in asdict(config).items()
            if name in tuned.KERNELS[self.kernel].sets
        }


def reduction_kernel(rows: int, n: int, dtype: str) -> str:
    """Which kernel an all-reduce of [rows, n] is."""
    return "one_shot" if is_one_shot(rows, n, getattr(torch, dtype)) else "two_shot"


def candidates(job: Job, machine: Machine, limit: int) -> list[Values]:
    """The default, then at most `limit` others that this machine can hold, the nearest to it first."""
    default = job.default(machine)
    space = _transports(machine) if job.kernel == "all_gather" else _tiles(job, machine, default)
    found = [values for values in space if values != default and _possible(job, machine, values)]
    found.sort(key=lambda values: (_distance(values, default), sorted(values.items())))
    return [default, *found[:limit]]


def refinements(job: Job, machine: Machine, values: Values) -> list[Values]:
    """Configurations that differ from this one in one field that a tile search leaves alone."""
    choices: dict[str, tuple[int, ...]] = {} if machine.clock == "host" else {"group": (1, 4, 8, 16, 32)}
    if "chunk" in tuned.KERNELS[job.kernel].sets and job.kernel != "all_gather":
        choices |= {"chunk": (1, 2, 4)}
        if machine.clock != "host":
            choices |= {"part": (128, 256, 512, 1024)}
        if not machine.shared_gpu:  # where ranks share a GPU its split is not a matter of taste
            choices |= {"other_programs": tuple(max(1, machine.programs // d) for d in (8, 4, 2))}
    if machine.clock != "host":  # of which `_possible` leaves what machine and dtype have
        toggles = dict(tma=(0, 1), specialized=(0, 1), halves=(0, 1))
        sets = tuned.KERNELS[job.kernel].sets
        choices |= {name: known for name, known in toggles.items() if name in sets}
    found = [values | {name: n} for name, known in choices.items() for n in known if values.get(name) != n]
    return [each for each in found if _possible(job, machine, each)]


def _transports(machine: Machine) -> Iterator[Values]:
    senders = (1, 2, 4, 8, 12, 16, 24, 32)
    for chunk, count in product((4, 8, 16, 32, 64, 128, 256, 512), senders):
        if count < machine.programs:
            yield dict(chunk=chunk, send_programs=count)


def _tiles(job: Job, machine: Machine, default: Values) -> Iterator[Values]:
    at, wide = job.extents, job.dtype == "float32"
    host = machine.clock == "host"
    sides, depths, warps, stages = [16, 32, 64, 128, 256], [16, 32, 64, 128], [4, 8], [2, 3, 4, 5]
    if host:  # the interpreter: a warp and a stage cost nothing
        sides, depths, warps, stages = [16, 32, 64], [16, 32, 64], [4], [1]
    for m, n, k, w, s in product(sides, sides, depths, warps, stages):
        sums = m * n // (32 * w)
        if m > max(16, 2 * at["rows"] - 1) or n > max(16, 2 * at["cols"] - 1) or sums > MOST_SUMS:
            continue
        if not host and ((wide and (m * n > 64 * 64 or k > 32)) or sums < 4):
            continue
        every = ALL_REGISTERS if machine.clock == "cuda" and sums < MOST_SUMS else 0
        tile = dict(block_m=m, block_n=n, block_k=k, num_warps=w, num_stages=s, max_registers=every)
        yield default | tile | (_plain(default, tile) if job.kernel == "matmul" else {})


def _plain(default: Values, tile: Values) -> Values:
    """What a plain matmul's launcher lets follow from a tile."""
    specialized = default["specialized"] and tile["block_m"] == 128
    found = dict(specialized=int(specialized), halves=int(default["tma"] and tile["block_n"] == 256))
    return found | (dict(max_registers=0) if specialized else {})


def _possible(job: Job, machine: Machine, values: Values) -> bool:
    return not tuned.config_faults(tuned.KERNELS[job.kernel], values, job.dtype, machine)


def _distance(values: Mapping[str, int], other: Mapping[str, int]) -> float:
    """How often something doubles between the two."""
    return sum(
        abs(log2(values[name] / other[name])) for name in other if values[name] > 0 and other[name] > 0
    )
