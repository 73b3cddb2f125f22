"""The command `fusedtp explain`: the table goes to stdout, errors go to stderr."""

from __future__ import annotations

import pytest

from fusedtp import cli


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--tp", "0"], "--tp 0 must be at least 1"), (["--tokens", "0"], "--tokens 0 must be")],
)
def test_numbers_below_one_are_refused_by_their_option(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["explain", "--model", "llama", *words])
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and out == "" and said in err


@pytest.mark.slow
def test_a_model_that_cannot_be_split_so_is_an_error_not_a_result(capsys):
    pytest.importorskip("transformers")
    assert cli.main(["explain", "--model", "llama", "--tp", "7"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("fusedtp explain: error: LlamaForCausalLM cannot be parallelized over 7")


def test_a_model_that_does_not_exist_is_told_with_what_may_be_given(tmp_path, capsys):
    assert cli.main(["explain", "--model", str(tmp_path / "nothing")]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "nothing" in err
    assert err.endswith("--model takes a hub name, a folder, a config.json, or a model type, such as llama\n")


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sizes", "named", "expected"),
    [
        (
            "t5",
            {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2},
            [],
            "T5ForConditionalGeneration",
        ),
        ("vit", SMALL, [], "ViTModel"),
        ("vit", SMALL, ["ViTForImageClassification"], "ViTForImageClassification"),
        ("vit", SMALL, ["MyOwnViT", "ViTConfig"], "ViTModel"),
    ],
)
def test_the_class_is_the_one_that_the_config_names_or_the_first_of_its_type(
    kind, sizes, named, expected, tmp_path, capsys
):
    transformers = pytest.importorskip("transformers")
    transformers.AutoConfig.for_model(kind, architectures=named, **sizes).save_pretrained(tmp_path)
    assert cli.main(["explain", "--model", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{expected} over 2 ranks") and "matmul_reduce_scatter" in out
