"""Files in, memory-mapped tokens out: which files there are, which are held out, and the cache.

    paths --find--> candidates --read--> texts --split, encode--> train.bin, train.ends, held_out.*, index.json

Documents follow each other in the sorted order of their files, each closed by the tokenizer's end; NAME.ends holds
where each ends. Only UTF-8 text without NUL counts, and arrays of token ids (.npy), which are taken as they are; files
in a folder that are something else are left out, and so are exact copies of another file, which could otherwise be
trained on under one name and held out under the other. The split depends only on the files' content: about a twentieth,
whole files in the order of their SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.progress import track

from fusedtp.train.tokenizer import SEPARATOR, Bytes, Tokenizer

HELD_OUT_SHARE = 20  # one byte in so many is held out
TOKENS = ".npy"  # token ids of numpy: one dimension of integers
_FORMAT = "2"  # part of the cache's key: change it with anything that changes the token files
_PROGRESS_FROM = 1 << 25  # bytes of text


@dataclass(frozen=True)
class Text:
    """A file that can be trained on, and what decides whether it is held out. size: its bytes, or its token ids."""

    path: Path
    size: int
    digest: str


def standard_library() -> Path:
    """Folder of the Python standard library's source on this machine."""
    return Path(sysconfig.get_paths()["stdlib"])


def find(paths: tuple[Path, ...]) -> list[Path]:
    """Candidate files of the given files and folders, each once, in an order that all machines share."""
    if not paths:
        return [path for path in _walk(standard_library()) if path.suffix == ".py"]
    found: dict[Path, None] = {}
    for path in paths:
        for file in _walk(path) if path.is_dir() else [path]:
            found.setdefault(file.resolve(), None)
    return list(found)


def faults(paths: tuple[Path, ...]) -> list[str]:
    """What is wrong with the given paths; reads no more than it must."""
    found = []
    for path in paths or (standard_library(),):
        if not path.exists():
            found.append(f"--data {path} does not exist")
        elif not os.access(path, os.R_OK):
            found.append(f"--data {path} is not readable")
        elif not (path.is_dir() or path.is_file()):
            found.append(f"--data {path} is neither a file nor a folder")
        elif path.is_dir():
            candidates = find((path,) if paths else ())
            if all(_read(each) is None for each in candidates):
                found.append(f"--data {path} holds no UTF-8 text ({len(candidates)} files)")
        elif not path.stat().st_size:
            found.append(f"--data {path} is empty")
        elif _read(path) is None:
            kind = "one dimension of token ids" if path.suffix == TOKENS else "UTF-8 text"
            found.append(f"--data {path} is not {kind}")
    return found


def split(texts: list[Text]) -> tuple[set[Path], Path | None, int]:
    """(files held out, the file whose tail is held out or None, bytes of that tail).

    In the order of their digests, files that still fit into a twentieth of all bytes are held out. Where whole
    files do not fill half of that (few files, or one large one), the tail of the largest makes up for it.
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


def build(
    paths: tuple[Path, ...], cache: Path, tokenizer: Tokenizer | None = None, quiet: bool = True
) -> Path:
    """Folder under `cache` with the token files of these paths; written once, atomically, then reused.

    Raises ValueError when there is nothing to train on, or token ids are no ids of this tokenizer.
    """
    tokenizer = Bytes() if tokenizer is None else tokenizer
    candidates = find(paths)
    folder = cache / _key(candidates, tokenizer)
    if folder.exists():
        return folder
    texts = list(_texts(candidates))
    if not texts:
        raise ValueError("no UTF-8 text in " + (", ".join(map(str, paths)) or str(standard_library())))
    cache.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=cache))
    try:
        _write(texts, draft, tokenizer, quiet)
        draft.chmod(0o755)
        os.rename(draft, folder)
    except OSError:
        if not folder.exists():  # otherwise another process wrote the same files first
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _write(texts: list[Text], folder: Path, tokenizer: Tokenizer, quiet: bool) -> None:
    held, tail_of, tail = split(texts)
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
    }
    (folder / "index.json").write_text(json.dumps(index, indent=1))


def _ids(part: bytes | np.ndarray, path: Path, tokenizer: Tokenizer) -> np.ndarray:
    if not isinstance(part, np.ndarray):
        return tokenizer.encode(part)
    low, high = int(part.min()), int(part.max())
    if low < 0 or high >= tokenizer.vocab_size:
        raise ValueError(f"{path} holds ids from {low} to {high}, of a vocabulary of {tokenizer.vocab_size}")
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
    """Content of a file that can be trained on; None for anything else."""
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
    """Regular files below a folder, sorted; hidden ones, byte code and installed packages are left out."""
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and name not in ("__pycache__", "site-packages", "dist-packages")
        )
        for name in sorted(files):
            if not name.startswith(".") and (path := Path(here, name)).is_file():
                yield path


def _key(candidates: list[Path], tokenizer: Tokenizer) -> str:
    """Hash that changes with the list of files, their contents and the tokenizer."""
    digest = hashlib.sha256(f"{_FORMAT}\0{tokenizer.digest}".encode())
    for path in candidates:
        status = path.stat()
        digest.update(f"\n{path}\0{status.st_size}\0{status.st_mtime_ns}".encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]
