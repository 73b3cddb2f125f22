"""What a figure needs beside it: machine, versions, commit, command."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent


def _git(*args: str) -> str:
    try:
        done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def _cpu() -> str:
    try:
        names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        names = []
    return names[0].strip() if names else platform.machine()


def describe(ranks: int, options: list[str]) -> dict[str, Any]:
    """Of this machine, now."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "load_before": round(os.getloadavg()[0], 1),
        "ranks": ranks,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": _git("rev-parse", "--short", "HEAD")
        + ("+" if _git("status", "--porcelain", "-uno") else ""),
        "command": shlex.join(["python", "-m", "bench", *options]),
    }


def slug(machine: dict[str, Any]) -> str:
    """A folder name for this machine: CPU, its vector instructions and cores."""
    name = f"{machine['cpu']} {machine['capability']} {machine['cores']} cores"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def arguments() -> list[str]:
    """As the user typed them."""
    return sys.argv[1:]
