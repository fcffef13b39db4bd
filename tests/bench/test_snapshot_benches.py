"""The snapshot benches' arithmetic, their gates, and that each goes through at a tiny size."""

import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import rows, snapshot_memory, snapshot_peers, snapshot_ranks
from bench.snapshot_candidates import CANDIDATES, Candidate, CheckFreq, Dcp, DcpStaged, TorchSave
from bench.snapshot_worker import (
    BYTES_A_PARAMETER,
    Measurement,
    Training,
    config_for,
    restored_after_kill,
)
from holdfast_lab.trainer.gpt import GPT

TINY_BYTES = 5 * 10**6
HERE = [TorchSave, CheckFreq, Dcp, DcpStaged]


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own for whatever would be recorded."""
    monkeypatch.setattr(rows, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


@pytest.fixture
def sigterm_restored() -> Any:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def training(one_thread: None) -> Training:
    return Training(TINY_BYTES, tokens=8, seed=0)


@pytest.mark.parametrize("gb", [0.02, 0.5, 2.0, 4.0])
def test_a_state_is_nearly_of_the_size_that_was_asked_for(gb: float) -> None:
    config = config_for(round(gb * 1e9), 128)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in GPT(config).parameters())
    assert BYTES_A_PARAMETER * count == pytest.approx(gb * 1e9, rel=0.05)
    assert config.width <= 1536


def test_a_state_too_small_for_the_smallest_model_is_refused() -> None:
    with pytest.raises(ValueError, match="is least"):
        config_for(1000, 8)


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
@pytest.mark.parametrize("kind", HERE)
def test_each_candidate_gives_back_what_it_saved(
    kind: type[Candidate], training: Training, tmp_path: Path
) -> None:
    candidate = kind(training.model, training.optimizer, tmp_path)
    Measurement(training, candidate, 10).check()
    measurement = Measurement(training, candidate, 20)
    times = measurement.idle()
    assert 0 < times["copy_s"] <= times["safe_s"] <= times["durable_s"]
    row = measurement.slowdown(steps=1, pairs=2)
    assert row["stall_s"] <= row["stall_max_s"]
    assert len(measurement.stalls_s) == 3
    candidate.close()


class Forgetful(TorchSave):
    """Restores nothing, but says that it did."""

    def restore(self) -> bool:
        return True


def test_the_gate_stops_a_candidate_that_restores_something_else(
    training: Training, tmp_path: Path
) -> None:
    candidate = Forgetful(training.model, training.optimizer, tmp_path)
    with pytest.raises(SystemExit, match="not what was saved"):
        Measurement(training, candidate, 1).check()


def test_after_a_kill_another_state_and_none_are_told_apart(
    training: Training, tmp_path: Path
) -> None:
    candidate = TorchSave(training.model, training.optimizer, tmp_path)
    with pytest.raises(SystemExit, match="nothing could be restored"):
        restored_after_kill(training, candidate)
    (tmp_path / "saved.digest").write_text(training.digest())
    candidate.begin(1)
    training.step()
    assert restored_after_kill(training, candidate)
    (tmp_path / "saved.digest").write_text("another")
    with pytest.raises(SystemExit, match="another state"):
        restored_after_kill(training, candidate)


def test_speeds_and_shares_follow_from_times() -> None:
    figures = {
        "state_bytes": 4 * 10**9,
        "memcpy_s": 0.5,
        "copy_s": 1.0,
        "safe_s": 2.0,
        "durable_s": 4.0,
        "ratio": 1.03,
        "held_bytes": 8 * 10**9,
        "on_disk": True,
    }
    found = snapshot_peers.derived(figures)
    assert found["memcpy_gb_s"] == 8.0
    assert found["copy_gb_s"] == 4.0
    assert found["save_gb_s"] == 2.0
    assert found["disk_gb_s"] == 1.0
    assert found["of_memcpy"] == 0.5
    assert found["slowdown"] == 0.03
    assert found["held_copies"] == 2.0
    assert "disk_gb_s" not in snapshot_peers.derived(figures | {"on_disk": False})


def test_holdfast_is_compared_with_each_peer_of_its_size() -> None:
    base = {"gb": 1, "stall_s": 0.01, "copy_s": 0.1, "save_gb_s": 5.0, "on_disk": False}
    peer = {"gb": 1, "stall_s": 0.1, "copy_s": 0.2, "save_gb_s": 0.5, "disk_gb_s": 0.25}
    rows = [
        base | {"candidate": "holdfast"},
        peer | {"candidate": "torchsnapshot", "on_disk": True},
        {"gb": 1, "candidate": "checkfreq", "not_measured": "no room"},
        peer | {"gb": 2, "candidate": "torch.save", "on_disk": True},
    ]
    (line,) = snapshot_peers.comparisons(rows)
    assert "stall 0.100×" in line
    assert "saving speed 10.00× (20.00× until synced); the paper has 14.11×" in line
    assert snapshot_peers.failures(rows) == ["1 GB, checkfreq: no room"]


def test_what_does_not_fit_and_what_is_not_installed_are_reasons() -> None:
    args = snapshot_peers.parse([])
    with pytest.raises(snapshot_peers.Failed, match="does not fit: 2334333333333 bytes"):
        snapshot_peers.measured("torch.save", 10**12, args, None)
    missing: Any = SimpleNamespace(package="no-such-package-at-all")
    with pytest.raises(snapshot_peers.Failed, match="give --peers-venv"):
        snapshot_peers.python_for(missing, None)
    peers = snapshot_peers.Peers("/other/python", {"torchsnapshot": "no such version"})
    assert snapshot_peers.python_for(CANDIDATES["lm-resiliency"], peers) == "/other/python"
    with pytest.raises(snapshot_peers.Failed, match="no such version"):
        snapshot_peers.python_for(CANDIDATES["torchsnapshot"], peers)
    assert snapshot_peers.python_for(TorchSave, peers) == sys.executable


def test_the_newest_version_that_can_be_installed_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = {"new": ["2", "1"], "old": ["2", "1"], "gone": ["2", "1"]}
    monkeypatch.setattr(snapshot_peers, "PACKAGES", packages)
    there = {"new==2", "new==1", "old==1"}
    monkeypatch.setattr(
        snapshot_peers, "_installed", lambda python, name: "" if name in there else f"no {name}"
    )
    peers = snapshot_peers.prepare_peers(tmp_path)
    assert (peers.missing, peers.older) == ({"gone": "no gone==1"}, {"old": "no old==2"})


def test_what_saves_nothing_in_a_step_is_told_and_no_failure(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sigterm_restored: None
) -> None:
    monkeypatch.setattr(snapshot_peers, "filesystem_of", lambda folder: "ext4")
    words = ["--gb", "1", "--candidates", "torchft", "--json", "--dir", str(tmp_path)]
    assert snapshot_peers.main(words) == 0
    row = json.loads((results / "snapshot_peers.jsonl").read_text())
    assert "saves nothing in a step" in row["not_comparable"]
    assert snapshot_peers.failures([row]) == [f"1 GB, torchft: {row['not_comparable']}"]


@pytest.mark.parametrize(
    ("before", "restored", "after", "passes"),
    [
        ("other", 3, "saved", True),
        ("saved", 3, "saved", False),
        ("other", 2, "saved", False),
        ("other", None, "other", False),
        ("other", 3, "another", False),
    ],
)
def test_ranks_are_timed_only_if_they_restored_what_differed_bit_for_bit(
    tmp_path: Path, before: str, restored: int | None, after: str, passes: bool
) -> None:
    (tmp_path / "digest-0").write_text("saved")
    digests = iter([before, after])
    rank: Any = SimpleNamespace(
        training=SimpleNamespace(digest=lambda: next(digests)),
        snapshots=SimpleNamespace(restore=lambda: restored),
    )
    if passes:
        snapshot_ranks.check(rank, tmp_path)
    else:
        with pytest.raises(SystemExit, match="not bit for bit"):
            snapshot_ranks.check(rank, tmp_path)


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_two_ranks_restore_in_their_second_life_and_are_timed(
    results: Path, sigterm_restored: None, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of each of two lives, so that the bench says where its ranks wait before this test is ended.
    monkeypatch.setattr(snapshot_ranks, "LIMIT_S", 100.0)
    words = ["--modes", mode, "--mb", "5", "--tokens", "8", "--steps", "1", "--pairs", "2"]
    snapshot_ranks.main(words)
    row = json.loads((results / "snapshot_ranks.jsonl").read_text())
    assert row["commits"] == row["saves"] == 4
    assert row["rank_cpu_s"] + row["smp_cpu_s"] > 0
    assert 0 < row["stall_s"] <= row["stall_max_s"]


@pytest.mark.parametrize(
    ("code", "limit_s", "available_bytes", "said"),
    [
        ("time.sleep(60)", 3.0, 2**60, "not done within 3 s"),
        ("raise SystemExit('no such luck')", 60.0, 2**60, "exit code 1: no such luck"),
        ("time.sleep(60)", 60.0, 0, "of memory left"),
    ],
    ids=["too long", "fails", "no memory"],
)
def test_a_worker_that_does_not_get_through_is_ended_and_says_why(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    limit_s: float,
    available_bytes: int,
    said: str,
) -> None:
    monkeypatch.setattr(snapshot_peers, "available_bytes", lambda: available_bytes)
    command = [sys.executable, "-c", f"import os, time; print(os.getpid(), flush=True); {code}"]
    with pytest.raises(snapshot_peers.Failed, match=said):
        snapshot_peers.run_worker(command, tmp_path / "log", limit_s, 0)
    if pid := (tmp_path / "log").read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid[0]), 0)


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_the_bench_goes_through_and_holdfast_outlives_its_trainer(
    tmp_path: Path, results: Path, sigterm_restored: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_peers, "filesystem_of", lambda folder: "ext4")
    words = "--gb 0.005 --candidates holdfast --tokens 8 --steps 1 --pairs 2 --json"
    assert snapshot_peers.main([*words.split(), "--dir", str(tmp_path)]) == 0
    (line,) = (results / "snapshot_peers.jsonl").read_text().splitlines()
    row = json.loads(line)
    assert row["survives_sigkill"] is True
    assert row["held_copies"] > 2
    assert not list(tmp_path.glob("snapshot-peers-*"))


def test_a_folder_in_memory_is_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_peers, "filesystem_of", lambda folder: "tmpfs")
    with pytest.raises(SystemExit, match="is in memory"):
        snapshot_peers.main([])


def test_a_slope_is_found_and_noise_is_none() -> None:
    steps = [float(step) for step in range(90)]
    noise = torch.randn(90, generator=torch.Generator().manual_seed(0)).tolist()
    rate, half = snapshot_memory.slope(steps, noise)
    assert abs(rate) <= half
    rate, half = snapshot_memory.slope(
        steps, [5 * s + n for s, n in zip(steps, noise, strict=True)]
    )
    assert rate - half > 0
    assert rate == pytest.approx(5, abs=2 * half)
    with pytest.raises(ValueError, match="at least 18"):
        snapshot_memory.slope(steps[:10], noise[:10])


def test_what_was_taken_before_the_fit_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_memory, "EVERY", 1)
    fit = snapshot_memory.fitted([0.0, 50.0, *[100.0 + 7 * step for step in range(18)]], warm=2)
    assert fit["warm_up_bytes"] == 100
    assert fit["bytes_a_save"] == 7.0


def test_what_is_left_over_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_memory, "GRACE_S", 0.0)
    before = snapshot_memory.present(tmp_path)
    assert snapshot_memory.left_over(before, tmp_path) == {}
    with open(tmp_path / "open", "w"):
        assert list(snapshot_memory.left_over(before, tmp_path)) == ["descriptors"]


@pytest.mark.processes
def test_a_short_run_leaves_nothing(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_memory, "EVERY", 1)
    snapshot_memory.main(["--saves", "20", "--warm", "5", "--mb", "5"])
    row = json.loads((results / "snapshot_memory.jsonl").read_text())
    assert row["left"] == {}
    assert row["commits"] == 25
    assert row["slot_bytes"] >= 2 * row["state_bytes"]
    assert row["smp"]["bytes"] > 10**6
