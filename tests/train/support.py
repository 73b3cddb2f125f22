"""Ranks of a run on a mesh, and comparison of a whole model's gradients with those of one process.

Note [Meshes of tests]
A mesh of four ranks has about 15 gloo groups, each with its own threads. So a worker makes each mesh once, and its
tests share it.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fusedtp.train.config import parse
from fusedtp.train.mesh import World, meshes
from tests.nn.support import roundings_of

parse([])  # slow the first time in a process, so do it once before ranks are forked

# Sizes of dp, tp, ep and pp in a world of pp * dp * tp ranks.
MESHES = {
    "1": (1, 1, 1, 1),
    "tp2": (1, 2, 2, 1),
    "dp2": (2, 1, 1, 1),
    "tp4": (1, 4, 4, 1),
    "dp2 tp2": (2, 2, 2, 1),
    "dp4": (4, 1, 1, 1),
    "dp2 tp2 ep4": (2, 2, 4, 1),
    "pp2": (1, 1, 1, 2),
    "pp4": (1, 1, 1, 4),
    "pp2 tp2": (1, 2, 2, 2),
    "pp2 dp2": (2, 1, 1, 2),
}


def ranks_of(mesh: str) -> int:
    dp, tp, _, pp = MESHES[mesh]
    return pp * dp * tp


@cache
def mesh_of(**axes: int) -> DeviceMesh:
    """A mesh of all ranks with axes of these sizes; see Note [Meshes of tests]."""
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


@cache
def meshes_of(
    dp: int, tp: int = 1, ep: int | None = None, pp: int = 1, copies: int = 1
) -> tuple[DeviceMesh, dict[str, DeviceMesh]]:
    """fusedtp.train.mesh.meshes; see Note [Meshes of tests]."""
    return meshes("cpu", dp, tp, ep or tp, pp, copies)


@cache
def host_groups() -> list[Any]:
    """Two groups of all ranks, for a World; see Note [Meshes of tests]."""
    return [dist.new_group(backend="gloo") for _ in range(2)]


def world_on(group: Any, mesh: str) -> World:
    """This rank's world on a mesh of MESHES."""
    dp, tp, ep, pp = MESHES[mesh]
    several = pp * dp * tp > 1
    on, flat = meshes_of(dp, tp, ep, pp) if several else (None, {})
    groups = host_groups() if several else [None, None]
    return World(dp, tp, ep, group.rank(), torch.device("cpu"), on, flat, *groups, pp)


def assert_gradients(got: Mapping[str, Tensor], want: Mapping[str, Tensor], layers: int) -> None:
    """Each gradient's error, relative to the wanted one's largest entry, is within what this many layers may lose.

    A layer has up to 8 operations forward and as many backward, each with about 32 terms (the width of these models);
    see Note [Roundings]. For 4 layers in fp32 that is 1.3e-4 of a parameter's largest gradient.
    """
    over = []
    for name, gradient in got.items():
        wanted = want[name].detach().double()
        error = (gradient.detach().double() - wanted).abs().max().item()
        bound = roundings_of(16 * layers, 32) * torch.finfo(gradient.dtype).eps * wanted.abs().max().item()
        if not error <= bound:
            over.append(f"{name}: off by {error:.3e}, allowed {bound:.3e}")
    assert not over, "\n".join(over)
