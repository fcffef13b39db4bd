"""Runs of a loop: bare, guarded, struck in both, killed; and what came of it."""

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from holdfast import ConfigError, UncorrectableFault, config, events, protect
from holdfast.events import EventKind
from holdfast.events.kinds import Role
from holdfast.snapshot.node import launch
from holdfast.torchrun import environment_of
from holdfast_lab.zoo.catalogue import LOOPS
from holdfast_lab.zoo.clock import Calm, quiet
from holdfast_lab.zoo.loop import FaultKind, Form, Loop, made
from holdfast_lab.zoo.strikes import Plan, Strike, plan

EQUAL, REFUSED, DIFFERENT, FAILED = "equal", "refused", "different", "failed"
DRAWS = 8  # for a fault that the fault model claims to cover


@dataclass(frozen=True)
class Outcome:
    """What came of one run.

    Attributes:
        loop: Name of the loop.
        fault: Kind of fault.
        seed: What the fault was drawn by.
        result: ``equal``, ``refused`` before the first step, ``different`` bits, or ``failed``.
        harmful: True if the same fault without holdfast changes the result; None if that was not
            tried, as without a fault and after a kill.
        place: Where the fault was.
        said: What the run said: kinds of events, or the error.
        seconds: Duration of the run.
    """

    loop: str
    fault: str
    seed: int
    result: str
    harmful: bool | None = None
    place: str = ""
    said: str = ""
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        """True if the loop ended as without the fault, or was refused."""
        return self.result in (EQUAL, REFUSED)


def run_case(kind: type[Loop], fault: FaultKind, seed: int, calm: Calm) -> Outcome:
    """Run a loop guarded with a fault, and bare with the same one."""
    began_s = time.monotonic()
    outcome = Outcome(kind.name, fault, seed, FAILED)
    try:
        with tempfile.TemporaryDirectory(prefix="zoo") as folder:
            if kind.form is Form.REFUSED:
                outcome = _refused(outcome, kind, Path(folder))
            elif fault is FaultKind.KILL:
                outcome = _killed(outcome, kind, plan(kind, fault, seed, calm), calm, Path(folder))
            else:
                outcome = _struck(outcome, kind, calm, Path(folder))
    except Exception as error:  # the campaign goes on, and counts it as a failure
        outcome = replace(outcome, said=f"{type(error).__name__}: {error}")
    return replace(outcome, seconds=time.monotonic() - began_s)


def _refused(outcome: Outcome, kind: type[Loop], folder: Path) -> Outcome:
    """Check that a loop is refused while its weights are as they were."""
    loop = made(kind)
    before = loop.digest()
    try:
        with _run_dir(folder, Plan(FaultKind.CALM)):
            _train(loop)
    except ConfigError as error:
        moved = loop.digest() != before
        return replace(outcome, result=FAILED if moved else REFUSED, said=str(error))
    return replace(outcome, said="it was not refused")


def _struck(outcome: Outcome, kind: type[Loop], calm: Calm, folder: Path) -> Outcome:
    fault = FaultKind(outcome.fault)
    for draw in range(DRAWS):
        planned = plan(kind, fault, outcome.seed + 1000 * draw, calm)
        with _run_dir(folder / str(draw), planned):
            digest, said = _guarded(kind, planned)
        injected = [event for event in said if event.kind == EventKind.INJECTED]
        below = any(event.detail.get("below_line") for event in injected)
        if digest == calm.digest or not below or planned.audit:
            break
    if injected and planned.index is None:
        planned = replace(planned, index=tuple(injected[0].detail["index"]))
    harmful = None
    if fault is not FaultKind.CALM:
        harmful = _bare(kind, planned) != calm.digest
    # An event with a rung repaired or repeated something.
    alarms = [event for event in said if EventKind(event.kind).role is Role.FOUND or event.rung]
    kinds = ", ".join(dict.fromkeys(str(event.kind) for event in said))
    result = EQUAL if digest == calm.digest else DIFFERENT
    if fault is FaultKind.CALM and alarms:
        result = FAILED
    return replace(outcome, result=result, harmful=harmful, place=planned.place, said=kinds)


def _guarded(kind: type[Loop], planned: Plan) -> tuple[str, list[events.Event]]:
    """Return the digest of a guarded run with a fault, and its events."""
    loop = made(kind)
    strike = Strike(loop, planned)
    try:
        with strike.armed():
            _train(loop)
    except UncorrectableFault:
        if kind.form is not Form.ATTACH:
            raise
        loop = made(kind)  # the process would be started again
        _train(loop)
    assert strike.struck or planned.fault is FaultKind.CALM, f"no fault at {planned.place}"
    return loop.digest(), list(events.recent())


def _bare(kind: type[Loop], planned: Plan) -> str:
    """Return the digest of a run with a fault and without holdfast."""
    events.clear()
    loop = made(kind)
    strike = Strike(loop, planned)
    with quiet(), protect(loop.model, verify=False), strike.armed():
        loop.bare()
    assert strike.struck, f"no fault at {planned.place}"
    events.clear()
    return loop.digest()


def _train(loop: Loop) -> None:
    """Run the guarded loop; remove its protection afterwards, as the process goes on."""
    try:
        with quiet():
            loop.guarded()
    finally:
        if loop.protection is not None:
            loop.protection.remove()


@contextmanager
def _run_dir(folder: Path, planned: Plan) -> Iterator[None]:
    """Set run directory and settings for a run; end its SMP and forget its events afterwards."""
    with environment_of(settings(folder, planned)):
        events.clear()
        try:
            yield
        finally:
            events.close_ledger()
            events.set_step(-1)
            launch.stop_smp(folder / "run")


def settings(folder: Path, planned: Plan) -> dict[str, str]:
    """Write the config file of a run, and return the environment that names it."""
    lines = ["[guard]", f"audit = {planned.audit}"]
    if planned.at_rest is not None:
        lines.append(f"at_rest = {planned.at_rest}")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "holdfast.toml"
    file.write_text("\n".join(lines) + "\n")
    return {config.RUN_DIR_VARIABLE: str(folder / "run"), config.CONFIG_VARIABLE: str(file)}


def _killed(outcome: Outcome, kind: type[Loop], planned: Plan, calm: Calm, folder: Path) -> Outcome:
    """Run the guarded loop in a process that is killed, and once more in another one."""
    environment = settings(folder, planned)
    outcome = replace(outcome, place=planned.place)
    try:
        code, _ = _life(kind.name, planned, environment)
        if code != -signal.SIGKILL:
            return replace(outcome, said=f"exit code {code} of the process to be killed")
        code, said = _life(kind.name, None, environment)
    finally:
        launch.stop_smp(folder / "run")
    if code or not said:
        return replace(outcome, said=f"exit code {code} of the second process")
    digest, source = said
    if not source.startswith("memory"):
        return replace(outcome, said=f"restored from {source!r}")
    result = EQUAL if digest == calm.digest else DIFFERENT
    return replace(outcome, result=result, said="SIGKILL, restored from memory")


def _life(
    name: str, planned: Plan | None, environment: dict[str, str]
) -> tuple[int, tuple[str, str] | None]:
    """Run a loop in a process of its own; return its exit code and what it sent."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch._dynamo"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_live, args=(name, planned, environment, theirs), daemon=True)
    process.start()
    theirs.close()
    with ours:
        try:
            said = ours.recv() if ours.poll(10 * config.timeout_s()) else None
        except EOFError:
            said = None
    process.join(config.timeout_s())
    if process.is_alive():
        process.kill()
        process.join(config.timeout_s())
    assert process.exitcode is not None
    return process.exitcode, said


def _live(name: str, planned: Plan | None, environment: dict[str, str], pipe: Connection) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    loop = LOOPS[name]()
    if planned is None:
        _train(loop)
    else:
        with Strike(loop, planned).armed():
            _train(loop)
    assert loop.snapshots is not None
    pipe.send((loop.digest(), loop.snapshots.restored_from))
