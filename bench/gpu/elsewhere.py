"""Stages that run what is kept elsewhere: the tests that need a device, and two benches."""

import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from bench.gpu.stage import Machine, Row, WrongResult, demand

TOY_TESTS = "tests/screen/test_screen_gpu.py"
SNAPSHOT_PAIRS, ATTENTION_PAIRS = 3, 5


def tests(machine: Machine, done: Collection[str]) -> Iterator[Row]:
    """Run the tests that need a device; a rehearsal collects and skips a few."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    command += [TOY_TESTS] if machine.rehearsed else []
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [*ended.stdout.splitlines(), *ended.stderr.splitlines()[-1:]] or ["no output"]
    counts = {name: int(count) for count, name in re.findall(r"(\d+) (\w+)", lines[-1])}
    row: Row = {"case": "tests", **{n: counts.get(n, 0) for n in ("passed", "failed", "skipped")}}
    yield {**row, "errors": counts.get("error", 0) + counts.get("errors", 0)}
    wrong = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    demand(ended.returncode == 0, "; ".join(wrong or lines[-1:]))
    demand(machine.rehearsed or row["passed"] > 0, f"no test ran: {lines[-1]}")


def snapshots(machine: Machine, done: Collection[str]) -> Iterator[Row]:
    """Take snapshots of 10 GB beside a training."""
    yield from ({"case": "snapshot", **row} for row in _measured("snapshot_device", _snapshots))


def _snapshots(bench: Any) -> list[Row]:
    rows: list[Row] = bench.measure(False, "cuda", SNAPSHOT_PAIRS)
    return rows


def attention(machine: Machine, done: Collection[str]) -> Iterator[Row]:
    """Time verified fused attention and the same kernels unverified, in bf16."""
    for row in _measured("attention_cuda", _attention):
        name = f"{row['candidate']} / {row['baseline']} {row['kind']} {row['length']}"
        yield {**row, "case": f"{name} {row['width']} {row.get('mask', '')}".rstrip()}


def _attention(bench: Any) -> Iterator[Row]:
    for case in bench.cases(False):
        if case.dtype == torch.bfloat16:
            yield from bench.measure(case, "cuda", ATTENTION_PAIRS)


def _measured(name: str, measure: Any) -> Iterator[Row]:
    """Yield the rows of a bench, if it is there; its gate raises SystemExit at a wrong result."""
    if find_spec(f"bench.{name}") is None:
        return
    bench = import_module(f"bench.{name}")
    try:
        yield from measure(bench)
    except SystemExit as exit:
        raise WrongResult(f"bench.{name}: {exit}") from exit
