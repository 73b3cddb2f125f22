"""The suites by name. The suites of fused operations are made from the operations' declarations: fused.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from ..cases import Case
from . import decode, experts, fp8, fused, local, model, step, train


class Suite(NamedTuple):
    """ranks: "one" (device), "several" or "any"; cases(plan, tp); measure(rank, case) -> rows, collective.

    worlds   numbers of ranks to run on, overriding --tp
    """

    ranks: str
    cases: Callable[..., list[Case]]
    measure: Callable[..., Any]
    help: str
    worlds: tuple[int, ...] = ()


FUSED = {
    name: Suite(
        "several",
        partial(fused.cases, name),
        fused.measure,
        "each engine against its parts, one after the other",
    )
    for name in fused.SUITES
}
SUITES = {
    "matmul": Suite("one", local.matmul_cases, local.measure_matmul, "the plain matmul against the vendor's"),
    **FUSED,
    "fp8": Suite(
        "one", fp8.cases, fp8.measure,
        "fp8 matmuls and quantization, against 16 bits, torch's scaled matmul, torch.compile",
    ),
    "pointwise": Suite(
        "one", local.pointwise_cases, local.measure_pointwise,
        "RMSNorm, SwiGLU, rotary embedding against torch, torch.compile and Liger-Kernel",
    ),
    "linear-cross-entropy": Suite(
        "any", model.loss_cases, model.measure_loss,
        "output head and loss against torch, torch.compile, Liger-Kernel, NCCL",
    ),
    "block": Suite("any", model.block_cases, model.measure_block, "a Transformer block, forward and backward"),
    "decode": Suite(
        "several", decode.cases, decode.measure,
        "a layer's matmuls for a few tokens with their sums over ranks, eager and in a CUDA graph, against NCCL",
    ),
    "grouped-matmul": Suite(
        "one", experts.grouped_cases, experts.measure_grouped,
        "rows by the weights of their experts, against torch's grouped_mm",
    ),
    "moe-exchange": Suite(
        "several", experts.exchange_cases, experts.measure_exchange,
        "dispatch and combine of a mixture of experts alone, against a copy",
    ),
    "moe": Suite(
        "several", experts.moe_cases, experts.measure_moe,
        "a layer of experts split over ranks, against all_to_all with torch",
    ),
    "train-step": Suite(
        "one", step.cases, step.measure,
        "a step of training on one GPU, and its MFU, against plain torch and torch.compile",
    ),
    "train": Suite(
        "any", train.cases, train.measure,
        "the trainer: bubbles of pipelines, overhead of the loop, saving beside training; CPU only",
        train.WORLDS,
    ),
}  # fmt: skip
