"""Plans inferred from a small copy of a transformers model: they have patterns only, which must fit every layer."""

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import fusedtp
from fusedtp.parallel.infer import infer
from tests.parallel import planless


class OwnConfig(transformers.PretrainedConfig):
    model_type = "own"

    def __init__(self, num_hidden_layers: int = 4, **more: Any) -> None:
        super().__init__(**more)
        self.num_hidden_layers, self.num_attention_heads, self.vocab_size = num_hidden_layers, 4, 50


class OwnMlp(nn.Module):
    def __init__(self, normalized: bool) -> None:
        super().__init__()
        self.up, self.down, self.normalized = nn.Linear(32, 48), nn.Linear(48, 32), normalized

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x).sin()
        return self.down(nn.functional.normalize(x, dim=-1) if self.normalized else x)


class OwnModel(transformers.PreTrainedModel):
    config_class, main_input_name = OwnConfig, "input_ids"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.table = nn.Embedding(config.vocab_size, 32)
        self.layers = nn.ModuleList(OwnMlp(i == 3) for i in range(config.num_hidden_layers))
        self.post_init()

    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
        x = self.table(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_a_layer_that_a_small_copy_lacks_is_tried():
    plan, whole = infer(OwnModel(OwnConfig()), 2)
    assert {name for name in plan if "layers" in name} == {
        f"layers.{i}.{end}" for i in range(3) for end in ("up", "down")
    }
    assert "layers.3.up" in whole


class Tied(OwnModel):
    """A weight of the first layer is also used outside of it, and the whole model has no output to compare."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(OwnMlp(False) for _ in range(config.num_hidden_layers))
        self.other = nn.Linear(32, 48)
        self.other.weight = self.layers[0].up.weight

    def forward(self, input_ids: Tensor, **_: Any) -> str:
        return str(self.other(super().forward(input_ids)))


def test_names_of_layers_of_a_small_copy_are_not_in_a_plan():
    assert infer(Tied(OwnConfig()), 2).plan == {}


class MixedHeads(planless.Biased):
    """No rank can do this with some of the heads."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(nn.functional.normalize(self.q(x), dim=-1), *args, **kwargs)


class FirstOnly(OwnModel):
    """Only the first layer of attention can be split. It has a table that the others lack."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        of_layer = [planless.Biased, *[MixedHeads] * (config.num_hidden_layers - 1)]
        self.layers = nn.ModuleList(kind(32, 4, table=i == 0) for i, kind in enumerate(of_layer))
        self.mlp = OwnMlp(False)

    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
        x = self.table(input_ids)
        for layer in self.layers:
            x = x + layer(x)[0]
        return x + self.mlp(x)


def test_layers_of_which_some_cannot_be_split_stay_whole_with_all_that_belongs_to_them():
    """A plan made from a small copy has no words for single layers: those of the table would be left."""
    model = FirstOnly(OwnConfig())
    plan, whole = infer(model, 2)
    assert plan.keys() == {"mlp.up", "mlp.down"}
    assert "layers.*.q" in whole


class TowerConfig(transformers.PretrainedConfig):
    model_type = "tower"

    def __init__(self, num_attention_heads: int = 12, num_key_value_heads: int = 4, **more: Any) -> None:
        super().__init__(**more)
        self.hidden_size, self.num_attention_heads = 16 * num_attention_heads, num_attention_heads
        self.num_key_value_heads = num_key_value_heads


class OuterConfig(transformers.PretrainedConfig):
    model_type = "outer"
    sub_configs = {"tower_config": TowerConfig}

    def __init__(self, tower_config: Any = None, **more: Any) -> None:
        super().__init__(**more)
        self.hidden_size, self.num_attention_heads, self.vocab_size = 64, 8, 50
        self.tower_config = TowerConfig(**tower_config) if isinstance(tower_config, dict) else TowerConfig()


class OfTower(planless.GroupedPairs):
    def __init__(self, config: Any) -> None:
        nn.Module.__init__(self)
        self.num_heads, self.num_key_value_heads = config.num_attention_heads, config.num_key_value_heads
        self.embed_dim, self.head_dim = config.hidden_size, config.hidden_size // self.num_heads
        self.attn = nn.Linear(self.embed_dim, self.embed_dim + 2 * self.num_key_value_heads * self.head_dim)
        self.proj = nn.Linear(self.embed_dim, self.embed_dim)


class Tower(transformers.PreTrainedModel):
    """Its heads are counted by an inner config, of which a small copy has others, in another proportion to the keys."""

    config_class, main_input_name = OuterConfig, "input_ids"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.table = nn.Embedding(config.vocab_size, config.tower_config.hidden_size)
        self.layers = nn.ModuleList(OfTower(config.tower_config) for _ in range(2))
        self.post_init()

    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
        x = self.table(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.slow
def test_numbers_of_heads_of_a_small_copy_are_not_taken_for_the_model_s():
    found = infer(Tower(OuterConfig()), 2)
    assert found.plan.get("layers.*.attn", "colwise_of_heads(12, 4, 4)") == "colwise_of_heads(12, 4, 4)"
    assert "layers.*.attn" in found.plan or "layers.*.attn" in found.whole


@pytest.mark.slow
def test_a_plan_with_numbers_of_heads_is_proved_on_a_copy_with_as_many():
    torch.manual_seed(0)
    config = transformers.GPTBigCodeConfig(
        n_head=4, n_embd=96, n_layer=2, vocab_size=50, n_positions=32, resid_pdrop=0, attn_pdrop=0, embd_pdrop=0
    )
    model = transformers.GPTBigCodeForCausalLM(config).eval()
    divided = "num_heads, embed_dim, split_size, num_key_value_groups"
    plan = {
        "transformer.h.*.attn.c_attn": "colwise_of_heads(4, 1, 1)",
        "transformer.h.*.attn.c_proj": "rowwise",
        "transformer.h.*.attn": f"local_view({divided})",
    }
    ids = torch.randint(50, (2, 7))
    with torch.no_grad():
        want = model(ids).logits
        got = fusedtp.VirtualWorld(2).run(
            lambda group: fusedtp.parallelize(copy.deepcopy(model), group, plan=plan, prove=True)(ids).logits
        )
    assert all(torch.allclose(each, want, atol=1e-5) for each in got)
