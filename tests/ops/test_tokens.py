"""Token movers: forward and backward are each other's transpose, for any number of rows per rank, including none."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fusedtp
from fusedtp.comm import communicator
from fusedtp.ops import tokens
from tests.harness import world


def numbers(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-5, 6, shape, generator=generator).float()


def all_movers(group, sizes: tuple[int, ...], tail: tuple[int, ...]) -> None:
    r, total = group.rank(), sum(sizes)
    begin = sum(sizes[:r])
    own = slice(begin, begin + sizes[r])
    shards = [numbers(n, *tail, seed=p) for p, n in enumerate(sizes)]
    fulls = [numbers(total, *tail, seed=10 + p) for p in range(len(sizes))]  # rank p's partial, or its gradient
    whole, summed = torch.cat(shards), torch.stack(fulls).sum(0)

    def check(name: str, function, given: Tensor, gradient: Tensor, y: Tensor, dx: Tensor) -> None:
        x = given.clone().requires_grad_()
        got = function(x)
        assert torch.equal(got, y), name
        assert torch.equal(torch.autograd.grad(got, x, gradient)[0], dx), f"gradient of {name}"

    gather, reduce_scatter = tokens.gather_tokens, tokens.reduce_scatter_tokens
    check("gather", lambda x: gather(x, group, sizes), shards[r], whole, whole, shards[r])
    check("reduce_scatter", lambda x: reduce_scatter(x, group, sizes), fulls[r], shards[r], summed[own], whole)
    check("copy", lambda x: tokens.copy_to_group(x, group), whole, fulls[r], whole, summed)
    check("all_reduce", lambda x: tokens.all_reduce_sum(x, group), fulls[r], whole, summed, whole)


@settings(max_examples=25)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.sampled_from([(3,), (1,), (2, 2), (), (0,)]))
def test_movers_and_their_transposes(sizes, tail):
    world(len(sizes)).run(all_movers, tuple(sizes), tail)


def several_in_one_call(group, sizes: tuple[int, ...], tail: tuple[int, ...]) -> None:
    """One call for several tensors of any dtype equals separate calls, with gradients where a tensor has one."""
    r, comm = group.rank(), communicator(group)
    own = [
        numbers(sizes[r], *tail, seed=r),
        numbers(sizes[r], 2, seed=50 + r).long(),
        numbers(sizes[r], 3, seed=90 + r).bfloat16(),
    ]
    gradients = [
        numbers(sum(sizes), *tail, seed=20 + r),
        None,
        numbers(sum(sizes), 3, seed=30 + r).bfloat16(),
    ]
    found = []
    for together in (False, True):
        xs = [x.clone().requires_grad_(x.is_floating_point()) for x in own]
        comm.engine_calls.clear()
        if together:
            ys = tokens.all_gather_tokens_of(xs, group, sizes)
            assert len(sizes) == 1 or comm.engine_calls == {("all_gather_tensors", "chunked"): 1}
        else:
            ys = [tokens.all_gather_tokens(x, group, sizes) for x in xs]
        torch.autograd.backward([ys[0], ys[2]], [gradients[0], gradients[2]])
        if together and len(sizes) > 1:
            wanted = {("all_gather_tensors", "chunked"): 1, ("reduce_scatter_tensors", "chunked"): 1}
            assert comm.engine_calls == wanted
        assert not ys[1].requires_grad
        found.append([*ys, xs[0].grad, xs[2].grad])
    assert all(map(torch.equal, *found)) and found[0][1].dtype == found[1][1].dtype == torch.int64


@settings(max_examples=25)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.sampled_from([(3,), (1,), (2, 2), (), (0,)]))
def test_several_are_gathered_in_one_call(sizes, tail):
    world(len(sizes)).run(several_in_one_call, tuple(sizes), tail)


def several_compiled(group, floats: int) -> None:
    """With gradients for `floats` of the tensors, or for none."""
    r, sizes = group.rank(), (2, 3)
    fusedtp.reserve(group, 1 << 12)
    own = [numbers(sizes[r], 2 + i, seed=r + i) for i in range(floats)]

    def mover(*xs: Tensor) -> Tensor:
        ys = tokens.all_gather_tokens_of([*xs, xs[0].long()], group, sizes)
        return torch.cat(ys, 1)

    compiled = torch.compile(mover, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*own), mover(*own))
    found = []
    for function in (mover, compiled):
        xs = [x.clone().requires_grad_() for x in own]
        y = function(*xs)
        y.backward(numbers(*y.shape, seed=r))
        found.append([y.detach(), *(x.grad for x in xs)])
    assert all(map(torch.equal, *found))
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("floats", [1, 2, 3])
def test_several_are_gathered_in_compiled_code(floats):
    world(2).run(several_compiled, floats)


def scalar(group) -> None:
    x = torch.tensor(float(group.rank() + 1), requires_grad=True)
    y = tokens.all_reduce_sum(x, group)
    y.backward()
    assert y.shape == () and y.item() == 6 and x.grad == 1
    z = tokens.copy_to_group(x, group)
    (dx,) = torch.autograd.grad(z, x)
    assert z.shape == () and dx.item() == 3


def test_scalars_are_summed_too():
    world(3).run(scalar)


def counted(group) -> None:
    comm, sizes = communicator(group), (2, 1)
    x = torch.ones(2 - group.rank(), 4, requires_grad=True)
    big = torch.ones(3, 1 << 17, requires_grad=True)  # a two-shot all-reduce, which counts as one call
    laws = {
        "all_gather_rows": lambda: tokens.gather_tokens(x, group, sizes, layer="head"),
        "reduce_scatter_rows": lambda: tokens.reduce_scatter_tokens(big, group, sizes, layer="head"),
        "all_reduce_rows": lambda: tokens.all_reduce_sum(big, group, layer="head"),
    }
    for operation, mover in laws.items():
        comm.engine_calls.clear()
        comm.layer_calls.clear()
        mover()
        assert comm.engine_calls == {(operation, "chunked"): 1}
        assert comm.layer_calls == {("head", "chunked"): 1}
    comm.layer_calls.clear()
    tokens.reduce_scatter_tokens(big, group, sizes, layer="embedding").sum().backward()
    tokens.copy_to_group(big, group, layer="mlp").sum().backward()
    assert comm.layer_calls == {("embedding", "chunked"): 2, ("mlp", "chunked"): 1}


def test_every_move_is_counted_once_for_its_layer_and_so_is_its_backward():
    world(2).run(counted)


def second_derivatives(group, mover: str) -> list[float]:
    """Gradients of sum((mover(x) * c)^3): movers are linear, and their backward is differentiable too."""
    w, sizes = group.size(), (1,) * group.size()
    shape = (1, 1) if mover == "gather_tokens" else (w, 1)
    x = torch.full(shape, 1.0, requires_grad=True)
    given = (x, group) if mover in ("copy_to_group", "all_reduce_sum") else (x, group, sizes)
    y = getattr(tokens, mover)(*given)
    (dx,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
    (ddx,) = torch.autograd.grad(dx.sum(), x)
    views = communicator(group).workspace.views.values()
    assert not any(view.requires_grad for view in views), "autograd got to the workspace"
    assert torch.equal(all_reduce_of_ones(group), torch.full((2, 1), float(w)))
    return ddx.flatten().tolist()


def all_reduce_of_ones(group) -> torch.Tensor:
    return tokens.all_reduce_sum(torch.ones(2, 1), group)


@pytest.mark.parametrize(
    ("mover", "want"),
    [  # y = x gathered: 6 y of the own row; y = own row of x: 6 y, gathered; y = sum of x: 6 y, gathered, and so on
        ("gather_tokens", [6.0]),
        ("take_tokens", [12.0, 12.0]),
        ("reduce_scatter_tokens", [24.0, 24.0]),
        ("copy_to_group", [12.0, 12.0]),
        ("all_reduce_sum", [12.0, 12.0]),
    ],
)
def test_movers_have_second_derivatives_and_leave_the_workspace_alone(mover, want):
    for seen in world(2).run(second_derivatives, mover):
        assert seen == want, (mover, seen)
