"""What autograd saves, refuses and accumulates; checkpoints, main_grad, and graphs that are used twice."""

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import fusedtp
from fusedtp.comm import communicator
from tests.engines import ENGINES
from tests.harness import world

SIZES = (3, 1)
T = sum(SIZES)


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).to(dtype).requires_grad_()


def gather(group, engine: str, x: Tensor, w: Tensor, v: Tensor, **options) -> tuple[Tensor, ...]:
    return fusedtp.all_gather_matmul(x, [w, v], group, sizes=SIZES, engine=engine, **options)


def scatter(group, engine: str, x: Tensor, w: Tensor) -> Tensor:
    return fusedtp.matmul_reduce_scatter(x, w, group, sizes=SIZES, engine=engine)


def mlp(group, engine: str, x: Tensor, up: Tensor, gate: Tensor, down: Tensor) -> Tensor:
    a, b = gather(group, engine, x, up, gate)
    return scatter(group, engine, a * b, down)


def leaves(group) -> list[Tensor]:
    """x [T_r, 4], up and gate [5, 4], down [4, 5]."""
    r = group.rank()
    shapes = (SIZES[r], 4), (5, 4), (5, 4), (4, 5)
    return [numbers(*s, seed=10 * i + r) for i, s in enumerate(shapes)]


def gradients(y: Tensor, given: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(y, given, torch.arange(y.numel()).view(y.shape).to(y.dtype)))


def assert_equal(got: list[Tensor], want: list[Tensor]) -> None:
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(a, b), f"gradient {i}: {a} is not {b}"


# -- checkpoints ------------------------------------------------------------------------------------------------------


def checkpointed(group, engine: str) -> None:
    given = leaves(group)
    want = gradients(mlp(group, engine, *given), given)
    y = checkpoint(lambda *args: mlp(group, engine, *args), *given, use_reentrant=False)
    assert_equal(gradients(y, given), want)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_checkpointed_layer_has_the_same_gradients(engine):
    world(2).run(checkpointed, engine)


# -- what is saved ----------------------------------------------------------------------------------------------------


def packed(function) -> list[tuple[int, ...]]:
    """The shapes of the tensors that `function` saves for backward."""
    shapes: list[tuple[int, ...]] = []
    with saved_tensors_hooks(lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t):
        kept = function()
    del kept
    return shapes


def saved(group, engine: str) -> None:
    x, up, gate, down = leaves(group)
    mine, full = (SIZES[group.rank()], 4), (T, 4)
    h = numbers(T, 5)
    shapes = packed(lambda: gather(group, engine, x, up, gate))
    assert mine in shapes and full not in shapes, f"a gather saves the shard: {shapes}"
    assert sorted(shapes) == sorted([mine, (5, 4), (5, 4)]), shapes
    shapes = packed(lambda: gather(group, engine, x, up, gate, keep_gathered=True))
    assert full in shapes, f"keep_gathered saves all rows: {shapes}"
    shapes = packed(lambda: scatter(group, engine, h, down))
    assert sorted(shapes) == sorted([(T, 5), (4, 5)]), shapes
    shapes = packed(lambda: fusedtp.matmul_all_reduce(h, down, group, engine=engine))
    assert sorted(shapes) == sorted([(T, 5), (4, 5)]), shapes


@pytest.mark.parametrize("engine", ENGINES)
def test_a_gather_saves_its_shard_and_a_reduction_its_input(engine):
    world(2).run(saved, engine)


def nothing_saved(group, engine: str) -> None:
    given = leaves(group)
    with torch.no_grad():
        ys: list[Tensor] = []
        assert packed(lambda: ys.append(mlp(group, engine, *given))) == []
        assert ys[0].grad_fn is None and not ys[0].requires_grad
    y = mlp(group, engine, *(t.detach() for t in given))
    assert y.grad_fn is None
    with torch.inference_mode():
        assert torch.equal(mlp(group, engine, *given), y)


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_is_saved_without_gradients(engine):
    world(2).run(nothing_saved, engine)


# -- double backward, main_grad, graphs used twice --------------------------------------------------------------------


def twice_differentiated(group, operation: str) -> str:
    x, up, gate, down = leaves(group)
    h = numbers(T, 5)
    y, of = {
        "gather": lambda: (gather(group, "chunked", x, up, gate)[0], x),
        "scatter": lambda: (scatter(group, "chunked", h, down), h),
        "reduce": lambda: (fusedtp.matmul_all_reduce(h, down, group, engine="chunked"), h),
    }[operation]()
    with pytest.raises(RuntimeError) as raised:
        torch.autograd.grad(y.sum(), of, create_graph=True)
    return str(raised.value)


@pytest.mark.parametrize("operation", ["gather", "scatter", "reduce"])
def test_double_backward_raises(operation):
    for message in world(2).run(twice_differentiated, operation):
        assert "double backward is not supported" in message, message


def with_tangents(group, operation: str, engine: str, kept: bool) -> str:
    """kept: calls of this kind have already run without tangents."""
    x, up, _, down = (t.detach() for t in leaves(group))
    h, ids, weights = numbers(T, 5).detach(), torch.zeros(len(x), 1, dtype=torch.int32), torch.ones(len(x), 1)
    offsets = torch.tensor([0, len(h)], dtype=torch.int32)
    call, at = {
        "gather": (lambda x: gather(group, engine, x, up, up)[0], x),
        "scatter": (lambda h: scatter(group, engine, h, down), h),
        "reduce": (lambda h: fusedtp.matmul_all_reduce(h, down, group, engine=engine), h),
        "dispatch": (lambda x: fusedtp.moe_dispatch(x, ids, weights, 2, group, sizes=SIZES, engine=engine)[0], x),
        "grouped": (lambda h: fusedtp.grouped_matmul(h, down[None], offsets), h),
    }[operation]
    if kept:
        call(at)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError) as raised:
        call(forward_ad.make_dual(at, torch.ones_like(at)))
    call(at)
    with forward_ad.dual_level():  # without a tangent, the call runs as usual
        call(at)
    return str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["gather", "scatter", "reduce", "dispatch", "grouped"])
@pytest.mark.parametrize("engine", ["collective", "chunked"])
@pytest.mark.parametrize("kept", [False, True], ids=["first", "later"])
def test_forward_mode_raises_in_place_of_losing_tangents(operation, engine, kept):
    for message in world(2).run(with_tangents, operation, engine, kept, fresh=True, timeout=30):
        assert "have no forward-mode derivatives" in message, message


def accumulated(group, engine: str) -> None:
    given = leaves(group)
    want = gradients(mlp(group, engine, *given), given)
    for weight in given[1:]:
        weight.main_grad = torch.full_like(weight, 0.5)
    for _ in range(2):
        y = mlp(group, engine, *given)
        y.backward(torch.arange(y.numel()).view(y.shape).float())
    assert_equal([given[0].grad], [2 * want[0]])
    for weight, gradient in zip(given[1:], want[1:], strict=True):
        assert weight.grad is None
        assert torch.equal(weight.main_grad, 0.5 + 2 * gradient)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_weight_with_main_grad_accumulates_there(engine):
    """In 16 bits too: tests/parallel/test_main_grad.py."""
    world(2).run(accumulated, engine)


def reduced_into_main_grad(group) -> None:
    x, w = numbers(T, 5), numbers(4, 5)
    w.main_grad = torch.zeros(4, 5)
    fusedtp.matmul_all_reduce(x, w, group).sum().backward()
    assert w.grad is None and torch.equal(w.main_grad, torch.ones(T, 4).t() @ x.detach())


def test_main_grad_of_an_all_reduced_layer():
    world(2).run(reduced_into_main_grad)


def two_losses(group, engine: str, keep: bool) -> None:
    """The input's gradient of one loss, then the weights' gradients of another, on one graph."""
    given = leaves(group)
    x, weights = given[0], given[1:]

    def forward() -> Tensor:
        a, b = gather(group, engine, x, weights[0], weights[1], keep_gathered=keep)
        return scatter(group, engine, a * b, weights[2])

    for of in ([weights[2]], weights):
        want = torch.autograd.grad(forward(), of, torch.full((SIZES[group.rank()], 4), 2.0))
        y = forward()
        torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
        got = torch.autograd.grad(y, of, torch.full_like(y, 2.0))
        assert_equal(list(got), list(want))


@pytest.mark.slow
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_weight_gradients_of_a_second_loss_are_not_those_of_the_first(engine, keep):
    world(2).run(two_losses, engine, keep)


def retained(group, engine: str) -> None:
    given = leaves(group)
    y = mlp(group, engine, *given)
    once = torch.autograd.grad(y, given, torch.ones_like(y), retain_graph=True)
    again = torch.autograd.grad(y, given, torch.full_like(y, 3.0))
    assert_equal(list(again), [3 * g for g in once])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_retained_graph_gives_gradients_again(engine):
    world(2).run(retained, engine)


def kept(group) -> None:
    given = leaves(group)[:3]
    ys = gather(group, "chunked", *given)
    kept_ys = gather(group, "chunked", *given, keep_gathered=True)
    comm = communicator(group)
    for a, b in zip(ys, kept_ys, strict=True):
        assert torch.equal(a, b)
    want = torch.autograd.grad(ys, given, [torch.ones_like(y) for y in ys])
    comm.engine_calls.clear()
    assert_equal(list(torch.autograd.grad(kept_ys, given, [torch.ones_like(y) for y in ys])), list(want))
    assert not any(operation == "all_gather_wgrad" for operation, _ in comm.engine_calls)


def test_a_kept_gather_is_not_repeated_in_backward():
    world(2).run(kept)


def kept_by_engine(group, engine: str) -> None:
    given = leaves(group)[:3]
    fusedtp.reserve(group, 1 << 16)
    comm = communicator(group)
    comm.engine_calls.clear()
    comm.layer_calls.clear()
    gather(group, engine, *given, keep_gathered=True, layer="attention")
    assert comm.engine_calls == {("all_gather_matmul", engine): 1}
    assert comm.layer_calls == {("attention", engine): 1}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_kept_gather_runs_in_the_engine_asked_for_and_is_counted_for_its_layer(engine):
    world(2).run(kept_by_engine, engine)


def kept_by_one(group) -> str:
    given = leaves(group)[:3]
    with pytest.raises(ValueError) as raised:
        gather(group, "chunked", *(t.detach() if group.rank() else t for t in given), keep_gathered=True)
    return str(raised.value)


def test_ranks_that_keep_a_gather_compare_which_inputs_need_gradients():
    assert all("needs_grad" in message for message in world(2).run(kept_by_one))


def kept_in_a_graph(group, engine: str) -> None:
    torch._dynamo.reset()
    fusedtp.reserve(group, 1 << 16)
    comm = communicator(group)
    found = []
    for compile in (lambda f: f, lambda f: torch.compile(f, fullgraph=True, backend="aot_eager")):
        given = leaves(group)[:3]
        ys = compile(lambda *args: gather(group, engine, *args, keep_gathered=True))(*given)
        comm.engine_calls.clear()
        found.append([*ys, *torch.autograd.grad(ys, given, [torch.ones_like(y) for y in ys])])
        assert not any(operation == "all_gather_wgrad" for operation, _ in comm.engine_calls)
    assert_equal(found[1], found[0])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_compiled_gather_is_kept_too(engine):
    world(2).run(kept_in_a_graph, engine, timeout=120)


def changed_in_place(group) -> str:
    given = leaves(group)
    y = mlp(group, "chunked", *given)
    with torch.no_grad():
        given[1].add_(1)
    with pytest.raises(RuntimeError) as raised:
        y.sum().backward()
    return str(raised.value)


def test_a_weight_changed_before_backward_is_noticed():
    assert all("modified by an inplace operation" in m for m in world(2).run(changed_in_place))


# -- autocast ---------------------------------------------------------------------------------------------------------


def autocast(group, engine: str) -> None:
    given = leaves(group)
    with torch.autocast("cpu", torch.bfloat16):
        y = mlp(group, engine, *given)
    got = torch.autograd.grad(y, given, torch.ones_like(y))
    narrow = [t.detach().bfloat16().requires_grad_() for t in given]
    want = mlp(group, engine, *narrow)
    assert y.dtype == torch.bfloat16 and torch.equal(y, want)
    for a, b in zip(got, torch.autograd.grad(want, narrow, torch.ones_like(want)), strict=True):
        assert a.dtype == torch.float32 and torch.equal(a, b.float())


@pytest.mark.parametrize("engine", ENGINES)
def test_under_autocast_a_layer_computes_in_the_narrow_dtype_as_linear_does(engine):
    world(2).run(autocast, engine)


# -- what needs no gradient is not kept ------------------------------------------------------------------------------


def kept_for(group, needs: str) -> dict[str, list[tuple[int, ...]]]:
    """The shapes that each kind of layer saves if x, the weights or both need gradients."""
    r = group.rank()
    x, full = numbers(SIZES[r], 4, seed=r).detach(), numbers(T, 4, seed=r).detach()
    w, v = numbers(5, 4).detach(), numbers(6, 4).detach()
    x.requires_grad_("x" in needs), full.requires_grad_("x" in needs)
    w.requires_grad_("w" in needs), v.requires_grad_("w" in needs)
    return {
        "gather": packed(lambda: gather(group, "chunked", x, w, v)),
        "kept gather": packed(lambda: gather(group, "chunked", x, w, v, keep_gathered=True)),
        "scatter": packed(lambda: scatter(group, "chunked", full, w)),
        "reduce": packed(lambda: fusedtp.matmul_all_reduce(full, w, group)),
    }


@pytest.mark.parametrize("needs", ["x", "w", "xw"])
def test_a_layer_keeps_only_what_some_gradient_reads(needs):
    for r, seen in enumerate(world(2).run(kept_for, needs)):
        weights, one = ([(5, 4), (6, 4)], [(5, 4)]) if "x" in needs else ([], [])
        shard, full = ([(SIZES[r], 4)], [(T, 4)]) if "w" in needs else ([], [])
        want = {
            "gather": shard + weights,
            "kept gather": full + weights,
            "scatter": full + one,
            "reduce": full + one,
        }
        assert seen == want


def changed_where_nothing_reads(group) -> None:
    """With a frozen weight, x may change in place; with an x that needs no gradient, the weight may."""
    x, w = numbers(T, 4, seed=1), numbers(5, 4, seed=2).detach()
    y = scatter(group, "chunked", x, w)
    with torch.no_grad():
        x.zero_()
    y.sum().backward()
    x, w = numbers(T, 4, seed=1).detach(), numbers(5, 4, seed=2)
    y = scatter(group, "chunked", x, w)
    with torch.no_grad():
        w.zero_()
    y.sum().backward()
    assert torch.equal(w.grad, x.sum(0).expand(5, 4))


def test_what_no_gradient_reads_may_change():
    world(2).run(changed_where_nothing_reads)
