"""What the adapters share: a Guard around the training of a framework that owns its loop."""

import copy
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import version
from os import PathLike
from typing import Any
from weakref import WeakValueDictionary

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
    """Check that a framework is installed, in a version such as "5.23" that was tested.

    An adapter uses private names of its framework, which the next version may change.

    Raises:
        ImportError: It cannot be imported.
        ConfigError: It has another version.
    """
    command = f"pip install '{package}=={tested}.*'"
    try:
        import_module(package)
    except ImportError as error:
        raise ImportError(
            f"holdfast.integrations.{package} needs {package} {tested} ({error}): {command}"
        ) from error
    found = version(package)
    refuse(
        not re.match(rf"{re.escape(tested)}(\.|$)", found),
        f"{package} {found} is installed, and holdfast's adapter was tested with {tested}: "
        f"{command}, or use a Guard in a loop of your own (docs/guard.md)",
    )


def refuse(applies: object, reason: str) -> None:
    """Raise a ``ConfigError`` with the reason if it applies."""
    if applies:
        raise ConfigError(reason)


@dataclass(eq=False)
class _Step:
    """A step that may be done again. What the Guard keeps of it holds it, and nothing else.

    Attributes:
        before: What the framework counted and logged when it began.
        after: States of the schedules, and settings of the optimizer, when the next one began.
    """

    before: Any
    after: tuple[list[Any], list[dict[str, Any]]] | None = None
    began: bool = False


class Adapter:
    """A Guard in a framework's loop, and the ``extra`` of its snapshots.

    Args:
        run_dir: Directory of the snapshots, as in ``Snapshots``.
        protect: Verify the model's products while it is trained, as by ``holdfast.protect``.
        snapshots: Further keywords of ``Snapshots``, for example ``{"persist_dir": "saved"}``.
        **guard: Further keywords of ``Guard``, for example ``audit=0.01``.

    Attributes:
        guard: The Guard of the present or latest training; None before.
        protection: The protection of the model, with its coverage report; None without one.
        loaded: The state with which the training goes on; None if it begins.
    """

    guard: Guard | None = None
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

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep a state until entry: a roll-back must not turn the framework's own back."""
        self.loaded: dict[str, Any] | None = state

    def _before(self) -> Any:
        """Return a copy of what passes change, beside what a Guard puts back."""

    def _put_back(self, before: Any) -> None:
        """Put it back, because a step is repeated."""

    def _clip_and_step(self) -> None:
        """Clip and apply the gradients, as the framework does."""
        raise NotImplementedError

    def _replace(self, owner: Any, name: str) -> Callable[[], None]:
        """Let a method of the framework be called through this adapter's, and return the undo.

        This adapter's has the same name, with one underscore before, and gets the other one first.

        Raises:
            ConfigError: An adapter has replaced it already.
        """
        plain = getattr(owner, name)
        replaced = isinstance(getattr(getattr(plain, "func", None), "__self__", None), Adapter)
        refuse(replaced, f"this {type(owner).__name__} has a Guard already: attach once")
        setattr(owner, name, partial(getattr(self, f"_{name.lstrip('_')}"), plain))
        return partial(delattr, owner, name)

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
    ) -> Guard:
        """Protect the model, restore the newest snapshot, and enter the Guard."""
        self._optimizer, self._schedules = optimizer, schedules
        self._step: _Step | None = None
        self._steps: WeakValueDictionary[int, _Step] = WeakValueDictionary()
        if self._protects:
            self.protection = self._opened.enter_context(protect_model(model))
        moving: dict[str, Any] = {"loader": loader, "scaler": scaler, "extra": self}
        moving["scheduler"] = Schedulers(*schedules) if schedules else None
        snapshots = Snapshots(model, optimizer, **moving, **self._options)
        self.loaded = None  # Snapshots has loaded the present state, to see whether it can be
        settings = {"apply_again": self._apply_again, **settings, **self._guard_settings}
        guard = Guard(wrapped, optimizer, snapshots=snapshots, **settings)
        self.guard = self._opened.enter_context(guard)
        self._restored_rng = rng_state()
        return guard

    def _micro_step(
        self, run: Callable[[Any], torch.Tensor], batch: Any, *, last: bool
    ) -> torch.Tensor:
        assert self.guard is not None
        begins, step = self._step is None, self._step or _Step(self._before())
        self._step = None  # so that a step whose pass raises begins again
        self._latest = self._steps[self.guard.steps_done] = step

        def again(given: Any) -> torch.Tensor:
            if begins and step.began:
                self._put_back(step.before)
            step.began = True
            return run(given)

        loss = self.guard.micro_step(again, batch, last=last)
        self._step = None if last else step
        return loss

    def _begin_snapshot(self) -> None:
        """Begin the snapshot of the step that is done, now that all that belongs to it is."""
        assert self.guard is not None
        step = self._steps.get(self.guard.steps_done - 1)
        if step is not None and step.after is None:
            groups = [{**group, "params": None} for group in self._optimizer.param_groups]
            schedules = [each.state_dict() for each in self._schedules]
            step.after = copy.deepcopy((schedules, groups))
        self.guard.begin_snapshot()

    def _apply_again(self) -> None:
        """Apply a step that is done again. The loop moved schedules and settings, maybe by hand."""
        assert self.guard is not None
        self._clip_and_step()
        after = copy.deepcopy(self._steps[self.guard.steps_done].after)
        assert after is not None
        for schedule, state in zip(self._schedules, after[0], strict=True):
            schedule.load_state_dict(state)
        for group in after[1]:
            del group["params"]
        GroupSettings(self._optimizer).repeat(after[1])
