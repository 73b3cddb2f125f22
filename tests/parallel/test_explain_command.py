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
