"""Resolves the case names of `fusedtp check`, and runs their schedules in worker processes.

    all_gather_matmul       a fused kernel of the library
    ring.py::exchange       `exchange` of ring.py: a Case, or a function that returns a Case or a Run
    ring.py                 every Case in ring.py, and every function named case_*, except imported ones
    rings.cases:exchange    the same for the module rings.cases
    rings.cases:            all cases of that module

A function with a parameter `world_size` receives it. If a case cannot be checked, or raises, its `Found` or `Part` says
so; the other cases continue.

A fork server imports this module once for all workers; the module does not import triton. Each worker unsets
TRITON_INTERPRET before it imports triton, so that it compiles kernels. If the program already has a fork server, that
one is used; if it imported triton to interpret, every case is refused with this reason. Workers return plain values; an
exception of the user's code is returned as its traceback.
"""

from __future__ import annotations

import ast
import gc
import importlib
import importlib.util
import inspect
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch

import fusedtp.limits
import fusedtp.sim
from fusedtp.limits import OutOfTime, time_limit
from fusedtp.sim.case import Case, Launch, Run, Work
from fusedtp.sim.explore import SCHEDULE_SECONDS, TARGET, Outcome, Schedule, exhaust, explore, trace
from fusedtp.sim.faults import Fault, Moment, UnsupportedKernel, short_path

OWN = (os.path.dirname(__file__), os.path.dirname(fusedtp.sim.__file__), fusedtp.limits.__file__)
WORLD_SIZE = 4  # the default
FAULTY, REFUSED, CRASHED = 1, 2, 3  # exit codes, see command.py
_Made = TypeVar("_Made")
DIED = "a worker process died; the kernel may have used up memory (try --workers 1)\n"


# -- cases by name -----------------------------------------------------------------------------------------------------


def names_of(name: str = "", world_size: int | None = None, target: str = TARGET) -> list[str]:
    """Full names of the cases that `name` refers to; "" refers to all fused kernels of the library.

    target: target of the compilation. Raises ValueError if there is no such case. Exceptions from importing the user's
    code pass through.
    """
    if not is_users(name):
        return [case.name for case in _own(name, world_size, target)]
    place, mark, wanted = _parts_of(name)
    module = _load(place) if mark == "::" else _import(place)
    if not wanted:
        found = _cases_in(module)
        if not found:
            raise ValueError(f"{place} has no Case and no function named case_*; name one: {place}{mark}NAME")
        return [f"{place}{mark}{key}" for key in found]
    if not hasattr(module, wanted):
        cases = ", ".join(_cases_in(module))
        raise ValueError(f"{place} has no {wanted!r}" + (f"; its cases are {cases}" if cases else ""))
    return [f"{place}{mark}{wanted}"]


@lru_cache
def case_of(name: str, world_size: int | None = None, target: str = TARGET) -> Case:
    """The single case of this name, as used in replays. Exceptions of the user's code pass through."""
    if not is_users(name):
        (case,) = _own(name, world_size, target)
        return case
    (full,) = names_of(name)
    place, mark, wanted = _parts_of(full)
    module = _load(place) if mark == "::" else _import(place)
    return _case(full, getattr(module, wanted), world_size)


def _cases_in(module: ModuleType) -> list[str]:
    """The names of every Case and every function named case_*, except imported ones."""
    imported = _imported(module)
    return [
        key
        for key, value in vars(module).items()
        if (isinstance(value, Case) or (key.startswith("case_") and inspect.isfunction(value)))
        and (key not in imported or getattr(value, "__module__", "") == module.__name__)
    ]


def _imported(module: ModuleType) -> set[str]:
    """Names that the import statements of a module bind."""
    names: set[str] = set()
    file = Path(module.__file__ or "")
    todo: list[ast.AST] = [ast.parse(file.read_bytes() if file.suffix == ".py" else "")]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), module.__package__)
            there = vars(sys.modules[source]) if source in sys.modules else {}  # a branch that did not run
            names |= {key for key, value in vars(module).items() if there.get(key) is value}
        elif isinstance(node, ast.ImportFrom):
            names |= {each.asname or each.name for each in node.names}
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):  # names in them are local
            todo += ast.iter_child_nodes(node)
    return names


def is_users(name: str) -> bool:
    """Whether it names a user's case: in a file or a module."""
    return ":" in name or name.endswith(".py")


def _parts_of(name: str) -> tuple[str, str, str]:
    """File or module, "::" or ":", and the case's name in it, or ""."""
    if "::" in name or name.endswith(".py"):
        place, _, wanted = name.partition("::")
        return place, "::", wanted
    place, mark, wanted = name.partition(":")
    return place, mark, wanted


def _import(name: str) -> ModuleType:
    """Import a module with the current folder on sys.path, like `python -m`."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        raise ValueError(f"no module {name.partition('.')[0]!r}")
    return importlib.import_module(name)


@lru_cache
def _own(name: str, world_size: int | None, target: str) -> tuple[Case, ...]:
    """The library's cases: all fused kernels, or one case by name; kernels of one rank only by name."""
    from .cases import compiled_cases
    from .local import local_cases

    fused = compiled_cases(world_size or WORLD_SIZE, target)
    if not name:
        return tuple(fused)
    cases = {case.name: case for case in (*fused, *local_cases(target))}
    if name not in cases:
        if os.path.isfile(f"{name}.py"):
            raise ValueError(f"no kernel is called {name!r}; for the cases of that file, name {name}.py")
        raise ValueError(
            f"no kernel is called {name!r}: it must be one of {', '.join(cases)}, or path/to/file.py::case, "
            "or package.module:case"
        )
    return (cases[name],)


@lru_cache
def _load(path: str) -> ModuleType:
    """Load the module in this file, with its folder on sys.path while it loads, as when Python runs it."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"no such file: {path}")
    spec = importlib.util.spec_from_file_location(file.stem, file.resolve())
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(file.stem, module)
    sys.path.insert(0, os.fspath(file.resolve().parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def _case(full_name: str, value: Any, world_size: int | None) -> Case:
    if isinstance(value, Case):
        if world_size is not None:
            raise ValueError(f"{full_name} is a Case, which sets its own world size; omit --world-size")
        return Case(full_name, value.make)
    if not inspect.isfunction(value):
        raise ValueError(f"{full_name} is {type(value).__name__}; it must be a Case or return a Case or a Run")
    call = _bound(full_name, value, world_size)
    made = call()
    if isinstance(made, Case):
        return Case(full_name, made.make)
    if not isinstance(made, Run):
        raise ValueError(f"{full_name} returned {type(made).__name__}; it must return a Case or a Run")
    return Case(full_name, call)


def _bound(full_name: str, function: Callable[..., Any], world_size: int | None) -> Callable[[], Any]:
    """Bind the world size if the function takes one."""
    parameters = inspect.signature(function).parameters
    needed = [
        key
        for key, each in parameters.items()
        if each.default is each.empty
        and key != "world_size"
        and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    if needed:
        raise ValueError(f"{full_name} needs arguments {needed}; a case may take only world_size")
    if "world_size" not in parameters:
        if world_size is not None:
            raise ValueError(f"{full_name} takes no world_size; omit --world-size")
        return function
    if world_size is None and parameters["world_size"].default is not inspect.Parameter.empty:
        return function
    return lambda: function(world_size=world_size or WORLD_SIZE)


# -- workers -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """A case to check.

    asked      the requested world size
    kernels    names of the kernels that it launches
    target     target of the compiled code
    refused    why it cannot be checked, one line; raised: traceback of an exception of its own code
    late       where it was when the time to build it ran out
    """

    name: str
    asked: int | None
    world_size: int
    kernels: tuple[str, ...] = ()
    target: str = TARGET
    refused: str = ""
    raised: str = ""
    late: str = ""

    @property
    def runs(self) -> bool:
        """Whether it can be checked."""
        return not (self.refused or self.raised or self.late)


@dataclass(frozen=True)
class Part:
    """The result of some schedules of a case.

    fault      the first fault
    raised     traceback, if the user's code raised
    refused    why the case cannot be checked, at all or on this target
    late       where a schedule was when time ran out
    waived     how often each waived finding occurred
    left       lower bound on the schedules skipped because of a limit
    """

    schedules: int = 0
    switches: int = 0
    fault: Fault | None = None
    raised: str = ""
    refused: str = ""
    late: str = ""
    waived: dict[str, int] = field(default_factory=dict)
    left: int = 0

    @property
    def ends(self) -> bool:
        """Whether no more schedules of the case are needed."""
        return bool(self.fault or self.raised or self.refused)


@dataclass(frozen=True)
class Result:
    """The result of a case."""

    found: Found
    schedules: int = 0
    switches: int = 0
    seconds: float = 0.0
    part: Part = field(default_factory=Part)  # with the fault, or the reason why it stopped
    waived: dict[str, int] = field(default_factory=dict)  # how often each waived finding occurred

    @property
    def verdict(self) -> str:
        if self.found.refused or self.part.refused:
            return "refused"
        if self.found.raised or self.part.raised:
            return "raised"
        if self.part.fault is not None:
            return self.part.fault.rule
        if self.part.left:
            return "not all"
        return "ok" if self.schedules else "out of time"

    @property
    def code(self) -> int:
        """The exit code of the command if this is the only result."""
        codes = {"ok": 0, "refused": REFUSED, "out of time": REFUSED, "not all": REFUSED}
        if self.verdict == "raised" and (self.found.raised or self.part.raised):
            return CRASHED
        return codes.get(self.verdict, FAULTY)


class BadInput(ValueError):
    """The user named something that cannot be checked; the message is one line, or the compiler's error."""


class UserError(Exception):
    """The user's code raised; the message is its own traceback."""


def find(
    name: str, world_size: int | None, target: str = TARGET, seconds: float | None = None,
    call: Callable[..., Any] | None = None,
) -> list[Found]:  # fmt: skip
    """The cases that this name refers to, including those that cannot be checked, with the reason.

    seconds   time limit for building each case
    call      runs a function with the arguments of `_names` in a worker; returns a Found if the worker dies
    """
    call = call or (lambda function, *given: function(*given))
    names = call(_names, name, world_size, target, seconds)
    if isinstance(names, Found):
        return [names]
    return [call(_described, each, world_size, target, seconds) for each in names]


def _names(name: str, asked: int | None, target: str, seconds: float | None) -> list[str] | Found:
    return _tried(name, asked, target, seconds, lambda: names_of(name, asked, target))


def _described(name: str, asked: int | None, target: str, seconds: float | None) -> Found:
    def describe() -> Found:
        case = case_of(name, asked, target)
        work = case.make().work
        for rank, of_rank in enumerate(work):
            if not isinstance(of_rank, Sequence) or not all(isinstance(each, Work) for each in of_rank):
                kinds = [type(each).__name__ for each in (of_rank if isinstance(of_rank, Sequence) else [of_rank])]
                said = f"{name}: the work of rank {rank} is {', '.join(dict.fromkeys(kinds))}"
                raise BadInput(f"{said}; it must be a list of launches, copies, signals and waits")
        kernels = dict.fromkeys(each.name for of_rank in work for each in of_rank if isinstance(each, Launch))
        return Found(case.name, asked, len(work), tuple(kernels), target)

    return _tried(name, asked, target, seconds, describe)


def _tried(
    name: str, asked: int | None, target: str, seconds: float | None, what: Callable[[], _Made]
) -> _Made | Found:
    refused = raised = late = ""
    try:
        with _told_apart(), time_limit(seconds or SCHEDULE_SECONDS):
            return what()
    except BadInput as error:
        refused = str(error)
    except UserError as error:
        raised = str(error)
    except OutOfTime as error:
        late = _users_line(error)
    return Found(name, asked, asked or 0, (), target, refused, raised, late)


def run_part(found: Found, schedules: Sequence[Schedule], seconds: float | None = None) -> Part:
    """Run these schedules of a case, in a worker. seconds: time left for them."""
    return _part(found, lambda case: explore(case, schedules, seconds=seconds), seconds)


def run_exhaust(found: Found, preemptions: int, limit: int, resident: Any, weak: bool, waive: Sequence[str]) -> Part:
    """Run every schedule of a case with at most this many preemptions, in a worker."""

    def run(case: Case) -> Outcome:
        return exhaust(case, preemptions, limit=limit, resident=resident, weak=weak, target=found.target, waive=waive)

    return _part(found, run)


def _part(found: Found, run: Callable[[Case], Outcome], seconds: float | None = None) -> Part:
    try:
        with _told_apart():
            with time_limit(seconds or SCHEDULE_SECONDS):
                case = case_of(found.name, found.asked, found.target)
            outcome = run(case)
    except BadInput as error:
        return Part(refused=str(error))
    except UserError as error:
        return Part(raised=str(error))
    except OutOfTime as error:
        return Part(late=_users_line(error))
    raised = "" if outcome.raised is None else _users_traceback(outcome.raised)
    return Part(
        outcome.schedules, outcome.switches, outcome.fault, raised, "", outcome.late, outcome.waived, outcome.left
    )


def run_trace(found: Found, schedule: Schedule) -> tuple[Moment, ...]:
    """Trace every program in one schedule, in a worker."""
    with _told_apart():
        return trace(case_of(found.name, found.asked, found.target).make(), schedule)[0]


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def schedule_of(fault: Fault) -> Schedule:
    """The schedule that shows the fault."""
    resident = resident_of(fault.resident)
    return Schedule(fault.strategy, fault.seed, resident, fault.weak, fault.fine, fault.target, fault.waive)


def resident_of(word: str) -> int | str | None:
    """Parses `resident` of a Schedule. Raises ValueError."""
    if word in ("all", "None"):
        return None
    if word == "varying" or (word.isdecimal() and int(word) > 0):
        return word if word == "varying" else int(word)
    raise ValueError(f"--resident {word!r} must be all, varying or at least 1")


class Pool:
    """Worker processes, started on demand."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self.start()

    def start(self) -> None:
        """Start the workers; called again after a worker died."""
        self._executor = ProcessPoolExecutor(self.workers, self._context, initializer=_begin)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        return self._executor.submit(function, *arguments)

    def close(self, now: bool) -> None:
        """Stop the workers; `now`: without waiting for running tasks."""
        children = multiprocessing.active_children() if now else []
        self._executor.shutdown(wait=not now, cancel_futures=True)
        for child in children:
            child.terminate()


@contextmanager
def pool(workers: int) -> Iterator[Pool]:
    """A pool of workers; stopped at once if the body raises."""
    made = Pool(workers)
    try:
        yield made
    except BaseException:
        made.close(now=True)
        raise
    made.close(now=False)


def _begin() -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops the workers
    torch.set_num_threads(1)
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)  # collecting every 700 objects took a tenth of the time
    threading.Thread(target=_end_with_the_parent, daemon=True).start()


def _end_with_the_parent() -> None:
    """Exit when the parent exits: a killed parent stops no worker, and they would wait for the next case forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextmanager
def _told_apart() -> Iterator[None]:
    """Converts errors of the simulator to BadInput, and exceptions of the user's code to UserError."""
    try:
        yield
    except UnsupportedKernel as error:
        raise BadInput(str(error)) from None
    except ValueError as error:
        if _raised_by_us(error):
            raise BadInput(str(error)) from None
        raise UserError(_users_traceback(error)) from None
    except OutOfTime:
        raise
    except BaseException as error:  # a script without a main guard exits when it is imported
        raise UserError(_users_traceback(error)) from None


def _raised_by_us(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(OWN)


def _users_line(error: BaseException) -> str:
    """The last line of the user's code in the traceback."""
    stood = "its start"
    for frame in traceback.extract_tb(error.__traceback__):
        if not frame.filename.startswith((*OWN, "<frozen")) and "site-packages" not in frame.filename:
            stood = f"{short_path(frame.filename)}:{frame.lineno} in {frame.name}"
    return stood


def _users_traceback(error: BaseException) -> str:
    """The traceback without our own frames before the user's first line."""
    at = error.__traceback__
    while at is not None and at.tb_frame.f_code.co_filename.startswith((*OWN, "<frozen importlib")):
        at = at.tb_next
    if at is None and isinstance(error, SyntaxError):  # its message has file and line
        return "".join(traceback.format_exception_only(error))
    return "".join(traceback.format_exception(type(error), error, at or error.__traceback__))
