"""The trials of one subject: a step with a fault, two more, and what has become of the state.

| outcome | |
| --- | --- |
| corrected | an event says what was wrong, and the state has the bits of the run without a fault |
| detected | an event says so, or the run was refused (``UncorrectableFault``) |
| masked | no event, and the bits of the run without a fault |
| rounding | no event, and other bits, but no harm (``judge.py`` defines it) |
| silent | no event, and harm |
| raised | the program itself raised, its process died, or it hung: nothing wrong was used |
| no fault | no bit was changed, as by a line that is stuck at its right value; not a trial |

Each trial runs in a fork, so that the next one finds the model, the Guard and the native core as
they were.
"""

import pickle
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any, TypeVar

from holdfast.errors import ConfigError, UncorrectableFault
from holdfast.inject.worker_pool import WorkerFailed, run_jobs
from holdfast.protection import protect
from holdfast_lab.step_faults.calls import (
    DURATIONS,
    INTERMITTENT,
    TRANSIENT,
    Call,
    Fault,
    Listed,
    Striking,
)
from holdfast_lab.step_faults.damage import KINDS
from holdfast_lab.step_faults.judge import NOISE_RUNS, STEPS, WARMUP, Judge, alarms, round_anew
from holdfast_lab.step_faults.operators import CLASSES, CONVOLUTION, DATA, OPTIMIZER
from holdfast_lab.step_faults.training import Batch, State, Subject, Training

# Settings of the Guard; bare runs have none.
MODES: dict[str, dict[str, Any] | None] = {"default": {}, "strict": {"audit": 1.0}, "bare": None}
# Steps after which a fault that lasts is named by the default's sampling at the latest.
LONGEST = {OPTIMIZER: 66, CONVOLUTION: 16}
SHARES = dict(zip(DURATIONS, (3, 1, 1), strict=True)), dict(zip(KINDS, (2, 1, 1, 1), strict=True))
OUTCOMES = ("corrected", "detected", "masked", "rounding", "silent", "raised")
NO_FAULT = "no fault"
TIMEOUT_S = 60.0
Result = TypeVar("Result")


class Trials:
    """Prepares a subject, which trains some steps; runs each of its trials by the number.

    Args:
        subject: What is trained.
        mode: A key of ``MODES``.
        options: Further settings of the Guard.
        seed: What the faults are drawn by.

    Attributes:
        classes: The calls of a step that can be struck, by class.

    Raises:
        ConfigError: Without a fault the steps give other bits each time, or an alarm.
    """

    def __init__(
        self, subject: Subject, mode: str, options: Mapping[str, Any] = {}, *, seed: int = 0
    ) -> None:
        self.subject, self.mode, self._seed = subject, mode, seed
        settings = MODES[mode]
        self._protection = None if settings is None else protect(subject.model)
        self._training = Training(subject, None if settings is None else {**settings, **options})
        for number in range(WARMUP):
            self._training.step(number)
        listed, first, _ = in_fork(partial(self._clean, 1))
        _, clean, heard = in_fork(partial(self._clean, self._longest(OPTIMIZER), STEPS))
        if heard:
            raise ConfigError(f"{subject.name}: without a fault there is {', '.join(heard)}")
        states = [in_fork(partial(self._clean, STEPS, STEPS, n))[1] for n in range(1 + NOISE_RUNS)]
        self._first, self._judge = Judge(first, ()), Judge(clean, states)
        if not self._judge.is_equal(states[0]):
            raise ConfigError(f"{subject.name}: the steps give other bits when they are repeated")
        calls = [*listed.calls, *(Call(DATA, 0, name, DATA) for name in subject.batches[0])]
        self._per_parameter = listed.per_parameter
        found = {kind: [each for each in calls if each.kind == kind] for kind in CLASSES}
        self.classes = {kind: those for kind, those in found.items() if those}

    def _clean(self, steps: int, state_after: int = 1, rounding: int = 0) -> Any:
        """Do steps without a fault; return the calls of a single one, the state, and alarms."""
        listed, state, losses = Listed(), State(), list[float]()
        if rounding:
            round_anew(self.subject.model, rounding)
        with alarms() as heard, self._training.seen_by(listed if steps == 1 else None):
            for step in range(steps):
                losses.append(self._training.step(WARMUP + step))
                if step + 1 == state_after:
                    state = self.subject.state(losses)
        return SimpleNamespace(calls=listed.calls, per_parameter=listed.per_parameter), state, heard

    def _longest(self, kind: str) -> int:
        """Return the number of steps after which a lasting fault of a class is named."""
        return max(STEPS, LONGEST.get(kind, 0) if self.mode == "default" else 0)

    def close(self) -> None:
        """End the protection of the model."""
        if self._protection is not None:
            self._protection.remove()

    def fault(self, number: int) -> Fault:
        """Draw a fault: the classes take turns, their calls are drawn."""
        seed = f"{self._seed}/{self.subject.name}/{self.mode}/{number}"
        draw, kinds = Random(seed), list(self.classes)
        call = draw.choice(self.classes[kinds[number % len(kinds)]])
        duration, damage = (draw.choices(list(s), list(s.values()))[0] for s in SHARES)
        if duration == INTERMITTENT and damage not in ("flip", "stuck"):
            damage = "flip"  # what has no place would be the same each time
        return Fault(call, damage, duration, seed)

    def __call__(self, number: int) -> dict[str, Any]:
        """Run a trial; return its row."""
        fault = self.fault(number)
        row = {"model": self.subject.name, "mode": self.mode, "trial": number}
        row |= {"class": fault.call.kind, "op": fault.call.op, "direction": fault.call.direction}
        row |= {"call": fault.call.number, "damage": fault.damage, "duration": fault.duration}
        try:
            return row | in_fork(partial(self.run, fault))
        except WorkerFailed as error:
            return row | {"outcome": "raised", "named": 0, "events": [], "detail": str(error)[:200]}

    def run(self, fault: Fault) -> dict[str, Any]:
        """Run the steps with a fault, in this process.

        Returns:
            The outcome; ``named``, the number of the struck step, from 1, in which an event first
            said so, or 0; the kinds of events; and as ``detail`` what an error said.
        """
        striking, losses, named = Striking(fault, self._per_parameter), list[float](), 0
        longest = STEPS if fault.duration == TRANSIENT else self._longest(fault.call.kind)
        outcome, detail = "", ""
        with alarms() as heard, self._training.seen_by(striking):
            try:
                for step in range(longest):
                    batch = self._training.batch(WARMUP + step)
                    self._damage_data(batch, step, striking)
                    losses.append(self._training.step(WARMUP + step, batch))
                    named = named or (len(losses) if heard else 0)
                    outcome = self._outcome(striking, losses, named)
                    if outcome not in ("", "silent"):
                        break
            except UncorrectableFault as error:
                outcome, named, detail = "detected", named or len(losses) + 1, str(error)
            except Exception as error:
                outcome, detail = "raised", f"{type(error).__name__}: {error}"
        kinds = list(dict.fromkeys(heard))
        return {"outcome": outcome, "named": named, "events": kinds, "detail": detail[:200]}

    def _damage_data(self, batch: Batch, step: int, striking: Striking) -> None:
        """Damage the batch of a step, if the fault is in the data."""
        call, once = striking.fault.call, striking.fault.duration == TRANSIENT
        if call.part == DATA and not (step and once):
            batches = self.subject.batches
            before = batches[(WARMUP + step - 1) % len(batches)]
            striking.strike(batch[call.op], striking.draw(), before[call.op])

    def _outcome(self, striking: Striking, losses: list[float], named: int) -> str:
        """Return the outcome if it is known after a step; an empty string if it is not."""
        steps, transient = len(losses), striking.fault.duration == TRANSIENT
        if steps < STEPS and not (steps == 1 and transient):
            return ""
        if not striking.changed:
            return NO_FAULT
        if steps > STEPS:
            return "detected" if named else "silent"
        state = self.subject.state(losses)
        if (self._first if steps == 1 else self._judge).is_equal(state):
            return "corrected" if named else "masked"
        if steps < STEPS:
            return ""
        return "detected" if named else "silent" if self._judge.is_harmful(state) else "rounding"


def in_fork(function: Callable[[], Result]) -> Result:
    """Return what a function returns in a fork of this process, which is left as it is.

    Raises:
        WorkerFailed: The fork died or took too long, or the function raised there.
    """

    def lost(job: int, exit_code: int | None) -> bytes:
        raise WorkerFailed("it hung" if exit_code is None else f"exit code {exit_code}")

    # As bytes, since tensors would be handed over in shared memory. Two workers: not in place.
    work = lambda job: pickle.dumps(function())  # noqa: E731
    with closing(run_jobs(work, [0], workers=2, timeout_s=TIMEOUT_S, lost=lost)) as results:
        result: Result = pickle.loads(next(results))
    return result
