"""Try a plan on one module: run it whole and on virtual ranks, and compare the outputs and every gradient.

    whole     a copy with random weights, forward and backward on given inputs
    split     the same copy on W threads (comm/virtual_world.py), once for gradients and once without autograd
    verdict   "" if everything matches, else what differs or the error that the split one raised

Code that branches on activations must see the same values on every rank: with other inputs, a rank that sees only its
part could take another branch. So the values behind its decisions are compared too.

Weights are random, since a model's own weights may hide a fault (a projection that is initialized to zero). All runs
are in fp32 on the CPU. The first run is in evaluation mode. The second is in training mode without dropout, on inputs
so large that clamps and clips are active. There a softmax saturates, and roundoff may change a small gradient a lot;
how much is measured by moving the weights by one unit in the last place. Buffers are compared too, and so are tensors
with a gradient that modules store as attributes while they run, such as an auxiliary loss. Arguments that the model
does not pass are not tried.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from fusedtp.comm import VirtualGroup, VirtualWorld, communicator

from .copies import deep_copy
from .foreign import Model
from .foreign_plan import adopt, foreign_steps
from .placement import Way
from .token_shard import TokenShard, shard
from .vocab_shard import VocabShard

# Roundoff of a module with random weights is three orders of magnitude smaller, the effect of a fault as much larger.
OFF = 1e-3
# The second run scales inputs by LOUD and has more roundoff: a value may be off by MARGIN times the change that MOVES
# of the weights cause in it, since it goes through some tens of roundings. A single move may happen to change nothing.
LOUD, MARGIN, MOVES = 30.0, 8.0, range(1, 4)
# A weight with gradients smaller than this share of the largest has no effect but by roundoff.
IDLE = 1e-5
DROPOUTS = re.compile(r"p|.*drop.*")
STORED = "the attribute "
# Ranks that take different branches would wait for each other.
TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Inputs:
    """Arguments of a forward; gradients of tensors that require them are compared."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def fresh(self) -> Inputs:
        """The same values, detached from any graph."""

        def leaf(x: Any) -> Any:
            return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x

        return Inputs(*tree_map(leaf, (self.args, self.kwargs)))

    def loud(self) -> Inputs:
        """The same inputs, scaled by LOUD."""

        def louder(x: Any) -> Any:
            return (x.detach() * LOUD).requires_grad_() if isinstance(x, Tensor) and x.requires_grad else x

        return Inputs(*tree_map(louder, (self.args, self.kwargs)))

    def gradients(self) -> list[Tensor]:
        """Gradients of the tensors that require them, in order."""
        leaves = [x for x in tree_leaves((self.args, self.kwargs)) if isinstance(x, Tensor) and x.requires_grad]
        return [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]


class Call(nn.Module):
    """Calls a module as a model would, with tokens split if `shares` is set.

    shares   (name of the communicator, rank, world size) of the ranks that share the tokens
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
        """Split hidden states [B, S, H] as between layers; masks and rotary tables, without gradient, stay whole."""
        if not isinstance(x, Tensor) or not x.requires_grad or x.dim() != 3:
            return x
        assert self.shares is not None
        return shard(x, *self.shares, Counter())


def random_copy(module: nn.Module) -> nn.Module:
    """A copy in fp32 on the CPU with random weights, scaled so that each matrix preserves the size of its input."""
    generator = torch.Generator().manual_seed(0)

    def drawn(parameter: Tensor) -> nn.Parameter:
        made = torch.empty(parameter.shape).normal_(generator=generator)
        if parameter.dim() < 2:
            made = 1 + made / 5
        else:
            made = made / math.sqrt(max(parameter[:1].numel(), 1))
        return nn.Parameter(made, requires_grad=True)

    memo: dict[int, Any] = {id(p): drawn(p) for p in module.parameters() if p.is_floating_point()}
    for buffer in module.buffers():
        if buffer.is_meta:
            memo[id(buffer)] = torch.zeros(buffer.shape, dtype=buffer.dtype)
    return deep_copy(module, memo | _stored(module)).cpu().float().eval()


def _stored(module: nn.Module) -> dict[int, Tensor]:
    """id -> a copy, of tensors that an earlier forward stored on its modules, which deepcopy refuses."""
    every = [x for each in module.modules() for x in tree_leaves(vars(each))]
    return {id(x): x.detach().clone() for x in every if isinstance(x, Tensor) and not x.is_leaf}


def sharing(module: nn.Module) -> Any:
    """A copy with new parameters that share storage with the old ones."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in module.parameters()}
    return deep_copy(module, memo | _stored(module))


READ = {Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__float__, Tensor.__int__}
OWN, TORCHS = f"{Path(__file__).parents[1]}{os.sep}", f"{Path(torch.__file__).parent}{os.sep}"
Numbers = list[Tensor | None]


class Decisions(TorchFunctionMode):
    """The activations that the module's own Python code (not torch's or this library's) branches on.

    of     id of a tensor without gradient -> the tensor, and the activations it was computed from (by comparison,
           detached, under no_grad); the tensor is kept alive so that its id is not reused
    made   the activations behind each value that Python read, in order

    None stands for split tokens: the library gathers them when code reads their values.
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
        """Whether the module's own code reads the value, not torch or this library."""
        frame: Any = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename.startswith(TORCHS):
            frame = frame.f_back
        return frame is not None and not frame.f_code.co_filename.startswith(OWN)

    def differ(self, whole: Decisions) -> str:
        """What differs from the decisions of the whole module, or ""."""
        for mine, theirs in zip(self.made, whole.made):
            pairs = [(a, b) for a, b in zip(mine, theirs) if a is not None and b is not None]
            if any(_off("a", a, b) for a, b in pairs):
                return "its code branches on values of an activation that is split over ranks"
        return ""


@dataclass
class Run:
    """One run of the whole module.

    trains    in training mode, without dropout
    off       tolerance of the split one
    noise     name of a compared value -> how far roundoff alone may move it; measured only if something is off
    want      its outputs, and what modules store in attributes
    names     of these
    weights   weight of each of these in the sum that backward starts from
    loose     names that are not compared: modules store random numbers or NaN there
    """

    inputs: Inputs
    trains: bool
    off: float
    want: list[Tensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    loose: frozenset[str] = frozenset()
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    input_gradients: list[Tensor] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    decisions: Decisions = field(default_factory=Decisions)
    noise: dict[str, float] = field(default_factory=dict)

    @property
    def least(self) -> float:
        """The smallest scale for relative errors of gradients: a thousandth of the largest gradient."""
        return 1e-3 * max((_top(g) for g in self.gradients.values() if g is not None), default=0.0)

    def bound(self, name: str, scale: float = 1.0) -> float:
        """scale: largest value of the whole tensor / largest value of the part that errors are relative to."""
        return max(self.off, scale * self.noise.get(name, 0.0))

    def drawn(self, i: int, name: str, x: Tensor) -> Tensor:
        drawn = torch.randn(x.shape, generator=torch.Generator().manual_seed(2 + i))
        self.weights.append(torch.zeros_like(x) if name in self.loose else drawn)
        return self.weights[-1]


class Trial:
    """Tries plans of one module over world_size ranks on the same inputs."""

    def __init__(
        self,
        module: nn.Module,
        inputs: Inputs,
        world_size: int,
        *,
        sequence_parallel: bool,
        parts: bool = False,
        inside: bool = True,
        forward: bool = False,
    ) -> None:
        """Run the module whole.

        parts    outputs besides the first may be only this rank's part (such as attention weights of its heads)
        inside   it is inside a model; a model gathers attention weights that it returns
        forward  compare only what one forward without autograd returns

        What modules of a model store may be this rank's part anyway. Raises what the module raises, and ValueError if
        its output has no finite values, or some that are not numbers.
        """
        self.module, self.world_size = module, world_size
        self.sequence_parallel, self.parts, self.inside, self.forward = sequence_parallel, parts, inside, forward
        self.runs = [self._whole(Run(inputs, False, OFF))]
        if not all(map(_tells, self.runs[0].want[:1])):
            raise ValueError("its output is not finite when it runs alone with random weights")
        if forward:
            return
        loud = Run(inputs.loud(), True, 10 * OFF)
        try:
            found, again = self._whole(loud), self._whole(replace(loud, weights=[], decisions=Decisions()))
        except Exception:  # it does not run alone in training mode
            return
        pairs = zip(found.names, found.want, again.want, strict=True)
        vague = frozenset(name for name, a, b in pairs if not _tells(a) or _off("", a, b))
        if all(name.startswith(STORED) for name in vague):  # else it draws random numbers
            loose = replace(loud, weights=[], decisions=Decisions(), loose=vague)
            self.runs.append(self._whole(loose) if vague else found)

    def _noise(self, run: Run) -> dict[str, float]:
        noise: dict[str, float] = {}
        for seed in MOVES:
            moved = self._whole(replace(run, weights=[], decisions=Decisions()), seed)
            pairs: list[tuple[str, Tensor, Tensor, float]]
            pairs = [(*each, 1e-9) for each in zip(run.names, moved.want, run.want, strict=True)]
            inputs = zip(moved.input_gradients, run.input_gradients, strict=True)
            pairs += [(f"the gradient of input {i}", *pair, 1e-9) for i, pair in enumerate(inputs)]
            for name, gradient in run.gradients.items():
                other = moved.gradients[name]
                if gradient is not None and other is not None:
                    pairs.append((f"the gradient of {name.removeprefix('module.')}", other, gradient, run.least))
            for name, got, want, least in pairs:
                noise[name] = max(noise.get(name, 0.0), MARGIN * _error(got, want, least))
        return noise

    def _whole(self, run: Run, seed: int | None = None) -> Run:
        """seed: if given, first move the weights randomly by about one unit in the last place."""
        whole = Call(self._copied(run))
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            for parameter in whole.parameters():
                if parameter.is_floating_point():
                    noise = torch.empty(parameter.shape).normal_(generator=generator)
                    parameter.data = parameter.data * (1 + torch.finfo(torch.float32).eps * noise)
        if self.forward:
            with torch.no_grad():
                run.names, run.want = _results(whole, run.inputs.fresh())
            return run
        with run.decisions:
            run.names, run.want, run.input_gradients = _run(whole, run.inputs, run.drawn)
        run.gradients = {name: p.grad for name, p in whole.named_parameters()}
        run.buffers = dict(whole.named_buffers())
        return run

    def _copied(self, run: Run) -> nn.Module:
        """A copy of the module that shares its parameters, in the mode of a run."""
        made: nn.Module = sharing(self.module)
        if run.trains:
            for each in made.train().modules():
                drops = [key for key, x in vars(each).items() if type(x) is float and DROPOUTS.fullmatch(key)]
                vars(each).update(dict.fromkeys(drops, 0.0))
        return made

    def ran(self, name: str) -> bool:
        """Whether a parameter of the module was used, in evaluation or training mode."""
        return any(run.gradients.get(f"module.{name}") is not None for run in self.runs)

    def idle(self, names: list[str]) -> list[str]:
        """The layers among these whose weights do not matter on these inputs: a wrong split of them would not show.

        Such are queries and keys of one token, or of equal ones: their softmax is constant.
        """
        gradients = self.runs[0].gradients
        most = max((_top(g) for g in gradients.values() if g is not None), default=0.0)
        own = {name: gradients.get(f"module.{name}.weight") for name in names}
        return [name for name, gradient in own.items() if gradient is not None and _top(gradient) < IDLE * most]

    def verdict(self, plan: Mapping[str, str]) -> str:
        """What is wrong with the module split by this plan, or "" if it computes the same."""
        own = {f"module.{name}".rstrip("."): word for name, word in plan.items()}
        for run in self.runs:
            try:
                fault = self._fault(own, run)
                if fault and run.trains and not run.noise:
                    run.noise = self._noise(run)
                    fault = self._fault(own, run)
            except Exception as error:  # the module's code may raise anything on tensors that it does not expect
                return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            if fault:
                return fault + ", in training mode and on large inputs" * run.trains
        return ""

    def _fault(self, plan: Mapping[str, str], run: Run) -> str:
        world = VirtualWorld(self.world_size, timeout_s=TIMEOUT_S)
        return next((fault for fault in world.run(partial(self._of_rank, plan=plan, run=run)) if fault), "")

    def _of_rank(self, group: VirtualGroup, plan: Mapping[str, str], run: Run) -> str:
        rank = group.rank()
        options: dict[str, Any] = {"engine": "collective", "sequence_parallel": self.sequence_parallel}
        split: Any = Call(self._copied(run))
        steps = foreign_steps(split, plan, self.world_size, False, Model(), False, **options)
        ways = {
            f"{step.name}.{key}".lstrip("."): way
            for step in steps
            for key, way in step.style.ways(step.module, self.world_size).items()
        }
        adopt(split, group, plan, complete=False, **options)
        if self.inside:
            split._fusedtp.maps = False
        if self.sequence_parallel:
            split.shares = (communicator(group).name, rank, self.world_size)
        if self.forward:
            with torch.no_grad():
                return self._outputs(run, *_results(split, run.inputs.fresh()), rank)
        with Decisions() as decisions:
            names, got, input_gradients = _run(split, run.inputs, lambda i, _, x: self._weights(run, i, x, rank))
        fault = self._outputs(run, names, got, rank) or self._gradients(run, split, ways, rank)
        fault = fault or decisions.differ(run.decisions)
        for i, (a, b) in enumerate(zip(input_gradients, run.input_gradients, strict=True)):
            name = f"the gradient of input {i}"
            fault = fault or _off(name, a, b, bound=run.bound(name))
        for name, buffer in split.named_buffers():
            want = run.buffers.get(name, buffer)
            if want.shape == buffer.shape:
                own, whole = (x.to_dense().float() if x.is_sparse else x.float() for x in (buffer, want))
                fault = fault or _off(name.removeprefix("module."), own, whole, bound=run.off)
        if run.trains:
            return fault
        with torch.no_grad():
            again = _results(split, run.inputs.fresh())  # on every rank: the others wait for this one
            return fault or self._outputs(run, *again, rank)

    def _outputs(self, run: Run, names: list[str], got: list[Tensor], rank: int) -> str:
        wanted = run.names
        if not torch.is_grad_enabled():  # so nothing that is stored depends on weights
            wanted = [each for each in wanted if not each.startswith(STORED)]
        if names != wanted:
            return f"it returns and stores {len(names)} tensors instead of {len(wanted)}"
        for i, (name, a, b) in enumerate(zip(names, got, run.want)):
            fault = _off(name, a, self._part(i, run, a, b, rank), bound=run.bound(name))
            if fault and name not in run.loose:
                return fault
        return ""

    def _weights(self, run: Run, i: int, x: Tensor, rank: int) -> Tensor:
        """Weights of a rank's output in the loss; zeros if its shape is wrong."""
        found = self._part(i, run, x, run.weights[i], rank) if i < len(run.weights) else torch.zeros_like(x)
        return found if found.shape == x.shape else torch.zeros_like(x)

    def _part(self, i: int, run: Run, got: Tensor, want: Tensor, rank: int) -> Tensor:
        """The part that a rank is allowed to have of the output or attribute number i."""
        stored = run.names[i].startswith(STORED) and not self.inside  # and the model has not been off
        if i == 0 or got.dim() != want.dim() or not (self.parts or stored):
            return want
        dims = [i for i, (a, b) in enumerate(zip(got.shape, want.shape, strict=True)) if a != b]
        if len(dims) != 1 or got.shape[dims[0]] * self.world_size != want.shape[dims[0]]:
            return want
        return want.chunk(self.world_size, dims[0])[rank]

    def _gradients(self, run: Run, split: nn.Module, ways: Mapping[str, Way], rank: int) -> str:
        wanted, least = run.gradients, run.least
        for name, parameter in split.named_parameters():
            want, got = wanted[name], parameter.grad
            if want is None:
                continue
            own = ways[name].part(want, (rank,)) if name in ways else want
            if got is None:
                got = torch.zeros_like(own)
            said = f"the gradient of {name.removeprefix('module.')}"
            scale = max(_top(want), least) / max(_top(own), least, 1e-9)
            fault = _off(said, got, own, least, run.bound(said, scale))
            if fault:
                return fault
        return ""


def _run(
    module: Call, inputs: Inputs, weights: Callable[[int, str, Tensor], Tensor]
) -> tuple[list[str], list[Tensor], list[Tensor]]:
    """As _results, and gradients of inputs, after a backward through all of these."""
    fresh = inputs.fresh()
    with torch.enable_grad():
        names, found = _results(module, fresh)
        counted = [(x, weights(i, name, x)) for i, (name, x) in enumerate(zip(names, found, strict=True))]
        loss = sum((x.masked_fill(~x.isfinite(), 0.0) * weight).sum() for x, weight in counted if x.requires_grad)
    if isinstance(loss, Tensor):
        loss.backward()
    return names, [x.detach() for x in found], fresh.gradients()


def _results(module: Call, inputs: Inputs) -> tuple[list[str], list[Tensor]]:
    """Names and values of what a call returns, and of what modules store in it with a gradient; all that is
    floating-point, as whole tensors. Raises ValueError if it returns nothing of that kind."""
    before = [x for _, x in _attributes(module)]
    outputs = module(*inputs.args, **inputs.kwargs)
    found = _floats(outputs) or _floats(getattr(outputs, "__dict__", {}))  # of a class that pytree does not know
    if not found:
        raise ValueError(f"it returns a {type(outputs).__name__} without floating-point tensors")
    names = [f"output {i}" for i in range(len(found))]
    old = set(map(id, before))
    for name, x in _attributes(module):
        own = [] if id(x) in old else _floats(x)
        names += [STORED + name] * len(own)
        found += own
    return names, found


def _attributes(module: Call) -> list[tuple[str, Tensor]]:
    """Tensors that depend on weights, in attributes of the modules inside; not views of parameters."""
    torchs = vars(nn.Module()).keys()
    return [
        (f"{name}.{key}".lstrip("."), x)
        for name, each in module.module.named_modules()
        for key, value in vars(each).items()
        if key not in torchs and isinstance(value, Tensor | list | tuple | dict)
        for x in tree_leaves(value)
        if isinstance(x, Tensor) and x.grad_fn is not None and (x._base is None or not x._base.is_leaf)
    ]


def _floats(values: Any) -> list[Tensor]:
    """The floating-point tensors among these, whole."""
    whole = [x.full_tensor() if isinstance(x, TokenShard | VocabShard) else x for x in _leaves(values)]
    return [x for x in whole if isinstance(x, Tensor) and x.is_floating_point()]


def _leaves(outputs: Any) -> list[Any]:
    """tree_leaves that also looks into dataclasses."""
    found: list[Any] = []
    for x in tree_leaves(outputs):
        own = is_dataclass(x) and not isinstance(x, type)
        found += _leaves([getattr(x, each.name) for each in fields(x)]) if own else [x]
    return found


def _tells(x: Tensor) -> bool:
    """Whether something can be compared with it: no value is NaN, and not all are infinite, as some in a mask are."""
    return not bool(x.isnan().any()) and (not x.numel() or bool(x.isfinite().any()))


def _off(name: str, got: Tensor, want: Tensor, least: float = 1e-9, bound: float = OFF) -> str:
    """What is wrong with a tensor, or ""."""
    if got.shape != want.shape:
        return f"{name} is {tuple(got.shape)} instead of {tuple(want.shape)}"
    error = _error(got, want, least)
    return "" if error <= bound else f"{name} is off by {error:.1e}"


def _error(got: Tensor, want: Tensor, least: float) -> float:
    """The largest difference, relative to the largest value or to `least` if that is larger."""
    if not want.numel():
        return 0.0
    got, want = got.detach(), want.detach()
    away = _largest(got - want)
    if not math.isfinite(away):
        equal = got == want  # infinities too, as in a mask
        away = float((got - want).abs().nan_to_num(math.inf).masked_fill(equal, 0.0).max())
    return away / max(_top(want), least)


def _top(x: Tensor) -> float:
    """The largest absolute value that is finite."""
    top = _largest(x.detach())
    return top if math.isfinite(top) else _largest(x.detach().masked_fill(~x.isfinite(), 0.0))


def _largest(x: Tensor) -> float:
    """The largest absolute value, in one pass and without a copy; NaN if one is."""
    if not x.numel():
        return 0.0
    low, high = x.aminmax()
    return max(-float(low), float(high))
