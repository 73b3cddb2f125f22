"""A kernel that is launched again and again: what Triton finds out at each launch, found out once.

`kernel[grid](**arguments)` binds arguments by name, asks each what the compiler specialises on, and looks for what it
compiled by the whole list. That costs more than all else in an eager call. But what it was specialised on here is known:
the arguments of a prepared launch are the same in every call but for addresses, of which only None, the dtype and the
alignment count. So a later launch hands the compiled kernel its addresses and no more.

The first launch of a kind goes through Triton, which compiles then; so do all with an address that 16 does not divide,
or where a hook wants to see launches (a profiler's), under the interpreter, and on AMD, where a specialisation depends
on a tensor's size as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

NO_ARGUMENTS: tuple[Any, ...] = ()


class Repeated:
    """kernel[(programs,)] with some of its arguments, and those that later calls have in common.

    args     the same in every call: integers, constants, tensors that stay where they are
    options  of the compiler
    """

    def __init__(self, kernel: Any, programs: int, args: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self.kernel, self.programs, self.args, self.options = kernel, programs, dict(args), dict(options)
        self._peers: Any = None
        self._peers_addresses: Any = None
        self._places: list[int] = []  # of the arguments of a call, among all
        self._ready: dict[Any, tuple[Any, list[Any]]] = {}  # what was compiled, and its arguments but for addresses
        self._runtime: Any = None  # Triton's, with its hooks

    def start(self, device: torch.device, given: dict[str, Any] | None = None) -> None:
        """Start on the current stream, with the arguments `given` that `args` lacks, the same names in every call.

        They are tensors, tuples of them, None, and TMA descriptors of the same tiles in every call. And `peers`, which
        are as they were until the group's memory moves.
        """
        kind, addresses = self._looked_at(given) if given else (NO_ARGUMENTS, None)
        ready = self._ready.get(kind)
        if ready is None or _watched(self._runtime):
            self._start_by_triton(given or {}, kind)
            return
        compiled, arguments = ready
        if addresses:
            arguments = arguments.copy()
            for place, address in zip(self._places, addresses):
                arguments[place] = address
        stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
        compiled.run(
            self.programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments
        )  # fmt: skip

    def _looked_at(self, given: dict[str, Any]) -> tuple[tuple[Any, ...] | None, list[Any]]:
        """What Triton specialises on, None where it is not as usual; and the arguments as a launcher takes them."""
        peers = given.get("peers")
        if peers is not self._peers:
            self._ready.clear()
            self._peers, self._peers_addresses = peers, _addresses(peers)
        kinds: list[Any] = []
        addresses: list[Any] = []
        low = 0
        for value in given.values():
            if value is None:
                kinds.append(None)
                addresses.append(None)
            elif value is peers:
                addresses.append(self._peers_addresses)
            elif type(value) is tuple:
                of_tuple = []
                for each in value:
                    if each is None:
                        kinds.append(None)
                        of_tuple.append(None)
                    else:
                        address = each.data_ptr()
                        low |= address
                        kinds.append(each.dtype)
                        of_tuple.append(address)
                addresses.append(tuple(of_tuple))
            elif (data_ptr := getattr(value, "data_ptr", None)) is not None:
                address = data_ptr()
                low |= address
                kinds.append(value.dtype)
                addresses.append(address)
            else:
                addresses.append(value)
        return None if low & 15 else tuple(kinds), addresses

    def load(self, given: Mapping[str, Any]) -> None:
        """Compile for arguments like these and load what was compiled, without starting it."""
        self.kernel.warmup(**self.args, **given, **self.options, grid=(self.programs,))._init_handles()

    def _start_by_triton(self, given: Mapping[str, Any], kinds: tuple[Any, ...] | None) -> None:
        """And keep what was compiled for arguments of these kinds, unless they are None."""
        args = {**self.args, **given}
        compiled = self.kernel[(self.programs,)](**args, **self.options)
        target = getattr(getattr(compiled, "metadata", None), "target", None)
        if kinds is None or target is None or target.backend != "cuda":
            return
        from triton import knobs

        self._runtime = knobs.runtime
        parameters = self.kernel.signature.parameters
        names = list(parameters)
        self._places = [names.index(name) for name in given]
        every = [args.get(name, parameters[name].default) for name in names]
        self._ready[kinds] = compiled, [_addresses(value) for value in every]


def _addresses(value: Any) -> Any:
    """A tensor's address, also in tuples; all else as it is."""
    if isinstance(value, tuple):
        return tuple(map(_addresses, value))
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


def _watched(runtime: Any) -> bool:
    """Whether somebody wants to see each launch."""
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
