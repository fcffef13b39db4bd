"""The ladder: one training step, run, judged, repaired, and only then applied."""

import math
import random
import time
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_

from holdfast import config, events
from holdfast.errors import ConfigError, SnapshotError, SnapshotLost, UncorrectableFault
from holdfast.protection import Deferred, deferring
from holdfast.replay.agreement import Agreement
from holdfast.replay.history import History
from holdfast.replay.norms import total_norm
from holdfast.replay.rerun import Attempt, ForwardBackward, MicroStep, Unconfirmed, Verdict, rerun
from holdfast.replay.rng import RngState
from holdfast.replay.shadow import Shadow, ShadowReplica
from holdfast.replay.spikes import SpikeDetector
from holdfast.snapshot.client import Snapshots

MAX_ROLLBACKS = 2


class Scheduler(Protocol):
    """What the Guard needs of a learning-rate schedule."""

    def step(self) -> None:
        """Move on by one step."""


class Guard:
    """Runs training steps so that nothing unverified reaches ``optimizer.step``.

    ``step`` runs forward and backward, judges the result (faults that protected ops left
    unrepaired, non-finite values, spikes of loss or gradient norm, the sampled audit), repeats the
    step where there is doubt, rolls back to the last clean snapshot where repetition does not
    help, and only then applies the optimizer and starts the next snapshot. Gradients are emptied
    by the Guard before each pass.

    Args:
        model: the module whose gradients are applied; a DDP wrapper is fine.
        optimizer: applied once a step is verified.
        scheduler: learning-rate schedule, stepped after the optimizer; by default the one that
            ``snapshots`` holds.
        snapshots: in-memory snapshots to begin after every step and to roll back to; without them
            a step that cannot be repaired raises.
        clip_grad_norm: largest gradient norm; larger ones are scaled down, as by
            ``torch.nn.utils.clip_grad_norm_``, after verification.
        audit: share of steps, 0 to 1, that are computed twice and compared bit for bit; by default
            the config file's ``guard.audit``, else 0.
        shadow: share of steps, 0 to 1, in which other ranks compute each rank's step too and are
            compared with it (``holdfast.replay.Shadow`` for more), and the step is put right by
            majority; doubtful steps that repetition confirms are looked at so as well. By default
            the config file's ``guard.shadow``, else 0.
        seed: chooses the audited steps; must be the same on all ranks.

    Guarantees: see ``docs/fault_model.md``. On healthy hardware the results are, bit for bit,
    those of the bare loop (``zero_grad``, forward and backward, clip, ``optimizer.step``,
    ``scheduler.step``). Every decision that is not "nothing happened" is an event.

    Not covered: faults inside the optimizer's own arithmetic and in parameters at rest that change
    the loss too little to spike; gradient scalers whose non-finite gradients are part of the
    method.

    Raises:
        ConfigError: a setting is out of range, the scheduler is not the one in the snapshots, or
            the optimizer holds parameters that the model does not.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        scheduler: Scheduler | None = None,
        snapshots: Snapshots | None = None,
        clip_grad_norm: float | None = None,
        audit: float | None = None,
        shadow: float | Shadow | None = None,
        seed: int = 0,
    ) -> None:
        audit = config.value("guard.audit", audit, 0.0)
        if not 0 <= audit <= 1:
            raise ConfigError(f"audit = {audit!r} must be a share of steps between 0 and 1")
        if clip_grad_norm is not None and not clip_grad_norm > 0:
            raise ConfigError(f"clip_grad_norm = {clip_grad_norm!r} must be positive")
        if snapshots is not None and scheduler not in (None, snapshots.scheduler):
            raise ConfigError(
                f"the scheduler {type(scheduler).__name__} is not the one in the snapshots, so "
                "that it would not be rolled back: give it to Snapshots(scheduler=...)"
            )
        known = {id(parameter) for parameter in model.parameters()}
        if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
            raise ConfigError(
                "the optimizer holds parameters that are not the model's: they would be neither "
                "emptied, clipped, verified nor saved; make them part of the model"
            )
        self.model, self.optimizer, self.snapshots = model, optimizer, snapshots
        self.scheduler = scheduler or (snapshots.scheduler if snapshots else None)
        self.clip_grad_norm, self.audit, self.seed = clip_grad_norm, audit, seed
        self.steps_done = 0
        self.grad_norm = math.nan
        self._parameters = list(model.parameters())
        self._agree = Agreement()
        if not isinstance(shadow, Shadow):
            shadow = Shadow(config.value("guard.shadow", shadow, 0.0))
        self.shadow = ShadowReplica(model, shadow, seed, _attempted)
        self._loss_past, self._norm_past = SpikeDetector(), SpikeDetector()
        self._accepted: set[tuple[str, str]] = set()  # doubts that turned out to be genuine
        self._history = History()
        self._entered = False

    def __enter__(self) -> "Guard":
        if self.snapshots is not None:
            events.ensure_ledger(self.snapshots.run_dir)
            restored = self.snapshots.restore()
            self.steps_done = restored or 0
            self._check_nodes_agree()
            if restored is None:
                self.snapshots.begin(0)
                self.snapshots.wait_committed()  # so that the first step can be rolled back too
            self._history = History(int(self.snapshots.status()["keep"]))
        events.record_config()
        self._entered = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        events.set_step(-1)
        if self.snapshots is not None:
            if kind is None:
                self.snapshots.finish()
            self.snapshots.close(finished=kind is None)

    def batches(self, loader: Any, *, steps: int) -> Iterator[Any]:
        """Batches for the steps not done yet, from where the restored snapshot stood.

        Args:
            loader: an iterable of batches. If it is the ``loader`` of the snapshots its position
                was restored with them. Any other must yield the same batches from the same random
                state (Python, NumPy, torch), as a shuffling ``DataLoader`` without a generator of
                its own does: its present pass is begun anew from the state it was begun with, and
                the batches of steps already done are skipped.
            steps: length of the whole run, in steps.

        Raises:
            ConfigError: the loader yields no batch.
        """
        snapshots = self.snapshots
        owned = snapshots is not None and snapshots.loader is loader and "loader" in snapshots.parts
        skip, rng = 0, RngState.capture()
        if not owned and self.steps_done:
            # The pass is begun anew with the random state it began with: so it shuffles alike.
            first, before = (snapshots.epoch if snapshots is not None else None) or (0, None)
            skip = self.steps_done - first
            if before is not None:
                RngState(before).restore()
        while self.steps_done < steps:
            empty = True
            if not owned and not skip and snapshots is not None:
                snapshots.epoch = (self.steps_done, RngState.capture().state)
            for batch in loader:
                empty = False
                if skip:
                    skip -= 1
                    if not skip:
                        rng.restore()
                    continue
                yield batch
                if self.steps_done >= steps:
                    return
            if empty:
                raise ConfigError(
                    f"the loader {type(loader).__name__} yields no batch at step "
                    f"{self.steps_done} of {steps}: give one with data that can be iterated again"
                )

    def step(self, forward_backward: ForwardBackward, batch: Any) -> torch.Tensor:
        """Compute, verify and apply one training step.

        Args:
            forward_backward: called with the batch; computes the loss, calls ``backward()`` and
                returns the loss. It may run several micro-batches. It may be called again.
            batch: anything.

        Returns:
            The verified loss, detached.

        Raises:
            UncorrectableFault: the step could not be confirmed, even after rolling back.
        """
        if self.snapshots is not None and not self._entered:
            raise ConfigError("a Guard with snapshots restores on entry: use it in a with block")
        clean = self.snapshots.committed_step if self.snapshots is not None else self.steps_done
        self._history.remember(self.steps_done, batch, clean=clean)
        for rollback in range(MAX_ROLLBACKS + 1):
            try:
                return self._catch_up(forward_backward, last_resort=rollback > 0)
            except Unconfirmed as error:
                if self.snapshots is None:
                    cause = f"{error}, and there are no snapshots to roll back to"
                    raise UncorrectableFault(_hopeless(self.steps_done, cause)) from error
                if rollback == MAX_ROLLBACKS:
                    cause = f"{error}, also after {rollback} roll-backs"
                    raise UncorrectableFault(_hopeless(self.steps_done, cause)) from error
                self._roll_back(error)
        raise AssertionError("unreachable")

    def _catch_up(self, forward_backward: ForwardBackward, *, last_resort: bool) -> torch.Tensor:
        """Do every remembered step from the present state on; normally just the latest."""
        todo = self._history.since(self.steps_done)
        if not todo:
            raise UncorrectableFault(
                f"rolled back to step {self.steps_done}, from which on the batches are forgotten: "
                "restart, which restores the loader with it"
            )
        for past in todo:
            past.rng.restore()
            loss = self._verified(forward_backward, past.batch, last_resort=last_resort)
            # A snapshot holds the loader's position, which is that of the latest step.
            self._apply(loss, snapshot=past is todo[-1])
        return loss

    def _verified(
        self, forward_backward: ForwardBackward, batch: Any, *, last_resort: bool
    ) -> torch.Tensor:
        """The loss of a pass whose gradients can be trusted; they are in place."""
        events.set_step(self.steps_done)
        started_s = time.perf_counter()
        micro_step = MicroStep(self.model, forward_backward, batch)
        self.shadow.begin(self.steps_done)
        loss, found = self._run(micro_step)
        reason = self._doubt(loss, found)
        audited, doubted = self._is_audited(self.steps_done), self._agree(bool(reason))
        if not doubted and not audited:
            return self._shadowed(micro_step, loss)
        if doubted:
            self.shadow.insist()  # a device that repeats its error is confirmed by repetition

        def repeat() -> Attempt:
            again, still = self._run(micro_step)
            return micro_step.attempt(again, faulty=bool(still.unrepaired))

        first = micro_step.attempt(loss, faulty=bool(found.unrepaired))
        verdict = rerun(first, repeat, agree=lambda wish: bool(self._agree(wish)))
        if verdict.disagreed or reason:
            self._report(verdict, reason or ("audit" if audited else "another rank"), started_s)
        if verdict.kind == "persistent" and not self.shadow.insist():
            raise Unconfirmed(f"{len(verdict.attempts)} runs gave no confirmed result")
        loss = self._shadowed(micro_step, verdict.loss, faulty=verdict.attempts[-1].faulty)
        if verdict.kind == "genuine" and loss is verdict.loss:
            self._accepted |= found.doubtful
        self._check_finite(loss, last_resort=last_resort)
        return loss

    def _shadowed(
        self, micro_step: MicroStep, loss: torch.Tensor, *, faulty: bool = False
    ) -> torch.Tensor:
        """The loss that shadows back, if the step is shadowed; its gradients are in place."""
        return self.shadow.confirmed(
            micro_step, loss, lambda: self._run(micro_step)[0], faulty=faulty
        )

    def _report(self, verdict: Verdict, reason: str, started_s: float) -> None:
        events.record(
            "rerun",
            detector=reason,
            rung="recompute" if verdict.disagreed and verdict.kind != "persistent" else "",
            duration_s=time.perf_counter() - started_s,
            detail={
                "verdict": verdict.kind,
                "attempts": len(verdict.attempts),
                "loss_differed": verdict.loss_differed,
            },
        )

    def _run(self, micro_step: MicroStep) -> tuple[torch.Tensor, Deferred]:
        with deferring() as found:
            loss = self.shadow.observe(micro_step.run)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        self._total_norm = total_norm(gradients)
        self.grad_norm = float(self._total_norm)
        return loss, found

    def _doubt(self, loss: torch.Tensor, found: Deferred) -> str:
        """Why this pass is not to be trusted as it is; empty if it is."""
        value = float(loss)
        if found.unrepaired:
            return "unrepaired fault"
        if not (math.isfinite(value) and math.isfinite(self.grad_norm)):
            return "non-finite value"
        if found.doubtful - self._accepted:
            return min(kind for kind, _ in found.doubtful - self._accepted).replace("_", " ")
        if self._loss_past.is_spike(value):
            return "loss spike"
        return "gradient norm spike" if self._norm_past.is_spike(self.grad_norm) else ""

    def _is_audited(self, step: int) -> bool:
        return self.audit > 0 and random.Random(f"{self.seed}/{step}").random() < self.audit

    def _check_finite(self, loss: torch.Tensor, *, last_resort: bool) -> None:
        """A confirmed NaN may still come from damaged parameters: older ones are tried once."""
        finite = math.isfinite(float(loss)) and math.isfinite(self.grad_norm)
        if not self._agree(not finite):
            return
        if not last_resort and self.snapshots is not None:
            raise Unconfirmed("loss or gradient is not finite, and repeats")
        events.record("nonfinite_genuine", detector="non-finite value")

    def _apply(self, loss: torch.Tensor, *, snapshot: bool) -> None:
        """The optimizer's turn; the snapshot in flight has left the parameters before it."""
        if self.snapshots is not None:
            self.snapshots.finish()
        if self.clip_grad_norm is not None:
            clip_grads_with_norm_(self._parameters, self.clip_grad_norm, self._total_norm)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self._loss_past.accept(float(loss))
        self._norm_past.accept(self.grad_norm)
        self.steps_done += 1
        if self.snapshots is not None and snapshot:
            self.snapshots.begin(self.steps_done)

    def _check_nodes_agree(self) -> None:
        """The ranks of a node restore one step; those of several nodes may not."""
        newest, oldest = self._agree(self.steps_done), -self._agree(-self.steps_done)
        if newest != oldest:
            raise SnapshotLost(
                f"this node restored step {self.steps_done}, others up to {newest} or down to "
                f"{oldest}: no step is held by all; load a checkpoint on every node"
            )

    def _roll_back(self, cause: Unconfirmed) -> None:
        assert self.snapshots is not None
        started_s, failed = time.perf_counter(), self.steps_done
        try:
            self.steps_done = self.snapshots.rollback()
        except SnapshotError as error:
            raise UncorrectableFault(_hopeless(failed, f"{cause}, and {error}")) from error
        self._check_nodes_agree()
        self._history.rolled_back(self.steps_done)
        events.record(
            "rollback",
            detector="rerun",
            rung="rollback",
            duration_s=time.perf_counter() - started_s,
            detail={"cause": str(cause), "from_step": failed, "to_step": self.steps_done},
        )


def _attempted(micro_step: MicroStep) -> tuple[torch.Tensor, bool]:
    with deferring() as found:
        loss = micro_step.run()
    return loss, bool(found.unrepaired)


def _hopeless(step: int, cause: str) -> str:
    return (
        f"step {step}: {cause}; nothing unverified was applied: look at `holdfast events` for the "
        "device, and restart on healthy hardware"
    )
