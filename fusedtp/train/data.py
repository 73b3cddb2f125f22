"""Text to tokens to batches.

    files --text_files--> candidates --_read--> texts --hold_out, encode--> train.*, held_out.*, index.json
    Windows      a memory-mapped token file as windows of `length` tokens
    Batches      the batches of a data-parallel rank, in one global order
    FromLoader   the same interface on top of the user's loader

Note [Token files]
Documents are stored one after the other, in the sorted order of their files. Each ends with the tokenizer's end id;
NAME.ends holds the end offsets. Accepted files are UTF-8 text without NUL and arrays of token ids (.npy). Ids are used
as they are: an end id among them ends a document too. Ids without a tokenizer have no end id, so that each file is one
document. Other files in a folder are skipped. So are exact copies of another file, since one copy could be trained on
and the other held out. The split depends only on the files' contents: about a twentieth is held out, as whole files in
the order of their SHA-256.

Note [Order]
A sample is a function of (seed, sample number) and does not depend on the layout of ranks. The text is cut into windows
of `length` tokens. Each epoch visits every window once, in its own random order, and shifts the cuts by a different
offset, so that the last tokens are used too. Steps take consecutive samples:

    samples of a step [batch] = [accumulate, dp, batch / (accumulate * dp)]

Each data-parallel rank takes its rows of every microbatch; its tensor-parallel ranks take the same rows. So one process
sees the same tokens as all ranks together. The progress of a run is one number, `samples`: a run that resumes from it,
on any number of ranks, repeats nothing and skips nothing.

Documents are packed back to back, so that a window may hold several. "separate" keeps them apart: attention, positions
and labels stop at document boundaries. A document that does not fit into a window continues in the next one.

Note [Loaders]
FromLoader builds steps from any iterable of batches: a list, a torch DataLoader, torchdata's StatefulDataLoader. A
batch is a mapping of integer tensors [B, S], of any integer dtype, that holds this data-parallel rank's rows:

    input_ids
    labels          the next token of each token, -100 for none. Default: the next token in the row and the document
    positions, document_ids     to keep documents apart: either, or both
    attention_mask  allowed if it has no zeros

The iterable restarts when it ends. A checkpoint saves its position. If the iterable has a state_dict, each
data-parallel rank saves its own; otherwise the number of batches taken is saved, and a resumed run reads and drops that
many. A run that resumes on another number of data-parallel ranks does so too, because no saved state fits its ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sysconfig
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fusedtp.train.checkpoint import OfRank
from fusedtp.train.clocks import Clocks
from fusedtp.train.mesh import World

# -- tokenizers --------------------------------------------------------------------------------------------------------

SEPARATOR = b"\0"  # ends a document of bytes; accepted text contains no NUL
NO_TEXT = 0xFF  # a byte that never occurs in UTF-8


class Tokenizer(ABC):
    """Converts between text and token ids.

    vocab_size   all ids are below it
    dtype        dtype of the token file
    digest       identifies the tokenizer: tokenizers that give different ids have different digests
    end          the id that ends a document, or None
    joint        separator between two decoded texts
    """

    vocab_size: int
    dtype: str
    digest: str
    end: int | None
    joint = ""

    @abstractmethod
    def encode(self, text: bytes) -> np.ndarray:
        """The ids of a document, including the end id."""

    @abstractmethod
    def decode(self, ids: list[int]) -> str: ...


class Bytes(Tokenizer):
    """Every byte of the text is a token."""

    vocab_size, dtype, digest, end = 256, "uint8", "bytes", 0

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text + SEPARATOR, np.uint8)

    def decode(self, ids: list[int]) -> str:
        """Invalid UTF-8 becomes U+FFFD, and so do ids above 255, which a model with a larger vocabulary may write."""
        return bytes(each if each < self.vocab_size else NO_TEXT for each in ids).decode(errors="replace")


class Ids(Tokenizer):
    """Token ids without a tokenizer: there is no text. Prompts and samples are ids as decimal numbers."""

    end, joint = None, " "

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.dtype = str(np.min_scalar_type(vocab_size - 1))
        self.digest = f"ids below {vocab_size}"

    def encode(self, text: bytes) -> np.ndarray:
        """Raises ValueError for a word that is not a token id."""
        words = text.split()
        if wrong := [word for word in words if not word.isdigit() or int(word) >= self.vocab_size]:
            raise ValueError(
                f"'{wrong[0].decode(errors='replace')}' is not a token id from 0 to {self.vocab_size - 1}: a run with "
                "--vocab-size takes token ids, separated by spaces, instead of text"
            )
        return np.array([int(word) for word in words], self.dtype)

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


class FromFolder(Tokenizer):
    """A transformers tokenizer, loaded from a folder. Raises ValueError if it cannot be read."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._own: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"--tokenizer {folder}: {' '.join(str(error).split())}") from error
        self.vocab_size = len(self._own)
        self.dtype = "uint16" if self.vocab_size <= 1 << 16 else "uint32"
        self.end = self._own.eos_token_id
        self.digest = _digest(folder)

    def encode(self, text: bytes) -> np.ndarray:
        ids = self._own(text.decode(errors="ignore"), add_special_tokens=False, verbose=False)["input_ids"]
        return np.array(ids if self.end is None else [*ids, self.end], self.dtype)

    def decode(self, ids: list[int]) -> str:
        return str(self._own.decode(ids))


@lru_cache(4)
def tokenizer_of(folder: Path | None) -> Tokenizer:
    """The tokenizer in a folder; Bytes if there is no folder. Raises ValueError if it cannot be read."""
    return Bytes() if folder is None else FromFolder(folder)


def _digest(folder: Path) -> str:
    """SHA-256 of the tokenizer's files (.json, .txt, .model)."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".txt", ".model") and os.path.isfile(path):
            digest.update(f"\n{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()


# -- files to tokens ---------------------------------------------------------------------------------------------------

HELD_OUT_SHARE = 20  # one byte out of HELD_OUT_SHARE is held out
TOKENS = ".npy"  # token ids as a numpy array: one dimension of integers
_FORMAT = "2"  # part of the cache key: bump it with every change of the token files
_PROGRESS_FROM = 1 << 25  # bytes of text from which a progress bar is shown


@dataclass(frozen=True)
class Text:
    """A file to train on. digest decides whether it is held out; size is the number of its bytes or token ids."""

    path: Path
    size: int
    digest: str


def standard_library() -> Path:
    """Folder of the Python standard library's source on this machine."""
    return Path(sysconfig.get_paths()["stdlib"])


def text_files(paths: tuple[Path, ...]) -> list[Path]:
    """Candidate files among the given files and folders, without duplicates, in the same order on all machines."""
    if not paths:
        return [path for path in _walk(standard_library()) if path.suffix == ".py"]
    found: dict[Path, None] = {}
    for path in paths:
        for file in _walk(path) if path.is_dir() else [path]:
            found.setdefault(file.resolve(), None)
    return list(found)


def text_faults(paths: tuple[Path, ...]) -> list[str]:
    """Errors of the given paths; reads no more files than necessary."""
    found = []
    for path in paths or (standard_library(),):
        if not path.exists():
            found.append(f"--data {path} does not exist")
        elif not os.access(path, os.R_OK):
            found.append(f"--data {path} is not readable")
        elif not (path.is_dir() or path.is_file()):
            found.append(f"--data {path} is neither a file nor a folder")
        elif path.is_dir():
            candidates = text_files((path,) if paths else ())
            if all(_read(each) is None for each in candidates):
                found.append(f"--data {path} holds no UTF-8 text ({len(candidates)} files)")
        elif not path.stat().st_size:
            found.append(f"--data {path} is empty")
        elif _read(path) is None:
            kind = "one dimension of token ids" if path.suffix == TOKENS else "UTF-8 text"
            found.append(f"--data {path} is not {kind}")
    return found


def hold_out(texts: list[Text]) -> tuple[set[Path], Path | None, int]:
    """(files held out, the file whose tail is held out or None, bytes of that tail).

    Goes through the files in the order of their digests and holds out each one that still fits into a twentieth of all
    bytes. If whole files fill less than half of that (few files, or one large one), the tail of the largest is added.
    """
    budget = sum(text.size for text in texts) // HELD_OUT_SHARE
    held, left = set(), budget
    for text in sorted(texts, key=lambda text: text.digest):
        if text.size <= left:
            held.add(text.path)
            left -= text.size
    if left <= budget // 2:
        return held, None, 0
    return held, max(texts, key=lambda text: (text.size, text.digest)).path, left


def build_tokens(paths: tuple[Path, ...], cache: Path, tokenizer: Tokenizer | None = None, quiet: bool = True) -> Path:
    """Folder under `cache` with the token files of these paths; written once, atomically, then reused.

    Raises ValueError if there is nothing to train on, or if token ids are out of the tokenizer's range.
    """
    tokenizer = Bytes() if tokenizer is None else tokenizer
    candidates = text_files(paths)
    folder = cache / _cache_key(candidates, tokenizer)
    if folder.exists():
        if _is_whole(folder):
            return folder
        warnings.warn(f"{folder} is damaged; its tokens are built again", stacklevel=2)
        shutil.rmtree(folder)
    texts = list(_texts(candidates))
    if not texts:
        raise ValueError("no UTF-8 text in " + (", ".join(map(str, paths)) or str(standard_library())))
    cache.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=cache))
    try:
        taken = {text.path for text in texts}
        _write_tokens(texts, draft, tokenizer, quiet, [path for path in candidates if path not in taken])
        draft.chmod(0o755)
        os.rename(draft, folder)
    except OSError:
        if not folder.exists():  # otherwise another process wrote the same files first
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _is_whole(folder: Path) -> bool:
    """Whether the token files have the sizes that index.json and the end offsets imply."""
    try:
        dtype = np.dtype(json.loads((folder / "index.json").read_text())["dtype"])
        for name in ("train", "held_out"):
            ends = np.fromfile(folder / f"{name}.ends", np.int64)
            wanted = int(ends[-1]) * dtype.itemsize if len(ends) else 0
            if (folder / f"{name}.bin").stat().st_size != wanted:
                return False
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True


def left_out(folder: Path) -> str:
    """A message that lists the given files that were not tokenized; empty if all were."""
    index = json.loads((folder / "index.json").read_text())
    paths = index.get("left_out", [])
    if not paths:
        return ""
    every = len(paths) + len(index["train"]) + len(index["held_out"])
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return f"skipped {len(paths)} of {every} files, not UTF-8 text or copies of others: {', '.join(paths[:3])}{more}"


def _write_tokens(texts: list[Text], folder: Path, tokenizer: Tokenizer, quiet: bool, others: Collection[Path]) -> None:
    from rich.progress import track  # imported here: benchmarks run without rich

    held, tail_of, tail = hold_out(texts)
    ends: dict[str, list[int]] = {"train": [], "held_out": []}
    hidden = quiet or sum(text.size for text in texts) < _PROGRESS_FROM
    with open(folder / "train.bin", "wb") as train, open(folder / "held_out.bin", "wb") as held_out:
        files = {"train": train, "held_out": held_out}
        for text in track(texts, "reading text", disable=hidden, transient=True):
            content = _read(text.path)
            assert content is not None
            cut = 0 if text.path in held else len(content) - (tail if text.path == tail_of else 0)
            for name, part in (("train", content[:cut]), ("held_out", content[cut:])):
                if not len(part):
                    continue
                ids = _ids(part, text.path, tokenizer)
                found = np.flatnonzero(ids == tokenizer.end) + 1 if isinstance(part, np.ndarray) else ()
                before = files[name].tell() // ids.itemsize
                files[name].write(ids.tobytes())
                ends[name] += sorted({*(before + int(each) for each in found), before + len(ids)})
    for name, each in ends.items():
        np.array(each, np.int64).tofile(folder / f"{name}.ends")
    index = {
        "dtype": tokenizer.dtype,
        "vocab_size": tokenizer.vocab_size,
        "train": [str(text.path) for text in texts if text.path not in held],
        "held_out": [str(text.path) for text in texts if text.path in held],
        "tail_held_out": {"path": str(tail_of), "size": tail} if tail_of else None,
        "left_out": [str(path) for path in others],
    }
    (folder / "index.json").write_text(json.dumps(index, indent=1))


def _ids(part: bytes | np.ndarray, path: Path, tokenizer: Tokenizer) -> np.ndarray:
    if not isinstance(part, np.ndarray):
        if isinstance(tokenizer, Ids):
            raise ValueError(f"--vocab-size works with token ids ({TOKENS}) only, but {path} is text")
        return tokenizer.encode(part)
    low, high = int(part.min()), int(part.max())
    if low < 0 or high >= tokenizer.vocab_size:
        raise ValueError(
            f"{path} holds ids from {low} to {high}, but the vocabulary has {tokenizer.vocab_size}: give its size with "
            "--vocab-size, or the --tokenizer that made the ids"
        )
    return part.astype(tokenizer.dtype)


def _texts(candidates: Iterable[Path]) -> Iterator[Text]:
    seen = set()
    for path in candidates:
        content = _read(path)
        if content is None:
            continue
        digest = hashlib.sha256(content if isinstance(content, bytes) else content.tobytes()).hexdigest()
        if digest in seen:
            continue
        seen.add(digest)
        yield Text(path, len(content), digest)


def _read(path: Path) -> bytes | np.ndarray | None:
    """Content of a file that can be trained on; None for any other file."""
    try:
        if path.suffix == TOKENS:
            ids: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
            return ids if ids.ndim == 1 and ids.dtype.kind in "iu" and len(ids) else None
        content = path.read_bytes()
        content.decode()
    except (OSError, UnicodeDecodeError, ValueError, EOFError):
        return None
    return content if content and SEPARATOR not in content else None


def _walk(folder: Path) -> Iterator[Path]:
    """Regular files below a folder, sorted, without hidden files, byte code and installed packages."""
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and name not in ("__pycache__", "site-packages", "dist-packages")
        )
        for name in sorted(files):
            if not name.startswith(".") and (path := Path(here, name)).is_file():
                yield path


def _cache_key(candidates: list[Path], tokenizer: Tokenizer) -> str:
    """Hash of the tokenizer and of the files' names, sizes and modification times."""
    digest = hashlib.sha256(f"{_FORMAT}\0{tokenizer.digest}".encode())
    for path in candidates:
        status = path.stat()
        digest.update(f"\n{path}\0{status.st_size}\0{status.st_mtime_ns}".encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]


# -- batches in one order ----------------------------------------------------------------------------------------------

IGNORED = -100  # label of a token without a target
Documents = Literal["joined", "separate"]


@dataclass(frozen=True)
class Microbatch:
    """The input of one forward: input_ids and labels [B, S] int64; each label is the next token.

    positions, document_ids   [B, S], if documents are kept apart
    first_token               index of its first token among all tokens of the step, over microbatches and ranks
    num_labels                divisor of the summed token losses; with it, summing over microbatches and averaging over
                              data-parallel ranks gives the mean over all labels of the step
    """

    input_ids: Tensor
    labels: Tensor
    first_token: int
    num_labels: float
    positions: Tensor | None = None
    document_ids: Tensor | None = None

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for the forward of fusedtp.nn.CausalLM."""
        return {
            "input_ids": self.input_ids, "labels": self.labels, "positions": self.positions,
            "document_ids": self.document_ids, "num_labels": self.num_labels,
        }  # fmt: skip

    def to(self, device: str | torch.device) -> Microbatch:
        def moved(x: Tensor | None) -> Any:
            return None if x is None else x.to(device, non_blocking=True)

        return Microbatch(
            moved(self.input_ids), moved(self.labels), self.first_token, self.num_labels, moved(self.positions),
            moved(self.document_ids),
        )  # fmt: skip


class Windows:
    """Windows of `length` tokens in a file that build_tokens wrote. Raises ValueError if it is shorter than one."""

    def __init__(self, folder: Path, name: str, length: int, documents: Documents = "joined") -> None:
        index = json.loads((folder / "index.json").read_text())
        path = folder / f"{name}.bin"
        size = path.stat().st_size // np.dtype(index["dtype"]).itemsize
        if size <= length:
            raise ValueError(
                f"{name} text has {size} tokens; --length {length} needs {length + 1}: "
                "give more text to --data or a smaller --length"
            )
        self.tokens = np.memmap(path, dtype=index["dtype"], mode="r")
        self.ends = np.fromfile(folder / f"{name}.ends", np.int64) if documents == "separate" else None
        self.length = length
        self.count = (size - 1) // length  # windows of an epoch

    def starts(self, seed: int, samples: np.ndarray) -> np.ndarray:
        """Offset of the first token of each sample. Sample numbers continue across epochs."""
        epochs, places = np.divmod(samples, self.count)
        slack = (len(self.tokens) - 1) % self.length
        found = np.empty(len(samples), np.int64)
        for epoch in np.unique(epochs):
            order, offset = _order(seed, int(epoch), self.count, slack)
            of_epoch = epochs == epoch
            found[of_epoch] = order[places[of_epoch]] * self.length + offset
        return found

    def spread(self, count: int) -> np.ndarray:
        """Offsets of the first tokens of `count` windows, spread evenly over the file."""
        return np.linspace(0, len(self.tokens) - self.length - 1, count).astype(np.int64)

    def num_labels(self, starts: np.ndarray) -> int:
        """Number of labels of these windows. If documents are kept apart, the last token of a document has no label."""
        total = len(starts) * self.length
        if self.ends is None:
            return total
        first, last = (np.searchsorted(self.ends, starts + at, "right") for at in (0, self.length))
        return total - int((last - first).sum())

    def read(self, starts: np.ndarray) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """(input_ids, labels, positions, document_ids), each [len(starts), length] int64; the last two may be None."""
        if self.ends is None:
            rows = [self.tokens[start : start + self.length + 1] for start in starts]
            tokens = torch.from_numpy(np.stack(rows).astype(np.int64))
            return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), None, None
        at = starts[:, None] + np.arange(self.length + 1)  # [B, S + 1]
        ids = self.tokens[at].astype(np.int64)
        document = np.searchsorted(self.ends, at, "right")
        begins = np.concatenate(([0], self.ends))[document]  # where each token's document begins
        labels = np.where(document[:, 1:] == document[:, :-1], ids[:, 1:], IGNORED)
        positions = (at - np.maximum(begins, starts[:, None]))[:, :-1]
        found = (ids[:, :-1], labels, positions, (document - document[:, :1])[:, :-1])
        return tuple(torch.from_numpy(np.ascontiguousarray(each)) for each in found)  # type: ignore[return-value]


@lru_cache(4)
def _order(seed: int, epoch: int, count: int, slack: int) -> tuple[np.ndarray, int]:
    """(the order of an epoch's windows, the offset of its cuts in tokens, at most `slack`)."""
    generator = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    return generator.permutation(count), int(generator.integers(0, slack + 1))


class Batches:
    """The training batches of one data-parallel rank of `dp`, and the held-out text for validation.

    samples   number of samples of the global order that have been trained on; this is the state of the data
    """

    def __init__(
        self,
        folder: Path,
        *,
        length: int,
        batch: int,
        accumulate: int = 1,
        seed: int = 0,
        dp: int = 1,
        dp_rank: int = 0,
        device: str | torch.device = "cpu",
        documents: Documents = "joined",
    ) -> None:
        self.train = Windows(folder, "train", length, documents)
        self.held_out = Windows(folder, "held_out", length, documents)
        self.batch, self.accumulate, self.seed = batch, accumulate, seed
        self.dp, self.dp_rank, self.device = dp, dp_rank, device
        self.samples, self.clocks = 0, Clocks()

    @property
    def tokens(self) -> int:
        """Tokens of a step, over all data-parallel ranks."""
        return self.batch * self.train.length

    @property
    def repeats(self) -> str:
        """A message if the text has fewer windows than a step takes, so that steps repeat some; otherwise empty."""
        count, length = self.train.count, self.train.length
        if self.batch <= count:
            return ""
        windows = f"{count} window" + ("s" if count > 1 else "")
        return (
            f"--batch {self.batch}: the training text has only {windows} of {length} tokens, so each step takes some "
            "of them more than once"
        )

    def step(self, scale: float = 1.0) -> Iterator[Microbatch]:
        """This rank's microbatches of the next step. scale: loss scale, applied through num_labels."""
        starts = self.train.starts(self.seed, np.arange(self.samples, self.samples + self.batch))
        self.samples += self.batch
        return self._split(self.train, starts, self.accumulate, max(1, self.train.num_labels(starts)) / scale)

    def validation(self, count: int, pieces: int = 1) -> Iterator[Microbatch]:
        """This rank's part of `count` batches of held-out text, each in `pieces` microbatches; always the same ones.

        The mean of the batches' losses is the mean over all of their labels.
        """
        starts = self.held_out.spread(count * self.batch)
        num_labels = max(1, self.held_out.num_labels(starts)) / count
        for each in starts.reshape(count, -1):
            yield from self._split(self.held_out, each, pieces, num_labels)

    def prompt(self, size: int) -> list[int]:
        """The first tokens of the held-out text."""
        return [int(token) for token in self.held_out.tokens[:size]]

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.samples = state_dict["samples"]

    def _split(self, windows: Windows, starts: np.ndarray, accumulate: int, num_labels: float) -> Iterator[Microbatch]:
        for microbatch, rows in enumerate(starts.reshape(accumulate, self.dp, -1)[:, self.dp_rank]):
            with self.clocks("data"):
                input_ids, labels, positions, document_ids = windows.read(rows)
                place = (microbatch * self.dp + self.dp_rank) * rows.size * windows.length
                found = Microbatch(input_ids, labels, place, num_labels / self.dp, positions, document_ids)
                found = found.to(self.device)
            yield found


# -- batches of the user's loader --------------------------------------------------------------------------------------


class FromLoader:
    """The interface of Batches on top of an iterable; see Note [Loaders].

    accumulate   batches per step
    tokens       tokens of the last step, over all data-parallel ranks
    """

    def __init__(self, loader: Iterable[Mapping[str, Tensor]], world: World, accumulate: int = 1) -> None:
        if accumulate < 1:
            raise ValueError(f"accumulate is {accumulate}, must be positive")
        self.loader, self.world, self.accumulate, self.device = loader, world, accumulate, world.device
        self.tokens, self.taken, self.clocks = 0, 0, Clocks()
        self._read, self._told = 0, False  # batches since the data began; whether _tell_of_repeats has warned
        self._batches: Iterator[Mapping[str, Tensor]] | None = None
        self._own = OfRank(loader, world.dp_rank, world.dp) if hasattr(loader, "state_dict") else None

    def step(self, scale: float = 1.0) -> Iterator[Microbatch]:
        """The next step's microbatches. Collective over the data-parallel ranks, which sum their label counts."""
        with self.clocks("data"):
            batches = [_checked(self._next()) for _ in range(self.accumulate)]
        labels = [_labels(batch) for batch in batches]
        own = [sum(int((each != IGNORED).sum()) for each in labels), sum(each.numel() for each in labels)]
        counted, tokens = self.world.means(torch.tensor(own, device=self.device))
        num_labels, self.tokens = max(1 / self.world.dp, counted), round(tokens * self.world.dp)
        for number, (batch, each) in enumerate(zip(batches, labels, strict=True)):
            place = (number * self.world.dp + self.world.dp_rank) * each.numel()
            yield Microbatch(batch["input_ids"], each, place, num_labels / scale, *_documents(batch)).to(self.device)

    def _next(self) -> Mapping[str, Tensor]:
        self.taken += 1
        for restarts in (False, True):
            if self._batches is None:
                self._batches = iter(self.loader)
            if (batch := next(self._batches, None)) is not None:
                if restarts:
                    self._tell_of_repeats()
                self._read = 1 if restarts else self._read + 1
                return batch
            self._batches = None
        if self.taken > 1:
            raise ValueError(
                f"the data ended after {self.taken - 1} batches and does not restart: a "
                f"{type(self.loader).__name__} can be read only once; pass a list or a DataLoader"
            )
        raise ValueError("the data has no batch")

    def _tell_of_repeats(self) -> None:
        """Warn, once, if the data that has just restarted has fewer batches than a step takes."""
        if self._read < self.accumulate and not self._told and self.world.rank == 0:
            warnings.warn(
                f"the data ends after {self._read} of the {self.accumulate} batches of a step (accumulate), so each "
                "step takes some of them more than once",
                stacklevel=4,
            )
            self._told = True

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken} | ({} if self._own is None else {"loader": self._own.state_dict()})

    def wanted(self, keys: Collection[str]) -> dict[str, Any]:
        """The state_dict to load a checkpoint with these keys into; see fusedtp.train.checkpoint.Stateful."""
        has = self._own is not None and f"loader.{self._own.key}" in keys
        return self.state_dict() if has else {"taken": self.taken}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._batches, taken = None, int(state_dict["taken"])
        if self._own is not None and self._own.key in state_dict.get("loader", {}):
            self._own.load_state_dict(state_dict["loader"])
            self._read = self.accumulate  # the next batch may be in the middle of the data
        else:
            if self._own is not None:
                warnings.warn(
                    f"the checkpoint has no loader state of data-parallel rank {self._own.key}: the loader "
                    f"starts from the beginning, and its first {taken} batches are dropped",
                    stacklevel=2,
                )
            for _ in range(taken):
                self._next()
        self.taken = taken


READ = ("input_ids", "labels", "positions", "document_ids", "attention_mask")  # accepted entries of a batch


def _checked(batch: Any) -> Mapping[str, Tensor]:
    """The batch in int64. Raises ValueError if its type, names, shapes or dtypes are not those of a batch.

    In a narrower dtype, IGNORED may not fit: in uint8 it is 156, a token. torch's cross_entropy needs int64 labels.
    """
    if not isinstance(batch, Mapping):
        raise ValueError(f"a batch is a {type(batch).__name__}; the trainer takes mappings with input_ids")
    if unknown := [name for name in batch if name not in READ]:
        raise ValueError(f"a batch has {', '.join(map(repr, unknown))}; the trainer reads {', '.join(READ)}")
    if "input_ids" not in batch:
        raise ValueError("a batch has no input_ids")
    if wrong := [name for name, value in batch.items() if not isinstance(value, Tensor)]:
        raise ValueError(f"{wrong[0]} is a {type(batch[wrong[0]]).__name__}; the trainer takes tensors")
    shape = tuple(batch["input_ids"].shape)
    if len(shape) != 2:
        raise ValueError(f"input_ids has shape {shape}; the trainer takes rows of tokens, [B, S]")
    for name, value in batch.items():
        if name != "attention_mask" and tuple(value.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, but input_ids has {shape}")
    numbers = {name: value for name, value in batch.items() if name != "attention_mask"}
    for name, value in numbers.items():
        if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
            raise ValueError(f"{name} is {value.dtype}; the trainer takes integers")
    return {**batch, **{name: value.to(torch.int64) for name, value in numbers.items()}}


def _labels(batch: Mapping[str, Tensor]) -> Tensor:
    """A batch's labels; default: the next tokens. Raises ValueError for a mask or labels that would be misread."""
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    if mask is not None and not bool(mask.all()):
        raise ValueError(
            "attention_mask has zeros, but the trainer does not use it: leave it out, set the labels of padding at the "
            f"end of a row to {IGNORED}, and keep documents apart by document_ids and positions"
        )
    if "labels" in batch:
        labels = batch["labels"]
        if _unshifted(ids, labels):
            raise ValueError(
                "labels equal input_ids, as transformers' collators make them; the trainer takes the next token of "
                "each token as its label: leave labels out, or shift them by one"
            )
        return labels
    follows = ids[:, 1:]
    if (documents := batch.get("document_ids")) is not None:
        follows = follows.where(documents[:, 1:] == documents[:, :-1], IGNORED)
    elif (positions := batch.get("positions")) is not None:
        follows = follows.where(positions[:, 1:] > positions[:, :-1], IGNORED)
    return torch.cat([follows, ids.new_full((len(ids), 1), IGNORED)], 1)


def _documents(batch: Mapping[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """positions and document_ids, each derived from the other: transformers reads positions only, fusedtp.nn both."""
    positions, documents = batch.get("positions"), batch.get("document_ids")
    if positions is None and documents is not None:
        places = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
        begins = places.masked_fill(F.pad(documents[:, 1:] == documents[:, :-1], (1, 0)), 0)
        positions = places - begins.cummax(1).values
    if documents is None and positions is not None:
        documents = F.pad(positions[:, 1:] <= positions[:, :-1], (1, 0)).cumsum(1)
    return positions, documents


def _unshifted(ids: Tensor, labels: Tensor) -> bool:
    """Whether labels equal the tokens. Rows of one repeated token and single labels are no evidence."""
    given = labels != IGNORED
    if labels.shape != ids.shape or bool((given & (labels != ids)).any()):
        return False
    return int((given[:, :-1] & (labels[:, :-1] != ids[:, 1:])).sum()) > 1
