"""Launchers of the kernels of cross-entropy. Logits are [T, V] with contiguous rows; sizes may be zero."""

from __future__ import annotations

import torch
from torch import Tensor

from .config import VECTOR, Config, Machine, machine_of
from .run import Launch

ACCESS = 16  # bytes of a thread's access to memory
LANES = 1024  # accesses of a program at once: four of each thread, so that enough bytes are under way
HOST_LANES = 4  # there small tests shall have several steps and programs
WARPS = 8


def logit_stats(logits: Tensor, labels: Tensor, start: int) -> Tensor:
    """[T, 2] in fp32: each row's log-sum-exp, and its label's logit or 0."""
    launch, stats = plan_logit_stats(logits, labels, start, machine_of(logits.device))
    launch.start(logits.device)
    return stats


def plan_logit_stats(logits: Tensor, labels: Tensor, start: int, machine: Machine) -> tuple[Launch, Tensor]:
    """The launch of logit_stats, not yet run, and its output."""
    from fusedtp.kernels.cross_entropy import logit_stats_kernel

    rows, width = logits.shape
    height, lanes, each = _blocks(logits, machine)
    stats = torch.empty(rows, 2, dtype=torch.float32, device=logits.device)
    args = dict(
        logits=logits,
        stride=logits.stride(0),
        labels=labels,
        start=start,
        stats=stats,
        T=rows,
        V=width,
        ROWS=height,
        LANES=lanes,
        BLOCK=lanes * each,
        VECTOR=_aligned(logits),
    )
    return Launch(logit_stats_kernel, -(-rows // height), args, _config(height * lanes)), stats


def logit_gradient(
    logits: Tensor, gradient: Tensor, labels: Tensor, start: int, lse: Tensor, scale: Tensor
) -> None:
    """gradient = (exp(logits - lse) - onehot) * scale; `gradient` may be `logits`. lse, scale: fp32 [T], contiguous."""
    plan_logit_gradient(logits, gradient, labels, start, lse, scale, machine_of(logits.device)).start(
        logits.device
    )


def plan_logit_gradient(
    logits: Tensor, gradient: Tensor, labels: Tensor, start: int, lse: Tensor, scale: Tensor, machine: Machine
) -> Launch:
    """The launch of logit_gradient, not yet run."""
    from fusedtp.kernels.cross_entropy import logit_gradient_kernel

    rows, width = logits.shape
    height, lanes, each = _blocks(logits, machine)
    args = dict(
        logits=logits,
        stride=logits.stride(0),
        gradient=gradient,
        stride_g=gradient.stride(0),
        labels=labels,
        start=start,
        lse=lse,
        scale=scale,
        T=rows,
        V=width,
        ROWS=height,
        BLOCK=lanes * each,
    )
    programs = -(-rows // height) * -(-width // (lanes * each))
    return Launch(logit_gradient_kernel, programs, args, _config(height * lanes))


def _blocks(logits: Tensor, machine: Machine) -> tuple[int, int, int]:
    """(rows, accesses along a row, elements of an access) of a program; short rows go several to a program."""
    each = ACCESS // logits.element_size()
    most = HOST_LANES if machine.clock == "host" else LANES
    lanes = min(most, _power_of_two(-(-logits.shape[1] // each)))
    return most // lanes, lanes, each


def _aligned(logits: Tensor) -> bool:
    """Whether the compiler sees that a thread can load ACCESS bytes at once: what it knows of a number is that 16
    divides it."""
    return logits.data_ptr() % ACCESS == 0 and all(
        n % VECTOR == 0 for n in (logits.stride(0), logits.shape[1])
    )


def _config(accesses: int) -> Config:
    return Config(0, 0, 0, num_warps=max(1, min(WARPS, accesses // 128)))


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
