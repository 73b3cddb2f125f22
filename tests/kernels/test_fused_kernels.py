"""Every fused kernel, interpreted by several processes, equals the single-device formula exactly.

Inputs are -1, 0 and 1, and sums stay below 256: exact in bf16 too, so no tolerance is needed.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

OPS = ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "all_gather_wgrad"]
GATHERS = ["all_gather_matmul", "all_gather_gated_matmul"]
SMALL = dict(block_m=16, block_n=16, block_k=16, group=2, send_programs=2, other_programs=3, chunk=2)


@st.composite
def configs(draw) -> dict | None:
    if draw(st.booleans()):
        return None
    number = lambda high: draw(st.integers(1, high))  # noqa: E731
    return {
        **SMALL,
        "group": number(3),
        "send_programs": number(3),
        "other_programs": number(3),
        "chunk": number(20),
        "tma": draw(st.booleans()),
    }


@st.composite
def calls(draw, world: int) -> dict:
    size = st.one_of(st.just(0), st.integers(0, 24))
    return dict(
        op=draw(st.sampled_from([*OPS, "all_gather_gated_matmul"])),
        sizes=tuple(draw(st.lists(size, min_size=world, max_size=world))),
        batch=draw(st.integers(1, 2)),
        k=draw(st.integers(0, 40)),
        widths=tuple(draw(st.lists(st.integers(0, 40), min_size=1, max_size=3))),
        biased=draw(st.sampled_from([(), (0,), (1,), (0, 2)])),
        dtype=draw(st.sampled_from(["float32", "float16", "bfloat16"])),
        layout=draw(st.sampled_from(["contiguous", "transposed", "strided", "offset", "expanded"])),
        keep=draw(st.booleans()),
        in_one=draw(st.booleans()),
        few=draw(st.booleans()),
        config=draw(configs()),
        step=draw(st.sampled_from([1, 8])),
        seed=draw(st.integers(0, 1 << 20)),
        sig=draw(st.integers(-(2**31), 2**31 - 1)),
        copied=tuple(r for r in range(world) if draw(st.booleans())),
        products=draw(st.integers(1, 3)),
    )


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_equals_the_formula(worlds, data):
    """Any shapes, dtypes, layouts and tilings; consecutive calls of mixed operations share one workspace."""
    world = data.draw(st.integers(1, 4))
    worlds.check(world, *data.draw(st.lists(calls(world), min_size=1, max_size=4)))


@pytest.mark.slow
@pytest.mark.parametrize("op", [*OPS, "all_gather_gated_matmul"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_several_tiles_and_tails_on_every_axis(worlds, op, dtype):
    worlds.check(2, dict(op=op, dtype=dtype, sizes=(40, 33), k=37, widths=(40, 17), biased=(0,), config=SMALL))


@pytest.mark.slow
@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "matmul_all_reduce"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_few_rows(worlds, op, dtype):
    """Rows of all ranks multiplied in one tile: empty ranks, no rows at all, several flags, several tiles per flag,
    several products, tails.
    """
    call = dict(op=op, dtype=dtype, in_one=False, few=True, k=37, widths=(70,), biased=(0,))
    programs = dict(send_programs=3, other_programs=0)
    worlds.check(
        3,
        call | dict(sizes=(40, 0, 33), config=dict(SMALL, **programs)),
        call | dict(sizes=(1, 0, 0), config=dict(SMALL, chunk=2)),
        call | dict(sizes=(0, 0, 0)),
        call | dict(sizes=(5, 59, 64), flags=4, products=3, step=8),
        call | dict(sizes=(0, 17, 3), config=dict(SMALL, chunk=3, **programs), layout="strided"),
    )


@pytest.mark.slow
@pytest.mark.parametrize("op", GATHERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_few_rows_come_together(worlds, op, dtype):
    """Several tiles of rows; empty ranks, no rows at all; rows in runs; K = 0; x kept or not."""
    call = dict(op=op, dtype=dtype, few=True, k=37, widths=(70, 17, 5), biased=(0, 1))
    programs = dict(send_programs=3, other_programs=0)
    worlds.check(
        3,
        call | dict(sizes=(40, 0, 33), config=dict(SMALL, **programs), keep=True),
        call | dict(sizes=(1, 0, 0), config=SMALL),
        call | dict(sizes=(0, 0, 0), keep=True),
        call | dict(sizes=(5, 59, 64), keep=True, layout="transposed"),
        call | dict(sizes=(0, 17, 3), batch=3, config=dict(SMALL, **programs), keep=True, layout="strided"),
        call | dict(sizes=(2, 3, 4), k=0, keep=True),
        call | dict(sizes=(7, 1, 4), widths=(0, 0), layout="offset", keep=True),
    )


TMA = dict(SMALL, tma=True)


@pytest.mark.parametrize("op", OPS)
def test_what_no_peer_writes_comes_by_tma(worlds, op):
    """Tails of rows, columns and K; an empty rank; weights and their gradients each by a descriptor."""
    call = dict(op=op, dtype="bfloat16", k=40, step=8, config=TMA, descriptors=2, biased=(0,))
    ragged = dict(call, sizes=(32, 0), widths=(20, 17), in_one=False)
    worlds.check(2, ragged, dict(call, sizes=(16, 16), widths=(8, 33), in_one=True, dtype="float16"))


@pytest.mark.parametrize("weights", [1, 4, 5])
def test_a_kernel_takes_four_descriptors(worlds, weights):
    sizes, widths = (16, 0), (9, 17, 8, 5, 3)[:weights]
    for op in ("all_gather_matmul", "all_gather_wgrad"):
        call = dict(op=op, dtype="bfloat16", k=16, sizes=sizes, widths=widths, config=TMA)
        worlds.check(2, dict(call, descriptors=weights % 5))


@pytest.mark.slow
@pytest.mark.parametrize("products", range(1, 5))
def test_a_gradient_s_products_are_added_where_their_operands_lie(worlds, products):
    """By TMA, by pointers, and with rows in runs; parts of K that no tile divides; weights with rows along K."""
    step = 8 * products
    call = dict(op="matmul_reduce_scatter", k=2 * step, step=step, sizes=(18, 5), products=products)
    by_tma = dict(call, dtype="bfloat16", config=TMA, descriptors=2 * products)
    runs = dict(by_tma, batch=2, descriptors=products)
    worlds.check(2, by_tma, dict(call, config=SMALL, k=2 * step - 7, step=1, biased=(0,)), runs)


def test_a_gather_takes_the_weights_of_a_gradient_where_they_lie(worlds):
    """One rank only: with other weights the widths differ, and TMA does not take such rows."""
    call = dict(op="all_gather_matmul", dtype="bfloat16", k=24, sizes=(20,), layout="transposed", config=TMA)
    worlds.check(1, *[dict(call, widths=(8, 24, 16)[:count], descriptors=count) for count in (1, 2, 3)])
    worlds.check(1, dict(call, widths=(8, 12), descriptors=0))


def test_wide_tiles_end_half_by_half(worlds):
    call = dict(op="all_gather_matmul", dtype="bfloat16", k=16, sizes=(18, 3), widths=(300, 20), biased=(0,))
    worlds.check(2, dict(call, config=dict(TMA, block_n=256), descriptors=2, keep=True))


@pytest.mark.parametrize("op", OPS)
def test_what_tma_cannot_take_comes_by_pointers(worlds, op):
    none = dict(op=op, sizes=(9, 5), config=TMA, k=24, step=8, widths=(8,), dtype="bfloat16", descriptors=0)
    full = dict(none, dtype="float32")  # the matrix units do not multiply it
    odd = dict(none, k=23)  # or, in wgrad, rows of a shard that BLOCK_K does not divide
    runs = dict(none, batch=2, descriptors=0 if "wgrad" in op else 1)  # runs of rows: x by pointers
    rows_of_k = dict(none, layout="transposed", descriptors=int("gather" not in op))  # a weight laid out as [K, N]
    if op == "all_gather_matmul":
        rows_of_k["widths"] = (9,)
    calls = [full, odd, rows_of_k, dict(none, layout="offset"), runs]
    worlds.check(2, *(calls[:-1] if op == "matmul_all_reduce" else calls))


@pytest.mark.parametrize("op", [*OPS, "all_gather_gated_matmul"])
def test_rows_of_a_batch_interleave(worlds, op):
    worlds.check(2, dict(op=op, batch=3, sizes=(7, 4), keep=True, config=SMALL))


@pytest.mark.parametrize("op", [*OPS, "all_gather_gated_matmul"])
def test_one_program_a_stage_is_enough(worlds, op):
    one = dict(SMALL, send_programs=1, other_programs=1)
    worlds.check(3, dict(op=op, sizes=(20, 0, 17), in_one=False, config=one))


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_fewer_flags_than_tiles(worlds, op):
    """One flag then covers several rows or tiles, all done by one program."""
    worlds.check(2, *[dict(op=op, sizes=(130, 70), widths=(70,), flags=8, in_one=i < 1) for i in range(2)])


@pytest.mark.slow
@pytest.mark.parametrize("op", [*GATHERS, "all_gather_wgrad"])
def test_copies_bring_what_programs_would(worlds, op):
    """Copies on all ranks, on one, on none; in pieces of several chunks and of one row; before and after other
    operations.
    """
    call = dict(op=op, sizes=(40, 0, 33), config=dict(SMALL, chunk=3))
    few = dict(op=op, sizes=(1, 7, 2), batch=2)
    between = dict(op="matmul_reduce_scatter", sizes=(9, 4, 0))
    every, one = dict(copied=(0, 1, 2)), dict(copied=(1,))
    worlds.check(3, call | every, few | one, between, few | every, few, call | one)


@pytest.mark.slow
def test_a_hundred_mixed_calls_on_one_workspace(worlds):
    """Shapes, dtypes, transports and empty shards change from call to call; ranks take turns being late."""
    mixed = []
    for i in range(100):
        sizes = tuple((7 * i + 5 * r) % 19 if (i + r) % 3 else 0 for r in range(3))
        dtype = ["float32", "bfloat16", "float16"][i % 3]
        mixed.append(
            dict(
                op=OPS[i % 4],
                sizes=sizes,
                k=8 + i % 20,
                widths=(i % 23,),
                dtype=dtype,
                seed=i,
                in_one=i % 8 < 4,
                copied=[(), (0, 1, 2), (1,)][i % 3],
            )
        )
    worlds.check(3, *mixed)


def test_the_epoch_wraps(worlds):
    worlds.make(2)
    worlds.ask("run", 2, [dict(epoch=2**31 - 4)])
    worlds.check(2, *[dict(op=OPS[i % 4], sizes=(9, 4)) for i in range(8)])
