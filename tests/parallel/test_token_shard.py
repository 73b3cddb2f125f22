"""A tensor of which each rank holds some tokens, against the plain one: values, gradients, and what had to gather.

A program gets tokens x [*lead, H], a parameter w [H], a square one m [H, H], and something of all tokens a [*lead, H],
which all want gradients. On ranks, x is split and the others are the same plain tensors on each: their gradients must
come out whole, on every rank.
"""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fusedtp.comm import VirtualWorld, communicator
from fusedtp.parallel.token_shard import TokenShard, shard
from tests.harness import world

Program = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def norm(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w


def in_place(x: Tensor, w: Tensor) -> Tensor:
    y = x * 1.0
    y.mul_(2.0).add_(w)
    y += 1.0
    y[..., 0] = 3.0
    return y


def of_a_view(x: Tensor, w: Tensor) -> Tensor:
    y = x * 1.0
    first, second = y.tensor_split(2, -1)
    first.mul_(2.0)
    return torch.cat([y, first, second], -1)


def router(x: Tensor, m: Tensor) -> Tensor:
    scores = F.linear(x.reshape(-1, x.shape[-1]), m).softmax(-1, dtype=torch.float64)
    top, index = scores.topk(1, -1)
    mask = torch.zeros_like(scores).scatter_(1, index, 1.0)
    return (scores.gather(1, index) / (top + 1.0)) + scores * mask


# Each token for itself: on rows, without communication.
LOCAL: dict[str, Program] = {
    "norm": lambda x, w, m, a: norm(x, w),
    "F.rms_norm": lambda x, w, m, a: F.rms_norm(x, (x.shape[-1],), w),
    "F.layer_norm": lambda x, w, m, a: F.layer_norm(x, (x.shape[-1],), w, w),
    "residual": lambda x, w, m, a: x + torch.tanh(x) * w,
    "reversed operands": lambda x, w, m, a: 2.0 - (w / (x.square() + 1.0)),
    "a plain tensor of all tokens": lambda x, w, m, a: x * a + a,
    "one value a token": lambda x, w, m, a: x * a.sum(-1, keepdim=True),
    "a column of the sequence": lambda x, w, m, a: x * a[(0,) * (a.dim() - 2)] if a.dim() > 2 else x * a,
    "scalars": lambda x, w, m, a: x * w.sum() + 1,
    "where": lambda x, w, m, a: torch.where(x > 0, x, w),
    "masked_fill": lambda x, w, m, a: x.masked_fill(a > 0, -1.0),
    "linear": lambda x, w, m, a: F.gelu(F.linear(x, m, w)),
    "matmul": lambda x, w, m, a: x @ m,
    "softmax": lambda x, w, m, a: x.softmax(-1) * w,
    "reductions": lambda x, w, m, a: (
        x.sum(-1, keepdim=True) * x.amax(-1, keepdim=True) + x.var(-1, keepdim=True)
    ),
    "chunk and cat": lambda x, w, m, a: torch.cat([*x.tensor_split(2, -1), x], dim=-1),
    "stack": lambda x, w, m, a: torch.stack([x, x * 2], -1).sum(-1),
    "unbind": lambda x, w, m, a: x.unsqueeze(-1).expand(*x.shape, 2).unbind(-1)[1] * w,
    "flat and back": lambda x, w, m, a: norm(x.reshape(-1, x.shape[-1]), w).view(x.shape) + x,
    "features": lambda x, w, m, a: x[..., :1] * x[..., -1:] + x,
    "all positions": lambda x, w, m, a: x[(slice(None),) * (x.dim() - 1)] * w,
    "transposed features": lambda x, w, m, a: x.unsqueeze(-1).transpose(-1, -2).squeeze(-2) * w,
    "permuted features": lambda x, w, m, a: x.unsqueeze(-1).permute(
        *range(x.dim() - 1), x.dim(), x.dim() - 1
    ),
    "repeated": lambda x, w, m, a: x.repeat_interleave(2, dim=-1) + x.repeat(*[1] * (x.dim() - 1), 2),
    "unflatten": lambda x, w, m, a: x.unflatten(-1, (1, -1)).flatten(-2) * w,
    "pad": lambda x, w, m, a: F.pad(x, (1, 2)),
    "router": lambda x, w, m, a: router(x, m),
    "in place": lambda x, w, m, a: in_place(x, w),
    "a view in place": lambda x, w, m, a: of_a_view(x, w),
    "types": lambda x, w, m, a: (x.float().to(torch.float64) * w).type_as(a),
    "detached": lambda x, w, m, a: x.detach() * w + x,
    "checkpoint": lambda x, w, m, a: checkpoint(norm, x, w, use_reentrant=False),
}
# What may look at other tokens.
GATHERING: dict[str, Program] = {
    "over tokens": lambda x, w, m, a: x.softmax(0) + x.cumsum(0) * w,
    "mean of all": lambda x, w, m, a: x.mean() * w,
    "tokens transposed": lambda x, w, m, a: x.transpose(0, -1).contiguous() * w.sum(),
    "einsum": lambda x, w, m, a: torch.einsum("...h,hk->...k", x, m),
    "some tokens": lambda x, w, m, a: x[:1] * w,
    "attention": lambda x, w, m, a: F.scaled_dot_product_attention(x, x * w, x),
    "rolled": lambda x, w, m, a: x.roll(1, 0) + x,
    "in place from all": lambda x, w, m, a: (x * 1.0).index_fill_(0, torch.tensor([0]), 2.0) * w,
    "a mask of elements": lambda x, w, m, a: x[x > 0].sum() * w,
}


def tensors(lead: tuple[int, ...], width: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((*lead, width), (width,), (width, width), (*lead, width))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def weights_like(x: Tensor) -> Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def on_rank(group: Any, full: list[Tensor], program: Program) -> tuple[Tensor, list[Any], Counter[str]]:
    """The whole result, gradients of all operands, and what was gathered."""
    comm, gathered = communicator(group), Counter[str]()
    x, *others = (each.clone().requires_grad_() for each in full)
    y = program(shard(x, comm.name, comm.rank, comm.world_size, gathered), *others)
    counted = Counter(gathered)
    whole = y.full_tensor() if isinstance(y, TokenShard) else y
    (whole * weights_like(whole)).sum().backward()
    return whole.detach(), [x.grad, *(each.grad for each in others)], counted


def alone(full: list[Tensor], program: Program) -> tuple[Tensor, list[Any]]:
    operands = [x.clone().requires_grad_() for x in full]
    y = program(*operands)
    (y * weights_like(y)).sum().backward()
    return y.detach(), [x.grad for x in operands]


def compare(world_size: int, full: list[Tensor], program: Program, gathers: bool | None) -> None:
    want, wanted = alone(full, program)
    for got, gradients, counted in VirtualWorld(world_size).run(lambda group: on_rank(group, full, program)):
        torch.testing.assert_close(got, want)
        assert gathers is None or bool(counted) == gathers, counted
        for mine, theirs in zip(gradients, wanted, strict=True):
            if mine is None or theirs is None:
                assert mine is theirs or not (theirs if mine is None else mine).any()
            else:
                torch.testing.assert_close(mine, theirs)


LEADS = st.one_of(
    st.tuples(st.integers(1, 7)),
    st.tuples(st.integers(1, 4), st.integers(1, 5)),
    st.sampled_from([(3, 3), (4, 4)]),
)


@pytest.mark.parametrize("name", LOCAL)
@settings(max_examples=25)
@given(world_size=st.integers(1, 4), lead=LEADS, width=st.integers(2, 4), seed=st.integers(0, 99))
def test_what_treats_tokens_alike_stays_local(
    name: str, world_size: int, lead: tuple[int, ...], width: int, seed: int
):
    compare(world_size, tensors(lead, width, seed), LOCAL[name], gathers=False)


@pytest.mark.parametrize("name", GATHERING)
@settings(max_examples=25)
@given(world_size=st.integers(1, 4), lead=LEADS, width=st.integers(2, 4), seed=st.integers(0, 99))
def test_anything_else_gathers_and_is_counted(
    name: str, world_size: int, lead: tuple[int, ...], width: int, seed: int
):
    compare(world_size, tensors(lead, width, seed), GATHERING[name], gathers=True)


SAME_SHAPE = [
    name for name in LOCAL if name not in {"permuted features", "repeated", "chunk and cat", "pad", "router"}
]
SAME_SHAPE = [name for name in SAME_SHAPE if name not in {"reductions", "a view in place"}]


@settings(max_examples=100)
@given(
    names=st.lists(
        st.sampled_from([*SAME_SHAPE, "over tokens", "rolled", "attention"]), min_size=2, max_size=5
    ),
    world_size=st.integers(1, 4),
    lead=LEADS,
    width=st.integers(2, 4),
    seed=st.integers(0, 99),
)
def test_one_after_another(names: list[str], world_size: int, lead: tuple[int, ...], width: int, seed: int):
    def program(x: Tensor, w: Tensor, m: Tensor, a: Tensor) -> Tensor:
        for name in names:
            x = torch.tanh({**LOCAL, **GATHERING}[name](x, w, m, a))
        return x

    compare(world_size, tensors(lead, width, seed), program, gathers=None)


def on_processes(group: Any, full: list[Tensor]) -> None:
    def program(x: Tensor, w: Tensor, m: Tensor, a: Tensor) -> Tensor:
        return F.linear(norm(x + a, w), m).cumsum(0) + x

    want, wanted = alone(full, program)
    got, gradients, counted = on_rank(group, full, program)
    torch.testing.assert_close(got, want)
    assert counted == {"cumsum": 1}
    for mine, theirs in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("lead", [(5,), (2, 3), (1, 1)])
def test_on_processes(lead: tuple[int, ...]):
    world(3).run(on_processes, tensors(lead, 4, 0))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy * 2


def test_functions_of_others_get_gradients_too():
    def program(x: Tensor, w: Tensor, m: Tensor, a: Tensor) -> Tensor:
        return Doubled.apply(x * w) + x

    compare(3, tensors((2, 4), 3, 0), program, gathers=None)


def test_dropout_draws_as_one_device_does():
    full = tensors((3, 5), 4, 0)

    def program(x: Tensor, w: Tensor, m: Tensor, a: Tensor) -> Tensor:
        return F.dropout(x * w, 0.5)

    def seeded(group: Any) -> Any:
        torch.manual_seed(7)
        return on_rank(group, full, program)

    torch.manual_seed(7)
    want, wanted = alone(full, program)
    got, gradients, counted = VirtualWorld(1).run(seeded)[0]
    assert torch.equal(got, want) and not counted
    torch.testing.assert_close(gradients[0], wanted[0])


def seeded_on_processes(group: Any, full: list[Tensor]) -> None:
    torch.manual_seed(7)
    want = F.dropout(full[0], 0.5)
    torch.manual_seed(7)
    comm = communicator(group)
    x = shard(full[0], comm.name, comm.rank, comm.world_size, Counter())
    assert torch.equal(F.dropout(x, 0.5).full_tensor(), want)


def test_dropout_is_the_same_on_every_rank():
    world(3).run(seeded_on_processes, tensors((2, 5), 4, 0))


def test_metadata_and_what_it_refuses():
    def body(group: Any) -> None:
        comm, gathered = communicator(group), Counter[str]()
        x = shard(torch.ones(2, 3, 4, requires_grad=True), comm.name, comm.rank, 2, gathered)
        assert x.shape == (2, 3, 4) and x.size(-1) == 4 and x.dim() == 3 and len(x) == 2 and x.numel() == 24
        assert (
            x.dtype == torch.float32 and x.device.type == "cpu" and x.requires_grad and x.is_floating_point()
        )
        assert repr(x).startswith("TokenShard((2, 3, 4), rows (3, 4) of rank ")
        assert math.prod(x.local.shape) == 12
        with pytest.raises(TypeError, match="save its full_tensor"):
            torch.save(x, "/dev/null")
        with pytest.raises(RuntimeError, match="use unsqueeze"):
            x.unsqueeze_(0)
        with torch.no_grad():
            assert not (x * 2).requires_grad
        with torch.autocast("cpu", torch.bfloat16):
            assert F.linear(x, torch.ones(4, 4)).dtype == torch.bfloat16
        assert not gathered

    VirtualWorld(2).run(body)


def test_inference_mode():
    def body(group: Any) -> Tensor:
        comm = communicator(group)
        with torch.inference_mode():
            x = shard(torch.arange(24.0).view(2, 3, 4), comm.name, comm.rank, 3, Counter())
            return (x * 2).cumsum(1)

    for got in VirtualWorld(3).run(body):
        assert torch.equal(got, (torch.arange(24.0).view(2, 3, 4) * 2).cumsum(1))
