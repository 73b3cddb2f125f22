"""Ranks of a virtual world can share experts in all the ways that processes can."""

import pytest
import torch

import fusedtp
from fusedtp.comm import VirtualWorld
from fusedtp.nn.experts import Experts
from fusedtp.parallel.expert_parallel import ExpertSplit
from tests.harness import world
from tests.parallel.test_expert_split import SPLITS, same_bits
from tests.properties.laws import assert_same


@pytest.mark.parametrize("size, experts, split", SPLITS, ids=str)
def test_any_sharing_gives_the_bits_of_one_process(size, experts, split):
    """In a virtual world a parameter is a plain tensor, this rank's part."""
    (alone,) = world(1).run(same_bits, 3, experts, ExpertSplit(), True)
    ranks = VirtualWorld(size).run(lambda group: same_bits(group, 3, experts, split, True))
    for i, name in enumerate(("y", "dx", "dweights")):
        assert_same(name, torch.cat([rank[i] for rank in ranks]), alone[i])
    shares = split.shares(experts, size)
    for i, (name, features) in enumerate((("dup", 1), ("ddown", 2))):
        way = shares.way(features)
        for rank, found in enumerate(ranks):
            at = [int(each) for each in torch.unravel_index(torch.tensor(rank), way.shape)]
            assert_same(f"{name} of rank {rank}", found[3 + i], way.part(alone[3 + i], at))


def test_virtual_ranks_may_share_a_style():
    """Each rank keeps its own groups."""
    style = fusedtp.FusedExperts(split=ExpertSplit(nodes=2))

    def body(group) -> tuple[str, ...]:
        module = Experts(5, 6, 4)
        fusedtp.parallelize(module, group, plan={"": style})
        return module.parallel.stages

    stages = VirtualWorld(4).run(body)
    assert len({name for names in stages for name in names}) == 8
