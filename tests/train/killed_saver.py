"""A process that is killed in one phase of a save: python killed_saver.py PHASE FOLDER

It saves steps 1, 2 and 3 and keeps two of them. It is killed in PHASE of saving step 3.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from fusedtp.train import checkpoint


class Numbers:
    """A state in which every number equals its step."""

    def __init__(self, step: int = 0) -> None:
        self.step = step

    def state_dict(self) -> dict[str, Any]:
        return {"x": torch.full((100,), float(self.step)), "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert bool((state_dict["x"] == state_dict["step"]).all())
        self.step = state_dict["step"]


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def after(owner: Any, name: str) -> Any:
    """Run the original function, then die."""
    own = getattr(owner, name)

    def then(*args: Any, **kwargs: Any) -> None:
        own(*args, **kwargs)
        die()

    return patch.object(owner, name, then)


def at_commit(then: bool) -> Any:
    """Die at the rename that makes a draft a checkpoint: before it, or after it."""
    own = Path.rename

    def rename(path: Path, target: Path) -> Path:
        commits = path.is_dir() and target.name.startswith("step-")
        if commits and not then:
            die()
        done = own(path, target)
        if commits:
            die()
        return done

    return patch.object(Path, "rename", rename)


PHASES = {
    "staging": lambda: patch.object(Numbers, "state_dict", die),
    "planned": lambda: patch.object(FileSystemWriter, "write_data", die),
    "data written": lambda: after(FileSystemWriter, "write_data"),
    "data fsynced": lambda: patch.object(checkpoint, "_sums", die),
    "metadata written": lambda: after(FileSystemWriter, "finish"),
    "manifest fsync": lambda: patch.object(checkpoint, "_sync", die),
    "rename": lambda: at_commit(then=False),
    "renamed": lambda: at_commit(then=True),
    "prune": lambda: patch.object(shutil, "rmtree", die),
    "pruned": lambda: after(checkpoint, "_remove"),
}
ON_DISK = ("renamed", "prune", "pruned")  # in these phases step 3 already is a checkpoint

if __name__ == "__main__":
    phase, folder = sys.argv[1], Path(sys.argv[2])
    checkpoints = checkpoint.Checkpoints(folder, keep_last=2, asynchronous=phase != "planned")
    for step in (1, 2):
        checkpoints.save(step, Numbers(step))
    checkpoints.wait()
    with PHASES[phase]():
        checkpoints.save(3, Numbers(3))
        checkpoints.wait()
