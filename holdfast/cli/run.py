"""``holdfast run``: torchrun, with one snapshot management process (SMP) a node."""

import argparse
import os
import sys
import threading
from contextlib import nullcontext, suppress
from pathlib import Path
from tempfile import mkdtemp

from holdfast import config
from holdfast.cli.drain import Drain
from holdfast.cli.tables import check_writable, print_table, say, write_json
from holdfast.errors import ConfigError, SmpUnavailable
from holdfast.launch.service import Standby
from holdfast.logs import LOG_VARIABLE
from holdfast.report.smp_status import smp_rows
from holdfast.snapshot.node.launch import Status, smp_status
from holdfast.torchrun import OWN_STORE_VARIABLE, environment_of, own_signals

POLL_S = 0.2
MOST_RANKS = 1024
MAX_RESTARTS = 3  # torchrun's default is 0, with which no snapshot in memory would be of use
DESCRIPTION = """\
Runs a script on this node's ranks as torchrun does, whose options these are, in a run directory
of its own: holdfast.Snapshots in the script starts one snapshot management process (SMP) there,
which keeps the ranks' snapshots when they are killed and restarted (--max-restarts). Each restart
gets a new store, so that init_process_group works as it did at first. Ranks are forked from a
standby process, one a node, which has imported torch already (--no-standby: they are not), so that
they are there again in a second. At the end the snapshots
that the SMP held are printed. The SMP ends when all ranks have finished; otherwise it lingers, and
the same command continues from its snapshots. The exit code is torchrun's. Plain torchrun works
as well."""


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb ``run`` to the command line."""
    parser = subparsers.add_parser(
        "run",
        prefix_chars="\0",  # all options belong to torchrun or to the script
        add_help=False,
    )
    parser.add_argument("words", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run)


def make_parser() -> argparse.ArgumentParser:
    """Extend torchrun's parser by the options of holdfast."""
    from torch.distributed import run as torchrun

    parser: argparse.ArgumentParser = torchrun.get_args_parser()
    parser.prog, parser.description = "holdfast run", DESCRIPTION
    if parser.get_default("max_restarts") == 0:  # that of PET_MAX_RESTARTS would be a string
        parser.set_defaults(max_restarts=MAX_RESTARTS)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument_group("holdfast").add_argument
    default = f"${config.RUN_DIR_VARIABLE}, or {config.DEFAULT_RUN_DIR}"
    text = f"directory of the SMP and the ledger (default: {default})"
    add("--run-dir", metavar="DIR", type=Path, help=text)
    text = f"settings that the script does not set itself (default: ${config.CONFIG_VARIABLE})"
    add("--config", metavar="FILE", type=Path, help=text)
    text = "shell command to run once for each device that shadow replicas name as faulty, such as "
    text += "one that drains its node; it finds the device in HOLDFAST_HOST and other variables"
    add("--on-evict", metavar="COMMAND", help=text)
    text = "do not fork ranks from a standby process, which has imported torch (0.4 GB a node)"
    add("--no-standby", action="store_true", help=text)
    add("--json", metavar="FILE", type=Path, help="also write the SMP's last status to FILE")
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the script until it ends; return torchrun's exit code."""
    # Started first, as this process imports torch only now, to parse its options.
    early = Standby() if "--no-standby" not in args.words else nullcontext()
    with early as standby:
        options = make_parser().parse_args(args.words)
        return _run(options, None if options.no_standby else standby)


def _run(options: argparse.Namespace, standby: Standby | None) -> int:
    check_writable(options.json)
    _check_script(options)
    _check_counts(options)
    run_dir = config.run_dir(options.run_dir)
    _check_run_dir(run_dir)
    store = os.environ.get(OWN_STORE_VARIABLE, "1")
    level = os.environ.get(LOG_VARIABLE, "INFO")
    environment = {config.RUN_DIR_VARIABLE: str(run_dir), OWN_STORE_VARIABLE: store}
    environment |= {LOG_VARIABLE: level}
    environment |= _configured(options.config or config.config_file())
    drain = Drain(run_dir, options.on_evict) if options.on_evict else nullcontext()
    with environment_of(environment), own_signals(), drain, _Witness(run_dir) as witness:
        code = _torchrun(options, standby)
    _report(run_dir, witness.last, code, options.json)
    return code


def _check_run_dir(run_dir: Path) -> None:
    """Check that a run directory can be used, or be made."""
    for path in (run_dir, *run_dir.absolute().parents):
        if path.exists():
            if not path.is_dir():
                raise ConfigError(
                    f"--run-dir {run_dir}: {path} is no directory: give that of a run, or a new one"
                )
            try:
                Path(mkdtemp(dir=path)).rmdir()
            except OSError as error:
                raise ConfigError(
                    f"--run-dir {run_dir}: no file can be made in {path}: {error.strerror}"
                ) from error
            return


def _check_script(options: argparse.Namespace) -> None:
    script = Path(options.training_script)
    if not options.module and not options.no_python and not script.is_file():
        raise ConfigError(
            f"there is no script {script}: give a Python file, or -m MODULE, or --no-python PROGRAM"
        )


def _check_counts(options: argparse.Namespace) -> None:
    """Check the numbers that torchrun's own parser takes as they are."""
    nodes = [int(part) if part.isdecimal() else -1 for part in str(options.nnodes).split(":")]
    if not (len(nodes) <= 2 and 1 <= nodes[0] <= nodes[-1]):
        raise ConfigError(f"--nnodes {options.nnodes}: give a number of at least 1, or MIN:MAX")
    ranks = str(options.nproc_per_node)
    if ranks.lstrip("+-").isdecimal() and not 1 <= int(ranks) <= MOST_RANKS:
        raise ConfigError(f"--nproc-per-node {ranks}: give 1 to {MOST_RANKS}")
    if not 0 <= options.node_rank < nodes[-1]:
        raise ConfigError(
            f"--node-rank {options.node_rank}: give 0 to {nodes[-1] - 1}, for --nnodes {nodes[-1]}"
        )
    if options.master_port is not None and not 0 < options.master_port < 2**16:
        raise ConfigError(f"--master-port {options.master_port}: give 1 to {2**16 - 1}")
    if options.max_restarts < 0:
        raise ConfigError(f"--max-restarts {options.max_restarts} must be at least 0")
    if not 0 < options.monitor_interval < threading.TIMEOUT_MAX:
        raise ConfigError(
            f"--monitor-interval {options.monitor_interval} must be a number of seconds above 0"
        )


def _configured(path: Path | None) -> dict[str, str]:
    """Read and print a config file; return the environment variables that pass it to the ranks."""
    if path is None:
        return {}
    values = config.read(path.absolute())
    shown = ", ".join(f"{key} = {value}" for key, value in values.items())
    say(
        f"config {path}: {shown or 'nothing'}; what the script sets itself takes precedence",
        flush=True,
    )
    return {config.CONFIG_VARIABLE: str(path.absolute())}


def _fork_ranks(options: argparse.Namespace, standby: Standby) -> None:
    """Have torchrun start clients of the standby process, if it would start this Python."""
    python = os.environ.get("PYTHON_EXEC", sys.executable)
    if options.no_python or options.run_path or python != sys.executable:
        return
    words = ["-u", *(["-m"] if options.module else []), options.training_script]
    options.training_script_args = standby.arguments([*words, *options.training_script_args])
    options.training_script, options.no_python, options.module = python, True, False


def _torchrun(options: argparse.Namespace, standby: Standby | None) -> int:
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from holdfast.launch import rendezvous

    rendezvous.choose(options)
    if standby is not None:
        _fork_ranks(options, standby)
    try:
        torchrun.run(options)
    except (ChildFailedError, SignalException) as error:
        print(f"holdfast run: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        raise ConfigError(f"torchrun refuses: {error}") from error
    return 0


class _Witness:
    """A thread that keeps the SMP's latest status while the ranks run, since it ends with them."""

    def __init__(self, run_dir: Path) -> None:
        self.last: Status | None = None
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
            with suppress(SmpUnavailable):  # the SMP may be ending; run() asks once more
                self.last = smp_status(self._run_dir) or self.last


def _report(run_dir: Path, last: Status | None, code: int, json: Path | None) -> None:
    alive = smp_status(run_dir)
    held = alive or last
    smp = {"held": held, "alive": alive is not None}
    write_json(json, {"run_dir": str(run_dir), "exit_code": code, "smp": smp})
    if held is None:
        say(f"no SMP was seen in {run_dir}: the script took no snapshots there")
        return
    print_table(("", "value"), smp_rows(held), title=f"Snapshots of {run_dir}")
    if alive is None:
        print("the SMP's last answer; it ended when all ranks had finished, maybe some steps later")
    else:
        say(
            "the SMP lingers: the same command goes on from its snapshots, and "
            f"`holdfast snapshots stop --run-dir {run_dir}` ends it"
        )
