"""One Transformer block, forward and backward: against the same block of plain torch, and its parallel form.

    one rank        fusedtp's block against plain torch's modules, eager and compiled
    several ranks   fusedtp.parallelize with each engine; W times the flops of a rank

Flops are those of the matmuls, three times the forward's, and of causal attention's two products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedtp.nn import ModelConfig, TokenLayout, TransformerBlock, init_
from fusedtp.nn.rope import rotary_tables
from fusedtp.ops.rows import split
from fusedtp.parallel import parallelize

from .. import baselines, errors
from ..options import Plan
from ..rank import Rank
from ..rows import Row
from ..sample import Rotating, Way
from .common import OfModel, drop_what_fails, model_cases, offer, rows_of

NAME, RANKS = "block", "any"


@dataclass(frozen=True)
class Case(OfModel):
    """One sequence of T tokens through one block of a model."""

    def config(self, dtype: str) -> ModelConfig:
        model = self.sizes
        return ModelConfig(
            hidden_size=model.hidden, intermediate_size=model.intermediate, num_attention_heads=model.heads,
            num_key_value_heads=model.kv_heads, head_dim=model.head_dim, num_hidden_layers=1,
            dtype=dtype, param_dtype=dtype,  # type: ignore[arg-type]
        )  # fmt: skip

    @property
    def flops(self) -> float:
        model = self.sizes
        queries, keys = model.heads * model.head_dim, 2 * model.kv_heads * model.head_dim
        weights = model.hidden * (2 * queries + keys + 3 * model.intermediate)
        return 3.0 * (2.0 * self.tokens * weights + 2.0 * self.tokens**2 * queries)


def cases(plan: Plan, tp: int) -> list[Case]:
    """Every model."""
    return model_cases(Case, plan, tp)


class PlainBlock(nn.Module):
    """The same block of torch's own modules and functions, with the weights of fusedtp's.

    repeats   kv heads are repeated instead of grouped: attention in fp32 then needs no [T, T] scores on a GPU
    """

    def __init__(
        self,
        ours: TransformerBlock,
        config: ModelConfig,
        tokens: int,
        device: torch.device,
        repeats: bool = False,
    ) -> None:
        super().__init__()
        self.repeats = repeats
        self.config, self.eps = config, config.rms_norm_eps
        self.weights = nn.ParameterDict({name.replace(".", "/"): p for name, p in ours.named_parameters()})
        cos, sin = rotary_tables(
            TokenLayout(1, tokens),
            config.head_dim or 0,
            config.rope_theta,
            None,
            device,
            config.compute_dtype,
        )
        self.cos, self.sin = cos.transpose(1, 2), sin.transpose(1, 2)  # [1, 1, T, D/2]

    def _weight(self, name: str) -> Tensor:
        found: Tensor = self.weights[f"{name}/weight"]
        return found

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self._weight(name), self.eps)

    def _heads(self, x: Tensor, name: str) -> Tensor:
        y = F.linear(x, self._weight(f"self_attn/{name}"))
        return y.view(1, x.shape[0], -1, self.config.head_dim or 0).transpose(1, 2)

    def _rotate(self, x: Tensor) -> Tensor:
        a, b = x.to(self.cos.dtype).chunk(2, -1)
        return torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], -1).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        normed = self._norm(x, "input_layernorm")
        q, k, v = (self._heads(normed, name) for name in ("q_proj", "k_proj", "v_proj"))
        grouped = q.shape[1] != k.shape[1] and not self.repeats
        if self.repeats:
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        y = F.scaled_dot_product_attention(
            self._rotate(q), self._rotate(k), v, is_causal=True, enable_gqa=grouped
        )
        x = x + F.linear(y.transpose(1, 2).flatten(2)[0], self._weight("self_attn/o_proj"))
        normed = self._norm(x, "post_attention_layernorm")
        gate, up = (F.linear(normed, self._weight(f"mlp/{name}_proj")) for name in ("gate", "up"))
        return x + F.linear(F.silu(gate) * up, self._weight("mlp/down_proj"))


def measure(rank: Rank, case: Case) -> list[Row]:
    """Rows of one case. Collective."""
    sizes = split(case.tokens, rank.world_size)
    layout = TokenLayout(1, case.tokens, sizes if rank.world_size > 1 else (), rank.rank)

    def operands(seed: int) -> tuple[Tensor, ...]:
        # The same tokens on every rank, of which each takes its own.
        generator = torch.Generator(rank.device).manual_seed(seed)
        x = torch.randn(case.tokens, case.sizes.hidden, generator=generator, device=rank.device)
        return (layout.take(x).to(getattr(torch, case.dtype)).requires_grad_(),)

    functions: dict[str, Callable[..., Tensor]] = {}
    modules: dict[str, nn.Module] = {}
    absent: dict[str, str] = {}
    if rank.world_size == 1:
        ours = _block(case, case.dtype, rank.device)
        plain = PlainBlock(ours, case.config(case.dtype), case.tokens, rank.device)
        modules = {"torch": plain, "fusedtp": ours}
        functions = {"torch": plain, "fusedtp": lambda x: ours(x)}
        modules["torch.compile"] = plain
        compiled = baselines.compiled(plain, rank.device, rank.plan.compile)
        offer(functions, absent, "torch.compile", compiled)
    else:
        for engine in rank.plan.engines:
            if engine == "triton-copy":
                continue  # of one operation, not of a layer
            if engine == "triton" and rank.device.type == "cpu":
                absent["fusedtp triton"] = "engine triton is interpreted on a CPU: its time says nothing"
                continue
            block = parallelize(_block(case, case.dtype, rank.device), rank.mesh, engine=engine)
            modules[f"fusedtp {engine}"] = block
            functions[f"fusedtp {engine}"] = _with_layout(block, layout)
    sets = rank.copies(operands)
    ways: dict[str, Way] = {name: Rotating(_both(fn, modules[name]), sets) for name, fn in functions.items()}
    drop_what_fails(rank, ways, functions, absent)
    found = _errors(rank, case, functions, sets[0][0], layout)
    return rows_of(rank, NAME, case, ways, found, absent, flops=case.flops, roof=rank.roofs[case.dtype])


def _block(case: Case, dtype: str, device: torch.device) -> TransformerBlock:
    block = TransformerBlock(case.config(dtype), device=device)
    init_(block, seed=0)
    return block


def _with_layout(block: nn.Module, layout: TokenLayout) -> Callable[..., Tensor]:
    def run(x: Tensor) -> Tensor:
        y: Tensor = block(x, layout)
        return y

    return run


def _both(fn: Callable[..., Tensor], module: nn.Module) -> Callable[..., object]:
    parameters: list[Any] = list(module.parameters())

    def run(x: Tensor) -> object:
        y = fn(x)
        return torch.autograd.grad(y, [x, *parameters], y.detach())

    return run


def _errors(
    rank: Rank, case: Case, functions: dict[str, Callable[..., Tensor]], x: Tensor, layout: TokenLayout
) -> dict[str, dict[str, errors.Error]]:
    """Of the forward on rank 0's tokens, against the plain block in fp64 (on a GPU fp32 for 16 bits), relative to the
    largest entry.

    Each of the block's 12 roundings to the dtype, and of its fp32 sums of up to `intermediate` terms, is allowed once.
    """
    model, wide = case.sizes, "float64"
    if rank.device.type == "cuda" and case.dtype != "float32":
        wide = "float32"
    want, allowed = None, 1.0
    with torch.no_grad():
        if rank.rank == 0:
            block = _block(case, case.dtype, rank.device).to(getattr(torch, wide))
            exact = PlainBlock(block, case.config(wide), case.tokens, rank.device, repeats=True)
            generator = torch.Generator(rank.device).manual_seed(0)
            whole = torch.randn(case.tokens, model.hidden, generator=generator, device=rank.device)
            want = layout.take(exact(whole.to(x.dtype).to(getattr(torch, wide))))
            allowed = 12 * (errors.unit(x.dtype) + model.intermediate * errors.unit(torch.float32))
            allowed *= max(1.0, float(want.abs().max()))
            del exact, block, whole
    found: dict[str, dict[str, errors.Error]] = {}
    for name, fn in functions.items():
        y = fn(x).detach()  # with gradients, as it was compiled
        off = 0.0 if want is None else float((y.to(want.dtype) - want).abs().max())
        found[name] = {"error": errors.Error(*rank.worst(off, off / allowed))}
    return found
