"""Triton's interpreter without repeated work: it checks and promotes types in Python for every operation on numbers.

Results are the same, of Triton 3.6 to 3.9, in less than half the time. What a faster function does not handle goes
to the one that it replaces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

_entered: set[Any] = set()


@contextmanager
def quick(module: Any) -> Iterator[None]:
    """While entered, `module`, which is triton.runtime.interpreter, computes what follows from types once a type.

    Entered again inside, it changes nothing: what is remembered serves every schedule of a process.
    """
    if module in _entered:
        yield
        return
    core, builder, semantic = module.tl.core, module.interpreter_builder, type(module.interpreter_semantic)
    # a second evaluation of every integer operation, in int64, for an assertion that only debugging makes
    calm = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
    with ExitStack() as stack:
        for holder, name, faster in (
            (builder, "options", calm),
            (module, "_get_np_dtype", _remembered(module._get_np_dtype)),
            (core.tensor, "__init__", _shaped_once(core)),
            (core.block_type, "__init__", _blocks_once(core)),
            (core, "_unwrap_if_constexpr", _unwrapped(core)),
            (semantic, "computation_type_impl", _ruled_once(semantic)),
            (semantic, "binary_op_type_checking_impl", _alike(core, semantic)),
            (module, "_patch_attr", _direct(module)),
            (module, "_validate_np_data_size", _fits(module)),
        ):
            stack.enter_context(patch.object(holder, name, faster))
        _entered.add(module)
        stack.callback(_entered.remove, module)
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


def _blocks_once(core: Any) -> Callable[..., None]:
    """A block type's constructor that validates and names a shape once for each element type."""
    own = core.block_type.__init__
    known: dict[Any, dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(getattr(shape, "values", shape))
        if any(type(size) is not int for size in sizes):
            own(self, element_ty, shape)
            return
        key = (element_ty.name, sizes)
        made = known.get(key)
        if made is None:
            own(self, element_ty, shape)
            known[key] = {k: v for k, v in vars(self).items() if k != "element_ty"}
        else:
            vars(self).update(made, element_ty=element_ty)

    return init


def _unwrapped(core: Any) -> Callable[[Any], Any]:
    """`_unwrap_if_constexpr`, which looks for lists, tuples and constants, for what is plainly none of them."""
    own, plain = core._unwrap_if_constexpr, {core.tensor, int, float, bool, type(None)}

    def unwrapped(value: Any) -> Any:
        return value if type(value) in plain else own(value)

    return unwrapped


def _alike(core: Any, semantic: Any) -> Callable[..., Any]:
    """Two operands of one type are ready as they are; a Python int becomes a constant of the other's type.

    `computed` says, of a dtype with itself and with a 32-bit int, whether an operation on both is done in that dtype.
    Constants are shared and read-only.
    """
    own, rule, tensor, int32 = (
        semantic.binary_op_type_checking_impl,
        _ruled_once(semantic),
        core.tensor,
        core.int32,
    )
    computed: dict[tuple[str, bool, bool], bool] = {}
    constants: dict[tuple[int, str], Any] = {}

    def alike(
        self: Any, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True, div_or_mod: bool = False,
    ) -> Any:  # fmt: skip
        if arithmetic_check:
            left, right = type(lhs) is tensor, type(rhs) is tensor
            if left and right:
                if same(lhs.type, rhs.type) and done_in(self, lhs.dtype, False, div_or_mod):
                    return lhs, rhs
            elif left and type(rhs) is int:
                made = constant(self, rhs, lhs.dtype, div_or_mod)
                if made is not None:
                    return self.broadcast_impl_value(lhs, made) if lhs.type.is_block() else (lhs, made)
            elif right and type(lhs) is int:
                made = constant(self, lhs, rhs.dtype, div_or_mod)
                if made is not None:
                    return self.broadcast_impl_value(made, rhs) if rhs.type.is_block() else (made, rhs)
        return own(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    def same(a: Any, b: Any) -> bool:
        return a is b or (a.name == b.name and type(a) is type(b))

    def done_in(self: Any, dtype: Any, with_int: bool, div_or_mod: bool) -> bool:
        key = dtype.name, with_int, div_or_mod
        if key not in computed:
            number = (dtype.is_floating() or dtype.is_int()) and not dtype.is_fp8()
            if with_int:  # of 32 bits or more, so that any int of 32 bits is one of its values
                number = number and dtype.is_int_signed() and dtype.int_bitwidth >= 32
            computed[key] = (
                number
                and rule(self, dtype, False, int32 if with_int else dtype, with_int, div_or_mod).name
                == dtype.name
            )
        return computed[key]

    def constant(self: Any, value: int, dtype: Any, div_or_mod: bool) -> Any:
        """None where the interpreter has to decide: for other dtypes and large numbers."""
        if not (-(2**31) <= value < 2**31 and done_in(self, dtype, True, div_or_mod)):
            return None
        key = value, dtype.name
        made = constants.get(key)
        if made is None:
            made = constants[key] = self.scalar_constant(value, dtype)
            made.handle.data.flags.writeable = False
        return made

    return alike


# What numpy computes is what the interpreter does: on signed integers and, the last two, on booleans.
ARITHMETIC = {
    "__add__": np.add,
    "__radd__": np.add,
    "__sub__": np.subtract,
    "__mul__": np.multiply,
    "__rmul__": np.multiply,
}
COMPARISONS = {
    "__lt__": np.less, "__le__": np.less_equal, "__gt__": np.greater, "__ge__": np.greater_equal, "__eq__": np.equal,
    "__ne__": np.not_equal,
}  # fmt: skip
BITWISE = {"__and__": np.bitwise_and, "__or__": np.bitwise_or}
OPERATORS = ARITHMETIC | COMPARISONS | BITWISE


def _computed(module: Any, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    """An operator of the language which, for the commonest operands, calls numpy and nothing else.

    Those are integers of one or two signed types, and an address with an offset; numpy broadcasts as Triton does.
    """
    core, handle_of, semantic = module.tl.core, module.TensorHandle, module.interpreter_semantic
    tensor, block_type, compute, compares = core.tensor, core.block_type, OPERATORS[name], name in COMPARISONS
    int32, int64, int1 = core.int32, core.int64, core.int1
    results = {
        (a.name, b.name): int32 if a is b is int32 else int64 for a in (int32, int64) for b in (int32, int64)
    }
    limits = {int32.name: 2**31, int64.name: 2**63}

    def run(self: Any, other: Any, **named: Any) -> Any:
        kind, mine = type(other), self.type
        if kind is tensor:
            its = other.type
            if mine.is_block() and its.is_block() and len(mine.shape) != len(its.shape):
                return own(self, other, **named)
            result = results.get((self.dtype.name, other.dtype.name))
            try:
                if result is not None:
                    return made(compute(self.handle.data, other.handle.data), result, mine, its)
                if name == "__add__" and self.dtype.is_ptr() and other.dtype.name in limits:
                    moved = semantic.builder.create_addptr(self.handle, other.handle)
                    return typed(moved, self.dtype, mine, its)
                if name in BITWISE and self.dtype.name == other.dtype.name == int1.name:
                    a, b = self.handle.data, other.handle.data
                    if a.dtype == b.dtype == np.bool_:
                        return typed(handle_of(compute(a, b), self.handle.dtype), int1, mine, its)
            except ValueError:
                pass  # shapes that do not fit: Triton says so
        elif (
            kind is int
            and self.dtype.name in limits
            and -limits[self.dtype.name] <= other < limits[self.dtype.name]
        ):
            return made(compute(self.handle.data, other), self.dtype, mine, mine)
        return own(self, other, **named)

    def made(data: Any, dtype: Any, mine: Any, its: Any) -> Any:
        # the handle of a comparison's result has the type of what was compared
        return typed(handle_of(data, dtype), int1 if compares else dtype, mine, its)

    def typed(handle: Any, dtype: Any, mine: Any, its: Any) -> Any:
        block = mine.is_block() or its.is_block()
        return tensor(handle, block_type(dtype, list(handle.data.shape)) if block else dtype)

    return run


def _direct(module: Any) -> Callable[..., None]:
    """Puts a builtin into the language as it is, without a check that it is called from a kernel."""
    checked, semantic = module.tl.core.builtin(lambda: None).__code__, module.interpreter_semantic
    plain = not module.interpreter_builder.options.debug
    known: dict[Any, Callable[..., Any]] = {}

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        if member not in known:
            made = operation(member.__wrapped__ if code(member) is checked else member)
            computed = obj is module.tl.core.tensor and plain and name in OPERATORS
            known[member] = _computed(module, name, made) if computed else made
        scope.set_attr(obj, name, known[member])

    def code(member: Any) -> Any:
        return getattr(member, "__code__", None)

    def operation(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return function(*args, **named)

        return run

    return patch_attr


def _fits(module: Any) -> Callable[..., bool]:
    """Whether elements of an array fit a dtype: asked of every result, answered once for each size and dtype."""
    own = module._validate_np_data_size
    known: dict[tuple[int, str], bool] = {}

    def fits(array: Any, dtype: Any) -> bool:
        key = array.itemsize, dtype.name
        if key not in known:
            known[key] = own(array, dtype)
        return known[key]

    return fits


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
