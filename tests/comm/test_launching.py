"""Repeated launches of a kernel equal Triton's own launch: the same compiled kernel, the same arguments."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fusedtp.checks.lint import OWN, SIGNALS, _planned, _view, machine_of, variants_of
from fusedtp.comm import device_view, launching
from fusedtp.comm.device_view import DeviceView, meet, peers_of
from fusedtp.lint import TARGETS
from fusedtp.ops.launch import Launch, pointwise
from fusedtp.ops.launch.operands import local_config
from fusedtp.ops.launch.plain import plan_matmul
from fusedtp.ops.launch.pointwise import plan_rms_norm
from fusedtp.ops.operation import OPERATIONS
from fusedtp.ops.rows import Rows

CPU = torch.device("cpu")
MACHINE = machine_of(TARGETS["sm_90"])
ROWS = Rows((16, 16))
LINEAR = (
    "all_gather_matmul",
    "all_gather_gated_matmul",
    "all_gather_wgrad",
    "matmul_reduce_scatter",
    "matmul_all_reduce",
    "scaled_all_gather_matmul",
    "scaled_matmul_reduce_scatter",
    "scaled_matmul_all_reduce",
)


launches: list[tuple] = []  # recorded launches


class Compiled:
    """A stand-in for a kernel that Triton compiled; its function is determined by what it was compiled for."""

    packed_metadata = (4, 1, 0)

    def __init__(self, function, source, tensordesc_meta):
        self.function = function
        self.metadata = SimpleNamespace(
            target=SimpleNamespace(backend="cuda"), tensordesc_meta=tensordesc_meta, num_ctas=1,
            global_scratch_size=0, global_scratch_align=1, profile_scratch_size=0, profile_scratch_align=1,
            launch_cooperative_grid=False, launch_pdl=False, instrumentation_mode="",
        )  # fmt: skip
        self.run = nvidia().CudaLauncher(source, self.metadata)

    def launch_metadata(self, *_):
        return self


def nvidia():
    return pytest.importorskip("triton.backends.nvidia.driver")


def encoding_of(descriptor: str) -> dict:
    """The compiler's metadata for encoding a descriptor; it depends on tile and dtype only."""
    tile = descriptor[descriptor.index("[") + 1 : descriptor.index("]")]
    return dict(
        swizzle=descriptor, elem_size=2, elem_type=8, block_size=list(map(int, tile.split(","))), fp4_padded=False
    )


def note(*args) -> None:
    """A stand-in for the driver's launch: record its arguments and call the hooks."""
    grid, (stream, function), how, packed, (metadata, enter, leave) = (
        args[:3],
        args[3:5],
        args[5:7],
        args[7],
        args[8:11],
    )
    scratch, annotations, signature, given = args[11:13], args[13], args[14], args[15]
    for hook in (enter, leave):
        if hook is not None:
            hook(metadata)
    taken = taken_of(annotations, given)
    assert len(taken) == len(signature)
    launches.append((*grid, stream, function, packed, *how, *scratch, *map(plain, taken)))


def taken_of(annotations, given) -> list:
    """The arguments that a kernel takes, as the driver selects them: tuples are flattened, constants dropped."""
    assert len(annotations) == len(given)
    found = []
    for annotation, value in zip(annotations, given, strict=True):
        if annotation.type == "tuple":
            found += taken_of(annotation.nested_tuple, value)
        elif annotation.type == "argument":
            found.append(value)
    return found


def plain(value):
    """Replace an argument by its value and a tensor by its address."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return getattr(value, "value", value)  # a constexpr


@pytest.fixture(scope="module")
def triton():
    """Triton for an H100 that is absent; it compiles nothing, but binding and specialization are its own."""
    jit = pytest.importorskip("triton.runtime.jit")
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    used, module = set(), nvidia()

    def do_compile(self, key, signature, device, constexprs, options, attrs, *_):
        used.add(self)
        source = SimpleNamespace(signature=signature, constants=constexprs, fn=self)
        metas = [encoding_of(each) for each in signature.values() if str(each).startswith("tensordesc")]
        made = self.device_caches[device][0][key] = Compiled((self, key), source, metas or None)
        return made

    def encoded(address, swizzle, size, kind, tile, shape, strides, padding):
        return address, swizzle, size, kind, tuple(tile), tuple(shape), tuple(strides), padding

    active = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda _: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        utils=SimpleNamespace(launch=note, build_signature_metadata=tuple, fill_tma_descriptor_tiled=encoded),
    )
    driver.set_active(active)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit.JITFunction, "_do_compile", do_compile)
        patch.setattr(module, "PyKernelArg", SimpleNamespace, raising=False)
        for name, kind in (("ARG_TUPLE", "tuple"), ("ARG_KERNEL", "argument"), ("ARG_CONSTEXPR", "constant")):
            patch.setattr(module, name, kind, raising=False)
        yield
    launching._kept.cache_clear()
    for kernel in used:
        kernel.device_caches.clear()
    driver.set_active(None)  # the next lookup finds this machine's own driver


def both(kernel, programs, args, options, ours) -> tuple:
    """(what we launched, what Triton launches)."""
    ours()
    mine = launches.pop()
    kernel[(programs,)](**args, **options)
    return mine, launches.pop()


def at(offset: int, *shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    """New memory, `offset` elements past a multiple of 16 bytes."""
    count = torch.Size(shape).numel()
    return torch.zeros(count + offset, dtype=dtype)[offset:].view(shape)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [name for name in OWN if name not in SIGNALS])
def test_every_kernel_is_launched_as_by_triton(triton, monkeypatch, kernel):
    """Every variant: first through Triton, then without it, and again after the group's memory has moved."""
    pointers = {}

    def given(self, of_call):
        pointers[id(self)] = self, dict(of_call)
        return planned(self, of_call)

    planned = Launch.given
    monkeypatch.setattr(Launch, "given", given)
    for variant in variants_of(kernel).values():
        if "sm_90" not in (variant.targets or ["sm_90"]):
            continue
        pointers.clear()
        whole = _planned(kernel, variant, MACHINE)
        first = moved = None
        if pointers:
            ((prepared, of_call),) = pointers.values()
            first = moved = of_call.pop("peers", None)
        if first is not None:
            moved = first._replace(epoch=torch.zeros(1, dtype=torch.int32))
        for peers in (first, first, moved):
            args = whole.args if peers is None else {**whole.args, "peers": peers}

            def ours() -> None:
                if not pointers:
                    whole.start(CPU)  # noqa: B023
                elif peers is None:  # noqa: B023
                    prepared.start(CPU, of_call)  # noqa: B023
                else:
                    prepared.repeated.start(CPU, of_call, peers)  # noqa: B023

            mine, want = both(whole.kernel, whole.programs, args, whole.options, ours)
            assert mine == want, variant


@given(
    st.lists(
        st.tuples(st.sampled_from([0, 0, 0, 1, 8]), st.booleans(), st.booleans(), st.booleans()),
        min_size=2,
        max_size=6,
    )
)
@example([(0, False, False, False), (0, False, False, False), (0, False, False, True), (0, False, False, False)])
@example([(1, True, False, False), (0, True, False, False), (0, True, True, False)])
@settings(max_examples=15)
def test_a_kept_launch_is_triton_s(triton, calls):
    """The gather, with and without a bias and a kept x, aligned or not, before and after its memory moves."""
    from fusedtp.ops.all_gather_matmul import pointers, prepare

    view = _view(2)
    launch = prepare(view, at(0, 16, 64), [at(0, 32, 64)], ROWS, None, MACHINE)
    peers = peers_of(view, 1, 2, 12345, "cuda")
    for offset, with_bias, keep, moves in calls:
        if moves:
            view = _view(2)
            view.slot_bytes = 1 << 33  # an integer of another type in the kernel
            peers = peers_of(view, 1, 2, 12345, "cuda")
        biases = [at(offset, 32) if with_bias else None]
        gathered = at(offset, 32, 64) if keep else None
        operands = at(0, 16, 64), [at(0, 32, 64)], biases, [at(0, 32, 32)], gathered
        given = pointers(launch, peers, *operands)
        args = {**launch.args, **given}
        del given["peers"]
        ours = lambda: launch.repeated.start(CPU, given, peers)  # noqa: B023, E731
        mine, want = both(launch.kernel, launch.programs, args, launch.options, ours)
        assert mine == want


def laid(layout: str, *shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    """[M, K] with contiguous rows, contiguous columns, gaps between rows, or an address that 16 does not divide."""
    if layout == "across":
        return at(0, *reversed(shape), dtype=dtype).t()
    return (
        at(0, shape[0], shape[1] + 16, dtype=dtype)[:, :-16]
        if layout == "wide"
        else at(1 if layout == "odd" else 0, *shape, dtype=dtype)
    )


def operands_of(name: str, draw, layouts: list[str], width: int) -> tuple:
    """The arguments of this operation's engine on one of two ranks."""
    layout, some = st.sampled_from(layouts), st.sampled_from(["", "rows", "odd"])
    fp8, one = torch.float8_e4m3fn, torch.ones(1, 1)

    def bias(dtype=torch.bfloat16):
        kind = draw(some)
        return laid(kind, 1, width, dtype=dtype).view(-1) if kind else None

    def scale(rows):
        return draw(st.sampled_from([one, torch.ones(rows, 1)]))

    if name == "all_gather_matmul":
        weights = [laid(draw(layout), width, 64) for _ in range(draw(st.integers(1, 2)))]
        return laid(draw(layout), 16, 64), weights, [bias() for _ in weights], draw(st.booleans())
    if name == "all_gather_gated_matmul":
        weights, biases = [laid(draw(layout), width, 64) for _ in range(2)], [bias(), bias()]
        return laid(draw(layout), 16, 64), weights, biases, "silu", draw(st.booleans()), draw(st.booleans())
    if name == "all_gather_wgrad":
        dtype = draw(st.sampled_from([torch.bfloat16, torch.float32]))
        return laid(draw(layout), 16, 64), [laid(draw(layout), 32, width)], dtype
    if name == "matmul_reduce_scatter":
        return [laid(draw(layout), 32, 64)], [laid(draw(layout), width, 64)], bias()
    if name == "matmul_all_reduce":
        return laid(draw(layout), 32, 64), laid(draw(layout), width, 64), bias()
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float32]))
    w = laid(draw(layout), width, 64, dtype=fp8)
    if name == "scaled_all_gather_matmul":
        packed = torch.zeros(16, 80, dtype=torch.uint8)
        return packed, fp8, [w], [scale(width)], [bias(dtype)], dtype, draw(st.booleans())
    return laid(draw(layout), 32, 64, dtype=fp8), scale(32), w, scale(width), bias(dtype), dtype


class Running:
    """A call of a group; the group's memory never moves."""

    def __init__(self, view) -> None:
        self.view = view

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        pass

    def kernel_view(self):
        return self.view


@pytest.fixture
def compared(triton, monkeypatch):
    """Compare every launch of an operation's call with Triton's; return a list with one entry per launch."""
    from fusedtp.ops.launch import run

    monkeypatch.setattr(run, "machine_of", lambda *_: MACHINE)
    monkeypatch.setattr(run, "require_triton", lambda _: None)
    seen, started = [], Launch.run

    def run_both(self, view, device, sending, pointers, **how) -> None:
        args = {**self.args, **pointers}
        mine, want = both(
            self.kernel,
            self.programs,
            args,
            self.options,
            lambda: started(self, view, device, sending, pointers, **how),
        )
        assert mine == want
        seen.append(how)

    monkeypatch.setattr(Launch, "run", run_both)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("name", LINEAR)
@given(data=st.data())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_launches_that_operations_keep_are_triton_s(compared, name, data):
    """A kept launch's key separates all that Triton compiles differently: layouts, biases, saved tensors, dtypes."""
    op, view, kept = OPERATIONS[name], _view(2), {}
    peers = peers_of(view, 1, 2, 12345, "cuda")
    # few layouts, so that a later call differs only slightly from an earlier one
    layouts = data.draw(st.lists(st.sampled_from(["rows", "rows", "across", "wide", "odd"]), min_size=1, max_size=2))
    width = data.draw(st.sampled_from([32, 32, 20]))
    for _ in range(data.draw(st.integers(3, 6))):
        operands = operands_of(name, data.draw, layouts, width)
        plan = SimpleNamespace(
            rows=ROWS, total_rows=32, own_rows=16, comm=SimpleNamespace(rank=1, world_size=2), slot_bytes=0,
            copies=False, launches=kept.setdefault(op.shared(*operands), {}), alike=False, call=lambda: Running(view),
            peers=lambda _: peers,
        )  # fmt: skip
        for _ in range(2):
            compared.clear()
            op.engines["triton"](plan, *operands)
            assert compared == [{"alike": True}]


def local_call(draw, kind: str, rows: int, width: int) -> tuple:
    """An elementwise kernel's planner and its arguments: at most one argument differs from the default."""
    changed, change = draw(st.integers(0, 4)), draw(st.sampled_from(["rows", "wide", "odd", "other"]))

    def other(i: int) -> bool:
        return changed == i and change == "other"

    usual = torch.float32 if other(4) else torch.bfloat16

    def operand(i: int, *shape: int, dtype: torch.dtype = usual):
        return laid(change if changed == i and change != "other" else "rows", *shape, dtype=dtype)

    x, second, third = (operand(i, rows, width) for i in range(3))
    if kind == "rotate":
        q, k = (operand(i, rows * heads, width).view(1, rows, heads, width) for i, heads in enumerate((2, 1)))
        table = at(0, 1, rows, 1, width // 2, dtype=torch.float32)
        return pointwise.plan_rotate, q, k, table, table, -1 if other(2) else 1
    if kind.startswith("norm"):
        weight = operand(3, 1, width, dtype=torch.float32 if other(3) else x.dtype).view(-1)
        added = None if other(1) else second
        if kind == "norm":
            return pointwise.plan_rms_norm, x, added, weight, 1e-6 if other(2) else 1e-5
        return pointwise.plan_rms_norm_backward, x, added, third, weight, at(0, rows, dtype=torch.float32)
    tensors = [each.contiguous() for each in (x, second, third)]
    act = "gelu" if other(3) else "silu"
    if kind == "gated":
        return pointwise.plan_swiglu, *tensors[:2], act
    return pointwise.plan_swiglu_backward, *tensors, act


@pytest.mark.slow
@given(
    kind=st.sampled_from(["norm", "norm backward", "gated", "gated backward", "rotate"]),
    sizes=st.sampled_from([(16, 64), (1, 64), (16, 24), (16, 9000), (0, 64)]),
    data=st.data(),
)
@settings(max_examples=60)
def test_kept_launches_of_elementwise_kernels_are_triton_s(triton, kind, sizes, data):
    """Operands that differ slightly, each used twice: first through Triton, then without it."""
    pointwise._kept.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pointwise, "machine_of", lambda _: MACHINE)
        for _ in range(data.draw(st.integers(4, 8))):
            plan, *given = local_call(data.draw, kind, *sizes)
            for _ in range(2):
                planned = plan(*given)
                whole = plan(*given, MACHINE).launch.given(planned.tensors)
                if whole.programs:
                    ours = lambda: planned.start(CPU)  # noqa: B023, E731
                    mine, want = both(whole.kernel, whole.programs, whole.args, whole.options, ours)
                    assert mine == want
                else:
                    planned.start(CPU)
    pointwise._kept.cache_clear()


@given(
    st.lists(
        st.tuples(st.sampled_from([0, 0, 1]), st.sampled_from([1, 16, 24]), st.booleans()),
        min_size=2,
        max_size=6,
    )
)
@example([(0, 16, False), (0, 1, False), (0, 16, True), (1, 16, False), (0, 16, False)])
@settings(max_examples=15)
def test_a_launch_made_anew_is_triton_s(triton, calls):
    """RMSNorm: compilation depends on sizes that are one or divisible by 16, on alignment, and on None."""
    for offset, rows, with_residual in calls:
        residual = at(offset, rows, 64) if with_residual else None
        launch, _ = plan_rms_norm(at(offset, rows, 64), residual, at(0, 64), 1e-5, MACHINE).whole()
        ours = lambda: launch.start(CPU)  # noqa: B023, E731
        mine, want = both(launch.kernel, launch.programs, launch.args, launch.options, ours)
        assert mine == want


@pytest.mark.parametrize("kept", [True, False])
def test_a_hook_sees_every_launch(triton, kept):
    """For example a profiler that sets the hook in Triton."""
    from triton import knobs

    launch, _ = plan_rms_norm(at(0, 16, 64), None, at(0, 64), 1e-5, MACHINE).whole()
    seen = []
    again = launch.repeated.start if kept else launch.start
    again(CPU)
    again(CPU)
    knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        again(CPU)
        again(CPU)
    finally:
        knobs.runtime.launch_enter_hook.remove(seen.append)
    again(CPU)
    assert len(seen) == 2 and len(launches) == 5 and len({launch[4] for launch in launches}) == 1
    launches.clear()


def test_later_launches_do_not_bind(triton, monkeypatch):
    """Skipping the binding is the point: both for a new launch and for the meeting kernel."""
    from triton.runtime.jit import JITFunction

    view = _view(2)
    monkeypatch.setattr(device_view, "clock_of", lambda _: "cuda")
    view = DeviceView(**{name: getattr(view, name) for name in DeviceView.__dataclass_fields__})
    calls = [lambda: plan_rms_norm(at(0, 16, 64), None, at(0, 64), 1e-5, MACHINE).whole()[0].start(CPU)]
    calls += [lambda: meet(view, 1, 2, 12345)]
    for call in calls:
        call()
    monkeypatch.setattr(JITFunction, "run", None)
    for call in calls:
        call()
    assert [launch[:6] for launch in launches[2:]] == [launch[:6] for launch in launches[:2]]
    assert len(launches) == 4
    launches.clear()


@pytest.fixture
def scattering(triton, monkeypatch):
    """matmul_reduce_scatter's engine on one of two ranks, x and weight by TMA: the function to call, and its plan."""
    from fusedtp.ops.launch import run

    op, view = OPERATIONS["matmul_reduce_scatter"], _view(2)
    monkeypatch.setattr(run, "machine_of", lambda *_: MACHINE)
    monkeypatch.setattr(run, "require_triton", lambda _: None)
    peers = peers_of(view, 1, 2, 12345, "cuda")
    view.meet = None
    plan = SimpleNamespace(
        rows=ROWS, total_rows=32, own_rows=16, comm=SimpleNamespace(rank=1, world_size=2), slot_bytes=0, copies=False,
        launches={}, alike=True, call=lambda: Running(view), peers=lambda _: peers,
    )  # fmt: skip
    call = lambda x, weight: op.engines["triton"](plan, [x], [weight], None)  # noqa: E731
    yield call, plan
    launches.clear()


def test_alike_calls_are_launched_below_triton_s_launcher(scattering, monkeypatch):
    """Triton's launcher encodes every descriptor in every call. Here each address is encoded once while weights
    alternate.
    """
    call, _ = scattering
    utils, seen = nvidia().triton.runtime.driver.active.utils, []
    encode = utils.fill_tma_descriptor_tiled
    x, weights = at(0, 32, 64), [at(0, 64, 64) for _ in range(3)]
    for _ in range(2):
        call(x, weights[0])
    monkeypatch.setattr(utils, "fill_tma_descriptor_tiled", lambda *args: (seen.append(args[0]), encode(*args))[1])
    monkeypatch.setattr(nvidia().CudaLauncher, "__call__", None)
    for i in (0, 1, 2, 1, 0):
        call(x, weights[i])
    assert seen == [w.data_ptr() for w in weights[1:]] and len(launches) == 7


def test_alike_calls_follow_the_group_s_memory(scattering):
    call, plan = scattering
    operands = at(0, 32, 64), at(0, 64, 64)
    for _ in range(2):
        peers = peers_of(_view(2), 1, 2, 12345, "cuda")
        plan.peers = lambda _: peers  # noqa: B023
        for _ in range(3):
            call(*operands)
            assert peers.epoch.data_ptr() in launches[-1]


def test_encoded_descriptors_of_ever_new_addresses_are_not_all_kept(scattering, monkeypatch):
    monkeypatch.setattr(launching, "MAX_TENSOR_MAPS", 2)
    call, plan = scattering
    x, weights = at(0, 32, 64), [at(0, 64, 64) for _ in range(6)]
    for weight in weights:
        call(x, weight)
    assert [len(made) for _, made in plan.launches[None].repeated._only.tensor_maps.values()] == [1, 1]


@pytest.mark.parametrize("field", ["global_scratch_size", "profile_scratch_size", "gsan_enabled", "arg_annotations"])
def test_a_launcher_that_does_more_or_is_another_is_called(scattering, monkeypatch, field):
    """Its fields are no stable API. If it allocates scratch, or a field is unexpected, every call goes through it."""
    call, plan = scattering
    operands, seen = (at(0, 32, 64), at(0, 64, 64)), []
    call(*operands)
    (ready,) = plan.launches[None].repeated._ready.values()
    value = [] if field == "arg_annotations" else 1
    monkeypatch.setattr(ready.compiled.run, field, value, raising=field != "gsan_enabled")  # added in Triton 3.8
    monkeypatch.setattr(nvidia().CudaLauncher, "__call__", lambda *args: seen.append(args))
    for _ in range(3):
        call(*operands)
    assert len(seen) == 3 and len(launches) == 1


def test_meetings_of_ever_new_signatures_are_not_all_kept(triton, monkeypatch):
    monkeypatch.setattr(device_view, "clock_of", lambda _: "cuda")
    monkeypatch.setattr(device_view, "MOST_MEETINGS", 2)
    view = _view(2)
    view = DeviceView(**{name: getattr(view, name) for name in DeviceView.__dataclass_fields__})
    for signature in range(5):
        meet(view, 1, 2, signature)
        assert signature in view.meetings and len(view.meetings) <= 2
    launches.clear()


@pytest.mark.parametrize("tma", [True, False])
def test_what_is_kept_holds_no_tensor_of_a_call(triton, tma):
    """With TMA too, where the argument is a descriptor and not an address."""
    x, weight = at(0, 128, 64), at(0, 128, 64)
    config = replace(local_config(MACHINE, x.dtype, "ieee", 128, 128), tma=tma)
    launch, y = plan_matmul(x, weight, None, x.dtype, config, "ieee", MACHINE)
    launch.start(CPU)
    alive = [weakref.ref(tensor) for tensor in (x, weight, y)]
    del x, weight, y, launch
    gc.collect()
    assert [ref() for ref in alive] == [None] * 3
    launches.clear()


def test_what_was_compiled_lives_as_long_as_what_starts_it(triton):
    """Otherwise its module would be unloaded, e.g. if two threads compile at once: Triton keeps only the later one."""
    launch, _ = plan_rms_norm(at(0, 16, 64), None, at(0, 64), 1e-5, MACHINE).whole()
    launch.kernel.device_caches.clear()
    launch.repeated.start(CPU)
    alive = weakref.ref(*launch.kernel.device_caches[0][0].values())
    launch.kernel.device_caches.clear()
    launches.clear()
    gc.collect()
    assert alive() is not None
