"""One-time checks of what a split model relies on: ranks have the same plan and weights, see the same inputs, draw the
same random numbers, and sum gradients."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten_with_path, tree_leaves

from fusedtp.comm import Communicator, communicator
from fusedtp.comm.draws import Watched, states
from fusedtp.ops.tokens import gather_tokens


def agreed_plan(
    make: Callable[[], tuple[Mapping[str, Any], dict[str, str]]], comm: Communicator
) -> tuple[Mapping[str, Any], dict[str, str]]:
    """The result of `make`, a plan and why modules stay whole; its plan must be the same on every rank. Collective.

    If `make` raises on any rank, every rank raises. Raises ValueError that names modules with different styles on
    different ranks.
    """
    error: Exception | None = None
    plan: Mapping[str, Any] = {}
    whole: dict[str, str] = {}
    try:
        plan, whole = make()
    except Exception as raised:  # do not raise yet: peers wait in the exchange below
        error = raised
    if comm.world_size > 1:
        every = comm.world.exchange(("" if error is None else f"{type(error).__name__}: {error}", dict(plan)))
        for rank, (fault, _) in enumerate(every):
            if fault and error is None:
                raise ValueError(f"rank {rank} found no plan: {fault}")
        if error is None:
            _refuse_different([theirs for _, theirs in every])
    if error is not None:
        raise error
    return plan, whole


def _refuse_different(plans: list[dict[str, Any]]) -> None:
    names = dict.fromkeys(name for plan in plans for name in plan)
    words = {name: [repr(plan.get(name, "whole")) for plan in plans] for name in names}
    differing = [
        f"{name} ({', '.join(f'rank {rank}: {word}' for rank, word in enumerate(found))})"
        for name, found in words.items()
        if len(set(found)) > 1
    ]
    if differing:
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise ValueError(
            f"ranks found different plans: {'; '.join(differing[:3])}{more}; build the same model on all ranks, "
            "or pass plan={...}"
        )


def check_same_weights(model: nn.Module, comm: Communicator) -> None:
    """Raises ValueError on every rank, naming the parameters and buffers that differ between ranks. Collective."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    # sorted by name: transformers registers buffers in set order, which differs between ranks
    own = {name: x for name, x in sorted(named.items()) if not isinstance(x, DTensor) and not x.is_meta}
    _refuse_weights(_differing(own, comm))


def _refuse_weights(differing: list[str]) -> None:
    if differing:
        more = f" and {len(differing) - 5} more" if len(differing) > 5 else ""
        raise ValueError(
            f"ranks hold different values of {', '.join(differing[:5])}{more}; load the same checkpoint on all ranks, "
            "or call torch.manual_seed with the same seed before building the model"
        )


def check_start(group: str, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """A hook before the first forward of a fusedtp.nn model, since its weights may be loaded after parallelize.

    Checks that replicated parameters are the same on all ranks, and that they see the same batch. Collective.
    """
    if torch.compiler.is_compiling():
        return
    given = inspect.signature(model.forward).bind(*args, **kwargs).arguments  # by name
    _once(model, check_start)
    numbers = {name: torch.tensor(float(x)) for name, x in given.items() if isinstance(x, int | float)}
    whole = {name: p._local_tensor for name, p in model.named_parameters() if _is_whole(p, group)}
    own = whole, _tensors_of(({**given, **numbers},))
    comm = communicator(group)
    if comm.world_size > 1:  # exchanged as objects, so that they do not count as calls of the model
        with torch.no_grad():
            every = comm.world.exchange([{name: _digest(x) for name, x in named.items()} for named in own])
        of_weights, of_inputs = ([digests[i] for digests in every] for i in (0, 1))
        _refuse_weights(_not_alike(of_weights))
        _refuse_inputs(_not_alike(of_inputs))


def _not_alike(every: Sequence[Mapping[str, list[float]]]) -> list[str]:
    """Names with different digests on different ranks, or missing on some."""
    names = dict.fromkeys(name for digests in every for name in digests)
    return [name for name in names if any(digests.get(name) != every[0].get(name) for digests in every)]


def _is_whole(parameter: Any, group: str) -> bool:
    """Whether the parameter is replicated within the group; it may be sharded over other ranks."""
    if not isinstance(parameter, DTensor) or parameter.is_meta or not parameter.placements[-1].is_replicate():
        return False
    mesh = parameter.device_mesh
    return bool(mesh.get_group(mesh.ndim - 1).group_name == group)


def check_same_inputs(model: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """A hook before a model's first forward: checks for the same batch on all ranks, no new parameters. Collective."""
    if torch.compiler.is_compiling():
        return
    _once(model, check_same_inputs)
    strange = [
        name
        for name, module in model.named_modules()
        if getattr(module, "parallel", None) is None and any(True for _ in module.parameters(recurse=False))
    ]
    if strange:
        raise ValueError(
            f"{', '.join(strange[:3])}{' and others' if len(strange) > 3 else ''}: added to the model after "
            "parallelize; add adapters (get_peft_model) before it"
        )
    _refuse_inputs(_differing(_tensors_of((args, kwargs)), communicator(model._fusedtp.group)))


def _tensors_of(given: Any) -> dict[str, Tensor]:
    return {name: x for name, x in named_leaves(given) if isinstance(x, Tensor) and not x.is_meta}


def _refuse_inputs(differing: list[str]) -> None:
    if differing:
        raise ValueError(
            f"ranks of one tensor-parallel group got different inputs: {', '.join(differing)}; give them the same "
            "batch (the data loader's sampler must count only data-parallel ranks)"
        )


def check_same_ids(ids: Tensor, group: str) -> None:
    """Checks that an embedding gets the same ids, of all tokens, on all ranks. Collective, not counted as a call."""
    comm = communicator(group)
    if comm.world_size > 1 and not ids.is_meta:
        _refuse_inputs(_not_alike(comm.world.exchange({"ids of an embedding": _digest(ids)})))


def watch_draws(model: Any, args: Any) -> None:
    """A hook before training forwards, until one passes: if generators differ, record what is drawn. Collective.

    Skipped for compiled code, which does not show what it draws for.
    """
    shared = model._fusedtp
    if torch.compiler.is_compiling() or shared.compiled or not model.training:
        return
    comm = communicator(shared.group)
    if _differing(states(comm.device), comm):
        shared.watched = Watched(comm.device)
    else:
        _once(model, watch_draws)


def check_draws(model: Any) -> None:
    """After that forward: ValueError on every rank if ranks drew different numbers for whole tensors. Collective."""
    watched, model._fusedtp.watched = model._fusedtp.watched, None
    comm = communicator(model._fusedtp.group)
    drawn = torch.tensor([float(watched.drawn())], device=comm.device)
    if gather_tokens(drawn, comm.name, (1,) * comm.world_size).any():
        raise ValueError(
            "ranks of one tensor-parallel group draw different random numbers, so dropout would change replicated "
            "tensors differently; call torch.manual_seed with the same seed on all ranks of the group before the "
            "first step (torch seeds every process differently)"
        )
    _once(model, watch_draws)


def _once(model: Any, hook: Any) -> None:
    """Remove a hook before the model's forward."""
    for key, each in list(model._forward_pre_hooks.items()):
        if getattr(each, "func", each) is hook:
            del model._forward_pre_hooks[key]
            model._forward_pre_hooks_with_kwargs.pop(key, None)


def check_gradients(x: Tensor) -> None:
    """Checks a split layer's input (this rank's rows): gradients of the parameters that produced it must be summed.

    Walks the graph back to the output of the last split layer. Raises ValueError for a plain parameter on the way: each
    rank would get only the gradient of its own tokens, and nothing would sum these gradients.
    """
    nodes, seen = [x.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        function = getattr(type(node), "_forward_cls", None)
        if function is not None and function.__module__.startswith("fusedtp."):
            continue
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and not isinstance(leaf, DTensor):
            raise ValueError(
                f"a parameter of shape {tuple(leaf.shape)} sees only this rank's tokens, but nothing sums its "
                "gradient over ranks; add its module to the plan, as fusedtp.Replicated() or torch's SequenceParallel()"
            )
        nodes += [following for following, _ in node.next_functions]


def named_leaves(args_and_kwargs: Any) -> list[tuple[str, Any]]:
    """Leaves of a call's arguments by name, in an order that is the same on all ranks.

    Dictionary order may differ: transformers builds a dictionary of masks from a set of layer types.
    """
    try:
        leaves, _ = tree_flatten_with_path(args_and_kwargs)
    except ValueError:  # a pytree node type without key paths
        return [(str(i), x) for i, x in enumerate(tree_leaves(args_and_kwargs))]
    return sorted(((_named(path), x) for path, x in leaves), key=lambda each: each[0])


def _named(path: Any) -> str:
    keys = [str(getattr(key, "key", getattr(key, "idx", key))) for key in path[1:]]
    return ".".join(keys)


@torch.no_grad()
def _differing(tensors: dict[str, Tensor], comm: Communicator) -> list[str]:
    """Names of the tensors that are not bitwise equal on every rank."""
    if comm.world_size == 1 or not tensors:
        return []
    digests = torch.tensor([_digest(x) for x in tensors.values()], dtype=torch.float32, device=comm.device)
    every = gather_tokens(digests, comm.name, (len(tensors),) * comm.world_size)
    same = (every.view(comm.world_size, len(tensors), -1) == digests).all(-1).all(0)
    same = gather_tokens(same.float(), comm.name, (len(tensors),) * comm.world_size)  # so all ranks return the same
    alike = same.view(comm.world_size, -1).bool().all(0).tolist()
    return [name for name, equal in zip(tensors, alike, strict=True) if not equal]


SAMPLES = 16


def _digest(x: Tensor) -> list[float]:
    """Shape, XOR of all bits, and some values, as numbers that fp32 represents exactly."""
    shape = zlib.crc32(repr((tuple(x.shape), x.dtype)).encode())
    bits, sample = 0, [0.0] * SAMPLES
    if x.layout != torch.strided:  # of a sparse matrix, the values
        x = (x.detach().coalesce() if x.is_sparse else x).values()
    if x.numel():
        x = x.detach().contiguous().reshape(-1)
        x = x.view(torch.uint8) if x.is_complex() or x.element_size() == 1 else x
        bits = int(torch.hash_tensor(x).view(torch.int64)) & 0xFFFFFFFFFFFFFFFF
        at = torch.linspace(0, x.numel() - 1, SAMPLES, device=x.device).long()
        sample = x[at].float().nan_to_num().tolist()
    words = [(bits >> shift) & 0xFFFF for shift in (0, 16, 32, 48)] + [shape & 0xFFFF, shape >> 16]
    return [*map(float, words), *sample]
