"""Tensor descriptors made by a kernel, and reductions by tensor copies: against indexing, and with a fence removed."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusedtp.sim import Launch, Run, SimulationFault, compare
from fusedtp.sim.case import Case
from fusedtp.sim.ptx.descriptors import TensorMap
from fusedtp.sim.ptx.parse import UnsupportedPtx
from tests.sim.ptx import user_cases as cases
from tests.sim.ptx.running import once, run_all, run_text
from tests.sim.ptx.test_litmus import WithMap

# PTX ISA 8.8, 9.7.9.27: value of elemtype
ELEMENTS = {
    torch.int32: 3,
    torch.float16: 6,
    torch.float32: 7,
    torch.bfloat16: 10,
    torch.uint8: 0,
    torch.int64: 5,
}
SCRATCH = 128  # a descriptor's bytes
DATA = 1024  # where a box goes in shared memory
FENCE = (
    "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd3], [%r1], 128;"
    " fence.proxy.tensormap::generic.acquire.gpu [%rd3], 128;"
)


def made(shape: list[int], steps: list[int], box: list[int], element: int, more: str = "") -> str:
    """PTX that makes a descriptor of the tensor at %rd0, in shared memory at 0. shape, box: innermost first; steps: in
    bytes, for all dimensions but the innermost.
    """
    fields = [("global_address", "b64", ""), ("rank", "b32", ""), ("elemtype", "b32", "")]
    values = ["%rd0", len(shape) - 1, element]
    for name, kind, numbers in (
        ("global_dim", "b32", shape), ("box_dim", "b32", box), ("element_stride", "b32", [1] * len(shape)),
        ("global_stride", "b64", steps),
    ):  # fmt: skip
        fields += [(name, kind, f", {n}") for n in range(len(numbers))]
        values += numbers
    lines = ["mov.b32 %r1, 0; mov.b32 %r2, 512; setp.eq.b32 %p1, %r0, 0; shl.b32 %r5, %r0, 2;"]
    lines += ["st.shared.b32 [%r5], 0; bar.warp.sync -1;"]
    for (name, kind, ordinal), value in zip(fields, values, strict=True):
        replace = f"@%p1 tensormap.replace.tile.{name}.shared::cta.b1024.{kind} [%r1]{ordinal}"
        lines.append(f"mov.b64 %rd9, {value}; {replace}, %rd9;" if kind == "b64" else f"{replace}, {value};")
    return "\n".join([*lines, more, "bar.warp.sync -1;"])


def copied_in(start: list[int], nbytes: int) -> str:
    """PTX that copies the box beginning there (innermost first) to %rd1, by the descriptor at %rd3."""
    dims = len(start)
    coordinates = ", ".join(f"%r{20 + n}" for n in range(dims))
    sets = " ".join(f"mov.b32 %r{20 + n}, {value};" for n, value in enumerate(start))
    return f"""{sets} mov.b32 %r3, {DATA}; mov.b32 %r6, {nbytes};
        @%p1 mbarrier.init.shared::cta.b64 [%r2], 1; bar.sync 0;
        @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], {nbytes};
        @%p1 cp.async.bulk.tensor.{dims}d.shared::cluster.global.mbarrier::complete_tx::bytes
            [%r3], [%rd3, {{{coordinates}}}], [%r2];
        $w: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0; @!%p2 bra $w;
        $l: setp.ge.s32 %p3, %r0, %r6; @%p3 bra $e;
        add.s32 %r7, %r3, %r0; cvt.s64.s32 %rd5, %r0; add.s64 %rd6, %rd1, %rd5;
        ld.shared.u8 %rs1, [%r7]; st.global.u8 [%rd6], %rs1; add.s32 %r0, %r0, 32; bra $l; $e:"""


@pytest.mark.slow
@given(st.data())
def test_a_copy_goes_by_the_fields_that_the_kernel_has_set(data: st.DataObject) -> None:
    """Of a strided tensor of 1 to 3 dimensions; elements outside of it are 0."""
    dtype = data.draw(st.sampled_from(list(ELEMENTS)))
    size = dtype.itemsize
    dims = data.draw(st.integers(1, 3))
    shape = [data.draw(st.integers(1, 9)) for _ in range(dims)]
    box = [data.draw(st.integers(1, 6)) for _ in range(dims - 1)] + [16 // size * data.draw(st.integers(1, 2))]
    start = [data.draw(st.integers(-4, 8)) for _ in range(dims)]
    row = -(-shape[-1] * size // 16) * 16 // size  # the strides of a descriptor are multiples of 16 bytes
    whole = (torch.arange(1000 * row) % 100 + 1).to(dtype)[: row * int(np.prod(shape[:-1]))]
    x = whole.view(*shape[:-1], row)[..., : shape[-1]]
    out, scratch = torch.zeros(box, dtype=dtype), torch.zeros(SCRATCH, dtype=torch.uint8)
    steps = [n * size for n in x.stride()[:-1]]
    body = made(shape[::-1], steps[::-1], box[::-1], ELEMENTS[dtype]) + FENCE
    nbytes = out.numel() * size
    body += copied_in(start[::-1], nbytes)
    run_text(body, x, out, x, scratch, shared=DATA + 4096, weak=True)
    want = torch.zeros(box, dtype=dtype)
    for index in np.ndindex(*box):
        at = tuple(i + s for i, s in zip(index, start, strict=True))
        if all(0 <= a < n for a, n in zip(at, shape, strict=True)):
            want[index] = x[at]
    assert torch.equal(out, want)


def small(fence: str, more: str = "") -> None:
    x, out, scratch = (
        torch.arange(8),
        torch.zeros(8, dtype=torch.int64),
        torch.zeros(SCRATCH, dtype=torch.uint8),
    )
    copy = copied_in([0], 64).replace("bar.sync 0;", "")  # the warp has met when cp_fenceproxy is over
    body = made([8], [], [8], ELEMENTS[torch.int64], more) + fence + copy
    run_text(body, x, out, x, scratch, shared=DATA + 64, weak=True)
    assert torch.equal(out, x)


def test_a_descriptor_is_seen_after_its_fence() -> None:
    small(FENCE)
    copy, acquire, _ = FENCE.split(";")
    with pytest.raises(SimulationFault, match=r"with no fence\.proxy\.tensormap in between") as error:
        small(copy + ";")
    assert error.value.fault.rule == "missing proxy fence"
    with pytest.raises(SimulationFault, match=r"with no fence\.proxy\.tensormap in between"):
        small(f"{acquire}; {copy};")


@pytest.mark.parametrize("field, value", [("fill_mode", 1), ("interleave_layout", 1), ("elemtype", 13), ("rank", 5)])
def test_descriptors_of_other_layouts_are_refused(field: str, value: int) -> None:
    more = f"@%p1 tensormap.replace.tile.{field}.shared::cta.b1024.b32 [%r1], {value};"
    with pytest.raises(UnsupportedPtx, match="unsupported tensor descriptor"):
        small(FENCE, more)


REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add, "min": torch.minimum, "max": torch.maximum, "and": torch.bitwise_and, "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
}  # fmt: skip


@pytest.mark.parametrize("how", ["cp.async.bulk.tensor.1d", "cp.reduce.async.bulk.tensor.1d"])
@pytest.mark.parametrize("wait, rule", [("", "read-write race"), ("cp.async.bulk.wait_group 0;", "")])
def test_what_a_copy_changes_is_ordered_after_its_wait_alone(how: str, wait: str, rule: str) -> None:
    """Flags that the issuing thread sets and sees meanwhile do not order it."""
    x, flags = torch.zeros(32, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    described = TensorMap(x.data_ptr(), (32,), (1,), (32,), "s32", 0)
    kind = "add.bulk_group" if "reduce" in how else "bulk_group"
    body = f"""mov.u32 %r9, %ctaid.x; setp.ne.b32 %p3, %r9, 0; @%p3 bra $reader;
        mov.b32 %r1, 0; mov.b32 %r3, 0; shl.b32 %r4, %r0, 2; st.shared.b32 [%r4], 1;
        fence.proxy.async.shared::cta; bar.sync 0; setp.ne.b32 %p1, %r0, 0; @%p1 ret;
        {how}.global.shared::cta.{kind} [%rd0, {{%r3}}], [%r1]; cp.async.bulk.commit_group; {wait}
        st.global.release.gpu.b32 [%rd2], 1;
        $back: ld.global.acquire.gpu.b32 %r6, [%rd2+4]; setp.eq.b32 %p2, %r6, 0; @%p2 bra $back; ret;
        $reader: setp.ne.b32 %p1, %r0, 0; @%p1 ret;
        $wait: ld.global.acquire.gpu.b32 %r6, [%rd2]; setp.eq.b32 %p2, %r6, 0; @%p2 bra $wait;
        ld.global.b32 %r7, [%rd1]; st.global.release.gpu.b32 [%rd2+4], 1;"""
    for seed in range(3):
        work = [[Launch(WithMap(body, 3, 32, 256), 2, dict(map=described, x=x.zero_(), f=flags.zero_()))]]
        try:
            run_all(work, weak=True, seed=seed)
            assert not rule
        except SimulationFault as error:
            assert error.fault.rule == rule


KINDS = {torch.int32: "s32", torch.float32: "f32", torch.bfloat16: "bf16"}
SUMS = [(dtype, "add") for dtype in KINDS]
COMPARED = [(dtype, operation) for dtype in (torch.int32, torch.bfloat16) for operation in ("min", "max")]


@pytest.mark.parametrize("dtype, operation", SUMS + COMPARED + [(torch.int32, each) for each in ("and", "or", "xor")])
def test_reductions(dtype: torch.dtype, operation: str) -> None:
    """PTX ISA 8.8, 9.7.9.25.5.4: each element becomes operation(element, the box's); with two programs."""
    reduced(dtype, operation)


def test_a_reduction_of_what_a_store_wrote_needs_a_proxy_fence() -> None:
    store = "@!%p1 st.global.b32 [%rd2], 0;"
    reduced(torch.int32, "min", store + " fence.proxy.async.global;", -6)
    with pytest.raises(SimulationFault, match="no proxy fence makes the first visible to an asynchronous copy"):
        reduced(torch.int32, "min", store)


def reduced(dtype: torch.dtype, operation: str, more: str = "", first: int | None = None) -> None:
    """more: PTX of the first thread before it reduces; first: the first elements of x in the end."""
    size = dtype.itemsize
    x = (torch.arange(24) * 7 % 11 - 5).to(dtype)
    given_ = (torch.arange(32) * 5 % 13 - 6).to(dtype)
    described = TensorMap(x.data_ptr(), (24,), (1,), (32,), KINDS[dtype], 0)
    want = REDUCTIONS[operation](REDUCTIONS[operation](x, given_[:24]), given_[:24])
    load = "u16 %rs1" if size == 2 else "b32 %r5"
    store = "b16" if size == 2 else "b32"
    body = f"""mov.b32 %r1, 0; mov.b32 %r3, 0; mul.lo.s32 %r4, %r0, {size}; cvt.s64.s32 %rd5, %r4;
        add.s64 %rd5, %rd1, %rd5; ld.global.{load}, [%rd5]; st.shared.{store} [%r4], {load.split()[1]};
        fence.proxy.async.shared::cta; bar.sync 0; setp.ne.b32 %p1, %r0, 0; {more} @%p1 ret;
        cp.reduce.async.bulk.tensor.1d.global.shared::cta.{operation}.bulk_group [%rd0, {{%r3}}], [%r1];
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"""
    args = dict(map=described, given=given_, x=x)
    run_all([[Launch(WithMap(body, 3, 32, 256), 1 if more else 2, args)]], weak=True)
    if first is not None:
        want[0] = first
    assert torch.equal(x, want)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize(
    "make", [cases.case_descriptors_of_the_kernel, cases.case_products_by_descriptors_of_the_kernel]
)
def test_compiled_kernels_that_make_descriptors(make: Callable, target: str) -> None:
    for seed in range(4):
        assert once(Case("made", make), target, seed, fine=seed == 3) is None


def test_one_launch_on_two_ranks_is_two_launches() -> None:
    """Each has descriptors in its own memory."""

    def make() -> Run:
        x, out = torch.ones(16, 16), torch.zeros(256)
        launch = Launch(cases.notes_what_is_negative, 2, dict(x=x, out=out, M=16, B=8))
        return Run([[launch, launch], [launch]], [], lambda: compare("out", [out], [torch.zeros(256)]))

    for seed in range(3):
        assert once(Case("twice", make), "sm_90", seed) is None


def without_fences(text: str) -> str:
    text, count = re.subn(r"(@%p\d+ )?fence\.proxy\.tensormap[^;]*;", "", text)
    assert count
    return text


def without_copies(text: str) -> str:
    text, count = re.subn(r"(@%p\d+ )?tensormap\.cp_fenceproxy[^;]*;", "", text)
    assert count
    return text


@pytest.mark.parametrize("edit, rule", [(without_fences, "missing proxy fence"), (without_copies, "never written")])
def test_what_a_compiled_kernel_lacks_is_found(edit: Callable[[str], str], rule: str) -> None:
    fault = once(Case("made", cases.case_products_by_descriptors_of_the_kernel), "sm_90", edit=edit)
    assert fault is not None and fault.rule == rule
