"""Commands for saved runs: list, verify and export checkpoints, and generate text.

fusedtp checkpoints list RUN            steps, sizes, times
fusedtp checkpoints verify RUN          hash every file
fusedtp checkpoints export RUN FOLDER   write a transformers folder with safetensors
fusedtp generate --run RUN PROMPT       continue a text
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load

from fusedtp.commands.build import build, has_weights
from fusedtp.commands.run import go_on
from fusedtp.nn import CausalLM
from fusedtp.train.checkpoint import (
    CheckpointError,
    about,
    as_bytes,
    faults_of,
    manifest_of,
    path_of,
    quiet,
    steps_in,
)
from fusedtp.train.config import CHECKPOINTS, TrainConfig
from fusedtp.train.foreign import Model
from fusedtp.train.mesh import World


def load_model(run: Path, step: int | None = None, device: str | torch.device = "cpu") -> tuple[Model, TrainConfig]:
    """The whole model in this process, from a run's newest good checkpoint or the one of `step`.

    Raises CheckpointError if no checkpoint can be read.
    """
    folder, refused = run / CHECKPOINTS, []
    steps = steps_in(folder)
    if step is not None and steps and step not in steps:
        raise CheckpointError(f"{folder} has no checkpoint of step {step}; it has steps {', '.join(map(str, steps))}")
    for candidate in [step] if step is not None else reversed(steps):
        path = path_of(folder, candidate)
        if faults := faults_of(path):
            refused += faults
            continue
        config = TrainConfig.from_dict(about(path)["config"])
        model = build(config, World(device=torch.device(device)), weights=False)
        state: dict[str, Any] = {"model": get_model_state_dict(model)}
        with quiet():
            load(state, storage_reader=FileSystemReader(path), no_dist=True)
        set_model_state_dict(model, state["model"])
        return model.eval(), config
    raise CheckpointError("; ".join(refused) or f"{folder} holds no checkpoint")


# -- fusedtp checkpoints -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckpointsOptions:
    """List or verify the checkpoints of a run, or export its model for transformers."""

    action: tyro.conf.Positional[Literal["list", "verify", "export"]]
    """list: steps and sizes. verify: hash every file. export: write safetensors with Hugging Face's names."""
    run: tyro.conf.Positional[Path]
    """Folder of the run, such as runs/main."""
    out: tyro.conf.Positional[Path | None] = None
    """export: the folder to write."""
    step: int | None = None
    """Use only the checkpoint of this step; default: all, for export the newest good one."""


def main(argv: list[str]) -> int:
    """Returns the exit code: 1 if a checkpoint is not good."""
    options = tyro.cli(CheckpointsOptions, prog="fusedtp checkpoints", args=argv)
    folder = options.run / CHECKPOINTS
    steps = steps_in(folder) if options.step is None else [options.step]
    try:
        if not steps_in(folder):
            raise CheckpointError(f"{folder} holds no checkpoint")
        if options.action == "export":
            return export(options)
        return verify(folder, steps) if options.action == "verify" else show(folder, steps)
    except (CheckpointError, ValueError, OSError) as error:
        print(f"fusedtp checkpoints: error: {error}", file=sys.stderr)
        return 1


def show(folder: Path, steps: list[int]) -> int:
    """Print a table of the checkpoints, with an error for those that cannot be read."""
    table = Table("step", "size", "files", "written", "ranks")
    for step in steps:
        path = path_of(folder, step)
        try:
            manifest, words = manifest_of(path), about(path)
        except CheckpointError as error:
            table.add_row(str(step), str(error))
            continue
        size = sum(each["bytes"] for each in manifest.values())
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime))
        table.add_row(str(step), as_bytes(size), str(len(manifest) + 1), when, str(words["ranks"]))
    Console(width=None if sys.stdout.isatty() else 110).print(table)
    return 0


def verify(folder: Path, steps: list[int]) -> int:
    """Hash all files; returns 1 if any has changed or is missing."""
    found = []
    for step in steps:
        faults = faults_of(path_of(folder, step))
        if not faults:
            about(path_of(folder, step))  # raises for a newer format
        print(f"step {step}: " + ("good" if not faults else "; ".join(faults)))
        found += faults
    return 1 if found else 0


def export(options: CheckpointsOptions) -> int:
    """Write the model in the format of transformers. Raises CheckpointError if it cannot be read or written."""
    from fusedtp.parallel import to_transformers
    from fusedtp.parallel.pretrained import read_generation_config

    if options.out is None:
        raise ValueError("export needs the folder to write: fusedtp checkpoints export RUN FOLDER")
    if options.out.exists() and not options.out.is_dir():
        raise ValueError(f"{options.out} is not a folder")
    model, config = load_model(options.run, options.step)
    tokenizer = None
    if config.data.tokenizer is not None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(config.data.tokenizer), local_files_only=True)
    ids = special_ids(config, tokenizer)
    if not isinstance(model, CausalLM):
        if has_weights(config):  # end ids and sampling options
            read_generation_config(model.causal, config.foreign.model, {"local_files_only": True})
        for each in filter(None, (model.hf.config, getattr(model.hf, "generation_config", None))):
            for name, value in ids.items():
                setattr(each, name, value)
    with written_whole(options.out) as draft:
        if isinstance(model, CausalLM):
            to_transformers(model, draft, **ids)
        else:
            model.hf.save_pretrained(draft)  # saves only adapters if there are any
        if tokenizer is not None:
            tokenizer.save_pretrained(draft)
    print(f"written to {options.out}")
    return 0


DRAFT, CARD = ".draft", "README.md"  # in an exported model's folder: files being written; the model card
WEIGHTS = r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?"


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """A draft inside `folder` to write files to, which move there at the end. After an error, `folder` is as before.

    Files that `folder` has already are replaced, and an earlier model's weights are removed: transformers would read
    them instead of new ones with other names. Raises CheckpointError if a file cannot be written.
    """
    draft, before = folder / DRAFT, folder.exists()
    try:
        try:
            shutil.rmtree(draft, ignore_errors=True)  # of a process that was killed
            draft.mkdir(parents=True)
            if (folder / CARD).is_file():
                shutil.copy2(folder / CARD, draft)  # PEFT adds to it
            yield draft
        except Exception as error:
            if (why := not_written(error)) is None:
                raise
            raise CheckpointError(f"cannot write the model to {folder}: {why}; nothing was changed there") from error
        _move(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        if not before:
            with suppress(OSError):
                folder.rmdir()  # only if it is empty


def _move(draft: Path, folder: Path) -> None:
    names = sorted(os.listdir(draft), key=lambda name: (name.endswith("config.json"), name))
    if any(re.fullmatch(WEIGHTS, name) for name in names):
        for name in os.listdir(folder):
            if re.fullmatch(WEIGHTS, name) and name not in names:
                (folder / name).unlink()
    for name in names:  # configurations last: without one there is no model
        if (folder / name).is_dir():
            shutil.rmtree(folder / name)
        (draft / name).replace(folder / name)


def not_written(error: Exception) -> str | None:
    """Why a file could not be written; None if that is not what the error is about."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    number = re.search(r"\(os error (\d+)\)$", str(error))  # safetensors and tokenizers raise no OSError
    return os.strerror(int(number[1])) if number else None


def special_ids(config: TrainConfig, tokenizer: Any) -> dict[str, Any]:
    """The bos, eos and pad ids by the names of their fields; empty if the model keeps its own."""
    data, source = config.data, Path(config.foreign.model or "")
    if config.foreign.model is not None and source.exists() and (data.tokenizer == source or data.vocab_size):
        return {}
    end = data.vocabulary.end if tokenizer is None else tokenizer.eos_token_id
    bos, pad = (getattr(tokenizer, name, None) for name in ("bos_token_id", "pad_token_id"))
    return {"bos_token_id": bos, "eos_token_id": end, "pad_token_id": pad}


# -- fusedtp generate --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GenerateOptions:
    """Continue a text with the model of a run."""

    prompt: tyro.conf.Positional[str]
    """The text to continue; for a run with --vocab-size, token ids separated by spaces."""
    run: Path = Path("runs/main")
    """Folder of the run."""
    step: int | None = None
    """Use the checkpoint of this step; default: the newest good one."""
    tokens: int = 200
    """Number of tokens to generate."""
    temperature: float = 0.8
    """Sampling temperature; 0 takes the most likely token."""
    seed: int = 0
    """Seed for sampling."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print {"prompt", "text"} instead of the text."""

    def faults(self) -> list[str]:
        """Errors of the options, as messages."""
        found = [] if self.tokens >= 1 else [f"--tokens {self.tokens} must be at least 1"]
        if not 0 <= self.temperature < math.inf:
            found.append(f"--temperature {self.temperature} must be at least 0 and finite")
        return found


def generate_main(argv: list[str]) -> int:
    """Returns the exit code: 2 if an option is wrong, 1 if the run cannot generate."""
    options = tyro.cli(GenerateOptions, prog="fusedtp generate", args=argv)
    for line in (wrong := options.faults()):
        print(f"fusedtp generate: error: {line}", file=sys.stderr)
    if wrong:
        return 2
    try:
        model, config = load_model(options.run, options.step)
        tokenizer = config.data.vocabulary
        ids = tokenizer.encode(options.prompt.encode())
        ids = ids[:-1] if tokenizer.end is not None else ids  # without the end id: the text continues
        if not len(ids):
            raise ValueError("the prompt has no token")
        found = go_on(
            model, torch.tensor([[int(token) for token in ids]]), options.tokens, temperature=options.temperature,
            seed=options.seed, max_context=config.data.length,
        )  # fmt: skip
    except (CheckpointError, ValueError, OSError) as error:
        print(f"fusedtp generate: error: {error}", file=sys.stderr)
        return 1
    text = tokenizer.decode([int(token) for token in found[0, len(ids) :]])
    whole = options.prompt + tokenizer.joint + text
    print(json.dumps({"prompt": options.prompt, "text": text}) if options.as_json else whole)
    return 0
