"""How a rank runs a case, and the laws that must hold; these functions run in the workers of a world."""

import random
import time
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

import fusedtp
from fusedtp.comm import communicator
from tests.properties.cases import BITS, Case, Tensors, build
from tests.properties.oracle import Named, expected


def assert_same(name: str, got: Tensor | None, want: Tensor) -> None:
    """Same shape, dtype and values; NaN equals NaN."""
    assert got is not None, f"{name} is missing"
    assert got.shape == want.shape, f"{name} has shape {tuple(got.shape)}, wanted {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"{name} is {got.dtype}, wanted {want.dtype}"
    wrong = (got != want) & ~(got.isnan() & want.isnan())
    if wrong.any():
        where = wrong.nonzero()[0].tolist()
        raise AssertionError(
            f"{name}: {int(wrong.sum())} of {wrong.numel()} differ, the first at {where}: "
            f"{got[tuple(where)].item()}, wanted {want[tuple(where)].item()}"
        )


def _where(case: Case) -> dict:
    where = {} if case.batch is None or case.operation == "matmul_all_reduce" else {"dim": 1}
    if case.tell_sizes and case.operation != "matmul_all_reduce":
        where["sizes"] = list(case.sizes)
    return where


def call(case: Case, group, x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> tuple[Tensor, ...]:
    """The operation of the case on this rank's tensors."""
    operation = getattr(fusedtp, case.operation)
    where = _where(case)
    if case.gathers:
        biases_given = biases if any(b is not None for b in biases) else None
        return operation(x, weights, group, biases=biases_given, engine=case.engine, **where)
    return (operation(x, weights[0], group, bias=biases[0], engine=case.engine, **where),)


def poison(group) -> None:
    """Fill every rank's workspace with NaN while no rank is in a call."""
    comm = communicator(group)
    if comm.has_workspace:
        comm.world.barrier()
        comm.workspace.poison()
        comm.world.barrier()


def _engine_ran(case: Case, group) -> None:
    """Check that the requested engine ran, without a silent fallback."""
    comm = communicator(group)
    ran = {engine for (operation, engine), n in comm.engine_calls.items() if n and operation == case.operation}
    want = "local" if comm.world_size == 1 else case.engine
    assert ran == {want} or case.engine == "auto", f"{case.operation} ran on {ran}, wanted {want}"


def results(case: Case, group, data: Tensors, rank: int, poisoned: bool = True) -> Named:
    """Outputs and gradients of this rank by name; the workspace is poisoned before forward and backward."""
    communicator(group).engine_calls.clear()
    if poisoned:
        poison(group)
    if case.operation == "all_gather_wgrad":
        dws = fusedtp.all_gather_wgrad(data.xs[rank], data.gradients[rank], group, engine=case.engine, **_where(case))
        _engine_ran(case, group)
        return {f"dw{i}": dw for i, dw in enumerate(dws)}
    x = data.xs[rank].detach().requires_grad_("x" in case.needs)
    weights = [w.detach().requires_grad_("w" in case.needs) for w in data.weights[rank]]
    biases = [None if b is None else b.detach().requires_grad_("b" in case.needs) for b in data.biases[rank]]
    outs = call(case, group, x, weights, biases)
    _engine_ran(case, group)
    if poisoned:
        poison(group)
    inputs = {"dx": x}
    inputs |= {f"dw{i}": w for i, w in enumerate(weights)}
    inputs |= {f"db{i}": b for i, b in enumerate(biases) if b is not None}
    used = [i for i in range(len(outs)) if i not in case.unused and outs[i].requires_grad]
    if used:
        torch.autograd.backward([outs[i] for i in used], [data.gradients[rank][i] for i in used])
    named = {f"y{i}": y.detach() for i, y in enumerate(outs)}
    for name, t in inputs.items():
        if t.requires_grad:
            named[name] = torch.zeros_like(t) if t.grad is None and case.unused else t.grad
        else:
            assert t.grad is None, f"{name} was not asked for"
    return named


def asked_for(case: Case, named: Named) -> Named:
    """The oracle's results that the case computes, in the working dtype."""
    wgrad = case.operation == "all_gather_wgrad"
    keep = (lambda n: n[:2] == "dw") if wgrad else (lambda n: n[0] == "y" or n[1] in case.needs)
    return {name: t for name, t in named.items() if keep(name)}


def compare(case: Case, group, device: str = "cpu", poisoned: bool = True) -> Named:
    """Forward and all gradients equal the oracle's, bit for bit, on exact inputs; returns this rank's results."""
    rank = group.rank()
    data = build(case, device)
    got = results(case, group, data, rank, poisoned)
    want = asked_for(case, expected(case, data, rank))
    assert got.keys() == want.keys(), f"got {sorted(got)}, wanted {sorted(want)}"
    for name, t in want.items():
        assert_same(f"{case.operation}/{case.engine} rank {rank}: {name}", got[name], t.to(case.dtype))
    return got


def exact(group, case: Case) -> None:
    """`compare` between processes."""
    compare(case, group)


def repeated(group, case: Case, times: int, delay: float, device: str = "cpu") -> None:
    """Repeating a call gives the same bits, whichever rank arrives first."""
    data, own = build(case, device), random.Random(group.rank())
    first = results(case, group, data, group.rank(), poisoned=False)
    for _ in range(times):
        time.sleep(own.random() * delay)
        for name, t in results(case, group, data, group.rank(), poisoned=False).items():
            assert torch.equal(t, first[name]), f"{name} differs when run again"


def mixed(group, drawn: list[Case], calls: int, delay: float, seed: int, device: str = "cpu") -> None:
    """Many calls of mixed operations, shapes and engines on one workspace, each rank at its own pace.

    Every drawn case is called if there are enough calls. Results are checked again some calls later, because they must
    not lie in memory that later calls write. A rank that finds a fault still runs to the end, as its peers do.
    """
    shared, own = random.Random(seed), random.Random(100 * seed + group.rank())
    kept: deque[list[tuple[Tensor, Tensor]]] = deque(maxlen=5)
    faults = []
    order = (drawn + shared.choices(drawn, k=calls))[:calls]
    shared.shuffle(order)
    for number, case in enumerate(order):
        time.sleep(own.random() * delay)
        try:
            got = compare(case, group, device, poisoned=False)  # poisoning would make ranks wait for each other
            kept.append([(t, t.clone()) for t in got.values()])
            for then, copy in kept[0]:
                assert_same("a result of five calls ago", then, copy)
        except AssertionError as error:
            faults.append(f"call {number}: {error}")
    assert not faults, "\n".join(faults)


def with_nan_and_inf(group, case: Case, share: float, device: str = "cpu") -> None:
    """NaN and inf in the inputs appear where plain torch has them, and nowhere else."""
    data, generator = build(case, device), torch.Generator().manual_seed(case.seed + 1)
    values = torch.tensor([float("nan"), float("inf"), float("-inf")])

    def strike(t: Tensor) -> Tensor:
        hit = torch.rand(t.shape, generator=generator) < share
        chosen = values[torch.randint(3, t.shape, generator=generator)]
        return torch.where(hit.to(device), chosen.to(t), t)

    data.xs = [strike(x) for x in data.xs]
    data.weights = [[strike(w) for w in ws] for ws in data.weights]
    got = results(case, group, data, group.rank())
    for name, t in asked_for(case, expected(case, data, group.rank())).items():
        assert_same(f"{case.operation}/{case.engine} {name}", got[name], t.to(case.dtype))


@dataclass(frozen=True)
class Error:
    """The error of one named tensor on one rank, against fp64."""

    squares: float  # sum of squared errors
    plain_squares: float  # the same for plain torch in the same dtype on one device
    worst: float  # the largest error, as a multiple of its bound (Note [Bounds])


def errors(group, case: Case, device: str = "cpu") -> dict[str, Error]:
    """The errors of each result on random inputs.

    Note [Bounds] Let u be the unit roundoff of the working dtype, v that of the sums (fp32 for 16-bit dtypes), L the
    terms of a sum and S the same sum of absolute values. One matmul has an error of at most (L + W + 2) v S. Each of W
    partials p_r that travels in a 16-bit dtype adds u |p_r|, and the result adds u |y|: W + 1 roundings.
    """
    rank, data = group.rank(), build(case, device)
    got = results(case, group, data, rank)
    exactly = asked_for(case, expected(case, data, rank))
    plain = asked_for(case, expected(case, data, rank, case.dtype))
    magnitude = expected(case, data.map(torch.Tensor.abs), rank)
    partials = [expected(case, data.only(case, r), rank) for r in range(case.world_size)]
    narrow = case.dtype in (torch.float16, torch.bfloat16)
    unit = 2.0 ** -BITS[case.dtype]
    sums = 2.0**-24 if narrow else unit
    summed = "dx" if case.gathers else "y0"
    found = {}
    for name, want in exactly.items():
        bound = (case.terms + case.world_size + 2) * sums * magnitude[name]
        if narrow:
            bound = bound + unit * want.abs()
            if name == summed:
                bound = bound + unit * sum(p[name].abs() for p in partials)
        error = (got[name].double() - want).abs()
        ratio = (error / bound.clamp_min(1e-300)).max().item() if error.numel() else 0.0
        off = plain[name].double() - want
        found[name] = Error(error.square().sum().item(), off.square().sum().item(), ratio)
    return found
