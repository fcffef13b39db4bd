"""The record of the SMP that serves a run directory, for processes that it cannot talk to."""

import json
import os
from contextlib import suppress
from pathlib import Path

from holdfast.snapshot.protocol.messages import WIRE_VERSION
from holdfast.version import __version__

NAME = "smp.json"


def write(run_dir: Path) -> None:
    """Record this process; without room on the disk there is no record."""
    about = {"pid": os.getpid(), "version": __version__, "wire": WIRE_VERSION}
    with suppress(OSError):
        (run_dir / NAME).write_text(json.dumps(about) + "\n")


def foreign(run_dir: Path) -> str:
    """Return why the SMP of a run directory cannot be talked to; empty if nothing is known."""
    try:
        about = json.loads((run_dir / NAME).read_text())
        wire, who = about["wire"], f"SMP {about['pid']} of holdfast {about['version']}"
    except FileNotFoundError:
        wire, who = 1, "an SMP of an older holdfast"
    except (OSError, ValueError, LookupError, TypeError):
        return ""
    if wire == WIRE_VERSION:
        return ""
    return (
        f"{who} serves {run_dir} and speaks version {wire} of the protocol, this process version "
        f"{WIRE_VERSION}: go on with the holdfast that started it, or with that one persist what "
        "it holds (`holdfast snapshots persist`) and stop it (`holdfast snapshots stop`)"
    )
