"""A group as the operations see it, and the registry: group name -> Communicator.

The first call for a group is collective (memory is mapped). Later behaviour depends only on values all ranks share.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import monotonic
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group as resolve  # type: ignore[attr-defined]
from torch.utils._python_dispatch import _disable_current_modes

from .constant import constant_to_compiler
from .draws import Draws
from .errors import PeerFailed, SignalTimeout
from .process_world import ProcessWorld
from .signature import MAX_SIZES, Signature, compare
from .streams import has_streams
from .virtual_world import BEFORE_RUNS, GROUPS, ThreadWorld, VirtualGroup
from .workspace import COMPARED_CALLS, Workspace

Group = dist.ProcessGroup | DeviceMesh | VirtualGroup | str
Facts = dict[str, tuple[Any, str]]  # name -> (value that ranks compare, the same in words)
RANK_FACTS: list[Callable[[torch.device], Facts]] = []  # hooks: what ranks tell each other when a group is made
_NO_SPAN = nullcontext()


def copied(x: Tensor) -> Tensor:
    """A contiguous copy, whatever the strides of x."""
    return x.clone(memory_format=torch.contiguous_format)


class Place(NamedTuple):
    """This rank's place in a group: everything that shape checks and custom ops need to know of it."""

    name: str
    rank: int
    world_size: int
    device_type: str


class Communicator:
    """Rank, size, memory and plain collectives of one group."""

    def __init__(self, world: ProcessWorld | ThreadWorld | AloneWorld) -> None:
        self.world: Any = world
        self.name, self.rank, self.world_size, self.device = (
            world.name,
            world.rank,
            world.world_size,
            world.device,
        )
        self.place = Place(self.name, self.rank, self.world_size, self.device.type)
        self._collective_seconds = 0.0
        self.engine_calls: dict[tuple[str, str], int] = defaultdict(int)  # (operation, engine that ran) -> calls
        self.layer_calls: dict[tuple[str, str], int] = defaultdict(int)  # (kind of layer, engine that ran) -> calls
        self.plans: dict[Any, Any] = {}  # how operations run here, see ops/operation.py
        self.kinds: dict[Any, Any] = {}  # linear-layer calls that have passed their checks, see ops/linear_call.py
        self.joint: dict[Any, bool] = {}  # whether both gradients share a call, see ops/column_backward.py
        self.exchanges: dict[tuple[str, torch.dtype], str] = {}  # engines of experts, see ops/moe/plan.py
        self.draws = Draws()  # random-number state for layers with unequal parts per rank
        self.timeline: list[tuple[str, float, float]] | None = None  # a list here receives (label, begin, end)
        self.differences: dict[str, str] = {}  # facts in which ranks differ -> which ranks say what; alike on all ranks
        self._workspace: Workspace | None = None
        self.fallback = self._fallback()

    def _fallback(self) -> str | None:
        if self.world_size == 1:
            return None
        fault = self.world.shared_memory_fault()
        if fault is None and self.world_size > MAX_SIZES:
            fault = f"fused operations support at most {MAX_SIZES} ranks"
        if fault is None:
            try:
                self._workspace = Workspace(self.world, self._compare_facts())
            except (SignalTimeout, PeerFailed):
                raise
            except (OSError, RuntimeError) as error:  # on all ranks or none
                fault = str(error)
        if fault is not None and self.rank == 0:
            warnings.warn(f"fusedtp uses plain collectives for group {self.name!r}: {fault}", stacklevel=4)
        return fault

    def _compare_facts(self) -> bool:
        """Collective: note the differences between ranks. Returns whether any rank debugs."""
        debugs = os.environ.get("FUSEDTP_DEBUG", "0") not in ("", "0")
        told: list[tuple[bool, Facts]] = self.world.exchange((debugs, _facts(self.device)))
        for name in dict.fromkeys(name for _, facts in told for name in facts):
            ranks: dict[Any, list[int]] = defaultdict(list)
            every = [facts.get(name, (None, "unknown")) for _, facts in told]
            for rank, (value, _) in enumerate(every):
                ranks[value].append(rank)
            if len(ranks) > 1:
                self.differences[name] = ", ".join(f"{every[at[0]][1]} on {_named(at)}" for at in ranks.values())
        return any(debug for debug, _ in told)

    @property
    def workspace(self) -> Workspace:
        if self._workspace is None:
            raise RuntimeError(f"group {self.name!r} has no shared workspace: {self.fallback or 'one rank'}")
        return self._workspace

    @property
    def wait_seconds(self) -> float:
        """Host time spent asleep waiting for peers, and in plain collectives."""
        asleep = 0.0 if self._workspace is None else self._workspace.wait_seconds
        return asleep + self._collective_seconds

    @property
    def has_workspace(self) -> bool:
        return self.fallback is None and self._workspace is not None

    @property
    def has_switch(self) -> bool:
        """Whether a switch can sum over all ranks' memories (NVLink SHARP). The same on all ranks."""
        return self.has_workspace and self.workspace.control.multicast != 0

    @property
    def begun(self) -> int:
        """Calls begun so far on the workspace, and plain collectives that compared nothing."""
        return 0 if self._workspace is None else self._workspace.number + self._workspace.plain

    def refuse(self, begun: int) -> None:
        """Notify the peers of an error, unless a call has begun since `begun`: that call has notified them."""
        if self.has_workspace and self.begun == begun:
            with _disable_current_modes():
                self.workspace.refuse()

    @contextmanager
    def agreed(self, signature: Signature) -> Iterator[None]:
        """Wrap a call that uses plain collectives: check first that every rank is in it."""
        if self.has_workspace:
            workspace = self.workspace
            always = workspace.on_cpu or self.world.shares_process  # checking needs no kernel there
            if always or workspace.debug or workspace.number < COMPARED_CALLS:
                with workspace.call(signature, 0) as call:
                    call.handshake()
            else:
                workspace.keep_order()
            yield
            return
        if self.device.type == "cpu" and self.world_size > 1:
            words = signature.words(0)
            mine = torch.frombuffer(bytearray(words), dtype=torch.uint8)
            every = self.world.all_gather(mine[None], [1] * self.world_size)
            for p, theirs in enumerate(every.numpy()):
                compare(words, theirs.tobytes(), self.rank, p, self.world_size)
        yield

    def span(self, label: str) -> AbstractContextManager[None]:
        """Record a span of host time in `timeline`, if there is one."""
        return _NO_SPAN if self.timeline is None else self._recorded(self.timeline, label)

    @contextmanager
    def _recorded(self, timeline: list[tuple[str, float, float]], label: str) -> Iterator[None]:
        begin = monotonic()
        yield
        timeline.append((label, begin, monotonic()))

    def _timed(self, fn: Any, *args: Any) -> Tensor:
        begin = monotonic()
        out = fn(*args)
        self._collective_seconds += monotonic() - begin
        return out

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """x [sizes[rank], ...] -> [sum(sizes), ...] in rank order. No autograd."""
        return copied(x) if self.world_size == 1 else self._timed(self.world.all_gather, x, sizes)

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """sent[p] rows for each rank p in turn -> received[p] rows from each rank p in turn. No autograd."""
        return copied(x) if self.world_size == 1 else self._timed(self.world.all_to_all, x, sent, received)

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int], bias: Tensor | None = None) -> Tensor:
        """x [sum(sizes), ...] -> [sizes[rank], ...] summed over ranks, plus bias. No autograd."""
        if self.world_size == 1:
            return copied(x) if bias is None else x + bias
        return self._timed(self.world.reduce_scatter, x, sizes, bias)

    def all_reduce(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The sum over ranks plus bias, a new tensor. No autograd."""
        if self.world_size == 1:
            return copied(x) if bias is None else x + bias
        return self._timed(self.world.all_reduce, x, bias)


def _facts(device: torch.device) -> Facts:
    """What this rank tells its peers; nothing if it cannot find out, because they wait for it."""
    try:
        return {name: fact for facts in RANK_FACTS for name, fact in facts(device).items()}
    except Exception:
        return {}


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


class AloneWorld:
    """The world of calls without a group: a single rank."""

    rank, world_size, shares_process = 0, 1, False

    def __init__(self, device_type: str) -> None:
        self.name, self.device = f"alone:{device_type}", torch.device(device_type)

    def group_ref(self) -> AloneWorld:
        return self


_registry: dict[str, Communicator] = {}
_registry_lock = threading.RLock()  # a finalizer may run inside it


def communicator(group: Group) -> Communicator:
    """The Communicator of a ProcessGroup, 1-D DeviceMesh, VirtualGroup, or the name of one already seen.

    The first call for a group is collective. Raises ValueError for a mesh of more than one dimension and for a name
    that no group has, TypeError for anything else.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"the mesh has dimensions {group.mesh_dim_names}; pass one of them, as in mesh['tp']")
        group = group.get_group()
    found = _known(group)
    if found is not None:
        return found
    if isinstance(group, str) and group in GROUPS:
        group = GROUPS[group]
    if isinstance(group, str):
        try:
            group = resolve(group)  # type: ignore[arg-type]
        except (RuntimeError, LookupError) as error:
            raise ValueError(f"{_this_rank()}no group is named {group!r}") from error
    if not isinstance(group, (dist.ProcessGroup, VirtualGroup)):
        raise _not_a_group(group)
    world = ThreadWorld(group) if isinstance(group, VirtualGroup) else ProcessWorld(group)
    made = Communicator(world)
    with _registry_lock:
        _join_order(made)
        _registry[made.name] = made
    weakref.finalize(group, _forget, made.name, id(made))
    return made


def _join_order(made: Communicator) -> None:
    """Order the calls of a new group and of this rank's others: Note [One order for all groups] in streams.py."""
    if not made.has_workspace or not has_streams(made.device):
        return
    others = [other for other in list(_registry.values()) if other.has_workspace]
    shared = (other.workspace for other in others if other.world.stream_owner == made.world.stream_owner)
    made.workspace.join_order(next(shared, None))


def _known(group: Group) -> Communicator | None:
    """The registry's entry for this very group, not for a destroyed one of the same name. None for a mesh."""
    name = group if isinstance(group, str) else getattr(group, "group_name", None)
    if name is None:
        if isinstance(group, DeviceMesh):
            return None
        raise _not_a_group(group)
    found = _registry.get(name)
    if found is None or (isinstance(group, str) and isinstance(found.world, (ThreadWorld, AloneWorld))):
        return found
    if isinstance(group, str):
        group = resolve(group)  # type: ignore[arg-type]
    return found if found.world.group_ref() is group else None


def _not_a_group(given: object) -> TypeError:
    shown = f"{given!r}"
    if isinstance(given, int) and given == dist.GroupMember.NON_GROUP_MEMBER:
        shown += ", which new_group returns on ranks outside of the group"
    return TypeError(
        f"{_this_rank()}group is {shown}; it must be a torch ProcessGroup, a 1-D DeviceMesh such as mesh['tp'], "
        "a VirtualGroup, or the name of a group"
    )


def _this_rank() -> str:
    """The prefix of an error message when the group's rank is unknown."""
    return f"rank {dist.get_rank()}: " if dist.is_initialized() else ""


def _forget(name: str, made: int) -> None:
    """Drop the entry of a group that no longer exists, and with it its workspace."""
    with _registry_lock:
        if name in _registry and id(_registry[name]) == made:
            gone = _registry.pop(name)
            gone.plans.clear()  # they refer to the communicator
            gone.kinds.clear()


def forget_broken(groups: Sequence[VirtualGroup]) -> None:
    """Between runs of a group's ranks: drop the group's entries if an error has left it unusable."""
    made = [found for group in groups if (found := _registry.get(group.group_name)) is not None]
    workspaces = [comm._workspace for comm in made if comm._workspace is not None]
    in_step = len(made) in (0, len(groups)) and len({workspace.number for workspace in workspaces}) <= 1
    if not in_step or any(workspace.failed is not None for workspace in workspaces):
        for comm in made:
            _forget(comm.name, id(comm))


BEFORE_RUNS.append(forget_broken)


@constant_to_compiler
def place(group: Group) -> Place:
    """This rank's place in a group; a constant to torch.compile. The first call for a group is collective."""
    group = getattr(group, "real_obj", group)  # while tracing, torch wraps the group
    found = _known(group)
    if found is None:
        with _disable_current_modes():
            found = communicator(group)
    return found.place


@constant_to_compiler
def alone(device_type: str) -> Place:
    """The place of a call without a group: rank 0 of 1."""
    name = f"alone:{device_type}"
    if name not in _registry:
        made = Communicator(AloneWorld(device_type))
        with _registry_lock:
            _registry.setdefault(name, made)
    return _registry[name].place


def propagate_errors(at: Place) -> AbstractContextManager[None]:
    """Around one operation: a rank that raises in here before any call has begun notifies its peers.

    They raise PeerFailed: on CPU at once, and the group stays usable. Note [Refused calls] in workspace.py.
    """
    return nullcontext() if torch.compiler.is_compiling() or not at.name else _PropagateErrors(_registry[at.name])


class _PropagateErrors(AbstractContextManager[None]):
    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.begun = comm.begun

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, Exception):
            self.comm.refuse(self.begun)


def registered(name: str) -> Communicator:
    """The Communicator of a group that `place` has seen; resolved again if that group is gone."""
    found = _registry.get(name)
    return found if found is not None and found.world.group_ref() is not None else communicator(name)


def reserve(group: Group, nbytes: int) -> None:
    """Grow the group's workspace so that each of its two slots holds `nbytes`. Collective.

    Calls that need no more than this never allocate, as CUDA graph capture requires.
    """
    comm = communicator(group)
    if comm.has_workspace:
        with comm.workspace.lock:
            comm.workspace.grow(max(comm.world.exchange(nbytes)))


def check(group: Group) -> None:
    """Raise the error that has made the group unusable, if any; call before an optimizer step.

    SignalTimeout; from a kernel also TooManyRows or, on a GPU, SignatureMismatch, or PeerFailed if a rank has raised in
    a call. A kernel's error is visible as soon as the kernel has recorded it.
    """
    comm = communicator(group)
    if comm.has_workspace:
        comm.workspace.check()


def set_timeout(group: Group, seconds: float) -> None:
    """Bound every wait for a peer of this group (default 600 s, enough for first-use compilation and slow data)."""
    if not seconds > 0:
        raise ValueError(f"timeout is {seconds} s; it must be positive")
    comm = communicator(group)
    if isinstance(comm.world, ThreadWorld):
        comm.world.timeout_s = float(seconds)
    if comm.has_workspace:
        comm.workspace.set_timeout(float(seconds))
