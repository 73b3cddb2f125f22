"""Later launches of a kernel against what Triton itself would launch: the same compiled kernel, the same arguments."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fusedtp.checks.lint import _view, machine_of
from fusedtp.comm import device_view, repeated
from fusedtp.comm.device_view import DeviceView, meet, peers_of
from fusedtp.ops.launch.pointwise import plan_rms_norm
from fusedtp.ops.rows import Rows
from fusedtp.sim.lint import TARGETS

CPU = torch.device("cpu")
MACHINE = machine_of(TARGETS["sm_90"])
ROWS = Rows((16, 16))


class Recording:
    """What stands in for Triton's launcher: keeps what it is called with."""

    launches: list[tuple] = []

    def __init__(self, src, metadata):
        pass

    def __call__(self, *args):
        grid, (stream, function, packed), (_metadata, enter, leave) = args[:3], args[3:6], args[6:9]
        Recording.launches.append((*grid, stream, function, packed, *map(plain, args[9:])))
        for hook in (enter, leave):
            if hook is not None:
                hook(_metadata)


def plain(value):
    """An argument by its value: a tensor by its address, a descriptor by all it holds."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    if hasattr(value, "block_shape"):
        return value.base.data_ptr(), *map(tuple, (value.shape, value.strides, value.block_shape))
    return getattr(value, "value", value)  # of a constexpr


@pytest.fixture(scope="module")
def triton():
    """Triton with a driver of an H100 that is not there."""
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    functions = iter(range(1, 1000))
    properties = {"max_shared_mem": 232448}
    utils = SimpleNamespace(
        load_binary=lambda *_: (object(), next(functions), 64, 0, 1024),
        get_device_properties=lambda _: properties,
        unload_module=lambda _: None,
    )
    active = SimpleNamespace(
        utils=utils,
        launcher_cls=Recording,
        get_current_device=lambda: 0,
        get_current_stream=lambda _: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    driver.set_active(active)
    yield
    repeated._STARTED.clear()
    for kernel in launched:
        kernel.device_caches.clear()  # of functions that no GPU has
    gc.collect()
    driver.set_active(None)  # whoever asks next finds this machine's own


launched: list = []


def both(kernel, programs, args, options, ours) -> tuple:
    """(what we launched, what Triton launches)."""
    launched.append(kernel)
    ours()
    mine = Recording.launches.pop()
    kernel[(programs,)](**args, **options)
    return mine, Recording.launches.pop()


def at(offset: int, *shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    """New memory, `offset` elements past a multiple of 16 bytes."""
    count = torch.Size(shape).numel()
    return torch.zeros(count + offset, dtype=dtype)[offset:].view(shape)


@given(
    st.lists(
        st.tuples(st.sampled_from([0, 0, 0, 1, 8]), st.booleans(), st.booleans(), st.booleans()),
        min_size=2,
        max_size=6,
    )
)
@example(
    [(0, False, False, False), (0, False, False, False), (0, False, False, True), (0, False, False, False)]
)
@example([(1, True, False, False), (0, True, False, False), (0, True, True, False)])
@settings(max_examples=15)
def test_a_kept_launch_is_triton_s(triton, calls):
    """Of the gather, with and without a bias and a kept x, aligned or not, before and after its memory has moved."""
    from fusedtp.ops.all_gather_matmul import pointers, prepare

    view = _view(2)
    launch = prepare(view, at(0, 16, 64), [at(0, 32, 64)], ROWS, None, MACHINE)
    peers = peers_of(view, 1, 2, 12345, "cuda")
    for offset, with_bias, keep, moves in calls:
        if moves:
            view = _view(2)
            view.slot_bytes = 1 << 33  # of another type in the kernel
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
    """Of RMSNorm: what is compiled depends on sizes that are one or divisible by 16, on alignment, and on None."""
    for offset, rows, with_residual in calls:
        residual = at(offset, rows, 64) if with_residual else None
        launch, _ = plan_rms_norm(at(offset, rows, 64), residual, at(0, 64), 1e-5, MACHINE)
        ours = lambda: launch.start(CPU)  # noqa: B023, E731
        mine, want = both(launch.kernel, launch.programs, launch.args, launch.options, ours)
        assert mine == want


@pytest.mark.parametrize("kept", [True, False])
def test_a_hook_sees_every_launch(triton, kept):
    """As of a profiler, which asks Triton for it."""
    from triton import knobs

    launch, _ = plan_rms_norm(at(0, 16, 64), None, at(0, 64), 1e-5, MACHINE)
    launched.append(launch.kernel)
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
    assert [each.get()["name"] for each in seen] == ["rms_norm_kernel"] * 2
    assert len({launch[3:6] for launch in Recording.launches}) == 1
    Recording.launches.clear()


def test_later_launches_do_not_bind(triton, monkeypatch):
    """The binding is what this saves: of a kept launch, of one made anew, of the bump and of the meeting kernel."""
    from triton.runtime.jit import JITFunction

    from fusedtp.kernels.meet import meet_kernel
    from fusedtp.kernels.signals import bump_epoch

    view = _view(2)
    monkeypatch.setattr(device_view, "clock_of", lambda _: "cuda")
    view = DeviceView(**{name: getattr(view, name) for name in DeviceView.__dataclass_fields__})
    calls = [lambda: plan_rms_norm(at(0, 16, 64), None, at(0, 64), 1e-5, MACHINE)[0].start(CPU)]
    launched.extend((bump_epoch, meet_kernel))
    calls += [lambda: view.bump.start(CPU), lambda: meet(view, 1, 2, 12345)]
    for call in calls:
        call()
    count = len(Recording.launches)
    monkeypatch.setattr(JITFunction, "run", None)
    for call in calls:
        call()
    assert len(Recording.launches) == 2 * count == 8
    Recording.launches.clear()
