"""Watching a run: only slow ranks are named; what bounds a step; losses; where a NaN began."""

import json
import math
import os
import re
import signal
import time
from collections.abc import Callable, Collection
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh

from fusedtp.comm import PeerDied, SignalTimeout
from fusedtp.commands.build import build_stages
from fusedtp.commands.run import trainer_of
from fusedtp.train.clocks import APART, Clocks
from fusedtp.train.config import parse
from fusedtp.train.data import Batches, Windows
from fusedtp.train.loop import Trainer
from fusedtp.train.mesh import World, bound_waits, meshes
from fusedtp.train.pulse import HANG, KEPT, Position, Pulse, RankHung, judge, timed_out
from fusedtp.train.watch import (
    KINDS,
    LEAST_STEPS,
    RANKS,
    SKIPS_IN_A_ROW,
    Event,
    Found,
    Guard,
    NotFinite,
    Reading,
    Spikes,
    Watch,
    finite,
    in_words,
    peak_memory,
    stragglers,
    verdict,
    where_not_finite,
)
from tests.harness import pool
from tests.harness.messages import Failure
from tests.train.support import host_groups

SIZES = "--width 16 --heads 4 --kv-heads 2 --mlp-width 10 --layers 2 --length 16 --batch 8 --warmup 2 --val-every 99"


# -- clocks ------------------------------------------------------------------------------------------------------------


def test_every_second_is_booked_once_under_the_innermost_kind(monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(now)))
    clocks = Clocks()
    clocks.base("compute")
    with clocks("pp_wait", "a schedule"), clocks("compute"), clocks("dp_wait", "a gather"):
        pass
    with clocks(APART), clocks("dp_wait"):
        pass
    read = clocks.read()
    assert read == {"other": 1, "compute": 5, "pp_wait": 2, "dp_wait": 1, APART: 3}
    assert sum(read.values()) == next(now) - 1
    assert (clocks.last, clocks.calls, clocks.kind) == ("a gather", 2, "compute")


# -- stragglers and the verdict ----------------------------------------------------------------------------------------


def reading(steps: int = 10, **seconds: list[float]) -> Reading:
    ranks = len(next(iter(seconds.values())))
    table = {kind: seconds.get(kind, [0.0] * ranks) for kind in KINDS}
    return Reading(9, steps, table, table, [0.0] * ranks)


even = st.lists(st.floats(0.09, 0.11), min_size=2, max_size=8)


@given(even, st.data())
def test_a_rank_three_times_as_slow_is_named_and_no_other(times, data):
    """Its peers wait for it, so their steps take as long."""
    slow = data.draw(st.integers(0, len(times) - 1))
    kind = data.draw(st.sampled_from(["compute", "data", "optimizer"]))
    times[slow] = 0.33
    (found,) = stragglers(reading(**{kind: times}, dp_wait=[0.33 - each for each in times]))
    assert (found.rank, found.kind, found.seconds) == (slow, kind, 0.33) and 0.09 <= found.others <= 0.11
    assert f"rank {slow} on box-7 is slow in {kind}: 330.0 ms a step" in found.in_words("box-7")


@given(even, even)
def test_even_ranks_raise_no_alarm(compute, data):
    count = min(len(compute), len(data))
    waits = [0.0] * (count - 1) + [5.0]  # waiting does not count as slow
    assert not stragglers(reading(compute=compute[:count], data=data[:count], tp_wait=waits))


def test_what_is_slow_but_small_raises_no_alarm():
    assert not stragglers(reading(compute=[0.1, 0.1], data=[0.001, 0.01]))
    assert stragglers(reading(compute=[0.1, 0.1], data=[0.001, 0.2]))


def test_stages_of_a_pipeline_may_differ_as_their_costs_do():
    uneven = reading(compute=[0.3, 0.1, 0.1, 0.1])
    (named,) = stragglers(uneven, stages=[0, 1, 2, 3], cost=[1, 1, 1, 1])
    assert named.rank == 0
    assert not stragglers(uneven, stages=[0, 1, 2, 3], cost=[3, 1, 1, 1])
    two = reading(compute=[0.1, 0.1, 0.3, 0.3])  # two ranks per stage are compared with each other
    assert not stragglers(two, stages=[0, 0, 1, 1], cost=[1, 1, 1, 1])
    (named,) = stragglers(reading(compute=[0.1, 0.1, 0.1, 0.3]), stages=[0, 0, 1, 1], cost=[1, 1, 1, 1])
    assert named.rank == 3


@pytest.mark.parametrize(
    ("bound", "seconds"),
    {
        "compute": {"compute": [6, 6], "dp_wait": [3, 3], "other": [1, 1]},
        "communication": {"compute": [3, 3], "tp_wait": [2, 2], "dp_wait": [4, 4], "data": [1, 1]},
        "slower ranks": {"compute": [1, 9, 1], "tp_wait": [8, 0, 8], "other": [1, 1, 1]},
        "data": {"compute": [2, 2], "data": [7, 7], "pp_wait": [1, 1]},
    }.items(),
)
def test_the_verdict_names_the_largest_part_and_its_shares_sum_to_the_step(bound, seconds):
    found, shares = verdict([reading(3, **seconds), reading(5, **seconds)])
    assert found == bound
    assert sum(shares[kind] for kind in KINDS) == pytest.approx(1)
    waits = sum(shares[kind] for kind in ("tp_wait", "pp_wait", "dp_wait"))
    assert shares["communication"] + shares["slower_ranks"] == pytest.approx(waits)
    assert in_words(found, shares).startswith(f"bound by {bound}: ")


def test_a_first_step_alone_says_nothing_of_what_bounds_a_step():
    watch = Watch(World())
    assert watch.verdict() == "no step was trained"
    watch.step(0, 1.0, last=True)
    assert watch.verdict().startswith("what bounds a step is not known: only the first step")


def test_what_a_gpu_does_not_show_is_not_measured():
    unseen = reading(**{kind: [math.nan] * 2 for kind in KINDS} | {"data": [0.1, 0.5]})
    bound, shares = verdict([unseen])
    assert bound == "not measured" and "not measured" in in_words(bound, shares)
    assert unseen.to_dict()["seconds"]["compute"] == [None, None]
    assert [each.kind for each in stragglers(unseen)] == ["data"]


# -- losses ------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.floats(0.5, 20))
def test_a_jump_is_noted_once_and_falling_noisy_losses_are_not(seed, height):
    generator, spikes = torch.Generator().manual_seed(seed), Spikes()
    noise = (torch.rand(100, generator=generator) * 0.2).tolist()
    losses = [2 + 4 / (1 + step / 10) + noise[step] for step in range(100)]
    assert [spikes.note(step, loss) for step, loss in enumerate(losses)] == [None] * 100
    line = spikes.note(100, losses[-1] + 3 + height)
    assert line is not None and line.startswith("step 101: the loss jumped to ")
    assert spikes.note(101, losses[-1] + 3 + height) is None
    assert spikes.note(102, losses[-1]) is None
    assert spikes.note(103, losses[-1] + 3 + height) is not None


def test_memory_is_what_the_process_has_had_at_most():
    """Up to what Linux counts late, a few pages per thread."""
    here, size = torch.device("cpu"), 128 << 20
    before = peak_memory(here)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    kept = torch.ones(before - resident + size, dtype=torch.uint8)
    most = peak_memory(here)
    del kept
    assert abs(most - before - size) < size / 8
    assert abs(peak_memory(here) - most) < size / 8


def test_a_disk_that_is_full_ends_no_run(tmp_path, capsys):
    """The error is printed once while it lasts, and a cut line does not damage others."""
    watch, path = Watch(World(), 1, tmp_path), tmp_path / "ranks.jsonl"

    def two_steps(step: int) -> str:
        watch.step(step, 1.0), watch.step(step + 1, 1.0)  # type: ignore[func-returns-value]
        return capsys.readouterr().err

    two_steps(0)
    (kept,) = path.read_text().splitlines()
    path.unlink(), path.mkdir()  # type: ignore[func-returns-value]
    assert two_steps(2) == f"{path} could not be written: Is a directory\n"
    path.rmdir()
    path.write_text(f"{kept}\n{kept[:9]}")
    assert two_steps(4) == ""
    assert [json.loads(line)["step"] for line in path.read_text().splitlines() if line.endswith("}")] == [1, 4, 5]
    path.unlink(), path.mkdir()  # type: ignore[func-returns-value]
    assert two_steps(6) != ""


# -- runs --------------------------------------------------------------------------------------------------------------

MESHES = {  # (pp, dp, tp) of two ranks, options
    "tp": ((1, 1, 2), ""),
    "dp": ((1, 2, 1), ""),
    "ddp": ((1, 2, 1), "--data-parallel ddp"),
    "pp": ((2, 1, 1), "--pp 2 --accumulate 4"),
}


class Slow:
    """Every rank sleeps in a module's forward or when reading data; rank 1 sleeps `factor` times as long."""

    def __init__(self, kind: str, factor: float) -> None:
        self.kind, self.factor = kind, factor

    def __call__(self, trainer: Trainer) -> None:
        seconds = 0.02 * (self.factor if trainer.world.rank == 1 else 1)

        def sleep(*given: Any) -> None:
            time.sleep(seconds)

        if self.kind == "compute":
            for module in first_layers(trainer.model):
                module.register_forward_pre_hook(sleep)
        elif self.kind == "data":
            read = Windows.read
            trainer.batches.train.read = lambda starts: (sleep(), read(trainer.batches.train, starts))[1]


def first_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The first layer on this rank, in a list."""
    return [module for name, module in model.named_modules() if name.startswith("layers.") and name.count(".") == 1][:1]


class Poison:
    """Put a NaN on `rank` in some steps, or once: in a module's output, in its gradient, or in a weight."""

    def __init__(self, what: str, name: str, rank: int = 1, steps: Collection[int] = (2,), once: bool = False) -> None:
        self.what, self.name, self.rank, self.steps, self.once, self.done = what, name, rank, steps, once, False

    def __call__(self, trainer: Trainer) -> None:
        if trainer.world.rank != self.rank:
            return
        module = trainer.model.get_submodule(self.name)
        if self.what == "weight":
            with torch.no_grad():
                next(module.parameters())._local_tensor.view(-1)[3] = math.nan
            return
        module.register_forward_hook(lambda module, args, output: self.poisoned(trainer, output))

    def poisoned(self, trainer: Trainer, output: torch.Tensor) -> torch.Tensor:
        if trainer.step not in self.steps or self.done:
            return output
        self.done = self.once
        bad = torch.ones_like(output)
        bad.view(-1)[5] = math.nan
        if self.what == "output":
            return output * bad
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * bad)
        return output


def steps_of(options: str) -> int:
    return parse(f"{SIZES} --steps 5 {options}".split()).optim.steps


@cache
def bounded_meshes(dp: int, tp: int, pp: int, timeout: float) -> tuple[DeviceMesh, dict[str, DeviceMesh]]:
    """Meshes whose groups have this timeout; see Note [Meshes of tests]."""
    return meshes("cpu", dp, tp, tp, pp, timeout=timeout)


def made(
    group: Any,
    mesh: str,
    options: str,
    tokens: Path,
    folder: Path | None = None,
    tell: Callable[[str], None] = print,
    timeout: float = 60.0,
) -> Trainer:
    """The trainer of one of two ranks."""
    (pp, dp, tp), more = MESHES[mesh]
    on, flat = bounded_meshes(dp, tp, pp, timeout)
    own = host_groups()[0]
    here = World(dp, tp, tp, group.rank(), torch.device("cpu"), on, flat, own, own, pp)
    config = parse(f"{SIZES} --steps 5 {more} {options}".split())
    batches = Batches(
        tokens, length=16, batch=8, accumulate=config.data.accumulate, dp=dp, dp_rank=here.dp_rank
    )  # fmt: skip
    model, pipeline = build_stages(config, here)
    watch = Watch(here, config.watch.watch_every, folder, tell)
    guard = Guard(here, config.watch.on_nan, tell)
    return trainer_of(config, here, batches, model, pipeline, None, watch, guard)


def train(
    group: Any, mesh: str, options: str, tokens: Path, breakage: Any = None, folder: Path | None = None
) -> dict[str, Any]:
    """Train as configured, with a breakage, and return the results."""
    told: list[str] = []
    trainer = made(group, mesh, options, tokens, folder, told.append)
    if breakage is not None:
        breakage(trainer)
    error = ""
    try:
        trainer.train(steps_of(options))
    except NotFinite as stopped:
        error = str(stopped)
    return {
        "told": told,
        "error": error,
        "steps": trainer.metrics.steps,
        "finite": all(finite(p.detach()) for p in trainer.model.parameters()),
        "readings": [each.to_dict() for each in trainer.watch.readings],
        "verdict": trainer.watch.verdict(),
        "samples": trainer.batches.samples,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [pytest.param(mesh, marks=pytest.mark.slow) if mesh == "pp" else mesh for mesh in MESHES]
)
def test_a_slow_rank_of_a_run_is_named_whatever_its_peers_wait_in(worlds, tokens, tmp_path, mesh):
    first, second = worlds(2).run(train, mesh, "--watch-every 3", tokens, Slow("compute", 20), tmp_path)
    (line,) = first["told"]
    assert line.startswith("step 4: rank 1 on ") and " is slow in compute: " in line
    assert second["told"] == []
    written = [json.loads(line) for line in (tmp_path / RANKS).read_text().splitlines()]
    assert [(each["step"], each["steps"]) for each in written] == [(3, 3), (4, 1)]
    assert [each["seconds"] for each in written] == [each["seconds"] for each in first["readings"]]
    waits = written[0]["seconds"][f"{mesh[-2:]}_wait"]
    assert waits[0] > 2 * waits[1]
    for mine in (first, second):
        parts = sum(record[f"{kind}_seconds"] for record in mine["steps"][1:] for kind in KINDS)
        assert parts == pytest.approx(sum(record["seconds"] for record in mine["steps"][1:]), rel=0.05)


@pytest.mark.slow
def test_a_rank_that_reads_slowly_is_named_for_its_data(worlds, tokens):
    short, _ = worlds(2).run(train, "dp", f"--steps {LEAST_STEPS}", tokens, Slow("data", 20))
    assert not short["told"]  # the first step is warm-up and does not count
    first, _ = worlds(2).run(train, "dp", "", tokens, Slow("data", 20))
    (line,) = first["told"]
    assert "rank 1 on " in line and " is slow in data: " in line


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp", "pp"])
def test_an_even_run_raises_no_alarm(worlds, tokens, mesh):
    first, _ = worlds(2).run(train, mesh, "", tokens, Slow("compute", 1))
    assert first["told"] == []
    assert first["verdict"].startswith("bound by ")


FAULTS = {  # mesh, breakage, expected message
    "tp output": ("tp", Poison("output", "layers.1.mlp"), "output of layers.1.mlp, microbatch 0, on rank 1 ("),
    "dp output": ("dp", Poison("output", "layers.0.self_attn"), "layers.0.self_attn, microbatch 0, on rank 1 ("),
    "pp output": ("pp", Poison("output", "layers.0.mlp", 0), "output of layers.0.mlp, microbatch 0, on rank 0 ("),
    "tp gradient": ("tp", Poison("gradient", "layers.1"), "backward with the gradient that arrives at layers.1"),
    "weight": ("dp", Poison("weight", "layers.1.input_layernorm"), "layers.1.input_layernorm.weight of rank 1 ("),
    "once": ("dp", Poison("output", "layers.0", once=True), "the same step, repeated, is finite"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", FAULTS)
def test_where_nan_began_is_named_and_every_rank_stops(worlds, tokens, case):
    mesh, poison, said = FAULTS[case]
    first, second = worlds(2).run(train, mesh, "", tokens, poison)
    assert first["error"] == second["error"] and said in first["error"], first["error"]
    step = 0 if case == "weight" else 2
    assert first["error"].startswith(f"step {step + 1}: the loss is ")
    assert len(first["steps"]) == step
    assert (first["finite"] and second["finite"]) == (case != "weight")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp", "pp", "tp"])
def test_a_skipped_step_changes_no_parameter_and_no_order_of_the_data(worlds, tokens, mesh):
    broken = Poison("gradient", "layers.0", rank=0)
    first, second = worlds(2).run(train, mesh, "--on-nan skip", tokens, broken)
    assert first["finite"] and second["finite"] and first["error"] == ""
    assert [record["grad_norm"] == math.inf for record in second["steps"]] == [
        False,
        False,
        True,
        False,
        False,
    ]
    assert first["samples"] == second["samples"] == 5 * 8
    (line,) = [line for line in first["told"] if "slow" not in line]  # a loaded machine may delay a rank
    assert line.startswith("step 3: ") and line.endswith("; the step was skipped")


@pytest.mark.slow
def test_a_run_whose_every_step_is_skipped_ends(worlds, tokens):
    broken = Poison("output", "layers.0", steps=range(99))
    first, _ = worlds(2).run(train, "dp", f"--on-nan skip --steps {SKIPS_IN_A_ROW + 3}", tokens, broken)
    assert first["error"].endswith(f"{SKIPS_IN_A_ROW} steps in a row were skipped")
    assert len(first["told"]) == len(first["steps"]) == SKIPS_IN_A_ROW - 1


def test_no_step_is_skipped_for_a_parameter_that_is_nan(worlds, tokens):
    """Otherwise bad checkpoints would replace good ones until the run ends."""
    for each in worlds(2).run(train, "dp", "--on-nan skip", tokens, Poison("weight", "norm")):
        assert "parameters were not finite before the step: norm.weight of rank 1 (" in each["error"]
        assert each["error"].endswith("resume an earlier checkpoint with --resume --step")
        assert each["steps"] == each["told"] == []


def test_a_run_ends_after_bad_steps_in_a_row_alone():
    guard, model = Guard(World(), "skip"), torch.nn.Linear(1, 1)
    for step in range(3 * SKIPS_IN_A_ROW):
        norm = 1.0 if step % SKIPS_IN_A_ROW == SKIPS_IN_A_ROW - 1 else math.nan
        assert guard.takes(step, 2.0, norm, model, lambda: None) == math.isfinite(norm)
    for step in range(SKIPS_IN_A_ROW - 1):
        guard.takes(step, 2.0, math.nan, model, lambda: None)
    with pytest.raises(NotFinite, match=f"{SKIPS_IN_A_ROW} steps in a row"):
        guard.takes(step, 2.0, math.nan, model, lambda: None)


def test_a_stage_that_was_given_nan_is_not_where_it_began():
    """A later stage may have called fewer modules before its first bad output."""
    first = Found(0, "box-a", forward=Event(9, "layers.1.mlp", 2, made=True))
    second = Found(1, "box-b", forward=Event(1, "layers.2.input_layernorm", 2, made=False))
    for found in ([first, second], [second, first]):
        assert (
            where_not_finite(found)
            == "it began in forward with the output of layers.1.mlp, microbatch 2, on rank 0 (box-a)"
        )
    assert "layers.2" in where_not_finite([Found(0, "box-a"), second])


def test_gradients_of_fp16_that_overflow_are_the_loss_scales():
    guard, asked = Guard(World(), "stop"), []
    assert guard.takes(0, 2.0, math.inf, torch.nn.Linear(1, 1), lambda: asked.append(1), scaled=True)
    for loss, norm, scaled in ((math.nan, math.inf, True), (2.0, math.inf, False), (math.inf, 1.0, False)):
        with pytest.raises(NotFinite):
            guard.takes(0, loss, norm, torch.nn.Linear(1, 1), lambda: asked.append(1), scaled=scaled)
    assert len(asked) == 3


# -- ranks that hang --------------------------------------------------------------------------------------------------


def hang(group: Any, mesh: str, tokens: Path, folder: Path, frozen: bool = False, rank: int = 1) -> None:
    """One rank stops in the forward of step 2 until the other reports it; if `frozen`, its process stops at once."""

    def stop(*given: Any) -> None:
        if frozen:  # in its first step, before its first heartbeat
            os.kill(os.getpid(), signal.SIGSTOP)  # until the world kills the process
        while trainer.step == 2 and not (folder / HANG).exists():
            time.sleep(0.05)

    trainer = made(group, mesh, "", tokens, timeout=3.0)
    bound_waits(trainer.world, 3.0)
    if group.rank() == rank:
        first_layers(trainer.model)[0].register_forward_pre_hook(stop)
    with Pulse(trainer.world, trainer.watch.clocks, lambda: trainer.step, folder, beat=0.2):
        trainer.train(5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "call"),
    [
        ("tp", "reduce_scatter_rows"),
        ("dp", "FSDP's all_gather"),
        ("pp", "the pipeline"),
    ],
)
def test_a_rank_that_hangs_is_named_by_the_others_with_its_last_call(tokens, tmp_path, mesh, call):
    with pool.World(2) as ranks:
        first, _ = ranks.outcomes(hang, mesh, tokens, tmp_path, grace=30)
    assert isinstance(first, Failure) and first.kinds[0] == "RankHung", first
    assert re.search(r"rank 1 on \S+ has been in compute of step 3 for \d+ s; its last call was ", first.message)
    report = json.loads((tmp_path / HANG).read_text())
    zero, one = report["ranks"]
    assert zero["gave_up"] and zero["kind"] == f"{mesh}_wait" and zero["step"] == 2
    assert not one["gave_up"] and one["call"].startswith(call), one
    assert report["what"] in first.message


@pytest.mark.slow
def test_a_rank_whose_process_is_stopped_is_named_as_one_that_answers_no_more(tokens, tmp_path):
    with pool.World(2) as ranks:
        first, _ = ranks.outcomes(hang, "dp", tokens, tmp_path, True, grace=5)
    assert isinstance(first, Failure) and first.kinds[0] == "RankHung", first
    assert re.search(r"rank 1 on \S+ no longer responds; it was last seen in \S+ of step 1", first.message)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp", "tp"])
def test_a_frozen_rank_that_holds_the_store_is_named(tokens, tmp_path, mesh):
    with pool.World(2) as ranks:
        _, second = ranks.outcomes(hang, mesh, tokens, tmp_path, True, 0, grace=5)
    assert isinstance(second, Failure) and second.kinds[0] == "RankHung", second
    told = "rank 0, which stores the positions of all ranks, no longer responds"
    assert second.message.startswith(told) and json.loads((tmp_path / HANG).read_text())["what"] == told


class SlowStore(dict[str, str]):
    """Slow once, like a machine that is being migrated."""

    def set(self, name: str, value: str) -> None:
        if not self:
            self[name] = ""
            time.sleep(0.5)
        self[name] = value

    def check(self, names: list[str]) -> bool:
        return names[0] in self


def test_a_store_that_was_slow_once_is_asked_again():
    pulse = Pulse(World(dp=2), Clocks(), lambda: 0, beat=0.02)
    pulse._store = SlowStore()
    assert not pulse._write() and pulse._read() == []  # the time limit is ten beats
    time.sleep(0.5)
    assert pulse._write() and [each.rank for each in pulse._read()] == [0]
    with pytest.raises(KeyError):
        pulse._ask(lambda: {}["no such name"])


def out_of_order(group: Any, mesh: str, tokens: Path, folder: Path) -> None:
    """In the forward of step 2, rank 1 calls an all-reduce that the other rank does not."""

    def more(*given: Any) -> None:
        if trainer.step == 2:
            dist.all_reduce(torch.ones(4), group=trainer.world.mesh[mesh].get_group())

    trainer = made(group, mesh, "", tokens, timeout=3.0)
    bound_waits(trainer.world, 3.0)
    if group.rank() == 1:
        first_layers(trainer.model)[0].register_forward_pre_hook(more)
    with Pulse(trainer.world, trainer.watch.clocks, lambda: trainer.step, folder, beat=0.2):
        trainer.train(5)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp", "pp"])
def test_ranks_whose_collectives_are_out_of_order_are_named_with_their_last_calls(tokens, tmp_path, mesh):
    with pool.World(2) as ranks:
        found = ranks.outcomes(out_of_order, mesh, tokens, tmp_path, grace=30)
    for each in found:
        assert isinstance(each, Failure) and each.kinds[0] == "RankHung", each
        assert each.message.startswith("all ranks wait, in different calls: rank 0 on ")
        assert re.search(r"rank 1 on \S+ has been in compute of step 3 for \d+ s; its last call was ", each.message)


def leaving(group: Any, mesh: str, tokens: Path, *said: str) -> tuple[str, str]:
    """Each rank exits with an error of its own from `said`. Returns the exception that comes out."""
    trainer = made(group, mesh, "", tokens)

    def connected(*given: Any, **more: Any) -> dist.TCPStore:
        time.sleep(0.3 * group.rank())  # the first rank must still be there
        return dist.TCPStore(*given, **more)

    try:
        with (
            patch("fusedtp.train.pulse.TCPStore", connected),
            Pulse(trainer.world, trainer.watch.clocks, lambda: 4, beat=0.5),
        ):
            time.sleep(0.1 * group.rank())
            raise ValueError("of the pipeline") from RuntimeError(said[group.rank()])
    except Exception as error:
        return type(error).__name__, str(error)


CLOSED = (
    "Connection closed by peer [::1]:80",
    "Read error [::1]:80: Connection reset by peer",
    "Broken pipe",
)


@pytest.mark.slow
@pytest.mark.parametrize("closed", CLOSED)
@pytest.mark.parametrize("first", [0, 1])
def test_a_connection_closed_by_one_that_timed_out_is_a_timeout_too(worlds, tokens, closed, first):
    said = ("Timed out waiting 3000ms", closed)
    found = worlds(2).run(leaving, "dp", tokens, *(said if first == 0 else said[::-1]))
    assert [kind for kind, _ in found] == ["RankHung", "RankHung"], found


@pytest.mark.slow
def test_a_connection_closed_by_one_that_died_is_no_timeout(worlds, tokens):
    found = worlds(2).run(leaving, "dp", tokens, "it broke", CLOSED[0])
    assert found == [("ValueError", "of the pipeline")] * 2


def leaving_late(group: Any, tokens: Path, late: int) -> tuple[str, float]:
    """One rank's wait times out eight beats after the other's. Returns the error and the seconds until it came."""
    trainer = made(group, "dp", "", tokens)
    began = time.monotonic()
    try:
        with (
            Pulse(trainer.world, trainer.watch.clocks, lambda: 4, beat=0.25),
            trainer.watch.clocks("dp_wait"),
        ):
            began = time.monotonic()
            time.sleep(2.0 if group.rank() == late else 0.0)
            raise RuntimeError("Timed out waiting 3000ms")
    except RankHung as error:
        return str(error), time.monotonic() - began
    raise AssertionError("no error")


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_whose_wait_times_out_later_still_learns_where_the_others_are(worlds, tokens, late):
    found = worlds(2).run(leaving_late, tokens, late)
    for told, seconds in found:
        assert told.startswith("all ranks wait, in different calls: rank 0 on "), told
        assert seconds < KEPT * 0.25  # the first rank waits for the other, but not for the maximum time


def place(rank: int, beat: int = 5, kind: str = "compute", **more: Any) -> Position:
    return Position(rank, "box", beat, 7, kind, 9.0, call=f"call of {rank}", **more)


def test_who_hangs_is_judged_by_who_waits_and_who_still_speaks():
    waits, gave_up = place(0, kind="dp_wait"), place(1, gave_up=True)
    told, hung = judge([waits], [place(0, 8, "dp_wait"), gave_up, place(2, 8)], 3)
    assert hung == {2} and told.startswith("rank 2 on box has been in compute of step 8 for 9 s; its last call was")
    told, hung = judge([place(2)], [gave_up, place(2, kind="tp_wait")], 3)  # rank 2 is frozen, rank 0 never reported
    assert (
        hung == {0, 2}
        and "rank 2 on box no longer responds; it was last seen in tp_wait of step 8" in told
        and "rank 0 never reported" in told
    )
    told, hung = judge([waits], [place(0, 8, "dp_wait"), gave_up], 2)
    assert hung == set() and told.startswith("all ranks wait, in different calls: ") and "call of 0" in told
    assert judge([], [], 2)[1] == set()


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (SignalTimeout("rank 0 waited 3 s for rank 1"), True),
        (RuntimeError("[pair.cc] Timed out waiting 3000ms for recv operation to complete"), True),
        (PeerDied("rank 1 ended"), False),
        (RuntimeError("Connection closed by peer"), False),
        (
            caused(RuntimeError("[Stage 1] failed to run forward"), RuntimeError("Timed out waiting 3 ms")),
            True,
        ),
        (caused(RuntimeError("[Stage 1] failed to run forward"), PeerDied("rank 1 ended")), False),
        (ValueError("--timeout 0 is not positive: it timed out"), False),
    ],
)
def test_only_waits_that_timed_out_make_a_report(error, is_one):
    assert timed_out(error) == is_one


def out_of_step(group: Any, what: str, tokens: Path) -> None:
    """Rank 1 of a tensor-parallel run reads fewer rows, or skips an attention and so calls layers in another order."""
    trainer = made(group, "tp", "", tokens)
    if group.rank() == 1 and what == "shape":
        read, steps = Windows.read, count()
        # the first batch is compared separately
        trainer.batches.train.read = lambda starts: read(trainer.batches.train, starts[:-1] if next(steps) else starts)
    if group.rank() == 1 and what == "order":
        layer = trainer.model.layers[1]
        layer.forward = lambda x, *more, **options: layer.mlp(x)
    trainer.train(5)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["shape", "order"])
def test_ranks_of_a_layer_that_are_out_of_step_name_each_other(tokens, what):
    with pool.World(2) as ranks:
        found = ranks.outcomes(out_of_step, what, tokens, grace=30)
    assert all(isinstance(each, Failure) and each.kinds[0] == "SignatureMismatch" for each in found), found
    assert all("rank 0" in each.message and "rank 1" in each.message for each in found), found
