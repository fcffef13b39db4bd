"""Run directories as the trainer leaves them, made of events that a test chooses."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from holdfast.events import LEDGER_NAME, Event, Ledger
from holdfast.report.run_files import METRICS_NAME
from holdfast_lab.trainer.gpt import GPTConfig
from holdfast_lab.trainer.settings import Settings
from holdfast_lab.trainer.worker import result_path

START_S = 1_700_000_000.0
OP = "blocks.0.attn.qkv/addmm/forward"
DIGESTS = {"model": "a", "optimizer": "b", "scheduler": "c", "finite": True}
SITE = {
    "covered": True,
    "reason": "",
    "calls": 7,
    "rows": 700,
    "suspects": 0,
    "line": 2e-5,
    "encode_s": 0.01,
    "product_s": 0.2,
    "verify_s": 0.03,
    "method": "row checksums",
}


def coverage(*uncovered: str) -> dict[str, Any]:
    """A coverage report: one covered site, and these that are not."""
    bare = [
        SITE | {"site": n, "covered": False, "reason": "in a compiled graph"} for n in uncovered
    ]
    return {"backend": "native", "sites": [SITE | {"site": OP}, *bare], "false_alarms": 3}


def event(
    kind: str, at_s: float, step: int = 1, rank: int = 0, host: str = "node-a", **values: Any
) -> Event:
    """An event at a time after the run's start."""
    return Event(kind, step=step, rank=rank, host=host, time_s=START_S + at_s, **values)


def struck(
    at_s: float, step: int = 1, rank: int = 0, op: str = OP, site: str = "output", **detail: Any
) -> Event:
    """An injected bit flip, or what ``detail`` says."""
    what = {"fault": 0, "kind": "bitflip", "site": site, "bit": 30} | detail
    return event("injected", at_s, step, rank, op=op, detail=what)


def corrected(at_s: float, step: int = 1, rank: int = 0, op: str = OP) -> Event:
    """A wrong product that was repaired inside its op in 20 ms."""
    answer = {"detector": "checksum", "rung": "correct", "duration_s": 0.02}
    return event("gemm_fault", at_s, step, rank, op=op, **answer)


def repeated(
    at_s: float, verdict: str, step: int = 1, rank: int = 0, differed: bool = True
) -> Event:
    """A step that was repeated for a second; ``transient`` ones are answered by it."""
    rung = "recompute" if verdict == "transient" else ""
    detail = {"verdict": verdict, "attempts": 3, "loss_differed": differed}
    answer = {"detector": "loss spike", "rung": rung, "duration_s": 1.0, "detail": detail}
    return event("rerun", at_s, step, rank, **answer)


def restored(at_s: float, step: int = -1, rank: int = 0, source: str = "memory") -> Event:
    """A state that was loaded in 30 ms."""
    rung = "rollback" if source == "memory" else "reload"
    detail = {"step": 4, "source": source}
    return event("restored", at_s, step, rank, rung=rung, duration_s=0.03, detail=detail)


def write_events(run_dir: Path, events: Iterable[Event]) -> None:
    """Add events to the directory's ledger, in one transaction where there are many."""
    run_dir.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(run_dir / LEDGER_NAME)
    ledger._connection.execute("BEGIN")
    for item in events:
        ledger.append(item)
    ledger._connection.execute("COMMIT")
    ledger.close()


def write_metrics(run_dir: Path, steps: Iterable[int], *, seconds: float = 0.5) -> None:
    """Add a line for each step, whose loss falls."""
    lines = [
        json.dumps({"step": s, "loss": 5 / s, "grad_norm": 1 / s, "seconds": seconds}) + "\n"
        for s in steps
    ]
    with (run_dir / METRICS_NAME).open("a") as file:
        file.write("".join(lines))


def write_run(
    run_dir: Path,
    events: Sequence[Event] = (),
    *,
    steps: int = 10,
    done: int | None = None,
    mode: str = "guarded",
    ranks: int = 2,
    covered: dict[str, Any] | None = None,
    digests: dict[str, Any] = DIGESTS,
) -> Path:
    """A run of ``steps``; it is finished unless fewer are ``done``."""
    write_events(run_dir, events)
    settings = Settings(mode=mode, steps=steps, ranks=ranks, warmup_steps=1, model=GPTConfig())
    settings.save(run_dir)
    write_metrics(run_dir, range(1, (steps if done is None else done) + 1))
    if done is None:
        for rank in range(ranks):
            extra = {"coverage": covered or coverage(), "snapshot_stall_s": 0.25}
            guarded = extra | {"snapshot_bytes": 4_000_000} if mode == "guarded" else {}
            result_path(run_dir, rank).write_text(json.dumps(digests | guarded))
    return run_dir
