"""What a snapshot of 10 GB after every step costs a training on a CUDA device.

    python -m bench.snapshot_device [--pairs N] [--dry-run]

Correctness first: a snapshot that is taken while training goes on must bring back its step bit for
bit, else nothing is timed. Then blocks of steps without and with snapshots run in turn (A B A B …),
and the speed of the copies is compared with what the bus reaches in the same run. Goals: the host
waits at most 10 ms a step, a step takes at most 3 % longer, copies reach at least 85 % of the bus.
It takes about five minutes, 45 GB of the device's memory and 25 GB of the host's. Without a device
it says so and exits with status 77; ``--dry-run`` goes through all of it on a tiny model, and
neither reports nor records.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.cuda import Rows, command
from holdfast.digest.tensors import state_digest
from holdfast.snapshot.client.device_copy import CudaQueue
from holdfast.snapshot.client.snapshots import Snapshots

NO_DEVICE = 77  # the status by which test programs say that they were skipped
STEPS, WARM_STEPS = 12, 3
BUS_BYTES, BUS_REPEATS = 2**30, 8
STALL_GOAL_S, SLOWDOWN_GOAL, BUS_GOAL = 10e-3, 1.03, 0.85


@dataclass(frozen=True)
class Scale:
    """Blocks of two linear layers and a norm, trained in bf16 autocast by AdamW in fp32."""

    blocks: int
    width: int
    tokens: int


# 0.81 billion parameters, and 9.7 GB of parameters and moments.
LARGE, DRY = Scale(6, 4096, 32768), Scale(2, 16, 8)


class TimedQueue(CudaQueue):
    """Records when the device begins and ends the copies of each snapshot."""

    def __init__(self) -> None:
        super().__init__()
        self.spans: list[list[torch.cuda.Event]] = []

    def mark(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Begin the span of another snapshot."""
        self.spans.append([])
        return super().mark(tensors)

    def run(self, action: Callable[[], object]) -> None:
        """Record an event before and after each copy."""
        self.spans[-1] += [_event()]
        super().run(action)
        self.spans[-1] += [_event()]

    def rates(self, nbytes: int) -> list[float]:
        """Return the bytes a second of each snapshot, from its first copy to its last."""
        spans = [span for span in self.spans if len(span) > 1]
        return [nbytes / (span[0].elapsed_time(span[-1]) / 1e3) for span in spans]


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass
class Training:
    """A model that is trained to repeat its input."""

    scale: Scale
    device: str
    run_dir: Path
    stalls_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        width = self.scale.width
        layers: list[nn.Module] = []
        for _ in range(self.scale.blocks):
            layers += [nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU()]
            layers += [nn.Linear(4 * width, width)]
        self.model = nn.Sequential(*layers).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.batch = torch.randn(self.scale.tokens, width, device=self.device)
        self.forward_backward()
        self.optimizer.step()
        self.snapshots = Snapshots(self.model, self.optimizer, run_dir=self.run_dir, keep=1)
        self.queue = TimedQueue()
        self.snapshots._copier.queue = self.queue
        self.taken = 0

    @property
    def nbytes(self) -> int:
        """The bytes of parameters and moments."""
        return 3 * sum(parameter.nbytes for parameter in self.model.parameters())

    def digest(self) -> str:
        """Return the digest of model and optimizer."""
        return state_digest([self.model.state_dict(), self.optimizer.state_dict()])

    def forward_backward(self) -> float:
        """Compute the gradients; return the loss, for which training waits in each step."""
        self.optimizer.zero_grad()
        with torch.autocast(self.device, torch.bfloat16):
            loss = (self.model(self.batch) - self.batch).square().mean()
        loss.backward()
        return loss.item()

    def step(self, *, snapshot: bool) -> None:
        """Train one step; time what the host waits for its snapshot."""
        self.forward_backward()
        before_s = time.perf_counter()
        self.snapshots.finish()
        finished_s = time.perf_counter()
        self.optimizer.step()
        begun_s = time.perf_counter()
        if snapshot:
            self.taken += 1
            self.snapshots.begin(self.taken)
            self.stalls_s.append(finished_s - before_s + time.perf_counter() - begun_s)

    def block_s(self, *, snapshot: bool) -> float:
        """Return the seconds that a step takes in a block of them, copies in flight included."""
        for _ in range(WARM_STEPS):
            self.step(snapshot=snapshot)
        self._synchronize()
        started_s = time.perf_counter()
        for _ in range(STEPS):
            self.step(snapshot=snapshot)
        self._synchronize()
        seconds = (time.perf_counter() - started_s) / STEPS
        self.snapshots.wait_committed()
        return seconds

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def gate(self) -> None:
        """Stop unless a snapshot beside training brings its step back bit for bit."""
        for _ in range(2):  # the second time memory is there, and copies run at full speed
            self.step(snapshot=True)
            right = self.digest()
            self.forward_backward()
            self.snapshots.finish()
            self.optimizer.step()
            committed, ahead = self.snapshots.wait_committed(), self.digest()
            back = self.snapshots.rollback()
            if not (committed == back == self.taken and ahead != right == self.digest()):
                raise SystemExit(f"step {self.taken} did not come back: nothing was timed")


def bus_bytes_s() -> float:
    """Return the best rate of copies from the device to pinned memory, in bytes a second."""
    there = torch.zeros(BUS_BYTES, dtype=torch.uint8, device="cuda")
    here = torch.zeros(BUS_BYTES, dtype=torch.uint8, pin_memory=True)
    rates = []
    for _ in range(BUS_REPEATS):
        start = _event()
        here.copy_(there, non_blocking=True)
        end = _event()
        end.synchronize()
        rates.append(BUS_BYTES / (start.elapsed_time(end) / 1e3))
    return max(rates)


def measure(dry: bool, device: str, pairs: int) -> Rows:
    """Gate, then blocks of steps without and with snapshots in turn."""
    with tempfile.TemporaryDirectory() as folder:
        training = Training(DRY if dry else LARGE, device, Path(folder))
        with training.snapshots:
            training.gate()
            training.stalls_s.clear()
            training.queue.spans.clear()
            times = [
                [training.block_s(snapshot=snapshot) for snapshot in (False, True)]
                for _ in range(pairs)
            ]
            training._synchronize()
    ratios = [with_s / without_s for without_s, with_s in times]
    row: dict[str, Any] = {
        "state_bytes": training.nbytes,
        "step_s": statistics.median(without_s for without_s, _ in times),
        "slowdown": round(statistics.median(ratios), 4),
        "slowdown_range": [round(min(ratios), 4), round(max(ratios), 4)],
        "stall_s": statistics.median(training.stalls_s),
        "stall_90_s": statistics.quantiles(training.stalls_s, n=10)[-1],
        "pairs": pairs,
        "snapshots": len(training.stalls_s),
    }
    if device == "cuda":
        copy, bus = statistics.median(training.queue.rates(training.nbytes)), bus_bytes_s()
        row |= {"copy_bytes_s": copy, "bus_bytes_s": bus, "share_of_bus": round(copy / bus, 4)}
    return [row]


def table(rows: Rows, measured: bool) -> str:
    """Return the goals and what was measured as text."""
    (row,) = rows
    if not measured:
        return f"{row['snapshots']} snapshots of {row['state_bytes']} bytes; not measured"
    goals = [
        ("host waits a step, ms", 1e3 * row["stall_s"], "<=", 1e3 * STALL_GOAL_S),
        ("step with / without", row["slowdown"], "<=", SLOWDOWN_GOAL),
        ("copy / bus", row["share_of_bus"], ">=", BUS_GOAL),
    ]
    lines = [f"{row['state_bytes'] / 1e9:.1f} GB a step of {row['step_s']:.3f} s"]
    for name, found, sign, goal in goals:
        met = found <= goal if sign == "<=" else found >= goal
        lines.append(f"{name:<24} {found:>8.3f}  {sign} {goal:g}  {'met' if met else 'MISSED'}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, record the row and print the goals; status 77 if there is no device."""
    given = sys.argv[1:] if arguments is None else arguments
    wanted = not {"--dry-run", "-h", "--help"}.intersection(given)
    if wanted and not torch.cuda.is_available():
        print("bench.snapshot_device measures a CUDA device and there is none here: use --dry-run")
        raise SystemExit(NO_DEVICE)
    command("snapshot_device", __doc__, measure, table, pairs=5, arguments=arguments)


if __name__ == "__main__":
    main()
