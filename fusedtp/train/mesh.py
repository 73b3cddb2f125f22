"""This rank in a job: its device, the ("pp", "dp", "tp") mesh, and small exchanges between ranks.

If ep > tp, "dp" is split into "outer" and "inner". Experts are sharded over "inner" and "tp" (together "ep") and are
data parallel over "outer"; everything else is data parallel over both ("dp").

    rank = ((pp * outer_ranks + outer) * inner_ranks + inner) * tp_ranks + tp

Tensor parallelism communicates most, so it is innermost, within a machine; pipeline stages communicate least.

A job of one process has no mesh and no process group. Exchanges through host memory and long waits use a gloo group of
their own, so that they neither occupy a GPU nor run into the timeout of the collectives.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import (
    _set_pg_timeout,
)  # sets a timeout like that of new_group, which init_device_mesh does not take

import fusedtp
from fusedtp.comm import communicator
from fusedtp.comm.memory import host_identity
from fusedtp.comm.process_world import gpu_uuid, let_gloo_end
from fusedtp.ops import engines

AXES = ("pp", "dp", "dp_replicate", "dp_shard", "tp")
LONG_WAIT = timedelta(hours=6)  # for waits while one rank trains alone for --verify, or writes


@dataclass(frozen=True)
class World:
    """This rank's position in the job. `mesh` is None in a job of one process.

    ep   ranks that share the experts: tp, or a multiple of it
    """

    dp: int = 1
    tp: int = 1
    ep: int = 1
    rank: int = 0
    device: torch.device = torch.device("cpu")
    mesh: DeviceMesh | None = None
    flat: Mapping[str, DeviceMesh] = field(default_factory=dict)
    host_group: dist.ProcessGroup | None = None
    checkpoint_group: dist.ProcessGroup | None = None  # all ranks, for saves during training
    pp: int = 1
    dp_replicate: int = 1
    step_group: dist.ProcessGroup | None = None  # all ranks, for exchanges in a step; default: host_group

    @staticmethod
    def of(mesh: DeviceMesh | None, device: torch.device) -> World:
        """The World of a mesh over all ranks in order. Its axes are a subset of AXES, in that order. Collective.

        Raises ValueError for any other mesh.
        """
        if mesh is None:
            return World(device=device)
        names = mesh.mesh_dim_names or ()
        if [name for name in AXES if name in names] != list(names) or {"dp", "dp_shard"} <= set(names):
            raise ValueError(f"the mesh has axes {names}, but they must be some of {', '.join(AXES)}, in this order")
        if mesh.mesh.flatten().tolist() != list(range(dist.get_world_size())):
            raise ValueError(f"the mesh has ranks {mesh.mesh.tolist()}, but it must have all ranks, in order")
        sizes = dict(zip(names, mesh.mesh.shape, strict=True))
        copies = sizes.get("dp_replicate", 1)
        dp = sizes.get("dp", 1) * copies * sizes.get("dp_shard", 1)
        flat: dict[str, tuple[str, ...]] = {"dp": ("dp_replicate", "dp_shard")} if copies > 1 else {}
        if sizes.get("pp", 1) > 1:
            flat["tokens"] = names[1:]
        groups = _host_groups()
        return World(
            dp, sizes.get("tp", 1), sizes.get("tp", 1), dist.get_rank(), device, mesh, flattened(mesh, flat), *groups,
            sizes.get("pp", 1), copies,
        )  # fmt: skip

    @property
    def size(self) -> int:
        return self.pp * self.dp * self.tp

    @property
    def dp_rank(self) -> int:
        return self.rank // self.tp % self.dp

    @property
    def pp_mesh(self) -> DeviceMesh | None:
        """Mesh of the pipeline's ranks; None without a pipeline."""
        return self.mesh["pp"] if self.mesh is not None and self.pp > 1 else None

    @property
    def tp_mesh(self) -> DeviceMesh | None:
        """Mesh of the tensor-parallel ranks; None if both tp and ep are 1."""
        return self.mesh["tp"] if self.mesh is not None and max(self.tp, self.ep) > 1 else None

    @property
    def ep_mesh(self) -> DeviceMesh | None:
        """Mesh of the ranks that share the experts, if ep > tp; otherwise None."""
        return self.flat["ep"] if self.ep > self.tp else None

    @property
    def outer_mesh(self) -> DeviceMesh | None:
        """Mesh of the ranks that hold the same experts; None if there is only one data-parallel rank."""
        if self.mesh is None or self.dp == 1:
            return None
        return self.mesh["outer"] if self.ep > self.tp else self.dp_mesh

    @property
    def dp_mesh(self) -> DeviceMesh | None:
        """Mesh of the data-parallel ranks; None if there is only one."""
        if self.mesh is None or self.dp == 1:
            return None
        return self.flat["dp"] if "dp" in self.flat else self.mesh["dp"]

    @property
    def shard_mesh(self) -> DeviceMesh | None:
        """The mesh that FSDP2 shards over: the data-parallel ranks, 1-D or as [copies, shards]."""
        if self.mesh is None or self.dp_replicate == 1:
            return self.dp_mesh
        return self.mesh["dp_replicate", "dp_shard"]

    def token_ranks(self, sequence_parallel: bool) -> dist.ProcessGroup | None:
        """Group of the ranks that hold different tokens for this rank's layers; None if this rank holds all tokens."""
        if self.mesh is None or not sequence_parallel:
            return None if self.dp_mesh is None else self.dp_mesh.get_group()
        return dist.group.WORLD if self.pp == 1 else self.flat["tokens"].get_group()

    def mean(self, value: Tensor) -> float:
        """Mean of a number over the data-parallel ranks."""
        return self.means(value.reshape(1))[0]

    def means(self, values: Tensor) -> list[float]:
        """Means of several numbers over the data-parallel ranks."""
        values = values.detach().to(torch.float32, copy=True)
        if self.dp_mesh is not None:
            dist.all_reduce(values, group=self.dp_mesh.get_group())
        return [value / self.dp for value in values.tolist()]

    def largest(self, values: Sequence[int]) -> list[int]:
        """Elementwise maximum over all ranks. Collective, through host memory."""
        found = torch.tensor([int(value) for value in values])
        if (group := self.step_group or self.host_group) is not None:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        return [int(value) for value in found]

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Every rank's numbers; all ranks must pass equally many. Collective, through host memory."""
        own = torch.tensor(numbers, dtype=torch.float64)
        group = self.step_group or self.host_group
        if group is None:
            return [own.tolist()]
        every = torch.empty(self.size, len(own), dtype=torch.float64)
        dist.all_gather(list(every), own, group=group)
        rows: list[list[float]] = every.tolist()
        return rows

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value, which must be picklable. Collective, through host memory."""
        group = self.step_group or self.host_group
        if group is None:
            return [value]
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, value, group=group)
        return every

    def machines(self) -> list[str]:
        """The host name of every rank. Collective."""
        names = [os.uname().nodename] * self.size
        if self.host_group is not None:
            dist.all_gather_object(names, names[0], group=self.host_group)
        return names

    def wait_for_all(self) -> None:
        """Barrier over all ranks; its error names the ranks that are missing after LONG_WAIT."""
        if self.host_group is not None:
            dist.monitored_barrier(self.host_group, timeout=LONG_WAIT)

    def check(self) -> None:
        """Raise the error of a failed wait for a peer, before wrong values reach the parameters."""
        for mesh in self.shared_meshes:
            fusedtp.check(mesh)

    @property
    def shared_meshes(self) -> list[DeviceMesh]:
        """The meshes that layers are split over."""
        return [mesh for mesh in (self.tp_mesh, self.ep_mesh) if mesh is not None]

    @property
    def meshes(self) -> list[DeviceMesh]:
        """All meshes of this job."""
        return [] if self.mesh is None else [self.mesh, *self.flat.values()]

    def engine_calls(self) -> dict[str, dict[str, int]]:
        """Kind of layer -> {engine that ran: number of calls}, for this rank so far."""
        found: dict[str, dict[str, int]] = {}
        for mesh in self.shared_meshes:  # each layer is split over one of them
            found.update(engines.layer_calls(communicator(mesh)))
        return found

    def wait_seconds(self) -> float | None:
        """Time this rank has spent waiting for the peers of its layers; None if it is not measured.

        On GPU the kernels wait, and the host cannot tell for how long.
        """
        if self.shared_meshes and self.device.type != "cpu":
            return None
        return sum(communicator(mesh).wait_seconds for mesh in self.shared_meshes)


def placement(world: World, machines: Sequence[str]) -> list[str]:
    """Where the ranks run: a line per stage and machine, and a warning if tensor parallelism spans machines.

    machines   host name of every rank
    """
    lines, stage = [], world.dp * world.tp
    for (pp, name), group in groupby(range(world.size), lambda rank: (rank // stage, machines[rank])):
        ranks = list(group)
        dp = [rank // world.tp % world.dp for rank in (ranks[0], ranks[-1])]
        tp = [0, world.tp - 1] if dp[0] != dp[1] else [rank % world.tp for rank in (ranks[0], ranks[-1])]
        places = {"rank": [ranks[0], ranks[-1]], "pp": [pp, pp], "dp": dp, "tp": tp}
        lines.append(f"{', '.join(_span(axis, *ends) for axis, ends in places.items())} on {name}")
    apart = [
        _span("", first, first + world.tp - 1).strip()
        for first in range(0, world.size, world.tp)
        if len(set(machines[first : first + world.tp])) > 1
    ]
    if apart:
        lines.append(
            f"tensor-parallel ranks {', '.join(apart)} span several machines: a smaller --tp that divides the ranks of "
            "a machine would keep fused operations off the network"
        )
    return lines


def _span(axis: str, first: int, last: int) -> str:
    return f"{axis} {first}" if first == last else f"{axis} {first}-{last}"


def device_type(asked: str) -> str:
    """ "cpu" or "cuda" for the device option."""
    return asked if asked != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


class Place(NamedTuple):
    """Rank and number of ranks of this process, in the job and on its machine."""

    rank: int = 0
    local_rank: int = 0
    ranks: int = 1
    local_ranks: int = 1


def torchrun_place() -> Place | None:
    """The Place of this process from torchrun's environment; None without torchrun."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank, local_ranks = os.environ.get("LOCAL_RANK", rank), os.environ.get("LOCAL_WORLD_SIZE", ranks)
    return Place(rank, int(local_rank), ranks, int(local_ranks))


def sees_one_gpu(place: Place | None) -> bool:
    """Whether the launcher of this rank shows each rank of a machine only one GPU, as Slurm's --gpus-per-task=1 does.

    It may show the same one to several: `claim_gpu` finds out.
    """
    return place is not None and place.local_ranks > 1 and torch.cuda.device_count() == 1


def claim_gpu(store: Any, rank: int) -> None:
    """Raises ValueError if another rank of the job has claimed the only GPU that this rank sees. Waits for no rank.

    store   the job's, of torch.distributed
    """
    uuid = gpu_uuid(0)
    holder = int(store.compare_set(f"fusedtp/gpu/{host_identity()}/{uuid}", "", str(rank)))
    if holder != rank:
        raise ValueError(
            f"ranks {holder} and {rank} see one GPU each, and it is the same one ({uuid}): give each rank a GPU of its "
            "own, show all GPUs to all ranks, or use fewer ranks or --device cpu"
        )


def meshes(
    device: str,
    dp: int,
    tp: int,
    ep: int,
    pp: int = 1,
    dp_replicate: int = 1,
    timeout: float | None = None,
) -> tuple[DeviceMesh, dict[str, DeviceMesh]]:
    """(mesh of all ranks, flattened meshes): "dp" and "ep" if they are not axes of it; "tokens", the ranks of a stage.

    timeout   seconds that their groups wait on CPU; see bound_waits
    """
    flat: dict[str, tuple[str, ...]]
    if dp_replicate > 1:
        sizes = {"pp": pp, "dp_replicate": dp_replicate, "dp_shard": dp // dp_replicate, "tp": tp}
        flat = {"dp": ("dp_replicate", "dp_shard")}
    elif ep > tp:
        sizes = {"pp": pp, "outer": dp // (ep // tp), "inner": ep // tp, "tp": tp}
        flat = {"dp": ("outer", "inner"), "ep": ("inner", "tp")}
    else:
        sizes, flat = {"pp": pp, "dp": dp, "tp": tp}, {}
    if pp > 1:
        flat["tokens"] = tuple(sizes)[1:]
    bound: Any = (None, None)
    if timeout is not None and device == "cpu":  # gloo receives keep the timeout that their group was created with
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout)
        bound = ("gloo", options)
    mesh = init_device_mesh(
        device,
        tuple(sizes.values()),
        mesh_dim_names=tuple(sizes),
        backend_override=dict.fromkeys(sizes, bound) if bound[0] else None,
    )
    return mesh, flattened(mesh, flat, bound if bound[0] else None)


def bound_waits(world: World, seconds: float) -> None:
    """Set the timeout of all waits for other ranks in a step: collectives and fused operations. Collective.

    On CPU, receives between pipeline ranks keep the timeout that was passed to `meshes`.
    """
    groups = {group.group_name: group for mesh in world.meshes for group in mesh.get_all_groups()}
    if world.step_group is not None:
        groups[world.step_group.group_name] = world.step_group
    for group in groups.values():
        _set_pg_timeout(timedelta(seconds=seconds), group)
    for mesh in world.shared_meshes:
        fusedtp.set_timeout(mesh, seconds)


def flattened(mesh: DeviceMesh, flat: Mapping[str, tuple[str, ...]], backend: Any = None) -> dict[str, DeviceMesh]:
    """Flattened axes of a mesh, by their new names."""
    return {name: mesh[axes]._flatten(name, backend) for name, axes in flat.items() if axes}


def _host_groups() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """(host_group, checkpoint_group): gloo groups for exchanges between ranks and for saves during training."""
    first, second = (dist.new_group(backend="gloo", timeout=LONG_WAIT) for _ in range(2))
    return first, second


@contextmanager
def world_of(
    dp: int,
    tp: int,
    device: str,
    ep: int | None = None,
    pp: int = 1,
    dp_replicate: int = 1,
    timeout: float | None = None,
) -> Iterator[World]:
    """Join the ranks that torchrun started, and leave them at the end. `ep` ranks share the experts; default: tp.

    timeout   seconds that a rank waits for others within a step
    After an error the process groups are not destroyed: the process ends, and torchrun ends its peers.
    Raises ValueError if ranks share a GPU.
    """
    place = torchrun_place() or Place()
    alone = device == "cuda" and sees_one_gpu(place)
    here = torch.device(device, 0 if alone else place.local_rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(here)
    if pp * dp * tp == 1:
        yield World(device=here)
        return
    let_gloo_end()
    by: dict[str, Any] = {}
    if alone:  # before NCCL starts, which does not say which ranks share a GPU
        store = next(dist.rendezvous("env://"))[0]  # type: ignore[attr-defined]
        claim_gpu(store, place.rank)
        prefixed = dist.PrefixStore("default_pg", store)  # type: ignore[attr-defined]
        by = dict(store=prefixed, rank=place.rank, world_size=place.ranks)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", device_id=here if device == "cuda" else None, **by
    )
    ep = ep or tp
    mesh, flat = meshes(device, dp, tp, ep, pp, dp_replicate, timeout)
    groups, in_step = _host_groups(), dist.new_group(backend="gloo")
    world = World(dp, tp, ep, place.rank, here, mesh, flat, *groups, pp, dp_replicate, in_step)
    if timeout is not None:
        bound_waits(world, timeout)
    yield world
    dist.destroy_process_group()
