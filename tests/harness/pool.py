"""The driver's side of a world: starts workers, sends them calls, and kills hung ones by pid."""

import atexit
import os
import pickle
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any, Self

import torch.distributed as dist

from tests.harness.messages import Failure, WorldError
from tests.harness.nursery import Nursery

START_SECONDS = 240.0
TAIL = 6000


@dataclass
class _Worker:
    pid: int
    nursery: Nursery
    connection: Connection
    output: IO[bytes]

    def signal(self, number: int) -> None:
        """Signal the process or its zombie: the pid is not reused until `wait` reaps it."""
        os.kill(self.pid, number)

    def wait(self, seconds: float) -> int | None:
        """The exit code, or None if the worker still runs after `seconds`."""
        return self.nursery.wait(self.pid, seconds)

    def tail(self) -> str:
        """The last lines that the worker wrote to stdout and stderr."""
        self.output.flush()
        text = os.pread(self.output.fileno(), 1 << 24, 0)
        return text[-TAIL:].decode(errors="replace")


class World:
    """`size` worker processes in one gloo group; a context manager, so that a test may have a world to itself.

    With `interpret` the workers run Triton kernels in its interpreter; Triton reads this setting on import. With
    `strangers` neighbouring ranks hash strings differently, like ranks that a launcher starts, so results that depend
    on the order of a set show; use it for code that works on names. The imports are then paid for twice.
    """

    def __init__(
        self,
        size: int,
        *,
        interpret: bool = True,
        strangers: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.size, self.strangers = size, strangers
        self.env = {
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            **({"GLOO_SOCKET_IFNAME": "lo"} if Path("/sys/class/net/lo").exists() else {}),
            "TRITON_INTERPRET": str(int(interpret)),
            **(env or {}),
        }
        self._workers: list[_Worker] = []
        self._store: Any = None

    def run(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        """Each rank's `function(group, *arguments)`, or `WorldError`; options as for `outcomes`."""
        outcomes = self.outcomes(function, *arguments, **options)
        if any(isinstance(outcome, Failure) for outcome in outcomes):
            raise WorldError(f"{function.__module__}.{function.__qualname__}", outcomes)
        return outcomes

    def outcomes(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        fresh: bool = False,
        timeout: float = 300.0,
        grace: float = 5.0,
    ) -> list[Any]:
        """Each rank's result, or its `Failure`.

        `fresh` makes a process group for this call alone. A worker that has not answered after `timeout` seconds, or
        `grace` seconds after the first failure of a peer, counts as hung. If any rank fails, this world ends and the
        next call starts a new one: peers of a failing rank may be at another place in the order of collectives, and
        DTensor caches groups by their ranks, including destroyed ones.
        """
        message = pickle.dumps((fresh, function, arguments))
        self._start(function.__module__)
        for worker in self._workers:
            with suppress(OSError):  # the worker died since the last call; `_collect` will notice
                worker.connection.send_bytes(message)
        outcomes = self._collect(timeout, grace)
        if any(isinstance(outcome, Failure) for outcome in outcomes):
            self.kill()
        return outcomes

    @property
    def pids(self) -> list[int]:
        """The workers' process ids; empty before the first call and after `close`."""
        return [worker.pid for worker in self._workers]

    def close(self) -> None:
        """End the workers: close their sockets, and SIGKILL those that do not exit."""
        for worker in self._workers:
            worker.connection.close()
        deadline = time.monotonic() + 3
        self.kill(lambda: max(deadline - time.monotonic(), 0.0))

    def kill(self, patience: Callable[[], float] = lambda: 0.0) -> None:
        """Kill by pid the workers that have not exited in time, and wait until they are gone."""
        for worker in self._workers:
            if worker.wait(patience()) is None:
                worker.signal(signal.SIGKILL)
                while worker.wait(10) is None:
                    pass
            worker.connection.close()
            worker.output.close()
        self._workers, self._store = [], None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, module: str) -> None:
        if self._workers:
            return
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        seeds = [{"PYTHONHASHSEED": str(1 + odd)} if self.strangers else {} for odd in (0, 1)]
        nurseries = [_nursery({**seeds[rank % 2], **self.env}) for rank in range(self.size)]
        self._workers = [self._spawn(module, rank, nursery) for rank, nursery in enumerate(nurseries)]
        greetings = self._collect(START_SECONDS, START_SECONDS, decode=bytes)
        if any(isinstance(greeting, Failure) for greeting in greetings):
            self.kill()
            raise WorldError("starting the workers", greetings)

    def _spawn(self, module: str, rank: int, nursery: Nursery) -> _Worker:
        ours, theirs = socket.socketpair()
        output = tempfile.TemporaryFile()
        with theirs:
            pid = nursery.fork(module, rank, self.size, self._store.port, theirs, output)
        return _Worker(pid, nursery, Connection(ours.detach()), output)

    def _collect(self, timeout: float, grace: float, decode: Callable[[bytes], Any] = pickle.loads) -> list[Any]:
        start = time.monotonic()
        deadline = start + timeout
        waiting = {worker.connection: rank for rank, worker in enumerate(self._workers)}
        outcomes: list[Any] = [None] * self.size
        while waiting and time.monotonic() < deadline:
            for connection in wait(list(waiting), max(deadline - time.monotonic(), 0)):
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    outcomes[rank] = decode(connection.recv_bytes())
                except (EOFError, OSError):
                    outcomes[rank] = self._death(rank, time.monotonic() - start)
                if isinstance(outcomes[rank], Failure):
                    deadline = min(deadline, time.monotonic() + grace)
        for rank in waiting.values():
            self._workers[rank].signal(signal.SIGUSR1)  # faulthandler prints its stack
        if waiting:
            time.sleep(0.3)
        for rank in waiting.values():
            seconds = time.monotonic() - start
            outcomes[rank] = Failure(
                ("WorkerHung",), f"no answer in {seconds:.1f} s", self._workers[rank].tail(), seconds
            )
        return outcomes

    def _death(self, rank: int, seconds: float) -> Failure:
        worker = self._workers[rank]
        code = worker.wait(5)
        return Failure(("WorkerDied",), f"exit code {code}", f"exit code {code}\n{worker.tail()}", seconds)


_worlds: dict[Any, World] = {}
_nurseries: dict[Any, Nursery] = {}


def world(size: int, *, interpret: bool = True, strangers: bool = False, env: Mapping[str, str] | None = None) -> World:
    """The session's world of this size and environment, started on its first call."""
    key = (size, interpret, strangers, tuple(sorted((env or {}).items())))
    if key not in _worlds:
        _worlds[key] = World(size, interpret=interpret, strangers=strangers, env=env)
    return _worlds[key]


def _nursery(env: Mapping[str, str]) -> Nursery:
    key = tuple(sorted(env.items()))
    if key not in _nurseries:
        _nurseries[key] = Nursery(env)
    return _nurseries[key]


@atexit.register
def close_all() -> None:
    """End all worlds of this process."""
    for each in _worlds.values():
        each.close()
    for nursery in _nurseries.values():
        nursery.close()
    _nurseries.clear()
