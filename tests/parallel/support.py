"""Helpers of the tests of parallel models: a model with its twin, meshes, and comparisons that name the tensor.

Everything here runs inside a worker of tests.harness, in fp64 unless a test says otherwise.

Note [What the order of sums may change]
The two models compute the same sums in another order. A value passes through at most OPERATIONS operations, forward and
backward (8 per layer and 4 around the layers). Let u be the unit roundoff. A sum of L terms that W ranks share has an
error of at most (L + W + 2) u relative to the sum of the terms' absolute values, which here is about the size of the
largest entry or of one. The errors of all operations add up.
"""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fusedtp.nn import CausalLM, ModelConfig
from fusedtp.nn.init import init_
from fusedtp.parallel import parallelize

SMALL: dict[str, Any] = {
    "vocab_size": 29,
    "hidden_size": 24,
    "intermediate_size": 34,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 4,
    "dtype": "float64",
    "param_dtype": "float64",
}


OPERATIONS = 2 * (8 * SMALL["num_hidden_layers"] + 4)
TERMS, RANKS = (
    SMALL["num_attention_heads"] * SMALL["head_dim"],
    4,
)  # the longest sum of these models, and the most ranks
TOLERANCE = {
    dtype: OPERATIONS * (TERMS + RANKS + 2) * torch.finfo(dtype).eps / 2 for dtype in (torch.float64, torch.float32)
}


def tp_mesh(group: Any) -> DeviceMesh:
    """A one-dimensional mesh over the group."""
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))


def dp_tp_mesh() -> DeviceMesh:
    """Four ranks as a 2 x 2 mesh."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def make(seed: int = 0, **changes: Any) -> CausalLM:
    """A small model, equal on every rank. Norm weights and biases are random too, because ones and zeros hide bugs."""
    model = init_(CausalLM(ModelConfig(**{**SMALL, **changes})), seed, std=0.3)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.2)
    return model


def make_pair(group: Any, seed: int = 0, *, options: dict | None = None, **changes: Any) -> tuple[CausalLM, CausalLM]:
    """The plain model and its parallel twin."""
    plain = make(seed, **changes)
    return plain, parallelize(copy.deepcopy(plain), tp_mesh(group), **(options or {}))


def batch(batch_size: int, length: int, vocab: int = 29, seed: int = 1) -> tuple[Tensor, Tensor]:
    """input_ids and labels; some labels are ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (batch_size, length), generator=generator)
    labels = torch.randint(0, vocab, (batch_size, length), generator=generator)
    return ids, labels.masked_fill(torch.rand(labels.shape, generator=generator) < 0.2, -100)


def full(tensor: Tensor) -> Tensor:
    """A DTensor's full value, on every rank; a plain tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_like(value: Tensor, parameter: Tensor) -> Tensor:
    """The full value of a gradient, of which a plain tensor is this rank's part."""
    if isinstance(parameter, DTensor) and not isinstance(value, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        value = DTensor.from_local(value, mesh, placements, shape=parameter.shape, stride=parameter.stride())
    return full(value)


def two_backwards(model: Any, x: Tensor, accumulating: Iterable[Any] = ()) -> dict[str, Tensor]:
    """The output, and the gradients of two backwards, in main_grad for the parameters of these layers."""
    x = x.clone().requires_grad_()
    for layer in accumulating:
        for parameter in layer.parameters():
            own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            parameter.main_grad = torch.zeros_like(own)
    for _ in range(2):
        y = model(x)
        (y * torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(9))).sum().backward()
    assert x.grad is not None
    found = {"output": y.detach(), "gradient of x": x.grad}
    for name, parameter in model.named_parameters():
        kept = getattr(parameter, "main_grad", None)
        assert (parameter.grad is None) == (kept is not None), name
        found[f"gradient of {name}"] = full_like(parameter.grad if kept is None else kept, parameter)
    return found


def beside(got: Tensor, want: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's part of `got`, and what it should be: for a DTensor its shard and the same shard of `want`.

    If every rank compares these two, all of `got` is checked, including replicas, without communication.
    """
    got = got.detach()
    if not isinstance(got, DTensor) or any(type(p) not in (Shard, Replicate) for p in got.placements):
        return full(got), want
    shard = distribute_tensor(want, got.device_mesh, got.placements, src_data_rank=None)
    return got.to_local(), shard.to_local()


def assert_close(name: str, got: Tensor, want: Tensor) -> None:
    """Relative to the largest entry, or to terms of size one that cancel (the gradient of a key's bias is zero).

    See Note [What the order of sums may change].
    """
    want = full(want).detach()
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, wanted {tuple(want.shape)}"
    mine, wanted = beside(got, want)
    assert mine.shape == wanted.shape, f"{name}: shard {tuple(mine.shape)}, wanted {tuple(wanted.shape)}"
    if wanted.numel():
        error = (mine - wanted).abs().max().item()
        bound = TOLERANCE[want.dtype] * max(want.abs().max().item(), 1.0)
        assert error <= bound, f"{name}: off by {error:.2e}, bound {bound:.2e}"


def assert_same_gradients(parallel: nn.Module, plain: nn.Module) -> None:
    """On every rank, each gradient of the parallel model is complete and equals that of the plain one."""
    wanted = dict(plain.named_parameters())
    got = dict(parallel.named_parameters())
    assert got.keys() == wanted.keys()
    for name, parameter in got.items():
        assert isinstance(parameter, DTensor) and parameter.shape == wanted[name].shape, name
        assert parameter.grad is not None and parameter.grad.placements == parameter.placements, name
        assert_close(f"gradient of {name}", parameter.grad, wanted[name].grad)


def losses(models: Iterable[nn.Module], ids: Tensor, labels: Tensor) -> list[Tensor]:
    """Losses of both models, after their backward passes."""
    out = []
    for model in models:
        loss = model(ids, labels).loss
        loss.backward()
        out.append(loss)
    return out
