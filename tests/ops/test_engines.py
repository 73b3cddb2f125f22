"""The choice of engine for every combination of device, workspace, Triton, dtype, rows and table; needs no GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from fusedtp.comm import alone, communicator
from fusedtp.comm.process_world import OVERLAPPING
from fusedtp.ops import engines, fp8, measured
from fusedtp.ops.launch import config
from fusedtp.ops.moe import grouped
from fusedtp.ops.moe import plan as routing
from fusedtp.ops.operation import Spec
from fusedtp.ops.rows import Rows

FP32, FP64 = torch.float32, torch.float64
DTYPES = (FP32, FP64, torch.float16, torch.bfloat16)
NARROW = (FP32, torch.float16, torch.bfloat16)


def group(
    device: str = "cpu",
    *,
    size: int = 2,
    workspace: bool = True,
    threads: bool = False,
    switch: bool = True,
    differ: Sequence[str] = (),
) -> SimpleNamespace:
    """The parts of a communicator that `choose` reads."""
    return SimpleNamespace(
        world_size=size,
        has_workspace=workspace,
        has_switch=switch,
        name="tp",
        differences=dict.fromkeys(differ, "one thing on rank 0, another on rank 1"),
        fallback="" if workspace else "ranks on several hosts",
        device=torch.device(device),
        world=SimpleNamespace(shares_process=threads),
    )


@contextmanager
def machine(
    *,
    triton: bool = True,
    interprets: bool = False,
    capability=(9, 0),
    cuda: bool = True,
    found=measured.NOTHING,
) -> Iterator[list[tuple]]:
    """A simulated machine. Yields the list of lookups in the crossover table."""
    asked: list[tuple] = []

    def find(*key):
        asked.append(key)
        return found

    patches = [
        *(mock.patch.object(module, "has_triton", lambda: triton) for module in (engines, grouped)),
        *(mock.patch.object(module, "interpreting", lambda: interprets) for module in (engines, grouped)),
        *(mock.patch.object(module, "runs_kernels", lambda _: triton) for module in (routing, grouped)),
        mock.patch.object(torch.version, "cuda", "13.0" if cuda else None),
        mock.patch.object(torch.cuda, "get_device_capability", lambda _: capability),
        mock.patch.object(measured, "find", find),
        mock.patch.object(engines, "kind_of", lambda device: f"a {device.type}"),
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield asked


def choose(comm, engine: str = "auto", rows: int = 4096, dtype: torch.dtype = FP32) -> engines.Choice:
    return engines.choose(comm, engine, Rows((rows // 2,) * 2), dtype, "all_gather_matmul", 64)


@pytest.mark.parametrize("engine", engines.ENGINES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_one_rank_is_local_whatever_was_asked_for(device, engine):
    for dtype, workspace, triton in product(DTYPES, (True, False), (True, False)):
        with machine(triton=triton), warnings.catch_warnings():
            warnings.simplefilter("error")
            comm = group(device, size=1, workspace=workspace)
            assert choose(comm, engine, dtype=dtype).engine == "local"
            assert routing.choose(comm, engine, dtype).engine == "local"
            assert routing.choose(communicator(alone("cpu").name), engine, dtype).engine == "local"


@pytest.mark.parametrize("size", [1, 2])
def test_an_unknown_engine_is_refused(size):
    want = "engine is 'fast'; it must be one of auto, collective, chunked, triton"
    with pytest.raises(ValueError, match=want):
        choose(group(size=size), "fast")
    with pytest.raises(ValueError, match=want):
        routing.choose(group(size=size), "fast", FP32)
    for engine in ("fast", "collective"):
        with pytest.raises(ValueError, match=f"engine is '{engine}'; it must be one of auto, chunked, triton"):
            grouped.choose(engine, torch.ones(1, 1))


@pytest.mark.parametrize("engine", engines.ENGINES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_a_workspace_there_are_collectives_and_a_warning_if_another_engine_was_asked_for(device, engine):
    """fp64 and a machine without Triton make no difference, because no kernel runs."""
    for dtype, triton in product(DTYPES, (True, False)):
        with machine(triton=triton), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            got = choose(group(device, workspace=False), engine, dtype=dtype)
        assert got == engines.Choice("collective", "no shared memory: ranks on several hosts")
        assert [str(each.message) for each in told] == [
            f"engine {engine!r} falls back to 'collective': no shared memory: ranks on several hosts"
        ] * (engine in ("chunked", "triton", "multimem"))
        with machine(triton=triton):
            assert routing.choose(group(device, workspace=False), engine, dtype).engine == "collective"


@pytest.mark.parametrize("engine", ["collective", "chunked"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_asked_for_runs_whatever_the_table_says(device, engine):
    found = measured.Found("triton", "measured", "copy")
    for dtype, triton in product(DTYPES, (True, False)):
        with machine(triton=triton, found=found):
            assert choose(group(device), engine, dtype=dtype) == (engine, "asked for", "copy")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_auto_on_a_cpu_is_chunked_at_any_size(dtype):
    for rows, triton, interprets, threads in product((0, 2048), *[(True, False)] * 3):
        with machine(triton=triton, interprets=interprets):
            comm = group(threads=threads)
            assert choose(comm, rows=rows, dtype=dtype).engine == "chunked"
            assert routing.choose(comm, "auto", dtype).engine == "chunked"
            assert grouped.choose("auto", torch.ones(1, 1, dtype=dtype)) == "chunked"


@pytest.mark.parametrize(
    ("rows", "dtype", "here", "engine", "why"),
    [
        (2046, FP32, {}, "collective", "2046 rows, fewer than 2048 (no crossover table)"),
        (2048, FP32, {}, "triton", "2048 rows, at least 2048 (no crossover table)"),
        (2048, torch.bfloat16, {}, "triton", "2048 rows, at least 2048"),
        (2048, torch.float16, {}, "triton", "2048 rows, at least 2048"),
        (2048, FP64, {}, "chunked", "the Triton kernels do not support fp64"),
        (0, FP64, {}, "chunked", "the Triton kernels do not support fp64"),
        (2048, FP32, {"triton": False}, "chunked", "Triton is not installed"),
        (0, FP32, {"triton": False}, "chunked", "Triton is not installed"),
        (2048, FP32, {"capability": (8, 0)}, "triton", "2048 rows"),
        (2048, FP32, {"capability": (7, 5)}, "chunked", "the Triton kernels need compute capability 8.0"),
        (0, FP32, {"capability": (7, 5)}, "chunked", "the Triton kernels need compute capability 8.0"),
        (
            2048,
            FP32,
            {"capability": (7, 5), "cuda": False},
            "triton",
            "2048 rows",
        ),  # ROCm's capability numbers mean something else
    ],
)
def test_auto_on_a_gpu_without_a_table(rows, dtype, here, engine, why):
    with machine(**here):
        got = choose(group("cuda"), rows=rows, dtype=dtype)
    assert got.engine == engine and got.reason.startswith(why) and got.transport == "programs"


@pytest.mark.parametrize("winner", ["collective", "chunked", "triton"])
@pytest.mark.parametrize(
    ("dtype", "here", "default"),
    [
        (FP32, {}, "triton"),
        (FP64, {}, "chunked"),
        (FP32, {"triton": False}, "chunked"),
        (FP32, {"capability": (7, 5)}, "chunked"),
    ],
)
def test_auto_takes_a_measured_engine_unless_it_is_a_kernel_that_cannot_run(winner, dtype, here, default):
    found = measured.Found(winner, "measured", "copy")
    with machine(found=found, **here):
        got = choose(group("cuda"), dtype=dtype)
    if winner == "triton" and default == "chunked":
        assert got.engine == "chunked" and "Triton" in got.reason and got.transport == "programs"
    else:
        assert got == tuple(found)


@pytest.mark.parametrize("engine", engines.ENGINES)
def test_the_table_is_asked_by_what_the_ranks_share(engine):
    for dtype, threads in product(NARROW, (True, False)):
        with machine() as asked:
            choose(group("cuda", threads=threads), engine, rows=512, dtype=dtype)
            ranks, name = ("virtual" if threads else "processes"), str(dtype).removeprefix("torch.")
            key = measured.Key("all_gather_matmul", name, 2, ranks)
            assert asked == [("a cuda", key, 512, 64)]
            engines.choose(group("cuda"), engine, Rows((2, 2)), dtype)  # a token mover: no operation, no table
            assert len(asked) == 1


@pytest.mark.parametrize(
    ("device", "dtype", "here", "threads", "error"),
    [
        ("cuda", FP32, {}, False, None),
        ("cuda", FP32, {}, True, None),
        ("cuda", torch.float16, {}, False, None),
        ("cuda", torch.bfloat16, {}, False, None),
        ("cpu", FP32, {"interprets": True}, False, None),
        ("cuda", FP64, {}, False, "takes fp32, fp16 and bf16, not torch.float64"),
        ("cpu", FP64, {"interprets": True}, False, "takes fp32, fp16 and bf16, not torch.float64"),
        ("cuda", FP32, {"triton": False}, False, "needs the triton package"),
        ("cpu", FP32, {"triton": False, "interprets": True}, False, "needs the triton package"),
        ("cpu", FP32, {}, False, "set TRITON_INTERPRET=1"),
        ("cpu", FP32, {"interprets": True}, True, "runs one rank per process"),
    ],
)
def test_triton_runs_where_it_can_and_says_why_where_it_cannot(device, dtype, here, threads, error):
    comm = group(device, threads=threads)
    operand = SimpleNamespace(is_cuda=device == "cuda", dtype=dtype)
    calls = {
        "dense": lambda: choose(comm, "triton", dtype=dtype).engine,
        "exchange": lambda: routing.choose(comm, "triton", dtype).engine,
        "grouped": lambda: grouped.choose("triton", operand),
    }
    if threads:
        calls.pop("grouped")  # has no group argument
    for name, call in calls.items():
        with machine(**here):
            if error is None:
                assert call() == "triton", name
            else:
                with pytest.raises(ValueError, match=error):
                    call()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernels", [True, False])
def test_experts_on_a_gpu_take_kernels_or_collectives(kernels, dtype):
    """The exchange's chunked engine reads peers' memory on the host."""
    operand = SimpleNamespace(is_cuda=True, dtype=dtype, device=torch.device("cuda"))
    fused = kernels and dtype != FP64
    with machine(triton=kernels):
        assert routing.choose(group("cuda"), "auto", dtype).engine == ("triton" if fused else "collective")
        assert routing.choose(group("cuda"), "collective", dtype).engine == "collective"
        assert grouped.choose("auto", operand) == ("triton" if fused else "chunked")
        assert grouped.choose("chunked", operand) == "chunked"
        with pytest.raises(ValueError, match=r"engine 'chunked' moves tokens to experts on CPU only"):
            routing.choose(group("cuda"), "chunked", dtype)


def test_copies_that_are_asked_for_go_before_what_was_measured():
    with machine(triton=True):
        for engine, transport in (("triton", "programs"), (engines.BY_COPY, "copy")):
            choice = engines.choose(group("cuda"), engine, Rows((8, 8)), FP32, "all_gather_matmul", 8)
            assert (choice.engine, choice.transport) == ("triton", transport)


@pytest.mark.parametrize("value", ["1", "true", "ON", "y", "Yes", "0", "false", "", "no", None])
def test_the_interpreter_is_what_the_environment_says(value, monkeypatch):
    if value is None:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    else:
        monkeypatch.setenv("TRITON_INTERPRET", value)
    assert engines.interpreting() == (value in ("1", "true", "ON", "y", "Yes"))


def test_ranks_whose_launches_are_cut_otherwise_are_told_apart():
    """The number of concurrent programs determines the order of sums."""
    comm, found = group(), set()
    for programs in (3, 4, 132):
        with mock.patch.object(config, "machine_of", lambda _, n=programs: replace(config.HOST, programs=n)):
            found.add(engines.tables(comm, "triton"))
            assert engines.tables(comm, "chunked") == 0
    assert len(found) == 3


@pytest.mark.parametrize("value", ["1", "0", None])
def test_a_switch_that_ranks_of_one_visible_gpu_cannot_use_is_told_so(value, monkeypatch):
    """torch makes no multicast address with the variable that the library sets for them."""
    monkeypatch.delenv(OVERLAPPING, raising=False)
    if value is not None:
        monkeypatch.setenv(OVERLAPPING, value)
    reduces = Rows((8, 8)), FP32, "matmul_all_reduce", 64
    with machine(), pytest.raises(ValueError, match="has no multicast address here") as told:
        engines.choose(group("cuda", switch=False), "multimem", *reduces)
    assert (OVERLAPPING in str(told.value) and "see all GPUs" in str(told.value)) == (value == "1")
    with machine():
        assert engines.choose(group("cuda"), "multimem", *reduces).engine == "multimem"


TABLE, KERNELS, FP8 = engines.TABLE, engines.KERNELS, engines.FP8
CHOICES: dict[str, tuple[Callable[..., engines.Choice], set[str]]] = {  # -> (choice, the facts that `auto` depends on)
    "dense": (choose, {TABLE, KERNELS}),
    "experts": (lambda comm, engine: routing.choose(comm, engine, FP32), {KERNELS}),
    "fp8": (lambda comm, engine: fp8.choose("x", comm, Spec("tp", 0, (8, 8), 1, engine), Rows((8, 8))), {KERNELS, FP8}),
    "rows": (lambda comm, _: engines.choose_mover(comm, Rows((8, 8)), FP32), set()),
}


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("fact", [TABLE, KERNELS, FP8])
def test_auto_is_refused_where_ranks_differ_in_what_it_depends_on(name, fact):
    """Otherwise they could choose differently, and wait for each other. A named engine depends on none of it."""
    chooses, facts = CHOICES[name]
    comm = group("cuda", differ=[fact])
    with machine(), mock.patch.object(fp8, "multiplies", lambda *_: True):
        assert chooses(comm, "collective").engine == "collective"
        if fact not in facts:
            chooses(comm, "auto")
            return
        with pytest.raises(ValueError, match=f"'auto' depends on {fact}.* one thing on rank 0, another") as told:
            chooses(comm, "auto")
        assert ("FUSEDTP_TABLES" in str(told.value)) == (fact == TABLE)


def test_facts_differ_where_choices_would_and_not_for_every_other_gpu():
    def facts(device: str = "cuda", **here) -> dict[str, object]:
        with machine(**here):
            return {name: value for name, (value, _) in engines.facts(torch.device(device, 0)).items()}

    assert facts(capability=(9, 0)) == facts(capability=(8, 9)) == facts(capability=(10, 0))
    for other in ({"triton": False}, {"capability": (7, 5)}, {"capability": (8, 0)}):
        assert facts(**other) != facts()
    assert facts("cpu", triton=False) == facts("cpu", capability=(8, 0)) == {TABLE: 0}
    with machine(), mock.patch.object(measured, "source", lambda kind: (5, kind)):
        assert engines.facts(torch.device("cuda", 0))[TABLE] == (5, "a cuda")
