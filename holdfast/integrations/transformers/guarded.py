"""A ``Trainer`` whose steps are run by a Guard: a callback, and methods that are replaced."""

import copy
import json
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from holdfast.integrations.adapter import Adapter, refuse
from holdfast.rng import rng_state, set_rng_state

RESUMED = "<holdfast>"  # in the place of a checkpoint's folder

# What training changes of a TrainerState, whose rest follows from the arguments; of a Trainer.
_STATE = ["epoch", "global_step", "num_input_tokens_seen", "total_flos", "best_metric"]
_STATE += ["best_global_step", "best_model_checkpoint"]
_COUNTERS = ["_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step"]
_COUNTERS += ["current_flos"]
# How accelerate distributes a run in which each rank has its own pass and its own gradients.
_PLAIN = ("NO", "MULTI_CPU", "MULTI_GPU")


def _check(trainer: Trainer) -> None:
    """Refuse settings with which no step can be repeated, or no run restored."""
    args, state = trainer.args, trainer.accelerator.state
    refuse(args.n_gpu > 1, f"{args.n_gpu} devices in one process, by nn.DataParallel: use torchrun")
    kind = str(state.distributed_type).split(".")[-1]
    untried = f"a run distributed by {kind} was not tried, or its step cannot be repeated: use DDP"
    refuse(kind not in _PLAIN, untried)
    optim = str(getattr(args.optim, "value", args.optim))
    inner = f"optim={optim!r} is applied within the backward pass: use one such as adamw_torch"
    refuse(any(word in optim for word in ("lomo", "layerwise")), inner)
    again = "auto_find_batch_size=True begins a run again: set per_device_train_batch_size"
    refuse(args.auto_find_batch_size, again)
    skip = "ignore_data_skip=True begins an epoch anew at a restart: leave it out"
    refuse(args.ignore_data_skip, skip)


class GuardedTrainer(Adapter, TrainerCallback):
    """What ``attach`` adds to a trainer."""

    def __init__(self, trainer: Trainer, attributes: Sequence[str], **settings: Any) -> None:
        """Check the settings of a trainer, and replace its methods."""
        super().__init__(**settings)
        _check(trainer)
        self._trainer = trainer
        self._attributes = [name for name in attributes if hasattr(trainer, name)]
        self._replace(trainer, "train", "training_step", "_run_epoch", "_load_rng_state")
        self._replace(trainer.callback_handler, "on_train_begin")
        trainer.add_callback(self)

    def _on_train_begin(self, plain: Callable[..., Any], args: Any, state: Any, *rest: Any) -> Any:
        """Restore the newest snapshot, before the trainer's callbacks see where training begins."""
        refuse(state.is_hyper_param_search, "hyperparameter_search trains many runs: attach to one")
        trainer, self._log = self._trainer, (0, "[]")
        self._epoch, self._within, self._ended = -1, 0, False  # no epoch has begun
        self._enter(
            trainer.model,
            trainer.model_wrapped,
            trainer.optimizer.optimizer,
            [trainer.lr_scheduler],
            scaler=trainer.accelerator.scaler,
        )
        self._restore()
        self._resumes = self._epoch >= 0
        return plain(args, state, *rest)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin the snapshot of the steps done, now that the step's batches are drawn."""
        if self._resumes:
            self._resumes = False
            self._restore()  # again: the trainer may have evaluated before its first step
            set_rng_state(self._restored_rng)
        self._snapshots.training.epoch = self._within, self._epoch_rng
        self._save()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the step, also if the scaler skipped it."""
        self.guard.after_optimizer_step(snapshot=False)
        self._within += 1

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take the last snapshot."""
        self._ended = True
        self._save()

    def _state(self) -> dict[str, Any]:
        """Return what the trainer counts and logs, and where it is in its data."""
        trainer, entries = self._trainer, self._trainer.state.log_history
        if len(entries) != self._log[0]:
            self._log = len(entries), _json(entries)
        plain = {
            "run": self._run(),
            "position": [self._epoch, self._within, self._ended],
            "state": {name: getattr(trainer.state, name) for name in _STATE},
            "counters": {name: getattr(trainer, name) for name in _COUNTERS},
            "attributes": {name: getattr(trainer, name) for name in self._attributes},
            "callbacks": [each.state()["attributes"] for each in self._callbacks()],
        }
        return {"plain": _json(plain), "log": self._log[1], "loss": trainer._tr_loss.clone()}

    def _restore(self) -> None:
        """Give the trainer the state that was loaded, if one was."""
        if self._loaded is None:
            return
        trainer, saved, run = self._trainer, json.loads(self._loaded["plain"]), self._run()
        found = f"the snapshot is of a run with {saved['run']}, and this one has {run}"
        refuse(saved["run"] != run, f"{found}: start it as it was, or give another run_dir")
        self._epoch, self._within, self._ended = saved["position"]
        vars(trainer.state).update(saved["state"], log_history=json.loads(self._loaded["log"]))
        vars(trainer).update(saved["counters"])
        self._put_back(saved["attributes"])
        for callback, values in zip(self._callbacks(), saved["callbacks"], strict=False):
            vars(callback).update(values)
        trainer._tr_loss = self._loaded["loss"].to(trainer.args.device)

    def _run(self) -> dict[str, int]:
        args = self._trainer.args
        run = {"processes": args.world_size, "batch": args.per_device_train_batch_size}
        return run | {"accumulation": args.gradient_accumulation_steps}

    def _callbacks(self) -> list[Any]:
        callbacks = self._trainer.callback_handler.callbacks
        return [each for each in callbacks if isinstance(each, ExportableState)]

    def _load_rng_state(self, plain: Callable[[Any], None], checkpoint: Any) -> None:
        if checkpoint != RESUMED:
            plain(checkpoint)

    def _run_epoch(self, plain: Callable[..., None], **epoch: Any) -> None:
        """Run an epoch, or what is left of it after a restore: the trainer skips its batches."""
        number, accumulation = epoch["epoch"], self._trainer.args.gradient_accumulation_steps
        if not self._resumes:
            self._epoch_rng, self._epoch, self._within = rng_state(), number, 0
            if number == epoch["epochs_trained"] and epoch["resume_from_checkpoint"] is not None:
                self._within = epoch["steps_trained_in_current_epoch"] // accumulation
        elif self._ended:
            self._trainer.control.should_training_stop = True
            return
        elif number < self._epoch:
            return
        else:
            found = f"the checkpoint begins with epoch {number}, the newest snapshot with "
            found += f"{self._epoch}: leave resume_from_checkpoint out, or give another run_dir"
            refuse(number > self._epoch, found)
            self._epoch_rng = self._snapshots.training.epoch[1]
            set_rng_state(self._epoch_rng)
            epoch |= {"resume_from_checkpoint": RESUMED, "epochs_trained": number}
            epoch["steps_trained_in_current_epoch"] = self._within * accumulation
        plain(**epoch)

    def _training_step(
        self, plain: Callable[..., torch.Tensor], model: Any, inputs: Any, *args: Any, **named: Any
    ) -> torch.Tensor:
        trainer, guard = self._trainer, self.guard
        last = trainer.accelerator.sync_gradients
        counted = trainer.state.global_step, trainer.current_gradient_accumulation_steps

        def run(batch: Any) -> torch.Tensor:  # maybe of a step before the present
            trainer.accelerator.gradient_state._set_sync_gradients(last)
            trainer.state.global_step, trainer.current_gradient_accumulation_steps = counted
            return plain(model, batch, *args, **named)

        loss = self._micro_step(run, inputs, last=last)
        if last and guard.replaced:
            trainer._tr_loss = self._sum_before
            steps = 1 + trainer.state.global_step - trainer._globalstep_last_logged
            for each in guard.losses[:-1]:  # added up as by the trainer, also if not finite
                filtered = trainer.args.logging_nan_inf_filter and not each.isfinite()
                logged = trainer._tr_loss / steps if filtered else each
                trainer._tr_loss = trainer._tr_loss + logged
        return loss

    def _before(self) -> dict[str, Any]:
        self._sum_before = self._trainer._tr_loss.clone()
        return {name: copy.deepcopy(getattr(self._trainer, name)) for name in self._attributes}

    def _put_back(self, before: dict[str, Any]) -> None:
        for name, value in before.items():
            _put(vars(self._trainer), name, value)

    def _clip_and_step(self) -> None:
        trainer = self._trainer
        if trainer.args.max_grad_norm > 0:
            trainer._clip_grad_norm(trainer.model_wrapped)
        trainer.optimizer.step()
        trainer.model_wrapped.zero_grad()


def _put(holder: MutableMapping[str, Any], name: str, value: Any) -> None:
    """Put a value back, into a dict entry by entry: it may be one with defaults."""
    held = holder.get(name)
    if not isinstance(value, dict) or not isinstance(held, MutableMapping):
        holder[name] = copy.deepcopy(value)
        return
    for key in held.keys() - value.keys():
        del held[key]
    for key, inner in value.items():
        _put(held, key, inner)


def _json(value: object) -> str:
    """Return plain values as text; what is no plain value of Python becomes one, or its name."""
    return json.dumps(value, default=lambda v: v.tolist() if hasattr(v, "tolist") else str(v))
