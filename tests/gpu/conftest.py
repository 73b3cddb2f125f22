"""Everything in this folder needs a GPU. Compiling dominates the time: a second or two for each new kernel."""

import os

import pytest
import torch
from hypothesis import Phase, settings

# Set before CUDA starts: loading a module lazily waits for the GPU, where a peer's kernel may be waiting for this rank;
# and streams that share a connection wait for each other.
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


# Shrinking would compile kernels for each smaller example, for minutes: report a failure as it was drawn.
if torch.cuda.is_available():
    settings.register_profile("gpu", settings(), phases=[Phase.explicit, Phase.reuse, Phase.generate])
    settings.load_profile("gpu")

# `make gpu` stops after a few minutes; tests that only a GPU can run come first.
FIRST = ("test_virtual", "test_processes", "test_moe", "test_graphs", "test_plain_matmul", "test_pointwise")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests here as `gpu`; tests/conftest.py skips them on machines without one."""
    for item in (own := [item for item in items if "/tests/gpu/" in str(item.path)]):
        item.add_marker(pytest.mark.gpu)
    ranks = {item: FIRST.index(item.path.stem) for item in own if item.path.stem in FIRST}
    items.sort(key=lambda item: ranks.get(item, len(FIRST)))
