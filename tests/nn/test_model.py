"""The whole model: causality, documents, loss, dtypes, checkpointing, compilation, names."""

import copy
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from fusedtp.nn import CausalLM, ModelConfig, TransformerBlock, generate, init_
from fusedtp.nn.recompute import Recompute, recompute_
from tests.nn.support import assert_close

SMALL = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "dtype": "float64",
    "param_dtype": "float64",
}
WIDE = {"attention_bias": True, "mlp_bias": True, "qk_norm": True}


def make(**changes: object) -> CausalLM:
    return init_(CausalLM(ModelConfig(**{**SMALL, **changes})), 0, std=0.3)  # type: ignore[arg-type,return-value]


def tokens(batch: int, length: int, seed: int = 1, vocab: int = 11) -> torch.Tensor:
    return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def gradients(model: CausalLM) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(grad is not None for grad in found.values())
    return {name: grad.clone() for name, grad in found.items() if grad is not None}


@settings(max_examples=20)
@given(st.integers(1, 8), st.integers(0, 7), st.none() | st.integers(1, 4), st.booleans())
def test_a_token_changes_nothing_that_may_not_see_it(
    length: int, changed: int, window: int | None, documents: bool
) -> None:
    changed %= length
    model = make(num_hidden_layers=1, sliding_window=window)
    ids = tokens(1, length)
    document_ids = torch.arange(length)[None] // 3 if documents else None
    other = ids.clone()
    other[0, changed] = (ids[0, changed] + 1) % 11
    a, b = (model(x, document_ids=document_ids).logits[0] for x in (ids, other))
    for place in range(length):
        sees = place >= changed and (window is None or place - changed < window)
        sees = sees and (not documents or place // 3 == changed // 3)
        assert torch.equal(a[place], b[place]) == (not sees), place


def test_sequences_of_a_batch_do_not_see_each_other() -> None:
    model, ids = make(), tokens(3, 5)
    together = model(ids).logits
    for row in range(3):
        assert_close("logits", together[row], model(ids[row : row + 1]).logits[0])


def test_packed_documents_are_the_separate_documents() -> None:
    """Two documents packed into one sequence, with positions that restart."""
    model, first, second = make(), tokens(1, 4, 1), tokens(1, 3, 2)
    packed = model(
        torch.cat((first, second), 1),
        positions=torch.tensor([[0, 1, 2, 3, 0, 1, 2]]),
        document_ids=torch.tensor([[0, 0, 0, 0, 1, 1, 1]]),
    ).logits
    assert_close("first", packed[:, :4], model(first).logits)
    assert_close("second", packed[:, 4:], model(second).logits)


@pytest.mark.parametrize("tied", [False, True])
def test_loss_is_cross_entropy_of_the_logits(tied: bool) -> None:
    model, ids, labels = make(tie_word_embeddings=tied, **WIDE), tokens(2, 5), tokens(2, 5, 2)
    labels[0, :2] = -100
    out = model(ids, labels, return_logits=True)
    assert out.logits.shape == (2, 5, 11)
    assert_close("loss", out.loss, F.cross_entropy(out.logits.flatten(0, 1), labels.flatten()))
    assert model(ids, labels).logits is None and model(ids).loss is None
    count = int((labels != -100).sum())
    parts = [model(ids[i : i + 1], labels[i : i + 1], num_labels=count).loss for i in range(2)]
    assert_close("sum of microbatches", sum(parts), out.loss)
    other = model(ids, labels.masked_fill(labels == -100, -5), ignore_index=-5).loss
    assert torch.equal(other, out.loss)


def test_loss_gradcheck_through_the_whole_model() -> None:
    """All custom backwards at once, against finite differences, for a few parameters of each kind."""
    model, ids, labels = (
        make(num_hidden_layers=1, tie_word_embeddings=True, **WIDE),
        tokens(1, 3),
        tokens(1, 3, 2),
    )
    model(ids, labels).loss.backward()
    for name, parameter in model.named_parameters():
        flat, step = parameter.data.view(-1), 1e-6
        assert parameter.grad is not None, name
        for index in {0, flat.numel() // 2, flat.numel() - 1}:
            kept, losses = flat[index].item(), []
            for sign in (1, -1):
                flat[index] = kept + sign * step
                losses.append(model(ids, labels).loss.item())
            flat[index] = kept
            slope = (losses[0] - losses[1]) / (2 * step)
            assert abs(slope - parameter.grad.view(-1)[index].item()) < 1e-7, (name, index)


@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_activation_checkpointing_changes_nothing(dropout: float, kind: Recompute) -> None:
    model, ids, labels = (
        make(residual_dropout=dropout, embedding_dropout=dropout),
        tokens(2, 5),
        tokens(2, 5, 2),
    )
    other = copy.deepcopy(model)
    recompute_(other.layers, kind)
    other = copy.deepcopy(other)  # the copy has its own blocks, not those of the original
    for each in (model, other):
        each.set_dropout(1, 2)
        each(ids, labels).loss.backward()
    want = gradients(model)
    for name, got in gradients(other).items():
        assert torch.equal(got, want[name]), name


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_a_backward_in_two_passes_computes_again_once(kind: Recompute) -> None:
    """As in zero-bubble schedules; torch's dropout draws the same numbers again."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.gate, self.down = (nn.Linear(6, 6, dtype=torch.float64) for _ in range(3))
            self.forwards = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.forwards += 1
            return x + F.dropout(self.down(self.up(x).sin() * self.gate(x).cos()), 0.5)

    torch.manual_seed(0)
    plain = Block()
    block = copy.deepcopy(plain)
    recompute_([block], kind, two_passes=True)
    xs = [torch.randn(4, 6, dtype=torch.float64, requires_grad=True)]
    xs.append(xs[0].detach().clone().requires_grad_())
    found = []
    for each, x in zip((plain, block), xs, strict=True):
        torch.manual_seed(1)
        y = each(x)
        after = torch.get_rng_state()
        (dx,), groups = stage_backward_input([y], [y.detach()], [x], each.parameters())
        stage_backward_weight(each.parameters(), groups)
        assert torch.equal(torch.get_rng_state(), after), "computing again draws from no later state"
        found.append((y, dx, *(p.grad for p in each.parameters())))
    assert all(map(torch.equal, *found)) and (plain.forwards, block.forwards) == (1, 2)
    weak = weakref.ref(found[1][0])
    del found, y, dx, groups, x, xs
    assert weak() is None, "what was kept for the second pass goes with the graph"


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 2])
def test_compiled_block_is_the_block(window: int | None) -> None:
    config = ModelConfig(**{**SMALL, "sliding_window": window}, qk_norm=True)  # type: ignore[arg-type]
    block = init_(TransformerBlock(config), 0, std=0.3)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    got, want = (torch.randn(6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) for _ in "ab")
    got.requires_grad_(), want.requires_grad_()
    for x, function in ((got, compiled), (want, block)):
        y = function(x)
        y.backward(torch.ones_like(y))
    assert_close("y", compiled(got), block(want))
    assert_close("dx", got.grad, want.grad)


@pytest.mark.slow
def test_compiled_model_is_the_model() -> None:
    model, ids, labels = make(residual_dropout=0.2), tokens(2, 5), tokens(2, 5, 2)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    frames = torch._dynamo.utils.counters["stats"]
    for step in range(4):
        model.set_dropout(0, step)
        assert_close("loss", compiled(ids, labels).loss, model(ids, labels).loss)
        if step == 0:
            graphs = frames["unique_graphs"]
    assert frames["unique_graphs"] == graphs, "a new step compiles a new graph"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_activations_over_fp32_parameters(dtype: str) -> None:
    model = make(dtype=dtype, param_dtype="float32", **WIDE)
    wide = make(dtype="float64", param_dtype="float32", **WIDE)
    ids, labels = tokens(2, 5), tokens(2, 5, 2)
    out = model(ids, labels, return_logits=True)
    out.loss.backward()
    assert out.logits.dtype == getattr(torch, dtype) and out.loss.dtype == torch.float32
    assert all(grad.dtype == torch.float32 for grad in gradients(model).values())
    want = wide(ids, labels, return_logits=True)
    error = ((out.logits.double() - want.logits).pow(2).mean() / want.logits.pow(2).mean()).sqrt().item()
    # A layer rounds 7 weights, 7 biases and 17 activations, the rest of the model 3, each by at most half an eps and
    # independently of the others.
    bound = math.sqrt(31 * model.config.num_hidden_layers + 3) / 2 * torch.finfo(out.logits.dtype).eps
    assert error <= bound, f"logits: rms error {error:.2e}, allowed {bound:.2e}"


@pytest.mark.parametrize("kind", ["residual_dropout", "embedding_dropout"])
def test_dropout_needs_a_step_and_follows_it(kind: str) -> None:
    model, ids, labels = make(**{kind: 0.3}), tokens(2, 5), tokens(2, 5, 2)
    with pytest.raises(ValueError, match="set_dropout"):
        model(ids, labels)
    losses = []
    for seed, step, first in ((0, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 10), (0, 0, 0)):
        model.set_dropout(seed, step, first)
        losses.append(model(ids, labels).loss.item())
    assert losses[0] == losses[4] and len(set(losses)) == 4
    assert model.eval()(ids, labels).loss.item() == make()(ids, labels).loss.item()


def test_zero_tokens() -> None:
    model = make()
    for batch, length in ((0, 5), (2, 0)):
        ids = tokens(batch, length)
        out = model(ids, ids, return_logits=True)
        out.loss.backward()
        assert out.loss.item() == 0.0 and out.logits.shape == (batch, length, 11)


def test_ids_may_be_bytes() -> None:
    ids = tokens(2, 5)
    assert torch.equal(make()(ids.to(torch.uint8)).logits, make()(ids).logits)


def test_names_are_those_of_llama() -> None:
    names = {name for name, _ in make(num_hidden_layers=1, **WIDE).named_parameters()}
    linears = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    norms = ["input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"]
    assert names == {
        "embed_tokens.weight",
        "norm.weight",
        "lm_head.weight",
        *(f"layers.0.{name}.{leaf}" for name in linears for leaf in ("weight", "bias")),
        *(f"layers.0.{name}.weight" for name in norms),
    }


def test_plan_names_every_linear_and_embedding() -> None:
    model = make()
    plan = {name.replace("*", str(i)) for name in model.tp_plan for i in range(2)}
    shared = {name for name, module in model.named_modules() if hasattr(module, "weight") and "norm" not in name}
    assert plan == shared


def test_state_dict_loads_and_holds_no_buffers() -> None:
    model, other = make(tie_word_embeddings=True), make(tie_word_embeddings=True)
    init_(other, 9)
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(tokens(2, 3)).logits, other(tokens(2, 3)).logits)
    assert not dict(model.named_buffers())


def test_tied_weights_stay_tied() -> None:
    model = make(tie_word_embeddings=True)
    made_late = CausalLM(model.config, device="meta").to_empty(device="cpu")
    for each in (model, copy.deepcopy(model), model.to(torch.float32), made_late):
        assert each.lm_head.weight is each.embed_tokens.weight
        assert "lm_head.weight" not in dict(each.named_parameters())


@pytest.mark.parametrize("bad", ["ids", "labels", "positions", "documents"])
def test_wrong_shapes_raise(bad: str) -> None:
    ids = tokens(2, 3)
    arguments = {
        "ids": (ids[0],),
        "labels": (ids, ids[:, :2]),
        "positions": (ids, ids, torch.arange(3)),
        "documents": (ids, ids, None, torch.arange(3)),
    }
    with pytest.raises(ValueError, match="shape"):
        make()(*arguments[bad])


@pytest.mark.slow
def test_it_learns() -> None:
    """Fifty steps on one repeated batch."""
    model = init_(CausalLM(ModelConfig(**{**SMALL, "dtype": "float32", "param_dtype": "float32"})), 0)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = tokens(4, 17)
    losses = []
    for _ in range(50):
        loss = model(ids[:, :-1], ids[:, 1:]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


def test_greedy_continuation_takes_the_most_likely_token() -> None:
    model, ids = make().train(), tokens(2, 3)
    out = generate(model, ids, 4)
    assert out.shape == (2, 7) and model.training
    for place in range(3, 7):
        assert torch.equal(out[:, place], model(out[:, :place]).logits[:, -1].argmax(-1))


def test_sampling_repeats_for_a_seed_and_follows_the_distribution() -> None:
    model, ids = make().eval(), tokens(1, 3).expand(4096, 3)
    once, again = (generate(model, ids, 1, temperature=1.5, seed=3) for _ in range(2))
    assert torch.equal(once, again)
    want = (model(ids[:1]).logits[0, -1] / 1.5).softmax(-1)
    got = once[:, -1].bincount(minlength=11) / 4096
    assert (got - want).abs().max() < 0.04
    few = generate(model, ids, 1, temperature=1.5, top_k=2, seed=3)[:, -1].unique()
    assert set(few.tolist()) == set(want.topk(2).indices.tolist())


def test_context_is_cut() -> None:
    model, ids = make(), tokens(1, 6)
    assert torch.equal(generate(model, ids, 1, max_context=2)[:, -1], generate(model, ids[:, -2:], 1)[:, -1])
    with pytest.raises(ValueError, match="S at least 1"):
        generate(model, ids[:, :0], 1)
