"""The library's kernels, compiled for four kinds of GPU, break no rule.

CI compiles a fifth of the cases, which take every branch; `make lint-kernels` compiles all, as this does elsewhere.
"""

from __future__ import annotations

import ast
import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from fusedtp import lint
from fusedtp.checks.command import _by_finding
from fusedtp.checks.lint import MAKES_FP8, OWN, PLANS, WITH_FP8, Variant, _case, check, own_cases, variants_of
from fusedtp.kernels.prefetch import LINES
from fusedtp.lint import speed
from fusedtp.lint.listing import Value, behind
from fusedtp.lint.resources import resources
from fusedtp.ops.matmul_reduce_scatter import FEW_ROWS
from fusedtp.sim import Launch
from tests.sampling import SAMPLED
from tests.sim.lint_sample import sample, takes, targets_of

pytestmark = pytest.mark.slow
KERNELS = Path(__file__).parents[2] / "kernels"
EXCHANGING = ("all_gather_", "matmul_reduce", "moe_", "one_shot", "two_shot", "few_rows_", "multimem_")
COMMUNICATING = [name for name in OWN if name.startswith(EXCHANGING) and name not in PLANS]


@pytest.fixture(scope="module")
def cases() -> list[lint.CompileCase]:
    return list(own_cases(None, list(lint.TARGETS)))


@pytest.fixture(scope="module")
def exchanging() -> dict[str, lint.Compiled]:
    """The communicating kernels, for sm_90 in bf16. Compiled in this process: another would import everything again."""
    made = [lint.compiled(case) for case in own_cases(COMMUNICATING, ["sm_90"], ["bf16"])]
    return {each.name: each for (each,) in made}


@pytest.fixture(scope="module", params=lint.TARGETS)
def compiled_for(request) -> str:
    """One target at a time: all of them together take longer than a test may."""
    return request.param


@pytest.fixture(scope="module")
def reports(
    compiled_for: str, cases: list[lint.CompileCase], exchanging: dict[str, lint.Compiled]
) -> list[lint.Report]:
    known = {made.case.key: [made] for made in exchanging.values()}
    chosen = [case for case in (sample(cases) if SAMPLED else cases) if case.target == compiled_for]
    return [lint.judge(made) for case in chosen for made in known.get(case.key) or lint.compiled(case)]


def kernels_of(target: str) -> set[str]:
    """All kernels but those that this target cannot compile: fp8 of fp32."""
    return {name for name in OWN if target in WITH_FP8 or name not in MAKES_FP8}


@pytest.mark.slow
def test_the_sample_has_each_kernel_on_two_targets_in_each_dtype_and_on_each_branch(cases):
    few = sample(cases)
    assert len(few) < 0.25 * len(cases)
    for kernel in OWN:
        targets = {c.target for c in few if c.kernel == kernel}
        assert targets >= targets_of(kernel) and "sm_90" in targets and len(targets) >= 2
    assert {c.config for c in cases} == {"", *(name for kernel in OWN for name in variants_of(kernel))}
    every, by_few = ({each for c in some for each in takes(c)} for some in (cases, few))
    assert by_few == every
    switches = {each[1:] for each in every}
    known = {
        ("TMA", "True"),
        ("TMA", "False"),
        ("ACT", "gelu"),
        ("gathered", "NoneType", ""),
        ("gathered", "Tensor", "torch.bfloat16"),
        ("x", "Tensor", "torch.float32"),
    }
    assert known <= switches, sorted(switches)


@pytest.mark.slow
def test_every_kernel_is_compiled(compiled_for, reports):
    """Every function of kernels/ that is launched, which means decorated with triton.jit itself."""
    launched = set()
    for path in KERNELS.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            decorators = getattr(node, "decorator_list", [])
            if any("triton.jit" in ast.unparse(decorator) for decorator in decorators):
                launched.add(node.name)
    assert launched == set(OWN)
    assert {report.target for report in reports} == {compiled_for}
    wanted = kernels_of(compiled_for)
    if SAMPLED:
        wanted = {kernel for kernel in wanted if compiled_for in targets_of(kernel)}
    assert {report.kernel for report in reports} >= wanted


def test_no_kernel_breaks_a_rule(reports):
    for report in reports:
        assert not report.findings, (report.key, [str(finding) for finding in report.findings])


ODD_K = Variant("bf16-odd-k", "bfloat16", 8, 8192, (4096, 2048), 4113, bias=True)
LOCAL_BYTES = 1024  # of a thread, that CUDA sets aside for every kernel (cudaLimitStackSize)
MATMULS = [
    name
    for name in OWN
    if "matmul" in name
    or "gated_kernel" in name
    or name.startswith(("few_rows", "multimem"))
    or name.endswith("_shot_kernel")
]
SUMS = (
    "matmul_reduce_scatter_kernel",
    "one_shot_kernel",
    "two_shot_kernel",
    "few_rows_kernel",
    "multimem_all_reduce_kernel",
)  # whose callers pad such operands


@pytest.mark.slow
@pytest.mark.parametrize("kernel", MATMULS)
def test_addresses_of_rows_that_no_vector_divides_fit_registers(kernel):
    """A kernel that needs more local memory than is free waits for all running ones: forever, if ranks share a GPU."""
    rows = {"few_rows_kernel": FEW_ROWS, "few_rows_gather_kernel": 512, "few_rows_gated_kernel": 512}
    variant = replace(ODD_K, rows=rows.get(kernel, ODD_K.rows))
    (made,) = lint.compiled(_case(kernel, "sm_90", variant))
    used = resources(made)
    assert used.stack <= LOCAL_BYTES and (used.spills == 0 or kernel in SUMS), used


def test_the_width_of_every_move_between_ranks_is_read(exchanging):
    """For each communicating kernel, loads and stores both; narrower instructions are found at each of them."""
    assert set(exchanging) == set(COMMUNICATING)
    for name, made in exchanging.items():
        ops = speed.exchanged(made)
        assert {"st" if op.name == "tt.store" else "ld" for op in ops} == {"st", "ld"}, name
        assert not list(speed.vector_width(made)), name
        narrowed = re.sub(r"((?:ld|st)\.global)\.v4", r"\1", made.files["ptx"]).replace(", 0x10, ", ", 0x4, ")
        narrow = replace(made, files={**made.files, "ptx": narrowed})
        found = {finding.frames for finding in speed.vector_width(narrow)}
        assert found == {op.frames for op in ops}, name


@pytest.mark.parametrize("kernel", ["few_rows_gather_kernel", "few_rows_gated_kernel"])
def test_weights_of_few_rows_are_prefetched_line_by_line(kernel):
    few, many = (variants_of(kernel)[name] for name in ("bf16-least", "bf16"))
    (made,) = lint.compiled(_case(kernel, "sm_90", few))
    asked = made.files["ptx"].count("prefetch.global.L2")
    weights = len(few.widths) if kernel == "few_rows_gather_kernel" else 2
    assert asked * 32 * made.num_warps == weights * LINES.value
    (made,) = lint.compiled(_case(kernel, "sm_90", many))
    assert "prefetch" not in made.files["ptx"]


# -- addresses ---------------------------------------------------------------------------------------------------------

COUNTED = {
    "for first in range(chunk * chunk_rows, last, BLOCK_M):",  # rows of a shard, as is the next
    "last = tl.minimum((chunk + 1) * chunk_rows, rows)",
    "chunk = ticket // (window * world) * window + ticket % window",  # chunks of tiles, as is the next
    "chunks = cdiv(cdiv(tiles, group), window) * window",
    "tiles = cdiv(longest * batch, BLOCK_M) * cdiv(N, BLOCK_N)",  # tiles, as are the next eight
    "tiles = num_rows * num_cols",
    "for tile in range(chunk * group, last):",
    "for tile in range(chunk * group, tl.minimum((chunk + 1) * group, tiles)):",
    "if chunk * group < last_tile:",
    "for col in range(ticket * group, tl.minimum((ticket + 1) * group, num_cols)):",
    "for col in range(chunk * group, tl.minimum((chunk + 1) * group, num_cols)):",
    "last = tl.minimum((chunk + 1) * group, num_rows * num_cols)",
    "last_tile = tl.minimum((chunk + 1) * group, num_rows * num_cols)",
    "first = row * BLOCK_M + part * part_rows",  # rows of a tile
    "done += num_rows * num_cols",
    "left = (owned - begun) * parts",  # sums that are left at the end, and flags
    "return tl.where(chunk < whole, chunk, whole + (chunk - whole) * parts)",
    "flag += rank_of(peers) * peers.flags_per_source + chunk",  # flags, of which there are 4096 a rank
    "return flag + src * peers.flags_per_source + chunk",
}


def products(made: lint.Compiled) -> set[str]:
    """Source lines with a 32-bit product of two unknowns from which an address is computed.

    Reads the compiler's own IR, before any pass has moved anything.
    """
    found = set()
    for op in made.source.named("tt.addptr", "tt.int_to_ptr"):
        for root in op.operands[1:] or op.operands:
            found |= {line for value in behind(root) if (line := _product(value))}
    return found


def _product(value: Value) -> str:
    op = value.op
    if op is None or op.name != "arith.muli" or not re.search(r": (tensor<[^>]*xi32>|i32)", op.text):
        return ""
    if any(_is_constant(operand) for operand in op.operands):
        return ""
    file, line = op.frames[0]
    return Path(file).read_text().splitlines()[line - 1].strip()


def _is_constant(value: Value) -> bool:
    while value.op is not None and value.op.name in ("tt.splat", "tt.broadcast", "tt.expand_dims"):
        value = value.op.operands[0]
    return value.op is not None and value.op.name == "arith.constant"


@pytest.mark.parametrize("kernel", [name for name in COMMUNICATING if not name.startswith("moe_")])
def test_addresses_have_64_bits(exchanging, kernel):
    """Strides, offsets and slots exceed 2**31 elements, where a 32-bit product of an index and a stride wraps."""
    assert products(exchanging[kernel]) <= COUNTED


@triton.jit
def narrow(x, y, first, stride, N: tl.constexpr):
    at = tl.arange(0, N)
    place = y
    for row in range(first, first + 2):
        tl.store(place + at, tl.load(x + row.to(tl.int64) * stride + at))
        place = y + row * stride


def test_a_product_of_32_bits_in_a_loop_is_found():
    """Also if the loop carries its result."""
    x = torch.empty(8)
    launch = Launch(narrow, 1, dict(x=x, y=x, first=7, stride=7, N=8))
    (made,) = lint.compiled(lint.CompileCase("narrow", "sm_90", lambda: launch))
    assert products(made) == {"place = y + row * stride"}
    (store,) = made.source.named("tt.store")
    assert any(_product(value) for value in behind(store.operands[0]))


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_table_shows_every_report(reports):
    from rich.console import Console

    console = Console(width=140, record=True, file=io.StringIO())
    console.print(lint.table(reports))
    rows = [line.replace("│", " ").split() for line in console.export_text().splitlines()]
    for report in reports:
        figures = (report.num_warps, report.registers, report.spills, report.shared_bytes, report.occupancy)
        assert [*report.key.split("/"), *map(str, figures), "ok"] in rows, report.key


def test_each_finding_is_said_once_with_its_targets(reports):
    report = replace(reports[0], findings=(lint.Finding("spills", "one"), lint.Finding("spills", "two")))
    said = _by_finding([replace(report, target=target) for target in lint.TARGETS])
    assert said == [f"{report.kernel} on {', '.join(lint.TARGETS)}\n  spills: {each}" for each in ("one", "two")]


def test_unknown_names_are_refused():
    for asked in (dict(kernels=["nothing"]), dict(targets=["sm_70"]), dict(variants=["int8"])):
        with pytest.raises(ValueError, match="it must be one of"):
            check(**asked)
