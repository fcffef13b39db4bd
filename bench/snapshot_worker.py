"""One candidate of ``bench.snapshot_peers`` in a process of its own: its gate, or its figures.

``save`` saves, writes down the digest of what it saved, and kills itself; ``measure`` restores
that, checks it, and then times saves and training steps.
"""

import argparse
import json
import os
import signal
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import psutil
import torch
from torch import nn

from bench.paired import paired
from bench.snapshot_candidates import CANDIDATES, Candidate
from holdfast.digest.tensors import state_digest
from holdfast.snapshot.node.supervisor import end_with_parent
from holdfast_lab.trainer.gpt import GPT, GPTConfig, loss

BYTES_A_PARAMETER = 12
WIDTHS = (64, *range(128, 1537, 128))
LAYERS = range(4, 25)
_VOCABULARY = 256
FIRST_MEASURED_STEP = 1000
IDLE_SAVES = 9  # the first into each slot fault its pages into this process
WATCHED_STEPS = 4
WATCH_EVERY_S = 0.1
SAVED_NAME, RESULT_NAME = "saved.digest", "result.json"


def config_for(nbytes: int, tokens: int) -> GPTConfig:
    """The GPT whose parameters and Adam moments come nearest to ``nbytes``.

    Raises:
        ValueError: the smallest is twice as large.
    """
    shapes = [(width, layers) for width in WIDTHS for layers in LAYERS]
    width, layers = min(shapes, key=lambda shape: abs(_state_bytes(*shape, tokens) - nbytes))
    found = _state_bytes(width, layers, tokens)
    if found > 2 * nbytes:
        raise ValueError(f"a state of {nbytes} bytes: {found} is least")
    return GPTConfig(layers=layers, heads=width // 64, width=width, context=tokens)


def _state_bytes(width: int, layers: int, tokens: int) -> int:
    block = 12 * width**2 + 13 * width
    return BYTES_A_PARAMETER * (layers * block + (_VOCABULARY + tokens + 2) * width)


class Training:
    """A GPT, fused AdamW, and a step on bytes drawn at random."""

    def __init__(self, nbytes: int, tokens: int, seed: int) -> None:
        torch.manual_seed(seed)
        config = config_for(nbytes, tokens)
        self.model = GPT(config)
        self.forward = self.laid_out(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        drawn = torch.randint(_VOCABULARY, (1, tokens + 1))
        self.inputs, self.targets = drawn[:, :-1], drawn[:, 1:]
        self.step()

    def laid_out(self, model: GPT) -> nn.Module:
        """Return the module that is called; several ranks divide or wrap the model here."""
        return model

    def forward_backward(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss(self.forward, self.inputs, self.targets).backward()

    def step(self) -> None:
        self.forward_backward()
        self.optimizer.step()

    def digest(self) -> str:
        return state_digest([self.model.state_dict(), self.optimizer.state_dict()])

    def tensors(self) -> list[torch.Tensor]:
        """All that is saved: parameters and optimizer state."""
        moments = self.optimizer.state_dict()["state"].values()
        held = [tensor for state in moments for tensor in state.values()]
        return [parameter.detach() for parameter in self.model.parameters()] + held


def nbytes_of(tensors: list[torch.Tensor]) -> int:
    """Their size in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def memcpy_s(tensors: list[torch.Tensor], repeats: int = 5) -> float:
    """The limit: all of them copied by one thread into memory that was touched before."""
    target = np.full(nbytes_of(tensors), 1, np.uint8)
    sources = [tensor.reshape(-1).view(torch.uint8).numpy() for tensor in tensors]
    return statistics.median(_copied_s(target, sources) for _ in range(repeats))


def _copied_s(target: "np.ndarray[Any, Any]", sources: list[Any]) -> float:
    started_s, offset = time.perf_counter(), 0
    for source in sources:
        np.copyto(target[offset : offset + len(source)], source)
        offset += len(source)
    return time.perf_counter() - started_s


def held_bytes(folder: Path) -> int:
    """Memory of this process, its children and whoever else works in ``folder``, shared pages once.

    Files in the page cache do not count.
    """
    own = psutil.Process()
    pids = {own.pid, *(child.pid for child in own.children(recursive=True))}
    for process in psutil.process_iter(["pid", "cmdline"]):
        if any(str(folder) in word for word in process.info["cmdline"] or []):
            pids.add(process.info["pid"])
    return sum(_proportional_bytes(pid) for pid in pids)


def _proportional_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    named = ("Pss_Anon:", "Pss_Shmem:")
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(named))


class PeakMemory:
    """The most memory that was held while this context was open."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.peak, self._over = folder, 0, Event()
        self._thread = Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._over.wait(WATCH_EVERY_S):
            self.peak = max(self.peak, held_bytes(self.folder))

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()
        self.peak = max(self.peak, held_bytes(self.folder))


def sync_folder(folder: Path) -> None:
    """See that every file in it is on the disk."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            with open(path, "rb") as file:
                os.fsync(file.fileno())


class Measurement:
    """Saves and steps of one candidate, with a number for each save."""

    def __init__(self, training: Training, candidate: Candidate, first_step: int) -> None:
        self.training, self.candidate, self.saves = training, candidate, first_step
        self.stalls_s: list[float] = []

    def step(self) -> None:
        """A training step beside a save; how long training waited is noted."""
        self.saves += 1
        begin_s = _timed(lambda: self.candidate.begin(self.saves))
        self.training.forward_backward()
        finish_s = _timed(self.candidate.finish)
        self.training.optimizer.step()
        self.stalls_s.append(begin_s + finish_s)

    def idle(self) -> dict[str, float]:
        """One save while nothing else runs: until training may go on, until safe, until on disk."""
        self.saves += 1
        started_s = time.perf_counter()
        self.candidate.begin(self.saves)
        self.candidate.finish()
        copied_s = time.perf_counter()
        self.candidate.settle()
        safe_s = time.perf_counter()
        if self.candidate.on_disk:
            sync_folder(self.candidate.folder)
        times = {"copy_s": copied_s, "safe_s": safe_s, "durable_s": time.perf_counter()}
        return {name: at_s - started_s for name, at_s in times.items()}

    def check(self) -> None:
        """The gate: what is restored in this process must be what was saved.

        Raises:
            SystemExit: it is not, or there was nothing to restore.
        """
        self.idle()
        saved = self.training.digest()
        self.training.step()
        if self.training.digest() == saved:
            raise SystemExit("a training step changed nothing: the gate proves nothing")
        self.training.optimizer.zero_grad(set_to_none=True)
        if not self.candidate.restore() or self.training.digest() != saved:
            raise SystemExit("what was restored is not what was saved; nothing was timed")

    def slowdown(self, steps: int, pairs: int) -> dict[str, Any]:
        """The loop with a save a step against the loop without."""

        def bare() -> None:
            for _ in range(steps):
                self.training.step()

        def saving() -> None:
            for _ in range(steps):
                self.step()

        # No save of one side is left to be done in the other's time.
        timed = paired(bare, saving, pairs=pairs, warmup=1, before=self.candidate.settle)
        self.candidate.settle()
        measured = self.stalls_s[steps:]
        return timed | {"stall_s": statistics.median(measured), "stall_max_s": max(measured)}

    def held(self) -> int:
        """The most memory that is held in a few steps."""
        with PeakMemory(self.candidate.folder) as memory:
            for _ in range(WATCHED_STEPS):
                self.step()
            self.candidate.settle()
        return memory.peak


def _timed(run: Callable[[], None]) -> float:
    started_s = time.perf_counter()
    run()
    return time.perf_counter() - started_s


def save(training: Training, kind: type[Candidate], folder: Path) -> None:
    """Save twice, write down the digest of the newer, and die by SIGKILL."""
    candidate = kind(training.model, training.optimizer, folder)
    for step in (1, 2):
        training.step()
        candidate.begin(step)
        candidate.finish()
        candidate.settle()
    (folder / SAVED_NAME).write_text(training.digest())
    os.kill(os.getpid(), signal.SIGKILL)


def restored_after_kill(training: Training, candidate: Candidate) -> bool:
    """Whether the killed trainer's save came back, bit for bit.

    Raises:
        SystemExit: another state came back, or nothing though it should have.
    """
    training.optimizer.zero_grad(set_to_none=True)
    if not candidate.restore():
        if candidate.outlives_the_trainer:
            raise SystemExit("nothing could be restored after SIGKILL of the trainer")
        return False
    if training.digest() != (candidate.folder / SAVED_NAME).read_text():
        raise SystemExit("after SIGKILL another state came back than was saved")
    return True


def measure(
    training: Training, kind: type[Candidate], folder: Path, steps: int, pairs: int
) -> dict[str, Any]:
    """Both gates, then all figures of one candidate."""
    tensors = training.tensors()
    nbytes, limit_s = nbytes_of(tensors), memcpy_s(tensors)
    del tensors
    training.step()
    alone = held_bytes(folder)
    candidate = kind(training.model, training.optimizer, folder)
    survives = restored_after_kill(training, candidate)
    measurement = Measurement(training, candidate, FIRST_MEASURED_STEP)
    measurement.check()
    idle = [measurement.idle() for _ in range(IDLE_SAVES)]
    figures = {name: statistics.median(one[name] for one in idle) for name in idle[0]}
    training.step()
    figures |= measurement.slowdown(steps, pairs) | {"held_bytes": measurement.held() - alone}
    candidate.close()
    return {
        "version": version(kind.package),
        "state_bytes": nbytes,
        "memcpy_s": limit_s,
        "survives_sigkill": survives,
        "on_disk": kind.on_disk,
        **{name: _rounded(value) for name, value in figures.items()},
    }


def _rounded(value: Any) -> Any:
    return round(value, 5) if isinstance(value, float) else value


def main() -> None:
    """Do one phase; figures go to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("phase", choices=("save", "measure"))
    parser.add_argument("name", choices=CANDIDATES)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--bytes", type=int, required=True)
    for option in ("tokens", "steps", "pairs"):
        parser.add_argument(f"--{option}", type=int, required=True)
    args = parser.parse_args()
    end_with_parent()
    kind = CANDIDATES[args.name]
    training = Training(args.bytes, args.tokens, seed=args.phase == "measure")
    if args.phase == "save":
        save(training, kind, args.folder)
    result = measure(training, kind, args.folder, args.steps, args.pairs)
    (args.folder / RESULT_NAME).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
