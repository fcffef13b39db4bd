"""torchtitan: the steps of its ``Trainer`` under a Guard."""

from collections.abc import Callable, Iterator
from functools import reduce
from os import PathLike
from typing import Any

import torch

from holdfast.errors import ConfigError
from holdfast.guard import Guard
from holdfast.integrations.frameworks import require
from holdfast.optimizers import Optimizers
from holdfast.protection import protect as protect_model
from holdfast.rng import rng_state, set_rng_state
from holdfast.snapshot.client.settings import SnapshotOptions
from holdfast.snapshot.client.snapshots import Snapshots

require("torchtitan", "0.3")
from torchtitan.distributed import utils as distributed  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

__all__ = ["GuardedTrainer", "attach"]


def attach(
    trainer: Trainer,
    *,
    run_dir: str | PathLike[str] | None = None,
    protect: bool = True,
    snapshots: SnapshotOptions | None = None,
    **guard: Any,
) -> "GuardedTrainer":
    """Put the training of a ``Trainer`` under a Guard; call it once, before ``trainer.train()``.

    Each step is verified after its last micro-batch, before gradients are clipped. Steps in doubt
    are repeated from their first micro-batch, in all ranks. A snapshot begins when the next step
    begins, after torchtitan's own checkpoint and validation. If the job is killed and started
    again, ``train`` loads torchtitan's checkpoint, if there is one, and then the newest snapshot.

    Args:
        trainer: A ``torchtitan.trainer.Trainer``.
        run_dir: Directory of the snapshots, as in ``Snapshots``.
        protect: Verify the model's products while it is trained, as by ``holdfast.protect``.
        snapshots: Further keywords of ``Snapshots``.
        **guard: Further keywords of ``Guard``, for example ``audit=0.01``.

    Guarantees: on healthy hardware weights, optimizer, schedule and logged losses are, bit for bit,
    those of the same trainer under ``holdfast.protect`` alone, also after a kill.

    Not covered: the state of metrics; what a validation draws after a restart. CUDA graphs and
    expert parallelism were not tried.

    Raises:
        ConfigError: The trainer divides its model into the stages of a pipeline.
    """
    if trainer.parallel_dims.pp_enabled:
        raise ConfigError(
            "pipeline parallelism: its schedule counts tokens and masks micro-batches within one "
            "call, which this adapter does not repeat; use data, tensor or context parallelism"
        )
    options: SnapshotOptions = {**(snapshots or {}), "run_dir": run_dir}
    return GuardedTrainer(trainer, options, guard, protects=protect)


class GuardedTrainer:
    """Methods in the place of a trainer's own, and the counters that snapshots hold.

    Attributes:
        guard: The ``Guard``, once ``train`` has begun.
    """

    guard: Guard

    def __init__(self, trainer: Any, options: Any, settings: Any, *, protects: bool) -> None:
        self._trainer, self._options, self._settings = trainer, options, settings
        self._protects = protects
        self._counters: dict[str, Any] = trainer.state_dict()
        self._number, self._restored = 0, False
        self._pass = trainer.fwd_bwd_fn
        trainer.fwd_bwd_fn = self._micro_step
        self._replace(trainer.checkpointer, "load")
        for name in ("train", "batch_generator", "train_step"):
            self._replace(trainer, name)

    def _replace(self, owner: Any, name: str) -> None:
        plain, method = getattr(owner, name), getattr(self, f"_{name}")
        setattr(owner, name, lambda *args, **named: method(plain, *args, **named))

    def state_dict(self) -> dict[str, Any]:
        """Return the trainer's counters after the newest step that is done."""
        return self._counters

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep counters for ``_load``: a roll-back must not turn the trainer's own back."""
        self._counters = state

    def _train(self, plain: Callable[[], None]) -> None:
        protection = protect_model(self._trainer.model_parts[0]) if self._protects else None
        try:
            plain()
        except BaseException as error:
            if hasattr(self, "guard"):
                self.guard.__exit__(type(error), error, None)
            raise
        finally:
            if protection is not None:
                protection.remove()
        self.guard.begin_snapshot()
        self.guard.__exit__(None, None, None)

    def _load(self, plain: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Load torchtitan's checkpoint, and then the newest snapshot."""
        loaded, trainer = plain(*args, **named), self._trainer
        [model], optimizers = trainer.model_parts, Optimizers(*trainer.optimizers.optimizers)
        snapshots = Snapshots(
            model,
            optimizers,
            scheduler=trainer.lr_schedulers,
            loader=trainer.dataloader,
            extra=self,
            **self._options,
        )
        self._counters = trainer.state_dict()
        self.guard = Guard(
            model, optimizers, snapshots=snapshots, apply_again=self._apply, **self._settings
        )
        self.guard.__enter__()
        self._restored = bool(snapshots.restored_from)
        trainer.load_state_dict(self._counters)
        return loaded

    def _batch_generator(self, plain: Callable[[Any], Iterator[Any]], loader: Any) -> Iterator[Any]:
        """Open the loader; a restored one was opened already, and drew random numbers for it."""
        if self._restored:
            before = rng_state()
            loader = iter(loader)
            set_rng_state(before)
        return plain(loader)

    def _train_step(self, plain: Callable[[Any], None], batches: Any) -> None:
        self.guard.begin_snapshot()
        plain(batches)
        self._counters = self._trainer.state_dict()
        self.guard.after_optimizer_step(snapshot=False)

    def _micro_step(self, *batch: Any) -> torch.Tensor:
        """Run a micro-batch; return a zero, and with the last one the sum of all losses.

        torchtitan adds the losses up: one of the earlier ones may have been wrong.
        """
        self._number = self._number % self._trainer.gradient_accumulation_steps + 1
        last = self._number == self._trainer.gradient_accumulation_steps
        # A CUDA graph would overwrite the loss in its next run.
        loss = self.guard.micro_step(lambda given: self._pass(*given).clone(), batch, last=last)
        if not last:
            return torch.zeros_like(loss)
        return reduce(torch.add, self.guard.losses)

    def _apply(self) -> None:
        """Clip and apply a step that is done again, as ``Trainer.train_step`` does."""
        trainer, dims = self._trainer, self._trainer.parallel_dims
        distributed.clip_grad_norm_(
            list(trainer.model_parts[0].parameters()),
            trainer.config.training.max_norm,
            foreach=True,
            pp_mesh=dims.get_optional_mesh("pp"),
            ep_enabled=dims.ep_enabled,
        )
        trainer.optimizers.step()
        trainer.lr_schedulers.step()
