"""Checkpoints in an S3 store: complete or absent, whatever the store does; staged meanwhile."""

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from s3_server import Server
from test_persist_files import load, part_of, state

from holdfast.digest.tensors import state_digest
from holdfast.errors import ConfigError
from holdfast.snapshot.disk import checkpoints, persist_format
from holdfast.snapshot.disk.object_store import Location, ObjectStore
from holdfast.snapshot.disk.remote_checkpoints import RemoteCheckpoints, checkpoints_at
from holdfast.snapshot.disk.scrub import Scrub

PLACE = "s3://bucket/runs/a"


def staged(folder: Path, options: str = "") -> RemoteCheckpoints:
    """The checkpoints as a node sees them whose staging folder is ``folder``."""
    found = checkpoints_at(f"{PLACE}?staging={folder}{options}")
    assert isinstance(found, RemoteCheckpoints)
    return found


def write(there: RemoteCheckpoints, step: int, seed: int = 0, keep: int = 2, **more: Any) -> int:
    parts = [part_of(state(seed + step + rank), rank) for rank in range(2)]
    return there.write(step, parts, world_size=2, first_rank=0, keep=keep, **more)


def published(server: Server) -> set[str]:
    return {name.removeprefix("runs/a/") for name in server.objects if "/data/" not in name}


def assert_is(folder: Path, step: int) -> None:
    for rank in range(2):
        assert state_digest(load(folder, rank)) == state_digest(state(step + rank))


def test_another_machine_downloads_what_was_written_bit_for_bit(
    server: Server, tmp_path: Path
) -> None:
    assert write(staged(tmp_path / "a"), 7) > 0
    assert published(server) == {"step-7.json"}
    other = staged(tmp_path / "b")
    assert other.steps() == [7]
    assert not other.path(7).exists()
    assert_is(other.fetch(7), 7)
    assert persist_format.damage_of(other.path(7)) == ""


def test_large_files_go_up_and_down_in_parts(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 11 * 2**20
    part = part_of({"w": torch.arange(size // 4, dtype=torch.int32)})
    there = staged(tmp_path / "a")
    there.write(1, [part], world_size=1, first_rank=0, keep=1)
    assert (
        "POST",
        next(n for n in server.objects if n.endswith("rank-0.safetensors")),
    ) in server.log
    folder = staged(tmp_path / "b").fetch(1)
    assert sum(entry == ("GET", name) for entry in server.log for name in server.objects) >= 4
    assert torch.equal(load(folder)["w"], torch.arange(size // 4, dtype=torch.int32))


def test_a_scrub_repairs_what_is_staged_from_the_store(server: Server, tmp_path: Path) -> None:
    there = staged(tmp_path / "a")
    write(there, 7)
    path = there.path(7) / "rank-0.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert [each.verdict for each in Scrub(there.folder, now_s=0.0).run()] == ["beyond repair"]
    (found,) = Scrub(there.folder, now_s=0.0, copies=[PLACE]).run()
    assert (found.verdict, found.source) == ("repaired", PLACE)
    assert path.read_bytes() == whole


def test_a_step_that_a_scrub_puts_in_place_during_a_download_is_used(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(staged(tmp_path / "a"), 7)
    other, get = staged(tmp_path / "b"), ObjectStore.get_file

    def slow(store: ObjectStore, *about: Any) -> None:
        get(store, *about)
        if not other.path(7).exists():
            shutil.copytree(tmp_path / "a" / "step-7", other.path(7))

    monkeypatch.setattr(ObjectStore, "get_file", slow)
    assert other.fetch(7) == other.path(7)
    assert_is(other.path(7), 7)
    assert persist_format.damage_of(other.path(7)) == ""


def test_the_newest_steps_stay_and_every_tenth_for_ever(server: Server, tmp_path: Path) -> None:
    there = staged(tmp_path / "a", "&keep_every=10")
    for step in (5, 10, 15, 20, 25, 30, 35):
        write(there, step)
    assert there.steps() == [10, 20, 30, 35]
    kept = {name.split("/")[3].split("-")[1] for name in server.objects if "/data/" in name}
    assert kept == {"10", "20", "30", "35"}


@pytest.mark.parametrize("fault", ["503", "refused", "cut"])
def test_while_the_store_fails_steps_are_staged_and_later_uploaded(
    server: Server, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = staged(tmp_path / "a")
    write(there, 1)
    if fault == "refused":
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        there = staged(tmp_path / "a")
    server.fault = lambda method, name: fault if method != "HEAD" else ""
    with pytest.raises(OSError, match=f"step 2 is only in {tmp_path / 'a'}"):
        write(there, 2)
    with pytest.warns(RuntimeWarning, match="only the checkpoints in"):
        assert there.steps() == [1, 2]
    assert_is(there.fetch(2), 2)
    assert "s3://bucket/runs/a" in staged(tmp_path / "b").unloadable()  # not "there are none"
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.environment["AWS_ENDPOINT_URL"])
    server.fault = lambda method, name: ""
    write(staged(tmp_path / "a"), 3)
    assert published(server) == {"step-2.json", "step-3.json"}
    assert_is(staged(tmp_path / "b").fetch(2), 2)


def test_an_interrupted_upload_is_never_chosen_and_is_completed_or_removed(
    server: Server, tmp_path: Path
) -> None:
    there = staged(tmp_path / "a")
    write(there, 1)
    server.fault = lambda method, name: "503" if "rank-1.s" in name else ""
    with pytest.raises(OSError, match="503"):
        write(there, 2)
    assert any("/data/step-2-" in name for name in server.objects)
    assert staged(tmp_path / "b").steps() == [1]
    server.fault = lambda method, name: ""
    server.log.clear()
    assert write(there, 2) == 0  # it is in the staging folder
    assert staged(tmp_path / "b").steps() == [1, 2]
    assert not [n for m, n in server.log if m == "PUT" and "rank-0.s" in n]  # it was there already
    server.objects["runs/a/data/step-2-dead/rank-0.safetensors"] = b"left behind"
    server.objects["runs/a/data/step-1-dead/rank-0.safetensors"] = b"left behind"
    write(there, 3)
    write(there, 4)
    assert not [name for name in server.objects if "dead" in name]


@pytest.mark.parametrize("damage", ["flipped", "deleted", "shortened"])
def test_a_damaged_object_is_noticed_and_its_step_set_aside(
    server: Server, tmp_path: Path, damage: str
) -> None:
    write(staged(tmp_path / "a"), 1)
    write(staged(tmp_path / "a"), 2)
    name = next(n for n in server.objects if "data/step-2" in n and n.endswith("0.safetensors"))
    body = server.objects[name]
    server.objects[name] = {
        "flipped": body[:-1] + bytes([body[-1] ^ 1]),
        "shortened": body[:-9],
    }.get(damage, b"")
    if damage == "deleted":
        del server.objects[name]
    other = staged(tmp_path / "b")
    try:
        found = persist_format.damage_of(other.fetch(2))
    except OSError as error:
        found = str(error)
    assert found
    assert not other.quarantine(2)
    assert staged(tmp_path / "c").steps() == [1]
    assert "damaged-step-2" in staged(tmp_path / "c").unloadable()
    assert_is(staged(tmp_path / "c").fetch(1), 1)


def test_bytes_damaged_or_cut_on_the_way_are_fetched_again(server: Server, tmp_path: Path) -> None:
    write(staged(tmp_path / "a"), 1)
    times = iter(["flip"])
    server.fault = lambda method, name: next(times, "") if name.endswith("0.safetensors") else ""
    other = staged(tmp_path / "b")
    assert "does not match" in persist_format.damage_of(other.fetch(1))
    assert other.quarantine(1)  # the store's copy is sound
    assert_is(other.path(1), 1)
    cuts = iter(["cut", "slow"])
    server.fault = lambda method, name: next(cuts, "") if name.endswith("0.safetensors") else ""
    assert_is(staged(tmp_path / "c").fetch(1), 1)


def test_what_a_run_went_back_behind_is_void_in_the_store_too(
    server: Server, tmp_path: Path
) -> None:
    there = staged(tmp_path / "a")
    for step in (1, 2, 3):
        write(there, step, keep=9)
    there.go_back(1)
    assert published(server) == {
        "step-1.json",
        "rolled-back-step-2.json",
        "rolled-back-step-3.json",
    }
    assert staged(tmp_path / "b").steps() == [1]
    write(there, 2, seed=5)
    assert staged(tmp_path / "b").steps() == [1, 2]
    server.fault = lambda method, name: "503"
    there.go_back(1)  # the store cannot be told, so the next upload tells it
    server.fault = lambda method, name: ""
    write(there, 2, seed=6)
    assert staged(tmp_path / "b").steps() == [1, 2]
    folder = staged(tmp_path / "b").fetch(2)
    assert state_digest(load(folder)) == state_digest(state(8))


def test_a_step_that_the_run_leaves_during_its_upload_does_not_appear(
    server: Server, tmp_path: Path
) -> None:
    there = staged(tmp_path / "a")
    write(there, 1)

    def fault(method: str, name: str) -> str:
        if method == "PUT" and name.endswith("step-2.json") and there.path(2).exists():
            shutil.move(there.path(2), tmp_path / "gone")
        return ""

    server.fault = fault
    write(there, 2)
    assert staged(tmp_path / "b").steps() == [1]


def test_another_runs_checkpoints_are_left_alone_and_set_aside_on_demand(
    server: Server, tmp_path: Path
) -> None:
    write(staged(tmp_path / "a"), 7)
    with pytest.raises(ConfigError, match="holds step 7 of another run"):
        write(staged(tmp_path / "b"), 6)
    with pytest.raises(ConfigError, match="holds step 7 of another run"):
        write(staged(tmp_path / "c"), 7, seed=3)
    assert published(server) == {"step-7.json"}
    staged(tmp_path / "b").set_aside()
    write(staged(tmp_path / "d"), 1)
    assert staged(tmp_path / "e").steps() == [1]
    assert len([name for name in published(server) if name.startswith("set-aside-")]) == 1


def test_uploads_keep_to_their_rate(server: Server, tmp_path: Path) -> None:
    part = part_of({"w": torch.zeros(10**6, dtype=torch.uint8)})
    begun = time.monotonic()
    there = staged(tmp_path / "a", "&max_mb_s=4")
    there.write(1, [part], world_size=1, first_rank=0, keep=1)
    assert time.monotonic() - begun >= 0.25
    assert persist_format.damage_of(staged(tmp_path / "b").fetch(1)) == ""


def test_settings_stage_in_the_run_directory_and_name_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for given in ("s3://bucket/a/?keep_every=9", Path("s3://bucket/a?keep_every=9")):
        found = checkpoints.settings(given, 1, 2, tmp_path)
        assert found is not None
        expected = Location("s3://bucket/a", str(tmp_path / "staged"), keep_every=9)
        assert Location.parse(found.directory) == expected
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    found = checkpoints.settings(f"s3://bucket/a?staging={tmp_path}", 1, 2, tmp_path)
    assert found is not None
    assert Location.parse(found.directory) == Location("s3://bucket/a/node-1", f"{tmp_path}/node-1")
    for place, what in {
        "s3://bucket/a?kep=3": "no option 'kep'",
        "s3://bucket/a?keep_every=x": "keep_every must be a whole number",
        "nothing://bucket": "cannot use persist_dir nothing://bucket",
    }.items():
        with pytest.raises(ConfigError, match=what):
            checkpoints.settings(place, 1, 2, tmp_path)
