"""Checkpoints are complete or absent whenever the writer is killed, are verified, and load the same on any mesh."""

import errno
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.tensor import DTensor

from fusedtp.commands.build import build
from fusedtp.nn.init import draw, local_slice
from fusedtp.train import checkpoint
from fusedtp.train.checkpoint import (
    CheckpointError,
    Checkpoints,
    Saver,
    TrainingState,
    faults_of,
    path_of,
    random_state,
    save_interval,
    set_random_state,
    steps_in,
)
from fusedtp.train.config import parse
from fusedtp.train.loop import adamw
from fusedtp.train.mesh import World
from tests.harness import pool
from tests.harness.messages import Failure
from tests.harness.warm import warm_python
from tests.train.killed_saver import ON_DISK, PHASES, Numbers
from tests.train.support import MESHES, host_groups, ranks_of, world_on
from tests.train.test_run import environment

# -- files -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("saved")
    checkpoints = Checkpoints(folder, keep_last=5)
    for step in (1, 2):
        checkpoints.save(step, Numbers(step), note="here")
    checkpoints.close()
    return folder


FILES = (".metadata", "__0_0.distcp", "about.json", "manifest.json")


def test_what_is_saved_is_loaded_and_good(saved: Path):
    checkpoints, state = Checkpoints(saved), Numbers()
    loaded = checkpoints.load(state)
    assert loaded.step == state.step == 2 and loaded.refused == () and loaded.about["note"] == "here"
    assert checkpoints.load(state, 1).step == state.step == 1
    assert checkpoints.steps() == [1, 2] and checkpoints.faults(1) == checkpoints.faults(2) == []
    assert sorted(path.name for path in path_of(saved, 2).iterdir()) == sorted(FILES)


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8 % len(content)] ^= 1 << bit % 8
    path.write_bytes(content)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(FILES), bit=st.integers(0, 1 << 20))
def test_one_flipped_bit_is_found_and_the_one_before_is_taken(
    saved: Path, tmp_path_factory: pytest.TempPathFactory, name: str, bit: int
):
    folder = Path(shutil.copytree(saved, tmp_path_factory.mktemp("flip") / "c"))
    flip(path_of(folder, 2) / name, bit)
    state = Numbers()
    same = name == "manifest.json" and checkpoint.manifest_of(path_of(saved, 2)) == _manifest(folder)
    loaded = Checkpoints(folder).load(state)
    assert state.step == loaded.step == (2 if same else 1)
    assert same or (all("step-00000002" in fault for fault in loaded.refused) and loaded.refused)
    assert same or name == "manifest.json" or f"step-00000002/{name} has" in loaded.refused[0]
    if not same:
        with pytest.raises(CheckpointError, match="step-00000002"):
            Checkpoints(folder).load(state, 2)


def _manifest(folder: Path) -> Any:
    try:
        return checkpoint.manifest_of(path_of(folder, 2))
    except CheckpointError:
        return None


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def swap(path: Path) -> None:
    """Swap this file with the same file of checkpoint 1."""
    other = path_of(path.parent.parent, 1) / path.name
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


DAMAGE = {"truncated": truncate, "emptied": lambda path: path.write_bytes(b""), "removed": Path.unlink}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_not_whole_is_found(saved: Path, tmp_path: Path, damage: str, name: str):
    folder = Path(shutil.copytree(saved, tmp_path / "c"))
    DAMAGE[damage](path_of(folder, 2) / name)
    if (damage, name) == ("truncated", "manifest.json"):  # its last byte is only a newline
        assert faults_of(path_of(folder, 2)) == []
        (path_of(folder, 2) / name).write_bytes((path_of(folder, 2) / name).read_bytes()[:-2])
    state = Numbers()
    (fault,) = Checkpoints(folder).load(state).refused
    assert state.step == 1 and name in fault and "step-00000002" in fault


@pytest.mark.parametrize("name", ["__0_0.distcp", "about.json"])
def test_files_of_two_checkpoints_that_were_swapped_are_found(saved: Path, tmp_path: Path, name: str):
    folder = Path(shutil.copytree(saved, tmp_path / "c"))
    swap(path_of(folder, 2) / name)
    with pytest.raises(CheckpointError, match=rf"step-00000002/{name} has.*step-00000001/{name} has"):
        Checkpoints(folder).load(Numbers())


def with_format(saved: Path, folder: Path, number: int) -> Path:
    """A copy of the checkpoints; the last one claims to have this format."""
    path = path_of(Path(shutil.copytree(saved, folder)), 2)
    words = json.loads((path / "about.json").read_text()) | {"format": number}
    (path / "about.json").write_text(json.dumps(words))
    manifest = checkpoint.manifest_of(path) | checkpoint._sums(path, ["about.json"])
    (path / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_an_older_format_is_loaded(saved: Path, tmp_path: Path):
    state = Numbers()
    loaded = Checkpoints(with_format(saved, tmp_path / "c", checkpoint.FORMAT - 1)).load(state)
    assert state.step == loaded.step == 2 and loaded.refused == ()


def test_a_newer_format_is_refused_by_its_number(saved: Path, tmp_path: Path):
    folder = with_format(saved, tmp_path / "c", checkpoint.FORMAT + 1)
    state = Numbers()
    (fault,) = Checkpoints(folder).load(state).refused
    assert state.step == 1 and f"format {checkpoint.FORMAT + 1}, which a newer fusedtp wrote" in fault


def test_what_cannot_be_loaded_says_why(tmp_path: Path, saved: Path):
    with pytest.raises(CheckpointError, match="there is none"):
        Checkpoints(tmp_path).load(Numbers())
    (tmp_path / "step-00000004").mkdir()
    with pytest.raises(CheckpointError, match=r"step-00000004 has no manifest.json"):
        Checkpoints(tmp_path).load(Numbers())
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 3; there are \[1, 2\]"):
        Checkpoints(saved).load(Numbers(), 3)
    with pytest.raises(CheckpointError, match="another model; and data"):
        Checkpoints(saved).load(Numbers(), check=lambda about: ["another model", "and data"])

    class Other(Numbers):
        def state_dict(self) -> dict[str, Any]:
            return {"y": torch.zeros(3)}

    with pytest.raises(CheckpointError, match=r"step 2 does not fit this model.*y"):
        Checkpoints(saved).load(Other())


# -- writing -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_a_kill_in_any_phase_of_a_save_leaves_a_checkpoint_that_loads(tmp_path: Path, phase: str):
    script = str(Path(__file__).with_name("killed_saver.py"))
    done = subprocess.run(
        [warm_python(), script, phase, str(tmp_path)], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    newest = 3 if phase in ON_DISK else 2
    assert all(faults_of(path_of(tmp_path, step)) == [] for step in steps_in(tmp_path))
    checkpoints, state = Checkpoints(tmp_path, keep_last=2), Numbers()
    assert checkpoints.load(state).step == state.step == newest
    checkpoints.tidy()
    assert all(path.name.startswith("step-") for path in tmp_path.iterdir())
    checkpoints.save(4, Numbers(4))
    checkpoints.close()
    assert checkpoints.steps() == [newest, 4]


def die_on(group: Any, rank: int, phase: str, folder: Path) -> None:
    checkpoints = Checkpoints(folder, group=group)
    for step in (1, 2):
        checkpoints.save(step, Numbers(step))
    checkpoints.wait()
    with PHASES[phase]() if group.rank() == rank else nullcontext():
        checkpoints.save(3, Numbers(3))
        checkpoints.wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "phase"), [(1, "planned"), (1, "data written"), (0, "data fsynced"), (0, "rename"), (0, "prune")]
)
def test_one_of_two_ranks_killed_in_a_save_leaves_a_checkpoint_that_loads(tmp_path: Path, rank: int, phase: str):
    with pool.World(2) as ranks:
        outcomes = ranks.outcomes(die_on, rank, phase, tmp_path, grace=30)
    assert all(isinstance(each, Failure) for each in outcomes), outcomes
    assert outcomes[rank].kinds[0] == "WorkerDied", outcomes[rank]
    newest = 3 if phase in ON_DISK else 2
    checkpoints, state = Checkpoints(tmp_path), Numbers()
    assert checkpoints.load(state).step == state.step == newest
    checkpoints.tidy()
    assert all(path.name.startswith("step-") for path in tmp_path.iterdir())


def test_a_save_after_close_says_so(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.close()
    with pytest.raises(ValueError, match="are closed"):
        checkpoints.save(1, Numbers(1))


def test_a_stager_that_takes_one_state_is_made_for_each(tmp_path: Path, monkeypatch):
    """torch's stager works only once before 2.13."""

    class Once(checkpoint.DefaultStager):
        def stage(self, *args: Any, **more: Any) -> Any:
            staged = super().stage(*args, **more)
            self.close()
            return staged

    monkeypatch.setattr(checkpoint, "DefaultStager", Once)
    monkeypatch.setattr(checkpoint, "_STAGES_ONCE", True)
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, Numbers(step))
        assert checkpoints.wait().step == step
    checkpoints.load(Numbers(2))
    checkpoints.close()


def test_training_goes_on_while_a_save_is_written_and_changes_nothing_of_it(tmp_path: Path, monkeypatch):
    go, write = threading.Event(), FileSystemWriter.write_data

    def waiting(self, *args):
        assert go.wait(60)
        return write(self, *args)

    monkeypatch.setattr(FileSystemWriter, "write_data", waiting)
    x = torch.zeros(100)

    class Shared(Numbers):
        def state_dict(self) -> dict[str, Any]:
            return {"x": x, "step": self.step}

    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, Shared(0))
    assert checkpoints.writing and checkpoints.steps() == []
    x.fill_(7.0)
    go.set()
    saved = checkpoints.wait()
    assert saved.step == 1 and saved.blocked <= saved.seconds and not checkpoints.writing
    assert (
        saved.size
        == sum(path.stat().st_size for path in path_of(tmp_path, 1).iterdir())
        - (path_of(tmp_path, 1) / "manifest.json").stat().st_size
    )
    checkpoints.load(Numbers())  # asserts that all numbers equal the saved step: 0, not 7
    checkpoints.close()


@settings(max_examples=40, deadline=None)
@given(
    steps=st.sets(st.integers(0, 40), min_size=1, max_size=12),
    keep_last=st.integers(1, 4),
    keep_every=st.none() | st.integers(1, 9),
)
def test_what_stays_of_older_checkpoints(
    tmp_path_factory: pytest.TempPathFactory, steps: set[int], keep_last: int, keep_every: int | None
):
    folder = tmp_path_factory.mktemp("keep")
    checkpoints = Checkpoints(folder, keep_last=keep_last, keep_every=keep_every)
    kept: list[int] = []
    for step in sorted(steps):
        path_of(folder, step).mkdir()
        checkpoints._prune()
        kept = [s for s in [*kept, step] if s in [*kept, step][-keep_last:] or (keep_every and s % keep_every == 0)]
        assert checkpoints.steps() == kept


def test_a_disk_without_room_is_found_before_anything_is_written(tmp_path: Path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 399))
    checkpoints.save(1, Numbers(1))
    with pytest.raises(CheckpointError, match=r"step 1 was not saved.*needs 4,496 bytes, 399 are free"):
        checkpoints.wait()
    assert [*tmp_path.iterdir()] == [], "the draft is left"
    monkeypatch.undo()
    checkpoints.save(2, Numbers(2))
    assert checkpoints.wait().step == 2 and checkpoints.steps() == [2]


def test_a_checkpoint_under_another_step_is_refused(tmp_path: Path):
    """Otherwise it would count as the newest, and the run would repeat its steps."""
    checkpoints = Checkpoints(tmp_path, asynchronous=False)
    for step in (1, 2):
        checkpoints.save(step, Numbers(step))
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000003")
    (tmp_path / "step-00000002").rename(tmp_path / "step-4")  # not a name that a save gives
    assert checkpoints.steps() == [1, 3]
    loaded = checkpoints.load(Numbers())
    assert loaded.step == 1 and "step-00000003 holds step 1" in loaded.refused[0]
    assert checkpoints.faults(3) == ["step-00000003 holds step 1: the folder was copied or renamed"]


def test_a_disk_that_fills_up_leaves_the_checkpoint_before(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, asynchronous=False)
    checkpoints.save(1, Numbers(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="step 2 was not saved"):
            checkpoints.save(2, Numbers(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"], "what a full disk needs least is left"
    assert checkpoints.steps() == [1] and checkpoints.load(Numbers()).step == 1
    checkpoints.save(2, Numbers(2))
    assert checkpoints.steps() == [1, 2]


def test_a_folder_that_cannot_be_written_is_an_error_with_its_name(tmp_path: Path):
    (tmp_path / "file").touch()
    checkpoints = Checkpoints(tmp_path / "file", asynchronous=False)
    with pytest.raises(CheckpointError, match=r"step 1 was not saved.*file"):
        checkpoints.save(1, Numbers(1))


def test_a_folder_may_be_a_string_and_an_interval_is_positive(tmp_path: Path):
    checkpoints = Checkpoints(str(tmp_path / "c"), asynchronous=False)
    checkpoints.save(1, Numbers(1))
    assert checkpoints.steps() == [1] and checkpoints.load(Numbers()).step == 1
    with pytest.raises(ValueError, match="every 0 must be positive"):
        Saver(checkpoints, World(), every=0)


def test_checkpoints_after_the_one_that_is_resumed_are_set_aside(saved: Path, tmp_path: Path):
    folder = Path(shutil.copytree(saved, tmp_path / "c"))
    checkpoints = Checkpoints(folder)
    assert [path.name for path in checkpoints.set_aside(1)] == ["aside-00000002"]
    checkpoints.save(2, Numbers(2))
    checkpoints.wait()
    assert [path.name for path in checkpoints.set_aside(1)] == ["aside-00000002.1"]
    assert checkpoints.steps() == [1] and faults_of(folder / "aside-00000002") == []


# -- ranks -------------------------------------------------------------------------------------------------------------


class Part:
    """One rank's own numbers."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, Any]:
        return {f"x{self.rank}": torch.full((10,), float(self.rank))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.found = state_dict[f"x{self.rank}"]


def failing_on_rank_1(group, folder: Path) -> list[str]:
    """The disk of rank 1 fails: the error on each rank. Afterwards the next save works."""
    rank, told = group.rank(), []
    checkpoints = Checkpoints(folder, group=host_groups()[0])
    write = FileSystemWriter.write_data
    try:
        if rank == 1:
            FileSystemWriter.write_data = _no_room
        checkpoints.save(1, Part(rank))
        checkpoints.wait()
    except CheckpointError as error:
        told.append(str(error))
    finally:
        FileSystemWriter.write_data = write
    checkpoints.save(2, Part(rank))
    checkpoints.wait()
    part = Part(rank)
    loaded = checkpoints.load(part)
    checkpoints.close()
    assert loaded.step == 2 and bool((part.found == rank).all())
    return told


def _no_room(self, plan, planner):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_rank_that_cannot_write_is_named_on_all_ranks(worlds, tmp_path: Path):
    told = worlds(2).run(failing_on_rank_1, tmp_path)
    assert told[0] == told[1] == ["step 1 was not saved: rank 1: [Errno 28] No space left on device"]
    assert steps_in(tmp_path) == [2]


def own_folders(group, folder: Path) -> str:
    checkpoints = Checkpoints(folder / str(group.rank()), group=host_groups()[0], asynchronous=False)
    try:
        checkpoints.save(1, Part(group.rank()))
    except CheckpointError as error:
        return str(error)
    finally:
        checkpoints.close()
    return ""


def test_a_folder_that_ranks_do_not_share_is_refused(worlds, tmp_path: Path):
    assert all(
        "rank 1 writes to another " in told and "must be shared" in told
        for told in worlds(2).run(own_folders, tmp_path)
    )


SIZES = "--width 16 --heads 4 --kv-heads 2 --mlp-width 10 --layers 2 --length 8 --warmup 0"
EXPERTS = "--experts 4 --top-k 2 --expert-width 8 --shared-width 6 --balance-bias 0.01"


def on_mesh(group, mesh: str, options: str) -> tuple[TrainingState, World, Any]:
    """Model and optimizer on this mesh."""
    here = world_on(group, mesh)
    config = parse(f"{SIZES} --pp {here.pp} {options}".split())
    model = build(config, here)
    optimizer = adamw(model, config.optim)
    return TrainingState(model, optimizer, {}, group.rank(), 0), here, here.checkpoint_group


def whole(state: TrainingState) -> dict[str, torch.Tensor]:
    """Every tensor of model and optimizer, gathered."""
    found = state.state_dict()
    tensors = {
        f"{part}.{name}": value.full_tensor() if isinstance(value, DTensor) else value
        for part in ("model", "optimizer")
        for name, value in found[part].items()
        if isinstance(value, torch.Tensor)
    }
    return {name: value.clone() for name, value in tensors.items()}


def save_on(group, mesh: str, options: str, folder: Path) -> dict[str, torch.Tensor]:
    state, _, own = on_mesh(group, mesh, options)
    for name, parameter in state.model.named_parameters():
        full = draw(f"{name}.gradient", (*parameter.shape, 1), 1, 1.0, 0)[..., 0]
        mine = local_slice(full, parameter).clone()
        if isinstance(parameter, DTensor):
            parameter.grad = DTensor.from_local(
                mine, parameter.device_mesh, parameter.placements, run_check=False,
                shape=parameter.shape, stride=parameter.stride(),
            )  # fmt: skip
        else:
            parameter.grad = mine
    state.optimizer.step()
    checkpoints = Checkpoints(folder, group=own)
    checkpoints.save(2, state)
    checkpoints.close()
    return whole(state)


def load_on(group, mesh: str, options: str, folder: Path) -> tuple[int, dict[str, torch.Tensor]]:
    state, _, own = on_mesh(group, mesh, options)
    checkpoints = Checkpoints(folder, group=own)
    before = random_state()
    loaded = checkpoints.load(state)
    set_random_state(before)
    return loaded.step, whole(state)


PAIRS = [
    ("1", "tp2", ""),
    ("tp2", "1", "--tie-embeddings"),
    ("tp2", "dp2", ""),
    ("dp2", "tp4", ""),
    ("tp4", "pp2 tp2", "--tie-embeddings"),
    ("pp2 tp2", "dp2 tp2", "--tie-embeddings"),
    ("pp2 dp2", "pp4", "--layers 4 --tie-embeddings"),
    ("pp4", "tp2", "--layers 4"),
    ("dp2 tp2", "dp4", "--tie-embeddings"),
    ("dp4", "pp2", ""),
    ("dp2 tp2 ep4", "1", EXPERTS),
    ("tp2", "dp2 tp2 ep4", EXPERTS),
]
if os.environ.get("FUSEDTP_ALL_MESHES") == "1":  # `make test-meshes`
    TEN = [mesh for mesh in MESHES if "ep" not in mesh]
    PAIRS += [
        (one, other, f"--layers 4 {tied}".strip())
        for tied in ("", "--tie-embeddings")
        for one in TEN
        for other in TEN
        if one != other
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("one", "other", "options"), PAIRS)
def test_a_checkpoint_loads_on_another_mesh_to_the_last_bit(worlds, tmp_path: Path, one: str, other: str, options: str):
    sizes = [ranks_of(mesh) for mesh in (one, other)]
    want = {name: x for of_rank in worlds(sizes[0]).run(save_on, one, options, tmp_path) for name, x in of_rank.items()}
    read: set[str] = set()
    for step, got in worlds(sizes[1]).run(load_on, other, options, tmp_path):
        assert step == 2 and [name for name in got if not torch.equal(got[name], want[name])] == []
        read |= got.keys()
    assert read == want.keys() and len(want) > 20
    assert sum("exp_avg_sq" in name for name in want) >= 12 and all(
        want[name].any() for name in want if "exp_avg" in name
    )


def unmade_on(group, mesh: str, folder: Path, saves: bool) -> int:
    """Save or load a checkpoint from before the first step. Returns for how many parameters the optimizer has state."""
    state, _, own = on_mesh(group, mesh, "--tie-embeddings")
    checkpoints = Checkpoints(folder, group=own, asynchronous=False)
    if saves:
        checkpoints.save(0, state)
    else:
        checkpoints.load(state)
    checkpoints.close()
    return len(state.optimizer.state)


@pytest.mark.slow
@pytest.mark.parametrize(("one", "other"), [("dp2", "tp2"), ("pp2", "dp2")])
def test_a_checkpoint_from_before_the_first_step_loads_on_another_mesh(worlds, tmp_path: Path, one: str, other: str):
    assert worlds(2).run(unmade_on, one, tmp_path, True) == [0, 0]
    assert worlds(2).run(unmade_on, other, tmp_path, False) == [0, 0]


# -- optimizer state that does not exist yet ---------------------------------------------------------------------------


class Partly(torch.nn.Module):
    """Three linear layers; the loss depends only on those in `used`."""

    def __init__(self, used: str = "ab") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (torch.nn.Linear(3, 3) for _ in range(3))
        self.used = used

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.used:
            x = getattr(self, name)(x)
        return x.square().sum()


OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
}


def partly(used: str = "ab", kind: str = "adamw", steps: int = 0) -> TrainingState:
    model = Partly(used)
    state = TrainingState(model, OPTIMIZERS[kind](model.parameters()))
    steps_of(state, steps)
    return state


def steps_of(state: TrainingState, count: int) -> None:
    for i in range(count):
        state.model(torch.arange(3.0) + i).backward()
        state.optimizer.step()
        state.optimizer.zero_grad()


def numbers_of(state: TrainingState) -> dict[str, torch.Tensor]:
    """Weights, and the optimizer state of the parameters that have some."""
    found = {name: p.detach().clone() for name, p in state.model.named_parameters()}
    for name, p in state.model.named_parameters():
        found |= {f"{name}.{key}": x.clone() for key, x in state.optimizer.state.get(p, {}).items() if x is not None}
    return found


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_save_changes_nothing_and_what_was_not_made_is_loaded_as_not_made(tmp_path: Path, kind: str, steps: int):
    """Cases: no step yet (fp16 may overflow at first), and a parameter that the loss does not depend on."""
    state, want = partly("ab", kind, steps), partly("ab", kind, steps)
    checkpoints = Checkpoints(tmp_path, asynchronous=False)
    checkpoints.save(steps, state)
    assert_same(numbers_of(state), numbers_of(want))
    assert len(state.optimizer.state) == len(want.optimizer.state)
    again = {"fresh": partly("ab", kind), "trained": partly("abc", kind, 3), "partly": partly("bc", kind, 1)}
    again["trained"].model.used = again["partly"].model.used = "ab"
    again["fresh"].model(torch.ones(3)).backward()  # gradients exist: they stay, and torch must not create state
    gradients = [p.grad for p in again["fresh"].model.parameters()]
    for each in again.values():
        checkpoints.load(each)
        assert_same(numbers_of(each), numbers_of(want))
    assert all(p.grad is grad for p, grad in zip(again["fresh"].model.parameters(), gradients, strict=True))
    again["fresh"].optimizer.zero_grad()
    for each in (state, want, *again.values()):
        steps_of(each, 2)
    for each in (state, *again.values()):
        assert_same(numbers_of(each), numbers_of(want))
    checkpoints.close()


def test_a_parameter_that_is_trained_from_now_on_begins_with_fresh_state(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, asynchronous=False)
    checkpoints.save(2, partly("ab", steps=2))
    state = partly("abc")
    checkpoints.load(state)
    steps_of(state, 1)
    steps = [int(state.optimizer.state[p]["step"]) for p in state.model.parameters()]
    assert steps == [3, 3, 3, 3, 1, 1]
    checkpoints.close()


def test_state_that_a_checkpoint_should_have_is_missed(tmp_path: Path):
    """State of another optimizer, of one with an extra entry, and of a parameter that the checkpoint does not know."""
    checkpoints = Checkpoints(tmp_path, asynchronous=False)
    checkpoints.save(2, partly("ab", steps=2))
    others = [partly("ab", "momentum"), partly("ab"), partly("ab")]
    others[1].optimizer = torch.optim.AdamW(others[1].model.parameters(), lr=0.1, amsgrad=True)
    others[2].model.register_parameter("d", torch.nn.Parameter(torch.ones(3)))
    others[2].optimizer.add_param_group({"params": [others[2].model.d]})
    for other, missed in zip(others, ("momentum", "max_exp_avg_sq", "d"), strict=True):
        before = numbers_of(other).keys()
        with pytest.raises(CheckpointError, match=rf"step 2 does not fit this model: .*Missing key.*{missed}"):
            checkpoints.load(other)
        assert numbers_of(other).keys() == before
    checkpoints.close()


# -- loaders -----------------------------------------------------------------------------------------------------------


class Shuffled:
    """A loader with an order of its own per rank. Its state is empty before it starts, as torchdata's may be."""

    def __init__(self, rank: int) -> None:
        self.state: dict[str, Any] = {}
        self.order = torch.randperm(100, generator=torch.Generator().manual_seed(rank)).tolist()

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        self.state = self.state or {"order": self.order, "at": 0}
        while self.state["at"] < 100:
            self.state["at"] += 1
            first = self.state["order"][self.state["at"] - 1]
            yield {"input_ids": (torch.arange(16).view(2, 8) + first) % 13}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = dict(state_dict)


def alone_with(loader: Any) -> TrainingState:
    model = torch.nn.Linear(2, 2)
    return TrainingState(model, torch.optim.AdamW(model.parameters()), {"data": loader})


def loaders(group: Any, folder: Path) -> None:
    """Each rank gets back the state of its own loader and its own random state."""
    rank, loader = group.rank(), Shuffled(group.rank())
    batches = iter(loader)
    for _ in range(3 + rank):
        next(batches)
    checkpoints = Checkpoints(folder, group=host_groups()[0], asynchronous=False)
    torch.manual_seed(rank)
    checkpoints.save(1, alone_with(loader))
    draws, again = torch.rand(3), Shuffled(7)
    torch.manual_seed(9)
    checkpoints.load(alone_with(again))
    checkpoints.close()
    assert again.state == loader.state == {"order": Shuffled(rank).order, "at": 3 + rank}
    assert torch.equal(torch.rand(3), draws)


def test_a_loaders_state_is_that_of_its_rank(worlds, tmp_path: Path):
    worlds(2).run(loaders, tmp_path)
    with pytest.raises(CheckpointError, match=r"of Shuffled .* for ranks 0 of 2, 1 of 2: rank 0 of 1 cannot"):
        Checkpoints(tmp_path).load(alone_with(Shuffled(0)))


# -- how often ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(save=st.floats(1e-3, 1e4), failure=st.floats(1.0, 1e7))
def test_the_interval_loses_least(save: float, failure: float):
    """Compare with the minimum of Daly's full model of the run time, found by search."""

    def time(interval: float) -> float:  # his eq. 20 without restarts, per unit of work
        return failure * math.expm1((interval + save) / failure) / interval

    found = save_interval(save, failure)
    if save >= 2 * failure:
        assert found == failure
        return
    tried = [failure * 10 ** (-6 + 7 * i / 2000) for i in range(2001)]
    assert time(found) <= 1.01 * min(time(each) for each in tried)
