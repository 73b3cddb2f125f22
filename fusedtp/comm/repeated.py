"""A kernel that is launched again and again: what Triton finds out at each launch, found out once.

`kernel[grid](**arguments)` binds arguments by name, asks each what the compiler specialises on, and looks for what it
compiled by the whole list. That costs more than all else in an eager call. But what it was specialised on here is known:
the arguments of a prepared launch are the same in every call but for addresses, of which only None, the dtype and the
alignment count. So a later launch hands the compiled kernel its addresses and no more.

The first launch of a kind goes through Triton, which compiles then; so do all where a hook wants to see launches (a
profiler's), under the interpreter, and on AMD, where a specialisation depends on a tensor's size as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Repeated:
    """kernel[(programs,)] with some of its arguments, and those that later calls have in common.

    args     the same in every call: integers, constants, tensors that stay where they are
    peers    likewise, until a call brings others: the group's memory has moved
    options  of the compiler
    """

    def __init__(self, kernel: Any, programs: int, args: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self.kernel, self.programs, self.args, self.options = kernel, programs, dict(args), dict(options)
        self.peers: Any = None
        self._hooks: tuple[Any, ...] = ()
        self._ready: dict[tuple[Any, ...], tuple[Any, list[Any], list[int]]] = {}

    def start(self, device: torch.device, given: dict[str, Any]) -> None:
        """Start on the current stream, with the arguments `given` that `args` lacks: tensors, tuples of them, None,
        TMA descriptors in tiles that are the same in every call, and `peers`.
        """
        peers = given.pop("peers", None)
        if peers is not self.peers:
            self._ready.clear()
            self.peers = peers
        kinds: list[Any] = []
        values = [_address(value, kinds) for value in given.values()]
        ready = self._ready.get(tuple(kinds))
        if ready is None or any(getattr(hook, "calls", hook) for hook in self._hooks):
            self._start_by_triton(given, tuple(kinds))
            return
        compiled, template, places = ready
        arguments = template.copy()
        for place, value in zip(places, values):
            arguments[place] = value
        stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
        compiled.run(
            self.programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments
        )  # fmt: skip

    def load(self, given: Mapping[str, Any]) -> None:
        """Compile for arguments like these and load what was compiled, without starting it."""
        self.kernel.warmup(**self.args, **given, **self.options, grid=(self.programs,))._init_handles()

    def _start_by_triton(self, given: dict[str, Any], kinds: tuple[Any, ...]) -> None:
        args = {**self.args, **given}
        if self.peers is not None:
            args["peers"] = self.peers
        compiled = self.kernel[(self.programs,)](**args, **self.options)
        target = getattr(getattr(compiled, "metadata", None), "target", None)
        if target is None or target.backend != "cuda":
            return
        from triton import knobs

        self._hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        parameters = self.kernel.signature.parameters
        names = list(parameters)
        template = [_address(args.get(name, parameters[name].default), []) for name in names]
        self._ready[kinds] = compiled, template, [names.index(name) for name in given]


def _address(value: Any, kinds: list[Any]) -> Any:
    """What a launcher takes in place of `value`; what Triton would specialise on is added to `kinds`."""
    if isinstance(value, Tensor):
        address = value.data_ptr()
        kinds.append(value.dtype)
        kinds.append(address & 15 == 0)
        return address
    if isinstance(value, tuple):
        kinds.append(len(value))
        return tuple([_address(each, kinds) for each in value])
    kinds.append(value is None)
    return value

