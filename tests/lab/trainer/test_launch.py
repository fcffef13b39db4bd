"""Real runs: killed, interrupted and resumed, they end with the weights of a calm run."""

import gc
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from process_server import descendants
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
from holdfast_lab.trainer.launch import RunResult, train
from holdfast_lab.trainer.rundir import claimed
from holdfast_lab.trainer.settings import Settings
from holdfast_lab.trainer.storm import outcomes
from holdfast_lab.trainer.worker import CHECKPOINTS_NAME, result_path

STEPS, LONG_STEPS = 6, 120
PATIENCE_S = 45.0
Make = Callable[..., Settings]
Calm = Callable[..., RunResult]
Command = Callable[..., list[str]]

pytestmark = pytest.mark.usefixtures("forked_python")


@pytest.fixture(autouse=True)
def _bounded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(config.TIMEOUT_VARIABLE, "20")
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    assert {number: signal.getsignal(number) for number in before} == before


def _kill(step: int, rank: int, identifier: int, op: str = "") -> Fault:
    return Fault(step, rank, "kill_trainer", op=op, identifier=identifier)


@pytest.mark.processes
def test_faults_that_queued_checks_find_are_repeated_away(
    calm: Calm, settings: Make, run_dir: Path
) -> None:
    ops = ("blocks.0.mlp.up/addmm/forward", "blocks.0.attn/bmm/grad_a", "head/mm/grad_b")
    faults = [
        Fault(step, step % 2, "bitflip", op=op, bit=30, identifier=step)
        for step, op in enumerate(ops, 1)
    ]
    faults.append(Fault(5, 0, "bitflip", op=ops[0], site="operand", bit=30, identifier=4))
    result = train(run_dir, settings(queued_checks=True), faults)
    assert result.digests == calm().digests
    answered = [(each.op, each.seen_by, each.rung) for each in outcomes(result.events)]
    assert answered[:-1] == [(op, "checksum", "recompute") for op in ops]
    # The last fault damages a weight, perhaps before it is copied: then only an older snapshot has
    # the right bits.
    mended = [e for e in result.events if e.kind == "state_fault" and e.rung == "correct"]
    assert answered[-1:] == [(ops[0], "checksum", "recompute" if mended else "rollback")]


def _steps_reported(run_dir: Path) -> int:
    metrics = run_dir / METRICS_NAME
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [pytest.param((0, 1), marks=pytest.mark.representative), (1,)])
def test_a_killed_run_ends_as_the_calm_one(
    calm: Calm, settings: Make, run_dir: Path, ranks: tuple[int, ...]
) -> None:
    kills = [_kill(3, rank, n, "head/mm/grad_b") for n, rank in enumerate(ranks)]
    result = train(run_dir, settings(), kills)
    assert result.digests == calm().digests
    assert list(result.losses) == list(range(1, STEPS + 1))
    assert result.losses == calm().losses
    answered = {(outcome.rank, outcome.seen_by) for outcome in outcomes(result.events)}
    assert answered == {(rank, "torchrun") for rank in ranks}
    restored = [event for event in result.events if event.kind == "restored"]
    assert {event.detail["step"] for event in restored} <= {2, 3}
    assert smp_status(run_dir) is None
    assert descendants("holdfast_lab.trainer.worker", str(run_dir)) == []


@pytest.mark.processes
def test_an_unprotected_inf_ruins_the_weights(calm: Calm, settings: Make, run_dir: Path) -> None:
    fault = Fault(2, 1, "inf", op="blocks.0.attn.qkv/addmm/forward")
    result = train(run_dir, settings("unprotected"), [fault])
    assert result.digests != calm().digests
    assert [rank["finite"] for rank in result.ranks] == [False, False]
    assert [outcome.seen_by for outcome in outcomes(result.events)] == ["not seen"]


@pytest.mark.processes
def test_state_that_changes_at_rest_on_one_rank_is_repaired_or_found_by_the_other_rank(
    calm: Calm, settings: Make, run_dir: Path
) -> None:
    flips = [
        Fault(3, 1, "bitflip", "rest", "model.blocks.0.mlp.up.weight", 31),
        Fault(4, 0, "bitflip", "rest", "optimizer.state.2.exp_avg_sq", 24, identifier=1),
    ]
    checked = train(run_dir / "checked", settings(), flips)
    assert checked.digests == calm().digests
    found = [(one.op, one.seen_by, one.rung) for one in outcomes(checked.events)]
    assert found == [(fault.op, "digest", "correct") for fault in flips]
    repeated = {(e.rank, e.step) for e in checked.events if e.kind == "rerun"}
    assert repeated == {(0, 3), (1, 3)}  # both ranks repeat the pass; a moment needs none
    unchecked = train(run_dir / "unchecked", settings(at_rest=0.0), flips)
    # Snapshots of ranks that divide their state compare them, a step later.
    assert unchecked.digests == calm().digests
    assert "replica_diverged" in {event.kind for event in unchecked.events}


@pytest.mark.processes
@pytest.mark.representative
def test_a_wrong_update_and_a_wrong_copy_of_a_sum_are_found_and_else_go_into_the_weights(
    calm: Calm, settings: Make, run_dir: Path, in_turn: Any
) -> None:
    op = in_turn(settings().model, 0)[0]
    update = Fault(0, 1, "bitflip", "update", op, 20)
    copy = Fault(STEPS - 1, 0, "bitflip", "collective", "all_reduce", 30, identifier=1)
    result = train(run_dir / "guarded", settings(), [update, copy])
    assert result.digests == calm().digests
    answered = [(each.op, each.seen_by, each.rung) for each in outcomes(result.events)]
    assert answered == [(op, "recomputation", "recompute"), ("all_reduce", "notes", "recompute")]
    for fault in (update, copy):
        alone = train(run_dir / fault.site, settings("unprotected"), [fault])
        assert [each.seen_by for each in outcomes(alone.events)] == ["not seen"]
        assert alone.digests != calm().digests


@pytest.mark.processes
def test_ranks_that_fail_for_good_are_reported_with_their_log(
    settings: Make, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "SPARE_RESTARTS", -1)
    with pytest.raises(RunFailed, match=r"rank 1 failed \(exit code -9\): .*logs are in /") as at:
        train(run_dir, settings(), [_kill(2, 1, 0)])
    assert "\n" not in str(at.value)
    assert str(run_dir / "logs") in str(at.value)
    assert descendants("holdfast_lab.trainer.worker", str(run_dir)) == []


@pytest.mark.processes
@pytest.mark.parametrize("nodes", [1, pytest.param(3, marks=pytest.mark.representative)])
def test_what_no_restart_can_mend_is_a_configuration_error(
    settings: Make, run_dir: Path, nodes: int
) -> None:
    run_dir.mkdir()
    (run_dir / FATAL_NAME).write_text("of an earlier attempt")
    fault = Fault(1, 0, "inf", op="head/mm/forward", index=(9999, 0))
    with pytest.raises(ConfigError, match=r"fault 1: index \[9999, 0\] is outside the output"):
        train(run_dir, settings("unprotected", ranks=max(2, nodes), nodes=nodes), [fault])
    assert descendants("holdfast_lab.trainer.worker", str(run_dir)) == []


def _interrupted(command: list[str], run_dir: Path, number: int) -> tuple[int, str]:
    """Start a run, send the launcher a signal in mid-run; its exit code and stderr."""
    before = _steps_reported(run_dir)
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as launcher:
        try:
            until(lambda: _steps_reported(run_dir) > before + 5, "no step was made", PATIENCE_S)
            os.kill(launcher.pid, number)
            error = launcher.communicate(timeout=PATIENCE_S)[1]
        finally:
            launcher.kill()
    until(lambda: not descendants("holdfast_lab.trainer.worker", str(run_dir)), "the ranks live on")
    return launcher.returncode, error


def _finished(command: list[str], run_dir: Path) -> tuple[list[tuple[str, ...]], list[Any]]:
    """Run a command to its end; the final digests of the ranks, and the restores on the way."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads(result_path(run_dir, rank).read_text()) for rank in range(2)]
    digests = [(rank["model"], rank["optimizer"], rank["scheduler"]) for rank in ranks]
    restored = events.read_ledger(run_dir / events.LEDGER_NAME, kind="restored")
    return digests, [event for _, event in restored]


@pytest.mark.representative
@pytest.mark.processes
def test_an_interrupted_run_leaves_its_snapshots_and_is_resumed_bit_for_bit(
    calm: Calm, command: Command, run_dir: Path
) -> None:
    run = command(run_dir, f"--steps={LONG_STEPS}")
    code, error = _interrupted(run, run_dir, signal.SIGTERM)
    assert code == 130, error
    assert error.splitlines()[-1] == "holdfast train: interrupted"
    assert "Traceback" not in error
    held = smp_status(run_dir)
    assert held is not None
    assert held["newest"] is not None
    code, _ = _interrupted([*run, "--resume"], run_dir, signal.SIGKILL)
    assert code == -signal.SIGKILL
    digests, restored = _finished([*run, "--resume"], run_dir)
    assert digests == calm(steps=LONG_STEPS).digests
    assert [event.rank for event in restored if event.detail["step"] > 0].count(0) == 2
    assert smp_status(run_dir) is None


@pytest.mark.processes
def test_a_run_whose_memory_is_lost_goes_on_from_its_last_checkpoint(
    calm: Calm, command: Command, run_dir: Path
) -> None:
    run = command(run_dir, f"--steps={LONG_STEPS}", "--persist-every=20")
    code, error = _interrupted(run, run_dir, signal.SIGTERM)
    assert code == 130, error
    # The SMP sees all ranks go, and has the newest step persisted: of the six steps that were
    # reported the last one's snapshot may have been in flight.
    steps = (run_dir / CHECKPOINTS_NAME).glob
    until(
        lambda: any(int(path.name.removeprefix("step-")) >= 5 for path in steps("step-*")),
        "no checkpoint",
    )
    stop_smp(run_dir)
    digests, restored = _finished([*run, "--resume"], run_dir)
    assert digests == calm(steps=LONG_STEPS).digests
    assert {event.detail["source"] for event in restored} == {"disk"}
    assert all(event.detail["step"] >= 5 for event in restored)


def _claim(run_dir: Path, settings: Settings, *faults: Fault, resume: bool = False) -> list[Fault]:
    with claimed(run_dir, settings, faults, resume=resume) as schedule:
        return schedule


def _refused(run_dir: Path, settings: Settings, *faults: Fault, resume: bool = False) -> str:
    with pytest.raises(ConfigError) as caught:
        _claim(run_dir, settings, *faults, resume=resume)
    assert "\n" not in str(caught.value)
    assert str(run_dir) in str(caught.value)
    return str(caught.value)


def test_two_runs_at_once_are_refused_and_nothing_is_resumed_where_nothing_was_begun(
    settings: Make, run_dir: Path
) -> None:
    assert "holds no run to resume: start it" in _refused(run_dir, settings(), resume=True)
    with claimed(run_dir, settings(), [], resume=False):
        for resume in (False, True):
            assert "another run is using" in _refused(run_dir, settings(), resume=resume)
    assert "already holds a run: give another" in _refused(run_dir, settings())


def test_a_run_without_snapshots_is_not_resumed(settings: Make, run_dir: Path) -> None:
    _claim(run_dir, settings("bare"))
    assert "no snapshots of the bare run" in _refused(run_dir, settings("bare"), resume=True)


@pytest.fixture
def begun(settings: Make, run_dir: Path) -> Iterator[Path]:
    """An interrupted guarded run of one rank, with its SMP."""
    _claim(run_dir, settings(ranks=1), _kill(2, 0, 0))
    model = torch.nn.Linear(2, 2)
    snapshots = Snapshots(model, torch.optim.SGD(model.parameters()), run_dir=run_dir)
    snapshots.begin(0)
    snapshots.wait_committed()
    snapshots.close(finished=False)
    yield run_dir
    stop_smp(run_dir)


def test_a_run_is_resumed_with_its_own_settings_schedule_and_snapshots_alone(
    settings: Make, begun: Path
) -> None:
    alone, kill = settings(ranks=1), [_kill(2, 0, 0)]
    assert _claim(begun, alone, resume=True) == kill
    assert _claim(begun, alone, *kill, resume=True) == kill
    other = _refused(begun, alone, _kill(3, 0, 0), resume=True)
    assert "another schedule: resume without --schedule" in other
    for changes, words in (
        ({"seed": 4}, "seed = 0 and not 4"),
        ({"ranks": 2}, "ranks = 1 and not 2"),
        ({"model": replace(alone.model, width=32)}, "'width': 16"),
    ):
        message = _refused(begun, replace(alone, **changes), resume=True)
        assert "other settings" in message
        assert words in message
    result_path(begun, 0).write_text("{}")
    assert "is finished" in _refused(begun, alone, resume=True)
    settings().save(begun)
    assert _claim(begun, settings(), resume=True) == kill  # one of two ranks is finished
    stop_smp(begun)
    assert "no snapshots of the guarded run" in _refused(begun, settings(), resume=True)


def test_an_smp_of_another_world_is_not_taken_over(settings: Make, begun: Path) -> None:
    (begun / SETTINGS_NAME).unlink()
    for name in (SCHEDULE_NAME, events.LEDGER_NAME):
        (begun / name).unlink()
    message = _refused(begun, settings())
    assert "with snapshots of 1 ranks serves" in message
    stop_smp(begun)
    assert _claim(begun, settings()) == []


@pytest.mark.parametrize("name", [SCHEDULE_NAME, events.LEDGER_NAME, METRICS_NAME])
def test_files_of_something_else_are_neither_used_nor_overwritten(
    settings: Make, run_dir: Path, name: str
) -> None:
    run_dir.mkdir()
    (run_dir / name).write_text("precious")
    assert f"holds {name} of something else" in _refused(run_dir, settings())
    assert (run_dir / name).read_text() == "precious"


def test_a_directory_that_cannot_be_made_or_written_is_named_and_stays_usable(
    settings: Make, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    message = _refused(tmp_path / "file" / "run", settings())
    assert message.endswith("Not a directory; give another --run-dir")
    original = Path.write_text

    def full(path: Path, text: str) -> int:
        if path.name.startswith(SETTINGS_NAME):
            path.touch()
            raise OSError(28, "No space left on device")
        return original(path, text)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        message = _refused(run_dir, settings(), _kill(2, 0, 0))
    assert "No space left on device; give another --run-dir" in message
    assert [path.name for path in run_dir.iterdir()] == [rundir.LOCK_NAME]
    assert _claim(run_dir, settings()) == []


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
    settings: Make, tiny_disk: Path, reserve_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rundir, "RESERVE_BYTES", reserve_bytes)
    (tiny_disk / "filler").write_bytes(bytes(2**18 - 3 * 4096))
    run_dir = tiny_disk / "run"
    message = _refused(run_dir, settings())
    assert any(words in message for words in ("bytes of disk left", "full", "No space left"))
    assert [path.name for path in run_dir.iterdir()] == [rundir.LOCK_NAME]
    subprocess.run(["mount", "-o", "remount,size=32m", str(tiny_disk)], check=True, timeout=20)
    assert _claim(run_dir, settings()) == []


def test_the_follower_gives_on_what_went_wrong_in_it(settings: Make, run_dir: Path) -> None:
    _claim(run_dir, settings())

    def watch(losses: dict[int, float], fresh: list[events.Event]) -> None:
        raise RuntimeError("the terminal is gone")

    with pytest.raises(RuntimeError, match="the terminal is gone"), Follower(run_dir, watch):
        pass
    with pytest.raises(KeyboardInterrupt), Follower(run_dir, watch):
        raise KeyboardInterrupt


def test_the_follower_reads_whole_lines_once(settings: Make, run_dir: Path) -> None:
    _claim(run_dir, settings())
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
