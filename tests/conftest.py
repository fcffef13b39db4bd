"""After every test: no process, no shared memory, no event, no setting, no armed site is left."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from holdfast import events, sites

# A shell's background job ignores SIGINT, and so would every process that a test starts and ends.
signal.signal(signal.SIGINT, signal.default_int_handler)

GRACE_S = 5.0
OURS = tuple(
    f"holdfast.{name}"
    for name in ("snapshot.smp", "snapshot.persister", "trainer.agent", "trainer.worker")
)


def _processes_of(directory: Path) -> list[psutil.Process]:
    """SMPs and trainers whose command line names something under a test's own directory."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if any(word in OURS for word in words) and any(str(directory) in word for word in words):
            found.append(process)
    return found


def _shared_memory() -> set[str]:
    return {
        name
        for name in os.listdir("/dev/shm")
        if "holdfast" in name or ("torch" in name and not _of_another_worker(name))
    }


def _of_another_worker(name: str) -> bool:
    """Whether a segment is a live process's that is below another pytest of the same parent."""
    owner = re.match(r"torch_(\d+)_", name)
    try:
        process = psutil.Process(int(owner[1])) if owner else psutil.Process()
        me, above = psutil.Process(), process.parents()
        return me.parent() in above and me not in (process, *above)
    except psutil.NoSuchProcess:
        return False  # nobody's any more


def _settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("HOLDFAST_")}


@pytest.fixture
def interpret() -> Callable[..., None]:
    """Runs test files of Triton kernels interpreted, in a process of its own; all must pass.

    Triton decides when it is imported whether it interprets, and torch.compile imports it too.
    """

    def run(*files: Path) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, files)],
            env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
        assert re.search(r"^\d+ passed in ", done.stdout, re.MULTILINE), done.stdout[-500:]

    return run


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """One thread for products, as they round by it; as before after the module."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Starts each test quiet, and fails it if it leaves anything behind."""
    directory = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
    shared, outer = set(os.listdir("/dev/shm")), _settings()
    for name in outer:
        del os.environ[name]
    events.clear()
    yield
    left = _settings()
    for name in left:
        del os.environ[name]
    os.environ.update(outer)
    armed = sites.armed()
    sites.disarm()
    events.close_ledger()
    events.set_step(-1)
    events.clear()
    _check_machine(directory, shared)
    assert not armed, "a fault site is still armed"
    assert not left, f"settings are left in the environment: {left}"


def _check_machine(directory: Path | None, shared: set[str]) -> None:
    deadline = time.monotonic() + GRACE_S
    while (processes := _processes_of(directory) if directory else []) or _shared_memory() - shared:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    for process in processes:
        process.kill()
    assert not processes, f"processes are left over: {processes}"
    assert not _shared_memory() - shared, "shared memory is left over"
