"""Worlds of worker processes for tests: `world(3).run(fn, *args)` runs `fn(group, *args)` on three ranks.

A world starts on first use, is reused by every later test of the session, and ends with the process. `fn` is a
top-level function of an importable module (it is pickled by name); arguments and results are pickled. An argument
wrapped in `PerRank([...])` gives each rank its own value. `run` raises `WorldError` with every rank's traceback;
`outcomes` returns a `Failure` in place of a failing rank's result instead.
"""

from tests.harness.messages import Failure, PerRank, WorldError
from tests.harness.pool import World, close_all, world

__all__ = ["Failure", "PerRank", "World", "WorldError", "close_all", "world"]
