"""Data-parallel ranks: a fault on one is repaired there, and unrepaired it reaches the other."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from ddp_worker import RANKS, STRUCK_RANK, WRAPPERS

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).with_name("ddp_worker.py")
ROOT = SCRIPT.parents[3]
PATHS = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
PATIENCE_S = 100.0

Seen = list[dict[str, Any]]  # by rank


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What both ranks observed, of all wrappers."""
    directory = tmp_path_factory.mktemp("ddp")
    place = {"PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    workers = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), "--rank", str(rank), "--directory", str(directory)],
            env=os.environ | place,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        said = [worker.communicate(timeout=PATIENCE_S)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait(PATIENCE_S)
    assert [worker.returncode for worker in workers] == [0] * RANKS, said
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.fixture(params=list(WRAPPERS))
def seen(ranks: Seen, request: pytest.FixtureRequest) -> Seen:
    """What both ranks observed, of one wrapper."""
    return [rank[request.param] for rank in ranks]


def test_clean_passes_are_silent_and_unchanged(seen: Seen) -> None:
    for rank in seen:
        assert rank["clean"] == [rank["bare"], []]
        assert rank["covered"] == Counter(rank["names"])
        assert {name.rsplit("/")[-1] for name in rank["names"]} == {"forward", "grad_a", "grad_b"}


@pytest.mark.representative
def test_a_fault_is_repaired_on_the_rank_it_strikes(seen: Seen) -> None:
    for number, rank in enumerate(seen):
        for name, (digest, events) in zip(rank["names"], rank["repaired"], strict=True):
            assert digest == rank["bare"], name
            assert events == ([["gemm_fault", name]] if number == STRUCK_RANK else []), name


def test_unverified_the_fault_reaches_the_other_rank_too(seen: Seen) -> None:
    for rank in seen:
        for name, (digest, events) in zip(rank["names"], rank["reaches"], strict=True):
            assert digest != rank["bare"], name
            assert events == [], name
