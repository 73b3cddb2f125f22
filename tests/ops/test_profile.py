"""Every call is counted, and named in a profile: `fusedtp.<operation>.<engine>`, backward and loss included."""

import pytest
import torch

import fusedtp
from fusedtp.comm import communicator
from fusedtp.nn.loss import vocab_parallel_cross_entropy
from tests.engines import ENGINES
from tests.harness import PerRank, world


def profiled(group, engine: str) -> set[str]:
    x, w = torch.ones(2, 4, requires_grad=True), torch.ones(5, 4, requires_grad=True)
    labels = torch.zeros(2 * group.size(), dtype=torch.int64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        (h,) = fusedtp.all_gather_matmul(x, [w], group, engine=engine)
        y = fusedtp.matmul_all_reduce(h, w.t(), group, engine=engine)
        fusedtp.matmul_reduce_scatter(h, w.t(), group, engine=engine).sum().backward()
        vocab_parallel_cross_entropy(y, labels, group, vocab_size=4 * group.size())
    return {event.key for event in profile.key_averages() if event.key.startswith("fusedtp.")}


@pytest.mark.parametrize("engine", ENGINES)
def test_profiler_ranges_carry_the_operation_and_the_engine(engine):
    wgrad = "column_grads" if engine == "chunked" else "all_gather_wgrad"
    operations = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", wgrad)
    want = {f"fusedtp.{operation}.{engine}" for operation in operations}
    assert world(2).run(profiled, engine) == [want | {"fusedtp.all_gather_rows.chunked"}] * 2


def loss_of(group, rows: int) -> None:
    comm = communicator(group)
    comm.engine_calls.clear()
    logits, labels = torch.zeros(rows, 3), torch.zeros(rows, dtype=torch.int64)
    vocab_parallel_cross_entropy(logits, labels, group, vocab_size=6)
    assert comm.engine_calls == {("all_gather_rows", "chunked"): 1}


def test_the_loss_is_counted_and_ranks_of_other_rows_are_named():
    world(2).run(loss_of, 4)
    for outcome in world(2).outcomes(loss_of, PerRank([4, 5])):
        assert outcome.is_a("SignatureMismatch") and "sizes" in outcome.message, outcome
