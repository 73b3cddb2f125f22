"""Launchers of the kernels of cross-entropy. Logits are [T, V] with contiguous rows; sizes may be zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedtp.comm.launching import Launch

from .config import VECTOR, Config, Machine, machine_of, power_of_two

ACCESS = 16  # bytes of a thread's access to memory
LANES = 1024  # accesses of a program at once: four per thread, so that enough bytes are in flight
HOST_LANES = 4  # under the interpreter: even small tests get several steps and programs
WARPS = 8


def logit_stats(logits: Tensor, labels: Tensor, start: int) -> Tensor:
    """[T, 2] in fp32: each row's log-sum-exp, and its label's logit or 0."""
    launch, stats = plan_logit_stats(logits, labels, start, machine_of(logits.device))
    launch.start(logits.device)
    return stats


def plan_logit_stats(logits: Tensor, labels: Tensor, start: int, machine: Machine) -> tuple[Launch, Tensor]:
    """The launch of logit_stats, not yet run, and its output."""
    from fusedtp.kernels.cross_entropy import logit_stats_kernel

    args, lanes = _shared_args(logits, labels, start, machine)
    rows, height = args["T"], args["ROWS"]
    stats = torch.empty(rows, 2, dtype=torch.float32, device=logits.device)
    args |= dict(stats=stats, LANES=lanes, VECTOR=_aligned(logits))
    return Launch(logit_stats_kernel, -(-rows // height), args, _config(height * lanes)), stats


def logit_gradient(logits: Tensor, gradient: Tensor, labels: Tensor, start: int, lse: Tensor, scale: Tensor) -> None:
    """gradient = (exp(logits - lse) - onehot) * scale; `gradient` may be `logits`. lse, scale: fp32 [T], contiguous."""
    plan_logit_gradient(logits, gradient, labels, start, lse, scale, machine_of(logits.device)).start(logits.device)


def plan_logit_gradient(
    logits: Tensor, gradient: Tensor, labels: Tensor, start: int, lse: Tensor, scale: Tensor, machine: Machine
) -> Launch:
    """The launch of logit_gradient, not yet run."""
    from fusedtp.kernels.cross_entropy import logit_gradient_kernel

    args, lanes = _shared_args(logits, labels, start, machine)
    args |= dict(gradient=gradient, stride_g=gradient.stride(0), lse=lse, scale=scale)
    programs = -(-args["T"] // args["ROWS"]) * -(-args["V"] // args["BLOCK"])
    return Launch(logit_gradient_kernel, programs, args, _config(args["ROWS"] * lanes))


def _shared_args(logits: Tensor, labels: Tensor, start: int, machine: Machine) -> tuple[dict[str, Any], int]:
    """The arguments of both kernels, and a program's accesses along a row; a program takes several short rows."""
    each = ACCESS // logits.element_size()
    most = HOST_LANES if machine.clock == "host" else LANES
    (rows, width), stride = logits.shape, logits.stride(0)
    lanes = min(most, power_of_two(-(-width // each)))
    args = dict(logits=logits, stride=stride, labels=labels, start=start, T=rows, V=width)
    return args | dict(ROWS=most // lanes, BLOCK=lanes * each), lanes


def _aligned(logits: Tensor) -> bool:
    """Whether the compiler can tell that a thread may load ACCESS bytes at once: it only knows which numbers 16
    divides."""
    return logits.data_ptr() % ACCESS == 0 and all(n % VECTOR == 0 for n in (logits.stride(0), logits.shape[1]))


def _config(accesses: int) -> Config:
    return Config(0, 0, 0, num_warps=max(1, min(WARPS, accesses // 128)))
