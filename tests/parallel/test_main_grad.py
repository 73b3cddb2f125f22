"""A parameter with `main_grad` gets its gradient there, in fp32, and `.grad` stays None, in every kind of layer.

After two backward passes main_grad must be 0.5 + 2 * dw, where dw = dy.T @ x of the 16-bit data in fp64. The error is
at most that of fp32 sums, 2**-24 per term; dw rounded to bf16 would be off by up to 2**-8.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import fusedtp
from fusedtp.nn.linear import Linear
from fusedtp.ops.rows import split
from fusedtp.parallel import FusedColwise, FusedEmbedding, FusedRowwise, Replicated
from tests.engines import ENGINES
from tests.harness import world
from tests.parallel.hf.families import model_of
from tests.parallel.hf.parity import batch, full
from tests.parallel.support import tp_mesh

T, K, N = 37, 6, 8
START = 0.5


def random(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def of_rank(group, full: Tensor, dim: int = 0) -> Tensor:
    return full.split(split(full.shape[dim], group.size()), dim)[group.rank()].contiguous()


def with_main_grad(parameter: Tensor) -> Tensor:
    plain = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    parameter.main_grad = torch.full_like(plain, START, dtype=torch.float32).detach()
    return parameter


def assert_unrounded(name: str, parameter: Tensor, dy: Tensor, x: Tensor) -> None:
    """dy [T, N] and x [T, K] are those of the whole batch."""
    assert parameter.grad is None, f"{name}: .grad must stay None"
    dy, x = dy.detach().double(), x.detach().double()
    terms = START + 2 * (dy.abs().t() @ x.abs())
    off = (parameter.main_grad - (START + 2 * (dy.t() @ x))).abs()
    assert (off <= (2 * len(x) + 4) * 2.0**-24 * terms).all(), f"{name}: off by {off.max():.1e}"


def twice(loss) -> None:
    for _ in range(2):
        loss().backward()


# -- the operations ---------------------------------------------------------------------------------------------------


def in_operations(group, engine: str, autocast: bool) -> None:
    dtype = torch.float32 if autocast else torch.bfloat16
    sizes = (T - 3 * (group.size() - 1), *([3] * (group.size() - 1)))
    full, wide = random(T, K, seed=1), random(T, N, seed=2)
    x, h = full.split(sizes)[group.rank()].to(dtype), wide.to(dtype)
    up = [with_main_grad(random(N, K, seed=3 + i, dtype=dtype).requires_grad_()) for i in range(3)]
    down, out = (with_main_grad(random(K, N, seed=5 + i, dtype=dtype).requires_grad_()) for i in range(2))
    up.append(random(N, K, seed=9, dtype=dtype).requires_grad_())  # no main_grad
    dys = [random(T, N, seed=10 + i) for i in range(4)]
    dy = random(T, K, seed=20)

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            ys = fusedtp.all_gather_matmul(x, [up[0], up[1], up[3]], group, sizes=sizes, engine=engine)
            ys += fusedtp.all_gather_matmul(x, [up[2]], group, sizes=sizes, engine=engine, keep_gathered=True)
            y = fusedtp.matmul_reduce_scatter(h, down, group, sizes=sizes, engine=engine)
            z = fusedtp.matmul_all_reduce(h, out, group, engine=engine)
        columns = sum((y * dy).sum() for y, dy in zip(ys, (dys[0], dys[1], dys[3], dys[2]), strict=True))
        return columns + (y * dy.split(sizes)[group.rank()]).sum() + (z * dy).sum()

    twice(loss)
    for i in range(3):
        assert_unrounded(f"all_gather_matmul, weight {i}", up[i], dys[i], full)
    assert up[3].grad is not None and up[3].grad.dtype == dtype
    assert_unrounded("matmul_reduce_scatter", down, dy, wide)
    assert_unrounded("matmul_all_reduce", out, dy, wide)


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_an_operation_adds_to_main_grad_unrounded(engine, autocast):
    world(2).run(in_operations, engine, autocast, timeout=120)


def test_one_rank_adds_unrounded_too():
    world(1).run(in_operations, "auto", False)


def of_another_shape(group) -> None:
    w = random(N, K, seed=1).requires_grad_()
    w.main_grad = torch.zeros(N + 1, K)
    with pytest.raises(ValueError, match=r"main_grad \(9, 6\)"):
        fusedtp.matmul_all_reduce(random(T, K, seed=0), w, group)


def test_a_main_grad_of_another_shape_is_refused():
    world(2).run(of_another_shape)


# -- the layers -------------------------------------------------------------------------------------------------------


def column(group, module: nn.Module, sequence_parallel: bool, head_dim: int | None) -> None:
    """Activations are 16-bit, and so are parameters if the module has 16-bit ones."""
    style = FusedColwise(sequence_parallel=sequence_parallel, head_dim=head_dim, sizes=split(T, group.size()))
    layer = parallelize_module(module, tp_mesh(group), style)
    for parameter in layer.parameters():
        with_main_grad(parameter)
    x, dy = random(T, K, seed=1), random(T, N, seed=2)
    heads = 1 if head_dim is None else group.size() * head_dim // N  # ranks that share one head
    begin = group.rank() // heads * (head_dim or 0)
    mine = of_rank(group, dy, 1) if head_dim is None else random(T, head_dim, seed=3 + group.rank())
    given = of_rank(group, x) if sequence_parallel else x
    twice(lambda: (layer(given) * mine).sum())
    if head_dim is not None:
        mine = torch.zeros(T, N, dtype=torch.float64)
        for r in range(group.size()):
            begin = r // heads * head_dim
            mine[:, begin : begin + head_dim] += random(T, head_dim, seed=3 + r).double()
    assert_unrounded_columns(layer, mine, x)


def assert_unrounded_columns(layer: nn.Module, dy: Tensor, x: Tensor) -> None:
    assert_unrounded("weight", layer.weight, dy, x)
    assert_added("bias", layer.bias, dy)


def assert_added(name: str, parameter: Tensor, dy: Tensor) -> None:
    """main_grad is 0.5 + 2 * dy.sum(0), each addend rounded to bf16."""
    assert parameter.grad is None, f"{name}: .grad must stay None"
    dy = dy.double()
    off = (parameter.main_grad - (START + 2 * dy.sum(0))).abs()
    assert (off <= 2.0**-6 * (START + 2 * dy.abs().sum(0))).all(), f"{name}: off by {off.max():.1e}"


def linear(kind: type, inputs: int, outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return kind(inputs, outputs, bias=True).to(torch.bfloat16)


@pytest.mark.parametrize("kind", [Linear, nn.Linear], ids=["ours", "torch's"])
@pytest.mark.parametrize("head_dim", [None, 4], ids=["sharded", "replicated heads"])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_column_parallel_layer(sequence_parallel, head_dim, kind):
    world(4).run(column, linear(kind, K, N), sequence_parallel, head_dim)


def row(group, sequence_parallel: bool, dtype: torch.dtype) -> None:
    style = FusedRowwise(sequence_parallel=sequence_parallel, sizes=split(T, group.size()))
    layer = parallelize_module(linear(Linear, N, K).to(dtype), tp_mesh(group), style)
    for parameter in layer.parameters():
        with_main_grad(parameter)
    x, dy = random(T, N, seed=1), random(T, K, seed=2)
    mine = of_rank(group, dy) if sequence_parallel else dy
    twice(lambda: (layer(of_rank(group, x, 1)) * mine).sum())
    assert_unrounded("weight", layer.weight, dy, of_rank(group, x, 1))
    assert_added("bias", layer.bias, dy)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_row_parallel_layer(sequence_parallel, dtype):
    world(2).run(row, sequence_parallel, dtype)


def replica(group, partial: bool) -> None:
    layer = parallelize_module(linear(Linear, K, N), tp_mesh(group), Replicated(partial=partial))
    for parameter in layer.parameters():
        with_main_grad(parameter)
    x, dy = random(T, K, seed=1), random(T, N, seed=2)
    own = (of_rank(group, x), of_rank(group, dy)) if partial else (x, dy)
    twice(lambda: (layer(own[0]) * own[1]).sum())
    assert_unrounded_columns(layer, dy, x)


@pytest.mark.parametrize("partial", [True, False])
def test_a_replicated_layer(partial):
    world(3).run(replica, partial)


def others(group) -> None:
    mesh = tp_mesh(group)
    norm = parallelize_module(nn.LayerNorm(K, dtype=torch.bfloat16), mesh, Replicated())
    table = nn.Embedding(11, K, dtype=torch.bfloat16)
    embedding = parallelize_module(table, mesh, FusedEmbedding(sizes=split(T, group.size())))
    for parameter in (*norm.parameters(), *embedding.parameters()):
        with_main_grad(parameter)
    x, dy = random(T, K, seed=1), random(T, K, seed=2)
    ids = torch.arange(T) % 11
    twice(lambda: (norm(of_rank(group, x)) * of_rank(group, dy)).sum())
    twice(lambda: (embedding(ids) * of_rank(group, dy)).sum())
    assert_added("bias of a norm", norm.bias, dy)
    x = x.double()
    normal = (x - x.mean(1, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + norm.eps).sqrt()
    assert_added("weight of a norm", norm.weight, normal * dy)
    rows = (torch.arange(11)[:, None] == ids).double() @ dy.double()
    got, want = embedding.weight.main_grad - START, 2 * of_rank(group, rows)
    assert embedding.weight.grad is None
    assert (got - want).abs().max() <= 2.0**-7 * len(ids) / 11 * want.abs().max()


def test_norms_biases_and_embeddings_add_what_autograd_made():
    world(2).run(others)


# -- models of others -------------------------------------------------------------------------------------------------


class Scaled(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 3.0


class Plain(nn.Module):
    """The norms and the head are in a list, so no module that runs around them reads their parameters for them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.scaled, self.places = nn.Embedding(11, K), Scaled(11, K), nn.Embedding(5, K)
        self.up, self.act, self.down = nn.Linear(K, N), nn.GELU(), nn.Linear(N, K)
        self.rest = nn.ModuleList([nn.LayerNorm(K), nn.RMSNorm(K), nn.Linear(K, 3)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.scaled(ids)
        x = x + self.places(torch.arange(ids.shape[1])[None])
        norm, last, head = self.rest
        return head(last(x + self.down(self.act(self.up(norm(x)))))).square().sum()


PLAN = {"table": "embedding_rowwise", "scaled": "embedding_rowwise", "places": "embedding_colwise", "up": "colwise",
        "down": "rowwise"}  # fmt: skip


def split_model(group, family: str) -> nn.Module:
    if family == "plain":
        return fusedtp.parallelize(Plain(), tp_mesh(group), plan=PLAN)
    return fusedtp.parallelize(model_of(family), tp_mesh(group), prove=False)


def whole_model(group, family: str) -> dict[str, float]:
    """Parameter -> how far main_grad, in fp64, is from .grad of the same model without it, of the largest |.grad|."""
    found = {}
    with_grad, with_main = split_model(group, family), split_model(group, family)
    for parameter in with_main.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float64)
    for model in (with_grad, with_main):
        twice(lambda m=model: m(batch((2, 5))["input_ids"] % 11) if family == "plain" else m(**batch((2, 5))).loss)
    for (name, parameter), expected in zip(with_main.named_parameters(), with_grad.parameters(), strict=True):
        assert parameter.grad is None, f"{name}: .grad must stay None"
        if expected.grad is None:
            assert not full(parameter.main_grad).any(), f"{name}: no gradient, but a main_grad"
            continue
        want = full(expected.grad)
        found[name] = float((full(parameter.main_grad) - want).abs().max() / want.abs().max().clamp_min(1e-30))
    return found


@pytest.mark.parametrize("family", ["plain", "gemma3_text", "gpt2", "qwen3_moe"])
def test_every_parameter_of_a_split_model_adds_to_its_main_grad(family):
    for found in world(2).run(whole_model, family, timeout=120):
        assert len(found) > 10
        assert all(off <= 4 * 2.0**-24 for off in found.values()), found  # .grad is rounded to fp32


# -- compiled ---------------------------------------------------------------------------------------------------------


def compiled(group, fullgraph: bool, layer: bool) -> None:
    torch._dynamo.reset()
    fusedtp.reserve(group, 1 << 16)
    if layer:
        function = parallelize_module(linear(Linear, K, N), tp_mesh(group), FusedColwise())
        with_main_grad(function.weight)
    else:
        w = with_main_grad(random(N, K, seed=3).requires_grad_())

        def function(x: Tensor) -> Tensor:
            return fusedtp.all_gather_matmul(x, [w], group)[0]

    with pytest.raises(RuntimeError, match="a parameter with main_grad is used in a compiled function"):
        torch.compile(function, fullgraph=fullgraph, backend="aot_eager")(random(4, K, seed=1))


@pytest.mark.slow
@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_layer_with_main_grad_says_that_it_cannot_be(fullgraph, layer):
    world(2).run(compiled, fullgraph, layer, timeout=120)
