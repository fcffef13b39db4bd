"""What a process that the standby process forked does to be the rank that was asked for."""

import atexit
import builtins
import ctypes
import os
import pkgutil
import runpy
import signal
import sys
import types
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader

# Read when libraries are loaded, which is before a rank has its environment. ``become`` sees to
# OMP_NUM_THREADS, which torchrun sets for ranks.
READ_EARLY = (
    *("PYTHON", "LD_", "KMP_", "GOMP_", "MKL_", "OMP_", "OPENBLAS_", "MALLOC_", "GLIBC_"),
    *("TORCH_LOGS", "TORCHDYNAMO_", "TORCHINDUCTOR_", "PYTORCH_", "HOLDFAST_PURE_PYTHON"),
)
STARTED_WITH: dict[str, str] = {}  # the environment, before libraries were loaded
starter: int | None = None  # in a forked rank, the process that started the standby process


@dataclass(frozen=True)
class Request:
    """A rank: its interpreter's arguments, environment, directory, cores and ignored signals."""

    words: list[str]
    environment: dict[str, str]
    folder: str
    cores: list[int]
    ignored: list[int]

    def first_path(self) -> str:
        """Return the folder that Python would put before all others on ``sys.path``."""
        module = self.words[1] == "-m"
        return self.folder if module else os.path.dirname(os.path.realpath(self.words[1]))

    def obstacle(self) -> str | None:
        """Return why a fork of this process would not be the same rank; None if it would."""
        if self.words[:1] != ["-u"] or len(self.words) < 2 + (self.words[1:2] == ["-m"]):
            return f"the arguments {self.words[:2]} are not those that torchrun gives"
        if self.folder != os.getcwd() or set(self.cores) != os.sched_getaffinity(0):
            return "its directory or its processor cores are others than at the start"
        given, before = self.environment, STARTED_WITH
        early = {name for name in {*given, *before} if name.startswith(READ_EARLY)}
        if changed := {n for n in early if given.get(n) != before.get(n)} - {"OMP_NUM_THREADS"}:
            return f"{', '.join(sorted(changed))} changed since the start"
        path = self.words[1]
        readable = os.path.isfile(path) and os.access(path, os.R_OK)
        archive = path.endswith(".pyc") or pkgutil.get_importer(os.path.abspath(path))
        if path != "-m" and (archive or not readable):
            return f"{path} is no readable Python file"
        return self._shadowing()

    def _shadowing(self) -> str | None:
        """Find a module beside the script that would have been imported for a loaded one."""
        with suppress(OSError):
            for entry in os.scandir(self.first_path()):
                loaded = sys.modules.get(entry.name.removesuffix(".py"))
                origin = getattr(loaded, "__file__", None)
                package = os.path.join(entry.path, "__init__.py")
                path = entry.path if entry.name.endswith(".py") else package
                if origin and os.path.isfile(path) and not os.path.samefile(path, origin):
                    return f"{path} has the name of a module that was loaded already"
        return None


def become(request: Request, descriptors: Sequence[int]) -> None:
    """Take over all that an executed program would have been given."""
    os.setsid()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for signal_ in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(signal_, signal.SIG_IGN if signal_ in request.ignored else signal.SIG_DFL)
    if signal.SIGINT not in request.ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
    # What imports added, as torch._dynamo does, they would have added in an executed program, too.
    added = {name: value for name, value in os.environ.items() if name not in STARTED_WITH}
    os.environ.clear()
    os.environ.update(added | request.environment)
    _set_threads()
    # Drawn once a process; ``random`` draws again by itself.
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if process := sys.modules.get("multiprocessing.process"):
        process.current_process().authkey = os.urandom(32)


def _set_threads() -> None:
    """Give torch and numpy the threads that they would have chosen at their import."""
    given, blas = (os.environ.get(f"{name}_NUM_THREADS") for name in ("OMP", "OPENBLAS"))
    wanted = int(given.split(",")[0]) if given else 0
    if wanted and given != STARTED_WITH.get("OMP_NUM_THREADS") and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(wanted)
    threads = int(blas) if blas else wanted or len(os.sched_getaffinity(0))
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[5].rstrip("\n") for line in maps if "openblas" in line}
    for library in map(ctypes.CDLL, paths if threads > 1 else ()):
        for name in ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads"):
            if hasattr(library, name):
                library[name](threads)


def run(request: Request) -> None:
    """Run the program as ``__main__``; exceptions are shown as the interpreter shows them.

    The module stays in ``sys.modules`` until the interpreter ends, as it does in any program.
    """
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={}, __cached__=None)
    sys.modules["__main__"] = main
    sys.orig_argv, sys.argv = [sys.executable, *request.words], request.words[1:]
    if not sys.flags.safe_path:
        sys.path.insert(0, request.first_path())
    try:
        if sys.argv[0] == "-m":
            name = sys.argv.pop(1)
            sys.modules.pop(name, None)
            runpy._run_module_as_main(name)  # type: ignore[attr-defined]
        else:
            path = os.path.abspath(sys.argv[0])
            main.__dict__.update(__file__=path, __loader__=SourceFileLoader("__main__", path))
            with open(path, "rb") as file:
                code = compile(file.read(), path, "exec")
            exec(code, main.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_globals is globals():
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        if isinstance(error, KeyboardInterrupt):  # Python ends by the signal
            atexit._run_exitfuncs()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        sys.exit(1)
