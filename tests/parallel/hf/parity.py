"""A model and its parallel twin: logits, loss, every gradient, generated tokens."""

import copy
import traceback
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import fusedtp
from tests.parallel.support import tp_mesh

from .families import model_of


def full(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


def off(got: Tensor, want: Tensor, least: float = 1e-9) -> float:
    got, want = got.detach(), want.detach()
    return float((got - want).abs().max() / want.abs().max().clamp(min=least))


def compare(
    group: Any,
    name: str,
    sequence_parallel: bool = True,
    tokens=(3, 5),
    generate: bool = True,
    changes=None,
    train=False,
    dtype=torch.float32,
) -> dict:
    plain = model_of(name, **(changes or {})).to(dtype)
    parallel = copy.deepcopy(plain)
    fusedtp.parallelize(parallel, tp_mesh(group), sequence_parallel=sequence_parallel)
    if train:
        parallel.train()
        parallel.gradient_checkpointing_enable()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 50, tokens, generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    labels = ids.masked_fill(mask == 0, -100)
    found: dict[str, Any] = {}
    outs = []
    for model in (plain, parallel):
        out = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False)
        out.loss.backward()
        outs.append(out)
    found["logits"] = off(outs[1].logits[mask.bool()], outs[0].logits[mask.bool()])
    found["loss"] = off(outs[1].loss, outs[0].loss)
    worst, where = 0.0, ""
    least = 1e-3 * max(float(p.grad.abs().max()) for p in plain.parameters() if p.grad is not None)
    for (key, a), (other, b) in zip(plain.named_parameters(), parallel.named_parameters(), strict=True):
        assert key == other and a.shape == b.shape, (key, other, a.shape, b.shape)
        if a.grad is None:
            assert b.grad is None or full(b.grad).abs().max() == 0, f"{key} has a gradient"
            continue
        if b.grad is None:
            error = float(a.grad.abs().max() > 0)
        else:
            error = off(full(b.grad), a.grad, least)
            if isinstance(b.grad, DTensor) and b.grad.placements[0].is_replicate():
                error = max(error, off(b.grad.to_local(), a.grad, least))
        if not error <= worst:
            worst, where = error, key
    found["gradient"], found["where"] = worst, where
    found["gathered"] = dict(parallel._fusedtp.gathered)
    if generate and not train:
        with torch.no_grad():
            want, got = (
                m.generate(ids[1:2, :3], max_new_tokens=6, do_sample=False) for m in (plain, parallel)
            )
        found["generate"] = torch.equal(want, got)
    return found


def attempt(group: Any, names: list[str], options: dict[str, Any]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in names:
        try:
            results[name] = compare(group, name, **options)
        except Exception as error:
            results[name] = (f"{type(error).__name__}: {str(error)[:300]}", traceback.format_exc())
    return results
