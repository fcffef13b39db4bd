"""The faults of the zoo: drawn by a seed among what a step of the loop has, and made to happen."""

import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch

from holdfast import inject
from holdfast.inject.faults import bit_field, bit_width, flip_bit, mantissa_bits, write_element
from holdfast_lab.zoo.clock import Calm, Clock, Places, Watcher
from holdfast_lab.zoo.loop import FaultKind, Form, Loop

KILLED_AT = ("begin", "product", "gradient", "applying", "applied")
_SPECIAL = ("inf", "nan", "near_inf")


@dataclass(frozen=True)
class Plan:
    """One fault of a loop.

    Attributes:
        fault: The kind of fault.
        step: Call of an optimizer, from 0, before which it happens.
        where: The kind of place: ``product``, ``module``, ``gradient``, ``weight``, ``state`` or
            ``lost weight``; of a kill, one of ``KILLED_AT``.
        name: Name of the product, module or parameter.
        effect: Kind of an injected value.
        bit: Bit that flips.
        index: Index of the element; None lets the injector draw one.
        draw: Random number, 0 to 1, that chooses an element where nothing else does.
        audit: Share of steps that the Guard has to compute twice so that it finds the fault.
        at_rest: Share of the state that it has to compare; None for its own choice.
    """

    fault: FaultKind
    step: int = -1
    where: str = ""
    name: str = ""
    effect: str = "bitflip"
    bit: int | None = None
    index: tuple[int, ...] | None = None
    draw: float = 0.0
    audit: float = 0.0
    at_rest: float | None = None

    @property
    def place(self) -> str:
        """The place in words."""
        what = self.effect if self.bit is None else f"bit {self.bit}"
        return " ".join(filter(None, (f"call {self.step}:", self.where, self.name, what)))


def plan(kind: type[Loop], fault: FaultKind, seed: int, calm: Calm) -> Plan:
    """Draw a fault of a loop; the same seed draws the same one."""
    draw = random.Random(f"zoo/{kind.name}/{fault}/{seed}")
    if fault is FaultKind.CALM:
        return Plan(fault)
    step = draw.choice(list(calm.steps))
    places = calm.steps[step]
    base = Plan(fault, step, draw=draw.random())
    if fault in (FaultKind.FORWARD, FaultKind.BACKWARD):
        return _in_product(base, draw, places)
    if fault is FaultKind.OUTSIDE:
        return _outside(base, draw, places, finite=kind.form is not Form.ATTACH)
    if fault is FaultKind.REST:
        return _at_rest(base, draw, calm)
    where = draw.choice(KILLED_AT)
    names = {"product": list(places.products), "gradient": places.parameters}.get(where, [""])
    return replace(base, where=where, name=draw.choice(names), effect="SIGKILL")


def _in_product(base: Plan, draw: random.Random, places: Places) -> Plan:
    forward = base.fault is FaultKind.FORWARD
    names = [name for name in places.products if name.endswith("/forward") is forward]
    name = draw.choice(names)
    effect = draw.choice(("bitflip", "bitflip", *_SPECIAL))
    bit = None
    if effect == "bitflip":
        dtype = places.products[name]
        bit = draw.choice([b for b in range(bit_width(dtype)) if bit_field(dtype, b) == "exponent"])
    return replace(base, where="product", name=name, effect=effect, bit=bit)


def _at_rest(base: Plan, draw: random.Random, calm: Calm) -> Plan:
    """Draw a bit that the check at rest finds, or a lost weight, which only a roll-back mends.

    The weight is lost as a whole and is one that the step reads, so that it is found without the
    check. A scaler takes this for overflows in twenty steps before the run is rolled back.
    """
    where = draw.choice(("weight", "state", "lost weight"))
    if where != "lost weight":
        return replace(base, where=where, bit=draw.randrange(32), at_rest=1.0)
    step = draw.choice(list(calm.steps)[:4])
    name, effect = draw.choice(calm.steps[step].parameters), draw.choice(("inf", "nan"))
    return replace(base, step=step, where=where, name=name, effect=effect, at_rest=0.0)


def _outside(base: Plan, draw: random.Random, places: Places, *, finite: bool) -> Plan:
    """Draw a gradient that is not finite, or a wrong activation, which only an audit finds.

    A loop that cannot repeat its steps finds the former only (not ``finite``).
    """
    if not finite or not places.modules or draw.random() < 0.5:
        name, effect = draw.choice(places.parameters), draw.choice(("inf", "nan"))
        return replace(base, where="gradient", name=name, effect=effect)
    name = draw.choice(list(places.modules))
    highest = mantissa_bits(places.modules[name])
    bit = draw.randrange(highest // 2, bit_width(places.modules[name]))
    return replace(base, where="module", name=name, bit=bit, audit=1.0)


class Strike(Watcher):
    """Makes a planned fault happen to a loop, once, while ``armed`` is open.

    Attributes:
        struck: True once it happened.
    """

    def __init__(self, loop: Loop, planned: Plan) -> None:
        self.struck = False
        self._loop, self._plan = loop, planned
        self._context = ExitStack()
        self._parameters = dict(loop.model.named_parameters())
        self._begins: dict[str, Callable[[], None]] = {
            "product": self._arm,
            "module": self._arm,
            "gradient": self._watch_gradient,
            "weight": self._flip_at_rest,
            "lost weight": self._lose_weight,
            "state": self._flip_at_rest,
            "begin": self._kill,
        }

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Let the fault happen while the context is open."""
        with self._context, Clock(self._loop, self):
            yield

    def begins(self, step: int) -> None:
        """Do what the plan says if it is for this step."""
        if step == self._plan.step and not self.struck:
            self._begins.get(self._plan.where, lambda: None)()

    def applying(self, step: int) -> None:
        """End the process, if the plan says so."""
        if step == self._plan.step and self._plan.where == "applying":
            self._kill()

    def applied(self, step: int) -> None:
        """End what was armed for the step."""
        self._context.close()
        if step == self._plan.step and self._plan.where == "applied":
            self._kill()

    def _kill(self) -> None:
        if self._plan.fault is FaultKind.KILL:
            os.kill(os.getpid(), signal.SIGKILL)

    def _arm(self) -> None:
        """Arm an injector for one step."""
        planned, killed = self._plan, self._plan.fault is FaultKind.KILL
        fault = inject.Fault(
            step=planned.step,
            rank=0,
            kind="kill_trainer" if killed else planned.effect,
            site="module" if planned.where == "module" else "output",
            op=planned.name,
            bit=planned.bit,
            index=planned.index,
        )
        injector = inject.Injector(self._loop.model, [fault], rank=0)
        self._context.enter_context(injector.step(planned.step))
        self.struck = True

    def _watch_gradient(self) -> None:
        parameter = self._parameters[self._plan.name]
        hook = parameter.register_post_accumulate_grad_hook(self._spoil_gradient)
        self._context.callback(hook.remove)

    def _spoil_gradient(self, parameter: torch.Tensor) -> None:
        if self.struck:
            return
        self.struck = True
        self._kill()
        assert parameter.grad is not None
        held = parameter.grad
        write_element(held, self._element(held), float(self._plan.effect))

    def _flip_at_rest(self) -> None:
        """Flip a bit of a tensor that the latest snapshot has read already."""
        self._wait_for_snapshot()
        held = self._at_rest()
        target = held[int(self._plan.draw * len(held))].detach()
        index, bit = self._element(target), self._plan.bit
        assert bit is not None
        write_element(target, index, flip_bit(target[index], bit % bit_width(target.dtype)))

    def _lose_weight(self) -> None:
        """Overwrite a weight that the latest snapshot has read already."""
        self._wait_for_snapshot()
        self._parameters[self._plan.name].data.fill_(float(self._plan.effect))

    def _wait_for_snapshot(self) -> None:
        self.struck = True
        if self._loop.snapshots is not None:
            self._loop.snapshots.finish()

    def _at_rest(self) -> Sequence[torch.Tensor]:
        if self._plan.where == "weight":
            return list(self._loop.model.parameters())
        states = [one for each in self._loop.optimizers for one in each.state.values()]
        found = [value for state in states for value in state.values()]
        return [
            v for v in found if isinstance(v, torch.Tensor) and v.dim() and v.is_floating_point()
        ]

    def _element(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """Return the index that the plan's random number chooses."""
        place = int(self._plan.draw * 7919 % 1 * tensor.numel())
        return tuple(int(n) for n in torch.unravel_index(torch.tensor(place), tensor.shape))
