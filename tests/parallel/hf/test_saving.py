"""A parallel model saves the same files as the plain model, and its state dicts work with all of torch's tools."""

import copy
import json
import weakref
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

import fusedtp
from fusedtp.parallel.foreign import enter
from tests.harness import world
from tests.parallel.support import tp_mesh

from .families import model_of
from .parity import full

TIED = {"tie_word_embeddings": True}


# Linear layers that each pack two matrices.
PACKED = {"model.layers.*.mlp.gate_up_proj": "packed_colwise", "model.layers.*.mlp.down_proj": "rowwise"}
PLANS = {"phi3": PACKED}


def parallel_of(group, name: str, dtype=torch.float32, **changes):
    """A plain model and its parallel twin."""
    plain = model_of(name, **changes).to(dtype)
    return plain, fusedtp.parallelize(copy.deepcopy(plain), tp_mesh(group), plan=PLANS.get(name))


def contents(folder: Path) -> dict:
    """File -> its content."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                found[path.name] = (
                    {name: file.get_tensor(name) for name in list(file.keys())},
                    file.metadata(),
                )
        else:
            found[path.name] = json.loads(path.read_text())
    return found


def assert_same_folder(got: Path, want: Path) -> None:
    got, want = contents(got), contents(want)
    assert got.keys() == want.keys()
    for name in want:
        if not name.endswith(".safetensors"):
            assert got[name] == want[name], name
            continue
        (ours, our_metadata), (theirs, their_metadata) = got[name], want[name]
        assert our_metadata == their_metadata and ours.keys() == theirs.keys(), name
        for tensor in theirs:
            assert ours[tensor].dtype == theirs[tensor].dtype, tensor
            assert torch.equal(ours[tensor], theirs[tensor]), tensor


def save(group, folder: str, name: str, dtype, changes: dict, options: dict) -> None:
    plain, parallel = parallel_of(group, name, dtype, **changes)
    parallel = copy.deepcopy(parallel)  # a copy must save itself, not its original
    parallel.save_pretrained(Path(folder, "parallel"), **options)
    if group.rank() == 0:
        plain.save_pretrained(Path(folder, "plain"), **options)
        assert_same_folder(Path(folder, "parallel"), Path(folder, "plain"))
        again = type(plain).from_pretrained(Path(folder, "parallel"), variant=options.get("variant"))
        for key, value in plain.state_dict().items():
            assert torch.equal(again.state_dict()[key], value), key
        assert plain.config.to_dict() == parallel.config.to_dict()


SAVED = {
    "llama": ("llama", torch.float32, {}, {}),
    "files of 20 kB": ("llama", torch.bfloat16, {}, {"max_shard_size": "20KB", "variant": "x"}),
    "tied": ("qwen3", torch.bfloat16, TIED, {"safe_serialization": True}),
    "vocabulary that ranks share unevenly": ("qwen3", torch.float32, {**TIED, "vocab_size": 51}, {}),
    "experts": ("mixtral", torch.bfloat16, {}, {"is_main_process": True}),
    "experts as the model has them": ("mixtral", torch.float32, {}, {"save_original_format": False}),
    "packed": ("phi3", torch.float32, {}, {}),
    "latent": ("deepseek_v3", torch.bfloat16, {}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", SAVED)
def test_the_folder_is_that_of_the_plain_model(case: str, tmp_path):
    world(2).run(save, str(tmp_path), *SAVED[case])


def save_options(group, folder: str) -> None:
    plain, parallel = parallel_of(group, "qwen3", **TIED)
    halves = {name: value.to(torch.bfloat16) for name, value in parallel.state_dict().items()}
    parallel.save_pretrained(Path(folder, "given"), state_dict=halves)
    on_first = {name: full(value) for name, value in halves.items()}
    parallel.save_pretrained(
        Path(folder, "given full"),
        is_main_process=group.rank() == 0,
        state_dict=on_first if group.rank() == 0 else {},
    )
    parallel.model.save_pretrained(Path(folder, "inner"))
    parallel.save_pretrained(Path(folder, "nothing"), is_main_process=False)
    assert not Path(folder, "nothing").exists()
    if group.rank() == 0:
        plain.save_pretrained(
            Path(folder, "halves"),
            state_dict={k: v.to(torch.bfloat16) for k, v in plain.state_dict().items()},
        )
        assert_same_folder(Path(folder, "given"), Path(folder, "halves"))
        assert_same_folder(Path(folder, "given full"), Path(folder, "halves"))
        plain.model.save_pretrained(Path(folder, "inner of plain"))
        assert_same_folder(Path(folder, "inner"), Path(folder, "inner of plain"))


@pytest.mark.slow
def test_other_state_dicts_and_inner_models_are_saved_too(tmp_path):
    world(2).run(save_options, str(tmp_path))


def most_gathered(group, folder: str) -> tuple[int, int]:
    """The largest number of full tensors alive at once, and the number gathered."""
    _, parallel = parallel_of(group, "mixtral")
    made, most = [], 0
    inner = DTensor.full_tensor

    def count(self):
        nonlocal most
        tensor = inner(self).clone()
        made.append(weakref.ref(tensor))
        most = max(most, sum(each() is not None for each in made))
        return tensor

    DTensor.full_tensor = count
    try:
        parallel.save_pretrained(folder)
    finally:
        DTensor.full_tensor = inner
    return most, len(made)


def test_only_the_first_rank_keeps_full_tensors(tmp_path):
    first, second = world(2).run(most_gathered, str(tmp_path))
    assert first[0] == first[1] == second[1] == len(model_of("mixtral").state_dict())
    assert second[0] == 1


def save_badly(group, folder: str, what: str, message: str) -> None:
    _, parallel = parallel_of(group, "llama")
    state = None
    if what == "disk":
        from transformers import modeling_utils

        inner = modeling_utils.safe_save_file

        def full_disk(*arguments, **options):
            raise OSError(28, "No space left on device")

        modeling_utils.safe_save_file = full_disk
    if what == "states":
        state = parallel.state_dict()
        if group.rank() == 1:
            del state["lm_head.weight"]
    try:
        with pytest.raises(Exception, match=message) as caught:
            parallel.save_pretrained(Path(folder, "file", "below") if what == "folder" else folder, state_dict=state)
        assert isinstance(caught.value, ValueError if what == "states" else OSError)
    finally:
        if what == "disk":
            modeling_utils.safe_save_file = inner


@pytest.mark.slow
@pytest.mark.parametrize(
    "what, message",
    [
        ("folder", "Not a directory"),
        ("disk", "No space left on device"),
        ("states", "state_dicts with different DTensors"),
    ],
)
def test_what_fails_on_the_first_rank_fails_on_all(what: str, message: str, tmp_path):
    (tmp_path / "file").write_text("")
    world(2).run(save_badly, str(tmp_path), what, message)


# --- state dicts ------------------------------------------------------------------------------------------------------

FAMILIES = {"phi3": {}, "mixtral": {}, "qwen3": TIED}


def state_dicts(group, name: str, changes: dict) -> None:
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        set_model_state_dict,
    )

    plain, parallel = parallel_of(group, name, **changes)
    want = plain.state_dict()

    def assert_whole(model, wanted=want) -> None:
        for key, value in model.state_dict().items():
            assert isinstance(value, DTensor) == (key in dict(plain.named_parameters(remove_duplicate=False)))
            assert value.shape == wanted[key].shape and torch.equal(full(value), wanted[key]), key

    def clear(model) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()

    assert_whole(parallel)
    got = get_model_state_dict(parallel, options=StateDictOptions(full_state_dict=True, cpu_offload=group.rank() == 2))
    assert got.keys() == want.keys() and all(torch.equal(got[key], want[key]) for key in want)
    clear(parallel)
    set_model_state_dict(parallel, copy.deepcopy(want), options=StateDictOptions(full_state_dict=True))
    assert_whole(parallel)
    clear(parallel)
    parallel.load_state_dict(copy.deepcopy(want))
    assert_whole(parallel)
    clear(plain)
    want = copy.deepcopy(got)
    plain.load_state_dict(got)
    fusedtp.parallelize(plain, tp_mesh(group), plan=PLANS.get(name))
    assert_whole(plain, want)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_full_state_dicts_come_out_and_go_in(name: str):
    world(2).run(state_dicts, name, FAMILIES[name])


def checkpoints(group, folder: str, saves: bool) -> None:
    for name, changes in FAMILIES.items():
        checkpoint(group, f"{folder}/{name}", name, changes, saves)


def checkpoint(group, folder: str, name: str, changes: dict, saves: bool) -> None:
    """Save or load model and optimizer with torch's distributed checkpoints."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    plain, parallel = parallel_of(group, name, **changes)
    ids = torch.arange(3, 15).view(2, 6)

    def train(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model(input_ids=ids, labels=ids).loss.backward()
        return optimizer

    optimizer = train(parallel)
    if not saves:
        with torch.no_grad():
            for parameter in parallel.parameters():
                parameter.zero_()
                parameter.grad.zero_()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(parallel, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    if saves:
        dcp.save(state, checkpoint_id=folder)
        torch.save({key: full(value) for key, value in model_state.items()}, f"{folder}/{group.rank()}.pt")
        packed = any(isinstance(p.placements[0], StridedShard) for p in parallel.parameters())
        assert packed == (name != "qwen3")
        return
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(parallel, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    want = torch.load(f"{folder}/0.pt")
    for key, value in parallel.state_dict().items():
        assert torch.equal(full(value), want[key]), key
    reference = train(plain)
    reference.step()
    for parameter, other in zip(parallel.parameters(), plain.parameters(), strict=True):
        for moment in ("exp_avg", "exp_avg_sq"):
            got = full(optimizer.state[parameter][moment])
            assert torch.allclose(got, reference.state[other][moment], rtol=1e-3, atol=1e-6), moment


@pytest.mark.slow
def test_distributed_checkpoints_pass_between_world_sizes(tmp_path):
    world(2).run(checkpoints, str(tmp_path / "2"), True)
    world(1).run(checkpoints, str(tmp_path / "2"), False)
    world(4).run(checkpoints, str(tmp_path / "2"), False)
    world(4).run(checkpoints, str(tmp_path / "4"), True)
    world(2).run(checkpoints, str(tmp_path / "4"), False)


# --- from_pretrained --------------------------------------------------------------------------------------------------


def assert_same_model(got, want) -> None:
    """Parameters, buffers, configs and logits are equal bit for bit."""
    assert not got.training and got.config.to_dict() == want.config.to_dict()
    assert got.generation_config.to_dict() == want.generation_config.to_dict()
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = (dict(getattr(model, kind)()) for model in (got, want))
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert ours[name].dtype == value.dtype, name
            assert getattr(ours[name], "placements", None) == getattr(value, "placements", None), name
            assert torch.equal(full(ours[name]), full(value)), name
    with torch.no_grad():
        ids = torch.arange(3, 15).view(2, 6)
        assert torch.equal(got(input_ids=ids).logits, want(input_ids=ids).logits)


def load(group, folder: str, name: str, changes: dict, options: dict, load_options: dict) -> None:
    from transformers import AutoModelForCausalLM

    mesh = tp_mesh(group)
    if group.rank() == 0:
        model_of(name, **changes).save_pretrained(folder, **options)
    torch.distributed.barrier(group)
    plain = AutoModelForCausalLM.from_pretrained(folder, **load_options)
    want = fusedtp.parallelize(plain, mesh)
    got = fusedtp.from_pretrained(folder, mesh, **load_options)
    assert_same_model(got, want)
    got.save_pretrained(f"{folder}/again")
    if group.rank() == 0:
        AutoModelForCausalLM.from_pretrained(folder, **load_options).save_pretrained(f"{folder}/plain")
        assert_same_folder(Path(folder, "again"), Path(folder, "plain"))


BF16, HALF = {"dtype": torch.bfloat16}, {"dtype": "float16"}
LOADED = {
    "llama": ("llama", {}, {}, {}),
    "many files": ("llama", {}, {"max_shard_size": "20KB"}, BF16),
    "tied": ("qwen3", TIED, {}, HALF),
    "experts one by one": ("mixtral", {}, {"max_shard_size": "20KB"}, {}),
    "experts as the model has them": ("mixtral", {}, {"save_original_format": False}, BF16),
    "buffers": ("gemma3_text", {}, {}, BF16),
    "latent": ("deepseek_v3", {}, {}, BF16),
    "norms kept in fp32": ("afmoe", {}, {}, HALF),
    "packed": ("phi3", {}, {}, {}),
    "state space": ("jamba", {}, {}, BF16),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", LOADED)
def test_from_pretrained_is_parallelize_of_the_plain_one(case: str, tmp_path):
    world(2).run(load, str(tmp_path), *LOADED[case])


def bytes_read(group, folder: str) -> tuple[int, int]:
    """Bytes that a rank reads, and bytes that it holds."""
    from fusedtp.parallel.pretrained import Lazy

    read, inner = 0, Lazy.full

    def count(self):
        nonlocal read
        values = inner(self)
        assert values.untyped_storage().nbytes() == values.nbytes, "a view keeps the file in memory"
        read += values.nbytes
        return values

    Lazy.full = count
    try:
        model = fusedtp.from_pretrained(folder, tp_mesh(group))
    finally:
        Lazy.full = inner
    return read, sum(p.to_local().nbytes for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_a_rank_reads_its_part_of_the_files_and_no_more(name: str, tmp_path):
    model_of(name, **FAMILIES[name]).save_pretrained(tmp_path)
    for read, held in world(2).run(bytes_read, str(tmp_path)):
        assert read == held


def fused_checkpoint(group, folder: str) -> None:
    """A checkpoint that fuses weights which ranks split: converting slices would mix up the parts."""
    from transformers import AutoModelForCausalLM
    from transformers.conversion_mapping import register_checkpoint_conversion_mapping
    from transformers.core_model_loading import Chunk, PermuteForRope, WeightConverter

    register_checkpoint_conversion_mapping(
        "llama",
        [
            WeightConverter(
                "self_attn.qkv.weight",
                ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"],
                [Chunk(dim=0)],
            ),
            WeightConverter("rotary.weight", "self_attn.o_proj.weight", [PermuteForRope()]),
        ],
        overwrite=True,
    )
    if group.rank() == 0:
        model_of("llama").save_pretrained(folder)
        with safe_open(Path(folder, "model.safetensors"), "pt") as file:
            assert any("qkv" in name for name in file.keys())  # noqa: SIM118
    torch.distributed.barrier(group)
    want = fusedtp.parallelize(AutoModelForCausalLM.from_pretrained(folder), tp_mesh(group))
    assert_same_model(fusedtp.from_pretrained(folder, tp_mesh(group)), want)
    register_checkpoint_conversion_mapping("llama", [], overwrite=True)


@pytest.mark.slow
def test_fused_matrices_are_taken_apart_before_ranks_take_their_parts(tmp_path):
    world(2).run(fused_checkpoint, str(tmp_path))


def differently_tied(group, folder: str) -> None:
    from transformers import AutoModelForCausalLM

    config = dict(json.loads(Path(folder, "config.json").read_text()))
    assert not config["tie_word_embeddings"]
    want = fusedtp.parallelize(AutoModelForCausalLM.from_pretrained(folder, tie_word_embeddings=True), tp_mesh(group))
    got = fusedtp.from_pretrained(folder, tp_mesh(group), tie_word_embeddings=True)
    assert got.lm_head.weight is not got.model.embed_tokens.weight
    assert_same_model(got, want)


@pytest.mark.slow
def test_parameters_are_not_tied_that_differ_in_the_files(tmp_path):
    model = model_of("qwen3", tie_word_embeddings=False)
    with torch.no_grad():  # equal but for the last row, which only one rank holds
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
        model.lm_head.weight[-1] += 1
    model.save_pretrained(tmp_path)
    world(2).run(differently_tied, str(tmp_path))


def damage(folder: Path, what: str) -> str:
    """Damage a checkpoint of several files. Returns a pattern that the error must match."""
    from safetensors.torch import load_file, save_file

    index = json.loads((folder / "model.safetensors.index.json").read_text())
    where = index["weight_map"]
    name = where["model.norm.weight"]
    if what == "missing file":
        (folder / name).unlink()
        return name
    if what == "corrupt file":
        (folder / name).write_bytes((folder / name).read_bytes()[:-10])
        return name
    if what == "corrupt index":
        (folder / "model.safetensors.index.json").write_text("{")
        return "not an index of safetensors files"
    if what == "no files":
        (folder / "model.safetensors.index.json").unlink()
        return "neither model.safetensors nor model.safetensors.index.json"
    if what == "quantized":
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
        (folder / "config.json").write_text(json.dumps(config))
        return "quantized"
    tensors = load_file(folder / name)
    weight = tensors.pop("model.norm.weight")[:5].clone()
    if what == "shape":
        tensors["model.norm.weight"] = weight
    else:
        del where["model.norm.weight"]
        tensors |= {"model.extra": weight, "model.norm.bias": weight.clone()}
    save_file(tensors, folder / name, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if what == "shape":
        return r"model.norm.weight has shape \(5,\), wanted \(32,\)"
    return r"(?s)norm.weight is missing.*model.extra is unexpected.*model.norm.bias is unexpected"


def load_badly(group, folder: str, only_last: bool, message: str) -> None:
    """only_last: only the last rank gets the bad checkpoint."""
    if only_last and group.rank() == 0:
        folder = f"{folder}/whole"
    with pytest.raises(ValueError, match=message):
        fusedtp.from_pretrained(folder, tp_mesh(group))


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    ["missing file", "corrupt file", "corrupt index", "no files", "quantized", "names", "shape"],
)
def test_a_bad_checkpoint_is_refused_on_every_rank(what: str, tmp_path):
    for folder in (tmp_path, tmp_path / "whole"):
        model_of("llama").save_pretrained(folder, max_shard_size="20KB")
    message = damage(tmp_path, what)
    for only_last in (False, True):
        world(2).run(load_badly, str(tmp_path), only_last, message)


def unknown_option(group, folder: str) -> None:
    with pytest.raises(ValueError, match="LlamaConfig has no rope_thetta"):
        fusedtp.from_pretrained(folder, tp_mesh(group), rope_thetta=1.0)
    with pytest.raises(ValueError, match="1-D DeviceMesh"):
        fusedtp.from_pretrained(folder, group)
    model = fusedtp.from_pretrained(folder, tp_mesh(group), sequence_parallel=False, rms_norm_eps=0.5)
    assert model.model.norm.variance_epsilon == 0.5 and not model.lm_head.parallel.sequence_parallel


def test_options_reach_config_and_layers(tmp_path):
    model_of("llama").save_pretrained(tmp_path)
    world(2).run(unknown_option, str(tmp_path))


# --- models on meta ---------------------------------------------------------------------------------------------------


def from_meta(group) -> None:
    from transformers import AutoModelForCausalLM

    from .families import config_of

    plain, want = parallel_of(group, "gemma3_text")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of("gemma3_text"))
    fusedtp.parallelize(model, tp_mesh(group))
    ids = torch.arange(3, 15).view(2, 6)
    with pytest.raises(ValueError, match=r"on the meta device.*model.embed_tokens.weight.*model.norm.weight"):
        model(input_ids=ids)
    with pytest.raises(ValueError, match=r"on the meta device.*model.embed_tokens.weight"):
        model.save_pretrained("nowhere")
    for parameter in model.to_empty(device="cpu").parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    model.load_state_dict(plain.state_dict())
    assert torch.equal(model(input_ids=ids).logits, want(input_ids=ids).logits)
    assert [hook.func for hook in model._forward_pre_hooks.values()] == [enter], "what looks once has gone"
    torch.manual_seed(0)  # transformers' own initialization fills the empty parameters
    model.to_empty(device="cpu").init_weights()
    assert all(full(p).isfinite().all() for p in model.parameters())
    assert full(model.model.embed_tokens.weight).std() > 0


@pytest.mark.slow
def test_a_model_on_meta_is_filled_from_a_state_dict():
    world(2).run(from_meta)
