"""The device's view of a group, and the launch of the group's own kernel, a barrier (kernels/meet.py).

Imports triton and the kernels lazily: groups work without Triton too, with other engines.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from .errors import PeerFailed, SignalTimeout, SignatureMismatch, TooManyRows
from .launching import Repeated, on
from .signature import RAISED


@dataclass(frozen=True)
class DeviceView:
    """The world as a fused kernel sees it; entry p is the address of rank p's memory as mapped in this process."""

    data_ptrs: Tensor  # int64 [W]
    flag_ptrs: Tensor  # int64 [W]
    arrival_ptrs: Tensor  # int64 [W]
    epoch: Tensor  # int32 [epoch_words], own memory: the call's number, and its kernel's counters, 0 between calls
    status: Tensor  # int64 [8], in memory that the host reads: code, peer, chunk, wanted, seen
    failure: Tensor  # int64 [8], on the device, where kernels read it; on CPU the same tensor as status
    slot_bytes: int
    flags_per_source: int
    timeout_s: float
    ranks_per_device: int = 1  # ranks that must run concurrently: all of a virtual world on one GPU
    multicast: Tensor | None = None  # int64 [1], address of all ranks' data regions: see kernels/multimem.py
    meet: Callable[[], None] | None = None  # if ranks share a GPU: a barrier of their host threads

    @cached_property
    def meetings(self) -> dict[int, Repeated]:
        """Launches of kernels/meet.py by signature, cached by `meet`."""
        return {}


OTHER_SIGNATURE, TOO_MANY_ROWS, ARRIVAL = 2, 3, -1  # codes that kernels record, as in kernels/signals.py
MOST_PARTS = 8  # of a call; each part has counters of finished programs
MOST_MEETINGS = 1024  # cached; if sizes change from call to call, so do signatures


def epoch_words(world_size: int) -> int:
    """The call's number, three counters, and one per part and rank: see Peers in kernels/signals.py."""
    return 4 + MOST_PARTS * world_size


def odd(n: int) -> int:
    """n as an integer that the compiler does not specialise on, see Note [Odd integers] in kernels/signals.py."""
    return 2 * n + 3


def clock_of(device: torch.device) -> str:
    """Which clock a kernel on `device` reads: "cuda", "hip", or "host" under the interpreter."""
    if device.type != "cuda":
        return "host"
    return "cuda" if torch.version.hip is None else "hip"


@cache
def runs_kernels(device: torch.device) -> bool:
    """Whether the Triton kernels run on this GPU. Assumes the same installation on all ranks of a group."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def _constant(value: Any) -> Any:
    """tl.constexpr(value), the same object each time: looking up a launch compares identities first."""
    import triton.language as tl

    return tl.constexpr(value)


def peers_of(view: Any, rank: int, world_size: int, sig: int, clock: str) -> Any:
    """The view as a single kernel argument."""
    from fusedtp.kernels.signals import Peers

    return Peers(
        data=view.data_ptrs,
        flags=view.flag_ptrs,
        arrivals=view.arrival_ptrs,
        epoch=view.epoch,
        failure=view.failure,
        status=view.status,
        world_size=_constant(world_size),
        clock=_constant(clock),
        slot_bytes=view.slot_bytes,
        flags_per_source=view.flags_per_source,
        timeout_ns=int(view.timeout_s * 1e9),
        rank2=odd(rank),
        low2=odd(sig & 0xFFFF),
        high2=odd((sig >> 16) & 0xFFFF),
    )


def meet_options(clock: str) -> dict[str, int]:
    """Compiler options of meet_kernel: by default ptxas spills to raise occupancy, which is useless for one program."""
    return {"maxnreg": 64} if clock == "cuda" else {}


def meet(view: DeviceView, rank: int, world_size: int, sig: int) -> None:
    """On the current stream, wait for all ranks of the group and compare signatures. See kernels/meet.py."""
    device = view.epoch.device
    kernel = view.meetings.get(sig)
    if kernel is None:
        from fusedtp.kernels.meet import meet_kernel

        clock = clock_of(device)
        peers = peers_of(view, rank, world_size, sig, clock)
        kernel = Repeated(meet_kernel, 1, dict(peers=peers), meet_options(clock))
        if len(view.meetings) >= MOST_MEETINGS:
            view.meetings.clear()
        view.meetings[sig] = kernel
    with on(device):
        kernel.start(device)


def announce(epoch: Tensor, arrivals: Iterable[Tensor], sig: int) -> None:
    """On the current stream, store this rank's arrival in its next call, without waiting for its peers' and without
    beginning the call: Note [Refused calls] in workspace.py.

    epoch      as in DeviceView
    arrivals   for each peer, int64 [2]: this rank's arrival words in its memory

    No data goes with it, so plain stores are enough: they are visible to the peers at the end of torch's kernel.
    """
    number = epoch[0].to(torch.int64)
    arrival = (number & 0xFFFFFFFF) | (sig << 32)
    of_call = torch.arange(2, device=epoch.device) == (number & 1)
    for words in arrivals:  # the other parity keeps the word that only this rank writes
        words.copy_(torch.where(of_call, arrival, words))


def recorded_error(status: Tensor, rank: int, group: str) -> Exception:
    """The error that a kernel of this rank has recorded in `status`, see DeviceView."""
    code, peer, chunk, wanted, seen = (int(v) for v in status[:5])
    unusable = f"the group {group!r} cannot be used again"
    if code == TOO_MANY_ROWS:
        return TooManyRows(
            f"rank {rank}: {seen} rows go to the experts of rank {peer}, which has room for max_rows = {wanted} (a "
            f"layer's recv_capacity sets it, too); {unusable}"
        )
    if code == OTHER_SIGNATURE and RAISED.hash32 in (wanted, seen):
        culprit = peer if seen == RAISED.hash32 else rank
        return PeerFailed(f"rank {rank}: rank {culprit} raised in a call that other ranks continued; {unusable}")
    what = "had published another signature" if code == OTHER_SIGNATURE else "had not signalled"
    kind = SignatureMismatch if code == OTHER_SIGNATURE else SignalTimeout
    where = "arrival" if chunk == ARRIVAL else f"chunk {chunk}"
    return kind(
        f"rank {rank}: a kernel waited for rank {peer}, which {what} ({where}: wanted {wanted}, saw {seen}); {unusable}"
    )
