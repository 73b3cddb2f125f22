"""torch's nn.MultiheadAttention, split by heads, beside the same one on one device: outputs, weights, every gradient.

In float64 with random values. A value goes through four matmuls and a softmax; each sum has at most 32 terms, so errors
relative to the largest value stay far below 1e-12.
"""

import copy
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fusedtp
from fusedtp.comm import VirtualWorld, communicator
from fusedtp.parallel.foreign import Model
from fusedtp.parallel.foreign_plan import adopt, foreign_steps
from fusedtp.parallel.infer import infer
from fusedtp.parallel.multihead import WORD
from fusedtp.parallel.token_shard import TokenShard, shard
from tests.harness import world
from tests.parallel.support import tp_mesh
from tests.sampling import examples

OFF = 1e-12
HEADS, WIDTH = 4, 8  # 4 heads of 2 features


class Layer(nn.Module):
    """An attention whose inputs are arguments by name; equal names of inputs are the same tensor."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, dtype=torch.float64, **options)

    def forward(self, inputs: dict[str, Tensor], names: tuple[str, str, str], **options: Any) -> Any:
        return self.attn(*(inputs[name] for name in names), **options)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape)))


def made(**options: Any) -> Layer:
    layer = Layer(**options).eval()
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=i))
    return layer


def results(layer: nn.Module, inputs: dict[str, Tensor], names: Any, options: dict[str, Any], comm: Any = None) -> Any:
    """Output, weights and all gradients by name. comm: the ranks that share the tokens of the inputs; None: none do."""
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    masks = {
        name: x.clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in options.items()
    }
    given = leaves
    if comm is not None:
        place = (comm.name, comm.rank, comm.world_size)
        given = {name: shard(x, *place, Model().gathered) for name, x in leaves.items()}
    y, weights = layer(given, names, **masks)
    y = y.full_tensor() if isinstance(y, TokenShard) else y
    found = {"output": y} | ({} if weights is None else {"weights": weights})
    loss = sum((x * normal(*x.shape, seed=9)).sum() for x in found.values())
    assert isinstance(loss, Tensor)
    loss.backward()
    learned = {name: x for name, x in masks.items() if isinstance(x, Tensor) and x.requires_grad}
    grads = {f"gradient of {name}": x.grad for name, x in [*leaves.items(), *learned.items()]}
    grads |= {f"gradient of {name}": x.grad for name, x in layer.named_parameters()}
    return {name: x.detach() for name, x in (found | grads).items() if x is not None}


def check(
    size: int, layer: nn.Module, inputs: dict[str, Tensor], names: Any, options: dict[str, Any], tokens: bool
) -> None:
    want = results(copy.deepcopy(layer), inputs, names, options)

    def of_rank(group: Any) -> dict[str, Tensor]:
        own = copy.deepcopy(layer)
        how: dict[str, Any] = {"engine": "collective", "sequence_parallel": tokens}
        steps = foreign_steps(own, {"attn": WORD}, size, False, Model(), True, **how)
        ways = {f"gradient of {s.name}.{k}": w for s in steps for k, w in s.style.ways(s.module, size).items()}
        adopt(own, group, {"attn": WORD}, complete=True, **how)
        found = results(own, inputs, names, options, communicator(group) if tokens else None)
        parts = {name: ways[name].part(x, (group.rank(),)) if name in ways else x for name, x in want.items()}
        assert found.keys() == parts.keys()
        return {name: (found[name] - x).abs() / max(float(want[name].abs().max()), 1.0) for name, x in parts.items()}

    for errors in VirtualWorld(size).run(of_rank):
        assert {name: float(x.max()) for name, x in errors.items() if x.numel() and float(x.max()) > OFF} == {}


NAMES = [("q", "q", "q"), ("q", "k", "k"), ("q", "q", "v"), ("q", "k", "v"), ("q", "k", "q")]


@pytest.mark.slow
@settings(max_examples=examples(150, 40))
@given(data=st.data())
def test_equals_torch_on_one_device(data: st.DataObject) -> None:
    draw = data.draw
    first, tokens = draw(st.booleans(), label="batch_first"), draw(st.booleans(), label="tokens")
    names = draw(st.sampled_from(NAMES), label="names")
    batch = draw(st.sampled_from([None, 1, 3]), label="batch")
    length = draw(st.integers(1, 5), label="length")
    keys = length if names[0] in names[1:] or names == ("q", "q", "v") else draw(st.integers(1, 6), label="keys")
    widths = {"q": WIDTH, "k": WIDTH, "v": WIDTH}
    options = {
        "batch_first": first, "bias": draw(st.booleans(), label="bias"),
        "add_bias_kv": draw(st.booleans(), label="add_bias_kv"),
        "add_zero_attn": draw(st.booleans(), label="add_zero_attn"),
    }  # fmt: skip
    if names == ("q", "k", "v") and draw(st.booleans(), label="other widths"):
        widths |= {"k": 6, "v": 5}
        options |= {"kdim": 6, "vdim": 5}

    def tensor(name: str) -> Tensor:
        n = length if name == "q" else keys
        lead = (n,) if batch is None else (batch, n) if first else (n, batch)
        return normal(*lead, widths[name], seed=ord(name))

    inputs = {name: tensor(name) for name in dict.fromkeys(names)}
    call: dict[str, Any] = {
        "need_weights": draw(st.booleans(), label="need_weights"),
        "average_attn_weights": draw(st.booleans(), label="average"),
    }
    of_mask = draw(st.sampled_from(["none", "causal", "bool", "float", "by head"]), label="mask")
    rows = (1 if batch is None else batch) * HEADS
    if of_mask == "causal":
        call |= {"attn_mask": torch.ones(length, keys).triu(1).bool(), "is_causal": length == keys}
    elif of_mask == "bool":
        call["attn_mask"] = normal(length, keys, seed=3) > 0.5
        call["attn_mask"][:, 0] = False  # a row without any key is not a number
    elif of_mask == "float":
        call["attn_mask"] = normal(length, keys, seed=3)
    elif of_mask == "by head":
        call["attn_mask"] = normal(rows, length, keys, seed=3)
    if draw(st.booleans(), label="padding"):
        shape = (keys,) if batch is None else (batch, keys)
        floats = isinstance(call.get("attn_mask"), Tensor) and call["attn_mask"].is_floating_point()
        call["key_padding_mask"] = normal(*shape, seed=4) if floats else normal(*shape, seed=4) > 0.5
        if not floats:
            call["key_padding_mask"][..., 0] = False
    check(draw(st.sampled_from([1, 2, 4]), label="ranks"), made(**options), inputs, names, call, tokens)


# --- in models --------------------------------------------------------------------------------------------------


def transformer() -> tuple[nn.Module, dict[str, Tensor]]:
    """torch's encoder-decoder, tokens first, with a mask, and inputs for it."""
    torch.manual_seed(0)
    model = nn.Transformer(16, HEADS, 2, 2, 24, dropout=0.0, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64)
    return model, {"src": normal(6, 3, 16), "tgt": normal(4, 3, 16), "tgt_mask": mask, "tgt_is_causal": True}


def trained(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Output and parameters after two steps, and the output in evaluation mode, where torch has fast paths."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        y = model(**inputs)
        (y * normal(*y.shape, seed=9)).mean().backward()
        optimizer.step()
    with torch.no_grad():
        found = {"output": y.detach(), "evaluated": model.eval()(**inputs)}
    own: dict[str, Any] = dict(model.named_parameters())
    return found | {name: p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for name, p in own.items()}


def in_processes(group: Any) -> tuple[dict[str, float], dict[str, str], str]:
    model, inputs = transformer()
    want = trained(copy.deepcopy(model), inputs)
    split: Any = fusedtp.parallelize(model, tp_mesh(group), example=inputs)
    found = trained(split, inputs)
    assert found.keys() == want.keys()
    errors = {name: float((found[name] - x).abs().max() / x.abs().max().clamp(min=1)) for name, x in want.items()}
    return errors, dict(split._fusedtp.whole), str(fusedtp.explain(split))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_torch_transformer_trains_as_on_one_device(size: int) -> None:
    for errors, whole, said in world(size).run(in_processes):
        assert {name: error for name, error in errors.items() if not error < 1e-11} == {}
        assert whole == {}
        assert re.search(r"encoder.layers.0.self_attn +all_gather_matmul", said)
        assert re.search(r"encoder.layers.0.self_attn.out_proj +matmul_reduce_scatter", said)


class Masked(nn.Module):
    """As in CLIP: attention called through its layer norm, with a buffer of minus infinity as its mask."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(16), nn.MultiheadAttention(16, HEADS, batch_first=True)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("mask", torch.full((5, 5), -torch.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.attn(h, h, h, need_weights=False, attn_mask=self.mask)[0]
        return x + self.down(self.up(x).relu())


@pytest.mark.slow
def test_infinite_buffers_are_no_difference() -> None:
    plan = infer(nn.Sequential(Masked(), Masked()), 2, example={"input": torch.randn(2, 5, 16)}).plan
    assert plan["0.attn"] == plan["1.attn"] == WORD and plan["0.attn.out_proj"] == plan["0.down"] == "rowwise"


class Own(nn.MultiheadAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize(
    "module, why",
    [
        (nn.MultiheadAttention(6, 3), "2 ranks cannot evenly share 3 heads"),
        (Own(8, 4), "Own is not torch's MultiheadAttention with its own forward"),
        (nn.Linear(8, 4), "Linear is not torch's MultiheadAttention"),
    ],
)
def test_what_cannot_be_split_is_refused(module: nn.Module, why: str) -> None:
    model = nn.Sequential(module)
    with pytest.raises(ValueError, match=why):
        VirtualWorld(2).run(lambda group: fusedtp.parallelize(model, group, plan={"0": WORD}))


@pytest.mark.parametrize(
    "masks, why",
    [
        ({"is_causal": True}, "Need attn_mask"),
        ({"attn_mask": torch.zeros(3, 4)}, r"attn_mask has shape \(3, 4\) instead of \(3, 3\)"),
        ({"attn_mask": torch.zeros(3, 3).int()}, "a mask is bool or floating point, not torch.int32"),
        ({"key_padding_mask": torch.zeros(1, 3)}, r"key_padding_mask has shape \(1, 3\) instead of \(2, 3\)"),
        ({"key_padding_mask": torch.zeros(3)}, r"key_padding_mask has shape \(3,\) instead of \(2, 3\)"),
    ],
)
def test_wrong_masks_are_errors(masks: dict[str, Any], why: str) -> None:
    def run(group: Any) -> None:
        layer = Layer(batch_first=True)
        adopt(layer, group, {"attn": WORD}, complete=True)
        layer({"q": normal(2, 3, WIDTH)}, ("q", "q", "q"), **masks)

    with pytest.raises(RuntimeError, match=why):
        VirtualWorld(2).run(run)


def test_keys_of_another_batch_are_an_error() -> None:
    def run(group: Any) -> None:
        layer = Layer(batch_first=True)
        adopt(layer, group, {"attn": WORD}, complete=True)
        layer({"q": normal(2, 3, WIDTH), "k": normal(1, 3, WIDTH)}, ("q", "k", "k"))

    with pytest.raises(RuntimeError, match="have batches of 2, 1 and 1"):
        VirtualWorld(2).run(run)


class MaskOfTokens(nn.Module):
    """A float mask computed from the hidden states, which are split over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64)

    def forward(self, inputs: dict[str, Tensor], names: Any, **options: Any) -> Any:
        x = inputs["q"]
        return self.attn(x, x, x, key_padding_mask=x[..., 0] * 3, **options)


@pytest.mark.parametrize("need_weights", [True, False])
def test_a_mask_of_split_tokens(need_weights: bool) -> None:
    torch.manual_seed(0)
    check(2, MaskOfTokens().eval(), {"q": normal(2, 5, WIDTH)}, ("q",), {"need_weights": need_weights}, True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_of_a_mask_keep_their_dtype(dtype: torch.dtype) -> None:
    """The lowest fp32 number is minus infinity in 16 bits: a row of it would be not a number."""
    torch.manual_seed(0)
    layer = Layer(batch_first=True).to(dtype).eval()
    mask = torch.zeros(3, 3)
    mask[1] = torch.finfo(torch.float32).min
    inputs, options = {"q": normal(2, 3, WIDTH).to(dtype)}, {"attn_mask": mask, "need_weights": False}
    with torch.no_grad():
        want = layer(inputs, ("q", "q", "q"), **options)[0]

    def run(group: Any) -> Tensor:
        own = copy.deepcopy(layer)
        adopt(own, group, {"attn": WORD}, complete=True, sequence_parallel=False)
        with torch.no_grad():
            found: Tensor = own(inputs, ("q", "q", "q"), **options)[0]
        return found

    for found in VirtualWorld(2).run(run):  # two sums of 8 terms, each of two parts
        assert float((found - want).abs().max()) <= 8 * torch.finfo(dtype).eps * float(want.abs().max())


def test_computed_weights_and_another_word_for_the_last_layer_are_refused() -> None:
    model = nn.Sequential(nn.MultiheadAttention(8, 4))
    plan = {"0": WORD, "0.out_proj": "replicate"}
    with pytest.raises(ValueError, match=r"0\.out_proj: 'replicate' does not go with 'multihead_attention'"):
        VirtualWorld(2).run(lambda group: fusedtp.parallelize(model, group, plan=plan))
    nn.utils.parametrizations.weight_norm(model[0], "in_proj_weight")
    with pytest.raises(ValueError, match="its in_proj_weight is computed from other parameters"):
        VirtualWorld(2).run(lambda group: fusedtp.parallelize(model, group, plan={"0": WORD}))


@pytest.mark.parametrize("word", ["rowwise", "colwise"])
@pytest.mark.parametrize("name", ["attn.out_proj", "attn.out_proj.weight"])
def test_the_last_layer_alone_is_refused(name: str, word: str) -> None:
    plan = {name: word, "up": "colwise", "down": "rowwise"}
    with pytest.raises(ValueError, match=r"attn\.out_proj: nn\.MultiheadAttention reads its weight and never calls it"):
        VirtualWorld(2).run(lambda group: fusedtp.parallelize(Masked(), group, plan=plan, prove=False))


class Direct(nn.MultiheadAttention):
    """Its own forward calls its last layer."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.out_proj(x)


def test_the_last_layer_of_a_class_that_calls_it_is_split() -> None:
    model, x = nn.Sequential(Direct(8, 4)).double(), normal(3, 5, 8)
    with torch.no_grad():
        want = model(x)

    def run(group: Any) -> float:
        plan = {"0.out_proj": "rowwise_split_input"}
        own: Any = fusedtp.parallelize(copy.deepcopy(model), group, plan=plan, prove=False)
        assert own[0].out_proj.weight.shape == (8, 4)
        with torch.no_grad():
            return float((own(x) - want).abs().max())

    assert all(off <= OFF for off in VirtualWorld(2).run(run))
