"""A bench whose ranks take too long or fail says in which calls all of them are."""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import snapshot_ranks, stacks

ROOT = Path(__file__).parents[2]
HANGS = """
import time
from bench.stacks import show_on_demand

def waits_here():
    print("ready", flush=True)
    time.sleep(60)

show_on_demand()
waits_here()
"""
SHOWS_NOTHING = "import time; print('ready', flush=True); time.sleep(60)"
FAILS = """print("ready", flush=True); raise SystemExit("no such luck")"""
CODES = HANGS, FAILS, SHOWS_NOTHING
ARGS = argparse.Namespace(mb=5, tokens=8, steps=1, pairs=2, nodes=1)


@pytest.mark.processes
def test_each_process_says_how_it_ended_or_where_it_is(tmp_path: Path) -> None:
    logs = [tmp_path / f"{number}.log" for number in range(3)]
    processes = [
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=file, stderr=file)
        for code, file in zip(CODES, (log.open("wb") for log in logs), strict=True)
    ]
    try:
        processes[1].wait(60)
        deadline = time.monotonic() + 60
        while not all("ready" in log.read_text() for log in logs) and time.monotonic() < deadline:
            time.sleep(0.02)
        said = stacks.whereabouts(processes, logs)
        assert processes[0].poll() is None, "being asked ended a process that can answer"
    finally:
        for process in processes:
            process.kill()
            process.wait()
    first, second, third = said.split("--- process ")[1:]
    assert first.startswith("0 runs")
    assert "in waits_here" in first
    assert f"thread {processes[0].pid} " in first
    assert second.startswith("1 ended with exit code 1")
    assert "no such luck" in second
    assert third.startswith("2 ran outside of its own code")


def programs(folder: Path, monkeypatch: pytest.MonkeyPatch, *codes: str) -> None:
    """Have each rank of a life run one of these programs instead."""
    lines = [f"{rank}) exec {sys.executable} -c '{code}';;" for rank, code in enumerate(codes)]
    stand_in = folder / "python"
    stand_in.write_text("\n".join(["#!/bin/sh", f"cd {ROOT}", "case $RANK in", *lines, "esac\n"]))
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))


@pytest.mark.processes
def test_a_life_that_does_not_end_is_ended_and_says_where_its_ranks_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs(tmp_path, monkeypatch, HANGS, HANGS)
    monkeypatch.setattr(snapshot_ranks, "LIMIT_S", 3.0)
    with pytest.raises(SystemExit, match="ddp, life 0: not done within 3 s") as ended:
        snapshot_ranks.run_life(ARGS, "ddp", tmp_path, 0)
    assert str(ended.value).count("in waits_here") == 2


@pytest.mark.processes
def test_a_rank_that_fails_is_told_although_the_one_before_it_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs(tmp_path, monkeypatch, HANGS, FAILS)
    with pytest.raises(SystemExit, match="rank 1 ended with exit code 1") as ended:
        snapshot_ranks.run_life(ARGS, "ddp", tmp_path, 1)
    assert "no such luck" in str(ended.value)
