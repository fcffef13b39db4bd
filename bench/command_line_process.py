"""Runs one command line as a process forked from this one, and tells how it ended."""

import ctypes
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO, TextIOWrapper
from pathlib import Path

import psutil
import torch

from bench.command_line_draw import CLOSED, FULL, Line
from holdfast.cli.main import main
from holdfast.report.run_files import LOCK_NAME

SERVES = "(Ctrl-C ends)"
POLL_S, GRACE_S = 0.005, 10.0
MOST_DATA_BYTES = 4 * 2**30
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "sqlite3.connect")
ELSEWHERE = ("/dev/null", "/dev/zero", "/dev/tty", "/dev/shm", "/proc", "/sys", ":memory:")
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Outcome:
    """The end of a process: its exit code, or None if it was still running after the limit.

    ``made`` are the files that are new in its folder, ``strayed`` the paths outside of it that it
    opened for writing or changed and that are there, ``left`` the processes that outlived it.
    """

    code: int | None
    stdout: str
    stderr: str
    seconds: float
    made: set[str]
    strayed: list[str]
    left: list[str]


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose parent has ended, so that it sees them."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def execute(
    line: Line, folder: Path, limit_s: float, run: Callable[[list[str]], int] = main
) -> Outcome:
    """Run a command line in a folder; end it if it serves, kill it if it takes too long."""
    streams = [folder.parent / name for name in ("stdout", "stderr", "strayed")]
    for path in streams:
        path.touch()
    before, others, began_s = _names(folder), set(_descendants()), time.monotonic()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _become(line, folder, streams, run)
    code = _wait(child, streams[0], began_s + limit_s)
    seconds = time.monotonic() - began_s
    stdout, stderr, told = (path.read_text(errors="replace") for path in streams)
    strayed = [path for path in sorted(set(told.splitlines())) if Path(path).exists()]
    left = _end_descendants(others)
    made = _names(folder) - before
    return Outcome(code, stdout, stderr, seconds, made, strayed, left)


def _names(folder: Path) -> set[str]:
    """Return the files in a folder, without caches of other libraries and lock files of runs."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir())
    hidden = (".cache", ".config")
    return {str(path) for path in found if path.parts[0] not in hidden and path.name != LOCK_NAME}


def _wait(child: int, stdout: Path, until_s: float) -> int | None:
    """Wait for the end of a process; return its exit code, negative for a signal."""
    asked = False
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until_s:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        if not asked and SERVES in stdout.read_text(errors="replace"):
            os.kill(child, signal.SIGTERM)
            asked = True
        time.sleep(POLL_S)


def _end_descendants(others: set[psutil.Process]) -> list[str]:
    """Kill descendants that do not end within a grace time, except others, and name them."""
    until_s = time.monotonic() + GRACE_S
    while alive := [each for each in _descendants() if each not in others]:
        if time.monotonic() > until_s:
            break
        time.sleep(POLL_S)
    left = []
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            left.append(" ".join(process.cmdline())[:200])
            process.kill()
    psutil.wait_procs(alive, timeout=GRACE_S)
    return left


def _descendants() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.status() == psutil.STATUS_ZOMBIE:
                with suppress(ChildProcessError):
                    os.waitpid(process.pid, os.WNOHANG)
            else:
                found.append(process)
    return found


def _become(line: Line, folder: Path, streams: list[Path], run: Callable[[list[str]], int]) -> None:
    """Run the command line in this process, as the installed command would, and end it."""
    os.setsid()
    os.chdir(folder)
    for name in [name for name in os.environ if name.startswith(("HOLDFAST_", "COLUMNS"))]:
        del os.environ[name]
    os.environ |= {"HOME": str(folder), "TMPDIR": str(folder.parent), "OMP_NUM_THREADS": "1"}
    os.environ |= {"XDG_CACHE_HOME": str(folder / ".cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    os.environ |= line.environment
    encoding = line.environment.get("PYTHONIOENCODING", "utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = TextIOWrapper(FileIO(0, closefd=False))
    os.dup2(_open_stdout(line.stdout, streams[0]), 1)
    os.dup2(os.open(streams[1], os.O_WRONLY | os.O_APPEND), 2)
    sys.stdout = TextIOWrapper(FileIO(1, "w", closefd=False), encoding, line_buffering=True)
    sys.stderr = TextIOWrapper(
        FileIO(2, "w", closefd=False), encoding, "backslashreplace", write_through=True
    )
    tempfile.tempdir = None
    torch.set_num_threads(1)
    sys.dont_write_bytecode = True
    sys.argv = ["holdfast", *line.words]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_DATA_BYTES, MOST_DATA_BYTES))
    _watch_writes(folder, os.open(streams[2], os.O_WRONLY | os.O_APPEND))
    code = _code_of(run, list(line.words))
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(code)


def _open_stdout(kind: str, path: Path) -> int:
    if kind == FULL:
        return os.open("/dev/full", os.O_WRONLY)
    if kind == CLOSED:
        reader, writer = os.pipe()
        os.close(reader)
        return writer
    return os.open(path, os.O_WRONLY | os.O_APPEND)


def _code_of(run: Callable[[list[str]], int], words: list[str]) -> int:
    """Return the exit code of a call, as the interpreter would exit."""
    try:
        return int(run(words))
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1


def _watch_writes(folder: Path, told: int) -> None:
    """Note every path outside of the folder that this process opens for writing or changes."""
    allowed = (str(folder.parent), *ELSEWHERE)

    def look(name: str, given: tuple[object, ...]) -> None:
        if name == "open":
            path, mode, flags = given
            writes = (isinstance(flags, int) and flags & WRITES) or mode in ("w", "a", "x", "r+")
        else:
            path, writes = given[0] if given else None, name in CHANGES
        if writes and isinstance(path, str | bytes | os.PathLike):
            whole = os.path.abspath(os.fsdecode(path))
            if not whole.startswith(allowed) and os.fsdecode(path) not in ELSEWHERE:
                os.write(told, f"{whole}\n".encode(errors="replace"))

    sys.addaudithook(look)
