"""The custom ops of a mixture of experts under torch's compiler."""

import pytest
import torch
from torch import Tensor

import fusedtp
from fusedtp.ops.moe.plan import Exchange, sort_choices
from tests.harness import world

OPS = ["moe_plan", "moe_dispatch", "moe_combine"]
SIZES, EXPERTS, TOP_K = (2, 0, 3), 6, 2


def routed(group) -> tuple[Tensor, Exchange, list[Tensor]]:
    """(ids of this rank, its place with room for just its rows, the plan), so all rows that ops return are defined."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(sum(SIZES), EXPERTS, generator=generator).argsort(1)[:, :TOP_K].int()
    parts = [sort_choices(part, EXPERTS) for part in ids.split(list(SIZES))]
    table = torch.stack([counts for counts, _order in parts])
    rank, each = group.rank(), EXPERTS // len(SIZES)
    rows = int(table[:, rank * each : (rank + 1) * each].sum())
    engine = "chunked"
    at = Exchange(group.group_name, rank, SIZES, EXPERTS, TOP_K, rows, engine)
    plan = [table, torch.cat([order for _counts, order in parts]), table.new_empty(0)]
    return ids.split(list(SIZES))[rank], at, plan


def check_op(group, name: str, engine: str, comm_dtype: str = "") -> None:
    fusedtp.reserve(group, 4096)  # registers the group; custom ops know it by name
    ids, at, plan = routed(group)
    at = at._replace(engine=engine, comm_dtype=comm_dtype)
    x, weights = torch.ones(len(ids), 4, requires_grad=False), torch.ones(ids.shape)
    y = torch.ones(at.max_rows, 4)
    given = {
        "moe_plan": (ids, at.max_rows, *at.spec),
        "moe_dispatch": (x, weights.detach(), *plan, at.max_rows, *at.spec),
        "moe_combine": (y, weights, False, *plan, at.max_rows, *at.spec),
    }[name]
    torch.library.opcheck(getattr(torch.ops.fusedtp, name).default, given)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["chunked", "collective"])
@pytest.mark.parametrize("name", OPS)
def test_opcheck(name, engine):
    world(3).run(check_op, name, engine)


def test_opcheck_of_rows_in_fp8():
    world(3).run(check_op, "moe_dispatch", "chunked", "fp8")


def compiled(group) -> None:
    """A compiled dispatch and combine equal the eager ones, gradients included, in one graph."""
    fusedtp.reserve(group, 1 << 16)
    ids, at, _plan = routed(group)

    def layer(x: Tensor, weights: Tensor) -> Tensor:
        rows, _offsets, handle = fusedtp.moe_dispatch(x, ids, weights, EXPERTS, group, sizes=SIZES)
        return fusedtp.moe_combine(rows.relu(), handle)

    results = []
    for compute in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        generator = torch.Generator().manual_seed(1)
        x, weights = (
            torch.randint(-3, 4, (len(ids), n), generator=generator).float().requires_grad_() for n in (4, TOP_K)
        )
        y = compute(x, weights)
        y.backward(torch.ones_like(y))
        results.append((y.detach(), x.grad, weights.grad))
    assert at.tokens == len(ids)
    for eager, graph in zip(*results, strict=True):
        assert torch.equal(eager, graph)


@pytest.mark.slow
def test_a_compiled_exchange_equals_an_eager_one():
    world(3).run(compiled)
