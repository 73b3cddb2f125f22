"""How an operation is declared, and what is derived from the declaration.

An operation is one file: its public function with the shape table, its engines side by side, the launcher of its kernel
and its backward. The file ends in one declaration:

    op = Operation(
        "matmul_reduce_scatter",
        "Tensor[] xs, Tensor[] weights, Tensor? bias", "Tensor",    operands and result as in torch's schemas
        fake=...,                                                   the result's shape, for torch.compile
        reference=...,                                              the formula on one device: every test's oracle
        shared=...,                                                 what the ranks' signatures compare, see Shared
        engines=dict(local=..., collective=..., chunked=..., triton=...),
        slot_bytes=dict(chunked=..., triton=...),                   bytes an engine needs in a slot, from (rows, shared)
        example=...,                                                how a linear layer calls it, see Example
        kernels=(FusedKernel(...),),                                how the checks launch the kernels of `triton`
    )

The rest is derived: the custom op `torch.ops.fusedtp.<name>`, the eager path, the signature that ranks compare, the
choice of an engine and its crossover key, the counts of `explain`, the ranges of a profile, a suite of `fusedtp bench`,
and the kernels' cases for the simulator and the lint of compiled code (fusedtp/checks). `op(spec, *operands)` runs it:

    eager      Operation._run: look up the plan of this Spec (made once), then call the engine's function. A linear
               layer that has seen this kind of call passes the plan in: linear_call.py
    compiled   torch.ops.fusedtp.<name>, which does the same when the graph runs

A LocalOperation is the same for a function of one device, without ranks.

Note [One autograd path]
The custom ops have no autograd: differentiate the public functions. Each kind of layer is one autograd.Function, eager
and compiled. A pipeline that defers weight gradients runs backward twice, first for inputs and then for weights. So a
Function asks `wanted` which gradients this pass computes, and communicates only for those. The row-parallel layer
gathers dy in its input pass and keeps it for its weight pass.

Note [DTensors as operands]
A parameter may be a DTensor on the group's mesh: a linear layer takes this rank's shard, and the gradient has the
parameter's placements. Calling `parameter.to_local()` before the operation would add one autograd node per parameter,
which costs the host as much as the operation's own node. So the Functions of linear layers take the DTensors
themselves. A DTensor that is also split over other ranks, or along another dimension, is rejected in the first call of
its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad, profiler
from torch.distributed.tensor import DTensor
from torch.library import Library, register_fake
from torch.utils._python_dispatch import _len_torch_dispatch_stack  # type: ignore[attr-defined]

from fusedtp.comm import Call, Communicator, Place, Signature, communicator, registered
from fusedtp.comm.device_view import clock_of, peers_of

from . import engines
from .engines import SWITCHED
from .measured import FUSED, GENERATION
from .rows import Rows

SPEC = "str group, int rank, SymInt[] sizes, SymInt batch, str engine, int needs_grad, str layer, int[] routing"
LIBRARY = Library("fusedtp", "FRAGMENT")
OPERATIONS: dict[str, Operation] = {}  # by name: backward formulas use each other's operations without import cycles

Engine = Callable[..., Any]  # (plan, *operands) -> the operation's result
Choose = Callable[..., engines.Choice]  # (name, comm, spec, rows, shared) -> which engine runs


class Spec(NamedTuple):
    """The arguments of every operation besides its operands: the last arguments of its custom op, in this order.

    group       the communicator's name
    sizes       every rank's rows, per batch entry; with `batch` a row map, see Rows
    engine      the requested engine
    needs_grad  a bit for each input that needs a gradient; ranks compare it
    layer       the kind of layer that the call is counted for
    routing     mixture of experts only: further fields of the signature, see Exchange in moe/plan.py
    """

    group: str
    rank: int
    sizes: tuple[int, ...]
    batch: int = 1
    engine: str = "auto"
    needs_grad: int = 0
    layer: str = ""
    routing: tuple[int, ...] = ()


class Shared(NamedTuple):
    """Properties of the operands that must be equal on all ranks, besides the Spec.

    dtype      dtype of the rows that are exchanged
    features   the width that all ranks share: K of a gathered x, N of a reduced output
    weights    number of weights
    with_bias  reductions only: whether a bias is added
    tf32       whether fp32 operands are multiplied in tf32, if that decides how the kernel splits its work
    """

    dtype: torch.dtype
    features: int
    weights: int = 1
    with_bias: int = 0
    tf32: int = 0


class Example(NamedTuple):
    """How a linear layer of T tokens, K inputs and N outputs calls an operation: one row of the benchmark.

    layer     "column": each rank has a part of the N outputs; "row": a part of the K inputs
    moves     the collective: "gather" of x, "scatter" of summed y, or "all_reduce" of y
    shapes    (T_r, T, K, N) -> shapes of this rank's two operands; K and N are per rank
    factors   both operands (x of all ranks if it is gathered) -> (a, b), where a @ b.T is this rank's product
    call      (both operands, group, sizes, engine) -> the result of the public function
    gated     b is gate and up concatenated, and the result is silu(product of gate) * product of up
    """

    layer: str
    moves: str
    shapes: Callable[[int, int, int, int], tuple[tuple[int, int], tuple[int, int]]]
    factors: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    call: Callable[..., Tensor]
    gated: bool = False


class OnRank(NamedTuple):
    """Where a check launches a kernel: `rank` of a simulated group, or of a group on a GPU that this host lacks.

    view     the workspace as a kernel's launcher takes it, see comm.DeviceView
    sig      the hash that ranks compare
    config   None: the launcher's choice
    machine  a launch.config.Machine
    """

    view: Any
    rank: int
    world_size: int
    rows: Rows
    sig: int
    config: Any
    machine: Any


class FusedKernel(NamedTuple):
    """A fused kernel as the checks call it. They draw random operands and compare the results with `reference`.

    name       name of its cases
    function   name of the kernel's function
    launch     (OnRank, x, others, biases, keep, copied, dtype) -> the complete launch, not yet run, and outputs by
               name. copied: copies bring x; dtype: of the outputs. Both apply only to a gather
    gathers    True: x is this rank's rows; all other operands, and the outputs y0, y1, ..., belong to this rank.
               False: every rank has all rows but only its own columns of x and of the single weight; the products are
               summed over ranks, with one bias
    scatters   reductions only: each rank gets its rows of the result y
    keeps      with `keep`, the gathered x is one more output, "gathered"
    others     shape of the operands besides x: "NK" weights, "TN" gradients of the outputs, which have no bias
    in_runs    takes rows in runs: Rows with a batch
    one_tile   takes few rows only: one tile holds all of them
    in_fp8     multiplies fp8: the launch quantizes its inputs; results have the inputs' dtype, or `dtype`
    pairs      takes two operands besides x, of the same width
    slot_bytes bytes this kernel needs in a slot, if its engine has several kernels
    formula    oracle of its outputs if they differ from the operation's result; replaces `reference`
    example    further arguments of its case, as checks.dense.Call takes them
    """

    name: str
    function: str
    launch: Callable[..., tuple[Any, dict[str, Tensor]]]
    gathers: bool = False
    scatters: bool = False
    keeps: bool = False
    others: str = "NK"
    in_runs: bool = False
    one_tile: bool = False
    pairs: bool = False
    in_fp8: bool = False
    slot_bytes: Callable[[Rows, Shared], int] | None = None
    formula: Engine | None = None
    example: dict[str, Any] = {}


class Plan(NamedTuple):
    """How calls with one Spec and Shared run on this rank: decided once, cached by the communicator.

    operation   name of the operation
    layer       the kind of layer that calls are counted for
    workspace   the group's workspace, for an engine that uses slots
    slot_bytes  bytes the engine needs in a slot, the same on all ranks
    copies      whether copies bring the rows of a fused gather
    label       the range in a profile
    launches    prepared launches of the fused kernel, by the operands' `layouts` and the other options
    alike       all calls have the same `layouts`: this plan belongs to a kind of calls, see linear_call.py
    """

    comm: Communicator
    spec: Spec
    operation: str
    layer: str
    workspace: Any
    rows: Rows
    total_rows: int
    own_rows: int
    engine: str
    function: Engine
    signature: Signature
    slot_bytes: int
    copies: bool
    label: str
    launches: dict[Any, Any]
    alike: bool = False

    def call(self) -> Call:
        """One call on the group's workspace."""
        return Call(self.workspace, self.signature, self.slot_bytes)

    def peers(self, view: Any) -> Any:
        """The group as a kernel argument; cached until the workspace changes."""
        made = self.launches.get("peers")
        if made is None or made[0] is not view:
            comm, clock = self.comm, clock_of(self.comm.device)
            made = view, peers_of(view, comm.rank, comm.world_size, self.signature.hash32, clock)
            self.launches["peers"] = made
        return made[1]


class Operation:
    """One operation; see the module's docstring. Its fake takes (spec, *operands).

    linear   linear layers only: (x [T, K], weights, biases) -> operands
    copied   gathers only: whether copies may bring these rows; None: always
    """

    def __init__(
        self,
        name: str,
        operands: str,
        returns: str,
        *,
        fake: Engine,
        reference: Engine | None = None,
        shared: Callable[..., Shared],
        engines: dict[str, Engine],
        slot_bytes: dict[str, Callable[..., int]],
        choose: Choose | None = None,
        linear: Callable[[Tensor, list[Any], list[Any]], tuple[Any, ...]] | None = None,
        copied: Callable[[Rows, torch.dtype], bool] | None = None,
        example: Example | None = None,
        kernels: Sequence[FusedKernel] = (),
    ) -> None:
        self.kernels = tuple(kernels)
        self.name, self.shared, self.engines, self.slot_bytes = name, shared, engines, slot_bytes
        self.reference, self.example, self.copied, self.linear = reference, example, copied, linear
        self.choose = choose or (_choose_fused if "triton" in engines else _choose_mover)
        self.num_operands = operands.count(",") + 1
        self.op = define(name, f"{operands}, {SPEC}", returns, self._from_graph, self._split(fake))
        _keep_order(name)
        OPERATIONS[name] = self
        if self.choose is _choose_fused:
            FUSED.append(name)
        if "multimem" in engines:
            SWITCHED.append(name)

    def _split(self, function: Engine) -> Engine:
        n = self.num_operands
        return lambda *args: function(Spec(*args[n:]), *args[:n])

    def _from_graph(self, *args: Any) -> Any:
        group, rank, sizes, *others, routing = args[self.num_operands :]
        communicator(group)
        batch, engine, grads, layer = others
        spec = Spec(group, rank, tuple(sizes), batch, engine, grads, layer, tuple(routing))
        return self._run(spec, args[: self.num_operands], None)

    def __call__(self, spec: Spec, *operands: Any, plan: Plan | None = None) -> Any:
        """Operands in the schema's order. No autograd. plan: this call's plan, if the caller has it."""
        if plan is None and (torch.compiler.is_compiling() or _len_torch_dispatch_stack()):
            return self.op(*operands, *spec)
        return self._run(spec, operands, plan)

    def _run(self, spec: Spec, operands: tuple[Any, ...], plan: Plan | None) -> Any:
        """Call the engine's function, in the operands' own dtype and without autograd.

        A rank that raises before its call has begun notifies its peers, as in `propagate_errors`.
        """
        comm = registered(spec.group) if plan is None else plan.comm
        begun = comm.begun
        try:
            if plan is None:
                plan = self.planned(comm, spec, self.shared(*operands))
            comm.engine_calls[plan.operation, plan.engine] += 1
            comm.layer_calls[plan.layer, plan.engine] += 1
            device = comm.place.device_type
            if profiler._is_profiler_enabled or torch.is_grad_enabled() or torch.is_autocast_enabled(device):
                return run_plainly(plan.label, device, plan.function, plan, *operands)
            return plan.function(plan, *operands)
        except Exception:
            comm.refuse(begun)
            raise

    def planned(self, comm: Communicator, spec: Spec, shared: Shared) -> Plan:
        """Look up the plan, or make and cache it."""
        key = self, spec, shared, GENERATION[0]
        plan: Plan | None = comm.plans.get(key)
        if plan is None:
            plan = self.plan(comm, spec, shared)
            if len(comm.plans) >= MAX_PLANS:
                comm.plans.clear()
            comm.plans[key] = plan
        return plan

    def plan(self, comm: Communicator, spec: Spec, shared: Shared) -> Plan:
        """Choose the engine. Raises ValueError if the requested engine cannot run this call."""
        rows = Rows(tuple(spec.sizes), spec.batch)
        choice = self.choose(self.name, comm, spec, rows, shared)
        signature = Signature(
            self.name, choice.engine, shared.dtype, shared.features, rows.sizes, rows.batch, shared.weights,
            spec.needs_grad, shared.with_bias, engines.tables(comm, choice.engine), shared.tf32, *spec.routing,
        )  # fmt: skip
        slot_bytes = self.slot_bytes.get(choice.engine)
        return Plan(
            comm=comm,
            spec=spec,
            operation=self.name,
            layer=spec.layer or self.name,
            workspace=comm.workspace if slot_bytes else None,
            rows=rows,
            total_rows=rows.total,
            own_rows=rows.local(comm.rank),
            engine=choice.engine,
            function=self.engines[choice.engine],
            signature=signature,
            slot_bytes=slot_bytes(rows, shared, *spec.routing) if slot_bytes else 0,
            copies=choice.transport == "copy" and (self.copied is None or self.copied(rows, shared.dtype)),
            label=f"fusedtp.{self.name}.{choice.engine}",
            launches={},
        )


def _choose_fused(name: str, comm: Communicator, spec: Spec, rows: Rows, shared: Shared) -> engines.Choice:
    return engines.choose(comm, spec.engine, rows, shared.dtype, name, shared.features)


def _choose_mover(name: str, comm: Communicator, spec: Spec, rows: Rows, shared: Shared) -> engines.Choice:
    return engines.choose_mover(comm, rows, shared.dtype)


class LocalOperation:
    """A single-device operation: fusedtp::<name> in graphs, its function in eager code."""

    def __init__(self, name: str, operands: str, returns: str, *, fake: Engine, function: Engine) -> None:
        self.name, self.function, self.label = name, function, f"fusedtp.{name}"
        self.op = define(name, operands, returns, self.run, fake)

    def __call__(self, *operands: Any) -> Any:
        """Operands in the schema's order. No autograd."""
        if torch.compiler.is_compiling() or _len_torch_dispatch_stack():
            return self.op(*operands)
        return self.run(*operands)

    def run(self, *operands: Any) -> Any:
        first = operands[0]
        device = (first if isinstance(first, Tensor) else first[0]).device.type
        return run_plainly(self.label, device, self.function, *operands)


def define(name: str, operands: str, returns: str, function: Engine, fake: Engine) -> Any:
    """Define fusedtp::<name>, without autograd."""
    LIBRARY.define(f"{name}({operands}) -> {returns}", tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    register_fake(f"fusedtp::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.fusedtp, name).default


def run_plainly(label: str, device: str, function: Engine, *operands: Any) -> Any:
    """Call `function` in the operands' own dtype and without autograd; while profiling, inside a range."""
    profiled = profiler._is_profiler_enabled
    if profiled or torch.is_autocast_enabled(device):
        # record_function costs 0.1 ms with cold caches even when no profiler runs
        span: Any = torch.profiler.record_function(label) if profiled else nullcontext()
        with torch.no_grad(), torch.autocast(device, enabled=False), span:
            return function(*operands)
    if torch.is_grad_enabled():  # autograd must not record the workspace's tensors
        with torch.no_grad():
            return function(*operands)
    return function(*operands)


MAX_PLANS = 4096  # cached per group; when full, the cache is cleared and refilled on demand


def _keep_order(name: str) -> None:
    """Keep an op's calls in program order.

    All ranks must make a group's calls in the same order. A compiler that sees no data flow between two calls may swap
    them, and if sizes differ between ranks, not on every rank. Older torch has no such mark.
    """
    if hasattr(LIBRARY, "_register_effectful_op"):
        from torch.library import EffectType  # type: ignore[attr-defined]

        LIBRARY._register_effectful_op(f"fusedtp::{name}", EffectType.ORDERED)


# -- autocast and argument checks ------------------------------------------------------------------------------------


def needs_grad(*tensors: Tensor | None) -> int:
    """Bit i: tensor i needs a gradient. Zero under no_grad.

    Raises NotImplementedError for a tensor with a tangent, because engines would drop the tangent.
    """
    if forward_ad._current_level >= 0 and not torch.compiler.is_compiling():
        _refuse_tangents(tensors)
    if not torch.is_grad_enabled():
        return 0
    mask = 0
    for i, t in enumerate(tensors):
        if t is not None and t.requires_grad:
            mask |= 1 << i
    return mask


def _refuse_tangents(tensors: Iterable[Tensor | None]) -> None:
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise NotImplementedError(
            "fusedtp's operations have no forward-mode derivatives (torch.autograd.forward_ad, torch.func.jvp); "
            "use reverse mode"
        )


def as_autocast(kind: str, *tensors: Tensor | None) -> tuple[Any, ...]:
    """Cast a linear layer's operands as torch.autocast does on this kind of device."""
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        t if t is None or t.dtype == torch.float64 or not t.is_floating_point() else t.to(dtype) for t in tensors
    )


def check_linear(at: Place, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
    """Raises ValueError, naming this rank, if a linear layer's operands do not fit together."""
    dtype, device, width = x.dtype, x.device, x.shape[-1] if x.dim() else 0
    for w, b in zip(weights, biases, strict=True):
        shape = w.shape
        if len(shape) != 2 or x.dim() < 2:
            raise ValueError(
                f"rank {at.rank}: x has shape {tuple(x.shape)}, the weight {tuple(shape)}; wanted [T, K] or "
                "[B, S, K], and [N, K]"
            )
        if width != shape[1]:
            raise ValueError(f"rank {at.rank}: x has {width} columns, the weight {tuple(shape)} takes {shape[1]}")
        if b is not None and tuple(b.shape) != (shape[0],):
            raise ValueError(
                f"rank {at.rank}: the bias has shape {tuple(b.shape)}; the weight {tuple(shape)} needs [{shape[0]}]"
            )
        if w.dtype != dtype or w.device != device:
            raise ValueError(f"rank {at.rank}: x is {dtype} on {device}, the weight {w.dtype} on {w.device}")
        if b is not None and (b.dtype != dtype or b.device != device):
            raise ValueError(f"rank {at.rank}: x is {dtype} on {device}, the bias {b.dtype} on {b.device}")
    if dtype.itemsize == 1 and dtype.is_floating_point:
        raise ValueError(f"rank {at.rank}: x is {dtype}; for fp8 with scales use the scaled_ operations")
    if not dtype.is_floating_point:
        raise ValueError(f"rank {at.rank}: x is {dtype}; the operations take floating-point tensors")
    if device.type != at.device_type:
        raise ValueError(f"rank {at.rank}: x is on {device}, the group {at.name!r} works on {at.device_type}")


def check_lying(at: Place, operands: Iterable[Any], dim: int) -> None:
    """Raises ValueError for a DTensor split along a dimension other than `dim`, or over ranks other than the group's.

    Replicas are fine, on any mesh. An FSDP shard is not: outside its module's forward, a rank holds only a piece of its
    tensor-parallel shard.
    """
    for operand in operands:
        if type(operand) is not DTensor:
            continue
        mesh, placements = operand.device_mesh, operand.placements
        for i, placement in enumerate(placements):
            if placement.is_replicate() or mesh.size(i) == 1:
                continue
            if getattr(placement, "dim", None) != dim or not _is_group(mesh.get_group(i), at.name):
                raise ValueError(
                    f"rank {at.rank}: a weight or bias of shape {tuple(operand.shape)} has placements {placements} on "
                    f"{mesh}; wanted Shard({dim}) over the ranks of group {at.name!r}. If FSDP shards it too, use it "
                    "only in the forward of the module that FSDP wraps"
                )


def _is_group(group: dist.ProcessGroup, name: str) -> bool:
    """Whether the group of this name has the same ranks, in the same order."""
    if group.group_name == name:
        return True
    other = registered(name).world.group_ref()
    if not isinstance(other, dist.ProcessGroup):
        return False
    return dist.get_process_group_ranks(group) == dist.get_process_group_ranks(other)


# -- autograd --------------------------------------------------------------------------------------------------------


def wanted(ctx: Any) -> Sequence[bool]:
    """Which of a Function's inputs get a gradient in this pass; `needs_input_grad` covers all passes.

    See Note [One autograd path]. Raises RuntimeError in a double backward.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(f"{type(ctx).__name__}: double backward is not supported")
    needs: Sequence[bool] = ctx.needs_input_grad
    if torch.compiler.is_compiling():
        return needs
    nodes = []  # one per input that needs a gradient, in order; next_functions has None for the others
    for node, _ in ctx.next_functions:
        if node is not None:
            nodes.append(node)
    if len(nodes) != sum(needs):
        return needs  # this torch refines needs_input_grad itself
    found = list(needs)
    for i, need in enumerate(needs):
        if need:
            try:
                found[i] = torch._C._will_engine_execute_node(nodes.pop(0))
            except (RuntimeError, AttributeError):
                found[i] = True  # torch cannot tell, e.g. for a leaf that torch.autograd.grad captures
    return found


# -- DTensor operands ------------------------------------------------------------------------------------------------


class Lying(NamedTuple):
    """A DTensor's layout: its spec, and the strides of this rank's shard. Note [DTensors as operands]."""

    spec: Any
    strides: tuple[int, ...]

    @classmethod
    def of(cls, operand: DTensor) -> Lying:
        return cls(operand._spec, operand._local_tensor.stride())

    def laid(self, own: Tensor) -> DTensor:
        """Wrap this rank's shard of a gradient as a DTensor of this layout."""
        if own.stride() != self.strides:
            strided = torch.empty_strided(own.shape, self.strides, dtype=own.dtype, device=own.device)
            own = strided.copy_(own)
        return DTensor.__new__(DTensor, own, self.spec, requires_grad=False)  # skips __init__, which does nothing


def parts(operands: Iterable[Any]) -> tuple[list[Any], dict[int, Lying]]:
    """(operands with each DTensor replaced by its local shard, below autograd; the layouts of the DTensors by index)"""
    own, lying = [], {}
    for i, operand in enumerate(operands):
        if type(operand) is DTensor:  # isinstance asks its metaclass, in Python
            lying[i], operand = Lying.of(operand), operand._local_tensor
        own.append(operand)
    return own, lying


def laid_alike(gradients: Iterable[Tensor | None], lying: dict[int, Lying]) -> list[Tensor | None]:
    """Give each gradient of a shard its operand's DTensor layout."""
    found = []
    for i, own in enumerate(gradients):
        found.append(lying[i].laid(own) if i in lying and own is not None else own)
    return found
