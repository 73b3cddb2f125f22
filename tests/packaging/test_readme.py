"""The README's program runs unchanged. The figures in README and docs/measured.md equal the saved ones."""

from __future__ import annotations

import json
import re
import statistics
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

import fusedtp
from fusedtp.bench import markdown
from tests.harness import world

ROOT = Path(__file__).parents[2]


def run_program(_group: Any, program: str) -> tuple[list[tuple[int, ...]], str]:
    """The shapes of a split weight and of this rank's gradient, and the program's output."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with redirect_stdout(StringIO()) as printed:
        exec(compile(program, "split.py", "exec"), names)
    weight = names["model"].model.layers[1].mlp.down_proj.weight
    return [tuple(weight.shape), tuple(weight.grad.to_local().shape)], printed.getvalue()


@pytest.mark.slow
def test_the_block_of_the_readme_runs_on_two_ranks():
    pytest.importorskip("transformers")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    (program,) = [b for b in blocks if "torchrun --nproc-per-node 2" in b]
    for shapes, printed in world(2).run(run_program, program):
        assert shapes == [(256, 704), (256, 352)]
        assert re.search(r"mlp\.down_proj +matmul_reduce_scatter +chunked", printed)


def saved_result(name: str = "bench") -> dict[str, Any]:
    (path,) = (ROOT / "bench" / "results").glob(f"*cores/{name}.json")
    return json.loads(path.read_text())


def summary(rows: list[dict[str, Any]]) -> str:
    removed, ratios = [row["share_removed"] for row in rows], [row["ratio"] for row in rows]
    return (
        f"Over all of them, the geometric mean of gloo / fusedtp is {statistics.geometric_mean(ratios):.2f}; "
        f"the share removed is {statistics.median(removed):.2f} in the median and at least {min(removed):.2f}."
    )


def test_the_measured_tables_are_those_of_the_saved_result():
    result, text = saved_result(), (ROOT / "docs" / "measured.md").read_text()
    for part in (markdown.machine, markdown.operations, markdown.training_step):
        assert part(result) in text, part.__name__
    assert summary(result["operations"]["rows"]) in text


def test_the_table_of_models_of_transformers_is_that_of_the_saved_result():
    result, text = saved_result("hf"), (ROOT / "docs" / "measured.md").read_text()
    assert markdown.machine(result) in text
    assert markdown.foreign(result) in text


def test_the_tables_of_a_gpu_are_those_of_the_saved_results():
    text = (ROOT / "docs" / "gpu.md").read_text()
    paths = sorted((ROOT / "bench" / "results").glob("nvidia-*/*.json"))
    assert len({path.parent for path in paths}) > 1
    for path in paths:
        result = json.loads(path.read_text())
        only = {"skew": "balanced"} if path.stem == "experts" else {}
        assert markdown.machine(result) in text, path
        assert markdown.engines(result, **only) in text, path


def test_the_table_of_all_sizes_is_that_of_the_predicted_results():
    text = (ROOT / "docs" / "timed-schedule.md").read_text()
    rows = json.loads((ROOT / "bench" / "results" / "predicted" / "h100.json").read_text())["rows"]
    lines: dict[str, list[str]] = {}
    for key, row in rows.items():
        _, model, tokens = key.split()
        times = ", ".join(f"{row[name]:.0f}" for name in ("before", "fused", "copied") if name in row)
        name = f"{model.removeprefix('llama3-').upper()}, {tokens}"
        lines.setdefault(name, [name]).append(f"{times} ({row['unfused']:.0f})")
    assert len(lines) == 12
    for cells in lines.values():
        assert f"| {' | '.join(cells)} |" in text, cells
    by_copies = [row["copied"] / row["product"] for row in rows.values() if "copied" in row]
    assert len(by_copies) == 6 and f"at most {100 * (max(by_copies) - 1):.1f} % longer" in text


def tokens_of_triton(steps: list[list[Any]]) -> str:
    said = []
    for (begin, engine), (end, _) in zip(steps, [*steps[1:], [None, ""]], strict=True):
        if engine == "triton" and end is None:
            said.append(f"from {begin}" if begin else "always")
        elif engine == "triton":
            said.append(
                f"up to {end - 1}" if not begin else str(begin) if begin == end - 1 else f"{begin} to {end - 1}"
            )
    return ", ".join(said) or "never"


def test_the_table_of_predicted_crossovers_is_that_of_the_tables_that_ship():
    text, cells = (ROOT / "docs" / "tuning.md").read_text(), {}
    for name in ("nvidia-h100-80gb-hbm3", "nvidia-h200", "nvidia-a100-sxm4-80gb"):
        body = json.loads((ROOT / f"fusedtp/ops/tables/{name}.json").read_text())
        for entry in body["tables"]["predicted"]["entries"]:
            if entry["dtype"] == "bfloat16" and entry["operation"] != "all_gather_gated_matmul":
                key = f"{entry['world']}, {entry['operation']}, {entry['width']}"
                cells.setdefault(key, []).append(tokens_of_triton(entry["engines"]))
    assert len(cells) == 18 and all(len(row) == 3 for row in cells.values())
    for key, row in cells.items():
        assert f"| {key} | {' | '.join(row)} |" in text, key


def test_the_table_of_exchanges_is_that_of_the_predicted_results():
    """Before and after, as saved by `python -m fusedtp.bench.timed_exchange`."""
    text = (ROOT / "docs" / "timed-schedule.md").read_text()
    folder = ROOT / "bench" / "results" / "predicted"
    before, now = (json.loads((folder / f"exchange-h100{which}.json").read_text())["rows"] for which in ("-before", ""))
    for tokens in (16, 128, 1024):
        there, back = (f"{operation} {tokens}" for operation in ("dispatch", "combine"))
        cells = [str(tokens), f"{now[there]['MB']}, {now[back]['MB']}"]
        for each in (there, back):
            cells += [f"{before[each]['us']:.0f}, {now[each]['us']:.0f}", f"{now[each]['GB/s']:.0f}"]
        assert f"| {' | '.join(cells)} |" in text


def test_the_table_of_dispatches_with_products_is_that_of_the_predicted_results():
    text = (ROOT / "docs" / "timed-schedule.md").read_text()
    folder = ROOT / "bench" / "results" / "predicted"
    before, now = (json.loads((folder / f"gated-h100{which}.json").read_text())["rows"] for which in ("-before", ""))
    assert before.keys() == now.keys()
    for key, row in now.items():
        assert f"| {key.removeprefix('gated ')} | {before[key]['us']:.0f}, {row['us']:.0f} |" in text


def test_the_table_of_the_switch_is_that_of_the_predicted_results():
    """Shown next to the times of sums by the kernels' programs, as with --against."""
    text, folder = (ROOT / "docs" / "timed-schedule.md").read_text(), ROOT / "bench" / "results" / "predicted"
    result, other = (json.loads((folder / f"h100{which}.json").read_text())["rows"] for which in ("-switch", ""))
    assert len(result) == 12
    for key, row in result.items():
        operation, model, tokens = key.split()
        assert operation == "matmul_all_reduce" and row["before"] == other[key]["fused"]
        name = model.removeprefix("llama3-").upper()
        assert f"| {name}, {tokens} | {row['before']:.0f} | {row['fused']:.0f} |" in text, key


def test_the_table_of_experts_on_other_machines_is_that_of_the_saved_results():
    text, cases = (ROOT / "docs" / "moe.md").read_text(), {}
    for machine in ("amd-epyc-avx2", "intel-r-xeon-r-processor-avx512", "amd-epyc-avx512"):
        of = cases[machine] = {}
        for row in json.loads((ROOT / f"bench/results/{machine}-2-cores/moe.json").read_text())["rows"]:
            key = row["dtype"], row["shape"]["F"], row["shape"]["skew"]
            of.setdefault(key, {})[row["engine"].split(" + torch")[0]] = row["seconds"]["median"]
    gloo, ours, alone = "gloo all_to_all", "fusedtp chunked", "experts alone"
    older, xeon, first = cases.values()
    for key, times in older.items():
        cells = [f"{t[gloo] / t[ours]:.2f} ({t[gloo] / t[alone]:.2f})" for t in (times, xeon[key])]
        assert f"| {' | '.join(map(str, key))} | {' | '.join(cells)} |" in text, key
    gone = [[(t[gloo] - t[ours]) / (t[gloo] - t[alone]) for t in of.values()] for of in (first, xeon)]
    median, other = (f"{statistics.median(each):.2f}" for each in gone)
    ends = f"(at least {min(gone[1]):.2f}, at most {max(gone[1]):.2f})"
    said = f"{median} on the EPYC with AVX512, and {other} on the Xeon {ends}"
    assert said in " ".join(text.split()) and len(xeon) == 12


def test_the_small_table_of_the_readme_has_rows_of_the_saved_result():
    result, text = saved_result(), (ROOT / "README.md").read_text()
    assert markdown.machine(result) in text
    saved = markdown.operations(result).splitlines()
    start = text.index(saved[0])
    shown = text[start : text.index("\n\n", start)].splitlines()
    assert shown[:2] == saved[:2]
    assert len(shown) > 2 and set(shown) <= set(saved), set(shown) - set(saved)
    assert f"{len(shown) - 2} of {len(saved) - 2} rows" in text
    assert summary(result["operations"]["rows"]) in text


def test_the_readme_is_short():
    """A newcomer reads it in one go; everything else is in docs/."""
    assert len((ROOT / "README.md").read_text().split()) <= 900


def pages() -> list[Path]:
    return [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "bench" / "results" / "README.md"]


def test_links_lead_to_files():
    broken = [
        f"{page.relative_to(ROOT)}: {link}"
        for page in pages()
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text())
        if not link.startswith("http") and not (page.parent / link).exists()
    ]
    assert broken == []


def test_the_index_of_docs_names_every_page():
    text = (ROOT / "docs" / "README.md").read_text()
    missing = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    missing -= set(re.findall(r"\]\(([^)]+)\)", text))
    assert missing == set()


def test_the_reference_has_every_public_name():
    text = (ROOT / "docs" / "reference.md").read_text()
    listed = re.findall(r"^::: (\S+)$", text, flags=re.M)
    public = [getattr(module, name) for module in (fusedtp, fusedtp.nn) for name in module.__all__]
    wanted = {f"{each.__module__}.{each.__qualname__}" for each in public if hasattr(each, "__qualname__")}
    assert wanted - set(listed) == set() and len(listed) == len(set(listed))
