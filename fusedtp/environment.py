"""`fusedtp env`: information for a bug report. A run writes the same to versions.json."""

from __future__ import annotations

import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import fusedtp

PACKAGES = ("torch", "triton", "numpy", "einops", "transformers", "tyro", "rich", "tensorboard", "matplotlib")
VARIABLES = (
    "TRITON_INTERPRET",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "NCCL_DEBUG",
    "GLOO_SOCKET_IFNAME",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES",
)


def environment() -> dict[str, Any]:
    """Versions, machine, devices and the environment variables that affect a run."""
    return {
        "fusedtp": fusedtp.__version__,
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "processor": processor(),
        "cores": cores(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())],
        "backends": [name for name in ("gloo", "nccl") if _has_backend(name)],
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main(argv: list[str]) -> int:
    if argv:
        print("usage: fusedtp env\n\nPrint versions, machine and devices as JSON, for a bug report.")
        return 0 if argv[0] in ("-h", "--help") else 2
    print(json.dumps(environment(), indent=1))
    return 0


def version(name: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    if name == "torch":
        return str(torch.__version__)  # with its build, +cu130, which the metadata of some wheels leave out
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def processor() -> str:
    """The model of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "capability": ".".join(map(str, torch.cuda.get_device_capability(index))),
    }


def _has_backend(name: str) -> bool:
    distributed = torch.distributed
    return distributed.is_available() and getattr(distributed, f"is_{name}_available")()
