"""Training a mixture of experts equals one process and reports how the experts are used."""

import json
import math

import numpy as np
import pytest
import torch

from fusedtp.commands.build import shard_faults
from fusedtp.commands.results import heat_map
from fusedtp.nn import CausalLM, ModelConfig, MoEConfig
from fusedtp.train.config import faults, layout, parse
from fusedtp.train.loop import ExpertLoad, LossScale, Trainer
from fusedtp.train.mesh import World
from fusedtp.train.watch import Guard
from tests.train.support import meshes_of
from tests.train.test_run import TINY, command, summary_of

EXPERTS = (
    "--experts 4 --top-k 2 --expert-width 12 --shared-width 10 --capacity 1.1 --balance-bias 0.001 --recv-capacity 0.9"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks",
    [
        "--pp 2 --dp 2 --ep 2 --accumulate 2 --layers 3 --dense-layers 1",
        "--dp 2 --tp 2 --ep 4 --expert-tp 2 --accumulate 2",
    ],
)
def test_ranks_with_experts_train_like_one_process(tmp_path, ranks):
    book = tmp_path / "book.txt"
    book.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(3000)))
    where = ["--data", str(book), "--runs", str(tmp_path)]
    done = command("-m", "fusedtp", "train", *TINY, *ranks.split(), *EXPERTS.split(), "--verify", *where)
    assert done.returncode == 0, done.stderr
    summary = summary_of(tmp_path / "main")
    assert summary["verified"] is True and summary["verified_steps"] == 6
    assert summary["engines"]["mlp.experts"]["chunked"] > 0
    lines = (tmp_path / "main" / "metrics.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if "loss" in record]
    layers = 2 if "--layers 3" in ranks else 1
    every = [np.sum(record["expert_load"], axis=1).tolist() for record in steps]
    assert every == [[8 * 32 * 2] * layers] * len(steps), "tokens of a step, two choices each"
    assert all(0 <= record["dropped_share"] < 1 for record in steps)
    assert any(record["dropped_share"] > 0 for record in steps)
    assert all(record["expert_rows_used"] > record["expert_rows_bound"] > 0 for record in steps)
    assert all(record["expert_rounds"] == 2 for record in steps)
    assert "busiest expert" in done.stdout and "dropped" in done.stdout
    assert (tmp_path / "main" / "experts.png").read_bytes().startswith(b"\x89PNG")


def tiny_model(**moe) -> CausalLM:
    return CausalLM(
        ModelConfig(
            vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=3, num_attention_heads=2,
            moe=MoEConfig(num_experts=4, top_k=2, hidden=6, first_dense=1, **moe),
        )
    )  # fmt: skip


def test_load_is_counted_over_microbatches_and_moves_the_biases():
    model = tiny_model(bias=True)
    load = ExpertLoad(model, World(), rate=0.5)
    ids = torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(0))
    outs = [model(ids, ids) for _ in range(2)]
    for out in outs:
        load.add(out.routings)
    found = load.step()
    counts = np.array(found["expert_load"])
    assert counts.shape == (2, 4) and (counts.sum(1) == 2 * 12 * 2).all()
    assert found["max_violation"] == pytest.approx((counts.max(1) / 12 - 1).max())
    assert found["dropped_share"] == 0
    for layer, row in zip(model.layers[1:], counts, strict=True):
        assert layer.mlp.router.bias.tolist() == (0.5 * np.sign(12 - row)).tolist()
    assert np.array(load.step()["expert_load"]).sum() == 0, "a step begins with nothing"


@pytest.mark.parametrize("skipped_by", ["guard", "loss scale"])
def test_a_skipped_step_changes_no_state_of_the_model(skipped_by):
    """Step 1 of three has a loss, or only gradients, that are not finite."""
    model = tiny_model(bias=True)
    scale = LossScale(2.0, window=9) if skipped_by == "loss scale" else LossScale()
    batches = [{"input_ids": torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(0))}]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = Trainer(model, batches, optimizer, scale=scale, balance_bias=0.5, guard=Guard(World(), "skip"))

    def poison(module: torch.nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        if trainer.step != 1:
            return output
        if skipped_by == "guard":
            return output * math.nan
        output.register_hook(lambda gradient: gradient * math.inf)
        return output

    def state() -> list[torch.Tensor]:
        parts = [*model.state_dict().values()]
        parts += [each for of_parameter in optimizer.state.values() for each in of_parameter.values()]
        return [part.clone() for part in parts]

    model.norm.register_forward_hook(poison)
    trainer.train_step()
    before = state()
    trainer.train_step()
    assert math.isinf(trainer.metrics.steps[1]["grad_norm"]), "it was not skipped"
    assert np.sum(trainer.metrics.steps[1]["expert_load"]) == 2 * 12 * 2, "its load is recorded all the same"
    assert all(map(torch.equal, state(), before))
    trainer.train_step()
    assert not all(map(torch.equal, state(), before)), "training goes on"


def test_the_most_that_was_used_of_the_experts_room_is_kept():
    model = tiny_model(recv_capacity=0.4, on_overflow="rounds")
    load = ExpertLoad(model, World(), rate=0.0)
    ids = torch.zeros(1, 5, dtype=torch.long)
    load.add(model(ids, ids).routings)
    load.add(model(ids[:, :3], ids[:, :3]).routings)
    found = load.step()
    room = {name: found[f"expert_{name}"] for name in ("rows_bound", "rows_used", "rounds")}
    assert room == {"rows_bound": 4, "rows_used": 10, "rounds": 3}, "of 5 tokens with two choices each"
    assert "expert_rounds" not in load.step(), "a step begins with nothing"


def rooms(group) -> list[int]:
    """Capacity, rows used and rounds, of this rank alone and of both. Rank 1 has five tokens, rank 0 three."""
    model = tiny_model(recv_capacity=0.4, on_overflow="rounds")
    routings = model(torch.zeros(1, 3 + 2 * group.rank(), dtype=torch.long)).routings
    mesh, flat = meshes_of(2)
    found = []
    for world in (World(), World(2, rank=group.rank(), mesh=mesh, flat=flat)):
        load = ExpertLoad(model, world, rate=0.0)
        load.add(routings)
        step = load.step()
        found.append([step[f"expert_{name}"] for name in ("rows_bound", "rows_used", "rounds")])
    return found


@pytest.mark.slow
def test_the_room_of_a_step_is_the_most_that_any_rank_used(worlds):
    (few, first), (many, second) = worlds(2).run(rooms)
    assert few[1] < many[1], "rows that each rank used"
    assert first == second == [max(pair) for pair in zip(few, many)]


def test_a_model_without_experts_has_no_load():
    model = CausalLM(ModelConfig(vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
    load = ExpertLoad(model, World(), rate=0.0)
    load.add(model(torch.zeros(1, 3, dtype=torch.long)).routings)
    assert load.step() == {}


def test_the_heat_map_shows_each_experts_share():
    steps = [{"expert_load": [[4, 4, 0, 0], [2, 2, 2, 2]]}, {"expert_load": [[8, 0, 0, 0], [1, 3, 2, 2]]}]
    first, second, _colours = heat_map(steps).axes
    assert np.array(first.images[0].get_array()).tolist() == [[2, 4], [2, 0], [0, 0], [0, 0]]
    assert np.array(second.images[0].get_array()).tolist() == [[1, 0.5], [1, 1.5], [1, 1], [1, 1]]


def test_faults_of_experts_are_reported_together():
    config = parse(
        [
            "--experts",
            "6",
            "--top-k",
            "7",
            "--capacity",
            "0",
            "--recv-capacity",
            "-1",
            "--dense-layers",
            "4",
            "--expert-width",
            "0",
            "--tp",
            "4",
        ]
    )
    found = faults(config, *layout(config, 4, 4))
    for words in (
        "--expert-width 0",
        "--capacity 0.0",
        "--recv-capacity -1.0",
        "--top-k 7 is larger than --experts 6",
        "--dense-layers 4 with --layers 4",
        "--experts 6 with --ep 4",
    ):
        assert any(words in fault for fault in found), (words, found)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--tp 2 --dp 2 --ep 3", "--ep 3 is not a multiple of --tp 2 that divides the 4 ranks"),
        ("--tp 2 --dp 3 --ep 4 --batch 6", "--ep 4 is not a multiple of --tp 2 that divides the 6 ranks"),
        (
            "--tp 2 --dp 2 --ep 4",
            "--experts 6 with --ep 4 --expert-tp 1: 6 experts cannot be divided evenly among 4 ranks",
        ),
        ("--tp 2 --expert-tp 3", "tensor_parallel is 3, must be a divisor of 2 ranks"),
        (
            "--tp 2 --expert-tp 2 --expert-width 1",
            "--expert-width 1 is smaller than --expert-tp 2",
        ),
        ("--ep 0", "--ep 0 is not positive"),
        ("--experts 0 --tp 2 --ep 4", "--ep 4 without --experts"),
        ("--experts 0 --tp 2 --expert-tp 2", "--expert-tp 2 without --experts"),
        ("--tp 1 --dp 2 --ep 2 --data-parallel ddp", "ddp with --ep beyond --tp: experts are data parallel over"),
        ("--tp 1 --dp 2 --dp-replicate 4", "--dp-replicate 4 does not divide --dp 2"),
    ],
)
def test_ranks_that_cannot_share_the_experts(options: str, words: str):
    config = parse(["--experts", "6", *options.split()])
    sizes = layout(config, 2, 2)
    found = faults(config, *sizes) + shard_faults(config, *sizes)
    assert len(found) == 1 and words in found[0], found


@pytest.mark.parametrize("options", ["--tp 2 --dp 2 --ep 4 --expert-tp 2", "--tp 1 --dp 4 --ep 2", "--tp 2"])
def test_ranks_that_can(options: str):
    config = parse(["--experts", "6", *options.split()])
    assert faults(config, *layout(config, 4, 4)) == []
