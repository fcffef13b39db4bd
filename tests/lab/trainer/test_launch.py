"""Real runs: killed, interrupted and resumed, they end with the weights of a calm run."""

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from process_server import Server, descendants
from snapshot_waits import until

from holdfast import config, events
from holdfast.errors import ConfigError
from holdfast.inject import Fault
from holdfast.report.run_files import FATAL_NAME, METRICS_NAME, SCHEDULE_NAME, SETTINGS_NAME
from holdfast.snapshot.client.snapshots import Snapshots
from holdfast.snapshot.node.launch import smp_status, stop_smp
from holdfast_lab.trainer import agent, rundir
from holdfast_lab.trainer.agent import RunFailed
from holdfast_lab.trainer.follower import Follower
from holdfast_lab.trainer.gpt import GPTConfig
from holdfast_lab.trainer.launch import RunResult, train
from holdfast_lab.trainer.rundir import claimed
from holdfast_lab.trainer.settings import Settings
from holdfast_lab.trainer.storm import outcomes
from holdfast_lab.trainer.worker import CHECKPOINTS_NAME, result_path

STEPS, LONG_STEPS = 6, 120
MODEL = GPTConfig(layers=1, heads=2, width=16, context=16)
PATIENCE_S = 45.0

pytestmark = pytest.mark.usefixtures("forked_python")


@pytest.fixture(autouse=True)
def _bounded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(config.TIMEOUT_VARIABLE, "20")
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    assert {number: signal.getsignal(number) for number in before} == before


def _settings(text: Path, mode: str = "guarded", **changes: Any) -> Settings:
    fields = {"steps": STEPS, "batch_size": 2, "warmup_steps": 1, "data": str(text)} | changes
    return Settings(mode=mode, model=MODEL, **fields)


@pytest.fixture(scope="module")
def calm(text: Path, tmp_path_factory: Any, python_server: Server) -> RunResult:
    with python_server.client.forking():
        return train(tmp_path_factory.mktemp("calm") / "run", _settings(text, "bare"))


@pytest.fixture(scope="module")
def long_calm(text: Path, tmp_path_factory: Any, python_server: Server) -> RunResult:
    settings = _settings(text, "bare", steps=LONG_STEPS)
    with python_server.client.forking():
        return train(tmp_path_factory.mktemp("long") / "run", settings)


def _kill(step: int, rank: int, identifier: int, op: str = "") -> Fault:
    return Fault(step, rank, "kill_trainer", op=op, identifier=identifier)


def _steps_reported(run_dir: Path) -> int:
    metrics = run_dir / METRICS_NAME
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [pytest.param((0, 1), marks=pytest.mark.representative), (1,)])
def test_a_killed_run_ends_as_the_calm_one(
    calm: RunResult, text: Path, run_dir: Path, ranks: tuple[int, ...]
) -> None:
    kills = [_kill(3, rank, n, "head/mm/grad_b") for n, rank in enumerate(ranks)]
    result = train(run_dir, _settings(text), kills)
    assert result.digests == calm.digests
    assert list(result.losses) == list(range(1, STEPS + 1))
    assert result.losses == calm.losses
    answered = {(outcome.rank, outcome.seen_by) for outcome in outcomes(result.events)}
    assert answered == {(rank, "torchrun") for rank in ranks}
    restored = [event for event in result.events if event.kind == "restored"]
    assert {event.detail["step"] for event in restored} <= {2, 3}
    assert smp_status(run_dir) is None
    assert descendants("holdfast_lab.trainer.worker", str(run_dir)) == []


@pytest.mark.processes
def test_an_unprotected_inf_ruins_the_weights(calm: RunResult, text: Path, run_dir: Path) -> None:
    fault = Fault(2, 1, "inf", op="blocks.0.attn.qkv/addmm/forward")
    result = train(run_dir, _settings(text, "unprotected"), [fault])
    assert result.digests != calm.digests
    assert [rank["finite"] for rank in result.ranks] == [False, False]
    assert [outcome.seen_by for outcome in outcomes(result.events)] == ["not seen"]


@pytest.mark.processes
def test_ranks_that_fail_for_good_are_reported_with_their_log(
    text: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "SPARE_RESTARTS", -1)
    with pytest.raises(RunFailed, match=r"rank 1 failed \(exit code -9\): .*logs are in /") as at:
        train(run_dir, _settings(text), [_kill(2, 1, 0)])
    assert "\n" not in str(at.value)
    assert str(run_dir / "logs") in str(at.value)
    assert descendants("holdfast_lab.trainer.worker", str(run_dir)) == []


@pytest.mark.processes
def test_what_no_restart_can_mend_is_a_configuration_error(text: Path, run_dir: Path) -> None:
    run_dir.mkdir()
    (run_dir / FATAL_NAME).write_text("of an earlier attempt")
    fault = Fault(1, 0, "inf", op="head/mm/forward", index=(9999, 0))
    with pytest.raises(ConfigError, match=r"fault 1: index \[9999, 0\] is outside the output"):
        train(run_dir, _settings(text, "unprotected"), [fault])
    assert descendants("holdfast_lab.trainer.worker", str(run_dir)) == []


def _command(run_dir: Path, text: Path, *more: str) -> list[str]:
    sizes = {"layers": 1, "heads": 2, "width": 16, "context": 16, "batch-size": 2}
    sizes |= {"steps": LONG_STEPS, "warmup-steps": 1}
    options = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "holdfast.cli.main", "train", "--run-dir", str(run_dir)]
    return [*command, "--data", str(text), *options, *more]


def _interrupted(command: list[str], run_dir: Path, number: int) -> tuple[int, str]:
    """Start a run, send the launcher a signal in mid-run; its exit code and stderr."""
    before = _steps_reported(run_dir)
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as launcher:
        try:
            until(lambda: _steps_reported(run_dir) > before + 5, "no step was made")
            os.kill(launcher.pid, number)
            error = launcher.communicate(timeout=PATIENCE_S)[1]
        finally:
            launcher.kill()
    until(lambda: not descendants("holdfast_lab.trainer.worker", str(run_dir)), "the ranks live on")
    return launcher.returncode, error


@pytest.mark.representative
@pytest.mark.processes
def test_an_interrupted_run_leaves_its_snapshots_and_is_resumed_bit_for_bit(
    long_calm: RunResult, text: Path, run_dir: Path
) -> None:
    code, error = _interrupted(_command(run_dir, text), run_dir, signal.SIGTERM)
    assert code == 130, error
    assert error.splitlines()[-1] == "holdfast train: interrupted"
    assert "Traceback" not in error
    held = smp_status(run_dir)
    assert held is not None
    assert held["newest"] is not None
    code, _ = _interrupted(_command(run_dir, text, "--resume"), run_dir, signal.SIGKILL)
    assert code == -signal.SIGKILL
    done = subprocess.run(
        _command(run_dir, text, "--resume"), capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    ranks = [json.loads(result_path(run_dir, rank).read_text()) for rank in range(2)]
    digests = [(rank["model"], rank["optimizer"], rank["scheduler"]) for rank in ranks]
    assert digests == long_calm.digests
    restored = [e for _, e in events.read_ledger(run_dir / events.LEDGER_NAME, kind="restored")]
    assert [event.rank for event in restored if event.detail["step"] > 0].count(0) == 2
    assert smp_status(run_dir) is None


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


@pytest.mark.processes
def test_a_run_whose_memory_is_lost_goes_on_from_its_last_checkpoint(
    long_calm: RunResult, text: Path, run_dir: Path
) -> None:
    persisting = "--persist-every", "20"
    code, error = _interrupted(_command(run_dir, text, *persisting), run_dir, signal.SIGTERM)
    assert code == 130, error
    # The SMP sees all ranks go, and has the newest step persisted.
    folder = run_dir / CHECKPOINTS_NAME
    # Of the six steps that were reported the last one's snapshot may have been in flight.
    until(lambda: any(_step_of(path) >= 5 for path in folder.glob("step-*")), "no checkpoint")
    stop_smp(run_dir)
    done = subprocess.run(
        _command(run_dir, text, "--resume", *persisting),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    ranks = [json.loads(result_path(run_dir, rank).read_text()) for rank in range(2)]
    assert [(r["model"], r["optimizer"], r["scheduler"]) for r in ranks] == long_calm.digests
    restored = [e for _, e in events.read_ledger(run_dir / events.LEDGER_NAME, kind="restored")]
    assert {e.detail["source"] for e in restored} == {"disk"}
    assert all(e.detail["step"] >= 5 for e in restored)


def _claim(run_dir: Path, settings: Settings, *faults: Fault, resume: bool = False) -> list[Fault]:
    with claimed(run_dir, settings, faults, resume=resume) as schedule:
        return schedule


def _refused(run_dir: Path, settings: Settings, *faults: Fault, resume: bool = False) -> str:
    with pytest.raises(ConfigError) as caught:
        _claim(run_dir, settings, *faults, resume=resume)
    assert "\n" not in str(caught.value)
    assert str(run_dir) in str(caught.value)
    return str(caught.value)


def test_two_runs_at_once_are_refused(text: Path, run_dir: Path) -> None:
    settings = _settings(text)
    with claimed(run_dir, settings, [], resume=False):
        for resume in (False, True):
            assert "another run is using" in _refused(run_dir, settings, resume=resume)
    assert "already holds a run: give another" in _refused(run_dir, settings)


def test_nothing_is_resumed_where_nothing_was_begun(text: Path, run_dir: Path) -> None:
    assert "holds no run to resume: start it" in _refused(run_dir, _settings(text), resume=True)
    assert _claim(run_dir, _settings(text)) == []


@pytest.fixture
def begun(text: Path, run_dir: Path) -> Iterator[Path]:
    """An interrupted guarded run of one rank, with its SMP."""
    _claim(run_dir, _settings(text, ranks=1), _kill(2, 0, 0))
    model = torch.nn.Linear(2, 2)
    snapshots = Snapshots(model, torch.optim.SGD(model.parameters()), run_dir=run_dir)
    snapshots.begin(0)
    snapshots.wait_committed()
    snapshots.close(finished=False)
    yield run_dir
    stop_smp(run_dir)


def test_a_run_is_resumed_with_its_own_schedule(text: Path, begun: Path) -> None:
    settings = _settings(text, ranks=1)
    kill = [_kill(2, 0, 0)]
    assert _claim(begun, settings, resume=True) == kill
    assert _claim(begun, settings, *kill, resume=True) == kill
    other = _refused(begun, settings, _kill(3, 0, 0), resume=True)
    assert "another schedule: resume without --schedule" in other


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 4}, "seed = 0 and not 4"),
        ({"ranks": 2}, "ranks = 1 and not 2"),
        ({"model": replace(MODEL, width=32)}, "'width': 16"),
    ],
)
def test_a_run_is_not_resumed_with_other_settings(
    text: Path, begun: Path, changes: dict[str, Any], words: str
) -> None:
    settings = replace(_settings(text, ranks=1), **changes)
    message = _refused(begun, settings, resume=True)
    assert "other settings" in message
    assert words in message


def test_a_finished_run_is_not_resumed(text: Path, begun: Path) -> None:
    result_path(begun, 0).write_text("{}")
    assert "is finished" in _refused(begun, _settings(text, ranks=1), resume=True)


def test_a_run_of_which_one_rank_finished_is_resumed(text: Path, begun: Path) -> None:
    _settings(text).save(begun)
    result_path(begun, 0).write_text("{}")
    assert _claim(begun, _settings(text), resume=True) == [_kill(2, 0, 0)]


def test_a_run_whose_snapshots_are_gone_is_not_begun_again_in_silence(
    text: Path, begun: Path
) -> None:
    stop_smp(begun)
    message = _refused(begun, _settings(text, ranks=1), resume=True)
    assert "no snapshots of the guarded run" in message


def test_a_run_without_snapshots_is_not_resumed(text: Path, run_dir: Path) -> None:
    _claim(run_dir, _settings(text, "bare"))
    message = _refused(run_dir, _settings(text, "bare"), resume=True)
    assert "no snapshots of the bare run" in message


def test_an_smp_of_another_world_is_not_taken_over(text: Path, begun: Path) -> None:
    (begun / SETTINGS_NAME).unlink()
    for name in (SCHEDULE_NAME, events.LEDGER_NAME):
        (begun / name).unlink()
    message = _refused(begun, _settings(text))
    assert "with snapshots of 1 ranks serves" in message
    stop_smp(begun)
    assert _claim(begun, _settings(text)) == []


@pytest.mark.parametrize("name", [SCHEDULE_NAME, events.LEDGER_NAME, METRICS_NAME])
def test_files_of_something_else_are_neither_used_nor_overwritten(
    text: Path, run_dir: Path, name: str
) -> None:
    run_dir.mkdir()
    (run_dir / name).write_text("precious")
    assert f"holds {name} of something else" in _refused(run_dir, _settings(text))
    assert (run_dir / name).read_text() == "precious"


def test_a_directory_that_cannot_be_made_is_named(text: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    message = _refused(tmp_path / "file" / "run", _settings(text))
    assert message.endswith("Not a directory; give another --run-dir")


def _write_fails(run_dir: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> str:
    original = Path.write_text

    def full(path: Path, text: str) -> int:
        if path.name.startswith(SETTINGS_NAME):
            path.touch()
            raise OSError(28, "No space left on device")
        return original(path, text)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        return _refused(run_dir, settings, _kill(2, 0, 0))


def test_a_half_written_run_is_cleared_and_the_directory_can_be_used(
    text: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = _write_fails(run_dir, _settings(text), monkeypatch)
    assert "No space left on device; give another --run-dir" in message
    assert [path.name for path in run_dir.iterdir()] == [rundir.LOCK_NAME]
    assert _claim(run_dir, _settings(text)) == []


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    yield disk
    gc.collect()  # an exception's traceback may still hold an open file
    subprocess.run(["umount", str(disk)], check=True, timeout=20)


@pytest.mark.parametrize("reserve_bytes", [rundir.RESERVE_BYTES, -(2**40)])
def test_a_full_disk_is_an_error_and_leaves_no_run(
    text: Path, tiny_disk: Path, reserve_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rundir, "RESERVE_BYTES", reserve_bytes)
    (tiny_disk / "filler").write_bytes(bytes(2**18 - 3 * 4096))
    run_dir = tiny_disk / "run"
    message = _refused(run_dir, _settings(text))
    assert any(words in message for words in ("bytes of disk left", "full", "No space left"))
    assert [path.name for path in run_dir.iterdir()] == [rundir.LOCK_NAME]
    subprocess.run(["mount", "-o", "remount,size=32m", str(tiny_disk)], check=True, timeout=20)
    assert _claim(run_dir, _settings(text)) == []


def test_the_follower_gives_on_what_went_wrong_in_it(text: Path, run_dir: Path) -> None:
    _claim(run_dir, _settings(text))

    def watch(losses: dict[int, float], fresh: list[events.Event]) -> None:
        raise RuntimeError("the terminal is gone")

    with pytest.raises(RuntimeError, match="the terminal is gone"), Follower(run_dir, watch):
        pass
    with pytest.raises(KeyboardInterrupt), Follower(run_dir, watch):
        raise KeyboardInterrupt


def test_the_follower_reads_whole_lines_once(text: Path, run_dir: Path) -> None:
    _claim(run_dir, _settings(text))
    line = {"step": 1, "loss": 2.5, "grad_norm": 1.0, "seconds": 0.1}
    follower = Follower(run_dir, None)
    with (run_dir / METRICS_NAME).open("w") as file:
        file.write(json.dumps(line) + "\n" + json.dumps(line | {"step": 2})[:20])
        file.flush()
        follower.read()
        assert follower.losses == {1: 2.5}
        file.write(json.dumps(line | {"step": 2, "loss": 2.0})[20:] + "\n")
    follower.read()
    follower.read()
    assert follower.losses == {1: 2.5, 2: 2.0}
    assert follower.step_seconds == {1: 0.1, 2: 0.1}
