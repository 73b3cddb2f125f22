"""Checkpoints: written atomically in the background of training, verified when they are read.

    folder/
      step-00000040/                  gets this name last, when every file below is on disk
        __0_0.distcp ..., .metadata   torch.distributed.checkpoint: one part per rank, readable by ranks of any mesh
        about.json                    step, format, number of ranks, and entries of the caller
        manifest.json                 size and SHA-256 of every other file
      .draft-00000080/                being written
      .old-00000020/                  being removed
      aside-00000120/                 newer than the checkpoint that a run was resumed from

Note [What a kill leaves]
One rename turns a draft into a checkpoint, after all ranks have written and fsynced their files and the first rank has
fsynced the manifest and the folder. To remove a checkpoint, the folder is renamed before its first file is deleted. So
every folder named step-* is complete, no matter when a process was killed; the next run removes the .draft-* and .old-*
folders. Files may still be damaged later. So `load` first hashes all files, split over the ranks, and falls back to the
newest good checkpoint.
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

FORMAT = 1  # version of about.json and of the state dicts; older versions load, newer ones are refused
ABOUT, MANIFEST = "about.json", "manifest.json"
_STEP, _DRAFT, _OLD, _ASIDE, _SUMS = "step-", ".draft-", ".old-", "aside-", ".sums-"
_FRAME = 2048  # allowance in bytes for what torch.save adds to an item
_PIECE = 1 << 22  # bytes hashed at a time
# Before 2.13 a stager is closed after one state; later ones reuse its memory. `make gpu` uses the installed torch.
_STAGES_ONCE = torch.__version__ < "2.13"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or none can be read."""


class Stateful(Protocol):
    """An object whose state torch.distributed.checkpoint saves: nested dicts of tensors, DTensors and plain values.

    Optionally, `wanted(keys)` returns the state_dict to load a checkpoint with these keys into.
    """

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


# -- state of a run ----------------------------------------------------------------------------------------------------


@dataclass
class TrainingState:
    """Everything that the next step depends on: weights, optimizer, RNG states, and `parts` (step, data, ...).

    rank, ranks   this rank and the number of ranks; default: those of torch.distributed
    optional      parts that an older checkpoint may lack; they then keep their current state

    RNG states are saved per rank. On another number of ranks the generators are seeded from (seed, step, rank) instead;
    dropout of fusedtp.nn uses neither. The state of a part that is an iterable, a loader, is per rank too; see OfRank.
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
            state[unmade] = {}  # if the state is empty, torch would create it by an optimizer step that counts
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
        """The state_dict to load a checkpoint with these keys into, with optimizer state of every trained parameter.

        It omits optional parts that the checkpoint lacks, and the optimizer state of parameters that have none in it.
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
        """Parameter name -> entries, parsed from an optimizer's flat keys state.PARAMETER.ENTRY."""
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
        """The parameters by their names in checkpoints."""
        every = self.model.named_parameters(remove_duplicate=False)
        return {name: p for own, p in every for name in _get_fqns(self.model, own)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        kept, named = self.optimizer.state, self._parameters()
        blank: dict[Any, Any] = {p: {} for group in self.optimizer.param_groups for p in group["params"]}
        for name, entries in self._by_parameter(state_dict["optimizer"]).items():
            blank[named[name]] |= {entry.partition(".")[0]: None for entry in entries}
        self.optimizer.state = defaultdict(dict, blank)  # torch loads only entries that exist
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
    """Make get_state_dict find state of every trained parameter; restore state and gradients on exit."""
    every = [p for group in optimizer.param_groups for p in group["params"]]
    if all(optimizer.state.get(p) for p in every if p.requires_grad):
        yield
        return
    state, gradients = optimizer.state, [p.grad for p in every]
    optimizer.state = defaultdict(dict)
    for p in every:
        p.grad = None  # otherwise torch creates no state
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
    """A loader with a state per data-parallel rank: `rank` of `ranks`. Ranks with the same batches save one state.

    The state is pickled as a whole, because a loader that has not started may have other entries. Raises
    CheckpointError if the checkpoint was saved by another number of ranks.
    """

    def __init__(self, of: Any, rank: int, ranks: int) -> None:
        self.of, self.key = of, f"{rank} of {ranks}"

    def state_dict(self) -> dict[str, Any]:
        return {self.key: pickle.dumps(self.of.state_dict())}

    def wanted(self, keys: Collection[str]) -> dict[str, Any]:
        """The state_dict to load a checkpoint with these keys into."""
        if self.key not in keys:
            raise CheckpointError(
                f"the state of {type(self.of).__name__} is saved per data-parallel rank, and the checkpoint has it for "
                f"ranks {', '.join(sorted(keys)) or 'none'}: rank {self.key} cannot resume from it"
            )
        return {self.key: b""}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.of.load_state_dict(pickle.loads(state_dict[self.key]))


def random_state() -> dict[str, Any]:
    """The states of all random number generators that a model may use."""
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "host": pickle.dumps((random.getstate(), np.random.get_state())),
    }
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore the generators to a state from random_state."""
    torch.set_rng_state(state["torch"])
    of_python, of_numpy = pickle.loads(state["host"])
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def seed_all(seed: int) -> None:
    """Seed all generators."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


# -- one checkpoint ----------------------------------------------------------------------------------------------------


def path_of(folder: Path, step: int) -> Path:
    """Path of the checkpoint after `step` steps."""
    return folder / f"{_STEP}{step:08}"


def steps_in(folder: Path) -> list[int]:
    """Steps that have a checkpoint, ascending; `faults_of` tells whether a checkpoint is good."""
    if not folder.is_dir():
        return []
    names = (path.name.removeprefix(_STEP) for path in folder.iterdir() if path.name.startswith(_STEP))
    return sorted(int(name) for name in names if name.isdecimal() and name == f"{int(name):08}")


def manifest_of(path: Path) -> dict[str, dict[str, Any]]:
    """File name -> {"bytes", "sha256"}. Raises CheckpointError if the manifest is missing or damaged."""
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
    """Errors of a checkpoint's files.

    share    (i, n): check only the i-th of every n files
    hashed   False: compare sizes only, without reading the files
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
    """The contents of about.json. Raises CheckpointError if it cannot be read or has a newer format."""
    try:
        found: dict[str, Any] = json.loads((path / ABOUT).read_text())
        version, step = int(found["format"]), int(found["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path.name}: {ABOUT} cannot be read: {error}") from None
    if version > FORMAT:
        raise CheckpointError(
            f"{path.name} has format {version}, which a newer fusedtp wrote; this one reads formats up to {FORMAT}"
        )
    if path.name.startswith(_STEP) and path.name != path_of(path.parent, step).name:
        raise CheckpointError(f"{path.name} holds step {step}: the folder was copied or renamed")
    return found


# -- writing -----------------------------------------------------------------------------------------------------------


class _Writer(FileSystemWriter):
    """Writes a draft; `finish` runs on the first rank after all have written, and turns it into a checkpoint."""

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
                raise CheckpointError(
                    f"rank {rank} writes to another {self.draft.parent}: the folder must be shared by all ranks"
                )
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
    """Estimated bytes of an item on disk, including what torch.save adds."""
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
    """Remove a checkpoint. It is renamed first, so that its name never denotes a partial checkpoint."""
    old = path.with_name(path.name.replace(_STEP, _OLD))
    if old.exists():
        shutil.rmtree(old)
    path.rename(old)
    shutil.rmtree(old)


# -- all checkpoints of a run ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk: its size in bytes, seconds that `save` blocked training, seconds until it was durable."""

    step: int
    size: int
    blocked: float
    seconds: float


@dataclass(frozen=True)
class Loaded:
    """What `load` has read: the checkpoint's about.json, and the errors of newer checkpoints that were skipped."""

    step: int
    about: dict[str, Any]
    refused: tuple[str, ...] = ()


class Checkpoints:
    """The checkpoints in a folder that all ranks share. Every method but `steps` is collective over `group`.

    keep_last, keep_every   keep the newest keep_last checkpoints, and those whose step is a multiple of keep_every
    group                   a gloo group used only here: saves communicate while training does. None: one process
    asynchronous            `save` returns as soon as the state has been copied to host memory
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
            raise ValueError(f"keep_last {keep_last} and keep_every {keep_every} must be positive")
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
        """Start writing the state after `step` steps; `more` is added to about.json. Waits for the previous save.

        Raises CheckpointError if the previous save failed, or if this one fails and is not asynchronous; ValueError
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
        """Whether a save is in progress, as seen by this rank."""
        return self._pending is not None and not self._pending.done()

    def wait(self) -> Saved | None:
        """Wait for the save since the last `wait`, and return it. Raises CheckpointError on all ranks if it failed."""
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()

    def close(self) -> None:
        """Wait for a save in progress, and end the thread."""
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
        """Remove checkpoints that killed runs left half written or half removed. Collective."""
        if self.rank == 0 and self.folder.is_dir():
            for path in self.folder.iterdir():
                if path.name.startswith((_DRAFT, _OLD)):
                    shutil.rmtree(path)
        self._gathered([])

    def set_aside(self, step: int) -> list[Path]:
        """Rename the checkpoints after `step`, so that no run resumes from them; return the new paths. Collective."""
        moved = []
        for newer in [each for each in self.steps() if each > step] if self.rank == 0 else []:
            path = path_of(self.folder, newer)
            free = (path.with_name(f"{_ASIDE}{newer:08}{tail}") for tail in ("", *(f".{i}" for i in range(1, 1000))))
            moved.append(path.rename(next(each for each in free if not each.exists())))
        return [Path(each) for each in self._gathered([str(each) for each in moved])[0]]

    def faults(self, step: int) -> list[str]:
        """Errors of a checkpoint, as messages; the ranks split the hashing and all return the same list. Collective."""
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
        """Read the newest good checkpoint, or the one of `step`, into `state`.

        check   about.json -> reasons why the checkpoint does not fit this run; if there are any, nothing is read
        Raises CheckpointError if no checkpoint is good, or if the checkpoint to read is damaged or does not fit.
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
        reason = "; ".join(refused) if refused else "there is none"
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
            raise CheckpointError(f"the checkpoint of step {step} does not fit this model: {_why(error)}") from error
        state.load_state_dict(found)


class quiet(warnings.catch_warnings):
    """Suppress torch's warnings about saving in a single process and about overwriting a draft."""

    def __enter__(self) -> Any:
        entered = super().__enter__()
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        warnings.filterwarnings("ignore", "Detected an existing checkpoint")
        return entered


def _why(error: BaseException) -> str:
    """The distinct causes that ranks report, each with its ranks."""
    if not isinstance(error, CheckpointException):
        return str(error)
    by_text: dict[str, list[int]] = {}
    for rank, (cause, _) in error.failures.items():
        by_text.setdefault(str(cause), []).append(rank)
    return "; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in by_text.items())


# -- how often ---------------------------------------------------------------------------------------------------------


def save_interval(save_seconds: float, failure_seconds: float) -> float:
    """Seconds of training between saves that minimize the time lost to saving and to repeating work after failures.

    save_seconds      seconds that a save blocks training
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
    """A size as text: 3.2 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


# -- when to save

FIRST_SAVE_SECONDS = 60.0  # until the first checkpoint, which measures how long a save takes


class Saver:
    """Decides after every step whether to save, and whether to stop: on a signal, after a save.

    every             steps between saves; None: by the first rank's clock, at the interval of save_interval
    stop_on_error     True: a failed save ends the run; False: `tell` reports it and the run continues
    tell, say, done   called on the first rank: `tell` with a line about an error or the end of the run, `say` once with
                      the time that a save took, `done` with each checkpoint that is on disk
    All ranks must make the same decision, so each step takes one small all-reduce on host memory.
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
            raise ValueError(f"every {every} must be positive")
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
        """In this context, SIGTERM requests a last save and an orderly end."""
        before = signal.signal(signal.SIGTERM, lambda number, frame: self._asked.set())
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def asked(self, patience: float = 0.0) -> bool:
        """Whether this rank got SIGTERM; waits up to `patience` seconds for it."""
        until = time.monotonic() + patience
        while not self._asked.is_set() and time.monotonic() < until:
            time.sleep(0.05)
        return self._asked.is_set()

    def after(self, step: int, state: TrainingState, last: bool) -> bool:
        """Call after each step: save if it is time. Returns whether training ends here. Collective."""
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
        """Wait for a save in progress, if any, and record it."""
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
                    "loses the least time"
                )
                self._say(took + least if self.every is None else took)

    def _guarded(self, action: Callable[[], Any], always: bool) -> None:
        try:
            action()
        except CheckpointError as error:
            self._tell(str(error))
            if self.stop_on_error or always:
                raise
