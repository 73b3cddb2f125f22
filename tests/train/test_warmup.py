"""`fusedtp warmup` covers every shape of a configuration and does not touch a run's folder."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fusedtp import cli
from fusedtp.commands import launch
from fusedtp.commands.build import build_stages
from fusedtp.commands.run import batches_of, trainer_of
from fusedtp.train.config import parse
from fusedtp.train.mesh import World
from tests.train.support import meshes_of
from tests.train.test_checkpoint import EXPERTS
from tests.train.test_resume import arguments

SIZES = "--width 32 --mlp-width 50 --length 16 --batch 8 --steps 1 --val-every 40 --val-batches 3"


def shapes_of(config: Any, tokens: Path, here: World) -> set[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Input shapes and weight shapes of a model's modules in one trainer step."""
    model, pipeline = build_stages(config, here)
    seen = set()

    def note(module: nn.Module, given: tuple[Any, ...], _: Any) -> None:
        weight = getattr(module, "weight", None)
        rows = tuple(tuple(x.shape) for x in given if isinstance(x, torch.Tensor))
        seen.add((type(module).__name__.removeprefix("FSDP"), rows, () if weight is None else tuple(weight.shape)))

    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(note)
    trainer_of(config, here, batches_of(config, tokens, here), model, pipeline).train(config.optim.steps)
    return seen


def on_mesh(group: Any, options: str, tokens: Path, dp: int, tp: int, ep: int, pp: int, reduced: bool) -> Any:
    config = parse(f"{SIZES} {options}".split())
    if reduced:
        config = launch.of_one_group(config, tp)
    mesh, flat = meshes_of(dp, tp, ep, pp)
    return shapes_of(config, tokens, World(dp, tp, ep, group.rank(), torch.device("cpu"), mesh, flat, pp=pp))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "dp", "pp", "least"),
    [
        ("--layers 3 --tp 2 --dp 2 --accumulate 2", 2, 1, 2),
        ("--layers 4 --tp 2 --dp 1 --pp 2 --accumulate 2", 1, 2, 2),
        (f"--layers 3 --dense-layers 1 --tp 2 --dp 2 {EXPERTS} --ep 2", 2, 1, 2),
    ],
)
def test_one_group_sees_every_shape_of_a_step(worlds, tokens, options, dp, pp, least):
    whole = worlds(4).run(on_mesh, options, tokens, dp, 2, 2, pp, False)
    small = worlds(least).run(on_mesh, options, tokens, least // 2, 2, 2, 1, True)
    missing = set.union(*whole) - set.union(*small)
    assert not missing, missing


def test_it_trains_a_step_and_leaves_the_run_as_it_is(book, tmp_path, capsys):
    assert cli.main(arguments(book, tmp_path, "--steps", "2")) == 0
    files = {path: path.read_bytes() for path in (tmp_path / "main").rglob("*") if path.is_file()}
    times = {path: path.stat().st_mtime_ns for path in files}
    capsys.readouterr()
    assert cli.main(["warmup", *arguments(book, tmp_path, "--layers", "4", "--accumulate", "2")[1:]]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "trained one step, 4 x 16 tokens at a time, on 1 ranks, 1 layers" in told
    assert "on a CPU there is nothing to compile" in told
    assert {path: path.read_bytes() for path in (tmp_path / "main").rglob("*") if path.is_file()} == files
    assert {path: path.stat().st_mtime_ns for path in files} == times


def test_it_leaves_tokens_and_no_run(book, tmp_path):
    assert cli.main(["warmup", *arguments(book, tmp_path)[1:]]) == 0
    assert [path.name for path in tmp_path.iterdir()] == [".tokens"]


@pytest.mark.slow
def test_a_wrong_configuration_is_refused_as_train_does(book, tmp_path, capsys):
    wrong = ["--heads", "3", "--dp", "3", "--data", str(book), "--runs", str(tmp_path)]
    assert cli.main(["warmup", *wrong]) == launch.WRONG_USAGE
    told = capsys.readouterr().err
    assert "fusedtp warmup: error: --width 256 does not divide into --heads 3" in told
    assert "--batch 16 does not divide over 3" in told and "give --tp: with --dp alone" in told
