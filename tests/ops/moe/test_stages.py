"""An exchange through one relay per node equals the loop over tokens and choices, and sends each node a token once."""

import dataclasses

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fusedtp
from fusedtp.comm import communicator
from tests.harness import PerRank, WorldError, pool, world
from tests.ops.moe.laws import SKEWS, Case, _Experts, build, mine, wanted
from tests.parallel.support import dp_tp_mesh
from tests.properties.laws import assert_same, poison


def one_exchange(between, within, nodes: int, places: int, case: Case, comm_dtype: str) -> None:
    """This rank's part: y, dx and dweights equal the definition."""
    node, at_place = (0 if group is None else communicator(group).rank for group in (between, within))
    rank, data = node * places + at_place, build(case)
    here, each = mine(case, rank), case.num_experts // (nodes * places)
    factors = data.factors[rank * each : (rank + 1) * each]
    x, weights = data.x[here].clone().requires_grad_(), data.weights[here].clone().requires_grad_()

    def poisoned() -> None:
        for group in (between, within):
            if group is not None:
                poison(group)

    def experts(rows, offsets):
        mine_alone = (data.ids >= rank * each) & (data.ids < (rank + 1) * each)
        assert int(offsets[-1]) == int(mine_alone.sum()), "rows of nobody are not for an expert"
        return _Experts.apply(rows, factors.repeat_interleave(offsets.diff().long()))

    poisoned()
    sizes = [case.sizes[n * places : (n + 1) * places] for n in range(nodes)]
    y = fusedtp.moe_in_stages(
        x,
        data.ids[here],
        weights,
        case.num_experts,
        between,
        within,
        experts,
        sizes=sizes,
        comm_dtype=comm_dtype,
    )
    poisoned()
    y.backward(data.gradients[here])
    for name, got, want in zip(
        ("y", "dx", "dweights"), (y.detach(), x.grad, weights.grad), wanted(case, data), strict=True
    ):
        dtype = torch.float32 if name == "dweights" else case.dtype
        assert_same(f"node {node}, place {at_place}: {name}", got, want[here].to(dtype))


def along_one_way(group, between: bool, case: Case, comm_dtype: str) -> None:
    """Several nodes of one rank, or one node."""
    size = len(case.sizes)
    groups, shape = ((group, None), (size, 1)) if between else ((None, group), (1, size))
    one_exchange(*groups, *shape, case, comm_dtype)


@st.composite
def cases(draw: st.DrawFn, ranks: int) -> Case:
    experts = ranks * draw(st.sampled_from([1, 2, 3, 12]))
    return Case(
        "auto",
        tuple(draw(st.one_of(st.just(0), st.integers(0, 9))) for _ in range(ranks)),
        experts,
        draw(st.integers(1, min(8, experts))),
        draw(st.integers(0, 5)),
        draw(st.sampled_from([torch.float32, torch.bfloat16])),
        draw(st.sampled_from(SKEWS)),
        draw(st.sampled_from([0.0, 0.3, 1.0])),
        draw(st.integers(0, 2**32)),
    )


@pytest.mark.slow
@settings(max_examples=20)
@given(st.sampled_from([2, 3]).flatmap(cases), st.booleans(), st.sampled_from(["", "fp8"]))
@example(Case("auto", (5, 3), 24, 3, 2, torch.float32, "uniform", 0.0, 0), True, "fp8")  # ids that fp8 cannot represent
def test_nodes_of_one_rank_and_one_node_equal_the_loop(case, between, comm_dtype):
    world(len(case.sizes)).run(along_one_way, between, case, comm_dtype)


def two_by_two(rank: int, cases: list[Case]) -> list[int]:
    """The number of rows that this rank sends to other nodes, per case."""
    mesh = dp_tp_mesh()
    between, within = mesh["dp"].get_group(), mesh["tp"].get_group()
    comm, sent = communicator(between), []
    all_to_all = comm.all_to_all

    def counted(x, counts, received):
        calls.append(sum(counts) - counts[comm.rank])
        return all_to_all(x, counts, received)

    comm.all_to_all = counted
    for case in cases:
        calls: list[int] = []
        one_exchange(between, within, 2, 2, case, "")
        sent.append(calls[0])  # the rows come first, then weights, choices and the way back
    return sent


@pytest.mark.slow
def test_two_nodes_of_two_ranks_equal_the_loop_and_send_a_token_once():
    plain = [
        Case("auto", sizes, 8, 4, 3, dtype, skew, dropped, seed)
        for seed, (sizes, dtype, skew, dropped) in enumerate(
            [
                ((5, 0, 3, 7), torch.float32, "uniform", 0.0),
                ((4, 4, 4, 4), torch.bfloat16, "skewed", 0.3),
                ((0, 0, 0, 0), torch.float32, "uniform", 0.0),
                ((3, 2, 0, 6), torch.float32, "one", 0.0),
            ]
        )
    ]
    to_one = dataclasses.replace(plain[3], num_experts=16, top_k=4, seed=9)  # the first quarter belongs to node 0
    cases = [*plain, to_one]
    with pool.World(4) as ranks:
        sent = ranks.run(two_by_two, cases)
    for i, case in enumerate(cases):
        ids, pairs = build(case).ids, 0
        for rank in range(4):
            for t in range(*mine(case, rank).indices(sum(case.sizes))):
                nodes = {int(e) // (case.num_experts // 2) for e in ids[t] if e >= 0}
                pairs += len(nodes - {rank // 2})
        assert sum(rows[i] for rows in sent) == pairs


def refused(group, between: bool, experts: int, sizes) -> None:
    ids = torch.tensor([[0], [1]])
    groups = (group, None) if between else (None, group)
    fusedtp.moe_in_stages(torch.ones(2, 3), ids, torch.ones(2, 1), experts, *groups, lambda rows, _: rows, sizes=sizes)


@pytest.mark.slow
@pytest.mark.parametrize("between", [True, False])
def test_what_does_not_fit_is_refused(between):
    shape = "2 nodes x 1" if between else "1 nodes x 2"
    with pytest.raises(WorldError, match=f"num_experts is 5; it must be a multiple of {shape} ranks"):
        world(2).run(refused, between, 5, None)
    with pytest.raises(WorldError, match=rf"wanted token counts of {shape} ranks, 2 for this rank"):
        world(2).run(refused, between, 4, [[2, 3, 4]])
    with pytest.raises(WorldError, match="PeerFailed: rank 1 raised before it began"):
        world(2).run(refused, between, PerRank([4, 5]), None)
