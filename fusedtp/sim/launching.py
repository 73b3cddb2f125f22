"""Normalizes launches as users write them ("Kernels as they are launched" in docs/checking-kernels.md) to one kernel, a
grid of numbers, and every argument by name.

Raises UnsupportedKernel if it is not a Triton kernel, ValueError if the arguments or the grid do not fit it.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .case import Launch, Run, Work, inside, name_of
from .faults import UnsupportedKernel
from .memory import Memory

OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion", "launch_cooperative_grid")
NOT_COMPILED = ("ir_override", "extern_libs")


@dataclass(frozen=True)
class Plain(Launch):
    """A normalized launch.

    config        the config of an autotuned kernel, in words
    environment   the values of %envreg0, %envreg1, ..., for the bodies in `replace`
    """

    config: str = ""
    environment: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return f"{name_of(self.kernel)} [{self.config}]" if self.config else name_of(self.kernel)


def plain(run: Run, turn: int = 0) -> Run:
    """The same run with plain launches. turn: index of the config of an autotuned kernel, modulo their number."""
    if not run.work:
        raise ValueError("the run has no ranks: it needs a list of work for each rank")
    replaced = any(isinstance(work, Launch) and work.replace for of_rank in run.work for work in of_rank)
    table = _table(run.memory, len(run.work)) if replaced else None
    made: list[list[Work]] = []
    for rank, of_rank in enumerate(run.work):
        environment: tuple[int, ...] = ()
        if table is not None:
            address = table.tensors[rank].data_ptr()
            environment = (rank, len(run.work), len(run.memory), address & 0xFFFFFFFF, address >> 32)
        made.append([_plain(w, turn, environment) if isinstance(w, Launch) else w for w in of_rank])
    return replace(run, work=made, memory=[*run.memory, *([table] if table else [])])


def _table(memory: Sequence[Memory], world_size: int) -> Memory:
    """One int64 table [memories, 1 + W] per rank: size of each memory in bytes, and its address on every rank."""
    rows = [[each.nbytes, *each.pointers.tolist()] for each in memory]
    tensors = tuple(torch.tensor(rows, dtype=torch.int64).view(-1, 1 + world_size) for _ in range(world_size))
    return Memory("table of symmetric memory", tensors)


def _plain(launch: Launch, turn: int, environment: tuple[int, ...]) -> Plain:
    kernel, args, options = launch.kernel, dict(launch.args), dict(launch.options)
    config = ""
    while not hasattr(kernel, "params"):
        if hasattr(kernel, "rewrite"):  # an InterpretedFunction
            why = "compiled kernels run here: unset TRITON_INTERPRET before triton is imported"
            raise UnsupportedKernel(f"{name_of(kernel)!r} was decorated for Triton's interpreter, but {why}")
        if hasattr(kernel, "configs"):
            config = _tuned(kernel, args, options, launch.tuned, turn)
        elif hasattr(kernel, "values") and hasattr(kernel, "fn"):
            for name, function in kernel.values.items():
                args[name] = function({**args, **options})
        elif inside(kernel) is None or inspect.isfunction(kernel):
            kind = "a plain function" if inspect.isfunction(kernel) else f"a {type(kernel).__name__}"
            raise UnsupportedKernel(f"{name_of(kernel)!r} is {kind}: decorate it with triton.jit")
        kernel = inside(kernel)
    options |= {key: args.pop(key) for key in OPTIONS if key in args and key not in kernel.arg_names}
    options = {key: value for key, value in options.items() if key not in NOT_COMPILED}
    bound = _bound(kernel, args)
    grid = _grid(launch.grid, {**bound, **options}, name_of(kernel))
    return Plain(kernel, grid, bound, launch.stream, options, launch.tuned, launch.replace, config, environment)


def _tuned(tuner: Any, args: dict[str, Any], options: dict[str, Any], named: Any, turn: int) -> str:
    """Adds a config to the arguments and options. Returns its description if there are several configs, else ""."""
    configs = list(tuner.configs)
    if named is None:
        prune = getattr(tuner, "early_config_prune", None)
        if prune is not None:
            tuner.nargs = dict(args)
            configs = list(prune(configs, tuner.nargs)) or configs
        chosen = configs[turn % len(configs)]
    else:
        chosen = configs[named] if isinstance(named, int) else named
    given = chosen.all_kwargs()
    both = sorted(set(given) & set(args))
    if both:
        raise ValueError(f"{name_of(tuner)!r}: {', '.join(both)} given both as arguments and by autotune")
    if chosen.pre_hook is not None:
        chosen.pre_hook({**args, **given})
    for key, value in given.items():
        (options if key in (*OPTIONS, *NOT_COMPILED) else args)[key] = value
    if len(configs) == 1:
        return ""
    return ", ".join(f"{key}={value}" for key, value in given.items() if (key, value) != ("num_ctas", 1))


def _bound(kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    """All arguments in the order of the signature. Raises ValueError for a missing or unknown one."""
    function = getattr(kernel, "fn", kernel)
    parameters = inspect.signature(function).parameters
    unknown = [key for key in args if key not in parameters]
    if unknown:
        raise ValueError(f"{name_of(kernel)!r} has no argument {', '.join(unknown)}; it has {', '.join(parameters)}")
    missing = [key for key, each in parameters.items() if key not in args and each.default is each.empty]
    if missing:
        raise ValueError(f"{name_of(kernel)!r} is launched without {', '.join(missing)}")
    return {key: args.get(key, each.default) for key, each in parameters.items()}


def _grid(grid: Any, meta: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """The grid as 1 to 3 integers; Triton launches no other grid."""
    made = grid(dict(meta)) if callable(grid) else grid
    try:
        sizes = tuple(operator.index(size) for size in ((made,) if isinstance(made, int) else made))
    except TypeError:
        raise ValueError(f"the grid of {name!r} is {made!r}; it must be 1 to 3 integers") from None
    if not 1 <= len(sizes) <= 3:
        raise ValueError(f"the grid of {name!r} has {len(sizes)} dimensions: {sizes}; it must have 1 to 3")
    if min(sizes) < 0:
        raise ValueError(f"the grid of {name!r} is {sizes}; no dimension may be negative")
    return sizes
