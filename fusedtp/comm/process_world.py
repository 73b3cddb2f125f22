"""The `processes` world: one process per rank, and a torch ProcessGroup between them.

Note [Threads of gloo at exit]
A gloo thread may release the tensors of a collective only after it has woken the waiting thread, and it needs the GIL
to do so. If the interpreter exits meanwhile, it unwinds that thread inside a destructor, which aborts the process:
"terminate called without an active exception", pytorch issue 190489. This can happen to a program that ends with a
collective, with or without destroy_process_group. A short sleep before the interpreter exits gives those threads the
GIL.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import select
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

# Its functions bind the default group, if one exists at import, as a default argument. torch imports it at the first
# custom op: the group, its threads and this library's memory for it would then outlive destroy_process_group.
import torch.distributed.nn.functional
from torch import Tensor

from .launching import on
from .memory import Region, allocate_memfd, allocate_symmetric, host_identity, pid_namespace, torch_version

# torch 2.13 renamed both and warns about the old names; 2.11 has only the old ones.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

EXIT_SECONDS = 0.05
OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # if it is 1, torch makes no multicast addresses
FABRIC_SINCE = (2, 9)  # from here on torch's symmetric memory passes fabric handles
FABRIC_HANDLE, FABRIC_BYTES, FABRIC_COMPLETE = 8, 64, 3  # of CUmemAllocationHandleType; NVML_GPU_FABRIC_STATE_COMPLETED
NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED of CUdevice_P2PAttribute
NVML_WRITE, NVML_ATOMICS = 1, 3  # of nvmlGpuP2PCapsIndex_t
SOCKET_NAME = 108  # bytes for the path in a socket's address, including the terminating zero
TEMP_FOLDERS = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")  # where torch puts sockets, in order of preference


class ProcessWorld:
    """Bootstrap, plain collectives and memory of one ProcessGroup. Every method but `has_died` is collective."""

    shares_process = False
    ranks_per_device = 1  # processes that share a GPU take turns on it

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group_ref = weakref.ref(group)  # a destroyed group may leave its name to another
        self.rank, self.world_size = group.rank(), group.size()
        self.name = group.group_name
        let_gloo_end()
        uses_cuda = torch.cuda.is_available() and torch.device("cuda") in group._device_types
        self.device = gpu_of(group) if uses_cuda else torch.device("cpu")
        self._pidfds: dict[int, int] = {}

    @property
    def group(self) -> dist.ProcessGroup:
        group = self.group_ref()
        if group is None:
            raise RuntimeError(f"the process group {self.name!r} was destroyed")
        return group

    @property
    def stream_owner(self) -> torch.device:
        """Equal for all groups of one rank on one device; see Note [One order for all groups] in streams.py."""
        return self.device

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's picklable value, in rank order."""
        out: list[Any] = [None] * self.world_size
        with on(self.device):  # where NCCL's objects lie
            dist.all_gather_object(out, value, group=self.group)
        return out

    def barrier(self) -> None:
        """Return when every rank has arrived."""
        if self.device.type == "cpu":
            dist.all_reduce(torch.zeros(1), group=self.group)  # takes a seventh of the time of an object exchange
        else:
            self.exchange(None)  # NCCL's collectives return before they are done; this reads the result

    def shared_memory_fault(self) -> str | None:
        """Why this group cannot share memory, the same answer on all ranks; None if it can. Watches the peers.

        CPU ranks open each other's memory through /proc and must notice when a peer dies. GPU ranks need neither: they
        only have to share a host, or an NVLink network of several hosts (GB200 NVL72). Their peers are watched if
        possible.
        """
        on_cpu = self.device.type == "cpu"
        hosts = self.exchange((host_identity(), pid_namespace(), os.getpid()))
        here, own_namespace, _ = hosts[self.rank]
        several = len({host for host, _, _ in hosts}) > 1
        if several:
            apart = "the group spans hosts" if on_cpu else self._domain_fault()
            if apart is not None:
                return apart
        if on_cpu and len({namespace for _, namespace, _ in hosts}) > 1:
            return "the group spans PID namespaces"
        fault = ""
        for p, (host, namespace, pid) in enumerate(hosts):
            try:
                if p != self.rank and (host, namespace) == (here, own_namespace):
                    self._pidfds[p] = os.pidfd_open(pid)
            except (OSError, AttributeError) as error:  # a Python built for kernels before 5.3 has no pidfd_open
                fault = f"cannot watch process {pid}: {error}"
        weakref.finalize(self, _close_all, list(self._pidfds.values()))
        if on_cpu:
            return first_fault(self.exchange(fault))
        if not several:
            unreachable = self._handles_fault([pid for _, _, pid in hosts])
            if unreachable is not None:
                return unreachable
        return self._gpu_fault()

    def _domain_fault(self) -> str | None:
        """GPU ranks on several hosts: why no NVLink network connects their GPUs, or torch cannot map memory over it.

        torch passes fabric handles if the GPU can make them. If not, it passes file descriptors through sockets, which
        do not reach other hosts, so this checks for fabric handles first.
        """
        try:
            domain, fault = nvlink_domain(self.device.index), ""
        except Exception as error:  # whatever it is, all ranks must hear of it
            domain, fault = "", f"rank {self.rank}: {error}"
        if torch_version() < FABRIC_SINCE:
            fault = f"torch {torch.__version__} does not share memory between hosts"
        told = self.exchange((domain, fault))
        found = first_fault([each for _, each in told])
        if found is None and len({each for each, _ in told}) > 1:
            found = "their GPUs are in different NVLink domains"
        return None if found is None else f"the group spans hosts: {found}"

    def _handles_fault(self, pids: Sequence[int]) -> str | None:
        """GPU ranks of one host: torch sends memory handles to the sockets TMPDIR/symm_mem-PID.

        A rank that finds no such socket raises while its peers wait for it forever, and a rank that finds its own
        socket takes its own memory for a peer's. torch writes a path that is too long past the end of the address.
        """
        found = None
        try:
            folder = next((os.environ[name] for name in TEMP_FOLDERS if name in os.environ), "/tmp")
            if len(os.fsencode(f"{folder}/symm_mem-{pids[self.rank]}")) < SOCKET_NAME:
                status = os.stat(folder)
                found = status.st_dev, status.st_ino
        except OSError:
            pass
        folders = set(self.exchange(found))
        if None not in folders and len(folders) == 1 and len(set(pids)) == self.world_size:
            return None
        return (
            "to pass memory handles, ranks need the same TMPDIR (or /tmp), with a path of less than 90 characters, and "
            "different process ids"
        )

    def _gpu_fault(self) -> str | None:
        """Why these GPUs cannot share memory, the same answer on all ranks.

        GPUs are identified by UUID: if each rank has its own CUDA_VISIBLE_DEVICES, every rank's GPU may have index 0. A
        peer's GPU that CUDA does not show here is looked up through NVML. If NVML does not see it either, as in
        containers with one GPU each, torch's rendezvous is the first to try it. A rank sends its fault, or its failure
        to find out, as text, so that no peer waits for it.
        """
        index, fault, uuid, visible = self.device.index, "", "", {}
        try:
            visible = {gpu_uuid(i): i for i in range(torch.cuda.device_count())}
            uuid, kind = gpu_uuid(index), symmetric_kind(self.device)
            if kind != "CUDA":
                fault = f"rank {self.rank} uses torch's symmetric memory by {kind}, not by CUDA: unset TORCH_SYMMMEM"
        except Exception as error:
            fault = f"rank {self.rank} cannot tell which GPU it has: {error}"
        told = self.exchange((uuid, index, fault))
        fault = first_fault([each for _, _, each in told]) or ""
        if fault:
            return fault
        try:
            for p, (peer, _, _) in enumerate(told):
                there = visible.get(peer)
                if there == index or peer == uuid or fault:
                    continue
                if there is None:
                    reached, atomic = hidden_p2p(uuid, peer) or (True, True)
                else:
                    reached = torch.cuda.can_device_access_peer(index, there)
                    atomic = reached and native_atomics(index, there)
                if not reached:
                    fault = f"the GPU of rank {self.rank} cannot access the memory of rank {p}'s GPU"
                elif not atomic:
                    fault = (
                        f"the GPU of rank {self.rank} has no native atomics in the memory of rank {p}'s GPU (as over "
                        "PCIe), and ranks signal each other with atomics"
                    )
        except Exception as error:
            fault = f"rank {self.rank} cannot tell whether its GPU can access its peers' memory: {error}"
        uuids, indices = {peer for peer, _, _ in told}, {there for _, there, _ in told}
        if len(uuids) == self.world_size > len(indices):  # torch would take equal indices for the same GPU
            os.environ.setdefault(OVERLAPPING, "1")
        return first_fault(self.exchange(fault))

    def has_died(self, p: int) -> bool:
        """Whether the process of rank p has ended (a zombie counts)."""
        fd = self._pidfds.get(p)
        if fd is None:
            return False
        poll = select.poll()  # select() does not support descriptors past 1023
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(0))

    def allocate(self, nbytes: int) -> Region:
        if self.device.type == "cuda":
            return allocate_symmetric(nbytes, self.device, self.name, self.exchange)
        return allocate_memfd(nbytes, self.exchange)

    def stream_barrier(self, region: Region, timeout_s: float) -> None:
        """CUDA: work that any rank enqueued before this finishes before work that any rank enqueues after it starts."""
        region.handle[0].barrier(channel=0, timeout_ms=int(timeout_s * 1e3))

    # -- plain collectives ---------------------------------------------------------------------------------------

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """[sizes[rank], ...] -> [sum(sizes), ...]"""
        most, total = max(sizes), sum(sizes)
        if total == 0 or (x[:1].numel() == 0 and 0 in x.shape[1:]):
            return x.new_empty(total, *x.shape[1:])
        if min(sizes) == most:
            out = x.new_empty(total, *x.shape[1:])
            _gather_into(out, x.contiguous(), group=self.group)
            return out
        padded = x.new_zeros(most, *x.shape[1:])
        padded[: x.shape[0]] = x
        out = x.new_empty(self.world_size * most, *x.shape[1:])
        _gather_into(out, padded, group=self.group)
        return torch.cat([part[:n] for part, n in zip(out.chunk(self.world_size), sizes, strict=True)])

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """[sum(sent), ...], rows for each rank in turn -> [sum(received), ...], rows from each rank in turn."""
        out = x.new_empty(sum(received), *x.shape[1:])
        if 0 in x.shape[1:]:
            return out
        dist.all_to_all_single(out, x.contiguous(), list(received), list(sent), group=self.group)
        return out

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int], bias: Tensor | None = None) -> Tensor:
        """[sum(sizes), ...] -> [sizes[rank], ...], summed over ranks, plus bias.

        16-bit sums run in fp32 on CPU and are rounded once, after the bias is added.
        """
        mine = sizes[self.rank]
        if x.numel() == 0:
            return x.new_empty(mine, *x.shape[1:])
        wide = self._wide(x)
        most = max(sizes)
        if min(sizes) != most:
            padded = wide.new_zeros(self.world_size, most, *x.shape[1:])
            for slot, part in zip(padded, wide.split(list(sizes)), strict=True):
                slot[: part.shape[0]] = part
            wide = padded.flatten(0, 1)
        out = wide.new_empty(most, *x.shape[1:])
        _reduce_scatter_into(out, wide.contiguous(), group=self.group)
        out = out if mine == most else out[:mine].clone()
        return (out if bias is None else out.add_(bias)).to(x.dtype)

    def all_reduce(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The sum over ranks plus bias, as in reduce_scatter; a new tensor."""
        wide = self._wide(x).clone(memory_format=torch.contiguous_format)
        if wide.numel():
            dist.all_reduce(wide, group=self.group)
        return (wide if bias is None else wide.add_(bias)).to(x.dtype)

    def _wide(self, x: Tensor) -> Tensor:
        narrow = self.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16)
        return x.float() if narrow else x


@functools.cache
def let_gloo_end() -> None:
    """Give gloo's threads some time before this process exits, see Note [Threads of gloo at exit]."""
    atexit.register(time.sleep, EXIT_SECONDS)


def gpu_of(group: dist.ProcessGroup) -> torch.device:
    """The GPU that init_process_group(device_id=...) was given, or the current one."""
    given: torch.device | None = getattr(group, "bound_device_id", None)
    return torch.device("cuda", torch.cuda.current_device()) if given is None or given.type != "cuda" else given


def gpu_uuid(index: int) -> str:
    """The GPU behind an index, independent of CUDA_VISIBLE_DEVICES."""
    return str(torch.cuda.get_device_properties(index).uuid)


def symmetric_kind(device: torch.device) -> str:
    """Which of torch's kinds of symmetric memory is in use. Only CUDA's is allocated and freed by a group for itself.

    That of NVSHMEM is by all processes of the job at once, so that a group that grows, or garbage that one of them
    collects, would wait for all others.
    """
    from torch.distributed import _symmetric_memory

    get_backend = getattr(_symmetric_memory, "get_backend", None)  # which older torch lacks
    return (get_backend and get_backend(device)) or "CUDA"


def native_atomics(index: int, there: int) -> bool:
    """Whether GPU `index` has native atomics in the memory of GPU `there`: over NVLink yes, over most PCIe no.

    Always True for AMD GPUs, which are not queried. Raises OSError if the query fails.
    """
    if torch.version.hip:
        return True
    driver, found = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
    code = driver.cuDeviceGetP2PAttribute(ctypes.byref(found), NATIVE_ATOMICS, index, there)
    if code != 0:
        raise OSError(f"cuDeviceGetP2PAttribute({index}, {there}) returned CUresult {code}")
    return bool(found.value)


def hidden_p2p(mine: str, theirs: str) -> tuple[bool, bool] | None:
    """Of GPUs by their UUIDs, one of which CUDA_VISIBLE_DEVICES hides, as NVML sees them: whether `mine` can store to
    the memory of `theirs`, and whether its atomics there are atomic. None: NVML does not see both, or cannot tell.
    """
    if torch.version.hip:
        return None
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2() != 0:
        return None
    try:
        gpus = ctypes.c_void_p(), ctypes.c_void_p()
        for gpu, uuid in zip(gpus, (mine, theirs), strict=True):
            if nvml.nvmlDeviceGetHandleByUUID(_nvml_uuid(uuid), ctypes.byref(gpu)) != 0:
                return None
        status = ctypes.c_int(), ctypes.c_int()
        for found, capability in zip(status, (NVML_WRITE, NVML_ATOMICS), strict=True):
            if nvml.nvmlDeviceGetP2PStatus(*gpus, capability, ctypes.byref(found)) != 0:
                return None
        return status[0].value == 0, status[1].value == 0
    finally:
        nvml.nvmlShutdown()


def _nvml_uuid(uuid: str) -> bytes:
    return f"GPU-{uuid.removeprefix('GPU-')}".encode()


class _FabricInfo(ctypes.Structure):
    """nvmlGpuFabricInfo_t."""

    _fields_ = (
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_int),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
    )


class _Allocation(ctypes.Structure):
    """CUmemAllocationProp, for pinned memory of a GPU."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("place", ctypes.c_int),
        ("index", ctypes.c_int),
        ("attributes", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


def nvlink_domain(index: int) -> str:
    """The multi-host NVLink network of GPU `index`: equal on GPUs that can map each other's memory over it.

    Raises OSError that says why the GPU is in none, or cannot export its memory. To find out, this makes a fabric
    handle: without an IMEX channel a host cannot get one, whatever the driver reports about the GPU.
    """

    def done(code: int, what: str) -> None:
        if code != 0:
            raise OSError(f"{what} returned {code}")

    nvml, gpu, info = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p(), _FabricInfo()
    done(nvml.nvmlInit_v2(), "nvmlInit_v2")
    try:
        uuid = _nvml_uuid(gpu_uuid(index))
        done(nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(gpu)), "nvmlDeviceGetHandleByUUID")
        done(nvml.nvmlDeviceGetGpuFabricInfo(gpu, ctypes.byref(info)), "nvmlDeviceGetGpuFabricInfo")
    finally:
        nvml.nvmlShutdown()
    if info.state != FABRIC_COMPLETE or info.status != 0 or not any(info.cluster):
        raise OSError(f"GPU {index} is not in an NVLink network of several hosts")
    driver, size, memory = ctypes.CDLL("libcuda.so.1"), ctypes.c_size_t(), ctypes.c_ulonglong()
    wanted = _Allocation(1, FABRIC_HANDLE, 1, index)
    given, handle = ctypes.byref(wanted), ctypes.create_string_buffer(FABRIC_BYTES)
    done(driver.cuMemGetAllocationGranularity(ctypes.byref(size), given, 0), "cuMemGetAllocationGranularity")
    done(
        driver.cuMemCreate(ctypes.byref(memory), size, given, ctypes.c_ulonglong(0)), "cuMemCreate for a fabric handle"
    )
    try:
        code = driver.cuMemExportToShareableHandle(handle, memory, FABRIC_HANDLE, ctypes.c_ulonglong(0))
        done(code, "cuMemExportToShareableHandle")
    finally:
        driver.cuMemRelease(memory)
    return f"{bytes(info.cluster).hex()} {info.clique}"


def first_fault(faults: Sequence[str]) -> str | None:
    """The first of all ranks' faults ("" for none), or None."""
    return next((fault for fault in faults if fault), None)


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
