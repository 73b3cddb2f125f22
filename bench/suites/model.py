"""Suites of a model's parts: its output head with the loss, and a Transformer block, forward and backward.

linear-cross-entropy   computed without [T, V] logits; speed and peak memory. Counts the FLOPs of three matmuls of
                       T x K x V, over all ranks: logits, dx, dw

    one rank        x [T, K], w [V, K]: against torch with all logits, compiled and eager, and Liger-Kernel
    several ranks   x [T_r, K], w [V_r, K], V split over ranks as by torch.chunk: against all logits [T, V_r] computed
                    with the group's collectives and torch's operations, see `Unfused`

block                  against the same block in plain torch, and its parallel form. Counts the FLOPs of the matmuls,
                       three times the forward's, and of causal attention's two products

    one rank        fusedtp's block against plain torch's modules, eager and compiled
    several ranks   fusedtp.parallelize with each engine; W times the flops of a rank
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from fusedtp.nn import ModelConfig, TokenLayout, TransformerBlock, init_
from fusedtp.nn.linear_loss import linear_cross_entropy
from fusedtp.nn.rope import rotary_tables
from fusedtp.ops.rows import Rows, split
from fusedtp.ops.shards import gather_rows
from fusedtp.parallel import parallelize

from .. import errors, rivals
from ..cases import Case, even, model_cases
from ..options import Plan
from ..rank import Rank
from ..rivals import matmul
from ..rows import Row
from ..shapes import Model
from ..ways import INTERPRETED, Ways

LOSS, BLOCK = "linear-cross-entropy", "block"


# -- output head and loss --------------------------------------------------------------------------------------------


def loss_cases(plan: Plan, tp: int) -> list[Case]:
    """Every model. Raises ValueError for tokens that do not split evenly."""
    sizes: dict[str, Callable[[Model], int]] = dict(K=lambda model: model.hidden, V=lambda model: model.vocab)
    return even(model_cases(LOSS, plan, tp, **sizes), LOSS)


def plain(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    """The loss from all logits."""
    return F.cross_entropy((x @ w.t()).float(), labels)


class Unfused(Function):
    """x [T_r, K], w [V_r, K], labels [T] -> the mean loss, by collectives and torch's operations one after another.

    forward    gather x; all logits; over ranks their maximum, then the sums of exponentials and of the labels' logits
    backward   softmax - onehot in the dtype; dw; dx, summed over ranks
    Source: Shoeybi et al. 2019, section 3.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, labels: Tensor, start: int, hand: Any) -> Tensor:
        full = hand.gather(x)
        logits = matmul(full, w).float()
        top = logits.max(1).values
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=hand.group)
        logits -= top[:, None]
        here = (labels >= start) & (labels < start + w.shape[0])
        column = (labels - start).where(here, 0)
        target = logits.gather(1, column[:, None])[:, 0] * here
        sums = torch.stack([logits.exp_().sum(1), target])
        dist.all_reduce(sums, group=hand.group)
        ctx.save_for_backward(logits, sums[0], column, here, full, w)
        ctx.hand = hand
        return (sums[0].log() - sums[1]).mean()

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Any, ...]:
        exponentials, total, column, here, full, w = ctx.saved_tensors
        gradient = exponentials.div_(total[:, None])
        gradient.scatter_add_(1, column[:, None], -here.to(gradient.dtype)[:, None])
        gradient = gradient.mul_(dloss / len(here)).to(w.dtype)
        dx = ctx.hand.reduce_scatter(matmul(gradient, w.t()))
        return dx, matmul(gradient.t(), full.t()), None, None, None


def exact(rank: Rank, rows: Rows, start: int, x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    """The loss in fp64, in blocks of rows. Collective."""
    comm, weight = rank.comm, w.detach().double()
    full = x.detach() if comm is None else gather_rows(comm, x.detach(), rows)
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for some, wanted in zip(full.split(1024), labels.split(1024)):
        logits = some.double() @ weight.t()
        here = (wanted >= start) & (wanted < start + w.shape[0])
        target = logits.gather(1, (wanted - start).where(here, 0)[:, None])[:, 0] * here
        stats = torch.stack([logits.logsumexp(1), target], 1)
        if comm is not None:
            stats = comm.all_gather(stats, (len(some),) * comm.world_size)
        stats = stats.view(-1, len(some), 2)
        total += (stats[..., 0].logsumexp(0) - stats[..., 1].sum(0)).sum()
    return total / len(labels)


def measure_loss(rank: Rank, case: Case) -> list[Row]:
    """Result rows of one case. The rows of x and the vocabulary are split over ranks. Collective."""
    k, v = case.model.hidden, case.model.vocab
    rows, vocab = Rows(split(case.tokens, rank.world_size)), split(v, rank.world_size)
    start, mine = sum(vocab[: rank.rank]), vocab[rank.rank]

    def operands(seed: int) -> tuple[Tensor, ...]:
        x = rank.randn(rows.local(rank.rank), k, dtype=case.dtype, seed=2 * seed)
        w = rank.randn(mine, k, dtype=case.dtype, seed=2 * seed + 1, scale=k**-0.5)
        labels = torch.randint(v, (case.tokens,), generator=torch.Generator().manual_seed(seed))
        return x.requires_grad_(), w.requires_grad_(), labels.to(rank.device)

    ways = Ways(rank, LOSS, case)
    if rank.comm is None:
        ways.add("torch", plain)
        ways.add("fusedtp", linear_cross_entropy)
        ways.add("torch.compile", *rivals.compiled(plain, rank.device, rank.plan.compile))
        ways.add("Liger-Kernel", *liger(rank.device))
    else:
        group = rank.group
        hand, why = rivals.by_hand(group, rank.device)
        unfused = _unfused(hand, start) if hand is not None else None
        ways.add(f"{rivals.collective_name(rank.device)} + torch", unfused, why)
        ways.add(
            "fusedtp",
            lambda x, w, labels: linear_cross_entropy(x, w, labels, group, sizes=rows.sizes, vocab_size=v),
        )
    sets = rank.copies(operands)
    want = exact(rank, rows, start, *sets[0])
    ways.prepare(sets, lambda _, fn: _gradients(fn))
    # A logit is a sum of K products of size K^-1/2 each, rounded once; the error of the loss is at most a logit's.
    allowed = 4 * (errors.unit(sets[0][0].dtype) + (k + v) * errors.unit(torch.float32))
    found: dict[str, dict[str, Any]] = {}
    for name, fn in ways.functions.items():
        # With gradients enabled, as when it was compiled.
        off = float((fn(*sets[0]).detach().double() - want).abs())
        error = errors.Error(*rank.worst(off, off / (allowed * max(1.0, float(want)))))
        found[name] = {"error": error, "peak_bytes": errors.peak_bytes(rank, ways.timed[name])}
    return ways.rows(found, flops=6.0 * case.tokens * k * v, roof=rank.roofs[case.dtype])


def _unfused(hand: Any, start: int) -> Callable[..., Tensor]:
    def loss(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
        y: Tensor = Unfused.apply(x, w, labels, start, hand)
        return y

    return loss


def liger(device: torch.device) -> rivals.Found:
    """Liger-Kernel's loss with its defaults."""
    function, why = rivals.liger("fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction", device)
    if function is None:
        return None, why

    def loss(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
        made: Any = function.apply(x, w, labels)
        y: Tensor = made[0] if isinstance(made, tuple) else made
        return y

    return loss, ""


def _gradients(fn: Callable[..., Tensor]) -> Callable[..., object]:
    return lambda x, w, labels: torch.autograd.grad(fn(x, w, labels), [x, w])


# -- block -----------------------------------------------------------------------------------------------------------


def block_cases(plan: Plan, tp: int) -> list[Case]:
    """One sequence of T tokens through one block of every model."""
    return model_cases(BLOCK, plan, tp)


def config_of(model: Model, dtype: str) -> ModelConfig:
    return ModelConfig(
        hidden_size=model.hidden, intermediate_size=model.intermediate, num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads, head_dim=model.head_dim, num_hidden_layers=1,
        dtype=dtype, param_dtype=dtype,  # type: ignore[arg-type]
    )  # fmt: skip


def block_flops(case: Case) -> float:
    model = case.model
    queries, keys = model.heads * model.head_dim, 2 * model.kv_heads * model.head_dim
    weights = model.hidden * (2 * queries + keys + 3 * model.intermediate)
    return float(3.0 * (2.0 * case.tokens * weights + 2.0 * case.tokens**2 * queries))


class PlainBlock(nn.Module):
    """The same block from torch's own modules and functions, with fusedtp's weights, also cast at use.

    tokens    total of `batch` sequences of equal length
    repeats   kv heads are repeated instead of grouped: attention in fp32 then needs no [T, T] scores on a GPU
    """

    def __init__(
        self,
        ours: TransformerBlock,
        config: ModelConfig,
        tokens: int,
        device: torch.device,
        repeats: bool = False,
        batch: int = 1,
    ) -> None:
        super().__init__()
        self.repeats, self.batch = repeats, batch
        self.config, self.eps = config, config.rms_norm_eps
        self.weights = nn.ParameterDict({name.replace(".", "/"): p for name, p in ours.named_parameters()})
        cos, sin = rotary_tables(
            TokenLayout(1, tokens // batch),
            config.head_dim or 0,
            config.rope_theta,
            None,
            device,
            config.compute_dtype,
        )
        self.cos, self.sin = cos.transpose(1, 2), sin.transpose(1, 2)  # [1, 1, length, D/2]

    def _weight(self, name: str) -> Tensor:
        found: Tensor = self.weights[f"{name}/weight"]
        return found.to(self.config.compute_dtype)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self._weight(name), self.eps)

    def _heads(self, x: Tensor, name: str) -> Tensor:
        y = F.linear(x, self._weight(f"self_attn/{name}"))
        length = x.shape[0] // self.batch
        return y.view(self.batch, length, -1, self.config.head_dim or 0).transpose(1, 2)

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
        y = F.scaled_dot_product_attention(self._rotate(q), self._rotate(k), v, is_causal=True, enable_gqa=grouped)
        x = x + F.linear(y.transpose(1, 2).flatten(2).flatten(0, 1), self._weight("self_attn/o_proj"))
        normed = self._norm(x, "post_attention_layernorm")
        gate, up = (F.linear(normed, self._weight(f"mlp/{name}_proj")) for name in ("gate", "up"))
        return x + F.linear(F.silu(gate) * up, self._weight("mlp/down_proj"))


def measure_block(rank: Rank, case: Case) -> list[Row]:
    """Result rows of one case. Collective."""
    sizes = split(case.tokens, rank.world_size)
    layout = TokenLayout(1, case.tokens, sizes if rank.world_size > 1 else (), rank.rank)

    def operands(seed: int) -> tuple[Tensor, ...]:
        # All ranks draw the same tokens; each takes its part.
        generator = torch.Generator(rank.device).manual_seed(seed)
        x = torch.randn(case.tokens, case.model.hidden, generator=generator, device=rank.device)
        return (layout.take(x).to(getattr(torch, case.dtype)).requires_grad_(),)

    ways, modules = Ways(rank, BLOCK, case), dict[str, nn.Module]()
    if rank.world_size == 1:
        ours = _block(case, case.dtype, rank.device)
        plain = PlainBlock(ours, config_of(case.model, case.dtype), case.tokens, rank.device)
        modules = {"torch": plain, "fusedtp": ours, "torch.compile": plain}
        ways.add("torch", plain)
        ways.add("fusedtp", lambda x: ours(x))
        ways.add("torch.compile", *rivals.compiled(plain, rank.device, rank.plan.compile))
    else:
        for engine in rank.plan.engines:
            if engine in ("triton-copy", "multimem"):
                continue  # triton-copy: one operation, not a layer; multimem: layers without sequence parallelism
            block = None
            if engine != "triton" or rank.device.type != "cpu":
                block = parallelize(_block(case, case.dtype, rank.device), rank.mesh, engine=engine)
                modules[f"fusedtp {engine}"] = block
            ways.add(f"fusedtp {engine}", block and _with_layout(block, layout), INTERPRETED)
    sets = rank.copies(operands)
    ways.prepare(sets, lambda name, fn: _both(fn, modules[name]))
    found = _errors(rank, case, ways.functions, sets[0][0], layout)
    return ways.rows(found, flops=block_flops(case), roof=rank.roofs[case.dtype])


def _block(case: Case, dtype: str, device: torch.device) -> TransformerBlock:
    block = TransformerBlock(config_of(case.model, dtype), device=device)
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
    """The error of the forward on rank 0's tokens against the plain block in fp64 (on a GPU, fp32 for 16 bits),
    relative to the largest entry.

    Allows each of the block's 12 roundings to the dtype, and of its fp32 sums of up to `intermediate` terms, once.
    """
    model, wide = case.model, "float64"
    if rank.device.type == "cuda" and case.dtype != "float32":
        wide = "float32"
    want, allowed = None, 1.0
    with torch.no_grad():
        if rank.rank == 0:
            block = _block(case, case.dtype, rank.device).to(getattr(torch, wide))
            exact = PlainBlock(block, config_of(model, wide), case.tokens, rank.device, repeats=True)
            generator = torch.Generator(rank.device).manual_seed(0)
            whole = torch.randn(case.tokens, model.hidden, generator=generator, device=rank.device)
            want = layout.take(exact(whole.to(x.dtype).to(getattr(torch, wide))))
            allowed = 12 * (errors.unit(x.dtype) + model.intermediate * errors.unit(torch.float32))
            allowed *= max(1.0, float(want.abs().max()))
            del exact, block, whole
    found: dict[str, dict[str, errors.Error]] = {}
    for name, fn in functions.items():
        y = fn(x).detach()  # with gradients enabled, as when it was compiled
        off = 0.0 if want is None else float((y.to(want.dtype) - want).abs().max())
        found[name] = {"error": errors.Error(*rank.worst(off, off / allowed))}
    return found
