"""Text becomes the same tokens everywhere, held-out text is never trained on, and batches do not know the layout."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from fusedtp.train import text
from fusedtp.train.data import Batches, Windows


def write_corpus(folder: Path, files: int = 60, size: int = 400) -> Path:
    """Folder of small texts, each with a content of its own."""
    for i in range(files):
        path = folder / f"part{i % 4}" / f"file{i:03}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"file {i}: " + f"{i * 7919:x} " * (size // 8))
    return folder


def pieces(path: Path) -> list[bytes]:
    return [piece for piece in path.read_bytes().split(text.SEPARATOR) if piece]


def test_every_byte_is_trained_on_or_held_out_and_none_is_both(tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    tokens = text.build((corpus,), tmp_path / "cache")
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
        set(pieces(text.build((folder,), tmp_path / "cache") / "held_out.bin"))
        for folder in (here, tmp_path / "there")
    ]
    assert held_out[0] == held_out[1]


def test_other_files_of_the_same_size_and_time_are_other_tokens(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text(name * 1000)
        os.utime(tmp_path / name, (1e9, 1e9))
    tokens = [text.build((tmp_path / name,), tmp_path / "cache") for name in ("a", "b")]
    assert [pieces(folder / "train.bin") for folder in tokens] == [[b"a" * 950], [b"b" * 950]]


def test_copies_of_a_file_count_once(tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    plain = text.build((corpus,), tmp_path / "cache")
    for path in list(corpus.rglob("*.txt")):
        (corpus / "zz").mkdir(exist_ok=True)
        (corpus / "zz" / path.name).write_bytes(path.read_bytes())
    doubled = text.build((corpus, corpus, corpus / "part0"), tmp_path / "cache")
    assert doubled != plain
    assert (plain / "train.bin").read_bytes() == (doubled / "train.bin").read_bytes()


def test_a_single_file_is_cut(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(bytes(32 + i * 31 % 90 for i in range(10_000)))
    tokens = text.build((path,), tmp_path / "cache")
    (train,), (held_out,) = pieces(tokens / "train.bin"), pieces(tokens / "held_out.bin")
    assert train + held_out == path.read_bytes()
    assert len(held_out) == 500


def test_a_changed_file_is_read_again(tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    before = text.build((corpus,), tmp_path / "cache")
    assert text.build((corpus,), tmp_path / "cache") == before
    (corpus / "new.txt").write_text("something else " * 10)
    after = text.build((corpus,), tmp_path / "cache")
    assert b"something else" in (after / "train.bin").read_bytes() + (after / "held_out.bin").read_bytes()


def test_what_is_not_text_is_left_out(tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    plain = text.build((corpus,), tmp_path / "cache")
    (corpus / "image.bin").write_bytes(b"\x89PNG\0\xff" * 50)
    (corpus / "nul.txt").write_bytes(b"text \0 " * 50)
    (corpus / "latin.txt").write_bytes(b"caf\xe9 " * 50)
    (corpus / "empty.txt").touch()
    (corpus / ".hidden").write_text("hidden " * 50)
    (corpus / "__pycache__").mkdir()
    (corpus / "__pycache__" / "code.txt").write_text("byte code " * 50)
    with_others = text.build((corpus,), tmp_path / "cache")
    assert (plain / "train.bin").read_bytes() == (with_others / "train.bin").read_bytes()


def test_the_default_is_the_standard_librarys_source():
    found = text.find(())
    assert {"this.py", "os.py", "heapq.py"} <= {path.name for path in found}
    assert not any("site-packages" in path.parts for path in found)
    assert text.faults(()) == []


def test_what_is_wrong_with_paths_is_said_together(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "image.png").write_bytes(b"\x89PNG\0")
    names = ("missing.txt", "empty.txt", "image.png", "folder")
    found = text.faults(tuple(tmp_path / name for name in names))
    wanted = ("does not exist", "is empty", "is not UTF-8 text", "holds no UTF-8 text (1 files)")
    assert found == [f"--data {tmp_path / name} {fault}" for name, fault in zip(names, wanted, strict=True)]


def test_text_shorter_than_a_window_is_refused(tmp_path):
    (tmp_path / "short.txt").write_text("abc" * 100)
    tokens = text.build((tmp_path / "short.txt",), tmp_path / "cache")
    with pytest.raises(ValueError, match=r"held_out text has 16 bytes; --length 64 needs 65"):
        Batches(tokens, length=64, batch=1)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return text.build((write_corpus(folder / "corpus"),), folder / "cache")


def rows(batches: Batches, step: int) -> torch.Tensor:
    """[accumulate, rows, 2, length]: what a rank trains on in a step."""
    return torch.stack([torch.stack((ids, labels), 1) for ids, labels, _ in batches.microbatches(step)])


def test_labels_are_the_next_tokens_of_the_text(tokens):
    content = (tokens / "train.bin").read_bytes()
    for ids, labels, _ in Batches(tokens, length=32, batch=4).microbatches(0):
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
        rows(Batches(tokens, length=32, batch=8, accumulate=accumulate, dp=dp, dp_rank=rank), 5)
        for rank in range(dp)
    ]
    assert torch.equal(torch.stack(parts, 1).flatten(0, 2), whole)


def test_a_microbatch_knows_the_place_of_its_first_token(tokens):
    flat = rows(Batches(tokens, length=32, batch=8), 2)[0, :, 0].flatten()
    for rank in range(2):
        for ids, _, place in Batches(
            tokens, length=32, batch=8, accumulate=2, dp=2, dp_rank=rank
        ).microbatches(2):
            assert torch.equal(ids.flatten(), flat[place : place + ids.numel()])


def test_validation_is_the_same_held_out_text_on_any_layout(tokens):
    content = (tokens / "held_out.bin").read_bytes()
    whole = [ids for ids, _ in Batches(tokens, length=32, batch=4).validation(3)]
    parts = [
        [ids for ids, _ in Batches(tokens, length=32, batch=4, dp=2, dp_rank=rank).validation(3)]
        for rank in range(2)
    ]
    for i, batch in enumerate(whole):
        assert torch.equal(torch.cat([part[i] for part in parts]), batch)
        assert all(bytes(row.tolist()) in content for row in batch)


def test_windows_reach_the_last_token(tokens):
    windows = Windows(tokens / "held_out.bin", 32)
    first, last = windows.spread(2)
    assert first == 0
    assert windows.read(np.array([last]))[1][0, -1] == windows.tokens[-1]
