"""Launchers of the elementwise kernels. Every tensor's last dim is contiguous; sizes may be zero.

A layer repeats its launches in every step. `prepare_*` makes a launch without its tensors from their layouts, and the
launch is cached by layouts. `plan_*` adds the tensors. For checks, it takes a `machine` that this host lacks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from fusedtp.comm.launching import MOST_KEPT, Launch, layouts

from .config import VECTOR, Config, Machine, machine_of, power_of_two

WHOLE = 8192  # widest row that one program holds in registers, together with its weight's gradient
WIDE_WARPS = 16  # of a program that holds a part of a wider row
PROGRAMS = 2  # per SM that loop over rows
STAGES = 3  # of their loops, if rows can be copied asynchronously and fit in shared memory
ELEMENTS = 2048  # per program, if nothing else determines it

Layouts = tuple[Any, ...]  # shape, strides, alignment and dtype of each tensor, or None; see `layouts`


Outs = TypeVar("Outs")


class Planned(NamedTuple, Generic[Outs]):
    """A prepared launch, its tensors by name, and its outputs among them."""

    launch: Launch
    tensors: dict[str, Tensor | None]
    outs: Outs

    def start(self, device: torch.device) -> Outs:
        """Run the launch and return its outputs."""
        self.launch.start(device, self.tensors)
        return self.outs

    def whole(self) -> tuple[Launch, Outs]:
        """The launch with all arguments, not yet run, and its outputs."""
        return self.launch.given(self.tensors), self.outs


def _prepared(
    prepare: Callable[..., Launch], machine: Machine | None, device: torch.device, laid: Layouts, *how: Any
) -> Launch:
    """The cached launch for tensors with these layouts on `device`, or a new one for `machine`."""
    return _kept(prepare, device, laid, *how) if machine is None else prepare(machine, laid, *how)


@lru_cache(MOST_KEPT)
def _kept(prepare: Callable[..., Launch], device: torch.device, laid: Layouts, *how: Any) -> Launch:
    return prepare(machine_of(device), laid, *how)


# -- RMSNorm ---------------------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, H] (+ residual) -> y [T, H], h = x + residual (x itself without one), 1 / rms fp32 [T]."""
    return plan_rms_norm(x, residual, weight, eps).start(x.device)


def plan_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, machine: Machine | None = None
) -> Planned[tuple[Tensor, Tensor, Tensor]]:
    """rms_norm, not yet run."""
    launch = _prepared(prepare_rms_norm, machine, x.device, layouts(x, residual, weight), eps)
    y, inverse_rms = x.new_empty(x.shape), x.new_empty(x.shape[0], dtype=torch.float32)
    total = None if residual is None else x.new_empty(x.shape)
    tensors = dict(x=x, residual=residual, weight=weight, y=y, total=total, inverse_rms=inverse_rms)
    return Planned(launch, tensors, (y, x if total is None else total, inverse_rms))


def prepare_rms_norm(machine: Machine, laid: Layouts, eps: float) -> Launch:
    """For the layouts of x, residual and weight."""
    from fusedtp.kernels.rms_norm import rms_norm_kernel
    from fusedtp.kernels.rms_norm_wide import rms_norm_wide_kernel

    x, residual, _ = laid
    (rows, width), steps = x[0], [_step(x), _step(residual)]
    args = dict(stride_x=steps[0], stride_r=steps[1], T=rows, H=width, eps=eps)
    if width > WHOLE:
        args |= dict(BLOCK=_wide_block(width, *steps))
        return _launch(rms_norm_wide_kernel, rows, args, WIDE_WARPS, machine)
    block, height, warps = _row_blocks(width)
    args |= dict(ROWS=height, BLOCK=block)
    return _launch(rms_norm_kernel, -(-rows // height) if width else 0, args, warps, machine)


def rms_norm_backward(
    dy: Tensor, dtotal: Tensor | None, h: Tensor, weight: Tensor, inverse_rms: Tensor
) -> tuple[Tensor, Tensor]:
    """-> the gradients of x (and the residual) [T, H] and of weight [H] in fp32. Bitwise deterministic per machine."""
    dx, parts = plan_rms_norm_backward(dy, dtotal, h, weight, inverse_rms).start(h.device)
    return dx, parts.sum(0)


def plan_rms_norm_backward(
    dy: Tensor,
    dtotal: Tensor | None,
    h: Tensor,
    weight: Tensor,
    inverse_rms: Tensor,
    machine: Machine | None = None,
) -> Planned[tuple[Tensor, Tensor]]:
    """rms_norm_backward, not yet run; its outputs are dx and each program's part of dweight [programs, H]."""
    laid = layouts(dy, dtotal, h, weight, inverse_rms)
    launch = _prepared(prepare_rms_norm_backward, machine, h.device, laid)
    programs = max(1, launch.programs // launch.args.get("COLUMNS", 1))
    dx, parts = h.new_empty(h.shape), h.new_empty(programs, h.shape[1], dtype=torch.float32)
    tensors = dict(dy=dy, dtotal=dtotal, h=h, weight=weight, inverse_rms=inverse_rms, dx=dx, dweight=parts)
    return Planned(launch, tensors, (dx, parts))


def prepare_rms_norm_backward(machine: Machine, laid: Layouts) -> Launch:
    """For the layouts of dy, dtotal, h, weight and inverse_rms."""
    from fusedtp.kernels.rms_norm import rms_norm_backward_kernel
    from fusedtp.kernels.rms_norm_wide import rms_norm_wide_backward_kernel

    dy, dtotal, h, *_ = laid
    (rows, width), steps = h[0], [_step(dy), _step(dtotal), _step(h)]
    block, height, warps = _row_blocks(width)
    columns = 1  # programs of a row
    if width > WHOLE:
        block = _wide_block(width, *steps)
        columns, height, warps = -(-width // block), 1, WIDE_WARPS
    programs = max(1, min(PROGRAMS * machine.programs // columns, -(-rows // height)))
    args = dict(stride_dy=steps[0], stride_dt=steps[1], stride_h=steps[2], T=rows, H=width, BLOCK=block)
    if width > WHOLE:
        args |= dict(COLUMNS=columns)
        return _launch(rms_norm_wide_backward_kernel, programs * columns, args, warps, machine)
    ahead = (2 if dtotal is None else 3) * (STAGES - 1) * block * height * h[3].itemsize
    even = all(n % VECTOR == 0 for n in (width, *steps))
    stages = STAGES if even and PROGRAMS * ahead <= machine.shared_bytes else 1
    args |= dict(ROWS=height, STAGES=stages)
    side = max(1, min(PROGRAMS, 16 // warps))  # with more warps per SM, each has too few registers
    return _launch(rms_norm_backward_kernel, programs if width else 0, args, warps, machine, side)


def _step(laid: Any) -> int:
    """The stride from row to row; 0 without a tensor."""
    step: int = 0 if laid is None else laid[1][0]
    return step


# -- gated activations -----------------------------------------------------------------------------------------------


def swiglu(gate: Tensor, up: Tensor, act: str) -> Tensor:
    """act(gate) * up; both contiguous, with the same shape. act: "silu", "gelu" or "gelu_pytorch_tanh"."""
    return plan_swiglu(gate, up, act).start(gate.device)


def plan_swiglu(gate: Tensor, up: Tensor, act: str, machine: Machine | None = None) -> Planned[Tensor]:
    """swiglu, not yet run."""
    launch = _prepared(prepare_swiglu, machine, gate.device, layouts(gate, up), act)
    y = torch.empty_like(gate)
    return Planned(launch, dict(gate=gate, up=up, y=y), y)


def prepare_swiglu(machine: Machine, laid: Layouts, act: str) -> Launch:
    """For the layouts of gate and up."""
    from fusedtp.kernels.swiglu import swiglu_kernel

    return _elementwise(swiglu_kernel, laid[0][0].numel(), act)


def swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor, act: str) -> tuple[Tensor, Tensor]:
    """-> the gradients of gate and up. All contiguous."""
    return plan_swiglu_backward(dy, gate, up, act).start(gate.device)


def plan_swiglu_backward(
    dy: Tensor, gate: Tensor, up: Tensor, act: str, machine: Machine | None = None
) -> Planned[tuple[Tensor, Tensor]]:
    """swiglu_backward, not yet run."""
    launch = _prepared(prepare_swiglu_backward, machine, gate.device, layouts(dy, gate, up), act)
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    return Planned(launch, dict(dy=dy, gate=gate, up=up, dgate=dgate, dup=dup), (dgate, dup))


def prepare_swiglu_backward(machine: Machine, laid: Layouts, act: str) -> Launch:
    """For the layouts of dy, gate and up."""
    from fusedtp.kernels.swiglu import swiglu_backward_kernel

    return _elementwise(swiglu_backward_kernel, laid[0][0].numel(), act)


def _elementwise(kernel: Any, count: int, act: str) -> Launch:
    return _launch(kernel, -(-count // ELEMENTS), dict(N=count, BLOCK=ELEMENTS, ACT=act))


# -- rotary embedding ------------------------------------------------------------------------------------------------


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, sign: int) -> tuple[Tensor, Tensor]:
    """q [B, S, Hq, D], k [B, S, Hk, D], tables fp32 [B or 1, S, 1, D/2] -> both rotated, contiguous."""
    return plan_rotate(q, k, cos, sin, sign).start(q.device)


def plan_rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, sign: int, machine: Machine | None = None
) -> Planned[tuple[Tensor, Tensor]]:
    """rotate, not yet run."""
    launch = _prepared(prepare_rotate, machine, q.device, layouts(q, k, cos, sin), sign)
    q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
    return Planned(launch, dict(q=q, q_out=q_out, k=k, k_out=k_out, cos=cos, sin=sin), (q_out, k_out))


def prepare_rotate(machine: Machine, laid: Layouts, sign: int) -> Launch:
    """For the layouts of q, k, cos and sin."""
    from fusedtp.kernels.rope import rope_kernel

    q, k, cos, _ = laid
    batch, length, heads_q, size = q[0]
    heads_k, half = k[0][2], size // 2
    pad = power_of_two(half)
    heads = power_of_two(max(heads_q, heads_k))
    args = dict(
        q_strides=q[1][:3],
        heads_q=heads_q,
        k_strides=k[1][:3],
        heads_k=heads_k,
        S=length,
        stride_cos=length * half if cos[0][0] > 1 else 0,
        SIGN=sign,
        HALF=half,
        PAD=pad,
        HEADS=min(heads, max(1, ELEMENTS // pad)),
    )
    return _launch(rope_kernel, batch * length, args)


# -- shared ----------------------------------------------------------------------------------------------------------


def _launch(
    kernel: Any,
    programs: int,
    args: dict[str, Any],
    warps: int = 4,
    machine: Machine | None = None,
    side: int = 1,
) -> Launch:
    """On a CUDA `machine`, a thread may use all registers that `side` programs on one SM leave it."""
    limited = machine is not None and machine.clock == "cuda"
    registers = min(255, 65536 // (32 * warps * side)) if limited else 0
    return Launch(kernel, programs, args, Config(0, 0, 0, num_warps=warps, max_registers=registers))


def _row_blocks(width: int) -> tuple[int, int, int]:
    """(columns, rows, warps) of a program: whole rows, with 16 elements per thread within the limits on warps."""
    block = power_of_two(width)
    height = max(1, ELEMENTS // block)
    return block, height, max(1, min(16, block * height // 512))


def _wide_block(width: int, *strides: int) -> int:
    """The fewest parts of at most WHOLE columns, about equal in size: 8193 columns must not become 8192 and 1.

    At most half of WHOLE if a thread loads element by element: it holds an address for each, and more would spill.
    """
    most = WHOLE if all(n % VECTOR == 0 for n in (width, *strides)) else WHOLE // 2
    parts = -(-width // most)
    return power_of_two(-(-width // parts))
