"""The Guard, which runs, verifies and if necessary repeats a training step before applying it."""

import logging
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
from holdfast.events import EventKind
from holdfast.protection import Collected, collecting
from holdfast.replay.agreement import Agreement
from holdfast.replay.history import History
from holdfast.replay.norms import total_norm
from holdfast.replay.rerun import Attempt, ForwardBackward, MicroStep, Unconfirmed, Verdict, rerun
from holdfast.replay.shadow import Shadow, ShadowReplica
from holdfast.replay.spikes import SpikeDetector
from holdfast.rng import set_rng_state
from holdfast.snapshot.client.snapshots import Snapshots
from holdfast.step.buckets import Buckets
from holdfast.step.loading import Batches
from holdfast.step.way_back import WayBack

_logger = logging.getLogger("holdfast.guard")


class Scheduler(Protocol):
    """A learning-rate schedule, of which the Guard needs one method."""

    def step(self) -> None:
        """Advance the schedule by one step."""


class Guard:
    """Runs training steps so that nothing unverified reaches ``optimizer.step``.

    ``step`` runs forward and backward and verifies the result: it looks for faults that protected
    ops could not repair, non-finite values, and spikes of the loss or the gradient norm, and it
    audits a sampled share of steps. A suspect step is repeated. If repetition does not confirm a
    result, training rolls back to the last clean snapshot. Only then the optimizer is applied and
    the next snapshot begun. The Guard empties the gradients before each pass.

    Args:
        model: The module whose gradients are applied; it may be wrapped in DDP.
        optimizer: Applied once a step is verified.
        scheduler: Learning-rate schedule, stepped after the optimizer; by default the one that
            ``snapshots`` holds.
        snapshots: In-memory snapshots, begun after every step and used to roll back. Without them
            a step that cannot be repaired raises.
        clip_grad_norm: Largest gradient norm; larger ones are scaled down after verification, as
            by ``torch.nn.utils.clip_grad_norm_``.
        audit: Share of steps, 0 to 1, that are computed twice and compared bit for bit; by default
            ``guard.audit`` of the config file, else 0.
        shadow: Share of steps, 0 to 1, in which other ranks compute each rank's step too. The
            results are compared, and the majority's is applied. Suspect steps that repetition on
            the same rank confirms are audited in the same way. A ``holdfast.replay.Shadow`` has
            further settings. By default ``guard.shadow`` of the config file, else 0.
        seed: Chooses the audited steps; the same on all ranks.

    Guarantees: see ``docs/fault_model.md``. On healthy hardware the results are, bit for bit,
    those of the plain loop (``zero_grad``, forward and backward, clip, ``optimizer.step``,
    ``scheduler.step``). Every step that was not simply applied leaves an event.

    Not covered: faults inside the optimizer's own arithmetic and in parameters at rest that change
    the loss too little to be a spike; gradient scalers that rely on non-finite gradients.

    Raises:
        ConfigError: A setting is out of range, the scheduler is not the one in the snapshots, or
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
        self._accepted: set[tuple[str, str]] = set()  # confirmed by repetition
        self._history, self._way_back = History(), WayBack()
        self._buckets = Buckets(model)
        self._entered = self._restored = False

    def __enter__(self) -> "Guard":
        if self.snapshots is not None:
            events.ensure_ledger(self.snapshots.run_dir)
            restored = self.snapshots.restore()
            self.steps_done, self._restored = restored or 0, restored is not None
            self._check_nodes_agree()
            if restored is None:
                self.snapshots.begin(0)
                self.snapshots.wait_committed()  # so that the first step can be rolled back too
            self._history = History(int(self.snapshots.status()["keep"]))
        events.record_config()
        self._log_start()
        self._entered = True
        return self

    def _log_start(self) -> None:
        looks = f"audit {self.audit:g}, shadow {self.shadow.settings.rate:g}"
        if self.snapshots is None:
            kept = "without snapshots: a step that cannot be repaired raises"
        elif self._restored:
            kept = f"resumes at step {self.steps_done} from {self.snapshots.restored_from}"
        else:
            kept = f"starts at step 0: nothing to resume in {self.snapshots.run_dir}"
        _logger.info("guarding %s (%s); %s", type(self.model).__name__, looks, kept)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        events.set_step(-1)
        if self.snapshots is not None:
            if kind is None:
                self.snapshots.finish()
            self.snapshots.close(finished=kind is None)

    def batches(self, loader: Any, *, steps: int) -> Iterator[Any]:
        """Yield the batches of the steps that remain after the restored snapshot.

        Args:
            loader: An iterable of batches. If it is the ``loader`` of the snapshots, its position
                was restored with them. Any other loader must yield the same batches from the same
                random state (Python, NumPy, torch), as a shuffling ``DataLoader`` without its own
                generator does: its current epoch is started again from the random state with which
                it began, and the batches of steps already done are skipped.
            steps: Length of the whole run, in steps.

        Raises:
            ConfigError: The loader yields no batch.
        """
        restored, self._restored = self._restored, False
        batches = Batches(loader, self.snapshots, lambda: self.steps_done, restored=restored)
        yield from batches.until(steps)

    def step(self, forward_backward: ForwardBackward, batch: Any) -> torch.Tensor:
        """Compute, verify and apply one training step.

        Args:
            forward_backward: Called with the batch; computes the loss, calls ``backward()`` and
                returns the loss. It may run several micro-batches, and it may be called again.
            batch: Argument of ``forward_backward``.

        Returns:
            The verified loss, detached.

        Raises:
            ConfigError: The Guard has snapshots and is not used in a ``with`` block.
            UncorrectableFault: The step could not be confirmed, even after rolling back.
        """
        if self.snapshots is not None and not self._entered:
            raise ConfigError("a Guard with snapshots restores on entry: use it in a with block")
        clean = self.snapshots.committed_step if self.snapshots is not None else self.steps_done
        self._history.remember(self.steps_done, batch, clean=clean)
        while True:
            try:
                loss = self._catch_up(forward_backward)
            except Unconfirmed as error:
                if self.snapshots is None:
                    cause = f"{error}, and there are no snapshots to roll back to"
                    raise UncorrectableFault(_hopeless(self.steps_done, cause)) from error
                self._roll_back(error)
            else:
                self._way_back.arrived()
                return loss

    def _catch_up(self, forward_backward: ForwardBackward) -> torch.Tensor:
        """Run every remembered step from the present state on, usually the latest one only."""
        todo = self._history.since(self.steps_done)
        if not todo:
            raise UncorrectableFault(
                f"rolled back to step {self.steps_done}, from which on the batches are forgotten: "
                "restart, which restores the loader with it"
            )
        for past in todo:
            set_rng_state(past.rng)
            loss = self._verified(forward_backward, past.batch)
            # Only the latest step is saved: the loader's position in a snapshot belongs to it.
            self._apply(loss, snapshot=past is todo[-1])
        return loss

    def _verified(self, forward_backward: ForwardBackward, batch: object) -> torch.Tensor:
        """Run a step until its result is confirmed; return its loss, its gradients in place."""
        events.set_step(self.steps_done)
        started_s = time.perf_counter()
        micro_step = MicroStep(self.model, forward_backward, batch)
        self._buckets.settle(micro_step)
        self.shadow.begin(self.steps_done)
        loss, found = self._run(micro_step)
        reason = self._suspicion(loss, found)
        audited, suspect = self._is_audited(self.steps_done), self._agree(bool(reason))
        if not suspect and not audited:
            return self._shadowed(micro_step, loss)
        if suspect:
            # Repetition would confirm the result of a device that repeats its error.
            self.shadow.force_audit()

        def repeat() -> Attempt:
            again, still = self._run(micro_step)
            return micro_step.attempt(again, faulty=bool(still.unrepaired))

        first = micro_step.attempt(loss, faulty=bool(found.unrepaired))
        verdict = rerun(first, repeat, agree=lambda wish: bool(self._agree(wish)))
        if verdict.disagreed or reason:
            self._report(verdict, reason or ("audit" if audited else "another rank"), started_s)
        if verdict.kind == "persistent" and not self.shadow.force_audit():
            raise Unconfirmed(f"{len(verdict.attempts)} runs gave no confirmed result")
        loss = self._shadowed(micro_step, verdict.loss, faulty=verdict.attempts[-1].faulty)
        if verdict.kind == "genuine" and loss is verdict.loss:
            self._accepted |= found.suspect_inputs
        self._check_plausible(loss, verdict.attempts[-1].digest)
        return loss

    def _shadowed(
        self, micro_step: MicroStep, loss: torch.Tensor, *, faulty: bool = False
    ) -> torch.Tensor:
        """Return the loss that shadow replicas confirm, if the step is audited by them."""
        return self.shadow.confirmed(
            micro_step, loss, lambda: self._run(micro_step)[0], faulty=faulty
        )

    def _report(self, verdict: Verdict, reason: str, started_s: float) -> None:
        events.record(
            EventKind.RERUN,
            detector=reason,
            rung="recompute" if verdict.disagreed and verdict.kind != "persistent" else "",
            duration_s=time.perf_counter() - started_s,
            detail={
                "verdict": verdict.kind,
                "attempts": len(verdict.attempts),
                "loss_differed": verdict.loss_differed,
            },
        )

    def _run(self, micro_step: MicroStep) -> tuple[torch.Tensor, Collected]:
        with collecting() as found:
            loss = self.shadow.observe(micro_step.run)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        self._total_norm = total_norm(gradients)
        self.grad_norm = float(self._total_norm)
        return loss, found

    def _suspicion(self, loss: torch.Tensor, found: Collected) -> str:
        """Return why the result of a pass is suspect; an empty string if it is not."""
        value = float(loss)
        if found.unrepaired:
            return "unrepaired fault"
        if not (math.isfinite(value) and math.isfinite(self.grad_norm)):
            return "non-finite value"
        if found.suspect_inputs - self._accepted:
            return min(kind for kind, _ in found.suspect_inputs - self._accepted).replace("_", " ")
        if self._loss_past.is_spike(value):
            return "loss spike"
        return "gradient norm spike" if self._norm_past.is_spike(self.grad_norm) else ""

    def _is_audited(self, step: int) -> bool:
        return self.audit > 0 and random.Random(f"{self.seed}/{step}").random() < self.audit

    def _check_plausible(self, loss: torch.Tensor, digest: str) -> None:
        """Refuse a confirmed result if damaged parameters may be its cause.

        Raises:
            Unconfirmed: Loss or gradient is not finite, or the loss absurd, there are snapshots,
                and it was not shown yet that older ones lead to the same result.
        """
        finite = math.isfinite(float(loss)) and math.isfinite(self.grad_norm)
        finite = not self._agree(not finite)
        if finite and not self._agree(self._loss_past.is_absurd(float(loss))):
            return
        if self.snapshots is not None and self._agree(digest not in self._way_back.genuine):
            what = "the loss is absurd" if finite else "loss or gradient is not finite"
            raise Unconfirmed(f"{what}, and repeats", digest)
        if not finite:
            events.record(EventKind.NONFINITE_GENUINE, detector="non-finite value")

    def _apply(self, loss: torch.Tensor, *, snapshot: bool) -> None:
        """Apply the optimizer, once the snapshot in flight has copied the parameters."""
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
        """Check that all nodes restored the same step.

        Raises:
            SnapshotLost: They did not, so that no step is available on all of them.
        """
        newest, oldest = self._agree(self.steps_done), -self._agree(-self.steps_done)
        if newest != oldest:
            raise SnapshotLost(
                f"this node restored step {self.steps_done}, others up to {newest} or down to "
                f"{oldest}: no step is held by all; load a checkpoint on every node"
            )

    def _roll_back(self, cause: Unconfirmed) -> None:
        """Restore the newest snapshot, or the next older one than that already tried.

        If there is none, and all that were tried gave the refused result, this result is accepted.
        """
        started_s, failed, way_back = time.perf_counter(), self.steps_done, self._way_back
        way_back.refuse(failed, cause.digest)
        missing = self._restore_older(way_back.start)
        if self._agree(missing is not None) and not self._agree(not way_back.repeated):
            way_back.accept()
            missing = self._restore_older(None)  # the oldest, which was tried last
        if self._agree(missing is not None):
            reason = f"{cause}{way_back.tried()}, and {missing or 'another rank has no snapshot'}"
            raise UncorrectableFault(_hopeless(failed, reason)) from missing
        self._check_nodes_agree()
        self._history.rolled_back(self.steps_done)
        way_back.rolled_back(self.steps_done)
        events.record(
            EventKind.ROLLBACK,
            detector="rerun",
            rung="rollback",
            duration_s=time.perf_counter() - started_s,
            detail={"cause": str(cause), "from_step": failed, "to_step": self.steps_done},
        )

    def _restore_older(self, before: int | None) -> SnapshotError | None:
        """Restore the newest snapshot, or the newest of a step before; return why there is none."""
        assert self.snapshots is not None
        try:
            self.steps_done = self.snapshots.rollback(before)
        except SnapshotError as error:
            return error
        return None


def _attempted(micro_step: MicroStep) -> tuple[torch.Tensor, bool]:
    with collecting() as found:
        loss = micro_step.run()
    return loss, bool(found.unrepaired)


def _hopeless(step: int, cause: str) -> str:
    return (
        f"step {step}: {cause}; nothing unverified was applied: look at `holdfast events` for the "
        "device, and restart on healthy hardware"
    )
