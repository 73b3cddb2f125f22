"""save_pretrained and push_to_hub of parallel Hugging Face models; buffers of models on meta.

parameter -full_tensor-> the first rank's CPU, one at a time -> transformers' own save_pretrained on that rank
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

# --- all ranks together ---------------------------------------------------------------------------------------------


def exchange(mesh: DeviceMesh, value: Any) -> list[Any]:
    """The picklable values of all ranks, in rank order. Collective over a mesh of any number of dimensions."""
    values = [value]
    for dim in reversed(range(mesh.ndim)):
        every: list[Any] = [None] * mesh.size(dim)
        dist.all_gather_object(every, values, group=mesh.get_group(dim))
        values = [each for part in every for each in part]
    return values


@contextmanager
def together(mesh: DeviceMesh) -> Iterator[None]:
    """If the body raises on any rank, raise on every rank. Collective at the end; the body must not be collective."""
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    for rank, theirs in enumerate(exchange(mesh, None if error is None else _portable(error))):
        if error is None and theirs is not None:
            error = theirs
            error.add_note(f"raised on rank {rank} of {mesh}")
    if error is not None:
        raise error


def _portable(error: Exception) -> Exception:
    """The error itself if it can be pickled, else a RuntimeError with its text."""
    try:
        if str(pickle.loads(pickle.dumps(error))) == str(error):
            return error
    except Exception:  # its class may raise anything when pickled
        pass
    return RuntimeError(f"{type(error).__name__}: {error}")


# --- save -----------------------------------------------------------------------------------------------------------


def save_pretrained(
    self: Any,
    save_directory: Any,
    is_main_process: bool | None = None,
    state_dict: dict[str, Any] | None = None,
    *arguments: Any,
    **options: Any,
) -> None:
    """transformers' save_pretrained for a parallel model, with the same arguments. Every rank must call it.

        is_main_process   None: the first rank of the whole mesh writes; otherwise the first of the ranks that share
                          this model writes, if it passes True
        state_dict        used instead of the model's; its DTensors are gathered, other values are those of the writing
                          rank

    The folder is the same as for the plain model. Ranks gather one parameter at a time, and only the writing rank keeps
    it, on its CPU. If writing raises, every rank raises. Raises ValueError for parameters on meta, or if state dicts of
    ranks have different DTensors.
    """
    mesh = mesh_of(self)
    writes, full = _gather(self, mesh, state_dict, is_main_process)
    with together(mesh):
        if writes:
            _write(self, full, save_directory, *arguments, **options)


def push_to_hub(self: Any, *arguments: Any, **options: Any) -> Any:
    """transformers' push_to_hub for a parallel model, with the same arguments. Every rank must call it.

    The first rank of the whole mesh creates the repository and uploads the plain model's folder in one commit; it
    returns what transformers returns, the others return None. If that raises, every rank raises.
    """
    mesh = mesh_of(self)
    uploads, full = _gather(self, mesh, None, None)
    commit = None
    with together(mesh):
        if uploads:
            kept = self.save_pretrained
            self.save_pretrained = partial(_write, self, full)  # already gathered, so only this rank runs it
            try:
                commit = type(self).push_to_hub(self, *arguments, **options)
            finally:
                self.save_pretrained = kept
    return commit


def _gather(
    model: Any, mesh: DeviceMesh, state_dict: dict[str, Any] | None, is_main_process: bool | None
) -> tuple[bool, dict[str, Any]]:
    """Whether this rank writes, and the full state dict (with values only on that rank). See save_pretrained."""
    state = model.state_dict() if state_dict is None else state_dict
    with together(mesh):
        _refuse_meta(state.items())
    aliases = _aliases(state)
    if any(other != aliases for other in exchange(mesh, aliases)):
        raise ValueError("ranks were given state_dicts with different DTensors; pass the same ones on all ranks")
    first = not any(mesh.get_coordinate() or ())
    writes = first and is_main_process is not False
    if is_main_process is None:
        writes = not any(mesh._get_root_mesh().get_coordinate() or ())
    full: dict[str, Any] = {}
    for name, value in state.items():
        if name not in aliases:
            full[name] = value
        elif aliases[name] != name:
            full[name] = full.get(aliases[name])
        else:
            gathered = value.detach().full_tensor()
            full[name] = gathered.cpu() if writes else None
            del gathered
    return writes, full


def _write(model: Any, full: dict[str, Any], save_directory: Any, *arguments: Any, **options: Any) -> None:
    """transformers' save_pretrained, on this rank only."""
    model.should_save_on_this_rank = bool  # by default transformers saves only on global rank 0
    config: Any = getattr(model, "config", None)
    split = config.__dict__.pop("distributed_config", None)  # with it, transformers would gather again
    try:
        if arguments:
            type(model).save_pretrained(model, save_directory, True, full, *arguments, **options)
        else:  # by name: PEFT has a different argument order
            options |= {"is_main_process": True, "state_dict": full}
            type(model).save_pretrained(model, save_directory, **options)
    finally:
        del model.should_save_on_this_rank
        if split is not None:
            config.distributed_config = split


def mesh_of(model: nn.Module) -> DeviceMesh:
    """The parameters' mesh with the most dimensions: FSDP2 adds one to the meshes of parameters it shards."""
    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
    return max(meshes, key=lambda mesh: mesh.ndim)


def _aliases(state: dict[str, Any]) -> dict[str, str]:
    """Names of DTensors -> the first name of the same tensor."""
    names: dict[tuple[Any, ...], str] = {}
    found = {}
    for name, value in state.items():
        if isinstance(value, DTensor):
            own = value.to_local()
            key = own.untyped_storage()._cdata, own.storage_offset(), value.shape, value.stride()
            found[name] = names.setdefault(key, name)
    return found


# --- models on meta -------------------------------------------------------------------------------------------------


def prepare(model: Any) -> None:
    """Before a third-party model is placed: give it the methods that a parallel model needs.

    save_pretrained   of the model and of every model inside it
    push_to_hub       the same
    to_empty          keeps non-persistent buffers; for a model on meta they are computed here
    forward           raises if parameters are still on meta
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        compute_buffers(model)
        model.register_forward_pre_hook(_refuse_meta_once)
    for module in model.modules():
        if callable(getattr(type(module), "save_pretrained", None)):
            module.save_pretrained = MethodType(save_pretrained, module)
            if callable(getattr(type(module), "push_to_hub", None)):
                module.push_to_hub = MethodType(push_to_hub, module)
            module.to_empty = MethodType(to_empty, module)


def compute_buffers(model: Any) -> None:
    """Compute the buffers of a model on meta on the CPU, as transformers does while loading."""
    on_meta = [
        (module, name)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta
    ]
    if not on_meta or not hasattr(model, "initialize_weights"):
        return
    for module, name in on_meta:
        module._buffers[name] = torch.empty_like(module._buffers[name], device="cpu")
    marked: list[Any] = []
    for parameter in model.parameters():
        if not hasattr(parameter, "_is_hf_initialized"):
            parameter._is_hf_initialized = True
            marked.append(parameter)
    unmarked = [module for module in model.modules() if not hasattr(module, "_is_hf_initialized")]
    model.initialize_weights()
    for each in [*marked, *unmarked]:  # unmark, so that a later init_weights fills the parameters
        each.__dict__.pop("_is_hf_initialized", None)


def to_empty(self: Any, *arguments: Any, **options: Any) -> Any:
    """nn.Module.to_empty, but non-persistent buffers move to the device with their values."""
    kept = [
        (module, name, module._buffers[name])
        for module in self.modules()
        for name in module._non_persistent_buffers_set
        if module._buffers.get(name) is not None
    ]
    type(self).to_empty(self, *arguments, **options)
    for module, name, buffer in kept:
        if not buffer.is_meta:
            module._buffers[name] = buffer.to(module._buffers[name].device)
    return self


def _refuse_meta_once(model: Any, arguments: Any) -> None:
    """A forward pre-hook that removes itself once nothing is on meta."""
    _refuse_meta([*model.named_parameters(), *model.named_buffers()])
    for key, hook in list(model._forward_pre_hooks.items()):
        if hook is _refuse_meta_once:
            del model._forward_pre_hooks[key]


def _refuse_meta(named: Any) -> None:
    found = [name for name, value in named if isinstance(value, Tensor) and value.is_meta]
    if found:
        raise ValueError(f"still on the meta device: {', '.join(found)}; call to_empty and load their values first")
