"""A Python that starts at once: `warm_python()` is the path of one that forks from a process with torch imported.

A cold process spends seconds of CPU time on imports, and a run of the trainer has one process per rank and one more.
Use the path in place of sys.executable, and as PYTHON_EXEC, which torchrun uses to start its ranks. The program runs in
a child of the server, with the arguments, environment, folder and files of the client, which is the process that was
started. The client forwards signals to the child and ends as the child ends.

    client ----- arguments, environment, folder + files 0, 1, 2 -----> server --fork--> runs a module, a file or -c text
           <---- pid, then its wait status ---------------------------
           ----- closed: the client was killed ----------------------> SIGKILL
"""

import atexit
import os
import pickle
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from tests.harness import collecting

ROOT = Path(__file__).resolve().parents[2]
PRELOAD = (
    "torch._dynamo", "torch.distributed.run", "torch.utils.tensorboard", "matplotlib.pyplot",
    "fusedtp.commands.launch",
)  # fmt: skip
ONE_THREAD = {
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive",
}  # fmt: skip
CLIENT = """#!{python} -ES
import os, pickle, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
request = pickle.dumps((sys.argv[1:], dict(os.environ), os.getcwd()))
socket.send_fds(server, [len(request).to_bytes(8, "little")], [0, 1, 2])
server.sendall(request)
with server.makefile("rb") as answers:
    pid = pickle.load(answers)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, lambda number, frame: os.kill(pid, number))
    code = os.waitstatus_to_exitcode(pickle.load(answers))
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@cache
def warm_python() -> str:
    """The path of a fast-starting Python, on one thread and without a GPU; its server ends with this process."""
    folder = tempfile.TemporaryDirectory(prefix="fusedtp-warm-")
    address = os.path.join(folder.name, "server")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen(64)
    ours, theirs = socket.socketpair()
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    fds = [listening.fileno(), theirs.fileno()]
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.harness.warm", *map(str, fds)],
        env={**os.environ, **ONE_THREAD, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        pass_fds=fds,
    )
    listening.close()
    theirs.close()

    def end() -> None:
        ours.close()
        server.wait()
        folder.cleanup()

    atexit.register(end)
    client = Path(folder.name, "python")
    client.write_text(CLIENT.format(python=sys.executable, address=address))
    client.chmod(0o700)
    return str(client)


class Server:
    """Forks for clients until the process that started it is gone."""

    def __init__(self, listening: socket.socket, owner: socket.socket) -> None:
        self.selector = selectors.DefaultSelector()
        self.clients: dict[int, socket.socket] = {}  # by the pid of the child that runs for the client
        self.listening, self.owner = listening, owner
        self.woken, waking = os.pipe()
        os.set_blocking(self.woken, False)
        os.set_blocking(waking, False)
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def serve(self) -> None:
        for fd, heard in ((self.listening, self.accept), (self.owner, None), (self.woken, self.reap)):
            self.selector.register(fd, selectors.EVENT_READ, heard)
        while True:
            for key, _ in self.selector.select():
                if key.data is None:
                    for pid in self.clients:
                        os.kill(pid, signal.SIGKILL)
                    return
                key.data()

    def accept(self) -> None:
        client, _ = self.listening.accept()
        length, files, _, _ = socket.recv_fds(client, 8, 3)
        with client.makefile("rb") as stream:
            request = stream.read(int.from_bytes(length, "little"))
        pid = os.fork() if len(length) == 8 and len(request) == int.from_bytes(length, "little") else None
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.selector.close()
            for each in (client, self.listening, self.owner, *self.clients.values()):
                each.close()
            _become(*pickle.loads(request), files)
        for file in files:
            os.close(file)
        if pid is None:  # the client was killed while it asked
            client.close()
            return
        self.clients[pid] = client

        def gone() -> None:
            if self.clients.get(pid) is client:
                self.selector.unregister(client)
                os.kill(pid, signal.SIGKILL)

        self.selector.register(client, selectors.EVENT_READ, gone)
        with suppress(OSError):  # a killed client is found by `gone` on the next pass
            client.sendall(pickle.dumps(pid))

    def reap(self) -> None:
        os.read(self.woken, 1 << 16)
        for pid in list(self.clients):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                client = self.clients.pop(pid)
                if client in self.selector.get_map():
                    self.selector.unregister(client)
                with suppress(OSError):  # the client has been killed
                    client.sendall(pickle.dumps(status))
                client.close()


def _become(arguments: list[str], environment: dict[str, str], folder: str, files: list[int]) -> None:
    """In the child: run what the client asked for, and end as a cold Python would."""
    code: Any = 1
    try:
        os.setsid()  # torchrun starts its ranks this way too
        for number, file in enumerate(files):
            os.dup2(file, number)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        _program(arguments)()
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    if isinstance(code, str):
        print(code, file=sys.stderr)
    code = code if isinstance(code, int) else int(code is not None)
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code & 0xFF)


def _program(arguments: list[str]) -> Callable[[], object]:
    arguments = [*arguments]
    while arguments[0] == "-u":  # torchrun passes -u
        arguments.pop(0)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    kind, *rest = arguments
    sys.path[0] = os.getcwd()
    if kind == "-m":
        sys.argv = rest
        return lambda: runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        return lambda: exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    sys.argv = arguments
    sys.path[0] = str(Path(kind).resolve().parent)
    return lambda: runpy.run_path(os.path.abspath(kind), run_name="__main__")


def _caller(depth: int = 2) -> str:
    """Replaces torchrun's get_method_name, which labels events: that reads the source of all frames, for seconds."""
    return sys._getframe(depth).f_code.co_name


def main() -> None:
    listening, owner = (socket.socket(fileno=int(fd)) for fd in sys.argv[1:])
    for each in (listening, owner):
        each.set_inheritable(False)
    collecting.pause()
    for module in PRELOAD:
        __import__(module)
    sys.modules["torch.distributed.elastic.rendezvous.dynamic_rendezvous"].get_method_name = _caller
    sys.modules["fusedtp.train.config"].parse([])  # the first call in a process is slow
    assert len(os.listdir("/proc/self/task")) == 1, "forking wants one thread"
    collecting.seldom()
    Server(listening, owner).serve()


if __name__ == "__main__":
    main()
