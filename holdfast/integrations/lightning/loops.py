"""What Lightning's loops do in the hands of a ``Guard``: their steps, and where they stand."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from holdfast.errors import ConfigError, UncorrectableFault
from holdfast.guard import Guard
from holdfast.rng import rng_state, set_rng_state

# Attributes of the logger connector: the newest values, and whether the present means go on.
CONNECTOR = ("_callback_metrics", "_first_loop_iter", "_current_fx")
_KEPT = 256  # steps of which schedule and settings are kept, for a roll-back


def _replace(owner: Any, name: str, method: Callable[..., Any], undo: ExitStack) -> None:
    """Let a method of an object be called through another one, which gets it as first argument."""
    plain = getattr(owner, name)
    setattr(owner, name, lambda *args: method(plain, *args))
    undo.callback(delattr, owner, name)


class Position:
    """Counters, callbacks, logged values and the place in the data, between two steps.

    A loader is opened again in the random state in which its epoch began, and the batches that
    were drawn are skipped. Loaders that know their position themselves (``state_dict``) are left to
    Lightning, if they have a length; without one Lightning has always drawn one batch too many.
    """

    def __init__(self, trainer: Any, undo: ExitStack) -> None:
        self._trainer, self._fit = trainer, trainer.fit_loop
        self._opened: tuple[Any, Any, int] = (None, None, 0)
        self.saved: dict[str, Any] | None = None
        _replace(self._fit, "setup_data", self._setup_data, undo)
        _replace(self._fit.epoch_loop, "on_run_start", self._on_run_start, undo)

    def state_dict(self) -> dict[str, Any]:
        """Return where the loops stand; they must be between two batches."""
        results = {key: each for key, each in self._results.items() if each.is_tensor}
        logged = io.BytesIO()
        connector = {name: getattr(self._trainer._logger_connector, name) for name in CONNECTOR}
        _Pickler(logged, self._trainer.strategy).dump((results, connector))
        return {
            "loops": self._fit.state_dict(),
            "opened": self._opened,
            "logged": logged.getvalue(),
            "callbacks": {each.state_key: each.state_dict() for each in self._others()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep a state for ``restore``: a roll-back must not move the loops."""
        self.saved = state

    @property
    def _results(self) -> Any:
        return self._fit.epoch_loop._results

    def _others(self) -> list[Any]:
        return [each for each in self._trainer.callbacks if each.state_dict()]

    def restore(self) -> None:
        """Put the loops where a restored snapshot was taken, if there is one."""
        if self.saved is None:
            return
        self._restored = rng_state()
        # Lightning says this of plain loaders, which are skipped here to where they were.
        warnings.filterwarnings("ignore", ".* your dataloader is not resumable")
        self._fit.load_state_dict(self.saved["loops"])
        self._fit.update_restart_stage()
        for each in self._trainer.callbacks:
            if each.state_key in self.saved["callbacks"]:
                each.load_state_dict(self.saved["callbacks"][each.state_key])
        results, connector = _Unpickler(self.saved["logged"], self._trainer.strategy).load()
        self._results.update(results)
        vars(self._trainer._logger_connector).update(connector)

    def _setup_data(self, plain: Callable[[], None]) -> None:
        before = rng_state()
        loader = self._fit._combined_loader
        plain()
        if self._fit._combined_loader is not loader:
            self._opened = (before, None, 0)

    def _on_run_start(self, plain: Callable[[Any], None], fetcher: Any) -> None:
        iterator, before = fetcher.iterator, rng_state()
        fetcher.iterator = None  # to see whether Lightning opens the loader, as in later epochs
        plain(fetcher)
        if fetcher.iterator is None:
            fetcher.iterator, before = iterator, self._opened[0]
        if self.saved is not None:
            self._reopen(fetcher, self.saved["opened"])
            self.saved = None
        else:
            self._opened = (before, rng_state(), self._ready())

    def _ready(self) -> int:
        return int(self._fit.epoch_loop.batch_progress.current.ready)

    def _reopen(self, fetcher: Any, opened: tuple[Any, Any, int]) -> None:
        before, first, ready = opened
        first = first or self._restored  # None: the snapshot was taken before the first batch
        self._opened = before, first, ready
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
        set_rng_state(self._restored)
        # All is between two batches: nothing of what Lightning does after its own restarts.
        for loop in (self._fit, self._fit.epoch_loop, self._fit.epoch_loop.val_loop):
            loop.on_iteration_done()


class Repeated:
    """Runs each micro-step through the Guard, which may repeat it, and ends each step."""

    def __init__(self, trainer: Any, undo: ExitStack) -> None:
        self._trainer, self._loop = trainer, trainer.fit_loop.epoch_loop
        self.guard: Guard
        self._first, self._stepped, self._ended = True, False, False
        self._settings: dict[int, tuple[Any, Any]] = {}  # after each step, by its number
        self._output: Any = None
        _replace(self._loop, "advance", self._advance, undo)
        _replace(self._loop.automatic_optimization, "_make_closure", self._make_closure, undo)

    def _advance(self, plain: Callable[[Any], None], fetcher: Any) -> None:
        """Run one batch; what belongs to the step before it is done by now."""
        self.begin_snapshot()
        plain(fetcher)
        if self._stepped:
            self._stepped, self._ended = False, True
            self.guard.after_optimizer_step(snapshot=False)

    def begin_snapshot(self) -> None:
        """Begin the snapshot of the step that has ended, if one has."""
        if self._ended:
            self._ended = False
            self._settings[self.guard.steps_done] = copy.deepcopy(self._present_settings())
            self._settings.pop(self.guard.steps_done - _KEPT, None)
            self.guard.begin_snapshot()

    def _present_settings(self) -> tuple[list[Any], list[dict[str, Any]]]:
        groups = self._trainer.optimizers[0].param_groups
        return (
            [each.scheduler.state_dict() for each in self._trainer.lr_scheduler_configs],
            [{key: value for key, value in group.items() if key != "params"} for group in groups],
        )

    def apply_again(self, guard: Guard) -> None:
        """Clip and apply a step that is done again; schedules and settings are as after it."""
        trainer = self._trainer
        if guard.steps_done + 1 not in self._settings:
            raise UncorrectableFault(f"step {guard.steps_done} is forgotten: restart")
        trainer.strategy.optimizer_step(trainer.optimizers[0], lambda: torch.zeros(()))
        schedules, groups = copy.deepcopy(self._settings[guard.steps_done + 1])
        for config, state in zip(trainer.lr_scheduler_configs, schedules, strict=True):
            config.scheduler.load_state_dict(state)
        for group, settings in zip(trainer.optimizers[0].param_groups, groups, strict=True):
            group.update(settings)

    def _make_closure(
        self, plain: Callable[..., Any], kwargs: Any, optimizer: Any, batch_idx: int
    ) -> Any:
        made = plain(kwargs, optimizer, batch_idx)
        before, runs, self._first = self._logged() if self._first else None, 0, False

        def run(batch: Any) -> torch.Tensor:
            nonlocal runs
            runs += 1
            if before is not None and runs > 1:
                self._log_again(before)
            self._output = plain(batch, optimizer, batch_idx).closure()
            if self._output.closure_loss is None:
                raise ConfigError("training_step returned None: HoldfastCallback needs a loss")
            loss: torch.Tensor = self._output.closure_loss
            return loss

        def closure(*_: object) -> Any:
            self._first = self._stepped = not self._trainer.fit_loop._should_accumulate()
            self.guard.micro_step(run, kwargs, last=self._stepped)
            output, self._output = self._output, None
            return output

        made.closure = closure
        return made

    def _logged(self) -> tuple[dict[str, Any], Any]:
        """Return what ``self.log`` has gathered so far, and a counter of the closure."""
        results = {key: _copied(vars(each)) for key, each in self._loop._results.items()}
        return results, self._zero_grad.state_dict()

    def _log_again(self, before: tuple[dict[str, Any], Any]) -> None:
        results, counter = before
        for key in [key for key in self._loop._results if key not in results]:
            del self._loop._results[key]
        for key, values in results.items():
            vars(self._loop._results[key]).update(_copied(values))
        self._zero_grad.load_state_dict(counter)

    @property
    def _zero_grad(self) -> Any:
        return self._loop.automatic_optimization.optim_progress.optimizer.zero_grad


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    """Return attributes with copies of those that are tensors, which are added to in place."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in values.items()
    }


class _Pickler(pickle.Pickler):
    """Leaves the strategy out, to whose method logged values refer."""

    def __init__(self, file: io.BytesIO, strategy: object) -> None:
        super().__init__(file)
        self._strategy = strategy

    def persistent_id(self, value: Any) -> str | None:
        return value.__name__ if getattr(value, "__self__", None) is self._strategy else None


class _Unpickler(pickle.Unpickler):
    """Refers to the strategy of this process."""

    def __init__(self, saved: bytes, strategy: object) -> None:
        super().__init__(io.BytesIO(saved))
        self._strategy = strategy

    def persistent_load(self, name: str) -> Any:
        return getattr(self._strategy, name)
