"""Transformers models in the trainer: any mesh gives the loss and gradients of transformers itself."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from fusedtp import cli
from fusedtp.commands.build import build_stages, foreign_faults
from fusedtp.commands.runs import load_model
from fusedtp.train.checkpoint import Checkpoints, TrainingState
from fusedtp.train.config import faults, parse
from fusedtp.train.data import Batches, build_tokens
from fusedtp.train.foreign import TransformersModel
from fusedtp.train.loop import ExpertLoad, adamw, backward
from fusedtp.train.mesh import World
from tests.train.support import assert_gradients, ranks_of, world_on
from tests.train.test_checkpoint import whole
from tests.train.test_resume import MIDDLE, middle_of, trained

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")
SHAPE: dict[str, Any] = dict(
    vocab_size=256, hidden_size=16, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    num_hidden_layers=4, bos_token_id=0, eos_token_id=0, pad_token_id=None, tie_word_embeddings=False,
    max_position_embeddings=64, initializer_range=0.3,
)  # fmt: skip
POSITIONS = dict(vocab_size=256, hidden_size=16, max_position_embeddings=32, num_hidden_layers=1, num_attention_heads=2)
# Classes, not names, so that they are imported before ranks are forked.
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaForCausalLM, {}),
    "llama tied": (transformers.LlamaForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3ForCausalLM, {}),
    "gemma2 tied": (
        transformers.Gemma2ForCausalLM,
        {"tie_word_embeddings": True, "sliding_window": 5, "query_pre_attn_scalar": 8},
    ),
    "gemma3_text tied": (
        transformers.Gemma3ForCausalLM,
        {
            "sliding_window": 5,
            "tie_word_embeddings": True,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
}
SIZES = "--length 16 --batch 8 --accumulate 2 --documents separate --clip 1e9"


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Most documents are shorter than a window."""
    folder = tmp_path_factory.mktemp("book")
    for i in range(60):
        (folder / f"{i:02}.txt").write_text(f"{i} times {i} is {i * i}."[: 5 + i % 20])
    return build_tokens((folder,), tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One checkpoint per family."""
    found = {}
    for name, (kind, more) in FAMILIES.items():
        torch.manual_seed(0)
        model = kind(kind.config_class(**{**SHAPE, **more}))
        found[name] = tmp_path_factory.mktemp("model")
        model.save_pretrained(found[name])
    return found


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


Step = tuple[float, dict[str, Tensor], float]  # loss, gradients, their norm


def stepped(group: Any, mesh: str, options: str, tokens: Path) -> Step:
    """One trainer step on a mesh, without the optimizer update."""
    from fusedtp.parallel import clip_grad_norm_

    here, config = world_on(group, mesh), parse(f"{SIZES} {options}".split())
    batches = Batches(tokens, length=16, batch=8, accumulate=2, dp=here.dp, dp_rank=here.dp_rank, documents="separate")
    model, pipeline = build_stages(config, here)
    loss = backward(model, batches, 0, ExpertLoad(model, here, 0.0), 0, pipeline)
    own = {} if pipeline is None else {"others": pipeline.group, "uncounted": pipeline.uncounted}
    norm = clip_grad_norm_(model, 1e9, **own).item()
    gradients = {
        name.removeprefix("hf."): p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad.clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    return here.mean(loss), gradients, norm


def by_transformers(folder: Path, tokens: Path) -> Step:
    """The same with transformers alone: one document at a time, sum of token losses over the number of labels."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    batches = list(Batches(tokens, length=16, batch=8, accumulate=2, documents="separate").step())
    labels = sum(int((batch.labels >= 0).sum()) for batch in batches)
    total = torch.zeros(())
    alone = 0
    for batch in batches:
        assert batch.document_ids is not None
        for ids, wanted, documents in zip(batch.input_ids, batch.labels, batch.document_ids, strict=True):
            for document in documents.unique():
                own = documents == document
                logits = model(input_ids=ids[own][None]).logits[0]
                loss = F.cross_entropy(logits, wanted[own], reduction="sum") / labels
                loss.backward()
                total += loss.detach()
                alone += 1
    assert alone > 12 and labels < 8 * 16  # documents end inside windows
    gradients = {name: p.grad for name, p in model.named_parameters()}
    norm = torch.nn.utils.get_total_norm(list(gradients.values()))
    return total.item(), gradients, norm.item()


CASES = [
    ("pp2 tp2", "llama tied", "--pp 2"),
    ("pp2 tp2", "gemma3_text tied", "--pp 2 --schedule interleaved_1f1b"),
    ("pp2 tp2", "qwen3", "--pp 2 --schedule zbv_zero_bubble"),
    ("pp2 dp2", "llama tied", "--pp 2"),
    ("pp2 dp2", "llama tied", "--pp 2 --schedule zbv_zero_bubble"),
    ("dp2 tp2", "gemma2 tied", ""),
    ("dp2 tp2", "llama", "--no-sequence-parallel --data-parallel zero2"),
    ("pp2", "llama", "--pp 2 --schedule gpipe"),
    ("tp2", "qwen3", ""),
    ("dp2", "llama tied", ""),
    ("tp2", "llama", "--compile --compile-backend aot_eager"),
    ("pp2 tp2", "qwen3", "--pp 2 --compile --compile-backend aot_eager"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "family", "options"), CASES)
def test_a_mesh_gives_the_gradients_of_transformers_with_documents_apart(
    worlds, tokens: Path, folders: dict[str, Path], mesh: str, family: str, options: str
):
    loss, gradients, norm = by_transformers(folders[family], tokens)
    names: set[str] = set()
    for found in worlds(ranks_of(mesh)).run(stepped, mesh, f"{options} --model {folders[family]}", tokens):
        assert found[0] == pytest.approx(loss, rel=1e-5) and found[2] == pytest.approx(norm, rel=1e-5)
        assert_gradients(found[1], gradients, layers=4)
        names |= found[1].keys()
    assert names == gradients.keys()


# -- initial weights ---------------------------------------------------------------------------------------------------


def start(group: Any, mesh: str, options: str) -> dict[str, Tensor]:
    """Full values of all parameters of which this rank has a part."""
    model, _ = build_stages(parse(f"{SIZES} {options}".split()), world_on(group, mesh))
    return {
        name: p.full_tensor() if isinstance(p, DTensor) else p.detach().clone() for name, p in model.named_parameters()
    }


def config_file(folder: Path, **more: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**SHAPE, "model_type": "llama", "initializer_range": 0.02, **more}))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("lora", [0, 2])
def test_random_weights_are_the_same_on_every_mesh(worlds, tmp_path: Path, lora: int):
    options = f"--model {config_file(tmp_path, vocab_size=259, intermediate_size=25)} --lora {lora}"
    want = start(_Alone(), "1", options)
    names: set[str] = set()
    for mesh, more in (("pp2 tp2", "--pp 2"), ("dp2 tp2", "")):
        for found in worlds(4).run(start, mesh, f"{options} {more}"):
            assert [name for name, values in found.items() if not torch.equal(values, want[name])] == []
            names |= found.keys()
    assert names == want.keys()
    drawn = {name: p for name, p in want.items() if p.dim() > 1 and "lora" not in name}
    for name, p in drawn.items():
        assert 0.5 < p.std().item() / 0.02 < 1.5, name
    layers = [p for name, p in drawn.items() if "q_proj" in name]
    assert len(layers) == 4 and not torch.equal(layers[0], layers[1])


class _Alone:
    def rank(self) -> int:
        return 0


# -- a run -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "more"), [("pp2 tp2", ""), ("pp2 dp2", "--lora 2")])
def test_a_resumed_run_equals_one_that_never_stopped(worlds, tokens: Path, tmp_path: Path, mesh: str, more: str):
    ranks = worlds(4)
    options = f"--pp 2 --accumulate 2 --model {config_file(tmp_path, tie_word_embeddings=True)} {more}"
    at_once = ranks.run(trained, mesh, options, tokens, tmp_path / "one")
    middle = middle_of(tmp_path / "one", tmp_path / "two")
    then = ranks.run(trained, mesh, options, tokens, middle, True)
    for rank, (records, state, _, saved) in enumerate(then):
        wanted_records, wanted_state, _, _ = at_once[rank]
        assert records == wanted_records[MIDDLE:] and saved == [2, 4]
        assert state.keys() == wanted_state.keys()
        assert [name for name in state if not torch.equal(state[name], wanted_state[name])] == []
    assert wanted_records[MIDDLE]["loss"] != wanted_records[MIDDLE - 1]["loss"]


def arguments(folder: Path, tmp_path: Path, *more: str) -> list[str]:
    book = tmp_path / "book.txt"
    book.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(400)))
    sizes = [
        "--tp",
        "1",
        "--steps",
        "3",
        "--batch",
        "4",
        "--length",
        "16",
        "--val-batches",
        "1",
        "--sample",
        "8",
    ]
    return ["train", "--model", str(folder), "--data", str(book), "--runs", str(tmp_path), *sizes, *more]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A character tokenizer with end id 3, padding id 4 and no begin id."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    path = tmp_path_factory.mktemp("vocabulary")
    known = ["?", "0", "1", "<end>", "<pad>", *"23456789 .imes\nt"]
    own = Tokenizer(models.WordLevel({c: i for i, c in enumerate(known)}, unk_token="?"))
    own.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=own, eos_token="<end>", pad_token="<pad>")
    made.save_pretrained(path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "of", "wanted"),
    [
        ("own", "tokenizer", (None, 3, 4)),
        ("own", "bytes", (None, 0, None)),
        ("llama", "tokenizer", (None, 3, 4)),
        ("folder", "tokenizer", (None, 3, 4)),
        ("folder", "folder", (1, [2, 5], None)),
    ],
)
def test_an_exported_model_has_the_special_ids_of_its_vocabulary(vocabulary, tmp_path, model, of, wanted):
    folder = tmp_path / "model"
    if model == "folder":
        own = transformers.LlamaConfig(**SHAPE | {"bos_token_id": 1, "eos_token_id": [2, 5]})
        transformers.LlamaForCausalLM(own).save_pretrained(folder)
    if of == "folder":
        shutil.copytree(vocabulary, folder, dirs_exist_ok=True)
    options = arguments(folder, tmp_path, "--sample", "0", *(["--tokenizer", str(vocabulary)] * (of == "tokenizer")))
    options[1:3] = {
        "own": ["--width", "16", "--heads", "2", "--kv-heads", "1", "--layers", "1"],
        "llama": ["--model", "llama"],
    }.get(model, options[1:3])
    assert cli.main(options) == 0
    assert cli.main(["checkpoints", "export", str(tmp_path / "main"), str(tmp_path / "out")]) == 0
    for kind in (transformers.AutoConfig, transformers.GenerationConfig):
        found = kind.from_pretrained(tmp_path / "out")
        assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == wanted, kind


@pytest.mark.slow
@pytest.mark.parametrize("of", ["tokenizer", "folder"])
def test_an_exported_model_generates_as_its_folder_says(vocabulary, tmp_path, of):
    """It keeps the end ids and sampling settings of generation_config.json, except for ids of another vocabulary."""
    folder = tmp_path / "model"
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE | {"bos_token_id": 1, "eos_token_id": 2}))
    own = {"bos_token_id": 1, "eos_token_id": [2, 5], "do_sample": True, "temperature": 0.6, "top_p": 0.9}
    model.generation_config = transformers.GenerationConfig(**own)
    model.save_pretrained(folder)
    if of == "folder":
        shutil.copytree(vocabulary, folder, dirs_exist_ok=True)
    more = ["--tokenizer", str(vocabulary)] * (of == "tokenizer")
    assert cli.main(arguments(folder, tmp_path, "--sample", "0", "--steps", "1", *more)) == 0
    assert cli.main(["checkpoints", "export", str(tmp_path / "main"), str(tmp_path / "out")]) == 0
    found = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    if of == "tokenizer":
        own |= {"bos_token_id": None, "eos_token_id": 3}
    assert {name: getattr(found, name) for name in own} == own


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "said"), [("gpt2", "embd_pdrop 0.1, resid_pdrop 0.2"), ("llama", None)], ids=["gpt2", "llama"]
)
def test_dropout_that_stays_off_is_said(tmp_path: Path, capsys, model_type: str, said: str | None):
    path = tmp_path / "config.json"
    rates = {"resid_pdrop": 0.2, "attn_pdrop": 0.0} if said else {"intermediate_size": 16}
    transformers.CONFIG_MAPPING[model_type](**POSITIONS | rates).to_json_file(path)
    assert cli.main(arguments(path, tmp_path, "--sample", "0", "--steps", "1", "--no-save")) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("dropout")]
    assert lines == ([] if said is None else [f"dropout stays off; the model's configuration has {said}"])


@pytest.mark.slow
def test_a_run_is_verified_resumed_exported_and_goes_on_with_a_text(folders, tmp_path: Path, capsys):
    folder = folders["llama tied"]
    assert cli.main(arguments(folder, tmp_path, "--verify", "--accumulate", "2")) == 0
    said = capsys.readouterr().out
    assert "equal: loss differs" in said and "NOT" not in said
    assert cli.main(["train", "--runs", str(tmp_path), "--resume", "--steps", "5"]) == 0
    assert "resumed at step 3, lost 0 steps" in capsys.readouterr().out
    assert cli.main(["checkpoints", "export", str(tmp_path / "main"), str(tmp_path / "out")]) == 0
    (tmp_path / "file").touch()
    assert cli.main(["checkpoints", "export", str(tmp_path / "main"), str(tmp_path / "file")]) != 0
    assert "file is not a folder" in capsys.readouterr().err
    ours, _ = load_model(tmp_path / "main")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    before = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    state = theirs.state_dict()
    assert state.keys() == before.keys() == ours.hf.state_dict().keys()
    for name, values in ours.hf.state_dict().items():
        assert torch.equal(values, state[name]) and not torch.equal(values, before[name]), name
    ids = torch.tensor([[55, 32, 116]])
    greedy = theirs.generate(ids, max_new_tokens=9, do_sample=False, pad_token_id=0, use_cache=False)
    assert torch.equal(ours.generate(ids, 9, temperature=0, seed=0, max_context=16), greedy)
    capsys.readouterr()
    run = ["generate", "--run", str(tmp_path / "main"), "--tokens", "40", "--json", "7 times"]
    assert cli.main(run) == cli.main(run) == 0
    one, two = map(json.loads, capsys.readouterr().out.splitlines())
    assert one == two and one["prompt"] == "7 times" and one["text"]


@pytest.mark.slow
def test_a_checkpoint_of_a_pipeline_loads_in_one_process(worlds, folders, tokens: Path, tmp_path: Path):
    options = f"--pp 2 --accumulate 2 --steps 2 --model {folders['llama tied']}"
    ranks = worlds(4).run(trained, "pp2 tp2", options, tokens, tmp_path / "one")
    config = parse(f"{SIZES} --model {folders['llama tied']}".split())
    model, _ = build_stages(config, World(), weights=False)
    state = TrainingState(model, adamw(model, config.optim))
    checkpoints = Checkpoints(tmp_path / "one")
    checkpoints.load(state)
    checkpoints.close()
    of_ranks = {name: value for _, values, _, _ in ranks for name, value in values.items()}
    found = whole(state)
    assert found.keys() == of_ranks.keys()
    assert [name for name in found if not torch.equal(found[name], of_ranks[name])] == []


# -- refusals ----------------------------------------------------------------------------------------------------------


def refusals(options: str, dp: int = 1, tp: int = 1) -> list[str]:
    config = parse(options.split())
    return faults(config, dp, tp) + foreign_faults(config, dp, tp)


def test_what_is_wrong_is_said_together(tmp_path: Path):
    path = config_file(tmp_path, vocab_size=99)
    options = f"--model {path} --width 32 --heads 2 --ep 2 --pp 3 --accumulate 4 --schedule zbv_zero_bubble"
    assert refusals(options, 2, 3) == [
        f"--width, --heads with --model {path}: the model's configuration sets these",
        "--ep and --expert-tp with --model: the model's plan determines how experts are split",
        f"{path} has no tokenizer: its vocabulary of 99 is too small for bytes",
        "LlamaForCausalLM cannot be parallelized over 3 ranks: - model.layers.*.self_attn: 3 ranks cannot evenly share "
        "4 query heads and 2 kv heads; sizes that would work: 1, 2, 4",
        "--schedule zbv_zero_bubble with --pp 3 has 6 stages, more than the 4 layers of --model",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (
            "--model gpt2 --pp 2 --accumulate 2",
            "GPT2LMHeadModel has no plan for pipelines (base_model_pp_plan)",
        ),
        ("--model bloom --documents separate", "in BloomForCausalLM, documents of a row attend to each other"),
        (
            "--model no/such",
            "no/such is neither a folder nor a causal language model type of transformers, such as llama",
        ),
        ("--lora 2", "--lora needs a --model"),
        ("--model llama --lora -1", "--lora -1 is negative"),
    ],
)
def test_a_refusal(options: str, fault: str):
    (found,) = refusals(options) if "--model" in options else faults(parse(options.split()), 1, 1)
    assert found.endswith(fault)


def test_a_folder_without_weights_and_ranks_that_would_be_empty_are_refused(tmp_path: Path):
    path = config_file(tmp_path)
    (fault,) = refusals(f"--model {tmp_path}")
    assert fault.endswith(f"holds no weights (*.safetensors); --model {path} starts from random ones")
    (fault,) = refusals(f"--model {path} --batch 64", 32, 2)
    assert "a rank would hold no row of" in fault and "norm.weight [16]" in fault


def test_blocks_inside_of_blocks_are_gathered_with_them():
    """transformers lists both block classes of Mamba, but FSDP2 cannot shard a parameter twice."""
    from transformers import MambaConfig, MambaForCausalLM

    sizes = dict(vocab_size=32, hidden_size=8, state_size=4, num_hidden_layers=2, intermediate_size=16)
    model = TransformersModel(MambaForCausalLM(MambaConfig(**sizes)))
    assert [type(block).__name__ for block in model.blocks] == 2 * ["MambaBlock"]


def test_ids_that_a_model_does_not_have_are_refused(tmp_path: Path):
    ids = "--vocab-size 500 --data ids.npy"
    assert refusals(f"--model llama {ids}") == refusals(f"--model {config_file(tmp_path, vocab_size=500)} {ids}") == []
    path = config_file(tmp_path, vocab_size=499)
    assert refusals(f"--model {path} {ids}") == [f"{path} has 499 tokens, fewer than --vocab-size 500"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "more", "most"),
    [
        ("gpt2", {}, 32),
        ("opt", {"word_embed_proj_dim": 16, "ffn_dim": 16}, 32),  # its table has two extra rows
        ("gptj", {"rotary_dim": 8}, 32),  # sines, not a parameter
        ("roberta", {"is_decoder": True, "intermediate_size": 16, "pad_token_id": 1}, 30),  # counts from 2
        ("mpt", {"max_seq_len": 32}, 32),  # ALiBi of a fixed size
        ("bloom", {}, None),  # ALiBi as long as the row
        ("llama", {"intermediate_size": 16}, None),
    ],
)
def test_windows_longer_than_a_models_table_of_positions_are_refused(tmp_path: Path, model_type, more, most):
    path = tmp_path / "config.json"
    transformers.CONFIG_MAPPING[model_type](**POSITIONS | more).to_json_file(path)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(path)).eval()
    for length in (30, 32, 33):
        fits = most is None or length <= most
        says = [] if fits else [f"--length {length}: {path} has positions for {most} tokens"]
        assert refusals(f"--model {path} --length {length}") == says
        row = torch.arange(3, 3 + length)[None]
        with nullcontext() if fits else pytest.raises((IndexError, RuntimeError)):
            model(input_ids=row)
        adapter = TransformersModel(model)
        words = rf"^rows of {length} tokens, but {type(model).__name__} has positions for {most} tokens$"
        with nullcontext() if fits else pytest.raises(ValueError, match=words):
            adapter(row, row, num_labels=1.0)


@pytest.mark.parametrize("model_type", ["gpt2", "mpt"])
def test_a_model_type_gets_positions_for_the_length(model_type: str):
    assert refusals(f"--model {model_type} --length 3000") == []


def test_a_small_copy_shows_a_loss_of_its_own_and_stages_that_differ(monkeypatch):
    config = parse(["--model", "llama", "--pp", "2", "--accumulate", "2"])
    assert foreign_faults(config, 1, 1) == []
    forward = transformers.LlamaModel.forward

    def doubled(self, *args, **kwargs):
        found = forward(self, *args, **kwargs)
        found.last_hidden_state = found.last_hidden_state * 2  # once in every stage
        return found

    monkeypatch.setattr(transformers.LlamaModel, "forward", doubled)
    assert foreign_faults(config, 1, 1) == ["--pp: LlamaForCausalLM computes another loss when it is cut into stages"]
    monkeypatch.undo()
    whole = transformers.LlamaForCausalLM.forward

    def scaled(self, *args, **kwargs):
        found = whole(self, *args, **kwargs)
        found.loss = None if found.loss is None else found.loss * 2
        return found

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", scaled)
    assert foreign_faults(parse(["--model", "llama"]), 1, 1) == [
        "the loss of LlamaForCausalLM is not the cross entropy of the next tokens"
    ]


class Scaled(transformers.LlamaForCausalLM):
    """Returns a new loss tensor, of the same or of another value."""

    by = 1.0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = super().forward(*args, **kwargs)
        found.loss = found.loss * self.by
        return found


def test_a_loss_of_routers_that_each_microbatch_would_add_again_is_refused():
    sizes = SHAPE | dict(num_hidden_layers=1, num_local_experts=4, router_aux_loss_coef=0.5)
    mixtral = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, output_router_logits=True))
    model, ids = TransformersModel(mixtral), torch.arange(12).view(2, 6)
    with pytest.raises(
        ValueError, match=r"MixtralForCausalLM adds another term to the loss .*output_router_logits = False"
    ):
        model(ids, ids + 1, num_labels=12.0)
    mixtral.config.output_router_logits = False
    assert model(ids, ids + 1, num_labels=12.0).loss.item() > 0


def test_a_loss_that_a_model_passes_on_changed_is_refused_where_it_is_trained():
    llama = Scaled(transformers.LlamaConfig(**SHAPE | {"num_hidden_layers": 1}))
    model, ids = TransformersModel(llama), torch.arange(12).view(2, 6)
    plain = model(ids, ids + 1, num_labels=12.0).loss.item()
    llama.by = 2.0
    with pytest.raises(ValueError, match="Scaled adds another term to the loss"):
        model(ids, ids + 1, num_labels=12.0)
    with torch.no_grad():  # the trial runs without gradients; it reports this along with all other faults
        assert model(ids, ids + 1, num_labels=12.0).loss.item() == 2 * plain
