"""Corpora and the loader: determinism, independence from global state, resumption, refusals."""

import os
import random
import sysconfig
from itertools import islice
from pathlib import Path

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


def test_the_standard_library_is_the_default_corpus():
    corpus = read_corpus()
    assert corpus.data.dtype == torch.uint8
    assert 2**20 < len(corpus) <= 16 * 2**20
    text = corpus.data.numpy().tobytes()
    stdlib = Path(sysconfig.get_path("stdlib"))
    assert (stdlib / "json" / "decoder.py").read_bytes() in text
    assert (stdlib / "idlelib" / "__init__.py").read_bytes() not in text
    assert "standard library of Python" in corpus.description
    assert str(len(corpus)) in corpus.description


def test_the_default_corpus_is_deterministic_and_capped():
    short = read_corpus(max_bytes=5000)
    assert len(short) == 5000
    assert torch.equal(short.data, read_corpus(max_bytes=6000).data[:5000])


def test_a_folder_is_read_recursively_in_order(tmp_path):
    for name, text in {"b.txt": "two", "a/z.md": "one", "c": "three", "a.txt": "zero"}.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert _bytes(read_corpus(tmp_path)) == b"one" + b"zero" + b"two" + b"three"
    assert "4 text files" in read_corpus(tmp_path).description
    assert ", 0 binary files skipped" in read_corpus(tmp_path).description


def test_binary_files_are_skipped_and_counted(tmp_path):
    (tmp_path / "text").write_bytes(b"x" * 9000 + b"\0")
    (tmp_path / "early").write_bytes(b"\x7fELF\0")
    (tmp_path / "late").write_bytes(b"y" * 8191 + b"\0")
    corpus = read_corpus(tmp_path)
    assert _bytes(corpus) == b"x" * 9000 + b"\0"
    assert "1 text files" in corpus.description
    assert "2 binary files skipped" in corpus.description


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


def test_a_file_without_permission_is_refused_by_name(tmp_path, monkeypatch):
    secret = tmp_path / "secret"
    secret.write_text("text")

    def denied(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", denied)
    assert f"cannot read {secret}: Permission denied" in _refusal(tmp_path)


def test_a_folder_without_permission_is_refused_by_name(tmp_path, monkeypatch):
    closed = tmp_path / "closed"
    closed.mkdir()
    (tmp_path / "text").write_text("text")
    scandir = os.scandir

    def guarded(path):
        if Path(path) == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)
    assert f"cannot read {closed}: Permission denied" in _refusal(tmp_path)


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


def test_batches_are_windows_of_the_corpus():
    text = _bytes(_corpus())
    for inputs, targets in islice(_loader(), 20):
        assert inputs.shape == targets.shape == (4, 8)
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.is_contiguous()
        for row, following in zip(inputs.tolist(), targets.tolist(), strict=True):
            assert bytes([*row, following[-1]]) in text
            assert row[1:] == following[:-1]


def test_every_start_can_be_drawn():
    loader = ByteLoader(
        Corpus(torch.arange(12).to(torch.uint8), ""), **SETTINGS | {"batch_size": 64}
    )
    starts = {row[0] for inputs, _ in islice(loader, 10) for row in inputs.tolist()}
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


def test_the_state_is_plain():
    assert {type(value) for value in _loader().state_dict().values()} == {int, str}


@pytest.mark.parametrize(
    "changes",
    [{"seed": 8}, {"rank": 1}, {"world_size": 3}, {"context": 9}, {"batch_size": 5}],
)
def test_the_state_of_another_loader_is_refused(changes):
    settings = {"world_size": 2}
    state = _loader(**settings | changes).state_dict()
    loader = _loader(**settings)
    _take(loader, 2)
    name, value = next(iter(changes.items()))
    with pytest.raises(ConfigError, match=f"{name} = {value}, this run has"):
        loader.load_state_dict(state)
    assert loader.position == 2


def test_the_state_of_another_corpus_is_refused():
    other = ByteLoader(_corpus(999), **SETTINGS)
    with pytest.raises(ConfigError, match="corpus_bytes = 999, this run has 1000"):
        _loader().load_state_dict(other.state_dict())
    edited = _corpus()
    edited.data[500] ^= 1
    with pytest.raises(ConfigError, match="corpus_digest"):
        _loader().load_state_dict(ByteLoader(edited, **SETTINGS).state_dict())


@pytest.mark.parametrize("position", [-1, "4", None, 1.5])
def test_a_broken_position_is_refused(position):
    state = _loader().state_dict() | {"position": position}
    with pytest.raises(ConfigError, match="not a count of batches"):
        _loader().load_state_dict(state)


def test_an_incomplete_state_is_refused():
    with pytest.raises(ConfigError, match="seed = None"):
        _loader().load_state_dict({"position": 3})
