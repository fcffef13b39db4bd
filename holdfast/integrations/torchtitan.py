"""torchtitan: the steps of its ``Trainer`` under a Guard."""

from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import torch

from holdfast.integrations.adapter import Adapter, refuse, require
from holdfast.optimizers import Optimizers
from holdfast.rng import rng_state, set_rng_state

require("torchtitan", "0.3")
from torchtitan.distributed import utils as distributed  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

__all__ = ["GuardedTrainer", "attach"]


def attach(trainer: Trainer, **settings: Any) -> "GuardedTrainer":
    """Put the training of a ``Trainer`` under a Guard; call it once, before ``trainer.train()``.

    Args:
        trainer: A ``torchtitan.trainer.Trainer``.
        **settings: ``run_dir``, ``protect`` (by default True), ``snapshots`` (a dict of further
            keywords of ``Snapshots``), and keywords of ``Guard``, such as ``audit=0.01``.

    Guarantees: on healthy hardware all results are, bit for bit, those of the same trainer under
    ``holdfast.protect``, also after a kill.

    Not covered: the state of metrics; what a validation draws after a restart.

    Raises:
        ConfigError: The model is divided into the stages of a pipeline, or has a Guard already.
    """
    return GuardedTrainer(trainer, **settings)


class GuardedTrainer(Adapter):
    """Methods in the place of a trainer's own, and the counters that snapshots hold."""

    def __init__(self, trainer: Any, **settings: Any) -> None:
        """Replace methods of a trainer."""
        super().__init__(**settings)
        stages = "pipeline parallelism: one call runs many micro-batches; use data parallelism"
        refuse(trainer.parallel_dims.pp_enabled, stages)
        self._trainer, self._number = trainer, 0
        self._replace(trainer, "train", "fwd_bwd_fn", "batch_generator", "train_step")
        self._replace(trainer.checkpointer, "load")

    def _state(self) -> dict[str, Any]:
        return self._counters

    def _load(self, plain: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Load torchtitan's checkpoint, and then the newest snapshot."""
        loaded, trainer = plain(*args, **named), self._trainer
        [model], optimizers = trainer.model_parts, Optimizers(*trainer.optimizers.optimizers)
        self._counters: dict[str, Any] = trainer.state_dict()
        schedules = [trainer.lr_schedulers]
        self._enter(model, model, optimizers, schedules, loader=trainer.dataloader)
        if self._loaded is not None:
            trainer.load_state_dict(self._loaded)
        return loaded

    def _batch_generator(self, plain: Callable[[Any], Iterator[Any]], loader: Any) -> Iterator[Any]:
        """Open the loader; a restored one was opened already, and drew random numbers for it."""
        if self._loaded is not None:
            before = rng_state()
            loader = iter(loader)
            set_rng_state(before)
        return plain(loader)

    def _train_step(self, plain: Callable[[Any], None], batches: Any) -> None:
        self._save()
        plain(batches)
        self._counters = self._trainer.state_dict()
        self.guard.after_optimizer_step(snapshot=False)

    def _fwd_bwd_fn(self, plain: Callable[..., torch.Tensor], *batch: Any) -> torch.Tensor:
        """Run a micro-batch; return a zero, and with the last one the sum of all losses.

        torchtitan adds the losses up: one of the earlier ones may have been wrong.
        """
        self._number = self._number % self._trainer.gradient_accumulation_steps + 1
        last = self._number == self._trainer.gradient_accumulation_steps
        # A CUDA graph would overwrite the loss in its next run.
        loss = self._micro_step(lambda given: plain(*given).clone(), batch, last=last)
        return reduce(torch.add, self.guard.losses) if last else torch.zeros_like(loss)

    def _clip_and_step(self) -> None:
        trainer, dims = self._trainer, self._trainer.parallel_dims
        distributed.clip_grad_norm_(
            list(trainer.model_parts[0].parameters()),
            trainer.config.training.max_norm,
            foreach=True,
            pp_mesh=dims.get_optional_mesh("pp"),
            ep_enabled=dims.ep_enabled,
        )
        trainer.optimizers.step()
