"""Where the processes of a bench wait, for the error that says that they took too long."""

import faulthandler
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

STACKS_SIGNAL = signal.SIGUSR1
ANSWER_S = 2.0  # for a process to write its stacks
TAIL_CHARACTERS = 6000


def show_on_demand() -> None:
    """Have this process write the stacks of all its threads to stderr at each ``STACKS_SIGNAL``.

    The handler needs neither the interpreter nor its lock.
    """
    faulthandler.register(STACKS_SIGNAL, all_threads=True)


def whereabouts(processes: Sequence["subprocess.Popen[bytes]"], logs: Sequence[Path]) -> str:
    """Say of each process how it ended, or in which calls its threads are; ``logs`` have stderr.

    A process that cannot show its stacks, as it still imports or already exits, is ended by this.
    """
    running = [process for process in processes if process.poll() is None]
    threads = {process.pid: kernel_waits(process.pid) for process in running}
    for process in running:
        process.send_signal(STACKS_SIGNAL)
    time.sleep(ANSWER_S if running else 0.0)
    said = []
    for number, (process, log) in enumerate(zip(processes, logs, strict=True)):
        code = process.poll()
        ended = "runs" if code is None else f"ended with exit code {code}"
        if process in running and code is not None:
            ended = f"ran outside of its own code, and {ended} when it was asked for its stacks"
        said += [f"--- process {number} {ended}", *threads.get(process.pid, [])]
        said.append(log.read_text(errors="replace")[-TAIL_CHARACTERS:].strip())
    return "\n".join(said)


def kernel_waits(pid: int) -> list[str]:
    """Return the name of each thread of a process and where it waits in the kernel, if it does."""
    found = []
    with suppress(OSError):
        for task in sorted(Path(f"/proc/{pid}/task").iterdir()):
            name, waits = (task / "comm").read_text().strip(), (task / "wchan").read_text()
            found.append(f"thread {task.name} {name}: {waits if waits != '0' else 'runs'}")
    return found
