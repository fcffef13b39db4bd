"""A callback for ``Trainer`` of Lightning, which gives its optimizer steps to a ``Guard``."""

import io
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from holdfast.integrations.adapter import Adapter, refuse, require
from holdfast.rng import rng_state, set_rng_state

require("lightning", "2.6")
from lightning.pytorch import Callback, Trainer  # noqa: E402

__all__ = ["HoldfastCallback"]

# Attributes of the logger connector: the newest values, and whether the present means go on.
CONNECTOR = ("_callback_metrics", "_first_loop_iter", "_current_fx")


class HoldfastCallback(Adapter, Callback):
    """Verifies, repeats and saves the steps of ``Trainer.fit`` with automatic optimization.

    Args:
        run_dir: Directory of the snapshots, as in ``Snapshots``.
        protect: Whether the module's products are verified while ``fit`` runs.
        snapshots: A dict of further keywords of ``Snapshots``.
        **guard: Keywords of ``Guard``, such as ``audit=0.01``.

    Guarantees: on healthy hardware all results are, bit for bit, those of a ``fit`` under
    ``protect`` without this callback, also after a kill.

    Not covered, after a restart: data sets that draw random numbers while they load a batch;
    torchmetrics' objects; what a ``LightningModule`` keeps outside its ``state_dict``.

    Raises:
        ConfigError: In ``fit``, which cannot be guarded (``docs/integrations_lightning.md``).
    """

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Put methods of this adapter in the place of the loops' own, until ``fit`` ends."""
        if stage != "fit":
            return
        package, strategy = type(trainer).__module__.split(".")[0], trainer.strategy
        refuse(not isinstance(trainer, Trainer), f"a Trainer of {package}: use lightning.pytorch's")
        manual = "manual optimization: give a Guard your steps (docs/guard.md)"
        refuse(not pl_module.automatic_optimization, manual)
        found = f"{type(strategy).__name__} accumulates gradients, so no step can be repeated"
        refuse(strategy.handles_gradient_accumulation, f"{found}: use DDP or FSDP2")
        self._trainer, self._fit = trainer, trainer.fit_loop
        self._loop = self._fit.epoch_loop
        automatic = self._loop.automatic_optimization
        self._zero_grad = automatic.optim_progress.optimizer.zero_grad
        self._loaded, self._stepped = None, False
        self._opened.callback(self._replace(self._fit, "run"))
        self._opened.callback(self._replace(self._loop, "on_run_start", "advance"))
        self._opened.callback(self._replace(automatic, "_make_closure"))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore the newest snapshot, and put the loops where it was taken."""
        number = len(trainer.optimizers)
        refuse(number != 1, f"{number} optimizers: HoldfastCallback takes one")
        self._enter(
            pl_module,
            trainer.strategy.model,
            trainer.optimizers[0],
            [each.scheduler for each in trainer.lr_scheduler_configs],
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            own_zero_grad=True,
            optimizer_hook=False,
        )
        if self._loaded is None:
            return
        # Lightning says this of plain loaders, which are skipped here to where they were.
        warnings.filterwarnings("ignore", ".* your dataloader is not resumable")
        self._fit.load_state_dict(self._loaded["loops"])
        self._fit.update_restart_stage()
        for each in trainer.callbacks:
            if each.state_key in self._loaded["callbacks"]:
                each.load_state_dict(self._loaded["callbacks"][each.state_key])
        unpickler: Any = pickle.Unpickler(io.BytesIO(self._loaded["logged"]))
        unpickler.persistent_load = partial(getattr, trainer.strategy)
        results, connector = unpickler.load()
        self._loop._results.update(results)
        vars(trainer._logger_connector).update(connector)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Check that the step is verified, before its gradients are clipped."""
        self.guard.before_optimizer_step()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Put the loops' methods back, if this was before they ran."""
        self._opened.close()

    def _state(self) -> dict[str, Any]:
        trainer, logged = self._trainer, io.BytesIO()
        results = {key: each for key, each in self._loop._results.items() if each.is_tensor}
        connector = {name: getattr(trainer._logger_connector, name) for name in CONNECTOR}
        pickler: Any = pickle.Pickler(logged)
        # The strategy is left out, to whose method logged values refer.
        pickler.persistent_id = lambda value: (
            value.__name__ if getattr(value, "__self__", None) is trainer.strategy else None
        )
        pickler.dump((results, connector))
        states = {each.state_key: each.state_dict() for each in trainer.callbacks}
        return {
            "loops": self._fit.state_dict(),
            "opened": self._opened_at,
            "logged": logged.getvalue(),
            "callbacks": {key: state for key, state in states.items() if state},
        }

    def _run(self, plain: Callable[[], None]) -> None:
        """Run the loops; the first thing that they do is to open the loader."""
        self._opened_at: tuple[Any, Any, int] = rng_state(), None, 0
        self._train(plain)

    def _on_run_start(self, plain: Callable[[Any], None], fetcher: Any) -> None:
        iterator, before = fetcher.iterator, rng_state()
        fetcher.iterator = None  # to see whether Lightning opens the loader, as in later epochs
        plain(fetcher)
        if fetcher.iterator is None:
            fetcher.iterator, before = iterator, self._opened_at[0]
        ready = self._loop.batch_progress.current.ready
        if self._loaded is None:
            self._opened_at = before, rng_state(), ready
        else:
            self._reopen(fetcher, ready, *self._loaded["opened"])
            self._loaded = None

    def _reopen(self, fetcher: Any, ready: int, before: Any, first: Any, drawn: int) -> None:
        """Open the loader in the random state in which its epoch began, and skip what was drawn.

        Loaders that know their position (``state_dict``) are left to Lightning, if they have a
        length; without one Lightning has always drawn one batch too many.
        """
        first = first or self._restored_rng  # None: the snapshot was taken before the first batch
        self._opened_at = before, first, drawn
        set_rng_state(before)
        loaders = fetcher.combined_loader.flattened
        knows = fetcher.length and all(hasattr(each, "load_state_dict") for each in loaders)
        if knows:
            self._fit._load_combined_loader_states()
        iter(fetcher)
        set_rng_state(first)
        for _ in range(0 if knows else ready - drawn):
            next(fetcher)
        fetcher.fetched = ready
        set_rng_state(self._restored_rng)
        # All is between two batches: nothing of what Lightning does after its own restarts.
        for loop in (self._fit, self._loop, self._loop.val_loop):
            loop.on_iteration_done()

    def _advance(self, plain: Callable[[Any], None], fetcher: Any) -> None:
        """Run one batch; what belongs to the step before it is done by now."""
        self._save()
        plain(fetcher)
        if self._stepped:
            self._stepped = False
            self.guard.after_optimizer_step(snapshot=False)

    def _make_closure(
        self, plain: Callable[..., Any], kwargs: Any, optimizer: Any, batch_idx: int
    ) -> Any:
        made, output = plain(kwargs, optimizer, batch_idx), None

        def run(batch: Any) -> Any:
            nonlocal output
            output = plain(batch, optimizer, batch_idx).closure()
            loss = output.closure_loss
            refuse(loss is None, "training_step returned None: HoldfastCallback needs a loss")
            return loss

        def closure(*_: object) -> Any:
            self._stepped = not self._fit._should_accumulate()
            self._micro_step(run, kwargs, last=self._stepped)
            nonlocal output  # which the Guard would keep for a while
            found, output = output, None
            return found

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

    def _clip_and_step(self) -> None:
        self._trainer.strategy.optimizer_step(self._optimizer, lambda: torch.zeros(()))


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    """Return attributes with copies of those that are tensors, which are added to in place."""
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in values.items()}
