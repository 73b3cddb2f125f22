"""The context of a measurement: machine, versions, commit, command."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import torch

import fusedtp
from fusedtp.environment import cores, processor, version

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CODE = ("fusedtp", "kernels", "bench", "tests")
GPU_FIELDS = (
    "name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "power.limit",
    "temperature.gpu",
)  # fmt: skip


def in_checkout() -> bool:
    """Whether this is the repository, not an installed package."""
    return (ROOT / "pyproject.toml").exists() and HERE.name == "bench"


def _git(*args: str) -> str:
    if not in_checkout():
        return ""
    try:
        done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def commit() -> str:
    """Identifies the code: the commit of a checkout; if files have changed since, or without git, with a + and a digest
    of the code. Empty for an installed package. Results do not count as code.
    """
    if not in_checkout():
        return ""
    head = _git("rev-parse", "--short", "HEAD")
    changed = not head or _git("status", "--porcelain", "-uno", "--", *CODE, ":!bench/results")
    return f"{head}+{_digest()}" if changed else head


def _digest() -> str:
    found = hashlib.sha256()
    for folder in CODE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            found.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return found.hexdigest()[:8]


def gpu_state() -> dict[str, str] | None:
    """The current nvidia-smi state of the first GPU that this process may use; None without it or without a GPU."""
    if not torch.cuda.is_available():
        return None
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    query = ["nvidia-smi", f"--id={first}", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    values = [value.strip() for value in done.stdout.strip().split("\n")[0].split(",")]
    return dict(zip(GPU_FIELDS, values)) if len(values) == len(GPU_FIELDS) else None


def describe_run(device: str, argv: list[str]) -> dict[str, Any]:
    """Describes this machine and its current state, for a result of `fusedtp bench`."""
    about = describe(1, [])
    del about["ranks"]
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    return about | {
        "device": device,
        "gpu": gpu,
        "gpus": torch.cuda.device_count() if device == "cuda" else 0,
        "cuda": torch.version.cuda,
        "gpu_state": gpu_state() if device == "cuda" else None,
        "triton": version("triton"),
        "liger": version("liger-kernel"),
        "fusedtp": fusedtp.__version__,
        "command": shlex.join(["fusedtp", "bench", *argv]),
    }


def same(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """The differences between two results' machines, in words; results of different machines are not comparable."""
    names = ("device", "gpu", "cpu", "cores", "capability")
    return [f"{name}: {a.get(name)} and {b.get(name)}" for name in names if a.get(name) != b.get(name)]


def folder_of(about: dict[str, Any], save: bool) -> Path:
    """Folder of results: in a checkout bench/out/, or bench/results/<machine>/ with `save`; else ./fusedtp-bench/."""
    if not in_checkout():
        return Path("fusedtp-bench")
    return HERE / "results" / slug(about) if save else HERE / "out"


def describe(ranks: int, options: list[str]) -> dict[str, Any]:
    """Describes this machine and its current state."""
    return {
        "cpu": processor(),
        "cores": cores(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "load_before": round(os.getloadavg()[0], 1),
        "ranks": ranks,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit(),
        "command": shlex.join(["python", "-m", "bench", *options]),
    }


def slug(machine: dict[str, Any]) -> str:
    """A folder name for this machine: its GPU, or CPU, its vector instructions and cores."""
    name = machine.get("gpu") or f"{machine['cpu']} {machine['capability']} {machine['cores']} cores"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
