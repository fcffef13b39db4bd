"""Starts Python programs by forking a process that has imported torch and holdfast already.

``python -m holdfast_lab.trainer.worker`` spends two to four seconds of processor time on imports
before its first statement. Within ``Client.forking()``, ``subprocess.Popen`` hands every command
that would start this interpreter to a server process instead, which forks; all other commands, and
options that a fork cannot honour, start as ever. What is started has its own process id, session,
environment, working directory and standard streams, runs the program as ``__main__`` and ends
through the interpreter's normal exit. It is a child of whoever asked for it, so that signals, exit
codes, ``PR_SET_PDEATHSIG`` and ``nsenter`` work as they do for a program that was executed.
"""

import ctypes
import functools
import importlib
import inspect
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

# What the programs of the tests import.
PRELOADED = (
    "torch._dynamo",  # torch.optim imports it at its first use
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.distributed.tensor.parallel",
    "torch.fx.experimental.symbolic_shapes",
    # The command line imports the verbs when they are asked for.
    *(f"holdfast.cli.{name}" for name in ("main", "calibration", "plan", "report")),
    *(f"holdfast.cli.{name}" for name in ("run", "screening", "snapshots_export")),
    "holdfast.guard",
    "holdfast.snapshot.client.snapshots",
    *(f"holdfast_lab.cli.{name}" for name in ("campaign", "demo", "study", "train")),
    "holdfast.screen.worker_handle",
    "holdfast.screen.worker",
    "holdfast_lab.study.sdc.ranks",
    "holdfast_lab.trainer.agent",
    "holdfast_lab.trainer.worker",
    "holdfast_lab.zoo.cases",
    "holdfast_lab.zoo.ranks.rank",
    "bench.nodes_rank",
)
# One thread, as a fork takes none along but the one that forks.
ALONE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# Programs that start others, whose imports are to be saved as well.
LAUNCHERS = ("holdfast.cli.main", "holdfast_lab.trainer.agent")
# The server's last argument: room for the command lines of what is forked from it.
ROOM = "." * 8000
# Who sets these has a program executed: they are read while modules are imported.
EXECUTED = ("HOLDFAST_PURE_PYTHON", "TRITON_INTERPRET")
# A variable by which others find a process, in /proc; the server's own has room for its value.
SHOWN = "HOLDFAST_HOST"
PIPE_ENDS = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
_MESSAGE_BYTES = 1 << 17
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Request:
    """A program to run: the words after the interpreter's own name, and where to run them."""

    words: list[str]
    environment: dict[str, str]
    folder: str | None
    new_session: bool
    namespaces: list[str]

    @classmethod
    def of(cls, popen: dict[str, Any]) -> "Request | None":
        """The request equal to a ``Popen`` call, or None if only an executed program will do."""
        words = [os.fsdecode(word) for word in popen["args"]]
        namespaces, words = _entered(words)
        special = ("preexec_fn", "pass_fds", "shell")
        if words[:1] != [sys.executable] or any(popen[name] for name in special):
            return None
        if not (program := [word for word in words[1:] if word != "-u"]):
            return None
        if program[0].startswith("-") and program[0] not in ("-m", "-c"):
            return None
        environment = dict(os.environ if popen["env"] is None else popen["env"])
        if any(name in environment for name in EXECUTED):
            return None
        folder = os.fsdecode(popen["cwd"]) if popen["cwd"] is not None else None
        return cls(words[1:], environment, folder, popen["start_new_session"], namespaces)


def _entered(words: list[str]) -> tuple[list[str], list[str]]:
    """The namespaces that ``nsenter`` is to enter, and the command that it would start there."""
    if words[:1] != ["nsenter"]:
        return [], words
    end = words.index("--")
    return [word.partition("=")[2] for word in words[1:end]], words[end + 1 :]


def adopt_orphans(adopt: bool = True) -> None:
    """Make this process the parent of every descendant whose own parent has ended, or no more."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def descendants(*words: str) -> list[psutil.Process]:
    """The descendants of this process that run a command with all of these in it."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            command = " ".join(process.cmdline())
            if command and all(word in command for word in words):
                found.append(process)
    return found


class Client:
    """The connection to a server; one that this process has all to itself."""

    def __init__(self, control: socket.socket) -> None:
        self._control, self._lock = control, threading.Lock()
        # What is forked for this process becomes its child once the process in between has ended.
        adopt_orphans()

    def start(self, request: Request, streams: Sequence[int]) -> int:
        """Start a program; its process id."""
        with self._lock:
            socket.send_fds(self._control, [json.dumps(asdict(request)).encode()], streams)
            answer = self._control.recv(_MESSAGE_BYTES)
        if not answer.isdigit():
            raise OSError(answer.decode() or "the process server has ended")
        return int(answer)

    def forking(self) -> Any:
        """A context in which ``subprocess.Popen`` forks the server for Python programs."""
        execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]
        signature = inspect.signature(execute)

        def start(popen: Any, *given: Any) -> None:
            call = signature.bind(popen, *given).arguments
            request = Request.of(call)
            if request is None:
                execute(popen, *given)
                return
            given_streams = (call["p2cread"], call["c2pwrite"], call["errwrite"])
            streams = [own if end == -1 else end for own, end in enumerate(given_streams)]
            try:
                popen.pid = self.start(request, streams)
                popen._child_created = True
            finally:
                popen._close_pipe_fds(*(call[end] for end in PIPE_ENDS))

        return mock.patch.object(subprocess.Popen, "_execute_child", start)


class Server:
    """A process that has imported everything and forks."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root = str(Path(__file__).parents[1])
        paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), ROOM],
                env=os.environ | ALONE | {"PYTHONPATH": paths, SHOWN: "." * 500},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._control = ours
        self.client = Client(ours)

    def close(self) -> None:
        """End the server; what it forked lives on."""
        self._control.close()
        self._process.wait(10)


def serve(control: socket.socket) -> Request | None:
    """Fork for every request; returns the request in the process that is to run it.

    Returns None once nobody can ask any more.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        message, streams, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 3)
        if not message:
            return None
        request = Request(**json.loads(message))
        answer = _fork(request)
        if answer is None:
            control.close()
            _become(request, streams)
            return request
        for stream in streams:
            os.close(stream)
        control.send(answer)


def _fork(request: Request) -> bytes | None:
    """Fork a process that outlives its parent at once; None in that process, else its id."""
    said, saying = os.pipe()
    going, go = os.pipe()
    between = os.fork()
    if between == 0:
        child = os.fork()
        if child:
            os.write(saying, str(child).encode())
            os._exit(0)
        for end in (said, saying, go):
            os.close(end)
        os.read(going, 1)  # returns once this process belongs to whoever asked for it
        os.close(going)
        if request.namespaces:
            _enter(request.namespaces)
        return None
    os.close(saying)
    os.close(going)
    os.waitpid(between, 0)
    os.close(go)
    with open(said, "rb") as file:
        return file.read()


def _enter(namespaces: Sequence[str]) -> None:
    """Fork into namespaces; the parent stands for what is there, as ``nsenter`` does."""
    for path in namespaces:
        with open(path, "rb") as namespace:
            if _libc.setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"cannot enter {path}")
    program = os.fork()
    if program == 0:
        return
    code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    if code >= 0:
        os._exit(code)
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)


def _become(request: Request, streams: Sequence[int]) -> None:
    """Take over everything that an executed program would have been given."""
    import torch

    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    if request.new_session:
        os.setsid()
    if request.folder is not None:
        os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    _show_variable(request.environment.get(SHOWN, ""))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "-u" in request.words:
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
    threads = request.environment.get("OMP_NUM_THREADS")
    torch.set_num_threads(int(threads) if threads else len(os.sched_getaffinity(0)))


def prepare_forkserver() -> None:
    """Let multiprocessing's forkserver import the same, whichever test is the first to use it."""
    server = forkserver._forkserver
    server.set_forkserver_preload([*PRELOADED, "tests.frozen_heap"])
    ensure_running = server.ensure_running

    def start_with_one_thread() -> None:
        with mock.patch.dict(os.environ, ALONE):
            ensure_running()

    # Contexts call the module's function, which is the server's method as it was before.
    forkserver.set_forkserver_preload = lambda names: None
    server.ensure_running = start_with_one_thread


def quicken_rendezvous() -> None:
    """Let torchrun's rendezvous find the caller's name, for its log, without ``inspect.stack``.

    That looks through all imported modules for each frame: a second where there are thousands, and
    the agents turn in a loop of it.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    def name_of_caller(depth: int = 2) -> str:
        return sys._getframe(depth).f_code.co_name

    dynamic_rendezvous.get_method_name = name_of_caller


def _shown_memory(first_field: int) -> tuple[int, int]:
    """Where the kernel reads the command line (48, as proc(5) counts) or the environment (50)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[first_field - 3]), int(fields[first_field - 2])


@functools.cache
def _room_of_variable() -> tuple[int, int]:
    """Where the kernel reads the value of ``SHOWN``, and for how many bytes there is room.

    The server asks first, so that everything that is forked from it knows.
    """
    start, end = _shown_memory(50)
    memory = ctypes.string_at(start, end - start)
    place = memory.index(f"{SHOWN}=".encode()) + len(SHOWN) + 1
    return start + place, memory.index(b"\0", place) - place


def _show_variable(value: str) -> None:
    """Put the value of ``SHOWN`` where the kernel reads it, for those who look for it there."""
    place, room = _room_of_variable()
    ctypes.memmove(place, value.encode().ljust(room, b"\0"), room)


def _show_command(words: Sequence[str]) -> None:
    """Put a command line where the kernel reads it, for those who look for the process by it.

    As setproctitle(3) has it: no NUL at the very end tells the kernel to stop at the first one.
    """
    start, end = _shown_memory(48)
    line = " ".join(words).encode()[: end - start - 2].ljust(end - start - 1, b"\0") + b"."
    ctypes.memmove(start, line, end - start)


def run(request: Request) -> None:
    """Run the program as ``__main__``; whatever it raises is raised here."""
    program = [word for word in request.words if word != "-u"]
    own = request.environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in own if path and path not in sys.path]
    if program[0] == "-m" and program[1] in LAUNCHERS:
        _serve_launcher()
    _show_command([sys.executable, *request.words])
    if program[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = program[1:]
        sys.modules.pop(program[1], None)
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    elif program[0] == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *program[2:]]
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(program[1], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.path.insert(0, str(Path(program[0]).resolve().parent))
        sys.argv = program
        runpy.run_path(program[0], run_name="__main__")


def _serve_launcher() -> None:
    """Fork a server of its own for a launcher, before that starts threads; use it from now on."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        run_served(theirs)
        sys.exit()
    theirs.close()
    Client(ours).forking().start()


def run_served(control: socket.socket) -> None:
    """Serve; in what is forked, run the program."""
    request = serve(control)
    if request is not None:
        run(request)


def main() -> None:
    """Import everything, then fork on demand until the client closes the connection."""
    for name in PRELOADED:
        importlib.import_module(name)
    quicken_rendezvous()
    _room_of_variable()
    importlib.import_module("tests.frozen_heap")
    run_served(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
