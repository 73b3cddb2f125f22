"""Make a model tensor-parallel in place, by its plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fusedtp.comm import communicator

from .expert_parallel import ExpertSplit
from .layers import Member, kind_of
from .placement import Mesh
from .plan import make_steps, plan_of

M = TypeVar("M", bound=nn.Module)


def parallelize(
    model: M,
    mesh: Mesh,
    *,
    engine: str = "auto",
    sequence_parallel: bool = True,
    plan: Mapping[str, Any] | None = None,
    experts: ExpertSplit | None = None,
) -> M:
    """Split the model over the ranks of a mesh, in place, and return it. Collective.

        mesh                a 1-D DeviceMesh such as mesh["tp"], or a VirtualGroup
        engine              auto, collective, chunked or triton; see fusedtp.explain
        sequence_parallel   tokens are split between layers too, [T_r, H]; else they are whole on every rank
        plan                module name -> style, instead of the model's tp_plan
        experts             which ranks share the experts of a mixture, and how; default: those of the mesh, whole ones

    Every rank holds the full model before (or a meta one: then to_empty and init_ follow); nothing is sent. Every
    parameter becomes a DTensor on the mesh with its old name and global shape, so that optimizers, FSDP2 (applied
    afterwards) and distributed checkpoints work, and full state dicts load before and after.
    Raises ValueError that lists every fault of plan, model and world size, or says which mesh of experts does not go
    with the mesh; nothing is changed then.
    """
    comm = communicator(mesh)
    if experts is not None:
        experts.check(mesh)
    plan = plan_of(model) if plan is None else plan
    steps = make_steps(
        model,
        plan,
        comm.world_size,
        _has_more_dimensions(mesh),
        engine=engine,
        experts=experts,
        sequence_parallel=sequence_parallel,
    )
    for step in steps:
        step.style._apply(step.module, mesh)
        if isinstance(getattr(step.module, "parallel", None), Member):
            step.module.parallel = replace(step.module.parallel, layer=kind_of(step.name))
    if sequence_parallel:
        for module in model.modules():
            if hasattr(module, "token_split"):
                module.token_split, module.token_group = (comm.rank, comm.world_size), comm.name  # type: ignore[assignment]
    return model


def _has_more_dimensions(mesh: Mesh) -> bool:
    return isinstance(mesh, DeviceMesh) and mesh._get_root_mesh().size() > mesh.size()
