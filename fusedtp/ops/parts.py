"""Parameters that lie on a mesh, as operands: an operation takes this rank's part, its gradient lies as the parameter.

With `parameter.to_local()` in front of the operation, the graph has one more node for each parameter, which costs the
host as much as the operation's own. So the nodes of linear layers take the DTensors themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class Lying(NamedTuple):
    """How a DTensor lies: its specification, and the strides of this rank's part."""

    spec: Any
    strides: tuple[int, ...]

    @classmethod
    def of(cls, operand: Tensor | None) -> Lying | None:
        """None of any other tensor."""
        if not isinstance(operand, DTensor):
            return None
        return cls(operand._spec, operand._local_tensor.stride())

    def laid(self, own: Tensor) -> DTensor:
        """This rank's part of a gradient as one that lies like this."""
        if own.stride() != self.strides:
            strided = torch.empty_strided(own.shape, self.strides, dtype=own.dtype, device=own.device)
            own = strided.copy_(own)
        hash(self.spec)  # kept in it, and by copies: torch would make it anew for each of them
        return DTensor(own, copy(self.spec), requires_grad=False)


def part(operand: Any) -> Any:
    """This rank's part of a DTensor, below autograd; anything else is itself."""
    return operand._local_tensor if isinstance(operand, DTensor) else operand


def parts(operands: Iterable[Any]) -> list[Any]:
    """The same of several."""
    return list(map(part, operands))


def laid_alike(gradients: Iterable[Tensor | None], like: Sequence[Lying | None]) -> list[Tensor | None]:
    """Gradients of this rank's parts, as the operands lie."""
    return [
        own if own is None or lying is None else lying.laid(own)
        for own, lying in zip(gradients, like, strict=True)
    ]
