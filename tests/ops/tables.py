"""Test tables: drawn, written, and installed where the library looks for them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import strategies as st

from fusedtp.bench import tables
from fusedtp.ops import measured
from fusedtp.ops.launch import tuned
from fusedtp.ops.launch.config import HOST, Machine

H200 = Machine("cuda", 132, 227 * 1024, name="nvidia-h200")
FILE = measured.file_of(H200.name)
TILE = dict(block_m=64, block_n=32, block_k=32, num_warps=4, num_stages=3)


@contextmanager
def tables_in(folder: Path) -> Iterator[None]:
    """The library reads its tables from `folder`; cached tables are dropped before and after."""
    with mock.patch.dict(os.environ, {measured.ENVIRONMENT: str(folder)}):
        tuned.forget()
        try:
            yield
        finally:
            tuned.forget()


@contextmanager
def holding(kernel: str, values: Mapping[str, int]) -> Iterator[None]:
    """`tuned.hold` within a block."""
    tuned.hold(kernel, values)
    try:
        yield
    finally:
        tuned.hold(kernel, None)


def entry(kernel: str, config: dict[str, int], dtype: str = "float32", **at: int) -> dict[str, Any]:
    """One entry of a table of configurations."""
    return {"kernel": kernel, "dtype": dtype, "class": {"programs": H200.programs} | at, "config": config}


def write_configurations(folder: Path, entries: list[dict[str, Any]], machine: str = "nvidia-h200") -> Path:
    """Write a configuration table for an H200, or for another machine under the same name."""
    path = folder / FILE
    tables.write(path, machine, tuned.table_name(), {}, entries, {})
    return path


def interpreters(folder: Path, entries: list[dict[str, Any]]) -> None:
    """Write a configuration table for the interpreter."""
    tables.write(folder / measured.file_of(HOST.name), HOST.name, tuned.table_name(), {}, entries, {})


@st.composite
def configs(draw: st.DrawFn, kernel: str) -> dict[str, int]:
    """Draw values that an entry of this kernel may have on an H200."""
    powers = lambda low, high: st.sampled_from([n for n in (1, 2, 4, 8, 16, 32, 64, 128) if low <= n <= high])  # noqa: E731
    known = dict(
        block_m=powers(16, 128), block_n=powers(16, 128), block_k=powers(16, 64), num_warps=powers(4, 8),
        num_stages=st.integers(1, 3), group=st.integers(1, 9), part=powers(32, 128), chunk=st.integers(1, 200),
        max_registers=st.sampled_from([0, 128, 255]), send_programs=st.integers(1, 200),
        other_programs=st.integers(1, 200), tma=st.just(0), specialized=st.just(0), halves=st.integers(0, 1),
    )  # fmt: skip
    sets = tuned.KERNELS[kernel].sets
    return {
        name: draw(known[name]) for name in sets if name in tuned.NEEDED or name in tuned.SPLIT or draw(st.booleans())
    }


@st.composite
def entries(draw: st.DrawFn, most: int = 6, extent: int = 7) -> list[dict[str, Any]]:
    """Draw entries of different classes, with extents up to 2 ** extent."""
    made = {}
    for _ in range(draw(st.integers(0, most))):
        kernel = draw(st.sampled_from(list(tuned.KERNELS)))
        at = {axis: 1 << draw(st.integers(0, extent)) for axis in tuned.KERNELS[kernel].axes}
        at |= {"programs": H200.programs} | {
            "world": draw(st.integers(2, 4)),
            "even": draw(st.integers(0, 1)),
        }
        at = {axis: n for axis, n in at.items() if axis in tuned.KERNELS[kernel].axes}
        one = entry(kernel, draw(configs(kernel)), draw(st.sampled_from(["float32", "bfloat16"])), **at)
        made[tuned.key_of(one)] = one
    return list(made.values())
