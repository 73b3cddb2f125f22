"""Disagreeing ranks are named on every rank, at once and without a hang; local faults say what was given and wanted."""

import pytest
import torch
from torch import Tensor

import fusedtp
from fusedtp.comm import PeerFailed, communicator
from tests.engines import ENGINES
from tests.harness import Failure, PerRank, world

W = 3


def gather(group, engine="chunked", k=4, n=5, rows=2, sizes=None, dtype=torch.float32, grad=False, weights=1) -> Tensor:
    x = torch.ones(rows, k, dtype=dtype, requires_grad=grad)
    ws = [torch.ones(n, k, dtype=dtype)] * weights
    return fusedtp.all_gather_matmul(x, ws, group, sizes=sizes, engine=engine)[0]


def scatter(
    group, engine="chunked", k=4, n=5, rows=6, sizes=None, dtype=torch.float32, grad=False, bias=False
) -> Tensor:
    x, w = torch.ones(rows, k, dtype=dtype, requires_grad=grad), torch.ones(n, k, dtype=dtype)
    b = torch.ones(n, dtype=dtype) if bias else None
    return fusedtp.matmul_reduce_scatter(x, w, group, bias=b, sizes=sizes, engine=engine)


def reduce(group, engine="chunked", k=4, n=5, rows=6, dtype=torch.float32, grad=False, bias=False) -> Tensor:
    x, w = torch.ones(rows, k, dtype=dtype, requires_grad=grad), torch.ones(n, k, dtype=dtype)
    return fusedtp.matmul_all_reduce(x, w, group, bias=torch.ones(n, dtype=dtype) if bias else None, engine=engine)


def wgrad(group, engine="chunked", k=4, n=5, rows=2, sizes=None, dtype=torch.float32, weights=1) -> Tensor:
    total = rows * group.size() if sizes is None else sum(sizes)
    dys = [torch.ones(total, n, dtype=dtype)] * weights
    return fusedtp.all_gather_wgrad(torch.ones(rows, k, dtype=dtype), dys, group, sizes=sizes, engine=engine)[0]


def agreeing_afterwards(group, function, options: dict) -> str:
    """The error of this rank's call, followed by a call on which all ranks agree, on the same group."""
    fusedtp.set_timeout(group, 30)
    try:
        function(group, **options)
    except ValueError as error:
        message = f"{type(error).__name__}: {error}"
    else:
        message = "no error"
    fusedtp.set_timeout(group, 600)
    for _ in range(2):
        assert torch.equal(gather(group), torch.full((2 * group.size(), 5), 4.0))
    return message


def disagree(function, common: dict, change: dict) -> list[str]:
    options = PerRank([common, {**common, **change}, common])
    outcomes = world(W).outcomes(agreeing_afterwards, function, options, timeout=40)
    assert not any(isinstance(outcome, Failure) for outcome in outcomes), outcomes
    return outcomes


DIFFERENCES = [
    (gather, {}, {"k": 6}, "features"),
    (gather, {}, {"dtype": torch.bfloat16}, "dtype"),
    (gather, {}, {"grad": True}, "needs_grad"),
    (gather, {}, {"weights": 2}, "weights"),
    (gather, {}, {"rows": 3}, "sizes"),
    (gather, {}, {"rows": 0}, "sizes"),
    (gather, {"sizes": [2, 2, 2]}, {"sizes": [3, 2, 2]}, "sizes"),
    (scatter, {}, {"n": 6}, "features"),
    (scatter, {}, {"dtype": torch.float16}, "dtype"),
    (scatter, {}, {"grad": True}, "needs_grad"),
    (scatter, {}, {"rows": 7}, "sizes"),
    (scatter, {}, {"bias": True}, "with_bias"),
    (scatter, {"sizes": [2, 2, 2]}, {"sizes": [1, 2, 3]}, "sizes"),
    (reduce, {}, {"n": 6}, "features"),
    (reduce, {}, {"rows": 7}, "sizes"),
    (reduce, {}, {"dtype": torch.bfloat16}, "dtype"),
    (reduce, {}, {"grad": True}, "needs_grad"),
    (reduce, {}, {"bias": True}, "with_bias"),
    (wgrad, {}, {"k": 6}, "features"),
    (wgrad, {}, {"weights": 2}, "weights"),
    (wgrad, {}, {"dtype": torch.float16}, "dtype"),
]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("function", "common", "change", "field"), DIFFERENCES, ids=lambda v: getattr(v, "__name__", str(v))
)
def test_a_rank_that_differs_is_named_with_the_field(function, common, change, field, engine):
    for rank, message in enumerate(disagree(function, {"engine": engine, **common}, change)):
        assert message.startswith("SignatureMismatch"), message
        assert field in message and "rank 1" in message and f"rank {rank}" in message, message


@pytest.mark.parametrize("function", [gather, scatter, reduce, wgrad])
def test_a_rank_with_another_engine_is_named(function):
    for rank, message in enumerate(disagree(function, {"engine": "chunked"}, {"engine": "collective"})):
        assert "engine is" in message and "chunked" in message and "collective" in message, message
        assert "rank 1" in message and f"rank {rank}" in message, message


def ragged(group, rows: int) -> str:
    with pytest.raises(ValueError) as raised:
        gather(group, rows=rows)
    return str(raised.value)


@pytest.mark.parametrize("rows", [(2, 2, 3), (0, 2, 2), (1, 2, 3)])
def test_ragged_rows_without_sizes_name_the_ranks(rows):
    for rank, message in enumerate(world(W).run(ragged, PerRank(rows))):
        assert "sizes" in message and f"rank {rank}" in message, message


def other_operation(group) -> str:
    with pytest.raises(ValueError) as raised:
        (scatter if group.rank() == 1 else gather)(group)
    return str(raised.value)


def test_a_rank_in_another_operation_is_named():
    for message in world(W).run(other_operation):
        assert "operation" in message and "rank 1" in message
        assert "matmul_reduce_scatter" in message and "all_gather_matmul" in message


# -- faults that a rank finds by itself --------------------------------------------------------------------------------


def raised_by(group, function, arguments: dict) -> str:
    with pytest.raises(ValueError) as raised:
        function(group=group, **arguments)
    return str(raised.value)


def wrong_and_go_on(group, function, fault: str | None, engine: str, wider: int) -> tuple[str, str]:
    """A call with this rank's fault, which grows the workspace if `wider`; then three calls on which all agree."""
    k = 4 + wider
    x, w = torch.ones(6, k), torch.ones(5, k)
    x = {"device": x.to("meta"), "K": torch.ones(6, k + 1)}.get(fault, x)
    engine = "fast" if fault == "engine" else engine
    try:
        function(x, [w] if function is fusedtp.all_gather_matmul else w, group, engine=engine)
        raised = "", ""
    except (ValueError, RuntimeError) as error:
        raised = type(error).__name__, str(error)
    for _ in range(3):
        assert torch.equal(gather(group), torch.full((2 * group.size(), 5), 4.0))
    return raised


OPERATIONS = (fusedtp.all_gather_matmul, fusedtp.matmul_reduce_scatter, fusedtp.matmul_all_reduce)


@pytest.mark.parametrize("fault", ["device", "K", "engine"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("function", OPERATIONS, ids=lambda f: f.__name__)
def test_a_rank_that_finds_a_fault_in_its_own_arguments_fails_its_peers(function, engine, fault):
    """They fail long before the group's timeout of 600 s, where they would raise SignalTimeout."""
    faults = PerRank([None, fault, None])
    outcomes = world(W).run(wrong_and_go_on, function, faults, engine, 0, timeout=40)
    assert [kind for kind, _ in outcomes] == ["PeerFailed", "ValueError", "PeerFailed"], outcomes
    assert "rank 1" in outcomes[0][1] and "rank 1" in outcomes[2][1], outcomes


@pytest.mark.parametrize("engine", ENGINES)
def test_also_when_its_peers_are_about_to_grow_the_workspace(engine):
    faults = PerRank([None, "K", None])
    arguments = fusedtp.matmul_reduce_scatter, faults, engine, 4096
    outcomes = world(W).run(wrong_and_go_on, *arguments, fresh=True, timeout=40)
    assert [kind for kind, _ in outcomes] == ["PeerFailed", "ValueError", "PeerFailed"], outcomes


@pytest.mark.parametrize("faults", [("K", "K", "K"), ("K", "device", "engine"), ("K", None, "device")])
@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_that_are_wrong_together_each_raise_their_own_fault(engine, faults):
    arguments = fusedtp.matmul_all_reduce, PerRank(faults), engine, 0
    outcomes = world(W).run(wrong_and_go_on, *arguments, timeout=40)
    wanted = ["ValueError" if fault else "PeerFailed" for fault in faults]
    assert [kind for kind, _ in outcomes] == wanted, outcomes


def wrong_alone(group) -> None:
    """Peers start their call only after rank 1 has raised. If rank 1 waited for them, it would raise SignalTimeout."""
    fusedtp.set_timeout(group, 10)
    barrier = communicator(group).world.barrier
    if group.rank() == 1:
        with pytest.raises(ValueError, match="the weight"):
            fusedtp.matmul_all_reduce(torch.ones(6, 3), torch.ones(5, 4), group)
        barrier()
    else:
        barrier()
        with pytest.raises(PeerFailed, match="rank 1"):
            reduce(group)


def test_the_fault_is_raised_without_waiting_for_the_peers():
    world(W).run(wrong_alone, fresh=True)


def without_workspace(group) -> str:
    communicator(group).fallback = "as on several hosts"
    return raised_by(group, fusedtp.matmul_all_reduce, {"x": torch.ones(6, 3), "weight": torch.ones(5, 4)})


def test_a_group_without_workspace_simply_raises():
    assert all("3 columns" in message for message in world(W).run(without_workspace, fresh=True))


X, WEIGHT, E4M3 = torch.ones(2, 4), torch.ones(5, 4), torch.float8_e4m3fn
LOCAL_FAULTS = [
    (fusedtp.all_gather_matmul, {"x": X, "weights": []}, ["0 weights"]),
    (fusedtp.all_gather_matmul, {"x": X, "weights": [WEIGHT], "biases": []}, ["1 weights", "0 biases"]),
    (fusedtp.all_gather_matmul, {"x": X, "weights": [torch.ones(5, 3)]}, ["rank 0", "4", "3"]),
    (fusedtp.all_gather_matmul, {"x": X, "weights": [torch.ones(5)]}, ["rank 0", "(5,)"]),
    (fusedtp.all_gather_matmul, {"x": X, "weights": [WEIGHT.double()]}, ["float32", "float64"]),
    (fusedtp.all_gather_matmul, {"x": X, "weights": [WEIGHT.to("meta")]}, ["cpu", "meta"]),
    (fusedtp.all_gather_matmul, {"x": X.int(), "weights": [WEIGHT.int()]}, ["int32"]),
    (fusedtp.all_gather_matmul, {"x": X.to(E4M3), "weights": [WEIGHT.to(E4M3)]}, ["e4m3fn", "scaled_"]),
    (fusedtp.all_gather_matmul, {"x": X, "weights": [WEIGHT], "sizes": [3]}, ["rank 0", "3", "2"]),
    (fusedtp.all_gather_matmul, {"x": X, "weights": [WEIGHT], "sizes": [2, 0]}, ["1 row counts", "[2, 0]"]),
    (fusedtp.all_gather_matmul, {"x": X, "weights": [WEIGHT], "sizes": [-1]}, ["-1"]),
    (fusedtp.all_gather_matmul, {"x": X, "weights": [WEIGHT], "engine": "fast"}, ["fast", "chunked"]),
    (fusedtp.all_gather_matmul, {"x": X, "weights": [WEIGHT], "dim": 2}, ["dim"]),
    (fusedtp.all_gather_matmul, {"x": X, "weights": [WEIGHT], "dim": 1}, ["dim", "(2, 4)"]),
    (fusedtp.all_gather_matmul, {"x": X, "weights": [WEIGHT], "biases": [torch.ones(4)]}, ["(4,)", "[5]"]),
    (fusedtp.matmul_reduce_scatter, {"x": X, "weight": WEIGHT, "sizes": [3]}, ["[3]", "(2, 4)"]),
    (fusedtp.matmul_reduce_scatter, {"x": X, "weight": WEIGHT, "bias": torch.ones(4)}, ["(4,)", "[5]"]),
    (fusedtp.matmul_reduce_scatter, {"x": torch.ones(4), "weight": WEIGHT}, ["(4,)"]),
    (fusedtp.matmul_reduce_scatter, {"x": X, "weight": WEIGHT, "dim": 1}, ["dim", "(2, 4)"]),
    (fusedtp.matmul_all_reduce, {"x": X, "weight": WEIGHT.t()}, ["rank 0", "4", "5"]),
    (fusedtp.matmul_all_reduce, {"x": torch.ones(4), "weight": WEIGHT}, ["(4,)"]),
    (fusedtp.all_gather_wgrad, {"x": X, "dys": [torch.ones(3, 5)]}, ["rank 0", "3", "2"]),
    (fusedtp.all_gather_wgrad, {"x": X, "dys": [torch.ones(2, 5).double()]}, ["float64", "float32"]),
    (fusedtp.all_gather_wgrad, {"x": X, "dys": [torch.ones(2)]}, ["rank 0", "(2,)", "[2, N]"]),
    (
        fusedtp.all_gather_wgrad,
        {"x": X.expand(3, 2, 4), "dys": [torch.ones(2, 3, 5)], "dim": 1},
        ["(2, 3, 5)", "[3, 2, N]"],
    ),
    (fusedtp.all_gather_wgrad, {"x": X.long(), "dys": [torch.ones(2, 5).long()]}, ["int64", "floating-point"]),
]


def all_faults(group) -> list[str]:
    return [raised_by(group, function, arguments) for function, arguments, _ in LOCAL_FAULTS]


def test_local_faults_say_what_was_given_and_what_is_wanted():
    (messages,) = world(1).run(all_faults)
    for message, (function, _, parts) in zip(messages, LOCAL_FAULTS, strict=True):
        assert all(part in message for part in parts), f"{function.__name__}: {parts} in {message!r}"


@pytest.mark.slow
def test_triton_on_cpu_without_the_interpreter_says_what_to_set():
    pytest.importorskip("triton")
    for outcome in world(2, interpret=False).outcomes(gather, "triton"):
        assert outcome.is_a("ValueError") and "TRITON_INTERPRET=1" in outcome.message


def in_fp64(group) -> str:
    with pytest.raises(ValueError) as raised:
        gather(group, engine="triton", dtype=torch.float64)
    return str(raised.value)


def test_triton_has_no_fp64_and_says_so():
    pytest.importorskip("triton")
    assert all("float64" in message and "chunked" in message for message in world(2).run(in_fp64))
