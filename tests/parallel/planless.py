"""Small models without a plan: blocks as in timm and nanoGPT, and one whose packed projection cannot be split."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops.layers.torch import Rearrange
from torch import Tensor, nn

WIDTH, HEADS = 32, 4


class TimmAttention(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(dim, dim * 3)
        self.q_norm, self.k_norm = nn.LayerNorm(self.head_dim), nn.LayerNorm(self.head_dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


class TimmMlp(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class TimmBlock(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), TimmAttention(dim, num_heads)
        self.norm2, self.mlp = nn.LayerNorm(dim), TimmMlp(dim, 2 * dim)
        self.gamma = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gamma * self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TimmViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, WIDTH, 4, 4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.zeros(1, 17, WIDTH))
        self.blocks = nn.Sequential(*(TimmBlock(WIDTH, HEADS) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch_embed(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


class NanoAttention(nn.Module):
    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.n_head, self.n_embd = n_head, n_embd

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.c_attn(x).split(self.n_embd, dim=2)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = (y.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for y in self.parts(x))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class ChunkedAttention(NanoAttention):
    """chunk computes a third of the width from the tensor, not from an attribute."""

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.c_attn(x).chunk(3, dim=2)


@dataclass
class GroupedConfig:
    """What GroupedByConfig reads, as in LitGPT."""

    n_head: int
    n_query_groups: int
    head_size: int


class GroupedAttention(nn.Module):
    """Queries of all heads, then keys and values of one, in one projection, as in GPT-BigCode."""

    pairs = False  # True: two queries for each key and value

    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads = (2 * n_head, n_head) if self.pairs else (n_head, 1)
        self.embed_dim, self.head_dim = n_embd, n_embd // self.num_heads
        self.attn = nn.Linear(n_embd, n_embd + 2 * self.num_key_value_heads * self.head_dim)
        self.proj = nn.Linear(n_embd, n_embd)

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        few = self.num_key_value_heads * self.head_dim
        return self.attn(x).split((self.embed_dim, few, few), dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in self.parts(x))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.proj(y.transpose(1, 2).flatten(2))


class GroupedPairs(GroupedAttention):
    """Two queries for each key and value, as in LitGPT."""

    pairs = True


class GroupedByConfig(GroupedPairs):
    """The numbers of heads come from a config."""

    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__(n_embd, n_head)
        self.config = GroupedConfig(self.num_heads, self.num_key_value_heads, self.head_dim)
        del self.num_heads, self.num_key_value_heads, self.embed_dim

    def forward(self, x: Tensor) -> Tensor:
        size, heads, few = self.config.head_size, self.config.n_head, self.config.n_query_groups
        B, T, _ = x.size()
        q, k, v = self.attn(x).split((heads * size, few * size, few * size), dim=-1)
        q = q.view(B, T, heads, size).transpose(1, 2)
        k, v = (y.view(B, T, few, size).transpose(1, 2).repeat_interleave(heads // few, 1) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(B, T, heads * size))


@dataclass
class WidthConfig:
    """The width of a head follows from the number of heads."""

    n_head: int
    n_query_groups: int
    n_embd: int

    @property
    def head_size(self) -> int:
        return self.n_embd // self.n_head


class GroupedByProperty(GroupedByConfig):
    """The code has a name of its own for the config."""

    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__(n_embd, n_head)
        self.config = WidthConfig(self.config.n_head, self.config.n_query_groups, n_embd)  # type: ignore[assignment]

    def forward(this, x: Tensor) -> Tensor:
        cfg = this.config
        q, k, v = (
            this.attn(x)
            .unflatten(-1, (-1, cfg.head_size))
            .transpose(1, 2)
            .split((cfg.n_head, cfg.n_query_groups, cfg.n_query_groups), dim=1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return this.proj(y.transpose(1, 2).flatten(2))


class GroupByGroup(GroupedPairs):
    """Each group of queries comes with its key and value, as in Falcon 40B: a contiguous split keeps groups whole."""

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        groups = self.attn(x).unflatten(-1, (-1, self.num_heads // self.num_key_value_heads + 2, self.head_dim))
        return tuple(y.flatten(-3) for y in (groups[..., :-2, :], groups[..., -2:-1, :], groups[..., -1:, :]))


class InterleavedAttention(NanoAttention):
    """Every third feature belongs to the queries, in an order that no contiguous split can keep."""

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.c_attn(x).roll(5, -1)
        return y[..., 0::3], y[..., 1::3].flip(-1), y[..., 2::3]


class Gated(nn.Module):
    """Gate and up projections in one matrix."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w12, self.w3 = nn.Linear(dim, 4 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w12(x).chunk(2, dim=-1)
        return self.w3(F.silu(gate) * up)


class NormedAttention(nn.Module):
    """Normalizes queries and keys over the features of all heads, one with weights and one without."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.q_norm, self.k_norm = nn.RMSNorm(dim, eps=1e-3), nn.RMSNorm(dim, elementwise_affine=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = (
            y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for y in (self.q_norm(self.q(x)), self.k_norm(self.k(x)), self.v(x))
        )
        return self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))


class SideBySide(nn.Module):
    """Attention and a gated MLP on the same input; one last layer takes both outputs."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.norm = num_heads, nn.LayerNorm(dim)
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))
        self.gate, self.up = nn.Linear(dim, 3 * dim), nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        heads = (layer(h).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attention = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.out(torch.cat([attention, F.silu(self.gate(h)) * self.up(h)], dim=-1))


class Core(nn.Module):
    """Attention without parameters that merges heads by their number."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_attention_heads = num_heads

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(q, k, v, bias)
        return y.transpose(1, 2).reshape(*q.shape[:1], -1, self.num_attention_heads * q.shape[-1])


class HeadsBeside(nn.Module):
    """The number of heads is known to layers of einops and to an inner module, and parameters have a part a head."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.by_heads = Rearrange("b n (h d) -> b h n d", h=num_heads)
        self.core = Core(num_heads)
        self.temperature = nn.Parameter(torch.ones(num_heads, 1, 1))
        self.table = nn.Parameter(torch.zeros(9, num_heads))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.by_heads(layer(x)) for layer in (self.q, self.k, self.v))
        at = torch.arange(x.shape[1], device=x.device)
        bias = self.table[(at[:, None] - at).clamp(-4, 4) + 4].permute(2, 0, 1)
        return x + self.out(self.core(q * self.temperature, k, v, bias[None]))


class Biased(nn.Module):
    """Attention whose scores get a bias of all heads, [..., S, S] with one for each head somewhere before.

    It comes as an argument, from a table of its own (as in the first layer of T5, which passes it on), or from a module
    beside the layers. Another table, of distances, is common to all heads.
    """

    def __init__(
        self, dim: int, heads: int, *, table: bool = False, inside: bool = False, common: bool = False
    ) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.table = nn.Embedding(9, heads) if table else None
        self.relative = BiasOfHeads(heads) if inside else None
        self.common = nn.Embedding(9, dim // heads) if common else None

    def forward(self, x: Tensor, bias: Tensor | None = None, scale: float = 1.0) -> tuple[Tensor, Tensor | None]:
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if bias is None and self.table is not None:
            bias = self.table(distances(x)).permute(2, 0, 1)[None]
        if bias is None and self.relative is not None:
            bias = self.relative(x)
        scores = scale * q @ k.mT
        if bias is not None and bias.dim() == 3:  # samples x heads, as in BLOOM, or heads
            bias = bias.view(-1, self.heads, *bias.shape[1:])
        if bias is not None:
            scores = scores + bias
        if self.common is not None:
            scores = scores + torch.einsum("bhqd,qkd->bhqk", q, self.common(distances(x)))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)), bias


class BiasOfHeads(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(9, heads))

    def forward(self, x: Tensor) -> Tensor:
        return self.rows[distances(x)].permute(2, 0, 1)[None]


def distances(x: Tensor) -> Tensor:
    """[S, S] in 0 ... 8"""
    at = torch.arange(x.shape[1], device=x.device)
    return (at[:, None] - at).clamp(-4, 4) + 4


class BiasedBlock(nn.Module):
    """A Biased that adds to its input, with a bias from one of its own modules."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attn = Biased(dim, heads, inside=True, common=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(x)[0]


class SharedBias(nn.Module):
    """As in T5: the first layer computes a bias of all heads from its table, the others get it."""

    def __init__(self, heads: int = 8) -> None:
        super().__init__()
        self.wte, self.lm_head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50)
        self.h = nn.ModuleList(Biased(WIDTH, heads, table=i == 0) for i in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x, bias = self.wte(ids), None
        for block in self.h:
            y, bias = block(x, bias=bias)
            x = x + y
        return self.lm_head(x)


class WithAlibi(Biased):
    def forward(self, x: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, bias)[0]


class Alibi(nn.Module):
    """As in BLOOM: the model computes a bias of all heads, [B heads, 1, S], and all layers get it by position."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.lm_head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50)
        self.h = nn.ModuleList(WithAlibi(WIDTH, HEADS) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids)
        slopes = torch.arange(1, HEADS + 1, device=x.device, dtype=x.dtype) / HEADS
        bias = (slopes[:, None, None] * torch.arange(x.shape[1], device=x.device)).repeat(len(x), 1, 1)
        for block in self.h:
            x = x + block(x, bias)
        return self.lm_head(x)


class Chain(nn.Module):
    """Token ids through these blocks."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.wte, self.lm_head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50)
        self.h = nn.ModuleList(block(WIDTH, HEADS) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids)
        for block in self.h:
            x = block(x)
        return self.lm_head(x)


class Idle(HeadsBeside):
    """What only an argument that trials do not pass uses is as long as there are heads, without being theirs."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.level = nn.Parameter(torch.ones(num_heads))
        self.grid = Rearrange("b (h w) d -> b h w d", h=num_heads)

    def forward(self, x: Tensor, level: int | None = None) -> Tensor:
        x = super().forward(x)
        return x if level is None else x * self.level[level] + self.grid(x).mean(1, keepdim=True).flatten(1, 2).mean()


class HeadByFunction(nn.Module):
    """An MLP and a head that is a function of the model, which deepcopy does not copy: its table is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.up, self.down = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        self.to_logits = lambda x: x @ self.wte.weight.t()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids)
        return self.to_logits(x + self.down(self.up(x).relu()))


class GradientByHeads(nn.Module):
    """An MLP whose attribute scales only a gradient, of its input or of a bias; its output does not depend on it."""

    def __init__(self, of_input: bool) -> None:
        super().__init__()
        self.of_input, self.num_heads = of_input, HEADS
        self.fc1, self.fc2 = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        scaled = x if self.of_input else self.bias
        return self.fc2(self.fc1(x).relu()) + self.num_heads * (scaled - scaled.detach())


class NanoGPT(nn.Module):
    def __init__(self, attention: type[NanoAttention] = NanoAttention, gated: bool = False) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(50, WIDTH), nn.Embedding(16, WIDTH)
        self.h = nn.ModuleList(
            nn.ModuleDict(
                {
                    "ln_1": nn.LayerNorm(WIDTH),
                    "attn": attention(WIDTH, HEADS),
                    "ln_2": nn.LayerNorm(WIDTH),
                    "mlp": Gated(WIDTH)
                    if gated
                    else nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH)),
                }
            )
            for _ in range(2)
        )
        self.lm_head = nn.Linear(WIDTH, 50, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx: Tensor) -> Tensor:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for layer in self.h:
            x = x + layer["attn"](layer["ln_1"](x))
            x = x + layer["mlp"](layer["ln_2"](x))
        return self.lm_head(x)


class Modulated(nn.Module):
    """A norm whose scale and shift come from one vector of the sample."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(dim, elementwise_affine=False), nn.Linear(dim, 2 * dim)

    def forward(self, x: Tensor, vector: Tensor) -> Tensor:
        scale, shift = self.linear(F.silu(vector))[:, None].chunk(2, dim=-1)
        return self.norm(x) * (1 + scale) + shift


class JointAttention(nn.Module):
    """Attention over tokens of an image and of a text together; with one kind alone, its layers for the other idle."""

    def __init__(self, dim: int, num_heads: int, last: bool) -> None:
        super().__init__()
        self.num_heads, self.last = num_heads, last
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim) for _ in range(3))
        self.add_q, self.add_k, self.add_v = (nn.Linear(dim, dim) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(dim, dim), nn.Dropout(0.0)])
        if not last:
            self.to_add_out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, text: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        parts = [(x, self.to_q, self.to_k, self.to_v)]
        if text is not None:
            parts.append((text, self.add_q, self.add_k, self.add_v))
        q, k, v = (torch.cat([part[i](part[0]) for part in parts], dim=1) for i in (1, 2, 3))
        heads = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        image, rest = y.split([x.shape[1], y.shape[1] - x.shape[1]], dim=1)
        image = self.to_out[1](self.to_out[0](image))
        return image, self.to_add_out(rest) if text is not None and not self.last else None


class JointBlock(nn.Module):
    def __init__(self, dim: int, num_heads: int, last: bool) -> None:
        super().__init__()
        self.norm, self.norm_text = Modulated(dim), Modulated(dim)
        self.attn = JointAttention(dim, num_heads, last)
        self.ff = nn.Sequential(nn.Linear(dim, 48), nn.GELU(), nn.Linear(48, dim))

    def forward(self, x: Tensor, text: Tensor, vector: Tensor) -> tuple[Tensor, Tensor]:
        image, more = self.attn(self.norm(x, vector), self.norm_text(text, vector))
        x = x + image
        return x + self.ff(x), text if more is None else text + more


class Diffusion(nn.Module):
    """A diffusion transformer, as Stable Diffusion 3's: its inputs cannot be guessed."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.caption, self.step = nn.Linear(4, WIDTH), nn.Linear(12, WIDTH), nn.Linear(1, WIDTH)
        self.blocks = nn.ModuleList(JointBlock(WIDTH, HEADS, last) for last in (False, False, True))
        self.out = nn.Linear(WIDTH, 4)

    def forward(self, latent: Tensor, caption: Tensor, step: Tensor) -> Tensor:
        x, text, vector = self.patches(latent), self.caption(caption), self.step(step[:, None])
        for block in self.blocks:
            x, text = block(x, text, vector)
        return self.out(x)

    @staticmethod
    def example(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(3)
        latent, caption = (torch.randn(2, n, k, generator=generator) for n, k in ((8, 4), (6, 12)))
        return {name: x.to(dtype) for name, x in (("latent", latent), ("caption", caption), ("step", torch.ones(2)))}
