"""The suite of a training step: the model of `fusedtp train`, wide enough for a GPU, on one rank.

    forward, loss, backward, clipping, AdamW            parameters fp32, cast to the activations' dtype at use

    torch                     the same model from torch's own modules and functions, with the same parameters
    torch.compile             the same, compiled as a whole
    fusedtp                   fusedtp.nn
    fusedtp, compiled blocks  the same, as run by `fusedtp train --compile`

A sample is a few steps back to back, as in training, so host time counts if the host is slower than the device. Only
the FLOPs of the matmuls, three times the forward's, and of causal attention's two products are counted. MFU (model
flops utilization, Chowdhery et al. 2022, PaLM, appendix B) is their rate over the vendor's peak; `roof` is their rate
over that of a large matmul on this machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedtp.nn import CausalLM, ModelConfig, TransformerBlock, init_
from fusedtp.parallel import clip_grad_norm_

from .. import errors, rivals
from ..cases import Case, named
from ..options import Plan
from ..rank import Rank
from ..rows import Row
from ..sample import Spread, interleave
from ..ways import Ways
from .model import PlainBlock

SUITE = "train-step"
STEPS = 3  # per sample
# Dense 16-bit FLOP/s from the vendor's data sheets, by torch's name of the GPU: H100 SXM, H200, A100 (all models).
PEAKS = {"H100 80GB HBM3": 989.4e12, "H200": 989.4e12, "A100": 312e12}
Step = Callable[[Tensor, Tensor], Tensor]  # (ids, labels) [B, S] -> loss


@dataclass(frozen=True)
class Sizes:
    """The options of `fusedtp train`: --width, --mlp-width, --layers, --heads, --kv-heads, --batch, --length."""

    width: int
    mlp_width: int
    layers: int = 4
    heads: int = 16
    kv_heads: int = 8
    batch: int = 8
    length: int = 2048


SIZES = (Sizes(2048, 5632), Sizes(4096, 11264, heads=32, kv_heads=16, batch=4))
SMOKE_SIZES = (Sizes(64, 176, 2, 4, 2, 2, 32),)


def cases(plan: Plan, tp: int) -> list[Case]:
    """16-bit cases. On a CPU only with --smoke: `make train` and the suite `train` measure there."""
    if not plan.smoke and plan.device == "cpu":
        return []
    return [
        Case(
            SUITE, dtype, sizes.batch * sizes.length, model=sizes,
            names=named(width=sizes.width, layers=sizes.layers, B=sizes.batch, S=sizes.length),
        )
        for sizes in (SMOKE_SIZES if plan.smoke else SIZES)
        for dtype in plan.dtypes
        if dtype != "float32"
    ]  # fmt: skip


def config_of(sizes: Sizes, dtype: str) -> ModelConfig:
    return ModelConfig(
        hidden_size=sizes.width, intermediate_size=sizes.mlp_width, num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads, num_key_value_heads=sizes.kv_heads, dtype=dtype,  # type: ignore[arg-type]
    )  # fmt: skip


def flops_of(config: ModelConfig, batch: int, length: int) -> float:
    """FLOPs of a step."""
    model = CausalLM(config, device="meta")
    weights = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name)
    queries = config.num_attention_heads * (config.head_dim or 0)
    attention = 2.0 * length**2 * queries * batch * config.num_hidden_layers
    return 3.0 * (2.0 * batch * length * weights + attention)


class PlainLM(nn.Module):
    """A model from torch's own modules and functions with a CausalLM's parameters: ids, labels [B, S] -> loss."""

    def __init__(self, ours: CausalLM, config: ModelConfig, batch: int, length: int) -> None:
        super().__init__()
        self.config = config
        self.embedding, self.norm = ours.embed_tokens.weight, ours.norm.weight
        self.head = ours.lm_head.weight
        device = self.head.device
        repeats = config.dtype == "float32"
        self.blocks = nn.ModuleList()
        for block in ours.layers:
            assert isinstance(block, TransformerBlock)
            self.blocks.append(PlainBlock(block, config, batch * length, device, repeats, batch))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        dtype = self.config.compute_dtype
        x = F.embedding(ids.flatten(), self.embedding).to(dtype)
        for block in self.blocks:
            x = block(x)
        x = F.rms_norm(x, (x.shape[-1],), self.norm.to(dtype), self.config.rms_norm_eps)
        return F.cross_entropy(F.linear(x, self.head.to(dtype)).float(), labels.flatten())


def compiled_blocks(model: CausalLM) -> CausalLM:
    """Compile the layers one by one, in place."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * len(model.layers))
    for block in model.layers:
        block.forward = torch.compile(block.forward)
    return model


def sharing(ours: CausalLM) -> CausalLM:
    """Another model that shares the parameters."""
    model = CausalLM(ours.config, device="meta")
    model.load_state_dict(ours.state_dict(keep_vars=True), assign=True)
    return model


def measure(rank: Rank, case: Case) -> list[Row]:
    """Result rows of a case."""
    sizes: Sizes = case.model
    config = config_of(sizes, case.dtype)
    ours = CausalLM(config, device=rank.device)
    init_(ours, seed=0)
    plain = PlainLM(ours, config, sizes.batch, sizes.length)
    parameters = list(ours.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=0.0, fused=True)  # all ways use the same parameters

    def operands(seed: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(config.vocab_size, (sizes.batch, sizes.length + 1), generator=generator)
        return ids[:, :-1].contiguous().to(rank.device), ids[:, 1:].contiguous().to(rank.device)

    sets = [operands(seed) for seed in range(STEPS)]
    exact = PlainLM(ours, config_of(sizes, "float32"), sizes.batch, sizes.length)
    want = gradients(exact, parameters, *sets[0])
    del exact

    ways = Ways(rank, SUITE, case)
    ways.add("torch", plain)
    compiled, why = rivals.compiled(plain, rank.device, rank.plan.compile)
    ways.add("torch.compile", compiled, why)
    ways.add("fusedtp", loss_of(ours))
    if compiled is not None:
        ways.add("fusedtp, compiled blocks", loss_of(compiled_blocks(sharing(ours))))
    else:
        ways.add("fusedtp, compiled blocks", None, why)

    def step(name: str, loss: Step) -> Callable[[Tensor, Tensor], object]:
        def run(ids: Tensor, labels: Tensor) -> None:
            loss(ids, labels).backward()
            if name.startswith("fusedtp"):
                clip_grad_norm_(ours, 1.0)
            else:
                nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return run

    ways.prepare(sets, step)
    found = {name: off_by(want, gradients(fn, parameters, *sets[0]), config) for name, fn in ways.functions.items()}
    del want
    times = interleave(
        ways.timed, rank.seconds, rank.meeting, lambda _, way: rank.once(way, 1 if rank.plan.smoke else STEPS)
    )
    flops = flops_of(config, sizes.batch, sizes.length)
    roof = rank.roofs[case.dtype]
    rows = [
        ways.row(name, Spread.of(seconds), error=found[name], flops=flops, roof=roof) for name, seconds in times.items()
    ]
    return [with_mfu(row, rank.device) for row in rows] + ways.missing()


def loss_of(model: CausalLM) -> Step:
    def run(ids: Tensor, labels: Tensor) -> Tensor:
        loss = model(ids, labels).loss
        assert loss is not None
        return loss

    return run


def with_mfu(row: Row, device: torch.device) -> Row:
    """Adds MFU if the GPU's peak is known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    for kind, peak in PEAKS.items():
        if kind in name and row.rate is not None:
            mfu = row.rate / peak
            return replace(row, figures={"mfu": mfu}, note=f"MFU {mfu:.1%} of {peak / 1e12:.0f} TFLOP/s")
    return row


def gradients(loss: Any, parameters: list[nn.Parameter], ids: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """The loss and its gradients."""
    value = loss(ids, labels)
    return (value.detach(), *torch.autograd.grad(value, parameters))


def off_by(want: tuple[Tensor, ...], got: tuple[Tensor, ...], config: ModelConfig) -> errors.Error:
    """The larger relative error: of the loss, or of all gradients together.

    A layer rounds to the dtype about 36 times, forward and backward. The roundings are independent and add up like a
    random walk; twice its standard deviation is allowed.
    """
    off = float((want[0] - got[0]).abs() / want[0])
    square = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(want[1:], got[1:], strict=True))
    size = sum(float(a.double().square().sum()) for a in want[1:])
    off = max(off, (square / size) ** 0.5)
    steps = 36 * config.num_hidden_layers
    return errors.Error(off, off / (2 * steps**0.5 * errors.unit(config.compute_dtype)))
