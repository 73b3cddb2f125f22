"""Text to token ids: a byte each, or a tokenizer of transformers from a local folder."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

SEPARATOR = b"\0"  # ends a document of bytes; text that is read holds none


class Tokenizer(ABC):
    """vocab_size: ids are below it. dtype: of the token file. digest: differs where any id would.

    end: the id that ends a document, where there is one.
    """

    vocab_size: int
    dtype: str
    digest: str
    end: int | None

    @abstractmethod
    def encode(self, text: bytes) -> np.ndarray:
        """The ids of a document, its end included."""

    @abstractmethod
    def decode(self, ids: list[int]) -> str: ...


class Bytes(Tokenizer):
    """A token is a byte of the text."""

    vocab_size, dtype, digest, end = 256, "uint8", "bytes", 0

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text + SEPARATOR, np.uint8)

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


class FromFolder(Tokenizer):
    """The tokenizer of a folder of transformers'. Raises ValueError where it cannot be read."""

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
    """That of a folder, or bytes. Raises ValueError."""
    return Bytes() if folder is None else FromFolder(folder)


def _digest(folder: Path) -> str:
    """Of the small files that a tokenizer is made of."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".txt", ".model") and os.path.isfile(path):
            digest.update(f"\n{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()
