"""The fault schedule of a demo run, and the run's reaction to each injected fault."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import as_file, files
from typing import Any

import torch

from holdfast.errors import ConfigError
from holdfast.events import RUNGS, Event, EventKind
from holdfast.inject.injector import state_at_rest
from holdfast.inject.schedule import KILLS, Fault, check_schedule, load_schedule
from holdfast.protection import protect
from holdfast.report.kinds import CAME_BACK
from holdfast_lab.trainer.gpt import GPT, GPTConfig, loss, make_optimizer

IN_OP = (EventKind.GEMM_FAULT, EventKind.CHECKSUM_FAULT)
IN_PLACE = (*IN_OP, EventKind.STATE_FAULT, EventKind.OPTIMIZER_FAULT)
BY_STEP = (EventKind.RERUN, EventKind.ROLLBACK)
BY_SITE = {"update": EventKind.OPTIMIZER_FAULT, "collective": EventKind.COLLECTIVE_FAULT}
MOMENTS = (".exp_avg", ".exp_avg_sq")
NOT_SEEN = "not seen"


@dataclass(frozen=True)
class Anatomy:
    """The names of modules, matmuls and the state, which a fault schedule may use as targets."""

    ops: list[str]
    modules: list[str]
    state: list[str]

    @property
    def weights_and_moments(self) -> list[str]:
        """Paths of the model's state and of the optimizer's moments."""
        return [path for path in self.state if path.startswith("model.") or path.endswith(MOMENTS)]

    @property
    def norms(self) -> list[str]:
        """Modules that contain no matmul and whose outputs are read by one."""
        return [name for name in self.modules if name.rsplit(".", 1)[-1].startswith("ln_")]


def anatomy(model_config: GPTConfig) -> Anatomy:
    """Take a step on a short sequence and list the model's matmuls, modules and state."""
    with torch.random.fork_rng(devices=[]):
        model = GPT(model_config)
        with protect(model) as protection:
            protection.reset_counters()
            tokens = torch.zeros(1, min(8, model_config.context), dtype=torch.int64)
            torch.autograd.backward(loss(model, tokens, tokens))
            ops = [site.site for site in protection.report().sites if site.covered]
        optimizer = make_optimizer(model, lr=1e-3, weight_decay=0.0)
        optimizer.step()
    state = [*state_at_rest(model, optimizer)]
    return Anatomy(ops, [name for name, _ in model.named_modules() if name], state)


def shipped_storm(*, nodes: int) -> list[Fault]:
    """Load the fault schedule of ``holdfast demo``; a single host is never lost."""
    with as_file(files("holdfast_lab.trainer") / "storm.toml") as path:
        faults = load_schedule(path)
    return [fault for fault in faults if nodes > 1 or fault.kind != "lose_node"]


def check(
    faults: Sequence[Fault], names: Anatomy, *, steps: int, ranks: int, nodes: int = 1
) -> None:
    """Check a fault schedule; raise ConfigError if it does not fit the model, the run or fp32."""
    for fault in faults:
        if fault.bit is not None and fault.bit > 31 and fault.site != "checksum":
            raise ConfigError(
                f"fault {fault.identifier + 1}: bit {fault.bit} is out of range for fp32; valid: 0 "
                "to 31, and 0 to 63 in a checksum"
            )
    sizes = {"steps": steps, "ranks": ranks, "nodes": nodes}
    check_schedule(faults, ops=names.ops, modules=names.modules, state=names.state, **sizes)


@dataclass(frozen=True)
class Outcome:
    """An injected fault and the reaction to it."""

    fault: int
    step: int
    rank: int
    kind: str
    site: str
    op: str
    bit: int | None
    true: float | None
    corrupted: float | None
    below_line: bool
    seen_by: str
    rung: str
    after_s: float

    def as_dict(self) -> dict[str, object]:
        """Return the outcome as plain values."""
        return asdict(self)


def outcomes(events: Iterable[Event]) -> list[Outcome]:
    """Pair every injected fault of a run with the event that answered it."""
    ordered = sorted(events, key=lambda event: event.time_s)
    struck = [event for event in ordered if event.kind == EventKind.INJECTED]
    return [_outcome(event, _answers(event, ordered)) for event in struck]


def _answers(struck: Event, ordered: Sequence[Event]) -> list[Event]:
    """List the reactions to a fault on its rank in order; none if it was not detected."""
    if struck.detail["kind"] == "lose_node":
        return _restores(struck, ordered)
    later = [e for e in ordered if e.time_s >= struck.time_s and e.rank == struck.rank]
    if struck.detail["kind"] == "kill_trainer":
        return [e for e in later if e.kind == EventKind.RESTORED][:1]
    same_step = [e for e in later if e.step == struck.step and e.kind != EventKind.INJECTED]
    if struck.detail["site"] == "rest":
        return _at_rest(struck, same_step)
    by_step = [e for e in same_step if e.kind in BY_STEP and e.rung]
    if struck.detail["site"] in BY_SITE:
        told = [e for e in same_step if e.kind == BY_SITE[struck.detail["site"]]][:1]
        return told if not told or told[0].rung else [*told, *by_step]
    if struck.detail["site"] != "module":
        in_op = [e for e in same_step if e.kind in IN_OP and e.op == struck.op][:1]
        if in_op:  # a check that was queued behind the product cannot repair it
            return in_op if in_op[0].rung else [*in_op, *by_step]
    return by_step


def _at_rest(struck: Event, same_step: Sequence[Event]) -> list[Event]:
    """List how a changed tensor was found, and its repair: at once, or by going back."""
    found = [e for e in same_step if e.kind == EventKind.STATE_FAULT and e.op == struck.op][:1]
    back = [e for e in same_step if e.kind == EventKind.ROLLBACK]
    return [*found, *([] if found and found[0].rung else back)] if found else []


def _restores(struck: Event, ordered: Sequence[Event]) -> list[Event]:
    """List how the ranks were restored after the loss of a host, the slowest way last."""
    later = [e for e in ordered if e.time_s >= struck.time_s and e.kind in CAME_BACK]
    first = {(event.rank, event.kind): event for event in reversed(later)}
    return sorted(first.values(), key=lambda event: RUNGS.index(event.rung))


def _outcome(struck: Event, answers: Sequence[Event]) -> Outcome:
    detail = struck.detail
    kill = detail["kind"] in KILLS
    last = answers[-1] if answers else None
    in_op = last is not None and last.kind in IN_PLACE
    after_s = 0.0 if last is None else last.time_s - struck.time_s
    return Outcome(
        fault=detail["fault"],
        step=struck.step,
        rank=struck.rank,
        kind=detail["kind"],
        site="process" if detail["kind"] == "kill_trainer" else detail["site"],
        op=struck.op,
        bit=detail["bit"],
        true=detail.get("true"),
        corrupted=detail.get("corrupted"),
        below_line=bool(detail.get("below_line")),
        seen_by="torchrun" if kill and last else answers[0].detector if last else NOT_SEEN,
        rung=last.rung if last else "",
        after_s=last.duration_s if last and in_op else after_s,
    )


@dataclass(frozen=True)
class Line:
    """The smallest change that checksums can find, relative to the rms of its row."""

    median: float
    worst: float
    mantissa_bit: int  # lowest fp32 mantissa bit whose flip exceeds the median


def detection_line(coverage: dict[str, Any]) -> Line | None:
    """Summarise the thresholds in the coverage report of a protected run, if it has any.

    Checks that are queued behind their products do not sample them.
    """
    lines = sorted(site["line"] for site in coverage["sites"] if site["line"] > 0)
    if not lines:
        return None
    median = lines[len(lines) // 2]
    # A flip of mantissa bit b changes an fp32 element by up to 2^(b-23) of its power of two.
    return Line(median, lines[-1], min(23, max(0, math.ceil(23 + math.log2(median)))))
