"""TokenShards: a program on shards has the same values, metadata and gradients as on the whole tensor.

A program is a list of seeds. It runs once on a plain tensor and once on ranks that hold shards of it, with the same
code and operands. Values are small integers in float64, so sums are exact in any order. Each gradient must be complete
and equal on every rank. Ranks are threads, except in a few cases at the end.
"""

import pickle
import random
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from fusedtp.comm import VirtualWorld, communicator
from fusedtp.parallel.token_shard import TokenShard, shard
from fusedtp.parallel.torch_names import ALONG, ELEMENTWISE
from tests.harness import world
from tests.sampling import examples


class Run:
    """One run of a program: its operands, all drawn from one seed, and their shards if `comm` is given."""

    def __init__(self, comm: Any = None, dtype: torch.dtype = torch.float64) -> None:
        self.comm, self.dtype = comm, dtype
        self.gathered: Counter[str] = Counter()
        self.leaves: list[Tensor] = []
        self.random = random.Random(0)

    def split(self, full: Tensor) -> Tensor:
        if self.comm is None:
            return full
        return shard(full, self.comm.name, self.comm.rank, self.comm.world_size, self.gathered)

    def leaf(self, *shape: int, low: int = -3, high: int = 4) -> Tensor:
        """A plain tensor that requires a gradient."""
        generator = torch.Generator().manual_seed(self.random.randrange(1 << 30))
        values = torch.randint(low, high, shape, generator=generator).to(self.dtype)
        self.leaves.append(values.requires_grad_())
        return self.leaves[-1]

    def operand(self, x: Tensor) -> Any:
        """An operand for x: a number, a 0-dim tensor, a shard, or a plain tensor whose shape broadcasts."""
        kind = self.random.choice(["number", "scalar", "shard", "feature", "token", "any", "any"])
        if kind == "number":
            return self.random.choice([2, -1, 3.0])
        if kind == "scalar":
            return self.leaf()
        if kind == "shard" and x.dim() > 1:
            return self.split(self.leaf(*x.shape))
        if kind == "feature":
            return self.leaf(*[1] * self.random.randrange(x.dim()), x.shape[-1])
        if kind == "token":
            some = self.leaf(*x.shape[:-1], 1)
            return some if self.random.random() < 0.6 else some.detach()
        kept = [n if self.random.random() < 0.6 else 1 for n in x.shape]
        some = self.leaf(*kept[self.random.randrange(len(kept) + 1) :])
        return some if self.random.random() < 0.6 else some.detach()

    def integers(self, *shape: int, high: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.random.randrange(1 << 30))
        return torch.randint(0, high, shape, generator=generator)


# --- programs ---------------------------------------------------------------------------------------------------


class Double(Function):
    """An autograd.Function, so Python code below the wrapper's node in the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, saves: bool) -> Tensor:
        ctx.save_for_backward(*[x] * saves)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return sum((x * 0 for x in ctx.saved_tensors), grad * 2), None


def bounded(x: Tensor) -> Tensor:
    """Keeps values exact even after products."""
    return x.remainder(8) - 3


def binary(x: Tensor, run: Run) -> Tensor:
    function = run.random.choice([torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum, torch.fmod])
    other = run.operand(x)
    if not isinstance(other, Tensor):
        return bounded(run.random.choice([x + other, other - x, x * other, other * x]))
    if function is torch.fmod:
        other = other.abs() + 1
    return bounded(function(x, other) if run.random.random() < 0.6 or function is torch.fmod else function(other, x))


def compared(x: Tensor, run: Run) -> Tensor:
    mask = run.random.choice([torch.gt, torch.ne, torch.le])(x, run.operand(x))
    other = run.operand(x)
    other = other if isinstance(other, Tensor) else x.new_tensor(other)
    match run.random.randrange(6):
        case 0:
            return torch.where(mask, x, other)
        case 1:
            return torch.where(~mask, other, x)
        case 2:
            return x.masked_fill(mask, 2)
        case 3:
            return x.clone().masked_fill_(mask & (x > 0), 1.0)
        case 4:
            return x * mask.type_as(x) + other.type_as(x)
        case _:
            return torch.where((x > 0)[..., :1], x, 0.0) + mask.to(x)


def in_place(x: Tensor, run: Run) -> Tensor:
    y, other = x.clone(), run.operand(x)
    match run.random.randrange(8):
        case 0:
            y.add_(other, alpha=2)
        case 1:
            y.mul_(other)
        case 2:
            y += other
            y *= 2
        case 3:
            y -= other
        case 4:
            y.copy_(other if isinstance(other, Tensor) else x * other)
        case 5:
            y.fill_(2 if isinstance(other, Tensor) and other.dim() else other)
        case 6:
            y = torch.zeros_like(x).add_(x).sub_(other)
        case _:
            y.clamp_(-1, 1).neg_()
    return bounded(y)


def of_a_view(x: Tensor, run: Run) -> Tensor:
    """Change a part in place, by Python or by C++; the whole tensor and other parts must see it."""
    y = run.random.choice([lambda: x.clone(), lambda: Double.apply(x, False)])()
    k = run.random.randint(0, x.shape[-1])
    part = run.random.choice(
        [
            lambda: y[..., :k],
            lambda: y.narrow(-1, 0, k),
            lambda: y.view(y.shape)[..., k:],
            lambda: y.unsqueeze(-1),
        ]
    )()
    before = run.random.choice([lambda: Double.apply(y, False), lambda: y * 1])()
    part.mul_(run.operand(part))
    whole = run.random.choice([lambda: Double.apply(y, False), lambda: y + 1])()
    again = run.random.choice([lambda: Double.apply(part, False), lambda: part * 1])()
    return bounded(whole + before + again.sum())


def along(x: Tensor, run: Run) -> Tensor:
    dim = run.random.choice([-1, -1, -1, x.dim() - 1, 0, x.dim() - 2, (-1, -2)])
    if isinstance(dim, tuple) and x.dim() < 2:
        dim = -1
    keep = run.random.random() < 0.5
    one = dim if isinstance(dim, int) else -1
    name = run.random.choice(["sum", "mean", "amax", "any", "max", "cumsum", "sort", "softmax", "var", "norm", "roll"])
    empty = x.numel() == 0
    if name in ("sum", "mean"):
        y = getattr(x, name)(dim, keepdim=keep) if not (empty and name == "mean") else x.sum(dim, keepdim=keep)
        y = y * x.shape[-1] if name == "mean" else y
    elif name == "amax" and not empty:
        y = x.amax(dim, keepdim=keep)
    elif name == "any":
        y = (x > 0).any(one, keepdim=keep).to(x.dtype)
    elif name == "max" and not empty:
        best = x.max(one, keepdim=keep)
        y = best.values * 1 + best.indices.to(x.dtype)
    elif name == "var" and not empty:
        y = torch.var(x, one, correction=0, keepdim=keep)
    elif name == "norm":
        y = torch.linalg.vector_norm(x, 1, dim=dim, keepdim=keep)
    elif name == "sort":
        y = x.sort(dim=one, stable=True).values
    elif name == "softmax":
        y = torch.softmax(x, one) * 4
    elif name == "roll":
        y = x.roll(1, one)
    else:
        y = x.cumsum(one)
    if y.dim() < 2:
        return x + y.sum()
    return y


def parts(x: Tensor, run: Run) -> Tensor:
    dim = run.random.choice([-1, -1, x.dim() - 1, 0, -2])
    match run.random.randrange(7):
        case 0:
            return torch.cat(x.chunk(2, dim)[::-1], dim)
        case 1:
            return torch.cat([x, run.split(run.leaf(*x.shape)), run.leaf(*x.shape)], dim)
        case 2:
            return torch.stack([x, run.leaf(*x.shape)], run.random.choice([-1, 0, x.dim()])).sum(-1)
        case 3:
            return sum(x.split(1, -1), torch.zeros((), dtype=x.dtype))
        case 4:
            return torch.stack([part * i for i, part in enumerate(x.unbind(-1), 1)], -1)
        case 5:
            half = x.tensor_split(2, -1)[0]
            return torch.cat((-half, half), dim=-1)
        case _:
            return x.repeat_interleave(2, dim=dim)


def arranged(x: Tensor, run: Run) -> Tensor:
    h = x.shape[-1]
    match run.random.randrange(12):
        case 0:
            return x.unsqueeze(run.random.randint(-x.dim() - 1, x.dim())) * 2
        case 1:
            return x.unsqueeze(-1).squeeze(-1).flatten(run.random.randrange(x.dim() - 1), -1)
        case 2:
            return x.reshape(-1, h)
        case 3:
            return x.reshape(*x.shape[:-1], 1, h).transpose(-1, -2).flatten(-2)
        case 4:
            return x.unflatten(-1, (1, h)).expand(*x.shape[:-1], 2, h).reshape(*x.shape[:-1], 2 * h)
        case 5:
            return x.flatten(0, -2).view(*x.shape[:-1], h)
        case 6:
            return x[..., None].repeat(*[1] * x.dim(), 2).permute(*range(x.dim() - 1), -1, x.dim() - 1).sum(-2)
        case 7:
            return x.sum(-1, keepdim=True).expand_as(x) + x.sum(-1, keepdim=True).broadcast_to(x.shape)
        case 8:
            return x.reshape(x.numel() // max(x.shape[0], 1), x.shape[0]) if x.numel() else x
        case 9:
            return x.transpose(0, 1)
        case 10:
            return x.unsqueeze(-1).mT.squeeze(-2).view_as(x)
        case _:
            return x.expand(2, *x.shape).sum(0) if x.dim() < 4 else x.squeeze()[..., None]


def indexed(x: Tensor, run: Run) -> Tensor:
    h, k = x.shape[-1], run.random.randrange(x.shape[-1] + 1)
    match run.random.randrange(13):
        case 0:
            return torch.cat([x[..., k:], x[..., :k]], -1)
        case 1:
            return x[..., ::2] if h else x
        case 2:
            return x[..., None] * x[..., None, :] if x.dim() < 4 else x[...]
        case 3:
            return x[:, : x.shape[1]] + x[()]
        case 4:
            return x[:, :1] + x
        case 5:
            return x[x[..., 0] > 0].sum() + x if h else x
        case 6:
            return x[None] * 2
        case 7:
            y = x.clone()
            y[..., :k] = run.operand(y[..., :k])
            return y
        case 8:
            y = x.clone()
            y[y > 0] = 2
            y[x[..., 0] < 0 if h else x < 0] = 1
            return y
        case 9:
            y = x.clone()
            y[:, 0:1] = run.leaf(1)
            y[:1] += 1
            return y
        case 10:
            return x.index_select(0, run.integers(3, high=x.shape[0])) if x.shape[0] else x
        case 11:
            return x[..., 0:1] + x[:, None].sum(1)
        case _:
            y = x.clone()
            y[..., -1:] = y[..., :1]
            y[(x > 1)] = y[(x > 1)] * 2
            return y


def weighted(x: Tensor, run: Run) -> Tensor:
    h = x.shape[-1]
    match run.random.randrange(9):
        case 0:
            return bounded(F.linear(x, run.leaf(3, h), run.leaf(3)))
        case 1:
            return bounded(x @ run.leaf(h, 2))
        case 2:
            return bounded(x.matmul(run.leaf(h))).unsqueeze(-1)
        case 3:
            return bounded(torch.addmm(run.leaf(3), x.reshape(-1, h), run.leaf(h, 3), alpha=2))
        case 4:
            return F.layer_norm(x, (h,), run.leaf(h), run.leaf(h)) if h else x
        case 5:
            return F.rms_norm(x, (h,), weight=run.leaf(h), eps=1e-3) if h else x
        case 6:
            return bounded(torch.einsum("...h,hk->...k", x, run.leaf(h, 2)))
        case 7:
            return bounded(run.leaf(x.shape[-2], x.shape[-2]) @ x)
        case _:
            return bounded(F.linear(x, run.split(run.leaf(4, h)))) if h else x


def routed(x: Tensor, run: Run) -> Tensor:
    """What routers compute from scores."""
    k = min(2, x.shape[-1])
    chosen = x.detach().argsort(dim=-1, stable=True)[..., :k]
    match run.random.randrange(5):
        case 0:
            return x.gather(-1, chosen)
        case 1:
            return x * torch.zeros_like(x).scatter_(-1, chosen, 1)
        case 2:
            return torch.zeros_like(x).scatter(x.dim() - 1, chosen, x.gather(-1, chosen) * 2)
        case 3:
            return x + F.one_hot(chosen, x.shape[-1]).sum(-2) if k else x
        case _:
            return x.scatter_add(-1, chosen, run.leaf(*chosen.shape))


def modes(x: Tensor, run: Run) -> Tensor:
    other = run.operand(x)
    match run.random.randrange(9):
        case 0:
            with torch.no_grad():
                y = x * other
            return x + y
        case 1:
            return checkpoint(lambda v: bounded(v * other) + v[..., :1], x, use_reentrant=False)
        case 2:
            if not x.requires_grad:
                return x
            return checkpoint(lambda v: bounded(v * other) + v[..., :1], x, use_reentrant=True)
        case 3:
            y = x * 1
            if y.requires_grad:
                y.register_hook(lambda grad: grad * torch.arange(grad.shape[-1]))
            return y * 2
        case 4:
            return Double.apply(x, True) + x
        case 5:
            leaf = x.detach().requires_grad_()
            y = leaf * 3 + Double.apply(leaf, True)
            y.backward(torch.ones_like(y))
            return x * leaf.grad
        case 6:
            if not x.requires_grad:
                return x
            y = x * x
            (grad,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
            return bounded(grad * x)
        case 7:
            return F.dropout(x, run.random.choice([0.0, 1.0]), True) + F.dropout(x, 0.5, False)
        case _:
            return F.relu(x.clone(), inplace=True) + x.float().double()


PROGRAMS = (binary, compared, in_place, of_a_view, along, parts, arranged, indexed, weighted, routed, modes)


# --- the law ------------------------------------------------------------------------------------------------------


def execute(run: Run, shape: tuple[int, ...], steps: list[tuple[Callable, int]]) -> dict[str, Any]:
    """The results of a program: values, and the gradient of every operand."""
    full = run.leaf(*shape)
    x = run.split(full)
    if steps and steps[0][1] % 5:
        x = x * 1
    for step, seed in steps:
        run.random.seed(seed)
        x = step(x, run)
        if x.dim() < 2:
            x = x.sum() + run.split(run.leaf(*shape))
    asked = (
        tuple(x.shape),
        tuple(x.size()),
        x.dim(),
        x.dtype,
        len(x),
        x.shape[-1],
        x.numel(),
        x.requires_grad,
    )
    run.random.seed(0)
    loss = (x * run.leaf(*x.shape)).sum()
    loss.backward()
    value = x.full_tensor() if isinstance(x, TokenShard) else x
    grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in run.leaves]
    return {"asked": asked, "value": value.detach(), "loss": loss.detach(), **dict(enumerate(grads))}


def close(got: Tensor, want: Tensor) -> bool:
    """Equal up to roundoff, which only normed values have; integers are exact."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    tolerance = 1e-9 * max(1.0, float(want.detach().double().nan_to_num().abs().max())) if want.numel() else 0.0
    return torch.allclose(got.double(), want.double(), rtol=0, atol=tolerance, equal_nan=True)


def check(world_size: int, shape: tuple[int, ...], steps: list[tuple[Callable, int]]) -> list[Counter[str]]:
    """Check the law. Returns the reasons for which each rank gathered."""
    want = execute(Run(), shape, steps)
    counts: list[Counter[str]] = []

    def body(group: Any) -> dict[str, Any]:
        run = Run(communicator(group))
        done = execute(run, shape, steps)
        counts.append(run.gathered)
        return done

    try:
        results = VirtualWorld(world_size).run(body)
    except RuntimeError as error:
        assert "passed to an autograd.Function" in str(error), error
        return counts
    for rank, got in enumerate(results):
        assert got.keys() == want.keys()
        for name, wanted in want.items():
            if not isinstance(wanted, Tensor):
                assert got[name] == wanted, f"rank {rank}: {name}"
            else:
                assert close(got[name], wanted), f"rank {rank}: {name}\n{got[name]}\nwanted\n{wanted}"
    return counts


SHAPES = st.one_of(
    st.tuples(st.integers(0, 3), st.integers(1, 5), st.integers(1, 4)),
    st.tuples(st.integers(0, 7), st.integers(1, 5)),
    st.sampled_from([(2, 2, 2), (3, 3, 3), (1, 1, 1), (1, 3, 1), (2, 3, 3), (4, 4), (3, 1, 3)]),
)


@pytest.mark.slow
@settings(max_examples=examples(1500, 250))
@given(
    st.integers(1, 4),
    SHAPES,
    st.lists(st.tuples(st.sampled_from(PROGRAMS), st.integers(0, 1 << 20)), min_size=1, max_size=6),
)
def test_a_program_on_shards_is_the_program_on_the_whole(world_size, shape, steps):
    try:
        execute(Run(), shape, steps)
    except (RuntimeError, IndexError, ValueError):
        reject()  # not a valid program for a plain tensor either
    check(world_size, shape, steps)


# --- every name of the tables --------------------------------------------------------------------------------------


def on_ranks(world_size: int, body: Callable[[Run], Any]) -> list[Any]:
    return VirtualWorld(world_size).run(lambda group: body(Run(communicator(group))))


POSITIVE = "sqrt rsqrt log log2 log10 log1p pow float_power rpow xlogy"
UNIT = "asin acos atanh erfinv logit"
TWO = (
    "add sub mul div true_divide floor_divide remainder fmod pow float_power rsub maximum minimum fmax fmin copysign "
    "isclose eq ne lt le gt ge not_equal less less_equal greater greater_equal logical_and logical_or logical_xor "
    "atan2 hypot logaddexp xlogy subtract multiply divide radd rmul rdiv rtruediv rfloordiv truediv floordiv mod rmod "
    "type_as copy"
)
OTHERS: dict[str, Callable[[Tensor, Any], Any]] = {
    "clamp": lambda x, y: torch.clamp(x, min=y),
    "clip": lambda x, y: torch.clip(x, -1, 1),
    "clamp_min": lambda x, y: torch.clamp_min(x, 1),
    "clamp_max": lambda x, y: torch.clamp_max(x, 1),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "masked_fill": lambda x, y: x.masked_fill(y > 0, 2),
    "lerp": lambda x, y: torch.lerp(x, y.expand(x.shape), 0.5),
    "addcmul": lambda x, y: torch.addcmul(x, y, y, value=2),
    "addcdiv": lambda x, y: torch.addcdiv(x, y, y.abs() + 1),
    "threshold": lambda x, y: F.threshold(x, 1, 2),
    "to": lambda x, y: (x.to(torch.float32), x.to("cpu"), y.to(x), x.to(y)),
    "type": lambda x, y: x.type(torch.float32),
    "full_like": lambda x, y: torch.full_like(x, 3),
    "empty_like": lambda x, y: torch.empty_like(x).copy_(y),
    "fill": lambda x, y: torch.fill(x, 2),
    "zero": lambda x, y: x.clone().zero_(),
    "data": lambda x, y: x.data,
    "copy": lambda x, y: x.clone().copy_(y),
    "rpow": lambda x, y: 2**x,
    "pos": lambda x, y: +x,
    "log_sigmoid": lambda x, y: F.logsigmoid(x),
    "signbit": lambda x, y: torch.signbit(x),
}
for _name in ("float", "half", "bfloat16", "double", "int", "long", "bool", "short"):
    OTHERS[_name] = lambda x, y, name=_name: getattr(x, name)()
for _name in ("and", "or", "xor", "rand", "ror", "rxor", "invert"):
    OTHERS[_name] = lambda x, y, name=_name: called(f"__{name}__", x.long(), y.long())
for _name in ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"):
    OTHERS[_name] = lambda x, y, name=_name: called(name, x.long(), y.long())


def called(name: str, x: Tensor, y: Tensor) -> Any:
    function = next(
        getattr(place, each)
        for place, each in [(torch, name), (F, name), (Tensor, name), (Tensor, f"__{name}__")]
        if hasattr(place, each)
    )
    unary = name in ("__invert__", "bitwise_not")
    return function(x) if unary else function(x, y)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ELEMENTWISE))
def test_elementwise_names(name):
    def body(run: Run) -> tuple[Any, Counter[str]]:
        x, y = run.split(run.leaf(2, 3, 4)), run.leaf(3, 4)
        run.gathered.clear()
        if name in UNIT.split():
            x = x / 8
        elif name in POSITIVE.split():
            x = x.abs() + 1
        if name in OTHERS:
            done = OTHERS[name](x, y)
        elif name in TWO.split():
            done = called(name, x, y)
        else:
            function = next(getattr(at, name) for at in (torch, F, Tensor) if hasattr(at, name))
            done = function(x)
        count = Counter(run.gathered)
        done = done if isinstance(done, tuple) else (done,)
        return [z.full_tensor() if isinstance(z, TokenShard) else z for z in done], count

    want, _ = body(Run())
    for got, count in on_ranks(2, body):
        assert not count, f"{name} gathers"
        assert all(close(g, w) for g, w in zip(got, want, strict=True))


FEATURES: dict[str, Callable[[Tensor], Any]] = {
    "topk": lambda x: x.topk(2, sorted=True).values,
    "kthvalue": lambda x: x.kthvalue(2).values,
    "glu": lambda x: F.glu(x),
    "norm": lambda x: x.norm(2, -1),
    "linalg_norm": lambda x: torch.linalg.norm(x, dim=2),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, 3, -1, True),
    "linalg_vector_norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "normalize": lambda x: F.normalize(x, 2.0, -1),
    "chunk": lambda x: x.chunk(2, -1),
    "split": lambda x: x.split([1, 3], dim=-1),
    "tensor_split": lambda x: x.tensor_split(3, 2),
    "narrow": lambda x: x.narrow(2, 1, 2),
    "select": lambda x: x.select(-1, 1),
    "roll": lambda x: x.roll(1, dims=-1),
    "diff": lambda x: x.diff(),
    "repeat_interleave": lambda x: x.repeat_interleave(2, -1),
    "flip": lambda x: x.flip(-1),
    "median": lambda x: x.median(-1).values,
    "mode": lambda x: x.mode().values,
    "sort": lambda x: x.sort(descending=True).values,
    "max": lambda x: (x.max(-1).values, torch.max(x, -x)),
    "min": lambda x: (x.min(dim=2).values, torch.min(x, x[..., :1])),
    "cummax": lambda x: x.cummax(-1).values,
    "cummin": lambda x: x.cummin(-1).values,
    "softmax": lambda x: (torch.softmax(x, -1), F.softmax(x, dim=2, dtype=torch.float32)),
    **{name: lambda x, name=name: getattr(torch, name)([x, x * 2], -1) for name in ("cat", "concat", "stack")},
    "concatenate": lambda x: torch.concatenate([x, x], axis=-1),
    "softmin": lambda x: F.softmin(x, -1),
    "all": lambda x: (x > 0).all(-1),
    "any": lambda x: (x > 0).any(dim=-1, keepdim=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ALONG))
def test_names_along_features(name):
    function = FEATURES.get(name, lambda x: getattr(torch, name)(x, dim=-1))

    def body(run: Run) -> Any:
        x = run.split(torch.randperm(24, generator=torch.Generator().manual_seed(1)).double().view(2, 3, 4))
        done = function(x)
        count = Counter(run.gathered)
        done = done if isinstance(done, tuple | list) else (done,)
        return [z.full_tensor() if isinstance(z, TokenShard) else z for z in done], count

    want, _ = body(Run())
    for world_size in (2, 4):
        for got, count in on_ranks(world_size, body):
            assert not count, f"{name} gathers"
            assert all(close(g, w) for g, w in zip(got, want, strict=True))


# Operations of a Transformer between its linear layers.
LOCAL: dict[str, Callable[[Tensor, Run], Any]] = {
    "norm": lambda x, run: run.leaf(4) * (x.float() * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1)).to(x.dtype),
    "gated": lambda x, run: F.silu(x[..., :2]) * x[..., 2:],
    "router": lambda x, run: torch.zeros_like(x.view(-1, 4)).scatter_(1, x.view(-1, 4).topk(2, dim=-1)[1], 1),
    "router weights": lambda x, run: x.view(-1, 4).gather(1, x.view(-1, 4).topk(2, dim=-1).indices),
    "one hot": lambda x, run: F.one_hot(x.argmax(-1), num_classes=4).permute(0, 1, 2),
    "heads": lambda x, run: x.view(2, 3, 2, 2).transpose(2, 3).reshape(2, 3, -1),
    "grouped": lambda x, run: x[:, :, None, :].expand(2, 3, 2, 4).flatten(2),
    "mask": lambda x, run: x.masked_fill(~(x.sum(-1, keepdim=True) > 0), 0.0),
    "positions": lambda x, run: x * run.leaf(3, 1) + run.leaf(3, 4),
    "plain mask": lambda x, run: x * (run.leaf(2, 3) > 0)[..., None],
    "padding": lambda x, run: x.clone().masked_fill_((run.leaf(2, 3, 1) > 0), 0.0),
    "assigned": lambda x, run: set_part(x, run),
    "residual": lambda x, run: x.clone().add_(run.split(run.leaf(2, 3, 4)), alpha=2),
    "dropped": lambda x, run: F.dropout(x * 1, 1.0, True, True) + F.dropout(x, 0.1, False),
    "noise": lambda x, run: torch.rand_like(x) * 0,
    "new": lambda x, run: x + x.new_zeros(4) + x.new_tensor([1.0]),
    "in turn": lambda x, run: torch.where(run.leaf(2, 3, 1) > 0, run.leaf(4), x),
}


def set_part(x: Tensor, run: Run) -> Tensor:
    y = x.clone()
    y[..., :2] = x[..., 2:]
    y[:, :, 3] = run.leaf(2, 3)
    y[run.leaf(2, 3) > 0] = 5
    y[y > 2] = 0
    return y


@pytest.mark.parametrize("name", LOCAL)
def test_common_code_gathers_nothing(name):
    def body(run: Run) -> Any:
        x = run.split(run.leaf(2, 3, 4))
        y = LOCAL[name](x, run)
        count = Counter(run.gathered)
        assert run.comm is None or type(y) is TokenShard
        y.double().sum().backward() if y.requires_grad else None
        return [y.full_tensor() if run.comm else y, *[leaf.grad for leaf in run.leaves]], count

    want, _ = body(Run())
    for got, count in on_ranks(2, body):
        assert not count
        assert all((g is w is None) or close(g, w) for g, w in zip(got, want, strict=True))


# --- what is not a value -------------------------------------------------------------------------------------------


def test_metadata_asks_no_other_rank():
    def body(run: Run) -> None:
        x = run.split(run.leaf(5, 3, 4)).float()
        assert (x.shape, x.size(-1), x.dim(), x.ndim, len(x), x.dtype) == (
            (5, 3, 4),
            4,
            3,
            3,
            5,
            torch.float32,
        )
        assert x.is_contiguous() and x.stride() == (12, 4, 1) and x.numel() == 60 and x.device.type == "cpu"
        assert x.requires_grad and not x.is_leaf and x.grad_fn is not None and not x.detach().requires_grad
        assert x.is_floating_point() and torch.is_tensor(x) and {x: 1}[x] == 1
        assert x._base is None and not (x + x)._is_view()
        assert "TokenShard((5, 3, 4), rows" in repr(x) and "TokenShard" in f"{x}" + str([x])
        with torch.no_grad():
            assert not (x * 2).requires_grad
        with torch.inference_mode():
            assert (x * 2).is_inference()
        assert not run.gathered

    on_ranks(4, body)


def test_gathers_are_counted_by_operation():
    def body(run: Run) -> None:
        x = run.split(run.leaf(2, 3, 4))
        x.transpose(0, 1)
        x.cumsum(1)
        x[:, 0]
        x[:, -1]
        torch.einsum("bsh->bh", x)
        x.full_tensor()
        want = {"transpose": 1, "cumsum": 1, "__getitem__": 2, "einsum": 1, "full_tensor": 1}
        assert run.gathered == Counter(want)

    on_ranks(2, body)


REFUSED: dict[str, tuple[type[Exception], Callable[[Tensor], Any]]] = {
    "pickle": (TypeError, lambda x: pickle.dumps(x)),
    "out": (NotImplementedError, lambda x: torch.add(torch.ones(4), 1, out=x)),
    "memory": (NotImplementedError, lambda x: x.data_ptr()),
    "shape in place": (NotImplementedError, lambda x: x.squeeze_()),
    "resized": (NotImplementedError, lambda x: x.resize_(3)),
    "data": (NotImplementedError, lambda x: setattr(x, "data", torch.ones(1))),
    "leaf in place": (RuntimeError, lambda x: x.detach().requires_grad_().mul_(2)),
    "view, then Function": (RuntimeError, lambda x: (x[:, 0].mul_(2), Double.apply(x, False))),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    error, function = REFUSED[name]

    def body(run: Run) -> None:
        x = run.split(run.leaf(2, 3, 4)) * 1
        with pytest.raises(error):
            function(x)

    on_ranks(2, body)


def test_ranks_without_rows_do_not_warn():
    def body(run: Run) -> None:
        x = run.split(run.leaf(1, 2, 3))
        assert x.local.shape[0] == (run.comm.rank < 2)
        y = x.mean(-1) + x.var(-1) + x.std(2) + x.amax(-1) + x.softmax(-1).sum(-1) + x.norm(dim=-1)
        (F.layer_norm(x, (3,)) * y[..., None]).sum().backward()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_ranks(4, body)


def test_autocast_and_bf16():
    def body(run: Run) -> Any:
        x, w = run.split(run.leaf(2, 3, 4)), run.leaf(5, 4).float()
        with torch.autocast("cpu", torch.bfloat16):
            y = F.linear(x.float(), w) + run.leaf(5)
            z = F.layer_norm(y, (5,)).to(torch.bfloat16).mul_(2) * run.leaf(5).bfloat16()
        z.float().sum().backward()
        y, z = (v.full_tensor() if run.comm else v for v in (y, z))
        return [y, z, *[leaf.grad for leaf in run.leaves]]

    want = body(Run())
    for got in on_ranks(2, body):
        for g, w in zip(got, want, strict=True):
            off = torch.finfo(torch.bfloat16).eps * w.abs().max()  # half a unit for each of two ranks' partial sums
            assert g.dtype == w.dtype and (g - w).abs().max() <= off


def test_no_grad_and_inference():
    for mode in (torch.no_grad, torch.inference_mode):

        def body(run: Run, mode: Any = mode) -> Any:
            full = run.leaf(2, 3, 4)
            with mode():
                x = run.split(full) * 1
                x += run.leaf(4)
                x[:, 0] = 1
                x[..., :2].mul_(3)
                y = F.relu(x, inplace=True).transpose(0, 1) + 0
                return (x.full_tensor() if run.comm else x), y

        want = body(Run())
        for got in on_ranks(3, body):
            assert all(close(g, w) for g, w in zip(got, want, strict=True))


# --- cases that draws seldom meet ----------------------------------------------------------------------------------


def same_on_ranks(program: Callable[[Tensor, Run], Tensor], *shape: int, world_size: int = 2) -> None:
    """Check one program on ranks."""
    check(world_size, shape, [(program, 1)])


def test_a_shard_beside_one_of_fewer_features():
    same_on_ranks(lambda x, run: x * x.sum(-1), 2, 2, 2)
    same_on_ranks(lambda x, run: x.sum(-1) + x, 3, 3, 3, world_size=3)
    same_on_ranks(lambda x, run: x + x.reshape(6, 2), 1, 6, 2)


def test_plain_operands_of_square_shapes():
    for size in (2, 3):
        for lead in ((), (1,), (size,), (1, 1), (size, 1), (1, size), (size, size)):
            same_on_ranks(lambda x, run, size=size, lead=lead: x * run.leaf(*lead, size), size, size, size)
            same_on_ranks(lambda x, run, size=size, lead=lead: x.sum(-1) * run.leaf(*lead[-1:], size), size, size, size)


def test_indices_of_a_mask_are_those_of_all_tokens():
    same_on_ranks(lambda x, run: x * sum(i.sum() for i in torch.where(x > 0)), 2, 3, 2)
    same_on_ranks(lambda x, run: x + x[x > 0].sum() + x[torch.nonzero(x > 0, as_tuple=True)].sum(), 2, 3, 2)


def test_one_hot_counts_the_classes_of_all_tokens():
    classes = torch.tensor([[0, 1, 1], [2, 4, 0]])
    same_on_ranks(lambda x, run: x + F.one_hot(run.split(classes[..., None]).squeeze(-1)).sum(), 2, 3, 2)


def test_a_view_over_tokens_and_its_shard_see_each_other_change():
    def the_view(x: Tensor, run: Run) -> Tensor:
        y = x * 1
        y[:, 0].mul_(run.leaf(2))
        return y * 2

    def the_shard(x: Tensor, run: Run) -> Tensor:
        y = x * 1
        first = y[:, 0]
        y.mul_(run.leaf(2))
        return y + first[:, None]

    def both(x: Tensor, run: Run) -> Tensor:
        y = x * 1
        rows = y.transpose(0, 1)
        rows[0] += run.leaf(2)
        y.add_(1)
        rows.mul_(3)
        return y.view(6, 2) + rows.sum()

    for program in (the_view, the_shard, both):
        same_on_ranks(program, 2, 3, 2)


def test_a_plain_tensor_in_the_likeness_of_a_shard_stays_plain():
    same_on_ranks(lambda x, run: x + run.leaf(2).to(x) + run.leaf(3, 1).type_as(x), 2, 3, 2)
    same_on_ranks(lambda x, run: x + run.leaf(2).expand_as(x) + run.leaf(3, 4).view_as(x), 2, 3, 2)


def test_a_matrix_times_a_shard_mixes_tokens():
    same_on_ranks(lambda x, run: run.leaf(3, 3) @ x, 2, 3, 2)
    same_on_ranks(lambda x, run: x.__rmatmul__(run.leaf(2, 3)), 2, 3, 2)


def test_gradients_of_shards_themselves():
    def retained(x: Tensor, run: Run) -> Tensor:
        y = Double.apply(x, False)
        z = y * 3
        y.retain_grad()
        z.retain_grad()
        (Double.apply(z, False) + y).sum().backward(retain_graph=True)
        return x * y.grad + z.grad

    def hooked(x: Tensor, run: Run) -> Tensor:
        y = Double.apply(x, False)
        y.register_hook(lambda grad: grad * grad.sum())
        return y * 1

    for program in (retained, hooked):
        same_on_ranks(program, 2, 3, 2)


# --- between processes -----------------------------------------------------------------------------------------------


def on_processes(group: Any) -> None:
    for seed in range(12):
        drawn = random.Random(seed)
        steps = [(drawn.choice(PROGRAMS), drawn.randrange(1 << 20)) for _ in range(4)]
        want, got = execute(Run(), (2, 3, 4), steps), execute(Run(communicator(group)), (2, 3, 4), steps)
        for name, wanted in want.items():
            same = close(got[name], wanted) if isinstance(wanted, Tensor) else got[name] == wanted
            assert same, (seed, name, steps)


def dropped(group: Any) -> None:
    """All ranks use one device's mask and draw as often as it does."""
    results = []
    for run in (Run(), Run(communicator(group))):
        torch.manual_seed(3)
        x = run.split(run.leaf(3, 5, 4, low=1)) * 1
        y = F.dropout(x, 0.5, True) + F.dropout(x.clone(), 0.25, True, True) + torch.rand_like(x)
        y = y + torch.empty_like(x).uniform_(0, 1) + torch.rand(4, dtype=torch.float64)
        y.sum().backward()
        results.append([y.full_tensor() if run.comm else y, run.leaves[0].grad])
    assert all(close(g, w) for w, g in zip(*results, strict=True))


@pytest.mark.parametrize("body", [on_processes, dropped])
def test_between_processes(body):
    world(3).run(body)
