"""Options: all faults of a command line are reported at once, and the schedule follows its formula."""

import json
import math
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusedtp.commands.build import model_config
from fusedtp.train.config import (
    CheckpointOptions,
    DataOptions,
    ModelOptions,
    OptimOptions,
    ParallelOptions,
    RunOptions,
    TrainConfig,
    faults,
    layout,
    parse,
)
from fusedtp.train.loop import adamw, for_batch, learning_rate, set_learning_rate


def test_the_defaults_are_without_fault():
    assert faults(TrainConfig(), 1, 2) == []


def test_faults_are_reported_together():
    arguments = "--heads 4 --width 10 --steps 0 --batch 7 --accumulate 2 --tp 3 --beta2 1 --name a/b --dropout 1"
    config = parse(arguments.split())
    found = faults(config, *layout(config, 3, 3))
    named = [
        "--width 10",
        "--dropout 1.0",
        "--steps 0",
        "--beta2 1.0",
        "--name 'a/b'",
        "--tp 3 with 4 heads",
        "--batch 7",
    ]
    assert [fault for fault in named if not any(one.startswith(fault) for one in found)] == []
    assert len(found) == len(named)


def test_sums_of_a_switch_are_not_deterministic():
    (found,) = faults(parse(["--determinism", "--engine", "multimem"]), 1, 2)
    assert found.startswith("--determinism with --engine multimem")
    assert faults(parse(["--determinism", "--engine", "triton"]), 1, 2) == []


def test_when_to_save_is_not_asked_of_a_run_that_saves_nothing():
    asked = ["--no-save", "--save-every", "5", "--keep-last", "3"]
    assert faults(parse(asked), 1, 2) == [
        "--save-every 5 with --no-save: nothing is saved",
        "--keep-last 3 with --no-save: nothing is saved",
    ]
    assert faults(parse(["--no-save"]), 1, 2) == faults(parse([*asked, "--resume"]), 1, 2) == []


def test_heads_that_do_not_divide_say_which_sizes_work():
    (found,) = faults(TrainConfig(ModelOptions(heads=4, kv_heads=2)), 1, 3)
    assert found.startswith("--tp 3 with 4 heads")
    assert "1, 2, 4 would work" in found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "ranks", "local_ranks", "wanted"),
    [
        ("", 8, 8, (1, 8)),
        ("", 16, 8, (2, 8)),
        ("--dp 2", 8, 8, (2, 4)),
        ("--tp 2", 8, 8, (4, 2)),
        ("--tp 2 --dp 2", 2, 2, (2, 2)),
        ("--dp 4", 2, 2, (4, 1)),
        ("--tp 0", 2, 2, (2, 0)),
    ],
)
def test_ranks_are_shared_out(arguments, ranks, local_ranks, wanted):
    assert layout(parse(arguments.split()), ranks, local_ranks) == wanted


def test_a_run_of_an_older_version_is_read_without_the_options_that_are_gone(tmp_path):
    """Options that are given again come before those of the run."""
    config = parse(f"--runs {tmp_path} --tp 2 --dp 4 --dp-replicate 2 --accumulate 8".split())
    plain = config.to_dict()
    plain["parallel"] |= {"dp_shard": None, "reshard": True}
    config.run.folder.mkdir()
    (config.run.folder / "config.json").write_text(json.dumps(plain))
    again = ["--runs", str(tmp_path), "--resume"]
    assert parse(again).parallel == config.parallel and parse(again).data == config.data
    assert parse([*again, "--dp", "2"]).parallel == replace(config.parallel, dp=2)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ("--vocab-size 500 --data ids.npy", []),
        ("--vocab-size 0 --data ids.npy", ["--vocab-size 0 is not from 1 to 2147483648"]),
        ("--vocab-size 500", ["--vocab-size works with token ids (.npy) only: pass them with --data"]),
    ],
)
def test_a_vocabulary_without_a_tokenizer(arguments, wanted):
    config = parse(arguments.split())
    assert faults(config, 1, 1) == wanted
    assert model_config(parse(["--vocab-size", "500"])).vocab_size == 500


def test_a_vocabulary_is_not_said_twice(tmp_path):
    """With token ids, a model's own tokenizer is ignored, and an explicit --tokenizer is refused."""
    (tmp_path / "tokenizer.json").touch()
    asked = ["--vocab-size", "500", "--data", "ids.npy"]
    assert parse(["--model", str(tmp_path)]).data.tokenizer == tmp_path
    assert parse(["--model", str(tmp_path), *asked]).data.tokenizer is None
    found = faults(parse([*asked, "--tokenizer", str(tmp_path)]), 1, 1)
    assert f"--vocab-size 500 with --tokenizer {tmp_path}, which has a vocabulary of its own" in found


def test_options_reach_the_model():
    arguments = "--width 96 --heads 6 --kv-heads 3 --layers 2 --mlp-width 100 --dtype bf16 --qk-norm"
    config = parse(arguments.split())
    model = model_config(config)
    assert (model.hidden_size, model.num_attention_heads, model.num_key_value_heads) == (96, 6, 3)
    assert (model.num_hidden_layers, model.intermediate_size, model.qk_norm) == (2, 100, True)
    assert (model.compute_dtype, model.parameter_dtype) == (torch.bfloat16, torch.float32)


def test_the_learning_rate_follows_the_formula():
    options = OptimOptions(steps=101, lr=2.0, warmup=20, min_lr=0.1)
    rates = [learning_rate(options, step) for step in range(101)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == pytest.approx(1.0) and rates[19] == rates[20] == 2.0
    assert rates[60] == pytest.approx(2 * (0.1 + 0.9 / 2))
    assert rates[40] == pytest.approx(2 * (0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2))
    assert rates[100] == pytest.approx(0.2)
    assert all(later < earlier for earlier, later in pairwise(rates[20:]))


def test_linear_and_wsd_decays():
    options = OptimOptions(steps=101, lr=2.0, warmup=20, min_lr=0.1, decay="linear")
    rates = [learning_rate(options, step) for step in range(101)]
    assert rates[19] == rates[20] == 2.0 and rates[60] == pytest.approx(2 * 0.55)
    assert rates[100] == pytest.approx(0.2)
    rates = [learning_rate(replace(options, decay="wsd", decay_share=0.2), step) for step in range(101)]
    assert rates[19:81] == [2.0] * 62 and rates[90] == pytest.approx(2 * 0.55)
    assert rates[100] == pytest.approx(0.2)
    assert all(later < earlier for earlier, later in pairwise(rates[80:]))
    assert OptimOptions(decay_share=0.0).faults() == ["--decay-share 0.0 is not in (0, 1]: it is a share of --steps"]


@given(
    steps=st.integers(1, 50), lr=st.floats(1e-5, 1.0), tp=st.none() | st.integers(1, 8),
    keep=st.none() | st.integers(1, 9),
    data=st.lists(st.sampled_from(["a", "b/c.txt"])), documents=st.sampled_from(["joined", "separate"]),
)  # fmt: skip
def test_a_configuration_is_read_as_it_was_written(steps, lr, tp, keep, data, documents):
    config = TrainConfig(
        data=DataOptions(data=tuple(map(Path, data)), documents=documents),
        optim=OptimOptions(steps=steps, lr=lr),
        parallel=ParallelOptions(tp=tp),
        run=RunOptions(name="x", runs=Path("somewhere"), resume=True, step=3),
        checkpoint=CheckpointOptions(keep_every=keep),
    )
    read = TrainConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert read == replace(config, run=replace(config.run, resume=False, step=None))


def test_what_another_version_wrote_is_named():
    assert TrainConfig.from_dict({"optim": {"steps": 3}}) == TrainConfig(optim=OptimOptions(steps=3))
    with pytest.raises(ValueError, match="unknown options of optim: muon"):
        TrainConfig.from_dict({"optim": {"muon": 1}})


@pytest.mark.slow
def test_resume_takes_the_options_of_the_run_and_those_given_come_first(tmp_path):
    folder = tmp_path / "main"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TrainConfig(optim=OptimOptions(steps=7, lr=0.5)).to_dict()))
    runs = ["--runs", str(tmp_path)]
    assert parse(runs).optim.steps == OptimOptions().steps
    resumed = parse([*runs, "--resume", "--lr", "0.25"])
    assert resumed.optim.steps == 7 and resumed.optim.lr == 0.25 and resumed.run.resume
    assert resumed.run.runs == tmp_path, "the folder may have moved"
    copy = shutil.copytree(folder, tmp_path / "other" / "copy")
    asked = parse(["--runs", str(copy.parent), "--name", "copy", "--resume"])
    assert asked.run.folder == copy and asked.optim.steps == 7
    (tmp_path / "books").mkdir()
    renamed = TrainConfig(optim=OptimOptions(steps=7), run=RunOptions(name="books", runs=tmp_path))
    (folder / "config.json").write_text(json.dumps(renamed.to_dict()))
    assert parse([*runs, "--resume"]).run.folder == folder, "its name was another"
    for broken in ("{", '{"optim": {"lr": "abc"}}', '{"model": {"width": null}}'):
        (folder / "config.json").write_text(broken)
        with pytest.raises(ValueError, match=f"^{folder / 'config.json'} is not the configuration of a run: [^;]*$"):
            parse([*runs, "--resume"])


def test_a_run_shorter_than_its_warm_up_still_has_a_rate():
    options = OptimOptions(steps=2, warmup=20)
    assert learning_rate(options, 1) == pytest.approx(options.lr / 10)
    assert learning_rate(replace(options, steps=1, warmup=0), 0) == options.lr


def test_only_matrices_decay_and_all_groups_follow_the_schedule():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    optimizer = adamw(model, options := OptimOptions(weight_decay=0.3))
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decays == {id(p): 0.3 if p.ndim > 1 else 0.0 for p in model.parameters()}
    set_learning_rate(optimizer, rate := learning_rate(options, 3))
    assert {group["lr"] for group in optimizer.param_groups} == {rate}


def test_fused_and_foreach_take_the_same_step():
    steps = []
    for options in (OptimOptions(adamw="fused"), OptimOptions(adamw="foreach")):
        torch.manual_seed(0)
        model = torch.nn.Linear(30, 20)
        optimizer = adamw(model, options, **{options.adamw: True})
        assert all(group[options.adamw] for group in optimizer.param_groups)
        model(torch.randn(5, 30)).square().sum().backward()
        optimizer.step()
        steps.append([p.detach() for p in model.parameters()])
    for fused, foreach in zip(*steps, strict=True):
        torch.testing.assert_close(fused, foreach, rtol=1e-6, atol=1e-7)


@given(st.integers(1, 4096), st.integers(1, 4096))
def test_the_learning_rate_follows_the_batch_as_asked(batch, base):
    options = OptimOptions(lr=0.5, base_batch=base)
    rates = {rule: for_batch(replace(options, batch_rule=rule), batch).lr for rule in ("none", "linear", "sqrt")}
    assert rates["none"] == 0.5
    assert rates["linear"] == pytest.approx(0.5 * batch / base)
    assert rates["sqrt"] == pytest.approx(0.5 * (batch / base) ** 0.5)
