"""The styles in torch's own parallelize_module, on a block of plain torch modules."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel, parallelize_module

import fusedtp
from fusedtp.ops.rows import split
from fusedtp.parallel import FusedColwise, FusedEmbedding, FusedRowwise, Replicated
from tests.harness import world
from tests.parallel.support import assert_close, assert_same_gradients, tp_mesh


class PlainBlock(nn.Module):
    """LayerNorm, attention over all tokens of [B, S, H] (or one sequence [T, H]), LayerNorm, MLP; 12 heads of 2."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(24), nn.LayerNorm(24)
        self.q, self.k, self.v, self.o = (nn.Linear(24, 24) for _ in range(4))
        self.up, self.down = nn.Linear(24, 37), nn.Linear(37, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(-1, (-1, 2)).transpose(-2, -3) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(-2, -3).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def plan(partial: bool = True, **options) -> dict:
    columns = {name: FusedColwise(**options) for name in ("q", "k", "v", "up")}
    rows = {name: FusedRowwise(**options) for name in ("o", "down")}
    return {**columns, **rows, "norm*": Replicated(partial=partial)}


def block_of(group, **options) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = PlainBlock().double()
    for norm in (plain.norm1, plain.norm2):
        nn.init.normal_(norm.weight)
    return plain, parallelize_module(copy.deepcopy(plain), tp_mesh(group), plan(**options))


def compare_block(group, shape: tuple[int, ...], dim: int, compiled: bool) -> None:
    torch.manual_seed(1)
    x = torch.randn(shape, dtype=torch.float64)
    sizes = split(shape[dim], group.size())
    even = len(set(sizes)) == 1
    plain, parallel = block_of(group, dim=dim, sizes=None if even else sizes)
    if compiled:
        parallel.compile(fullgraph=True, backend="aot_eager")
    wanted, own = x.clone().requires_grad_(), x.split(sizes, dim)[group.rank()].clone().requires_grad_()
    want, got = plain(wanted), parallel(own)
    assert_close("y", got, want.split(sizes, dim)[group.rank()])
    want.square().sum().backward()
    got.square().sum().backward()
    assert_close("dx", own.grad, wanted.grad.split(sizes, dim)[group.rank()])
    assert_same_gradients(parallel, plain)
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize(
    "world_size, shape, dim",
    [
        (2, (8, 24), 0),
        (3, (7, 24), 0),
        (4, (2, 24), 0),
        (2, (3, 4, 24), 1),
        (3, (2, 7, 24), 1),
        (4, (2, 2, 24), 1),
    ],
)
def test_a_block_of_plain_modules(world_size: int, shape: tuple[int, ...], dim: int):
    world(world_size).run(compare_block, shape, dim, False)


@pytest.mark.slow
def test_a_compiled_block_of_plain_modules():
    world(2).run(compare_block, (2, 6, 24), 1, True, timeout=120)


def forget_the_norms(group) -> None:
    torch.manual_seed(0)
    styles = {name: style for name, style in plan().items() if name != "norm*"}
    parallel = parallelize_module(PlainBlock().double(), tp_mesh(group), styles)
    with pytest.raises(ValueError, match=r"a parameter of shape \(24,\) sees only this rank's tokens"):
        parallel(torch.randn(4, 24, dtype=torch.float64))
    with torch.no_grad():
        parallel(torch.randn(4, 24, dtype=torch.float64))


def test_parameters_that_nobody_planned_are_told():
    world(2).run(forget_the_norms)


def beside_torch_styles(group) -> None:
    """torch's SequenceParallel, which outputs DTensors, between our styles."""
    torch.manual_seed(1)
    x = torch.randn(2, 8, 24, dtype=torch.float64)
    plain, _ = block_of(group)
    styles = {**plan(dim=1), "norm*": SequenceParallel()}
    parallel = parallelize_module(copy.deepcopy(plain), tp_mesh(group), styles)
    own = x.chunk(group.size(), 1)[group.rank()]
    want, got = plain(x), parallel(own)
    assert_close("y", got, want.chunk(group.size(), 1)[group.rank()])
    want.square().sum().backward()
    got.square().sum().backward()
    for name, parameter in parallel.named_parameters():
        assert_close(f"gradient of {name}", parameter.grad, plain.get_parameter(name).grad)


def test_sequence_parallel_of_torch_beside_ours():
    world(2).run(beside_torch_styles)


def compare_whole_tokens(group) -> None:
    plain, parallel = block_of(group, sequence_parallel=False, partial=False)
    x = torch.randn(2, 5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wanted, own = x.clone().requires_grad_(), x.clone().requires_grad_()
    want, got = plain(wanted), parallel(own)
    assert_close("y", got, want)
    want.square().sum().backward()
    got.square().sum().backward()
    assert_close("dx", own.grad, wanted.grad)
    assert_same_gradients(parallel, plain)


def test_a_block_without_sequence_parallelism():
    world(3).run(compare_whole_tokens)


def compare_embedding(group, dim: int, sequence_parallel: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Embedding(11, 6, padding_idx=7, dtype=torch.float64)
    style = FusedEmbedding(dim=dim, sequence_parallel=sequence_parallel)
    parallel = parallelize_module(copy.deepcopy(plain), tp_mesh(group), style)
    ids = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(1))
    ids[0, 0] = 7
    want, got = plain(ids), parallel(ids)
    weight = torch.randn(want.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    own = weight
    if sequence_parallel:
        want_rows, own = (want.flatten(0, 1), weight.flatten(0, 1)) if dim == 0 else (want, weight)
        sizes = split(want_rows.shape[dim], group.size())
        assert_close("rows", got, want_rows.split(sizes, dim)[group.rank()])
        own = own.split(sizes, dim)[group.rank()]
    else:
        assert_close("rows", got, want)
    (want * weight).sum().backward()
    (got * own).sum().backward()
    assert_close("gradient", parallel.weight.grad, plain.weight.grad)
    with pytest.raises(IndexError, match="id 11 is outside the vocabulary of 11"):
        parallel(ids + 4)


@pytest.mark.parametrize("dim, sequence_parallel", [(0, True), (1, True), (0, False)])
def test_an_embedding_with_padding(dim: int, sequence_parallel: bool):
    world(3).run(compare_embedding, dim, sequence_parallel)


def save_whole(group) -> None:
    _, by_styles = block_of(group)
    torch.manual_seed(0)
    by_plan = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    fusedtp.parallelize(by_plan, tp_mesh(group), plan={"0": "colwise", "2": "rowwise"})
    for model in (by_styles, by_plan):
        for whole in (model, copy.deepcopy(model)):
            with pytest.raises(TypeError, match=r"a split module is one rank's part, .* save its state_dict\(\)"):
                torch.save(whole, io.BytesIO())
        torch.save(model.state_dict(), io.BytesIO())


def test_a_split_module_is_not_saved_whole_in_a_form_that_nothing_reads():
    world(2).run(save_whole)


def look_up_other_ids(group, differs: bool, options: dict) -> str:
    module = nn.Sequential(nn.Embedding(11, 4))
    parallelize_module(module, tp_mesh(group), {"0": FusedEmbedding(**options)})
    try:
        for _ in range(2):
            module(torch.arange(6).view(2, 3) + (differs and group.rank() == 1))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("options", [{}, {"dim": 1}, {"sequence_parallel": False}], ids=["0", "1", "whole"])
def test_an_embedding_compares_the_first_ids_of_ranks(options: dict):
    assert world(2).run(look_up_other_ids, False, options) == ["", ""]
    for said in world(2).run(look_up_other_ids, True, options, timeout=30):
        assert said.startswith("ranks of one tensor-parallel group got different inputs: ids of an embedding;")


def share_one_gather(group) -> None:
    from fusedtp.comm import communicator

    _plain, parallel = block_of(group)
    x = torch.randn(3, 24, dtype=torch.float64)
    comm = communicator(group)
    before = dict(comm.engine_calls)
    with torch.no_grad():
        parallel.q.parallel.project(x, (parallel.q, parallel.k, parallel.v))
    calls = {key: n - before.get(key, 0) for key, n in comm.engine_calls.items()}
    assert sum(n for (operation, _), n in calls.items() if operation == "all_gather_matmul") == 1
    with pytest.raises(ValueError, match="must all be column-parallel"):
        parallel.q.parallel.project(x, (parallel.q, parallel.o))


def test_linears_that_share_their_input_share_one_gather():
    world(2).run(share_one_gather)


def lie_as_planned(group) -> None:
    _, parallel = block_of(group)
    expected = {
        "q.weight": Shard(0),
        "q.bias": Shard(0),
        "o.weight": Shard(1),
        "o.bias": Replicate(),
        "norm1.bias": Replicate(),
    }
    parameters = dict(parallel.named_parameters())
    for name, placement in expected.items():
        assert isinstance(parameters[name], DTensor) and parameters[name].placements == (placement,), name
    assert parallel.up.weight.to_local().shape == (split(37, group.size())[group.rank()], 24)


def test_parameters_lie_as_the_style_says():
    world(3).run(lie_as_planned)


def refuse(group) -> None:
    mesh = tp_mesh(group)
    linear = parallelize_module(nn.Linear(4, 4), mesh, FusedColwise())
    with pytest.raises(ValueError, match="parallel already"):
        parallelize_module(linear, mesh, FusedRowwise())
    with pytest.raises(ValueError, match="DTensors already"):
        parallelize_module(parallelize_module(nn.Linear(4, 4), mesh, ColwiseParallel()), mesh, FusedRowwise())
    with pytest.raises(ValueError, match="Conv1d is not a linear layer"):
        parallelize_module(nn.Conv1d(4, 4, 1), mesh, FusedColwise())
    with pytest.raises(ValueError, match="Linear is not an embedding"):
        parallelize_module(nn.Linear(4, 4), mesh, FusedEmbedding())
    with pytest.raises(ValueError, match="embedding with max_norm"):
        parallelize_module(nn.Embedding(4, 4, max_norm=1.0), mesh, FusedEmbedding())
    with pytest.raises(ValueError, match="5 features are not a multiple of head_dim 2"):
        parallelize_module(nn.Linear(4, 5), mesh, FusedColwise(head_dim=2))
    with pytest.raises(ValueError, match="3 heads cannot be divided evenly among 2 ranks"):
        parallelize_module(nn.Linear(4, 6), mesh, FusedColwise(head_dim=2))
    with pytest.raises(ValueError, match="reads its weight and never calls it; leave it out"):
        parallelize_module(nn.MultiheadAttention(4, 2), mesh, {"out_proj": FusedRowwise()})
    with pytest.raises(ValueError, match=r"BatchNorm1d.*: it normalizes over tokens, but each rank sees only its own"):
        parallelize_module(nn.BatchNorm1d(4), mesh, Replicated())
    parallelize_module(nn.BatchNorm1d(4), mesh, Replicated(partial=False))
    parallelize_module(nn.SyncBatchNorm(4), mesh, Replicated())


def test_modules_that_a_style_does_not_fit():
    world(2).run(refuse)


def test_options_are_checked_at_once():
    with pytest.raises(ValueError, match="engine is 'fast'; it must be one of auto, collective, chunked, triton"):
        FusedColwise(engine="fast")
    with pytest.raises(ValueError, match="dim is 2"):
        FusedRowwise(dim=2)
