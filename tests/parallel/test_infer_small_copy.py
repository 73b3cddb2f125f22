"""Plans inferred from a small copy of a transformers model: they have patterns only, which must fit every layer."""

from typing import Any

import transformers
from torch import Tensor, nn

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
