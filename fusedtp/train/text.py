"""Text files in, one memory-mapped token file out: which files there are, which are held out, and the cache.

    paths --find--> candidates --read--> texts --split--> train.bin, held_out.bin, index.json

A token is a byte. Files follow each other in sorted order, separated by a NUL byte. Only UTF-8 text without
NUL counts; files in a folder that are something else are left out, and so are exact copies of another file,
which could otherwise be trained on under one name and held out under the other. The split depends only on
the files' content: about a twentieth of the bytes, whole files in the order of their SHA-256.
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

SEPARATOR = b"\0"
HELD_OUT_SHARE = 20  # one byte in so many is held out
_FORMAT = "1"  # part of the cache's key: change it with anything that changes the token files


@dataclass(frozen=True)
class Text:
    """A file that is text, and what decides whether it is held out."""

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
            if not any(map(_read_text, candidates)):
                found.append(f"--data {path} holds no UTF-8 text ({len(candidates)} files)")
        elif not path.stat().st_size:
            found.append(f"--data {path} is empty")
        elif _read_text(path) is None:
            found.append(f"--data {path} is not UTF-8 text")
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


def build(paths: tuple[Path, ...], cache: Path) -> Path:
    """Folder under `cache` with the token files of these paths; written once, atomically, then reused.

    Raises ValueError when no text is found.
    """
    candidates = find(paths)
    folder = cache / _key(candidates)
    if folder.exists():
        return folder
    texts = list(_texts(candidates))
    if not texts:
        raise ValueError("no UTF-8 text in " + (", ".join(map(str, paths)) or str(standard_library())))
    cache.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=cache))
    try:
        _write(texts, draft)
        draft.chmod(0o755)
        os.rename(draft, folder)
    except OSError:
        if not folder.exists():  # otherwise another process wrote the same files first
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _write(texts: list[Text], folder: Path) -> None:
    held, tail_of, tail = split(texts)
    with open(folder / "train.bin", "wb") as train, open(folder / "held_out.bin", "wb") as held_out:
        for text in texts:
            content = text.path.read_bytes()
            cut = 0 if text.path in held else len(content) - (tail if text.path == tail_of else 0)
            for out, part in ((train, content[:cut]), (held_out, content[cut:])):
                if part:
                    out.write(part + SEPARATOR)
    index = {
        "train": [str(text.path) for text in texts if text.path not in held],
        "held_out": [str(text.path) for text in texts if text.path in held],
        "tail_held_out": {"path": str(tail_of), "bytes": tail} if tail_of else None,
    }
    (folder / "index.json").write_text(json.dumps(index, indent=1))


def _texts(candidates: Iterable[Path]) -> Iterator[Text]:
    seen = set()
    for path in candidates:
        content = _read_text(path)
        if content is None or (digest := hashlib.sha256(content).hexdigest()) in seen:
            continue
        seen.add(digest)
        yield Text(path, len(content), digest)


def _read_text(path: Path) -> bytes | None:
    """Content of a non-empty UTF-8 file without NUL; None for anything else."""
    try:
        content = path.read_bytes()
        content.decode()
    except (OSError, UnicodeDecodeError):
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


def _key(candidates: list[Path]) -> str:
    """Hash that changes with the list of files and their contents."""
    digest = hashlib.sha256(_FORMAT.encode())
    for path in candidates:
        status = path.stat()
        digest.update(f"\n{path}\0{status.st_size}\0{status.st_mtime_ns}".encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]
