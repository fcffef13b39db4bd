"""A callback for ``Trainer`` of Lightning, which gives its optimizer steps to a ``Guard``."""

import io
import pickle
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from os import PathLike
from typing import Any

import torch

from holdfast.guard import Guard
from holdfast.integrations.adapter import Adapter, refuse, require
from holdfast.rng import rng_state, set_rng_state

require("lightning", "2.6")
from lightning.pytorch import Callback  # noqa: E402

__all__ = ["HoldfastCallback"]

# Attributes of the logger connector: the newest values, and whether the present means go on.
CONNECTOR = ("_callback_metrics", "_first_loop_iter", "_current_fx")


class HoldfastCallback(Callback):
    """Verifies, repeats and saves the steps of ``Trainer.fit`` with automatic optimization.

    ``fit`` restores the newest snapshot: model, optimizer, schedule, scaler, generators, the loops'
    counters, the other callbacks, and the position in the data. ``docs/integrations_lightning.md``
    says what is verified, repeated and restored, and when.

    Args:
        run_dir: Directory of the snapshots, as in ``Snapshots``.
        **settings: ``protect`` (by default True) and ``snapshots``, which has further keywords of
            ``Snapshots``; all others are those of ``Guard``, such as ``audit=0.01``.

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

    def __init__(self, run_dir: str | PathLike[str] | None = None, **settings: Any) -> None:
        self._loops = _Loops(run_dir, **settings)

    @property
    def guard(self) -> Guard:
        """The ``Guard``, once ``fit`` has begun to train."""
        return self._loops.guard

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Put methods of this adapter in the place of the loops' own."""
        if stage != "fit":
            return
        refuse(
            not pl_module.automatic_optimization,
            "manual optimization: HoldfastCallback cannot know what a step is; call a Guard in "
            "your training_step (docs/guard.md)",
        )
        refuse(
            trainer.strategy.handles_gradient_accumulation,
            f"{type(trainer.strategy).__name__} accumulates gradients by itself, so that no step "
            'can be repeated: use strategy="ddp" or ModelParallelStrategy (FSDP2)',
        )
        self._loops.replace(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the Guard, which restores the newest snapshot."""
        self._loops.begin(pl_module)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Check that the step is verified, before its gradients are clipped."""
        self.guard.before_optimizer_step()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save the last step, and end the snapshots."""
        self._loops.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Keep the snapshots for a restart."""
        self._loops.leave(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Put the loops' own methods back."""
        self._loops.leave()


class _Loops(Adapter):
    """Lightning's loops in the hands of a Guard: their steps, and where they stand.

    A loader is opened again in the random state in which its epoch began, and the batches that
    were drawn are skipped. Loaders that know their position themselves (``state_dict``) are left to
    Lightning, if they have a length; without one Lightning has always drawn one batch too many.
    """

    guard: Guard

    def replace(self, trainer: Any) -> None:
        """Let the loops call this adapter's methods, until it leaves."""
        self._trainer, self._fit, self._loop = (
            trainer,
            trainer.fit_loop,
            trainer.fit_loop.epoch_loop,
        )
        self._undo, self._stepped, self._ended = ExitStack(), False, False
        self._opened_at: tuple[Any, Any, int] = (None, None, 0)
        self._output: Any = None
        self.loaded = None
        for owner, name in (
            *((self._fit, "setup_data"), (self._loop, "on_run_start"), (self._loop, "advance")),
            (self._loop.automatic_optimization, "_make_closure"),
        ):
            self._undo.callback(self._replace(owner, name))

    def begin(self, module: Any) -> None:
        """Enter the Guard, and put the loops where a restored snapshot was taken."""
        trainer = self._trainer
        number = len(trainer.optimizers)
        refuse(number != 1, f"{number} optimizers: HoldfastCallback takes one")
        self._enter(
            module,
            trainer.strategy.model,
            trainer.optimizers[0],
            [each.scheduler for each in trainer.lr_scheduler_configs],
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            own_zero_grad=True,
            optimizer_hook=False,
        )
        if self.loaded is None:
            return
        # Lightning says this of plain loaders, which are skipped here to where they were.
        warnings.filterwarnings("ignore", ".* your dataloader is not resumable")
        self._fit.load_state_dict(self.loaded["loops"])
        self._fit.update_restart_stage()
        for each in trainer.callbacks:
            if each.state_key in self.loaded["callbacks"]:
                each.load_state_dict(self.loaded["callbacks"][each.state_key])
        unpickler = pickle.Unpickler(io.BytesIO(self.loaded["logged"]))
        unpickler.persistent_load = (  # type: ignore[method-assign]
            lambda name: getattr(trainer.strategy, name)
        )
        results, connector = unpickler.load()
        self._loop._results.update(results)
        vars(trainer._logger_connector).update(connector)

    def end(self) -> None:
        """Begin the last snapshot, and leave the Guard."""
        self._save()
        self._opened.close()

    def leave(self, error: BaseException | None = None) -> None:
        """Leave the Guard, if it was entered, and put the loops' methods back."""
        self._opened.__exit__(type(error) if error else None, error, None)
        if hasattr(self, "_undo"):
            self._undo.close()

    def state_dict(self) -> dict[str, Any]:
        """Return where the loops stand; they must be between two batches."""
        trainer, logged = self._trainer, io.BytesIO()
        results = {key: each for key, each in self._loop._results.items() if each.is_tensor}
        connector = {name: getattr(trainer._logger_connector, name) for name in CONNECTOR}
        pickler = pickle.Pickler(logged)
        # The strategy is left out, to whose method logged values refer.
        pickler.persistent_id = (  # type: ignore[method-assign]
            lambda v: v.__name__ if getattr(v, "__self__", None) is trainer.strategy else None
        )
        pickler.dump((results, connector))
        states = {each.state_key: each.state_dict() for each in trainer.callbacks}
        return {
            "loops": self._fit.state_dict(),
            "opened": self._opened_at,
            "logged": logged.getvalue(),
            "callbacks": {key: state for key, state in states.items() if state},
        }

    def _setup_data(self, plain: Callable[[], None]) -> None:
        before, loader = rng_state(), self._fit._combined_loader
        plain()
        if self._fit._combined_loader is not loader:
            self._opened_at = (before, None, 0)

    def _on_run_start(self, plain: Callable[[Any], None], fetcher: Any) -> None:
        iterator, before = fetcher.iterator, rng_state()
        fetcher.iterator = None  # to see whether Lightning opens the loader, as in later epochs
        plain(fetcher)
        if fetcher.iterator is None:
            fetcher.iterator, before = iterator, self._opened_at[0]
        if self.loaded is None:
            self._opened_at = (before, rng_state(), self._ready())
        else:
            self._reopen(fetcher, *self.loaded["opened"])
            self.loaded = None

    def _ready(self) -> int:
        return int(self._loop.batch_progress.current.ready)

    def _reopen(self, fetcher: Any, before: Any, first: Any, ready: int) -> None:
        first = first or self._restored_rng  # None: the snapshot was taken before the first batch
        self._opened_at = before, first, ready
        set_rng_state(before)
        loaders = fetcher.combined_loader.flattened
        if fetcher.length and all(hasattr(each, "load_state_dict") for each in loaders):
            self._fit._load_combined_loader_states()
            iter(fetcher)
            fetcher.fetched = self._ready()
        else:
            iter(fetcher)
            set_rng_state(first)
            for _ in range(self._ready() - ready):
                next(fetcher)
            fetcher.fetched += ready
        set_rng_state(self._restored_rng)
        # All is between two batches: nothing of what Lightning does after its own restarts.
        for loop in (self._fit, self._loop, self._loop.val_loop):
            loop.on_iteration_done()

    def _advance(self, plain: Callable[[Any], None], fetcher: Any) -> None:
        """Run one batch; what belongs to the step before it is done by now."""
        self._save()
        plain(fetcher)
        if self._stepped:
            self._stepped, self._ended = False, True
            self.guard.after_optimizer_step(snapshot=False)

    def _save(self) -> None:
        if self._ended:
            self._ended = False
            self._begin_snapshot()

    def _make_closure(
        self, plain: Callable[..., Any], kwargs: Any, optimizer: Any, batch_idx: int
    ) -> Any:
        made = plain(kwargs, optimizer, batch_idx)

        def run(batch: Any) -> torch.Tensor:
            self._output = plain(batch, optimizer, batch_idx).closure()
            loss: Any = self._output.closure_loss
            refuse(loss is None, "training_step returned None: HoldfastCallback needs a loss")
            found: torch.Tensor = loss
            return found

        def closure(*_: object) -> Any:
            self._stepped = not self._fit._should_accumulate()
            self._micro_step(run, kwargs, last=self._stepped)
            output, self._output = self._output, None
            return output

        made.closure = closure
        return made

    def _before(self) -> tuple[dict[str, Any], Any]:
        """Return what ``self.log`` has gathered so far, and a counter of the closure."""
        results = {key: _copied(vars(each)) for key, each in self._loop._results.items()}
        return results, self._zero_grad.state_dict()

    def _put_back(self, before: tuple[dict[str, Any], Any]) -> None:
        results, counter = before
        for key in self._loop._results.keys() - results.keys():
            del self._loop._results[key]
        for key, values in results.items():
            vars(self._loop._results[key]).update(_copied(values))
        self._zero_grad.load_state_dict(counter)

    @property
    def _zero_grad(self) -> Any:
        return self._loop.automatic_optimization.optim_progress.optimizer.zero_grad

    def _clip_and_step(self) -> None:
        self._trainer.strategy.optimizer_step(self._optimizer, lambda: torch.zeros(()))


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    """Return attributes with copies of those that are tensors, which are added to in place."""
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in values.items()}
