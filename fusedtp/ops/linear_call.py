"""The call of a linear layer: its checks, and the cache of calls that have passed them.

Note [Kinds of calls]
An eager call of a linear layer spends more time on its checks and on choosing its plan than on its launch. The outcome
depends only on shapes, dtypes and devices, on which operands need gradients, on the other arguments, and on this
machine's tables (GENERATION). These make up the kind of a call, together with strides and alignments, which the
prepared launch depends on. Each communicator caches the outcome by kind, and skips the checks for a kind it has seen.
These calls are not cached: under autocast, which casts operands; while torch.compile traces; where tensors may have
tangents; with a weight that has a main_grad, which every call inspects; and with a DTensor as x, which no operation
takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _len_torch_dispatch_stack  # type: ignore[attr-defined]

from fusedtp.comm import Group, Place, place, propagate_errors, registered

from .main_grad import MainGrad, main_grads_of
from .measured import GENERATION
from .operation import MAX_PLANS, Operation, Plan, Spec, as_autocast, check_linear, check_lying, needs_grad, parts
from .pointwise import ACTIVATIONS
from .rows import Rows

RowsOf = Callable[[Tensor, Place, Sequence[int] | None, int], Rows]  # (x, place, sizes, dim) -> rows of all ranks


class LinearCall(NamedTuple):
    """A call that has passed its checks.

    plan        None: the operation looks it up
    main_grads  of the weights
    backward    the Spec of the operations that backward runs
    """

    spec: Spec
    plan: Plan | None
    main_grads: Sequence[MainGrad | None]
    backward: Spec


class Operands(NamedTuple):
    """The operands of a call, after autocast.

    x      [T, K]: batch entries one after another
    given  weights, then biases
    own    this rank's shards of these
    """

    x: Tensor
    given: list[Any]
    own: list[Any]


def linear_call(
    op: Operation,
    rows_of: RowsOf,
    group: Group,
    x: Tensor,
    weights: Iterable[Any],
    biases: Iterable[Any] | None,
    sizes: Sequence[int] | None,
    dim: int,
    engine: str,
    layer: str,
    act: str | None = None,
) -> tuple[LinearCall, Operands]:
    """Check a call of `op`, unless its kind has been seen: Note [Kinds of calls].

    biases   one per weight, or None for none
    act      gated layers only; they have two weights of the same shape

    Raises ValueError for operands that do not fit, TypeError for operands that are not tensors. A rank that raises here
    notifies its peers.
    """
    at = place(group)
    traced = torch.compiler.is_compiling() or _len_torch_dispatch_stack() > 0
    keeps = not traced and not torch.is_autocast_enabled(at.device_type) and forward_ad._current_level < 0
    key = None
    if keeps:
        try:
            weights = list(weights)
            biases = [None] * len(weights) if biases is None else list(biases)
            sizes = None if sizes is None else tuple(map(int, sizes))
            grads, own = torch.is_grad_enabled(), []
            kind = [op, len(weights), sizes, dim, engine, layer, act, GENERATION[0], grads]
            keeps = type(x) is not DTensor  # isinstance asks its metaclass, in Python
            for t in (x, *weights, *biases):
                if t is None:
                    kind.append(None)
                else:
                    needs = t.requires_grad
                    if needs and grads and getattr(t, "main_grad", None) is not None:
                        keeps = False
                    if type(t) is DTensor:
                        t = t._local_tensor
                    kind += needs, t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 16 == 0
                own.append(t)
            key = tuple(kind)
            call = registered(at.name).kinds.get(key) if keeps else None
            if call is not None:
                return call, Operands(x if x.dim() == 2 else x.flatten(0, -2), [*weights, *biases], own[1:])
        except Exception:  # not tensors, not numbers, no memory: the checks below raise and notify the peers
            keeps = False
    with propagate_errors(at):
        if act is not None and act not in ACTIVATIONS:
            raise ValueError(f"rank {at.rank}: act is {act!r}; it must be one of {', '.join(ACTIVATIONS)}")
        weights = list(weights)
        n = len(weights)
        biases = [None] * n if biases is None else list(biases)
        strange = [t for t in (x, *weights, *(b for b in biases if b is not None)) if not isinstance(t, Tensor)]
        if strange:
            raise TypeError(f"rank {at.rank}: x, weights and biases must be tensors, not {type(strange[0]).__name__}")
        if act is not None and (n != 2 or len(biases) != 2 or weights[0].shape != weights[1].shape):
            raise ValueError(
                f"rank {at.rank}: got weights {[tuple(w.shape) for w in weights]} and {len(biases)} biases; wanted "
                "gate and up of one shape, and a bias or None for each"
            )
        if not weights or len(biases) != n:
            raise ValueError(
                f"rank {at.rank}: got {n} weights and {len(biases)} biases; give at least one weight, and a bias or "
                "None for each"
            )
        main_grads = main_grads_of(weights)  # before a cast loses them
        rows = rows_of(x, at, sizes, dim)
        x, *given = as_autocast(at.device_type, x, *weights, *biases)
        own, lying = parts(given)
        if lying and not traced:
            assert op.example is not None
            check_lying(at, given[:n], 0 if op.example.layer == "column" else 1)
            check_lying(at, given[n:], 0)
        check_linear(at, x, own[:n], own[n:])
        spec = Spec(at.name, at.rank, rows.sizes, rows.batch, engine, needs_grad(x, *given), layer)
        call = LinearCall(spec, None, main_grads, spec._replace(needs_grad=0))
        x = x if x.dim() == 2 else x.flatten(0, -2)
        if keeps:
            comm = registered(at.name)
            assert op.linear is not None
            plan = op.planned(comm, spec, op.shared(*op.linear(x, own[:n], own[n:])))
            call = call._replace(plan=plan._replace(alike=True, launches={}))
            if len(comm.kinds) >= MAX_PLANS:
                comm.kinds.clear()
            comm.kinds[key] = call
        return call, Operands(x, given, own)
