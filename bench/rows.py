"""Rows of benchmark results: the circumstances that each one records, and where they are kept.

``python -m bench.rows`` says of the newest row of every claim whether the code that produced it
has changed since.
"""

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from holdfast import __version__, native
from holdfast_lab.provenance import provenance, source_tree

RESULTS = Path(__file__).parent / "results"


def circumstances() -> dict[str, Any]:
    """Return commit, machine and versions, without which a figure cannot be interpreted."""
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
    """Print a row and append it to the claim's file, with its circumstances and its code's hash."""
    full = {"claim": claim, **row, **circumstances(), **provenance(_started_module())}
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"{claim}.jsonl").open("a") as file:
        file.write(json.dumps(full) + "\n")
    print(json.dumps(row), flush=True)


def _started_module() -> str:
    """Return the outermost module of ``bench`` on the call stack, for example ``bench.gemm``."""
    frame, found = sys._getframe(1), __name__
    while frame is not None:
        spec = frame.f_globals.get("__spec__")
        if spec is not None and spec.name.startswith("bench."):
            found = spec.name
        frame = frame.f_back
    return found


def states() -> dict[str, str]:
    """Return the state of the newest row of every claim: current, stale, or without a hash."""
    found = {}
    for path in sorted(RESULTS.glob("*.jsonl")):
        newest = json.loads(path.read_text().splitlines()[-1])
        module = newest.get("module", "")
        found[path.stem] = source_tree().state_of(module, newest.get("code"))
    return found


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True, timeout=30)
    return done.stdout.strip()


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            flags = "AMX" if "amx_tile" in Path("/proc/cpuinfo").read_text() else "no AMX"
            return f"{line.split(':', 1)[1].strip()} ({flags})"
    return platform.processor()


if __name__ == "__main__":
    for claim, state in states().items():
        print(f"{claim:20} {state}")
