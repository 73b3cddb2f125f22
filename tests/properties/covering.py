"""Cases that every law of an operation runs in addition to the drawn ones, so that no rare pair depends on luck.

In CI's 200 draws of a law, a pair such as (collective, batch > 1) comes up ten times, and a case that reveals anything
needs more at once: two ranks with rows, two features, a weight on every rank. Each operation has

    sizes        batch   dtype   bias
    all equal    3       fp32    yes     `sizes` is not passed
    ragged       2       bf16    yes
    ragged       -       fp16    no
    one empty    -       fp64    yes     fp32 with engine "triton", which has no fp64
    one empty    2       fp32    no      four ranks

`python -m tests.properties.coverage` shows what the draws cover; test_covering.py checks that these cases do their job.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import example

from tests.properties.cases import BITS, Case

ENGINES = ("collective", "chunked", "triton", "auto")
OPERATIONS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "all_gather_wgrad")


@dataclass(frozen=True)
class _Row:
    """A row of the table above. An all-reduce has no rows per rank: it splits the same number of rows its own way."""

    sizes: tuple[int, ...]
    all_reduce: tuple[int, ...]
    batch: int | None
    dtype: torch.dtype
    biased: bool
    tell_sizes: bool = True


_ROWS = (
    _Row((2, 2), (2, 2), 3, torch.float32, True, tell_sizes=False),
    _Row((3, 1, 2), (2, 2, 1), 2, torch.bfloat16, True),
    _Row((4, 1), (3, 2), None, torch.float16, False),
    _Row((3, 0, 2), (2, 2, 0), None, torch.float64, True),
    _Row((2, 0, 3, 1), (2, 2, 1, 0), 2, torch.float32, False),
)


def _case(operation: str, row: _Row, seed: int) -> Case:
    gathers, reduces = operation.startswith("all_gather"), operation == "matmul_all_reduce"
    widths = (3, 2) if gathers else (5,)
    return Case(
        operation=operation,
        engine="auto",
        dtype=row.dtype,
        sizes=row.all_reduce if reduces else row.sizes,
        features=7,
        local=(widths,) * len(row.sizes),
        batch=row.batch,
        tell_sizes=row.tell_sizes,
        biased=(row.biased, False)[: len(widths)],
        seed=seed,
    )


COVERING = tuple(_case(operation, row, i) for operation in OPERATIONS for i, row in enumerate(_ROWS))


def on(case: Case, engine: str) -> Case:
    """The case with this engine; kernels have no fp64 and use fp32 instead."""
    narrow = engine in ("triton", "multimem") and case.dtype == torch.float64
    return replace(case, engine=engine, dtype=torch.float32 if narrow else case.dtype)


def covered(*cases: Case, **others: Any) -> Callable[[Any], Any]:
    """Decorate a law: run `case` with each of these, and the other arguments as given."""

    def decorate(law: Any) -> Any:
        for case in reversed(cases):
            law = example(case=case, **others)(law)
        law.covering = [{"case": case, **others} for case in cases]
        return law

    return decorate


def telling(case: Case) -> bool:
    """Whether an error would show: two ranks with rows, two features, a weight on every rank."""
    return sum(n > 0 for n in case.sizes) >= 2 and case.features >= 2 and all(sum(w) > 0 for w in case.local)


def traits(case: Case) -> set[str]:
    """The traits of a case, of those that every law must cover; none if the case cannot reveal an error."""
    if not telling(case):
        return set()
    has = {
        "batch": case.batch is not None and case.batch > 1,
        "ragged": len(set(case.sizes)) > 1,
        "empty": 0 in case.sizes,
        "bias": any(case.biased) and case.operation != "all_gather_wgrad",
        str(case.dtype).removeprefix("torch."): True,
    }
    return {name for name, there in has.items() if there}


def required(operation: str, engine: str) -> set[str]:
    """The traits that a law's explicit cases must cover together."""
    dtypes = {str(dtype).removeprefix("torch.") for dtype in BITS if (engine, dtype) != ("triton", torch.float64)}
    return {"batch", "ragged", "empty", *dtypes} | ({"bias"} if operation != "all_gather_wgrad" else set())
