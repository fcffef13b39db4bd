"""A ``Trainer`` whose steps are run by a Guard: a callback, and four methods that are wrapped."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from holdfast.errors import ConfigError
from holdfast.guard import Guard
from holdfast.integrations.transformers.state import TrainerState
from holdfast.protection import Protection, protect
from holdfast.rng import rng_state, set_rng_state
from holdfast.snapshot.client.settings import SnapshotOptions
from holdfast.snapshot.client.snapshots import Snapshots

RESUMED = "<holdfast>"  # in the place of a checkpoint's folder


@dataclass(frozen=True)
class _Step:
    """What the trainer had when a step began."""

    number: int
    accumulation: int
    attributes: dict[str, Any]
    loss: torch.Tensor


class GuardedTrainer(TrainerCallback):
    """What ``attach`` adds to a trainer.

    Attributes:
        guard: The Guard of the present or latest ``train()``; None before.
        protection: The protection of the model, with its coverage report; None without one.
    """

    def __init__(
        self,
        trainer: Trainer,
        options: SnapshotOptions,
        settings: Mapping[str, Any],
        attributes: Sequence[str],
        *,
        protects: bool,
    ) -> None:
        self.guard: Guard | None = None
        self.protection: Protection | None = None
        self._trainer, self._options, self._settings = trainer, options, settings
        self._protects, self._opened = protects, ExitStack()
        self._attributes = [name for name in attributes if hasattr(trainer, name)]
        self._resumes = False
        trainer.train = partial(self._train, trainer.train)
        trainer.training_step = partial(self._training_step, trainer.training_step)
        trainer._run_epoch = partial(self._run_epoch, trainer._run_epoch)
        trainer._load_rng_state = partial(self._load_rng_state, trainer._load_rng_state)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Restore the newest snapshot, once model, optimizer and schedule are prepared."""
        if state.is_hyper_param_search:
            raise ConfigError("hyperparameter_search trains many runs: attach to one of its own")
        trainer, self._state = self._trainer, TrainerState(self._trainer, self._attributes)
        if self._protects:
            self.protection = self._opened.enter_context(protect(trainer.model))
        optimizer = trainer.optimizer.optimizer
        moving = {"scheduler": trainer.lr_scheduler, "scaler": trainer.accelerator.scaler}
        self._snapshots = Snapshots(
            trainer.model, optimizer, extra=self._state, **moving, **self._options
        )
        self._state.forget()  # Snapshots has loaded it once, to see whether it can be
        settings = {"apply_again": self._apply_again, **self._settings}
        self.guard = Guard(trainer.model_wrapped, optimizer, snapshots=self._snapshots, **settings)
        self._opened.enter_context(self.guard)
        self._resumes = self._state.restored() and self._state.epoch >= 0
        self._restored_rng = rng_state()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin the snapshot of the steps done, now that the step's batches are drawn."""
        if self._resumes:
            self._resumes = False
            self._state.restored()  # again: the trainer may have evaluated before its first step
            set_rng_state(self._restored_rng)
        self._snapshots.epoch = self._state.within, self._epoch_rng
        self._guard.begin_snapshot()
        accumulation = self._trainer.current_gradient_accumulation_steps
        attributes, loss = self._state.attributes(), self._trainer._tr_loss.clone()
        self._step = _Step(state.global_step, accumulation, attributes, loss)
        self._begins = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the step, also if the scaler skipped it."""
        self._guard.after_optimizer_step(snapshot=False)
        self._state.within += 1

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take the last snapshot, and leave the Guard."""
        self._state.ended = True
        self._guard.begin_snapshot()
        self._opened.close()

    @property
    def _guard(self) -> Guard:
        assert self.guard is not None
        return self.guard

    def _train(self, train: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        with self._opened:  # which an exception leaves too
            return train(*args, **settings)

    def _load_rng_state(self, load: Callable[[Any], None], checkpoint: Any) -> None:
        if checkpoint != RESUMED:
            load(checkpoint)

    def _run_epoch(self, run: Callable[..., None], **epoch: Any) -> None:
        """Run an epoch, or what is left of it after a restore: the trainer skips its batches."""
        trainer, state, number = self._trainer, self._state, epoch["epoch"]
        accumulation = trainer.args.gradient_accumulation_steps
        if self._resumes and state.ended:
            trainer.control.should_training_stop = True
        elif self._resumes and number < state.epoch:
            return
        elif self._resumes and number > state.epoch:
            raise ConfigError(
                f"the checkpoint begins with epoch {number}, after the newest snapshot, of epoch "
                f"{state.epoch}: leave resume_from_checkpoint out, or give another run_dir"
            )
        elif self._resumes:
            assert self._snapshots.epoch is not None
            self._epoch_rng = self._snapshots.epoch[1]
            set_rng_state(self._epoch_rng)
            epoch["steps_trained_in_current_epoch"] = state.within * accumulation
            run(**epoch | {"resume_from_checkpoint": RESUMED, "epochs_trained": number})
        else:
            self._epoch_rng, state.epoch, state.within = rng_state(), number, 0
            if number == epoch["epochs_trained"] and epoch["resume_from_checkpoint"] is not None:
                state.within = epoch["steps_trained_in_current_epoch"] // accumulation
            run(**epoch)

    def _training_step(
        self, plain: Callable[..., torch.Tensor], model: Any, inputs: Any, *args: Any, **named: Any
    ) -> torch.Tensor:
        trainer, guard, step = self._trainer, self._guard, self._step
        begins, self._begins = self._begins, False
        last = trainer.accelerator.sync_gradients

        def run(batch: Any) -> torch.Tensor:
            trainer.accelerator.gradient_state._set_sync_gradients(last)
            if begins:
                self._state.put_back_attributes(step.attributes)
            with self._back_in(step):
                return plain(model, batch, *args, **named)

        loss = guard.micro_step(run, inputs, last=last)
        if last and guard.replaced:
            trainer._tr_loss = step.loss
            for replaced in guard.losses[:-1]:
                trainer._tr_loss = trainer._tr_loss + self._logged(replaced)
        return loss

    def _logged(self, loss: torch.Tensor) -> Any:
        """Return what the trainer adds to its sum for a loss, in the place of one not finite."""
        trainer = self._trainer
        steps = 1 + trainer.state.global_step - trainer._globalstep_last_logged
        filtered = trainer.args.logging_nan_inf_filter and not loss.isfinite()
        return trainer._tr_loss / steps if filtered else loss

    @contextmanager
    def _back_in(self, step: _Step) -> Iterator[None]:
        """Let the trainer count as in a step, which may be one before the present."""
        trainer = self._trainer
        now = trainer.state.global_step, trainer.current_gradient_accumulation_steps
        trainer.state.global_step = step.number
        trainer.current_gradient_accumulation_steps = step.accumulation
        try:
            yield
        finally:
            trainer.state.global_step, trainer.current_gradient_accumulation_steps = now

    def _apply_again(self) -> None:
        """Do what the trainer does between the last micro-step and the end of a step."""
        trainer = self._trainer
        if trainer.args.max_grad_norm > 0:
            trainer._clip_grad_norm(trainer.model_wrapped)
        trainer.optimizer.step()
        if not trainer.accelerator.optimizer_step_was_skipped:
            trainer.lr_scheduler.step()
        trainer.model_wrapped.zero_grad()
