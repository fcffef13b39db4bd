"""Corpora and the loader: determinism, independence from global state, resumption, refusals."""

import os
import random
import sysconfig
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.errors import ConfigError
from holdfast_lab.trainer.data import ByteLoader, Corpus, read_corpus

SETTINGS = {"context": 8, "batch_size": 4, "seed": 7}


def _corpus(size: int = 1000) -> Corpus:
    return Corpus((torch.arange(size) * 7 % 251).to(torch.uint8), "numbers")


def _loader(**changes: int) -> ByteLoader:
    return ByteLoader(_corpus(), **SETTINGS | changes)


def _take(loader: ByteLoader, count: int) -> list[list[list[int]]]:
    return [inputs.tolist() for inputs, _ in islice(loader, count)]


def _bytes(corpus: Corpus) -> bytes:
    return bytes(corpus.data.tolist())


def test_the_standard_library_is_the_default_corpus_and_is_capped():
    corpus, short = read_corpus(), read_corpus(max_bytes=5000)
    assert corpus.data.dtype == torch.uint8
    assert 2**20 < len(corpus) <= 16 * 2**20
    assert torch.equal(short.data, corpus.data[:5000])
    text = corpus.data.numpy().tobytes()
    stdlib = Path(sysconfig.get_path("stdlib"))
    assert (stdlib / "json" / "decoder.py").read_bytes() in text
    assert (stdlib / "idlelib" / "__init__.py").read_bytes() not in text
    assert "standard library of Python" in corpus.description


def test_a_folder_is_read_recursively_in_order_without_its_binary_files(tmp_path):
    (tmp_path / "a").mkdir()
    late = b"y" * 8191 + b"\0"
    files = {"b.txt": b"two", "a/z.md": b"one", "c": b"x" * 9000 + b"\0", "a.txt": b"zero"}
    for name, content in {**files, "early": b"\x7fELF\0", "late": late}.items():
        (tmp_path / name).write_bytes(content)
    corpus = read_corpus(tmp_path)
    assert _bytes(corpus) == b"one" + b"zero" + b"two" + files["c"]
    assert "4 text files" in corpus.description
    assert ", 2 binary files skipped" in corpus.description


def test_pipes_loops_and_dangling_links_are_left_out(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "text").write_text("hello")
    assert _bytes(read_corpus(tmp_path)) == b"hello"


def _refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_corpus(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def test_unusable_folders_are_refused(tmp_path):
    assert "no folder" in _refusal(tmp_path / "none")
    (tmp_path / "file").write_text("text")
    assert "not a directory" in _refusal(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert "no text" in _refusal(tmp_path / "empty")
    (tmp_path / "empty" / "blank").touch()
    (tmp_path / "empty" / "binary").write_bytes(b"\0")
    assert "1 binary files" in _refusal(tmp_path / "empty")


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path):
    # Reading the kernel's view of address 0 fails for every user, root included.
    (tmp_path / "memory").symlink_to("/proc/self/mem")
    assert f"cannot read {tmp_path / 'memory'}: " in _refusal(tmp_path)


def test_a_file_or_folder_without_permission_is_refused_by_name(tmp_path, monkeypatch):
    closed, scandir = tmp_path / "closed", os.scandir
    closed.mkdir()
    (tmp_path / "text").write_text("text")

    def denied(path: Path) -> Any:
        if Path(path) in (closed, tmp_path / "text"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)
    assert f"cannot read {closed}: Permission denied" in _refusal(tmp_path)
    closed.rmdir()
    monkeypatch.setattr(Path, "read_bytes", denied)
    assert f"cannot read {tmp_path / 'text'}: Permission denied" in _refusal(tmp_path)


def test_a_corpus_shorter_than_a_sequence_is_refused():
    with pytest.raises(ConfigError, match="has 8 bytes, one sequence needs 9"):
        ByteLoader(_corpus(8), **SETTINGS)
    inputs, targets = next(ByteLoader(_corpus(9), **SETTINGS))
    assert inputs.tolist() == [_corpus(9).data[:8].tolist()] * 4
    assert targets.tolist() == [_corpus(9).data[1:].tolist()] * 4


@pytest.mark.parametrize(
    "changes",
    [{"context": 0}, {"batch_size": 0}, {"rank": -1}, {"rank": 2, "world_size": 2}],
)
def test_impossible_settings_are_refused(changes):
    with pytest.raises(ConfigError, match=str(next(iter(changes.values())))):
        _loader(**changes)


def test_batches_are_windows_of_the_corpus_from_every_start():
    text, starts = bytes(range(12)), set()
    loader = ByteLoader(Corpus(torch.arange(12).to(torch.uint8), ""), **SETTINGS)
    for inputs, targets in islice(loader, 50):
        assert inputs.shape == targets.shape == (4, 8)
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.is_contiguous()
        for row, following in zip(inputs.tolist(), targets.tolist(), strict=True):
            starts.add(text.index(bytes([*row, following[-1]])))
            assert row[1:] == following[:-1]
    assert starts == {0, 1, 2, 3}


def test_a_batch_is_a_function_of_its_position():
    straight = _take(_loader(), 6)
    loader = _loader()
    assert [loader.batch(position)[0].tolist() for position in reversed(range(6))] == straight[::-1]
    assert loader.position == 0
    assert len({str(batch) for batch in straight}) == 6


@pytest.mark.parametrize("changes", [{"seed": 8}, {"rank": 1, "world_size": 2}, {"world_size": 2}])
def test_seed_rank_and_world_size_change_the_batches(changes):
    assert _take(_loader(**changes), 3) != _take(_loader(), 3)


def test_the_global_generators_are_neither_read_nor_changed():
    torch.manual_seed(0)
    first = _take(_loader(), 3)
    torch.manual_seed(99)
    random.seed(3)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert _take(_loader(), 3) == first
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]


def test_a_restored_loader_continues_with_the_next_batch():
    straight = _loader()
    expected = _take(straight, 9)
    stopped = _loader()
    _take(stopped, 4)
    state = stopped.state_dict()
    assert state["position"] == 4
    _take(stopped, 2)
    resumed = _loader()
    _take(resumed, 1)
    resumed.load_state_dict(state)
    assert _take(resumed, 5) == expected[4:]
    assert resumed.state_dict() == straight.state_dict()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 8}, "seed = 8, this run has"),
        ({"rank": 1}, "rank = 1, this run has"),
        ({"world_size": 3}, "world_size = 3, this run has"),
        ({"context": 9}, "context = 9, this run has"),
        ({"batch_size": 5}, "batch_size = 5, this run has"),
        ({"seed": None}, "seed = None"),
        ({"corpus_bytes": 999}, "corpus_bytes = 999, this run has 1000"),
        ({"corpus_digest": "another"}, "corpus_digest"),
        ({"position": -1}, "not a count of batches"),
        ({"position": "4"}, "not a count of batches"),
        ({"position": None}, "not a count of batches"),
        ({"position": 1.5}, "not a count of batches"),
    ],
)
def test_the_state_of_another_loader_or_none_is_refused(changes, message):
    loader = _loader(world_size=2)
    _take(loader, 2)
    with pytest.raises(ConfigError, match=message):
        loader.load_state_dict(_loader(world_size=2).state_dict() | changes)
    assert loader.position == 2


def test_a_changed_corpus_is_another():
    edited = _corpus()
    edited.data[500] ^= 1
    ours, other = _loader().state_dict(), ByteLoader(edited, **SETTINGS).state_dict()
    assert {name for name in ours if ours[name] != other[name]} == {"corpus_digest"}
    assert ByteLoader(_corpus(999), **SETTINGS).state_dict()["corpus_bytes"] == 999
