"""Everything in this folder needs a GPU."""

import os

import pytest

# Before CUDA starts: a module that is loaded lazily waits for the GPU, where a peer's kernel may be waiting for this
# rank; and streams that share a connection wait for each other.
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them so; tests/conftest.py skips them where there is none."""
    for item in items:
        if "/tests/gpu/" in str(item.path):
            item.add_marker(pytest.mark.gpu)
