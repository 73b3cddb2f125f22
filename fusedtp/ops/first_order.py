"""For custom backwards that are not differentiable themselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Raise if autograd would record this backward (create_graph=True).

    torch's once_differentiable raises only if the upstream gradient requires a gradient itself. The gradient of a loss
    does not, so the resulting gradients would silently be constants.
    """

    @wraps(backward)
    def checked(*args: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(f"{backward.__qualname__}: double backward is not supported")
        return backward(*args)

    return checked
