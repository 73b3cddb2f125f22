"""Triton's interpreter with every memory operation handed to the simulator.

The interpreter's builder is one object for the whole process; while `intercepted` is entered its memory operations go
to a handler, and greenlets may switch inside them. Works with Triton 3.6 to 3.9, which differ in how a load and a store
are told of caches, and in what they have beside these operations.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any, NoReturn, Protocol
from unittest.mock import patch

import numpy as np

from .clocks import Order
from .faults import SimulationFault, UnsupportedKernel
from tests.harness.quick import quick
from .sites import raised_at, site

EXTERN = "a call of an external library"
GUARD = "cannot be simulated; put it behind a tl.constexpr that is off when interpreting"
TESTED = ("3.6", "3.7", "3.8", "3.9")


class Handler(Protocol):
    """Does the memory operations. Addresses and masks are arrays of one shape; `do` is the interpreter's own."""

    def load(
        self, addresses: np.ndarray, mask: np.ndarray, itemsize: int, volatile: bool, do: Callable
    ) -> Any: ...

    def store(self, addresses: np.ndarray, value: np.ndarray, mask: np.ndarray, do: Callable) -> Any: ...

    def atomic(
        self,
        name: str,
        addresses: np.ndarray,
        mask: np.ndarray,
        itemsize: int,
        order: Order,
        do: Callable,
        peek: Callable,
    ) -> Any: ...

    def barrier(self) -> None: ...


def triton_interpreter() -> Any:
    """Triton's interpreter module. Raises UnsupportedKernel for a Triton that was not tried or does not interpret."""
    try:
        import triton
        from triton.runtime import interpreter
    except ImportError as error:
        raise UnsupportedKernel("the simulator needs the triton package") from error
    version = ".".join(triton.__version__.split(".")[:2])
    if version not in TESTED:
        raise UnsupportedKernel(
            f"the simulator knows Triton {TESTED[0]} to {TESTED[-1]}, not {triton.__version__}"
        )
    return interpreter


def interpreted(kernel: Any) -> Any:
    """The Python function of an interpreted kernel. Raises UnsupportedKernel if it was decorated to be compiled."""
    if not hasattr(kernel, "rewrite"):
        name = getattr(kernel, "__name__", kernel)
        raise UnsupportedKernel(
            f"{name!r} is {type(kernel).__name__}, not an interpreted kernel: set TRITON_INTERPRET=1 in the "
            "environment before triton is imported, and decorate it with triton.jit"
        )
    return kernel.rewrite()


def arguments(kernel: Any, given: dict[str, Any]) -> dict[str, Any]:
    """A kernel's arguments as its interpreted function takes them. Raises TypeError for a missing or unknown one."""
    module, function = triton_interpreter(), interpreted(kernel)
    constexprs = set(module.GridExecutor(function, kernel.arg_names, (1,)).constexprs)
    bound = inspect.getcallargs(function, **given)
    return {k: v if k in constexprs else module._implicit_cvt(v) for k, v in bound.items()}


def call(function: Callable[..., Any], args: dict[str, Any]) -> None:
    """Run an interpreted kernel.

    Triton wraps whatever is raised inside a helper of a kernel, once for each level; our own faults come out bare.
    Functions of external libraries do not get as far as the builder: Triton takes them for a call outside of a kernel.
    """
    try:
        function(**args)
    except Exception as error:
        inner: BaseException = error
        while type(inner).__name__ == "InterpreterError" and inner.__cause__ is not None:
            inner = inner.__cause__
        if isinstance(inner, (SimulationFault, UnsupportedKernel)):
            raise inner from None
        if isinstance(inner, ValueError) and "`_semantic` argument must be provided" in str(inner):
            raise UnsupportedKernel(f"{raised_at(inner)}: {EXTERN} {GUARD}") from inner
        raise


class Builder:
    """The interpreter's builder with a handler in place of its memory operations."""

    def __init__(self) -> None:
        self.module = triton_interpreter()
        self._builder = self.module.interpreter_builder
        self._sem = {
            getattr(self.module._ir.MEM_SEMANTIC, name): word
            for name, word in (
                ("RELAXED", "relaxed"), ("ACQUIRE", "acquire"), ("RELEASE", "release"), ("ACQUIRE_RELEASE", "acq_rel")
            )
        }  # fmt: skip
        scopes = self.module._ir.MEM_SYNC_SCOPE
        self._scope = {scopes.SYSTEM: "sys", scopes.GPU: "gpu", scopes.CTA: "cta"}

    def stand_at(self, program: int, grid: tuple[int, int, int]) -> None:
        """Go on as this program of the grid; the last of the three dimensions varies fastest."""
        self._builder.grid_dim = grid
        rest, z = divmod(program, grid[2])
        self._builder.grid_idx = (*divmod(rest, grid[1]), z)

    @contextmanager
    def intercepted(self, handler: Handler, functions: list[Any]) -> Iterator[None]:
        """While entered, memory operations of these interpreted functions go to `handler`."""
        builder, module = self._builder, self.module
        own = {
            name: getattr(builder, name)
            for name in (
                "create_masked_load",
                "create_masked_store",
                "create_atomic_rmw",
                "create_atomic_cas",
            )
        }

        # what is said of caches: a modifier and a policy in Triton 3.6 and 3.7, one argument in 3.9
        caches = [None] * (len(inspect.signature(own["create_masked_store"]).parameters) - 3)

        def read(ptr: Any, mask: Any) -> Any:
            return own["create_masked_load"](ptr, mask, None, *caches, True)

        def peek(ptr: Any, mask: Any) -> Callable:
            return lambda: read(ptr, mask).data

        def load(ptrs: Any, mask: Any, other: Any, *how: Any, **named: Any) -> Any:
            size = module._get_np_dtype(ptrs.get_element_ty()).itemsize
            do = lambda: own["create_masked_load"](ptrs, mask, other, *how, **named)  # noqa: E731
            volatile = named["is_volatile"] if "is_volatile" in named else how[-1]
            return handler.load(ptrs.data, _mask(mask), size, bool(volatile), do)

        def store(ptrs: Any, value: Any, mask: Any, *how: Any, **named: Any) -> Any:
            do = lambda: own["create_masked_store"](ptrs, value, mask, *how, **named)  # noqa: E731
            return handler.store(ptrs.data, value.data, _mask(mask), do)

        def rmw(op: Any, ptr: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
            do = lambda: own["create_atomic_rmw"](op, ptr, value, mask, sem, scope)  # noqa: E731
            name = "atomic_" + getattr(op, "name", str(op)).rpartition(".")[2].lower()
            order = Order(self._sem[sem], self._scope[scope])
            return handler.atomic(name, ptr.data, mask.data, value.data.itemsize, order, do, peek(ptr, mask))

        def cas(ptr: Any, compare: Any, value: Any, sem: Any, scope: Any) -> Any:
            do = lambda: own["create_atomic_cas"](ptr, compare, value, sem, scope)  # noqa: E731
            order = Order(self._sem[sem], self._scope[scope])
            every = _all(module, ptr)
            return handler.atomic(
                "atomic_cas", ptr.data, every.data, value.data.itemsize, order, do, peek(ptr, every)
            )

        def atomic_load(ptr: Any, mask: Any, sem: Any, scope: Any) -> Any:
            mask = mask if mask is not None else _all(module, ptr)
            size = module._get_np_dtype(ptr.get_element_ty()).itemsize
            do = lambda: read(ptr, mask)  # noqa: E731
            return handler.atomic(
                "atomic_load", ptr.data, mask.data, size, self._order(sem, scope), do, peek(ptr, mask)
            )

        def atomic_store(ptr: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
            mask = mask if mask is not None else _all(module, ptr)
            do = lambda: own["create_masked_store"](ptr, value, mask, *caches)  # noqa: E731
            return handler.atomic(
                "atomic_store",
                ptr.data,
                mask.data,
                value.data.itemsize,
                self._order(sem, scope),
                do,
                peek(ptr, mask),
            )

        def atomic_poll(ptr: Any, expected: Any, timeout_ns: Any, sem: Any, scope: Any) -> Any:
            while True:  # the scheduler sees a program that polls in vain; time does not pass here
                seen = atomic_load(ptr, None, sem, scope)
                if (seen.data == expected.data).all():
                    return module.TensorHandle(np.ones(ptr.data.shape, bool), module.tl.int1)

        operations = dict(
            create_masked_load=load, create_masked_store=store, create_atomic_rmw=rmw, create_atomic_cas=cas,
            create_atomic_load=atomic_load, create_atomic_store=atomic_store, create_atomic_poll=atomic_poll,
            create_barrier=handler.barrier,
            create_inline_asm=lambda *_, **__: refuse("inline assembly"),
            create_extern_elementwise=lambda *_, **__: refuse(EXTERN),
        )  # fmt: skip
        with ExitStack() as stack:
            stack.enter_context(quick(module))  # first: it is quick about the builtins of the functions too
            for stub in _stubs():
                stack.callback(setattr, stub, "__code__", stub.__code__)
                stub.__code__ = _refused.__code__
            for function in functions:
                stack.callback(module._patch_lang(function).restore)
            for name, operation in operations.items():
                stack.enter_context(patch.object(builder, name, operation, create=True))
            yield

    def _order(self, sem: Any, scope: Any) -> Order:
        return Order(self._sem[sem], self._scope[scope])


def refuse(what: str) -> NoReturn:
    """Raises UnsupportedKernel at the running kernel's line."""
    raise UnsupportedKernel(f"{site()}: {what} {GUARD}")


def _refused(*_: Any, **__: Any) -> None:
    from fusedtp.sim import interpreter  # this runs among the globals of another module

    interpreter.refuse(interpreter.EXTERN)


def _stubs() -> list[FunctionType]:
    """Functions that the compiler takes for those of a target's library, and that do nothing here, without a word.

    A kernel may have imported one by its name, so not its module is patched but its code.
    """
    from triton.language.extra import libdevice

    return [each for each in vars(libdevice).values() if isinstance(each, FunctionType)]


def _mask(mask: Any) -> np.ndarray:
    """A descriptor's mask is a bare array in Triton 3.6, whose `data` is a view of its bytes."""
    return np.asarray(mask.data)


def _all(module: Any, ptr: Any) -> Any:
    return module.TensorHandle(np.ones(ptr.data.shape, bool), module.tl.int1)
