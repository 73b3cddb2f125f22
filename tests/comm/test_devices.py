"""Whether the GPUs of a group can share memory, given what each rank sees: all ranks agree. The GPUs are fakes."""

import os
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric

from fusedtp.comm import process_world
from fusedtp.comm.process_world import ProcessWorld
from tests.harness import PerRank, world

VARIABLE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


@dataclass(frozen=True)
class Seen:
    """What one rank sees: the UUIDs of its visible GPUs, and the index of its own GPU."""

    uuids: tuple[str, ...]
    index: int = 0
    hidden: tuple[str, ...] = ()  # visible to NVML but not to CUDA
    unreachable: tuple[str, ...] = ()
    not_atomic: tuple[str, ...] = ()
    broken: str = ""  # the function that fails on this rank
    namespace: str = "one"
    pidfd: bool | None = True  # None: this Python was built without it
    folder: str = "/tmp"
    pid: int = 0  # 0: the real one
    host: str = "here"
    domain: str = ""  # an NVLink domain that spans hosts; "": none
    torch: tuple[int, int] = (2, 11)
    backend: str | None = "CUDA"  # of torch's symmetric memory; None: torch does not name one


def judged(group, seen: Seen, device: str = "cuda") -> tuple[str | None, str | None]:
    """This rank's fault, and the value of the variable for torch's rendezvous."""

    def called(name: str) -> None:
        if name == seen.broken:
            raise RuntimeError(f"{name} is broken")

    def properties(i: int) -> SimpleNamespace:
        called("get_device_properties")
        return SimpleNamespace(uuid=seen.uuids[i])

    def can_access(i: int, j: int) -> bool:
        called("can_device_access_peer")
        assert i == seen.index and 0 <= j < len(seen.uuids), (i, j)  # torch asserts this too
        return seen.uuids[j] not in seen.unreachable

    def attribute(found, which: int, i: int, j: int) -> int:
        """A fake of the driver's cuDeviceGetP2PAttribute; CUdevice_P2PAttribute 3 is native atomics."""
        if seen.broken == "cuDeviceGetP2PAttribute":
            return 999
        assert which == 3 and i == seen.index and i != j < len(seen.uuids)
        found._obj.value = seen.uuids[j] not in seen.not_atomic
        return 0

    def hidden(mine: str, theirs: str) -> tuple[bool, bool] | None:
        called("hidden_p2p")
        assert mine == seen.uuids[seen.index] and theirs not in seen.uuids
        return (theirs not in seen.unreachable, theirs not in seen.not_atomic) if theirs in seen.hidden else None

    def domain(index: int) -> str:
        assert index == seen.index
        called("nvlink_domain")
        if not seen.domain:
            raise OSError("not in an NVLink network of several hosts")
        return seen.domain

    def pidfd_open(pid: int) -> int:
        if not seen.pidfd:
            raise OSError("no pidfd here")
        return os.dup(0)

    own, own_pid = ProcessWorld(dist.group.WORLD), os.getpid()
    own.device = torch.device(device, seen.index) if device == "cuda" else torch.device("cpu")
    with (
        patch.object(torch.cuda, "device_count", lambda: len(seen.uuids)),
        patch.object(torch.cuda, "get_device_properties", properties),
        patch.object(torch.cuda, "can_device_access_peer", can_access),
        patch.object(process_world.ctypes, "CDLL", lambda _: SimpleNamespace(cuDeviceGetP2PAttribute=attribute)),
        patch.object(process_world, "on", lambda _: nullcontext()),
        patch.object(process_world, "pid_namespace", lambda: seen.namespace),
        patch.object(process_world, "host_identity", lambda: seen.host),
        patch.object(process_world, "nvlink_domain", domain),
        patch.object(symmetric, "get_backend", lambda device: seen.backend),
        patch.object(process_world, "hidden_p2p", hidden),
        patch.object(process_world, "torch_version", lambda: seen.torch),
        patch.object(os, "pidfd_open", pidfd_open),
        patch.object(os, "getpid", lambda: seen.pid or own_pid),
        patch.dict(os.environ, TMPDIR=seen.folder),
    ):
        os.environ.pop(VARIABLE, None)
        if seen.pidfd is None:
            del os.pidfd_open
        return own.shared_memory_fault(), os.environ.get(VARIABLE)


def outcomes(*seen: Seen, device: str = "cuda") -> list[tuple[str | None, str | None]]:
    return world(len(seen)).run(judged, PerRank(seen), device)


def test_gpus_of_one_visible_device_a_rank_share_memory_and_torch_is_told_so():
    assert outcomes(Seen(("a",)), Seen(("b",))) == [(None, "1")] * 2


def test_gpus_that_all_ranks_see_share_memory_and_torch_need_not_be_told():
    assert outcomes(Seen(("a", "b"), 0), Seen(("a", "b"), 1)) == [(None, None)] * 2


def test_unequal_visibility_raises_on_no_rank():
    """Rank 0 sees one GPU; rank 1 sees another one and two more. A peer's device indices mean nothing here."""
    assert outcomes(Seen(("a",), 0), Seen(("c", "b", "d"), 1), Seen(("c",), 0)) == [(None, "1")] * 3


def test_ranks_that_share_a_gpu_are_left_to_torch():
    assert outcomes(Seen(("a",)), Seen(("a",))) == [(None, None)] * 2


def test_symmetric_memory_of_another_kind_is_refused_on_all_ranks():
    """Such as NVSHMEM, which frees memory with all processes of the job: pytorch issue 195500."""
    told = outcomes(Seen(("a", "b"), 0), Seen(("a", "b"), 1, backend="NVSHMEM"))
    (fault,) = {fault for fault, _ in told}
    assert "rank 1" in str(fault) and "NVSHMEM" in str(fault)
    assert outcomes(Seen(("a",), backend=None), Seen(("b",))) == [(None, "1")] * 2


def test_a_gpu_that_cannot_reach_its_peer_s_is_named_on_all_ranks():
    told = outcomes(Seen(("a", "b"), 0), Seen(("a", "b"), 1, unreachable=("a",)))
    assert {fault for fault, _ in told} == {"the GPU of rank 1 cannot access the memory of rank 0's GPU"}


def test_gpus_without_native_atomics_between_them_are_named_on_all_ranks():
    """For example over PCIe: flags are exchanged with atomics, and a peer's memory supports none."""
    told = outcomes(Seen(("a", "b", "c"), 0), Seen(("a", "b", "c"), 1, not_atomic=("c",)), Seen(("c",), 0))
    (fault,) = {fault for fault, _ in told}
    assert "the GPU of rank 1 has no native atomics in the memory of rank 2's" in str(fault)


@pytest.mark.parametrize(
    "given, text", [("unreachable", "cannot access the memory of rank 0's"), ("not_atomic", "has no native atomics")]
)
def test_of_gpus_that_cuda_does_not_show_nvml_is_asked(given, text):
    """One visible device per rank on a PCIe machine: torch would map the memory, and flags would be lost."""
    told = outcomes(Seen(("a",), hidden=("b",)), Seen(("b",), hidden=("a",), **{given: ("a",)}))
    (fault,) = {fault for fault, _ in told}
    assert "the GPU of rank 1 " in str(fault) and text in str(fault)
    assert outcomes(Seen(("a",), hidden=("b",)), Seen(("b",), hidden=("a",))) == [(None, "1")] * 2


@pytest.mark.parametrize(
    "broken", ["get_device_properties", "can_device_access_peer", "cuDeviceGetP2PAttribute", "hidden_p2p"]
)
def test_what_raises_on_one_rank_is_told_to_all(broken):
    told = outcomes(Seen(("a", "b"), 0), Seen(("a", "b"), 1, broken=broken), Seen(("c",), 0))
    faults = {fault for fault, _ in told}
    assert len(faults) == 1 and "rank 1" in (fault := faults.pop()) and broken in fault


def test_only_cpu_ranks_need_one_pid_namespace_and_to_watch_each_other():
    apart = Seen(("a",), namespace="one"), Seen(("b",), namespace="two")
    blind = Seen(("a",), pidfd=False), Seen(("b",), pidfd=False)
    old = Seen(("a",), pidfd=None), Seen(("b",), pidfd=None)  # many Python builds only know older kernels
    assert outcomes(*apart) == outcomes(*blind) == outcomes(*old) == [(None, "1")] * 2
    for seen, text in (
        (apart, "spans PID namespaces"),
        (blind, "cannot watch process"),
        (old, "cannot watch process"),
    ):
        for fault, _ in outcomes(*seen, device="cpu"):
            assert text in str(fault)


def test_gpu_ranks_that_torch_s_handles_cannot_reach_say_so(tmp_path):
    """Otherwise one rank raises in torch's rendezvous and its peers wait, or a rank maps its own memory as a peer's."""
    folders = Seen(("a",)), Seen(("b",), namespace="two", folder=str(tmp_path))
    missing = Seen(("a",)), Seen(("b",), namespace="two", folder=str(tmp_path / "none"))
    pids = Seen(("a",), pid=7), Seen(("b",), namespace="two", pid=7)
    here = Seen(("a",)), Seen(("b",), folder=str(tmp_path))
    for seen in (folders, missing, pids, here):
        for fault, variable in outcomes(*seen):
            assert (
                "the same TMPDIR (or /tmp)" in str(fault) and "different process ids" in str(fault) and variable is None
            )
        assert outcomes(*seen, device="cpu")[0][0] == (None if seen is here else "the group spans PID namespaces")


def test_gpu_ranks_whose_sockets_would_have_too_long_a_name_say_so(tmp_path):
    """torch copies the name into the 108 bytes of a socket address without a check."""
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    seen = Seen(("a",), folder=str(deep)), Seen(("b",), folder=str(deep))
    assert all("the same TMPDIR" in str(fault) for fault, _ in outcomes(*seen))


def test_gpus_of_several_hosts_in_one_nvlink_domain_share_memory():
    """As on GB200 NVL72: sockets and process ids on one host are not needed, and no peer's GPU is visible."""
    one = Seen(("a",), host="x", domain="n 1", pid=7), Seen(("b",), host="y", domain="n 1", pid=7, folder="/none")
    assert outcomes(*one) == [(None, "1")] * 2


def test_gpus_of_several_hosts_that_nvlink_does_not_connect_say_so_on_all_ranks():
    there = Seen(("a",), host="x", domain="n 1")
    other = {
        "different NVLink domains": Seen(("b",), host="y", domain="n 2"),
        "rank 1: not in an NVLink network of several hosts": Seen(("b",), host="y"),
        "does not share memory between hosts": Seen(("b",), host="y", domain="n 1", torch=(2, 8)),
    }
    for words, seen in other.items():
        told = {fault for fault, _ in outcomes(there, seen)}
        (fault,) = told
        assert str(fault).startswith("the group spans hosts: ") and words in str(fault)
    assert {fault for fault, _ in outcomes(there, Seen(("b",), host="y"), device="cpu")} == {"the group spans hosts"}


def test_whatever_a_rank_cannot_find_out_about_its_domain_is_told_to_all():
    """The peers wait for this rank's answer."""
    told = outcomes(Seen(("a",), host="x", domain="n 1"), Seen(("b",), host="y", domain="n 1", broken="nvlink_domain"))
    assert {fault for fault, _ in told} == {"the group spans hosts: rank 1: nvlink_domain is broken"}


class Driver:
    """A fake libnvidia-ml and libcuda of a GPU in a cluster; `broken`: the function that returns 999."""

    def __init__(self, broken: str = "", **info: object) -> None:
        self.broken, self.info = broken, {"cluster": b"\1" * 16, "status": 0, "clique": 5, "state": 3, **info}
        self.calls: list[str] = []

    def __getattr__(self, name: str):
        def call(*given) -> int:
            self.calls.append(name)
            if name == "nvmlDeviceGetHandleByUUID":
                assert given[0] == b"GPU-a"
            if name == "nvmlDeviceGetGpuFabricInfo":
                found = given[1]._obj
                found.cluster[:] = self.info["cluster"]
                found.status, found.clique, found.state = (self.info[key] for key in ("status", "clique", "state"))
            if name == "cuMemCreate":
                wanted = given[2]._obj  # pinned memory of GPU 2, shared by a fabric handle
                assert (wanted.type, wanted.handles, wanted.place, wanted.index) == (1, 8, 1, 2)
            if name == "cuMemExportToShareableHandle":
                assert len(given[0]) == 64 and given[2] == 8
            return 999 if name == self.broken else 0

        return call


def domain_by(driver: Driver) -> str:
    with (
        patch.object(process_world.ctypes, "CDLL", lambda _: driver),
        patch.object(process_world, "gpu_uuid", lambda index: "a"),
    ):
        return process_world.nvlink_domain(2)


def test_a_domain_is_a_cluster_and_a_clique_in_which_memory_can_be_passed_on():
    driver = Driver()
    assert domain_by(driver) == f"{'01' * 16} 5"
    assert driver.calls.count("cuMemRelease") == driver.calls.count("nvmlShutdown") == 1
    assert domain_by(Driver(clique=6)) != domain_by(driver)


class Nvml:
    """A fake libnvidia-ml of a machine with several GPUs; `refused`: each (GPU, peer, capability) that it denies."""

    def __init__(self, *uuids: str, refused: tuple[tuple[str, str, int], ...] = (), broken: str = "") -> None:
        self.uuids, self.refused, self.broken, self.begun = uuids, refused, broken, 0

    def nvmlInit_v2(self) -> int:
        self.begun += 1
        return 0

    def nvmlShutdown(self) -> int:
        self.begun -= 1
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, gpu) -> int:
        name = uuid.decode().removeprefix("GPU-")
        if name not in self.uuids:
            return 6  # NVML_ERROR_NOT_FOUND
        gpu._obj.value = 1 + self.uuids.index(name)
        return 0

    def nvmlDeviceGetP2PStatus(self, mine, theirs, capability: int, status) -> int:
        if self.broken:
            return 999
        names = (self.uuids[gpu.value - 1] for gpu in (mine, theirs))
        status._obj.value = 5 if (*names, capability) in self.refused else 0  # NVML_P2P_STATUS_NOT_SUPPORTED
        return 0


@pytest.mark.parametrize(
    "nvml, want",
    [
        (Nvml("a", "b"), (True, True)),
        (Nvml("a", "b", refused=(("a", "b", 3),)), (True, False)),
        (Nvml("a", "b", refused=(("a", "b", 1), ("a", "b", 3))), (False, False)),
        (Nvml("a", "b", refused=(("b", "a", 1), ("a", "b", 2))), (True, True)),
        (Nvml("a"), None),
        (Nvml("a", "b", broken="yes"), None),
    ],
)
def test_nvml_tells_of_hidden_gpus_whether_stores_and_atomics_reach_them(nvml, want):
    with patch.object(process_world.ctypes, "CDLL", lambda _: nvml):
        assert process_world.hidden_p2p("a", "b") == want
    assert nvml.begun == 0


def test_without_nvml_nothing_is_known_of_hidden_gpus():
    def missing(_: str) -> None:
        raise OSError("no such library")

    with patch.object(process_world.ctypes, "CDLL", missing):
        assert process_world.hidden_p2p("a", "b") is None


@pytest.mark.parametrize("info", [{"state": 2}, {"status": 10}, {"cluster": bytes(16)}])
def test_a_gpu_whose_network_is_not_up_or_ends_at_its_host_is_in_no_domain(info):
    """An H100 whose switches stay within its host reports a completed fabric without a cluster."""
    with pytest.raises(OSError, match="GPU 2 is not in an NVLink network of several hosts"):
        domain_by(Driver(**info))


@pytest.mark.parametrize(
    "broken", ["nvmlInit_v2", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetGpuFabricInfo", "cuMemCreate",
               "cuMemExportToShareableHandle"]
)  # fmt: skip
def test_what_the_driver_refuses_is_named_and_nothing_is_kept(broken):
    driver = Driver(broken)
    with pytest.raises(OSError, match=f"{broken}.* returned 999"):
        domain_by(driver)
    assert driver.calls.count("nvmlShutdown") == (broken != "nvmlInit_v2")
    assert driver.calls.count("cuMemRelease") == (broken == "cuMemExportToShareableHandle")


class Bound:
    """A process group that was bound to a GPU, as by init_process_group(device_id=...)."""

    group_name = "bound"
    _device_types = (torch.device("cuda"),)

    def __init__(self, device: torch.device | None) -> None:
        self.bound_device_id = device

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


@pytest.mark.parametrize("given, want", [(torch.device("cuda", 3), 3), (None, 1)])
def test_a_rank_has_the_gpu_that_its_group_was_given_or_else_the_current_one(monkeypatch, given, want):
    """Objects are exchanged with that GPU as the current one, because torch uses the current one for them."""
    current = [1]

    class Current:
        def __init__(self, device: torch.device) -> None:
            self.index, self.before = device.index, current[0]

        def __enter__(self) -> None:
            current[0] = self.index

        def __exit__(self, *_: object) -> None:
            current[0] = self.before

    def gather(out: list, value: int, group: Bound) -> None:
        out[:] = [current[0]] * 2

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", Current)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    group = Bound(given)
    own = ProcessWorld(group)  # type: ignore[arg-type]
    assert own.device == torch.device("cuda", want)
    assert own.exchange(0) == [want] * 2 and current == [1]


def watched(group, namespace: str) -> set[int]:
    own = ProcessWorld(dist.group.WORLD)
    own.device = torch.device("cuda", 0)
    with (
        patch.object(process_world, "on", lambda _: nullcontext()),
        patch.object(process_world, "pid_namespace", lambda: namespace),
        patch.object(own, "_gpu_fault"),
    ):
        own.shared_memory_fault()
    return set(own._pidfds)


def test_a_gpu_rank_watches_the_peers_of_its_own_pid_namespace():
    """In another PID namespace, the same number may be an unrelated process."""
    assert world(3).run(watched, PerRank(["one", "two", "one"])) == [{2}, set(), {0}]
