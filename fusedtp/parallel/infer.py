"""Infer a plan for a model that has none: guess it from layer widths, keep what a trial proves.

    observe    run a small copy of the model, or run its modules one by one, on guessed inputs or on what they get when
               the model runs on the user's example (observe.py); record which linear layers run, in which order, on
               which inputs, and the arguments of every module
    guess      pair a linear layer of K inputs with earlier linear layers that share another input and output K
               features, two or three times K (packed), or K query features and fewer key and value features; in joint
               attention over two kinds of tokens, several such layers with all those before them
    try        run the smallest module around them whole and split over ranks (trial.py), with each kind of packing and
               each way to show local widths to the module's code (local_view.py); take the first that matches
    conclude   try everything taken at once in the whole copy, if that can be run

Layers of one kind (same classes, shapes and settings) are tried once. What no trial proves stays whole, and `Inferred`
says why. Names are not used, with one exception: an attribute with "head" in its name is a number of heads, and so is
axis h of a Rearrange layer, if it is as long.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from types import CodeType
from typing import Any, NamedTuple

from einops.layers.torch import Rearrange
from torch import Tensor, nn

from .local_view import (
    INPUT,
    features_of,
    is_conv1d,
    is_linear,
    is_norm_of_features,
    lengths,
    local_view,
    names_in,
    packed,
)
from .multihead import OUT, WORD, is_multihead
from .observe import Seen, guesses, join, key, observe, recorded, required
from .plan import generic, matches, parent_of, refuse
from .proof import _seeding
from .styles import computed
from .trial import Inputs, Trial, random_copy, sharing
from .twin import NoTwin, twin_of

# A module with more elements than this is not run as a whole; its children are run instead.
LARGEST = 500_000_000
LARGEST_MODEL = 20_000_000
NEEDS = " needs "
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
COUNTS_HEADS = re.compile(r"(?!.*(dim|size|width|group)).*head.*")
# Attributes that may equal a width by chance but count something else.
NO_WIDTH = re.compile(r"block|pos|seq|len|context|window|max|vocab|bucket|layer|rank")


class Inferred(NamedTuple):
    """The result of a search.

    plan     pattern of module names -> style name
    whole    pattern of linear layers -> why they are not split
    """

    plan: dict[str, str]
    whole: dict[str, str]


def infer_or_refuse(
    model: nn.Module, world_size: int, sequence_parallel: bool, example: Mapping[str, Any] | None = None
) -> Inferred:
    """`infer`; if no linear layer can be split, raises ValueError that says why for each of them."""
    found = infer(model, world_size, sequence_parallel, example)
    if not found.plan and found.whole:
        advice = "it has no tp_plan and none could be inferred; pass one, such as plan={'...up_proj': 'colwise'}"
        if example is None:
            advice += ", or an example of the model's inputs, example={'x': x}"
        refuse(model, world_size, [advice, *(f"{name}: {why}" for name, why in found.whole.items())])
    return found


def infer(
    model: nn.Module, world_size: int, sequence_parallel: bool = True, example: Mapping[str, Any] | None = None
) -> Inferred:
    """A plan with style names of foreign_plan.py, proved over world_size virtual ranks, and what stays whole.

    example   arguments of the model's forward, by name; default: inputs are guessed

    Both are empty if nothing can be split. Runs copies of the model's modules on the CPU; the model itself is not
    changed, and only run on an example. Raises ValueError if it cannot run on it.
    """
    linears = [name for name, module in model.named_modules() if is_linear(module)]
    if any(hasattr(m, "parallel") for m in model.modules()):
        return Inferred({}, {})
    if not _worth(model):
        others = {generic(n): m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in linears}
        own = "{} has its own forward"
        return Inferred({}, {name: (computed(m) or [own.format(type(m).__name__)])[0] for name, m in others.items()})
    twin = small_copy(model) if example is None else None
    inputs = {} if example is None else recorded(model, Inputs((), dict(example)), _kind)
    search = Search(model if twin is None else twin, model, max(world_size, 2), sequence_parallel, inputs)
    search.run()
    return search.result(model, explicit=twin is None)


def small_copy(model: Any) -> nn.Module | None:
    """A small copy of a transformers model, with the same number of heads; None if it has none."""
    config = getattr(model, "config", None)
    heads = getattr(config, "num_attention_heads", None) or getattr(config, "num_heads", None)
    try:
        with _seeding:
            return twin_of(model, heads) if isinstance(heads, int) else None
    except NoTwin:
        return None


@dataclass(frozen=True)
class Verdict:
    """The result of trying candidates on a module: names inside it -> style names, or why there are none."""

    words: dict[str, str]
    why: str = ""


class Search:
    """One search over `model`, which is the model `real` or its small copy.

    inputs   kind of a module (see _kind) -> its inputs; they are guessed for modules that are not listed
    """

    def __init__(
        self,
        model: nn.Module,
        real: nn.Module,
        world_size: int,
        sequence_parallel: bool,
        inputs: Mapping[Hashable, Inputs] | None = None,
    ) -> None:
        self.inputs = dict(inputs or {})
        self.real = {generic(name): module for name, module in real.named_modules()}
        self.model, self.world_size, self.sequence_parallel = model, world_size, sequence_parallel
        self.named: dict[str, Any] = dict(model.named_modules())
        self.words: dict[str, str] = {}
        self.units: list[tuple[str, dict[str, str]]] = []  # accepted, in order
        self.why: dict[str, str] = {}  # linear layer -> why it is not split
        self.known: dict[Any, Verdict] = {}
        self.concluded = False
        self.trials: dict[Any, Trial | str] = {}

    def run(self) -> None:
        """Fill `words` and `why`."""
        whole = None
        for seen, copied in self._observed("", self.model):
            whole = seen if seen.root == "" else whole
            self._attentions(seen, copied)
            self._per_sample(seen, copied)
            for name, x in seen.calls:
                if name not in self.words:
                    self._as_rows(seen, copied, name, x)
        if whole is not None:
            self._conclude(whole)
        if not self.concluded:
            self._drop_shared()

    # --- observe ---------------------------------------------------------------------------------------------

    def _observed(self, name: str, module: nn.Module) -> Iterator[tuple[Seen, nn.Module]]:
        """Records of running the outermost modules that can be run."""
        elements = sum(p.numel() for p in module.parameters())
        if not _worth(module):
            return
        if elements <= (LARGEST if name else LARGEST_MODEL) and not isinstance(module, CONTAINERS[:2]):
            copied = random_copy(module)
            given = self.inputs.get(_kind(name, module))
            for inputs in guesses(module) if given is None else [given]:
                seen = observe(name, sharing(copied), inputs)
                if seen is not None:
                    yield seen, copied
                    return
            needed = ", ".join(p.name for p in required(module))
            for child, inner in module.named_modules():
                if is_linear(inner):
                    self.why[join(name, child)] = (
                        f"{type(module).__name__} could not be run: it{NEEDS}{needed or 'other inputs'}"
                        if given is None
                        else f"a copy of {type(module).__name__} could not be run on what it got in the example"
                    )
        for child, inner in module.named_children():
            yield from self._observed(join(name, child), inner)

    # --- guess -----------------------------------------------------------------------------------------------

    def _attentions(self, seen: Seen, copied: nn.Module) -> None:
        """Split torch's own attention, which calls none of its layers."""
        for unit, module in self.named.items():
            if unit not in seen.inputs or unit in self.words or not is_multihead(module):
                continue
            verdict = self._judge(seen, copied, unit, [""], [OUT])
            if verdict.why:
                self.why[join(unit, OUT)] = _telling(self.why.get(join(unit, OUT), ""), verdict.why)
                continue
            layer = parent_of(unit)
            fast = isinstance(self.named[layer], nn.TransformerEncoderLayer)
            self._take(unit, verdict, {layer: "no_fast_path"} if fast else None)

    def _as_rows(self, seen: Seen, copied: nn.Module, row: str, x: Tensor) -> None:
        """Try this linear layer as the row-parallel partner of layers that ran before it."""
        for columns, rows in self._columns(seen, row, x):
            unit = _around([*rows, *columns], self.named, seen)
            if unit is None or key(x) in seen.given[unit]:  # what the unit gets is not made inside it
                continue
            verdict = self._judge(seen, copied, unit, columns, rows)
            if not verdict.why:
                self._take(unit, verdict)
                return
            for name in (*columns, *rows):
                self.why[name] = _telling(self.why.get(name, ""), verdict.why)

    def _take(self, unit: str, verdict: Verdict, more: dict[str, str] | None = None) -> None:
        """more: words of modules outside the unit that belong to it."""
        found = {join(unit, name): word for name, word in verdict.words.items()} | (more or {})
        self.units.append((unit, found))
        self.words.update(found)

    def _columns(self, seen: Seen, row: str, x: Tensor) -> list[tuple[list[str], list[str]]]:
        """Groups of layers that may produce the features the row consumes, likeliest first, with all rows of the group.

        Layers with a common input, latest first; then layers with several inputs: cross-attention, and joint attention
        over two kinds of tokens, each of which has a row of its own; then layers whose outputs are concatenated, as
        those of attention and an MLP side by side.
        """
        width = features_of(self.named[row])[0]
        at = next(i for i, (name, _) in enumerate(seen.calls) if name == row)
        groups: dict[Any, list[str]] = {}
        for name, own in seen.calls[:at]:
            out = features_of(self.named[name])[1]
            if name not in self.words and key(own) != key(x) and not _across(name, row, self.named):
                groups.setdefault((key(own), out > width), []).append(name)
        found = []
        for (_, wider), names in reversed(groups.items()):
            outs = [features_of(self.named[name])[1] for name in names]
            if wider:
                found += [[name] for name in reversed(names)]
            elif width in outs and all(width % out == 0 for out in outs):
                found.append(names)
        single = [(columns, [row]) for columns in found[:3]]
        every = [name for names in groups.values() for name in names]
        among = [name for name in every if parent_of(name) == parent_of(row)]
        exact = [name for name in among if features_of(self.named[name])[1] == width]
        if exact and exact not in found:
            single.append((exact, [row]))
        unit = _around([row], self.named, seen)
        within = "" if unit is None else _below(unit)
        sizes = {name: features_of(self.named[name]) for name, _ in seen.calls if name.startswith(within)}
        joint = [name for name in every if name in sizes and width % sizes[name][1] == 0]
        rows = [name for name, _ in seen.calls[at:] if name in sizes and sizes[name][0] == width]
        if unit is not None and len(joint) > 1 and (joint, rows) not in single:
            single.append((joint, rows))
        ahead = [name for name in every if name in sizes]
        if unit is not None and _concatenated({sizes[name][1] for name in ahead}, width):
            single.append((ahead, [row]))
        return single

    def _per_sample(self, seen: Seen, copied: nn.Module) -> None:
        """Split layers that turn one vector of a sample into several (scales and shifts of adaptive norms).

        Their outputs are small, [B, n H], and are gathered.
        """
        shapes = {name: x.shape for name, x in seen.calls}
        samples = {shape[0] for shape in shapes.values() if len(shape) > 2}
        alone = Counter(map(parent_of, shapes))
        for name, shape in shapes.items():
            few, many = features_of(self.named[name])
            unit = _around([name], self.named, seen)
            one_each = len(shape) == 2 and shape[0] in samples
            if one_each and many >= 2 * few and alone[parent_of(name)] == 1 and unit is not None:
                verdict = self._judge(seen, copied, unit, [name], [])
                if not verdict.why:
                    self._take(unit, verdict)

    # --- try -------------------------------------------------------------------------------------------------

    def _judge(self, seen: Seen, copied: nn.Module, unit: str, columns: list[str], rows: list[str]) -> Verdict:
        module = self.named[unit]
        columns, rows = ([_within(unit, name) for name in names] for names in (columns, rows))
        taken = {_within(unit, n): w for n, w in self.words.items() if n == unit or n.startswith(_below(unit))}
        kind = (_kind(unit, module), tuple(columns), tuple(rows), tuple(sorted(taken.items())))
        if kind not in self.known:
            self.known[kind] = self._try(seen, copied, unit, columns, rows, taken)
        return self.known[kind]

    def _try(
        self, seen: Seen, copied: nn.Module, unit: str, columns: list[str], rows: list[str], taken: dict[str, str]
    ) -> Verdict:
        module: Any = self.named[unit]
        trial = self._trial(seen, copied, unit)
        if isinstance(trial, str):
            return Verdict({}, trial)
        if is_multihead(module):
            words = {"": WORD, OUT: "rowwise"}
            fault = trial.verdict(words)
            return Verdict({}, f"split over {self.world_size} ranks, {fault}") if fault else Verdict(words)
        idle = self._idle(trial, seen, unit, [join(unit, name) for name in (*columns, *rows)])
        if idle:
            return Verdict({}, f"{idle} beside it did not run in the trial")
        still = trial.idle([*columns, *rows])
        if len(still) > 1:  # one may be: the queries of tokens that the last layer of joint attention drops
            return Verdict({}, f"{still[0]} and {still[1]} do not matter in a trial without several different tokens")
        why = ""
        wide = _widths(self.real.get(generic(unit)), columns, rows) & _widths(module, columns, rows)
        ran = {name for name, _ in module.named_parameters() if trial.ran(name)}
        ran |= {_within(unit, name) for name in seen.inputs if name.startswith(_below(unit))}
        for words in _candidates(module, columns, rows, taken, wide, ran):
            fault = trial.verdict({**taken, **words})
            if not fault:
                return Verdict(words)
            why = _telling(why, f"split over {self.world_size} ranks, {fault}")
        return Verdict({}, why)

    def _idle(self, trial: Trial, seen: Seen, unit: str, names: list[str]) -> str:
        """A linear layer that did not run in the modules around these; with other inputs it would, on split tensors."""
        around = {_around([name], self.named, seen) for name in names}
        inside = {name: join(unit, name) for name, module in self.named[unit].named_modules() if is_linear(module)}
        return next(
            (
                name
                for name, full in inside.items()
                if not trial.ran(f"{name}.weight") and _around([full], self.named, seen) in around
            ),
            "",
        )

    def _trial(self, seen: Seen, copied: nn.Module, unit: str) -> Trial | str:
        key = (seen.root, unit)
        if key not in self.trials:
            self.trials.clear()  # keep only one: each holds gradients
            inside = copied.get_submodule(_within(seen.root, unit))
            try:
                self.trials[key] = Trial(
                    inside, seen.inputs[unit], self.world_size, sequence_parallel=self.sequence_parallel,
                    parts=seen.root == "",
                )  # fmt: skip
            except Exception as error:
                self.trials[key] = f"{type(error).__name__}: {error}"
        return self.trials[key]

    # --- conclude --------------------------------------------------------------------------------------------

    def _conclude(self, seen: Seen) -> None:
        """Prove all units together; if that fails, add them kind by kind, dropping those that break the whole model.

        Then add the embedding and the head.
        """
        try:
            trial = Trial(
                random_copy(self.model), seen.inputs[""], self.world_size, parts=False,
                sequence_parallel=self.sequence_parallel,
            )  # fmt: skip
        except Exception:  # its units ran, but the model has no output to compare
            return
        if self.words and trial.verdict(self.words):
            kinds: dict[tuple[str, ...], dict[str, str]] = {}
            for _, found in self.units:
                kinds.setdefault(tuple(map(generic, found)), {}).update(found)
            self.words = {}
            for found in kinds.values():
                fault = trial.verdict({**self.words, **found})
                if fault:
                    self.why.update(dict.fromkeys(found, f"the whole model differs when it is split: {fault}"))
                else:
                    self.words.update(found)
        self.concluded = True
        if not self.words:
            return
        ends = _ends(self.model, self.named, seen)
        for tried in (ends, *({name: word} for name, word in ends.items())):
            if self.words.keys().isdisjoint(tried) and not trial.verdict({**self.words, **tried}):
                self.words.update(tried)
                break

    def _drop_shared(self) -> None:
        """Leave a unit whole if some of its parameters are also used outside of all units."""
        names: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        shared = [each for each in names.values() if len(each) > 1]
        while True:
            within = {
                name: [unit for unit, _ in self.units if name.startswith(_below(unit))]
                for each in shared
                for name in each
            }
            mixed = [each for each in shared if not all(within[name] for name in each)]
            bad = {unit: each[0] for each in mixed for name in each for unit in within[name]}
            if not bad:
                break
            for unit, found in self.units:
                if unit in bad:
                    self.why.update(dict.fromkeys(found, f"{bad[unit]} is also used outside {unit}"))
            self.units = [each for each in self.units if each[0] not in bad]
            self.words = {name: word for _, found in self.units for name, word in found.items()}

    # --- result ----------------------------------------------------------------------------------------------

    def result(self, model: nn.Module, explicit: bool) -> Inferred:
        """Patterns if all modules of a kind have the same style; otherwise names, if explicit (not from a twin)."""
        plan: dict[str, str] = {}
        whole: dict[str, str] = {}
        every = [*self.named, *(name for name, _ in self.model.named_parameters(remove_duplicate=False))]
        for name, word in self.words.items():
            for pattern in dict.fromkeys((generic(name), _of_lists(name, self.named))):
                if {self.words.get(other) for other in every if matches(pattern, other)} == {word}:
                    plan[pattern] = word
                    break
            else:
                if explicit:
                    plan[name] = word
                else:
                    whole[name] = "layers of the same kind would be split differently"
        own = dict(model.named_modules())
        split = {name for name in own if any(matches(pattern, name) for pattern in plan)}
        for name, module in own.items():
            if is_linear(module) and name not in split:
                reason = self.why.get(name) or next(
                    (why for other, why in self.why.items() if generic(other) == generic(name)), ""
                )
                alone = any(generic(other) == generic(name) for other in split)
                whole[name if alone else generic(name)] = reason or "no linear layer was found to pair with it"
        if plan and not self.concluded:
            unknown = "inputs of the whole model are unknown; parallelize takes an example of them"
            large = "a copy of the whole model cannot be run"
            whole[""] = f"each split module was proved alone, because {large if self.inputs else unknown}"
        return Inferred(plan, whole)


def _worth(module: nn.Module) -> bool:
    """Whether it contains layers to split: two linear layers, or an attention, which is one beside its last layer."""
    return sum(is_linear(each) + is_multihead(each) for each in module.modules()) > 1


def _around(names: list[str], named: dict[str, Any], seen: Seen) -> str | None:
    """The smallest module that ran and contains all of them."""
    at = parent_of(names[0])
    while True:
        inside = all(name.startswith(_below(at)) for name in names)
        if inside and at in seen.inputs:
            return at
        if at == seen.root or not at:
            return None
        at = parent_of(at)


def _across(name: str, row: str, named: dict[str, Any]) -> bool:
    """Whether a stack separates them: they are in different layers of it, or only one of them is in it."""
    ours, theirs = name.split("."), row.split(".")
    common = 0
    while ours[common] == theirs[common]:
        common += 1
    stack = isinstance(named[".".join(ours[:common])], CONTAINERS)
    if stack and len(ours) - common > 1 and len(theirs) - common > 1:
        return True
    return any(
        isinstance(named[".".join(parts[:i])], CONTAINERS)
        for parts in (ours, theirs)
        for i in range(common + 1, len(parts) - 1)
    )


def _widths(module: nn.Module | None, columns: list[str], rows: list[str]) -> set[str]:
    """Names of attributes, on modules directly around these layers, that hold the number of features between them."""
    try:
        linears = {name: module.get_submodule(name) for name in (*columns, *rows)} if module is not None else {}
    except AttributeError:
        linears = {}
    if module is None or not linears:
        return set()
    between = {features_of(linears[name])[0] for name in rows} | {features_of(linears[name])[1] for name in columns}
    return {
        name
        for name, value in _attributes(module, [*columns, *rows]).items()
        if value in between and not COUNTS_HEADS.fullmatch(name) and not NO_WIDTH.search(name)
    }


def _candidates(
    module: Any, columns: list[str], rows: list[str], taken: dict[str, str], wide: set[str], ran: set[str]
) -> Iterator[dict[str, str]]:
    """Candidate style names for these layers and the modules around them, the likeliest first.

    ran: modules and parameters inside that the trial uses; of others it could not tell whether they may be split.
    """
    if not rows:
        yield dict.fromkeys(columns, "colwise_gather_output")
        return
    row = rows[0]
    inside = {name: module.get_submodule(name) for name in (*columns, *rows)}
    attributes = _attributes(module, [*columns, row])
    heads = tuple(name for name in attributes if COUNTS_HEADS.fullmatch(name))
    widths = tuple(name for name in attributes if name in wide)
    first = parent_of(columns[0])
    narrow = ((), (INPUT,)) if features_of(inside[columns[0]])[0] == features_of(inside[row])[0] else ((),)
    counts = {attributes[name] for name in heads}
    norms, by_head = _norms(module, columns), _by_head(module, [*columns, row], counts)
    by_head = {name: word for name, word in by_head.items() if name in ran}
    beside = [norms, {}, norms | by_head, by_head]  # split no more than is needed
    ways = _ways(inside, columns, rows)
    for linears in [way | each for way in ways for i, each in enumerate(beside) if each not in beside[:i]]:
        tried: list[dict[str, str]] = []
        for claimed, within in product(narrow, (False, True)):
            for names in (heads, (*heads, *widths), ()):
                views: dict[str, str] = {}
                for at in dict.fromkeys((first, parent_of(row), *_parents(columns), "")):
                    each = module.get_submodule(at) if at else module
                    own = tuple(n for n in names if type(each.__dict__.get(n)) is int) + (
                        claimed if at == first else ()
                    )
                    if own:
                        views[at] = local_view((*names_in(taken.get(at, "")), *own))
                    elif isinstance(each, nn.TransformerEncoderLayer):
                        views[at] = "no_fast_path"
                    if within and names:
                        views |= {name: word for name, word in _inside(at, each, counts).items() if name in ran}
                if views not in tried:
                    tried.append(views)
                    yield linears | views


def _ways(inside: dict[str, Any], columns: list[str], rows: list[str]) -> list[dict[str, str]]:
    """Style names for linear layers: of packed matrices first, if their sizes allow it.

    A row that takes two outputs of A and B features in one is like g = gcd(A, B) wide matrices packed: every rank has a
    part of each, in the same order as its parts of the outputs, if these are split as A / g and B / g matrices.
    """
    outs = {name: features_of(inside[name])[1] for name in columns}
    width = features_of(inside[rows[0]])[0]
    prefix = {name: "conv1d_" if is_conv1d(each) else "" for name, each in inside.items()}
    if _concatenated(set(outs.values()), width):
        unit = math.gcd(*outs.values())
        row = {rows[0]: packed("rowwise", width // unit)}
        return [{name: packed("colwise", out // unit) for name, out in outs.items()} | row]
    several = {2 * width: (2, 1), 3 * width: (3, 1)} if len(columns) == 1 else {}
    return [
        {name: prefix[name] + packed("colwise", n) for name in columns}
        | {name: f"{prefix[name]}rowwise" for name in rows}
        for n in several.get(outs[columns[0]], (1,))
    ]


def _concatenated(outs: set[int], width: int) -> bool:
    """Whether outputs of two widths may be concatenated to this one."""
    return len(outs) == 2 and sum(outs) == width


def _norms(module: Any, columns: list[str]) -> dict[str, str]:
    """Norms beside these layers over as many features as one of them outputs."""
    widths = {features_of(module.get_submodule(name))[1] for name in columns}
    return {
        join(at, name): "norm_of_all_heads"
        for at in dict.fromkeys(_parents(columns))
        for name, each in module.get_submodule(at).named_children()
        if is_norm_of_features(each) and each.normalized_shape[0] in widths
    }


def _by_head(module: Any, linears: list[str], heads: set[int]) -> dict[str, str]:
    """Style names for parameters around these layers with a first or last dimension as long as there are heads."""
    found: dict[str, str] = {}
    for at in dict.fromkeys((*_parents(linears), "")):
        for name, parameter in module.get_submodule(at).named_parameters(recurse=False):
            if parameter.dim() > 1 and parameter.shape[-1] in heads:
                found[join(at, name)] = "rowwise"
            elif parameter.dim() and parameter.shape[0] in heads:
                found[join(at, name)] = "grouped_gemm"
    return found


def _inside(at: str, module: nn.Module, heads: set[int]) -> dict[str, str]:
    """Style names for children without parameters that know the number of heads, such as the kernel of an attention.

    In a Rearrange layer of einops it is the length of axis h.
    """
    found: dict[str, str] = {}
    for name, each in module.named_children():
        if any(True for _ in each.parameters()):
            continue
        known = re.compile("h|(n_|num_)?heads?") if isinstance(each, Rearrange) else COUNTS_HEADS
        values = lengths(each).items()
        own = tuple(key for key, n in values if type(n) is int and n in heads and known.fullmatch(key))
        found |= {join(at, name): local_view(own)} if own else {}
    return found


def _parents(names: list[str]) -> list[str]:
    return [parent_of(name) for name in names]


def _attributes(module: Any, linears: list[str]) -> dict[str, int]:
    """Attributes of the modules directly around these layers that are integers above one."""
    found: dict[str, int] = {}
    for at in dict.fromkeys((*_parents(linears), "")):
        each = module.get_submodule(at) if at else module
        found.update({name: value for name, value in each.__dict__.items() if type(value) is int and value > 1})
    return found


def _ends(model: Any, named: dict[str, Any], seen: Seen) -> dict[str, str]:
    """Token embedding and head: those that a transformers model names, else the largest embedding, the last linear."""
    tables = [m for m in named.values() if isinstance(m, nn.Embedding)]
    first: Any = max(tables, key=lambda m: m.num_embeddings, default=None)
    last: Any = named[seen.calls[-1][0]] if seen.calls else None
    if not tables:
        return {}
    if hasattr(model, "get_input_embeddings"):
        try:
            first, last = model.get_input_embeddings(), model.get_output_embeddings()
        except (AttributeError, NotImplementedError):
            return {}
    found: dict[str, str] = {}
    for name, module in named.items():
        if module is first and isinstance(module, nn.Embedding):
            found[name] = "embedding_rowwise"
        elif module is last and isinstance(module, nn.Linear):
            found[name] = "colwise_gather_output"
    return found


SIMPLE = (int, float, str, bool, type(None))
INDEX = re.compile(r".*(idx|index|layer_(id|number)).*")


def _kind(name: str, module: nn.Module) -> tuple[Any, ...]:
    """Equal for the same layer of several blocks that are alike."""
    return generic(name), _fingerprint(module)


def _fingerprint(module: nn.Module) -> tuple[Any, ...]:
    """Equal for two modules of one kind: classes, shapes, settings, functions. Their index in a stack is included only
    if code of the class other than __init__ reads it; transformers code is skipped: it reads it to find a cache."""
    found: list[Any] = []
    for name, each in module.named_modules():
        kind: Any = type(each)
        reads = _reads(kind)
        own = [(key, _setting(x)) for key, x in vars(each).items() if not INDEX.fullmatch(key) or key in reads]
        shapes = [(key, tuple(p.shape)) for key, p in each.named_parameters(recurse=False)]
        found.append((name, type(each), tuple(shapes), tuple(own)))
    return tuple(found)


def _setting(value: Any) -> Any:
    """Equal if the attributes of two modules are equal; a function with a closure is only equal to itself."""
    if type(value) in SIMPLE:
        return value
    if isinstance(value, (tuple, list)):
        return tuple(map(_setting, value))
    if isinstance(value, dict):
        return tuple((key if isinstance(key, str) else "", _setting(x)) for key, x in value.items())
    if isinstance(value, partial):
        return _setting(value.func), _setting(value.args), _setting(value.keywords)
    if not callable(value) or isinstance(value, nn.Module):
        return type(value)
    value = getattr(value, "__func__", value)
    closed = getattr(value, "__closure__", None) or getattr(value, "__defaults__", None)
    return id(value) if closed else getattr(value, "__code__", id(value))


@cache
def _reads(kind: Any) -> frozenset[str]:
    """Names that the code of a class reads outside __init__."""
    theirs = [
        each for each in kind.__mro__ if each.__module__.partition(".")[0] not in ("builtins", "torch", "transformers")
    ]
    todo = [getattr(f, "__code__", None) for each in theirs for key, f in vars(each).items() if key != "__init__"]
    found: set[str] = set()
    while todo:
        code = todo.pop()
        if isinstance(code, CodeType):
            found.update(code.co_names)
            todo += code.co_consts
    return frozenset(found)


def _telling(first: str, second: str) -> str:
    """The more informative of two reasons: values that differ or what ranks cannot share, rather than a torch error."""

    def says(why: str) -> int:
        return 0 if NEEDS in why else 1 if re.search(r"\b(?!ValueError)\w+(Error|Exception): ", why) else 2

    return second if not first or says(second) > says(first) else first


def _of_lists(name: str, named: dict[str, Any]) -> str:
    """The name with * for indices in a ModuleList, but not in a Sequential."""
    parts = name.split(".")
    return ".".join(
        "*" if part.isdigit() and isinstance(named[".".join(parts[:i])], nn.ModuleList) else part
        for i, part in enumerate(parts)
    )


def _below(name: str) -> str:
    return f"{name}." if name else ""


def _within(outer: str, name: str) -> str:
    return "" if name == outer else name.removeprefix(_below(outer))
