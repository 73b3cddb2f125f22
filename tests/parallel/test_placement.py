"""A rank's part of a full parameter is a copy of its slice and owns its memory."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

import fusedtp
from fusedtp.comm import communicator
from fusedtp.parallel.placement import TOGETHER_BYTES, Way, locals_of, opened, place, read
from tests.harness import world

from .support import tp_mesh


class NewBytes(TorchDispatchMode):
    """Total bytes that operations allocate."""

    def __init__(self, known: Tensor) -> None:
        super().__init__()
        self.total, self.known = 0, {known.data_ptr()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, list | tuple) else [made]:
            memory = x.untyped_storage()
            if memory.data_ptr() not in self.known:
                self.known.add(memory.data_ptr())
                self.total += memory.nbytes()
        return made


PLACEMENTS = [
    Shard(0),
    Shard(1),
    StridedShard(0, split_factor=2),
    StridedShard(1, split_factor=2),
    StridedShard(2, split_factor=3),
]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_is_copied_once(placement: Any, rank: int):
    full = torch.arange(8.0 * 4 * 12).view(8, 4, 12)
    with NewBytes(full) as new:
        part = Way((placement,), (2,)).part(full, [rank])
    assert part.is_contiguous() and part.untyped_storage().nbytes() == part.nbytes == new.total
    assert part.nbytes == full.nbytes // 2
    packed = full.chunk(getattr(placement, "split_factor", 1), placement.dim)
    want = torch.cat([each.chunk(2, placement.dim)[rank] for each in packed], placement.dim)
    assert torch.equal(part, want)


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_a_part_of_a_packed_part_has_memory_of_its_own(rank: int):
    full = torch.arange(8.0 * 4).view(8, 4)
    part = Way((StridedShard(0, split_factor=2), Shard(1)), (2, 2)).part(full, divmod(rank, 2))
    rows = torch.cat([half.chunk(2)[rank // 2] for half in full.chunk(2)])
    assert torch.equal(part, rows.chunk(2, 1)[rank % 2])
    assert part.is_contiguous() and part.untyped_storage().nbytes() == part.nbytes


def test_a_replicated_parameter_is_not_copied():
    full = torch.ones(3, 4)
    assert Way((Replicate(),), (2,)).part(full, [1]).data_ptr() == full.data_ptr()


def several(group: Any, uses: list[tuple[bool, bool]], dtypes: list[torch.dtype]) -> None:
    """Gradients of parameters of one node and the calls that sum them. Each is used whole, in part, both or neither."""
    comm, mesh = communicator(group), tp_mesh(group)
    ways = [Way((Replicate(),), (group.size(),))] * len(uses)
    plain = [torch.arange(3.0 + i, dtype=dtype) for i, dtype in enumerate(dtypes)]
    parameters = [place(nn.Parameter(x), mesh, way) for x, way in zip(plain, ways, strict=True)]
    owns = locals_of(parameters, comm.name)
    assert all(type(own) is Tensor for own in owns)
    comm.engine_calls.clear()
    total = torch.zeros((), dtype=torch.float64)
    for i, (own, (as_whole, as_part)) in enumerate(zip(owns, uses, strict=True)):
        if as_whole:
            total = total + (own * (i + 1)).sum()
        if as_part:
            total = total + (read(own, comm.name) * (comm.rank + 10)).sum()
    if total.requires_grad:
        total.backward()
    for i, (parameter, (as_whole, as_part)) in enumerate(zip(parameters, uses, strict=True)):
        want = (i + 1) * as_whole + sum(p + 10 for p in range(group.size())) * as_part
        if as_whole or as_part:
            assert isinstance(parameter.grad, DTensor) and parameter.grad.placements == parameter.placements
            assert torch.equal(parameter.grad.to_local(), torch.full_like(plain[i], want))
        else:
            assert parameter.grad is None
    of = {dtype for dtype, (_, as_part) in zip(dtypes, uses, strict=True) if as_part}
    assert sum(comm.engine_calls.values()) == (len(of) if len(uses) > 1 else sum(part for _, part in uses))


@pytest.mark.slow
@given(data=st.data())
def test_gradients_of_several_are_summed_in_one_call(data):
    uses = data.draw(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=4))
    kinds = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
    world(2).run(several, uses, [data.draw(kinds) for _ in uses])


def norm_calls(group: Any, name: str, checkpointing: dict[str, bool] | None) -> int:
    """Number of all-reduces in the second backward of a two-layer model."""
    from .hf.families import model_of

    model = fusedtp.parallelize(model_of(name), tp_mesh(group))
    if checkpointing is not None:
        model.gradient_checkpointing_enable(checkpointing)
        model.train()
    ids = torch.arange(1, 11).view(2, 5)
    for _ in range(2):
        loss = model(input_ids=ids, labels=ids).loss
        communicator(group).engine_calls.clear()
        loss.backward()
    return communicator(group).engine_calls["all_reduce_rows", "chunked"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral"])
@pytest.mark.parametrize("checkpointing", [None, {"use_reentrant": False}])
def test_a_stack_sums_its_norms_gradients_in_one_call(name, checkpointing):
    pytest.importorskip("transformers")
    assert world(2).run(norm_calls, name, checkpointing) == [1, 1]


def test_a_layer_with_a_backward_of_its_own_sums_its_norms_gradients_in_one_call():
    pytest.importorskip("transformers")
    assert world(2).run(norm_calls, "qwen3", {"use_reentrant": True}) == [3, 3]  # two layers and the last norm


class Reader(nn.Module):
    """Records whether its norm's parameter is a plain tensor while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(4)
        self.plain: bool | None = None

    def forward(self) -> None:
        self.plain = not isinstance(self.norm.weight, nn.Parameter)


def opened_readers(group: Any) -> list[bool | None]:
    stack = nn.ModuleList([Reader() for _ in range(5)])
    for each in stack:
        each.norm.weight = place(each.norm.weight, tp_mesh(group), Way((Replicate(),), (group.size(),)))
    stack[1].compile(backend="eager")
    stack[2].forward = torch.compile(stack[2].forward, backend="eager")
    fully_shard(stack[4], mesh=init_device_mesh("cpu", (1, group.size()), mesh_dim_names=("dp", "tp"))["dp"])
    stack[4].unshard()  # as between two microbatches, if parameters stay unsharded
    with opened([(stack, f"{i}.norm") for i in range(5)], communicator(group).name):
        for each in stack:
            Reader.forward(each)
    assert all(isinstance(each.norm.weight, nn.Parameter) for each in stack)
    return [each.plain for each in stack]


def test_a_layer_that_is_compiled_or_that_fsdp_holds_reads_its_norms_itself():
    assert world(2).run(opened_readers) == [[True, False, False, True, False]] * 2


def large_and_small(group: Any) -> tuple[int, list[float]]:
    mesh = tp_mesh(group)
    shapes = [(3,), (TOGETHER_BYTES // 8 + 1,), (2, 2)]
    plain = [nn.Parameter(torch.ones(shape, dtype=torch.float64)) for shape in shapes]
    parameters = [place(p, mesh, Way((Replicate(),), (group.size(),))) for p in plain]
    comm = communicator(group)
    owns = locals_of(parameters, comm.name)
    total = sum((read(own, comm.name) * (i + 1 + 10 * comm.rank)).sum() for i, own in enumerate(owns))
    comm.engine_calls.clear()
    total.backward()
    assert all((p.grad.to_local() == p.grad.to_local().flatten()[0]).all() for p in parameters)
    return sum(comm.engine_calls.values()), [float(p.grad.to_local().flatten()[0]) for p in parameters]


def test_a_large_gradient_is_summed_alone():
    for calls, sums in world(2).run(large_and_small):
        assert sums == [12.0, 14.0, 16.0]
        assert calls == 2  # one call for the large gradient, one for the others
