"""A call uses as much of the workspace as Note [Slot bytes] in comm/workspace.py says, and the group has no more."""

import math

import pytest
import torch

import fusedtp
from fusedtp.comm import communicator
from fusedtp.comm.memory import round_up
from fusedtp.ops.shards import TWO_SHOT_BYTES
from tests.engines import ENGINES
from tests.harness import world

W = 3
SHARDS = [(2, 2, 2), (2, 2, 1), (9, 0, 1), (0, 0, 6)]


def call(group, operation: str, engine: str, sizes: tuple[int, ...], width: int, dtype: torch.dtype) -> int:
    """Slot bytes after one call on a gathered or scattered tensor [sum(sizes), width]."""
    rows, k = sum(sizes), 2
    own = sizes[group.rank()]
    x, h = torch.ones(own, width, dtype=dtype), torch.ones(rows, k, dtype=dtype)
    w = torch.ones(width, k, dtype=dtype)
    {
        "all_gather_matmul": lambda: fusedtp.all_gather_matmul(x, [w.t()], group, sizes=sizes, engine=engine),
        "all_gather_wgrad": lambda: fusedtp.all_gather_wgrad(x, [h], group, sizes=sizes, engine=engine),
        "matmul_reduce_scatter": lambda: fusedtp.matmul_reduce_scatter(h, w, group, sizes=sizes, engine=engine),
        "matmul_all_reduce": lambda: fusedtp.matmul_all_reduce(h, w, group, engine=engine),
    }[operation]()
    return communicator(group).workspace.slot_bytes


def stated(operation: str, engine: str, sizes: tuple[int, ...], width: int, itemsize: int) -> int:
    """The table in the note."""
    row, total, most = width * itemsize, sum(sizes), max(sizes)
    if engine == "collective":
        return 0
    if operation in ("all_gather_matmul", "all_gather_wgrad"):
        return (most if engine == "chunked" else total) * row
    if engine == "chunked":
        return total * row
    if operation == "matmul_reduce_scatter":
        return W * most * row
    if total * row <= 128 * 1024:
        return W * total * row
    return math.ceil(W * math.ceil(total / W) * row / 16) * 16 + total * row


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("operation", ["all_gather_matmul", "all_gather_wgrad", "matmul_reduce_scatter"])
def test_a_slot_of_ragged_rows(operation, engine, dtype):
    for sizes in SHARDS:
        want = round_up(stated(operation, engine, sizes, 700, dtype.itemsize))
        arguments = operation, engine, sizes, 700, dtype
        assert world(W).run(call, *arguments, fresh=True) == [want] * W, sizes


@pytest.mark.slow
@pytest.mark.parametrize("rows, width", [(5, 700), (32, 1024), (33, 1024), (65, 1024)])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_slot_of_an_all_reduce_in_one_shot_and_in_two(engine, rows, width):
    sizes = (rows, 0, 0)  # its operands have all rows on every rank
    want = round_up(stated("matmul_all_reduce", engine, sizes, width, 4))
    assert world(W).run(call, "matmul_all_reduce", engine, sizes, width, torch.float32, fresh=True) == [want] * W


def test_a_chunked_all_reduce_in_two_calls_needs_no_more_than_in_one():
    arguments = "matmul_all_reduce", "chunked", (130, 0, 0), 2100
    assert TWO_SHOT_BYTES <= 130 * 2100 * 4
    assert world(W).run(call, *arguments, torch.float32, fresh=True) == [round_up(stated(*arguments, 4))] * W


def several_calls(group) -> int:
    for rows in (60, 7, 30):
        for operation in ("matmul_reduce_scatter", "all_gather_matmul"):
            call(group, operation, "chunked", (rows, 0, 3), 500, torch.float32)
    workspace = communicator(group).workspace
    assert workspace.data is not None and workspace.data.nbytes == 2 * workspace.slot_bytes
    return workspace.slot_bytes


def test_a_group_holds_two_slots_of_its_largest_call():
    want = round_up(stated("matmul_reduce_scatter", "chunked", (60, 0, 3), 500, 4))
    assert world(W).run(several_calls, fresh=True) == [want] * W
