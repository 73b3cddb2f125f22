"""Linear layers: any activation dtype with any parameter dtype, and several layers on one input."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from fusedtp.nn import Linear, project
from fusedtp.nn import linear as linear_module
from fusedtp.nn.hooks import is_called_plainly
from fusedtp.nn.linear import linears
from tests.nn.support import assert_sums, assert_within, randn


@pytest.mark.slow
@given(st.integers(0, 600), st.integers(1, 9), st.integers(1, 9), st.booleans(), st.sampled_from("bhfd"))
def test_linear_rounds_once(tokens: int, k: int, n: int, bias: bool, kind: str) -> None:
    dtype = {"b": torch.bfloat16, "h": torch.float16, "f": torch.float32, "d": torch.float64}[kind]
    inputs = [randn(tokens, k, seed=1), randn(n, k, seed=2), randn(n, seed=3)][: 2 + bias]
    mine = [x.to(dtype).requires_grad_() for x in inputs]
    theirs = [x.to(dtype).double().requires_grad_() for x in inputs]
    y, want = linears(mine[0], mine[1:2], mine[2:] or [None])[0], F.linear(*theirs)
    assert y.dtype == dtype
    dy = randn(tokens, n, seed=4).to(dtype)
    y.backward(dy)
    want.backward(dy.double())
    absolute = [x.detach().abs().requires_grad_() for x in theirs]
    sizes = F.linear(*absolute)
    sizes.backward(dy.double().abs())
    assert_sums("y", y, want.detach(), sizes.detach(), k + bias)
    for name, terms, a, b, size in zip(
        ("x", "weight", "bias"), (n, tokens, tokens), mine, theirs, absolute, strict=False
    ):
        assert a.grad is not None and b.grad is not None and size.grad is not None and a.grad.dtype == dtype
        assert_sums(f"d{name}", a.grad, b.grad, size.grad, terms)


def several_law(device: str, widths: list[int], dtype: torch.dtype, kept: torch.dtype, seen: list[bool]) -> None:
    """Several weights on one x; dw of fp32 weights is exact to fp32, dx is rounded once more per additional weight.

    seen   the outputs that a loss depends on
    """
    tokens, k = 37, 24
    x = randn(tokens, k, seed=1).to(dtype)
    weights = [randn(n, k, seed=2 + n).to(kept) for n in widths]
    biases = [None if n % 2 else randn(n, seed=3 + n).to(kept) for n in widths]
    given = [t.to(device).requires_grad_() for t in (x, *weights)]
    given_biases = [None if b is None else b.to(device).requires_grad_() for b in biases]
    ys = linears(given[0], given[1:], given_biases)
    dys = [randn(tokens, n, seed=9 + n).to(dtype) for n in widths]
    used = [(y, dy.to(device)) for y, dy, is_seen in zip(ys, dys, seen, strict=True) if is_seen]
    torch.autograd.backward([y for y, _ in used], [dy for _, dy in used])
    total, lost = torch.zeros(tokens, k, dtype=torch.float64), torch.zeros(tokens, k, dtype=torch.float64)
    for i, (w, b, n) in enumerate(zip(weights, biases, widths, strict=True)):
        cast, wide = w.to(dtype).double(), x.double()
        bias = 0.0 if b is None else b.to(dtype).double()
        size = wide.abs() @ cast.abs().t() + (0.0 if b is None else bias.abs())
        assert ys[i].dtype == dtype
        assert_sums(f"y{i}", ys[i].cpu(), wide @ cast.t() + bias, size, k + 1)
        if not seen[i]:
            assert given[1 + i].grad is None
            continue
        dy = dys[i].double()
        dw = given[1 + i].grad
        assert dw is not None and dw.dtype == kept
        assert_sums(f"dw{i}", dw.cpu(), dy.t() @ wide, dy.abs().t() @ wide.abs(), tokens)
        if b is not None:
            db = given_biases[i].grad
            assert_sums(f"db{i}", db.cpu(), dy.sum(0), dy.abs().sum(0), tokens)
        total += dy @ cast
        lost += torch.finfo(torch.float32).eps * (n + 2) * (dy.abs() @ cast.abs())
        lost += torch.finfo(dtype).eps / 2 * total.abs()
    if any(seen):
        assert_within("dx", given[0].grad.cpu(), total, lost)


@pytest.mark.slow
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True),
    st.sampled_from([torch.bfloat16, torch.float16]),
    st.booleans(),
    st.data(),
)
def test_several_on_one_input(widths: list[int], dtype: torch.dtype, wide: bool, data: st.DataObject) -> None:
    """As on a CPU without 16-bit instructions, which uses the same autograd node as GPUs."""
    seen = data.draw(st.lists(st.booleans(), min_size=len(widths), max_size=len(widths)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fusedtp.nn.linear.widens", lambda x: True)
        patch.setattr("fusedtp.ops.matmul._is_native", lambda dtype: False)
        several_law("cpu", widths, dtype, torch.float32 if wide else dtype, seen or [True])


def test_a_backward_in_two_passes_makes_no_product_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in zero-bubble pipelines: the input pass computes the three dx, the weight pass the three dw."""
    monkeypatch.setattr("fusedtp.nn.linear.widens", lambda x: True)
    made = dict.fromkeys(("matmul", "matmul_add", "matmul_as"), 0)
    for name in made:
        function = getattr(linear_module, name)

        def counted(*args: object, name: str = name, function: Callable[..., object] = function) -> object:
            made[name] += 1
            return function(*args)

        monkeypatch.setattr(linear_module, name, counted)
    layers = [Linear(4, 6), Linear(4, 6), Linear(6, 4)]
    weights = [layer.weight for layer in layers]

    def run(x: torch.Tensor) -> torch.Tensor:
        a, b = project(x, layers[:2])
        return layers[2](a * b)

    x = torch.randint(-2, 3, (5, 4)).bfloat16().requires_grad_()
    run(x).sum().backward()
    whole = [t.grad for t in (x, *weights)]
    x.grad = None
    for w in weights:
        w.grad = None
    y = run(x)
    made.update(dict.fromkeys(made, 0))
    (dx,), groups = stage_backward_input([y], [torch.ones_like(y)], [x], iter(weights))
    assert made == {"matmul": 2, "matmul_add": 1, "matmul_as": 0}
    stage_backward_weight(iter(weights), groups)
    assert made == {"matmul": 2, "matmul_add": 1, "matmul_as": 3}
    for got, want in zip((dx, *(w.grad for w in weights)), whole, strict=True):
        assert got is not None and want is not None and torch.equal(got, want)


@pytest.mark.parametrize("x_wants, w_wants, kept", [(True, True, 2), (True, False, 1), (False, True, 1)])
def test_only_what_a_gradient_needs_is_kept(
    x_wants: bool, w_wants: bool, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen weights keep no activations, as in torch."""
    monkeypatch.setattr("fusedtp.nn.linear.widens", lambda x: True)
    x = torch.randn(5, 4).bfloat16().requires_grad_(x_wants)
    w = torch.randn(3, 4).requires_grad_(w_wants)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        (y,) = linears(x, [w], [None])
    y.sum().backward()
    assert len(saved) == kept and (x.grad is not None, w.grad is not None) == (x_wants, w_wants)


def test_layers_with_hooks_or_of_other_classes_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """`project` takes the weights of plain layers only."""

    class Doubled(Linear):
        def forward(self, x: torch.Tensor, layout: object = None) -> torch.Tensor:
            return 2 * super().forward(x)

    monkeypatch.setattr("fusedtp.nn.linear.widens", lambda x: True)
    called = []
    plain, hooked, patched, other = (Linear(4, 3), Linear(4, 3), Linear(4, 3), Doubled(4, 3))
    hooked.register_forward_hook(lambda module, inputs, y: called.append("hook"))
    patched.forward = lambda x: called.append("patch") or x  # type: ignore[method-assign]
    x = torch.randn(5, 4).bfloat16()
    for second in (hooked, patched, other):
        got = project(x, [plain, second])
        assert torch.equal(got[0], plain(x))
    assert called == ["hook", "patch"]
    assert torch.equal(got[1], 2 * F.linear(x, other.weight.bfloat16()))


def test_hooks_of_all_modules_see_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools that count flops or time per module rely on these hooks."""
    monkeypatch.setattr("fusedtp.nn.linear.widens", lambda x: True)
    layers, seen = [Linear(4, 3), Linear(4, 5)], []
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, y: seen.append(module))
    try:
        project(torch.randn(6, 4).bfloat16(), layers)
    finally:
        handle.remove()
    assert seen == layers
    layers[0].compile(backend="eager")
    assert not is_called_plainly(layers[0]) and is_called_plainly(layers[1])


@pytest.mark.parametrize("dtype, other", [(torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16)])
def test_autocast_to_another_16_bits(dtype: torch.dtype, other: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer computes in autocast's dtype, as torch's does, and its backward uses matching dtypes."""
    monkeypatch.setattr("fusedtp.nn.linear.widens", lambda x: True)
    x, w = torch.randn(5, 4).to(dtype).requires_grad_(), torch.randn(3, 4, requires_grad=True)
    with torch.autocast("cpu", other):
        (y,) = linears(x, [w], [None])
    y.sum().backward()
    assert y.dtype == other and x.grad is not None and x.grad.dtype == dtype and w.grad is not None


def test_transforms_of_torch_func(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusedtp.nn.linear.widens", lambda x: True)
    w = torch.ones(3, 4).bfloat16()
    gradient = torch.func.grad(lambda x: linears(x, [w], [None])[0].sum())(torch.ones(2, 4).bfloat16())
    assert torch.equal(gradient, torch.full((2, 4), 3.0).bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_parameters_are_cast_to_the_activations(dtype: torch.dtype) -> None:
    layer = Linear(4, 3, bias=True)
    y = layer(torch.randn(2, 5, 4, dtype=dtype))
    y.float().sum().backward()
    assert y.dtype == dtype and y.shape == (2, 5, 3)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())


def test_project_is_each_linear() -> None:
    x, layers = torch.randn(6, 4), [Linear(4, 3), Linear(4, 5, bias=True)]
    for got, layer in zip(project(x, layers), layers, strict=True):
        assert torch.equal(got, layer(x))


def test_a_parallel_object_takes_over() -> None:
    """The hooks of hooks.py get the documented arguments."""

    class Recorder:
        def project(self, *arguments: object) -> str:
            return ("project", *arguments)  # type: ignore[return-value]

        def linear(self, *arguments: object) -> str:
            return ("linear", *arguments)  # type: ignore[return-value]

    x, layers = torch.randn(6, 4), [Linear(4, 3), Linear(4, 5)]
    layers[0].parallel = Recorder()
    assert project(x, layers, None) == ("project", x, layers, None, None)
    assert layers[0](x) == ("linear", x, layers[0], None)
