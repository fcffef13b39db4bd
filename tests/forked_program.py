"""A program that is to run in a fork of a process which has everything imported."""

import ctypes
import fcntl
import functools
import io
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PYTHON = sys.executable  # which a test may replace
# Who sets these has a program executed: they are read while modules are imported.
EXECUTED = ("HOLDFAST_PURE_PYTHON", "TRITON_INTERPRET")
# A variable by which others find a process, in /proc; the server's own has room for its value.
SHOWN = "HOLDFAST_HOST"
FAR = 512  # a number of a file that nobody has open


@dataclass(frozen=True)
class Request:
    """A program to run: the words after the interpreter's own name, and where to run them."""

    words: list[str]
    environment: dict[str, str]
    folder: str | None
    new_session: bool
    namespaces: list[str]
    # Descriptors beside the standard streams, which keep their numbers.
    descriptors: Sequence[int] = ()
    ends_with_parent: bool = False

    @classmethod
    def of(cls, popen: dict[str, Any]) -> "Request | None":
        """The request equal to a ``Popen`` call, or None if only an executed program will do."""
        words = [os.fsdecode(word) for word in popen["args"]]
        namespaces, words = _entered(words)
        before = getattr(popen["preexec_fn"], "__name__", None)
        special = before not in (None, "end_with_parent") or popen["pass_fds"] or popen["shell"]
        if words[:1] != [PYTHON] or special:
            return None
        if not (program := [word for word in words[1:] if word != "-u"]):
            return None
        if program[0].startswith("-") and program[0] not in ("-m", "-c"):
            return None
        environment = dict(os.environ if popen["env"] is None else popen["env"])
        if any(name in environment for name in EXECUTED):
            return None
        folder = os.fsdecode(popen["cwd"]) if popen["cwd"] is not None else None
        session = popen["start_new_session"]
        return cls(words[1:], environment, folder, session, namespaces, (), before is not None)


def _entered(words: list[str]) -> tuple[list[str], list[str]]:
    """The namespaces that ``nsenter`` is to enter, and the command that it would start there."""
    if words[:1] != ["nsenter"]:
        return [], words
    end = words.index("--")
    return [word.partition("=")[2] for word in words[1:end]], words[end + 1 :]


def become(request: Request, streams: Sequence[int]) -> None:
    """Take over everything that an executed program would have been given."""
    import torch

    from holdfast.snapshot.node import supervisor

    for number, stream in zip((0, 1, 2, *request.descriptors), _apart(streams), strict=True):
        os.dup2(stream, number)
        os.close(stream)
    if request.new_session:
        os.setsid()
    if request.ends_with_parent:
        supervisor.end_with_parent()
    if request.folder is not None:
        os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    _show_variable(request.environment.get(SHOWN, ""))
    _customise()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "-u" in request.words:
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
    threads = request.environment.get("OMP_NUM_THREADS")
    torch.set_num_threads(int(threads) if threads else len(os.sched_getaffinity(0)))


def _customise() -> None:
    """Run the ``sitecustomize.py`` that an interpreter would have found in ``PYTHONPATH``."""
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    files = (Path(folder, "sitecustomize.py") for folder in folders if folder)
    if (file := next(filter(Path.exists, files), None)) is not None:
        exec(compile(file.read_text(), file, "exec"), {"__file__": str(file)})


def _apart(descriptors: Sequence[int]) -> list[int]:
    """The same files under numbers that no other file is to have."""
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD, FAR) for each in descriptors]
    for each in descriptors:
        os.close(each)
    return moved


def _shown_memory(first_field: int) -> tuple[int, int]:
    """Where the kernel reads the command line (48, as proc(5) counts) or the environment (50)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[first_field - 3]), int(fields[first_field - 2])


@functools.cache
def room_of_variable() -> tuple[int, int]:
    """Where the kernel reads the value of ``SHOWN``, and for how many bytes there is room.

    The server asks first, so that everything that is forked from it knows.
    """
    start, end = _shown_memory(50)
    memory = ctypes.string_at(start, end - start)
    place = memory.index(f"{SHOWN}=".encode()) + len(SHOWN) + 1
    return start + place, memory.index(b"\0", place) - place


def _show_variable(value: str) -> None:
    """Put the value of ``SHOWN`` where the kernel reads it, for those who look for it there."""
    place, room = room_of_variable()
    ctypes.memmove(place, value.encode().ljust(room, b"\0"), room)


def show_command(words: Sequence[str]) -> None:
    """Put a command line where the kernel reads it, for those who look for the process by it.

    As setproctitle(3) has it: no NUL at the very end tells the kernel to stop at the first one.
    """
    start, end = _shown_memory(48)
    line = " ".join(words).encode()[: end - start - 2].ljust(end - start - 1, b"\0") + b"."
    ctypes.memmove(start, line, end - start)
