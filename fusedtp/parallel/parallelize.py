"""Make a model tensor-parallel in place, following its plan."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fusedtp.comm import communicator

from .agree import agreed_plan, check_same_weights, check_start
from .expert_parallel import ExpertSplit
from .foreign_plan import adopt, check_plan
from .infer import infer, infer_or_refuse
from .placement import Mesh
from .plan import add_replicas, apply_steps, has_more_dimensions, make_steps, names_only_ends, plan_of
from .proof import prove as prove_plan
from .proof import proved_plan
from .towers import with_towers
from .twin import NoTwin, OtherCode

M = TypeVar("M", bound=nn.Module)


def parallelize(
    model: M,
    mesh: Mesh,
    *,
    engine: str = "auto",
    sequence_parallel: bool = True,
    plan: Mapping[str, Any] | None = None,
    experts: ExpertSplit | None = None,
    prove: bool | None = None,
    example: Mapping[str, Any] | None = None,
) -> M:
    """Split the model over the ranks of a mesh, in place, and return it. Collective.

        mesh                a 1-D DeviceMesh such as mesh["tp"], or a VirtualGroup
        engine              auto, collective, chunked, triton or multimem; see fusedtp.explain
        sequence_parallel   also split tokens between layers, [T_r, H]; if False, every rank holds all tokens
        plan                module name -> style, overrides the model's tp_plan. If the model has no plan, or one for
                            its embedding and head only, one is inferred from what its modules do, see infer.py; so
                            is one for encoders of images and sounds that its plan leaves out, see towers.py
        prove               first run a tiny copy of a third-party model, see fusedtp.prove. True: raise if that is not
                            possible; False: skip it; None: run it if the model comes from transformers
        example             arguments of the model's forward, by name, from which its plan is inferred; best a batch of
                            two or more and several different tokens. Without it inputs are guessed, and modules whose
                            inputs cannot be guessed stay whole
        experts             which ranks share the MoE experts, and how; default: the ranks of the mesh, with whole
                            experts in fusedtp.nn, with a part of every expert in third-party models

    Every rank must hold the full model beforehand, or a meta one (then call to_empty and init_ afterwards); nothing is
    sent. Every parameter becomes a DTensor on the mesh with its old name and global shape, so optimizers, FSDP2
    (applied afterwards) and distributed checkpoints work, and full state dicts load before and after.
    Raises ValueError if weights of a third-party model differ between ranks, if ranks inferred different styles for a
    module, if the plan, the model and the world size do not fit (all faults are listed), if the expert mesh does not
    match the mesh, or if transformers has split the model already. The model is then unchanged. Raises TypeError if
    model is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"parallelize takes a torch.nn.Module, not {type(model).__name__}; from_pretrained loads one by name"
        )
    refuse_split_by_transformers(model)
    comm = communicator(mesh)
    if experts is not None:
        experts.check(mesh)
    own = plan is None
    if not isinstance(example, Mapping | None):
        raise TypeError(f"example has arguments by name, such as {{'x': x}}; this is a {type(example).__name__}")
    plan = cast(Mapping[str, Any], plan_of(model) if plan is None else plan)
    whole: dict[str, str] = {}
    if own and (not plan or names_only_ends(model, plan)):
        search = partial(_inferred, model, comm.world_size, sequence_parallel, plan, example)
        if not plan:
            prove = prove or False  # an inferred plan has been proved already
        plan, whole = agreed_plan(search, comm) if isinstance(mesh, DeviceMesh) else search()
    elif example is not None:
        raise ValueError(
            f"example is for a plan that is inferred, and {type(model).__name__} has one already; fusedtp.prove "
            "takes an example too"
        )
    if plan and is_foreign(model, plan):
        if isinstance(mesh, DeviceMesh):  # modules of fusedtp.nn start empty: weights may come afterwards
            check_same_weights(model, comm)
        plan = plan if experts is None else with_experts(model, plan, experts)
        check_plan(model, mesh, plan, complete=not own)
        if prove is not False:
            given = plan

            def proof() -> tuple[Mapping[str, Any], dict[str, str]]:
                found = _proved(model, mesh, given, own, sequence_parallel, prove)
                return with_towers(model, comm.world_size, *found, sequence_parallel) if own else found

            plan, more = agreed_plan(proof, comm) if isinstance(mesh, DeviceMesh) else proof()
            whole |= more
        adopt(
            model,
            mesh,
            plan,
            complete=not own,
            engine=engine,
            sequence_parallel=sequence_parallel,
            whole=whole,
        )
        return model
    steps = make_steps(
        model,
        plan,
        comm.world_size,
        has_more_dimensions(mesh),
        engine=engine,
        experts=experts,
        sequence_parallel=sequence_parallel,
    )
    apply_steps(steps, mesh)
    add_replicas(model, steps, comm.name)
    for module in model.modules():
        if hasattr(module, "token_split"):
            module.register_forward_pre_hook(partial(check_start, comm.name), with_kwargs=True)
            if sequence_parallel:
                module.token_split, module.token_group = (comm.rank, comm.world_size), comm.name  # type: ignore[assignment]
    return model


def _inferred(
    model: nn.Module,
    world_size: int,
    sequence_parallel: bool,
    plan: Mapping[str, Any],
    example: Mapping[str, Any] | None,
) -> tuple[Mapping[str, Any], dict[str, str]]:
    """The plan with inferred styles added (it is empty or names only the ends); module -> why it stays whole."""
    found = (infer if plan else infer_or_refuse)(model, world_size, sequence_parallel, example)
    return with_towers(model, world_size, {**found.plan, **plan}, found.whole, sequence_parallel)


def refuse_split_by_transformers(model: nn.Module) -> None:
    """Raises ValueError if transformers' from_pretrained has split the model and replaced its modules' forwards."""
    modules = list(model.modules())
    if any(hasattr(module, "_fusedtp") for module in modules):
        return  # split by this library, which sets the transformers flag as well
    if any(getattr(module, "_is_distributed_loading_by_transformers", False) for module in modules):
        raise ValueError(
            f"transformers has split {type(model).__name__} already; load it without tp_plan, tp_size and "
            "distributed_config, or with fusedtp.from_pretrained(folder, mesh), which reads only this rank's part"
        )


def with_experts(model: nn.Module, plan: Mapping[str, Any], experts: ExpertSplit) -> dict[str, Any]:
    """The plan with whole experts per rank, taken from the model's ep_plan. Raises ValueError if it has no ep_plan."""
    if experts != ExpertSplit():
        raise ValueError(f"{type(model).__name__} takes only experts=ExpertSplit() without arguments, not {experts}")
    own = dict(getattr(model, "ep_plan", None) or {})
    modules = [pattern for pattern, word in own.items() if word == "ep_dispatch_experts"]
    if not modules:
        raise ValueError(f"{type(model).__name__} has no ep_plan with ep_dispatch_experts; leave out experts")
    rest = {
        pattern: word
        for pattern, word in plan.items()
        if not any(pattern == name or pattern.startswith(f"{name}.") for name in modules)
    }
    return rest | own


def is_foreign(model: nn.Module, plan: Mapping[str, Any]) -> bool:
    """Whether the model has no fusedtp.nn modules and the plan has only style names, no ParallelStyle objects.

    Our ParallelStyles specify the token layout themselves.
    """
    return not any(hasattr(module, "parallel") for module in model.modules()) and all(
        isinstance(style, str) for style in plan.values()
    )


def _proved(
    model: nn.Module,
    mesh: Mesh,
    plan: Mapping[str, Any],
    own: bool,
    sequence_parallel: bool,
    must: bool | None,
) -> tuple[Mapping[str, Any], dict[str, str]]:
    """The exact part of a plan, and module -> why it stays whole. A plan given by the user is exact or rejected."""
    prefix, inner = _inside(model, plan)
    inner_plan = {pattern.removeprefix(prefix): style for pattern, style in plan.items()}
    try:
        if own:
            kept, whole = proved_plan(inner, mesh, inner_plan, sequence_parallel)
            return {prefix + pattern: style for pattern, style in kept.items()}, {
                f"{prefix}{name}".removesuffix("."): why for name, why in whole.items()
            }
        proof = prove_plan(inner, mesh, plan=inner_plan, sequence_parallel=sequence_parallel)
    except NoTwin as why:
        if must:
            raise ValueError(f"{type(model).__name__} cannot be proved: {why}") from why
        if isinstance(why, OtherCode):
            warnings.warn(
                f"{type(model).__name__} is split by the plan of its class, but that plan is not proved for it: {why}. "
                "Compare its outputs and gradients with a single process; prove=True makes this an error, prove=False "
                "silences this warning",
                stacklevel=3,
            )
        return plan, {"": f"not proved: {why}"}
    if not proof.exact:
        raise ValueError(f"{type(model).__name__} is not exact when it is split by this plan:\n  {proof}")
    return plan, {}


def _inside(model: nn.Module, plan: Mapping[str, Any]) -> tuple[str, nn.Module]:
    """The transformers model inside a wrapper such as PeftModel, and its name there followed by a dot.

    Adapters are not part of the proof: how they attach to linears is known.
    """
    for name, module in model.named_modules():
        if hasattr(type(module), "_from_config"):  # on the type: a wrapper forwards attributes of the inner model
            prefix = f"{name}." if name else ""
            return (prefix, module) if all(pattern.startswith(prefix) for pattern in plan) else ("", model)
    return "", model
