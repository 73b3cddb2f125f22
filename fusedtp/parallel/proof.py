"""Prove that a plan computes the same as the model: run a tiny copy parallel and on one device, compare everything.

A plan only specifies placements. That the model's code then still computes the same is the promise of the plan's
author, and some plans break it (gate and up projections packed in one matrix that is cut in half; statistics over
features of which each rank sees only a part). `proved_plan` finds the module where values diverge, leaves that module
whole, and tries again until everything is exact. Then fewer modules are split, and `explain` lists the whole ones.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from fusedtp.comm import Communicator, communicator
from fusedtp.ops.tokens import gather_tokens

from .copies import deep_copy
from .foreign_plan import adopt
from .local_view import heads_in
from .placement import Mesh
from .plan import generic, matches, parent_of, plan_of
from .token_shard import TokenShard
from .twin import NoTwin, twin_of
from .vocab_shard import VocabShard

# Roundoff of a small model in fp32 is four orders of magnitude below the effect of a faulty plan.
OFF = 5e-3
_seeding = threading.Lock()  # virtual ranks are threads of one process and share one generator


@dataclass(frozen=True)
class Proof:
    """The result of the comparison.

    outputs     largest difference of the model's outputs, relative to their largest value
    gradients   parameter -> the same for its gradient; very small gradients are measured relative to a thousandth of
                the largest gradient
    failure     the error that the parallel copy raised, or ""
    where       the module where values diverged, or that was running when it failed; "" if everything is exact
    """

    outputs: float
    gradients: dict[str, float]
    failure: str = ""
    where: str = ""

    @property
    def exact(self) -> bool:
        return not self.failure and self.outputs <= OFF and all(g <= OFF for g in self.gradients.values())

    def __str__(self) -> str:
        if self.failure:
            return f"failed in {self.where or 'the model'}: {self.failure}"
        off = {name: error for name, error in self.gradients.items() if not error <= OFF}
        lines = [
            f"outputs differ by {self.outputs:.1e}",
            f"gradients off: {len(off)} of {len(self.gradients)}",
        ]
        lines += [f"values diverge at {self.where}"] if self.where else []
        width = max(map(len, off), default=0)
        return "\n  ".join([*lines, *(f"{name.ljust(width)}  {error:.1e}" for name, error in off.items())])


def prove(
    model: nn.Module,
    mesh: Mesh,
    example: Mapping[str, Any] | None = None,
    *,
    plan: Mapping[str, str] | None = None,
    sequence_parallel: bool = True,
) -> Proof:
    """Compare outputs and every gradient of a tiny copy of the model, parallel and on one device. Collective.

        mesh      as for parallelize
        example   arguments of forward; default: token ids, one row of them padded
        plan      module name -> style; default: the model's own, as for parallelize

    A transformers model is copied small, with random weights; any other is copied as it is, and needs an example.
    Raises NoTwin if neither is possible, or if there is no plan. The model itself is neither run nor changed.
    """
    taken: Mapping[str, Any] = plan_of(model) if plan is None else plan
    if not taken:
        raise NoTwin(f"{type(model).__name__} has no plan to prove; parallelize proves the one that it infers")
    return _prove(_copy_of(model, mesh, example, taken), mesh, example, taken, sequence_parallel)


def proved_plan(
    model: nn.Module, mesh: Mesh, plan: Mapping[str, str], sequence_parallel: bool
) -> tuple[dict[str, str], dict[str, str]]:
    """The part of a plan that is exact, and module -> why it stays whole. Collective. Raises NoTwin, ValueError."""
    plain = _copy_of(model, mesh, None, plan)
    kept = dict(plan)
    whole: dict[str, str] = {}
    while True:
        proof = _prove(plain, mesh, None, kept, sequence_parallel)
        if proof.exact:
            return kept, whole
        region, dropped = _region(proof.where, kept)
        if not dropped:
            raise ValueError(f"{type(model).__name__} is not exact when it is split:\n  {proof}")
        why = f"fails ({proof.failure})" if proof.failure else f"is off by {proof.outputs:.1e} at {proof.where}"
        whole[region] = f"a small copy of the model, with this split, {why}"
        for pattern in dropped:
            del kept[pattern]


def _region(where: str, plan: Mapping[str, str]) -> tuple[str, list[str]]:
    """The smallest module around the fault with patterns in the plan, and those patterns."""
    name = generic(where) if where else ""
    single = not any(pattern.startswith(f"{name}.") for pattern in plan)
    at = parent_of(name) if single and name else name
    while True:
        within = [p for p in plan if p == at or p.startswith(f"{at}.") or at == "" or matches(at, p)]
        if within or not at:
            return at, within
        at = parent_of(at)


def _copy_of(model: nn.Module, mesh: Mesh, example: Mapping[str, Any] | None, plan: Mapping[str, str]) -> nn.Module:
    """A small copy of the model with as many heads as ranks, or as the plan's words say."""
    comm = communicator(mesh)
    heads = max((count for word in plan.values() for count in heads_in(word)), default=comm.world_size)
    with _seeding:
        try:
            return twin_of(model, heads).to(comm.device)
        except NoTwin:
            if example is None:
                raise
            copied: nn.Module = deep_copy(model).to(comm.device)
            return copied


def _example(plain: nn.Module, device: torch.device) -> dict[str, Any]:
    if getattr(plain, "main_input_name", "") != "input_ids":
        raise NoTwin("its input is not input_ids; call fusedtp.prove with an example")
    vocab = plain.get_input_embeddings().num_embeddings  # type: ignore[operator]
    ids = torch.randint(3, vocab, (2, 7), generator=torch.Generator().manual_seed(1)).to(device)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    targets = {"decoder_input_ids": ids} if getattr(getattr(plain, "config", None), "is_encoder_decoder", False) else {}
    return {"input_ids": ids, "attention_mask": mask, **targets}


def _prove(
    plain: nn.Module,
    mesh: Mesh,
    example: Mapping[str, Any] | None,
    plan: Mapping[str, str],
    sequence_parallel: bool,
) -> Proof:
    comm = communicator(mesh)
    counted = dict(comm.engine_calls), dict(comm.layer_calls)
    try:
        return _compare(plain, mesh, comm, example, plan, sequence_parallel)
    finally:  # calls of the tiny copy must not count as calls of the model
        for counts, before in zip((comm.engine_calls, comm.layer_calls), counted, strict=True):
            counts.clear()
            counts.update(before)


def _compare(
    plain: nn.Module,
    mesh: Mesh,
    comm: Communicator,
    example: Mapping[str, Any] | None,
    plan: Mapping[str, str],
    sequence_parallel: bool,
) -> Proof:
    example = _example(plain, comm.device) if example is None else example
    for parameter in plain.parameters():
        parameter.grad = None
    parallel = deep_copy(plain)
    try:
        want = _run(plain, example)
    except Exception as error:
        raise NoTwin(f"its small copy does not run: {type(error).__name__}: {error}") from error
    running: list[str] = []
    failure, outputs, gradients = "", 0.0, {}
    try:
        adopt(parallel, mesh, plan, complete=False, engine="collective", sequence_parallel=sequence_parallel)
    except ValueError as error:
        raise NoTwin(f"its small copy cannot be split: {error}") from error
    try:
        _track(parallel, running)
        got = _run(parallel, example)
        outputs = max((_off(a, b) for a, b in zip(got, want, strict=True)), default=0.0)
        gradients = _gradients(parallel, plain)
    except Exception as error:  # the model's code may raise anything on tensors that it does not expect
        failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    found = Proof(outputs, gradients, failure, running[-1] if failure and running else "")
    if _any(not found.exact, comm.name, comm.world_size, comm.device) and not failure:
        where = _first_off(plain, mesh, example, plan, sequence_parallel)
        if not where:
            late = [name for name, error in gradients.items() if not error <= OFF]
            where = parent_of(late[-1]) if late else ""
        found = Proof(outputs, gradients, failure, where)
    return found


def _run(model: nn.Module, example: Mapping[str, Any]) -> list[Tensor]:
    """The model's floating-point outputs, after a backward through all of them."""
    out = model(**example, **({"use_cache": False} if hasattr(model, "generation_config") else {}))
    whole = [x.full_tensor() if isinstance(x, TokenShard | VocabShard) else x for x in tree_leaves(out)]
    floats = [x for x in whole if isinstance(x, Tensor) and x.is_floating_point()]
    generator = torch.Generator().manual_seed(2)
    loss = sum(
        (x.float() * torch.randn(x.shape, generator=generator).to(x.device)).sum() for x in floats if x.requires_grad
    )
    if isinstance(loss, Tensor):
        loss.backward()
    return [x.detach() for x in floats]


def _track(model: nn.Module, running: list[str]) -> None:
    """Keep a stack of the names of running modules."""
    for name, module in model.named_modules():

        def enter(module: Any, args: Any, name: str = name) -> None:
            running.append(name)

        def leave(module: Any, args: Any, out: Any) -> None:
            running.pop()

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)


def _off(got: Tensor, want: Tensor, least: float = 1e-9) -> float:
    if got.shape != want.shape:
        return float("inf")
    if not want.numel():
        return 0.0
    error = float((got.float() - want.float()).abs().max() / want.float().abs().max().clamp(min=least))
    return error if error == error else float("inf")  # NaN counts as infinite


def _gradients(parallel: nn.Module, plain: nn.Module) -> dict[str, float]:
    found: dict[str, float] = {}
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    largest = max((float(g.abs().max()) for g in wanted.values() if g is not None and g.numel()), default=0.0)
    for name, parameter in parallel.named_parameters():
        want, got = wanted[name], parameter.grad
        if want is None:
            continue
        if got is None:
            found[name] = float(want.abs().max() > 0)
            continue
        own = got.full_tensor() if isinstance(got, DTensor) else got
        if own.shape != want.shape:
            continue  # a shard of the virtual world
        found[name] = _off(own, want, 1e-3 * largest)
        if isinstance(got, DTensor) and all(p.is_replicate() for p in got.placements):
            found[name] = max(found[name], _off(got.to_local(), want, 1e-3 * largest))
    return found


def _first_off(
    plain: nn.Module, mesh: Mesh, example: Mapping[str, Any], plan: Mapping[str, str], sequence_parallel: bool
) -> str:
    """The first module to finish with an output that has the right shape but other values than on one device."""
    comm = communicator(mesh)
    parallel = deep_copy(plain)
    adopt(parallel, mesh, plan, complete=False, engine="collective", sequence_parallel=sequence_parallel)
    seen: list[dict[str, list[Tensor]]] = []
    for model in (deep_copy(plain), parallel):
        outputs: dict[str, list[Tensor]] = {}
        for name, module in model.named_modules():

            def keep(module: Any, args: Any, out: Any, name: str = name, outputs: Any = outputs) -> None:
                whole = [x.full_tensor() if isinstance(x, TokenShard | VocabShard) else x for x in tree_leaves(out)]
                outputs.setdefault(name, [x.detach().clone() for x in whole if isinstance(x, Tensor)])

            module.register_forward_hook(keep)
        with torch.no_grad():
            model(**example, **({"use_cache": False} if hasattr(model, "generation_config") else {}))
        seen.append(outputs)
    want, got = seen
    for name, tensors in want.items():
        others = got.get(name, [])
        pairs = [(a, b) for a, b in zip(others, tensors, strict=False) if a.shape == b.shape and a.is_floating_point()]
        off = any(_off(a, b) > OFF for a, b in pairs)
        if _any(off, comm.name, comm.world_size, comm.device):
            return name
    return ""


def _any(flag: bool, group: str, world_size: int, device: torch.device) -> bool:
    """Whether it holds on any rank. Collective."""
    own = torch.tensor([float(flag)], device=device)
    return bool(gather_tokens(own, group, (1,) * world_size).max())
