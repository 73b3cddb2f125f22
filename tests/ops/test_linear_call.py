"""Kinds of calls: a cached check or plan is reused only for calls that agree in everything it depends on."""

from __future__ import annotations

import re
from contextlib import nullcontext
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fusedtp
from fusedtp import VirtualWorld
from fusedtp.comm import communicator
from fusedtp.ops import linear_call as module
from fusedtp.ops.matmul_reduce_scatter import op as scatter_op
from fusedtp.ops.rows import rows_of_full
from tests.harness import PerRank, world
from tests.properties.cases import arrange

W = 2
FUNCTIONS = ("all_gather_matmul", "all_gather_gated_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
LAYOUTS = ("contiguous", "transposed", "sliced")


class Drawn(NamedTuple):
    """A call; it may be wrong in several ways."""

    rows: int = 2
    k: int = 4
    n: int = 3
    wide: int = 0  # extra columns of the weight
    dtype: str = "float32"
    of_weight: str = ""  # the weight's dtype; "": the same
    layouts: tuple[str, str] = ("contiguous", "contiguous")
    bias: str = ""  # "fits", "strided", "long"
    grads: tuple[bool, bool, bool] = (True, True, True)
    mode: str = ""  # "no_grad", "autocast"
    batch: int = 0
    main_grad: str = ""  # "fits", "other shape"
    sizes: str = ""  # "given", "tensor", "wrong"
    engine: str = "chunked"
    biases: int = 1  # per weight


def calls() -> st.SearchStrategy[Drawn]:
    """Mostly valid calls of few sizes, so that kinds repeat."""
    seldom = st.sampled_from
    return st.builds(
        Drawn,
        rows=seldom([2, 2, 2, 0, 3]),
        k=seldom([4, 4, 5]),
        n=seldom([3, 3, 2]),
        wide=seldom([0, 0, 0, 0, 1]),
        dtype=seldom(["float32", "float32", "bfloat16", "float64", "int32"]),
        of_weight=seldom(["", "", "", "", "float16"]),
        layouts=st.tuples(seldom(LAYOUTS), seldom(LAYOUTS)),
        bias=seldom(["", "", "fits", "strided", "long"]),
        grads=st.tuples(st.booleans(), st.booleans(), st.booleans()),
        mode=seldom(["", "", "no_grad", "autocast"]),
        batch=seldom([0, 0, 2]),
        main_grad=seldom(["", "", "", "fits", "other shape"]),
        sizes=seldom(["", "", "given", "tensor", "wrong"]),
        engine=seldom(["chunked", "chunked", "collective", "auto", "none"]),
        biases=seldom([1, 1, 1, 0, 2]),
    )


def numbers(*shape: int, seed: int, of: torch.dtype) -> Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).to(of)


def outcome(group: Any, function: str, drawn: Drawn, seed: int) -> Any:
    """Results and gradients of the call, or its error."""
    gathers = function.startswith("all_gather")
    of, of_weight = (getattr(torch, name) for name in (drawn.dtype, drawn.of_weight or drawn.dtype))
    rows = drawn.rows if gathers else W * drawn.rows
    of_x, of_w = drawn.layouts if of.is_floating_point else ("contiguous", "contiguous")
    lead = (drawn.batch, rows) if drawn.batch else (rows,)
    x = arrange(numbers(*lead, drawn.k, seed=seed, of=of), (*lead, drawn.k), of_x)
    shape = drawn.n, drawn.k + drawn.wide
    weights = [
        arrange(numbers(*shape, seed=seed + i, of=of_weight), shape, of_w)
        for i in range(2 if function == "all_gather_gated_matmul" else 1)
    ]
    bias = None
    if drawn.bias:
        entries = numbers(2 * drawn.n + 2, seed=seed + 9, of=of_weight)
        bias = entries[: 2 * drawn.n : 2] if drawn.bias == "strided" else entries[: drawn.n + (drawn.bias == "long")]
    for t, needs in zip((x, *weights, bias), (drawn.grads[0], *[drawn.grads[1]] * len(weights), drawn.grads[2])):
        if t is not None and t.is_floating_point():
            t.requires_grad_(needs)
    if drawn.main_grad:
        weights[0].main_grad = torch.zeros(drawn.n + (drawn.main_grad != "fits"), shape[1])
    right = [drawn.rows] * W
    sizes = {"given": right, "tensor": torch.tensor(right), "wrong": [drawn.rows + 1, drawn.rows]}.get(drawn.sizes)
    how: dict[str, Any] = dict(engine=drawn.engine)
    if function != "matmul_all_reduce":
        how |= dict(sizes=sizes, dim=1 if drawn.batch else 0)
    cast: Any = torch.autocast("cpu", torch.bfloat16) if drawn.mode == "autocast" else nullcontext()
    try:
        with cast, torch.set_grad_enabled(drawn.mode != "no_grad"):
            if gathers:
                biases = [bias] * (drawn.biases * len(weights))
                (y,) = getattr(fusedtp, function)(x, iter(weights), group, biases=biases, **how)
            else:
                y = getattr(fusedtp, function)(x, weights[0], group, bias=bias, **how)
        if y.requires_grad:
            y.sum().backward()
    except Exception as error:
        return type(error).__name__, re.sub(r"call \d+", "call", str(error))
    leaves = [x, *weights, *([] if bias is None else [bias])]
    kept = [leaf.grad for leaf in leaves] + [getattr(weights[0], "main_grad", None)]
    return y.dtype, y.requires_grad, *(None if t is None else (t.dtype, t.tolist()) for t in (y.detach(), *kept))


def outcomes(group: Any, drawn: list[tuple[str, Drawn]], keeps: bool) -> list[Any]:
    comm, found = communicator(group), []
    fusedtp.set_timeout(group, 30)
    comm.kinds.clear()
    for seed, (function, call) in enumerate(drawn):
        if not keeps:
            comm.kinds.clear()
        found.append(outcome(group, function, call, seed))
    return found


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from(FUNCTIONS), calls()), min_size=2, max_size=8))
@example([("matmul_reduce_scatter", Drawn()), ("matmul_reduce_scatter", Drawn(grads=(False, True, True)))])
@example([("matmul_reduce_scatter", Drawn()), ("matmul_reduce_scatter", Drawn(main_grad="other shape"))])
@example([("all_gather_matmul", Drawn(mode=mode)) for mode in ("no_grad", "", "autocast", "no_grad")])
@example([("all_gather_matmul", Drawn(sizes=sizes)) for sizes in ("given", "wrong", "given")])
@example([("all_gather_matmul", Drawn(bias=bias)) for bias in ("fits", "long", "", "strided")])
@example([("matmul_all_reduce", Drawn(of_weight=of)) for of in ("", "float16", "")])
@example([(function, Drawn(engine=engine)) for function in FUNCTIONS[2:] for engine in ("collective", "none")])
@example([("all_gather_matmul", Drawn(sizes="wrong", main_grad="fits", engine=engine)) for engine in ("none", "auto")])
@settings(max_examples=60)
def test_a_call_does_what_it_did_if_none_came_before(drawn):
    ranks = VirtualWorld(W)
    kept, anew = (ranks.run(lambda group, keeps=keeps: outcomes(group, drawn, keeps)) for keeps in (True, False))
    assert kept == anew
    assert not any(each[0] == "SignalTimeout" for of_rank in kept for each in of_rank)


def checks_of(group: Any, function: str, mode: str) -> list[int]:
    """The number of operand checks after a call, after the same call again, and after one of another kind."""
    checked, counts = module.check_linear, [0]

    def counted(*given: Any) -> None:
        counts[0] += 1
        checked(*given)

    module.check_linear = counted
    found = []
    try:
        sizes = "" if function == "matmul_all_reduce" else "tensor"
        for seed, drawn in enumerate([Drawn(), Drawn(), Drawn(n=2)]):
            outcome(group, function, drawn._replace(mode=mode, sizes=sizes), seed)
            found.append(counts[0])
    finally:
        module.check_linear = checked
    return found


@pytest.mark.slow
@pytest.mark.parametrize("function", FUNCTIONS)
def test_only_the_first_call_of_a_kind_is_checked(function):
    with_grad, without, cast = (
        world(W).run(checks_of, function, mode, fresh=True) for mode in ("", "no_grad", "autocast")
    )
    assert with_grad == without == [[1, 1, 2]] * W
    assert cast == [[1, 2, 3]] * W


def of_layouts(group: Any) -> list[int]:
    """Make the same call in several layouts, each twice; return the index of the plan each call used."""
    plans, found = [], []
    for offset, layout in ((0, "contiguous"), (0, "sliced"), (0, "transposed"), (1, "contiguous")) * 2:
        x = torch.zeros(4 * 8 + offset)[offset:].view(4, 8)
        w = arrange(torch.zeros(3, 8), (3, 8), layout)
        call, _ = module.linear_call(scatter_op, rows_of_full, group, x, [w], [None], None, 0, "chunked", "")
        assert call.plan is not None and call.plan.alike
        if not any(call.plan is plan for plan in plans):
            plans.append(call.plan)
        found.append(next(i for i, plan in enumerate(plans) if plan is call.plan))
    return found


def test_each_layout_has_a_plan_of_its_own():
    assert world(W).run(of_layouts) == [[0, 1, 2, 3] * 2] * W


def misread(group: Any) -> None:
    """Valid operands are invalid in other argument positions, or with an unknown activation."""
    x, a, b = torch.ones(3, 4), torch.ones(5, 4), torch.ones(5, 4)
    fusedtp.all_gather_matmul(x, [a, b], group, biases=[None, None])
    with pytest.raises(ValueError, match="got 1 weights and 3 biases"):
        fusedtp.all_gather_matmul(x, [a], group, biases=[b, None, None])
    fusedtp.all_gather_gated_matmul(x, [a, b], group)
    with pytest.raises(ValueError, match="act is 'relu'"):
        fusedtp.all_gather_gated_matmul(x, [a, b], group, act="relu")


def test_a_kind_has_all_arguments_and_how_many_weights():
    world(W).run(misread)


def of_a_distributed_x(group: Any) -> None:
    """It is refused, whatever came before, and leaves no plan for a plain tensor of its shape."""
    mesh = init_device_mesh("cpu", (W,))
    x, w = torch.ones(3, 4), torch.ones(5, 4)
    whole = DTensor.from_local(x, mesh, [Shard(0)])
    for turn in (whole, x, whole, x):
        if turn is whole:
            with pytest.raises((RuntimeError, ValueError)):
                fusedtp.all_gather_matmul(turn, [w], group, engine="chunked")
        else:
            (y,) = fusedtp.all_gather_matmul(turn, [w], group, engine="chunked")
            assert torch.equal(y, torch.full((W * 3, 5), 4.0))


def test_a_distributed_x_is_of_no_kind():
    world(W).run(of_a_distributed_x, fresh=True)


def refused(group: Any, weights: Any, good: Any) -> str:
    """One rank's operands are not tensors; return this rank's error. The group stays usable."""
    fusedtp.set_timeout(group, 60)
    x, heard = torch.ones(3, 4), ""
    try:
        fusedtp.all_gather_gated_matmul(x, weights, group, engine="chunked")
    except Exception as error:
        heard = f"{type(error).__name__}: {error}"
    fusedtp.all_gather_gated_matmul(x, good, group, engine="chunked")
    return heard


@pytest.mark.parametrize(("wrong", "said"), [(None, "not iterable"), ([None, None], "must be tensors, not NoneType")])
def test_peers_hear_of_operands_that_are_no_tensors(wrong, said):
    good = [torch.ones(5, 4)] * 2
    mine, of_peer = world(W).run(refused, PerRank([wrong, good]), good)
    assert mine.startswith("TypeError") and said in mine and of_peer.startswith("PeerFailed")


def raises_before_its_call(group: Any, faulty: bool) -> str:
    """The row-parallel layer's backward; on the faulty rank the gather raises before it has begun."""
    gather: Any = import_module("fusedtp.ops.all_gather_matmul")
    fusedtp.set_timeout(group, 60)
    x, w = torch.ones(4, 3, requires_grad=True), torch.ones(5, 3, requires_grad=True)
    y = fusedtp.matmul_reduce_scatter(x, w, group, engine="chunked")
    before = gather.to_fp32
    if faulty:
        gather.to_fp32 = broken
    try:
        y.sum().backward()
    finally:
        gather.to_fp32 = before
    return ""


def broken(*_: Any) -> None:
    raise MemoryError("no room for it")


def test_peers_hear_of_an_error_before_a_call_of_backward():
    own, peer = world(W).outcomes(raises_before_its_call, PerRank([True, False]))
    assert own.is_a("MemoryError"), own
    assert peer.is_a("PeerFailed") and "rank 0" in peer.message and peer.seconds < 30, peer
    assert world(W).run(raises_before_its_call, False) == [""] * W
