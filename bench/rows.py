"""What every bench row carries, and where it goes."""

import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from holdfast import __version__, native

RESULTS = Path(__file__).parent / "results"


def circumstances() -> dict[str, Any]:
    """Commit, machine and versions: without them a figure says nothing."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "-s") else ""),
        "holdfast": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "native": native.core.simd_name() if native.core is not None else None,
    }


def record(claim: str, row: dict[str, Any]) -> None:
    """Print a row and append it to the claim's file."""
    full = {"claim": claim, **row, **circumstances()}
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"{claim}.jsonl").open("a") as file:
        file.write(json.dumps(full) + "\n")
    print(json.dumps(row), flush=True)


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True, timeout=30)
    return done.stdout.strip()


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            flags = "AMX" if "amx_tile" in Path("/proc/cpuinfo").read_text() else "no AMX"
            return f"{line.split(':', 1)[1].strip()} ({flags})"
    return platform.processor()
