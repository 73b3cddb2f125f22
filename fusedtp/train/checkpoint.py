"""Checkpoints that are whole or not there, verified when they are read, and written while training goes on.

    folder/
      step-00000040/                  it gets this name last, when every file below is on disk
        __0_0.distcp ..., .metadata   of torch.distributed.checkpoint: each rank's part, which ranks of any mesh read
        about.json                    step, format, number of ranks, and what the caller adds
        manifest.json                 size and SHA-256 of every other file
      .draft-00000080/                being written
      .old-00000020/                  being removed
      aside-00000120/                 newer than the one that a run was resumed from

Note [What a kill leaves]
A draft becomes a checkpoint by one rename, after all ranks have written and fsynced their files and the first rank has
fsynced the manifest and the folder. A checkpoint that is to go is renamed before its first file is removed. So whatever
is called step-* is whole, whenever the process died; the next run removes the other folders. Disks and people damage
files later: reading hashes all of them first, each rank its share, and goes back to the newest checkpoint that is good.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import pickle
import random
import shutil
import signal
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, _get_fqns, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult

from fusedtp.train.mesh import World

FORMAT = 1  # of about.json and of what state dicts hold; older ones load, newer ones are refused
ABOUT, MANIFEST = "about.json", "manifest.json"
_STEP, _DRAFT, _OLD, _ASIDE, _SUMS = "step-", ".draft-", ".old-", "aside-", ".sums-"
_FRAME = 2048  # bytes
_PIECE = 1 << 22  # bytes hashed at a time
# An older stager (`make gpu` takes the torch that is there) is closed after one state; later ones keep its memory.
_STAGES_ONCE = torch.__version__ < "2.13"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or none can be read."""


class Stateful(Protocol):
    """What torch.distributed.checkpoint saves: nested dicts of tensors (DTensors too) and plain values.

    A `wanted(keys)` that it may have gives the state_dict that a checkpoint with these keys is read into.
    """

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


# -- what a run is -----------------------------------------------------------------------------------------------------


@dataclass
class TrainingState:
    """Everything that the next step depends on: weights, optimizer, random numbers, and `parts` (step, data, ...).

    rank, ranks   of the job; default: torch.distributed's
    optional      parts that an older checkpoint may lack; they then stay as they are

    Random numbers are kept by rank. On another number of ranks they are drawn anew, from (seed, step, rank): dropout of
    fusedtp.nn depends on neither. So is the state of a part that is an iterable, a loader; see OfRank.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    parts: Mapping[str, Stateful] = field(default_factory=dict)
    rank: int = field(default_factory=lambda: dist.get_rank() if dist.is_initialized() else 0)
    seed: int = 0
    optional: Sequence[str] = ()
    ranks: int = field(default_factory=lambda: dist.get_world_size() if dist.is_initialized() else 1)

    def state_dict(self) -> dict[str, Any]:
        parts, state = {name: part.state_dict() for name, part in self._parts().items()}, self.optimizer.state
        unmade = next((p for group in self.optimizer.param_groups for p in group["params"] if not state), None)
        if unmade is not None:
            state[unmade] = {}  # of an optimizer without any state torch makes it, by a step that counts
        try:
            return self._found(parts)
        finally:
            if unmade is not None:
                del state[unmade]

    def _found(self, parts: dict[str, Any]) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=_OPTIONS)
        return {
            "model": model, "optimizer": optimizer, "parts": parts, "rng": {str(self.rank): random_state()},
        }  # fmt: skip

    def _parts(self) -> dict[str, Stateful]:
        return {
            name: OfRank(part, self.rank, self.ranks) if _is_loader(part) else part for name, part in self.parts.items()
        }

    def wanted(self, keys: Collection[str]) -> dict[str, Any]:
        """What a checkpoint with these keys is read into: there is a place for the state of every trained parameter.

        Left out are optional parts that it lacks, and the state of parameters of which it has none at all.
        """
        parts = {}
        for name, part in self._parts().items():
            own = [key.removeprefix(f"parts.{name}.") for key in keys if key.startswith(f"parts.{name}.")]
            if own or name not in self.optional:
                parts[name] = _wanted(part, own)
        with _all_made(self.optimizer):
            found = self._found(parts)
        held = [key.removeprefix("optimizer.") for key in keys if key.startswith("optimizer.")]
        made = self._by_parameter(held)
        for name, entries in self._by_parameter(found["optimizer"]).items():
            for entry in entries if name not in made else ():
                del found["optimizer"][f"state.{name}.{entry}"]
        return found

    def _by_parameter(self, keys: Iterable[str]) -> dict[str, list[str]]:
        """Of an optimizer's flat keys, state.PARAMETER.ENTRY, the entries of each parameter."""
        names, found = self._parameters(), defaultdict(list)
        for key in keys:
            kind, _, path = key.partition(".")
            name = path if kind == "state" else ""
            while name and name not in names:
                name = name.rpartition(".")[0]
            if name:
                found[name].append(path.removeprefix(f"{name}."))
        return found

    def _parameters(self) -> dict[str, nn.Parameter]:
        """By the names that checkpoints have for them."""
        every = self.model.named_parameters(remove_duplicate=False)
        return {name: p for own, p in every for name in _get_fqns(self.model, own)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        kept, named = self.optimizer.state, self._parameters()
        blank: dict[Any, Any] = {p: {} for group in self.optimizer.param_groups for p in group["params"]}
        for name, entries in self._by_parameter(state_dict["optimizer"]).items():
            blank[named[name]] |= {entry.partition(".")[0]: None for entry in entries}
        self.optimizer.state = defaultdict(dict, blank)  # torch reads those entries that are there
        try:
            set_state_dict(
                self.model,
                self.optimizer,
                model_state_dict=state_dict["model"],
                optim_state_dict=state_dict["optimizer"],
                options=_OPTIONS,
            )
        except Exception:
            self.optimizer.state = kept
            raise
        for parameter in [p for p, state in self.optimizer.state.items() if not state]:
            del self.optimizer.state[parameter]
        parts = self._parts()
        for name, state in state_dict["parts"].items():
            parts[name].load_state_dict(state)
        if "rng" in state_dict:
            set_random_state(state_dict["rng"][str(self.rank)])
        else:
            step = max((int(vars(part).get("step", 0)) for part in self.parts.values()), default=0)
            seed_all(int(np.random.SeedSequence([self.seed, step, self.rank]).generate_state(1)[0]))


_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


@contextmanager
def _all_made(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within, get_state_dict finds state of every trained parameter. After it, state and gradients are as before."""
    every = [p for group in optimizer.param_groups for p in group["params"]]
    if all(optimizer.state.get(p) for p in every if p.requires_grad):
        yield
        return
    state, gradients = optimizer.state, [p.grad for p in every]
    optimizer.state = defaultdict(dict)
    for p in every:
        p.grad = None  # else torch makes no state
    try:
        yield
    finally:
        optimizer.state = state
        for p, gradient in zip(every, gradients, strict=True):
            p.grad = gradient


def _is_loader(part: Stateful) -> bool:
    return isinstance(part, Iterable) and not isinstance(part, nn.Module)


def _wanted(state: Stateful, keys: Collection[str]) -> dict[str, Any]:
    wanted: Callable[[Collection[str]], dict[str, Any]] | None = getattr(state, "wanted", None)
    return state.state_dict() if wanted is None else wanted(keys)


class OfRank:
    """A loader whose state is this data-parallel rank's own: `rank` of `ranks`. Peers that share its batches save one.

    It is kept in one piece, because a loader that has not begun may have other entries. Raises CheckpointError where a
    checkpoint has it of another number of ranks.
    """

    def __init__(self, of: Any, rank: int, ranks: int) -> None:
        self.of, self.key = of, f"{rank} of {ranks}"

    def state_dict(self) -> dict[str, Any]:
        return {self.key: pickle.dumps(self.of.state_dict())}

    def wanted(self, keys: Collection[str]) -> dict[str, Any]:
        """What a checkpoint with these keys is read into."""
        if self.key not in keys:
            raise CheckpointError(
                f"the state of {type(self.of).__name__} is a data-parallel rank's own, and was saved by ranks "
                f"{', '.join(sorted(keys)) or 'none'}: rank {self.key} cannot go on from it"
            )
        return {self.key: b""}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.of.load_state_dict(pickle.loads(state_dict[self.key]))


def random_state() -> dict[str, Any]:
    """The states of all random number generators that a model may draw from."""
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "host": pickle.dumps((random.getstate(), np.random.get_state())),
    }
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put the generators where random_state found them."""
    torch.set_rng_state(state["torch"])
    of_python, of_numpy = pickle.loads(state["host"])
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def seed_all(seed: int) -> None:
    """Start all generators anew."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


# -- one checkpoint ----------------------------------------------------------------------------------------------------


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint after so many steps is."""
    return folder / f"{_STEP}{step:08}"


def steps_in(folder: Path) -> list[int]:
    """Steps that have a checkpoint, ascending; whether each is good, `faults_of` says."""
    if not folder.is_dir():
        return []
    names = (path.name.removeprefix(_STEP) for path in folder.iterdir() if path.name.startswith(_STEP))
    return sorted(int(name) for name in names if name.isdecimal() and name == f"{int(name):08}")


def manifest_of(path: Path) -> dict[str, dict[str, Any]]:
    """File name -> {"bytes", "sha256"}. Raises CheckpointError where there is none that makes sense."""
    try:
        manifest: dict[str, dict[str, Any]] = json.loads((path / MANIFEST).read_text())
        sound = all(set(each) == {"bytes", "sha256"} for each in manifest.values())
    except FileNotFoundError:
        raise CheckpointError(f"{path.name} has no {MANIFEST}") from None
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path.name}: {MANIFEST} cannot be read: {error}") from None
    if not sound or ABOUT not in manifest:
        raise CheckpointError(f"{path.name}: {MANIFEST} is damaged")
    return manifest


def faults_of(path: Path, share: tuple[int, int] = (0, 1), hashed: bool = True) -> list[str]:
    """What is wrong with a checkpoint's files.

    share    (i, n): look at the i-th of every n files alone
    hashed   not: sizes alone, which reads no file
    """
    try:
        manifest = manifest_of(path)
    except CheckpointError as error:
        return [str(error)] if share[0] == 0 else []
    found = []
    for name in sorted(manifest)[share[0] :: share[1]]:
        if (fault := _fault_of(path / name, manifest[name], hashed)) is not None:
            found.append(f"{path.name}/{name} {fault}")
    return found


def _fault_of(path: Path, wanted: Mapping[str, Any], hashed: bool) -> str | None:
    try:
        size = path.stat().st_size
        if size != wanted["bytes"]:
            return f"has {size:,} bytes instead of {wanted['bytes']:,}"
        right = not hashed or digest_of(path) == wanted["sha256"]
        return None if right else "has another SHA-256 than when it was written"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def digest_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def about(path: Path) -> dict[str, Any]:
    """What was written beside the state. Raises CheckpointError where it cannot be read or is of a newer format."""
    try:
        found: dict[str, Any] = json.loads((path / ABOUT).read_text())
        version, step = int(found["format"]), int(found["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path.name}: {ABOUT} cannot be read: {error}") from None
    if version > FORMAT:
        raise CheckpointError(
            f"{path.name} has format {version}, which a newer fusedtp wrote; this one reads up to {FORMAT}"
        )
    if path.name.startswith(_STEP) and path.name != path_of(path.parent, step).name:
        raise CheckpointError(f"{path.name} holds step {step}: the folder was copied or renamed")
    return found


# -- writing -----------------------------------------------------------------------------------------------------------


class _Writer(FileSystemWriter):
    """Writes a draft; `finish`, on the first rank when all have written, makes a checkpoint of it."""

    def __init__(self, target: Path, about: Mapping[str, Any], rank: int, done: Callable[[], None]) -> None:
        self.target, self.about, self.own_rank, self.done = target, about, rank, done
        self.draft = target.with_name(target.name.replace(_STEP, _DRAFT))
        super().__init__(self.draft, overwrite=True)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        needed = sum(_bytes_of(item) for plan in plans for item in plan.items)
        free = shutil.disk_usage(self.draft).free
        if needed > free:
            raise OSError(errno.ENOSPC, f"the checkpoint needs {needed:,} bytes, {free:,} are free", str(self.draft))
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        written = super().write_data(plan, planner)
        names = {result.storage_data.relative_path for result in written.wait()}
        _write_json(self.draft / f"{_SUMS}{self.own_rank}", _sums(self.draft, names))
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        manifest: dict[str, Any] = {}
        for rank in range(len(results)):
            sums = self.draft / f"{_SUMS}{rank}"
            if not sums.exists():
                raise CheckpointError(f"{self.draft.parent} of rank {rank} is another folder: it must be shared")
            manifest |= json.loads(sums.read_text())
            sums.unlink()
        _write_json(self.draft / ABOUT, self.about)
        manifest |= _sums(self.draft, (ABOUT, ".metadata"))
        _write_json(self.draft / MANIFEST, manifest)
        _sync(self.draft)
        if self.target.exists():
            _remove(self.target)
        self.draft.rename(self.target)
        _sync(self.target.parent)
        self.done()


def _bytes_of(item: WriteItem) -> int:
    """With what torch.save writes around the numbers."""
    if item.tensor_data is None:
        return _FRAME
    properties = item.tensor_data.properties
    assert isinstance(properties, TensorProperties)
    return math.prod(item.tensor_data.chunk.sizes) * properties.dtype.itemsize + _FRAME


def _sums(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    return {
        name: {"bytes": (folder / name).stat().st_size, "sha256": digest_of(folder / name)} for name in sorted(names)
    }


def _write_json(path: Path, value: Any) -> None:
    with open(path, "w") as file:
        file.write(json.dumps(value, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """A checkpoint: no moment shows a part of it under its name."""
    old = path.with_name(path.name.replace(_STEP, _OLD))
    if old.exists():
        shutil.rmtree(old)
    path.rename(old)
    shutil.rmtree(old)


# -- all checkpoints of a run ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is on disk: its bytes, seconds that `save` held training up, seconds until it was durable."""

    step: int
    size: int
    blocked: float
    seconds: float


@dataclass(frozen=True)
class Loaded:
    """What `load` read: about.json of that checkpoint, and what is wrong with newer ones that were left out."""

    step: int
    about: dict[str, Any]
    refused: tuple[str, ...] = ()


class Checkpoints:
    """The checkpoints in a folder that all ranks share. Every method but `steps` is collective over `group`.

    keep_last, keep_every   of older checkpoints, the newest so many stay, and those whose step divides by keep_every
    group                   of gloo, with no other use: a save communicates while training does. None: one process
    asynchronous            `save` returns when the state has been copied to host memory
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep_last: int = 2,
        keep_every: int | None = None,
        group: dist.ProcessGroup | None = None,
        asynchronous: bool = True,
    ) -> None:
        if keep_last < 1 or (keep_every is not None and keep_every < 1):
            raise ValueError(f"keep_last {keep_last} and keep_every {keep_every} are to be positive")
        self.folder, self.keep_last, self.keep_every = Path(folder), keep_last, keep_every
        self.group, self.asynchronous = group, asynchronous
        self.rank = 0 if group is None else dist.get_rank(group)
        self.ranks = 1 if group is None else dist.get_world_size(group)
        self._stager = self._new_stager()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[Saved] | None = None
        self._closed = False

    @staticmethod
    def _new_stager() -> DefaultStager:
        return DefaultStager(StagingOptions(False, False, False, False))

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, ascending."""
        return steps_in(self.folder)

    def save(self, step: int, state: Stateful, **more: Any) -> None:
        """Begin to write the state after `step` steps; about.json also gets `more`. Waits for the save before.

        Raises CheckpointError where the save before failed, or, unless asynchronous, where this one does; ValueError
        after `close`.
        """
        if self._closed:
            raise ValueError(f"the checkpoints of {self.folder} are closed")
        begin = time.perf_counter()
        self.wait()
        if _STAGES_ONCE:
            self._stager = self._new_stager()
        staged = self._stager.stage(state.state_dict())
        words = {"format": FORMAT, "step": step, "ranks": self.ranks, **more}
        writer = _Writer(path_of(self.folder, step), words, self.rank, self._prune)
        blocked = time.perf_counter() - begin if self.asynchronous else None
        self._pending = self._thread.submit(self._write, staged, writer, step, begin, blocked)
        if not self.asynchronous:
            self.wait()

    @property
    def writing(self) -> bool:
        """Whether a save is on its way, as this rank sees it."""
        return self._pending is not None and not self._pending.done()

    def wait(self) -> Saved | None:
        """The save since the last `wait`, when it is done. Raises CheckpointError if it failed: on all ranks alike."""
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()

    def close(self) -> None:
        """Wait for a save that is on its way, and end the thread."""
        self._closed = True
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._stager.close()

    def _write(self, staged: Any, writer: _Writer, step: int, begin: float, blocked: float | None) -> Saved:
        try:
            with quiet():
                save(staged, storage_writer=writer, process_group=self.group, no_dist=self.group is None)
        except (CheckpointException, OSError, CheckpointError) as error:
            if self.rank == 0:  # all ranks have stopped writing
                shutil.rmtree(writer.draft, ignore_errors=True)
            raise CheckpointError(f"step {step} was not saved: {_why(error)}") from error
        seconds = time.perf_counter() - begin
        size = sum(each["bytes"] for each in manifest_of(path_of(self.folder, step)).values())
        return Saved(step, size, seconds if blocked is None else blocked, seconds)

    def _prune(self) -> None:
        every = self.steps()
        kept = set(every[-self.keep_last :])
        kept |= {step for step in every if self.keep_every and step % self.keep_every == 0}
        for step in set(every) - kept:
            _remove(path_of(self.folder, step))

    def tidy(self) -> None:
        """Remove what killed runs left half written or half removed. Collective."""
        if self.rank == 0 and self.folder.is_dir():
            for path in self.folder.iterdir():
                if path.name.startswith((_DRAFT, _OLD)):
                    shutil.rmtree(path)
        self._gathered([])

    def set_aside(self, step: int) -> list[Path]:
        """Rename the checkpoints after `step`, which no run is to take for its own; where they are now. Collective."""
        moved = []
        for newer in [each for each in self.steps() if each > step] if self.rank == 0 else []:
            path = path_of(self.folder, newer)
            free = (path.with_name(f"{_ASIDE}{newer:08}{tail}") for tail in ("", *(f".{i}" for i in range(1, 1000))))
            moved.append(path.rename(next(each for each in free if not each.exists())))
        return [Path(each) for each in self._gathered([str(each) for each in moved])[0]]

    def faults(self, step: int) -> list[str]:
        """What is wrong with a checkpoint, in words; the same on all ranks, which share the hashing."""
        found = faults_of(path_of(self.folder, step), (self.rank, self.ranks))
        if self.rank == 0 and not found:
            try:
                about(path_of(self.folder, step))
            except CheckpointError as error:
                found = [str(error)]
        return [fault for part in self._gathered(found) for fault in part]

    def _gathered(self, value: list[str]) -> list[list[str]]:
        if self.group is None:
            return [value]
        parts: list[list[str] | None] = [None] * self.ranks
        dist.all_gather_object(parts, value, group=self.group)
        return [part or [] for part in parts]

    def load(
        self,
        state: Stateful,
        step: int | None = None,
        check: Callable[[Mapping[str, Any]], list[str]] | None = None,
    ) -> Loaded:
        """Read the newest good checkpoint, or that of `step`, into `state`.

        check   of about.json: why it does not fit this run; nothing is read then
        Raises CheckpointError where there is none, where that of `step` is not good, or does not fit.
        """
        steps = self._gathered([str(each) for each in self.steps()])[0]
        every = [int(each) for each in steps]
        if step is not None and step not in every:
            raise CheckpointError(f"{self.folder} has no checkpoint of step {step}; there are {every or 'none'}")
        refused: list[str] = []
        for candidate in [step] if step is not None else reversed(every):
            if faults := self.faults(candidate):
                refused += faults
                continue
            words = about(path_of(self.folder, candidate))
            if check is not None and (faults := check(words)):
                raise CheckpointError(f"{path_of(self.folder, candidate)}: " + "; ".join(faults))
            self._read(state, candidate, words)
            return Loaded(candidate, words, tuple(refused))
        reason = "; ".join(refused) if refused else "it holds none"
        raise CheckpointError(f"no checkpoint of {self.folder} can be read: {reason}")

    def _read(self, state: Stateful, step: int, words: Mapping[str, Any]) -> None:
        reader = FileSystemReader(path_of(self.folder, step))
        found = _wanted(state, reader.read_metadata().state_dict_metadata.keys())
        if words["ranks"] != self.ranks:
            found.pop("rng", None)
        try:
            with quiet():
                load(
                    found,
                    storage_reader=reader,
                    process_group=self.group,
                    no_dist=self.group is None,
                )
        except (CheckpointException, RuntimeError, ValueError) as error:
            raise CheckpointError(f"step {step} is not of this model: {_why(error)}") from error
        state.load_state_dict(found)


class quiet(warnings.catch_warnings):
    """Without what torch says of a save by one process, and of a draft that it writes over."""

    def __enter__(self) -> Any:
        entered = super().__enter__()
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        warnings.filterwarnings("ignore", "Detected an existing checkpoint")
        return entered


def _why(error: BaseException) -> str:
    """The causes that ranks report, each once."""
    if not isinstance(error, CheckpointException):
        return str(error)
    by_text: dict[str, list[int]] = {}
    for rank, (cause, _) in error.failures.items():
        by_text.setdefault(str(cause), []).append(rank)
    return "; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in by_text.items())


# -- how often ---------------------------------------------------------------------------------------------------------


def save_interval(save_seconds: float, failure_seconds: float) -> float:
    """Seconds of training between two saves that lose least, to saving and to what a failure takes back.

    save_seconds      that a save holds training up
    failure_seconds   mean time between failures of the whole job
    J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22 (2006), eq. 37;
    its first term is Young's (CACM 17, 1974).
    """
    share = save_seconds / (2 * failure_seconds)
    if share >= 1:
        return failure_seconds
    first = math.sqrt(2 * save_seconds * failure_seconds)
    return first * (1 + math.sqrt(share) / 3 + share / 9) - save_seconds


def as_bytes(size: float) -> str:
    """In words: 3.2 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


# -- when one is saved

FIRST_SAVE_SECONDS = 60.0  # until the first checkpoint, which shows what a save takes


class Saver:
    """Decides after every step whether to save, and whether to stop: on a signal, after a save.

    every             steps between two saves; None: by the clock of the first rank, as save_interval says
    stop_on_error     a save that fails ends the run; else `tell` says so and the run goes on
    tell, say, done   called on the first rank: with a line of what went wrong or ends the run; with what a save took,
                      once; and with each checkpoint that is on disk
    All ranks must decide alike, so each step takes one small all-reduce on host memory.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        world: World,
        *,
        every: int | None = None,
        failure_seconds: float = 86400.0,
        stop_on_error: bool = False,
        about: dict[str, Any] | None = None,
        tell: Callable[[str], None] = print,
        say: Callable[[str], None] = print,
        done: Callable[[Saved], None] = lambda saved: None,
    ) -> None:
        if every is not None and every < 1:
            raise ValueError(f"every {every} is to be positive")
        self.checkpoints, self.world, self.every = checkpoints, world, every
        self.failure_seconds, self.stop_on_error, self.about = failure_seconds, stop_on_error, about or {}
        self._tell = tell if world.rank == 0 else lambda line: None
        self._say = say if world.rank == 0 else lambda line: None
        self._done = done if world.rank == 0 else lambda saved: None
        self._asked = threading.Event()
        self._interval, self._last = FIRST_SAVE_SECONDS, time.monotonic()
        self._told = False
        self.saved: list[Saved] = []

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Within, SIGTERM asks for a last save and an orderly end."""
        before = signal.signal(signal.SIGTERM, lambda number, frame: self._asked.set())
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def asked(self, patience: float = 0.0) -> bool:
        """Whether this rank itself was asked to end, or is within so many seconds."""
        until = time.monotonic() + patience
        while not self._asked.is_set() and time.monotonic() < until:
            time.sleep(0.05)
        return self._asked.is_set()

    def after(self, step: int, state: TrainingState, last: bool) -> bool:
        """After a step, the last or another: save if it is time. Whether training ends here. Collective."""
        by_clock = self.every is None and self.world.rank == 0 and self._due()
        stop, due, writing = self.world.largest([self._asked.is_set(), by_clock, self.checkpoints.writing])
        ends = bool(stop or last)
        if ends or due or (self.every is not None and step % self.every == 0):
            self._finish()
            self._last = time.monotonic()
            self._guarded(lambda: self.checkpoints.save(step, state, **self.about), ends)
        if ends or not writing:
            self._finish(ends)
        if stop:
            self._tell(f"asked to end by SIGTERM: saved after step {step}")
        return ends

    def _due(self) -> bool:
        return time.monotonic() - self._last >= self._interval

    def _finish(self, always: bool = False) -> None:
        """Wait for the save that is on its way, if any, and take note of it."""
        saved: list[Saved | None] = []
        self._guarded(lambda: saved.append(self.checkpoints.wait()), always)
        for each in filter(None, saved):
            self.saved.append(each)
            self._done(each)
            self._interval = save_interval(each.blocked, self.failure_seconds)
            if not self._told:
                self._told = True
                took = (
                    f"saved step {each.step}: {as_bytes(each.size)}, training waited {each.blocked:.2f} s of "
                    f"{each.seconds:.2f} s"
                )
                least = (
                    f"; with a failure every {self.failure_seconds / 3600:g} h, saving every {self._interval:.0f} s "
                    "loses least"
                )
                self._say(took + least if self.every is None else took)

    def _guarded(self, action: Callable[[], Any], always: bool) -> None:
        try:
            action()
        except CheckpointError as error:
            self._tell(str(error))
            if self.stop_on_error or always:
                raise
