"""Infer a plan for a model that has none: guess it from layer widths, keep what a trial proves.

    observe    run a small copy of the model, or run its modules that take hidden states one by one; record which
               linear layers run, in which order, on which inputs, and the arguments of every module
    guess      pair a linear layer of K inputs with earlier linear layers that share another input and output K
               features, two or three times K (packed), or K query features and fewer key and value features
    try        run the smallest module around them whole and split over ranks (trial.py), with each kind of packing and
               each way to show local widths to the module's code (local_view.py); take the first that matches
    conclude   try everything taken at once in the whole copy, if that can be run

Layers of one kind (same classes, shapes and settings) are tried once. What no trial proves stays whole, and `Inferred`
says why. Names are not used, with one exception: an attribute with "head" in its name is a number of heads.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from .local_view import INPUT, features_of, is_conv1d, is_linear, local_view, names_in
from .plan import generic, matches, parent_of, refuse
from .proof import _seeding
from .styles import computed
from .trial import Inputs, Trial, random_copy, sharing
from .twin import NoTwin, twin_of

# A module with more elements than this is not run as a whole; its children are run instead.
LARGEST = 500_000_000
LARGEST_MODEL = 20_000_000
BATCH, LENGTH = 2, 5
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


def infer_or_refuse(model: nn.Module, world_size: int, sequence_parallel: bool) -> Inferred:
    """`infer`; if no linear layer can be split, raises ValueError that says why for each of them."""
    found = infer(model, world_size, sequence_parallel)
    if not found.plan and found.whole:
        advice = "it has no tp_plan and none could be inferred; pass one, such as plan={'...up_proj': 'colwise'}"
        refuse(model, world_size, [advice, *(f"{name}: {why}" for name, why in found.whole.items())])
    return found


def infer(model: nn.Module, world_size: int, sequence_parallel: bool = True) -> Inferred:
    """A plan with style names of foreign_plan.py, proved over world_size virtual ranks, and what stays whole.

    Both are empty if nothing can be split. Runs copies of the model's modules on the CPU; the model itself is neither
    run nor changed.
    """
    linears = [name for name, module in model.named_modules() if is_linear(module)]
    if any(hasattr(m, "parallel") for m in model.modules()):
        return Inferred({}, {})
    if len(linears) < 2:
        others = {generic(n): m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in linears}
        own = "{} has its own forward"
        return Inferred({}, {name: (computed(m) or [own.format(type(m).__name__)])[0] for name, m in others.items()})
    twin = small_copy(model)
    search = Search(model if twin is None else twin, model, max(world_size, 2), sequence_parallel)
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


@dataclass
class Seen:
    """Records of one run.

    root     the module that ran
    inputs   module -> arguments of its first call
    calls    (linear layer, its input), in order
    """

    root: str
    inputs: dict[str, Inputs] = field(default_factory=dict)
    calls: list[tuple[str, Tensor]] = field(default_factory=list)


@dataclass(frozen=True)
class Verdict:
    """The result of trying candidates on a module: names inside it -> style names, or why there are none."""

    words: dict[str, str]
    why: str = ""


class Search:
    """One search over `model`, which is the model `real` or its small copy."""

    def __init__(self, model: nn.Module, real: nn.Module, world_size: int, sequence_parallel: bool) -> None:
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
        linears = [m for m in module.modules() if is_linear(m)]
        if len(linears) < 2:
            return
        if elements <= (LARGEST if name else LARGEST_MODEL) and not isinstance(module, CONTAINERS[:2]):
            copied = random_copy(module)
            for guess in _guesses(module):
                seen = _observe(name, sharing(copied), guess)
                if seen is not None:
                    yield seen, copied
                    return
            needed = ", ".join(p.name for p in _required(module))
            for child, inner in module.named_modules():
                if is_linear(inner):
                    self.why[_join(name, child)] = (
                        f"{type(module).__name__} could not be run: it{NEEDS}{needed or 'other inputs'}"
                    )
        for child, inner in module.named_children():
            yield from self._observed(_join(name, child), inner)

    # --- guess -----------------------------------------------------------------------------------------------

    def _as_rows(self, seen: Seen, copied: nn.Module, row: str, x: Tensor) -> None:
        """Try this linear layer as the row-parallel partner of layers that ran before it."""
        for columns in self._columns(seen, row, x):
            unit = _around([row, *columns], self.named, seen)
            if unit is None:
                continue
            verdict = self._judge(seen, copied, unit, columns, row)
            if not verdict.why:
                found = {_join(unit, name): word for name, word in verdict.words.items()}
                self.units.append((unit, found))
                self.words.update(found)
                return
            for name in (*columns, row):
                self.why[name] = _telling(self.why.get(name, ""), verdict.why)

    def _columns(self, seen: Seen, row: str, x: Tensor) -> list[list[str]]:
        """Groups of layers with a common input, latest first, that may produce the features the row consumes."""
        width = features_of(self.named[row])[0]
        before = seen.calls[: next(i for i, (name, _) in enumerate(seen.calls) if name == row)]
        groups: dict[Any, list[str]] = {}
        for name, own in before:
            out = features_of(self.named[name])[1]
            if name not in self.words and _key(own) != _key(x) and not _across(name, row, self.named):
                groups.setdefault((_key(own), out > width), []).append(name)
        found = []
        for (_, packed), names in reversed(groups.items()):
            outs = [features_of(self.named[name])[1] for name in names]
            if packed:
                found += [[name] for name in reversed(names)]
            elif width in outs and all(width % out == 0 for out in outs):
                found.append(names)
        among = [name for names in groups.values() for name in names if parent_of(name) == parent_of(row)]
        exact = [name for name in among if features_of(self.named[name])[1] == width]
        return found[:3] + [exact] * (len(exact) > 1 and exact not in found)  # cross-attention

    # --- try -------------------------------------------------------------------------------------------------

    def _judge(self, seen: Seen, copied: nn.Module, unit: str, columns: list[str], row: str) -> Verdict:
        module = self.named[unit]
        inside = [_within(unit, name) for name in (*columns, row)]
        taken = {_within(unit, n): w for n, w in self.words.items() if n == unit or n.startswith(_below(unit))}
        kind = (generic(unit), _fingerprint(module), tuple(inside), tuple(sorted(taken.items())))
        if kind not in self.known:
            self.known[kind] = self._try(seen, copied, unit, inside[:-1], inside[-1], taken)
        return self.known[kind]

    def _try(
        self, seen: Seen, copied: nn.Module, unit: str, columns: list[str], row: str, taken: dict[str, str]
    ) -> Verdict:
        trial = self._trial(seen, copied, unit)
        if isinstance(trial, str):
            return Verdict({}, trial)
        module: Any = self.named[unit]
        why = ""
        widths = _widths(self.real.get(generic(unit)), columns, row)
        for words in _candidates(module, columns, row, taken, widths & _widths(module, columns, row)):
            fault = trial.verdict({**taken, **words})
            if not fault:
                return Verdict(words)
            why = _telling(why, f"split over {self.world_size} ranks, {fault}")
        return Verdict({}, why)

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
        for name, word in self.words.items():
            for pattern in dict.fromkeys((generic(name), _of_lists(name, self.named))):
                if {self.words.get(other) for other in self.named if matches(pattern, other)} == {word}:
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
            whole[""] = "each split module was proved alone, because inputs of the whole model are unknown"
        return Inferred(plan, whole)


def _guesses(module: Any) -> Iterator[Inputs]:
    """Inputs that it might accept: those that its class names, token ids, hidden states."""
    generator = torch.Generator().manual_seed(1)
    config: Any = getattr(module, "config", None)
    main = getattr(module, "main_input_name", "")
    more = _without_cache(module, config)
    needed = [p.name for p in _required(module)]
    tables = [m for m in module.modules() if isinstance(m, nn.Embedding)]
    if main == "pixel_values" and hasattr(config, "image_size"):
        size = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
        image = torch.randn(BATCH, getattr(config, "num_channels", 3), size, size, generator=generator)
        yield Inputs((), {main: image, **more})
    if "grid_thw" in needed and isinstance(getattr(config, "patch_size", None), int):
        side, frames = 2 * getattr(config, "spatial_merge_size", 1), getattr(config, "temporal_patch_size", 1)
        width = getattr(config, "in_channels", 3) * frames * config.patch_size**2
        patches = torch.randn(BATCH * side**2, width, generator=generator)
        yield Inputs((), {needed[0]: patches, "grid_thw": torch.tensor([[1, side, side]] * BATCH)})
    if main == "input_features" and hasattr(config, "max_source_positions"):
        frames, bins = 2 * config.max_source_positions, getattr(config, "num_mel_bins", 1)
        sound = torch.randn(BATCH, bins, frames, generator=generator)
        ids = torch.randint(0, getattr(config, "vocab_size", 1), (BATCH, LENGTH), generator=generator)
        decoder = {"decoder_input_ids": ids} if getattr(config, "is_encoder_decoder", False) else {}
        yield Inputs((), {main: sound, **decoder, **more})
    if tables:
        most = tables[0].num_embeddings
        ids = torch.randint(min(3, most - 1), most, (BATCH, LENGTH), generator=generator)
        if main == "input_ids":
            mask = torch.ones_like(ids)
            mask[0, :2] = 0
            decoder = {"decoder_input_ids": ids} if getattr(config, "is_encoder_decoder", False) else {}
            yield Inputs((), {main: ids, "attention_mask": mask, **decoder, **more})
        elif len(_required(module)) == 1:
            yield Inputs((ids,), more)
    if len(_required(module)) == 1:
        widths = [features_of(m)[0] for m in module.modules() if is_linear(m)]
        for width in list(dict.fromkeys(widths))[:2]:
            yield Inputs((torch.randn(BATCH, LENGTH, width, generator=generator).requires_grad_(),), {})


def _without_cache(module: Any, config: Any) -> dict[str, Any]:
    """The argument that leaves out the cache, which would grow with each run of a trial."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    caches = any(getattr(each, "use_cache", False) for each in (config, text))
    kinds = {p.kind for name, p in inspect.signature(module.forward).parameters.items() if name != "use_cache"}
    takes = "use_cache" in inspect.signature(module.forward).parameters or inspect.Parameter.VAR_KEYWORD in kinds
    return {"use_cache": False} if caches and takes else {}


def _required(module: Any) -> list[inspect.Parameter]:
    """The first argument of its forward and those without defaults."""
    kinds = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    )
    found = [p for p in inspect.signature(module.forward).parameters.values() if p.kind in kinds]
    return [p for i, p in enumerate(found) if i == 0 or p.default is inspect.Parameter.empty]


def _observe(root: str, copied: nn.Module, inputs: Inputs) -> Seen | None:
    """Run it once; None if it raises."""
    seen = Seen(root)
    handles = []

    def keep(x: Any) -> Any:
        return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x

    for inner, module in copied.named_modules():

        def enter(module: Any, args: Any, kwargs: Any, name: str = _join(root, inner)) -> None:
            if name not in seen.inputs:
                seen.inputs[name] = Inputs(*tree_map(keep, (args, kwargs)))
            if is_linear(module) and args:
                seen.calls.append((name, args[0]))

        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
    try:
        with torch.enable_grad():
            fresh = inputs.fresh()
            copied(*fresh.args, **fresh.kwargs)
    except Exception:
        return None
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _key(x: Tensor) -> tuple[Any, ...]:
    """Calls with equal keys have the same input; the run keeps all inputs alive, so data_ptr identifies them."""
    return x.data_ptr(), x.numel()


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


def _widths(module: nn.Module | None, columns: list[str], row: str) -> set[str]:
    """Names of attributes, on modules directly around these layers, that hold the number of features between them."""
    try:
        linears = {name: module.get_submodule(name) for name in (*columns, row)} if module is not None else {}
    except AttributeError:
        linears = {}
    if module is None or not linears:
        return set()
    between = {features_of(linears[row])[0], *(features_of(linears[name])[1] for name in columns)}
    return {
        name
        for name, value in _attributes(module, [*columns, row]).items()
        if value in between and not COUNTS_HEADS.fullmatch(name) and not NO_WIDTH.search(name)
    }


def _candidates(
    module: Any, columns: list[str], row: str, taken: dict[str, str], wide: set[str]
) -> Iterator[dict[str, str]]:
    """Candidate style names for these layers and the modules around them, the likeliest first."""
    inside = {name: module.get_submodule(name) for name in (*columns, row)}
    prefix = {name: "conv1d_" if is_conv1d(each) else "" for name, each in inside.items()}
    width, outs = features_of(inside[row])[0], [features_of(inside[name])[1] for name in columns]
    ways = ["colwise"]
    if len(columns) == 1 and outs[0] in (2 * width, 3 * width):
        ways.insert(0, "packed_colwise" if outs[0] == 2 * width else "packed_colwise_3")
    attributes = _attributes(module, [*columns, row])
    heads = tuple(name for name in attributes if COUNTS_HEADS.fullmatch(name))
    widths = tuple(name for name in attributes if name in wide)
    first = parent_of(columns[0])
    narrow = ((), (INPUT,)) if features_of(inside[columns[0]])[0] == width else ((),)
    for way in ways:
        linears = {name: prefix[name] + way for name in columns} | {row: prefix[row] + "rowwise"}
        tried: list[dict[str, str]] = []
        for claimed in narrow:
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
                if views not in tried:
                    tried.append(views)
                    yield linears | views


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


def _join(outer: str, inner: str) -> str:
    return f"{outer}.{inner}".strip(".")


def _below(name: str) -> str:
    return f"{name}." if name else ""


def _within(outer: str, name: str) -> str:
    return "" if name == outer else name.removeprefix(_below(outer))
