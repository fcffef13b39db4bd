"""``holdfast spare``: a process beside a run that computes its steps again."""

import argparse
import runpy
import sys
from pathlib import Path

from holdfast import config
from holdfast.errors import ConfigError
from holdfast.spare_process import SPARE_VARIABLE
from holdfast.torchrun import environment_of, interruptible

# The environment of a rank without others; port 0 is any that is free.
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
ALONE |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "TORCHELASTIC_USE_AGENT_STORE": "False"}


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb ``spare`` to the command line."""
    parser = subparsers.add_parser("spare", description="Computes steps again: docs/replay.md.")
    add, default = parser.add_argument, f"${config.RUN_DIR_VARIABLE}, or {config.DEFAULT_RUN_DIR}"
    add("--run-dir", metavar="DIR", type=Path, help=f"directory of the run (default: {default})")
    add("script", type=Path, help="Python file that the ranks run")
    add("arguments", nargs=argparse.REMAINDER, help="its arguments on the ranks")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the script, whose first ``Guard.step`` ends with the run and exits with code 0."""
    if not args.script.is_file():
        raise ConfigError(f"there is no script {args.script}: give the Python file of the run")
    folder = config.run_dir(args.run_dir) / "spare"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ended").unlink(missing_ok=True)  # of an earlier run
    interruptible()
    sys.argv = [str(args.script), *args.arguments]
    sys.path.insert(0, str(args.script.resolve().parent))
    here = {SPARE_VARIABLE: "1", config.RUN_DIR_VARIABLE: str(folder.parent)}
    with environment_of(ALONE | here):
        runpy.run_path(str(args.script), run_name="__main__")
    raise ConfigError(f"{args.script} ended without a Guard.step, so that nothing was compared")
