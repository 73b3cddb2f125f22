"""Make a model tensor-parallel in place, by its plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fusedtp.comm import Communicator, communicator

from .expert_parallel import ExpertSplit
from .foreign import Model, leave
from .foreign_plan import foreign_steps, regroup_heads
from .layers import Member, kind_of
from .placement import Mesh
from .plan import Step, make_steps, plan_of
from .saving import prepare

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
    own = plan is None
    plan = plan_of(model) if plan is None else plan
    if plan and is_foreign(model, plan):
        return _parallelize_foreign(model, mesh, comm, plan, not own, engine, sequence_parallel)
    steps = make_steps(
        model,
        plan,
        comm.world_size,
        _has_more_dimensions(mesh),
        engine=engine,
        experts=experts,
        sequence_parallel=sequence_parallel,
    )
    _apply(steps, mesh)
    if sequence_parallel:
        for module in model.modules():
            if hasattr(module, "token_split"):
                module.token_split, module.token_group = (comm.rank, comm.world_size), comm.name  # type: ignore[assignment]
    return model


def _apply(steps: list[Step], mesh: Mesh) -> None:
    for step in steps:
        step.style._apply(step.module, mesh)
        if isinstance(getattr(step.module, "parallel", None), Member):
            step.module.parallel = replace(step.module.parallel, layer=kind_of(step.name))


def is_foreign(model: nn.Module, plan: Mapping[str, Any]) -> bool:
    """Whether nothing in it is of fusedtp.nn, nor the plan one of our styles, which say how tokens lie themselves."""
    return not any(hasattr(module, "parallel") for module in model.modules()) and all(
        isinstance(style, str) for style in plan.values()
    )


def _parallelize_foreign(
    model: M,
    mesh: Mesh,
    comm: Communicator,
    plan: Mapping[str, Any],
    complete: bool,
    engine: str,
    sequence_parallel: bool,
) -> M:
    shared = Model()
    steps = foreign_steps(
        model, plan, comm.world_size, _has_more_dimensions(mesh), shared, complete,
        engine=engine, sequence_parallel=sequence_parallel,
    )  # fmt: skip
    prepare(model)
    regroup_heads(dict(model.named_modules()), steps, comm.world_size)
    _apply(steps, mesh)
    model._fusedtp = shared  # type: ignore[assignment]
    model.register_forward_hook(leave)
    return model


def _has_more_dimensions(mesh: Mesh) -> bool:
    return isinstance(mesh, DeviceMesh) and mesh._get_root_mesh().size() > mesh.size()
