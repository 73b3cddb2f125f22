"""Laws of the fused dispatch and matmul on each rank: the bits of the two calls, and on integers the formula."""

from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor

import fusedtp
from fusedtp.comm import communicator
from fusedtp.nn.experts import Experts
from fusedtp.ops.moe import (
    dispatch,
    grouped_gated,
    grouped_matmul,
    moe_combine,
    moe_dispatch,
    moe_dispatch_gated,
    moe_dispatch_matmul,
)
from tests.ops.moe.laws import Case, Data, build, mine, room_of
from tests.properties.laws import assert_same, poison


@dataclass(frozen=True)
class Matmul:
    """Experts [experts, out, width] on the rows of `case`, with an activation or none."""

    case: Case
    out: int
    act: str = ""


@dataclass
class Inputs:
    """The inputs of all ranks: routing and tokens, one matrix or gate and up, the gradient of the combined output."""

    data: Data
    matrices: list[Tensor]
    gradients: Tensor


def random(law: Matmul) -> Inputs:
    case, data = law.case, build(law.case)
    g = torch.Generator().manual_seed(case.seed + 1)
    draw = lambda *shape: torch.randn(shape, generator=g).to(case.dtype)  # noqa: E731
    data.x, data.weights = draw(*data.x.shape), torch.rand(data.weights.shape, generator=g)
    matrices = [draw(case.num_experts, law.out, case.width) for _ in range(2 if law.act else 1)]
    return Inputs(data, matrices, draw(sum(case.sizes), law.out))


def whole(law: Matmul) -> Inputs:
    """Integer inputs. In a gated matmul, gate's product is above 128 or below -128: there act is its argument or 0."""
    case, data = law.case, build(law.case)
    g = torch.Generator().manual_seed(case.seed + 1)
    draw = lambda *shape: torch.randint(-2, 3, shape, generator=g).to(case.dtype)  # noqa: E731
    matrices = [draw(case.num_experts, law.out, case.width) for _ in range(2 if law.act else 1)]
    if law.act:
        assert case.width and case.dtype == torch.float32
        data.x[:, 0], matrices[0][:, :, 0], matrices[1][:, :, 0] = 64, 3, 0
        matrices[0][::2, :, 0] = -3
    return Inputs(data, matrices, draw(sum(case.sizes), law.out))


def leaves_of(law: Matmul, inputs: Inputs, rank: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """x and weights of this rank's tokens, and the matrices of its experts."""
    case, here = law.case, mine(law.case, rank)
    each = case.num_experts // len(case.sizes)
    own = [m[rank * each : (rank + 1) * each].clone().requires_grad_() for m in inputs.matrices]
    x, weights = inputs.data.x[here].clone(), inputs.data.weights[here].clone()
    return x.requires_grad_(), weights.requires_grad_(), own


def computed(group, law: Matmul, inputs: Inputs, fused: bool, backward: bool = True) -> dict[str, Tensor]:
    """All results of this rank by name, from the fused call or from the two calls."""
    case, rank = law.case, group.rank()
    x, weights, own = leaves_of(law, inputs, rank)
    given = x, inputs.data.ids[mine(case, rank)], weights
    how = dict(sizes=case.sizes, engine=case.engine, max_rows=room_of(case, inputs.data))
    poison(group)
    with torch.set_grad_enabled(backward):
        if not fused:
            rows, offsets, handle = moe_dispatch(*given, case.num_experts, group, **how)
            by = case.engine if len(case.sizes) > 1 else "auto"  # on one rank there is no fused kernel
            if law.act:
                y = grouped_gated(rows, *own, offsets, act=law.act, engine=by)
            else:
                y = grouped_matmul(rows, *own, offsets, engine=by)
        elif law.act:
            y, offsets, handle = moe_dispatch_gated(*given, *own, case.num_experts, group, act=law.act, **how)
        else:
            y, offsets, handle = moe_dispatch_matmul(*given, *own, case.num_experts, group, **how)
        out = moe_combine(y, handle)
    found = {"offsets": offsets, "y": y[: int(offsets[-1])].detach(), "out": out.detach()}
    if backward:
        poison(group)
        out.backward(inputs.gradients[mine(case, rank)])
        grads = {"dx": x, "dweights": weights} | {f"dw{i}": w for i, w in enumerate(own)}
        found |= {name: leaf.grad for name, leaf in grads.items()}
    return found


def equals_two_calls(group, law: Matmul) -> None:
    """The fused call equals the two calls bit for bit, with and without gradients."""
    inputs = random(law)
    communicator(group).engine_calls.clear()
    got = computed(group, law, inputs, fused=True)
    calls = communicator(group).engine_calls
    assert ("moe_dispatch_matmul", law.case.engine) in calls or len(law.case.sizes) == 1, calls
    bare = computed(group, law, inputs, fused=True, backward=False)
    for name, want in computed(group, law, inputs, fused=False).items():
        assert_same(f"rank {group.rank()}: {name}", got[name], want)
        if name in bare:
            assert_same(f"rank {group.rank()}: {name} without gradients", bare[name], want)


def dense(law: Matmul, inputs: Inputs) -> dict[str, Tensor]:
    """The results of all ranks, by a loop over tokens and choices in fp64."""
    x, weights, *matrices = (
        t.double().requires_grad_() for t in (inputs.data.x, inputs.data.weights, *inputs.matrices)
    )
    out = torch.zeros(x.shape[0], law.out, dtype=torch.float64)
    for t, chosen in enumerate(inputs.data.ids.tolist()):
        for j, e in enumerate(chosen):
            if e >= 0:
                first, *second = (x[t] @ m[e].t() for m in matrices)
                y = first.relu() * second[0] if second else first
                out[t] = out[t] + weights[t, j] * y
    if out.requires_grad:
        out.backward(inputs.gradients.double())
    grads = {"dx": x, "dweights": weights} | {f"dw{i}": m for i, m in enumerate(matrices)}
    return {"out": out.detach()} | {
        name: torch.zeros_like(t) if t.grad is None else t.grad for name, t in grads.items()
    }


def equals_dense(group, law: Matmul) -> None:
    """With integers, the combined output and all gradients are the formula's, rounded once."""
    inputs, case, rank = whole(law), law.case, group.rank()
    got, each = computed(group, law, inputs, fused=True), case.num_experts // len(case.sizes)
    for name, full in dense(law, inputs).items():
        own = slice(rank * each, (rank + 1) * each) if name in ("dw0", "dw1") else mine(case, rank)
        dtype = torch.float32 if name == "dweights" else case.dtype
        assert_same(f"rank {rank}: {name}", got[name], full[own].to(dtype))


def layer(group, law: Matmul) -> None:
    """Experts uses the fused kernels, in backward too: outputs, gradients and main_grads equal those of two calls."""
    inputs, case, rank = whole(law), law.case, group.rank()
    experts = Experts(case.width, law.out, case.num_experts, act=law.act or "relu", gated=bool(law.act))
    each = case.num_experts // len(case.sizes)
    down = torch.ones(each, case.width, law.out).requires_grad_()
    results = []
    for engine in (case.engine, "collective"):
        x, weights, own = leaves_of(law, inputs, rank)
        ids = inputs.data.ids[mine(case, rank)]
        for w in own:
            w.main_grad = torch.ones_like(w)
        communicator(group).engine_calls.clear()
        given = [*own, down] if law.act else [None, *own, down]
        out = experts.compute(x, ids, weights, case.num_experts, given, group, case.sizes, engine)
        out.sum().backward()
        assert all(w.grad is None for w in own)
        results.append([out.detach(), x.grad, weights.grad, *(w.main_grad for w in own)])
        calls = {name: n for (name, by), n in communicator(group).engine_calls.items() if by == engine != "collective"}
        # Forward and backward each dispatch once and combine once; moe_combine is the routing weights' gradient.
        wanted = {"moe_plan": 1, "moe_dispatch_matmul": 2, "moe_matmul_combine": 2, "moe_combine": 1}
        assert calls == (wanted if engine != "collective" else {}), calls
    for got, want in zip(*results, strict=True):
        assert_same(f"rank {rank}", got, want)


def compiled(group, law: Matmul) -> None:
    """One compiled graph equals eager code, gradients included."""
    fusedtp.reserve(group, 1 << 16)
    inputs, case, rank = whole(law), law.case, group.rank()
    ids, here = inputs.data.ids[mine(case, rank)], mine(case, rank)

    def compute(x: Tensor, weights: Tensor, *own: Tensor) -> Tensor:
        how = dict(sizes=case.sizes, engine=case.engine)
        if law.act:
            y, _, handle = moe_dispatch_gated(x, ids, weights, *own, case.num_experts, group, act=law.act, **how)
        else:
            y, _, handle = moe_dispatch_matmul(x, ids, weights, *own, case.num_experts, group, **how)
        return moe_combine(y, handle)

    torch._dynamo.reset()
    results = []
    for function in (compute, torch.compile(compute, backend="aot_eager", fullgraph=True)):
        x, weights, own = leaves_of(law, inputs, rank)
        out = function(x, weights, *own)
        out.backward(inputs.gradients[here])
        results.append([out.detach(), x.grad, weights.grad, *(w.grad for w in own)])
    for i, (eager, graph) in enumerate(zip(*results, strict=True)):
        assert_same(f"rank {rank}: tensor {i}", graph, eager)


def refuses(group, law: Matmul) -> None:
    """More rows than the capacity, when the host does not know the counts, as on a GPU."""
    inputs, case, rank = whole(law), law.case, group.rank()
    x, weights, own = leaves_of(law, inputs, rank)
    ids = inputs.data.ids[mine(case, rank)]
    with patch.object(dispatch, "known_room", lambda plan, at: at):
        moe_dispatch_matmul(
            x, ids, weights, *own, case.num_experts, group, sizes=case.sizes, engine="triton", max_rows=1
        )
