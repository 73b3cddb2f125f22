"""Options as typed dataclasses, parsed by tyro, or without it by argparse from the same fields.

Contains the options that suites, `tune` and `crossover` share, the parsing of lists, and the choice of the world.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import math
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

from .shapes import layers

T = TypeVar("T")
ENGINES = (
    "chunked",
    "triton",
    "triton-copy",
    "multimem",
    "collective",
    "auto",
)  # triton-copy: copies carry a gather's rows; multimem: a switch sums an all-reduce
DTYPES = ("float32", "float16", "bfloat16")
WHERE = {  # shapes, tokens, tp, dtype, engine
    "cuda": (
        "llama3-8b,llama3-70b",
        "2048,8192,16384",
        "1,8",
        "bfloat16",
        "triton,triton-copy,chunked,collective",
    ),
    "cpu": ("qwen3-0.6b", "256", "2", "float32,bfloat16", "chunked,collective"),
    "smoke": ("tiny", "64", "1,2", "float32,bfloat16", "chunked,collective"),
}


class Refused(ValueError):
    """Options that are valid, but not on this machine."""


@dataclass(frozen=True)
class Shared:
    """Options of every command that measures. Lists are comma-separated."""

    shapes: str = ""
    """Models by name (`fusedtp bench all --list`)."""
    tokens: str = ""
    """T, total tokens of all ranks."""
    tp: str = ""
    """Numbers of ranks of a tensor-parallel group."""
    dtype: str = ""
    """float32, float16, bfloat16."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Default: cuda if there is a GPU."""
    world: Literal["auto", "processes", "virtual"] = "auto"
    """One process per rank, or all ranks in this process. Default: processes, but virtual on a single GPU."""
    save: bool = False
    """Keep the result in the repository."""


@dataclass(frozen=True)
class Options(Shared):
    """What to measure, where, for how long, and where to write results. Lists are comma-separated.

    Defaults: llama3-8b,llama3-70b at 2048,8192,16384 tokens on 1,8 ranks in bfloat16, engines triton, triton-copy,
    chunked, collective; on a CPU, qwen3-0.6b at 256 tokens on 2 ranks in float32,bfloat16, engines chunked, collective.
    Shapes may be square-N. Single-device suites use --tp for their shapes.
    """

    engine: str = ""
    """Engines of the fused operations."""
    minutes: float | None = None
    """Approximate total time of all samples. Default: 5; 0.05 with --smoke."""
    compile: bool = True
    """Also measure torch.compile (its compilation takes long and is not included in any figure)."""
    smoke: bool = False
    """Small shapes and few samples: only shows that everything runs; its figures are meaningless."""
    suites: str = ""
    """With `all`: only these suites."""
    out: str = ""
    """File of the result. Default: bench/out/SUITE.json, or with --save bench/results/MACHINE/SUITE.json."""
    resume: bool = False
    """Keep the results of an interrupted or finished run with the same commit and options."""
    plots: bool = True
    """Draw pictures next to the JSON, if matplotlib is installed."""
    list: bool = False
    """List the known shapes and exit."""


@dataclass(frozen=True)
class Plan:
    """Checked options with every default filled in.

    seconds     total time of all samples
    interpret   ranks are processes in which Triton interprets kernels
    """

    shapes: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()
    tp: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()
    world: str = "processes"
    device: str = "cpu"
    seconds: float = 0.0
    compile: bool = False
    smoke: bool = False
    interpret: bool = False


def filled(
    options: Shared, defaults: Mapping[str, Sequence[str]], faults: list[str], dtypes: Sequence[str] = DTYPES
) -> Plan:
    """The shared options, with defaults filled in and checked; every fault is added to `faults`.

    defaults   device -> shapes, tokens, tp, dtype
    """
    device = device_of(options.device)
    given = (options.shapes, options.tokens, options.tp, options.dtype)
    shapes, tokens, tp, dtype = (mine or theirs for mine, theirs in zip(given, defaults[device]))
    ranks = numbers("tp", tp, faults)
    for name in items(shapes):
        for count in ranks or (1,):
            try:
                layers(name, count)
            except ValueError as error:
                faults.append(str(error))
    if device == "cuda" and not torch.cuda.is_available():
        faults.append("--device cuda: torch sees no GPU here")
    return Plan(
        items(shapes), numbers("tokens", tokens, faults), ranks, known("dtype", dtype, dtypes, faults),
        world=world_of(options.world, device), device=device,
    )  # fmt: skip


def plan_of(options: Options) -> Plan:
    """The plan of suites. Raises ValueError that lists every fault."""
    faults: list[str] = []
    defaults = {device: WHERE["smoke" if options.smoke else device] for device in ("cpu", "cuda")}
    plan = filled(options, defaults, faults)
    engines = known("engine", options.engine or defaults[plan.device][4], ENGINES, faults)
    minutes = options.minutes if options.minutes is not None else 0.05 if options.smoke else 5.0
    if not 0 <= minutes < math.inf:
        faults.append(f"--minutes is {minutes}; it must be finite and not negative")
    if faults:
        raise ValueError("; ".join(dict.fromkeys(faults)))
    return dataclasses.replace(
        plan, engines=engines, seconds=60 * minutes,
        compile=options.compile and not options.smoke, smoke=options.smoke,
    )  # fmt: skip


def device_of(device: str) -> str:
    """Resolves "auto" to the available device."""
    return device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def world_of(world: str, device: str) -> str:
    """Resolves "auto" to a world that is possible on the device."""
    if world != "auto":
        return world
    return "virtual" if device == "cuda" and torch.cuda.device_count() < 2 else "processes"


def items(text: str) -> tuple[str, ...]:
    """The items of a list from the command line."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def numbers(name: str, text: str, faults: list[str]) -> tuple[int, ...]:
    """A list of positive integers; invalid items are added to `faults`."""
    wrong = [item for item in items(text) if not item.isdigit() or int(item) < 1]
    faults += [f"--{name} {item!r} is not a positive whole number" for item in wrong]
    if not items(text):
        faults.append(f"--{name} is empty; name at least one")
    return tuple(int(item) for item in items(text) if item not in wrong)


def known(name: str, text: str, names: Iterable[str], faults: list[str]) -> tuple[str, ...]:
    """A list of names out of `names`; unknown ones are added to `faults`."""
    wrong = [item for item in items(text) if item not in names]
    faults += [f"--{name} {item!r} is not one of {', '.join(names)}" for item in wrong]
    return tuple(item for item in items(text) if item not in wrong)


def parse(kind: type[T], argv: Sequence[str], prog: str) -> T:
    """Parses argv into a dataclass with str, int, float, bool, Literal and optional fields."""
    try:
        import tyro
    except ImportError:
        return _parse_plainly(kind, argv, prog)
    return tyro.cli(kind, args=list(argv), prog=prog, description=inspect.getdoc(kind))


def _parse_plainly(kind: type[T], argv: Sequence[str], prog: str) -> T:
    """The same without tyro: --two-words VALUE, --flag and --no-flag."""
    parser = argparse.ArgumentParser(prog=prog, description=inspect.getdoc(kind))
    types = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        flag, wanted = "--" + field.name.replace("_", "-"), types[field.name]
        if wanted is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=field.default)
            continue
        extra: dict[str, Any] = {}
        if typing.get_origin(wanted) is Literal:
            extra["choices"] = typing.get_args(wanted)
        else:
            extra["type"] = next(t for t in (typing.get_args(wanted) or (wanted,)) if t is not type(None))
        parser.add_argument(flag, default=field.default, **extra)
    return kind(**vars(parser.parse_args(list(argv))))
