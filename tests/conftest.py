"""Settings of every test: hypothesis profiles, `gpu` tests only where there is a GPU, and who runs what under `-n`."""

import os
from collections.abc import Generator
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported, and for all children

import pytest
import torch
from hypothesis import settings

from tests.harness import collecting

# No deadline: the first example of a law pays for starting worker processes. CI draws the same examples every time.
settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

GPU_TESTS = ("tests/gpu/", "tests/nn/test_gpu.py")


def pytest_configure(config: pytest.Config) -> None:
    """Under `-n` each process has a core's worth of threads, as ranks have."""
    if hasattr(config, "workerinput"):
        torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    collecting.pause()
    try:
        return (yield)
    finally:
        collecting.seldom()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips what is marked `gpu` on a machine without one; under `-n`, files with `slow` tests come first."""
    if hasattr(config, "workerinput"):
        # else one process would end minutes after the others
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """What a test took of a GPU's memory goes back: other test processes, and those that tests start, share it."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Under `-n`, a file's tests run in one process, in order: they share worlds, compiled kernels and fixtures.

    The files of GPU tests have one process together: they share the GPU.
    """
    if config.getvalue("dist") != "load":  # asked for another way
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "gpu" if file.startswith(GPU_TESTS) else file

    config.option.loadscopereorder = False
    return Scheduling(config, log)
