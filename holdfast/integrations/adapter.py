"""What the adapters share: a Guard around the training of a framework that owns its loop."""

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from importlib.metadata import version
from os import PathLike
from types import SimpleNamespace
from typing import Any

import torch

from holdfast.errors import ConfigError
from holdfast.guard import Guard
from holdfast.optimizers import Schedulers
from holdfast.protection import Protection
from holdfast.protection import protect as protect_model
from holdfast.rng import rng_state
from holdfast.snapshot.client.settings import SnapshotOptions
from holdfast.snapshot.client.snapshots import Snapshots
from holdfast.step.settings import GroupSettings


def require(package: str, tested: str) -> None:
    """Raise an error if a framework is missing, or not of the version, as "5.23", that was tested.

    An adapter uses private names of its framework, which the next version may change.
    """
    command = f"pip install '{package}=={tested}.*'"
    try:
        import_module(package)
    except ImportError as error:
        needs = f"holdfast.integrations.{package} needs {package} {tested}"
        raise ImportError(f"{needs} ({error}): {command}") from error
    found = version(package)
    other = f"{package} {found} is installed, and holdfast's adapter was tested with {tested}"
    differs = not f"{found}.".startswith(f"{tested}.")
    refuse(differs, f"{other}: {command}, or use a Guard in a loop of your own (docs/guard.md)")


def refuse(applies: object, reason: str) -> None:
    """Raise a ``ConfigError`` with the reason if it applies."""
    if applies:
        raise ConfigError(reason)


class Adapter:
    """A Guard in a framework's loop; ``protect`` verifies products too, as ``holdfast.protect``.

    Attributes:
        guard: The Guard of the present or latest training; None before.
        protection: The protection of the model, with its coverage report; None without one.
    """

    guard: Guard = None  # type: ignore[assignment]
    protection: Protection | None = None

    def __init__(
        self,
        run_dir: str | PathLike[str] | None = None,
        *,
        protect: bool = True,
        snapshots: SnapshotOptions | None = None,
        **guard: Any,
    ) -> None:
        self._options: SnapshotOptions = {**(snapshots or {}), "run_dir": run_dir}
        self._guard_settings, self._protects, self._opened = guard, protect, ExitStack()

    def _state(self) -> dict[str, Any]:
        """Return what a snapshot holds of the framework; once restored it is in ``_loaded``."""
        return {}

    def _before(self) -> Any:
        """Return a copy of what passes change, beside what a Guard puts back."""

    def _put_back(self, before: Any) -> None:
        """Put it back, because a step is repeated."""

    def _clip_and_step(self) -> None:
        """Clip and apply the gradients, as the framework does, of a step that is done again."""

    def _replace(self, owner: Any, *names: str) -> Callable[[], None]:
        """Let methods of the framework be called through this adapter's, and return the undo.

        This adapter's have the same names, with one underscore before, and get the other first.
        """
        undo = ExitStack()
        for name in names:
            plain = getattr(owner, name)
            replaced = isinstance(getattr(getattr(plain, "func", None), "__self__", None), Adapter)
            refuse(replaced, f"this {type(owner).__name__} has a Guard already: attach one, once")
            setattr(owner, name, partial(getattr(self, f"_{name.lstrip('_')}"), plain))
            undo.callback(delattr, owner, name)
        return undo.close

    def _train(self, plain: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Run a training. The Guard is left at its end, after a last snapshot, or by an error."""
        with self._opened:
            return plain(*args, **named)

    def _enter(
        self,
        model: torch.nn.Module,
        wrapped: torch.nn.Module,
        optimizer: Any,
        schedules: Sequence[Any],
        *,
        loader: Any = None,
        scaler: Any = None,
        **settings: Any,
    ) -> None:
        """Protect the model, restore the newest snapshot, and enter the Guard."""
        self._optimizer, self._schedule, self._begins = optimizer, Schedulers(*schedules), True
        if self._protects:
            self.protection = self._opened.enter_context(protect_model(model))
        keep = partial(setattr, self, "_loaded")  # until entry: roll-backs do not turn it back
        extra = SimpleNamespace(state_dict=self._state, load_state_dict=keep)
        moving = {"scheduler": self._schedule, "loader": loader, "scaler": scaler, "extra": extra}
        self._snapshots: Any = Snapshots(model, optimizer, **moving, **self._options)
        self._loaded: Any = None  # Snapshots has loaded the present state, to see if it can be
        settings = {"apply_again": self._clip_and_step, **settings, **self._guard_settings}
        guard = Guard(wrapped, optimizer, snapshots=self._snapshots, **settings)
        self.guard = self._opened.enter_context(guard)
        self._opened.push(lambda kind, *_: None if kind else self._save())
        self._restored_rng = rng_state()

    def _save(self) -> None:
        """Begin the snapshot of the steps done, unless a step has begun."""
        if self._begins:
            self.guard.begin_snapshot()

    def _micro_step(
        self, run: Callable[[Any], torch.Tensor], batch: Any, *, last: bool
    ) -> torch.Tensor:
        first, self._begins = self._begins, True  # a step whose pass raises begins again
        if first:
            before = self._before()
            groups = self._optimizer.param_groups
            settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
            # By hand or by a metric the loop has moved them since the step before.
            moved = copy.deepcopy((self._schedule.state_dict(), settings))
        began = False

        def again(given: Any) -> torch.Tensor:
            nonlocal began
            if began and first:
                self._put_back(before)
                schedule, settings = copy.deepcopy(moved)
                self._schedule.load_state_dict(schedule)
                GroupSettings(self._optimizer).repeat(settings)
            began = True
            return run(given)

        loss = self.guard.micro_step(again, batch, last=last)
        self._begins = last
        return loss
