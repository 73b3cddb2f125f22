"""Fine-tuning of transformers models: a run equals one process, the saved model loads, and refusals are one line."""

import json
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch

from fusedtp import cli
from fusedtp.commands import launch, runs, verify
from fusedtp.train.data import Batches, build_tokens, tokenizer_of
from fusedtp.train.loop import learning_rate

from .test_run import command

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")
TINY = ["--steps", "3", "--batch", "2", "--length", "16", "--verify", "--verify-steps", "3"]
SHAPE = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "book.txt"
    path.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(1000)))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A small Llama with a character tokenizer."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    path = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate("?0123456789 .imes\nt")}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(path)
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=24, **SHAPE)).save_pretrained(path)
    return path


def arguments(corpus: Path, runs: Path, *more: str) -> list[str]:
    return ["finetune", *TINY, "--data", str(corpus), "--runs", str(runs), *more]


def losses(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


@pytest.mark.slow
def test_a_folder_on_two_ranks(corpus, folder, tmp_path):
    more = ["--model", str(folder), "--out", str(tmp_path / "out"), "--lr", "0.01"]
    done = command("-m", "fusedtp", *arguments(corpus, tmp_path, *more))
    assert done.returncode == 0, done.stderr
    assert "equal: loss differs" in done.stdout and "NOT" not in done.stdout
    assert f"written to {tmp_path / 'out'}" in done.stdout and (tmp_path / "finetune" / "loss.png").exists()
    assert cli.main([*arguments(corpus, tmp_path, *more[:2], *more[4:]), "--tp", "1", "--name", "one"]) == 0
    assert losses(tmp_path / "finetune") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    start = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer("7 times 7 is 49.", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        trained, before = (each(ids, labels=ids).loss.item() for each in (model, start))
    assert trained < before


@pytest.mark.slow
def test_adapters_on_two_ranks(corpus, folder, tmp_path):
    from peft import PeftModel

    more = ["--model", str(folder), "--out", str(tmp_path / "out"), "--lora", "2"]
    done = command("-m", "fusedtp", *arguments(corpus, tmp_path, *more))
    assert done.returncode == 0, done.stderr
    assert "equal: loss differs" in done.stdout and "NOT" not in done.stdout
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
    assert not (tmp_path / "out" / "model.safetensors").exists()
    start = transformers.AutoModelForCausalLM.from_pretrained(folder)
    adapted = PeftModel.from_pretrained(start, tmp_path / "out")
    moved = {name: p.abs().max().item() for name, p in adapted.named_parameters() if "lora_B" in name}
    assert len(moved) == 14 and all(moved.values()), moved
    down = next(p for name, p in adapted.named_parameters() if "down_proj.lora_A" in name)
    assert down.shape == (2, 48)


def test_another_run_in_one_process_is_found_out(corpus, tmp_path, monkeypatch, capsys):
    from dataclasses import replace

    build, seeds = verify.build, iter([1, 1])

    def other(config, world):
        return build(replace(config, run=replace(config.run, seed=next(seeds))), world)

    monkeypatch.setattr(verify, "build", other)
    assert cli.main([*arguments(corpus, tmp_path, "--tp", "1", "--model", "qwen2"), "--verify-steps", "1"]) == 1
    captured = capsys.readouterr()
    assert "NOT EQUAL: loss differs" in captured.out
    assert captured.err.startswith("fusedtp finetune: error: the parallel run differs from the run of one process")


def test_text_is_that_of_the_folders_tokenizer(corpus, folder, tmp_path):
    data = launch.parse_finetune(["--model", str(folder), "--data", str(corpus)]).data
    assert data.tokenizer == folder
    tokens = build_tokens((corpus,), tmp_path, tokenizer_of(data.tokenizer))
    (batch,) = Batches(tokens, length=16, batch=3).step()
    assert batch.input_ids.shape == (3, 16)
    words = transformers.AutoTokenizer.from_pretrained(folder).decode(batch.input_ids[0].tolist())
    assert words.replace(" ", "") in corpus.read_text().replace(" ", "")


def test_defaults_are_of_what_is_trained(folder):
    def rate(*more: str) -> float:
        return launch.parse_finetune([*more]).optim.lr

    assert (rate(), rate("--model", str(folder)), rate("--model", str(folder), "--lora", "2")) == (
        2e-3,
        5e-5,
        2e-3,
    )
    assert rate("--model", str(folder), "--lr", "0.01") == 0.01
    first = launch.parse_finetune(["--steps", "50"])
    assert first.optim.warmup == 5 and first.parallel.tp == 2


@pytest.mark.slow
def test_a_resumed_run_has_the_options_that_it_had(corpus, folder, tmp_path):
    """Includes options that depend on the model, and the folder of the trained model."""
    out = tmp_path / "out"
    begun = ["--model", str(folder), "--tp", "1", "--lr", "0.01", "--warmup", "0", "--out", str(out)]
    sizes = ["--steps", "2", "--batch", "2", "--length", "16", "--data", str(corpus), "--runs", str(tmp_path)]
    assert cli.main(["finetune", *begun, *sizes]) == 0
    before = launch.parse_finetune([*begun, *sizes])
    resumed = ["--runs", str(tmp_path), "--resume"]
    found = launch.parse_finetune(resumed)
    assert found.run.resume and found.out == out and found.to_dict() == before.to_dict()
    found = launch.parse_finetune([*resumed, "--lr", "0.02", "--out", "other"])
    assert (found.optim.lr, found.optim.steps, found.out) == (0.02, 2, Path("other"))
    shutil.rmtree(out)
    assert cli.main(["finetune", *resumed, "--steps", "3"]) == 0
    assert len(losses(tmp_path / "finetune")) == 3 and (out / "model.safetensors").exists()


@pytest.mark.slow
def test_a_run_that_was_asked_to_end_writes_no_trained_model(corpus, folder, tmp_path, monkeypatch, capsys):
    out, rate = tmp_path / "out", learning_rate

    def asked(options, step):
        if step == 1:
            signal.raise_signal(signal.SIGTERM)
        return rate(options, step)

    monkeypatch.setattr("fusedtp.commands.run.learning_rate", asked)
    some = arguments(corpus, tmp_path, "--model", str(folder), "--tp", "1", "--no-verify", "--out", str(out))
    assert cli.main([*some, "--steps", "4"]) == 0
    assert not out.exists()
    assert f"not all steps were trained: {out} is not written\n" in capsys.readouterr().out
    monkeypatch.undo()
    assert cli.main(["finetune", "--runs", str(tmp_path), "--resume"]) == 0
    assert len(losses(tmp_path / "finetune")) == 4 and (out / "model.safetensors").exists()


def contents(folder: Path) -> dict[str, bytes] | None:
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else None


@pytest.mark.slow
def test_a_full_disk_leaves_the_folder_of_the_trained_model_as_it_was(corpus, folder, tmp_path, monkeypatch, capsys):
    """No file above 200 B is written, so no configuration; above 20 kB, so no weights; or no tokenizer."""
    new, earlier = tmp_path / "out", tmp_path / "earlier"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(earlier, max_shard_size="20KB")
    was = contents(earlier)
    assert was is not None and "model.safetensors.index.json" in was
    load, limits, room = runs.load_model, resource.getrlimit(resource.RLIMIT_FSIZE), 20_000

    def limited(*args):
        loaded = load(*args)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
        return loaded

    def fails(argv: list[str], why: str = "File too large") -> None:
        before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            assert cli.main(argv) == 1
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, before)
        said = f": error: cannot write the model to {argv[-1]}: {why}; nothing was changed there\n"
        assert capsys.readouterr().err.endswith(said)
        assert contents(new) is None and contents(earlier) == was

    monkeypatch.setattr(runs, "load_model", limited)
    some = arguments(corpus, tmp_path, "--model", str(folder), "--tp", "1", "--no-verify", "--steps", "1")
    fails([*some, "--lr", "0.01", "--out", str(new)])
    export = ["checkpoints", "export", str(tmp_path / "finetune")]
    fails([*export, str(earlier)])
    room = 200
    fails([*export, str(new)])
    monkeypatch.setattr(runs, "load_model", load)
    with monkeypatch.context() as patch:

        def full(*args, **options):
            raise Exception("No space left on device (os error 28)")  # as tokenizers raises it

        patch.setattr(transformers.PreTrainedTokenizerFast, "save_pretrained", full)
        fails([*export, str(earlier)], "No space left on device")
    for out in (new, earlier):
        assert cli.main([*export, str(out)]) == 0
        assert "model.safetensors" in contents(out) and "model.safetensors.index.json" not in contents(out)
        trained = transformers.AutoModelForCausalLM.from_pretrained(out)
        assert not torch.equal(trained.lm_head.weight, model.lm_head.weight)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["torchrun", "fusedtp"])
def test_the_trained_model_is_written_under_a_torchrun_of_ones_own(corpus, folder, tmp_path, monkeypatch, by):
    """If this command started the ranks, it writes the model itself after they all ended."""
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))
    if by == "fusedtp":
        monkeypatch.setenv(launch.ASKED, "1")
    some = arguments(corpus, tmp_path, "--model", str(folder), "--tp", "1", "--no-verify", "--steps", "1")
    assert cli.main([*some, "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "model.safetensors").exists() == (by == "torchrun")


def error_of(capsys, *more: str) -> str:
    assert cli.main(["finetune", *more]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("fusedtp finetune: error: ")


@pytest.fixture
def refusing(monkeypatch, corpus, tmp_path):
    def refuse(*args, **kwargs):
        raise AssertionError("a process was started")

    monkeypatch.setattr(launch, "launch", refuse)
    return ["--data", str(corpus), "--runs", str(tmp_path)]


def test_another_run_of_the_name_is_left_alone_unless_asked(refusing, capsys, tmp_path):
    checkpoint = tmp_path / "books" / "checkpoints" / "step-00000004"
    checkpoint.mkdir(parents=True)
    found = error_of(capsys, *refusing, "--name", "books")
    assert found.startswith(f"{tmp_path / 'books'} holds checkpoints up to step 4: ") and checkpoint.exists()
    assert launch.parse_finetune(["--replace"]).run.replace and not launch.parse_finetune([]).run.replace


def test_no_such_model_is_refused(refusing, capsys):
    found = error_of(capsys, *refusing, "--model", "no/such/folder")
    assert (
        found
        == "--model no/such/folder is neither a folder nor a causal language model type of transformers, such as llama"
    )


def test_a_folder_without_a_model_is_refused(refusing, capsys, tmp_path):
    found = error_of(capsys, *refusing, "--model", str(tmp_path))
    assert found == f"{tmp_path} has no config.json, so it is not the folder of a transformers model"


def test_a_quantized_model_is_refused(refusing, capsys, tmp_path):
    config = {"model_type": "llama", "quantization_config": {"quant_method": "awq"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "is quantized" in error_of(capsys, *refusing, "--model", str(tmp_path))


def test_heads_that_do_not_divide_are_refused(refusing, capsys):
    found = error_of(capsys, *refusing, "--tp", "3")
    assert "3 ranks cannot evenly share 8 query heads and 4 kv heads" in found
    assert found.endswith("sizes that would work: 1, 2, 4, 8")


def test_text_and_options_are_checked_together(refusing, capsys, tmp_path):
    assert cli.main(["finetune", "--steps", "0", "--lora", "-1", "--data", str(tmp_path / "none")]) == 2
    found = capsys.readouterr().err
    assert "--steps 0 is not positive" in found and "--lora -1 is negative" in found
    missing = error_of(capsys, "--data", str(tmp_path / "none"), "--runs", str(tmp_path))
    assert missing == f"--data {tmp_path / 'none'} does not exist"
