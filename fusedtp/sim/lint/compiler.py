"""Compile cases in processes of their own, a few at once, and read back what came out."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from . import asm, mlir
from .targets import Target, target


@dataclass(frozen=True)
class CompileCase:
    """One compilation.

    kernel   name of the function
    target   a name of targets.TARGETS
    config   what tells this case from others of the kernel; with kernel and target it names the report
    planner  "module:function" that makes the launch in the compiling process: (kernel, target, **given) -> (kernel,
             arguments, options), with `given` as plain values
    path     or else the file that defines the kernel
    launch   of such a file: the case (or a function that makes one) whose launches are compiled; or else
    signature, constexprs, options   as triton.compiler.ASTSource takes them: {"x": "*bf16", "n": "i32"}, {"BLOCK": 16}
    aligned  arguments that are multiples of 16
    shared   arguments that point to memory which another rank reads or writes while the kernel runs; None: all
             pointers. An address that the kernel reads from memory counts always.
    aligned_rows   whether every row in memory that ranks share begins at a multiple of 16 bytes, and so moves 16 bytes
             at a time
    """

    kernel: str
    target: str
    config: str = ""
    planner: str = ""
    given: dict[str, Any] = field(default_factory=dict)
    path: str = ""
    launch: str = ""
    signature: dict[str, str] = field(default_factory=dict)
    constexprs: dict[str, Any] = field(default_factory=dict)
    options: dict[str, int] = field(default_factory=dict)
    aligned: tuple[str, ...] = ()
    shared: tuple[str, ...] | None = None
    aligned_rows: bool = False

    @property
    def key(self) -> str:
        return f"{self.target}/{self.kernel}/{self.config}" if self.config else f"{self.target}/{self.kernel}"


class CompileError(RuntimeError):
    """A kernel that the compiler refuses; the message holds its traceback."""


@dataclass
class Compiled:
    """What one compilation gave.

    case             what was asked for
    triton           version of the compiler
    files            "ttir", "ttgir" and "ptx" or "amdgcn" -> text
    usage            what the assembler says of registers, stack and spills (NVIDIA)
    shared           arguments through which the kernel reaches memory that other ranks reach too
    """

    case: CompileCase
    name: str
    triton: str
    files: dict[str, str]
    usage: str
    shared: tuple[str, ...]
    shared_bytes: int
    tensor_columns: int
    num_warps: int
    num_stages: int

    @property
    def target(self) -> Target:
        return target(self.case.target)

    @property
    def version(self) -> tuple[int, int]:
        major, minor = self.triton.split(".")[:2]
        return int(major), int(minor)

    @cached_property
    def ttir(self) -> mlir.Module:
        return mlir.parse(self.files["ttir"])

    @cached_property
    def ttgir(self) -> mlir.Module:
        return mlir.parse(self.files["ttgir"])

    @cached_property
    def listing(self) -> asm.Listing:
        if "ptx" in self.files:
            return asm.parse(self.files["ptx"], asm.PTX)
        return asm.parse(self.files["amdgcn"], asm.AMD)


def cache_dir(given: str | None) -> Path:
    """A part of Triton's cache for this checkout."""
    whole = Path(given) if given else Path.home() / ".triton" / "cache"
    return whole / ("lint-" + hashlib.sha256(str(Path(__file__)).encode()).hexdigest()[:16])


class Worker:
    """One compiling process."""

    def __init__(self, python: str, folder: Path) -> None:
        self.folder = folder
        env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        root = str(Path(__file__).parents[3])
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH")]))
        # FP fusion as every supported version does it by default; 3.9 warns where it is not said
        env.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
        # Triton's cache knows a kernel by its text, not its place: another checkout's entry names that one's files
        env["TRITON_CACHE_DIR"] = str(cache_dir(env.get("TRITON_CACHE_DIR")))
        self.errors = (folder / f"worker-{id(self)}.err").open("w+")
        self.process = subprocess.Popen(
            [python, "-m", "fusedtp.sim.lint.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=env,
        )

    def compile(self, case: CompileCase, package: str | None) -> list[Compiled]:
        """Raises CompileError."""
        assert self.process.stdin is not None and self.process.stdout is not None
        request = {"case": asdict(case), "package": package, "out": str(self.folder)}
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.errors.seek(0)
            raise CompileError(f"{case.key}: the compiler's process ended\n{self.errors.read()[-4000:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise CompileError(f"{case.key}: {answer['error']}\n{answer['traceback']}")
        return [self.read(case, made) for made in answer["made"]]

    @staticmethod
    def read(case: CompileCase, made: dict[str, Any]) -> Compiled:
        stem = made.pop("stem")
        paths = [Path(f"{stem}.{kind}") for kind in ("ttir", "ttgir", "ptx", "amdgcn")]
        files = {path.suffix[1:]: path.read_text() for path in paths if path.exists()}
        return Compiled(case=case, files=files, **{**made, "shared": tuple(made["shared"])})

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self.errors.close()


Task = tuple[CompileCase, "str | None"]


class Compiler:
    """A few workers that share a list of cases. Use through `compiler(...)`."""

    def __init__(self, python: str, workers: int, folder: Path) -> None:
        self.python, self.count, self.folder = python, workers, folder
        self.idle: list[Worker] = []

    def compile(self, case: CompileCase, package: str | None = None) -> list[Compiled]:
        """One case, at once. Raises CompileError."""
        results: list[list[Compiled] | CompileError] = []
        self.run([(case, package)], lambda _, result: results.append(result))
        if isinstance(results[0], CompileError):
            raise results[0]
        return results[0]

    def run(self, tasks: Sequence[Task], done: Callable[[int, list[Compiled] | CompileError], None]) -> None:
        """Compile all; `done(index, result)` is called from this thread, in the order in which they finish."""
        todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        for index in range(len(tasks)):
            todo.put(index)
        finished: queue.SimpleQueue[tuple[int, list[Compiled] | BaseException]] = queue.SimpleQueue()
        while len(self.idle) < min(self.count, len(tasks)):
            self.idle.append(Worker(self.python, self.folder))

        def serve(worker: Worker) -> None:
            while True:
                try:
                    index = todo.get_nowait()
                except queue.Empty:
                    return
                try:
                    finished.put((index, worker.compile(*tasks[index])))
                except BaseException as error:
                    finished.put((index, error))

        threads = [threading.Thread(target=serve, args=(worker,)) for worker in self.idle[: len(tasks)]]
        for thread in threads:
            thread.start()
        for _ in tasks:
            index, result = finished.get()
            if isinstance(result, BaseException) and not isinstance(result, CompileError):
                raise result
            done(index, result)
        for thread in threads:
            thread.join()


@contextmanager
def compiler(python: str | None = None, workers: int | None = None) -> Iterator[Compiler]:
    """Compiling processes, which live as long as the block.

    python    interpreter that runs them (one whose Triton is another); this one where None
    workers   how many; None: as many as cores, at most four
    """
    count = workers or min(4, os.cpu_count() or 1)
    with tempfile.TemporaryDirectory(prefix="fusedtp-lint-") as folder:
        made = Compiler(python or sys.executable, count, Path(folder))
        try:
            yield made
        finally:
            for worker in made.idle:
                worker.close()
