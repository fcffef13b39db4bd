"""``holdfast run``: torchrun, with one snapshot management process (SMP) a node."""

import argparse
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from holdfast import config
from holdfast.cli.quantities import shown_duration, shown_size
from holdfast.cli.tables import check_writable, print_table, write_json
from holdfast.errors import ConfigError, SmpUnavailable
from holdfast.logs import LOG_VARIABLE
from holdfast.report.sources import Record
from holdfast.snapshot.node.launch import smp_status
from holdfast.torchrun import OWN_STORE_VARIABLE, environment_of, own_signals

POLL_S = 0.2
DESCRIPTION = """\
Runs a script on this node's ranks as torchrun does, whose options these are, in a run directory
of its own: holdfast.Snapshots in the script starts one SMP there, which keeps the ranks' snapshots
when they are killed and restarted (--max-restarts). Each life of the ranks gets a fresh store, so
that init_process_group works after a restart as it did at first. At the end it is said what the
SMP held. The SMP ends when all ranks have finished; else it lingers, and the same command goes on
from its snapshots. The exit code is torchrun's. Plain torchrun works as well."""


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb ``run`` to the command line."""
    parser = subparsers.add_parser(
        "run",
        help="torchrun, with an SMP that outlives the ranks",
        prefix_chars="\0",  # torchrun's options and the script's own are not ours to read
        add_help=False,
    )
    parser.add_argument("words", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run)


def make_parser() -> argparse.ArgumentParser:
    """Extend torchrun's parser by the options of holdfast."""
    parser: argparse.ArgumentParser = torchrun.get_args_parser()
    parser.prog, parser.description = "holdfast run", DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    ours = parser.add_argument_group("holdfast")
    where = f"of the SMP and the ledger (default: ${config.RUN_DIR_VARIABLE}, or "
    where += config.DEFAULT_RUN_DIR + ")"
    ours.add_argument("--run-dir", metavar="DIR", type=Path, help=where)
    what = "defaults of what the script does not set (default: $" + config.CONFIG_VARIABLE + ")"
    ours.add_argument("--config", metavar="FILE", type=Path, help=what)
    what = "also write what the SMP held to FILE"
    ours.add_argument("--json", metavar="FILE", type=Path, help=what)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the script until it ends; return torchrun's exit code.

    Raises:
        ConfigError: there is no such script, or an option is unusable; nothing was started.
    """
    options = make_parser().parse_args(args.words)
    check_writable(options.json)
    _check_script(options)
    run_dir = config.run_dir(options.run_dir)
    store = os.environ.get(OWN_STORE_VARIABLE, "1")
    level = os.environ.get(LOG_VARIABLE, "INFO")
    environment = {config.RUN_DIR_VARIABLE: str(run_dir), OWN_STORE_VARIABLE: store}
    environment |= {LOG_VARIABLE: level}
    environment |= _configured(options.config or config.config_file())
    with environment_of(environment), own_signals(), _Witness(run_dir) as witness:
        code = _torchrun(options)
    _report(run_dir, witness.last, code, options.json)
    return code


def _check_script(options: argparse.Namespace) -> None:
    script = Path(options.training_script)
    if not options.module and not options.no_python and not script.is_file():
        raise ConfigError(
            f"there is no script {script}: give a Python file, or -m MODULE, or --no-python PROGRAM"
        )


def _configured(path: Path | None) -> dict[str, str]:
    """Read and print a config file; return the environment variables that pass it to the ranks."""
    if path is None:
        return {}
    values = config.read(path.absolute())
    shown = ", ".join(f"{key} = {value}" for key, value in values.items())
    print(f"config {path}: {shown or 'nothing'}; what the script sets itself counts", flush=True)
    return {config.CONFIG_VARIABLE: str(path.absolute())}


def _torchrun(options: argparse.Namespace) -> int:
    try:
        torchrun.run(options)
    except (ChildFailedError, SignalException) as error:
        print(f"holdfast run: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        raise ConfigError(f"torchrun refuses: {error}") from error
    return 0


class _Witness:
    """Keeps the SMP's latest status while the ranks run, as the SMP ends with them."""

    def __init__(self, run_dir: Path) -> None:
        self.last: Record | None = None
        self._run_dir = run_dir
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "_Witness":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(config.timeout_s())

    def _watch(self) -> None:
        while not self._stop.wait(POLL_S):
            with suppress(SmpUnavailable):  # it may be ending; at the end it is asked once more
                self.last = smp_status(self._run_dir) or self.last


def _report(run_dir: Path, last: Record | None, code: int, json: Path | None) -> None:
    alive = smp_status(run_dir)
    held = alive or last
    smp = {"held": held, "alive": alive is not None}
    write_json(json, {"run_dir": str(run_dir), "exit_code": code, "smp": smp})
    if held is None:
        print(f"no SMP was seen in {run_dir}: the script took no snapshots there")
        return
    newest = "none" if held["newest"] is None else f"step {held['newest']}"
    rows = [
        ("SMP", f"process {held['pid']}, up {shown_duration(held['uptime_s'])}"),
        ("newest clean snapshot", newest),
        ("committed, aborted", f"{held['commits']}, {held['aborts']}"),
        ("memory", shown_size(held["bytes"])),
        ("training waited", shown_duration(held["stall_s"]) + " in all"),
    ]
    print_table(("", "value"), rows, title=f"Snapshots of {run_dir}")
    if alive is None:
        print("the SMP has ended, as it does when all ranks of the node have finished")
    else:
        print(
            "the SMP lingers: the same command goes on from its snapshots, and "
            f"`holdfast snapshots stop --run-dir {run_dir}` ends it"
        )
