"""Settings for all tests: hypothesis profiles, CI's part, skipping `gpu` tests without a GPU, scheduling under `-n`."""

import os
from collections.abc import Generator
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported; child processes inherit it

import pytest
import torch
from hypothesis import settings

from tests.harness import collecting
from tests.sampling import PARTS, of_part

# No deadline: the first example of a law pays for starting worker processes. CI draws the same examples every time.
settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

GPU_TESTS = ("tests/gpu/", "tests/nn/test_gpu.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part",
        type=int,
        metavar="N",
        help=f"of the slow tests that no row of tests/faults names, run one in {PARTS}: part N modulo {PARTS}",
    )


def pytest_report_header(config: pytest.Config) -> str | None:
    part = config.getoption("--part")
    return None if part is None else f"part {part % PARTS} of the {PARTS} parts of slow tests that no fault names"


def pytest_configure(config: pytest.Config) -> None:
    """Under `-n`, give each process one core's worth of threads, as ranks have."""
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
    """Drop what is not in CI's part, skip `gpu` tests without a GPU; under `-n`, run files with `slow` tests first."""
    if (part := config.getoption("--part")) is not None:
        try:
            items[:], left = of_part(items, part)
        except LookupError as error:
            raise pytest.UsageError(str(error)) from None
        config.hook.pytest_deselected(items=left)
    if hasattr(config, "workerinput"):
        # otherwise one process would finish minutes after the others
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Free the test's GPU memory: other test processes, and the processes that tests start, share the GPU."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Under `-n`, run a file's tests in one process, in order: they share worlds, compiled kernels and fixtures.

    All files of GPU tests run in one process together, because they share the GPU.
    """
    if config.getvalue("dist") != "load":  # the user asked for another distribution
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "gpu" if file.startswith(GPU_TESTS) else file

    config.option.loadscopereorder = False
    return Scheduling(config, log)
