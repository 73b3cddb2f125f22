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

A large model is tried with two layers of each kind in each of its lists (kinds.py); the others get the same words.
Layers of one kind (same classes, shapes and settings) are tried once. What no trial proves stays whole, and `Inferred`
says why. Names are not used, with one exception: an attribute with "head" in its name is a number of heads, and so is
axis h of a Rearrange layer, if it is as long.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from .candidates import candidates, concatenated, grouped, widths_between
from .foreign_styles import features_of, is_linear
from .kinds import Short, kind_of, names_of, shortened
from .local_view import (
    ARGUMENT,
    NUMBERS,
    heads_in,
    local_view,
    names_in,
    parameters_of,
    value_of,
)
from .multihead import OUT, WORD, is_multihead
from .observe import Seen, guesses, join, key, observe, recorded, required
from .plan import generic, matches, parent_of, refuse
from .proof import _seeding
from .styles import computed
from .trial import Inputs, Trial, random_copy, sharing
from .twin import NoTwin, twin_of

# A module with more elements than this is not run as a whole; its children are run instead. A model with more than
# LARGEST_MODEL is run with fewer layers, if it then has no more than LARGEST_SHORT.
LARGEST = 500_000_000
LARGEST_MODEL, LARGEST_SHORT = 20_000_000, 200_000_000
NEEDS = " needs "
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


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
    inputs = {} if example is None else recorded(model, Inputs((), dict(example)), kind_of)
    large = twin is None and sum(p.numel() for p in model.parameters()) > LARGEST_MODEL
    short = shortened(model) if large else None
    options: dict[str, Any] = {"real": model, "world_size": max(world_size, 2), "sequence_parallel": sequence_parallel}
    if short is not None:
        search = Search(short.model, **options, inputs=inputs, largest=LARGEST_SHORT, parts=False)
        search.run()
        if search.concluded and search.lengthen(short) and not search.wrong(search.words):
            return search.result(model)
    search = Search(model if twin is None else twin, **options, inputs=inputs, largest=LARGEST_MODEL, small=bool(twin))
    search.run()
    if large:
        search.drop_wrong()
    return search.result(model)


def small_copy(model: Any) -> nn.Module | None:
    """A small copy of a transformers model, with the same number of heads; None if it has none."""
    config = getattr(model, "config", None)
    heads = getattr(config, "num_attention_heads", None) or getattr(config, "num_heads", None)
    try:
        with _seeding:
            return twin_of(model, heads) if isinstance(heads, int) else None
    except NoTwin:
        return None


class Unit(NamedTuple):
    """A module with layers that are split, and the words for them; the run in which a trial of it was recorded."""

    name: str
    words: dict[str, str]
    seen: Seen
    copied: nn.Module


@dataclass(frozen=True)
class Verdict:
    """The result of trying candidates on a module: names inside it -> style names, or why there are none."""

    words: dict[str, str]
    why: str = ""


class Search:
    """One search over `model`, which is the model `real`, a copy with fewer layers, or its small copy.

    inputs    kind of a module (see kind_of) -> its inputs; they are guessed for modules that are not listed
    largest   number of elements up to which the model is run as a whole
    small     it is the small copy: names of its layers mean nothing in the real model
    parts     units may return parts, since a trial of the whole model shows what becomes of these; not so with fewer
              layers, of which the model may use other ones in another way
    """

    def __init__(
        self,
        model: nn.Module,
        real: nn.Module,
        world_size: int,
        sequence_parallel: bool,
        inputs: Mapping[Hashable, Inputs],
        largest: int,
        small: bool = False,
        parts: bool = True,
    ) -> None:
        self.inputs, self.largest, self.small, self.parts = inputs, largest, small, parts
        self.real = dict(real.named_modules())
        self.reals: dict[str, list[nn.Module]] = {}
        for name, module in real.named_modules():
            self.reals.setdefault(generic(name), []).append(module)
        self.model, self.world_size, self.sequence_parallel = model, world_size, sequence_parallel
        self.named: dict[str, Any] = dict(model.named_modules())
        self.words: dict[str, str] = {}
        self.units: list[Unit] = []  # accepted, in order
        self.why: dict[str, str] = {}  # linear layer -> why it is not split
        self.known: dict[Any, Verdict] = {}
        self.concluded = False
        self.whole: Trial | None = None  # of one forward of all layers
        self.trials: dict[Any, Trial | str] = {}

    def run(self) -> None:
        """Fill `words` and `why`."""
        whole = self._search()
        if whole is not None:
            self._conclude(whole)
            if not self.concluded and self.parts:  # nothing has shown what becomes of the parts
                self.parts = False
                self.units, self.words, self.why, self.known = [], {}, {}, {}
                self.trials.clear()
                self._search()
        if not self.concluded:
            self._drop_shared()
            self._drop_uneven()

    def _search(self) -> Seen | None:
        """Find units; the record of the whole model, if it runs."""
        whole = None
        for seen, copied in self._observed("", self.model):
            whole = seen if seen.root == "" else whole
            self._attentions(seen, copied)
            self._per_sample(seen, copied)
            for name, x in seen.calls:
                if name not in self.words:
                    self._as_rows(seen, copied, name, x)
        self._join_views()
        self._drop_uneven()
        return whole

    # --- observe ---------------------------------------------------------------------------------------------

    def _observed(self, name: str, module: nn.Module) -> Iterator[tuple[Seen, nn.Module]]:
        """Records of running the outermost modules that can be run."""
        elements = sum(p.numel() for p in module.parameters())
        if not _worth(module):
            return
        if elements <= (LARGEST if name else self.largest) and not isinstance(module, CONTAINERS[:2]):
            copied = random_copy(module)
            given = self.inputs.get(kind_of(name, self.real.get(name, module)))
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
            self._take(unit, verdict, seen, copied, {layer: "no_fast_path"} if fast else None)

    def _as_rows(self, seen: Seen, copied: nn.Module, row: str, x: Tensor) -> None:
        """Try this linear layer as the row-parallel partner of layers that ran before it."""
        for columns, rows in self._columns(seen, row, x):
            unit = _around([*rows, *columns], self.named, seen)
            if unit is None or key(x) in seen.given[unit]:  # what the unit gets is not made inside it
                continue
            verdict = self._judge(seen, copied, unit, columns, rows)
            if not verdict.why:
                self._take(unit, verdict, seen, copied)
                return
            for name in (*columns, *rows):
                self.why[name] = _telling(self.why.get(name, ""), verdict.why)

    def _take(
        self, unit: str, verdict: Verdict, seen: Seen, copied: nn.Module, more: dict[str, str] | None = None
    ) -> None:
        """more: words of modules outside the unit that belong to it."""
        found = {join(unit, name): word for name, word in verdict.words.items()} | (more or {})
        self.units.append(Unit(unit, found, seen, copied))
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
        if unit is not None and concatenated({sizes[name][1] for name in ahead}, width):
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
                    self._take(unit, verdict, seen, copied)

    # --- try -------------------------------------------------------------------------------------------------

    def _judge(self, seen: Seen, copied: nn.Module, unit: str, columns: list[str], rows: list[str]) -> Verdict:
        module = self.named[unit]
        columns, rows = ([_within(unit, name) for name in names] for names in (columns, rows))
        taken = self._taken(unit)
        kind = (kind_of(unit, module), tuple(columns), tuple(rows), tuple(sorted(taken.items())))
        if kind not in self.known:
            self.known[kind] = self._try(seen, copied, unit, columns, rows, taken)
        return self.known[kind]

    def _taken(self, unit: str) -> dict[str, str]:
        """Names inside a unit -> the words that they have already."""
        return {_within(unit, n): w for n, w in self.words.items() if n == unit or n.startswith(_below(unit))}

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
        real = self.reals.get(generic(unit), [None])[-1]
        wide = widths_between(real, columns, rows) & widths_between(module, columns, rows)
        ran = {name for name, _ in module.named_parameters() if trial.ran(name)}
        within = {_within(unit, name): given for name, given in seen.inputs.items() if name.startswith(_below(unit))}
        given = {**within, "": seen.inputs[unit]}
        for words in candidates(module, columns, rows, taken, wide, ran | within.keys(), given):
            fault = trial.verdict({**taken, **words})
            while fault and (at := _partial(fault, {**taken, **words}, module)):
                words = {**words, at: "replicated_with_grad_allreduce"}
                fault = trial.verdict({**taken, **words})
            if not fault and not self._fits(unit, words, columns, rows):
                fault = "its small copy is, but the model has other numbers of heads"
            if not fault:
                return Verdict(words)
            why = _telling(why, f"split over {self.world_size} ranks, {fault}")
        return Verdict({}, why)

    def _fits(self, unit: str, words: dict[str, str], columns: list[str], rows: list[str]) -> bool:
        """Whether numbers of heads in words that were found on a small copy are those of the model."""
        heads = heads_in(words.get(columns[0], "")) if columns else ()
        if not self.small or not heads:
            return True

        def reals(name: str) -> list[Any]:
            return self.reals.get(generic(join(unit, name)), [])

        packs, takes = ([features_of(each) for each in reals(name)] for name in (columns[0], rows[0]))
        fits = [heads in grouped(out, width, {heads[0]}) for (_, out), (width, _) in zip(packs, takes, strict=True)]
        for name, word in words.items():
            for count in filter(NUMBERS.fullmatch, names_in(word)):
                value = value_of(self.named[join(unit, name)], count)
                fits += [value_of(each, count) == value for each in reals(name)]
        return all(fits) and bool(packs)

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
                    parts=self.parts and seen.root == "",
                )  # fmt: skip
            except Exception as error:
                self.trials[key] = f"{type(error).__name__}: {error}"
        return self.trials[key]

    # --- conclude --------------------------------------------------------------------------------------------

    def _join_views(self) -> None:
        """Let modules of one kind get the arguments of one of them cut, if a trial says that they may.

        A first layer may compute for all heads what the others get as an argument.
        """
        views: dict[Any, dict[str, None]] = {}
        # those with arguments first: they begin with the number of heads that the arguments have
        for name, word in sorted(self.words.items(), key=lambda each: not ARGUMENT.search(each[1])):
            views.setdefault(_view(name, word), {}).update(dict.fromkeys(names_in(word)))
        for unit in self.units:
            now = {name: self.words[name] for name in unit.words}  # a later unit may have added to a word
            joined = {
                name: local_view(tuple(views[_view(name, word)]))
                for name, word in now.items()
                if names_in(word) and _takes(self.named[name], views[_view(name, word)])
            }
            if any(now[name] != word for name, word in joined.items()):
                trial = self._trial(unit.seen, unit.copied, unit.name)
                within = {**self._taken(unit.name), **{_within(unit.name, name): word for name, word in joined.items()}}
                if isinstance(trial, Trial) and not trial.verdict(within):
                    unit.words.update(joined)
                    self.words.update(joined)

    def _drop_uneven(self) -> None:
        """For a plan from a small copy: leave units whole that differ between layers of one kind.

        Patterns could not describe them in the model.
        """
        if not self.small:
            return
        patterns = self._patterns()
        for found in self._kinds():
            if not all(patterns[name] for name in found):
                self.why.update(dict.fromkeys(found, "layers of the same kind would be split differently"))
                self.units = [each for each in self.units if each.words.keys().isdisjoint(found)]
        self.words = {name: word for each in self.units for name, word in each.words.items()}

    def _patterns(self) -> dict[str, str]:
        """Name -> a pattern that matches it and others with the same style only, or ""."""
        every = names_of(self.model)
        fits: dict[tuple[str, str], bool] = {}
        found: dict[str, str] = {}
        for name, word in self.words.items():
            tried = dict.fromkeys((generic(name), _of_lists(name, self.named)))
            for pattern in tried:
                if (pattern, word) not in fits:
                    fits[pattern, word] = all(self.words.get(at) == word for at in every if matches(pattern, at))
            found[name] = next((pattern for pattern in tried if fits[pattern, word]), "")
        return found

    def _kinds(self) -> list[dict[str, str]]:
        """Words of units of one kind, together: with equal names but for numbers.

        In a plan from a small copy, units are of one kind even if they share only some layers or parameters: no pattern
        tells them apart in the model.
        """
        kinds: list[tuple[set[str], dict[str, str]]] = []
        for unit in self.units:
            patterns = {generic(name) for name, word in unit.words.items() if not _of_code(word)}
            same = [each for each in kinds if each[0] == patterns or (self.small and each[0] & patterns)]
            kinds = [each for each in kinds if each not in same]
            words = {name: word for _, each in same for name, word in each.items()} | unit.words
            kinds.append((patterns.union(*(each for each, _ in same)), words))
        return [words for _, words in kinds]

    def _conclude(self, seen: Seen) -> None:
        """Prove all units together, with the embedding and the head.

        If that fails, add units kind by kind, dropping those that break the whole model, and then the ends.
        """
        try:
            trial = Trial(
                random_copy(self.model), seen.inputs[""], self.world_size,
                sequence_parallel=self.sequence_parallel, inside=False,
            )  # fmt: skip
        except Exception:  # its units ran, but the model has no output to compare
            return
        self.concluded = True
        ends = _ends(self.model, self.named, seen)
        every = {**self.words, **ends}
        if self.words and len(every) == len(self.words) + len(ends) and not trial.verdict(every):
            self.words = every
            return
        if self.words and trial.verdict(self.words):
            self._keep_right(trial.verdict)
        if not self.words:
            return
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
                name: [unit.name for unit in self.units if name.startswith(_below(unit.name))]
                for each in shared
                for name in each
            }
            mixed = [each for each in shared if not all(within[name] for name in each)]
            bad = {unit: each[0] for each in mixed for name in each for unit in within[name]}
            if not bad:
                break
            for unit in self.units:
                if unit.name in bad:
                    self.why.update(dict.fromkeys(unit.words, f"{bad[unit.name]} is also used outside {unit.name}"))
            self.units = [each for each in self.units if each.name not in bad]
            self.words = {name: word for each in self.units for name, word in each.words.items()}

    def wrong(self, words: Mapping[str, str]) -> str:
        """What one forward of all layers shows to be wrong with these words; "" if it cannot be run."""
        elements = sum(p.numel() for p in self.model.parameters())
        if elements > LARGEST:
            return ""
        if self.whole is None:
            copied, kind = random_copy(self.model), kind_of("", self.real[""])
            given = self.inputs.get(kind)
            for inputs in guesses(self.model) if given is None else [given]:
                try:
                    self.whole = Trial(
                        copied, inputs, self.world_size, sequence_parallel=self.sequence_parallel, inside=False,
                        forward=True,
                    )  # fmt: skip
                    break
                except Exception:  # another guess may do
                    continue
        return "" if self.whole is None else self.whole.verdict(words)

    def drop_wrong(self) -> None:
        """Leave units whole that one forward of all layers shows to be wrong."""
        if self.words and self.wrong(self.words):
            self._keep_right(self.wrong)

    def _keep_right(self, fault_of: Callable[[Mapping[str, str]], str]) -> None:
        """Add units kind by kind, and leave those whole with which the whole model has a fault."""
        self.words = {}
        for found in self._kinds():
            fault = fault_of({**self.words, **found})
            if fault:
                self.why.update(dict.fromkeys(found, f"the whole model differs when it is split: {fault}"))
            else:
                self.words.update(found)

    def lengthen(self, short: Short) -> bool:
        """Give layers that the short copy lacks the words of those of their kind; False if these differ in them."""
        if any(self._taken(layer) != self._taken(kept[0]) for kept in short.lacks.values() for layer in kept):
            return False
        words = {}
        for name in names_of(self.real[""]):
            at = ""
            for part in name.split(".") if name else []:
                at = join(at, part)
                at = short.lacks[at][0] if at in short.lacks else at
            if at in self.words:
                words[name] = self.words[at]
        self.words, self.model, self.named = words, self.real[""], self.real
        return True

    # --- result ----------------------------------------------------------------------------------------------

    def result(self, model: nn.Module) -> Inferred:
        """Patterns if all modules of a kind have the same style; otherwise names, unless they are a small copy's."""
        patterns = self._patterns()
        plan = {patterns[name] or name: word for name, word in self.words.items() if patterns[name] or not self.small}
        whole: dict[str, str] = {}
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


def _partial(fault: str, words: Mapping[str, str], module: nn.Module) -> str:
    """The module without a style whose gradient a trial found wrong: each rank may have that of its heads. Else ""."""
    found = re.match(r"the gradient of (\S+) is off", fault)
    at = parent_of(found[1]) if found else ""
    return at if at and at not in words and not is_linear(module.get_submodule(at)) else ""


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


def _telling(first: str, second: str) -> str:
    """The more informative of two reasons: values that differ or what ranks cannot share, rather than a torch error."""

    def says(why: str) -> int:
        return 0 if NEEDS in why else 1 if re.search(r"\b(?!ValueError)\w+(Error|Exception): ", why) else 2

    return second if not first or says(second) > says(first) else first


def _view(name: str, word: str) -> tuple[str, frozenset[str]]:
    """Equal for local views of one kind of module that divide the same attributes."""
    return generic(name), frozenset(each for each in names_in(word) if not ARGUMENT.fullmatch(each))


def _of_code(word: str) -> bool:
    """Whether a word is for the code of a module rather than for its weights."""
    return bool(names_in(word)) or word == "no_fast_path"


def _takes(module: Any, names: Iterable[str]) -> bool:
    """Whether a local view of the module may list all these: its forward has each argument, none is listed twice."""
    arguments = [found[1] for name in names if (found := ARGUMENT.fullmatch(name))]
    return len(set(arguments)) == len(arguments) and parameters_of(module).keys() >= set(arguments)


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
