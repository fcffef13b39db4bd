"""A callback that gives each optimizer step of a Lightning ``Trainer`` to a ``Guard``."""

from contextlib import ExitStack
from os import PathLike
from typing import Any

from lightning.pytorch import Callback

from holdfast.errors import ConfigError
from holdfast.guard import Guard
from holdfast.integrations.lightning.loops import Position, Repeated
from holdfast.optimizers import Schedulers
from holdfast.protection import protect as protect_model
from holdfast.snapshot.client.settings import SnapshotOptions
from holdfast.snapshot.client.snapshots import Snapshots


class HoldfastCallback(Callback):
    """Verifies, repeats and saves the steps of ``Trainer.fit`` with automatic optimization.

    A step that is in doubt is repeated from its first micro-batch, before gradients are clipped. A
    snapshot begins before the first batch of the next step, after logging, validation, checkpoints
    and the hooks of an epoch's end. ``fit`` restores the newest one: model, optimizer, schedule,
    scaler, generators, the loops' counters, the other callbacks, and the position in the data.

    Args:
        run_dir: Directory of the snapshots, as in ``Snapshots``.
        protect: Whether to protect the model's products (``holdfast.protect``) during ``fit``.
        snapshots: Further keywords of ``Snapshots``, for example ``{"persist_dir": "saved"}``.
        **guard: Further keywords of ``Guard``, such as ``audit`` and ``shadow``.

    Attributes:
        guard: The ``Guard``, once ``fit`` has begun to train.

    Guarantees: on healthy hardware weights, optimizer, schedule and logged values are those of a
    ``fit`` under ``protect`` without this callback, bit for bit; also after a kill, unless the data
    set draws random numbers while it loads a batch.

    Not covered: metric objects of torchmetrics that were updated in the part of an epoch before a
    restart; what a ``LightningModule`` keeps outside its ``state_dict``; its own ``optimizer_step``
    is not called for steps that are done again after a roll-back.

    Raises:
        ConfigError: In ``fit``: manual optimization, several optimizers, L-BFGS, a strategy that
            accumulates by itself (DeepSpeed), or a ``training_step`` that returns None.
    """

    guard: Guard

    def __init__(
        self,
        run_dir: str | PathLike[str] | None = None,
        *,
        protect: bool = True,
        snapshots: SnapshotOptions | None = None,
        **guard: Any,
    ) -> None:
        self._options: SnapshotOptions = {**(snapshots or {}), "run_dir": run_dir}
        self._protects, self._settings = protect, guard
        self._undo, self._entered = ExitStack(), False

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Put methods of this adapter in the place of the loops' own."""
        if stage != "fit":
            return
        if not pl_module.automatic_optimization:
            raise ConfigError(
                "manual optimization: HoldfastCallback cannot know what a step is; call a Guard in "
                "your training_step (docs/guard.md)"
            )
        if trainer.strategy.handles_gradient_accumulation:
            raise ConfigError(
                f"{type(trainer.strategy).__name__} accumulates gradients by itself, so that no "
                'step can be repeated: use strategy="ddp" or ModelParallelStrategy (FSDP2)'
            )
        self._position = Position(trainer, self._undo)
        self._repeated = Repeated(trainer, self._undo)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the Guard, which restores the newest snapshot."""
        if len(trainer.optimizers) != 1:
            raise ConfigError(f"{len(trainer.optimizers)} optimizers: HoldfastCallback takes one")
        [optimizer] = trainer.optimizers
        if self._protects:
            self._undo.callback(protect_model(pl_module).remove)
        schedules = [each.scheduler for each in trainer.lr_scheduler_configs]
        snapshots = Snapshots(
            pl_module,
            optimizer,
            scheduler=Schedulers(*schedules) if schedules else None,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            extra=self._position,
            **self._options,
        )
        self.guard = Guard(
            trainer.strategy.model,
            optimizer,
            apply_again=lambda: self._repeated.apply_again(self.guard),
            own_zero_grad=True,
            optimizer_hook=False,
            snapshots=snapshots,
            **self._settings,
        )
        self._position.saved = None  # Snapshots loaded the present state to see whether it can
        self.guard.__enter__()
        self._entered = True
        self._position.restore()
        self._repeated.guard = self.guard

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Check that the step is verified, before its gradients are clipped."""
        self.guard.before_optimizer_step()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save the last step, and end the snapshots."""
        self._repeated.begin_snapshot()
        self._leave(None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Keep the snapshots for a restart."""
        self._leave(exception)
        self._undo.close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Put the loops' own methods back."""
        self._undo.close()

    def _leave(self, error: BaseException | None) -> None:
        if self._entered:
            self._entered = False
            self.guard.__exit__(None if error is None else type(error), error, None)
