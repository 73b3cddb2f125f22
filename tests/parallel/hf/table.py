"""Writes docs/models.md: every transformers family, split and compared with itself on one device.

    python -m tests.parallel.hf.table > docs/models.md
    python -m tests.parallel.hf.table --composite          only the section of models with images, sound or an encoder
    python -m tests.parallel.hf.table --diffusion          only that of diffusion transformers
    python -m tests.parallel.hf.table --libraries > docs/libraries.md         models of other libraries

Runs parity.compare for each family on two and on four CPU ranks. Families with a plan for experts run once more on two
ranks, with whole experts behind the library's exchange. Each row reports this run only; no earlier results are reused.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from transformers import CONFIG_MAPPING

import fusedtp
from fusedtp.environment import environment
from tests.harness import WorldError, world

from . import composite, diffusion, libraries, parity
from .families import HEAD_ONLY, LARGE, OTHERS, UNPLANNED, families, towers

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
TOGETHER = 5  # families per call: imports and the call itself are paid once
Found = dict[str, Any]  # what parity.compare returns, or {"refused": why}


def measured(
    names: Sequence[str], ranks: int, options: dict[str, Any], compare: Callable[..., Any] = parity.compare
) -> dict[str, Found]:
    """Family -> result of one run on this many ranks."""
    found: dict[str, Found] = {}
    for i in range(0, len(names), TOGETHER):
        some = list(names[i : i + TOGETHER])
        try:
            these = world(ranks).run(parity.attempt, some, options, compare, timeout=400)[0]
        except WorldError as error:
            these = dict.fromkeys(some, str(error))
        found |= {name: each if isinstance(each, dict) else refusal(each) for name, each in these.items()}
        print(f"{len(found)} of {len(names)} on {ranks} ranks {options or ''}", file=sys.stderr, flush=True)
    return found


def refusal(traceback: str) -> Found:
    """The error message at the end of a traceback: the lines after the last indented one."""
    lines = traceback.strip().splitlines()
    last = max((i for i, line in enumerate(lines) if line.startswith("  File ")), default=-1)
    message = [line for line in lines[last + 1 :] if line and not line.startswith("    ")]
    return {"refused": " ".join(line.strip() for line in message) or lines[-1]}


def exact(found: Found) -> bool:
    """Nothing is off by more than roundoff explains, and greedy decoding gives the same tokens."""
    return "refused" not in found and found["excess"] <= 1 and found.get("generate", True)


def share_fused(*runs: Found) -> str:
    """Share of calls to split linears that communicated inside the matmul; "-" if no linear is split."""
    calls = [run["calls"] for run in runs if "refused" not in run]
    total = sum(sum(each.values()) for each in calls)
    return f"{sum(each.get('fused', 0) for each in calls) / total:.0%}" if total else "-"


def status(*runs: Found) -> str:
    """fused, partly (modules stay whole), unproved (split as planned, without a proof beforehand), or refused."""
    if any("refused" in run for run in runs):
        return "refused"
    whole = {module for run in runs for module in run["whole"]}
    return "fused" if not whole else "unproved" if whole == {""} else "partly"


def row(name: str, two: Found, four: Found, experts: Found | None) -> str:
    """One line of the table."""

    def pair(key: str) -> str:
        return " / ".join("-" if "refused" in run else f"{run[key]:.0e}" for run in (two, four))

    gathered: dict[str, int] = {} if "refused" in two else two["gathered"]
    cells = [
        name,
        status(two, four) if (exact(two) and exact(four)) or "refused" in {**two, **four} else "NOT EXACT",
        pair("logits"),
        pair("gradient"),
        " / ".join("-" if "refused" in run else said(run.get("generate")) for run in (two, four)),
        share_fused(two, four),
        ", ".join(f"{operation} {n}" for operation, n in gathered.items()) or "nothing",
        "" if experts is None else "no" if "refused" in experts else said(exact(experts)),
    ]
    return f"| {' | '.join(cells)} |"


def parts_row(name: str, two: Found, four: Found) -> str:
    """One line of the table of models without a plan."""
    shares = " / ".join("-" if "refused" in run else f"{run['share']:.0%}" for run in (two, four))
    cells = row(name, two, four, None).split(" | ")
    return " | ".join([cells[0], shares if "NOT" not in cells[1] else cells[1], *cells[2:-1]]) + " |"


def said(equal: bool | None) -> str:
    return "-" if equal is None else "yes" if equal else "NO"


def reasons(two: dict[str, Found], four: dict[str, Found], experts: dict[str, Found]) -> list[str]:
    """Table rows for what is not split and why, in the words of the first run that says so."""
    rows: dict[tuple[str, str], str] = {}
    for name in two:
        for run in (two[name], four[name]):
            for module, why in ({"": run["refused"]} if "refused" in run else run["whole"]).items():
                rows.setdefault((name, f"`{module}`" if module else "the model"), why)
        if "refused" in experts.get(name, {}):
            rows[name, "whole experts on ranks"] = experts[name]["refused"]
    together: dict[tuple[str, str], list[str]] = {}
    for (name, module), why in rows.items():
        together.setdefault((name, why), []).append(module)
    return [f"| {name} | {', '.join(modules)} | {escaped(why)} |" for (name, why), modules in together.items()]


def escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


class Section(NamedTuple):
    """A section with columns of its own that can be measured alone.

    about      what its models are; the number of those that are exact follows
    packages   whose versions it states
    command    that prints it; default: of this file, with `option`
    """

    heading: str
    about: str
    option: str
    packages: tuple[str, ...]
    cases: Sequence[str]
    compare: Callable[..., Any]
    command: str = ""

    def measured(self) -> tuple[dict[str, Found], ...]:
        return tuple(measured(sorted(self.cases), ranks, {}, self.compare) for ranks in (2, 4))

    def lines(self, two: dict[str, Found], four: dict[str, Found]) -> list[str]:
        here = environment()
        versions = ", ".join(f"{name} {version(name)}" for name in self.packages)
        alone = (
            f"python -m tests.parallel.hf.table {self.option} > models.md.new      (only this section is measured anew)"
        )
        return [
            self.heading,
            "",
            self.about,
            f"{sum(exact(two[name]) and exact(four[name]) for name in two)} of {len(two)} are exact. "
            "*Whole*: the outermost modules",
            "without a split weight matrix, on 2 ranks; the reasons follow.",
            "",
            f"    {self.command or alone}",
            "",
            f"{here['processor']}, {here['cores']} cores; Python {here['python']}, {versions}, "
            f"fusedtp {here['fusedtp']}.",
            "",
            "| family | split | logits | gradient | tokens | fused | gathered | whole |",
            "|---|---|---|---|---|---:|---|---|",
            *(section_row(name, two[name], four[name]) for name in two),
            "",
            "| family | module | why |",
            "|---|---|---|",
            *reasons(two, four, {}),
            "",
        ]


SECTIONS = [
    Section(
        "## Models with images, sound or an encoder",
        "Whole models of images or sounds, and encoder-decoders, with real inputs of each kind and labels.",
        "--composite", ("torch", "transformers"), list(composite.CASES), composite.compare,
    ),
    Section(
        "## Diffusion transformers",
        "Models of diffusers. A plan is inferred from an example of their inputs; *logits* are their outputs. Most "
        'are split\n"partly" since the projections from and to latents and captions are whole.',
        "--diffusion", ("torch", "diffusers"), list(diffusion.CASES), diffusion.compare,
    ),
]  # fmt: skip


LIBRARIES = Section(
    "# Models of other libraries",
    "Small models with random weights, split by a plan that `fusedtp.parallelize` infers from an example of their\n"
    "inputs, beside the same model on one device; *logits* are their outputs. A projection that\n"
    "packs queries with fewer keys (litgpt: Llama) is held whole, and each rank computes its heads of it.",
    "--libraries",
    ("torch", "torchvision", "timm", "open_clip_torch", "openai-whisper", "x-transformers", "vit-pytorch", "litgpt"),
    list(libraries.CASES),
    libraries.compare,
    "python -m tests.parallel.hf.table --libraries > docs/libraries.md      (`make libraries-table`)",
)


def section_row(name: str, two: Found, four: Found) -> str:
    whole = "" if "refused" in two else ", ".join(f"`{each}`" for each in two["unsplit"])
    cells = row(name, two, four, None).removesuffix(" |").split(" | ")
    return " | ".join([*cells[:-1], whole]) + " |"


def with_section(page: str, section: list[str]) -> str:
    """The page with this section in place of the one with its heading, or before "Without a plan"."""
    begin = page.find(f"{section[0]}\n")
    begin = page.index("## Without a plan\n") if begin < 0 else begin
    end = page.index("\n## ", begin) + 1 if page.startswith(section[0], begin) else begin
    return page[:begin] + "\n".join(section) + "\n" + page[end:]


HEAD = [
    "| family | split | logits | gradient | tokens | fused | gathered | experts |",
    "|---|---|---|---|---|---:|---|---|",
]


def page(
    two: dict[str, Found],
    four: dict[str, Found],
    experts: dict[str, Found],
    text: tuple[dict[str, Found], ...],
    sections: Sequence[list[str]],
    inferred: tuple[dict[str, Found], ...],
) -> str:
    """The whole page. On two and on four ranks, `text`: towers; `inferred`: models without a plan. sections: lines of
    SECTIONS."""
    here, names = environment(), list(two)
    kinds = [status(two[name], four[name]) for name in names]
    every = [exact(two[name]) and exact(four[name]) for name in names]
    versions = ", ".join(f"{name} {here['packages'][name]}" for name in ("torch", "transformers"))
    why = reasons(two, four, experts) + reasons(*text, {}) + reasons(*inferred, {})
    ran = [name for name, found in inferred[0].items() if "refused" not in found]
    lines = [
        "# Models of transformers",
        "",
        "Every family with a tensor-parallel plan and a causal language model: a small one in fp32 with random "
        "weights,",
        "split by `fusedtp.parallelize` with sequence parallelism, beside the same model on one device.",
        "",
        f"Plans are those of transformers. It plans only the head of {', '.join(HEAD_ONLY)};",
        "there this library completes the plan by one of its own or by what it infers.",
        "",
        "    python -m tests.parallel.hf.table > docs/models.md      (`make models-table`)",
        "",
        f"{here['processor']}, {here['cores']} cores; Python {here['python']}, {versions}, fusedtp {here['fusedtp']}.",
        "",
        f"- {sum(every)} of {len(names)} are exact on 2 and on 4 ranks: "
        "logits, loss and every gradient differ by no more",
        "  than roundoff explains (`tests/parallel/hf/parity.py` says how that is measured), and greedy decoding gives",
        "  the same tokens.",
        f"- Split as planned: {kinds.count('fused')}. Partly, because some modules stay whole (below): "
        f"{kinds.count('partly')}.",
        f"  As planned, but without a proof beforehand: {kinds.count('unproved')}. Refused: {kinds.count('refused')}.",
        f"- {sum(bool(found.get('calls', {}).get('fused')) for found in two.values())} run with sequence parallelism"
        " and fused linear layers; the others split no linear layer.",
        f"- {share_fused(*two.values(), *four.values())} of all calls of split linear layers "
        "communicated inside their matmul.",
        f"- {sum(exact(found) for found in experts.values())} of {len(experts)} with a plan for experts "
        "are exact with whole experts behind the exchange too.",
        "",
        "Columns: *logits* and *gradient*: the largest difference relative to the largest value, on 2 / 4 ranks; of",
        "gradients, the worst parameter. *Tokens*: whether greedy decoding gave the same. "
        "*Fused*: the share of calls of",
        "split linear layers whose communication ran inside the matmul. *Gathered*: operations of the model's own code",
        "that needed all tokens, in one forward and backward. *Experts*: exact with",
        "`experts=fusedtp.ExpertSplit()`; empty where the model has no plan for it.",
        "",
        *HEAD,
        *(row(name, two[name], four[name], experts.get(name)) for name in names),
        "",
        "## Towers of text",
        "",
        "Text models with a plan and without a language model of their own: those inside vision-language models, and",
        f"encoders. {sum(exact(text[0][name]) and exact(text[1][name]) for name in text[0])} of {len(text[0])} are "
        "exact; in place of logits, the last hidden states are compared.",
        "",
        *HEAD,
        *(row(name, text[0][name], text[1][name], None) for name in text[0]),
        "",
        *(line for lines in sections for line in lines),
        "## Without a plan",
        "",
        "Causal language models without a plan of transformers: one is inferred ([guide.md](guide.md#plans)).",
        f"{sum(exact(inferred[0][name]) and exact(inferred[1][name]) for name in ran)} of {len(ran)} are exact; "
        f"{len(inferred[0]) - len(ran)} more are refused, or run no small copy (below). *Parts*: of the elements",
        "of weight matrices, those of which a rank holds a part, on 2 / 4 ranks; a projection that packs queries with",
        "fewer keys (falcon, gpt_bigcode) is held whole, and each rank computes its heads of it.",
        "",
        "| family | parts | logits | gradient | tokens | fused | gathered |",
        "|---|---|---|---|---|---:|---|",
        *(parts_row(name, inferred[0][name], inferred[1][name]) for name in ran),
        "",
    ]
    if why:
        lines += ["## What is not split, and why", "", "| family | module | why |", "|---|---|---|", *why, ""]
    lines += [
        "## Not compared",
        "",
        *(f"- {name}: no small configuration: {reason}" for name, reason in LARGE.items()),
        *(f"- {name}: {reason}" for name, reason in OTHERS.items()),
    ]
    return "\n".join(lines)


def main() -> None:
    warnings.filterwarnings("ignore")
    if LIBRARIES.option in sys.argv[1:]:
        print("\n".join(LIBRARIES.lines(*LIBRARIES.measured())).rstrip("\n"))
        return
    for section in SECTIONS:
        if section.option in sys.argv[1:]:
            print(with_section(PAGE.read_text(), section.lines(*section.measured())).rstrip("\n"))
            return
    names = sorted(name for name in families() if name not in LARGE)
    with_experts = [name for name in names if getattr(CONFIG_MAPPING[name], "base_model_ep_plan", None)]
    two = measured(names, 2, {})
    experts = measured(with_experts, 2, {"experts": fusedtp.ExpertSplit()})
    text = tuple(measured(sorted(towers()), ranks, {}) for ranks in (2, 4))
    sections = [section.lines(*section.measured()) for section in SECTIONS]
    inferred = tuple(measured(sorted(UNPLANNED), ranks, {}) for ranks in (2, 4))
    print(page(two, measured(names, 4, {}), experts, text, sections, inferred))


if __name__ == "__main__":
    main()
