"""Compare a model with its parallel twin: logits, loss, gradients, generated tokens; for towers, last hidden states.

Note [What roundoff may change]
The twins compute the same sums in another order, in fp32. How much that moves a value depends on the model: a norm of
small numbers or a gradient that cancels amplifies it. So the bound is measured. Every weight of the plain model is
moved by about one unit in its last place, several times. A tensor of the parallel model may be off by MARGIN times the
largest change that these moves cause in it (MARGIN because each value passes through some tens of roundings, not one),
or by LEAST if they change nothing.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

import fusedtp
from fusedtp.parallel.copies import deep_copy
from fusedtp.parallel.plan import generic
from fusedtp.parallel.vocab_shard import VocabShard
from tests.parallel.support import beside, tp_mesh

from .families import model_of

MARGIN, LEAST = 8.0, 2e-6
SEEDS = range(3, 7)  # a single move may change nothing in a sum whose terms cancel


def batch(tokens: tuple[int, int] = (3, 5), padding: int = 2, side: str = "left") -> dict[str, Tensor]:
    """Token ids and labels; the first row is padded."""
    ids = torch.randint(3, 50, tokens, generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    padding = min(padding, tokens[1] - 1)
    mask[0, slice(padding) if side == "left" else slice(tokens[1] - padding, None)] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def perturbed(model: nn.Module, seed: int = 3) -> nn.Module:
    """A copy with every weight moved by about one unit in its last place."""
    made: nn.Module = deep_copy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * torch.finfo(torch.float32).eps
            parameter.copy_(parameter + parameter * noise)
    return made


def tokens_to_predict(inputs: dict[str, Tensor]) -> bool:
    return bool((inputs["labels"][:, 1:] != -100).any())


def generates(model: Any) -> bool:
    return not isinstance(model, PreTrainedModel) or model.can_generate()


def results(model: nn.Module, inputs: dict[str, Tensor], scale: float = 1.0) -> dict[str, Tensor]:
    """Logits of the real tokens (of an encoder-decoder, of all targets), loss and gradients, by name."""
    encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    real = torch.ones_like(inputs["labels"]).bool() if encoder_decoder else inputs["attention_mask"].bool()
    if generates(model):
        out = model(**inputs, use_cache=False)
        loss = out.loss if tokens_to_predict(inputs) else out.logits.square().mean()
        logits = out.logits.full_tensor() if isinstance(out.logits, VocabShard) else out.logits
    else:
        logits = model(**{name: x for name, x in inputs.items() if name != "labels"}).last_hidden_state
        generator = torch.Generator().manual_seed(2)
        loss = (logits * torch.randn(logits.shape, generator=generator))[real].mean()
    (loss * scale).backward()
    found = {"logits": logits[real], "loss": loss}
    found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: x.detach() for name, x in found.items()}


def full(x: Any) -> Any:
    """A DTensor's full value."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def difference(got: Tensor, want: Tensor, least: float) -> float:
    """The largest error of this rank's part, relative to the tensor's largest value or to `least`, if larger."""
    assert got.shape == want.shape, (got.shape, want.shape)
    mine, wanted = beside(got, want)
    assert mine.shape == wanted.shape, (mine.shape, wanted.shape)
    if not wanted.numel():
        return 0.0
    error = float((mine - wanted).abs().max() / want.abs().max().clamp(min=least))
    return error if error == error else float("inf")


def errors(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """Tensor -> its difference. Gradients are compared relative to at least 1/1000 of the largest gradient."""
    gradients = [x for name, x in want.items() if name.startswith("gradient")]
    least = 1e-3 * max(float(g.abs().max()) for g in gradients)
    missing = {name: float("inf") for name in want.keys() - got.keys() if want[name].abs().max() > 0}
    extra = {name: float("inf") for name in got.keys() - want.keys() if _largest(got[name]) > 0}
    common = [name for name in want if name in got]  # collective, so every rank must use the same order
    return missing | extra | {name: difference(got[name], want[name], least) for name in common}


def _largest(x: Tensor) -> float:
    return float(full(x).abs().max())


def worst(group: Any, found: dict[str, float]) -> dict[str, float]:
    """For each tensor, the largest difference on any rank. Each rank compared only its own part."""
    of_rank: list[Any] = [None] * group.size()
    dist.all_gather_object(of_rank, found, group)
    return {name: max(each.get(name, 0.0) for each in of_rank) for name in {n for e in of_rank for n in e}}


def compare(group: Any, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The errors of the parallel model, and their ratio to what roundoff explains.

    options   sequence_parallel, engine, experts, changes of the configuration, attention, tokens, padding, side,
              checkpointing (what gradient_checkpointing_enable takes), generate
    """
    plain = model_of(name, attention=options.get("attention"), **options.get("changes", {}))
    inputs = batch(options.get("tokens", (3, 5)), options.get("padding", 2), options.get("side", "left"))
    prompt: dict[str, Any] = batch((2, 4))
    if name in IGNORE_MASKS:
        prompt["attention_mask"] = None  # generate does not pass the mask on
    return compared(group, plain, inputs, prompt, options)


def compared(
    group: Any, plain: nn.Module, inputs: dict[str, Tensor], prompt: dict[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    """compare for a given model and batch; prompt: for generate, without its labels."""
    parallel = copy.deepcopy(plain)
    fusedtp.parallelize(
        parallel,
        tp_mesh(group),
        sequence_parallel=options.get("sequence_parallel", True),
        engine=options.get("engine", "auto"),
        experts=options.get("experts"),
    )
    if "checkpointing" in options:
        parallel.train()
        parallel.gradient_checkpointing_enable(options["checkpointing"])
        plain.train()
    found = against(group, plain, parallel, lambda model: results(model, inputs))
    if options.get("generate", generates(plain)):
        found["generate"] = torch.equal(*(generated(model, prompt) for model in (plain, parallel)))
    return found


def against(
    group: Any, plain: nn.Module, parallel: Any, results: Callable[[nn.Module], dict[str, Tensor]]
) -> dict[str, Any]:
    """The errors of a split model, and their ratio to what roundoff explains. results: logits, loss and gradients."""
    want = results(plain)
    noises = [errors(results(perturbed(plain, seed)), want) for seed in SEEDS]
    noise = {key: max(each.get(key, 0.0) for each in noises) for key in want}
    parallel._fusedtp.calls.clear()
    off = worst(group, errors(results(parallel), want))
    excess = {key: error / max(LEAST, MARGIN * noise.get(key, 0.0)) for key, error in off.items()}
    most = max(excess, key=lambda key: excess[key])
    return {
        "logits": off["logits"],
        "loss": off["loss"],
        "gradient": max(error for key, error in off.items() if key.startswith("gradient")),
        "worst": most,
        "excess": excess[most],
        "gathered": {why: n for why, n in parallel._fusedtp.gathered.items() if why != "logits: full_tensor"},
        "calls": dict(parallel._fusedtp.calls),
        "whole": dict(parallel._fusedtp.whole),
        "share": share_split(parallel),
        "unsplit": unsplit(parallel),
    }


def share_split(model: nn.Module) -> float:
    """The share of weight-matrix elements that are split over ranks."""
    weights: list[Any] = [p for p in model.parameters() if p.dim() > 1]
    split = sum(p.numel() for p in weights if not any(at.is_replicate() for at in p.placements))
    return split / sum(p.numel() for p in weights)


def unsplit(model: nn.Module) -> list[str]:
    """The outermost modules that have weight matrices none of which is split."""
    found: list[str] = []
    for name, module in model.named_modules():
        weights: list[Any] = [p for p in module.parameters() if p.dim() > 1]
        whole = bool(weights) and all(at.is_replicate() for p in weights for at in p.placements)
        if whole and not any(name.startswith(f"{outer}.") for outer in found):
            found.append(name)
    return list(dict.fromkeys(map(generic, found)))


def generated(model: Any, prompt: dict[str, Any]) -> Tensor:
    """Greedy decoding of six tokens for each of two prompts, the first one padded."""
    given = {name: x for name, x in prompt.items() if name != "labels"}
    with torch.no_grad():
        tokens: Tensor = model.eval().generate(**given, max_new_tokens=6, do_sample=False)
    return tokens


IGNORE_MASKS = {"nemotron_h"}


def attempt(
    group: Any, names: list[str], options: dict[str, Any], compare: Callable[..., Any] = compare
) -> dict[str, Any]:
    """Run compare for each model. On an error, store its traceback instead of a result."""
    import traceback

    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = compare(group, name, options)
        except Exception:
            found[name] = traceback.format_exc()
    return found
