"""Random numbers of ranks that share a layer.

    column-parallel    remember the generator's state
    dropout on [T, N_r], of other sizes on other ranks: generators part
    row-parallel       where the state has changed, seed the generator anew from what was remembered

Ranks begin with the same state and draw the same numbers for whole tensors; that keeps tensors and parameters which
every rank holds identical. Between two split layers a rank draws for its own columns only. Where ranks have different
numbers of columns, their generators would stay apart from then on.

Ranks that begin with other states may draw for their own columns, but not for whole tensors: `Watched` tells which.
"""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Tensor


class Draws:
    """What one rank remembers of its generator while it works on a part of a layer."""

    def __init__(self) -> None:
        self._before: Tensor | None = None

    def part(self, device: torch.device) -> None:
        """What is drawn from here on may be for a part of another size than other ranks have. The last call counts."""
        generator = _generator(device)
        self._before = None if generator is None else generator.get_state()

    def whole(self, device: torch.device, some_have_none: bool = False) -> None:
        """Parts have been put together. some_have_none: some ranks have no columns and so draw nothing."""
        before, self._before = self._before, None
        generator = None if before is None else _generator(device)
        if before is None or generator is None:
            return
        if some_have_none or not torch.equal(generator.get_state(), before):
            generator.manual_seed(int.from_bytes(blake2b(before.numpy().tobytes(), digest_size=7).digest()))


class Watched:
    """Whether numbers are drawn for whole tensors in a forward.

    part    what is drawn from here on is for this rank's columns, or for whole tensors again
    drawn   whether some were drawn for whole tensors until now
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._part, self._drawn = device, False, False
        self._before = states(device)

    def part(self, part: bool) -> None:
        now = states(self._device)
        if not self._part:
            self._drawn |= any(
                not torch.equal(x, self._before[name]) for name, x in now.items() if name in self._before
            )
        self._part, self._before = part, now

    def drawn(self) -> bool:
        self.part(False)
        return self._drawn


def states(device: torch.device) -> dict[str, Tensor]:
    """Those of the generators that a forward on this device draws from."""
    found = {"cpu": torch.default_generator, device.type: _generator(device)}
    return {name: generator.get_state() for name, generator in found.items() if generator is not None}


def _generator(device: torch.device) -> torch.Generator | None:
    """The device's default one; None while a CUDA graph is captured, which has its own."""
    if device.type != "cuda":
        return torch.default_generator
    if torch.cuda.is_current_stream_capturing():
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]
