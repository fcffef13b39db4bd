"""Starts Python programs by forking a process that has imported torch and holdfast already.

``python -m holdfast_lab.trainer.worker`` spends two to four seconds of processor time on imports
before its first statement. Within ``Client.forking()``, ``subprocess.Popen`` hands every command
that would start this interpreter to a server process instead, which forks; all other commands, and
options that a fork cannot honour, start as ever. What is started has its own process id, session,
environment, working directory and standard streams, runs the program as ``__main__`` and ends as
the interpreter does, but without taking half a million objects apart. It is a child of whoever
asked for it, so that signals, exit codes, ``PR_SET_PDEATHSIG`` and ``nsenter`` work as they do for
a program that was executed. What it starts itself is forked as well: it has a server of its own.

The workers of pytest-xdist and multiprocessing's forkserver are forked like this, too.
"""

import atexit
import ctypes
import functools
import importlib
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from multiprocessing import forkserver, util
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
from forked_program import FAR, SHOWN, Request, become, room_of_variable, show_command

# A program that has one thread, and starts another one, which is to end with it.
SMP = "holdfast.snapshot.node.smp"
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
    "holdfast.snapshot.disk.persister",
    SMP,
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
# What a worker of pytest-xdist begins with, and the variable that tells it of a server of its own.
WORKER, INHERITED = "import sys;exec(eval(sys.stdin.readline()))", "PROCESS_SERVER"
FORKSERVER = "from multiprocessing.forkserver import main"
serve_one = forkserver._serve_one  # type: ignore[attr-defined]
execute_child = subprocess.Popen._execute_child  # type: ignore[attr-defined]
# The server's last argument: room for the command lines of what is forked from it.
ROOM = "." * 8000
PIPE_ENDS = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
_MESSAGE_BYTES = 1 << 17
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans(adopt: bool = True) -> None:
    """Make this process the parent of every descendant whose own parent has ended, or no more."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def commands() -> dict[psutil.Process, str]:
    """The command lines of the descendants of this process; none of those that have ended."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if command := " ".join(process.cmdline()):
                found[process] = command
    return found


def descendants(*words: str) -> list[psutil.Process]:
    """The descendants of this process that run a command with all of these in it."""
    return [p for p, command in commands().items() if all(word in command for word in words)]


class Client:
    """The connection to a server; one that this process has all to itself."""

    def __init__(self, control: socket.socket) -> None:
        self._control, self._lock = control, threading.Lock()
        # What is forked for this process becomes its child once the process in between has ended;
        # for a process that this one forks nothing can be forked, as it would become ours.
        adopt_orphans()
        os.register_at_fork(after_in_child=_execute)

    def start(self, request: Request, streams: Sequence[int]) -> int:
        """Start a program; its process id.

        Args:
            request: The program.
            streams: What are to be its standard streams, and its ``request.descriptors``.
        """
        with self._lock:
            socket.send_fds(self._control, [json.dumps(asdict(request)).encode()], streams)
            answer = self._control.recv(_MESSAGE_BYTES)
        if not answer.isdigit():
            raise OSError(answer.decode() or "the process server has ended")
        return int(answer)

    def forking(self) -> Any:
        """A context in which ``subprocess.Popen`` forks the server for Python programs."""
        return forking_for(self.start)


def forking_for(fork: Callable[[Request, Sequence[int]], int]) -> Any:
    """A context in which ``subprocess.Popen`` has Python programs forked, of given streams."""
    signature = inspect.signature(execute_child)

    def start(popen: Any, *given: Any) -> None:
        call = signature.bind(popen, *given).arguments
        request = Request.of(call)
        if request is None:
            execute_child(popen, *given)
            return
        given_streams = (call["p2cread"], call["c2pwrite"], call["errwrite"])
        streams = [own if end == -1 else end for own, end in enumerate(given_streams)]
        try:
            popen.pid = fork(request, streams)
            popen._child_created = True
        finally:
            popen._close_pipe_fds(*(call[end] for end in PIPE_ENDS))

    return mock.patch.object(subprocess.Popen, "_execute_child", start)


def executing() -> Any:
    """A context in which ``subprocess.Popen`` executes all programs, whatever is around it."""
    return mock.patch.object(subprocess.Popen, "_execute_child", execute_child)


def _execute() -> None:
    subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]


def _forked_here(request: Request, streams: Sequence[int]) -> int:
    """Run a program in a fork of this process, which has one thread; its process id."""
    if pid := os.fork():
        return pid
    try:
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        moved = [os.dup(stream) for stream in streams]
        become(request, moved)
        os.closerange(3, FAR)
        run_to_the_end(request)
    except BaseException:  # nothing of the program that was forked may go on
        traceback.print_exc()
    finally:
        os._exit(1)


class Server:
    """A process that has imported everything and forks."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        inherited = os.environ.pop(INHERITED, None)
        self._control = socket.socket(fileno=int(inherited)) if inherited else self._executed()
        self.client = Client(self._control)

    def _executed(self) -> socket.socket:
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
        return ours

    def close(self) -> None:
        """End the server; what it forked lives on."""
        self._control.close()
        if self._process is not None:
            self._process.wait(10)


@functools.cache
def server() -> Server:
    """Return this process's server, which ends with it."""
    made = Server()
    atexit.register(made.close)
    return made


def serve(control: socket.socket) -> Request | None:
    """Fork for every request; returns the request in the process that is to run it.

    Returns None once nobody can ask any more.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        message, streams, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 8)
        if not message:
            return None
        request = Request(**json.loads(message))
        answer = _fork(request)
        if answer is None:
            control.close()
            become(request, streams)
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


def prepare_forkserver() -> None:
    """Fork multiprocessing's forkserver, too, whichever test is the first to use it."""
    execute, ensure_running = util.spawnv_passfds, forkserver._forkserver.ensure_running

    def start(executable: str, words: Sequence[str], descriptors: Sequence[int]) -> int:
        if not words[-1].startswith(FORKSERVER):
            return execute(executable, words, descriptors)
        request = Request(["-c", words[-1]], dict(os.environ), None, False, [], descriptors)
        return server().client.start(request, (0, 1, 2, *descriptors))

    def ensure() -> None:
        with mock.patch.dict(os.environ, ALONE), mock.patch.object(util, "spawnv_passfds", start):
            ensure_running()

    # Contexts call the module's function, which is the server's method as it was before.
    forkserver.set_forkserver_preload = lambda names: None
    forkserver._forkserver.ensure_running = ensure


def quicken_rendezvous() -> None:
    """Let torchrun's rendezvous find the caller's name, for its log, without ``inspect.stack``.

    That looks through all imported modules for each frame: a second where there are thousands, and
    the agents turn in a loop of it.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    def name_of_caller(depth: int = 2) -> str:
        return sys._getframe(depth).f_code.co_name

    dynamic_rendezvous.get_method_name = name_of_caller


def run(request: Request) -> None:
    """Run the program as ``__main__``; whatever it raises is raised here."""
    program = [word for word in request.words if word != "-u"]
    own = request.environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in own if path and path not in sys.path]
    if program[:2] == ["-m", SMP]:
        forking_for(_forked_here).start()
    elif WORKER in program[1:2]:
        os.environ[INHERITED] = str(_forked_server()[0].detach())
    elif program[1:] and program[1].startswith(FORKSERVER):
        forkserver._serve_one = _serve_one  # type: ignore[attr-defined]
    elif request.environment.get("LOCAL_RANK", "0") == "0":  # others start nothing
        atexit.register(_serving_this_process())
    show_command([sys.executable, *request.words])
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


def _forked_server() -> tuple[socket.socket, int]:
    """Fork a server for this process alone, before it starts threads.

    Returns:
        The connection to it, and its process id.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if pid := os.fork():
        theirs.close()
        return ours, pid
    ours.close()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    run_served(theirs)
    os._exit(0)


def _serving_this_process() -> Callable[[], None]:
    """Have a server fork what this process starts; a function that ends the server."""
    owner, (control, pid) = os.getpid(), _forked_server()
    Client(control).forking().start()

    def end() -> None:
        if os.getpid() == owner:
            control.close()
            os.waitpid(pid, 0)

    return end


def _serve_one(*given: Any) -> int:
    """Be a process of multiprocessing's forkserver, with a server for what that starts."""
    end = _serving_this_process()
    code: int = serve_one(*given)
    end()
    return code


def run_served(control: socket.socket) -> None:
    """Serve; in what is forked, run the program."""
    request = serve(control)
    if request is not None:
        run_to_the_end(request)


def run_to_the_end(request: Request) -> None:
    """Run a program; end as the interpreter does, unless it raises what the interpreter prints.

    All but that the interpreter takes half a million objects apart, for half a second.
    """
    status: object = None
    try:
        run(request)
    except SystemExit as ended:
        status = ended.code
    if not isinstance(status, int | None):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    os._exit((status or 0) & 0xFF)


def main() -> None:
    """Import everything, then fork on demand until the client closes the connection."""
    for name in PRELOADED:
        importlib.import_module(name)
    quicken_rendezvous()
    room_of_variable()
    importlib.import_module("tests.frozen_heap")
    run_served(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
