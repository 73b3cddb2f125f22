"""Kernels that are launched again and again: what Triton finds out at each launch, found out once.

`kernel[grid](**arguments)` binds arguments by name, asks each what the compiler specialises on, and looks for what it
compiled by the whole list. In an eager call that takes longer than all else. But of tensors only dtype and alignment
count, and all else is the same from call to call; so a later launch hands the compiled kernel its addresses, no more.

The first launch of a kind goes through Triton, which compiles then. So do all with an address that 16 does not divide,
or while a hook watches launches (a profiler's), all under the interpreter, and on AMD, where what is compiled depends
on a tensor's size as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

STREAM = 3  # which argument of a launcher it is


class Repeated:
    """kernel[(programs,)] with some of its arguments, the same in every call. options: the compiler's."""

    def __init__(
        self, kernel: Any, programs: int, args: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        from triton import knobs
        from triton.runtime.jit import JITFunction

        self.kernel, self.programs, self.args, self.options = kernel, programs, dict(args), dict(options)
        self._compiled = isinstance(kernel, JITFunction)
        self._runtime = knobs.runtime  # which has the hooks
        self._peers: Any = None
        self._places: list[int] = []  # of a call's arguments among all
        # of each kind: what was compiled, which unloads its module when nobody holds it; its launcher; its arguments
        self._ready: dict[Any, tuple[Any, Any, list[Any]]] = {}

    def start(self, device: torch.device, given: Mapping[str, Any] = {}, peers: Any = None) -> None:
        """Start on the current stream of `device`, the current one, with the arguments that `args` lacks.

        given   the same names in every call, in one order: tensors, None, tuples of these, integers, and TMA
                descriptors of the same tiles in every call
        peers   one more; the same object until the group's memory moves
        """
        if peers is not self._peers:
            self._ready.clear()
            self._peers = peers
        kinds: tuple[Any, ...] | None = () if self._compiled else None
        values: list[Any] = []
        if given and self._compiled:
            kinds, values = _looked_at(given.values())
        ready = self._ready.get(kinds)
        enter, leave = self._runtime.launch_enter_hook, self._runtime.launch_exit_hook
        if ready is None or getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            args = {**self.args, **given} if peers is None else {**self.args, **given, "peers": peers}
            compiled = self.kernel[(self.programs,)](**args, **self.options)
            if kinds is not None:
                self._keep(kinds, compiled, args, list(given))
            return
        _compiled, launch, first = ready
        arguments = first.copy()
        for place, value in zip(self._places, values):
            arguments[place] = value
        if device.type == "cuda":
            arguments[STREAM] = torch._C._cuda_getCurrentRawStream(device.index)
        launch(*arguments)

    def load(self, given: Mapping[str, Any] = {}, peers: Any = None) -> None:
        """Compile for arguments like these and load what was compiled, without starting it."""
        args = {**self.args, **given} if peers is None else {**self.args, **given, "peers": peers}
        self.kernel.warmup(**args, **self.options, grid=(self.programs,))._init_handles()

    def _keep(self, kinds: tuple[Any, ...], compiled: Any, args: Mapping[str, Any], given: list[str]) -> None:
        """As Triton launches what it has found: with a grid, a stream, the function, no hooks, and all arguments."""
        self._compiled = compiled.metadata.target.backend == "cuda"
        parameters = self.kernel.signature.parameters
        every = [args.get(name, parameter.default) for name, parameter in parameters.items()]
        first = [self.programs, 1, 1, 0, compiled.function, compiled.packed_metadata, None, None, None]
        self._places = [len(first) + list(parameters).index(name) for name in given]
        arguments = [*first, *map(_addresses, every)]
        for place in self._places:  # of the first call, whose descriptors hold tensors
            arguments[place] = None
        self._ready.setdefault(kinds, (compiled, compiled.run, arguments))


def start(
    kernel: Any, programs: int, args: Mapping[str, Any], options: Mapping[str, Any], device: torch.device
) -> None:
    """kernel[(programs,)](**args, **options), a launch that nobody keeps, found by all arguments that are no tensors.

    Where a TMA descriptor's tiles differ, so does one of the constants.
    """
    same: dict[str, Any] = {}
    given: dict[str, Any] = {}
    for name, value in args.items():
        first = value[0] if type(value) is tuple and value else value
        of_call = first is None or isinstance(first, torch.Tensor) or hasattr(first, "base")
        (given if of_call else same)[name] = value
    key = (kernel, programs, device, *options.values(), *given, *same.values())
    found = _STARTED.get(key)
    if found is None:
        if len(_STARTED) >= MOST_STARTED:
            _STARTED.clear()
        found = _STARTED[key] = Repeated(kernel, programs, same, options)
    found.start(device, given)


MOST_STARTED = 4096  # kept: sizes are part of a key, and some never come again
_STARTED: dict[tuple[Any, ...], Repeated] = {}


def _looked_at(given: Iterable[Any]) -> tuple[tuple[Any, ...] | None, list[Any]]:
    """By what Triton chooses what it compiled for these arguments, and them as a launcher takes them.

    The former is None where 16 does not divide an address: then Triton has to choose.
    """
    kinds: list[Any] = []
    values: list[Any] = []
    low = 0
    for value in given:
        if value is None:
            kinds.append(None)
        elif type(value) is tuple:
            of_tuple = []
            for each in value:
                if each is None:
                    kinds.append(None)
                else:
                    kinds.append(each.dtype)
                    each = each.data_ptr()
                    low |= each
                of_tuple.append(each)
            value = tuple(of_tuple)
        elif isinstance(value, torch.Tensor):
            kinds.append(value.dtype)
            value = value.data_ptr()
            low |= value
        elif isinstance(value, int):  # one, a multiple of 16, of more than 32 bits
            kinds.append((value == 1, value & 15 == 0, value >> 31))
        else:  # a TMA descriptor, whose address is one that 16 divides
            kinds.append(value.base.dtype)
        values.append(value)
    return None if low & 15 else tuple(kinds), values


def _addresses(value: Any) -> Any:
    """A tensor's address, also in tuples within tuples; all else as it is."""
    if isinstance(value, tuple):
        return tuple(map(_addresses, value))
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


def on(device: torch.device) -> AbstractContextManager[Any]:
    """`device` as the current one; that costs nothing where it is."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(device)


_HERE: AbstractContextManager[Any] = nullcontext()
