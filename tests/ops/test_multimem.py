"""The engine "multimem": its kernel without a switch, when it may be used, and what other operations then run.

tests/sim/test_fused.py tests the compiled kernel with a simulated switch.
"""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings

import fusedtp
from fusedtp.comm import SignatureMismatch, communicator
from fusedtp.ops import engines
from fusedtp.ops.launch.config import Machine
from fusedtp.ops.matmul_all_reduce import SUM_ROWS, multimem_config, multimem_slot_bytes, prepare_multimem, sum_rows
from fusedtp.ops.moe import plan as routing
from fusedtp.ops.rows import Rows
from tests.harness import world
from tests.ops.test_engines import group, machine
from tests.properties.cases import Case
from tests.properties.covering import COVERING, covered, on
from tests.properties.laws import errors, exact, repeated, with_nan_and_inf
from tests.properties.strategies import cases
from tests.properties.test_numerics import a_case, together

NARROW = (torch.float32, torch.float16, torch.bfloat16)
H100 = Machine("cuda", 132, 227 << 10, capability=90)


@pytest.mark.slow
@covered(*(on(case, "multimem") for case in COVERING if case.operation == "matmul_all_reduce"))
@settings(max_examples=25)
@given(
    case=cases(
        engine="multimem", operation="matmul_all_reduce", dtypes=NARROW, world_sizes=(2, 3, 4), rows=5, width=10,
        features=30,
    )
)  # fmt: skip
def test_equals_the_formula(case):
    pytest.importorskip("triton")
    world(case.world_size).run(exact, case)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 2), (torch.bfloat16, 3), (torch.float16, 4)], ids=str)
def test_several_tiles_and_steps_equal_the_formula(dtype, size):
    """Tiles of 64 rows and columns, with tails; enough of them that programs sum and copy between their products."""
    pytest.importorskip("triton")
    case = Case("matmul_all_reduce", "multimem", dtype, (70,) * size, 140, ((70,),) * size, biased=(True,))
    world(size).run(exact, case, timeout=200)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_random_inputs_have_errors_within_their_bounds(dtype):
    pytest.importorskip("triton")
    case = a_case("matmul_all_reduce", "multimem", dtype, 3)
    for name, (ratio, worst) in together(world(3).run(errors, case)).items():
        assert worst <= 1 and (dtype == torch.float32 or ratio <= 2), f"{name}: {worst}, {ratio}"
    world(3).run(repeated, case, 3, 0.01)


@settings(max_examples=10)
@given(
    case=cases(
        engine="multimem", operation="matmul_all_reduce", dtypes=NARROW, world_sizes=(2, 3), rows=8, width=12,
        features=20,
    )
)  # fmt: skip
def test_nan_and_inf_come_out_as_plain_torch_gives_them(case):
    pytest.importorskip("triton")
    world(case.world_size).run(with_nan_and_inf, case, 0.03)


def rounded(group) -> tuple[bool, int]:
    """Whether bits are those of partials rounded to bf16, the first with the bias, and of their sum rounded once."""
    rank, w, n = group.rank(), group.size(), 37
    x = (torch.arange(5)[:, None] + 250).bfloat16()  # 8 significant bits
    weights = [(torch.arange(n)[:, None] + r + 1).bfloat16() for r in range(w)]
    bias = (torch.arange(n) * 0.75).bfloat16()
    got = fusedtp.matmul_all_reduce(x, weights[rank], group, bias=bias, engine="multimem")
    partials = [x.float() @ weight.float().T for weight in weights]
    partials[0] += bias.float()
    want = sum(partial.bfloat16().float() for partial in partials).bfloat16()
    calls = communicator(group).engine_calls["matmul_all_reduce", "multimem"]
    return torch.equal(got, want), calls


def test_the_bias_is_in_the_partial_of_the_first_rank():
    pytest.importorskip("triton")
    for right, calls in world(3).run(rounded, fresh=True):
        assert right and calls == 1


def others(group) -> dict[str, set[str]]:
    """The engines used by calls that ask for multimem."""
    x, w = torch.ones(4, 8), torch.ones(6, 8)
    fusedtp.all_gather_matmul(x, [w], group, engine="multimem")
    fusedtp.matmul_reduce_scatter(x, w, group, engine="multimem")
    fusedtp.matmul_all_reduce(x, w, group, engine="multimem")
    rows, _offsets, handle = fusedtp.moe_dispatch(
        x, torch.zeros(4, 1, dtype=torch.long), torch.ones(4, 1), 3, group, engine="multimem"
    )
    fusedtp.moe_combine(rows, handle)
    return {name: set(by) for name, by in engines.calls(communicator(group)).items()}


def test_other_operations_of_a_model_that_asks_for_it_run_the_fused_kernels():
    pytest.importorskip("triton")
    for found in world(3).run(others, fresh=True):
        assert found.pop("matmul_all_reduce") == {"multimem"}
        assert {"all_gather_matmul", "matmul_reduce_scatter", "moe_dispatch", "moe_combine"} <= set(found)
        assert all(by == {"triton"} for by in found.values()), found


def another(group) -> str:
    engine = "multimem" if group.rank() == 1 else "triton"
    try:
        fusedtp.matmul_all_reduce(torch.ones(4, 8), torch.ones(6, 8), group, engine=engine)
    except SignatureMismatch as error:
        return str(error)
    return ""


def test_a_rank_with_another_engine_is_told():
    pytest.importorskip("triton")
    said = world(2).run(another, fresh=True)
    assert all("engine" in each and "multimem" in each and "triton" in each for each in said), said


def test_a_slot_has_rows_of_whole_accesses():
    for dtype in NARROW:
        assert multimem_slot_bytes(5, 33, dtype) == 5 * 48 * dtype.itemsize
        assert multimem_slot_bytes(5, 32, dtype) == 5 * 32 * dtype.itemsize
        assert multimem_slot_bytes(0, 33, dtype) == multimem_slot_bytes(5, 0, dtype) == 0


def asked(device: str, dtype: torch.dtype = torch.bfloat16, **about) -> str:
    return engines.choose(group(device, **about), "multimem", Rows((8, 8)), dtype, "matmul_all_reduce").engine


def test_gpus_need_a_switch_that_sums_and_ranks_that_share_one_do_not():
    with machine():
        with pytest.raises(ValueError, match=r"engine 'multimem' needs .*NVSwitch with NVLink SHARP.*use 'triton'"):
            asked("cuda", switch=False)
        assert asked("cuda") == asked("cuda", threads=True, switch=False) == "multimem"
        assert routing.choose(group("cuda"), "multimem", torch.bfloat16).engine == "triton"


def test_what_no_kernel_can_run_is_refused_by_its_name():
    with machine(), pytest.raises(ValueError, match="engine 'multimem' takes fp32, fp16 and bf16"):
        asked("cuda", torch.float64)
    with machine(triton=False), pytest.raises(ValueError, match="engine 'multimem' needs the triton package"):
        asked("cuda")
    with machine(), pytest.raises(ValueError, match="engine 'multimem' on CPU tensors runs in Triton's interpreter"):
        asked("cpu")


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("total, n", [(1, 1), (16, 4096), (300, 8192), (8192, 4096), (16384, 28672)])
def test_every_thread_has_a_piece_and_every_sum_its_flag(total, n, dtype):
    """What the kernel cannot check: tiles split into pieces of 16 bytes, and flags for parts."""
    flags = 2048
    config = multimem_config(H100, dtype, total, n, flags)
    rows = sum_rows(config, dtype)
    assert rows * config.block_n * dtype.itemsize >= 16 * 32 * config.num_warps
    assert rows & (rows - 1) == 0 and rows >= min(SUM_ROWS, config.block_m)
    view = SimpleNamespace(flags_per_source=2 * flags)
    x, w = torch.empty(total, 64, dtype=dtype, device="meta"), torch.empty(n, 64, dtype=dtype, device="meta")
    args = prepare_multimem(view, 8, x, w, config, H100).args
    chunks = -(-(-(-total // config.block_m) * -(-n // config.block_n)) // args["group"])
    left = min(args["behind"], chunks)
    assert chunks - left + left * args["parts"] <= flags and args["parts"] * args["height"] >= config.block_m
