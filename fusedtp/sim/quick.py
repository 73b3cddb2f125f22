"""Triton's interpreter without work whose outcome is known or looked at by nobody: half of its time.

Results are the same, of Triton 3.6 to 3.9.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def quick(module: Any) -> Iterator[None]:
    """While entered, `module`, which is triton.runtime.interpreter, computes what follows from types once a type."""
    core, builder, semantic = module.tl.core, module.interpreter_builder, type(module.interpreter_semantic)
    # a second evaluation of every integer operation, in int64, for an assertion that only debugging makes
    calm = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
    with ExitStack() as stack:
        for holder, name, faster in (
            (builder, "options", calm),
            (module, "_get_np_dtype", _remembered(module._get_np_dtype)),
            (core.tensor, "__init__", _shaped_once(core)),
            (semantic, "computation_type_impl", _ruled_once(semantic)),
        ):
            stack.enter_context(patch.object(holder, name, faster))
        yield


def _shaped_once(core: Any) -> Callable[..., None]:
    """A tensor's constructor that builds what follows from its type once a type, not once an operation."""
    own = core.tensor.__init__
    known: dict[Any, dict[str, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        key = (type.scalar.name, *type.shape) if type.is_block() else None
        made = known.get(key)
        if made is None:
            own(self, handle, type)
            known[key] = {k: v for k, v in vars(self).items() if k not in ("handle", "type", "dtype")}
        else:
            vars(self).update(made, handle=handle, type=type, dtype=type.scalar)

    return init


def _ruled_once(semantic: Any) -> Callable[..., Any]:
    """The type that an operation on two numbers is done in, which follows from their types, once for each two."""
    own = semantic.computation_type_impl
    known: dict[tuple[Any, ...], Any] = {}

    def ruled(self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = (a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod)
        if key not in known:
            known[key] = own(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
        return known[key]

    return ruled


def _remembered(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The interpreter builds a table at every call of this."""
    known: dict[Any, Any] = {}

    def remembered(dtype: Any) -> Any:
        scalar = dtype.scalar
        key = "pointer" if scalar.is_ptr() else scalar.name
        if key not in known:
            known[key] = function(dtype)
        return known[key]

    return remembered
