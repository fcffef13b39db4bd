"""Checkpoints at rest: what is damaged or missing is found, and rebuilt bit for bit, or named."""

import json
import os
import shutil
import time
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from test_persist_files import load, part_of, state

from holdfast.cli.main import main
from holdfast.digest.tensors import state_digest
from holdfast.errors import ConfigError
from holdfast.snapshot.disk import persist_format
from holdfast.snapshot.disk.checkpoints import Checkpoints
from holdfast.snapshot.disk.scrub import Finding, Scrub
from holdfast.snapshot.layout import identity
from holdfast.snapshot.layout.identity import RunIdentity

NODES, LOCAL, STEP = 3, 2, 7
Files = dict[str, bytes]


def persist(
    place: Path,
    node: int,
    step: int,
    *,
    replicas: bool = False,
    keep: int = 9,
    run: str = "",
    world_size: int = NODES * LOCAL,
) -> None:
    """Write a node's checkpoint; replicas differ in plain values only, as in random states."""
    ranks = range(node * LOCAL, (node + 1) * LOCAL)
    seeds = [step if replicas else 100 * step + rank for rank in ranks]
    trees = [state(seed) | {"rank": rank} for seed, rank in zip(seeds, ranks, strict=True)]
    for seed, tree in zip(seeds, trees, strict=True):
        tree["model"]["large"] = torch.randn(3000, generator=torch.Generator().manual_seed(seed))
        if run:
            tree[identity.KEY] = RunIdentity(run, "", "", "", world_size).encode()
    folder = place / f"node-{node}"
    folder.mkdir(parents=True, exist_ok=True)
    parts = [part_of(tree, local) for local, tree in enumerate(trees)]
    about = {"world_size": world_size, "first_rank": ranks[0], "keep": keep}
    Checkpoints(folder).write(step, parts, **about)


def made(place: Path, *, replicas: bool = False, steps: tuple[int, ...] = (STEP,)) -> Files:
    """Checkpoints of all nodes, scrubbed once: the bytes of their files."""
    for step in steps:
        for node in range(NODES):
            persist(place, node, step, replicas=replicas)
    assert found(place) == []
    return files(place)


def files(place: Path) -> Files:
    paths = sorted(place.glob("node-*/step-*/*"))
    return {str(path.relative_to(place)): path.read_bytes() for path in paths}


def written(place: Path, *steps: int, nodes: tuple[int, ...] = (0, 1, 2), keep: int = 9) -> None:
    for step in steps:
        for node in nodes:
            persist(place, node, step, keep=keep)


def found(place: Path, *, late: bool = False, **options: Any) -> list[Finding]:
    """What a scrub finds, at once or after more time than any node takes to write a step."""
    return list(Scrub(place, now_s=time.time() + late * 1e6, **options).run())


def verdicts(place: Path, **options: Any) -> list[str]:
    return [each.verdict for each in found(place, **options)]


def digests(place: Path) -> list[str]:
    """Of the states of all ranks, as a restore would load them; empty where it could not."""
    known = []
    for rank in range(NODES * LOCAL):
        try:
            folder = place / f"node-{rank // LOCAL}" / f"step-{STEP}"
            known.append(state_digest(load(folder, rank)))
        except Exception:
            known.append("")
    return known


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


def test_a_clean_scrub_says_nothing_and_adds_parity_once(tmp_path: Path) -> None:
    held = made(tmp_path)
    assert {Path(name).name for name in held} >= {"parity", "parity.json"}
    largest = max(len(held[f"node-{n}/step-{STEP}/parity"]) for n in range(NODES))
    state_bytes = sum(len(held[name]) for name in held if name.startswith("node-0/step"))
    assert largest < state_bytes / 2  # a half of what each of three nodes holds
    assert found(tmp_path) == []
    assert files(tmp_path) == held
    replicas = made(tmp_path / "replicas", replicas=True)
    assert len(replicas[f"node-0/step-{STEP}/parity"]) < largest / 1.5  # no tensor that all have


@pytest.mark.parametrize("replicas", [False, pytest.param(True, marks=pytest.mark.fuzz)])
def test_every_kind_of_damage_is_found_and_repaired_bit_for_bit(
    tmp_path: Path, replicas: bool
) -> None:
    held = made(tmp_path, replicas=replicas)
    node = tmp_path / "node-1"
    folder, right = node / f"step-{STEP}", digests(tmp_path)
    for path in sorted(set(folder.iterdir()) - set(folder.glob("rank-3.*"))):
        size = path.stat().st_size
        flips = [partial(flip, path, at) for at in (0, 2 * size // 3)]
        for damage in (*flips, partial(halve, path), path.unlink, partial(lengthen, path)):
            damage()
            assert files(tmp_path) != held
            (one,) = found(tmp_path)
            kind = "parity" if path.name == "parity.json" else path.name
            assert (one.where, one.step) == (f"{folder}/{kind}", STEP)
            assert one.verdict == "repaired", one
            assert files(tmp_path) == held
    for gone in (folder, node):
        shutil.rmtree(gone)
        assert digests(tmp_path) != right
        assert verdicts(tmp_path) == ["repaired"] * 2  # all of its files, and its parity
        assert files(tmp_path) == held
        assert digests(tmp_path) == right


def test_what_is_repaired_is_what_a_restore_loads(tmp_path: Path) -> None:
    made(tmp_path)
    right, path = digests(tmp_path), tmp_path / "node-2" / f"step-{STEP}" / "rank-4.safetensors"
    aged = path.parent.joinpath("checkpoint.json").stat().st_mtime_ns
    flip(path, path.stat().st_size - 5)
    assert digests(tmp_path) == [*right[:4], "", right[5]]
    assert [each.source for each in found(tmp_path)] == ["parity"]
    assert digests(tmp_path) == right
    assert path.stat().st_mtime_ns == aged  # by which a restore tells older runs apart


def test_files_of_another_step_are_not_replaced_by_those_of_an_old_parity(tmp_path: Path) -> None:
    made(tmp_path)
    folder, other = (tmp_path / f"node-{node}" / f"step-{STEP}" for node in (0, 1))
    for path, another in zip(folder.glob("*.manifest"), other.glob("*.manifest"), strict=True):
        path.write_bytes(another.read_bytes())
    flip(folder / "checkpoint.json", 5)
    before = files(tmp_path)
    assert set(verdicts(tmp_path)) == {"beyond repair"}
    assert files(tmp_path) == before


def test_two_damaged_members_are_beyond_repair_and_nothing_is_overwritten(tmp_path: Path) -> None:
    held = made(tmp_path)
    for path in tmp_path.glob("node-[01]/step-*/*"):
        path.write_bytes(bytes(path.stat().st_size))
    damaged = files(tmp_path)
    assert verdicts(tmp_path) == ["beyond repair"] * 2 * (1 + 2 * LOCAL)
    assert files(tmp_path) == damaged
    for node in (0, 1):
        shutil.rmtree(tmp_path / f"node-{node}")
    left = files(tmp_path)
    assert verdicts(tmp_path) == ["beyond repair"] * 2
    assert files(tmp_path) == left
    # Damage that no stripe has in common is two times one.
    again = made(tmp_path / "again")
    flip(tmp_path / "again" / "node-0" / f"step-{STEP}" / "checkpoint.json", 5)
    path = tmp_path / "again" / "node-1" / f"step-{STEP}" / "rank-3.safetensors"
    flip(path, path.stat().st_size - 1)
    assert verdicts(tmp_path / "again") == ["repaired"] * 2
    assert files(tmp_path / "again") == again
    assert held.keys() == again.keys()


def test_without_parity_replicas_or_another_copy_help(tmp_path: Path) -> None:
    for name, replicas in (("shards", False), ("replicas", True)):
        for node in range(NODES):
            persist(tmp_path / name, node, STEP, replicas=replicas)
        before = files(tmp_path / name)
        path = tmp_path / name / "node-1" / f"step-{STEP}" / "rank-2.safetensors"
        shutil.copytree(tmp_path / name, tmp_path / f"copy of {name}")
        flip(path, path.stat().st_size - 1)
        cut = files(tmp_path / name)
        if not replicas:
            assert verdicts(tmp_path / name) == ["beyond repair"]
            assert files(tmp_path / name) == cut
        copies = () if replicas else (tmp_path / "copy of shards",)
        (one,) = found(tmp_path / name, copies=copies)
        assert (one.verdict, "node-" in one.source) == ("repaired", True)
        assert before.items() <= files(tmp_path / name).items()
        assert found(tmp_path / name) == []


def test_a_copy_says_what_a_damaged_checkpoint_held_unless_it_is_of_another_run(
    tmp_path: Path,
) -> None:
    alone = tmp_path / "alone"
    persist(alone, 0, STEP)
    held, folder = files(alone), alone / "node-0" / f"step-{STEP}"
    shutil.copytree(alone, tmp_path / "copy")
    persist(tmp_path / "other", 1, STEP)
    (tmp_path / "other" / "node-1").rename(tmp_path / "other" / "node-0")
    for name in ("checkpoint.json", "rank-0.manifest"):
        flip(folder / name, 9)
        for copies in ((), (tmp_path / "other",)):
            damaged = files(alone)
            assert "beyond repair" in verdicts(alone, copies=copies)
            assert files(alone) == damaged
        assert "repaired" in verdicts(alone, copies=(tmp_path / "copy",))
        assert files(alone) == held


def test_a_dry_run_writes_nothing_and_says_what_it_would_do(tmp_path: Path) -> None:
    held = made(tmp_path)
    shutil.rmtree(tmp_path / "node-1")
    left = files(tmp_path)
    assert verdicts(tmp_path, repair=False) == ["repairable"]
    assert files(tmp_path) == left
    assert not (tmp_path / "node-1").exists()
    assert "repaired" in verdicts(tmp_path)
    assert files(tmp_path) == held


def test_drafts_that_a_killed_scrub_has_left_are_removed(tmp_path: Path) -> None:
    made(tmp_path)
    left = tmp_path / "node-1" / ".scrub-killed" / "step"
    left.mkdir(parents=True)
    (left / "parity").write_bytes(b"half")
    assert found(tmp_path, repair=False) == []
    assert left.exists()
    assert found(tmp_path) == []
    assert not left.parent.exists()


def test_another_step_in_a_folder_with_the_same_number_is_left_alone(tmp_path: Path) -> None:
    """A file system gives the numbers of folders again: only the time tells them apart."""
    made(tmp_path)
    at, draft = Checkpoints(tmp_path / "node-1"), tmp_path / "draft"
    shutil.copytree(at.path(STEP), draft)
    seen = at.inode(STEP)
    os.utime(at.path(STEP) / "checkpoint.json", (2e9, 2e9))
    before = files(tmp_path)
    assert not at.mend(STEP, draft, seen)
    assert files(tmp_path) == before
    assert at.mend(STEP, draft, at.inode(STEP))


@pytest.mark.parametrize("event", ["went back", "retired", "began anew"])
@pytest.mark.parametrize("damage", ["a file", "a folder"])
def test_what_the_run_removes_meanwhile_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, event: str, damage: str
) -> None:
    made(tmp_path, steps=(STEP, STEP + 1))
    newer = tmp_path / "node-1" / f"step-{STEP + 1}"
    shutil.rmtree(newer) if damage == "a folder" else flip(newer / "rank-2.manifest", 3)
    placed = Scrub._placed

    def late(self: Scrub, *about: Any) -> bool:
        at = Checkpoints(tmp_path / "node-1")
        if event == "went back":
            at.go_back(STEP)
        elif event == "began anew":
            at.set_aside()
        else:
            for node in (0, 1):
                shutil.rmtree(tmp_path / f"node-{node}" / newer.name, ignore_errors=True)
        return placed(self, *about)

    monkeypatch.setattr(Scrub, "_placed", late)
    assert {*verdicts(tmp_path)} == {"removed meanwhile"}
    assert not newer.exists()
    assert not list(tmp_path.glob("node-*/.scrub-*"))


def test_a_scrub_beside_persisters_does_no_harm(tmp_path: Path) -> None:
    made(tmp_path)
    steps = range(STEP + 1, STEP + 8)

    def write() -> None:
        for step in steps:
            for node in range(NODES):
                persist(tmp_path, node, step, keep=2)

    writer, seen = Thread(target=write), list[Finding]()
    writer.start()
    while writer.is_alive():
        seen += found(tmp_path)
    writer.join()
    assert {each.verdict for each in seen} <= {"incomplete", "removed meanwhile"}
    assert found(tmp_path) == []
    for node in range(NODES):
        at = Checkpoints(tmp_path / f"node-{node}")
        assert at.steps() == list(steps[-2:])
        assert [persist_format.damage_of(at.path(step)) for step in at.steps()] == ["", ""]
    assert not list(tmp_path.glob("node-*/.[ws]*"))


def test_another_step_in_the_place_of_one_with_parity_is_left_alone(tmp_path: Path) -> None:
    made(tmp_path)
    shutil.rmtree(tmp_path / "node-1")
    persist(tmp_path, 1, STEP, replicas=True)
    held = files(tmp_path)
    (one,) = found(tmp_path)
    assert (one.verdict, "node-1 has another step" in one.problem) == ("beyond repair", True)
    assert files(tmp_path) == held


def test_the_limit_on_what_is_read_in_a_second_holds_and_one_scrub_runs_at_a_time(
    tmp_path: Path,
) -> None:
    made(tmp_path)
    read, begun_s = list[int](), time.monotonic()
    limited = Scrub(tmp_path, now_s=0.0, bytes_s=4 * 10**5, progress=read.append)
    runs = limited.run()
    assert list(runs) == []
    assert time.monotonic() - begun_s >= limited.nbytes / (4 * 10**5) > 0.1
    assert read == sorted(read)
    assert read[-1] == limited.nbytes
    flip(tmp_path / "node-0" / f"step-{STEP}" / "checkpoint.json", 5)
    busy = Scrub(tmp_path, now_s=0.0).run()
    next(busy)
    with pytest.raises(ConfigError, match="another scrub is at work"):
        found(tmp_path)
    with pytest.raises(ConfigError, match="no checkpoint is in"):
        Scrub(tmp_path / "nothing", now_s=0.0)


def test_the_command_line_says_what_it_found_and_what_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, told = tmp_path / "disk", tmp_path / "found.json"
    held = made(place)

    def call(*words: object) -> tuple[int, list[dict[str, Any]]]:
        words = ("--persist-dir", place, "--run-dir", tmp_path / "none", "--json", told, *words)
        code = main(["snapshots", "scrub", *map(str, words)])
        rows: list[dict[str, Any]] = json.loads(told.read_text())["found"]
        return code, rows

    assert call() == (0, [])
    assert "1 steps, " in capsys.readouterr().out
    path = place / "node-1" / f"step-{STEP}" / "rank-3.manifest"
    flip(path, 30)
    for words, code, verdict in ((("--no-repair",), 1, "repairable"), ((), 0, "repaired")):
        assert files(place) != held
        ended, (row,) = call("--max-mb-s", 100, *words)
        assert (ended, row["where"], row["verdict"]) == (code, str(path), verdict)
        assert verdict in capsys.readouterr().out
    assert files(place) == held
    written(place, STEP + 1, STEP + 2, nodes=(0, 1))
    written(place, STEP + 2, nodes=(2,))
    code, (row,) = call()
    assert (code, row["step"], row["verdict"]) == (1, STEP + 1, "beyond repair")
    for node in (0, 2):
        shutil.rmtree(place / f"node-{node}")
    code, rows = call("--persist-dir", place / "node-1")
    assert (code, {row["verdict"] for row in rows if row["step"] == STEP}) == (1, {"beyond repair"})
