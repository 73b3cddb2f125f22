"""python -m bench.markdown RESULT.json: prints a saved result as the tables of docs/measured.md, docs/gpu.md or
docs/benchmarks.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .cpu import gap


def operations(result: dict[str, Any]) -> str:
    """One row per case: milliseconds, the speedup, and the share of gloo's overhead that is removed."""
    lines = [
        "| operation | dtype | tokens x K x N | | matmuls alone | gloo | fusedtp | gloo / fusedtp | removed |",
        "|---|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in result["operations"]["rows"]:
        case = row["case"]
        times = [f"{1e3 * row[way]['median']:.1f}" for way in ("bare", "gloo", "ours")]
        lines.append(
            f"| `{case['operation']}` | {case['dtype']} | {case['tokens']} x {case['k']} x {case['n']} "
            f"| {'fwd+bwd' if case['backward'] else 'fwd'} | {' | '.join(times)} "
            f"| {row['ratio']:.2f} | {row['share_removed']:.2f} |"
        )
    return "\n".join(lines)


def training_step(result: dict[str, Any]) -> str:
    """One row per way to run the step: seconds by dtype."""
    steps = result["training_step"]
    lines = ["| | " + " | ".join(step["dtype"] for step in steps) + " |", "|---|" + "---:|" * len(steps)]
    for way in steps[0]["seconds"]:
        lines.append(f"| {way} | " + " | ".join(f"{s['seconds'][way]['median']:.3f} s" for s in steps) + " |")
    lines.append("| gap closed | " + " | ".join(f"{gap(step)['gap closed']:.0%}" for step in steps) + " |")
    return "\n".join(lines)


def foreign(result: dict[str, Any]) -> str:
    """The suite `hf`: one column per model and dtype, one row per way to run it, then derived figures."""
    results = result["results"]
    lines = ["| | " + " | ".join(f"{each['model']} {each['dtype']}" for each in results) + " |"]
    lines.append("|---|" + "---:|" * len(results))
    for way in dict.fromkeys(way for each in results for way in each["seconds"]):
        spreads = [each["seconds"].get(way) for each in results]
        cells = ["" if spread is None else f"{spread['median']:.3f} s" for spread in spreads]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    for name, form in (("ours / same", ".3f"), ("gap closed", ".0%")):
        found = [each["figures"].get(name) for each in results]
        lines.append(f"| {name} | " + " | ".join("" if x is None else format(x, form) for x in found) + " |")
    return "\n".join(lines)


def trainer(result: dict[str, Any]) -> str:
    """The suite `train`: one row per schedule and number of ranks, then overhead and checkpoint in words."""
    lines = [
        "| schedule | ranks | stages of a rank | idle | quartiles | order | formula | idle / order | step / order |",
        "|---|---:|---:|---:|---|---:|---:|---:|---:|",
    ]
    told = []
    for row in result["rows"]:
        if row["suite"] != TRAIN:
            continue
        shape, figures = row["shape"], row["figures"]
        if shape.get("part") != "bubble" or not figures:
            told += [f"- {shape['part']}: {row['note']}"] if row["note"] else []
            continue
        low, high = figures["bubble_low"], figures["bubble_high"]
        by_formula, ratio = figures["formula_bubble"], figures["bubble_ratio"]
        lines.append(
            f"| `{shape['schedule']}` | {row['ranks']} | {figures['stages_of_a_rank']} | {figures['bubble']:.1%} "
            f"| {low:.1%} to {high:.1%} | {figures['ideal_bubble']:.1%} "
            f"| {'' if by_formula is None else format(by_formula, '.1%')} "
            f"| {'' if ratio is None else format(ratio, '.2f')} | {figures['step_ratio']:.3f} |"
        )
    return "\n".join([*lines, "", *told])


TRAIN = "train"  # the suite whose rows have a table of their own
RIVALS = {  # suite -> (the baseline, ours)
    "matmul": ("torch.matmul (cuBLAS)", "fusedtp triton"),
    "grouped-matmul": ("torch grouped_mm", "fusedtp triton"),
    "fp8": ("torch.matmul (cuBLAS)", "fusedtp fp8"),
    "pointwise": ("Liger-Kernel", "fusedtp"),
    "block": ("torch.compile", "fusedtp"),
    "train-step": ("torch.compile", "fusedtp"),
}


def engines(result: dict[str, Any], **only: Any) -> str:
    """One table per suite, kind of shape and dtype, in microseconds: one row per shape that matches `only`, one column
    per engine, then the time of the suite's baseline over ours, and MFU if it was measured.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        if row["seconds"] and row["suite"] != TRAIN and all(row["shape"].get(k, v) == v for k, v in only.items()):
            groups.setdefault((row["suite"], tuple(row["shape"]), row["dtype"]), []).append(row)
    tables = []
    for (suite, _, dtype), rows in groups.items():
        names = list(dict.fromkeys(row["engine"] for row in rows))
        shapes = list({str(row["shape"]): row["shape"] for row in rows}.values())
        common = [k for k, v in shapes[0].items() if all(shape[k] == v for shape in shapes)]
        told = ", ".join(f"{k} {shapes[0][k]}" for k in common)
        fields = [k for k in shapes[0] if k not in common]
        rival, ours = RIVALS.get(suite, ("", ""))
        rival = rival if ours in names else ""
        mfu = any("mfu" in row.get("figures", {}) for row in rows)
        header = [*fields, *names, *([f"{rival} / {ours}"] if rival else []), *(["MFU"] if mfu else [])]
        lines = [f"`{suite}`, {told}, {dtype}, us:", "", "| " + " | ".join(header) + " |"]
        lines.append("|" + "---|" * len(fields) + "---:|" * (len(header) - len(fields)))
        for shape in shapes:
            us = {r["engine"]: 1e6 * r["seconds"]["median"] for r in rows if r["shape"] == shape}
            cells = [str(shape[k]) for k in fields]
            cells += [f"{us[name]:.0f}" if name in us else "" for name in names]
            if rival:
                cells += [f"{us[rival] / us[ours]:.2f}" if rival in us and ours in us else ""]
            if mfu:
                found = [r["figures"].get("mfu") for r in rows if (r["shape"], r["engine"]) == (shape, ours)]
                cells += [f"{found[0]:.1%}" if found and found[0] else ""]
            lines.append("| " + " | ".join(cells) + " |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def machine(result: dict[str, Any]) -> str:
    """The machine, the versions and the command of a measurement."""
    about = result["machine"]
    if about.get("gpu"):
        state = about["gpu_state"]  # None where nvidia-smi did not answer
        driver = f" (driver {state['driver_version']})" if state else ""
        return (
            f"{about['gpu']}{driver}, Python {about['python']}, "
            f"torch {about['torch']}, Triton {about['triton']}, commit {about['commit']}, `{about['command']}`"
        )
    return (
        f"{about['cpu']} ({about['capability']}, {about['cores']} cores), Python {about['python']}, "
        f"torch {about['torch']}, `{about['command']}`"
    )


def shown(result: dict[str, Any]) -> str:
    """The machine and the tables of a result. Raises ValueError for a result of another kind."""
    if not isinstance(result, dict):
        raise ValueError("not a result")
    if "machine" in result and "rows" in result:
        suites = {row["suite"] for row in result["rows"]}
        tables = [engines(result)] if suites != {TRAIN} else []
        tables += [trainer(result)] if TRAIN in suites else []
    elif "machine" in result and "results" in result:
        tables = [foreign(result)]
    elif "machine" in result and "operations" in result:
        tables = [operations(result), training_step(result)]
    else:
        raise ValueError(f"neither a result of a suite nor of `cpu` or `hf`: it holds {', '.join(result)}")
    return "\n\n".join([machine(result), *tables])


def main(argv: Sequence[str]) -> int:
    """Print the tables; 2 for a file that this command cannot show."""
    if len(argv) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        print(shown(json.loads(Path(argv[0]).read_text())))
    except (OSError, ValueError) as error:
        print(f"bench.markdown: {argv[0]}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
