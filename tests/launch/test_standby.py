"""A rank that the standby process forked is the rank that Python would have started."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.launch import rank
from holdfast.launch.rank import Request
from holdfast.launch.service import Standby

ROOT = str(Path(__file__).parents[2])
processes = pytest.mark.processes

# All that a program can see of how it was started. The depth of the stack, the parent and what
# the imports of others left (warnings, variables of the environment) are the known differences.
ITSELF = """
'''The docstring.'''
import faulthandler, json, os, signal, sys, threading
main = sys.modules["__main__"]
told = {
    "names": [__name__, __file__, __package__, __doc__, type(__loader__).__name__],
    "spec": __spec__ and [__spec__.name, __spec__.origin],
    "dunders": sorted(name for name in vars(main) if name.startswith("__")),
    "sys": [sys.argv, sys.orig_argv, sys.path, sys.executable, str(sys.flags), sys.prefix],
    "streams": [
        [s.encoding, s.errors, s.line_buffering, s.name, s.mode, s.fileno(), s.isatty()]
        for s in (sys.stdin, sys.stdout, sys.stderr)
    ],
    "written": [sys.stdout.write_through, sys.stdin.read()],
    "signals": {int(n): str(signal.getsignal(n)) for n in signal.valid_signals()},
    "mask": list(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "process": [os.getcwd(), os.getsid(0) == os.getpid() == os.getpgid(0), os.umask(0o22)],
    "threads": [threading.current_thread().name, threading.active_count()],
    "descriptors": sorted(os.listdir("/proc/self/fd")),
    "faulthandler": faulthandler.is_enabled(),
    "environment": {n: v for n, v in os.environ.items() if not n.startswith("TORCHINDUCTOR")},
}
if "torch" in sys.argv:
    import torch, numpy
    told["torch"] = [torch.get_num_threads(), torch.cuda.is_initialized()]
    a = torch.ones(600, 600)
    told["sum"] = float((a @ a).sum())  # with all threads, which a fork does not take along
print(json.dumps(told))
"""

DRAWN = """
import json, multiprocessing, random, numpy, torch
key = multiprocessing.current_process().authkey.hex()
seed, drawn = torch.initial_seed(), float(torch.rand(1))
print(json.dumps([random.random(), numpy.random.rand(), seed, drawn, key]))
"""

# How a program ends: what it writes, and its exit code.
ENDS = {
    "a message": "import sys; sys.exit('no data')",
    "a code": "raise SystemExit(7)",
    "nothing": "pass",
    "an error": "def f():\n    raise ValueError('wrong')\ntry:\n    f()\nexcept ValueError as e:\n"
    "    raise KeyError('key') from e",
    "no Python": "a = = 1",
    "an interrupt": "import atexit, os, signal\natexit.register(print, 'at exit')\n"
    "os.kill(os.getpid(), signal.SIGINT)\nimport time; time.sleep(9)",
    "a signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "a crash": "import faulthandler, ctypes; faulthandler.enable(); ctypes.string_at(0)",
    "no end": "import os; print('said', flush=True); os._exit(3)",
    "buffers": "import sys\nkept = open(sys.argv[1], 'w'); kept.write('not closed')\n"
    "class Last:\n    def __del__(self): print('deleted')\nlast = Last()",
    "threads": "import atexit, threading, time\natexit.register(print, 'at exit')\n"
    "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()",
    "a hook": "import sys\nsys.excepthook = lambda *of: print('hook', of[0].__name__)\n1 / 0",
    "an error file": "import os, sys\nos.environ['TORCHELASTIC_ERROR_FILE'] = sys.argv[1]\n"
    "from torch.distributed.elastic.multiprocessing.errors import record\n"
    "@record\ndef main():\n    raise RuntimeError('recorded')\nmain()",
    "spawned processes": "import multiprocessing, os, sys\n"
    "def work(n): return [n, __name__, os.path.basename(__file__), sys.argv[1:]]\n"
    "if __name__ == '__main__':\n"
    "    for how in ('spawn', 'fork', 'forkserver'):\n"
    "        with multiprocessing.get_context(how).Pool(1) as pool:\n"
    "            print(pool.map(work, [1, 2]))",
}
TORCH_ENDS = ("an error file",)


@pytest.fixture(scope="module")
def standby(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standby]:
    """One standby process for all tests, started in the directory of the module ``itself``."""
    folder = tmp_path_factory.mktemp("folder")
    (folder / "itself.py").write_text(ITSELF)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PYTHONPATH", ROOT)
        with Standby() as process:
            yield process


def start(words: list[str], standby: Standby | None, **options: Any) -> "subprocess.Popen[str]":
    arguments = standby.arguments(words) if standby is not None else words
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )


@processes
@pytest.mark.parametrize("program", [["itself.py", "torch", "--option"], ["-m", "itself", "a"]])
def test_what_a_program_sees_of_itself_is_the_same(
    program: list[str], standby: Standby, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # the standby process was started without it
    told = []
    for way in (None, standby):
        out, err = start(["-u", *program], way).communicate("typed", timeout=60)
        assert err == ""
        told.append(json.loads(out))
    assert told[1] == told[0]


@processes
@pytest.mark.parametrize("end", ENDS)
def test_a_program_ends_in_the_same_way(end: str, standby: Standby, tmp_path: Path) -> None:
    script, kept = tmp_path / "script.py", tmp_path / "kept"
    script.write_text(ENDS[end])
    results = []
    for way in (None, standby):
        process = start(["-u", str(script), str(kept)], way)
        out, err = process.communicate(timeout=60)
        said = kept.read_text() if kept.exists() else ""
        if end in TORCH_ENDS:  # times and process ids differ
            said = json.loads(said)["message"]["message"]
        kept.unlink(missing_ok=True)
        # A crash names the modules that were loaded and the frames below the script's.
        err = err.split("Extension modules")[0].split('\n  File "<frozen')[0]
        err = "\n".join(line for line in err.split("\n") if "holdfast/launch" not in line)
        err = err.replace('\n  File "<string>", line 1 in <module>', "")
        err = "\n".join(line for line in err.split("\n") if "Current thread 0x" not in line)
        err = "\n".join(
            line for line in err.split("\n") if end not in TORCH_ENDS or "[" not in line
        )
        results.append((process.returncode, out, err.strip(), said))
    assert results[0] == results[1]


@processes
def test_forked_ranks_draw_different_random_numbers(standby: Standby, tmp_path: Path) -> None:
    (tmp_path / "drawn.py").write_text(DRAWN)
    started = [start(["-u", str(tmp_path / "drawn.py")], standby) for _ in range(2)]
    first, second = (json.loads(process.communicate(timeout=60)[0]) for process in started)
    assert all(one != other for one, other in zip(first, second, strict=True))


def wait_for(path: Path, text: str = "") -> str:
    deadline = time.monotonic() + 30
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < deadline, f"{path} was not written"
        time.sleep(0.01)
    return path.read_text()


WAITING = """
import os, signal, sys, time
def told(number, _):
    open(sys.argv[1] + ".told", "w").write(str(number))
    if number == signal.SIGTERM: sys.exit(5)
for number in (signal.SIGTERM, signal.SIGUSR1): signal.signal(number, told)
part = sys.argv[1] + ".part"
open(part, "w").write(str(os.getpid()))
os.rename(part, sys.argv[1])
while True: time.sleep(0.01)
"""


@processes
def test_signals_reach_the_rank_and_its_exit_code_comes_back(
    standby: Standby, tmp_path: Path
) -> None:
    script, here = tmp_path / "waiting.py", tmp_path / "here"
    script.write_text(WAITING)
    process = start(["-u", str(script), str(here)], standby)
    assert int(wait_for(here)) != process.pid
    for number in (signal.SIGUSR1, signal.SIGTERM):
        process.send_signal(number)
        wait_for(tmp_path / "here.told", str(int(number)))
    assert process.wait(30) == 5


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def ends(pid: int) -> bool:
    deadline = time.monotonic() + 30
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return gone(pid)


@processes
def test_a_rank_ends_with_its_client(standby: Standby, tmp_path: Path) -> None:
    script, here = tmp_path / "waiting.py", tmp_path / "here"
    script.write_text(WAITING)
    process = start(["-u", str(script), str(here)], standby)
    pid = int(wait_for(here))
    assert not gone(pid)
    process.kill()
    process.wait(30)
    assert ends(pid)


@processes
def test_a_standby_process_that_dies_takes_its_ranks_along_and_is_started_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script, here = tmp_path / "waiting.py", tmp_path / "here"
    script.write_text(WAITING)
    with Standby() as standby:
        process = start(["-u", str(script), str(here)], standby)
        pid, first = int(wait_for(here)), standby.pid
        assert len(os.listdir(f"/proc/{first}/task")) == 1
        os.kill(first, signal.SIGKILL)
        assert process.wait(30) == -signal.SIGKILL
        assert ends(pid)  # by a signal of the kernel, which comes a moment later
        (tmp_path / "plain.py").write_text("print('done')")
        out, err = start(["-u", str(tmp_path / "plain.py")], standby).communicate(timeout=30)
        assert out == "done\n"
        assert "starts without the standby process: Connection refused" in err
        deadline = time.monotonic() + 30
        while standby.pid in (0, first) and time.monotonic() < deadline:
            time.sleep(0.01)
        second = standby.pid
        assert second not in (0, first)
        gc.collect()  # what subprocess lists here, it reaps before the thread that waits for it
        assert second not in {each.pid for each in subprocess._active}  # type: ignore[attr-defined]
    assert gone(second)
    assert not Path(standby.path).parent.exists()
    assert "the standby process ended (-9) and is started again" in capfd.readouterr().err


@processes
def test_a_rank_that_cannot_be_forked_is_started_and_says_why(
    standby: Standby, tmp_path: Path
) -> None:
    (tmp_path / "plain.py").write_text("print('done')")
    words = ["-u", str(tmp_path / "plain.py")]
    for options, why in (
        ({"env": {**os.environ, "PYTHONWARNINGS": "ignore"}}, "PYTHONWARNINGS changed"),
        ({"cwd": tmp_path}, "its directory or its processor cores"),
    ):
        out, err = start(words, standby, **options).communicate(timeout=30)
        assert out == "done\n"
        assert f"rank ? starts without the standby process: {why}" in err
        assert err.count("\n") == 1


def request(*words: str, **changed: Any) -> Request:
    cores = sorted(os.sched_getaffinity(0))
    given = {"environment": dict(rank.STARTED_WITH), "folder": os.getcwd(), "cores": cores}
    return Request(words=list(words), ignored=[], **(given | changed))


def test_only_what_would_be_the_same_rank_is_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank, "STARTED_WITH", dict(os.environ))
    script = tmp_path / "script.py"
    script.write_text("import json")
    assert request("-u", str(script), "-m").obstacle() is None
    assert request("-u", "-m", "json.tool").obstacle() is None
    started = rank.STARTED_WITH | {"RANK": "1", "OMP_NUM_THREADS": "3"}
    assert request("-u", str(script), environment=started).obstacle() is None
    (tmp_path / "script.pyc").write_text("")
    for wrong, why in (
        (request(str(script)), "not those that torchrun gives"),
        (request("-u", "-m"), "not those that torchrun gives"),
        (request("-u", str(tmp_path)), "is no readable Python file"),
        (request("-u", str(tmp_path / "script.pyc")), "is no readable Python file"),
        (request("-u", str(tmp_path / "absent.py")), "is no readable Python file"),
        (request("-u", str(script), folder="/"), "directory"),
        (request("-u", str(script), cores=[]), "cores"),
        (request("-u", str(script), environment=started | {"LD_PRELOAD": "x"}), "LD_PRELOAD"),
    ):
        assert why in (wrong.obstacle() or "")
    (tmp_path / "json").mkdir()
    assert request("-u", str(script)).obstacle() is None  # a package of the library comes first
    (tmp_path / "json" / "__init__.py").write_text("")
    assert "the name of a module that was loaded" in (request("-u", str(script)).obstacle() or "")
