"""For custom backwards that are not differentiable themselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Raise where autograd would record this backward (create_graph=True).

    torch's once_differentiable raises only if the output's gradient requires one itself; of a loss it does not,
    and the gradients would silently be constants.
    """

    @wraps(backward)
    def checked(*args: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(f"{backward.__qualname__}: double backward is not supported")
        return backward(*args)

    return checked
