"""The Guard, which runs, verifies and if necessary repeats a training step before applying it."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.amp import GradScaler
from torch.utils.hooks import RemovableHandle

from holdfast import config, events
from holdfast.collectives.checks import Collectives
from holdfast.errors import (
    ConfigError,
    SnapshotError,
    SnapshotLost,
    SnapshotMismatch,
    UncorrectableFault,
)
from holdfast.events import EventKind
from holdfast.events.steps import StepLog
from holdfast.liveness.watchdog import Hang, Watchdog
from holdfast.optimizers import AnyOptimizer, as_one, innermost_of
from holdfast.protection import Collected
from holdfast.replay.agreement import Agreement
from holdfast.replay.batches import keep
from holdfast.replay.history import History
from holdfast.replay.micro_batches import Accumulation, check_empty
from holdfast.replay.parameters import parameters_of
from holdfast.replay.rerun import ForwardBackward, MicroStep, Unconfirmed
from holdfast.replay.shadow import Shadow, ShadowReplica
from holdfast.rng import register_all, set_rng_state, unregister
from holdfast.snapshot.client.at_rest import AtRest
from holdfast.snapshot.client.snapshots import Snapshots
from holdfast.spare_process import is_spare
from holdfast.step.buckets import Buckets
from holdfast.step.hooks import weak_hook
from holdfast.step.loading import Batches
from holdfast.step.optimizer_check import OptimizerCheck
from holdfast.step.refusals import (
    check_model,
    check_optimizer,
    check_scheduler,
    check_snapshots,
    in_snapshots,
)
from holdfast.step.scaling import LossScale
from holdfast.step.settings import Edits, GroupSettings
from holdfast.step.spare import SpareReplica
from holdfast.step.spot_check import SpotCheck
from holdfast.step.summary import Summary, timed
from holdfast.step.update import After, Scheduler, Update
from holdfast.step.verifier import FirstPass, Verifier
from holdfast.step.watch import PassWatch
from holdfast.step.way_back import WayBack

_logger = logging.getLogger("holdfast.guard")
_entered: "WeakValueDictionary[Path, Guard]" = WeakValueDictionary()  # by their run directories


@dataclass(frozen=True)
class _Step:
    """A step as it is done again: ``begin`` prepares its pass, ``apply`` applies its gradients.

    ``edits`` are the settings of the optimizer that the loop changed before it.
    """

    begin: Callable[[], MicroStep]
    apply: Callable[[], object] | None
    edits: Edits = ()


@dataclass(frozen=True)
class _Open:
    """A step whose micro-steps a framework runs, with what was found in them so far."""

    passes: Accumulation
    found: Collected


class Guard:
    """Runs training steps so that nothing unverified reaches ``optimizer.step``.

    ``step`` runs forward and backward and verifies the result: it looks for faults that protected
    ops could not repair, non-finite values, and spikes of the loss or the gradient norm, and it
    audits a sampled share of steps. A suspect step is repeated. If repetition does not confirm a
    result, training rolls back to the last clean snapshot. Only then the optimizer is applied and
    the next snapshot begun. The Guard empties the gradients before each pass.

    A framework that applies the optimizer itself calls ``micro_step`` in the place of its pass, and
    ``after_optimizer_step`` at the end of its step. ``Guard.attach`` is for loops that can do
    neither. See ``docs/guard.md``.

    Args:
        model: The module whose gradients are applied; it may be wrapped in DDP.
        optimizer: Applied once a step is verified; a list or ``holdfast.Optimizers`` for several.
        scheduler: Learning-rate schedule, stepped after the optimizer; by default the one that
            ``snapshots`` holds. ``holdfast.Schedulers`` for several.
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
        scaler: The ``GradScaler`` by which the losses are scaled; by default the one that
            ``snapshots`` holds. A step that overflows, also when it is repeated, is skipped by it.
        apply_again: For ``micro_step``: clips, applies the optimizer and advances the schedule as
            the framework does. It is called for steps that are done again after a roll-back;
            without it such steps raise, and the restart restores.
        own_zero_grad: True if the functions given to ``micro_step`` empty the gradients.
        optimizer_hook: False if the framework runs its passes within ``optimizer.step``. Otherwise
            the optimizer refuses steps that are not verified.
        generators: Generators of your own (``torch.Generator``) from which passes draw, by name or
            in a fixed order. They are saved and restored with the random state, in snapshots too.
        at_rest: Share of the state, 0 to 1, that is compared before each ``optimizer.step`` with
            its digests after the step before; it needs snapshots. By default ``guard.at_rest`` of
            the config file, else as much as takes 1 % of the time
            (``holdfast/snapshot/client/at_rest.py``).
        optimizer_check: Share, 0 to 1, of the optimizer's updates that are computed again in each
            step and compared bit for bit; in audited steps all are, unless it is 0. By default
            ``guard.optimizer_check`` of the config file, else 1/64.
        spot: Share of the model's modules, 0 to 1, that are computed again in each step, forward
            and backward, and compared bit for bit. By default ``guard.spot`` of the config file,
            else 1/64.
        collectives: True to check what ranks exchange and sum in a pass. By default
            ``guard.collectives`` of the config file, else False (``docs/fault_model.md``).
        hang: When a run is said to hang, or a rank to be slow, and whether it is restarted then; by
            default ``Hang()``.

    Attributes:
        steps_done: Number of steps done; after entry those of the restored snapshot. A loop that
            does not draw its batches from ``batches`` continues there.
        losses: Verified loss of each micro-step of the latest step.
        replaced: True if any of them was computed anew.
        optimizer_check: The check of the optimizer's updates, which says what it covers.
        spot: The check of the model's modules, which says what it covers.

    Guarantees: see ``docs/fault_model.md``. On healthy hardware the results are, bit for bit,
    those of the plain loop (``zero_grad``, forward and backward, clip, ``optimizer.step``,
    ``scheduler.step``; with a scaler those of torch's recipe). Every step that was not simply
    applied leaves an event.

    Not covered: single faults in updates and modules that are not computed again, and in the state
    at rest before the snapshot has read it; optimizers that the backward pass applies without
    ``torch.optim``.

    Raises:
        ConfigError: A setting is out of range, the scheduler or the scaler is not the one in the
            snapshots, or model, optimizer or scheduler cannot be guarded. Entering it raises this
            if another Guard of this process uses the same run directory.
    """

    _applies = True  # False if the training loop applies its optimizer itself, in any case

    def __init__(
        self,
        model: nn.Module,
        optimizer: AnyOptimizer,
        *,
        scheduler: Scheduler | None = None,
        snapshots: Snapshots | None = None,
        clip_grad_norm: float | None = None,
        audit: float | None = None,
        shadow: float | Shadow | None = None,
        seed: int = 0,
        scaler: GradScaler | None = None,
        apply_again: Callable[[], object] | None = None,
        own_zero_grad: bool = False,
        optimizer_hook: bool = True,
        generators: Mapping[str, torch.Generator] | Iterable[torch.Generator] = (),
        at_rest: float | None = None,
        optimizer_check: float | None = None,
        spot: float | None = None,
        collectives: bool | None = None,
        hang: Hang | None = None,
    ) -> None:
        """Check the settings and prepare the first step; ``help(Guard)`` describes each."""
        audit = config.value("guard.audit", audit, 0.0)
        if not 0 <= audit <= 1:
            raise ConfigError(f"audit = {audit!r} must be a share of steps between 0 and 1")
        if clip_grad_norm is not None and not clip_grad_norm > 0:
            raise ConfigError(f"clip_grad_norm = {clip_grad_norm!r} must be positive")
        if snapshots is not None:
            scheduler = in_snapshots("scheduler", scheduler, snapshots.scheduler)
            scaler = in_snapshots("scaler", scaler, snapshots.scaler)
        if is_spare():
            snapshots = None  # a spare leaves those of the run alone
        optimizer = as_one(optimizer)
        check_model(model)
        check_optimizer(model, optimizer)
        if snapshots is not None:
            check_snapshots(snapshots, optimizer)
        if self._applies and apply_again is None:
            check_scheduler(scheduler)
        if not isinstance(shadow, Shadow):
            shadow = Shadow(config.value("guard.shadow", shadow, 0.0))
        if is_spare() and not shadow.spare:
            raise ConfigError("a spare's Guard needs shadow=Shadow(rate, spare=True), as the run's")
        self.model, self.optimizer, self.snapshots = model, optimizer, snapshots
        self.scheduler, self.scaler = scheduler, scaler
        self.clip_grad_norm, self.audit, self.seed = clip_grad_norm, audit, seed
        self._generators = register_all(generators)
        self.steps_done = 0
        self.losses: list[torch.Tensor] = []
        self.replaced = False
        self._agree = Agreement()
        self._scale = LossScale(scaler)
        self.optimizer_check = OptimizerCheck(model, optimizer, optimizer_check)
        self.spot = SpotCheck(model, spot, seed=seed)
        checks = self.optimizer_check, self.spot
        self._step_log, self._summary = StepLog(), Summary(model, snapshots, *checks)
        self._watchdog = Watchdog(model, hang or Hang.configured())
        parameters = parameters_of(model)
        self._verifier = Verifier(
            model,
            audit=audit,
            shadow=shadow,
            seed=seed,
            agree=self._agree,
            snapshots=snapshots,
            at_rest=AtRest(snapshots, at_rest),
            optimizer_check=self.optimizer_check,
            collectives=Collectives(wanted=config.value("guard.collectives", collectives, False)),
            spot=self.spot,
            watch=PassWatch(parameters, scaler),
            loss_scale=self._scale,
            timing=self._summary.timing,
        )
        self._update = Update(
            optimizer, scheduler, parameters, clip_grad_norm=clip_grad_norm, scaler=scaler
        )
        self._settings = GroupSettings(optimizer)
        self._apply_again, self._own_zero_grad = apply_again, own_zero_grad
        self._optimizer_hook = optimizer_hook
        self._open: _Open | None = None
        self._verified: torch.Tensor | None = None  # loss of the step that may be applied now
        self._hooks: list[RemovableHandle] = []
        self._history, self._way_back = History(), WayBack()
        self._buckets = Buckets(model)
        self._entered = self._restored = False

    @staticmethod
    def attach(
        model: nn.Module,
        optimizer: AnyOptimizer,
        *,
        snapshots: Snapshots | None = None,
    ) -> "Guard":
        """Return a Guard that a training loop of its own does not call; use it in a with block.

        Hooks of the optimizer count its steps, refuse gradients that are not finite, and wait for
        the snapshot that is being copied. A snapshot begins when ``batches`` is asked for the next
        batch, when ``begin_snapshot`` is called, or at the latest with the next forward pass in
        training mode. On entry the newest snapshot is restored.

        Args:
            model: The module whose gradients are applied.
            optimizer: The optimizer that the loop applies.
            snapshots: In-memory snapshots, begun after every step.

        Not covered: wrong values that are finite, and changes of the state at rest. The Guard
        cannot repeat a step, so that it neither repairs nor audits; in its place
        ``UncorrectableFault`` ends the run, and the restart restores the newest snapshot. Steps
        that a ``GradScaler`` skips are not counted.

        Raises:
            ConfigError: As for ``Guard``.
        """
        from holdfast.attached import AttachedGuard  # it is a Guard

        return AttachedGuard(
            model, optimizer, snapshots=snapshots, at_rest=0.0, optimizer_check=0.0, spot=0.0
        )

    @property
    def shadow(self) -> ShadowReplica:
        """This rank's part in the audits by shadow replicas."""
        return self._verifier.shadow

    @property
    def at_rest(self) -> AtRest:
        """The checks of the state at rest, with the share of it that they read."""
        return self._verifier.at_rest

    @property
    def grad_norm(self) -> float:
        """Norm of the gradients of the latest pass, before clipping."""
        return self._verifier.grad_norm

    def __enter__(self) -> Self:
        if self.snapshots is not None:
            self._check_alone(self.snapshots.run_dir)
            restored = self._restore(self.snapshots)
            self.steps_done, self._restored = restored or 0, restored is not None
            self._check_nodes_agree()
            # All ranks or none, also where a node restored step 0 and another one nothing.
            self._verifier.rehearses = bool(self._agree(restored is None))
            if restored is None:
                self.snapshots.begin(0)
                self.snapshots.wait_committed()  # so that the first step can be rolled back too
            self._check_replicas(began=restored is None)
            self._history = History(int(self.snapshots.status()["keep"]))
            self._settings.settle()
            _entered[self.snapshots.run_dir] = self
        events.record_config()
        self._log_start()
        self._step_log.start()
        self._watchdog.start(self.steps_done)
        self._entered = True
        self._add_hooks()
        return self

    def _restore(self, snapshots: Snapshots) -> int | None:
        """Restore the newest snapshot, and open the ledger unless it is another run's."""
        events.ensure_ledger(snapshots.run_dir)
        foreign = False
        try:
            return snapshots.restore()
        except SnapshotMismatch:
            foreign = True
            raise
        finally:
            if not foreign:
                events.claim_ledger(snapshots.run_id)

    def _check_alone(self, run_dir: Path) -> None:
        """Check that no other Guard of this process restores from the same run directory.

        Raises:
            ConfigError: There is one: each would restore and replace the snapshots of the other.
        """
        if _entered.get(run_dir, self) is not self:
            raise ConfigError(
                f"another Guard of this process uses run_dir {run_dir}: for models that are "
                "trained together make one Guard of all of them (docs/loops.md has a GAN), for "
                "runs that are independent give each its own Snapshots(run_dir=...)"
            )

    def _log_start(self) -> None:
        if self.snapshots is None:
            kept = "without snapshots: a step that cannot be repaired raises"
        elif self._restored:
            kept = f"resumes at step {self.steps_done} from {self.snapshots.restored_from}"
        else:
            kept = f"starts at step 0: nothing to resume in {self.snapshots.run_dir}"
        _logger.info("guarding %s (%s); %s", type(self.model).__name__, self._watches(), kept)

    def _watches(self) -> str:
        """Say what the Guard does about faults."""
        return f"audit {self.audit:g}, shadow {self.shadow.rate:g}"

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        events.set_step(-1)
        self._watchdog.stop()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._step_log.flush()
        self._summary.write(self.steps_done)
        self.at_rest.close()
        if isinstance(self.shadow, SpareReplica):
            self.shadow.close(ended_well=kind is None)
        self.optimizer_check.close()
        unregister(self._generators)
        wrong = self._verifier.wrong_update(self.steps_done - 1) if kind is None else ""
        if self.snapshots is not None:
            _entered.pop(self.snapshots.run_dir, None)
            events.retire_ledger(self.snapshots.run_dir)
            self._close(self.snapshots, ended_well=kind is None and not wrong)
        if wrong:
            raise UncorrectableFault(f"{wrong}; restart from a step before it")

    def _close(self, snapshots: Snapshots, *, ended_well: bool) -> None:
        """Close the snapshots, whose process is kept for a restart unless the run ended well."""
        finished = False
        try:
            if ended_well:
                snapshots.finish()
                if not snapshots.suspended:
                    snapshots.wait_committed()
                self._verifier.check_replicas(self.steps_done)
                finished = True
        finally:
            snapshots.close(finished=finished)

    def batches(self, loader: Any, *, steps: int) -> Iterator[Any]:
        """Yield the batches of the steps that remain after the restored snapshot.

        Args:
            loader: An iterable of batches. If it is the ``loader`` of the snapshots, its position
                was restored with them. Any other loader must yield the same batches from the same
                random state (Python, NumPy, torch), as a shuffling ``DataLoader`` without its own
                generator does: its current epoch is started again from the random state with which
                it began, and the batches that were drawn for the steps done are skipped.
            steps: Length of the whole run, in steps.

        Raises:
            ConfigError: The loader yields no batch.
        """
        restored, self._restored = self._restored, False
        batches = Batches(loader, self.snapshots, lambda: self.steps_done, restored=restored)
        for batch in batches.until(steps):
            yield batch
            self._between_batches()

    def _between_batches(self) -> None:
        """Do what is due after a batch; ``step`` and ``after_optimizer_step`` did it already."""

    @timed
    def step(
        self, forward_backward: ForwardBackward, batch: Any, *, after: After | None = None
    ) -> torch.Tensor:
        """Compute, verify and apply one training step.

        Args:
            forward_backward: Called with the batch; computes the loss, calls ``backward()`` and
                returns the loss. It may run several micro-batches, and it may be called again.
            batch: Argument of ``forward_backward``.
            after: Called without arguments, under ``torch.no_grad()``, after optimizer and schedule
                and before the next snapshot begins: the place to change weights (averages, clipped
                or pruned weights). It is called again if the step is done again.

        Returns:
            The verified loss, detached.

        Raises:
            ConfigError: The Guard has snapshots and is not used in a ``with`` block, or the pass
                did what cannot be verified.
            UncorrectableFault: The step could not be confirmed, even after rolling back.
        """
        self._check_usable()
        if isinstance(self.shadow, SpareReplica) and is_spare():
            self.shadow.serve(forward_backward)
        batch = keep(batch)
        if self._open is not None:
            raise ConfigError(
                f"step {self.steps_done} has begun with micro_step: end it with last=True"
            )
        record = _Step(
            begin=lambda: MicroStep(self.model, forward_backward, batch),
            apply=lambda: self._update.apply(self._verifier.total_norm, after),
        )
        self._remember(record)
        loss = self._confirmed(None)
        self.losses = [loss]
        self._apply(record, loss)
        self.begin_snapshot()
        return loss

    @timed
    def micro_step(self, function: ForwardBackward, batch: Any, *, last: bool) -> torch.Tensor:
        """Run one micro-step of a step whose optimizer the caller applies.

        With the last one the whole step is verified, and repeated from its first micro-step if it
        is in doubt. Then the caller clips and applies the gradients and calls
        ``after_optimizer_step``. If ``function`` raises, the step has to begin again.

        Args:
            function: Called with the batch; computes the loss, calls ``backward()``, which adds to
                the gradients, and returns the loss. It may be called again.
            batch: Argument of ``function``.
            last: True for the last micro-step before the optimizer is applied; the same on all
                ranks.

        Returns:
            The loss, detached. The loss of an earlier micro-step may have been replaced with the
            last one (``replaced``): ``losses`` has all of them.

        Raises:
            ConfigError: As for ``step``, gradients of an earlier step are left over, or
                ``after_optimizer_step`` was not called.
            UncorrectableFault: The step could not be confirmed, even after rolling back.
        """
        self._check_usable()
        if self.shadow.settings.spare:
            raise ConfigError("a spare computes steps of Guard.step, and none of micro_step")
        if self.clip_grad_norm is not None:
            raise ConfigError(
                f"clip_grad_norm={self.clip_grad_norm} is for Guard.step: with micro_step the loop "
                "clips its gradients itself, after the last micro-step"
            )
        if self._open is None:
            if not self._own_zero_grad:
                check_empty(self.model)  # before a pass that settles the buckets empties them
            self._buckets.settle(MicroStep(self.model, function, batch))
        step, self._open = self._open or self._first_micro_step(), None
        loss, found = self._verifier.collected(lambda: step.passes.run(function, batch))
        step.found.unrepaired += found.unrepaired
        step.found.suspect_inputs |= found.suspect_inputs
        if not last:
            self._open = step
            return loss
        self._verified = self._confirmed(FirstPass(*step.passes.ended(), step.found))
        self.losses = list(self._verified.unbind())
        return self.losses[-1]

    def before_optimizer_step(self) -> None:
        """Check that the gradients are verified, and wait until a snapshot is copied.

        The optimizer calls it, unless ``optimizer_hook`` is False.

        Raises:
            ConfigError: The present step is not verified.
        """
        if self._verified is None:
            raise ConfigError(
                f"optimizer.step at step {self.steps_done} with gradients that were not verified: "
                "compute them in Guard.step, or in micro_step with last=True"
            )
        if self.snapshots is not None:
            self.snapshots.finish()

    @timed
    def after_optimizer_step(self, *, snapshot: bool = True) -> None:
        """End a step of which ``micro_step`` ran the passes, also if a scaler skipped it.

        Args:
            snapshot: False to call ``begin_snapshot`` later, when all that belongs to the step is
                done.

        Raises:
            ConfigError: No step is verified.
        """
        if self._verified is None:
            raise ConfigError(
                f"after_optimizer_step at step {self.steps_done}, of which micro_step did not run "
                "the last micro-step: call micro_step(..., last=True) before the optimizer"
            )
        self._ended(self._verified)
        if snapshot:
            self.begin_snapshot()

    def pause(self) -> AbstractContextManager[None]:
        """Return a context in which no step is expected, so that it is not said to hang."""
        return self._watchdog.pause()

    def begin_snapshot(self) -> None:
        """Begin the snapshot of the steps done, unless it is begun already.

        There is none after a step that the scaler skipped: if gradients overflow because a weight
        is damaged, an older snapshot has the right one.
        """
        snapshots = self.snapshots
        if snapshots is not None and snapshots.step != self.steps_done and not self._scale.skipped:
            snapshots.begin(self.steps_done)
            self._settings.settle()

    def _check_usable(self) -> None:
        if self.snapshots is not None and not self._entered:
            raise ConfigError("a Guard with snapshots restores on entry: use it in a with block")
        if self._verified is not None:
            raise ConfigError(
                f"step {self.steps_done} was verified and not ended: call after_optimizer_step()"
            )
        self.optimizer_check.watch()

    def _first_micro_step(self) -> _Open:
        events.set_step(self.steps_done)
        self._add_hooks()
        if self._optimizer_hook and not self._hooks:
            raise ConfigError(
                f"a {type(self.optimizer).__name__} has no register_step_pre_hook, so that it "
                "could apply what is not verified: give Guard(optimizer_hook=False), and call "
                "before_optimizer_step() before its step"
            )
        passes = Accumulation(self.model, own_zero_grad=self._own_zero_grad)
        self._remember(_Step(begin=passes.anew, apply=self._apply_again))
        return _Open(passes, Collected())

    def _remember(self, record: _Step) -> None:
        kept = self.snapshots is not None and not self.snapshots.suspended
        # While snapshots fail no batches are kept for a roll-back, which would be ever more.
        clean = self.snapshots.committed_step if self.snapshots and kept else self.steps_done
        record = replace(record, edits=self._settings.edits())
        self._history.remember(self.steps_done, record, clean=clean)

    def _confirmed(self, first: FirstPass | None) -> torch.Tensor:
        """Verify the latest step, rolling back if need be; return its loss, not applied yet."""
        rolled_back = False
        while True:
            try:
                loss = self._catch_up(first)
            except Unconfirmed as error:
                if self.snapshots is None:
                    cause = f"{error}, and there are no snapshots to roll back to"
                    raise UncorrectableFault(hopeless(self.steps_done, cause)) from error
                self._roll_back(error)
                first, rolled_back = None, True
            else:
                self.replaced = rolled_back or self._verifier.runs > (first is None)
                self._way_back.arrived()
                return loss

    def _catch_up(self, first: FirstPass | None) -> torch.Tensor:
        """Verify every remembered step from the present state on, usually the latest one only.

        All but the latest are applied too. None of them is saved: the loader's position in a
        snapshot belongs to the latest.
        """
        todo = self._history.since(self.steps_done)
        if not todo:
            raise UncorrectableFault(
                f"rolled back to step {self.steps_done}, from which on the batches are forgotten: "
                "restart, which restores the loader with it"
            )
        if any(past.record.apply is None for past in todo[:-1]):
            raise UncorrectableFault(
                f"rolled back to step {self.steps_done}, and without apply_again the steps since "
                "then cannot be applied: restart, which restores the loader with it"
            )
        for past in todo:
            if first is None:
                set_rng_state(past.rng)
                self._settings.repeat(past.record.edits)
            micro_step = past.record.begin() if first is None else first.micro_step
            if first is None:
                self._buckets.settle(micro_step)
            loss = self._verifier.verified(
                self.steps_done, micro_step, first=first, refuses=self._refuses
            )
            if past is not todo[-1]:
                self._apply(past.record, loss)
        return loss

    def _refuses(self, digest: str) -> bool:
        """Return whether an implausible result may be due to damaged weights."""
        return self.snapshots is not None and digest not in self._way_back.genuine

    def _apply(self, record: _Step, loss: torch.Tensor) -> None:
        """Apply a verified step, once the snapshot in flight has copied the parameters."""
        assert record.apply is not None
        self._verified = loss
        try:
            self.before_optimizer_step()
            with self._summary.timing("optimizer"):
                record.apply()
        finally:
            self._verified = None
        self._ended(loss)

    def _ended(self, loss: torch.Tensor) -> None:
        self._verifier.accept(loss)
        self._verified = None
        self._settings.settle()
        self.steps_done += 1
        self._log_step(self._verifier.value_of(loss), self.grad_norm)

    def _log_step(self, loss: float, grad_norm: float) -> None:
        self._step_log.add(self.steps_done, loss, grad_norm)
        self._summary.step_done(self.steps_done)
        self._watchdog.step_done(self.steps_done)

    def _add_hooks(self) -> None:
        """Let the optimizer refuse steps that are not verified, unless this is switched off."""
        if self._optimizer_hook and not self._hooks:
            refuses, optimizers = weak_hook(self._refuse_unverified), innermost_of(self.optimizer)
            hookable = [each for each in optimizers if hasattr(each, "register_step_pre_hook")]
            self._hooks = [each.register_step_pre_hook(refuses) for each in hookable]

    def _refuse_unverified(self, *_: object) -> None:
        self.before_optimizer_step()

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

    def _check_replicas(self, *, began: bool) -> None:
        """Check that the ranks that the snapshots take for replicas hold the same first state.

        Raises:
            ConfigError: They do not, so that no fault is the cause.
        """
        assert self.snapshots is not None
        if self._agree(began and 0 in self.snapshots.diverged_steps):
            raise ConfigError(
                "ranks that the snapshots take for replicas hold different states before the first "
                "step: if they are stages of a pipeline, give Snapshots(mesh=...) the mesh of the "
                'whole job with its dimension "pp"; replicas must begin with the same parameters, '
                "as under DistributedDataParallel"
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
            raise UncorrectableFault(hopeless(failed, reason)) from missing
        self._check_nodes_agree()
        self._history.rolled_back(self.steps_done)
        self._scale.rolled_back()
        self.optimizer_check.lost = None
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


def hopeless(step: int, cause: str) -> str:
    """Return the message of an ``UncorrectableFault`` at a step."""
    return (
        f"step {step}: {cause}; nothing unverified was applied: look at `holdfast events` for the "
        "device, and restart on healthy hardware"
    )
