"""A kernel with its arguments, and its launch: the first one through Triton, later ones without.

`kernel[grid](**arguments)` binds arguments by name, computes what the compiler specialises on for each, and looks up
the compiled kernel by the whole list. In an eager call this dominates the host time. But only the dtype and alignment
of a tensor matter, and everything else is the same from call to call. So a later launch passes only the addresses to
the compiled kernel.

The first launch of a kind goes through Triton, which compiles it. So does every launch with an address that is not a
multiple of 16 or while a launch hook is set (by a profiler), every launch under the interpreter, and every launch on
AMD, where the compiled code also depends on a tensor's size.

Note [Below Triton's launcher]: Triton starts a compiled kernel through a launcher in Python, which allocates scratch
memory and encodes each TMA descriptor in every call. Launches without descriptors, and launches that are alike, call
the driver's binding directly, with the arguments that the launcher would pass, and cache encoded descriptors by
address. The launcher's attributes are not a stable interface of Triton. If one is missing, if the number of arguments
does not match, or if a kernel needs scratch memory, the launcher is called.

Modules that import triton are imported inside functions, so that `import fusedtp` works without it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .copies import Sending
from .streams import is_capturing

MAX_TENSOR_MAPS = 4096  # encoded descriptors of one operand, one for each address
MOST_KEPT = 4096  # cached launches without another owner; sizes are in the key, and some never recur
_HERE: AbstractContextManager[Any] = nullcontext()
_LOADING = threading.Lock()  # if ranks are threads: one compiles a kernel, the others find it in the cache


@dataclass(frozen=True)
class Launch:
    """A kernel with its arguments; `run` starts it on the current stream.

    A prepared launch lacks the arguments that change from call to call, its pointers; see `prepare` in the operations.
    """

    kernel: Any
    programs: int
    args: dict[str, Any]
    config: Any  # a launch.config.Config of the operations

    @cached_property
    def options(self) -> dict[str, int]:
        """Compiler options. FP fusion is among them because Triton's default changes: off from 3.10 on."""
        chosen = {"num_warps": self.config.num_warps, "num_stages": self.config.num_stages, "enable_fp_fusion": True}
        if self.config.max_registers:  # an option that only the CUDA backend has
            chosen["maxnreg"] = self.config.max_registers
        return chosen

    @cached_property
    def repeated(self) -> Repeated:
        return Repeated(self.kernel, self.programs, self.args, self.options)

    def given(self, pointers: dict[str, Any]) -> Launch:
        """This launch completed with the missing arguments."""
        return Launch(self.kernel, self.programs, {**self.args, **pointers}, self.config)

    def run(
        self,
        view: Any,
        device: torch.device,
        sending: Sending | None = None,
        pointers: dict[str, Any] | None = None,
        *,
        alike: bool = False,
    ) -> None:
        """Start the kernel of a call of the group.

        sending    copies that run beside the kernel, which then sends nothing
        pointers   the missing arguments, in a dictionary that this call owns
        alike      this launch is cached by the `layouts` of all operands, so that these are of one kind in all its
                   runs; the other tensors are new and contiguous, with the same dtypes

        Ranks that share a GPU (their view has a `meet`, a barrier of the host threads) load the kernel before any of
        them starts it, and all start it before any continues. Loading a module or creating a library handle may wait
        for the device, and so for a running kernel that waits for a rank that has not been able to start its own.
        """
        given = pointers or {}
        peers = given.pop("peers", None)
        if view.meet is None and sending is None and is_current(device):
            if self.programs:
                self.repeated.start(device, given, peers, alike)
            return
        meet = None if view.meet is None or is_capturing() else view.meet
        with on(device):
            if meet is not None:
                with _LOADING:
                    self.repeated.load(given, peers)
                meet()
            try:
                if sending is not None:
                    sending.send()
                if self.programs:
                    self.repeated.start(device, given, peers, alike)
            finally:
                if sending is not None:
                    sending.join()
        if meet is not None:
            meet()

    def start(self, device: torch.device, tensors: dict[str, Tensor | None] | None = None) -> None:
        """Start a kernel that belongs to no call, if there is anything to do.

        tensors   the missing tensors of a prepared launch, which its caller caches by the `layouts` of the operands;
                  outputs are new and contiguous. None: the launch has all arguments
        """
        if not self.programs:
            return
        if tensors is not None:
            made, given = self.repeated, tensors
        else:
            made, given = self._looked_up(device)
        with on(device):
            made.start(device, given, alike=tensors is not None)

    def _looked_up(self, device: torch.device) -> tuple[Repeated, dict[str, Any]]:
        """The cached launch with the same constants, and this launch's tensors.

        Descriptors with different tiles come with different constants, so that the key tells them apart.
        """
        same: dict[str, Any] = {}
        given: dict[str, Any] = {}
        for name, value in self.args.items():
            first = value[0] if type(value) is tuple and value else value
            # only a TMA descriptor has a `base`
            of_call = first is None or isinstance(first, Tensor) or hasattr(first, "base")
            (given if of_call else same)[name] = value
        options = tuple(self.options.items())
        return _kept(self.kernel, self.programs, device, options, tuple(same.items()), tuple(given)), given


def layouts(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Cache key of a prepared launch: shape, strides, alignment and dtype of each operand."""
    found: list[Any] = []
    for t in tensors:
        found.append(None if t is None else (t.shape, t.stride(), t.data_ptr() % 16 == 0, t.dtype))
    return tuple(found)


@lru_cache(MOST_KEPT)
def _kept(
    kernel: Any,
    programs: int,
    device: torch.device,
    options: tuple[tuple[str, Any], ...],
    same: tuple[tuple[str, Any], ...],
    given: tuple[str, ...],
) -> Repeated:
    return Repeated(kernel, programs, dict(same), dict(options))


class Repeated:
    """kernel[(programs,)] with the arguments that are the same in every call. options: for the compiler."""

    def __init__(self, kernel: Any, programs: int, args: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        from triton import knobs
        from triton.runtime.jit import JITFunction

        self.kernel, self.programs, self.args, self.options = kernel, programs, dict(args), dict(options)
        self._compiled = isinstance(kernel, JITFunction)
        self._runtime = knobs.runtime  # has the launch hooks
        self._peers: Any = None
        self._ready: dict[Any, _Ready] = {}  # by kind
        self._only: _Ready | None = None  # for calls that are alike

    def start(
        self, device: torch.device, given: Mapping[str, Any] = {}, peers: Any = None, alike: bool = False
    ) -> None:
        """Start on the current stream of `device`, the current device, with the arguments missing from `args`.

        given   the same names in every call, in the same order: tensors, None, tuples of these, integers, and TMA
                descriptors with the same tiles in every call
        peers   one more argument; the same object until the group's memory moves
        alike   everything else that Triton specialises on is the same in every call: which arguments are tensors or
                None, dtypes, alignment, and the shapes and strides in descriptors
        """
        if peers is not self._peers:
            self._ready.clear()
            self._peers, self._only = peers, None
        enter, leave = self._runtime.launch_enter_hook, self._runtime.launch_exit_hook
        watched = getattr(enter, "calls", enter) or getattr(leave, "calls", leave)
        ready = self._only if alike else None
        if ready is None or watched:
            kinds = _kinds(given.values()) if self._compiled else None
            kept = self._ready.get(kinds)
            if kept is None or watched:
                args = {**self.args, **given} if peers is None else {**self.args, **given, "peers": peers}
                compiled = self.kernel[(self.programs,)](**args, **self.options)
                if kinds is not None:
                    self._keep(kinds, compiled, args, given)
                return
            ready = kept
            if alike:
                ready = self._only = kept if kept.direct else kept.without_launcher(given)
        arguments, tensor_maps = ready.arguments.copy(), ready.tensor_maps
        for place, value in zip(ready.places, given.values()):
            if type(value) is tuple:
                of_tuple = []  # before Python 3.12 a comprehension costs a function call
                for each in value:
                    of_tuple.append(None if each is None else each.data_ptr())
                value = tuple(of_tuple)
            elif isinstance(value, Tensor):
                value = value.data_ptr()
            elif place in tensor_maps:
                value = ready.tensor_map(place, value)
            arguments[place] = value
        stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
        if ready.direct:
            ready.launch(self.programs, 1, 1, stream, *ready.how, arguments)
        else:
            ready.launch(self.programs, 1, 1, stream, *ready.how, *arguments)

    def load(self, given: Mapping[str, Any] = {}, peers: Any = None) -> None:
        """Compile for arguments like these and load the compiled kernel, without starting it."""
        args = {**self.args, **given} if peers is None else {**self.args, **given, "peers": peers}
        self.kernel.warmup(**args, **self.options, grid=(self.programs,))._init_handles()

    def _keep(self, kinds: tuple[Any, ...], compiled: Any, args: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        self._compiled = compiled.metadata.target.backend == "cuda"
        if not self._compiled:
            return
        parameters = self.kernel.signature.parameters
        arguments = [_addresses(args.get(name, parameter.default)) for name, parameter in parameters.items()]
        places = [list(parameters).index(name) for name in given]
        for place in places:  # drop the first call's arguments: its descriptors keep tensors alive
            arguments[place] = None
        ready = _Ready.of(compiled, places, arguments)
        self._ready.setdefault(
            kinds, ready if any(map(_is_descriptor, given.values())) else ready.without_launcher(given)
        )


class _Ready(NamedTuple):
    """A compiled kernel and how to launch it without Triton's binding of arguments.

    compiled     kept alive here, because its module is unloaded with it
    direct       True: `launch` is the driver's binding, which takes all arguments as one list; False: Triton's launcher
    launch       called with (programs, 1, 1, stream, *how), then the arguments
    places       positions of a call's arguments in the full list
    tensor_maps  position of a TMA descriptor -> its encoder, and the encoded descriptors by address
    """

    compiled: Any
    launch: Callable[..., Any]
    how: tuple[Any, ...]
    places: list[int]
    arguments: list[Any]
    direct: bool = False
    tensor_maps: Mapping[int, tuple[Any, dict[int, Any]]] = {}

    @classmethod
    def of(cls, compiled: Any, places: list[int], arguments: list[Any]) -> _Ready:
        """A launch through Triton's launcher, without hooks."""
        how = compiled.function, compiled.packed_metadata, None, None, None
        return cls(compiled, compiled.run, how, places, arguments)

    def without_launcher(self, given: Mapping[str, Any]) -> _Ready:
        """The same without the launcher, if possible: Note [Below Triton's launcher].

        given   the arguments of one call; if some are descriptors, all calls are alike
        """
        run = self.compiled.run
        try:
            metas = list(getattr(self.compiled.metadata, "tensordesc_meta", None) or ())
            sanitized = getattr(run, "gsan_enabled", False)  # from Triton 3.8 on
            if run.global_scratch_size or run.profile_scratch_size or sanitized or None in metas:
                return self
            from triton.backends.nvidia.driver import make_tensordesc_arg
            from triton.runtime import driver

            unused = {"_": None} if "_" in signature(make_tensordesc_arg).parameters else {}  # from Triton 3.8 on
            launch = driver.active.utils.launch
            how = (
                self.compiled.function, run.launch_cooperative_grid, run.launch_pdl, self.compiled.packed_metadata,
                None, None, None, None, None, run.arg_annotations, run.kernel_signature,
            )  # fmt: skip
            taken = zip(self.places, given.values(), strict=True)
            described = {place: value for place, value in taken if _is_descriptor(value)}
            arguments: list[Any] = []
            moved: dict[int, int] = {}
            tensor_maps: dict[int, tuple[Any, dict[int, Any]]] = {}
            for place, value in enumerate(self.arguments):
                moved[place] = len(arguments)
                if place in described:
                    encode = partial(make_tensordesc_arg, metadata=metas.pop(0), **unused)
                    tensor_maps[len(arguments)] = encode, {}
                    arguments += [None, *encode(described[place])[1:]]
                else:
                    arguments.append(value)
            if metas or len(arguments) != len(run.arg_annotations):
                return self
        except (ImportError, AttributeError, IndexError, TypeError):
            return self
        places = [moved[place] for place in self.places]
        return _Ready(self.compiled, launch, how, places, arguments, True, tensor_maps)

    def tensor_map(self, place: int, descriptor: Any) -> Any:
        """The descriptor, encoded."""
        encode, made = self.tensor_maps[place]
        address = descriptor.base.data_ptr()
        found = made.get(address)
        if found is None:
            if len(made) >= MAX_TENSOR_MAPS:
                made.clear()
            found = made[address] = encode(descriptor)[0]
        return found


def _is_descriptor(value: Any) -> bool:
    return value is not None and not isinstance(value, (Tensor, tuple, int))


def _kinds(given: Iterable[Any]) -> tuple[Any, ...] | None:
    """The properties of these arguments by which Triton chooses a compiled kernel.

    None if 16 does not divide an address: then Triton has to choose.
    """
    kinds: list[Any] = []
    low = 0
    for value in given:
        if value is None:
            kinds.append(None)
        elif type(value) is tuple:
            for each in value:
                if each is None:
                    kinds.append(None)
                else:
                    kinds.append(each.dtype)
                    low |= each.data_ptr()
        elif isinstance(value, Tensor):
            kinds.append(value.dtype)
            low |= value.data_ptr()
        elif isinstance(value, int):  # is it one, is it a multiple of 16, does it need more than 32 bits
            kinds.append((value == 1, value & 15 == 0, value >> 31))
        else:  # a TMA descriptor; its address is a multiple of 16
            kinds.append(value.base.dtype)
    return None if low & 15 else tuple(kinds)


def _addresses(value: Any) -> Any:
    """Replace tensors by their addresses, also in nested tuples."""
    if isinstance(value, tuple):
        return tuple(map(_addresses, value))
    return value.data_ptr() if isinstance(value, Tensor) else value


def is_current(device: torch.device) -> bool:
    """Whether `device` is the current device; always true on CPU."""
    return device.type != "cuda" or device.index == torch._C._cuda_getDevice()  # torch.cuda.current_device calls this


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` the current one; free if it already is."""
    return _HERE if is_current(device) else torch.cuda.device(device)
