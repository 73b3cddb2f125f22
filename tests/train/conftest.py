"""Worlds that are closed after a file's tests, and a small text."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from fusedtp.train.data import build_tokens
from tests.harness import pool


@pytest.fixture(scope="module")
def worlds() -> Iterator[Callable[[int], pool.World]]:
    """worlds(4): four ranks, closed after a file's tests. Each group of a mesh has a thread that keeps waking up."""
    with ExitStack() as stack:
        made: dict[int, pool.World] = {}

        def of(size: int) -> pool.World:
            if size not in made:
                made[size] = stack.enter_context(pool.World(size))
            return made[size]

        yield of


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of eight documents."""
    folder = tmp_path_factory.mktemp("book")
    for i in range(8):
        (folder / f"{i}.txt").write_text("".join(f"{n} times {i} is {n * i}.\n" for n in range(40)))
    return folder


@pytest.fixture(scope="module")
def tokens(book: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The token files of `book`; each token is a byte."""
    return build_tokens((book,), tmp_path_factory.mktemp("tokens"))
