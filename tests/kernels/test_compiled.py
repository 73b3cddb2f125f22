"""What the interpreter cannot show is read off the code compiled for GPUs: memory order, scope, pipelining, spills."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERNELS = [
    "all_gather_matmul_kernel",
    "all_gather_wgrad_kernel",
    "matmul_reduce_scatter_kernel",
    "one_shot_kernel",
    "two_shot_kernel",
]


@pytest.fixture(scope="module")
def code(tmp_path_factory) -> dict[str, dict[str, str]]:
    """stem -> {"asm", "ttgir", "usage"} of every kernel for sm_90, sm_80 and gfx942."""
    pytest.importorskip("triton")
    folder = tmp_path_factory.mktemp("compiled")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
    script = str(Path(__file__).parent / "compile_kernels.py")
    subprocess.run([sys.executable, script, str(folder), "sm_90", "sm_80", "gfx942"], env=env, check=True)
    found: dict[str, dict[str, str]] = {}
    for path in folder.iterdir():
        found.setdefault(path.stem, {})[path.suffix[1:]] = path.read_text()
    assert {stem.rsplit("-", 1)[1] for stem in found} == set(KERNELS)
    return found


def of(code: dict, *words: str) -> list[tuple[str, dict[str, str]]]:
    chosen = [(stem, files) for stem, files in code.items() if all(word in stem for word in words)]
    assert chosen
    return chosen


def instructions(asm: str) -> list[str]:
    lines = (line.split("//")[0].strip() for line in asm.splitlines())
    return [line for line in lines if line and not line.startswith(".")]


def test_a_block_barrier_stands_between_stores_and_release(code):
    for stem, files in of(code, "sm_"):
        lines = instructions(files["asm"])
        releases = [i for i, line in enumerate(lines) if re.search(r"\batom\.\S*release", line)]
        assert releases, stem
        for i in releases:
            before = [line for line in lines[:i] if re.search(r"bar\.sync|st\.global", line)]
            assert before and "bar.sync" in before[-1], (stem, lines[i])


def test_flags_are_ordered_at_system_scope(code):
    for stem, files in of(code, "sm_"):
        ordered = re.findall(r"\b(?:atom|ld|st|red|fence)\.\S*(?:acquire|release|acq_rel)\S*", files["asm"])
        assert ordered and all(".sys" in word for word in ordered), (stem, set(ordered))
    for stem, files in of(code, "gfx942"):
        asm = "\n".join(instructions(files["asm"]))
        assert re.search(r"s_barrier(?:\n(?!.*global_store).*)*\nbuffer_wbl2 sc0 sc1", asm), stem
        assert "buffer_inv sc0 sc1" in asm, stem


def regions(ttgir: str) -> list[tuple[int, int, str]]:
    """(first line, last line, head) of every region of an MLIR listing."""
    found, open_at = [], []
    lines = ttgir.splitlines()
    for i, line in enumerate(lines):
        text = re.sub(r"loc\((\".*?\"\()?#loc\d*\)?\)", "", line).strip()
        if text.startswith("}"):
            start = open_at.pop()
            found.append((start, i, lines[start]))
        if text.endswith("{"):
            open_at.append(i)
    return found


def test_gated_loads_follow_the_acquire(code):
    """In every outermost loop that holds an acquire, all acquires come before the first load of a tile."""
    for stem, files in of(code, "-"):
        lines = files["ttgir"].splitlines()
        acquires = [i for i, line in enumerate(lines) if "atomic_rmw" in line and "acquire" in line]
        loads = [
            i
            for i, line in enumerate(lines)
            if "async_copy_global_to_local" in line
            or re.search(r"(tt|amdg|amdgpu)\.(buffer_)?load\b.*tensor<", line)
        ]
        loops = [(a, b) for a, b, head in regions(files["ttgir"]) if "scf.for" in head]
        outer = [(a, b) for a, b in loops if not any(c < a and b < d for c, d in loops)]
        gated = 0
        for first, last in outer:
            waits = [i for i in acquires if first < i < last]
            gets = [i for i in loads if first < i < last]
            if waits and gets:
                gated += 1
                assert max(waits) < min(gets), (stem, lines[first])
        assert gated, stem
        assert all(any(a < i < b for a, b in outer) for i in loads if "tensor<1x" not in lines[i]), stem


def test_the_k_loop_holds_no_wait_and_is_pipelined(code):
    for stem, files in of(code, "sm_"):
        lines = files["ttgir"].splitlines()
        loops = [(a, b) for a, b, head in regions(files["ttgir"]) if "scf.for" in head]
        dots = [i for i, line in enumerate(lines) if re.search(r"= (ttng\.warp_group_dot|tt\.dot) ", line)]
        assert dots, stem
        for i in dots:
            first, last = max((a, b) for a, b in loops if a < i < b)
            body = "\n".join(lines[first:last])
            assert "atomic" not in body and "async_copy_global_to_local" in body, stem
        assert re.search(r"cp\.async\.cg\.shared\.global \[.*\], \[.*\], 0x10", files["asm"]), stem


def test_tensor_cores_do_16_bit_products(code):
    for _, files in of(code, "sm_90-bfloat16-large"):
        assert "wgmma.mma_async" in files["asm"]
    for _, files in of(code, "sm_80-bfloat16"):
        assert "mma.sync" in files["asm"]


def test_registers_do_not_spill(code):
    """An epilogue of single 2-byte stores may: where N is odd, each element has an address of its own."""
    for stem, files in of(code, "sm_", "large"):
        stack, local = (int(re.search(rf"{name}:(\d+)", files["usage"])[1]) for name in ("STACK", "LOCAL"))
        assert stack <= 16 and local == 0, (stem, files["usage"])
    for stem, files in of(code, "gfx942"):
        assert "vgpr_spill_count: 0" in files["asm"], stem
