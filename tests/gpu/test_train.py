"""`fusedtp train` on one GPU: it equals one plain process, saves, resumes from a checkpoint, and generates text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

for package in ("tyro", "rich", "tensorboard"):  # installed by the extra `train`
    pytest.importorskip(package)

SIZES = "--width 64 --mlp-width 96 --layers 2 --heads 4 --kv-heads 2 --length 32 --batch 8 --warmup 2"
OPTIONS = [*SIZES.split(), "--val-every", "4", "--val-batches", "2", "--sample", "8", "--save-every", "3"]


def command(*arguments: str) -> str:
    """The output of `python -m fusedtp`. Modules are loaded as they are for a user, see conftest.py."""
    variables = {k: v for k, v in os.environ.items() if k != "CUDA_MODULE_LOADING"}
    run = [sys.executable, "-m", "fusedtp", *arguments]
    done = subprocess.run(run, capture_output=True, text=True, timeout=280, env=variables)
    assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def losses(folder: Path) -> list[float]:
    """The losses of all steps, in order."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = {record["step"]: record["loss"] for record in records if "loss" in record}
    return [found[step] for step in sorted(found)]


def goes_on(folder: Path, device: str, *options: str) -> None:
    """A verified run of six steps, and a second one that resumes from its third step, with the same losses."""
    book = folder / "book.txt"
    book.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(3000)))
    where = ["--tp", "1", "--device", device, "--data", str(book), "--runs", str(folder), *OPTIONS, *options]
    where.append("--determinism")
    command("train", *where, "--steps", "6", "--name", "whole", "--verify")
    command("train", *where, "--steps", "6", "--name", "part")
    said = command("train", "--runs", str(folder), "--name", "part", "--resume", "--step", "3")
    assert "resumed at step 3" in said
    whole, part = losses(folder / "whole"), losses(folder / "part")
    assert part == whole and len(whole) == 6 and whole[0] > whole[-1]
    assert command("generate", "--run", str(folder / "whole"), "one", "--tokens", "5").startswith("one")


@pytest.mark.parametrize(
    "options",
    [
        "--dtype fp32",
        "--dtype bf16 --recompute selective",
        "--dtype fp16 --dropout 0.1",
        "--dtype bf16 --experts 4 --expert-width 48",
    ],
)
def test_a_run_is_verified_and_resumed(tmp_path: Path, options: str) -> None:
    goes_on(tmp_path, "cuda", *options.split())
