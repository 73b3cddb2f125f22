"""Counts what CI's draws of each law cover. No calls run between ranks.

    python -m tests.properties.coverage [PATH ...]     test files or folders; default: tests/properties

The first table lists, for each law, how many cases it draws and how many have each trait. The second one lists, for
each engine, how many cases that can reveal an error have it: at least two ranks with rows and two features. `-` means
none: add rare pairs of tests/properties to covering.py. Laws without a world are counted from the arguments they draw.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

os.environ["HYPOTHESIS_PROFILE"] = "ci"

import pytest
import torch
from hypothesis.errors import HypothesisException
from rich.box import ASCII
from rich.console import Console
from rich.markup import escape
from rich.table import Table

TRAITS = ("batch>1", "ragged", "empty", "bias", "float32", "float64", "float16", "bfloat16")


def cases_in(value: Any) -> Iterator[Any]:
    """Dataclasses with a dtype, in nested dataclasses and sequences."""
    if isinstance(value, list | tuple):
        for each in value:
            yield from cases_in(each)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        if isinstance(getattr(value, "dtype", None), torch.dtype):
            yield value
        else:
            for field in dataclasses.fields(value):
                yield from cases_in(getattr(value, field.name))


def traits(case: Any) -> set[str]:
    """The traits of a case of any law; `sizes` are the rows of ranks, or of experts if there is one rank."""
    sizes = getattr(case, "sizes", ())
    has = {
        "batch>1": (getattr(case, "batch", None) or 1) > 1,
        "ragged": len(set(sizes)) > 1,
        "empty": 0 in sizes,
        "bias": _any(getattr(case, "biased", False)),
        str(case.dtype).removeprefix("torch."): True,
    }
    return {name for name, there in has.items() if there}


def _any(flags: Any) -> bool:
    return any(flags) if isinstance(flags, tuple) else bool(flags)


def can_show(case: Any) -> bool:
    """Whether two ranks have rows of two or more features, and every rank's weight has an entry."""
    sizes = getattr(case, "sizes", None)
    features = next((getattr(case, name) for name in ("features", "width", "k") if hasattr(case, name)), 2)
    rows = sizes is None or sum(n > 0 for n in sizes) >= 2
    return rows and features >= 2 and all(sum(widths) > 0 for widths in getattr(case, "local", ()))


class Recorder:
    """A pytest plugin: laws draw as in CI, and worlds record their arguments instead of running them."""

    def __init__(self) -> None:
        self.laws: dict[str, list[Any]] = {}
        self.now: list[Any] = []

    def world(self, size: int, *_: Any, **__: Any) -> Any:
        run = lambda function, *arguments, **options: self.note(arguments)  # noqa: E731
        return mock.Mock(run=run, outcomes=run, size=size)

    def note(self, value: Any) -> list[Any]:
        self.now += cases_in(value)
        return []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if hasattr(getattr(item, "obj", None), "hypothesis")]
        for item in items:
            if hasattr(item.module, "world"):
                item.module.world = self.world
            if hasattr(item.module, "VirtualWorld"):
                item.module.VirtualWorld = self.world

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> None:
        handle = pyfuncitem.obj.hypothesis
        cases = self.laws.setdefault(pyfuncitem.nodeid, [])
        law = getattr(handle.inner_test, "__wrapped__", handle.inner_test)

        @functools.wraps(law)  # its source code seeds the draws
        def drawn(*arguments: Any, **named: Any) -> None:
            self.now = []
            try:
                law(*arguments, **named)
            except HypothesisException:
                raise
            except Exception:
                pass  # the law looks at what ranks answered
            cases.extend(self.now or cases_in([*arguments, *named.values()]))

        handle.inner_test = drawn


def engine_of(law: str, case: Any) -> str:
    """The case's own engine, or else the one in the law's name."""
    return getattr(case, "engine", None) or next((e for e in ("triton", "chunked") if e in law), "?")


def by_law(laws: dict[str, list[Any]]) -> Table:
    table = Table("law", "cases", "can show", "ranks", "engines", *TRAITS, box=ASCII, title="Cases of each law")
    for law, cases in laws.items():
        counts = Counter(name for case in cases for name in traits(case))
        ranks = sorted({len(case.sizes) for case in cases if hasattr(case, "sizes")})
        engines = sorted({engine_of(law, case) for case in cases})
        shown = sum(can_show(case) for case in cases)
        said = [f"{ranks[0]}-{ranks[-1]}" if ranks else "", ", ".join(engines)]
        table.add_row(_short(law), str(len(cases)), str(shown), *said, *(str(counts[name] or "-") for name in TRAITS))
    return table


def by_engine(laws: dict[str, list[Any]]) -> Table:
    """The traits by engine, counted over cases that can reveal an error."""
    table = Table("law", "operation", "engine", *TRAITS, box=ASCII, title="Cases that can show an error")
    for law, cases in laws.items():
        pairs: dict[tuple[str, str], Counter[str]] = {}
        for case in filter(can_show, cases):
            key = (getattr(case, "operation", ""), engine_of(law, case))
            pairs.setdefault(key, Counter()).update(traits(case))
        for key in sorted(pairs):
            table.add_row(_short(law), *key, *(str(pairs[key][name] or "-") for name in TRAITS))
    return table


def _short(law: str) -> str:
    file, _, name = law.partition("::")
    return escape(f"{file.removeprefix('tests/')}\n{name}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.properties.coverage", description=__doc__.split("\n")[0])
    parser.add_argument("paths", nargs="*", default=["tests/properties"], metavar="PATH")
    asked = parser.parse_args(arguments)
    recorder = Recorder()
    pytest.main([*asked.paths, "-q", "-p", "no:cacheprovider", "--no-summary"], plugins=[recorder])
    laws = {law: cases for law, cases in recorder.laws.items() if cases}
    console = Console(width=max(160, Console().width))
    console.print(by_law(laws), by_engine(laws), sep="\n")
    empty = sorted(set(recorder.laws) - set(laws))
    console.print("Laws without cases: " + (", ".join(map(_short, empty)).replace("\n", "::") or "none"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
