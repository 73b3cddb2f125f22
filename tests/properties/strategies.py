"""Hypothesis strategies for cases; only the driver imports this."""

import torch
from hypothesis import strategies as st

from fusedtp.ops.rows import split
from tests.properties.cases import BITS, LAYOUTS, Case

OPERATIONS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "all_gather_wgrad")


@st.composite
def cases(
    draw,
    *,
    engine: str,
    operation: str | None = None,
    dtypes: tuple = tuple(BITS),
    world_sizes: tuple[int, ...] = (1, 2, 3, 4),
    rows: int = 24,
    width: int = 40,
    features: int = 200,
) -> Case:
    """Cases with at most `rows` rows per rank, weights up to `width` wide, and up to `features` features; any may be 0.

    For a dtype with few bits, no more than it can sum exactly: Note [Exact inputs] in cases.py.
    """
    dtype = draw(st.sampled_from([d for d in dtypes if (engine, d) != ("triton", torch.float64)]))
    operation = draw(st.sampled_from(OPERATIONS)) if operation is None else operation
    size = draw(st.sampled_from(world_sizes))
    terms = 2 ** BITS[dtype] - 1
    rows, features = min(rows, terms // size), min(features, terms)
    gathers, scatters = operation.startswith("all_gather"), operation != "matmul_all_reduce"
    differentiable = operation != "all_gather_wgrad"
    batch = draw(st.sampled_from([None, None, 1, 2, 3]))
    most = rows if batch is None else max(1, rows // batch)
    tell = draw(st.booleans()) or not scatters
    a_count = st.one_of(st.integers(0, 3), st.integers(0, most))
    if not scatters:
        sizes = split(draw(st.integers(0, most * size)), size)
    elif tell:
        sizes = tuple(draw(a_count) for _ in range(size))
    elif gathers:
        sizes = (draw(a_count),) * size
    else:
        sizes = split(draw(st.integers(0, most * size)), size)
    weights = draw(st.integers(1, 3)) if gathers else 1
    widest = min(width, 240 // (size * weights))
    a_width = st.one_of(st.integers(0, widest), st.sampled_from([1, 16, 32]).map(lambda n: min(n, widest)))
    local = tuple(tuple(draw(a_width) for _ in range(weights)) for _ in range(size))
    biased = tuple(draw(st.booleans()) for _ in range(weights)) if draw(st.booleans()) else (False,) * weights
    layouts = {name: draw(st.sampled_from(LAYOUTS)) for name in "xwg"} if draw(st.booleans()) else {}
    return Case(
        operation=operation,
        engine=engine,
        dtype=dtype,
        sizes=sizes,
        features=draw(st.one_of(st.integers(0, 5), st.integers(1, features))),
        local=local,
        batch=batch,
        tell_sizes=tell,
        biased=biased,
        unused=draw(st.sampled_from([(), (), (weights - 1,)])) if weights > 1 and differentiable else (),
        needs=frozenset(draw(st.sampled_from(["xwb", "xwb", "xwb", "x", "w", "wb", "xb", "b", ""]))),
        layouts=layouts,
        seed=draw(st.integers(0, 2**32)),
    )
