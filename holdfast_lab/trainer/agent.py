"""torchrun's agent, which starts the ranks of one host and restarts them when one of them dies.

``python -m holdfast_lab.trainer.agent RUN_DIR ENDPOINT RUN_ID ADDRESS`` runs the agent of one of
several hosts. A run on a single host has its agent in the launcher's process.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from holdfast import config
from holdfast.errors import ConfigError, HoldfastError
from holdfast.inject.schedule import KILLS, load_schedule
from holdfast.launch.rendezvous import QUICK_BACKEND, register
from holdfast.launch.service import Standby
from holdfast.launch.standby import PRELOADED, preload, serve, unsafe
from holdfast.report.run_files import FATAL_NAME, SCHEDULE_NAME
from holdfast.torchrun import OWN_STORE_VARIABLE, environment_of, own_signals, quiet_torchrun
from holdfast_lab.trainer.namespaces import enter
from holdfast_lab.trainer.settings import Settings
from holdfast_lab.trainer.worker import LAUNCHER_VARIABLE, end_with_parent

POLL_S = 0.1
SPARE_RESTARTS = 3  # in addition to one restart for each kill of the schedule
LOGS_NAME = "logs"
AGENT, WORKER = "holdfast_lab.trainer.agent", "holdfast_lab.trainer.worker"
# A process with the threads of numpy's OpenBLAS could not be forked; nothing here uses it.
ALONE = {"OPENBLAS_NUM_THREADS": "1"}


class RunFailed(HoldfastError):
    """The training processes failed for good; the message names the log to read."""


@dataclass(frozen=True)
class Place:
    """The directory of an agent's host, and the addresses of the host and the rendezvous."""

    node_dir: Path
    endpoint: str
    run_id: str
    address: str
    serves: bool = False


def launch(run_dir: Path, settings: Settings, place: Place, standby: Standby) -> None:
    """Run one host's ranks to their end; they are forked from its standby process.

    Raises:
        ConfigError: A rank found input that no restart can correct.
        RunFailed: The ranks failed more often than they may.
        KeyboardInterrupt: A signal arrived; the ranks were ended.
    """
    logs = place.node_dir / LOGS_NAME
    logs.mkdir(exist_ok=True)
    environment = {OWN_STORE_VARIABLE: "1", LAUNCHER_VARIABLE: str(os.getpid())}
    with quiet_torchrun(), environment_of(environment), own_signals():
        try:
            launched = elastic_launch(_launch_config(run_dir, settings, place), sys.executable)
            launched(*standby.arguments(["-u", "-m", WORKER, str(run_dir)]))
        except ChildFailedError as error:
            fatal = run_dir / FATAL_NAME
            if fatal.exists():
                raise ConfigError(fatal.read_text()) from error
            raise RunFailed(_explain(error, logs)) from error
        except SignalException as error:
            raise KeyboardInterrupt from error
        except UnboundLocalError as error:
            # Torch's timing of its own calls fails so if the signal arrives just before them.
            if isinstance(error.__context__, SignalException):
                raise KeyboardInterrupt from error
            raise


def _launch_config(run_dir: Path, settings: Settings, place: Place) -> LaunchConfig:
    register()
    schedule = run_dir / SCHEDULE_NAME
    faults = load_schedule(schedule) if schedule.exists() else []
    rendezvous: dict[str, object] = {
        "is_host": str(int(place.serves)),
        "timeout": config.timeout_s(),
        "join_timeout": int(max(config.timeout_s(), config.DEFAULT_TIMEOUT_S)),
    }
    return LaunchConfig(
        min_nodes=settings.nodes,
        max_nodes=settings.nodes,
        nproc_per_node=settings.ranks // settings.nodes,
        run_id=place.run_id,
        rdzv_backend=QUICK_BACKEND,
        rdzv_endpoint=place.endpoint,
        rdzv_configs=rendezvous,
        max_restarts=sum(fault.kind in KILLS for fault in faults) + SPARE_RESTARTS,
        monitor_interval=POLL_S,
        local_addr=place.address,
        logs_specs=DefaultLogsSpecs(log_dir=str(place.node_dir / LOGS_NAME), redirects=Std.ALL),
    )


def _explain(error: ChildFailedError, logs: Path) -> str:
    rank, failure = error.get_first_failure()
    last = last_line(logs.glob(f"*/attempt_*/{failure.local_rank}/stderr.log"))
    return f"rank {rank} failed (exit code {failure.exitcode}): {last}; logs are in {logs}"


def last_line(logs: Iterator[Path]) -> str:
    """Return the last line of the newest of several logs."""
    found = sorted(logs, key=lambda path: path.stat().st_mtime)
    lines = found[-1].read_text(errors="replace").split("\n") if found else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "no message")


class ForkedStandby(Standby):
    """A standby process that is forked from this one and so shares its imports.

    It is started as usual if this process has several threads already.
    """

    def first(self) -> int:
        """Fork; a rank, forked in turn, ends here."""
        preload((*PRELOADED, *self.modules))
        if unsafe() is not None:
            return super().first()
        starter, pid = os.getpid(), os.fork()
        if pid == 0:
            serve(self.path, starter, ())
            sys.exit()
        return pid


@contextmanager
def source() -> Iterator[Standby]:
    """Keep a process that has imported all that agents need, to fork them from."""
    with environment_of(ALONE), Standby((AGENT,)) as standby:
        yield standby


def main(standby: Standby, run_dir: Path, endpoint: str, run_id: str, address: str) -> int:
    """Run the ranks of this host; an error is printed as the last line on stderr."""
    end_with_parent()
    place = Place(config.run_dir(), endpoint, run_id, address)
    try:
        launch(run_dir, Settings.load(run_dir), place, standby)
    except HoldfastError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    enter()
    # Entered where a rank, which returns through here, has nothing to unwind.
    with ForkedStandby((WORKER,), config.run_dir()) as host_standby:
        code = main(host_standby, Path(sys.argv[1]), *sys.argv[2:5])
    sys.exit(code)
