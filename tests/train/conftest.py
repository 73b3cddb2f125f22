"""Worlds that end with a file's tests."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.harness import pool


@pytest.fixture(scope="module")
def worlds() -> Iterator[Callable[[int], pool.World]]:
    """worlds(4): four ranks. Runs make meshes, and each of their groups has a thread that wakes up while it lives."""
    with ExitStack() as stack:
        made: dict[int, pool.World] = {}

        def of(size: int) -> pool.World:
            if size not in made:
                made[size] = stack.enter_context(pool.World(size))
            return made[size]

        yield of
