"""Text gives the same tokens everywhere, held-out text is never trained on, and batches do not depend on the layout."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedtp.commands.run import validation_loss
from fusedtp.nn import CausalLM, ModelConfig
from fusedtp.nn.init import init_
from fusedtp.train.config import DataOptions
from fusedtp.train.data import (
    SEPARATOR,
    Batches,
    Bytes,
    Windows,
    build_tokens,
    text_faults,
    text_files,
    tokenizer_of,
)
from fusedtp.train.mesh import World


def write_corpus(folder: Path, files: int = 60, size: int = 400) -> Path:
    """A folder of small texts with different contents."""
    for i in range(files):
        path = folder / f"part{i % 4}" / f"file{i:03}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"file {i}: " + f"{i * 7919:x} " * (size // 8))
    return folder


def pieces(path: Path) -> list[bytes]:
    return [piece for piece in path.read_bytes().split(SEPARATOR) if piece]


def test_every_byte_is_trained_on_or_held_out_and_none_is_both(tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    tokens = build_tokens((corpus,), tmp_path / "cache")
    train, held_out = pieces(tokens / "train.bin"), pieces(tokens / "held_out.bin")
    assert sorted(train + held_out) == sorted(path.read_bytes() for path in corpus.rglob("*.txt"))
    assert not set(train) & set(held_out)
    index = json.loads((tokens / "index.json").read_text())
    assert held_out == [Path(name).read_bytes() for name in index["held_out"]]
    assert 0.025 < sum(map(len, held_out)) / sum(map(len, train + held_out)) <= 0.05


def test_the_split_follows_the_content_not_the_names(tmp_path):
    here = write_corpus(tmp_path / "here")
    (tmp_path / "there").mkdir()
    for i, path in enumerate(sorted(here.rglob("*.txt"), reverse=True)):
        (tmp_path / "there" / f"{i:03}").write_bytes(path.read_bytes())
    held_out = [
        set(pieces(build_tokens((folder,), tmp_path / "cache") / "held_out.bin"))
        for folder in (here, tmp_path / "there")
    ]
    assert held_out[0] == held_out[1]


def test_other_files_of_the_same_size_and_time_are_other_tokens(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text(name * 1000)
        os.utime(tmp_path / name, (1e9, 1e9))
    tokens = [build_tokens((tmp_path / name,), tmp_path / "cache") for name in ("a", "b")]
    assert [pieces(folder / "train.bin") for folder in tokens] == [[b"a" * 950], [b"b" * 950]]


def test_copies_of_a_file_count_once(tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    plain = build_tokens((corpus,), tmp_path / "cache")
    for path in list(corpus.rglob("*.txt")):
        (corpus / "zz").mkdir(exist_ok=True)
        (corpus / "zz" / path.name).write_bytes(path.read_bytes())
    doubled = build_tokens((corpus, corpus, corpus / "part0"), tmp_path / "cache")
    assert doubled != plain
    assert (plain / "train.bin").read_bytes() == (doubled / "train.bin").read_bytes()


def test_a_single_file_is_cut(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(bytes(32 + i * 31 % 90 for i in range(10_000)))
    tokens = build_tokens((path,), tmp_path / "cache")
    (train,), (held_out,) = pieces(tokens / "train.bin"), pieces(tokens / "held_out.bin")
    assert train + held_out == path.read_bytes()
    assert len(held_out) == 500


@pytest.mark.parametrize("damage", ["shorter", "empty", "no index", "index cut"])
def test_damaged_tokens_are_made_again(tmp_path, damage):
    """Otherwise a shorter file would silently give other windows in another order."""
    corpus = write_corpus(tmp_path / "corpus")
    folder = build_tokens((corpus,), tmp_path / "cache")
    kept = {path.name: path.read_bytes() for path in folder.iterdir()}
    if damage in ("shorter", "empty"):
        os.truncate(folder / "train.bin", 100 if damage == "shorter" else 0)
    elif damage == "no index":
        (folder / "index.json").unlink()
    else:
        os.truncate(folder / "index.json", 20)
    with pytest.warns(UserWarning, match="is damaged; its tokens are built again"):
        assert build_tokens((corpus,), tmp_path / "cache") == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == kept


def test_a_changed_file_is_read_again(tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    before = build_tokens((corpus,), tmp_path / "cache")
    assert build_tokens((corpus,), tmp_path / "cache") == before
    (corpus / "new.txt").write_text("something else " * 10)
    after = build_tokens((corpus,), tmp_path / "cache")
    assert b"something else" in (after / "train.bin").read_bytes() + (after / "held_out.bin").read_bytes()


def test_what_is_not_text_is_left_out(tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    plain = build_tokens((corpus,), tmp_path / "cache")
    (corpus / "image.bin").write_bytes(b"\x89PNG\0\xff" * 50)
    (corpus / "nul.txt").write_bytes(b"text \0 " * 50)
    (corpus / "latin.txt").write_bytes(b"caf\xe9 " * 50)
    (corpus / "empty.txt").touch()
    (corpus / ".hidden").write_text("hidden " * 50)
    (corpus / "__pycache__").mkdir()
    (corpus / "__pycache__" / "code.txt").write_text("byte code " * 50)
    with_others = build_tokens((corpus,), tmp_path / "cache")
    assert (plain / "train.bin").read_bytes() == (with_others / "train.bin").read_bytes()


def test_the_default_is_the_standard_librarys_source():
    found = text_files(())
    assert {"this.py", "os.py", "heapq.py"} <= {path.name for path in found}
    assert not any("site-packages" in path.parts for path in found)
    assert text_faults(()) == []


def test_what_is_wrong_with_paths_is_said_together(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "image.png").write_bytes(b"\x89PNG\0")
    names = ("missing.txt", "empty.txt", "image.png", "folder")
    found = text_faults(tuple(tmp_path / name for name in names))
    wanted = ("does not exist", "is empty", "is not UTF-8 text", "holds no UTF-8 text (1 files)")
    assert found == [f"--data {tmp_path / name} {fault}" for name, fault in zip(names, wanted, strict=True)]


def test_text_shorter_than_a_window_is_refused(tmp_path):
    (tmp_path / "short.txt").write_text("abc" * 100)
    tokens = build_tokens((tmp_path / "short.txt",), tmp_path / "cache")
    with pytest.raises(ValueError, match=r"held_out text has 16 tokens; --length 64 needs 65"):
        Batches(tokens, length=64, batch=1)


def test_a_step_that_takes_a_token_twice_is_told(tokens):
    """A step has more windows than the text only if its windows overlap."""
    count = Windows(tokens, "train", 300).count
    for batch in (1, count, count + 1, 3 * count):
        batches = Batches(tokens, length=300, batch=batch)
        starts = np.sort(batches.train.starts(0, np.arange(batch)))
        assert bool((np.diff(starts) < 300).any()) == bool(batches.repeats) == (batch > count)
    assert batches.repeats == (
        f"--batch {3 * count}: the training text has only {count} windows of 300 tokens, so each step takes some "
        "of them more than once"
    )


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return build_tokens((write_corpus(folder / "corpus"),), folder / "cache")


def rows(batches: Batches, step: int) -> torch.Tensor:
    """[accumulate, rows, 2, length]: the data of one rank in one step."""
    batches.load_state_dict({"samples": step * batches.batch})
    return torch.stack([torch.stack((batch.input_ids, batch.labels), 1) for batch in batches.step()])


def test_labels_are_the_next_tokens_of_the_text(tokens):
    content = (tokens / "train.bin").read_bytes()
    for batch in Batches(tokens, length=32, batch=4).step():
        ids, labels = batch.input_ids, batch.labels
        assert torch.equal(ids[:, 1:], labels[:, :-1])
        for row, label in zip(ids, labels, strict=True):
            assert bytes(row.tolist()) + bytes([label[-1]]) in content


def test_steps_and_seeds_differ_and_repeat(tokens):
    def draw(seed: int, step: int) -> torch.Tensor:
        return rows(Batches(tokens, length=32, batch=8, seed=seed), step)

    assert torch.equal(draw(0, 3), draw(0, 3))
    assert not torch.equal(draw(0, 3), draw(0, 4))
    assert not torch.equal(draw(0, 3), draw(1, 3))


@pytest.mark.parametrize(("accumulate", "dp"), [(1, 2), (1, 4), (2, 2), (4, 2), (2, 1)])
def test_ranks_together_see_what_one_process_sees(tokens, accumulate, dp):
    whole = rows(Batches(tokens, length=32, batch=8), 5).flatten(0, 1)
    parts = [
        rows(Batches(tokens, length=32, batch=8, accumulate=accumulate, dp=dp, dp_rank=rank), 5) for rank in range(dp)
    ]
    assert torch.equal(torch.stack(parts, 1).flatten(0, 2), whole)


def test_a_microbatch_knows_the_place_of_its_first_token(tokens):
    flat = rows(Batches(tokens, length=32, batch=8), 0)[0, :, 0].flatten()
    for rank in range(2):
        for batch in Batches(tokens, length=32, batch=8, accumulate=2, dp=2, dp_rank=rank).step():
            place, ids = batch.first_token, batch.input_ids
            assert torch.equal(ids.flatten(), flat[place : place + ids.numel()])


@pytest.mark.slow
@settings(max_examples=50)
@given(data=st.data(), size=st.integers(2, 400), length=st.integers(1, 40), seed=st.integers(0, 9))
def test_an_epoch_visits_every_window_once_whoever_takes_it(tmp_path_factory, data, size: int, length: int, seed: int):
    """Numbers of ranks, microbatches and batch sizes change, and the run resumes in between."""
    length = min(length, size - 1)
    folder = write_tokens(tmp_path_factory.mktemp("epoch"), np.arange(size), [size])
    count = (size - 1) // length
    seen: list[int] = []
    while len(seen) < 2 * count:
        dp, accumulate, each = (data.draw(st.integers(1, 3)) for _ in range(3))
        taken: dict[int, list[int]] = {}
        for rank in range(dp):
            batches = Batches(
                folder,
                length=length,
                batch=dp * accumulate * each,
                accumulate=accumulate,
                seed=seed,
                dp=dp,
                dp_rank=rank,
            )
            batches.load_state_dict({"samples": len(seen)})
            for micro, batch in enumerate(batches.step()):
                taken[micro * dp + rank] = batch.input_ids[:, 0].tolist()
            assert batches.state_dict() == {"samples": len(seen) + dp * accumulate * each}
        seen += [start for at in sorted(taken) for start in taken[at]]
    slack = (size - 1) % length
    for epoch in range(2):
        starts = sorted(seen[epoch * count : (epoch + 1) * count])
        assert starts == list(range(starts[0], starts[0] + count * length, length)) and starts[0] <= slack
    if count > 20:
        assert seen[:count] != seen[count : 2 * count]


def write_tokens(folder: Path, ids: np.ndarray, ends: list[int], dtype: str = "uint16") -> Path:
    for name in ("train", "held_out"):
        ids.astype(dtype).tofile(folder / f"{name}.bin")
        np.array(ends, np.int64).tofile(folder / f"{name}.ends")
    (folder / "index.json").write_text(json.dumps({"dtype": dtype, "vocab_size": 1 << 16}))
    return folder


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    length=st.integers(1, 20),
    seed=st.integers(0, 9),
)
def test_separate_documents_token_by_token(tmp_path_factory, sizes: list[int], length: int, seed: int):
    total = sum(sizes)
    if total <= length:
        sizes, total = [*sizes, length], total + length
    ends = np.cumsum(sizes).tolist()
    folder = write_tokens(tmp_path_factory.mktemp("documents"), np.arange(total), ends)
    document = [i for i, size in enumerate(sizes) for _ in range(size)]
    batches = Batches(folder, length=length, batch=6, accumulate=3, seed=seed, documents="separate")
    labels_of_step = 0
    for batch in batches.step():
        for b in range(2):
            first = int(batch.input_ids[b, 0])
            for s in range(length):
                token = first + s
                begin = max(first, document.index(document[token]))
                follows = token + 1 if document[token + 1] == document[token] else -100
                assert batch.input_ids[b, s] == token and batch.labels[b, s] == follows
                assert batch.positions[b, s] == token - begin
                assert batch.document_ids[b, s] == document[token] - document[first]
                labels_of_step += follows != -100
    assert batch.num_labels == max(1, labels_of_step)


def test_a_step_is_the_mean_over_all_its_labels_on_any_layout(tmp_path):
    """The documents give microbatches and ranks unequal numbers of labels."""
    random = np.random.default_rng(0)
    folder = write_tokens(tmp_path, random.integers(0, 11, 300), [*range(3, 90, 3), 200, 300])
    config = ModelConfig(
        vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        dtype="float64", param_dtype="float64",
    )  # fmt: skip
    model = init_(CausalLM(config), 0, std=0.5)
    losses, counts = [], []
    for dp, accumulate in ((1, 1), (2, 2), (1, 4), (4, 1)):
        of_ranks = []
        for rank in range(dp):
            batches = Batches(
                folder, length=16, batch=8, accumulate=accumulate, dp=dp, dp_rank=rank, documents="separate"
            )
            every = list(batches.step())
            counts += [int((batch.labels != -100).sum()) for batch in every]
            of_ranks.append(sum(model(**batch.arguments()).loss.double().item() for batch in every))
        losses.append(sum(of_ranks) / dp)
    assert len(set(counts)) > 2, "numbers of labels differ"
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-6)  # each loss is rounded to fp32 in the end


def test_validation_is_the_mean_over_all_its_labels_on_any_layout(tmp_path):
    """The first batch has documents of two tokens, the second one long document."""
    ids = np.random.default_rng(2).integers(0, 11, 260)
    folder = write_tokens(tmp_path, ids, [*range(2, 130, 2), 260])
    config = ModelConfig(vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    model = init_(CausalLM(config), 0, std=0.5)
    windows = Windows(folder, "held_out", 16, "separate")
    x, labels, positions, document_ids = windows.read(windows.spread(2 * 8))
    want = model(x, labels, positions, document_ids).loss.item()  # divided by the actual number of labels
    first, second = ((half != -100).sum() for half in labels.chunk(2))
    assert 3 * first < 2 * second
    for dp, pieces in ((1, 1), (2, 2), (1, 4), (4, 1)):
        of_ranks = []
        for rank in range(dp):
            batches = Batches(folder, length=16, batch=8, dp=dp, dp_rank=rank, documents="separate")
            of_ranks.append(validation_loss(model, batches.validation(2, pieces), World(), pieces=pieces))
        assert sum(of_ranks) / dp == pytest.approx(want, rel=1e-5)


def test_a_document_among_others_gets_the_logits_that_it_has_alone(tmp_path):
    ids = np.random.default_rng(1).integers(0, 11, 40)
    folder = write_tokens(tmp_path, ids, [9, 17, 40])
    (batch,) = Batches(folder, length=20, batch=1, documents="separate").step()
    config = ModelConfig(vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2)
    model = init_(CausalLM(config), 0, std=0.5)
    together = model(batch.input_ids, positions=batch.positions, document_ids=batch.document_ids).logits[0]
    for document in batch.document_ids.unique():
        here = batch.document_ids[0] == document
        torch.testing.assert_close(together[here], model(batch.input_ids[:, here]).logits[0])


def test_validation_is_the_same_held_out_text_on_any_layout(tokens):
    content = (tokens / "held_out.bin").read_bytes()
    whole = [batch.input_ids for batch in Batches(tokens, length=32, batch=4).validation(3)]
    parts = [
        [batch.input_ids for batch in Batches(tokens, length=32, batch=4, dp=2, dp_rank=rank).validation(3)]
        for rank in range(2)
    ]
    in_two = [batch.input_ids for batch in Batches(tokens, length=32, batch=4).validation(3, 2)]
    for i, batch in enumerate(whole):
        assert torch.equal(torch.cat([part[i] for part in parts]), batch)
        assert torch.equal(torch.cat(in_two[2 * i : 2 * i + 2]), batch)
        assert all(bytes(row.tolist()) in content for row in batch)


@pytest.fixture(scope="module", params=[40, 1 << 16, (1 << 16) + 1])
def words(request, tmp_path_factory) -> Path:
    """The folder of a word tokenizer with this many ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = ["<end>", "<unknown>", "one", "two", "three", "."]
    known += [f"w{i}" for i in range(request.param - len(known))]
    own = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="<unknown>"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path_factory.mktemp("words")
    PreTrainedTokenizerFast(tokenizer_object=own, eos_token="<end>").save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_tokenizer_of_transformers_makes_the_tokens(words, tmp_path):
    tokenizer = tokenizer_of(words)
    for i in range(30):
        (tmp_path / f"{i:02}.txt").write_text("one two . " * (i + 1))
    folder = build_tokens((tmp_path,), tmp_path / "cache", tokenizer)
    index = json.loads((folder / "index.json").read_text())
    wide = tokenizer.vocab_size > 1 << 16
    assert index["dtype"] == ("uint32" if wide else "uint16") and index["vocab_size"] == tokenizer.vocab_size
    ids = np.fromfile(folder / "train.bin", index["dtype"])
    ends = np.fromfile(folder / "train.ends", np.int64)
    assert (ids[ends - 1] == tokenizer.end).all() and (ids == tokenizer.end).sum() == len(ends)
    assert ends[-1] == len(ids) and set(ids.tolist()) == {0, 2, 3, 5}
    assert tokenizer.decode(ids[: ends[0] - 1].tolist()).split() == ["one", "two", "."] * (ends[0] // 3)
    assert build_tokens((tmp_path,), tmp_path / "cache") != folder, "another tokenizer, other tokens"
    (batch,) = Batches(folder, length=8, batch=2).step()
    assert batch.input_ids.max() < tokenizer.vocab_size


def test_a_folder_without_a_tokenizer_is_a_fault_of_the_options(tmp_path):
    (fault,) = DataOptions(tokenizer=tmp_path).faults()
    assert fault.startswith(f"--tokenizer {tmp_path}: ")


def test_token_ids_are_taken_as_they_are(tmp_path):
    ids = np.arange(1000) % 7
    np.save(tmp_path / "ids.npy", ids)
    folder = build_tokens((tmp_path / "ids.npy",), tmp_path / "cache")
    train, held_out = (np.fromfile(folder / f"{name}.bin", np.uint8) for name in ("train", "held_out"))
    assert np.array_equal(np.concatenate((train, held_out)), ids) and len(held_out) == 50
    ends = np.fromfile(folder / "train.ends", np.int64)
    assert ends.tolist() == [*range(1, 950, 7), 950], "id 0 ends a document"
    np.save(tmp_path / "large.npy", np.array([3, 256]))
    with pytest.raises(
        ValueError,
        match=r"large.npy holds ids from 3 to 256, but the vocabulary has 256: give .*--vocab-size, or .*--tok",
    ):
        build_tokens((tmp_path / "large.npy",), tmp_path / "cache")
    np.save(tmp_path / "square.npy", np.zeros((2, 2), int))
    assert text_faults((tmp_path / "square.npy",)) == [
        f"--data {tmp_path / 'square.npy'} is not one dimension of token ids"
    ]


@pytest.mark.parametrize(("size", "dtype"), [(200, "uint8"), (500, "uint16"), (1 << 17, "uint32")])
def test_ids_without_a_tokenizer_lie_below_the_size_that_is_given(tmp_path, size: int, dtype: str):
    ids = np.arange(1000) * 7919 % size
    np.save(tmp_path / "ids.npy", ids)
    options = DataOptions(data=(tmp_path / "ids.npy",), vocab_size=size)
    assert options.faults() == []
    folder = build_tokens(options.data, tmp_path / "cache", options.vocabulary)
    index = json.loads((folder / "index.json").read_text())
    assert (index["dtype"], index["vocab_size"]) == (dtype, size)
    train, held_out = (np.fromfile(folder / f"{name}.bin", dtype) for name in ("train", "held_out"))
    assert np.array_equal(np.concatenate((train, held_out)), ids)
    assert np.fromfile(folder / "train.ends", np.int64).tolist() == [950], "no id ends a document"
    other = DataOptions(data=options.data, vocab_size=size + 1).vocabulary
    assert build_tokens(options.data, tmp_path / "cache", other) != folder, "another vocabulary, another run"
    smaller = DataOptions(data=options.data, vocab_size=int(ids.max())).vocabulary
    with pytest.raises(ValueError, match=f"from 0 to {ids.max()}, but the vocabulary has {ids.max()}:"):
        build_tokens(options.data, tmp_path / "cache", smaller)


def test_ids_without_a_tokenizer_are_numbers_in_the_place_of_text(tmp_path):
    vocabulary = DataOptions(vocab_size=500).vocabulary
    assert vocabulary.end is None
    assert vocabulary.decode([3, 499, 0]) == "3 499 0" and vocabulary.encode(b" 3  499 0").tolist() == [
        3,
        499,
        0,
    ]
    for wrong in ("500", "-1", "three", "1.5"):
        with pytest.raises(ValueError, match=f"'{wrong}' is not a token id from 0 to 499"):
            vocabulary.encode(f"3 {wrong}".encode())
    np.save(tmp_path / "ids.npy", np.arange(500))
    (tmp_path / "more.txt").write_text("3 499 0 " * 100)
    with pytest.raises(ValueError, match=r"--vocab-size works with token ids \(.npy\) only, but .*more.txt is text"):
        build_tokens((tmp_path,), tmp_path / "cache", vocabulary)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == []


def test_ids_that_are_no_bytes_are_shown_as_what_is_no_text():
    assert (
        Bytes().decode([104, 256, 195, 164, 65535, 195])
        == "h\N{REPLACEMENT CHARACTER}\xe4" + 2 * "\N{REPLACEMENT CHARACTER}"
    )


def test_windows_reach_the_last_token(tokens):
    windows = Windows(tokens, "held_out", 32)
    first, last = windows.spread(2)
    assert first == 0
    assert windows.read(np.array([last]))[1][0, -1] == windows.tokens[-1]
