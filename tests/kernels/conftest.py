"""Worlds of interpreting processes, started once; the pytest process itself never interprets."""

import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

MAX_RANKS = 4
ROOT = Path(__file__).parents[2]

CASE = dict(
    batch=1, k=40, widths=(24,), biased=(), dtype="float32", layout="contiguous", keep=False, seed=0, sig=7,
    in_one=None, few=False, config=None, flags=4096, copied=(), step=1, descriptors=None, products=1,
)  # fmt: skip


class Worlds:
    """MAX_RANKS workers; a world of W ranks is the first W of them, with memory of its own."""

    def __init__(self) -> None:
        self.files = [os.memfd_create(f"world{w + 1}") for w in range(MAX_RANKS)]
        self.made: set[int] = set()
        pairs = [socket.socketpair() for _ in range(MAX_RANKS)]
        theirs = [pair[1].fileno() for pair in pairs]
        numbers = [",".join(map(str, fds)) for fds in (theirs, self.files)]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "worker.py"), *numbers],
            pass_fds=[*theirs, *self.files],
            env={**os.environ, "PYTHONPATH": path},
        )
        self.channels = [Connection(ours.detach()) for ours, _ in pairs]
        for _, other in pairs:
            other.close()

    def make(self, size: int) -> None:
        """Allocate memory for a world of `size` ranks; all ranks map it before any of them writes into it."""
        os.ftruncate(self.files[size - 1], 0)
        self.ask("make", size, [{}])
        self.made.add(size)

    def ask(self, task: str, size: int, cases: list[dict]) -> list:
        cases = [{**CASE, **case} for case in cases]
        for channel in self.channels[:size]:
            channel.send((task, size, cases))
        for channel in self.channels[:size]:
            assert channel.poll(120 + 10 * len(cases)), "a worker hangs"
        return [channel.recv() for channel in self.channels[:size]]

    def check(self, size: int, *cases: dict) -> None:
        """Run the calls one after another on one workspace; every rank checks its own results."""
        if size not in self.made:
            self.make(size)
        wrong = [line for reply in self.ask("run", size, list(cases)) for line in reply]
        assert not wrong, "\n".join(wrong)

    def fail(self, size: int, case: dict) -> tuple[list[dict], list[dict]]:
        """The replies to a call that must fail, in new memory, and to the call after it."""
        self.make(size)
        self.made.discard(size)  # its status and flags are no longer usable
        return self.ask("fail", size, [case]), self.ask("fail", size, [case])

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
        for fd in self.files:
            os.close(fd)


@pytest.fixture(scope="session")
def worlds():
    pytest.importorskip("triton")
    started = Worlds()
    yield started
    started.close()
