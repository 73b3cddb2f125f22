"""Methods of a split model that compute features of images and sounds: `generate` calls them outside of a forward."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, wraps
from types import MethodType
from typing import Any

import torch
from torch import nn

from .foreign import Model, Own, plain_outputs, plain_parameters

FEATURES = re.compile(r"get_(image|video|audio)_features")


def open_features(model: nn.Module, shared: Model) -> None:
    """Make methods that compute features of images and sounds work outside of a forward, where generate calls them."""
    for module in model.modules():
        for name in filter(FEATURES.fullmatch, dir(type(module))):
            module._fusedtp_shared = shared  # type: ignore[assignment]
            setattr(module, name, MethodType(_opened_features(getattr(type(module), name)), module))


@cache
def _opened_features(own: Callable[..., Any]) -> Callable[..., Any]:
    """The method with the module's own parameters as plain tensors; its outputs are plain if no forward runs."""

    @wraps(own)
    def features(self: Any, *args: Any, **kwargs: Any) -> Any:
        shared: Model = self._fusedtp_shared
        if shared.running or torch.compiler.is_compiling():
            return own(self, *args, **kwargs)
        with plain_parameters(self) if isinstance(getattr(self, "parallel", None), Own) else nullcontext():
            done = own(self, *args, **kwargs)
        shared.running = False  # the hooks of stacks inside set it
        return plain_outputs(done)

    return features
