"""A process that has imported torch and fusedtp once, and forks workers: `python -m tests.harness.nursery FD`.

Importing takes seconds of CPU time, and every world needs one worker per rank. Forking is safe here because this
process has one thread, has run no operation, and never joined a group.

    driver ----- fork module, rank, size, port + socket, log ---> nursery --fork--> worker (tests/harness/worker.py)
           <---- pid --------------------------------------------
           ----- wait pid, seconds ------> reaps -----> exit code, or None
"""

import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from tests.harness import collecting

ROOT = Path(__file__).resolve().parents[2]
# A process's first custom operation imports torch._dynamo, and its first compilation imports torch._inductor.
PRELOAD = (
    "torch", "torch.distributed", "torch._dynamo", "torch._inductor.compile_fx", "fusedtp", "hypothesis", "pytest",
)  # fmt: skip
# imported too if the driver has them, because its workers will use them
WITH_DRIVER = ("transformers.modeling_utils", "transformers.generation", "accelerate", "peft")


class Nursery:
    """The driver's side."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair()
        self.log = tempfile.TemporaryFile()
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        also = [name for name in WITH_DRIVER if name in sys.modules]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.harness.nursery", str(theirs.fileno()), *also],
                env={**os.environ, **env, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
                pass_fds=[theirs.fileno()],
            )

    def fork(self, module: str, rank: int, size: int, port: int, worker_socket: socket.socket, log: IO[bytes]) -> int:
        """Fork a worker and return its pid; it has imported `module` if that can be imported."""
        fds = [worker_socket.fileno(), log.fileno()]
        socket.send_fds(self._socket, [pickle.dumps(("fork", module, rank, size, port))], fds)
        pid = self._answer()
        assert isinstance(pid, int)
        return pid

    def wait(self, pid: int, seconds: float) -> int | None:
        """The worker's exit code, negative for a signal; None while it runs."""
        self._socket.send(pickle.dumps(("wait", pid, seconds)))
        return self._answer()

    def close(self) -> None:
        """End the nursery; remaining workers exit after it."""
        self._socket.close()
        self._process.wait()

    def _answer(self) -> int | None:
        answer = self._socket.recv(1000)
        if not answer:
            self.log.seek(0)
            raise RuntimeError(f"the process that forks workers ended:\n{self.log.read().decode(errors='replace')}")
        return pickle.loads(answer)


def main() -> None:
    """Import, then fork on demand until the driver closes the socket."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    collecting.pause()
    for module in (*PRELOAD, *sys.argv[2:]):
        __import__(module)
    with _quick():
        collecting.seldom()
        _serve(control)


def _quick() -> AbstractContextManager[None]:
    """Interpreted kernels take half the time in workers."""
    if os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None:
        return nullcontext()
    from triton.runtime import interpreter

    from tests.harness.quick import quick

    return quick(interpreter)


def _serve(control: socket.socket) -> None:
    ended: dict[int, int] = {}
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1000, 2)
        if not message:
            return
        order, *arguments = pickle.loads(message)
        if order == "wait":
            control.send(pickle.dumps(_reap(ended, *arguments)))
            continue
        module = arguments.pop(0)
        if module not in sys.modules:
            with suppress(Exception):  # the worker's own import reports the error
                import_module(module)
        pid = _fork()
        if pid == 0:
            control.close()
            _become_worker(*arguments, *fds)
        ended.pop(pid, None)
        for fd in fds:
            os.close(fd)
        control.send(pickle.dumps(pid))


def _fork() -> int:
    assert len(os.listdir("/proc/self/task")) == 1, "forking wants one thread"
    return os.fork()


def _become_worker(rank: int, size: int, port: int, fd: int, log: int) -> None:
    from tests.harness import worker

    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
        worker.main(rank, size, port, fd)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    finally:
        os._exit(1)


def _reap(ended: dict[int, int], pid: int, seconds: float) -> int | None:
    deadline = time.monotonic() + seconds
    while pid not in ended:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            ended[pid] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() >= deadline:
            return None
        else:
            time.sleep(0.01)
    return ended[pid]


if __name__ == "__main__":
    main()
