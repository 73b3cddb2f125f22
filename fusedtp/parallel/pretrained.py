"""from_pretrained: each rank reads only its part of a Hugging Face checkpoint.

    model on meta -> parallelize -> for each parameter: regions of this rank -> read -> DTensor

A checkpoint may be older than the model's code: transformers then renames tensors, stacks experts, concatenates or
chunks matrices (its conversion mapping). transformers also has a loader for DTensors, which slices first and converts
afterwards. That is wrong if a conversion mixes parts of different ranks: chunking a fused qkv, rotary permutations.
Here the conversion comes first, on lazy tensors (`Lazy`), which then know where each region of a parameter is on disk.
Conversions other than stack, concatenate, chunk and transpose read full tensors, but only those of one parameter at a
time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fusedtp.ops.rows import split

from .parallelize import parallelize
from .placement import way_of
from .saving import compute_buffers, exchange, together

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def from_pretrained(
    name_or_folder: Any,
    mesh: DeviceMesh,
    *,
    model_class: Any = None,
    dtype: torch.dtype | str | None = "auto",
    engine: str = "auto",
    sequence_parallel: bool = True,
    plan: Mapping[str, Any] | None = None,
    variant: str | None = None,
    hub: Mapping[str, Any] | None = None,
    **config_changes: Any,
) -> Any:
    """Load a Hugging Face model over the ranks of a mesh. Collective.

    Equivalent to parallelize(model_class.from_pretrained(...)), but each rank holds and reads only its part.

        name_or_folder     a folder with config.json and safetensors files, or a name on the hub
        mesh               a 1-D DeviceMesh such as mesh["tp"]
        model_class        default: transformers.AutoModelForCausalLM
        dtype              dtype of the parameters; "auto": the config's, or else the checkpoint's
        engine, sequence_parallel, plan   see fusedtp.parallelize
        variant            as in model.<variant>.safetensors
        hub                options of transformers' cached_file: revision, cache_dir, token, local_files_only, subfolder
        config_changes     fields of the configuration; attn_implementation

    Raises ValueError on every rank that names all tensors that are missing, unexpected or have another shape, a file
    that is missing or corrupt, or an option that the config does not know; and what fusedtp.parallelize raises.
    """
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise ValueError(f"from_pretrained needs a 1-D DeviceMesh, not {mesh!r}")
    hub = dict(hub or {})
    with together(mesh):
        files = Files(name_or_folder, variant, hub)
        model = on_meta(name_or_folder, files, model_class, dtype, hub, config_changes)
        checkpoint = Checkpoint(model, files)
        different = checkpoint.differently_tied(mesh.get_local_rank(), mesh.size())
    verdicts = [set(each) for each in exchange(mesh, different)]
    untie(model, sorted(set().union(*verdicts)))
    parallelize(model, mesh, engine=engine, sequence_parallel=sequence_parallel, plan=plan)
    with together(mesh):
        checkpoint.load(mesh)
        read_generation_config(model, name_or_folder, hub)
    return model.eval()


def on_meta(name: Any, files: Files, model_class: Any, dtype: Any, hub: dict[str, Any], changes: dict[str, Any]) -> Any:
    """The model built from its config, parameters on meta, buffers computed."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_class = AutoModelForCausalLM if model_class is None else model_class
    attention = changes.pop("attn_implementation", None)
    config_class = getattr(model_class, "config_class", None) or AutoConfig
    config, unknown = config_class.from_pretrained(name, return_unused_kwargs=True, **hub, **changes)
    unknown = {option for option in unknown if option in changes}
    if unknown:
        raise ValueError(f"{type(config).__name__} has no {', '.join(sorted(unknown))}")
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{name} is quantized; from_pretrained needs an unquantized checkpoint")
    if attention is not None:
        config._attn_implementation = attention
    if dtype == "auto":
        dtype = getattr(config, "dtype", None) or files.floating_dtype()
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype or torch.get_default_dtype()
    config.name_or_path = str(name)
    return build_on_meta(model_class, config, dtype)


def build_on_meta(model_class: Any, config: Any, dtype: torch.dtype) -> Any:
    """The model for a configuration, parameters on meta, buffers computed."""
    from transformers import initialization as init

    build = getattr(model_class, "from_config", None) or model_class._from_config
    with ExitStack() as stack:
        stack.enter_context(torch.device("meta"))
        stack.enter_context(init.meta_device_safe_creation_ops())
        model = build(config, dtype=dtype)
    compute_buffers(model)
    _keep_in_fp32(model, dtype)
    return model


def _keep_in_fp32(model: Any, dtype: torch.dtype) -> None:
    """Cast the parameters and buffers that a model keeps in fp32 regardless of its dtype."""
    from transformers.core_model_loading import build_glob_alternation

    kept = model._get_dtype_plan(dtype)
    if not kept:
        return
    pattern, glob_of, _ = build_glob_alternation(list(kept))
    for name, tensor in model.state_dict(keep_vars=True).items():
        match = pattern.search(name)
        if match is not None:
            tensor.data = tensor.data.to(kept[glob_of[match.lastgroup or ""]])


def read_generation_config(model: Any, name: Any, hub: dict[str, Any]) -> None:
    """Set the generation configuration from the model's folder, if there is one."""
    if not model.can_generate() or not hasattr(model, "adjust_generation_fn"):
        return
    options = dict.fromkeys(("cache_dir", "proxies", "token"), None)
    options |= {"force_download": False, "local_files_only": False, "revision": "main", "subfolder": ""}
    model.adjust_generation_fn(None, True, None, str(name), trust_remote_code=False, **{**options, **hub})


def untie(model: Any, names: Sequence[str]) -> None:
    """Untie parameters that the config ties but the checkpoint does not."""
    for name in names:
        module, _, last = name.rpartition(".")
        parameters = model.get_submodule(module)._parameters
        parameters[last] = nn.Parameter(torch.empty_like(parameters[last]), parameters[last].requires_grad)
        model.all_tied_weights_keys.pop(name)


# --- files ----------------------------------------------------------------------------------------------------------


class Files:
    """The open safetensors files of a checkpoint.

    tensors   name -> lazy tensor
    """

    def __init__(self, name: Any, variant: str | None, hub: dict[str, Any]) -> None:
        from transformers.utils.hub import cached_file

        def find(file: str) -> str | None:
            try:
                return cached_file(name, file, **hub)
            except OSError as error:
                missing.append(str(error))
                return None

        missing: list[str] = []
        single, index = (_with_variant(file, variant) for file in (WEIGHTS, INDEX))
        self.tensors: dict[str, Lazy] = {}
        path = find(single)
        if path is not None:
            self._open(path)
            return
        path = find(index)
        if path is None:
            raise ValueError(f"{name} has neither {single} nor {index}: {missing[-1]}")
        try:
            where: dict[str, str] = json.loads(Path(path).read_text())["weight_map"]
        except (ValueError, KeyError, OSError) as error:
            raise ValueError(f"{path} is not an index of safetensors files: {error!r}") from error
        missing.clear()
        paths = {file: find(file) for file in sorted(set(where.values()))}
        absent = [file for file, found in paths.items() if found is None]
        if absent:
            raise ValueError(f"{name} lacks {', '.join(absent)}, which its index names: {missing[0]}")
        for found in paths.values():
            self._open(found)
        lost = sorted(where.keys() - self.tensors.keys())
        if lost:
            raise ValueError(f"tensors of {path} are not in the files it names: {', '.join(lost)}")

    def _open(self, path: Any) -> None:
        from safetensors import safe_open

        try:
            file = safe_open(path, "pt")
            self.tensors |= {name: Lazy.of(file.get_slice(name)[...]) for name in file.keys()}  # noqa: SIM118
        except Exception as error:  # safetensors raises its own class
            raise ValueError(f"{path} is not a complete safetensors file: {error}") from error

    def floating_dtype(self) -> torch.dtype | None:
        """The dtype of the first floating-point tensor."""
        return next((lazy.dtype for lazy in self.tensors.values() if lazy.dtype.is_floating_point), None)


def _with_variant(file: str, variant: str | None) -> str:
    return file if variant is None else file.replace("model.safetensors", f"model.safetensors.{variant}", 1)


# --- lazy tensors ---------------------------------------------------------------------------------------------------


Block = tuple[tuple[int, ...], Tensor]


class Lazy:
    """A tensor that is not read yet; any region of it can be read.

    blocks   (where it begins in each dimension, a view of a memory-mapped file); together they are the whole tensor
    """

    def __init__(self, blocks: Sequence[Block], shape: Sequence[int], dtype: torch.dtype) -> None:
        self.blocks, self.shape, self.dtype = blocks, torch.Size(shape), dtype

    @staticmethod
    def of(view: Tensor) -> Lazy:
        """A tensor of a file."""
        return Lazy([((0,) * view.dim(), view)], view.shape, view.dtype)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def contiguous(self) -> Lazy:
        return self

    def narrow(self, dim: int, start: int, length: int) -> Lazy:
        blocks = []
        for at, view in self.blocks:
            begin, end = max(at[dim], start), min(at[dim] + view.shape[dim], start + length)
            if begin < end:
                blocks.append((_put(at, dim, begin - start), view.narrow(dim, begin - at[dim], end - begin)))
        return Lazy(blocks, _put(self.shape, dim, length), self.dtype)

    def full(self) -> Tensor:
        """Read it: the pages of its blocks and no others."""
        values = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        for at, view in self.blocks:
            values[tuple(slice(begin, begin + n) for begin, n in zip(at, view.shape, strict=True))] = view
        return values

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _LAZILY[func](*args, **(kwargs or {}))


def _put(sizes: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*sizes[:dim], size, *sizes[dim + 1 :])


def _cat(tensors: Sequence[Lazy], dim: int = 0) -> Lazy:
    dim %= tensors[0].ndim
    if len({_put(each.shape, dim, 0) for each in tensors}) > 1:
        raise ValueError(f"tensors to concatenate have incompatible shapes {[tuple(each.shape) for each in tensors]}")
    blocks: list[Block] = []
    first = 0
    for each in tensors:
        blocks += [(_put(at, dim, first + at[dim]), view) for at, view in each.blocks]
        first += each.shape[dim]
    return Lazy(blocks, _put(tensors[0].shape, dim, first), _dtype(tensors))


def _stack(tensors: Sequence[Lazy], dim: int = 0) -> Lazy:
    dim %= tensors[0].ndim + 1
    if len({each.shape for each in tensors}) > 1:
        raise ValueError(f"tensors to stack have different shapes {[tuple(each.shape) for each in tensors]}")
    blocks = [
        ((*at[:dim], i, *at[dim:]), view.unsqueeze(dim)) for i, each in enumerate(tensors) for at, view in each.blocks
    ]
    shape = tensors[0].shape
    return Lazy(blocks, (*shape[:dim], len(tensors), *shape[dim:]), _dtype(tensors))


def _dtype(tensors: Sequence[Lazy]) -> torch.dtype:
    return reduce(torch.promote_types, (each.dtype for each in tensors))


def _chunk(input: Lazy, chunks: int, dim: int = 0) -> list[Lazy]:
    dim %= input.ndim
    sizes = [size for size in split(input.shape[dim], chunks) if size]
    return [input.narrow(dim, sum(sizes[:i]), size) for i, size in enumerate(sizes)]


def _transpose(input: Lazy, dim0: int, dim1: int) -> Lazy:
    order = list(range(input.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    blocks = [(tuple(at[i] for i in order), view.permute(order)) for at, view in input.blocks]
    return Lazy(blocks, [input.shape[i] for i in order], input.dtype)


_LAZILY: dict[Any, Callable[..., Any]] = {
    torch.stack: _stack,
    torch.cat: _cat,
    torch.chunk: _chunk,
    torch.transpose: _transpose,
}
LAZY_OPERATIONS = {"MergeModulelist", "Concatenate", "Chunk", "Transpose"}  # of transformers' conversions


# --- from a checkpoint's tensors to a model's parameters ------------------------------------------------------------


@dataclass
class Conversion:
    """Tensors of a checkpoint that are converted to one or more tensors of a model.

    rule      transformers' conversion, without tensors
    sources   (name in the model, name in the checkpoint, pattern of the rule, tensor)
    targets   names in the model
    """

    rule: Any
    sources: list[tuple[str, str, str, Lazy]] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)

    @property
    def is_lazy(self) -> bool:
        operations = getattr(self.rule, "operations", ())
        return all(
            type(each).__name__ in LAZY_OPERATIONS and type(each).__module__.startswith("transformers.")
            for each in operations
        )

    def run(self, model: Any, of: Callable[[Lazy], Any]) -> dict[str, Any]:
        """Name in the model -> converted tensor; `of` is applied to each source first."""
        rule = deepcopy(self.rule)
        for renamed, original, pattern, lazy in self.sources:
            rule.add_tensor(renamed, original, pattern, of(lazy))
        made = rule.convert(self.sources[0][0], model=model, config=model.config)
        return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}

    def tensors(self, model: Any, dtype: torch.dtype | None = None) -> dict[str, Any]:
        """Name in the model -> lazy tensor; or a full one of this dtype, if its operations need full tensors."""
        return self.run(model, (lambda lazy: lazy) if self.is_lazy else lambda lazy: lazy.full().to(dtype=dtype))


class Checkpoint:
    """Maps tensors of the files to tensors of the model. Raises one ValueError that lists all that do not fit."""

    def __init__(self, model: Any, files: Files) -> None:
        self.model = model
        self.conversions, unexpected = self._conversions(files)
        wanted = model.state_dict(keep_vars=True)
        faults = self._convert_shapes({name: tensor.shape for name, tensor in wanted.items()}, unexpected)
        made = {name for conversion in self.conversions for name in conversion.targets}
        there = {id(wanted[name]) for name in made}  # one of several tied parameters is enough
        missing = {name for name, tensor in wanted.items() if id(tensor) not in there}
        info = SimpleNamespace(missing_keys=set(missing), unexpected_keys=unexpected)
        model._adjust_missing_and_unexpected_keys(info)  # drops those that the model declares as allowed
        missing = {name for name in missing if name in info.missing_keys or wanted[name].is_meta}
        faults += [f"{name} is missing" for name in sorted(missing)]
        faults += [f"{name} is unexpected" for name in sorted(info.unexpected_keys)]
        if faults:
            lines = "".join(f"\n  - {fault}" for fault in faults)
            raise ValueError(f"the checkpoint does not fit this {type(model).__name__}:{lines}")

    def _conversions(self, files: Files) -> tuple[list[Conversion], set[str]]:
        """transformers' conversions of the files' tensors, and names of tensors that it does not use."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        rules = get_model_conversion_mapping(self.model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        of_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        wanted, prefix = self.model.state_dict(), self.model.base_model_prefix
        found: dict[str, Conversion] = {}
        unexpected: set[str] = set()
        for name in sorted(files.tensors, key=dot_natural_key):
            renamed, pattern = rename_source_key(name, renamings, converters, prefix, wanted)
            if renamed not in wanted and name in wanted:
                renamed, pattern = rename_source_key(name, [], [], prefix, wanted)
            if renamed not in wanted:
                unexpected.add(name)
                continue
            if renamed not in found:
                rule = WeightRenaming(name, renamed) if pattern is None else of_pattern[pattern]
                found[renamed] = Conversion(deepcopy(rule))
            found[renamed].sources.append((renamed, name, pattern or name, files.tensors[name]))
        self.model._weight_conversions = [rule for rule in rules if rule.was_used()]  # save_pretrained reverts them
        return list(found.values()), unexpected

    def _convert_shapes(self, wanted: Mapping[str, torch.Size], unexpected: set[str]) -> list[str]:
        """Find each conversion's targets by running it on meta; returns the faults."""
        faults = []
        for conversion in self.conversions:
            names = ", ".join(name for _, name, _, _ in conversion.sources)
            try:
                made = conversion.run(self.model, lambda lazy: torch.empty(lazy.shape, dtype=lazy.dtype, device="meta"))
            except Exception as error:
                faults.append(f"{names} cannot be converted: {error}")
                continue
            for name, tensor in made.items():
                if name not in wanted:
                    unexpected.add(name)
                    continue
                conversion.targets.append(name)
                if tensor.shape != wanted[name]:
                    faults.append(f"{name} has shape {tuple(tensor.shape)}, wanted {tuple(wanted[name])}")
        return faults

    def differently_tied(self, rank: int, world_size: int) -> list[str]:
        """Parameters that the config ties but the files do not. Each rank compares its rows of them."""
        of = {name: conversion for conversion in self.conversions for name in conversion.targets}
        found = []
        for target, source in getattr(self.model, "all_tied_weights_keys", {}).items():
            if target not in of or source not in of:
                continue
            parts = []
            for name in (target, source):
                tensor = of[name].tensors(self.model)[name]
                ranges = [[range(size)] for size in tensor.shape]
                rows = split(tensor.shape[0], world_size)
                ranges[0] = [range(sum(rows[:rank]), sum(rows[: rank + 1]))]
                parts.append(region(tensor, ranges))
            if not torch.equal(*parts):
                found.append(target)
        return found

    def load(self, mesh: DeviceMesh) -> None:
        """Load the values into the model: for a DTensor only this rank's part."""
        owners: dict[int, list[tuple[dict[str, Any], str]]] = {}
        for module in self.model.modules():
            for tensors in (module._parameters, module._buffers):
                for last, tensor in tensors.items():
                    if tensor is not None:
                        owners.setdefault(id(tensor), []).append((tensors, last))
        wanted = self.model.state_dict(keep_vars=True)
        for conversion in self.conversions:
            targets = [name for name in conversion.targets if id(wanted[name]) in owners]
            if not targets:
                continue  # tied, and read already
            made = conversion.tensors(self.model, wanted[targets[0]].dtype)
            for name in targets:
                values = _values(made.pop(name), wanted[name], mesh)
                for tensors, last in owners.pop(id(wanted[name]), ()):
                    tensors[last] = values
        for module in self.model.modules():
            for last, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[last] = buffer.to(mesh.device_type)


def region(tensor: Lazy | Tensor, ranges: Sequence[Sequence[range]]) -> Tensor:
    """The values at the indices in `ranges` of each dimension, one range after the other."""
    found: Any = tensor
    for dim, parts in enumerate(ranges):
        found = torch.cat([found.narrow(dim, part.start, len(part)) for part in parts], dim)
    return found.full() if isinstance(found, Lazy) else found


def _values(full: Lazy | Tensor, like: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's part of `full`, as a parameter or buffer like `like`."""
    if not isinstance(like, DTensor):
        own = region(full, [[range(size)] for size in full.shape])
        own = own.to(mesh.device_type, like.dtype)
        return nn.Parameter(own, like.requires_grad) if isinstance(like, nn.Parameter) else own
    coordinate = like.device_mesh.get_coordinate()
    assert coordinate is not None
    own = region(full, way_of(like).ranges(like.shape, coordinate))
    placed = DTensor.from_local(
        own.to(like.device_mesh.device_type, like.dtype), like.device_mesh, like.placements,
        run_check=False, shape=like.shape, stride=like.stride(),
    )  # fmt: skip
    parameter = nn.Parameter(placed, like.requires_grad)
    parameter.__dict__.update(like.__dict__)
    parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # as transformers marks what it has loaded
    return parameter
