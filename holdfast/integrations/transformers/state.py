"""What a ``Trainer`` counts and logs, and where it is in its data: a part of each snapshot."""

import copy
import json
from collections.abc import Iterable, MutableMapping
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from holdfast.errors import ConfigError

# What training changes of a TrainerState, whose rest follows from the arguments; of a Trainer.
_STATE = (
    *("epoch", "global_step", "num_input_tokens_seen", "total_flos"),
    *("best_metric", "best_global_step", "best_model_checkpoint"),
)
_COUNTERS = (
    *("_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step"),
    "current_flos",
)


class TrainerState:
    """The ``extra`` of the snapshots of a trainer.

    A roll-back loads it too, but leaves the trainer alone, whose steps are done again.

    Attributes:
        epoch: Number of the present epoch.
        within: Number of steps done in it.
        ended: True once the last step is done.
    """

    def __init__(self, trainer: Any, attributes: Iterable[str]) -> None:
        self._trainer, self._attributes = trainer, list(attributes)
        self.epoch, self.within, self.ended = -1, 0, False  # no epoch has begun
        self._loaded: dict[str, Any] | None = None
        self._log: tuple[int, torch.Tensor] = 0, _encoded([])

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        trainer = self._trainer
        plain = {
            "run": self._run(),
            "position": [self.epoch, self.within, self.ended],
            "state": {name: getattr(trainer.state, name) for name in _STATE},
            "counters": {name: getattr(trainer, name) for name in _COUNTERS},
            "attributes": self.attributes(),
            "callbacks": [each.state()["attributes"] for each in self._callbacks()],
        }
        entries = trainer.state.log_history
        if len(entries) != self._log[0]:
            self._log = len(entries), _encoded(entries)
        return {"plain": _encoded(plain), "log": self._log[1], "loss": trainer._tr_loss.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Remember a state, without changing the trainer."""
        self._loaded = state

    def forget(self) -> None:
        """Forget the state that was loaded."""
        self._loaded = None

    def restored(self) -> bool:
        """Give the trainer the state that was loaded, and return True, if one was.

        Raises:
            ConfigError: It is of a run with other steps.
        """
        if self._loaded is None:
            return False
        trainer, saved = self._trainer, _decoded(self._loaded["plain"])
        if saved["run"] != self._run():
            raise ConfigError(
                f"the snapshot is of a run with {saved['run']}, and this one has {self._run()}: "
                "its steps are of other batches; start it as it was, or give another run_dir"
            )
        self.epoch, self.within, self.ended = saved["position"]
        for holder, values in ((trainer.state, saved["state"]), (trainer, saved["counters"])):
            vars(holder).update(values)
        self.put_back_attributes(saved["attributes"])
        for callback, values in zip(self._callbacks(), saved["callbacks"], strict=False):
            vars(callback).update(values)
        trainer.state.log_history = _decoded(self._loaded["log"])
        trainer._tr_loss = self._loaded["loss"].to(trainer.args.device)
        return True

    def attributes(self) -> dict[str, Any]:
        """Return a copy of the attributes that passes change."""
        return {name: copy.deepcopy(getattr(self._trainer, name)) for name in self._attributes}

    def put_back_attributes(self, values: dict[str, Any]) -> None:
        """Give the trainer attributes that were copied before."""
        for name, value in values.items():
            _put(vars(self._trainer), name, value)

    def _run(self) -> dict[str, int]:
        args = self._trainer.args
        batch, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
        return {"processes": args.world_size, "batch": batch, "accumulation": accumulation}

    def _callbacks(self) -> list[TrainerCallback]:
        callbacks = self._trainer.callback_handler.callbacks
        return [each for each in callbacks if isinstance(each, ExportableState)]


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


def _encoded(value: object) -> torch.Tensor:
    """Return plain values as bytes; what is no plain value of Python becomes one, or its name."""
    text = json.dumps(value, default=lambda v: v.tolist() if hasattr(v, "tolist") else str(v))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _decoded(encoded: torch.Tensor) -> Any:
    return json.loads(bytes(encoded.tolist()))
