"""Data parallelism: every kind gives the gradients of one process and sends as many messages as it should."""

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fusedtp.nn import CausalLM, init_
from fusedtp.parallel import clip_grad_norm_
from fusedtp.train.config import faults, parse
from fusedtp.train.data import Microbatch
from fusedtp.train.shard import accumulate_, shard
from tests.train.support import assert_gradients, meshes_of
from tests.train.test_stages import alone, batches_of, half_of, model_of

MICROBATCHES, BLOCKS = 3, 5
# Messages of a step: parameter gathers, gradient scatters, gradient reductions. A unit is a block or the rest.
UNITS = BLOCKS + 1
MESSAGES = {
    "zero3": (MICROBATCHES * (UNITS + BLOCKS), MICROBATCHES * UNITS, 0),
    "zero2": (UNITS, MICROBATCHES * UNITS, 0),
    "zero1": (UNITS, UNITS, 0),
    "ddp": (0, 0, UNITS),
}
Found = tuple[dict[str, Tensor], float, tuple[int, int, int]]


def trained(group: Any, kind: str) -> Found:
    """Gradients of a step, their norm, and the message counts of the next step."""
    mesh, flat = meshes_of(2, copies=2 if kind == "ddp" else 1)
    model = model_of(False)
    shard(model, mesh["dp_replicate", "dp_shard"] if kind == "ddp" else mesh["dp"], kind=kind)
    init_(model.to_empty(device="cpu"), 0, std=0.3)
    dp = (flat["dp"] if flat else mesh["dp"]).get_local_rank()
    run(model, kind, dp)
    gradients = {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}
    norm = clip_grad_norm_(model, 1e9).item()
    with profile(activities=[ProfilerActivity.CPU]) as messages:
        run(model, kind, dp)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        messages.export_chrome_trace(str(path))  # the profiler's own tables take far longer
        names = [event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]]
    counts = Counter(name.removeprefix("c10d::") for name in names if name.startswith("c10d::"))
    wanted = ("_allgather_base_", "_reduce_scatter_base_", "allreduce_")
    assert counts.keys() <= set(wanted), counts
    gathered, scattered, reduced = (counts[name] for name in wanted)
    return gradients, norm, (gathered, scattered, reduced)


def run(model: CausalLM, kind: str, dp: int) -> None:
    for number, batch in enumerate(batches_of(MICROBATCHES, 8, 0), 1):
        accumulate_(model, kind, number == MICROBATCHES)
        own: Microbatch = half_of(batch, dp)
        model.set_dropout(7, 0, own.first_token)
        model(**own.arguments()).loss.backward()


@pytest.mark.slow
@pytest.mark.parametrize("kind", MESSAGES)
def test_a_kind_gives_the_gradients_of_one_process_with_its_messages(worlds, kind: str):
    ((_, wanted, wanted_norm, _),) = alone(False, ((MICROBATCHES, 8),))
    for gradients, norm, messages in worlds(2).run(trained, kind):
        assert gradients.keys() == wanted.keys()
        assert_gradients(gradients, wanted, layers=5)
        assert norm == pytest.approx(wanted_norm, rel=1e-5)
        assert messages == MESSAGES[kind]


def test_what_kinds_cannot_do_is_said_together():
    options = "--dp-replicate 2 --data-parallel ddp --param-dtype bf16"
    assert [fault.split(":")[0] for fault in faults(parse(options.split()), 4, 1)] == [
        "--dp-replicate 2 with --data-parallel ddp, which shards nothing",
        "--param-dtype bf16 with --dtype fp32",
    ]
    (pipeline,) = faults(parse(["--pp", "2", "--accumulate", "4", "--data-parallel", "zero2"]), 2, 1)
    assert pipeline.startswith("--data-parallel zero2 with --pp 2")


@pytest.mark.parametrize("kind", ["zero2", "zero3"])
def test_stages_keep_their_parameters_whole(kind: str):
    with pytest.raises(ValueError, match=f"{kind} with pipeline stages"):
        shard(torch.nn.Linear(2, 2), None, stages=[torch.nn.Linear(2, 2)], kind=kind)  # type: ignore[arg-type]
