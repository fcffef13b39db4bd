"""Checkpoints on disk: what stock tools see, what damage is found, what is never left behind."""

import enum
import json
import os
import shutil
import sys
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.digest.tensors import state_digest
from holdfast.errors import ConfigError, SnapshotCorrupt
from holdfast.snapshot.disk import checkpoints, persist_format
from holdfast.snapshot.disk.checkpoints import Checkpoints, Revoked
from holdfast.snapshot.disk.persist_format import Part
from holdfast.snapshot.layout import flat_buffer, manifest
from holdfast.snapshot.layout.identity import RunIdentity
from holdfast.snapshot.protocol.checkpoint_schedule import Needed


class Colour(enum.Enum):
    RED = 1


def state(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(5, 3, generator=generator)
    return {
        "model": {
            "a": weight,
            "tied": weight,
            "half": weight.bfloat16(),
            "none": torch.empty(0, 2),
        },
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "lr": 0.1},
        "extra": {"wave": torch.randn(2, generator=generator) * 1j, 1: weight + 1, "1": weight + 2},
        "colour": Colour.RED,
    }


def part_of(tree: object, rank: int = 0) -> Part:
    flat = flat_buffer.flatten(tree)
    entries = flat_buffer.plan(flat)
    buffer = torch.zeros(flat_buffer.total_bytes(entries) + 100, dtype=torch.uint8)
    entries = flat_buffer.write(flat, entries, buffer, lambda: False)
    blob = manifest.encode(flat.skeleton, entries)
    return Part(rank, buffer, blob, manifest.digest_of(blob))


def write(folder: Path, step: int, seed: int = 0, keep: int = 2, **more: Any) -> int:
    folder.mkdir(exist_ok=True)
    parts = [part_of(state(seed + rank), rank) for rank in range(2)]
    checkpoints = Checkpoints(folder)
    return checkpoints.write(step, parts, world_size=2, first_rank=0, keep=keep, **more)


def load(folder: Path, rank: int = 0) -> Any:
    rows = persist_format.read_index(folder)["ranks"]
    row = next((row for row in rows if row["rank"] == rank), None)
    assert row is not None
    described, buffer = persist_format.read_rank(folder, row)
    return flat_buffer.unflatten(described.skeleton, flat_buffer.read(described.entries, buffer))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".lock", ".publish-lock"}


def test_what_is_read_is_what_was_written_bit_for_bit(tmp_path: Path) -> None:
    assert write(tmp_path / "c", 7) > 0
    for rank in range(2):
        tree = load(tmp_path / "c" / "step-7", rank)
        assert state_digest(tree) == state_digest(state(rank))
        assert tree["model"]["a"] is tree["model"]["tied"]
    assert state_digest(state(0)) != state_digest(state(1))


def test_stock_safetensors_loads_it_without_holdfast(tmp_path: Path) -> None:
    write(tmp_path / "c", 7)
    tensors = load_file(tmp_path / "c" / "step-7" / "rank-0.safetensors")
    expected = state(0)
    assert torch.equal(tensors["model.a"], expected["model"]["a"])
    assert torch.equal(tensors["model.half"], expected["model"]["half"])
    assert tensors["model.none"].shape == (0, 2)
    assert tensors["optimizer.state.0.step"].item() == 3.0
    assert torch.equal(tensors["extra.1"], expected["extra"][1])
    assert torch.equal(tensors["extra.1#2"], expected["extra"]["1"])
    assert torch.equal(tensors["extra.wave"].view(torch.complex64), expected["extra"]["wave"])
    index = json.loads((tmp_path / "c" / "step-7" / "checkpoint.json").read_text())
    assert index["ranks"][0]["aliases"] == {"model.tied": "model.a"}
    assert "model.tied" not in tensors


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    write(tmp_path / "c", 7)
    folder = tmp_path / "c" / "step-7"
    assert persist_format.damage_of(folder) == ""
    missed, tried = [], 0
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for at in range(0, len(whole), 5):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
            tried += 1
            try:
                found = persist_format.damage_of(folder)
            except OSError as error:  # a name of a file changed
                found = str(error)
            missed += [] if found else [(path.name, at)]
        path.write_bytes(whole[:-1])
        missed += [] if persist_format.damage_of(folder) else [(path.name, "cut short")]
        path.write_bytes(whole)
    assert tried > 500
    assert missed == []


def test_the_newest_stay_and_drafts_are_removed(tmp_path: Path) -> None:
    (tmp_path / "c" / ".writing-step-1").mkdir(parents=True)
    for step in range(1, 6):
        write(tmp_path / "c", step, keep=3)
    assert names(tmp_path / "c") == {"step-3", "step-4", "step-5"}


def test_the_same_checkpoint_is_not_written_twice_and_a_damaged_one_is_replaced(
    tmp_path: Path,
) -> None:
    write(tmp_path / "c", 7)
    assert write(tmp_path / "c", 7) == 0
    (tmp_path / "c" / "step-7" / "checkpoint.json").write_text("{")
    assert write(tmp_path / "c", 7) > 0
    assert persist_format.damage_of(tmp_path / "c" / "step-7") == ""
    assert names(tmp_path / "c") == {"step-7", "damaged-step-7"}


@pytest.mark.parametrize("step", [6, 7])
def test_the_folder_of_another_run_is_refused_and_left_alone(tmp_path: Path, step: int) -> None:
    write(tmp_path / "c", 7)
    with pytest.raises(ConfigError, match="another run"):
        write(tmp_path / "c", step, seed=5)
    assert names(tmp_path / "c") == {"step-7"}
    assert state_digest(load(tmp_path / "c" / "step-7")) == state_digest(state(0))


def test_what_a_run_went_back_behind_is_void_until_it_is_as_far_again(tmp_path: Path) -> None:
    for step in (5, 7, 9):
        write(tmp_path / "c", step, keep=9)
    with pytest.raises(ConfigError, match="another run"):
        write(tmp_path / "c", 6)
    Checkpoints(tmp_path / "c").go_back(5)
    assert Checkpoints(tmp_path / "c").steps() == [5]
    assert names(tmp_path / "c") == {"step-5", "rolled-back-step-7", "rolled-back-step-9"}
    write(tmp_path / "c", 6, seed=5)
    assert Checkpoints(tmp_path / "c").steps() == [5, 6]
    write(tmp_path / "c", 8, seed=5)
    assert names(tmp_path / "c") == {"step-6", "step-8", "rolled-back-step-9"}
    Checkpoints(tmp_path / "c").go_back(6)
    assert names(tmp_path / "c") == {"step-6", "rolled-back-step-8", "rolled-back-step-9"}
    write(tmp_path / "c", 20, seed=5)
    assert names(tmp_path / "c") == {"step-6", "step-20"}


def test_going_back_finds_a_step_that_appears_at_that_very_moment(tmp_path: Path) -> None:
    write(tmp_path / "c", 5)
    going = Thread(target=Checkpoints(tmp_path / "c").go_back, args=(5,))

    def asked_before_the_run_went_back() -> bool:
        going.start()
        going.join(0.3)  # as long as it takes without the lock
        return True

    write(tmp_path / "c", 7, still_intact=asked_before_the_run_went_back)
    going.join(60)
    assert names(tmp_path / "c") == {"step-5", "rolled-back-step-7"}


def test_going_back_does_not_wait_for_what_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "c", 5)
    write(tmp_path / "c", 7)
    save = persist_format.save_tensors

    def meanwhile(*given: Any) -> None:
        going = Thread(target=Checkpoints(tmp_path / "c").go_back, args=(5,))
        going.start()
        going.join(60)
        assert Checkpoints(tmp_path / "c").steps() == [5]
        save(*given)

    monkeypatch.setattr(persist_format, "save_tensors", meanwhile)
    with pytest.raises(Revoked, match="went back"):
        write(tmp_path / "c", 9, still_intact=lambda: False)
    assert Checkpoints(tmp_path / "c").steps() == [5]


def test_short_of_room_what_is_void_or_of_no_use_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, room = tmp_path / "c", 3

    def usage(_: object) -> Any:
        there = sum("step-" in path.name and path.is_dir() for path in folder.iterdir())
        return SimpleNamespace(free=10**9 if there < room else 0)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    for step in (10, 20, 30):
        write(folder, step, keep=9)
    with pytest.raises(OSError, match="are free on the storage"):
        write(folder, 40)
    assert Checkpoints(folder).steps() == [10, 20, 30]
    write(folder, 40, needed=Needed(10, 40))
    assert Checkpoints(folder).steps() == [10, 30, 40]
    Checkpoints(folder).go_back(35)
    write(folder, 36, seed=5, keep=9)
    assert names(folder) == {"step-10", "step-30", "step-36"}


def half_written(tensors: object, path: Path, metadata: object) -> None:
    path.write_bytes(b"half")
    raise OSError(28, "No space left on device")


def rotten(tensors: dict[str, torch.Tensor], *rest: Any) -> None:
    save_file(tensors | {"model.a": tensors["model.a"] + 1}, *rest)


@pytest.mark.parametrize(
    ("free", "save", "intact", "error"),
    [
        (10, save_file, True, OSError),
        (10**9, half_written, True, OSError),
        (10**9, rotten, True, SnapshotCorrupt),
        (10**9, save_file, False, Revoked),
    ],
    ids=["no room", "full while writing", "rotten", "revoked"],
)
def test_what_cannot_be_written_leaves_nothing_behind(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    save: Any,
    intact: bool,
    error: type[Exception],
) -> None:
    write(tmp_path / "c", 1)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
        patched.setattr(persist_format, "save_file", save)
        with pytest.raises(error):
            write(tmp_path / "c", 2, seed=1, still_intact=lambda: intact)
    assert names(tmp_path / "c") == {"step-1"}
    write(tmp_path / "c", 3, seed=1)
    assert names(tmp_path / "c") == {"step-1", "step-3"}


def test_a_type_that_only_the_trainer_knows_is_moved_on_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = part_of(state(0))
    described = manifest.decode(part.manifest, part.digest)
    assert described.skeleton["colour"] is Colour.RED  # type: ignore[index]
    with monkeypatch.context() as elsewhere:
        elsewhere.delitem(sys.modules, Colour.__module__)
        with pytest.raises(SnapshotCorrupt, match="imported first"):
            manifest.decode(part.manifest, part.digest)
        Checkpoints(tmp_path).write(7, [part], world_size=1, first_rank=0, keep=1)
        assert persist_format.damage_of(tmp_path / "step-7") == ""
    assert load(tmp_path / "step-7")["colour"] is Colour.RED


def test_settings_are_checked_and_nodes_are_kept_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert checkpoints.settings(None, 1, 1) is None
    for every, keep in ((0, 1), (1, 0)):
        with pytest.raises(ConfigError, match="at least 1"):
            checkpoints.settings(tmp_path, every, keep)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="choose another"):
        checkpoints.settings(tmp_path / "file", 1, 1)
    alone = checkpoints.settings(tmp_path / "a", 1, 1)
    assert (alone.directory, alone.world_size, alone.first_rank) == (str(tmp_path / "a"), 1, 0)
    place = {"WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2, "RANK": 3, "LOCAL_RANK": 1, "GROUP_RANK": 1}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    second = checkpoints.settings(tmp_path / "a", 1, 1)
    assert second.directory == str(tmp_path / "a" / "node-1")
    assert (second.world_size, second.first_rank) == (4, 2)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["checkpoint.json", "rank-0.manifest", "rank-0.safetensors"])
def test_a_pipe_in_the_place_of_a_file_is_damage_and_blocks_nobody(
    disk: Checkpoints, name: str
) -> None:
    disk.folder.mkdir()
    disk.write(1, [part_of(state())], world_size=1, first_rank=0, keep=1)
    path = disk.path(1) / name
    path.unlink()
    os.mkfifo(path)
    assert "is not a regular file" in persist_format.damage_of(disk.path(1))
    assert disk.foreign(RunIdentity("x", "", "", "", 1)) == ""
