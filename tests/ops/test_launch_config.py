"""The launch configurations chosen for GPUs that are not present."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedtp.checks.lint import _view, machine_of
from fusedtp.comm.device_view import MOST_PARTS
from fusedtp.comm.launching import Launch
from fusedtp.lint import TARGETS
from fusedtp.ops.all_gather_matmul import plan_all_gather_matmul
from fusedtp.ops.launch.config import HOST, VECTOR, Config, tiles
from fusedtp.ops.launch.operands import described, even_columns, even_depth
from fusedtp.ops.launch.tuned import REGISTERS
from fusedtp.ops.matmul_all_reduce import plan_few_rows, plan_one_shot, plan_two_shot
from fusedtp.ops.matmul_reduce_scatter import (
    part_args,
    plan_few_rows_reduce_scatter,
    plan_matmul_reduce_scatter,
    window_args,
)
from fusedtp.ops.moe.combine import part_columns, returning
from fusedtp.ops.moe.dispatch import pulling
from fusedtp.ops.rows import Rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_cuda_is_told_of_registers(dtype):
    """Other backends and the interpreter reject the option."""
    for machine in (HOST, *(machine_of(target) for target in TARGETS.values())):
        options = [
            Launch(None, 1, {}, tiles(machine, dtype, rows, 512, even)).options
            for rows in (1, 64, 512)
            for even in (True, False)
        ]
        assert all(("maxnreg" in each) == (machine.clock == "cuda") for each in options), machine


@pytest.mark.parametrize("target", list(TARGETS))
def test_a_large_two_shot_all_reduce_takes_the_tiles_of_the_whole_product(target):
    """A rank multiplies the rows of all owners, so the tiles of 8192 rows fill the machine, not those of its 1024."""
    machine, world_size, rows, n = machine_of(TARGETS[target]), 8, 8192, 4096
    x, weight = (torch.empty(extent, 16, dtype=torch.bfloat16, device="meta") for extent in (rows, n))
    launch, _y = plan_two_shot(_view(world_size), 1, world_size, x, weight, None, 12345, None, machine)
    whole = tiles(machine, torch.bfloat16, rows, n)
    tile = launch.config.block_m, launch.config.block_n, launch.config.num_stages
    assert tile == (whole.block_m, whole.block_n, whole.num_stages)
    if target in ("sm_90", "sm_100"):
        assert tile == (128, 256, 4)


@pytest.mark.parametrize("programs", [4, 16, 132])
def test_a_grid_counts_on_one_program_a_multiprocessor(programs):
    """The lint's occupancy rule requires no more. On a GPU shared by ranks, all programs of a rank fit its share."""
    rows, w, n = Rows((1024,) * 8), 8, 4096
    x, full = (torch.empty(extent, 64, dtype=torch.bfloat16, device="meta") for extent in (1024, 8192))
    weight, view = torch.empty(n, 64, dtype=torch.bfloat16, device="meta"), _view(w)
    machine = replace(machine_of(TARGETS["sm_90"]), programs=programs)
    for shared in (False, True):
        machine = replace(machine, shared_gpu=shared)
        end = (12345, None, machine)
        gathered = plan_all_gather_matmul(view, 1, w, x, [weight], [None], rows, 12345, False, None, machine)[0]
        assert gathered.programs == programs
        for launch in (
            plan_matmul_reduce_scatter(view, 1, w, [full], [weight], None, rows, *end)[0],
            plan_few_rows_reduce_scatter(view, 1, w, [full[:128]], [weight], None, Rows((16,) * w), *end)[0],
            plan_few_rows(view, 1, w, x[:100], weight, None, *end)[0],
            plan_one_shot(view, 1, w, x[:16], weight, None, *end)[0],
            plan_two_shot(view, 1, w, full, weight, None, *end)[0],
        ):
            resident = launch.programs if shared else launch.config.send_programs
            assert resident <= programs, launch.kernel
            if "window" in launch.args:  # each program multiplies, sends and sums
                assert launch.programs == programs, launch.kernel


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 9), st.integers(1, 6), st.integers(1, 40))
def test_all_programs_have_a_chunk_in_a_round_and_all_ranks_a_part_of_a_last_sum(rows, n, world_size, chunk, programs):
    config = Config(16, 16, 16, chunk=chunk, send_programs=programs, other_programs=0)
    args = window_args(config, rows, n, world_size)
    assert args["group"] == chunk and args["window"] >= 1 and args["behind"] % args["window"] == 0
    assert args["window"] * world_size <= max(programs, world_size)
    parts, height = part_args(config, rows, world_size).values()
    assert parts == min(world_size, rows, 16)
    assert height * parts >= min(rows, 16) > height * parts - parts  # the rows of a tile that exist


@given(
    st.integers(1, 4000), st.integers(1, 4000), st.integers(1, 9), st.integers(2, 900), st.sampled_from(sorted(TARGETS))
)
@settings(deadline=None)
def test_chunks_of_a_two_shot_all_reduce_have_a_flag_each_for_partials_and_for_sums(rows, n, world_size, flags, target):
    x, weight = (torch.empty(extent, 16, dtype=torch.bfloat16, device="meta") for extent in (rows, n))
    view = SimpleNamespace(**{**vars(_view(world_size)), "flags_per_source": flags})
    launch, _y = plan_two_shot(view, 0, world_size, x, weight, None, 12345, None, machine_of(TARGETS[target]))
    owned, config = -(-rows // world_size), launch.config
    chunks = -(-(-(-owned // config.block_m) * -(-n // config.block_n)) // config.chunk)
    assert launch.args["flags"] >= chunks and launch.args["flags"] + chunks <= flags


@pytest.mark.parametrize("transposed", [False, True])
def test_a_descriptor_is_what_its_constructor_makes(transposed):
    """The constructor accepts every matrix that `describable` accepts."""
    descriptors = pytest.importorskip("triton.tools.tensor_descriptor")
    full = torch.empty(40, 64, dtype=torch.bfloat16)
    x = full[:, 8:32] if not transposed else full.t().contiguous().t()[:, :24].t()
    made, want = (
        described(x, [16, 8]),
        descriptors.TensorDescriptor(x, list(x.shape), list(x.stride()), [16, 8]),
    )
    assert isinstance(made, descriptors.TensorDescriptor) and made.base is x
    for each in fields(want):
        assert each.name == "base" or getattr(made, each.name) == getattr(want, each.name), each.name


def test_columns_are_evened_with_zeros_and_only_where_they_must_be():
    for width in (1, 15, 16, 17, 32):
        dy = torch.randn(3, width)
        made = even_columns(dy)
        assert made.shape == (3, -(-width // 16) * 16) and made.stride(0) % 16 == 0
        assert torch.equal(made[:, :width], dy) and not made[:, width:].any()
        assert (made is dy) == (width % 16 == 0)


@given(st.integers(0, 9000), st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]))
def test_an_exchange_fits_its_part_of_a_gpu(width, dtype):
    for target in TARGETS.values():
        for programs in (2, 16, 132):
            x = torch.empty(3, width, dtype=dtype, device="meta")
            machine = replace(machine_of(target), programs=programs)
            for config in (pulling(machine, x), returning(machine, x)):
                assert config.send_programs + config.other_programs == programs
                assert 32 * config.num_warps * config.max_registers <= REGISTERS


@given(st.integers(0, 70000), st.sampled_from([1, 64, 256, 1024]))
def test_parts_of_a_row_are_whole_blocks_and_few(width, block):
    columns = part_columns(width, block)
    assert columns % block == 0 and columns > 0 and -(-width // columns) <= MOST_PARTS


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 70), st.booleans(), st.booleans())
def test_operands_of_a_sum_over_ranks_end_at_whole_vectors(t, n, k, x_across, w_across):
    """Unless neither has contiguous rows; the product is the same."""

    def drawn(rows: int, across: bool) -> torch.Tensor:
        x = (torch.arange(rows * k).view(rows, k) % 7 - 3.0).bfloat16()
        return x.t().contiguous().t() if across else x

    x, w = drawn(t, x_across), drawn(n, w_across)
    (wide_x,), (wide_w,) = even_depth([x], [w])
    assert torch.equal(wide_x @ wide_w.t(), x @ w.t())
    if k % 8 and 1 in (x.stride(1), w.stride(1)):
        assert wide_x.shape[1] == wide_w.shape[1] == -(-k // VECTOR) * VECTOR
        assert w.stride(1) == 1 or n < 2 or k < 2 or wide_w.stride(0) == 1
    else:
        assert wide_x is x and wide_w is w
