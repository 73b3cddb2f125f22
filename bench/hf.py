"""fusedtp bench hf: forward and backward of Hugging Face models, against transformers and torch themselves.

Every model and dtype runs in a separate world, with all ways (hf_models.py) interleaved. Prints medians, and

    gap closed      (peer - ours) / (peer - ceiling), where peer is the faster of stock and torch
    ours / nn       relative to a model of fusedtp.nn with the same shape and weights
    ours / same     relative to one that computes with the same operations: the cost of supporting foreign models
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

from fusedtp.environment import version

from . import hf_models, machine
from .errors import unit
from .options import Plan, device_of, items, known, parse
from .rank import Rank, run
from .sample import Spread

WAYS = ("stock", "torch", "nn", "same", "ours", "ceiling")
DTYPES = ("float32", "bfloat16")
SHAPES = {  # device -> a shape; on a GPU one layer with the width of a published model
    "cpu": dict(
        vocab_size=4096, hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4,
    ),
    "cuda": dict(
        vocab_size=32768, hidden_size=4096, intermediate_size=14336, num_hidden_layers=1, num_attention_heads=32,
        num_key_value_heads=8,
    ),
}  # fmt: skip
TOKENS = {"cpu": 2048, "cuda": 8192}


@dataclass(frozen=True)
class Options:
    """Unmodified Hugging Face models on tensor-parallel ranks: fusedtp, transformers, torch.

    Results go to bench/out/, or with --save to bench/results/<machine>/.
    """

    models: str = ",".join(hf_models.KINDS)
    """llama, qwen3, mixtral."""
    dtype: str = ",".join(DTYPES)
    """float32, bfloat16."""
    minutes: float = 4.0
    """Approximate total time of the samples."""
    ranks: int = 2
    """World size."""
    engine: Literal["auto", "chunked", "collective", "triton", "multimem"] = "auto"
    """The engine of ours and nn."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Default: cuda if there is a GPU for each rank."""
    save: bool = False
    """Keep the result in the repository."""


# -- one model -------------------------------------------------------------------------------------------------------


def ways_of(
    rank: Rank, kind: str, model: Any, ids: torch.Tensor, folder: str, engine: str
) -> tuple[dict[str, hf_models.Step], dict[str, str]]:
    """The ways that run, and the reasons why others do not. Collective."""
    mesh, dtype = rank.mesh, model.dtype
    make: dict[str, Callable[[], hf_models.Step]] = {
        "stock": lambda: hf_models.stock(folder, mesh, ids, dtype),
        "torch": lambda: hf_models.by_torch(model, mesh, ids),
        "nn": lambda: hf_models.by_nn(model, mesh, ids, engine),
        "same": lambda: hf_models.by_nn(model, mesh, ids, engine, same=True),
        "ours": lambda: hf_models.ours(model, mesh, ids, engine),
        "ceiling": lambda: hf_models.ceiling(model, mesh, ids),
    }
    absent: dict[str, str] = {}
    if kind != "llama":
        absent |= dict.fromkeys(("nn", "same"), "is available for llama only")
    if kind == "mixtral":
        absent["torch"] = "torch has no style that splits experts stored in one parameter"
    steps: dict[str, hf_models.Step] = {}

    def prepare(name: str) -> Callable[[], object]:
        def first() -> None:
            steps[name] = make[name]()
            steps[name]()

        return first

    failed = rank.failures({name: prepare(name) for name in WAYS if name not in absent})
    for name, why in failed.items():
        if name in ("ours", "nn", "same", "ceiling"):
            raise RuntimeError(f"{kind}: {name} failed: {why}")
    return {name: step for name, step in steps.items() if name not in failed}, absent | failed


def tolerance(config: Any, dtype: torch.dtype) -> float:
    """Allowed relative difference of the loss between two orders of the same sums: see bench/cpu.py."""
    terms = max(config.hidden_size, config.intermediate_size)
    roundings = (8 * config.num_hidden_layers) ** 0.5
    return float(roundings * (unit(dtype) + terms**0.5 * unit(torch.float32)))


def check_losses(
    what: str, steps: Mapping[str, Callable[[], torch.Tensor]], want: float, bound: float
) -> dict[str, float]:
    """Relative difference of each way's loss from `want`, except the ceiling's, which is not the model's loss.

    Raises RuntimeError if one exceeds the bound.
    """
    off = {name: abs(float(step()) / want - 1) for name, step in steps.items() if name != "ceiling"}
    if not all(error <= bound for error in off.values()):
        raise RuntimeError(f"{what}: the ways do not compute the same loss: {off}, bound {bound:.1e}")
    return off


def measure(
    rank: Rank,
    kind: str,
    dtype: str,
    engine: str,
    seconds: float,
    shape: Mapping[str, int],
    tokens: int,
    folder: str,
) -> dict[str, Any]:
    """Times of each way as Spreads, and the results of the checks. Collective.

    Raises RuntimeError if the first loss of a way differs from the plain model's.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = hf_models.config_of(kind, getattr(torch, dtype), **shape)
    hf_models.even(config, tokens, rank.world_size)
    model = hf_models.plain(config, rank.device)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(config.vocab_size, (1, tokens), generator=generator).to(rank.device)
    if rank.rank == 0:
        model.save_pretrained(folder)
    rank.meet()
    want = float(hf_models.single(model, ids))
    steps, absent = ways_of(rank, kind, model, ids, folder, engine)
    off = check_losses(f"{kind} {dtype}", steps, want, tolerance(config, model.dtype))
    del model
    times = rank.measure(dict(steps), seconds)
    return {
        "model": kind, "dtype": dtype, "tokens": tokens, "shape": dict(shape), "loss_difference": off,
        "seconds": {name: vars(spread) for name, spread in times.items()}, "absent": absent,
    }  # fmt: skip


def figures(result: Mapping[str, Any]) -> dict[str, float]:
    """Figures derived from the times of one result. A meaningless figure (peer at the ceiling) is nan."""
    t = {way: spread["median"] for way, spread in result["seconds"].items()}
    peers = [t[way] for way in ("stock", "torch") if way in t]
    found = {"tokens/s": result["tokens"] / t["ours"]}
    found |= {f"{way} / ours": t[way] / t["ours"] for way in ("stock", "torch") if way in t}
    found |= {f"ours / {way}": t["ours"] / t[way] for way in ("nn", "same") if way in t}
    found["ours / ceiling"] = t["ours"] / t["ceiling"]
    if peers:
        gap = min(peers) - t["ceiling"]
        found["gap closed"] = (min(peers) - t["ours"]) / gap if gap > 0 else math.nan
    return found


# -- the command -----------------------------------------------------------------------------------------------------


def show(console: Console, results: Sequence[Mapping[str, Any]]) -> None:
    """One column per result."""
    table = Table(title="Forward and backward: s, median +- half the interquartile range", title_justify="left")
    table.add_column("")
    for result in results:
        table.add_column(f"{result['model']} {result['dtype']}", justify="right", no_wrap=True)
    for way in WAYS:
        cells = []
        for result in results:
            spread = result["seconds"].get(way)
            cells.append("-" if spread is None else _seconds(Spread(**spread)))
        table.add_row(way, *cells)
    table.add_section()
    derived = [figures(result) for result in results]
    for name in dict.fromkeys(name for each in derived for name in each):
        digits = 0 if name == "tokens/s" else 3
        table.add_row(name, *(f"{each[name]:.{digits}f}" if name in each else "-" for each in derived))
    console.print(table)
    for result in results:
        for way, why in result["absent"].items():
            console.print(f"{result['model']} {result['dtype']}: no {way}: {why}", style="dim", soft_wrap=True)


def _seconds(spread: Spread) -> str:
    return f"{spread.median:.3f} +-{(spread.high - spread.low) / 2:.3f}"


def main(argv: Sequence[str]) -> int:
    """Measure, print, write."""
    options = parse(Options, argv, "fusedtp bench hf")
    console = Console(width=None if Console().is_terminal else 130)
    faults: list[str] = []
    kinds = known("models", options.models, hf_models.KINDS, faults)
    dtypes = known("dtype", options.dtype, DTYPES, faults)
    device = device_of(options.device)
    if options.device == "auto" and device == "cuda" and torch.cuda.device_count() < options.ranks:
        device = "cpu"
    if find_spec("transformers") is None:
        faults.append("transformers is not installed (extra `hf`)")
    if not items(options.models) or not items(options.dtype):
        faults.append("--models and --dtype must each name at least one")
    if faults:
        console.print(f"fusedtp bench hf: {'; '.join(faults)}")
        return 2
    about = machine.describe_run(device, ["hf", *argv])
    about |= {"ranks": options.ranks, "transformers": version("transformers")}
    path = machine.folder_of(about, options.save) / "hf.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    console.print(", ".join(f"{key} {value}" for key, value in about.items()), style="dim", soft_wrap=True)
    if device == "cpu" and about["cores"] < options.ranks:
        console.print(f"{options.ranks} ranks share {about['cores']} cores: these figures say little")
    jobs = [(kind, dtype) for kind in kinds for dtype in dtypes]
    results: list[dict[str, Any]] = []
    for kind, dtype in jobs:
        console.print(f"{len(results) + 1} of {len(jobs)}: {kind} {dtype}", style="dim")
        with tempfile.TemporaryDirectory() as folder:
            results.append(
                run(
                    Plan(world="processes", device=device), options.ranks, measure, kind, dtype, options.engine,
                    60 * options.minutes / len(jobs), SHAPES[device], TOKENS[device], folder,
                )
            )  # fmt: skip
    show(console, results)
    whole = {"machine": about, "results": [{**each, "figures": figures(each)} for each in results]}
    path.write_text(json.dumps(whole, indent=1) + "\n")
    console.print(str(path))
    return 0
