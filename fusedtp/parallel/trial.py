"""Try a plan on one module: it runs whole and as virtual ranks, and outputs and every gradient are compared.

    whole     a copy with random weights, forward and backward on given inputs
    split     the same copy as W threads (comm/virtual_world.py), once for gradients and once without autograd
    verdict   "" where all is the same, else what differs or which error the split one raised

Code that branches on activations must decide by the same numbers: with other inputs a rank's own part could lead it
another way. So the numbers behind its decisions are compared too.

Weights are random, since those of a model may hide a fault (a projection that starts at zero). All runs are in
evaluation mode, fp32, on the CPU.
"""

from __future__ import annotations

import copy
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from fusedtp.comm import VirtualGroup, VirtualWorld, communicator

from .foreign import Model
from .foreign_plan import adopt, foreign_steps
from .placement import Way
from .token_shard import TokenShard, shard
from .vocab_shard import VocabShard

# Roundoff of a module with random weights is three orders of magnitude below this, a fault's effect as far above.
OFF = 1e-3
# Ranks whose code goes other ways wait for each other.
TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Inputs:
    """Arguments of a forward; tensors that require gradients get them compared."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def fresh(self) -> Inputs:
        """The same values, apart from any graph."""

        def leaf(x: Any) -> Any:
            return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x

        return Inputs(*tree_map(leaf, (self.args, self.kwargs)))

    def gradients(self) -> list[Tensor]:
        """Of those that require them, in order."""
        leaves = [x for x in tree_leaves((self.args, self.kwargs)) if isinstance(x, Tensor) and x.requires_grad]
        return [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]


class Call(nn.Module):
    """A module as it is called inside a model, where tokens may be split.

    shares   (the communicator's name, rank, ranks) of those that split them
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.shares: tuple[str, int, int] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.shares is not None:
            args, kwargs = tree_map(self._shard, (args, kwargs))
        return self.module(*args, **kwargs)

    def _shard(self, x: Any) -> Any:
        """Hidden states [B, S, H], split as between layers; masks and rotations take no part in a backward."""
        if not isinstance(x, Tensor) or not x.requires_grad or x.dim() != 3:
            return x
        assert self.shares is not None
        return shard(x, *self.shares, Counter())


def random_copy(module: nn.Module) -> nn.Module:
    """A copy in fp32 on the CPU; each weight matrix keeps the size of what it multiplies."""
    generator = torch.Generator().manual_seed(0)

    def drawn(parameter: Tensor) -> nn.Parameter:
        made = torch.empty(parameter.shape).normal_(generator=generator)
        if parameter.dim() < 2:
            made = 1 + made / 5
        else:
            made = made / math.sqrt(max(parameter.numel() // parameter.shape[0], 1))
        return nn.Parameter(made, requires_grad=True)

    memo: dict[int, Any] = {id(p): drawn(p) for p in module.parameters() if p.is_floating_point()}
    for buffer in module.buffers():
        if buffer.is_meta:
            memo[id(buffer)] = torch.zeros(buffer.shape, dtype=buffer.dtype)
    return copy.deepcopy(module, memo).cpu().float().eval()


def _sharing(module: nn.Module) -> Any:
    """A copy of it, its parameters other ones of the same storage."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in module.parameters()}
    return copy.deepcopy(module, memo)


READ = {Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__float__, Tensor.__int__}
OWN, TORCHS = f"{Path(__file__).parents[1]}{os.sep}", f"{Path(torch.__file__).parent}{os.sep}"
Numbers = list[Tensor | None]


class Decisions(TorchFunctionMode):
    """The activations by which a module's own code (not torch's, nor this library's) decides in Python.

    of     identity of a tensor without gradient -> the tensor, and the activations it was computed from (by comparison,
           detached, under no_grad); it is kept alive so that its identity is not reused
    made   the activations behind each value that Python read, in order

    None stands for split tokens: the library makes them whole where code asks for values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[int, tuple[Any, Numbers]] = {}
        self.made: list[Numbers] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in READ and (not isinstance(result, Tensor) or result.requires_grad):
            return result
        numbers: Numbers = []
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and x.requires_grad:
                numbers.append(x.detach() if type(x) is Tensor else None)
            else:
                numbers += self.of.get(id(x), (None, []))[1]
        if numbers and func not in READ:
            self.of[id(result)] = result, numbers
        elif numbers and self._asked():
            self.made.append(numbers)
        return result

    def _asked(self) -> bool:
        """Whether the module's code asks, not torch or this library."""
        frame: Any = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename.startswith(TORCHS):
            frame = frame.f_back
        return frame is not None and not frame.f_code.co_filename.startswith(OWN)

    def differ(self, whole: Decisions) -> str:
        """What is other than where nothing was split; ""."""
        for mine, theirs in zip(self.made, whole.made):
            pairs = [(a, b) for a, b in zip(mine, theirs) if a is not None and b is not None]
            if any(_off("a", a, b) for a, b in pairs):
                return "its code decides by the values of an activation that each rank has a part of"
        return ""


class Trial:
    """Plans of one module, tried over world_size ranks on the same inputs."""

    def __init__(
        self, module: nn.Module, inputs: Inputs, world_size: int, *, sequence_parallel: bool, parts: bool
    ) -> None:
        """parts: an output besides the first may be this rank's part of the whole one (attention weights of heads).

        Raises what the module raises, and ValueError for one without a finite output.
        """
        self.module, self.inputs, self.world_size = module, inputs, world_size
        self.sequence_parallel, self.parts = sequence_parallel, parts
        self.whole = Call(_sharing(module))
        self.weights: list[Tensor] = []
        with Decisions() as self.decisions:
            self.want, self.input_gradients = _run(self.whole, inputs, self._drawn)
        if not self.want or not all(bool(x.isfinite().all()) for x in self.want[:1]):
            raise ValueError("alone and with random weights it makes no finite output")

    def verdict(self, plan: Mapping[str, str]) -> str:
        """Whether the module split by this plan does the same: "", or what is wrong."""
        own = {f"module.{name}".rstrip("."): word for name, word in plan.items()}
        try:
            faults = VirtualWorld(self.world_size, timeout_s=TIMEOUT_S).run(lambda group: self._of_rank(group, own))
        except Exception as error:  # whatever the module's code says to tensors that it does not expect
            return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return next((fault for fault in faults if fault), "")

    def _of_rank(self, group: VirtualGroup, plan: Mapping[str, str]) -> str:
        rank = group.rank()
        options: dict[str, Any] = {"engine": "collective", "sequence_parallel": self.sequence_parallel}
        split: Any = Call(_sharing(self.module))
        steps = foreign_steps(split, plan, self.world_size, False, Model(), False, **options)
        ways = {
            f"{step.name}.{key}".lstrip("."): way
            for step in steps
            for key, way in step.style.ways(step.module, self.world_size).items()
        }
        adopt(split, group, plan, complete=False, **options)
        if self.sequence_parallel:
            split.shares = (communicator(group).name, rank, self.world_size)
        with Decisions() as decisions:
            got, input_gradients = _run(split, self.inputs, lambda i, x: self._weights_of(i, x, rank))
        fault = self._outputs(got, rank) or self._gradients(split, ways, rank)
        fault = fault or decisions.differ(self.decisions)
        for i, (a, b) in enumerate(zip(input_gradients, self.input_gradients, strict=True)):
            fault = fault or _off(f"the gradient of input {i}", a, b)
        with torch.no_grad():
            fresh = self.inputs.fresh()
            again = _floats(split(*fresh.args, **fresh.kwargs))
        return fault or self._outputs(again, rank)

    def _outputs(self, got: list[Tensor], rank: int) -> str:
        if len(got) != len(self.want):
            return f"it returns {len(got)} tensors instead of {len(self.want)}"
        for i, (a, b) in enumerate(zip(got, self.want, strict=True)):
            fault = _off(f"output {i}", a, b if i == 0 else self._part(a, b, rank))
            if fault:
                return fault
        return ""

    def _drawn(self, i: int, x: Tensor) -> Tensor:
        """What each output counts in the sum that backward starts from."""
        self.weights.append(torch.randn(x.shape, generator=torch.Generator().manual_seed(2 + i)))
        return self.weights[-1]

    def _weights_of(self, i: int, x: Tensor, rank: int) -> Tensor:
        """The same of a rank's output; zero for one that is wrong anyway."""
        found = self.weights[i] if i < len(self.weights) else torch.zeros_like(x)
        found = found if i == 0 else self._part(x, found, rank)
        return found if found.shape == x.shape else torch.zeros_like(x)

    def _part(self, got: Tensor, want: Tensor, rank: int) -> Tensor:
        """The part of an output that a rank may return."""
        if not self.parts or got.dim() != want.dim():
            return want
        dims = [i for i, (a, b) in enumerate(zip(got.shape, want.shape, strict=True)) if a != b]
        if len(dims) != 1 or got.shape[dims[0]] * self.world_size != want.shape[dims[0]]:
            return want
        return want.chunk(self.world_size, dims[0])[rank]

    def _gradients(self, split: nn.Module, ways: Mapping[str, Way], rank: int) -> str:
        wanted = {name: p.grad for name, p in self.whole.named_parameters()}
        least = 1e-3 * max((float(g.abs().max()) for g in wanted.values() if g is not None and g.numel()), default=0.0)
        for name, parameter in split.named_parameters():
            want, got = wanted[name], parameter.grad
            if want is None:
                continue
            own = ways[name].part(want, (rank,)) if name in ways else want
            if got is None:
                got = torch.zeros_like(own)
            fault = _off(f"the gradient of {name.removeprefix('module.')}", got, own, least)
            if fault:
                return fault
        return ""


def _run(module: Call, inputs: Inputs, weights: Callable[[int, Tensor], Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Floating-point outputs, after a backward through all of them, and gradients of inputs."""
    fresh = inputs.fresh()
    with torch.enable_grad():
        found = _floats(module(*fresh.args, **fresh.kwargs))
        counted = [(x, weights(i, x)) for i, x in enumerate(found)]
        loss = sum((x * weight).sum() for x, weight in counted if x.requires_grad and bool(x.isfinite().all()))
    if isinstance(loss, Tensor):
        loss.backward()
    return [x.detach() for x in found], fresh.gradients()


def _floats(outputs: Any) -> list[Tensor]:
    whole = [x.full_tensor() if isinstance(x, TokenShard | VocabShard) else x for x in tree_leaves(outputs)]
    return [x for x in whole if isinstance(x, Tensor) and x.is_floating_point()]


def _off(name: str, got: Tensor, want: Tensor, least: float = 1e-9) -> str:
    """What is wrong with a tensor; ""."""
    if got.shape != want.shape:
        return f"{name} is {tuple(got.shape)} instead of {tuple(want.shape)}"
    if not want.numel():
        return ""
    error = float((got - want).abs().nan_to_num(math.inf).max() / want.abs().max().clamp(min=least))
    return "" if error <= OFF else f"{name} is off by {error:.1e}"
