"""What every test starts with, and what no test may leave behind."""

import gc
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import process_server
import psutil
import pytest
import torch
from torch import distributed

from holdfast import Protection, events, sites
from holdfast.abft.gemm import compiled
from holdfast.snapshot.node import launch

# A shell's background job ignores SIGINT, and so would every process that a test starts and ends.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Daemons too are then found among this process's descendants.
process_server.adopt_orphans()
process_server.prepare_forkserver()

hypothesis.settings.register_profile("dev", max_examples=25, deadline=None)
hypothesis.settings.register_profile("ci", max_examples=200, deadline=None)
hypothesis.settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") == "true" else "dev")
)

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores: a second thread of each would wait for the others' first ones.
    torch.set_num_threads(1)

HERE = Path(__file__).parent
# The longest files, which begin first: one of them at the end would leave a core idle.
LONGEST = (
    "abft/test_interpreted.py",
    "abft/test_triton.py",
    "lab/zoo_ranks/test_campaign.py",
    "snapshot/test_cluster_faults.py",
    "snapshot/test_node_loss.py",
    "lab/zoo/test_zoo.py",
    "lab/trainer/test_nodes.py",
    "lab/study/test_registry.py",
    "lab/trainer/test_launch.py",
    "integrations/test_models_coverage.py",
    "abft/gemm/test_ahead_of_time.py",
    "snapshot/test_dtensors.py",
    "snapshot/test_snapshot_death.py",
    "guard/test_process_faults.py",
    "snapshot/test_run_identity.py",
    "abft/test_simd.py",
    "abft/gemm/test_graph_cache.py",
    "abft/gemm/test_detector.py",
    "lab/campaign/test_campaign_run.py",
)
assert all((HERE / name).exists() for name in LONGEST), "a file of LONGEST has another name now"
GRACE_S = 5.0
# Fixtures of tests that start processes, with or without the marker.
PROCESS_FIXTURES = {"forked_python", "run_dir"}
# Helpers of multiprocessing and of torch that serve until this process ends.
SERVERS = (
    process_server.ROOM,
    "multiprocessing.forkserver",
    "multiprocessing.resource_tracker",
    "compile_worker",
)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import the tests without the garbage collector, and never have it look at them again.

    It would read millions of objects of modules again and again, at each ``gc.collect()`` of a test
    for half a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the longest files begin; all others keep their order."""
    places = {HERE / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture(scope="session")
def python_server() -> Iterator[process_server.Server]:
    """A process with everything imported, to be forked."""
    process_server.quicken_rendezvous()
    server = process_server.Server()
    yield server
    server.close()


@pytest.fixture
def forked_python(python_server: process_server.Server) -> Iterator[None]:
    """Programs in Python that the test starts are forked from a process that has torch already."""
    with python_server.client.forking():
        yield


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """A run directory; its SMP, if one is left, is asked to stop at the end."""
    path = tmp_path / "run"
    yield path
    launch.stop_smp(path)


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
    yield from _with_threads(1)


@pytest.fixture(scope="module")
def two_threads() -> Iterator[None]:
    """Two threads, for what divides its work among them; as before after the module."""
    yield from _with_threads(2)


def _with_threads(count: int) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Starts each test without events and settings, and fails it if it leaves anything behind."""
    starts_processes = request.node.get_closest_marker("processes") is not None
    starts_processes |= bool(PROCESS_FIXTURES & set(request.fixturenames))
    before = _processes() if starts_processes else set()
    outer = _settings()
    for name in outer:
        del os.environ[name]
    events.clear()
    protections = compiled._users
    group_before, level_before = distributed.is_initialized(), logging.root.level
    yield
    left = _settings()
    for name in left:
        del os.environ[name]
    os.environ.update(outer)
    armed = sites.armed()
    sites.disarm()
    if group_left := distributed.is_initialized() and not group_before:
        distributed.destroy_process_group()
    level_left = logging.root.level
    logging.root.setLevel(level_before)
    events.close_ledger()
    events.set_step(-1)
    events.clear()
    if protected := compiled._users > protections:
        _remove_protections()
    if starts_processes:
        _check_processes(before)
    assert not protected, "a protection is still active: end it, or hold it in a module's fixture"
    assert not armed, "a fault site is still armed"
    assert not group_left, "a process group is left"
    assert level_left == level_before, f"the root logger is left at level {level_left}"
    assert not left, f"settings are left in the environment: {left}"


@pytest.fixture(autouse=True, scope="module")
def no_module_leaves_processes() -> Iterator[None]:
    """Finds what a test without the marker ``processes`` started, at the end of its file."""
    before = _processes()
    yield
    _check_processes(before)


def _remove_protections() -> None:
    """End every protection that is alive, so that only the test fails that left one."""
    for protection in (each for each in gc.get_objects() if isinstance(each, Protection)):
        protection.remove()


def _settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("HOLDFAST_")}


def _processes() -> set[psutil.Process]:
    """The descendants of this process that a test started, those that ended left out."""
    servers = {p for name in SERVERS for p in process_server.descendants(name)}
    return set(process_server.descendants()) - servers


def _segments() -> set[str]:
    """Shared memory that a descendant of this process owns, or that nobody owns any more."""
    ours = {process.pid for process in psutil.Process().children(recursive=True)} | {os.getpid()}
    owners = {name: re.match(r"torch_(\d+)_", name) for name in os.listdir("/dev/shm")}
    pids = {name: int(owner[1]) for name, owner in owners.items() if owner}
    return {name for name, pid in pids.items() if pid in ours or not psutil.pid_exists(pid)}


def _check_processes(before: set[psutil.Process]) -> None:
    """Fails if processes live on that were not there before, or shared memory."""
    deadline = time.monotonic() + GRACE_S
    while (processes := _processes() - before) or _segments():
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    words = [" ".join(process.cmdline()) for process in processes]
    for process in processes:
        process.kill()
    assert not processes, f"processes are left over: {words}"
    assert not _segments(), "shared memory is left over"
