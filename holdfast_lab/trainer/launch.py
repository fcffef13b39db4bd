"""Start and supervision of a training run, on this machine or on several emulated hosts."""

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast import config
from holdfast.events import Event
from holdfast.inject.schedule import Fault
from holdfast.launch.service import Standby
from holdfast.report.run_files import FATAL_NAME
from holdfast.snapshot.node.launch import stop_smp
from holdfast.torchrun import environment_of
from holdfast_lab.trainer.agent import WORKER, Place, launch
from holdfast_lab.trainer.follower import Follower, Watcher
from holdfast_lab.trainer.hosts import INTERFACE_VARIABLE
from holdfast_lab.trainer.nodes import launch_on_hosts
from holdfast_lab.trainer.rundir import claimed
from holdfast_lab.trainer.settings import Settings
from holdfast_lab.trainer.worker import result_path


@dataclass
class RunResult:
    """The results of a finished run."""

    run_dir: Path
    seconds: float
    ranks: list[dict[str, Any]]
    events: list[Event]
    losses: dict[int, float] = field(default_factory=dict)
    step_seconds: dict[int, float] = field(default_factory=dict)

    @property
    def digests(self) -> list[tuple[str, str, str]]:
        """Digest of each rank's model, optimizer and scheduler."""
        return [(r["model"], r["optimizer"], r["scheduler"]) for r in self.ranks]


def train(
    run_dir: Path,
    settings: Settings,
    faults: Sequence[Fault] = (),
    *,
    resume: bool = False,
    watch: Watcher | None = None,
    source: Standby | None = None,
) -> RunResult:
    """Run a training to its end, restarting its processes as often as needed.

    However a run ends, no training process is left. The snapshot process of a guarded run ends with
    it when it finishes; otherwise it remains for ten minutes, so that the run can be resumed. If
    there are several hosts, they always end with the run, and their snapshot processes with them.

    The call makes ``run_dir``, which must not hold a run. With ``resume`` it continues an
    interrupted run from the snapshots in memory; ``settings`` must equal the run's own. ``watch``
    is called about ten times a second with the losses by step and the new events. The agents of
    several hosts are forked from ``source`` (``agent.source``), if it is given.

    Raises:
        ConfigError: The directory is in use, holds a run already, or cannot be written; or a rank
            found input that no restart can correct.
        RunFailed: The processes failed more often than they may.
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP; the training processes were ended.
    """
    with claimed(run_dir, settings, faults, resume=resume) as faults:
        started_s = time.monotonic()
        follower = Follower(run_dir, watch)
        done = False
        try:
            with follower:
                _launch(run_dir, settings, faults, follower, source)
            done = True
        finally:
            if done or settings.mode != "guarded":
                stop_smp(run_dir)
        ranks = [json.loads(result_path(run_dir, r).read_text()) for r in range(settings.ranks)]
        seconds = time.monotonic() - started_s
        return RunResult(
            run_dir, seconds, ranks, follower.events, follower.losses, follower.step_seconds
        )


def _launch(
    run_dir: Path,
    settings: Settings,
    faults: Sequence[Fault],
    follower: Follower,
    source: Standby | None,
) -> None:
    (run_dir / FATAL_NAME).unlink(missing_ok=True)  # left by an earlier attempt
    if settings.nodes > 1:
        launch_on_hosts(run_dir, settings, faults, follower, source)
        return
    environment = {INTERFACE_VARIABLE: "lo", config.RUN_DIR_VARIABLE: str(run_dir)}
    with environment_of(environment):
        place = Place(run_dir, "127.0.0.1:0", uuid.uuid4().hex, "127.0.0.1", serves=True)
        with Standby((WORKER,), run_dir) as standby:
            launch(run_dir, settings, place, standby)
