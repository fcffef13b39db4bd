"""Every call of an operator in a training step: numbered, and one of them struck.

The calls are seen by a dispatch mode that is open in the pass and in the optimizer's update, so
that neither checks nor digests of a Guard count. It damages the output of the struck call after the
kernel has run. Products, attention and convolutions are verified by the call itself; those are
damaged at their fault site (``holdfast.sites``), between the kernel and the check.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast import sites
from holdfast_lab.step_faults.damage import damage
from holdfast_lab.step_faults.operators import (
    OPTIMIZER,
    PRODUCTS,
    class_of,
    like,
    overwritten_by,
    written_by,
)

PASS = "pass"
DURATIONS = TRANSIENT, INTERMITTENT, PERMANENT = "transient", "intermittent", "permanent"


@dataclass(frozen=True)
class Call:
    """A call of an operator that writes a tensor, the first of them of a shape.

    It is numbered within its part of the step, ``pass``, ``optimizer`` or ``data``. ``before`` is
    the previous call of this operator with this shape, or -1; ``visits`` is how often it passes a
    fault site with something computed.
    """

    part: str
    number: int
    op: str
    kind: str
    direction: str = ""
    shape: tuple[int, ...] = ()
    before: int = -1
    visits: int = 0


class Numbered(TorchDispatchMode):
    """Numbers the calls of a part of the step; ``again`` while an update is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.number, self.again = "", -1, False

    @contextmanager
    def within(self, part: str, parameters: int = 0, *, again: bool = False) -> Iterator[None]:
        """Count from 0 the calls of a part of the step: an update of so many parameters, if any."""
        self.part, self.number, self.again = part, -1, again
        with self:
            yield

    def looks_at(self, part: str) -> bool:
        """Return whether the mode has to see the calls of a part."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count a call, and pass it on."""
        self.number += 1
        return self.called(func, args, kwargs or {})

    def called(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a call."""
        raise NotImplementedError


class Listed(Numbered):
    """Lists the ``calls`` of one step, and counts those of one parameter's update."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.per_parameter = list[Call](), 0
        self._last, self._begun = dict[object, int](), set[str]()

    @contextmanager
    def within(self, part: str, parameters: int = 0, *, again: bool = False) -> Iterator[None]:
        """List the calls of a part when it runs for the first time."""
        again |= part in self._begun
        with super().within(part, again=again):
            yield
        if parameters and not again:
            each, left = divmod(self.number + 1, parameters)
            self.per_parameter = 0 if left else each
        self._begun.add(part)

    def called(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a call and note it."""
        if self.again:
            return func(*args, **kwargs)
        kind, visited = OPTIMIZER if self.part == OPTIMIZER else class_of(func), list[bool]()
        watch = sites.injecting(lambda *given: visited.append(given[3] is not None))
        with watch if kind in PRODUCTS else nullcontext():
            result = func(*args, **kwargs)
        if written := written_by(func, args, kwargs, result):
            shape, name = tuple(written[0].shape), str(func)
            key = self.part, name, shape, written[0].dtype
            before, self._last[key] = self._last.get(key, -1), self.number
            backward = torch._C._current_graph_task_id() != -1
            direction = "" if self.part != PASS else "backward" if backward else "forward"
            known = name, kind, direction, shape, before, sum(visited)
            self.calls.append(Call(self.part, self.number, *known))
        return result


@dataclass(frozen=True)
class Fault:
    """What happens to a call: a kind of damage, at places that are drawn by the seed.

    A ``transient`` fault happens once. An ``intermittent`` one happens each time that the call is
    made, in this step and in later ones, in repetitions and where an update is computed again, at a
    place drawn anew; a ``permanent`` one at the same place.
    """

    call: Call
    damage: str
    duration: str
    seed: str


class Striking(Numbered):
    """Lets a fault happen; counts how often it struck, and says whether a bit has changed.

    By the number of calls ``per_parameter`` it finds the call where an update is computed again.
    """

    def __init__(self, fault: Fault, per_parameter: int = 0) -> None:
        super().__init__()
        self.fault, self.struck, self.changed = fault, 0, False
        self._per_parameter, self._old = per_parameter, list[torch.Tensor]()

    def called(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a call, and damage what it has written if it is the one."""
        call = self.fault.call
        if not self._is_struck():
            result = func(*args, **kwargs)
            if (self.number, self.again) == (call.before, False):
                written = written_by(func, args, kwargs, result)
                self._old = [each.detach().clone() for each in written]
            return result
        if call.visits:
            with sites.injecting(self._at_site(self.draw())):
                return func(*args, **kwargs)
        lost = [each.detach().clone() for each in overwritten_by(func, args, kwargs)]
        result = func(*args, **kwargs)
        written = written_by(func, args, kwargs, result)
        if written and not (self.again and tuple(written[0].shape) != call.shape):
            draw = self.draw()
            target = draw.choices(written, [each.numel() for each in written])[0]
            self.strike(target, draw, like((lost, self._old, args, kwargs), target))
        return result

    def looks_at(self, part: str) -> bool:
        """Return whether the fault may happen in a part."""
        over = self.struck and self.fault.duration == TRANSIENT
        return part == self.fault.call.part and not over

    def strike(self, target: torch.Tensor, draw: Random, old: torch.Tensor | None) -> None:
        """Damage a tensor, whose stale content is given."""
        self.changed |= damage(target, self.fault.damage, draw, old)
        self.struck += 1

    def draw(self) -> Random:
        """Return what draws the place of the next damage."""
        again = self.struck if self.fault.duration == INTERMITTENT else 0
        return Random(f"{self.fault.seed}/{again}")

    def _is_struck(self) -> bool:
        number = self.fault.call.number
        if self.fault.duration == TRANSIENT:
            return self.number == number and not self.struck and not self.again
        if self.again:
            return bool(self._per_parameter) and self.number == number % self._per_parameter
        return self.number == number

    def _at_site(self, draw: Random) -> sites.Hook:
        """Make a hook that damages what passes a fault site for the n-th time."""
        left, old = draw.randrange(self.fault.call.visits), self._old[:1]

        def hook(stage: str, site: str, gemm: object, output: torch.Tensor | None) -> None:
            nonlocal left
            if output is not None:
                if left == 0:
                    self.strike(output, draw, old[0] if old else None)
                elif not old or old[0].numel() == output.numel():
                    old[:] = [output.detach().clone()]
                left -= 1

        return hook
