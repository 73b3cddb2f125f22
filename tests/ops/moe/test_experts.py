"""Experts computed while rows travel, in rounds or in one, equal a dense loop over experts and tokens."""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import fusedtp
from fusedtp import VirtualWorld
from fusedtp.comm import communicator
from fusedtp.nn.experts import Experts
from fusedtp.ops.moe import Mlp, moe_dispatch_gated, moe_dispatch_matmul, moe_matmul_combine, moe_rounds, rounds
from fusedtp.ops.moe import plan as plans
from fusedtp.ops.moe.plan import Exchange
from tests.harness import world
from tests.ops.moe.laws import Case, mine, split_backward
from tests.ops.moe.layer_laws import SMALL, Layer, experts_law
from tests.ops.moe.matmul_laws import Matmul, leaves_of, whole
from tests.ops.moe.test_exchange import cases
from tests.properties.laws import assert_same, poison


def dense(law: Matmul, inputs, down: Tensor) -> dict[str, Tensor]:
    """y and all gradients of all ranks by a loop over experts in fp64; gates are so large that each act is ReLU."""
    data = inputs.data
    x, weights, *matrices = (
        t.double().nan_to_num(0).requires_grad_() for t in (data.x, data.weights, *inputs.matrices)
    )
    down = down.double().requires_grad_()
    y = torch.zeros(x.shape[0], law.case.width, dtype=torch.float64)
    for e in range(law.case.num_experts):
        chosen = torch.where(data.ids == e, weights, 0).sum(1, keepdim=True)
        hidden = (x @ matrices[0][e].T).relu()
        if law.act:
            hidden = hidden * (x @ matrices[1][e].T)
        y = y + chosen * (hidden @ down[e].T)
    dy = data.gradients.double().nan_to_num(0)
    leaves = {"dx": x, "dweights": weights, "ddown": down} | {f"dw{i}": m for i, m in enumerate(matrices)}
    grads = torch.autograd.grad(y, list(leaves.values()), dy, materialize_grads=True)
    return {"y": y.detach()} | dict(zip(leaves, grads, strict=True))


def without_rounds(given, gate, up, down, num_experts, group, how) -> Tensor:
    if gate is not None:
        hidden, _, handle = moe_dispatch_gated(*given, gate, up, num_experts, group, **how)
    else:
        hidden, _, handle = moe_dispatch_matmul(*given, up, num_experts, group, **how)
        hidden = hidden.relu()
    return moe_matmul_combine(hidden, down, handle)


def equals_dense(group, law: Matmul, max_rows: int | None, with_main_grad: bool) -> None:
    """Integers, so no sum rounds."""
    case, rank, inputs = law.case, group.rank(), whole(law)
    g = torch.Generator().manual_seed(case.seed + 2)
    down = torch.randint(-1, 2, (case.num_experts, case.width, law.out), generator=g).to(case.dtype)
    each = case.num_experts // len(case.sizes)
    own = slice(rank * each, (rank + 1) * each)
    x, weights, matrices = leaves_of(law, inputs, rank)
    mine_down = down[own].clone().requires_grad_()
    for w in (*matrices, mine_down) if with_main_grad else ():
        w.main_grad = torch.zeros_like(w)
    gate, up = matrices if law.act else (None, *matrices)
    communicator(group).engine_calls.clear()
    poison(group)
    given = x, inputs.data.ids[mine(case, rank)], weights
    how = dict(sizes=case.sizes, engine=case.engine)
    if max_rows is None:
        y, usage = without_rounds(given, gate, up, mine_down, case.num_experts, group, how), None
    else:
        experts = Mlp(gate, up, mine_down, law.act or torch.relu)
        y, usage = moe_rounds(*given, case.num_experts, group, experts, max_rows=max_rows, **how)
    ids = inputs.data.ids
    counts = torch.bincount(ids[ids >= 0] // each, minlength=len(case.sizes))
    if usage is not None:
        assert (usage.bound, int(usage.rounds)) == (max_rows, -(-int(counts.max()) // max_rows))
        assert usage.used.tolist() == counts.tolist()
    used = {name for name, _ in communicator(group).engine_calls}
    assert used <= {"moe_plan", "moe_dispatch_matmul", "moe_matmul_combine"}, "rows travel with the matmuls"
    poison(group)
    y.backward(inputs.data.gradients[mine(case, rank)])
    want = dense(law, inputs, down)
    for name, leaf in {"dx": x, "dweights": weights}.items():
        assert_same(f"rank {rank}: {name}", leaf.grad, want[name][mine(case, rank)].to(leaf.dtype))
    assert_same(f"rank {rank}: y", y.detach(), want["y"][mine(case, rank)].to(y.dtype))
    own_weights = {"ddown": mine_down} | {f"dw{i}": w for i, w in enumerate(matrices)}
    for name, leaf in own_weights.items():
        assert with_main_grad == (leaf.grad is None)
        got = leaf.main_grad if with_main_grad else leaf.grad
        assert_same(f"rank {rank}: {name}", got, want[name][own].to(leaf.dtype))


@st.composite
def layers(draw: st.DrawFn) -> tuple[Matmul, int | None, bool]:
    case = replace(draw(cases(("chunked", "collective"))), dtype=torch.float32)
    case = replace(case, width=max(1, case.width), room=None)
    most = sum(case.sizes) * min(case.top_k, case.num_experts // len(case.sizes))
    room = draw(st.one_of(st.none(), st.integers(max(1, -(-most // 12)), max(2, most + 1))))
    law = Matmul(case, draw(st.integers(1, 5)), draw(st.sampled_from(["", "silu"])))
    return law, room, draw(st.booleans())


SEVERAL = Matmul(Case("chunked", (5, 2, 7), 6, 3, 5, torch.float32, "skewed", 0.2, 0), 4, "silu")


@pytest.mark.slow
@settings(max_examples=25)
@example((SEVERAL, 4, False))
@example((replace(SEVERAL, act="", case=replace(SEVERAL.case, engine="collective")), 3, True))
@example((SEVERAL, None, True))
@given(layers())
def test_experts_equal_the_dense_formula(drawn):
    world(len(drawn[0].case.sizes)).run(equals_dense, *drawn)


@pytest.mark.slow
@pytest.mark.parametrize("act", ["", "silu"])
def test_rounds_of_kernels_equal_the_dense_formula(act):
    """Two rounds with the fused kernels."""
    pytest.importorskip("triton")
    case = Case("triton", (3, 2), 4, 2, 3, torch.float32, "skewed", 0.1, 1)
    world(2).run(equals_dense, Matmul(case, 2, act), 5, False, timeout=300)


def by_default(group, layer: Layer, shares: int) -> list[int]:
    """With a low size threshold and round plans made by kernels; return the number of rounds."""
    with (
        patch.multiple(plans, SMALL=0, SHARES=shares),
        patch.object(rounds, "plans_by_kernel", lambda device: True),
    ):
        used = experts_law(group, layer, range(4))
    assert all(use is None or use.bound == 5 for use in used), used
    return [0 if use is None else int(use.rounds) for use in used]


@pytest.mark.slow
def test_more_than_the_usual_room_comes_in_rounds_of_kernels():
    """Five tokens with two choices each: a share is 5 of 10 rows."""
    pytest.importorskip("triton")
    layer = Layer((2, 3), 4, 2, 3, 2, engine="triton")
    assert world(2).run(by_default, layer, 1, timeout=300) == [[0, 2, 2, 1]] * 2
    assert world(2).run(by_default, layer, 2, timeout=300) == [[0] * 4] * 2, "two shares are all rows"


MIB = 1 << 20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "tokens", "top_k", "experts", "row_bytes", "engine", "want"),
    [
        (8, 8192, 8, 256, 14336, "triton", 2 * 8192),  # out of 65,536
        (8, 8192, 8, 256, 14336, "chunked", None),  # the host knows the counts
        (8, 8192, 2, 8, 8192, "triton", None),  # 64 MiB: Mixtral
        (8, 16384, 2, 8, 8192, "triton", 2 * 4096),  # out of 16,384
        (4, 8192, 2, 8, 8192, "triton", 2 * 4096),  # out of 16,384
        (2, 8192, 8, 64, 8192, "triton", None),  # on two ranks, two shares are everything
        (8, 64, 8, 256, 14336, "triton", None),  # decoding: 7 MiB
        (64, 65536, 8, 256, 14336, "triton", 2 * 8192),  # out of 262,144
        (4, 64 * MIB // 1024 // 4, 4, 16, 1024, "triton", None),  # 64 MiB
        (4, 64 * MIB // 1024 // 4 + 4, 4, 16, 1024, "triton", 2 * (16384 + 4)),
    ],
)
def test_the_usual_room(ranks, tokens, top_k, experts, row_bytes, engine, want):
    def room(group) -> int | None:
        x = torch.empty(tokens // ranks, row_bytes // 2, dtype=torch.bfloat16, device="meta")
        ids = torch.empty(tokens // ranks, top_k, dtype=torch.int64, device="meta")
        return plans.usual_room(group, x, ids, experts, None, engine)

    with patch.object(plans, "_engine_of", lambda group, engine, dtype: engine):
        assert VirtualWorld(ranks).run(room) == [want] * ranks
        with patch.object(plans, "may_wait", lambda: False):
            assert VirtualWorld(ranks).run(room) == [None] * ranks
        assert VirtualWorld(ranks).run(torch.no_grad()(room)) == [None] * ranks, "no rows are kept"


@pytest.mark.parametrize(
    ("engine", "bound", "found", "i", "want"),
    [
        ("chunked", 160, [37, 12], 0, [37, 12]),
        ("chunked", 30, [37, 12], 1, [7, 0]),
        ("triton", 160, [37, 12], 0, [40, 40]),  # rounded up to a sixteenth of the bound, the same on all ranks
        ("triton", 160, [161, 12], 0, [160, 160]),
        ("triton", 160, [161, 12], 1, [10, 10]),
        ("triton", 170, [170, 0], 0, [170, 170]),
        ("triton", 160, [0, 0], 0, [10, 10]),
        ("triton", 160, None, 1, [160, 160]),
    ],
)
def test_the_room_of_a_round_is_what_comes(engine, bound, found, i, want):
    at = Exchange("", 0, (50, 50), 4, 2, bound, engine, bound=bound)
    assert [rounds._fitted(at._replace(rank=rank), found, i).max_rows for rank in (0, 1)] == want


@pytest.mark.parametrize(("gate", "act"), [(True, "tanh"), (True, torch.relu), (False, "silu")])
def test_activations_that_do_not_fit_are_refused(gate, act):
    x, up, down = torch.ones(2, 3), torch.ones(2, 4, 3), torch.ones(2, 3, 4)
    with pytest.raises(ValueError, match="rank 0: act is"):
        experts = Mlp(up if gate else None, up, down, act)
        moe_rounds(x, torch.tensor([[0], [1]]), torch.ones(2, 1), 2, None, experts, max_rows=2)


def split(group) -> None:
    """A backward in an input pass and a weight pass, in rounds, gives the gradients of a single backward."""
    rank, g, sizes = group.rank(), torch.Generator().manual_seed(0), (2, 3, 1)
    ids = torch.rand(6, 6, generator=g).argsort(1)[:, :2].split(list(sizes))[rank]
    x, weights = (torch.randint(-2, 3, (6, n), generator=g).float().split(list(sizes))[rank].clone() for n in (3, 2))
    up, down = own = [nn.Parameter(torch.randint(-2, 3, s, generator=g).float()) for s in ((2, 4, 3), (2, 3, 4))]

    def layer() -> Tensor:
        experts = Mlp(None, up, down, torch.relu)
        y, usage = moe_rounds(x, ids, weights, 6, group, experts, sizes=sizes, max_rows=3)
        assert int(usage.rounds) > 1
        return y

    split_backward(layer, x.requires_grad_(), own)


def test_a_split_backward_of_rounds_has_the_gradients_of_a_whole_one():
    world(3).run(split)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["chunked", "collective"])
def test_a_layer_in_rounds_equals_the_dense_formula(engine):
    layer = Layer((6, 0, 5), **SMALL, engine=engine, recv_capacity=0.6)
    for used in world(3).run(rounds_taken, layer):
        assert max(used) > 1


def rounds_taken(group, layer: Layer) -> list[int]:
    return [int(used.rounds) for used in experts_law(group, layer, range(3))]


def told(group, fault: str) -> None:
    """One rank's experts are faulty; the other rank raises at once, and the group stays usable."""
    wrong, rank = group.rank() == 1, group.rank()
    x, weights = torch.ones(2, 4), torch.ones(2, 1)
    ids = torch.tensor([[0], [1]])

    def act(hidden: Tensor) -> Tensor:
        if wrong and fault == "act":
            raise KeyError("mine")
        return hidden.relu()

    def call(**options) -> Tensor:
        up = torch.ones(1, 5, 3 if wrong and fault == "fp8" else 4)
        experts = Mlp(None, up, torch.ones(1, 4, 5), act)
        return moe_rounds(x, ids, weights, 2, group, experts, max_rows=1, **options)[0]

    begin = time.monotonic()
    with pytest.raises((KeyError, ValueError) if wrong else fusedtp.PeerFailed):
        if fault == "engine":
            layer = Experts(4, 5, 2, act="relu", gated=False)
            own = [None, torch.ones(1, 5, 4), torch.ones(1, 4, 5)]
            layer.compute(x, ids, weights, 2, own, group, engine="bogus" if wrong else "auto")
        else:
            call(comm_dtype="fp8" if fault == "fp8" else "")
    assert time.monotonic() - begin < 20
    fault = "none"
    assert call().shape == (2, 4), rank


@pytest.mark.parametrize("fault", ["act", "fp8", "engine"])
def test_a_fault_of_one_rank_is_told_to_the_others(fault):
    world(2).run(told, fault)


def changed_later(group, max_rows: int) -> None:
    """x may be changed in place after the experts have read it, in one round or in several."""
    x, factor = torch.ones(4, 3), torch.tensor(2.0, requires_grad=True)
    ids = (torch.arange(4) % 2)[:, None]
    y, usage = moe_rounds(x * factor, ids, torch.ones(4, 1), 2, group, lambda rows, _: rows.square(), max_rows=max_rows)
    assert int(usage.rounds) == -(-4 // max_rows)
    given = x * factor
    y, _ = moe_rounds(given, ids, torch.ones(4, 1), 2, group, lambda rows, _: 3 * rows, max_rows=max_rows)
    (given.add_(y)).sum().backward()
    assert factor.grad.item() == 12 * 4


@pytest.mark.parametrize("max_rows", [4, 1])
def test_x_may_be_changed_afterwards(max_rows):
    world(2).run(changed_later, max_rows)


def held_between_passes(group, max_rows: int) -> int:
    """How many tensors of hidden rows exist between the passes of a split backward, not counting one gradient per
    round.

    torch's two passes hand over those gradients.
    """

    def hidden() -> int:
        gc.collect()
        return sum(isinstance(t, Tensor) and t.dim() == 2 and t.shape[1] == 7 for t in gc.get_objects())

    before, ids = hidden(), torch.arange(6).remainder(4)[:, None]
    x = torch.ones(6, 3, requires_grad=True)
    own = [nn.Parameter(torch.ones(s)) for s in ((2, 7, 3), (2, 3, 7))]
    experts = Mlp(None, *own, torch.relu)
    y, usage = moe_rounds(x, ids, torch.ones(6, 1), 4, group, experts, max_rows=max_rows)
    rounds = int(usage.rounds)
    assert rounds == -(-8 // max_rows)
    _dx, groups = stage_backward_input([y], [torch.ones_like(y)], [x], iter(own))
    found = hidden() - before
    kept = [node.kept for of in groups for node in of["intermediates"] if getattr(node, "kept", None) is not None]
    stage_backward_weight(iter(own), groups)
    return found - rounds + len(kept)


def test_a_split_backward_holds_no_more_rows_for_more_rounds():
    counts = [world(2).run(held_between_passes, rows) for rows in (4, 1)]
    assert counts[0] == counts[1]


def under_autocast(group) -> None:
    """fp32 weights with a main_grad, bf16 products: rounds give the same as one round. bf16 holds these integers."""
    rank, g = group.rank(), torch.Generator().manual_seed(0)
    x = torch.randint(-2, 3, (4, 3), generator=g).float()
    ids = torch.rand(4, 4, generator=g).argsort(1)[:, :2]
    found = []
    for max_rows in (16, 3):
        own = [torch.ones(2, 4, 3, requires_grad=True), torch.ones(2, 3, 4, requires_grad=True)]
        for w in own:
            w.main_grad = torch.zeros_like(w)
        with torch.autocast("cpu", torch.bfloat16):
            y, usage = moe_rounds(x, ids, torch.ones(4, 2), 4, group, Mlp(None, *own, torch.relu), max_rows=max_rows)
        y.sum().backward()
        assert y.dtype == torch.bfloat16 and all(w.grad is None for w in own)
        found.append([y.detach(), *(w.main_grad for w in own)])
    assert int(usage.rounds) > 1
    for one, several in zip(*found, strict=True):
        assert_same(f"rank {rank}", several, one)


def test_rounds_under_autocast_accumulate_into_main_grads():
    world(2).run(under_autocast)


def test_the_usual_room_counts_bytes_as_rows_travel():
    """65,536 rows of 512 are 128 MiB in fp32, and 64 MiB under autocast."""

    def room(group) -> int | None:
        x, ids = torch.empty(16384, 512), torch.zeros(16384, 4, dtype=torch.int64)
        return plans.usual_room(group, x, ids, 16, None, "triton")

    def smaller(group) -> int | None:
        x, ids = torch.empty(4096, 512), torch.zeros(4096, 4, dtype=torch.int64)
        return plans.usual_room(group, x, ids, 16, None, "triton")

    with patch.object(plans, "_engine_of", lambda group, engine, dtype: engine):
        assert VirtualWorld(4).run(room) == [2 * 65536] * 4
        assert VirtualWorld(4).run(smaller) == [32768] * 4
        with torch.autocast("cpu", torch.bfloat16):
            assert VirtualWorld(4).run(smaller) == [None] * 4  # there is room for any routing
