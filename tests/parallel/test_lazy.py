"""Lazy tensors equal plain ones: any chain of the operations that conversions use, and any region of the result."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fusedtp.parallel.pretrained import Lazy, region

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OPERATIONS = ("stack", "cat", "chunk", "transpose", "narrow")


def applied(operation: str, tensors: list[Any], dims: tuple[int, int], numbers: tuple[int, int]) -> list[Any]:
    """The tensors after an operation on all of them together, or on each."""
    first, (dim, other), (a, b) = tensors[0], dims, numbers
    if operation == "stack":
        return [torch.stack(tensors, dim=dim)]
    if operation == "cat":
        return [torch.cat(tensors, dim=dim)]
    if operation == "chunk":
        return list(torch.chunk(first, a + 1, dim=dim))
    if operation == "transpose":
        return [torch.transpose(x, dim0=dim, dim1=other).contiguous() for x in tensors]
    begin, dim = a % first.shape[dim], dim % first.ndim
    return [x.narrow(dim, begin, b % (first.shape[dim] - begin) + 1) for x in tensors if x.shape == first.shape]


@st.composite
def chains(draw: Any) -> tuple[list[Tensor], list[Any]]:
    """The results of a random chain of operations on plain tensors, and on lazy ones."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    count = draw(st.integers(1, 3))
    size = torch.Size(shape).numel()
    kinds = draw(st.lists(st.sampled_from(DTYPES), min_size=count, max_size=count))
    whole = torch.arange(float(count * size)).view(count, *shape)  # exact in all of these
    plain = [x.to(dtype) for x, dtype in zip(whole, kinds, strict=True)]
    unread: list[Any] = [Lazy.of(x) for x in plain]
    for _ in range(draw(st.integers(1, 4))):
        ndim = plain[0].ndim
        dims = draw(st.tuples(*[st.integers(-ndim, ndim - 1)] * 2))
        numbers = draw(st.tuples(st.integers(0, 5), st.integers(0, 5)))
        operation = draw(st.sampled_from(OPERATIONS if len({x.shape for x in plain}) == 1 else OPERATIONS[2:]))
        plain, unread = (applied(operation, each, dims, numbers) for each in (plain, unread))
    return plain, unread


@given(chains(), st.data())
def test_any_region_is_that_of_plain_tensors(made: tuple[list[Tensor], list[Any]], data: st.DataObject) -> None:
    plain, unread = made
    assert [x.shape for x in plain] == [x.shape for x in unread]
    for want, got in zip(plain, unread, strict=True):
        ends = [st.lists(st.tuples(*[st.integers(0, n)] * 2), min_size=1, max_size=3) for n in want.shape]
        ranges = [[range(*sorted(each)) for each in parts] for parts in data.draw(st.tuples(*ends))]
        values = region(got, ranges)
        assert torch.equal(values, region(want, ranges)) and torch.equal(got.full(), want)
        assert values.is_contiguous() and values.dtype == want.dtype
        assert values.untyped_storage().nbytes() == values.nbytes  # a copy, which keeps no file in memory


def test_tensors_of_different_shapes_are_refused() -> None:
    narrow, wide = Lazy.of(torch.ones(2, 3)), Lazy.of(torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"to stack have different shapes \[\(2, 3\), \(2, 4\)\]"):
        torch.stack([narrow, wide])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"to concatenate have incompatible shapes \[\(2, 3\), \(2, 4\)\]"):
        torch.cat([narrow, wide])  # type: ignore[list-item]
