"""A parallel model's files are the plain model's; and its state dicts, whatever torch does with them."""

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
from tests.harness import world
from tests.parallel.support import tp_mesh

from .families import model_of
from .parity import full

TIED = {"tie_word_embeddings": True}


# Two matrices packed in one linear layer, and in the experts' weights.
PACKED = {"model.layers.*.mlp.gate_up_proj": "packed_colwise", "model.layers.*.mlp.down_proj": "rowwise"}
PLANS = {"phi3": PACKED}


def parallel_of(group, name: str, dtype=torch.float32, **changes):
    """A plain model and its parallel twin."""
    plain = model_of(name, **changes).to(dtype)
    return plain, fusedtp.parallelize(copy.deepcopy(plain), tp_mesh(group), plan=PLANS.get(name))


def contents(folder: Path) -> dict:
    """File -> what is in it."""
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
    parallel = copy.deepcopy(parallel)  # a copy saves itself, not the model it was copied from
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


def test_other_state_dicts_and_inner_models_are_saved_too(tmp_path):
    world(2).run(save_options, str(tmp_path))


def most_gathered(group, folder: str) -> tuple[int, int]:
    """How many full tensors are alive at once, at most, and how many are gathered."""
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
            parallel.save_pretrained(
                Path(folder, "file", "below") if what == "folder" else folder, state_dict=state
            )
        assert isinstance(caught.value, ValueError if what == "states" else OSError)
    finally:
        if what == "disk":
            modeling_utils.safe_save_file = inner


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
    got = get_model_state_dict(
        parallel, options=StateDictOptions(full_state_dict=True, cpu_offload=group.rank() == 2)
    )
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


@pytest.mark.parametrize("name", FAMILIES)
def test_full_state_dicts_come_out_and_go_in(name: str):
    world(2).run(state_dicts, name, FAMILIES[name])


def checkpoints(group, folder: str, saves: bool) -> None:
    for name, changes in FAMILIES.items():
        checkpoint(group, f"{folder}/{name}", name, changes, saves)


def checkpoint(group, folder: str, name: str, changes: dict, saves: bool) -> None:
    """Save or load model and optimizer by torch's distributed checkpoints."""
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


def test_distributed_checkpoints_pass_between_world_sizes(tmp_path):
    world(2).run(checkpoints, str(tmp_path / "2"), True)
    world(1).run(checkpoints, str(tmp_path / "2"), False)
    world(4).run(checkpoints, str(tmp_path / "2"), False)
    world(4).run(checkpoints, str(tmp_path / "4"), True)
    world(2).run(checkpoints, str(tmp_path / "4"), False)
