"""`fusedtp bench hf`: its ways agree, its ceiling holds the same shards as ours, its figures follow from its times."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from fusedtp.bench import cli, hf, hf_models
from fusedtp.bench.options import Plan
from fusedtp.bench.rank import Rank, run
from fusedtp.bench.sample import LEAST

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
TOKENS = 64


def measured(kind: str, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = run(Plan(), 2, hf.measure, kind, "float32", "chunked", 0.0, SHAPE, TOKENS, str(folder))
    return found


@pytest.mark.slow
def test_all_ways_of_a_llama_make_the_same_loss_and_are_timed(tmp_path: Path):
    found = measured("llama", tmp_path)
    assert set(found["loss_difference"]) == {"stock", "torch", "nn", "same", "ours"} and not found["absent"]
    # For 16 operations, each with a sum of up to 96 terms and one rounding of its own.
    assert max(found["loss_difference"].values()) < 16**0.5 * (96**0.5 + 1) * 2.0**-24
    assert {way: spread["samples"] for way, spread in found["seconds"].items()} == dict.fromkeys(hf.WAYS, LEAST)


@pytest.mark.slow
def test_what_has_no_counterpart_of_a_mixture_says_why(tmp_path: Path):
    found = measured("mixtral", tmp_path)
    assert set(found["seconds"]) == {"stock", "ours", "ceiling"}
    assert "llama" in found["absent"]["nn"] and "experts" in found["absent"]["torch"]


def _shards(rank: Rank) -> dict[str, dict[str, tuple[Tensor, Tensor]]]:
    """Kind -> parameter -> this rank's shard in ours and in the ceiling."""
    found = {}
    for kind in hf_models.KINDS:
        model = hf_models.plain(hf_models.config_of(kind, torch.float32, **SHAPE), rank.device)
        ids = torch.arange(TOKENS)[None] % SHAPE["vocab_size"]
        ours = dict(hf_models.ours(model, rank.mesh, ids, "chunked").model.named_parameters())
        bound = dict(hf_models.ceiling(model, rank.mesh, ids).model.named_parameters())
        found[kind] = {name: (ours[name].to_local().detach(), bound[name].detach()) for name in ours}
    return found


@pytest.mark.slow
def test_the_ceiling_holds_the_shards_of_ours():
    for kind, shards in run(Plan(), 2, _shards).items():
        assert shards, kind
        for name, (ours, bound) in shards.items():
            assert torch.equal(ours, bound), (kind, name)


def result(**seconds: float) -> dict[str, Any]:
    return {"tokens": 100, "seconds": {way: {"median": time} for way, time in seconds.items()}}


def test_the_gap_is_that_of_the_faster_peer():
    found = hf.figures(result(stock=5.0, torch=4.0, nn=2.0, same=2.0, ours=2.5, ceiling=1.0))
    assert (
        found["gap closed"] == 0.5
        and found["ours / nn"] == found["ours / same"] == 1.25
        and found["ours / ceiling"] == 2.5
    )
    assert (found["stock / ours"], found["torch / ours"], found["tokens/s"]) == (2.0, 1.6, 40.0)
    found = hf.figures(result(stock=3.0, ours=1.5, ceiling=1.0))
    assert found["gap closed"] == 0.75 and not {"ours / nn", "torch / ours"} & set(found)
    assert math.isnan(hf.figures(result(stock=1.0, ours=1.5, ceiling=1.0))["gap closed"])
    assert "gap closed" not in hf.figures(result(ours=1.5, ceiling=1.0))


def test_a_loss_that_differs_is_refused(monkeypatch: pytest.MonkeyPatch):
    steps = {"ours": lambda: torch.tensor(2.0), "ceiling": lambda: torch.tensor(7.0)}
    hf.check_losses("llama", steps, 2.0, 1e-6)
    with pytest.raises(RuntimeError, match=r"the same loss.*ours"):
        hf.check_losses("llama", steps, 2.1, 1e-6)
    with pytest.raises(RuntimeError, match="the same loss"):
        hf.check_losses("llama", {"ours": lambda: torch.tensor(math.nan)}, 2.0, 1e-6)


def test_a_run_writes_what_it_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Runs without a world; the measurement's result is given."""
    given = result(stock=5.0, torch=4.0, nn=2.0, ours=2.5, ceiling=1.0)
    spreads = {w: {**s, "low": s["median"], "high": s["median"], "samples": 3} for w, s in given["seconds"].items()}
    given |= {"model": "llama", "dtype": "float32", "absent": {}, "seconds": spreads}
    monkeypatch.setattr(hf, "run", lambda *args: given)
    monkeypatch.setattr(hf.machine, "folder_of", lambda about, save: tmp_path)
    assert cli.main(["hf", "--models", "llama", "--dtype", "float32", "--device", "cpu"]) == 0
    assert "gap closed" in capsys.readouterr().out
    written = json.loads((tmp_path / "hf.json").read_text())
    assert written["results"][0]["figures"] == hf.figures(given)
    assert written["machine"]["transformers"] and written["machine"]["ranks"] == 2
    assert cli.main(["hf", "--models", "nonsense", "--dtype", "int8"]) == 2
    told = capsys.readouterr().out
    assert "'nonsense'" in told and "'int8'" in told


def test_what_does_not_split_evenly_is_refused():
    config = hf_models.config_of("llama", torch.float32, **SHAPE)
    hf_models.even(config, TOKENS, 2)
    with pytest.raises(ValueError, match="63 tokens, 2 kv heads do not split evenly over 4 ranks"):
        hf_models.even(config, 63, 4)
