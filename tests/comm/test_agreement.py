"""Valid and invalid groups, and when ranks compare the signatures of plain collectives."""

import os
import subprocess
import sys
from importlib import import_module
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import fusedtp
from fusedtp import VirtualWorld
from fusedtp.comm import SignalTimeout, device_view
from fusedtp.comm.communicator import communicator, set_timeout
from fusedtp.comm.workspace import COMPARED_CALLS
from tests.harness import PerRank, world

X, W = torch.ones(2, 4), torch.ones(5, 4)
CALLS = {
    "all_gather_matmul": lambda group: fusedtp.all_gather_matmul(X, [W], group),
    "matmul_reduce_scatter": lambda group: fusedtp.matmul_reduce_scatter(X, W, group),
    "matmul_all_reduce": lambda group: fusedtp.matmul_all_reduce(X, W, group),
    "all_gather_wgrad": lambda group: fusedtp.all_gather_wgrad(X, [X], group),
    "reserve": lambda group: fusedtp.reserve(group, 64),
    "check": lambda group: fusedtp.check(group),
    "set_timeout": lambda group: fusedtp.set_timeout(group, 1.0),
    "parallelize": lambda group: fusedtp.parallelize(torch.nn.Linear(2, 2), group),
}


@pytest.mark.parametrize("group", [None, 3, object(), dist], ids=["None", "3", "object", "module"])
@pytest.mark.parametrize("name", CALLS)
def test_what_is_no_group_is_refused_with_what_is_wanted(name, group):
    with pytest.raises(TypeError, match=r"must be a torch ProcessGroup.*VirtualGroup, or the name of a group"):
        CALLS[name](group)


class Foreign:
    group_name = "a name that no group has"


def refused_on_this_rank(group) -> list[str]:
    """The errors of `communicator` for a group without this rank, a foreign object, and an unknown name."""
    told = []
    for given in (dist.new_group([0]), Foreign(), "tp"):
        try:
            communicator(given)
        except (TypeError, ValueError) as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def test_a_rank_outside_of_a_group_a_foreign_object_and_an_unknown_name_are_told_apart():
    first, second = world(2).run(refused_on_this_rank)
    assert second[0].startswith(
        "TypeError: rank 1: group is -100, which new_group returns on ranks outside of the group"
    )
    for rank, (foreign, name) in enumerate((first, second[1:])):
        assert foreign.startswith(f"TypeError: rank {rank}: group is <") and "Foreign" in foreign
        assert name == f"ValueError: rank {rank}: no group is named 'tp'"


def collective_of_unequal_widths(group, width: int, workspace: bool) -> str:
    if not workspace:
        communicator(group).fallback = "as on several hosts"
    with pytest.raises(fusedtp.SignatureMismatch) as raised:
        fusedtp.all_gather_matmul(torch.ones(2, width), [torch.ones(3, width)], group, engine="collective")
    return str(raised.value)


@pytest.mark.parametrize("workspace", [True, False])
def test_ranks_that_disagree_on_a_plain_collective_are_named(workspace):
    """With and without shared memory: gloo itself would drop the connection, or worse."""
    told = world(3).run(collective_of_unequal_widths, PerRank([4, 5, 4]), workspace, fresh=True)
    assert "features is 4 on rank 0 and 5 on rank 1" in told[0]
    assert "features is 5 on rank 1 and 4 on rank 0" in told[1]


def another_weight_in_a_late_call(group) -> str:
    """Only rank 1 has a second weight; the bytes sent are the same."""
    for _ in range(COMPARED_CALLS + 1):
        fusedtp.all_gather_matmul(X, [W], group, engine="collective")
    with pytest.raises(fusedtp.SignatureMismatch) as raised:
        fusedtp.all_gather_matmul(X, [W] * (1 + (group.rank() == 1)), group, engine="collective")
    return str(raised.value)


def test_cpu_ranks_compare_every_plain_collective():
    for message in world(2).run(another_weight_in_a_late_call, fresh=True, timeout=30):
        assert "weights is" in message and "2 on rank 1" in message


def comparisons(group, debug: str, calls: int) -> tuple[bool, int]:
    """Count how many of the collective calls compared signatures, on the GPU path."""
    os.environ["FUSEDTP_DEBUG"] = debug
    try:
        workspace = communicator(group).workspace
    finally:
        del os.environ["FUSEDTP_DEBUG"]
    workspace.on_cpu, workspace.meets = False, True
    met = []
    meet, device_view.meet = device_view.meet, lambda *_: met.append(None)
    try:
        for _ in range(calls):
            y = fusedtp.all_gather_matmul(X, [W], group, engine="collective")[0]
            assert y.eq(4).all() and y.shape == (2 * group.size(), 5)
    finally:
        device_view.meet = meet
    return workspace.debug, len(met)


def test_gpu_ranks_compare_the_signatures_of_a_group_s_first_collectives_only():
    calls = COMPARED_CALLS + 5
    assert world(2).run(comparisons, "0", calls, fresh=True) == [(False, COMPARED_CALLS)] * 2


def test_debugging_one_rank_makes_all_of_them_compare_always():
    """Whether ranks meet never depends on state that only one of them has."""
    calls = COMPARED_CALLS + 5
    assert world(2).run(comparisons, PerRank(["", "1"]), calls, fresh=True) == [(True, calls)] * 2


def timeouts(group) -> tuple[float, float]:
    workspace = communicator(group).workspace
    before = workspace.device_view()
    set_timeout(group, 7.5)
    assert before is not workspace.device_view()
    return workspace.timeout_s, workspace.device_view().timeout_s


def test_a_timeout_holds_for_hosts_and_kernels():
    assert world(2).run(timeouts, fresh=True) == [(7.5, 7.5)] * 2


def test_a_timeout_holds_where_threads_meet():
    def body(group):
        set_timeout(group, 0.5)
        if group.rank() == 1:
            return "away"
        with pytest.raises(SignalTimeout, match=r"waited 0\.5 s for rank 1"):
            communicator(group).world.barrier()
        return "told"

    assert VirtualWorld(2, timeout_s=600.0).run(body) == ["told", "away"]


TWICE = """
import sys, torch, torch.distributed as dist, fusedtp

def begin(store, rank):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    return dist.group.WORLD

def gathered(group):
    x = torch.full((1, 2), float(dist.get_rank()))
    for engine in ("chunked", "collective"):  # the workspace, and the group itself
        y = fusedtp.all_gather_matmul(x, [torch.eye(2)], group, engine=engine)[0]
    return y[:, 0].tolist()

rank = int(sys.argv[1])
first = begin(sys.argv[2], rank)
name = first.group_name
assert gathered(first) == [0, 1]
dist.destroy_process_group()
second = begin(sys.argv[3], 1 - rank)
assert second.group_name == name and second is not first, "this torch names groups anew"
assert gathered(second) == [0, 1] and gathered(name) == [0, 1]
"""


@pytest.mark.slow
def test_a_group_that_takes_a_destroyed_one_s_name_has_memory_of_its_own(tmp_path):
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    arguments = [str(tmp_path / "first"), str(tmp_path / "second")]
    ranks = [
        subprocess.Popen([sys.executable, "-c", TWICE, str(r), *arguments], env=env, stderr=subprocess.PIPE)
        for r in range(2)
    ]
    try:
        told = [rank.communicate(timeout=120)[1].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], told


def differences(group, fact: str | None) -> dict[str, str]:
    """Of ranks that tell this fact of themselves; None: it cannot be found out."""

    def facts(device: torch.device) -> dict[str, tuple[int, str]]:
        if fact is None:
            raise OSError("unknown")
        return {"a fact": (len(fact), fact), "another": (0, "the same")}

    with patch.object(import_module("fusedtp.comm.communicator"), "RANK_FACTS", [facts]):
        return communicator(group).differences


def test_ranks_learn_in_what_they_differ_when_their_group_is_made():
    def told(*facts: str | None) -> dict[str, str]:
        first, *others = world(3).run(differences, PerRank(facts), fresh=True)
        assert others == [first] * 2
        return first

    assert told("a", "a", "b") == {}, "values are compared, not words"
    assert told("a", "long", "b") == {"a fact": "a on ranks 0, 2, long on rank 1"}
    others = "on ranks 0, 2, unknown on rank 1"
    assert told("a", None, "b") == {"a fact": f"a {others}", "another": f"the same {others}"}
    assert set(told(None, "a", "b")) == {"a fact", "another"}
