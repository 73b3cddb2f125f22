"""Options of the suites as typed dataclasses, read by tyro, or without it by argparse from the same fields."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

from .shapes import layers

T = TypeVar("T")
ENGINES = (
    "chunked",
    "triton",
    "triton-copy",
    "collective",
    "auto",
)  # triton-copy: copies carry a gather's rows
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
    """Options that are well-formed, but not for this machine."""


@dataclass(frozen=True)
class Options:
    """What to measure, where, for how long, and where results go. Lists are separated by commas."""

    shapes: str = ""
    """Models by name (see --list), or square-N. Default: llama3-8b,llama3-70b; on a CPU qwen3-0.6b."""
    tokens: str = ""
    """T, tokens of all ranks. Default: 2048,8192,16384; on a CPU 256."""
    tp: str = ""
    """Ranks of a tensor-parallel group, for shapes and worlds. Default: 1,8; on a CPU 2."""
    dtype: str = ""
    """float32, float16, bfloat16. Default: bfloat16; on a CPU float32,bfloat16."""
    engine: str = ""
    """Engines of the fused operations. Default: triton,triton-copy,chunked,collective; on a CPU chunked,collective."""
    world: Literal["auto", "processes", "virtual"] = "auto"
    """One process a rank, or all ranks in this one. Default: processes, but virtual on a single GPU."""
    link_gbps: float | None = None
    """Virtual world on a GPU: hold each rank's copies to so many GB/s (a node's link divided by its ranks)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Default: cuda if there is a GPU."""
    minutes: float | None = None
    """About how long all samples take together. Default: 5; 0.05 with --smoke."""
    compile: bool = True
    """Measure torch.compile too (its compilation takes long and is in no figure)."""
    smoke: bool = False
    """Small shapes and few samples: shows that everything runs, its figures mean nothing."""
    suites: str = ""
    """With `all`: only these suites."""
    out: str = ""
    """File of the result. Default: bench/out/SUITE.json, or with --save bench/results/MACHINE/SUITE.json."""
    save: bool = False
    """Keep the result in the repository."""
    resume: bool = False
    """Keep what an interrupted run of the same commit and options had measured, or a finished one."""
    plots: bool = True
    """Draw pictures beside the JSON, where matplotlib is installed."""
    list: bool = False
    """List the shapes there are, and end."""


@dataclass(frozen=True)
class Plan:
    """Options with every default filled in, and checked."""

    shapes: tuple[str, ...]
    tokens: tuple[int, ...]
    tp: tuple[int, ...]
    dtypes: tuple[str, ...]
    engines: tuple[str, ...]
    world: str
    link_gbps: float | None
    device: str
    seconds: float
    compile: bool
    smoke: bool


def plan_of(options: Options) -> Plan:
    """Fill in and check. Raises ValueError that lists every fault."""
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    defaults = WHERE["smoke" if options.smoke else device]
    given = (options.shapes, options.tokens, options.tp, options.dtype, options.engine)
    shapes, tokens, tp, dtypes, engines = (_items(mine or theirs) for mine, theirs in zip(given, defaults))
    faults: list[str] = []
    ranks, counts = _numbers("tp", tp, faults), _numbers("tokens", tokens, faults)
    faults += [f"dtype {name!r} is none of {', '.join(DTYPES)}" for name in dtypes if name not in DTYPES]
    faults += [f"engine {name!r} is none of {', '.join(ENGINES)}" for name in engines if name not in ENGINES]
    for name in shapes:
        for count in ranks or (1,):
            try:
                layers(name, count)
            except ValueError as error:
                faults.append(str(error))
    if device == "cuda" and not torch.cuda.is_available():
        faults.append("device cuda: torch sees no GPU here")
    world = options.world
    if world == "auto":
        world = "virtual" if device == "cuda" and torch.cuda.device_count() < 2 else "processes"
    if options.link_gbps is not None and (world != "virtual" or device != "cuda"):
        faults.append("--link-gbps holds the copies of a virtual world on a GPU; here is none")
    if options.link_gbps is not None and not options.link_gbps > 0:
        faults.append(f"--link-gbps is {options.link_gbps}, must be positive")
    minutes = options.minutes if options.minutes is not None else 0.05 if options.smoke else 5.0
    if minutes < 0:
        faults.append(f"--minutes is {minutes}, must not be negative")
    if faults:
        raise ValueError("; ".join(dict.fromkeys(faults)))
    return Plan(
        shapes, counts, ranks, dtypes, engines, world, options.link_gbps, device, 60 * minutes,
        options.compile and not options.smoke, options.smoke,
    )  # fmt: skip


def _items(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _numbers(name: str, items: Sequence[str], faults: list[str]) -> tuple[int, ...]:
    wrong = [item for item in items if not item.isdigit() or int(item) < 1]
    faults += [f"--{name} {item!r} is no positive integer" for item in wrong]
    return tuple(int(item) for item in items if item not in wrong)


def parse(kind: type[T], argv: Sequence[str], prog: str) -> T:
    """argv as an instance of a dataclass of str, int, float, bool, Literal and optional fields."""
    try:
        import tyro
    except ImportError:
        return _parse_plainly(kind, argv, prog)
    return tyro.cli(kind, args=list(argv), prog=prog, description=kind.__doc__)


def _parse_plainly(kind: type[T], argv: Sequence[str], prog: str) -> T:
    """The same without tyro: --two-words VALUE, --flag and --no-flag."""
    parser = argparse.ArgumentParser(prog=prog, description=kind.__doc__)
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
